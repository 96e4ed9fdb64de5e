"""anthropic: messages plain and streamed, tools and their results, parsed answers, tokens."""

import os

from common import MODEL, PROMPT, TOOL, URL, check_arguments, check_city, check_stream, run
from typed import City

os.environ.pop("ANTHROPIC_API_KEY", None)
from anthropic import Anthropic, BadRequestError, NotFoundError  # noqa: E402

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
USER = [{"role": "user", "content": PROMPT}]
# The newest versions have no argument for it.
chat = {"model": MODEL, "messages": USER, "extra_body": {"temperature": 0}}
tool = TOOL["function"]
tools = [{k: tool[k] for k in ("name", "description")} | {"input_schema": tool["parameters"]}]


def plain():
    message = client.messages.create(**chat, max_tokens=40)
    assert message.content[0].text
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert message.metrics["speculative_decoding"]["num_draft_tokens"] > 0
    counted = client.messages.count_tokens(model=MODEL, messages=USER)
    assert counted.input_tokens == message.usage.input_tokens
    for error, wrong in ((NotFoundError, {"model": "claude"}), (BadRequestError, {"messages": []})):
        told = None
        try:
            client.messages.create(**{**chat, **wrong}, max_tokens=4)
        except error as caught:
            told = caught.body
        assert told is not None
        assert told["type"] == "error", told


def streamed():
    text = client.messages.create(**chat, max_tokens=40).content[0].text
    with client.messages.stream(**chat, max_tokens=40) as stream:
        check_stream(list(stream.text_stream), text)
        assert stream.get_final_message().usage.output_tokens > 1


def call_tool():
    choice = {"type": "any", "disable_parallel_tool_use": True}
    asked = {"tools": tools, "tool_choice": choice, "max_tokens": 200}
    message = client.messages.create(**chat, **asked)
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    check_arguments(call.input)
    with client.messages.stream(**chat, **asked) as stream:
        assert stream.get_final_message().content[-1].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [
        *USER, {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    again = client.messages.create(
        model=MODEL, messages=turns, tools=tools, tool_choice={"type": "none"}, max_tokens=20
    )
    assert again.content[0].text


def schema():
    check_city(client.messages.parse(**chat, output_format=City, max_tokens=200).parsed_output)


run(plain=plain, streamed=streamed, tool=call_tool, schema=schema)
