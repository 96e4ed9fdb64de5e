"""The endpoints: OpenAI's forms, event by event, and the text that the engine gives alone."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import hypothesis
import pytest
from hypothesis import strategies as st
from transformers import tokenization_utils_base

from specdec import Engine, Event, Prompt, SpecDecError, UsageError
from specdec.decode.loop import Batch
from specdec.decode.requests import TokenLogprob
from specdec.files.vocabulary import list_byte_letters
from specdec.serve import app, protocol
from specdec.serve.answers import Choice, CompletionAnswer
from specdec.serve.body_reading import list_rules
from specdec.serve.foreign import IGNORED, ROWS
from specdec.serve.schema import ChatBody, CompletionBody
from specdec.serve.server import EngineServer, check_address
from specdec.serve.settings import ServeSettings
from specdec.serve.tokens import TokenTable
from specdec.system.http_client import read_key
from tests.conftest import EOS
from tests.serve.servers import (
    CLIENT,
    MODEL,
    ask_and_send_no_more,
    post,
    read_events,
    serve_here,
    wait_until,
)

TEXT = "hello ab"
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """The greedy continuation of TEXT, without drafts."""
    with Engine.load(folder, device="cpu", speculation=False) as engine:
        return engine.generate(Prompt(text=TEXT, temperature=0, end_ids=()), max_output_len=40)[0]


GREEDY = {"temperature": 0, "ignore_eos": True}
EOS_ID = 2


# --- answers ---


def test_a_completion_is_what_the_engine_gives(url: str, expected: Any) -> None:
    answer = post(url, "/v1/completions", model=MODEL, prompt=TEXT, max_tokens=40, **GREEDY)
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0, "text": expected.text, "logprobs": None, "finish_reason": "length"
    }  # fmt: skip
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(expected.prompt_ids), 40)
    assert answer["object"] == "text_completion"
    ids = expected.prompt_ids
    several = post(
        url, "/v1/completions", prompt=[ids, ids[:3], ids], max_tokens=40, echo=True, n=1, **GREEDY
    )
    texts = [choice["text"] for choice in several["choices"]]
    assert texts[0] == texts[2] == TEXT + expected.text != texts[1]
    assert several["usage"]["prompt_tokens"] == 2 * len(ids) + 3
    told = answer["metrics"]["speculative_decoding"]
    assert told["num_draft_tokens"] == sum(told["per_step_drafted"]) > 0
    assert sum(told["acceptance_histogram"]) == len(told["per_step_accepted"])
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == told["num_accepted_draft_tokens"]
    told_ids = {"max_tokens": 40, "return_token_ids": True, **GREEDY}
    (choice,) = post(url, "/v1/completions", prompt=TEXT, **told_ids)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, expected.token_ids)
    events = read_events(url, "/v1/completions", prompt=TEXT, **told_ids)
    streamed = [t for event in events for t in event["choices"][0].get("token_ids", [])]
    assert streamed == expected.token_ids


def test_seeds_and_choices(folder: Path, url: str) -> None:
    """Choice i of seed s is what seed s + i gives."""
    sampling: Any = {"temperature": 0.9, "top_p": 0.9, "top_k": 20}
    answer = post(
        url, "/v1/completions", prompt=TEXT, max_tokens=9, n=3, seed=2**64 - 2, **sampling
    )
    prompts = [Prompt(text=TEXT, seed=seed % 2**64, **sampling) for seed in range(-2, 1)]
    with Engine.load(folder, device="cpu") as engine:
        outputs = engine.generate(prompts, max_output_len=9)
    assert [c["text"] for c in answer["choices"]] == [output.text for output in outputs]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    for seed in (None, -1):
        other = [post(url, "/v1/completions", prompt=TEXT, max_tokens=9, seed=seed) for _ in "ab"]
        assert other[0]["choices"] != other[1]["choices"], "without a seed each is drawn afresh"
    many = post(
        url, "/v1/completions", prompt=[TEXT, TEXT], max_tokens=9, n=2, seed=2**64 - 2, **sampling
    )["choices"]
    expected = [output.text for output in outputs]
    assert [choice["text"] for choice in many[:3]] == expected, "equal prompts share no numbers"


def round_all(value: Any) -> Any:
    """A document whose numbers are without their last bits, which follow the rest of a batch."""
    if isinstance(value, dict):
        return {key: round_all(one) for key, one in value.items()}
    if isinstance(value, list):
        return [round_all(one) for one in value]
    return pytest.approx(value, abs=1e-4) if isinstance(value, float) else value


ASKED = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 16), "seed": st.integers(0, 99),
        "temperature": st.sampled_from([0, 0.7, 1.5]), "n": st.integers(1, 3),
    },
    optional={
        "stop": st.lists(st.text("abcdefghijk ", min_size=1, max_size=3), max_size=4),
        "logprobs": st.integers(0, 3), "echo": st.booleans(), "ignore_eos": st.booleans(),
        "presence_penalty": st.floats(-2, 2), "speculation": st.booleans(),
        "logit_bias": st.dictionaries(st.integers(0, 90).map(str), st.floats(-9, 9), max_size=3),
        "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    },
)  # fmt: skip


@hypothesis.settings(max_examples=20)
@hypothesis.given(ASKED, st.booleans())
def test_streams_of_all_settings_have_openais_form(
    url: str, asked: dict[str, Any], is_chat: bool
) -> None:
    """Event by event, with the types of OpenAI's own client; and together they are the answer."""
    from openai.types.chat import ChatCompletionChunk

    path, given = "/v1/completions", {"prompt": [TEXT, "k"], **asked}
    if is_chat:
        path, given = "/v1/chat/completions", {"messages": CHAT, **asked}
        given.pop("echo", None)
        if "logprobs" in given:
            given |= {"top_logprobs": given["logprobs"], "logprobs": True}
    tells_usage = given.get("stream_options", {}).get("include_usage", False)
    events = read_events(url, path, **given)
    given.pop("stream_options", None)
    whole = post(url, path, **given)
    assert len({(e["id"], e["object"], e["created"], e["model"]) for e in events}) == 1
    assert events[0]["object"] == ("chat.completion.chunk" if is_chat else "text_completion")
    for event in events:
        if is_chat:
            ChatCompletionChunk.model_validate(event, strict=True)
        for part in event["choices"]:  # in OpenAI's type of a completion no finish_reason is null
            known = {"index", "logprobs", "finish_reason", "delta" if is_chat else "text"}
            assert part.keys() == known
        assert ("usage" in event) == tells_usage
    if tells_usage:
        last = events.pop()
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert all(event["usage"] is None for event in events)
    assert [("metrics" in event) for event in events] == [False] * (len(events) - 1) + [True]
    for choice in whole["choices"]:
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        reasons = [part["finish_reason"] for part in own]
        assert reasons == [None] * (len(own) - 1) + [choice["finish_reason"]]
        if is_chat:
            assert [part["delta"].get("role") for part in own] == ["assistant"] + [None] * (
                len(own) - 1
            )
            text = "".join(part["delta"].get("content", "") for part in own)
            assert text == choice["message"]["content"]
        else:
            assert "".join(part["text"] for part in own) == choice["text"]
        if choice["logprobs"] is None:
            assert all(part["logprobs"] is None for part in own)
            continue
        for key, values in choice["logprobs"].items():
            told = [one for part in own for one in (part["logprobs"] or {}).get(key) or []]
            assert round_all(told) == round_all(values or [])


