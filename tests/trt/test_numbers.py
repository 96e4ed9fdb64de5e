"""Half precision and quantized weights on networks, and mistakes that the tests must find."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.decode.engine import TorchEngine
from specdec.engine import loading
from specdec.engine.decoder import Decoder
from specdec.engine.float8 import Float8Linear
from specdec.engine.step import Step
from specdec.engine.tree import build_tree_mask
from specdec.trt import decoder as networks
from specdec.trt import target as written
from specdec.trt.network import NetworkWriter
from tests.conftest import make_llama
from tests.engines import call
from tests.parity.models import make_model
from tests.parity.test_families import TREE, generate
from tests.run.test_fp8_engine import quantize
from tests.trt.networks import NEEDS_TENSORRT, load_here

pytestmark = NEEDS_TENSORRT
LENGTHS = (5, 24, 1, 70)


def convert(parent: Path, dtype: str, name: str = "LlamaForCausalLM-plain") -> Path:
    model = make_model(parent / "model", name, dtype=dtype)
    call("convert", "--model-dir", model, "--output-dir", parent / "checkpoint")
    return parent / "checkpoint"


def build_both(parent: Path, checkpoint: Path, *flags: object) -> tuple[TorchEngine, TorchEngine]:
    """The torch backend's engine without kernels, and that of networks."""
    call(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", parent / "torch", "--backend",
        "torch", "--optimize", "none", *flags,
    )  # fmt: skip
    return TorchEngine(parent / "torch", device="cpu"), load_here(
        checkpoint, parent / "engine", *flags
    )


@torch.inference_mode()
def run_tree(decoder: Decoder) -> torch.Tensor:
    """The logits of a prompt, and of a tree after it, [2, ..., V]."""
    cache, size = decoder.make_cache(2, 64), 7
    decoder.start_row(cache, 0, size)
    decoder.start_row(cache, 1, size)
    rows, tokens = np.arange(2), np.arange(2 * size).reshape(2, size) * 5 % 97 + 3
    causal = np.tril(np.ones((2, size, size), np.bool_))
    prompt = Step(rows, tokens, np.tile(np.arange(size), (2, 1)), causal)
    first = decoder.compute_logits(decoder.forward(prompt, cache))
    for row in rows:
        cache.commit(int(row), list(range(size - int(row))))  # of unlike lengths
    step = Step(
        rows, np.tile(TREE.tokens, (2, 1)), cache.past_lens[:, None] + TREE.depths,
        np.stack([build_tree_mask(TREE)] * 2),
    )  # fmt: skip
    second = decoder.compute_logits(decoder.forward(step, cache))
    return torch.cat((first, second), dim=1).float()


def measure(ours: TorchEngine, theirs: TorchEngine) -> float:
    """The largest difference of two engines' logits, in the largest logit."""
    expected = run_tree(theirs.decoder)
    error = (run_tree(ours.decoder) - expected).abs().max() / expected.abs().max()
    return float(error)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.005), ("bfloat16", 0.04)])
def test_half_precision(dtype: str, tolerance: float, tmp_path: Path) -> None:
    """Both round every product's result; scores and sums are rounded in other places."""
    theirs, ours = build_both(tmp_path, convert(tmp_path, dtype))
    assert measure(ours, theirs) < tolerance


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [("int8",), ("int4", "--group-size", 32)])
def test_quantized_weights(flags: tuple[object, ...], tmp_path: Path) -> None:
    checkpoint = convert(tmp_path, "float32", "Qwen2ForCausalLM-plain")
    if flags[0] == "int4":  # whose MLP does not divide into groups
        model = make_model(tmp_path / "other", "Qwen2ForCausalLM-plain", intermediate_size=96)
        checkpoint = tmp_path / "other_checkpoint"
        call("convert", "--model-dir", model, "--output-dir", checkpoint)
    theirs, ours = build_both(tmp_path, checkpoint, "--quantization", *flags)
    assert measure(ours, theirs) < 2e-5
    assert generate(ours, LENGTHS) == generate(theirs, LENGTHS)


def test_float8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs of the torch backend multiply: inputs and weights are float8."""
    checkpoint = quantize(tmp_path, make_llama(tmp_path, vocab=131, intermediate=128))
    monkeypatch.setattr(loading, "can_multiply", lambda weight, device: True)
    theirs, ours = build_both(tmp_path, checkpoint)
    assert isinstance(theirs.decoder.stack.layers[0].qkv, Float8Linear)
    assert measure(ours, theirs) < 2e-4
    assert generate(ours, LENGTHS) == generate(theirs, LENGTHS)


def shift_mask(make: Callable[..., Any]) -> Callable[..., Any]:
    """Every token sees one committed position more."""
    return lambda past, *rest: make(past, *rest) | make(past + 1, *rest)


def drop_scale(attend: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, q, *rest: attend(self, self.scale(q, 0.5), *rest)


def swap_heads(update: Callable[..., Any]) -> Callable[..., Any]:
    """The heads of keys and of values are written in the other order."""

    def swap(self: NetworkWriter, cache: Any, new: Any, places: Any) -> Any:
        order = torch.arange(new.shape[1] - 1, -1, -1, dtype=torch.int32)
        return update(self, cache, self.gather(new, self.constant(order), 1), places)

    return swap


def turn_further(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """Queries and keys are turned by half as much as they should be."""

    def turn(self: NetworkWriter, x: Any, tables: Any, positions: Any, size: int) -> Any:
        half = self.combine("FLOOR_DIV", positions, self.number(2, 2, torch.int64))
        return rotate(self, x, tables, half, size)

    return turn


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a mask that is off by one": (networks, "build_full_mask", shift_mask),
    "a missing scale": (NetworkWriter, "attend", drop_scale),
    "K/V heads swapped": (NetworkWriter, "update_cache", swap_heads),
    "positions shifted": (NetworkWriter, "rotate", turn_further),
    "a norm left out": (written.LayersWriter, "norm", lambda norm: lambda self, x, name: x),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, change = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    theirs, ours = build_both(tmp_path, convert(tmp_path, "float32"))
    assert measure(ours, theirs) > 1e-3
