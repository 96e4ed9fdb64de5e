"""`specdec-train data` with an engine of our own instead of a server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecDecError
from specdec.measure.prompts import read_prompt_set
from specdec.text.chat import ChatFormat, Conversation
from specdec.text.prompts import read_line, read_prompts
from specdec.train.data.dialogues import DataSource, Dialogue, Row
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
                input=str(path), output=output, device="cpu", force=True,
                **{"engine_dir": folder / "engine", "tokenizer_dir": str(folder / "target")}
                | values,
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
    return str(tokenizer.decode(tokens))


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


def test_special_tokens_of_an_answer_are_kept(
    regenerate: Regenerate, folder: Path, tmp_path: Path
) -> None:
    """As <think> and <tool_call> are special in some tokenizers; the end of an answer is not it."""
    (plain,) = regenerate([{"prompt": "def add("}], completion=True)
    changed = tmp_path / "tokenizer"
    shutil.copytree(folder / "target", changed)
    document = json.loads((changed / "tokenizer.json").read_text())
    written = plain["text"].removeprefix("def add(")
    name = next(c for c in written if c in document["model"]["vocab"] and c not in "def add(")
    document["added_tokens"].append(
        {"id": document["model"]["vocab"][name], "content": name, "special": True,
         "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    )  # fmt: skip
    (changed / "tokenizer.json").write_text(json.dumps(document))
    rows = regenerate([{"prompt": "def add("}], completion=True, tokenizer_dir=str(changed))
    assert rows == [plain]


def test_rows_are_prompts_of_run_and_bench(regenerate: Regenerate, tmp_path: Path) -> None:
    """The prompt of the last answer, which is written again."""
    asked = [{"role": "system", "content": "Hm."}, {"role": "user", "content": "a?"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"id": "x", "messages": asked, "chat_template_kwargs": {"thinks": False}}
    texts = regenerate([{"prompt": "def add("}], completion=True)
    (tmp_path / "texts.jsonl").write_text(json.dumps(texts[0]) + "\n")
    rows = regenerate([row])
    (tmp_path / "out.jsonl").write_text(json.dumps(rows[0] | {"tools": tools}) + "\n")
    (line,) = read_prompts(tmp_path / "out.jsonl", "--input-file")
    assert line.prompt.messages == asked
    assert line.prompt.chat_template_kwargs == {"tools": tools, "thinks": False}
    (text,) = read_prompts(tmp_path / "texts.jsonl", "--input-file")
    assert text.prompt.text == "def add("
    del texts[0]["prompt"]  # as an older release wrote them
    (tmp_path / "texts.jsonl").write_text(json.dumps(texts[0]) + "\n")
    (prompt,) = read_prompt_set(tmp_path / "texts.jsonl")
    assert prompt.prompt.text == texts[0]["text"]
    with pytest.raises(SpecDecError, match="unknown key 'truncated'"):
        read_line("line", '{"prompt": "a", "truncated": true}')


def test_half_a_character_at_a_cut_is_no_answer(tmp_path: Path) -> None:
    row = Row(index=0, number=1, line=b'{"prompt": "a"}')
    settings = DataSettings(input="in.jsonl", output=tmp_path / "out.jsonl")
    source = DataSource(name="in.jsonl", path=tmp_path / "in.jsonl", num_rows=1, facts={})
    for is_cut, text in ((True, "so "), (False, "so \ufffd")):
        dialogue = Dialogue(row, settings, source)
        dialogue.ask()
        dialogue.add({"content": "so \ufffd"}, is_truncated=is_cut)
        assert dialogue.to_json()["messages"][-1]["content"] == text


@pytest.mark.parametrize("holds_tokenizer", [True, False])
def test_the_engine_s_own_tokenizer(
    folder: Path, regenerate: Regenerate, tmp_path: Path, holds_tokenizer: bool
) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(folder / "engine", engine)
    if holds_tokenizer:
        expected = regenerate([{"prompt": "def add("}])
        shutil.copytree(folder / "target", engine / "tokenizer", dirs_exist_ok=True)
        rows = regenerate([{"prompt": "def add("}], engine_dir=engine, tokenizer_dir=None)
        assert rows == expected
        return
    shutil.rmtree(engine / "tokenizer", ignore_errors=True)
    with pytest.raises(SpecDecError, match="the data needs a tokenizer, and the engine holds none"):
        regenerate([{"prompt": "def add("}], engine_dir=engine, tokenizer_dir=None)


def test_an_engine_for_external_drafts_answers_without(
    folder: Path, regenerate: Regenerate, tmp_path: Path
) -> None:
    flags = ["--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 4]
    engine = make_engine(tmp_path, folder / "target", optimize="none",
                         build=["--max-seq-len", 100, *flags])  # fmt: skip
    expected = regenerate([{"prompt": "def add("}])
    assert regenerate([{"prompt": "def add("}], engine_dir=engine) == expected


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
