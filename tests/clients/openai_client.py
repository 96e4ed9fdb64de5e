"""openai: chats, completions and responses."""

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
from openai import OpenAI
from typed import City

client = OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
chat = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0}


def plain():
    text = client.chat.completions.create(**chat, max_tokens=40).choices[0].message.content
    assert text
    prompts = client.completions.create(model=MODEL, prompt=[PROMPT, "import "], max_tokens=9)
    assert len(prompts.choices) == 2
    given = client.responses.create(model=MODEL, input=PROMPT, temperature=0, max_output_tokens=40)
    assert given.output_text == text


def streamed():
    text = client.chat.completions.create(**chat, max_tokens=40).choices[0].message.content
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(**chat, max_tokens=40, stream=True, stream_options=options)
    )
    assert chunks[-1].usage.completion_tokens > 1
    check_stream([c.choices[0].delta.content or "" for c in chunks if c.choices], text)
    # Its helper takes no answer that a limit ends.
    until = {"temperature": 0, "extra_body": {"stop": ["\n\n"]}}
    with client.responses.stream(model=MODEL, input=PROMPT, **until) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        check_stream(pieces, stream.get_final_response().output_text)


def tool():
    tools = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    message = client.chat.completions.create(**chat, **tools).choices[0].message
    check_arguments(message.tool_calls[0].function.arguments)
    with client.chat.completions.stream(**chat, **tools) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.tool_calls[0].function.arguments == message.tool_calls[0].function.arguments
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    messages = [*chat["messages"], message, result]
    again = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=20
    )
    assert again.choices[0].message.content
    flat = {"type": "function", **TOOL["function"], "strict": True}
    given = client.responses.create(model=MODEL, input=PROMPT, **tools | {"tools": [flat]})
    check_arguments(given.output[0].arguments)


def schema():
    parsed = client.chat.completions.parse(**chat, response_format=City, max_tokens=200)
    check_city(parsed.choices[0].message.parsed)
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    client.chat.completions.create(**chat, response_format=form, max_tokens=200)
    given = client.responses.parse(model=MODEL, input=PROMPT, text_format=City)
    check_city(given.output_parsed)


run(plain=plain, streamed=streamed, tool=tool, schema=schema)
