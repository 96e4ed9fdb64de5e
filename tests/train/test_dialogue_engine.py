"""Dialogues that an engine answers: the order of turns, the rows in use, prompts and errors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import Prompt
from specdec.files.backends import BACKENDS, TORCH
from specdec.methods import METHODS
from specdec.train.data import engine as engine_module
from specdec.train.data.dialogues import DataSource, Dialogue, Row
from specdec.train.data.engine import DialogueEngine
from specdec.train.data.settings import DataSettings

SOURCE = DataSource(name="in.jsonl", num_rows=9, facts={}, path=Path("in.jsonl"))
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }} {% endfor %}>"


@dataclasses.dataclass
class FakeStream:
    """A stream that ends with the step after as many as `num_steps`."""

    prompt: Prompt
    num_steps: int
    text: str
    finish_reason: str

    @property
    def output(self) -> SimpleNamespace:
        return SimpleNamespace(text=self.text)

    def take(self) -> SimpleNamespace | None:
        self.num_steps -= 1
        if self.num_steps > 0:
            return SimpleNamespace(finish_reason=None) if self.num_steps % 2 else None
        return SimpleNamespace(finish_reason=self.finish_reason)


class FakeEngine:
    """An engine of two rows that answers a prompt with the number of its tokens.

    A token is a word. Prompts with "cut" end at the limit, those with "mute" have no text.
    """

    max_batch_size, max_seq_len, max_input_len = 2, 12, 10

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.steps: list[int] = []
        self.is_closed = False
        self.tokenizer = FakeTokenizer()

    def stream(self, prompt: Prompt) -> FakeStream:
        text = self.tokenizer.texts[tuple(prompt.token_ids or ())]
        reason = "length" if "cut" in text else "eos"
        answer = "" if "mute" in text else str(len(prompt.token_ids or ()))
        stream = FakeStream(prompt, 3 if "slow" in text else 1, answer, reason)
        self.streams.append(stream)
        return stream

    def step(self) -> None:
        self.steps.append(sum(stream.num_steps > 0 for stream in self.streams))

    def close(self) -> None:
        self.is_closed = True


class FakeTokenizer:
    """Words as tokens; special tokens are told by a zero before them."""

    chat_template = TEMPLATE

    def __init__(self) -> None:
        self.texts: dict[tuple[int, ...], str] = {}

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool
    ) -> dict[str, list[int]]:
        ids = [0] * add_special_tokens + [len(self.texts) + 1] * len(text.split())
        self.texts[tuple(ids)] = text
        return {"input_ids": ids}

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        turns = [f"{message['role'][0]}:{message['content']}" for message in messages]
        return " ".join([*turns, ">" * options["add_generation_prompt"]])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    loads: list[tuple[Any, dict[str, Any]]] = []
    fake.loads = loads  # type: ignore[attr-defined]

    def load(folder: Path, **options: Any) -> FakeEngine:
        loads.append((folder, options))
        return fake

    monkeypatch.setattr(engine_module, "Engine", SimpleNamespace(load=load))
    monkeypatch.setattr(engine_module, "find_backend", lambda folder: BACKENDS[TORCH])
    monkeypatch.setattr(
        engine_module, "read_engine_config",
        lambda folder, name: SimpleNamespace(default_method=METHODS.get(folder.name)),
    )  # fmt: skip
    return fake


def make_settings(**changes: Any) -> DataSettings:
    values: dict[str, Any] = {
        "input": "in.jsonl", "output": Path("out.jsonl"), "engine_dir": Path("suffix"),
        "tokenizer_dir": "words", "device": "cpu", "max_tokens": 5,
    }  # fmt: skip
    return DataSettings(**values | changes)


def answer(*rows: dict[str, Any], **changes: Any) -> list[tuple[int, Any]]:
    """The index of each row in the order of their ends, with its answers or its error."""
    settings = make_settings(**changes)
    dialogues = [
        Dialogue(Row(index=n, number=n + 1, line=json.dumps(row).encode()), settings, SOURCE)
        for n, row in enumerate(rows)
    ]
    ends = []
    for dialogue, error in DialogueEngine(settings).answer(dialogues):
        result: Any = error.reason if error is not None else dialogue.to_json()
        ends.append((dialogue.row.index, result))
    return ends


def ask(*words: str) -> dict[str, Any]:
    """A conversation whose user says these, and whose assistant said something else."""
    turns = [[{"role": "user", "content": w}, {"role": "assistant", "content": "?"}] for w in words]
    return {"messages": [message for pair in turns for message in pair]}


def list_answers(document: dict[str, Any]) -> list[str]:
    return [m["content"] for m in document["messages"] if m["role"] == "assistant"]


def test_turns_are_answered_one_after_another(engine: FakeEngine) -> None:
    """The prompt of a later turn holds the engine's answers: 'u:one >' has two tokens."""
    ((index, document),) = answer(ask("one", "two words"))
    assert index == 0
    assert list_answers(document) == ["2", "5"]
    texts = [engine.tokenizer.texts[tuple(s.prompt.token_ids or ())] for s in engine.streams]
    assert texts == ["u:one >", "u:one a:2 u:two words >"]


