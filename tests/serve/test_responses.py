"""/v1/responses, as OpenAI's own client sends, reads and validates it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from specdec.decode.loop import Batch
from specdec.serve.body_reading import read_body
from specdec.serve.grammars import find_grammar
from specdec.serve.response_body import ResponseBody
from specdec.serve.tools import read_calling
from specdec.text.call_formats import TOOL_FORMATS, ChatFormats, TemplateUse
from tests.serve.servers import CLIENT, MODEL, post, serve_here
from tests.serve.test_http import round_all
from tests.serve.test_tools import ADD, CHAT, check_call

SAY = {"type": "function", "name": "say", "parameters": {}}
TOOL = {"type": "function", **ADD["function"], "strict": True}
# What a reasoning model writes, as a grammar of its whole answer.
THOUGHT = r"start: /<think>hm<\/think>\n\nso/"
CALLED = (
    r'start: /so <tool_call>\{"name": "add", "arguments": \{"a": 1, "b": true\}\}<\/tool_call>/'
)


# OpenAI's client takes 3 s of a processor to import: processes that collect this file do without.


@functools.cache
def get_event_types() -> TypeAdapter[Any]:
    from openai.types import responses

    return TypeAdapter(responses.ResponseStreamEvent)


def check_response(document: object, *, strict: bool = False) -> None:
    from openai.types.responses import Response

    Response.model_validate(document, strict=strict)


@pytest.fixture(scope="module")
def url(calling_url: str) -> str:
    return calling_url


@pytest.fixture(scope="module")
def thinking_url(folder: Path, calling_tokenizer_dir: str) -> Iterator[str]:
    more: Any = {"draft_budget": "fixed", "reasoning_parser": "qwen3"}
    with serve_here(folder, tokenizer_dir=calling_tokenizer_dir, **more) as (_, url):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_a_text_is_that_of_a_chat(url: str, client: Any) -> None:
    settings: Any = {"temperature": 0.7, "extra_body": {"seed": 3}}
    given = client.responses.create(
        model=MODEL, input="hi", instructions="be", max_output_tokens=9, store=True,
        metadata={"a": "b"}, include=["reasoning.encrypted_content"], **settings,
    )  # fmt: skip
    check_response(given.model_dump(), strict=True)
    messages = [{"role": "system", "content": "be"}, *CHAT]
    chat = post(
        url, "/v1/chat/completions", messages=messages, max_tokens=9, seed=3, temperature=0.7
    )
    assert given.output_text == chat["choices"][0]["message"]["content"]
    assert given.status == "incomplete"
    assert given.incomplete_details
    assert given.incomplete_details.reason == "max_output_tokens"
    assert given.usage
    assert given.usage.total_tokens == chat["usage"]["total_tokens"]
    assert (given.metadata, given.instructions) == ({"a": "b"}, "be")
    told = given.model_dump()
    assert told["store"] is False
    assert told["specdec"]["ignored"] == ["store", "include.reasoning.encrypted_content"]


def read_stream(url: str, **body: Any) -> list[dict[str, Any]]:
    """The events, each named as it is typed, numbered, and valid for OpenAI's client."""
    answer = CLIENT.post(f"{url}/v1/responses", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events: list[dict[str, Any]] = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        get_event_types().validate_python(event)
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(events)
        events.append(event)
    return events


ITEM = ["output_item.added", "content_part.added"]
END = ["content_part.done", "output_item.done"]
MESSAGE = [*ITEM, "output_text.delta", "output_text.done", *END]
CALL = [
    "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
    "output_item.done",
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, MESSAGE),
        ({"grammar": THOUGHT}, [
            *ITEM, "reasoning_text.delta", "reasoning_text.done", *END, *MESSAGE]),
        ({"grammar": CALLED, "tools": [TOOL]}, [*MESSAGE, *CALL]),
    ],
    ids=["text", "reasoning", "tool"],
)  # fmt: skip
def test_a_stream_tells_of_the_items_in_order(
    thinking_url: str, body: dict[str, Any], expected: list[str]
) -> None:
    url = thinking_url
    limit = 99 if "grammar" in body else 20
    body = {**body, "input": "hi", "max_output_tokens": limit, "seed": 1}
    events = read_stream(url, **body)
    names = [event["type"].removeprefix("response.") for event in events]
    first, second, *between, last = names
    assert (first, second) == ("created", "in_progress")
    assert last == ("completed" if "grammar" in body else "incomplete")
    merged = [n for at, n in enumerate(between) if "delta" not in n or n != between[at - 1]]
    assert merged == expected
    whole = post(url, "/v1/responses", **body)
    final = events[-1]["response"]
    for one in (whole, final):
        check_response(one)
        for item in one["output"]:
            item.pop("id")
            item.pop("call_id", None)
    same = ("output", "usage", "status", "incomplete_details")
    assert {key: whole[key] for key in same} == round_all({key: final[key] for key in same})
    texts = [item["content"][0]["text"] for item in whole["output"] if "content" in item]
    streamed = ["" for _ in whole["output"]]
    for event in events:
        if event["type"].endswith(".delta"):
            streamed[event["output_index"]] += event["delta"]
    assert streamed[: len(texts)] == texts
    if "grammar" in body:
        assert texts == (["so"] if "tools" in body else ["hm", "so"])
    if "tools" in body:
        assert streamed[-1] == whole["output"][-1]["arguments"] == '{"a": 1, "b": true}'


