"""Parameters of other servers' clients: each row of the table does as it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.serve.body_reading import read_body
from specdec.serve.foreign import FOREIGN, ROWS, Foreign
from specdec.serve.protocol import BadRequest
from specdec.serve.schema import ChatBody, CompletionBody
from tests.serve.servers import CALLING_TEMPLATE, CLIENT, change_template, post, serve_here
from tests.serve.test_responses import THOUGHT
from tests.serve.test_tools import CHAT

CLIENTS = ("OpenAI", "vLLM", "SGLang", "llama.cpp", "Ollama", "open-webui", "LM Studio",
           "OpenRouter")  # fmt: skip


def read_chat(**more: Any) -> ChatBody:
    return read_body(ChatBody, {"messages": CHAT, **more})


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
@pytest.mark.parametrize("place", ["body", "options"])
def test_a_row_does_as_it_says(row: Foreign, place: str) -> None:
    """In the body and in its `options`; what a chat has by that name of its own is left out."""
    assert set(row.clients.split(", ")) <= set(CLIENTS)
    path = row.name if place == "body" else f"options.{row.name}"

    def read(value: Any, **more: Any) -> Any:
        kind: Any = CompletionBody if row.name in ("tools", "tool_choice") else ChatBody
        kind = CompletionBody if row.name == "parallel_tool_calls" else kind
        kind = ChatBody if row.name == "echo" else kind
        source = {"prompt": "x"} if kind is CompletionBody else {"messages": CHAT}
        given = {row.name: value} if place == "body" else {"options": {row.name: value}}
        return read_body(kind, {**source, **given, **more})

    if row.field is not None:
        body = read(row.example)
        assert getattr(body, row.field) == row.example
        assert body.paths == {row.field: path}
        assert not body.ignored
    elif row.is_ignored:
        assert read(row.example).ignored == (path,)
    else:
        assert row.values is not None
        for value in (*row.values, None):
            assert not read(value).ignored
        penalty = {row.refines[0]: 1.1} if row.refines else {}
        with pytest.raises(BadRequest, match="is not supported") as caught:
            read(row.example, **penalty)
        assert caught.value.message.startswith(path)
        assert caught.value.param == path.partition(".")[0]
        if row.refines:
            assert read(row.example, **{row.refines[0]: 1.0}).ignored == (path,)


def test_names_are_there_once() -> None:
    assert len(FOREIGN) == len(ROWS)


def test_two_names_of_one_parameter_may_not_differ() -> None:
    body = read_chat(repeat_penalty=1.1, options={"repeat_penalty": 1.1}, repetition_penalty=1.1)
    assert body.repetition_penalty == 1.1
    with pytest.raises(BadRequest, match=r"options.repeat_penalty is 1.2, and .* 1.1") as caught:
        read_chat(repetition_penalty=1.1, options={"repeat_penalty": 1.2})
    assert caught.value.param == "options"
    with pytest.raises(BadRequest, match="options is 3, not an object"):
        read_chat(options=3)
    with pytest.raises(BadRequest, match="unknown parameter 'options.num_predct'"):
        read_chat(options={"num_predct": 3})
    with pytest.raises(BadRequest, match=r"options.num_predict is 0, not a whole number"):
        read_chat(options={"num_predict": 0})


def test_a_limit_of_minus_one_is_all_the_room(url: str) -> None:
    """As LM Studio's, llama.cpp's and Ollama's clients write it; errors name what they wrote."""
    for path, body in (
        ("/v1/completions", {"prompt": "x", "n_predict": -1}),
        ("/v1/chat/completions", {"messages": CHAT, "options": {"num_predict": -1}}),
    ):
        answer = post(url, path, **body, ignore_eos=True, speculation=False)
        assert answer["usage"]["total_tokens"] == 300
    wrong: Any = {"prompt": "x", "options": {"num_predict": 9000}}
    error = CLIENT.post(f"{url}/v1/completions", json=wrong).json()["error"]
    assert error["param"] == "options.num_predict"


@pytest.fixture(scope="module")
def thinking_url(folder: Path, lasting_dir: Path) -> Iterator[str]:
    made = change_template(folder, lasting_dir / "foreign", CALLING_TEMPLATE)
    more: Any = {"draft_budget": "fixed", "reasoning_parser": "qwen3"}
    with serve_here(folder, tokenizer_dir=str(made), **more) as (_, url):
        yield url


def test_reasoning_is_turned_off_or_hidden(thinking_url: str) -> None:
    """As OpenRouter, vLLM, DeepSeek and Ollama write it; the template here reads no switch."""
    body: Any = {"messages": CHAT, "grammar": THOUGHT, "max_tokens": 90, "temperature": 0}
    path = "/v1/chat/completions"
    whole = post(thinking_url, path, **body)
    assert whole["choices"][0]["message"]["reasoning_content"] == "hm"
    for hiding in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        answer = post(thinking_url, path, **body, **hiding)
        message = answer["choices"][0]["message"]
        assert (message["content"], "reasoning_content" in message) == ("so", False)
        assert answer["usage"] == whole["usage"]
    for switch, name in (
        ({"think": False}, "think"), ({"enable_thinking": True}, "enable_thinking"),
        ({"thinking": {"type": "disabled"}}, "thinking.type"),
        ({"reasoning": {"enabled": False}}, "reasoning.enabled"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ):  # fmt: skip
        answer = post(thinking_url, path, **body, **switch)
        assert answer["specdec"]["ignored"] == [name]
    with pytest.raises(BadRequest, match=r"unknown parameter 'reasoning.max_tokens'"):
        read_chat(reasoning={"max_tokens": 100})
