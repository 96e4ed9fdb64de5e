"""The demo says what was measured, also where speculation loses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.pycode import demo

MODEL = demo.Model("model", "drafter", "float32", num_prompts=2, max_output_len=3)


def make_figures(plain: Sequence[float], **others: Sequence[float]) -> dict[str, demo.Figures]:
    ways = {demo.PLAIN: plain, **others}
    return {name: demo.Figures(speeds=list(speeds)) for name, speeds in ways.items()}


def test_the_conclusion_is_measured() -> None:
    found = make_figures([10, 11, 9], lookup=[30, 25, 5], drafts=[9, 9, 9])
    assert "2.5 times as fast with lookup" in demo.conclude(found)
    assert "Slower than plain decoding here: drafts" in demo.conclude(found)
    lost = demo.conclude(make_figures([10.0], lookup=[9.9], drafts=[1.0]))
    assert "No method was faster" in lost


def test_the_table_shows_medians_and_spread() -> None:
    table = demo.format_figures("Small", make_figures([10, 11, 9], lookup=[30, 25, 5]))
    assert "10.0 (9.0 to 11.0)" in table[2]
    assert table[3].split()[0] == "lookup"
    assert " 2.50 " in table[3]


def answer_runs(
    monkeypatch: pytest.MonkeyPatch, root: Path, texts: dict[str, list[int]]
) -> list[str]:
    """Let specdec-run answer at once; return the ways in the order in which they are called."""
    called: list[str] = []

    def call(words: Sequence[str], **_: Any) -> str:
        called.append(words[1])
        outputs = [{"output_ids": texts[words[1]]}]
        stats = {"tokens_per_second": 1.0, "acceptance_length": 1.0}
        return json.dumps({"outputs": outputs, "stats": stats})

    monkeypatch.setattr(demo, "call_program", call)
    monkeypatch.setattr(demo, "ROOT", root)
    return called


def test_ways_are_measured_by_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ways = {demo.PLAIN: ["a"], "lookup": ["b"], "drafts": ["c"]}
    called = answer_runs(monkeypatch, tmp_path, {"a": [1], "b": [1], "c": [1]})
    found = demo.measure(MODEL, ways, ["p", "q", "r"], str(tmp_path))
    assert called == ["a", "b", "c"] * demo.ROUNDS
    assert {len(figures.speeds) for figures in found.values()} == {demo.ROUNDS}
    assert len((tmp_path / "prompts.jsonl").read_text().splitlines()) == 2


def test_another_text_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer_runs(monkeypatch, tmp_path, {"a": [1], "b": [2]})
    with pytest.raises(SystemExit, match="the text of lookup differs"):
        demo.measure(MODEL, {demo.PLAIN: ["a"], "lookup": ["b"]}, ["p"], str(tmp_path))


def test_nothing_lies_on_the_disk_longer_than_it_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def call(words: Sequence[str], **_: Any) -> str:
        folder = tmp_path / words[words.index("--output-dir") + 1]
        folder.mkdir(parents=True)
        lying.append(sorted(path.name for path in tmp_path.iterdir()))
        return ""

    lying: list[list[str]] = []
    monkeypatch.setattr(demo, "call_program", call)
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    for _ in range(2):  # a second demo finds the first one's engine
        (tmp_path / "model").mkdir()
        assert demo.make_engine("one", "model", "float32", spent=["model"]) == "one-engine"
    assert lying == [["model", "one-checkpoint"], ["one-checkpoint", "one-engine"]] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["one-engine"]


def test_a_full_disk_is_told_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("specdec.files.staging.measure_free_space", lambda path: (path, 10**9))
    monkeypatch.setattr("sys.argv", ["demo.py", "--work-dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="the demo takes 1700.0 MB, .* has 1000.0 MB free\nhint: "):
        demo.main()
    assert not list(tmp_path.iterdir())