def test_no_more_dialogues_than_rows(engine: FakeEngine) -> None:
    """A row that is free is taken by the next dialogue at once; quick ones end first."""
    ends = answer(ask("slow"), ask("b", "b2"), ask("c"), ask("d"))
    assert [index for index, _ in ends] == [1, 0, 2, 3]
    assert engine.steps == [2, 2, 2, 1], "two at a time, while there are two"


def test_prompts_have_the_options(engine: FakeEngine) -> None:
    """Of each row its own seed, and no more tokens than the engine has positions."""
    answer(ask("a"), ask("b c d e f g"), temperature=0.5, top_p=0.9, seed=100, max_tokens=7)
    first, second = (stream.prompt for stream in engine.streams)
    assert (first.max_output_len, second.max_output_len) == (7, 12 - 7)
    assert (first.seed, second.seed) == (100, 101)
    assert (first.temperature, first.top_p) == (0.5, 0.9)
    assert first.skip_special_tokens is first.spaces_between_special_tokens is False


def test_completions_have_special_tokens_and_no_template(engine: FakeEngine) -> None:
    ((_, document),) = answer({"prompt": "def add"}, completion=True)
    assert document["text"] == "def add3"
    (stream,) = engine.streams
    assert list(stream.prompt.token_ids or ())[:1] == [0]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("mute", "the answer is empty"),
        ("x " * 10, "turn 1 asks with 11 tokens, the engine's max_input_len is 10 and its"
         " max_seq_len 12"),
    ],
)  # fmt: skip
def test_a_row_fails_alone(words: str, reason: str, engine: FakeEngine) -> None:
    ends = dict(answer(ask(words), ask("b")))
    assert ends[0] == reason
    assert list_answers(ends[1]) == ["2"]


def test_the_longest_prompt(engine: FakeEngine) -> None:
    """Ten tokens of input; of the engine's positions one at least is left to answer."""
    answer(ask("x " * 9))
    (stream,) = engine.streams
    assert stream.prompt.max_output_len == 2
    engine.max_seq_len = 11
    answer(ask("x " * 9))
    assert engine.streams[-1].prompt.max_output_len == 1
    engine.max_seq_len = 10
    ((_, reason),) = answer(ask("x " * 9))
    assert reason == (
        "turn 1 asks with 10 tokens, the engine's max_input_len is 10 and its max_seq_len 10"
    )


def test_an_answer_at_the_limit_ends_the_dialogue(engine: FakeEngine) -> None:
    ((_, document),) = answer(ask("cut", "never asked"))
    assert list_answers(document) == ["2"]
    assert document["truncated"]


@pytest.mark.parametrize(
    ("name", "speculates"), [("suffix", True), ("draft_target", False), ("plain", True)]
)
def test_an_engine_that_awaits_drafts_decodes_without(
    name: str, speculates: bool, engine: Any
) -> None:
    opened = DialogueEngine(make_settings(engine_dir=Path(name)))
    assert engine.loads == [
        (Path(name), {"tokenizer": "words", "device": "cpu", "speculation": speculates})
    ]
    opened.close()
    assert engine.is_closed


def test_a_template_s_own_refusal_is_the_row_s(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise ValueError("roles must alternate")

    monkeypatch.setattr(engine.tokenizer, "apply_chat_template", refuse)
    ((_, reason),) = answer(ask("a"))
    assert "roles must alternate" in reason
