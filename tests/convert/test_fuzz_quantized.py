"""Absurd quantized folders: planned, or refused with a fact and a remedy; nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from specdec.convert.pipeline import make_plan
from specdec.convert.settings import ConvertSettings
from tests.convert.fuzzing import attempt, fuzz
from tests.convert.quantized import CASES, Tensors, change_folder, make_quantized

NAMES = ("awq", "gptq-act-order", "compressed-asymmetric", "fp8-block", "modelopt-nvfp4")
KEYS = sorted(
    {key for case in CASES.values() for key in case.section}
    | {"meta", "dynamic", "lm_head", "num_bits", "weights", "strategy", "block_structure"}
)
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.sampled_from([2**63, 1.5, "x" * 4000])
    | st.sampled_from(["gemm", "gptq", "fp8", "awq", "modelopt", "compressed-tensors", "group"])
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=5,
)  # fmt: skip
# What may happen to a tensor.
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "lost": lambda tensor: None,
    "shorter": lambda tensor: tensor.reshape(-1)[:-1].clone(),
    "empty": lambda tensor: tensor.reshape(-1)[:0].clone(),
    "deeper": lambda tensor: tensor[None].clone(),
    "turned": lambda tensor: tensor.reshape(tensor.shape[::-1]).clone(),
    "float32": lambda tensor: tensor.float(),
    "int32": lambda tensor: tensor.float().int(),
    "int8": lambda tensor: torch.zeros_like(tensor, dtype=torch.int8),
    "ones": lambda tensor: torch.full_like(tensor.float(), -1).to(tensor.dtype),
    "half": lambda tensor: tensor[: len(tensor) // 2].clone() if tensor.dim() else tensor,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("quantized")
    return {name: make_quantized(parent, CASES[name], name=name, layers=1)[0] for name in NAMES}


@pytest.fixture(scope="module")
def stored(folders: dict[str, Path]) -> dict[str, Tensors]:
    return {name: load_file(folder / "model.safetensors") for name, folder in folders.items()}


def plan(folder: Path, *, dequantize: bool) -> None:
    """Plan a conversion, and read the first chunk of every tensor of it."""
    settings = ConvertSettings(
        model_dir=str(folder), output_dir=folder.parent / "never", dequantize=dequantize
    )
    for tensor in make_plan(settings).ranks[0].values():
        next(iter(tensor.list_output_blocks())).make()


@fuzz(80)
@given(
    name=st.sampled_from(NAMES), key=st.sampled_from(KEYS), value=VALUES, dequantize=st.booleans()
)
def test_sections(
    folders: dict[str, Path], name: str, key: str, value: Any, *, dequantize: bool
) -> None:
    path = folders[name] / "config.json"
    before = path.read_text()
    section = copy.deepcopy(dict(CASES[name].section))
    inner = section.get("config_groups", {}).get("group_0", {})
    place = inner["weights"] if key in inner.get("weights", {}) else section
    place[key] = value
    try:
        path.write_text(json.dumps(json.loads(before) | {"quantization_config": section}))
        attempt(lambda: plan(folders[name], dequantize=dequantize))
    finally:
        path.write_text(before)


@fuzz(80)
@given(
    name=st.sampled_from(NAMES), number=st.integers(0, 10**6),
    change=st.sampled_from(sorted(CHANGES)), dequantize=st.booleans(),
)  # fmt: skip
def test_tensors(
    folders: dict[str, Path], stored: dict[str, Tensors], name: str, number: int, change: str,
    *, dequantize: bool,
) -> None:  # fmt: skip
    tensors = stored[name]
    key = sorted(tensors)[number % len(tensors)]
    try:
        change_folder(folders[name], {key: CHANGES[change](tensors[key])})
        attempt(lambda: plan(folders[name], dequantize=dequantize))
    finally:
        change_folder(folders[name], tensors)
