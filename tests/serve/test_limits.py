"""Prompts and outputs that are longer than the engine takes, as each API answers them."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.decode import prompt_requests
from specdec.text.encoding import encode_prompt
from tests.serve.servers import CLIENT, MODEL, post

LONG = [{"role": "user", "content": "x" * 900}]
SHORT = [{"role": "user", "content": "hi"}]
LONG_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x" * 900},
    "/v1/chat/completions": {"messages": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/messages": {"messages": LONG, "max_tokens": 2},
    "/api/chat": {"messages": LONG},
    "/api/generate": {"prompt": "x" * 900, "raw": True},
}
MAX_SEQ_LEN = 300


@pytest.mark.parametrize("path", LONG_BODIES)
def test_a_prompt_that_is_too_long_is_recognized_by_its_clients(url: str, path: str) -> None:
    """langchain-openai looks for OpenAI's code, litellm for OpenAI's sentence, both
    for Anthropic's three words, and agents cut the prompt by the numbers."""
    answer = CLIENT.post(url + path, json={"model": MODEL, **LONG_BODIES[path]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    if path == "/v1/messages":
        assert error["message"].startswith("prompt is too long: 9")
        assert error["message"].endswith(f" tokens > {MAX_SEQ_LEN - 1} maximum")
        return
    message = error if path.startswith("/api/") else error["message"]
    assert "This model's maximum context length is 300 tokens. However, you requested 9" in message
    assert "the engine's max_input_len is 299" in message
    if path.startswith("/v1/"):
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == next(iter(LONG_BODIES[path]))


def test_an_output_beyond_the_room_is_a_bad_request_of_openai(url: str) -> None:
    body = {"prompt": "hello", "max_tokens": 900}
    error = CLIENT.post(f"{url}/v1/completions", json=body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "you requested 904 tokens (4 in the prompt, 900 in the completion)" in error["message"]


def test_an_output_of_messages_ends_with_the_context(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents ask for 32,000 tokens whatever room there is; a long prompt is tokenized once."""
    num_encoded = 0

    def encode(*arguments: Any) -> Any:
        nonlocal num_encoded
        num_encoded += 1
        return encode_prompt(*arguments)

    monkeypatch.setattr(prompt_requests, "encode_prompt", encode)
    body: dict[str, Any] = {"messages": SHORT, "ignore_eos": True}
    answer = post(url, "/v1/messages", max_tokens=32000, **body)
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == MAX_SEQ_LEN
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert num_encoded == 1
    assert post(url, "/v1/messages", max_tokens=2, **body)["stop_reason"] == "max_tokens"
    answer = post(url, "/v1/messages", max_tokens=usage["output_tokens"], **body)
    assert answer["stop_reason"] == "max_tokens"


@pytest.mark.thorough
@pytest.mark.parametrize("num_predict", [4096, -1, -2])
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_output_of_ollama_ends_with_the_context(url: str, path: str, num_predict: int) -> None:
    source = {"messages": SHORT} if path == "/api/chat" else {"prompt": "hello", "raw": True}
    options = {"num_predict": num_predict, "ignore_eos": True}
    answer = post(url, path, stream=False, options=options, **source)
    assert answer["done_reason"] == "length"
    assert answer["prompt_eval_count"] + answer["eval_count"] == MAX_SEQ_LEN


def test_a_prompt_may_be_cut_to_the_room(url: str) -> None:
    """vLLM's truncate_prompt_tokens -1, beside an output that is to fill the context."""
    body = {"messages": LONG, "truncate_prompt_tokens": -1}
    answer = post(url, "/v1/messages", max_tokens=32000, **body)
    assert answer["usage"]["input_tokens"] == MAX_SEQ_LEN - 1
    assert answer["stop_reason"] == "model_context_window_exceeded"
    counted = post(url, "/v1/messages/count_tokens", **body)["input_tokens"]
    assert counted == MAX_SEQ_LEN - 1


def test_tokens_of_a_conversation_beyond_the_context_are_counted(url: str) -> None:
    """Agents count to find out by how much a conversation is too long."""
    counted = post(url, "/v1/messages/count_tokens", messages=LONG)["input_tokens"]
    tokenized = post(url, "/tokenize", messages=LONG)
    assert counted == tokenized["count"] == len(tokenized["tokens"]) > 900
    assert tokenized["max_model_len"] == MAX_SEQ_LEN
