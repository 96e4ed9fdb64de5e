"""Ollama's API, with the bodies that its Python client 0.6.3 sends (recorded), and its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.serve.body_reading import read_body
from specdec.serve.ollama import GenerateBody, OllamaChatBody
from specdec.serve.schema import ChatBody
from tests.serve.servers import CLIENT, MODEL, post, serve_here
from tests.serve.test_responses import CALLED, THOUGHT
from tests.serve.test_tools import ADD, CHAT

OPTIONS = {"temperature": 0, "num_predict": 9}
BODY = {"model": MODEL, "stream": False, "options": OPTIONS, "messages": CHAT, "tools": []}
PROMPT = {"model": MODEL, "stream": False, "options": OPTIONS, "prompt": "hi"}
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def url(calling_url: str) -> str:
    return calling_url


def read_lines(url: str, path: str, **body: Any) -> list[dict[str, Any]]:
    """A stream's lines, which is what comes where a body does not say otherwise."""
    answer = CLIENT.post(url + path, json={k: v for k, v in body.items() if k != "stream"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.removesuffix("\n").split("\n")]


def check_counts(line: dict[str, Any], chat: dict[str, Any]) -> None:
    """The last line's statistics: the tokens of a chat, and times that add up."""
    counts = line["prompt_eval_count"], line["eval_count"]
    assert counts == (chat["usage"]["prompt_tokens"], chat["usage"]["completion_tokens"])
    total, *parts = (line[name] for name in TIMES)
    assert all(isinstance(part, int) and part > 0 for part in parts)
    assert abs(total - sum(parts)) <= 3
    assert line["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_a_chat_is_a_chat_in_other_words(url: str) -> None:
    options = {"temperature": 0.7, "num_predict": 9, "top_k": 9, "top_p": 0.9, "min_p": 0.01,
               "seed": 3, "stop": ["zz"], "repeat_penalty": 1.1, "num_ctx": 4096}  # fmt: skip
    answer = post(url, "/api/chat", **BODY | {"options": options, "keep_alive": "5m"})
    settings = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 3}
    chat = post(
        url, "/v1/chat/completions", messages=CHAT, max_tokens=9, repetition_penalty=1.1, **settings
    )
    text = chat["choices"][0]["message"]["content"]
    assert answer["message"] == {"role": "assistant", "content": text}
    reason = chat["choices"][0]["finish_reason"]
    assert (answer["done"], answer["done_reason"], answer["model"]) == (True, reason, MODEL)
    assert answer["specdec"]["ignored"] == ["options.num_ctx", "keep_alive"]
    check_counts(answer, chat)


def test_streams_are_lines(url: str) -> None:
    body = BODY | {"options": OPTIONS | {"num_predict": 60, "ignore_eos": True}}
    whole = post(url, "/api/chat", **body)
    lines = read_lines(url, "/api/chat", **body | {"model": f"{MODEL}:latest"})
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert len(lines) > 2, "a busy machine may send some tokens together, not all"
    texts = [line["message"]["content"] for line in lines]
    assert ("".join(texts), texts[-1]) == (whole["message"]["content"], "")
    assert lines[-1]["eval_count"] == whole["eval_count"] == 60


def test_prompts_with_the_template_and_without(url: str) -> None:
    body = PROMPT | {"system": "be", "think": False}
    answer = post(url, "/api/generate", **body)
    turns = [{"role": "system", "content": "be"}, *CHAT]
    chat = post(url, "/v1/chat/completions", messages=turns, max_tokens=9, temperature=0)
    assert answer["response"] == chat["choices"][0]["message"]["content"]
    assert answer["specdec"]["ignored"] == ["think"]
    check_counts(answer, chat)
    lines = read_lines(url, "/api/generate", **body)
    assert "".join(line["response"] for line in lines) == answer["response"]
    raw = post(url, "/api/generate", **PROMPT | {"raw": True})
    completion = post(url, "/v1/completions", prompt="hi", max_tokens=9, temperature=0)
    assert raw["response"] == completion["choices"][0]["text"]
    check_counts(raw, completion)
    longer = {"num_predict": -1, "temperature": 0, "ignore_eos": True}
    unlimited = post(url, "/api/generate", **PROMPT | {"raw": True, "options": longer})
    assert unlimited["prompt_eval_count"] + unlimited["eval_count"] == 300


def test_thoughts_and_calls(folder: Path, calling_tokenizer_dir: str, url: str) -> None:
    body = BODY | {"tools": [ADD], "grammar": CALLED, "options": {"temperature": 0}}
    call = {"index": 0, "name": "add", "arguments": {"a": 1, "b": True}}
    answer, lines = post(url, "/api/chat", **body), read_lines(url, "/api/chat", **body)
    assert answer["message"]["content"] == "so"
    for (told,) in (answer["message"]["tool_calls"], lines[-2]["message"]["tool_calls"]):
        assert told["function"] == call
    assert answer["done_reason"] == "stop"
    cut = post(url, "/api/chat", **body | {"options": {"temperature": 0, "num_predict": 50}})
    assert (cut["done_reason"], "tool_calls" in cut["message"]) == ("length", False)
    more: Any = {"draft_budget": "fixed", "reasoning_parser": "qwen3"}
    with serve_here(folder, tokenizer_dir=calling_tokenizer_dir, **more) as (_, thinking_url):
        body = BODY | {"grammar": THOUGHT, "options": {"temperature": 0}, "think": True}
        answer = post(thinking_url, "/api/chat", **body)
        lines = read_lines(thinking_url, "/api/chat", **body)
    message = {"role": "assistant", "content": "so", "thinking": "hm"}
    assert answer["message"] == message
    assert "".join(line["message"].get("thinking", "") for line in lines) == "hm"
    abilities = CLIENT.post(url + "/api/show", json={"model": MODEL}).json()["capabilities"]
    assert abilities == ["completion", "tools"]


def test_a_history_is_that_of_a_chat(url: str) -> None:
    function = {"name": "add", "arguments": {"a": 1, "b": True}}
    history = [
        *CHAT,
        {"role": "assistant", "content": "so", "thinking": "hm",
         "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "2", "tool_name": "add"},
    ]  # fmt: skip
    answer = post(url, "/api/chat", **BODY | {"messages": history, "tools": [ADD]})
    calls = [{"id": "x", "type": "function", "function": function}]
    turns = [
        *CHAT,
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "x"},
    ]
    tokens = post(url, "/tokenize", messages=turns, tools=[ADD])
    assert answer["prompt_eval_count"] == tokens["count"]
    assert answer["specdec"]["ignored"] == ["messages.name"]


def test_the_assistants_last_text_is_continued(url: str) -> None:
    """As Ollama does; after calls, or a text that has ended, an answer begins."""
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    begun: dict[str, Any] = {"role": "assistant", "content": "so it"}
    for last, continues, options in (
        (begun, True, {}), (begun, False, {"continue_final_message": False}),
        ({**begun, "tool_calls": [call]}, False, {}), ({**begun, "content": ""}, False, {}),
    ):  # fmt: skip
        answer = post(url, "/api/chat", **BODY | {"messages": [*CHAT, last], **options})
        written = {
            **last,
            "tool_calls": [{"type": "function", **c} for c in last.get("tool_calls", [])],
        }
        chat = post(
            url, "/v1/chat/completions", messages=[*CHAT, written], max_tokens=9, temperature=0,
            continue_final_message=continues,
        )  # fmt: skip
        assert answer["message"]["content"] == chat["choices"][0]["message"]["content"]
        assert answer["prompt_eval_count"] == chat["usage"]["prompt_tokens"]


def test_formats_and_log_probabilities(url: str) -> None:
    schema = ADD["function"]["parameters"]
    options = {"temperature": 0, "num_predict": 90}
    answer = post(url, "/api/chat", **BODY | {"format": schema, "options": options})
    assert json.loads(answer["message"]["content"]).keys() == {"a", "b"}
    for raw in (False, True):
        body = PROMPT | {"format": "json", "raw": raw, "options": options}
        assert isinstance(json.loads(post(url, "/api/generate", **body)["response"]), dict)
    asked = {"logprobs": True, "top_logprobs": 2}
    answer = post(url, "/api/chat", **BODY | asked)
    assert len(answer["logprobs"]) == 9
    assert all(len(entry["top_logprobs"]) == 2 for entry in answer["logprobs"])
    lines = read_lines(url, "/api/generate", **PROMPT | asked | {"raw": True})
    assert sum(len(line.get("logprobs", ())) for line in lines) == 9


def test_models_are_listed_and_loaded(url: str) -> None:
    def get(path: str) -> Any:
        return CLIENT.get(url + path).json()

    (listed,), (running,) = get("/api/tags")["models"], get("/api/ps")["models"]
    assert listed["name"] == listed["model"] == running["model"] == MODEL
    assert len(listed["digest"]) == 64
    assert listed["size"] > 10**5
    assert (running["size_vram"], running["context_length"]) == (0, 300)
    assert [int(part) for part in get("/api/version")["version"].split(".")] >= [0, 6, 4]
    card = CLIENT.post(url + "/api/show", json={"name": MODEL}).json()
    family = card["details"]["family"]
    assert family == card["model_info"]["general.architecture"] == listed["details"]["family"]
    assert card["model_info"][f"{family}.context_length"] == 300
    for path, body in (
        ("/api/chat", {"messages": [], "tools": []}),
        ("/api/chat", {}), ("/api/generate", {"keep_alive": 0.0}),
    ):  # fmt: skip
        answer = post(url, path, model=MODEL, **body)
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        assert answer["specdec"]["ignored"] == [name for name in body if name == "keep_alive"]


IMAGED = [{"role": "user", "content": "hi", "images": ["YWE="]}]


@pytest.mark.parametrize(
    ("path", "more", "status", "words"),
    [
        ("/api/generate", {"suffix": "x"}, 400, "suffix is 'x'"),
        ("/api/generate", {"template": "x"}, 400, "template is 'x'"),
        ("/api/generate", {"raw": True, "system": "x"}, 400, "system is 'x'"),
        ("/api/generate", {"images": ["YWE="]}, 400, "images is"),
        ("/api/generate", {"context": [1]}, 400, "context is"),
        ("/api/chat", {"messages": IMAGED}, 400, "messages.0.images"),
        ("/api/chat", {"messages": "hi"}, 400, "messages is 'hi'"),
        ("/api/chat", {"format": "yaml"}, 400, "format is 'yaml'"),
        ("/api/chat", {"think": 3}, 400, "think is 3"),
        ("/api/chat", {"options": {"temperature": -1}}, 400, "options.temperature is -1"),
        ("/api/chat", {"options": {"mirostat": 2}}, 400, "options.mirostat is not supported"),
        ("/api/chat", {"options": {"num_predict": -3}}, 400, "options.num_predict is -3"),
        ("/api/chat", {"options": {"wrong": 1}}, 400, "unknown parameter 'options.wrong'"),
        ("/api/chat", {"model": "llama3"}, 404, "the model 'llama3' does not exist"),
        ("/api/show", {"model": "llama3"}, 404, "the model 'llama3' does not exist"),
        ("/api/embed", {"input": "x"}, 400, "the model 'toy' writes texts"),
        ("/api/pull", {}, 404, "there is no /api/pull"),
    ],
)
def test_errors_have_ollamas_form(
    url: str, path: str, more: dict[str, Any], status: int, words: str
) -> None:
    body = {"/api/chat": BODY, "/api/generate": PROMPT}.get(path, {}) | more
    answer = CLIENT.post(url + path, json=body)
    assert answer.status_code == status
    assert answer.json().keys() == {"error"}
    assert answer.json()["error"].startswith(words)


def test_a_stream_that_fails_ends_with_an_error(folder: Path, calling_tokenizer_dir: str) -> None:
    more: Any = {"draft_budget": "fixed", "request_timeout": 0.1}
    with serve_here(folder, tokenizer_dir=calling_tokenizer_dir, **more) as (_, url):
        lines = read_lines(url, "/api/generate", model=MODEL, prompt="hi", ignore_eos=True)
        assert lines[-1] == {"error": "the request took more than 0.1 seconds"}
        assert post(url, "/api/chat", **BODY | {"options": {"num_predict": 1}})["done"] is True


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 9, "temperature": 0}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 9, "temperature": 0}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 9, "temperature": 0}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 9, "temperature": 0}),
        ("/api/chat", BODY), ("/api/generate", PROMPT),
        ("/api/generate", {**PROMPT, "raw": True}),
    ],
)  # fmt: skip
def test_each_protocol_controls_speculation(url: str, path: str, body: dict[str, Any]) -> None:
    """None, less, by name; a method that the engine lacks is an error with those that it has."""

    def count(speculation: Any) -> tuple[list[int], float]:
        answer = post(url, path, **body, speculation=speculation)
        told = answer["metrics"]["speculative_decoding"]
        return told["per_step_drafted"], told["mean_acceptance_length"]

    whole, length = count(True)
    assert max(whole) > 3
    assert length >= 1
    assert max(count({"method": "redrafter", "max_tokens": 3})[0]) == 3
    assert count({"method": "redrafter"})[0] == whole
    assert set(count(False)[0]) == {0}
    answer = CLIENT.post(url + path, json={**body, "speculation": {"method": "eagle"}})
    assert answer.status_code == 400
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "speculation" in (error.get("param", message) if isinstance(error, dict) else message)
    assert "'eagle', and this engine drafts by redrafter" in message


