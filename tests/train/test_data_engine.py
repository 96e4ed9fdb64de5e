"""`specdec-train data` with an engine of our own instead of a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.chat import ChatFormat, Conversation
from specdec.errors import SpecDecError
from specdec.train.data.dialogues import Dialogue
from specdec.train.data.pipeline import regenerate_data
from specdec.train.data.settings import DataSettings
from tests.conftest import make_llama, make_tokenizer
from tests.engines import continue_greedily, make_engine

LIMIT = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer and an engine that has room for 100 tokens."""
    parent = tmp_path_factory.mktemp("engine")
    make_tokenizer(make_llama(parent, seed=3))
    build = ["--max-seq-len", 100]
    make_engine(parent, parent / "target", optimize="none", build=build).rename(parent / "engine")
    return parent


Regenerate = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def regenerate(folder: Path, tmp_path: Path) -> Regenerate:
    def run(rows: list[dict[str, Any]], **flags: Any) -> list[dict[str, Any]]:
        path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        values: dict[str, Any] = {"max_tokens": LIMIT, **flags}
        regenerate_data(
            DataSettings(
                input=str(path), output=output, engine_dir=folder / "engine",
                tokenizer_dir=str(folder / "target"), device="cpu", force=True, **values,
            )
        )  # fmt: skip
        return [json.loads(line) for line in output.read_text().splitlines()]

    return run


@pytest.fixture(scope="module")
def target(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    return model, AutoTokenizer.from_pretrained(folder / "target")


def answer_by_transformers(target: tuple[Any, Any], text: str) -> str:
    """Greedy text; a model of random weights does not stop by itself."""
    model, tokenizer = target
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    (tokens,) = continue_greedily(model, [prompt], LIMIT)
    assert tokenizer.eos_token_id not in tokens, "choose another text"
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def test_completions_are_the_targets(regenerate: Regenerate, target: tuple[Any, Any]) -> None:
    """More rows than the engine decodes at once."""
    texts = ["def add(", "one two", "x = 7", *"abcdefg"]
    rows = regenerate([{"prompt": text} for text in texts], completion=True)
    assert [row["text"] for row in rows] == [t + answer_by_transformers(target, t) for t in texts]


def test_conversations_go_on_from_the_new_answers(
    regenerate: Regenerate, target: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that ends before the limit is followed by the next turn; here each is cut."""
    add = Dialogue.add
    monkeypatch.setattr(
        Dialogue, "add", lambda self, answer, **_: add(self, answer, is_truncated=False)
    )
    turns = [{"role": "user", "content": "a?"}, {"role": "user", "content": "b c"}]
    old = {"role": "assistant", "content": "old"}
    rows = regenerate([{"messages": [turns[0], old, turns[1]]}, {"prompt": "alone"}])
    expected: list[dict[str, str]] = []
    for turn in turns:
        expected.append(turn)
        text = ChatFormat(target[1]).render(Conversation(expected), ask=True)
        answer = answer_by_transformers(target, text)
        expected.append({"role": "assistant", "content": answer})
    assert rows[0] == {"index": 0, "messages": expected}
    assert rows[1]["messages"][0] == {"role": "user", "content": "alone"}


def test_seeds_and_cut_answers(regenerate: Regenerate) -> None:
    """Equal seeds give equal answers, the rows' differ."""
    rows = [{"prompt": "same"}] * 4
    first, again, other = (
        regenerate(rows, completion=True, temperature=1.0, seed=seed) for seed in (1, 1, 9)
    )
    assert first == again
    assert first != other
    assert len({row["text"] for row in first}) > 1
    assert [len(row["text"]) > 0 for row in first if row.get("truncated")] == [True] * 3


def test_rows_that_the_engine_has_no_room_for(regenerate: Regenerate, tmp_path: Path) -> None:
    """Alone of the call's rows; and an answer gets what room there is."""
    rows = [{"prompt": "x " * 200}, {"prompt": "y"}, {"prompt": " ".join("abcdefgh" * 6)[:96]}]
    out = regenerate(rows, completion=True, allow_failures=True)
    assert [row["index"] for row in out] == [1, 2]
    failed = json.loads((tmp_path / "out.failed.jsonl").read_text())
    assert failed["index"] == 0
    assert "the engine's max_input_len is 99 and its max_seq_len 100" in failed["reason"]


def test_an_absent_engine(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("a\n")
    settings = DataSettings(
        input=str(path), output=tmp_path / "out.jsonl", engine_dir=tmp_path / "absent",
        tokenizer_dir=str(folder / "target"),
    )  # fmt: skip
    with pytest.raises(SpecDecError, match="absent does not exist"):
        regenerate_data(settings)
    assert [p.name for p in tmp_path.iterdir()] == ["in.txt"]
