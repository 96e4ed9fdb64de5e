"""ollama: chats and prompts plain and streamed, tools and their results, formats, models."""

import json

from common import CITY, MODEL, PROMPT, TOOL, URL, check_city, check_stream, run
from ollama import Client, ResponseError

client = Client(host=URL)
USER = [{"role": "user", "content": PROMPT}]
OPTIONS = {"temperature": 0, "num_predict": 40}


def plain():
    answer = client.chat(MODEL, USER, options=OPTIONS, keep_alive="5m")
    assert answer.message.content
    assert answer.eval_count > 1
    assert answer.total_duration >= answer.eval_duration > 0
    assert client.generate(MODEL, PROMPT, options=OPTIONS).response == answer.message.content
    assert client.generate(MODEL, PROMPT, raw=True, options=OPTIONS).response
    assert client.list().models[0].model == client.ps().models[0].model == MODEL
    assert "completion" in client.show(MODEL).capabilities
    for wrong in ({"model": "llama3"}, {"options": {"temperature": -1}}):
        status = None
        try:
            client.chat(**{"model": MODEL, "messages": USER, **wrong})
        except ResponseError as error:
            status = error.status_code
        assert status in (400, 404)


def streamed():
    text = client.chat(MODEL, USER, options=OPTIONS).message.content
    parts = list(client.chat(f"{MODEL}:latest", USER, options=OPTIONS, stream=True))
    check_stream([part.message.content for part in parts], text)
    assert parts[-1].done
    prompts = client.generate(MODEL, PROMPT, options=OPTIONS, stream=True)
    check_stream([part.response for part in prompts], text)


def tool():
    client.chat(MODEL, USER, tools=[TOOL], options=OPTIONS)
    call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    turns = [
        *USER, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "get_weather", "content": "rain"},
    ]  # fmt: skip
    assert client.chat(MODEL, turns, tools=[TOOL], options=OPTIONS).message.content is not None


def schema():
    options = {"temperature": 0, "num_predict": 200}
    check_city(json.loads(client.chat(MODEL, USER, format=CITY, options=options).message.content))


run(plain=plain, streamed=streamed, tool=tool, schema=schema)
