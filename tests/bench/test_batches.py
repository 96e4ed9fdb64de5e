"""benchmarks/batches.py with tiny models: engines, turns, the table and the chart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import batches, drafters
from benchmarks.side_by_side import models
from tests.conftest import (
    make_dflash_drafter,
    make_drafter,
    make_eagle_drafter,
    make_llama,
    make_medusa_heads,
    make_tokenizer,
)
from tests.costs import make_costs
from tests.engines import call


@pytest.mark.thorough
def test_all_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_llama(tmp_path, seed=3, dtype="bfloat16")
    make_tokenizer(target)
    draft = tmp_path / "draft"
    shutil.copytree(target, draft)
    redrafter = make_drafter(tmp_path, exit_dim=80, seed=5)
    make_eagle_drafter(tmp_path, version=3, draft_vocab=70, own_embedding=False, name="eagle3")
    make_eagle_drafter(tmp_path)
    make_medusa_heads(tmp_path, name="medusa")
    make_dflash_drafter(tmp_path, target_layers=2, aux_layers=(0,))
    prompts = ["x x x", "def add(a, b): return a + b", "class Stack: pass", "import os", "x = 1"]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in prompts)
    )
    paths = models.Models(tmp_path / "models", target, redrafter, draft)
    monkeypatch.setattr(batches, "PYCODE", tmp_path)
    monkeypatch.setattr(models, "prepare_models", lambda *_: paths)
    built: list[str] = []

    def call_here(stage: str, words: Any) -> None:
        built.append(stage)
        call(stage, *words)

    monkeypatch.setattr(models, "call_stage", call_here)
    few = True

    def choose(engine_dir: Path, lines: list[str], max_output_len: int) -> list[str]:
        assert (engine_dir.name, max_output_len) == ("draft-target", 64)
        return [line for line in lines if "x x x" not in line][few:]

    monkeypatch.setattr(batches, "choose", choose)
    # The first table is measured, which takes up to three seconds; the others are made.
    measure_costs = drafters.measure_costs
    tables: list[Any] = []

    def measure_once(bench: Any, groups: Any) -> Any:
        tables.append(make_costs(len(groups)) if tables else measure_costs(bench, groups))
        return tables[-1]

    monkeypatch.setattr(drafters, "measure_costs", measure_once)
    output_dir = tmp_path / "out"
    words = ["--size", "pycode", "--batch-sizes", "1,2", "--max-output-len", "6",
             "--folder", str(tmp_path), "--output-dir", str(output_dir)]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["batches.py", *words, "--prepare"])
    batches.main()
    assert built == ["convert", "build"] * 7
    assert not output_dir.exists()
    assert not tables
    monkeypatch.setattr("sys.argv", ["batches.py", *words])
    with pytest.raises(SystemExit, match="3 of 5 texts do not loop, 4 are needed"):
        batches.main()
    few = False
    batches.main()
    assert len(built) == 14, "engines that are there are used"
    report = json.loads((output_dir / "batches-pycode.json").read_text())
    labels = ["suffix of 8", "prompt lookup of 8", "lookahead [4,4,4]", "draft model, 8",
              "draft model, tree of 8", "suffix, else draft model", "ReDrafter 1 x 5", "EAGLE-3",
              "EAGLE-1", "Medusa", "DFlash"]  # fmt: skip
    expected = [label + mark for label in labels for mark in ("", ", budget auto")]
    expected.remove("draft model, 8, budget auto")  # that is the tree's
    assert list(report["methods"]) == expected
    for rows in report["methods"].values():
        assert [row["batch_size"] for row in rows] == [1, 2]
        assert all(row["texts"] == {"compared": 4, "equal": 4} for row in rows)
        assert all(row["ratio"]["median"] > 0 for row in rows)
    assert (output_dir / "batches.png").read_bytes().startswith(b"\x89PNG")
    costs = capsys.readouterr().out.split("| with 1 at once | ")[1]
    assert [line.split(" | ")[0].removeprefix("| ") for line in costs.splitlines()[2:]] == expected
    row = report["methods"]["draft model, 8"][0]
    cells = [
        f"{row['acceptance']['acceptance_length']:.2f}",
        f"{row['acceptance']['draft_tokens_per_step']:.1f}",
        *(f"{row['step_ms'][phase]:.1f}" for phase in ("draft", "verify")),
    ]
    assert f"| draft model, 8 | {' | '.join(cells)} | " in costs
    monkeypatch.setattr(
        "sys.argv", ["batches.py", *words, "--only", "EAGLE-1, budget", "lookahead"]
    )
    batches.main()
    report = json.loads((output_dir / "batches-pycode.json").read_text())
    labels_of_two = [
        label for label in expected if label.startswith(("lookahead", "EAGLE-1, budget"))
    ]
    assert list(report["methods"]) == labels_of_two
    drafter = make_eagle_drafter(tmp_path, seed=9, name="another")
    monkeypatch.setattr("sys.argv", ["batches.py", *words, "--more", f"eagle={drafter}"])
    with pytest.raises(SystemExit, match=r"--more eagle=.*: wanted is METHOD-NAME=FOLDER"):
        batches.main()
    monkeypatch.setattr(
        "sys.argv", ["batches.py", *words, "--only", "one-", "--more", f"eagle-one-more={drafter}"]
    )
    batches.main()
    report = json.loads((output_dir / "batches-pycode.json").read_text())
    assert list(report["methods"]) == ["eagle-one-more", "eagle-one-more, budget auto"]
    assert len(built) == 16
