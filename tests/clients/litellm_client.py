"""litellm: completion() with the provider openai, and its responses()."""

import json

import litellm
from common import (
    BASE_URL,
    CITY,
    MODEL,
    PROMPT,
    TOOL,
    check_arguments,
    check_city,
    check_stream,
    run,
)

server = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": "none"}
chat = server | {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0}


def plain():
    text = litellm.completion(**chat, max_tokens=40).choices[0].message.content
    assert text
    given = litellm.responses(**server, input=PROMPT, temperature=0, max_output_tokens=40)
    assert given.output[0].content[0].text == text


def streamed():
    text = litellm.completion(**chat, max_tokens=40).choices[0].message.content
    chunks = litellm.completion(**chat, max_tokens=40, stream=True)
    check_stream([chunk.choices[0].delta.content or "" for chunk in chunks], text)


def tool():
    given = litellm.completion(**chat, tools=[TOOL], tool_choice="required")
    check_arguments(given.choices[0].message.tool_calls[0].function.arguments)
    chunks = list(litellm.completion(**chat, tools=[TOOL], tool_choice="required", stream=True))
    built = litellm.stream_chunk_builder(chunks)
    check_arguments(built.choices[0].message.tool_calls[0].function.arguments)


def schema():
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    given = litellm.completion(**chat, response_format=form, max_tokens=200)
    check_city(json.loads(given.choices[0].message.content))


run(plain=plain, streamed=streamed, tool=tool, schema=schema)
