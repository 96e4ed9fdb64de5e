"""A target's networks, computed layer by layer, are the model that transformers runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from specdec.engine import layers
from specdec.model.architectures import Architecture
from specdec.model.config import ModelConfig
from specdec.trt.target import ACTIVATIONS, COMPUTED
from tests.covering import TAKES_ALL
from tests.engines import call
from tests.parity.models import NAMES, SWITCH, WINDOW, make_model
from tests.parity.test_families import LIMIT, check_logits, check_reference, generate
from tests.trt.networks import NEEDS_TENSORRT, load_here

pytestmark = NEEDS_TENSORRT
# Mixtures, hybrids, and layers of several sizes. Of LFM2's models one attends in every layer.
REFUSED = ("Mixtral", "Moe", "Qwen3_5", "Qwen3Next", "GptOss", "Gemma4", "Lfm2")
DENSE = [name for name in NAMES if all(kind not in name for kind in REFUSED)]
# One variant of each family, and those that add arithmetic of their own.
MORE = ("longrope", "350m", "-tied_head_dim", "LM-biases")
SHORT = [
    name for at, name in enumerate(DENSE)
    if name.split("-")[0] != DENSE[at - 1].split("-")[0] or name.endswith(MORE)
]  # fmt: skip
# What `ModelConfig` says of a model, all of which the networks follow or the build refuses. A new
# field belongs here when that is seen to.
FIELDS = {
    "architecture", "dtype", "vocab_size", "hidden_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_size", "intermediate_size",
    "norm_epsilon", "max_position_embeddings", "hidden_act", "rotary_base", "rotary_scaling",
    "attn_bias", "mlp_bias", "rotary_pct", "sliding_window", "original_max_position_embeddings",
    "query_scaling_beta", "use_parallel_embedding", "embedding_sharding_dim",
    "share_embedding_table", "layer_types",
    "rope_local_base_freq", "embedding_multiplier", "attention_multiplier",
    "residual_multiplier", "output_multiplier_scale", "query_pre_attn_scalar",
    "attn_logit_softcapping", "final_logit_softcapping", "tp_size", "pp_size", "experts",
    "own_arithmetic", "linear_attention", "short_conv", "mamba2", "layer_sizes",
}  # fmt: skip


def test_what_a_model_has_is_followed_or_refused() -> None:
    assert {field.name for field in dataclasses.fields(ModelConfig)} == FIELDS
    assert set(ACTIVATIONS) == set(layers.ACTIVATIONS)
    refused = {
        "adds_one", "gates_attention", "has_sinks", "gate_limit", "gate_slope", "norms_values",
        "scales_layers", "adds_experts",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(Architecture)} == COMPUTED | refused


@pytest.mark.thorough
@pytest.mark.parametrize("name", DENSE if TAKES_ALL else SHORT)
def test_family_equals_transformers(name: str, tmp_path: Path) -> None:
    """Logits of chunks, single tokens and a tree; greedy text, windows and switches exceeded."""
    target, checkpoint = make_model(tmp_path / "model", name), tmp_path / "checkpoint"
    call("convert", "--model-dir", target, "--output-dir", checkpoint)
    engine = load_here(checkpoint, tmp_path / "engine", "--max-batch-size", 3)
    assert WINDOW < LIMIT
    check_logits(engine.decoder, target)
    lengths = (5, SWITCH - LIMIT, 1, 70)
    outputs = generate(engine, lengths)
    assert sum(len(set(output)) for output in outputs) > LIMIT, "the text varies"
    assert outputs == check_reference(target, lengths, outputs)
