"""Layers with a state in the one call of all layers, beside a call for each part of a layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.engine.decoder import Decoder
from specdec.engine.linear_states import LinearStates
from specdec.engine.native_layers import KernelLayers, NativeLayers
from specdec.engine.native_states import SHORT_CONV, PackedRecurrence
from specdec.engine.short_conv import ShortConv
from specdec.engine.step import Step
from specdec.model.architectures import Architecture
from specdec.model.config import CONV, FULL, MAMBA
from specdec.model.experts import Experts
from specdec.model.mamba2 import Mamba2Sizes
from specdec.model.short_conv import ShortConvSizes
from tests.engine.kernels import needs_compiler
from tests.engine.state_steps import STEPS
from tests.engine.test_native_step import make_decoder

pytestmark = needs_compiler
EXPERTS = Experts(num=5, top_k=2, inner=40, shared_inner=24, num_dense_layers=2)
# Attention in the middle, at both ends, and layers of experts after those of an MLP.
HYBRIDS: dict[str, dict[str, Any]] = {
    "convolutions": {
        "short_conv": ShortConvSizes(num_channels=72, num_taps=4, has_bias=True),
        "layer_types": (CONV, FULL, CONV, CONV), "experts": EXPERTS,
        "own_arithmetic": Architecture(qk_norm=True, mlp="experts", activations=("swiglu",)),
    },
    "Mamba-2": {
        "mamba2": Mamba2Sizes(
            num_key_heads=2, num_value_heads=6, key_size=16, value_size=24, num_taps=3
        ),
        "layer_types": (FULL, MAMBA, MAMBA, FULL), "residual_multiplier": 0.3,
        "own_arithmetic": Architecture(
            layers_without_positions=(0, 1, 2, 3), activations=("swiglu",)
        ),
    },
}  # fmt: skip


def make_hybrid(library: Path, kind: str, dtype: str = "bfloat16", **options: Any) -> Decoder:
    values: dict[str, Any] = {"architecture": "Hybrid", "hidden_act": "swiglu", "is_int8": False}
    return make_decoder(library, dtype, 6, 2, None, **values | HYBRIDS[kind] | options)


def run_steps(decoder: Decoder, *, is_cut: bool) -> list[torch.Tensor]:
    """Two texts in ragged steps with drafts, some of which are rejected.

    Returns the states of all tokens that are read, and what the layers keep. is_cut: of each row
    only the first token is read.
    """
    cache, found = decoder.make_cache(3, 200), []
    assert cache.states is not None
    dice = np.random.default_rng(1)
    for counts, certain, accepted in STEPS:
        size, rows = max(counts), np.array([0, 2])
        real = np.arange(size) < np.array(counts)[:, None]
        wanted = real & (np.arange(size) < 1) if is_cut else real
        step = Step(
            rows=rows, tokens=dice.integers(64, size=(2, size)),
            positions=cache.past_lens[rows][:, None] + np.arange(size),
            tree_mask=np.tile(np.tri(size, dtype=np.bool_), (2, 1, 1)),
            counts=np.array(counts), certain_counts=np.array(certain),
        )  # fmt: skip
        step = dataclasses.replace(step, output_mask=wanted if is_cut else None)
        found.append(decoder.forward(step, cache)[torch.from_numpy(wanted)])
        if decoder.observed_outputs is not None:
            found.append(decoder.observed_outputs[torch.from_numpy(real)])
        for row, count in zip(rows.tolist(), accepted, strict=True):
            cache.commit(row, list(range(count)))
    states = cache.states
    return [*found, states.state.clone(), states.window.clone()]


@pytest.mark.parametrize("kind", HYBRIDS)
@torch.inference_mode()
def test_one_call_has_the_bits_of_a_call_for_each_part(library: Path, kind: str) -> None:
    """With integer weights too, where layers are observed, and where few states are read."""
    for is_int8 in (False, True):
        decoder = make_hybrid(library, kind, is_int8=is_int8)
        native = decoder._native
        assert isinstance(native, NativeLayers)
        parts = KernelLayers(decoder.stack, native.kernels)
        for is_cut, observed in ((False, ()), (False, (0, 2)), (True, ())):
            decoder.observed_layers = observed
            decoder._native = native
            found = run_steps(decoder, is_cut=is_cut)
            decoder._native = parts
            expected = run_steps(decoder, is_cut=is_cut)
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
                assert one.numel() == 0 or one.count_nonzero() > 0


@torch.inference_mode()
def test_states_that_do_not_go_with_the_layers(library: Path) -> None:
    """None, of other sizes, of fewer layers or rows, of another type; weights of another size."""
    decoder = make_hybrid(library, "convolutions")
    native, cache = decoder._native, decoder.make_cache(2, 64)
    assert isinstance(native, NativeLayers)
    layers, sizes = native.packed, decoder.model.short_conv
    types = torch.bfloat16, torch.device("cpu")
    assert sizes is not None
    wider = dataclasses.replace(sizes, num_channels=73)
    start = np.zeros((1, 1), np.int64)
    plan = native.kernels.plan_step(start[0], start, start, start[0], np.ones((1, 1, 1), np.bool_))
    for states in (
        None, LinearStates(wider, 3, 2, *types), LinearStates(sizes, 2, 2, *types),
        LinearStates(sizes, 3, 1, *types), LinearStates(sizes, 3, 2, torch.float32, types[1]),
    ):  # fmt: skip
        x = torch.zeros(1, 1, 384, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"states|windows"):
            native.kernels.run_layers(x, layers, cache.blocks, plan, (), states=states)
    layer = decoder.stack.layers[0].recurrence
    assert isinstance(layer, ShortConv)
    shorter = dataclasses.replace(layer, taps=layer.taps[1:])
    for changed in (shorter, dataclasses.replace(layer, bias=torch.zeros(73))):
        with pytest.raises(ValueError, match=r"taps is|bias.* is"):
            PackedRecurrence(torch.bfloat16, SHORT_CONV, changed, None, (changed.bias,))
