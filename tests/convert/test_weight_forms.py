"""Form of a target's weights: chosen once, by the folder and the flags."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.convert.hf import GgufFolder, HfFolder
from specdec.convert.settings import ConvertSettings
from specdec.convert.target import PLANNERS, WeightForm, choose_form
from specdec.errors import SpecDecError
from specdec.files.tensor_file import TensorInfo

SCHEME: Any = SimpleNamespace(description="FP8")


def choose(kind: str, **flags: Any) -> WeightForm:
    """Choose the form for a folder without files: a plain or quantized one, or a GGUF file."""
    folder = object.__new__(GgufFolder if kind == "gguf" else HfFolder)
    folder.path, folder.tensors = Path("model"), {"a.weight": TensorInfo("bfloat16", (2, 2))}
    folder.config = {"quantization_config": {"quant_method": "mxfp4"}} if kind == "mxfp4" else {}
    settings = ConvertSettings(output_dir=Path("out"), model_dir="model", **flags)
    return choose_form(settings, folder, SCHEME if kind == "quantized" else None)


@pytest.mark.parametrize(
    ("kind", "flags", "form"),
    [
        ("plain", {}, WeightForm.PLAIN),
        ("plain", {"lora_dir": Path("adapter")}, WeightForm.PLAIN),
        ("plain", {"quantization": "fp8"}, WeightForm.ROUNDED),
        ("quantized", {}, WeightForm.STORED),
        ("quantized", {"dequantize": True}, WeightForm.PLAIN),
        ("gguf", {}, WeightForm.BLOCKS),
        ("mxfp4", {}, WeightForm.BLOCKS),
        ("mxfp4", {"dequantize": True}, WeightForm.PLAIN),
        ("gguf", {"dequantize": True}, WeightForm.PLAIN),
        ("gguf", {"lora_dir": Path("adapter")}, WeightForm.PLAIN),
        ("gguf", {"quantization": "fp8"}, WeightForm.ROUNDED),
    ],
)
def test_form_by_folder_and_flags(kind: str, flags: dict[str, Any], form: WeightForm) -> None:
    assert choose(kind, **flags) is form


@pytest.mark.parametrize(
    ("kind", "flags", "words"),
    [
        ("plain", {"dequantize": True}, "--dequantize has no effect"),
        ("quantized", {"quantization": "fp8"}, "is quantized already"),
    ],
)
def test_flags_that_do_not_suit_the_folder(kind: str, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecDecError, match=words):
        choose(kind, **flags)


def test_every_form_has_a_planner() -> None:
    assert PLANNERS.keys() == {*WeightForm}