@pytest.mark.parametrize("value", [True, False])
def test_truncate_and_shift_have_no_effect(value: bool) -> None:
    body = read_body(OllamaChatBody, {"messages": CHAT, "truncate": value, "shift": value})
    assert body.list_ignored() == ["truncate", "shift"]


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings", "/v1/embeddings"])
def test_there_are_no_embeddings(url: str, path: str) -> None:
    answer = CLIENT.post(url + path, json={"model": MODEL, "input": "a", "prompt": "a"})
    assert answer.status_code == 400
    assert "it makes no embeddings" in answer.text


@pytest.mark.parametrize("kind", [OllamaChatBody, GenerateBody, ChatBody])
def test_options_that_are_null_are_none(kind: Any) -> None:
    source = {"prompt": "a"} if kind is GenerateBody else {"messages": CHAT}
    body = read_body(kind, {"options": None, **source})
    assert body == read_body(kind, source)


def test_a_body_needs_no_content_type(url: str) -> None:
    content = json.dumps({"prompt": "a", "raw": True, "stream": False, "num_predict": 1})
    assert CLIENT.post(f"{url}/api/generate", content=content.encode()).status_code == 200
    headers = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    answer = CLIENT.post(f"{url}/api/generate", content=content.encode(), headers=headers)
    assert answer.status_code == 415
