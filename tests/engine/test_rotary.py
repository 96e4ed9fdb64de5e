"""Rotary frequencies of every scaling, and which a sequence has, against transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from specdec.engine.rotary import CHUNK_POSITIONS, RotaryTable, compute_frequencies
from specdec.errors import SpecDecError
from specdec.model.config import ModelConfig
from tests.engine.models import make_model

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
FACTORS = {
    "short_factor": [1.0 + 0.01 * i for i in range(32)],
    "long_factor": [1.0 + 0.5 * i for i in range(32)],
}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, **FACTORS}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear_old_key": {"type": "linear", "factor": 2},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_attention": {**YARN, "attention_factor": 0.7},
    "yarn_mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn_untruncated": {**YARN, "truncate": False},
    "longrope": LONGROPE,
    "longrope_attention": {**LONGROPE, "attention_factor": 1.3},
}
CPU = torch.device("cpu")


def compute_reference(model: ModelConfig, length: int) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = copy.deepcopy(model.rotary_scaling)
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_theta=model.rotary_base,
        rope_scaling=scaling, max_position_embeddings=model.max_position_embeddings,
    )  # fmt: skip
    if scaling is None:  # not in the table of every version
        rotary = LlamaRotaryEmbedding(config)
        return rotary.inv_freq, float(rotary.attention_scaling)
    kind = scaling.get("rope_type", scaling.get("type"))
    inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length)
    return inverse, float(factor)


@pytest.mark.parametrize("length", [1, 2048, 2049, 5000])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_transformers(name: str, length: int) -> None:
    model = make_model(rotary_base=500000.0, rotary_scaling=SCALINGS[name])
    expected, factor = compute_reference(model, length)
    actual, own_factor = compute_frequencies(model, length)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    assert own_factor == pytest.approx(factor, rel=1e-9)


def test_the_lengths_tell_the_scalings_apart() -> None:
    """The test above would see a length that is not heeded."""
    for name in ("dynamic", "longrope"):
        model = make_model(rotary_scaling=SCALINGS[name])
        short, long = (compute_frequencies(model, length)[0] for length in (2048, 2049))
        assert not torch.equal(short, long)
        assert torch.equal(short, compute_frequencies(model, 1)[0])


def test_partial_rotation_has_the_frequencies_of_its_own_size() -> None:
    model = make_model(rotary_pct=0.5)
    whole = make_model(head_size=32)
    partial, expected = compute_frequencies(model, 1)[0], compute_frequencies(whole, 1)[0]
    assert torch.equal(partial, expected)


def test_phi3_takes_the_original_length_beside_the_scaling() -> None:
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    scaling = {"type": "longrope", **FACTORS}
    sizes = {"max_position_embeddings": 4096, "original_max_position_embeddings": 512}
    config = Phi3Config(
        hidden_size=256, num_attention_heads=4, num_key_value_heads=4, rope_theta=10000.0,
        rope_scaling=copy.deepcopy(scaling), pad_token_id=0, **sizes,
    )  # fmt: skip
    rotary = Phi3RotaryEmbedding(config)
    model = make_model(rotary_scaling=scaling, **sizes)
    table = RotaryTable(model, 600, torch.float32, CPU)
    for length, prompt_len in ((512, 512), (513, 513), (600, 513)):
        cos, sin = rotary(torch.zeros(1, 1, 1), torch.arange(length)[None])
        start = table.find_start(prompt_len)
        torch.testing.assert_close(table.cos[start : start + length], cos[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(table.sin[start : start + length], sin[0], rtol=0, atol=1e-5)
    assert table.attention_factor == pytest.approx(1.1547005383792515)
    assert table.find_start(512) != table.find_start(513)


def test_dynamic_follows_generation_one_token_at_a_time() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"rope_type": "dynamic", "factor": 3.0}
    model = make_model(max_position_embeddings=64, rotary_scaling=scaling)
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_scaling=dict(scaling),
        max_position_embeddings=64,
    )  # fmt: skip
    rotary = LlamaRotaryEmbedding(config)
    table = RotaryTable(model, 100, torch.float32, CPU)
    x = torch.zeros(1, 1, 1)
    prompt = rotary(x, torch.arange(60)[None])[0][0]
    torch.testing.assert_close(table.cos[:60], prompt, rtol=0, atol=1e-6)
    for position in range(60, 100):
        cos, sin = rotary(x, torch.tensor([[position]]))
        torch.testing.assert_close(table.cos[position], cos[0, 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(table.sin[position], sin[0, 0], rtol=0, atol=1e-5)
    plain = RotaryTable(make_model(max_position_embeddings=64), 100, torch.float32, CPU)
    assert (table.cos[64:] - plain.cos[64:]).abs().max() > 0.1, "the reference does scale"


def test_requests_that_transformers_would_rotate_anew_are_told() -> None:
    scaling = {"rope_type": "longrope", **FACTORS}
    model = make_model(rotary_scaling=scaling, original_max_position_embeddings=512)
    table = RotaryTable(model, 2048, torch.float32, CPU)
    assert table.check_request(500, 512) is None
    assert table.check_request(513, 600) is None
    message, hint = table.check_request(500, 513) or ("", "")
    assert "500 + 13 tokens cross 512" in message
    assert "12 tokens or fewer" in hint
    assert RotaryTable(model, 512, torch.float32, CPU).check_request(500, 513) is None
    dynamic = make_model(rotary_scaling={"type": "dynamic", "factor": 2.0})
    table = RotaryTable(dynamic, 3000, torch.float32, CPU)
    assert table.check_request(2048, 3000) is None
    assert "2049 tokens" in (table.check_request(2049, 3000) or ("",))[0]


def test_bad_scaling_is_refused() -> None:
    """What is wrong with one is told by tests/core/test_rotary_scaling.py."""
    with pytest.raises(SpecDecError, match="did you mean longrope"):
        compute_frequencies(make_model(rotary_scaling={"rope_type": "longrop"}), 1)


def test_a_table_beyond_all_memory_is_refused() -> None:
    model = make_model(max_position_embeddings=2**31 - 1)
    with pytest.raises(SpecDecError, match="more than 268435456") as caught:
        RotaryTable(model, 2**31 - 1, torch.float32, CPU)
    assert "--max-seq-len" in caught.value.hint


def test_a_table_that_is_made_in_parts() -> None:
    model = make_model(max_position_embeddings=4096)
    table = RotaryTable(model, 2 * CHUNK_POSITIONS + 3, torch.float32, CPU)
    inverse, _ = compute_frequencies(model, 1)
    angles = torch.outer(torch.arange(2 * CHUNK_POSITIONS + 3).float(), inverse).repeat(1, 2)
    assert torch.equal(table.cos, angles.cos())
    assert torch.equal(table.sin, angles.sin())
