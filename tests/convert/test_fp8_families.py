"""FP8 of every family: each linear rounded, each input and each K/V output seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specdec.checkpoint.config import read_checkpoint_config
from specdec.convert.families import FAMILIES
from specdec.convert.quantize import scales
from specdec.errors import SpecDecError
from specdec.model.tensors import list_linears
from tests.convert.conftest import Converter
from tests.families import CLASSES, CONVOLVING, GRANITES, HYBRIDS, make_family_model

# Mixtures, hybrids, and layers of several sizes.
NOT_QUANTIZED = (
    "gemma4", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", *HYBRIDS, *CONVOLVING, *GRANITES,
)  # fmt: skip
HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 8
KINDS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "c_attn": "qkv", "qkv_proj": "qkv"}


def watch_model(target: Path, rows: list[list[int]]) -> tuple[set[float], dict[str, list[float]]]:
    """Return the largest input of every linear in the layers; and of K and V by layer."""
    import transformers
    from transformers.pytorch_utils import Conv1D

    model = transformers.AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager"
    )
    inputs: dict[str, float] = {}
    outputs: dict[str, dict[str, float]] = {"k": {}, "v": {}}

    def note(name: str, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        inputs[name] = max(inputs.get(name, 0.0), args[0].abs().max().item())
        kind = KINDS.get(name.rpartition(".")[2], "")
        if kind == "qkv":
            # Only GPT-2 and Phi-3 stack them; GPT-2 has as many K/V heads as query heads.
            num_kv = HEADS if "c_attn" in name else KV_HEADS
            start = HEADS * HEAD_SIZE
            middle = start + num_kv * HEAD_SIZE
            parts = {"k": out[..., start:middle], "v": out[..., middle:]}
        else:
            parts = {kind: out}
        for key in set(parts) & set(outputs):
            largest = outputs[key].get(name, 0.0)
            outputs[key][name] = max(largest, parts[key].abs().max().item())

    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and "lm_head" not in name:
            module.register_forward_hook(lambda _m, args, out, name=name: note(name, args, out))
    for row in rows:
        model(torch.tensor([row]))
    return set(inputs.values()), {key: list(found.values()) for key, found in outputs.items()}


def test_every_family_is_here() -> None:
    assert {family.name for family in FAMILIES.values()} == set(CLASSES)


@pytest.mark.thorough
@pytest.mark.parametrize("family", [name for name in CLASSES if name not in NOT_QUANTIZED])
def test_a_family_is_quantized(
    family: str, convert: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tiny model's keys and values are far below the scale's floor.
    monkeypatch.setattr(scales, "MIN_KV_SCALE", np.float32(0))
    target = make_family_model(tmp_path, family)
    rows = np.random.default_rng(0).integers(3, 67, (3, 10)).tolist()
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    before = load_file(
        convert(model_dir=target, output_dir=tmp_path / "plain") / "rank0.safetensors"
    )
    flags: dict[str, Any] = {"quantization": "fp8", "calibration_data": data}
    convert(model_dir=target, kv_cache_dtype="fp8", **flags)
    after = load_file(convert.output / "rank0.safetensors")
    checkpoint = read_checkpoint_config(convert.output)
    linears = list_linears(checkpoint.model)
    inputs, outputs = watch_model(target, rows)
    found = set()
    for module in linears:
        scale = after[f"{module}.weights_scaling_factor"]
        whole = before[f"{module}.weight"]
        rounded = after[f"{module}.weight"].float() * scale
        assert after[f"{module}.weight"].dtype == torch.float8_e4m3fn
        assert ((rounded - whole).abs() <= 1.001 * (2**-4 * whole.abs() + 2**-10 * scale)).all()
        found.add(after[f"{module}.activation_scaling_factor"].item() * 448)
        assert checkpoint.quantization.excludes(module) is False
    assert sorted(found) == pytest.approx(sorted(inputs), rel=1e-5)
    for key in ("k", "v"):
        cache = [
            after[f"transformer.layers.{i}.attention.{key}_cache_scaling_factor"].item() * 448
            for i in range(2)
        ]
        assert cache == pytest.approx(outputs[key], rel=1e-5)
    kept = [name for name in before if name.removesuffix(".weight") not in linears]
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert len(after) == len(before) + 2 * len(linears) + 2 * 3


@pytest.mark.parametrize("family", NOT_QUANTIZED)
def test_a_mixture_or_hybrid_is_refused(family: str, convert: Converter, tmp_path: Path) -> None:
    target, data = make_family_model(tmp_path, family), tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"input_ids": [3, 4, 5]}) + "\n")
    with pytest.raises(
        SpecDecError, match=r"is a (mixture|hybrid) of .*, and --quantization is given"
    ):
        convert(model_dir=target, quantization="fp8", calibration_data=data)
    assert not convert.output.exists()