def test_log_probabilities(url: str) -> None:
    body: Any = {"input": "hi", "max_output_tokens": 9, "seed": 1, "top_logprobs": 1}
    (item,) = post(url, "/v1/responses", **body)["output"]
    told = item["content"][0]["logprobs"]
    assert "".join(one["token"] for one in told) == item["content"][0]["text"]
    events = read_stream(url, **body)
    streamed = [one for event in events for one in event.get("logprobs", []) if "delta" in event]
    assert streamed == round_all(told)


def test_tools_and_their_results(client: Any, url: str) -> None:
    given = client.responses.create(
        model=MODEL,
        input="hi",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
        extra_body={"seed": 1},
    )
    calls = [item for item in given.output if item.type == "function_call"]
    assert len(calls) == 1
    check_call(
        {"id": calls[0].call_id, "type": "function",
         "function": {"name": calls[0].name, "arguments": calls[0].arguments}}
    )  # fmt: skip
    output = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "22"}
    again = client.responses.create(
        model=MODEL,
        tools=[TOOL],
        max_output_tokens=3,
        input=[{"role": "user", "content": "hi"}, *given.output, output],
    )
    assert again.output


def test_structured_output(client: Any) -> None:
    class Point(BaseModel):
        x: bool
        y: bool

    given = client.responses.parse(model=MODEL, input="hi", text_format=Point)
    assert isinstance(given.output_parsed, Point)


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "a"}], "id": "m"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "x"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1",
         "output": [{"type": "input_text", "text": "o"}]},
        {"type": "function_call_output", "call_id": "2", "output": "p"},
    ]  # fmt: skip
    tool = {"type": "function", "name": "f", "parameters": {}}
    body = read_body(ResponseBody, {
        "input": items, "instructions": "i", "store": True, "tools": [tool, SAY],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [tool]},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"enum": [1]}}},
    })  # fmt: skip
    paths, messages = map(list, zip(*body.list_turns(), strict=True))
    calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, name in (("1", "f"), ("2", "g"))
    ]
    assert messages == [
        {"role": "system", "content": "i"}, {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "o"},
        {"role": "tool", "tool_call_id": "2", "content": "p"},
    ]  # fmt: skip
    assert paths == ["instructions", *(f"input.{at}" for at in (0, 1, 3, 6, 7))]
    calling = read_calling(
        body, ChatFormats(TOOL_FORMATS["hermes"], None, use=TemplateUse("tools"))
    )
    assert calling is not None
    assert calling.tools[0] == {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert (calling.schemas.keys(), calling.is_forced) == ({"f"}, False)
    param, grammar, _ = find_grammar(body)
    assert grammar is not None
    assert (param, grammar["json_schema"]["enum"]) == ("text", [1])
    assert body.list_ignored() == ["store"]


REASONING = [
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in "rst"
]
USER, SAID = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
CALLED_F = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "o"}


@pytest.mark.parametrize(
    ("items", "expected_thoughts"),
    [
        ([USER, REASONING[0], CALLED_F, RESULT, REASONING[1], SAID], [None, "r", None, "s"]),
        ([USER, SAID, REASONING[0], CALLED_F, RESULT, SAID], [None, "r", None, None]),
        ([USER, REASONING[0], SAID, REASONING[1], CALLED_F, RESULT], [None, "r\ns", None]),
        ([USER, REASONING[0], CALLED_F, REASONING[1], CALLED_F | {"call_id": "2"}, RESULT, SAID],
         [None, "r\ns", None, None]),
        ([REASONING[0], REASONING[1], SAID, USER], ["r\ns", None]),
        ([USER, REASONING[0], USER, SAID], [None, None, None]),
        ([USER, CALLED_F, REASONING[0], RESULT, SAID], [None, None, None, None]),
    ],
)  # fmt: skip
def test_reasoning_stays_with_the_turn_after_it(
    items: list[dict[str, Any]], expected_thoughts: list[str | None]
) -> None:
    turns = read_body(ResponseBody, {"input": items}).list_turns()
    thoughts = [message.get("reasoning_content") for _, message in turns]
    assert thoughts == expected_thoughts