@pytest.mark.parametrize("as_list", [False, True])
def test_nothing_comes_after_a_stop(url: str, expected: Any, as_list: bool) -> None:
    """In text, tokens, log-probabilities or usage, wherever in an accepted block it falls."""
    text = expected.text
    for at in (9, 14, 21):
        word = text[at : at + 3]
        end = text.index(word)
        body = {"prompt": TEXT, "max_tokens": 40, "stop": [word, "@@"] if as_list else word}
        body |= {"logprobs": 0, **GREEDY}
        answer = post(url, "/v1/completions", **body)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[:end], "stop")
        told = choice["logprobs"]
        assert all(offset < end for offset in told["text_offset"])
        assert "".join(told["tokens"]).startswith(text[:end])
        assert len("".join(told["tokens"][:-1])) < end
        sizes = [len("".join(names)) for names in (told["tokens"], told["tokens"][:-1])]
        assert sizes[0] >= end > sizes[1]
        # The tokens generated are those up to the one that completed the stop word.
        assert len(told["tokens"]) <= answer["usage"]["completion_tokens"] <= 40
        events = read_events(url, "/v1/completions", **body)
        assert "".join(e["choices"][0]["text"] for e in events) == text[:end]
        names = [
            name for e in events for name in (e["choices"][0]["logprobs"] or {}).get("tokens", [])
        ]
        assert names == told["tokens"]


def test_half_characters_wait_and_tokens_are_bytes(folder: Path) -> None:
    """A token that ends in the middle of a character is told of, but no half of it is text."""
    letters = {byte: letter for letter, byte in list_byte_letters().items()}
    pieces = [b"a", "€".encode()[:2], "€".encode()[2:], b" b"]

    class Bytes:
        all_special_ids = [9]
        added_tokens_decoder = {9: "</s>"}

        class backend_tokenizer:  # noqa: N801 - as transformers names it
            decoder = "ByteLevel()"

        def convert_ids_to_tokens(self, token: int) -> str | None:
            if token == 9:
                return "</s>"
            return "".join(letters[byte] for byte in pieces[token]) if token < 4 else None

    table = TokenTable(Bytes())
    assert [table.get_bytes(n) for n in range(4)] == pieces
    names = ["a", "bytes:\\xe2\\x82", "bytes:\\xac", " b"]
    assert [table.get_text(n) for n in range(4)] == names
    assert table.get_bytes(9) == b"</s>"
    assert table.get_bytes(77) == b""
    request: Any = SimpleNamespace(num_logprobs=0, input_text="")
    choice = Choice(0, request)
    shown, counts = [], []
    for token, (text, end) in enumerate([("a", 1), ("", 1), ("€", 2), (" b", 4)]):
        told = [TokenLogprob(-1.0, [])]
        choice.add(
            Event(text=text, token_ids=[token], origins=["plain"], ends=[end], logprobs=told)
        )
        shown.append(choice.text)
        counts.append(len(choice.tokens))
    assert shown == ["a", "a", "a€", "a€ b"]
    assert counts == [1, 1, 3, 4], "a stop word may yet begin with the character"
    answer = CompletionAnswer(CompletionBody(prompt="", logprobs=0), MODEL, [choice], table)
    details = answer._describe_tokens(choice.tokens, [])
    assert details["logprobs"]["tokens"] == names


@pytest.mark.parametrize("num_events", [1, 2, 4])
def test_nothing_stays_of_a_stop_word_that_begins_inside_of_a_character(num_events: int) -> None:
    """Of "€." after "a": however many tokens come at once, and though "€" was held back."""
    request: Any = SimpleNamespace(num_logprobs=0, input_text="")
    choice = Choice(0, request)
    events = [("a", 1, None), ("", 1, None), ("", 2, None), ("", 1, "stop")]
    size = len(events) // num_events
    for start in range(0, len(events), size):
        texts, ends, reasons = zip(*events[start : start + size], strict=True)
        number = len(texts)
        choice.add(
            Event(
                text="".join(texts), token_ids=list(range(start, start + number)), ends=list(ends),
                origins=["plain"] * number, logprobs=[TokenLogprob(-1.0, [])] * number,
                finish_reason=reasons[-1],
            )
        )  # fmt: skip
        assert len(choice.tokens) <= 1
    assert (choice.text, [token.id for token in choice.tokens]) == ("a", [0])


def test_the_small_endpoints(url: str, expected: Any) -> None:
    assert CLIENT.get(f"{url}/health").json() == {"status": "ok"}
    assert CLIENT.get(f"{url}/version").json().keys() == {"version"}
    (model,) = CLIENT.get(f"{url}/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, 300)
    assert CLIENT.get(f"{url}/v1/models/{MODEL}").json() == model
    assert CLIENT.get(f"{url}/v1/models/other").status_code == 404
    told = post(url, "/tokenize", prompt=TEXT)
    assert told == {
        "count": len(expected.prompt_ids), "max_model_len": 300, "tokens": expected.prompt_ids
    }  # fmt: skip
    assert post(url, "/detokenize", tokens=told["tokens"]) == {"prompt": TEXT}
    chat = post(url, "/tokenize", messages=CHAT)
    assert post(url, "/detokenize", tokens=chat["tokens"]) == {"prompt": "u:hi\na:"}
    unknown = CLIENT.post(f"{url}/detokenize", json={"tokens": [*told["tokens"], 99_999]})
    assert unknown.status_code == 400
    assert unknown.json()["error"]["message"] == "the tokenizer has no token 99999"
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
    ]
    assert post(url, "/tokenize", messages=parts) == chat
    refused = {"prompt": TEXT, "chat_template_kwargs": {"a": 1}}
    assert "has no place beside prompt" in CLIENT.post(f"{url}/tokenize", json=refused).text
    whole = post(url, "/v1/chat/completions", messages=CHAT, ignore_eos=True)
    assert whole["usage"]["total_tokens"] == 300, "all that there is room for"


