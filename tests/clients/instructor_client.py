"""instructor: objects by tools, by JSON schema and by JSON, whole and partial."""

import instructor
from common import BASE_URL, MODEL, PROMPT, check_city, check_stream, run
from openai import OpenAI
from typed import City

server = OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)
asked = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0}


def make(mode):
    return instructor.from_openai(server, mode=mode)


def plain():
    text = make(instructor.Mode.TOOLS).chat.completions.create(
        **asked, response_model=None, max_tokens=40
    )
    assert text.choices[0].message.content


def streamed():
    parts = make(instructor.Mode.TOOLS).create_partial(**asked, response_model=City, max_tokens=200)
    parts = list(parts)
    check_stream([str(part) for part in parts])
    check_city(parts[-1])


def tool():
    made = make(instructor.Mode.TOOLS)
    check_city(made.create(**asked, response_model=City, max_tokens=200, max_retries=0))


def schema():
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
        check_city(make(mode).create(**asked, response_model=City, max_tokens=200, max_retries=0))


run(plain=plain, streamed=streamed, tool=tool, schema=schema)
