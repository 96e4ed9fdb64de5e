"""specdec-bench --sweep: every value of an option beside plain decoding; `specdec tune` is gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecDecError, UsageError
from specdec.measure.report import format_sweep
from specdec.measure.settings import BenchSettings
from specdec.measure.sweep import list_fastest, name_combination, read_sweep, run_sweep
from tests.engines import run_cli_here


def make_settings(folder: Path, *sweep: str, **options: Any) -> BenchSettings:
    values: dict[str, Any] = {
        "engine_dir": folder / "engine", "tokenizer_dir": str(folder / "target"),
        "prompts": folder / "prompts.jsonl", "device": "cpu", "max_output_len": 8, "repeat": 1,
        "draft_budget": "fixed", "sweep": list(sweep),
    }  # fmt: skip
    return BenchSettings(**values | options)


def test_combinations(tmp_path: Path) -> None:
    settings = make_settings(
        tmp_path,
        "--eagle-tree-tokens=4,8",
        "draft_target_model_config=[2,[0],[0],False],[3,[0],[0],False]",
    )
    combinations = read_sweep(settings)
    assert len(combinations) == 4
    assert [row["eagle_tree_tokens"] for row in combinations] == [4, 4, 8, 8]
    assert combinations[1]["draft_target_model_config"] == "[3,[0],[0],False]"
    names = [name_combination(row) for row in combinations]
    assert len(set(names)) == 4
    assert not any("/" in name or " " in name for name in names)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eagle_tree_tokens", "--sweep is 'eagle_tree_tokens'"),
        ("eagle_tree_tokens=", "--sweep is 'eagle_tree_tokens='"),
        ("eagle_tree_token=4", r"no option 'eagle_tree_token' \(did you mean eagle_tree_tokens"),
        ("engine_dir=a,b", "no option 'engine_dir'"),
        ("eagle_tree_tokens=4,many", "eagle_tree_tokens: expected a whole number, got 'many'"),
    ],
)
def test_wrong_sweeps(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_sweep(make_settings(tmp_path, text))


def test_an_option_is_swept_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--sweep has draft_budget twice"):
        read_sweep(make_settings(tmp_path, "draft_budget=auto", "draft_budget=fixed"))


@pytest.mark.thorough
def test_every_value_is_measured(eagle1: Path, tmp_path: Path) -> None:
    """A value that the engine refuses stands in the table with its error, and stops no other."""
    output = tmp_path / "reports"
    settings = make_settings(
        eagle1, "eagle_tree_tokens=3,6,4000", eagle_dynamic_tree_max_top_k=3, output=output
    )
    report = run_sweep(settings)
    rows = report["sweep"]
    assert [row["options"] for row in rows] == [{"eagle_tree_tokens": n} for n in (3, 6, 4000)]
    drafted = []
    for row in rows[:2]:
        (batch,) = row["report"]["batches"]
        assert batch["texts"]["equal"] == batch["texts"]["compared"] == 5
        drafted.append(batch["acceptance"]["draft_tokens_per_step"])
        written_report = json.loads(
            (output / name_combination(row["options"]) / "report.json").read_text()
        )
        assert written_report == json.loads(json.dumps(row["report"]))
    assert drafted[0] < drafted[1]
    assert "4000" in rows[2]["error"]
    assert rows[2]["hint"]
    text = format_sweep(report)
    assert "eagle_tree_tokens 6" in text
    assert "best at batch size 1: " in text
    assert rows[2]["error"] in text


def test_nothing_can_be_measured(eagle1: Path) -> None:
    settings = make_settings(eagle1, "eagle_tree_tokens=4000", eagle_dynamic_tree_max_top_k=3)
    with pytest.raises(SpecDecError, match="no value of --sweep can be measured: .*4000"):
        run_sweep(settings)


def test_best_of_each_batch() -> None:
    def make_row(number: int, *ratios: float) -> dict[str, Any]:
        batches = [
            {"batch_size": size, "ratio": {"median": ratio}}
            for size, ratio in zip((1, 4), ratios, strict=True)
        ]
        return {"options": {"draft_len": number}, "report": {"batches": batches}}

    rows = list_fastest([make_row(2, 1.2, 0.9), make_row(4, 1.5, 0.8)])
    assert rows == [
        {"batch_size": 1, "ratio": 1.5, "options": {"draft_len": 4}, "flags": ["--draft-len 4"]},
        {"batch_size": 4, "ratio": 1.0, "options": None, "flags": []},
    ]


def test_the_command(eagle1: Path) -> None:
    process = run_cli_here(
        "bench", "--engine-dir", eagle1 / "engine", "--tokenizer-dir", eagle1 / "target",
        "--prompts", eagle1 / "prompts.jsonl", "--sweep", "draft_budget=fixed,auto",
        "--max-output-len", 4, "--repeat", 1, "--json",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert [row["options"]["draft_budget"] for row in report["sweep"]] == ["fixed", "auto"]
    assert report["best"][0]["batch_size"] == 1


def test_tune_says_where_its_work_is_done() -> None:
    process = run_cli_here("tune", "--checkpoint-dir", "anywhere")
    assert process.returncode == 2
    assert "specdec bench --sweep OPTION=a,b,c" in process.stderr


def test_force_replaces_no_model_with_a_report(tmp_path: Path) -> None:
    """It is told before anything is measured."""
    folder = tmp_path / "reports" / "eagle_tree_tokens=6"
    folder.mkdir(parents=True)
    (folder / "model.gguf").touch()
    settings = make_settings(
        tmp_path, "eagle_tree_tokens=3,6", output=tmp_path / "reports", force=True
    )
    with pytest.raises(SpecDecError, match="eagle_tree_tokens=6 is not replaced"):
        run_sweep(settings)