def test_a_tokenizers_own_limit_leaves_no_line_in_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's limits are what counts, and what is beyond them is told the client."""
    told: list[str] = []
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", lambda *a: told.append(a[0]))
    with serve_here(folder) as (server, url):
        tokenizer = server.scheduler.engine.tokenizer
        tokenizer.model_max_length = 1
        for path, body in (
            ("/tokenize", {"prompt": TEXT}),
            ("/v1/completions", {"prompt": TEXT, "max_tokens": 2}),
            ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}),
        ):
            post(url, path, **body)
    assert not told
    tokenizer(TEXT)
    assert "longer than the specified maximum" in told[0]


# --- what is refused ---


CHAT_PATH = "chat/completions"


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


# What is sent with a prompt of "x", where not said otherwise; the parameter named; the message.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"prompt": [True]}, "prompt", "not a text, a list of texts"),
    ({"prompt": [[1], []]}, "prompt", "not a text"),
    ({"prompt": [-1]}, "prompt", "not a text"),
    ({"promt": "x"}, "promt", "unknown parameter 'promt' (did you mean prompt?)"),
    ({"tools": [1]}, "tools", "tools is not supported"),
    ({"messages": CHAT, "tools": [1]}, "tools", "tools.0 is 1, not an object"),
    ({"best_of": 1, "n": 2}, "best_of", "best_of is 1, and n 2"),
    ({"best_of": True}, "best_of", "best_of is True, not a whole number from 1 to 128"),
    ({"best_of": 2, "stream": True}, "best_of", "only for what is no stream"),
    ({"best_of": 129}, "best_of", "from 1 to 128"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "only for what is no stream"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
    ({"min_tokens": -1}, "min_tokens", "a whole number from 0"),
    ({"min_tokens": 17}, "min_tokens", "has min_tokens 17, and at most 16 tokens"),
    ({"bad_words": [""]}, "bad_words", "none empty"),
    ({"bad_words": ["a"], "guided_regex": "b"}, "bad_words", "both grammar and bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "not empty"),
    ({"allowed_token_ids": [900]}, "allowed_token_ids", "allows token 900"),
    ({"stop_token_ids": [1, "a"]}, "stop_token_ids", "a list of token ids"),
    ({"stop_token_ids": [1, 900]}, "stop_token_ids", "stop_token_ids 900, the model's vocabulary"),
    ({"prompt": [5], "add_special_tokens": True}, "add_special_tokens", "no tokenizer reads them"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "a whole number from 1"),
    ({"suffix": "x"}, "suffix", "suffix is not supported"),
    ({"modalities": ["audio"]}, "modalities", "modalities is not supported"),
    ({"n": True}, "n", "n is True, not a whole number from 1 to 128"),
    ({"seed": 1.0}, "seed", "seed is 1.0, not a whole number"),
    ({"top_k": "1"}, "top_k", "top_k is '1', not a whole number"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty", "a number from 0.001 to 1000"),
    ({"temperature": True}, "temperature", "temperature is True, not a number"),
    ({"temperature": -1}, "temperature", "a number of at least 0"),
    ({"top_p": 0}, "top_p", "a number above 0"),
    ({"n": 10**9}, "n", "from 1 to 128"),
    ({"prompt": ["x"] * 100, "n": 2}, "n", "200 choices, at most 128"),
    ({"max_tokens": -2}, "max_tokens", "max_tokens is -2, not a whole number from 1"),
    ({"max_tokens": 900}, "max_tokens", "asks for 900 more, the engine's max_seq_len is 300"),
    ({"prompt": "x" * 9000}, "prompt", "the prompt has 9000 tokens, the engine's max_input_len is"),
    ({"prompt": ["x", ""]}, "prompt", "prompt 1 is empty"),
    ({"prompt": ""}, "prompt", "is empty"),
    ({"prompt": [900]}, "prompt", "holds token 900"),
    ({"prompt": [1, "a"]}, "prompt", "prompt"),
    ({"stop": ["a", None]}, "stop", "at most 1000 characters"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias is {'a': 1}, not numbers"),
    ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "by token id"),
    ({"logit_bias": {"1": True}}, "logit_bias", "logit_bias is {'1': True}"),
    ({"logit_bias": {"500": 1}}, "logit_bias", "logit_bias for token 500"),
    ({"logprobs": 50}, "logprobs", "from 0 to 20"),
    ({"max_tokens": 0}, "max_tokens", "without echo"),
    ({"stream_options": {}}, "stream_options", "only for stream"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options", "true or false"),
    ({"return_trees": True}, "return_trees", "only for stream"),
    ({"model": "gpt-9"}, "model", "'gpt-9' does not exist"),
    ({"seed": 2**64}, "seed", "to 2**64 - 1"),
    ({"messages": []}, "messages", "not a list of messages"),
    (turn("user", 3), "messages", "messages.0.content is 3: give a text"),
    (turn("user", None), "messages", "messages.0.content is missing"),
    ({"messages": [{"content": "x"}]}, "messages", "messages.0.role is missing"),
    (
        {"messages": [{**CHAT[0], "tool_calls": [{"name": "f"}]}]},
        "messages",
        "does not read messages.0.tool",
    ),
    (
        {"messages": [CHAT[0] | {str(at): 1 for at in range(99)}]},
        "messages",
        "99 names beside role and content, at most 64",
    ),
    (
        {"messages": CHAT, "max_tokens": 3, "max_completion_tokens": 2},
        "max_completion_tokens",
        "both given, and differ",
    ),
    ({"messages": CHAT, "max_completion_tokens": 900}, "max_completion_tokens", "asks for 900"),
    (turn("villain", "x"), "messages", "refuses the messages: no villains"),
    ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    (
        {"messages": CHAT, "enable_thinking": False, "thinking": {"type": "enabled"}},
        "thinking",
        "thinking.type sets the template's enable_thinking to True, and enable_thinking to False",
    ),
    (
        {
            "messages": CHAT,
            "reasoning_effort": "a",
            "chat_template_kwargs": {"reasoning_effort": 1},
        },
        "reasoning_effort",
        "to 'a', and chat_template_kwargs.reasoning_effort to 1",
    ),
    (
        {"messages": CHAT, "include_reasoning": True, "reasoning": {"exclude": True}},
        "include_reasoning",
        "is True, and reasoning.exclude too",
    ),
    (
        turn("user", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}}]),
        "messages",
        "has a part of type 'image_url': this server reads texts",
    ),
    (turn("user", [{"type": "text", "text": "x"}, {"type": "video"}]), "messages", "type 'video'"),
    (turn("user", [{"type": "picture"}]), "messages", "is supported"),
    ({"response_format": {"type": "text", "json_schema": {}}}, "response_format", "no place"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format", "response_format.x"),
    ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "no json_schema.schema"),
    ({"guided_regex": "[a"}, "guided_regex", "the regex is refused"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_json", "are both given"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "both given"),
    (
        {"structured_outputs": {"disable_any_whitespace": True, "whitespace_pattern": " "}},
        "structured_outputs",
        "structured_outputs.disable_any_whitespace are both given",
    ),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag"),
    ({"guided_json": "{"}, "guided_json", "guided_json is not JSON"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "none empty"),
    ({"grammar": "start: /a/", "ignore_eos": True}, "ignore_eos", "beside a grammar"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
def test_refusals_name_the_parameter(
    url: str, body: dict[str, Any], param: str, message: str
) -> None:
    path = CHAT_PATH if "messages" in body else "completions"
    given = body if "messages" in body else {"prompt": "x", **body}
    answer = CLIENT.post(f"{url}/v1/{path}", json=given)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]


def test_structured_output(url: str) -> None:
    """Valid in a stream as in a whole answer, alongside requests of other grammars and of none."""
    schema: Any = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    chat: Any = {"messages": CHAT, "response_format": form, "max_tokens": 40, "n": 3, "seed": 1}
    whole = post(url, "/v1/chat/completions", **chat)
    events = read_events(url, "/v1/chat/completions", **chat)
    for index, choice in enumerate(whole["choices"]):
        assert choice["finish_reason"] == "stop"
        assert json.loads(choice["message"]["content"])["a"] in (1, 22)
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        text = "".join(part["delta"].get("content", "") for part in own)
        assert text == choice["message"]["content"]
    body: Any = {"prompt": TEXT, "max_tokens": 20, "seed": 3}
    for name, value in (("guided_regex", "(ab|c){2,4}"), ("grammar", "start: /(ab|c){2,4}/")):
        answer = post(url, "/v1/completions", **body, **{name: value})
        assert re.fullmatch("(ab|c){2,4}", answer["choices"][0]["text"])
    body["max_tokens"], one = 40, '{ ?"a": ?(1|22) ?}'.replace(" ?", "")
    told = post(url, "/v1/completions", prompt="x", spaces_between_special_tokens=False)
    assert told["specdec"]["ignored"] == ["spaces_between_special_tokens"]
    told = post(url, "/v1/completions", prompt="x", guided_whitespace_pattern=" ")
    assert told["specdec"]["ignored"] == ["guided_whitespace_pattern"]
    ways: list[tuple[dict[str, Any], str]] = [
        ({"guided_choice": ["a.b", "(c"]}, r"a\.b|\(c"),
        ({"structured_outputs": {"choice": ["a.b", "(c"]}}, r"a\.b|\(c"),
        ({"structured_outputs": {"regex": "(ab){2}"}}, "abab"),
        ({"structured_outputs": {"grammar": 'start: "k"', "disable_fallback": True}}, "k"),
        ({"structured_outputs": {"json": schema, "disable_any_whitespace": True}}, one),
        ({"structured_outputs": {"json": json.dumps(schema)}}, one.replace(":", ": ?")),
        ({"guided_json": schema, "guided_whitespace_pattern": "\n"}, one.replace(":", "\n?:\n?")),
        ({"json_schema": schema}, one.replace(":", ": ?")),
        ({"response_format": {"type": "json_object", "schema": schema}}, one.replace(":", ": ?")),
    ]
    for given, pattern in ways:
        pattern = (
            pattern.replace("{", r"\{\n?").replace("}", r"\n?\}") if "{" in pattern else pattern
        )
        answer = post(url, "/v1/completions", **body, **given)
        assert re.fullmatch(pattern, answer["choices"][0]["text"]), (given, answer)


def test_parameters_that_ask_for_nothing_are_taken(url: str) -> None:
    nothing = {row.name: row.values[0] for row in ROWS if row.values}
    nothing |= {"top_k": -1, "response_format": {"type": "text"}, "logit_bias": {}, "stop": [""]}
    answer = post(url, "/v1/completions", prompt="x", max_tokens=1, **nothing)
    assert answer["specdec"] == {"ignored": []}
    post(
        url,
        "/v1/completions",
        prompt="x",
        max_tokens=1,
        **dict.fromkeys(row.name for row in ROWS),
    )
    # As clients send back what they got.
    whole = post(url, "/v1/chat/completions", messages=CHAT, max_tokens=2)
    message = whole["choices"][0]["message"] | {"tool_calls": None, "annotations": []}
    post(url, "/v1/chat/completions", messages=[*CHAT, message], max_tokens=2)


def test_parameters_without_effect_are_taken_and_told(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is the one without them, and names them; the log names each once."""
    caplog.set_level("INFO")
    idle: dict[str, Any] = dict.fromkeys(IGNORED, {"a": ["b"]})
    body: Any = {"max_tokens": 8, "seed": 4, "max_completion_tokens": 8}
    content = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    message = {"role": "user", "content": content, "typo": 1, "refusal": None}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 7}}}
    plain = post(url, "/v1/chat/completions", messages=CHAT, response_format=form, **body)
    form["json_schema"]["x"] = 1  # type: ignore[index]
    more = {**body, **idle, "messages": [message], "response_format": form}
    for _ in range(2):
        whole = post(url, "/v1/chat/completions", **more)
        assert whole["choices"] == plain["choices"]
        told = {*IGNORED, "messages.content.cache_control", "messages.typo"}
        assert {*whole["specdec"]["ignored"]} == {*told, "response_format.json_schema.x"}
    lines = [record.getMessage() for record in caplog.records]
    assert lines.count("parameter prediction has no effect (said once)") <= 1
    options = {"include_usage": True, "include_obfuscation": True, "continuous_usage_stats": True}
    events = read_events(url, "/v1/chat/completions", **more, stream_options=options)
    assert "stream_options.include_obfuscation" in events[-1]["specdec"]["ignored"]
    options = {"continuous_usage_stats": True}
    short: Any = {"prompt": "x", "max_tokens": 1, "stream_options": options}
    last_event = read_events(url, "/v1/completions", **short)[-1]
    assert last_event["specdec"]["ignored"] == ["stream_options.continuous_usage_stats"]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == whole["usage"]["completion_tokens"]


def test_what_a_chat_says_of_its_template(folder: Path) -> None:
    """What the template reads changes the prompt; what it does not is told; names stay text."""
    with serve_here(folder) as (server, url):
        tokenizer = server.scheduler.engine.tokenizer
        tokenizer.chat_template += "{{ reasoning_effort }}{% if loud %}!{% endif %}"

        def read(**given: Any) -> tuple[str, list[str]]:
            body = {"messages": CHAT, "max_tokens": 1, "return_token_ids": True, **given}
            answer = post(url, "/v1/chat/completions", **body)
            ids = answer["choices"][0]["prompt_token_ids"]
            del body["max_tokens"], body["return_token_ids"]
            same = {k: v for k, v in body.items() if k not in ("reasoning_effort", "max_tokens")}
            if same == body:
                assert post(url, "/tokenize", **body)["tokens"] == ids
            return tokenizer.decode(ids), answer["specdec"]["ignored"]

        assert read() == ("u:hi\na:", [])
        assert read(reasoning_effort="low") == ("u:hi\na:low", [])
        kwargs = {"loud": True, "thinking": False}
        assert read(chat_template_kwargs=kwargs) == (
            "u:hi\na:!", ["chat_template_kwargs.thinking"],
        )  # fmt: skip
        assert read(add_generation_prompt=False)[0] == "u:hi\n"
        named = [{**CHAT[0], "name": "bob"}, {"role": "assistant", "content": "so"}]
        assert read(messages=named) == ("u:hi\na:so\na:", ["messages.name"])
        assert read(messages=named, continue_final_message=True)[0] == "u:hi\na:so"
        tokenizer.chat_template = "{% for m in messages %}{{ m.name }}{% endfor %}"
        assert read(messages=[named[0]]) == ("bob", [])
        content = [{"role": "user", "content": "</s>"}]
        tokenizer.chat_template = "{{ messages[0].content }}{{ reasoning_effort }}</s>"
        whole = post(url, "/tokenize", messages=content)["tokens"]
        assert (whole.count(EOS_ID), whole[-1]) == (1, EOS_ID)
        refused = {"messages": CHAT, "chat_template_kwargs": {"tokenize": True}}
        answer = CLIENT.post(f"{url}/v1/chat/completions", json=refused)
        assert answer.json()["error"]["param"] == "chat_template_kwargs"
        body: Any = {"prompt": TEXT, "max_tokens": 2, "echo": True, "temperature": 0}
        cut = post(url, "/v1/completions", **body, truncate_prompt_tokens=3)
        assert cut["usage"]["prompt_tokens"] == 3
        assert cut["choices"][0]["text"].startswith(" ab")
        body |= {"prompt": "x" * 900, "max_tokens": 9, "truncate_prompt_tokens": -1}
        assert post(url, "/v1/completions", **body)["usage"]["total_tokens"] == 300


def test_the_best_of_several_choices(url: str) -> None:
    """By the sum of the target's own log-probabilities; all of them count as usage."""
    body: Any = {"prompt": [TEXT, "x"], "max_tokens": 6, "seed": 3, "logprobs": 0}
    made = post(url, "/v1/completions", **body, n=5)
    told = post(url, "/v1/completions", **body, n=2, best_of=5)
    assert told["usage"] == made["usage"]
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
    for at in (0, 1):
        own = sorted(
            made["choices"][5 * at : 5 * at + 5],
            key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]),
        )[:2]
        assert [c["text"] for c in told["choices"][2 * at : 2 * at + 2]] == [c["text"] for c in own]
    del body["logprobs"]
    silent = post(url, "/v1/completions", **body, n=2, best_of=5)
    assert [c["text"] for c in silent["choices"]] == [c["text"] for c in told["choices"]]
    assert all(choice["logprobs"] is None for choice in silent["choices"])


def test_log_probabilities_of_the_prompt(url: str) -> None:
    """The numbers that echo tells, in vLLM's form, whatever is asked of the output."""
    body: Any = {"prompt": TEXT, "max_tokens": 2, "temperature": 0}
    echoed = post(url, "/v1/completions", **body, echo=True, logprobs=3)["choices"][0]["logprobs"]
    for more in ({}, {"logprobs": 1}):
        (choice,) = post(url, "/v1/completions", **body, **more, prompt_logprobs=3)["choices"]
        assert not choice["text"].startswith(TEXT)
        assert (choice["logprobs"] is None) == (not more)
        if more:
            assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"])
        assert choice["prompt_logprobs"][0] is None
        for at, told in enumerate(choice["prompt_logprobs"][1:], 1):
            assert {one["decoded_token"]: pytest.approx(one["logprob"], abs=1e-4)
                    for one in told.values()} == echoed["top_logprobs"][at]  # fmt: skip
            assert [one["rank"] for one in told.values() if one["rank"]] in ([1, 2, 3], [2, 3])
    chat = post(url, "/v1/chat/completions", messages=CHAT, max_tokens=1, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert [len(told) for told in chat["prompt_logprobs"][1:]] == [1] * 6


def test_ends_stops_and_bans(url: str, expected: Any) -> None:
    """As the engine's own tests have them, by the names of vLLM."""
    body: Any = {"prompt": TEXT, "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    ids, text = expected.token_ids, expected.text
    end = ids[9]
    at = ids.index(end)

    def ask(**given: Any) -> tuple[str, list[int], str]:
        (whole,) = post(url, "/v1/completions", **body, **given)["choices"]
        events = read_events(url, "/v1/completions", **body, **given)
        parts = [event["choices"][0] for event in events]
        assert "".join(part["text"] for part in parts) == whole["text"]
        assert [t for part in parts for t in part.get("token_ids", [])] == whole["token_ids"]
        return whole["text"], whole["token_ids"], whole["finish_reason"]

    told, shown, reason = ask(stop_token_ids=[end], ignore_eos=True)
    assert (shown, reason) == (ids[: at + 1], "stop")
    kept = ask(stop_token_ids=[end], ignore_eos=True, include_stop_str_in_output=True)
    assert kept[0].startswith(told)
    assert text.startswith(kept[0])
    assert kept[0] != told
    late = ask(stop_token_ids=[end], ignore_eos=True, min_tokens=at + 5)
    assert len(late[1]) >= at + 5
    word = text[8:10]
    whole = ask(stop=[word], ignore_eos=True, include_stop_str_in_output=True)[0]
    assert whole == text[: text.index(word) + 2]
    assert word not in ask(bad_words=[word[0], word[1], word], ignore_eos=True)[0]
    allowed = [*range(40, 60), EOS_ID]
    assert set(ask(allowed_token_ids=allowed)[1]) <= set(allowed)
    bias = {"logit_bias": {str(EOS_ID): 100}}
    assert ask(**bias, min_tokens=3)[1][3] == EOS_ID
    special = {"allowed_token_ids": [1, EOS_ID], "logit_bias": {"1": 50}}
    assert ask(**special, skip_special_tokens=False)[0].startswith("<s><s>")
    spaced = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert ask(**bias, **spaced)[0] == ""
    assert ask(**bias, **spaced, include_stop_str_in_output=True)[0] == EOS


def test_an_end_token_is_told_of(folder: Path, url: str) -> None:
    """It counts as output, and so it has its id and log-probability, and no text."""
    body: Any = {"prompt": TEXT, "max_tokens": 40, "logit_bias": {str(EOS_ID): 100}, "logprobs": 1}
    body |= {"return_token_ids": True, "temperature": 0}
    for answer in (post(url, "/v1/completions", **body), None):
        events = [answer] if answer else read_events(url, "/v1/completions", **body)
        told = [c for event in events for c in event["choices"] if c.get("token_ids")]
        assert [c["token_ids"] for c in told] == [[EOS_ID]]
        assert (told[0]["text"], told[0]["logprobs"]["tokens"]) == ("", [EOS])
        assert told[0]["logprobs"]["text_offset"] == [0]
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        assert answer is None or answer["usage"]["completion_tokens"] == 1
    (part,) = post(
        url, "/v1/chat/completions", messages=CHAT, logprobs=True, logit_bias={str(EOS_ID): 100},
        temperature=0,
    )["choices"][0]["logprobs"]["content"]  # fmt: skip
    assert part["token"] == EOS


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = sorted({*list_rules(CompletionBody), *list_rules(ChatBody)})
BODIES = (
    st.dictionaries(st.sampled_from(NAMES), ANY_JSON, max_size=4).map(
        lambda body: json.dumps({"prompt": "x", "max_tokens": 2, **body}).encode()
    )
    | ANY_JSON.map(lambda body: json.dumps(body).encode())
    | st.binary(max_size=40)
    | st.sampled_from(
        [
            b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt": "x", "n": NaN}',
            b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}", b'{"prompt": "x", "prompt": "y"}',
            b'{"messages": [{"role": "user", "content": "\\udfff"}]}', b"\xff\xfe{}", b"",
            b'{"prompt": "\\u0000"}', b'{"prompt": {}}', b'{"stop": [[]], "prompt": "x"}',
        ]
    )
)  # fmt: skip


@hypothesis.settings(max_examples=80)
@hypothesis.given(
    BODIES, st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
)
def test_whatever_is_sent_gets_an_answer_in_openais_form(url: str, body: bytes, path: str) -> None:
    answer = CLIENT.post(url + path, content=body, headers={"Content-Type": "application/json"})
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        error = answer.json()["error"]
        assert error["message"]
        assert "Traceback" not in answer.text
    assert CLIENT.get(f"{url}/health").status_code == 200


def test_limits_of_body_header_and_kind(url: str) -> None:
    big = b'{"prompt": "' + b"x" * (5 << 20) + b'"}'
    kind = {"Content-Type": "application/json"}

    def in_pieces() -> Iterator[bytes]:
        for at in range(0, len(big), 1 << 16):
            yield big[at : at + (1 << 16)]

    for content in (big, in_pieces()):
        try:
            answer = CLIENT.post(f"{url}/v1/completions", content=content, headers=kind)
        except httpx.TransportError:  # refused while it still was sending
            continue
        assert answer.status_code == 413
        assert "more than 4194304 bytes" in answer.json()["error"]["message"]
    answer = CLIENT.get(f"{url}/version", headers={"X-Long": "x" * 70_000})
    assert answer.status_code == 431
    answer = CLIENT.post(
        f"{url}/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}
    )
    assert answer.status_code == 415
    answer = CLIENT.post(f"{url}/v1/completions", content=b'{"prompt": "x"}')
    assert answer.status_code == 415, "as a page of another site can send it"
    packed = {**kind, "Content-Encoding": "gzip"}
    assert CLIENT.post(f"{url}/v1/completions", content=b"", headers=packed).status_code == 415
    for method in ("GET", "HEAD", "OPTIONS", "PUT", "DELETE"):
        answer = CLIENT.request(method, f"{url}/v1/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "does not take DELETE, only POST" in answer.json()["error"]["message"]
    assert CLIENT.head(f"{url}/health").status_code == 200
    for path in ("/nowhere", "/v1/completions/", "//v1/completions"):
        answer = CLIENT.post(url + path, json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert CLIENT.get(f"{url}/version", headers={"Host": "evil.example"}).status_code == 403
    for host in ("localhost:80", "127.0.0.1", "[::1]:9"):
        assert CLIENT.get(f"{url}/version", headers={"Host": host}).status_code == 200


def talk(url: str, data: bytes, wait: float = 30) -> bytes:
    """What the server answers to these bytes until it ends the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait) as connection:
        with contextlib.suppress(ConnectionError):  # it ends while more is sent
            connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                answer += piece
    return answer


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
# What is sent, and the status that is its answer.
RAW: list[tuple[bytes, int]] = [
    (b"\x16\x03\x01 hello\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\n\r\n", 400),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 300_000 + b"\r\n\r\n", 431),
    (POST + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\n", 400),
    (POST + b"Content-Length: -5\r\n\r\n", 400),
    (POST + b"Transfer-Encoding: gzip\r\n\r\n", 501),
    (POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n\r\n", 400),
    # Answered for its host before its body is looked at.
    (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n\r\n", 400),
    (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade, close"
        b"\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\n\r\n",
        200,
    ),
]


@pytest.mark.parametrize(("sent", "status"), RAW)
def test_what_is_not_http_is_an_error_in_openais_form(
    url: str, sent: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    head, _, body = talk(url, sent).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    if status != 200:
        assert json.loads(body)["error"].keys() == {"message", "type", "param", "code"}
    assert CLIENT.get(f"{url}/health").status_code == 200
    assert "Exception in ASGI application" not in caplog.text


def test_health_is_answered_as_all_else_is(
    served: tuple[EngineServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in several packets, after another request, and with a body that nobody reads."""
    server, url = served
    asking = f"GET /health HTTP/1.1\r\nHost: {url.removeprefix('http://')}\r\n".encode()
    last = b"Connection: close\r\nContent-Length: 2\r\n\r\n{}"
    answer = talk(url, (asking + b"\r\n") * 2 + asking + last)
    assert answer.count(b" 200 OK") == answer.count(b'\r\n\r\n{"status":"ok"}') == 3
    elsewhere = b"GET /health HTTP/1.1\r\nHost: evil.example\r\n"
    assert b" 403 " in talk(url, elsewhere + last)
    monkeypatch.setattr(server.scheduler, "_is_draining", True)
    assert b" 503 " in talk(url, asking + last)


def test_a_client_that_sends_no_more_gets_its_answer(url: str, expected: Any) -> None:
    """Whole and streamed; what tells it from one that has left is passed over by HTTP clients."""
    body: Any = {"prompt": TEXT, "max_tokens": 40, **GREEDY}
    for stream in (False, True):
        bodies = [{**body, "stream": stream}, {**body, "stream": not stream}]
        for text in ask_and_send_no_more(url, "/v1/completions", *bodies)[:: -1 if stream else 1]:
            if text.startswith("{"):
                assert json.loads(text)["choices"][0]["text"] == expected.text
            else:
                assert text.endswith("data: [DONE]\n\n")


def test_answers_have_a_request_id(url: str) -> None:
    ids = {CLIENT.get(f"{url}/version").headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    for path, status in (("/version", 200), ("/nowhere", 404)):
        answer = CLIENT.get(url + path, headers={"X-Request-Id": "mine-1"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine-1")
    answer = CLIENT.get(f"{url}/version", headers={"X-Request-Id": "a" * 999})
    assert answer.headers["x-request-id"].startswith("req_")


def test_connections_that_stall_are_ended(
    served: tuple[EngineServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers that do not come, a body that does not, and an answer that nobody takes."""
    server, url = served
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    assert talk(url, b"") == talk(url, b"GET /health HTTP/1.1\r\nHost: loc") == b""
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    assert b" 408 " in talk(url, POST + b"Connection: close\r\nContent-Length: 99\r\n\r\n{")
    monkeypatch.setattr(protocol, "STALL_SECONDS", 0.2)
    connections = server._http.server_state.connections
    wait_until(lambda: not connections)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3000)
        wait_until(lambda: len(connections) == 1)
        wait_until(lambda: not connections)
    assert CLIENT.get(f"{url}/health").status_code == 200


def test_more_bodies_than_there_is_memory_for(folder: Path) -> None:
    """What is being sent by all together has a bound; each alone is below the limit."""
    with serve_here(folder, max_body_mb=0.01) as (_, url):
        limit = int(0.01 * 2**20)
        host, port = url.removeprefix("http://").split(":")
        head = POST + f"Content-Length: {limit}\r\n\r\n".encode()
        with contextlib.ExitStack() as stack:
            for _ in range(app.MAX_BODIES + 4):
                sent = stack.enter_context(socket.create_connection((host, int(port))))
                sent.sendall(head + b" " * (limit - 1))
            statuses = set()
            for _ in range(100):
                answer = CLIENT.post(f"{url}/tokenize", json={"prompt": "x" * (limit // 2)})
                statuses.add(answer.status_code)
                if 429 in statuses:
                    break
            assert answer.status_code == 429
            assert answer.json()["error"]["type"] == "rate_limit_error"
        wait_until(lambda: CLIENT.post(f"{url}/tokenize", json={"prompt": "x"}).is_success)


# --- operation ---


def test_a_key_is_asked_for_and_never_logged(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    path = tmp_path / "key"
    path.write_text("sesame-open\n")
    with serve_here(folder, api_key_file=path) as (_, url):
        for header in (
            {},
            {"Authorization": "Bearer sesame"},
            {"Authorization": "Basic sesame-open"},
        ):
            answer = CLIENT.get(f"{url}/v1/models", headers=header)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "sesame" not in answer.text
            lack = "is not this server's" if header else "a key is needed"
            assert lack in answer.json()["error"]["message"]
        header = {"Authorization": "Bearer sesame-open"}
        assert CLIENT.get(f"{url}/v1/models", headers=header).status_code == 200
        assert CLIENT.get(f"{url}/metrics").status_code == 401
        assert CLIENT.get(f"{url}/health").status_code == 200
        assert (
            CLIENT.get(f"{url}/v1/models", headers={"Origin": "http://a", **header})
            .headers.keys()
            .isdisjoint({"access-control-allow-origin"})
        )
    assert "sesame" not in caplog.text


def test_addresses_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(**given: Any) -> ServeSettings:
        return ServeSettings(engine_dir=tmp_path, **given)

    for host in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        check_address(settings(host=host), None)
    for host in ("0.0.0.0", "::", "192.168.1.1", "example.org"):
        with pytest.raises(UsageError, match="can be reached from elsewhere, and there is no key"):
            check_address(settings(host=host), None)
        check_address(settings(host=host), "key")
        check_address(settings(host=host, allow_anonymous=True), None)
    with pytest.raises(UsageError, match="--allow-anonymous beside a key"):
        check_address(settings(allow_anonymous=True), "key")
    monkeypatch.setenv("SPECDEC_API_KEY", "from-the-environment")
    assert read_key(None) == "from-the-environment"
    path = tmp_path / "key"
    path.write_text("  from-a-file \n")
    assert read_key(path) == "from-a-file"
    for bad in ("", "two words", "schlüssel"):
        path.write_text(bad)
        with pytest.raises(SpecDecError, match="holds no key"):
            read_key(path)
    with pytest.raises(SpecDecError, match="cannot be read"):
        read_key(tmp_path / "none")


LONG = {"prompt": TEXT, "max_tokens": 250, **GREEDY}


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.02) -> None:
    step = Batch.step

    def wait(batch: Batch) -> None:
        time.sleep(seconds)
        step(batch)

    monkeypatch.setattr(Batch, "step", wait)


def count_left(url: str) -> float:
    """Requests whose clients have left."""
    text = CLIENT.get(f"{url}/metrics").text
    found = re.search(r'request_success_total{finished_reason="abort".*} (\S+)', text)
    assert found is not None
    return float(found[1])


def test_who_leaves_frees_the_row(
    served: tuple[EngineServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they asked for is not finished without them."""
    server, url = served
    slow_down(monkeypatch)
    before = count_left(url)
    body = LONG | {"stream": True, "n": 2}
    with CLIENT.stream("POST", f"{url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert server.scheduler.num_running == 2
    wait_until(lambda: server.scheduler.num_running == 0)
    assert count_left(url) == before + 2
    with pytest.raises(httpx.ReadTimeout):
        CLIENT.post(f"{url}/v1/completions", json=LONG, timeout=0.3)
    wait_until(lambda: server.scheduler.num_running == 0)
    assert count_left(url) == before + 3


def test_a_slow_reader_delays_nobody(served: tuple[EngineServer, str], expected: Any) -> None:
    """Its request ends without it, and what waits for it is no more than its own output."""
    server, url = served
    body = LONG | {"stream": True}
    with CLIENT.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        wait_until(lambda: server.scheduler.num_running == 1)
        wait_until(lambda: server.scheduler.num_running == 0)
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
    assert text.startswith(expected.text)


def test_queue_and_time_have_bounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch)
    with serve_here(folder, max_queue=1, request_timeout=1.5) as (server, url):
        assert CLIENT.post(f"{url}/v1/completions", json=LONG).status_code == 504
        wait_until(lambda: server.scheduler.num_running == 0)
        events = read_events(url, "/v1/completions", **LONG)
        assert events[-1]["error"]["code"] == "timeout"
        wait_until(lambda: server.scheduler.num_running == 0)
        answers: list[Any] = []

        def ask() -> None:
            answers.append(CLIENT.post(f"{url}/v1/completions", json=LONG, timeout=60))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) == 3, "four rows and one that waits"
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert refused[0].json()["error"]["type"] == "rate_limit_error"


def test_a_failing_step_is_a_500_and_the_server_goes_on(
    served: tuple[EngineServer, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, url = served
    step, left = Batch.step, [3, 3]

    def fail(batch: Batch) -> None:
        if left:
            left[0] -= 1
            if left[0] == 0:
                left.pop(0)
                raise RuntimeError("secret detail")
        step(batch)

    monkeypatch.setattr(Batch, "step", fail)
    answer = CLIENT.post(f"{url}/v1/completions", json=LONG)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    events = read_events(url, "/v1/completions", **LONG)
    assert events[-1]["error"]["type"] == "server_error"
    told = [record.getMessage() for record in caplog.records if record.exc_info]
    assert told == ["a step failed: RuntimeError: secret detail"] * 2, "once each, where it failed"
    monkeypatch.undo()
    post(url, "/v1/completions", prompt="x", max_tokens=2)


def test_metrics_add_up(folder: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with serve_here(folder, metrics_prefix="vllm", draft_budget="fixed") as (_, url):
        body = {"prompt": TEXT, "max_tokens": 30, "seed": 3, "n": 3, "ignore_eos": True}
        told = post(url, "/v1/completions", **body)["metrics"]["speculative_decoding"]
        post(url, "/v1/completions", prompt=TEXT, max_tokens=1, ignore_eos=True)
        alone = post(url, "/v1/completions", prompt=TEXT, max_tokens=0, echo=True)
        text = CLIENT.get(f"{url}/metrics").text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "le")}
            found[sample.name + "".join(f"{{{v}}}" for v in labels.values())] = sample.value
    assert found["vllm:spec_decode_num_drafts_total"] == told["num_spec_steps"]
    assert found["vllm:spec_decode_num_draft_tokens_total"] == told["num_draft_tokens"]
    accepted = found["vllm:spec_decode_num_accepted_tokens_total"]
    assert accepted == told["num_accepted_draft_tokens"] > 0
    places = [v for k, v in found.items() if "accepted_tokens_per_pos_total" in k]
    assert sum(places) == accepted
    assert places == sorted(places, reverse=True)
    assert alone["usage"]["completion_tokens"] == 0 == alone["metrics"]["tokens_per_second"]
    assert found["vllm:generation_tokens_total"] == 91
    assert found["vllm:request_generation_tokens_sum"] == 91
    assert found["vllm:prompt_tokens_total"] == found["vllm:prefix_cache_queries_total"]
    assert found["vllm:prefix_cache_hits_total"] > 0
    assert found["vllm:request_success_total{length}"] == 5
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_inference_time_seconds", "request_time_per_output_token_seconds",
    ):  # fmt: skip
        assert found[f"vllm:{name}_count"] == (3 if "per_output" in name else 5)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f"vllm:{name}" in found
    assert found["vllm:inter_token_latency_seconds_count"] > 3


# --- what the page shows ---


def test_trees_of_each_step_and_requests_without_drafts(url: str) -> None:
    body = {"prompt": TEXT, "max_tokens": 40, **GREEDY}
    events = read_events(url, "/v1/completions", **body, return_trees=True, return_origins=True)
    trees = [tree for e in events for c in e["choices"] for tree in c.get("trees", [])]
    told = events[-1]["metrics"]["speculative_decoding"]
    assert [len(tree["tokens"]) - 1 for tree in trees] == [0, *told["per_step_drafted"]]
    assert [len(tree["accepted"]) - 1 for tree in trees][:-1] == [0, *told["per_step_accepted"]][
        :-1
    ]
    names = [name for e in events for c in e["choices"] for name in c.get("tokens", [])]
    at = 0
    for tree in trees:
        assert tree["parents"][0] == -1
        for parent, node in zip(tree["accepted"], tree["accepted"][1:], strict=False):
            assert tree["parents"][node] == parent
            if at < len(names):
                assert names[at] == [tree["tokens"][node], "draft"]
            at += 1
        at += 1
    plain = post(url, "/v1/completions", **body, speculation=False)
    assert plain["choices"][0]["text"] == "".join(c["text"] for e in events for c in e["choices"])
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
