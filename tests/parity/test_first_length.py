"""Length of the first training, inside of a rotary scaling or outside, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.convert.families import gpt_oss, llama, qwen
from specdec.convert.families.base import Family, Layout
from specdec.engine.rotary import compute_frequencies
from specdec.errors import SpecDecError
from specdec.model.config import FULL, SLIDING, ModelConfig
from specdec.model.config_reader import ConfigReader, read_rotary

IS_OLD = not hasattr(AutoConfig.for_model("llama"), "rope_parameters")
LAYOUT = Layout(
    dtype="float32", tp_size=1, pp_size=1, use_parallel_embedding=False, embedding_sharding_dim=0,
    share_embedding_table=False,
)  # fmt: skip
LENGTH = "original_max_position_embeddings"
SIZES = {
    "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 256,
    "num_local_experts": 2, "num_experts_per_tok": 1, "rms_norm_eps": 1e-6,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, Family] = {
    "llama": llama.LLAMA, "qwen2": qwen.QWEN2, "ministral3": llama.MINISTRAL_3,
    "gpt_oss": gpt_oss.GPT_OSS,
}  # fmt: skip


def read_model(family: str, config: dict[str, Any]) -> ModelConfig:
    reader = ConfigReader(SIZES | config, Path("config.json"))
    fields = FAMILIES[family].read_config(reader, LAYOUT)
    reader.finish()
    names = {name: getattr(LAYOUT, name) for name in ("dtype", "tp_size", "pp_size")}
    return ModelConfig(architecture=FAMILIES[family].architectures[0], **names | dict(fields))


def check_frequencies(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    """Compare frequencies and the factor of cos and sin with those of transformers' own class."""
    document = {"model_type": family, **SIZES, "head_dim": 32, **config}
    (tmp_path / "config.json").write_text(json.dumps(document))
    net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).model.rotary_emb
    frequencies, factor = compute_frequencies(read_model(family, config | {"head_dim": 32}), 1)
    torch.testing.assert_close(net.inv_freq, frequencies, rtol=1e-6, atol=0)
    assert net.attention_scaling == pytest.approx(factor)


@pytest.mark.skipif(IS_OLD, reason="transformers 4.57 reads no rope_parameters")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scaling", [YARN, LLAMA3])
def test_a_length_outside_is_read(tmp_path: Path, family: str, scaling: dict[str, Any]) -> None:
    """As transformers 5 reads it, which gave other frequencies, and other text, than here."""
    rotary = {**scaling, "rope_theta": 10000.0}
    check_frequencies(tmp_path, family, {"rope_parameters": rotary, LENGTH: 16})
    inside = read_model(family, {"rope_parameters": rotary | {LENGTH: 16}})
    assert read_model(family, {"rope_parameters": rotary, LENGTH: 16}) == inside
    both = {"rope_parameters": rotary | {LENGTH: 16}, LENGTH: 16}
    assert read_model(family, both) == inside


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", [YARN, LLAMA3])
def test_two_lengths_are_refused(family: str, name: str, scaling: dict[str, Any]) -> None:
    """Of both, transformers 4.57 takes the inner one, 5 the outer."""
    with pytest.raises(SpecDecError, match=f"{LENGTH} is 16 and in the scaling 32$"):
        read_model(family, {name: scaling | {LENGTH: 32, "rope_theta": 1e4}, LENGTH: 16})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_length_outside_of_an_earlier_yarn_is_refused(family: str) -> None:
    """transformers 4.57 takes the whole length there, 5 this one; where both agree, it is read."""
    with pytest.raises(SpecDecError, match="5 reads it there, 4.57 takes max_position_embed.*256"):
        read_model(family, {"rope_scaling": YARN, LENGTH: 16})
    model = read_model(family, {"rope_scaling": YARN, LENGTH: 256})
    assert (model.rotary_scaling or {})[LENGTH] == 256


@pytest.mark.skipif(IS_OLD, reason="transformers 4.57 fails for want of the length")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_length_outside_of_an_earlier_llama3_is_read(tmp_path: Path, family: str) -> None:
    check_frequencies(tmp_path, family, {"rope_scaling": LLAMA3, LENGTH: 16})


def test_a_scaling_of_a_kind_of_layer_has_its_length_inside() -> None:
    """transformers reads none from outside of objects by types of layers."""
    rotary = {FULL: YARN | {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}}
    reader = ConfigReader({"rope_parameters": rotary, LENGTH: 16}, Path("config.json"))
    assert read_rotary(reader).scaling == YARN
    reader.finish()
