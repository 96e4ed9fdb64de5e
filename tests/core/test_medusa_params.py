"""Medusa's keys of a checkpoint's config.json, and its tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from specdec.errors import SpecDecError
from specdec.methods.medusa import MedusaParams
from specdec.model.checkpoint import parse_checkpoint_config
from specdec.model.sharding import join, split
from specdec.model.tensors import Shard, TensorSpec
from tests.core.test_schema import LLAMA
from tests.core.test_tensors import MODEL

MEDUSA: dict[str, Any] = {
    "architecture": "MedusaForCausalLM", "num_medusa_heads": 4, "num_medusa_layers": 1,
    "max_draft_len": 63,
}  # fmt: skip


@pytest.mark.parametrize("architecture", ["MedusaForCausalLM", "MedusaLlamaForCausalLM"])
def test_medusa_is_read(architecture: str) -> None:
    config = parse_checkpoint_config({**LLAMA, **MEDUSA, "architecture": architecture})
    assert config.mode == "medusa"
    assert config.model.architecture == "LlamaForCausalLM"
    assert config.drafter == MedusaParams(num_heads=4, num_layers=1, max_draft_len=63)
    assert config.drafter.to_checkpoint().items() <= MEDUSA.items()
    assert (config.drafter.max_draft_tokens, config.drafter.max_draft_depth) == (63, 4)


@pytest.mark.parametrize(
    ("keys", "architecture"),
    [
        ({}, "LlamaForCausalLM"),
        ({"model_type": "llama"}, "LlamaForCausalLM"),
        ({"model_type": "qwen2", "qwen_type": "qwen2"}, "Qwen2ForCausalLM"),
        ({"base_architecture": "MistralForCausalLM", "model_type": "llama"}, "MistralForCausalLM"),
        ({"base_architecture": "MedusaQwen2ForCausalLM", "decoder": "qwen"}, "Qwen2ForCausalLM"),
    ],
)
def test_the_target_is_found_in_either_lines_config(
    keys: dict[str, Any], architecture: str
) -> None:
    config = parse_checkpoint_config({**LLAMA, **MEDUSA, **keys})
    assert config.model.architecture == architecture


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_medusa_heads": 0}, "num_medusa_heads is 0, not a whole number from 1 to 1000"),
        ({"num_medusa_heads": None}, "num_medusa_heads is None"),
        ({"num_medusa_heads": 10**9}, "num_medusa_heads is 1000000000, not a whole number from 1"),
        ({"num_medusa_layers": -1}, "num_medusa_layers is -1, not a whole number from 0 to 1000"),
        ({"max_draft_len": True}, "max_draft_len is True"),
        ({"max_draft_len": 10**9}, "max_draft_len is 1000000000, not a whole number from 1"),
        (
            {"num_medusa_heads": 1000, "num_medusa_layers": 1000},
            "1000 Medusa heads of 1000 layers are 1000000, more than 1000",
        ),
        ({"medusa_hidden_act": "gelu"}, "unknown keys medusa_hidden_act"),
        ({"base_architecture": "MedusaFalcon"}, "'Falcon' is not supported"),
        ({"base_architecture": 7}, "7 is not supported"),
        (
            {"hidden_size": 66, "head_size": 16, "num_key_value_heads": 4,
             "mapping": {"tp_size": 4}},
            "the Medusa heads' hidden_size=66 does not split over tp_size=4",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecDecError) as caught:
        parse_checkpoint_config({**LLAMA, **MEDUSA, **change})
    assert message in caught.value.message


@pytest.mark.parametrize("num_layers", [0, 1, 2])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_the_ranks_make_up_the_heads(tp_size: int, num_layers: int) -> None:
    """131 tokens, which no tp_size divides."""
    model = dataclasses.replace(MODEL, tp_size=tp_size)
    params = MedusaParams(num_heads=3, num_layers=num_layers, max_draft_len=9)
    tensors = params.list_tensors(model)
    assert len(tensors) == 3 * (2 * num_layers + 1)
    assert tensors["medusa_heads.2.lm_head.weight"] == TensorSpec((131, 64), Shard.VOCAB)
    for name, spec in tensors.items():
        whole = np.random.default_rng(0).standard_normal(spec.shape, dtype=np.float32)
        parts = [split(whole, spec, model, rank) for rank in range(tp_size)]
        height = -(-131 // tp_size) if name.endswith("lm_head.weight") else 64 // tp_size
        assert {part.shape[0] for part in parts} == {height}
        assert np.array_equal(join(parts, spec, model), whole), name
