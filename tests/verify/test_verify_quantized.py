"""An int8 engine is compared with itself; how far it is from the model is told, never `exact`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.decode.outputs import Output
from specdec.errors import SpecDecError
from specdec.verify.engine import verify_engine
from specdec.verify.greedy import Text
from specdec.verify.quantized import compare_with_plain
from specdec.verify.report import find_error, format_report
from specdec.verify.settings import VerifySettings
from tests.convert.quantized import CASES, make_quantized
from tests.engines import make_engine
from tests.verify.test_verify_engine import break_outputs, replace_tokens

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


@pytest.mark.parametrize("name", ["fp8-channel", "compressed-nvfp4"])
def test_a_model_that_rounds_its_inputs_is_refused(name: str, tmp_path: Path) -> None:
    """transformers rounds them too, or fails; the engine's right text was called wrong."""
    folder, _ = make_quantized(tmp_path, CASES[name])
    engine = make_engine(tmp_path, folder, optimize="none", convert=("--dequantize",))
    with pytest.raises(SpecDecError, match="transformers rounds the inputs of its linears") as info:
        verify_engine(VerifySettings(engine_dir=engine, model_dir=str(folder)))
    assert "unquantized model" in str(info.value.hint)


@pytest.mark.thorough
def test_a_right_engine_is_lossy(engine: Path, parent: Path) -> None:
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


def change_a_token(output: Output, index: int) -> Output:
    tokens = list(output.token_ids)
    tokens[7] = (tokens[7] + 1) % 128
    return output if index else replace_tokens(output, tokens)


@pytest.mark.parametrize(
    ("change", "found", "fact"),
    [
        (change_a_token, [("batch", 7, "choice"), ("alone", 7, "choice")],
         "with speculation differs from itself without: prompt 0, position 7"),
        (lambda r, at: r if at else dataclasses.replace(r, finish_reason="eos"), [],
         "prompt 0 ends at token"),
    ],
)  # fmt: skip
def test_other_text_or_another_end_with_drafts_is_a_fault(
    change: Callable[[Output, int], Output], found: list[Any], fact: str, engine: Path,
    parent: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    break_outputs(monkeypatch, change)
    report = verify(engine, parent)
    assert report["verdict"] == "differs"
    assert [(f["run"], f["position"], f["cause"]) for f in report["divergences"]] == found
    error = find_error(report)
    assert error is not None
    assert fact in error.message
    assert format_report(report).startswith(f"FAIL: {engine}: differs\n")


def test_sampling_is_refused(engine: Path, parent: Path) -> None:
    with pytest.raises(SpecDecError, match="its sampled text follows its own distribution"):
        verify(engine, parent, sampling=True)


def make_text(tokens: list[int], logits: torch.Tensor) -> Text:
    return Text(run="batch", prompt=0, input_ids=[1], output_ids=tokens, logits=logits)


@pytest.mark.parametrize(
    ("gap", "own", "near_tie", "cause"),
    [(1e-6, 2, True, "rounding"), (0.1, 2, False, "logits"), (1e-6, 1, False, "choice")],
)
def test_kinds_of_differences(gap: float, own: int, near_tie: bool, cause: str) -> None:
    """Token 2 instead of 1, whose logit is `gap` higher; `own`: what the drafted step preferred."""
    plain_logits = torch.zeros(3, 4)
    plain_logits[:, 1], plain_logits[:, 2] = 8.0, 8.0 - gap
    logits = torch.zeros(3, 4)
    logits[0, 1] = logits[1:, own] = 8.0
    plain = make_text([1, 1, 1], plain_logits)
    ((found,), told) = compare_with_plain([make_text([1, 2, 3], logits)], [plain], "float32")
    assert (found.position, found.near_tie, found.cause) == (1, near_tie, cause)
    assert found.margin == pytest.approx(gap, rel=0.1)
    assert told["wrong_ends"] == []
    short = make_text([1, 1], plain_logits[:2])
    found_none, told = compare_with_plain([short], [plain], "float32")
    assert found_none == []
    assert told["wrong_ends"] == ["prompt 0 ends after 2 tokens, without drafts after 3"]