def test_items_of_tools_that_the_clients_host_runs_are_calls_and_results() -> None:
    """As a conversation has them that another model began."""
    action = {"type": "exec", "command": ["ls"]}
    body = read_body(ResponseBody, {"input": [
        {"role": "user", "content": "u"},
        {"type": "custom_tool_call", "call_id": "1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "local_shell_call", "call_id": "2", "action": action, "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "Done"},
        {"type": "local_shell_call_output", "call_id": "2", "output": "a.txt"},
    ]})  # fmt: skip
    _, asked, *results = (message for _, message in body.list_turns())
    assert (asked["role"], asked["content"]) == ("assistant", None)
    assert [(call["id"], call["function"]) for call in asked["tool_calls"]] == [
        ("1", {"name": "apply_patch", "arguments": {"input": "*** Begin"}}),
        ("2", {"name": "local_shell", "arguments": action}),
    ]
    assert [(r["role"], r["tool_call_id"], r["content"]) for r in results] == [
        ("tool", "1", "Done"), ("tool", "2", "a.txt"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": []}, "input", "a text or a list of items"),
        ({}, "input", "input is missing"),
        ({"input": "x", "tools": [{"type": "file_search"}]}, "tools", "'file_search'"),
        ({"input": "x", "tools": [{"type": "namespace", "name": "n"}]}, "tools",
         "tools.0.tools is"),
        ({"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{"name": "f"}]}]},
         "tools", "tools.0.tools.0.type is None"),
        ({"input": "x", "previous_response_id": "r"}, "previous_response_id", "nothing is stored"),
        ({"input": "x", "background": True}, "background", "as soon as"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "nothing is stored"),
        ({"input": [{"type": "computer_call"}]}, "input", "'computer_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input",
         "only texts"),
        ({"input": "x", "max_output_tokens": 900}, "max_output_tokens", "asks for 900 more"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "has no message"),
        ({"input": [{"role": "", "content": "x"}], "instructions": "i"}, "input",
         "input.0.role is '', not a text"),
        ({"input": [{"type": "function_call", "name": 1}]}, "input", "input.0.name is 1"),
        ({"input": [{"type": "function_call_output"}]}, "input", "input.0.output is missing"),
        ({"input": [{"role": "user", "content": 5}]}, "input", "input.0.content is 5, not a text"),
        ({"input": [{"type": "reasoning", "summary": 5}]}, "input", "input.0.summary is 5"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools",
         "tools.0.name is 'a b'"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": ["add"]}},
         "tool_choice", "names ['add'], which is no tool"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "messages"}}}, "text",
         "text.format has no schema"),
        ({"input": "x", "temperature": "messages"}, "temperature", "'messages'"),
        ({"input": "x", "guided_choice": 5}, "guided_choice", "is 5, not a list"),
        *(({"input": "x", name: 2}, name, "unknown parameter")
          for name in ("n", "best_of", "prompt_logprobs", "return_trees")),
        ({"input": "x", "top_logprobs": 1, "tools": [TOOL]}, "top_logprobs", "without tools"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text", "text.format.type is 'xml'"),
    ],
)  # fmt: skip
def test_refusals(url: str, body: dict[str, Any], param: str, message: str) -> None:
    answer = CLIENT.post(f"{url}/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert message in answer.json()["error"]["message"]


def test_tools_of_the_clients_host(url: str) -> None:
    """As Codex CLI sends them: functions of a namespace are called, and the rest is listed."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    tools = [
        {"type": "custom", "name": "apply_patch", "description": "d", "format": grammar},
        {"type": "local_shell"}, {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp", "description": "d", "tools": [TOOL]},
        {"type": "shell", "name": "sh", "parameters": {"type": "object"}}, SAY,
    ]  # fmt: skip
    body = {"input": "hi", "client_metadata": {"a": "b"}, "max_output_tokens": 200, "tools": tools}
    choice = {"type": "function", "name": "add"}
    answer = post(url, "/v1/responses", **body, tool_choice=choice, store=False)
    unread = [f"tools.{i}.type" for i in (0, 1, 2)]
    assert answer["specdec"]["ignored"] == ["client_metadata", "store", *unread]
    (call,) = answer["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "add", "mcp")
    read = read_body(ResponseBody, body)
    names = [tool["name"] for _, tool in read.list_tools()]
    assert names == ["add", "sh", "say"]
    assert read.find_namespace("say") is None
    done = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    turns = [{"role": "user", "content": "hi"}, call, done]
    again = {**body, "input": turns, "max_output_tokens": 2}
    assert post(url, "/v1/responses", **again)["usage"]["input_tokens"] > 20


def test_embeddings_are_refused(client: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="makes no embeddings"):
        client.embeddings.create(model=MODEL, input="x")


def test_an_error_ends_a_stream(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(Batch, "step", fail)
    events = read_stream(url, input="hi")
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
