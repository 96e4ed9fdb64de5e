"""/v1/messages, with the bodies that Anthropic's SDK 2.14 sends (recorded), and what it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serve.servers import CLIENT, MODEL, post, serve_here
from tests.serve.test_responses import CALLED, THOUGHT
from tests.serve.test_tools import ADD

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SCHEMA = ADD["function"]["parameters"]
TOOL = {"name": "add", "description": "adds", "input_schema": SCHEMA}
BODY = {"max_tokens": 9, "messages": USER, "model": MODEL, "temperature": 0}
HEADERS = {"anthropic-version": "2026-10-21", "authorization": "Bearer none"}


@pytest.fixture(scope="module")
def url(calling_url: str) -> str:
    return calling_url


def read_stream(url: str, **body: Any) -> list[dict[str, Any]]:
    """A stream's events, of which each is called by its type."""
    answer = CLIENT.post(url + PATH, json=body | {"stream": True}, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def join_stream(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events build, as the SDK builds it."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    message, (delta, end) = dict(events[0]["message"]), events[-2:]
    assert (message["content"], message["stop_reason"]) == ([], None)
    inputs: dict[int, str] = {}
    for event in events[2:-2]:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert index == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            kind = event["delta"].pop("type").removesuffix("_delta")
            if kind == "input_json":
                inputs[index] = inputs.get(index, "") + event["delta"]["partial_json"]
            else:
                message["content"][index][kind] += event["delta"][kind]
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    assert end == {"type": "message_stop"}
    return message | delta["delta"] | {"usage": delta["usage"]}


def drop_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what differs between two of the same text."""
    blocks = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    left_out = ("id", "metrics", "specdec", "content")
    return {k: v for k, v in message.items() if k not in left_out} | {"content": blocks}


def test_a_message_is_a_chat_in_other_words(url: str) -> None:
    """System texts, settings and marks of a cache: the text is the chat's, the marks are listed."""
    system = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]
    body = {
        "max_tokens": 9, "messages": USER, "model": MODEL, "metadata": {"user_id": "u"},
        "service_tier": "auto", "stop_sequences": ["zzz"], "system": system, "temperature": 0.7,
        "top_p": 0.9, "top_k": 5, "seed": 3,
    }  # fmt: skip
    message = post(url, PATH, **body)
    turns = [{"role": "system", "content": "be"}, *USER]
    settings = {"max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3}
    chat = post(url, "/v1/chat/completions", messages=turns, **settings)
    text = chat["choices"][0]["message"]["content"]
    assert message["content"] == [{"type": "text", "text": text}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    reason = {"length": "max_tokens", "stop": "end_turn"}[chat["choices"][0]["finish_reason"]]
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, None)
    usage = message["usage"]
    counts = chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"]
    assert (usage["input_tokens"], usage["output_tokens"]) == counts
    speculation = message["metrics"]["speculative_decoding"]
    assert speculation["num_draft_tokens"] > 0
    ignored = ["metadata", "service_tier", "messages.content.cache_control"]
    assert message["specdec"]["ignored"] == ignored


def test_a_stop_sequence_is_named(url: str) -> None:
    text = post(url, PATH, **BODY | {"max_tokens": 30})["content"][0]["text"]
    word = text[8:10]
    assert text.index(word) == 8
    message = post(url, PATH, **BODY | {"max_tokens": 30, "stop_sequences": ["none", word]})
    assert message["content"] == [{"type": "text", "text": text[:8]}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", word)
    events = read_stream(url, **BODY | {"max_tokens": 30, "stop_sequences": ["none", word]})
    assert drop_ids(join_stream(events)) == drop_ids(message)


@pytest.mark.parametrize(
    ("more", "kinds", "reason"),
    [
        ({}, ["text"], "max_tokens"),
        ({"max_tokens": 200, "tools": [TOOL], "grammar": CALLED}, ["text", "tool_use"], "tool_use"),
        ({"max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "any"}}, ["tool_use"],
         "tool_use"),
        ({"max_tokens": 200, "tools": [TOOL, {**TOOL, "name": "other"}],
          "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True}},
         ["tool_use"], "tool_use"),
        ({"max_tokens": 55, "tools": [TOOL], "tool_choice": {"type": "any"}}, ["tool_use"],
         "max_tokens"),
    ],
    ids=["text", "text and call", "any call", "one call", "cut call"],
)  # fmt: skip
def test_a_stream_builds_the_whole_message(
    url: str, more: dict[str, Any], kinds: list[str], reason: str
) -> None:
    message = post(url, PATH, **BODY | more)
    assert [block["type"] for block in message["content"]][: len(kinds)] == kinds
    assert message["stop_reason"] == reason
    call = message["content"][-1]
    if reason == "tool_use":
        assert (call["name"], call["input"].keys()) == ("add", {"a", "b"})
        streamed = join_stream(read_stream(url, **BODY | more))
        assert drop_ids(streamed) == drop_ids(message)
    elif "tool_use" in kinds:
        assert call["input"] == {}


def test_thoughts_are_blocks(folder: Path, calling_tokenizer_dir: str) -> None:
    more: Any = {"draft_budget": "fixed", "reasoning_parser": "qwen3"}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = BODY | {"max_tokens": 200, "thinking": thinking, "grammar": THOUGHT}
    with serve_here(folder, tokenizer_dir=calling_tokenizer_dir, **more) as (_, url):
        message = post(url, PATH, **body)
        streamed = join_stream(read_stream(url, **body))
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    assert message["content"] == [thought, {"type": "text", "text": "so"}]
    assert message["stop_reason"] == "end_turn"
    assert drop_ids(streamed) == drop_ids(message)
    assert message["specdec"]["ignored"] == ["thinking.budget_tokens", "thinking.type"]


def test_a_history_is_that_of_a_chat(url: str) -> None:
    """Thoughts, calls and results are read into the prompt that a chat with them has."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": True}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True}
    history = [
        *USER,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "so"}, call]},
        {"role": "user", "content": [
            {**result, "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "then"}, {"type": "text", "text": "?"},
        ]},
    ]  # fmt: skip
    function = {"name": "add", "arguments": json.dumps({"a": 1, "b": True})}
    calls = [{"id": "toolu_1", "type": "function", "function": function}]
    chat = [
        *USER,
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "user", "content": "then?"},
    ]
    counted = post(url, COUNT, messages=history, model=MODEL, tools=[TOOL])
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    tokens = post(url, "/tokenize", messages=chat, tools=tools)
    assert counted == {"input_tokens": tokens["count"]}
    message = post(url, PATH, **BODY | {"messages": history, "tools": [TOOL], "max_tokens": 1})
    assert message["usage"]["input_tokens"] == tokens["count"]
    assert message["specdec"]["ignored"] == ["messages.tool_call_id", "messages.is_error"]


def test_the_assistants_last_message_is_continued(url: str) -> None:
    begun = [*USER, {"role": "assistant", "content": "so it"}]
    message = post(url, PATH, **BODY | {"messages": begun})
    chat = post(
        url, "/v1/chat/completions", messages=begun, max_tokens=9, temperature=0,
        continue_final_message=True,
    )  # fmt: skip
    assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_after_a_call_an_answer_begins(url: str) -> None:
    """As by /api/chat; the text before the call is not continued."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
    text = {"type": "text", "text": "so it"}
    ended = [*USER, {"role": "assistant", "content": [text, call]}]
    counted = post(url, COUNT, messages=ended, model=MODEL, tools=[TOOL])
    asked = {"role": "user", "content": "?"}
    later = post(url, COUNT, messages=[*ended, asked], model=MODEL, tools=[TOOL])
    function = {"name": "add", "arguments": json.dumps({"a": 1})}
    calls = [{"id": "toolu_1", "type": "function", "function": function}]
    chat = [*USER, {"role": "assistant", "content": "so it", "tool_calls": calls}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    tokens = post(url, "/tokenize", messages=chat, tools=tools)
    assert counted["input_tokens"] == tokens["count"] < later["input_tokens"]


def test_tools_without_a_schema_are_left_out_and_listed(url: str) -> None:
    hosted = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
    ]
    message = post(url, PATH, **BODY | {"tools": [*hosted, TOOL]})
    assert message["specdec"]["ignored"] == ["tools.0.type", "tools.1.type"]
    assert message["usage"] == post(url, PATH, **BODY | {"tools": [TOOL]})["usage"]


def test_an_answer_keeps_to_a_schema(url: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    message = post(url, PATH, **BODY | {"max_tokens": 90, "output_config": {"format": form}})
    assert json.loads(message["content"][0]["text"]).keys() == {"a", "b"}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
HISTORY = {"role": "user", "content": [{"type": "tool_result", "content": "x"}]}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}


@pytest.mark.parametrize(
    ("more", "status", "kind", "words"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error",
         "messages.0.content.0.type is 'image'"),
        ({"model": "claude"}, 404, "not_found_error", "model"),
        ({"temperature": -1}, 400, "invalid_request_error", "temperature is -1"),
        ({"messages": None}, 400, "invalid_request_error", "messages is missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error",
         "messages.0.role"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "invalid_request_error",
         "messages.0.content is 3"),
        ({"messages": [HISTORY]}, 400, "invalid_request_error",
         "messages.0.content.0.tool_use_id"),
        ({"messages": [*USER, CALL]}, 400, "invalid_request_error", "messages.1.content.0.input"),
        ({"max_tokens": -2}, 400, "invalid_request_error", "max_tokens is -2"),
        ({"stop_sequences": "x"}, 400, "invalid_request_error",
         "stop_sequences is 'x', not a list of at most 16 texts"),
        ({"thinking": {"type": "maybe"}}, 400, "invalid_request_error", "thinking.type"),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "tools.0.input_schema"),
        ({"tools": [{**TOOL, "name": "x y"}]}, 400, "invalid_request_error", "tools.0.name"),
        ({"tools": [TOOL], "tool_choice": "any"}, 400, "invalid_request_error", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, 400,
         "invalid_request_error", "tool_choice"),
        ({"mcp_servers": [{"type": "url"}]}, 400, "invalid_request_error", "mcp_servers"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_form(
    url: str, more: dict[str, Any], status: int, kind: str, words: str
) -> None:
    for stream in (False, True):
        answer = CLIENT.post(url + PATH, json=BODY | more | {"stream": stream})
        assert answer.status_code == status
        document = answer.json()
        assert (document["type"], document.keys()) == ("error", {"type", "error"})
        assert document["error"]["type"] == kind
        assert words in document["error"]["message"]
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_a_stream_that_fails_ends_with_an_error(folder: Path, calling_tokenizer_dir: str) -> None:
    more: Any = {"draft_budget": "fixed", "request_timeout": 0.1}
    with serve_here(folder, tokenizer_dir=calling_tokenizer_dir, **more) as (_, url):
        events = read_stream(url, **BODY | {"max_tokens": 280, "ignore_eos": True})
        error = {"type": "timeout_error", "message": "the request took more than 0.1 seconds"}
        assert events[-1] == {"type": "error", "error": error}
        assert post(url, PATH, **BODY | {"max_tokens": 1})["usage"]["output_tokens"] == 1


def test_the_key_may_come_as_x_api_key(folder: Path, lasting_dir: Path) -> None:
    path = lasting_dir / "messages-key"
    path.write_text("sk-x\n")
    with serve_here(folder, api_key_file=path) as (_, url):
        for headers in ({"x-api-key": "sk-x"}, {"authorization": "Bearer sk-x"}):
            answer = CLIENT.post(url + PATH, json=BODY | {"max_tokens": 1}, headers=headers)
            assert answer.status_code == 200
        for wrong_headers in ({"x-api-key": "sk-y"}, {}, {"authorization": "sk-x"}):
            answer = CLIENT.post(url + PATH, json=BODY, headers=wrong_headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
        assert CLIENT.get(url + "/v1/models").status_code == 401


def test_paths_below_have_the_same_errors(url: str) -> None:
    answer = CLIENT.get(url + PATH)
    assert (answer.status_code, answer.json()["type"]) == (405, "error")
    answer = CLIENT.post(url + "/v1/messages/batches", json={})
    assert answer.json()["error"]["type"] == "not_found_error"
    models = CLIENT.get(url + "/v1/models").json()
    assert (models["first_id"], models["has_more"]) == (MODEL, False)
