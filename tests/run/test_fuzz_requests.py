"""Request lines of every kind: taken and tokenized, or refused in one message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decode.prompt_requests import make_requests
from specdec.decode.requests import Request, find_problems
from specdec.errors import SpecDecError, UsageError
from specdec.run.settings import RunSettings
from specdec.text.prompts import list_prompts, read_line
from tests.conftest import make_tokenizer
from tests.convert.fuzzing import attempt, fuzz

LONG = 10**400
NUMBERS = st.sampled_from(
    [0, 1, -1, 2**31 - 1, 2**31, 2**63, 2**64 - 1, 2**64, 2**70, LONG, -LONG, 0.0, -0.0, 1e-320,
     1e308, 0.7, 1.5]
)  # fmt: skip
TEXTS = st.sampled_from(["", "a", "\x00", "\ud800", "a\udfffb", "\U0001f600", "\u2028", "\ufeff"])
ANYTHING = st.recursive(
    NUMBERS | TEXTS | st.none() | st.booleans() | st.text(max_size=8) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "a", "\ud800"]), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = (
    "prompt", "input_ids", "messages", "max_output_len", "temperature", "top_k", "top_p", "seed",
    "stop", "prmpt", "turns",
)  # fmt: skip
GOOD: dict[str, Any] = {
    "max_output_len": 4, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 1, "stop": ["x"],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(make_tokenizer(tmp_path_factory.mktemp("t")))


@st.composite
def make_entry(draw: st.DrawFn) -> dict[str, Any]:
    """A good request with some of its values, or keys, replaced."""
    sources: list[dict[str, Any]] = [{"prompt": "t a"}, {"input_ids": [3, 4, 5]}]
    source = draw(st.sampled_from(sources))
    entry: dict[str, Any] = {**source, **GOOD}
    for key in draw(st.lists(st.sampled_from([*source, *KEYS]), min_size=1, max_size=3)):
        if draw(st.booleans()):
            entry[key] = draw(ANYTHING)
        else:
            entry.pop(key, None)
    return entry


def take(line: str, tokenizer: Any) -> list[Request]:
    """What specdec-run does with a line before an engine sees it."""
    requests = make_requests([read_line("f line 1", line).prompt], RunSettings(), tokenizer)
    for request in requests:
        find_problems(request, max_input_len=50, max_seq_len=60, vocab_size=128)
    return requests


@pytest.mark.thorough
@fuzz(1000)
@given(entry=make_entry(), ascii_only=st.booleans())
def test_values(entry: dict[str, Any], ascii_only: bool, tokenizer: Any) -> None:
    line = json.dumps(entry, ensure_ascii=True)
    has_halves = "\\ud8" in line or "\\udf" in line or "\\udc" in line
    if not ascii_only and not has_halves:
        line = json.dumps(entry, ensure_ascii=False)
    requests, error = attempt(lambda: take(line, tokenizer))
    if requests is None:
        assert error is not None
        assert len(error.message) < 5000
        return
    (request,) = requests
    json.dumps(request.input_ids)
    assert all(0 <= token < 2**31 for token in request.input_ids)
    assert 0 <= request.sampling.seed < 2**64
    request.input_text.encode()
    "".join(request.stop).encode()


@fuzz(500)
@given(data=st.data())
def test_damaged_lines(data: st.DataObject, tokenizer: Any, tmp_path: Path) -> None:
    content = bytearray(json.dumps({"prompt": "t a", **GOOD}).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        content = content or bytearray(b"{")
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    settings = RunSettings()

    def work() -> list[Request]:
        return make_requests(list_prompts([], path, json=True), settings, tokenizer)

    attempt(work)


BAD = {
    "a negative token": {"input_ids": [3, -1]},
    "a token beyond every vocabulary": {"input_ids": [2**70]},
    "half of a character": {"prompt": "a\ud800"},
    "half of one in a stop word": {"prompt": "a", "stop": ["\udc00"]},
    "half of one in a message": {"messages": [{"role": "user", "content": ["\ud800"]}]},
    "a temperature of 400 digits": {"prompt": "a", "temperature": LONG},
    "a top_p of 400 digits": {"prompt": "a", "top_p": LONG},
    "a top_k of 400 digits": {"prompt": "a", "top_k": LONG},
    "an output of 400 digits": {"prompt": "a", "max_output_len": LONG},
    "a seed of 400 digits": {"prompt": "a", "seed": LONG},
    "a key with half of a character": {"prompt": "a", "\ud800": 1},
}


@pytest.mark.parametrize("name", BAD)
def test_known_bad_lines(name: str, tokenizer: Any) -> None:
    with pytest.raises(SpecDecError, match="^f line 1") as caught:
        take(json.dumps(BAD[name]), tokenizer)
    assert len(caught.value.message) < 400
    caught.value.message.encode()


@pytest.mark.parametrize("flag", ["input_text", "stop_words", "engine_dir", "tokenizer_dir"])
def test_arguments_that_are_no_text(flag: str) -> None:
    """What Python makes of bytes on the command line that are not UTF-8."""
    from specdec.command.settings import resolve_settings

    resolve: Callable[..., Any] = resolve_settings
    value: Any = "a\udcff" if flag.endswith("dir") else ("a\udcff",)
    with pytest.raises(UsageError, match="whole characters"):
        resolve(RunSettings, "run", {flag: value}, None)


def test_stdin_in_a_locale_that_lets_bytes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), "ascii", "surrogateescape")
    )
    with pytest.raises(SpecDecError, match="stdin is not UTF-8"):
        list_prompts([], Path("-"), json=True)


def test_a_tokenizer_that_cannot_decode_is_told() -> None:
    class Sentencepiece:
        eos_token_id = None

        def decode(self, ids: list[int]) -> str:
            raise IndexError("piece id is out of range.")

    line = json.dumps({"input_ids": [99]})
    with pytest.raises(SpecDecError, match=r"cannot decode input_ids \[99\]: piece id is out"):
        take(line, Sentencepiece())
