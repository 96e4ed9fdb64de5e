"""What pages show of commands is compared by tests/pages.py; here, that it sees a difference."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specdec.run.drafts import format_legend
from specdec.verify.report import format_report
from tests import pages
from tests.conftest import ROOT

FENCED = re.MULTILINE | re.DOTALL
LINE = "suffix on cpu (bfloat16): 60 tokens in ... s, 1.26 tokens per verify step"


@pytest.mark.parametrize(
    ("printed", "is_same"),
    [
        ("suffix on cpu (bfloat16): 60 tokens in 0.31 s, 1.26 tokens per verify step\n", True),
        ("suffix on cpu (bfloat16): 60 tokens in\n 0.31 s, 1.26 tokens per\nverify step", True),
        ("suffix on cpu (bfloat16): 60 tokens in 0.31 s, 1.02 tokens per verify step", False),
        ("suffix on cpu (bfloat16): 60 tokens in 0.31 s, 1.26 tokens", False),
        ("", False),
    ],
)
def test_counts_are_compared_and_speeds_are_not(printed: str, is_same: bool) -> None:
    assert pages.is_shown(LINE, printed) == is_same


def test_a_page_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n```\n$ NAME=ab\n$ echo $NAME \\\n    c; echo 3 s\nab c\n... s\n```\n"
    )
    assert pages.read_blocks(page.read_text())[1] == pages.Shown(
        "echo $NAME c; echo 3 s", "ab c\n... s\n"
    )
    assert pages.check_page(page) == []
    page.write_text(page.read_text().replace("ab c\n", "ab d\n") + "\n```\n$ false\n```\n")
    first, second = pages.check_page(page)
    assert "the page shows\nab d" in first
    assert "the command printed\nab c" in first
    assert "ended with an error" in second


def test_every_output_that_is_shown_is_compared() -> None:
    """Blocks of output follow commands, which the script runs, or have a test below."""
    assert ROOT / "docs/walkthrough.md" in pages.list_pages()
    loose = r"^(\w[\w ,+]* on (cpu|cuda) \(|PASS|step \d+/|Output \[Text|drafter: failed)"
    found = []
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), FENCED)
        for language, block in blocks:
            is_output = not language and not block.startswith("$ ")
            if is_output and re.search(loose, block, re.MULTILINE):
                found.append(str(page.relative_to(ROOT)))
    assert found == ["docs/audit.md", "docs/run.md", "docs/train.md", "docs/verify.md"]


def test_excerpts_of_reports_are_what_the_commands_write() -> None:
    """An excerpt's figures, put into the report, give the excerpt."""
    near_tie = {
        "prompt": 5, "run": "batch", "position": 21, "is_first": True, "near_tie": True,
        "engine_token": 103, "engine_text": "eo", "model_token": 102, "model_text": "ea",
        "margin": -0.03125, "bound": 0.204, "cause": "rounding",
    }  # fmt: skip
    sampling = {
        "verdict": "exact", "temperature": 1.0, "top_k": 4, "num_tokens": 3,
        "false_alarm_rate": 0.001, "tests": [], "same_seeds": None,
    }  # fmt: skip
    report = {
        "verdict": "near-ties", "dtype": "bfloat16", "engine_dir": "engine-bf16",
        "model_dir": "HF", "method": "redrafter", "device": "cpu", "num_tokens": 384,
        "prompts": 6, "acceptance_length": 1.03, "num_drafted_steps": 300,
        "alone": {"prompts": 2, "same": 2}, "logit_difference": 0.1, "logit_bound": 0.2,
        "near_tie_spacings": 8, "divergences": [near_tie], "wrong_ends": [],
        "wrong_readings": [], "sampling": sampling,
    }  # fmt: skip
    (excerpt,) = re.findall(r"^```\n(PASS.*?)^```", (ROOT / "docs/verify.md").read_text(), FENCED)
    assert pages.is_shown(excerpt, format_report(report))


def test_the_marks_of_drafts_are_those_of_the_page() -> None:
    page = (ROOT / "docs/run.md").read_text()
    assert format_legend(in_colour=False) in page


def test_the_training_that_is_shown_is_in_the_shipped_log() -> None:
    page = (ROOT / "docs/train.md").read_text()
    step, loss, accuracies, rate = re.findall(
        r"step (\d+)/2000  loss ([\d.]+)  top-1 ([\d. ]+?)  lr \S+  (\d+) tokens/s", page
    )[-1]
    rows = (ROOT / "examples/pycode/redrafter/pretraining_log.jsonl").read_text().splitlines()
    row = next(row for row in map(json.loads, rows) if row.get("step") == int(step))
    assert float(loss) == pytest.approx(row["mean_loss"], abs=1e-3)
    assert accuracies.split() == [f"{100 * top[0]:.1f}" for top in row["top_k_accuracy"]]
    assert int(rate) == row["tokens_per_second"]
