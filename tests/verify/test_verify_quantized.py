"""An int8 engine is compared with itself; how far it is from the model is told, never `exact`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.errors import SpecDecError
from specdec.verify import runner
from specdec.verify.engine import verify_engine
from specdec.verify.quantized import compare_with_plain
from specdec.verify.report import find_error, format_report
from specdec.verify.settings import VerifySettings
from tests.engines import make_engine, run_here

Report = dict[str, Any]
INT8 = ("--quantization", "int8")
HEAD = "PASS (the engine's own text: its weights are quantized)"


@pytest.fixture(scope="module")
def engine(parent: Path, drafter: Path) -> Path:
    return make_engine(
        parent, parent / "target", drafter, beams=3, length=3, optimize="none", build=INT8
    )


def verify(engine: Path, parent: Path, **flags: Any) -> Report:
    flags = {"max_output_len": 12, "num_alone": 1, **flags}
    return verify_engine(
        VerifySettings(engine_dir=engine, model_dir=str(parent / "target"), **flags)
    )


def test_a_right_engine_is_lossy(
    engine: Path, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "call_run", run_here)
    report = verify(engine, parent, max_output_len=40)
    json.dumps(report)
    assert (report["verdict"], report["quantization"]) == ("lossy", "int8")
    assert report["lossy"] is True
    assert (report["divergences"], report["wrong_ends"]) == ([], [])
    assert report["alone"] == {"prompts": 1, "same": 1}
    assert find_error(report) is None
    distance = report["distance"]
    assert distance["num_tokens"] == 6 * 40
    assert 0 < distance["mean_divergence"] < distance["largest_divergence"] < 0.1
    assert 0.9 * 240 < distance["same_choice"] <= 240
    assert distance["same_texts"] + len(distance["first_differences"]) == 6
    text = format_report(report)
    assert text.startswith(
        f"{HEAD}: {engine}: lossy\n  redrafter in float32 with int8 weights on cpu"
    )
    assert "exact" not in text
    assert f"{distance['same_choice']} of 240 tokens" in text


def change_speculative_token(arguments: Sequence[str]) -> Report:
    """specdec-run with a fault: a token of the first text is another, with speculation only."""
    report = run_here(arguments)
    if "--no-speculation" not in arguments:
        output = report["outputs"][0]
        output["output_ids"][7] = (output["output_ids"][7] + 1) % 128
    return report


def test_other_text_with_drafts_is_a_fault(
    engine: Path, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "call_run", change_speculative_token)
    report = verify(engine, parent)
    assert report["verdict"] == "differs"
    assert [(f["run"], f["position"], f["cause"]) for f in report["divergences"]] == [
        ("batch", 7, "choice"), ("alone", 7, "choice"),
    ]  # fmt: skip
    error = find_error(report)
    assert error is not None
    assert "with speculation differs from itself without: prompt 0, position 7" in error.message
    assert format_report(report).startswith(f"FAIL: {engine}: differs\n")


def test_a_wrong_end_is_found(engine: Path, parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end_too_early(arguments: Sequence[str]) -> Report:
        report = run_here(arguments)
        report["outputs"][0]["finish_reason"] = "eos"
        return report

    monkeypatch.setattr(runner, "call_run", end_too_early)
    report = verify(engine, parent, num_alone=0)
    error = find_error(report)
    assert error is not None
    assert "prompt 0 ends at token" in error.message


def test_sampling_is_refused(engine: Path, parent: Path) -> None:
    with pytest.raises(SpecDecError, match="its sampled text follows its own distribution"):
        verify(engine, parent, sampling=True)


def make_text(tokens: list[int], logits: torch.Tensor) -> tuple[str, int, Report, torch.Tensor]:
    return ("batch", 0, {"output_ids": tokens, "input_ids": [1]}, logits)


@pytest.mark.parametrize(
    ("gap", "own", "near_tie", "cause"),
    [(1e-6, 2, True, "rounding"), (0.1, 2, False, "logits"), (1e-6, 1, False, "choice")],
)
def test_kinds_of_differences(gap: float, own: int, near_tie: bool, cause: str) -> None:
    """Token 2 instead of 1, whose logit is `gap` higher; `own`: what the drafted step preferred."""
    plain_logits = torch.zeros(3, 4)
    plain_logits[:, 1], plain_logits[:, 2] = 8.0, 8.0 - gap
    logits = torch.zeros(3, 4)
    logits[:, own] = 8.0
    plain = make_text([1, 1, 1], plain_logits)
    ((found,), ends) = compare_with_plain([make_text([1, 2, 3], logits)], {0: plain}, "float32")
    assert (found.position, found.near_tie, found.cause) == (1, near_tie, cause)
    assert found.margin == pytest.approx(gap, rel=0.1)
    assert ends == []
    found_none, ends = compare_with_plain([make_text([1, 1], logits[:2])], {0: plain}, "float32")
    assert found_none == []
    assert ends == ["prompt 0 ends after 2 tokens, without drafts after 3"]
