"""Readers of the families by themselves: fields by hand, modules by numpy, what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from specdec.convert import wrappers
from specdec.convert.families import (
    gemma,
    gemma4,
    gpt2,
    granite,
    lfm2,
    llama,
    opt,
    phi,
    qwen,
    qwen_hybrid,
)
from specdec.convert.families.base import Family, Layout
from specdec.convert.families.torch_only import SEED_OSS, SMOLLM3, STABLELM
from specdec.convert.hf import HfFolder
from specdec.convert.plan import SourceRows, plan_tensors
from specdec.errors import Problems, SpecDecError
from specdec.files.reading import Array
from specdec.model.config import CONV, FULL, LINEAR, MAMBA, SLIDING, ModelConfig
from specdec.model.config_reader import ConfigReader
from specdec.model.tensors import TensorSpec, list_target_tensors
from specdec.model.wrappers import NAMES, WRAPPERS

LAYOUT = Layout(
    dtype="float32", tp_size=1, pp_size=1, use_parallel_embedding=False, embedding_sharding_dim=0,
    share_embedding_table=False,
)  # fmt: skip
SIZES = {
    "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 6,
}  # fmt: skip
GENERATOR = np.random.default_rng(0)


def read(family: Family, layout: Layout = LAYOUT, **config: Any) -> ModelConfig:
    """The model of a config.json; SIZES unless given; "ABSENT" removes one."""
    values = {key: value for key, value in (SIZES | config).items() if value != "ABSENT"}
    reader = ConfigReader(values, Path("config.json"))
    fields = family.read_config(reader, layout)
    reader.finish()
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    shared = {key: value for key, value in vars(layout).items() if key in names}
    architecture = family.written_as or family.architectures[0]
    return ModelConfig(architecture=architecture, **shared | fields)


def describe(family: Family, model: ModelConfig) -> dict[str, Any]:
    """The keys of a checkpoint's config.json, with those that others have put there."""
    quantization = {"quant_algo": None, "kv_cache_quant_algo": None}
    mapping = {"world_size": 2, "tp_size": 2, "pp_size": 1, "moe_tp_size": 2}
    return family.describe(model, {"quantization": quantization, "mapping": mapping})


def draw(*shape: int) -> Array:
    return GENERATOR.standard_normal(shape, np.float32)


def write_folder(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> HfFolder:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()},
              path / "model.safetensors")  # fmt: skip
    return HfFolder(path)


def plan(family: Family, folder: HfFolder, model: ModelConfig, *names: str) -> dict[str, Array]:
    """Canonical tensors, read from the folder as a conversion would write them."""
    num_experts = 1 if model.experts is None else model.experts.num
    specs: dict[str, TensorSpec] = {
        n: s for n, s in list_target_tensors(model).items() if n in names
    }
    problems = Problems()
    source_rows = family.find_source_rows(specs, folder, num_experts)
    (rank,) = plan_tensors(
        specs, source_rows=source_rows, source=folder, model=model, dtype="float32", ignored=("*",),
        problems=problems,
    )  # fmt: skip
    problems.raise_all()
    return {
        name: np.concatenate([block.make() for block in tensor.list_output_blocks()])
        .reshape(tensor.info.shape) for name, tensor in rank.items()
    }  # fmt: skip


def name_rows(family: Family, name: str) -> tuple[SourceRows, ...]:
    return family.find_source_rows([name])[name]


# Llama, Mistral, Ministral, Mixtral, Granite.


def test_llama() -> None:
    model = read(llama.LLAMA)
    assert (model.head_size, model.max_position_embeddings, model.rotary_base) == (4, 2048, 1e4)
    assert (model.norm_epsilon, model.hidden_act) == (1e-6, "silu")
    assert read(llama.LLAMA, num_key_value_heads="ABSENT").num_key_value_heads == 2
    biased = read(llama.LLAMA, attention_bias=True, mlp_bias=True)
    assert biased.attn_bias
    assert biased.mlp_bias
    names = [
        rows.name for rows in name_rows(llama.LLAMA, "transformer.layers.3.attention.qkv.weight")
    ]
    assert names == [f"model.layers.3.self_attn.{part}_proj.weight" for part in "qkv"]
    (gate,) = name_rows(llama.LLAMA, "transformer.layers.0.mlp.fc.weight")
    assert gate.name == "model.layers.0.mlp.gate_proj.weight", "which is activated"
    (post,) = name_rows(llama.LLAMA, "transformer.layers.0.post_layernorm.weight")
    assert post.name == "model.layers.0.post_attention_layernorm.weight"


@pytest.mark.parametrize(
    ("family", "config", "window", "types"),
    [
        (llama.MISTRAL, {}, 4096, None),
        (llama.MISTRAL, {"sliding_window": None}, None, None),
        (llama.MINISTRAL, {"sliding_window": 3, "layer_types": [SLIDING, FULL, FULL, SLIDING]}, 3,
         (SLIDING, FULL, FULL, SLIDING)),
        (llama.MINISTRAL, {"sliding_window": 3, "layer_types": [FULL] * 4}, None, None),
        (qwen.QWEN2, {"sliding_window": 5}, None, None),
        (qwen.QWEN2, {"sliding_window": 5, "use_sliding_window": True}, None, None),
        (qwen.QWEN2, {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}, 5,
         (FULL, SLIDING, SLIDING, SLIDING)),
        (qwen.QWEN3, {"use_sliding_window": True, "max_window_layers": 0}, 4096, None),
        (phi.PHI3, {"sliding_window": 7}, 7, None),
        (phi.PHI3, {}, None, None),
        (gemma.GEMMA2, {}, 4096, (SLIDING, FULL, SLIDING, FULL)),
        (gemma.GEMMA2, {"sliding_window": 3}, 3, (SLIDING, FULL, SLIDING, FULL)),
        (gemma.GEMMA3, {"_sliding_window_pattern": 3}, 4096, (SLIDING, SLIDING, FULL, SLIDING)),
        (gemma.GEMMA3, {"sliding_window_pattern": 1, "_sliding_window_pattern": 2}, 4096,
         (FULL,) * 4),
    ],
)  # fmt: skip
def test_windows(
    family: Family, config: dict[str, Any], window: int | None, types: tuple[str, ...] | None
) -> None:
    """Of what Qwen2 has by default no layer is after the 28th, so none has a window."""
    model = read(family, **config)
    assert (model.sliding_window, model.layer_types) == (window, types)


def test_granite_s_scores_are_not_divided_again() -> None:
    """A factor of the scores alone: times the root of the head's size, 4, which divides them."""
    model = read(
        llama.GRANITE, attention_multiplier=0.25, embedding_multiplier=12, logits_scaling=8,
        residual_multiplier=0.22,
    )  # fmt: skip
    assert model.attention_multiplier == 0.25 * 2
    assert model.attention_scale == 0.25
    assert model.output_multiplier_scale == 1 / 8
    described = describe(llama.GRANITE, model)
    assert (described["embedding_multiplier"], described["residual_multiplier"]) == (12, 0.22)


def test_mixtral_s_experts(tmp_path: Path) -> None:
    """In memory transformers 5 names them otherwise; the multiplied matrix comes first."""
    mixtral = llama.MIXTRAL
    model = read(mixtral, num_local_experts=2)
    assert model.experts is not None
    assert (model.experts.num, model.experts.top_k, model.experts.inner) == (2, 2, 6)
    assert model.experts.renormalizes
    assert (model.rotary_base, model.num_key_value_heads, model.hidden_act) == (1e6, 1, "swiglu")
    prefix = "model.layers.0.mlp."
    tensors = {f"{prefix}experts.{e}.w{n}.weight": draw(6, 8) for e in (0, 1) for n in (1, 3)}
    folder = write_folder(tmp_path / "m", {}, tensors | {f"{prefix}gate.weight": draw(2, 8)})
    folder = mixtral.prepare(folder, "float32")
    name = "transformer.layers.0.mlp.fc.weight"
    wanted = [
        np.concatenate([tensors[f"{prefix}experts.{e}.w{n}.weight"] for n in (3, 1)])
        for e in (0, 1)
    ]
    assert np.array_equal(plan(mixtral, folder, model, name)[name], np.stack(wanted))
    with pytest.raises(SpecDecError, match="layer_types is"):
        read(mixtral, sliding_window=3, layer_types=[FULL] * 4)


def test_ministral_3_s_queries_are_scaled() -> None:
    """By the length that the scaling names; by YaRN's that names none, the model's."""
    rotary = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.3}
    for values, length in ((rotary, 99), (rotary | {"original_max_position_embeddings": 7}, 7)):
        model = read(llama.MINISTRAL_3, rope_parameters=values, max_position_embeddings=99)
        assert model.query_scaling_beta == 0.3
        assert model.original_max_position_embeddings == length
    unscaled = rotary | {"rope_type": "default"}
    del unscaled["factor"]
    with pytest.raises(SpecDecError, match="original_max_position_embeddings is missing"):
        read(llama.MINISTRAL_3, rope_parameters=unscaled)
    assert read(llama.MINISTRAL_3, head_dim=4).original_max_position_embeddings == 16384


# Granite 4.

MULTIPLIED = {"attention_multiplier": 0.25, "embedding_multiplier": 12.0,
              "residual_multiplier": 0.25, "logits_scaling": 8.0}  # fmt: skip
GRANITE4: dict[str, Any] = MULTIPLIED | {
    "mamba_n_heads": 4, "mamba_d_head": 4, "mamba_n_groups": 2, "mamba_d_state": 3,
    "mamba_d_conv": 2, "num_local_experts": 2, "num_experts_per_tok": 1,
    "shared_intermediate_size": 5, "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "position_embedding_type": "nope",
}  # fmt: skip


def test_granite_4_s_layers() -> None:
    """Names of both transformers and the published ones; without a list all are of Mamba-2."""
    model = read(granite.GRANITE_HYBRID, **GRANITE4)
    assert model.layer_types == (MAMBA, FULL, MAMBA, MAMBA)
    assert model.mamba2 is not None
    assert dataclasses.astuple(model.mamba2) == (2, 4, 3, 4, 2, True, False)
    assert model.arithmetic.layers_without_positions == (0, 1, 2, 3)
    assert (model.arithmetic.mlp, model.experts and model.experts.shared_inner) == ("experts", 5)
    assert model.experts is not None
    assert not model.experts.gates_shared
    assert (model.attention_scale, model.output_multiplier_scale) == (0.25, 1 / 8)
    named = {"layer_types": "ABSENT", "layers_block_type": ["linear_attention"] + [FULL] * 3}
    assert read(granite.GRANITE_HYBRID, **GRANITE4 | named).layer_types == (MAMBA, *[FULL] * 3)
    both = {"layers_block_type": ["linear_attention", FULL] + ["linear_attention"] * 2}
    assert read(granite.GRANITE_HYBRID, **GRANITE4 | both) == model
    absent = {"layer_types": "ABSENT", "mamba_d_head": "auto", "position_embedding_type": "rope"}
    model = read(granite.GRANITE_HYBRID, **GRANITE4 | absent)
    assert (model.layer_types, model.arithmetic.layers_without_positions) == ((MAMBA,) * 4, ())
    assert model.mamba2 is not None
    assert model.mamba2.value_size == 4
    dense = {"num_local_experts": 0, "layer_types": ["attention"] * 4}
    model = read(granite.GRANITE_HYBRID, **GRANITE4 | dense)
    assert (model.experts, model.mamba2, model.layer_types) == (None, None, None)
    assert model.intermediate_size == 5, "of the shared expert, which is the MLP"
    alone = read(granite.GRANITE_SHARED, **GRANITE4 | {"shared_intermediate_size": "ABSENT"})
    assert (alone.experts and alone.experts.shared_inner, alone.arithmetic.mlp) == (0, "experts")
    described = describe(granite.GRANITE_HYBRID, read(granite.GRANITE_HYBRID, **GRANITE4))
    assert (described["mamba2"]["key_size"], described["embedding_multiplier"]) == (3, 12.0)


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ({"layer_types": ["mamba"] * 3}, "layer_types is .* for 4 layers"),
        ({"layer_types": ["mamba", "sliding_attention"] * 2}, "layer_types is"),
        ({"mamba_d_head": 3}, "mamba_n_heads 4 times mamba_d_head 3 is not mamba_expand times"),
        ({"mamba_expand": 3}, "mamba_expand times hidden_size, 24"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ({"time_step_limit": [0.0, 1.0]}, r"time_step_limit is \[0.0, 1.0\]"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"logits_scaling": 0}, "logits_scaling is 0"),
        ({"num_local_experts": 0, "shared_intermediate_size": 0}, "shared_intermediate_size is 0"),
        ({"attention_multiplier": None}, "attention_multiplier is null"),
        (
            {"layers_block_type": ["attention"] * 4},
            "layer_types .* and layers_block_type .* disagree",
        ),
    ],
)
def test_granite_4_s_that_are_refused(config: dict[str, Any], fact: str) -> None:
    with pytest.raises(SpecDecError, match=fact):
        read(granite.GRANITE_HYBRID, **GRANITE4 | config)


def test_granite_4_s_rows_are_dealt(tmp_path: Path) -> None:
    """z, x, B, C, rates become C, B, x, z, rates; a shared expert's activated rows come last."""
    model = read(granite.GRANITE_HYBRID, **GRANITE4)
    mamba, shared = "model.layers.0.mamba.", "model.layers.0.shared_mlp.input_linear.weight"
    z, x, b, c, rates = (draw(rows, 8) for rows in (16, 16, 6, 6, 4))
    taps, bias = draw(28, 1, 2), draw(28)
    stored = {
        f"{mamba}in_proj.weight": np.concatenate([z, x, b, c, rates]),
        f"{mamba}conv1d.weight": taps, f"{mamba}conv1d.bias": bias, f"{mamba}A_log": draw(4),
        shared: draw(10, 8),
    }  # fmt: skip
    folder = granite.prepare(write_folder(tmp_path / "m", {}, stored), "float32")
    prefix, ours = "transformer.layers.0.", "transformer.layers.0.mamba."
    expected = {
        f"{ours}in_proj.weight": np.concatenate([c, b, x, z, rates]),
        f"{ours}conv.weight": np.concatenate([taps[22:], taps[16:22], taps[:16]]).reshape(-1),
        f"{ours}channels.bias": np.concatenate([bias[22:], bias[16:22], bias[:16]]),
        f"{ours}A_log": stored[f"{mamba}A_log"],
        f"{prefix}mlp.shared_expert.fc.weight": np.roll(stored[shared], 5, axis=0),
    }
    planned = plan(granite.GRANITE_HYBRID, folder, model, *expected)
    assert planned.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(planned[name].reshape(values.shape), values), name
    up = shared.replace("input_linear", "up_proj")
    assert np.array_equal(folder.read_block(up, 1, 3, (2, 4)), stored[shared][6:8, 2:4])
    assert shared not in folder.tensors


# Gemma.


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({}, "gelu"), ({"hidden_act": "gelu"}, "gelu"), ({"hidden_activation": "relu"}, "relu"),
        ({"hidden_act": "silu", "hidden_activation": None}, "silu"),
        ({"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu"),
    ],
)  # fmt: skip
def test_gemma_s_activation_is_the_tanh_form(config: dict[str, Any], activation: str) -> None:
    model = read(gemma.GEMMA, **config)
    assert model.hidden_act == activation
    assert (model.head_size, model.max_position_embeddings) == (256, 8192)


@pytest.mark.parametrize(
    ("family", "config", "score_cap", "logit_cap"),
    [
        (gemma.GEMMA, {}, None, None),
        (gemma.GEMMA2, {}, 50.0, 30.0),
        (gemma.GEMMA2, {"attn_logit_softcapping": None, "final_logit_softcapping": 9}, None, 9.0),
        (gemma.GEMMA3, {}, None, None),
        (gemma.GEMMA3, {"final_logit_softcapping": 9.5}, None, 9.5),
    ],
)
def test_soft_caps(
    family: Family, config: dict[str, Any], score_cap: float | None, logit_cap: float | None
) -> None:
    model = read(family, **config)
    assert model.attn_logit_softcapping == score_cap
    assert model.final_logit_softcapping == logit_cap


def test_gemma_4_s_layers_differ() -> None:
    """As E2B: the last layer sees all, and the last ones read the keys of earlier ones."""
    types = [SLIDING, FULL, SLIDING, SLIDING]
    config = {"layer_types": types, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
              "hidden_size_per_layer_input": 5, "vocab_size_per_layer_input": 9}  # fmt: skip
    model = read(gemma4.GEMMA4, **config)
    assert model.layer_types == (SLIDING, FULL, SLIDING, FULL)
    assert model.layer_sizes is not None
    sizes = dataclasses.astuple(model.layer_sizes)
    assert sizes == (512, 1, 2, 12, 5, 9)
    assert [model.get_source(layer) for layer in range(4)] == [None, None, 0, 1]
    assert (model.sliding_window, model.rotary_base, model.rope_local_base_freq) == (512, 1e6, 1e4)
    assert describe(gemma4.GEMMA4, model)["layer_sizes"]["reusing_inner"] == 12
    assert read(gemma4.GEMMA4, **config, per_layer_config=None) == model
    alike = read(gemma4.GEMMA4, per_layer_config={}, head_dim=4)  # as transformers 5 writes it
    assert alike.layer_sizes is not None
    assert (alike.layer_sizes.full_head_size, alike.layer_sizes.full_num_kv_heads) == (4, 1)
    for wrong, fact in (
        ({"attention_bias": True}, "attention_bias is true"),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config is"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "no rope_theta of full_attention",
        ),
        ({"rope_parameters": {FULL: gemma4.ROTARY[FULL]}}, "no rope_theta of sliding_attention"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is"),
        ({"model_type": "gemma4_unified_text"}, "hidden_size_per_layer_input is 5, and models of"),
    ):
        with pytest.raises(SpecDecError, match=fact):
            read(gemma4.GEMMA4, **config, **wrong)


def test_gemma_4_s_keys_are_values_and_unread_tensors_are_left_out(tmp_path: Path) -> None:
    prefix = "model.layers.{}.self_attn.{}.weight"
    layers, modules = range(3), ("q_proj", "k_proj", "v_proj", "k_norm", "v_norm")
    tensors = {prefix.format(n, module): draw(2, 2) for n in layers for module in modules}
    tensors["model.layers.0.layer_scalar"] = draw(1)
    config = {"num_hidden_layers": 3, "num_kv_shared_layers": 1, "attention_k_eq_v": True,
              "layer_types": [SLIDING, FULL, SLIDING]}  # fmt: skip
    folder = gemma4.prepare(write_folder(tmp_path / "m", config, tensors), "float32")
    unread = {prefix.format(2, module) for module in gemma4.UNREAD}
    assert folder.tensors.keys() == {
        *tensors, "model.layers.0.layer_scalar.weight"
    } - unread - {"model.layers.0.layer_scalar"}  # fmt: skip
    short = write_folder(tmp_path / "short", config | {"layer_types": [SLIDING]}, tensors)
    assert gemma4.prepare(short, "float32").tensors  # their number is told when fields are read
    keys, values = (folder.read(prefix.format(1, module)) for module in ("k_proj", "v_proj"))
    assert np.array_equal(keys, values)


def test_gemma_s_norms_are_stored_less_one(tmp_path: Path) -> None:
    names = {
        "transformer.layers.0.input_layernorm.weight": "model.layers.0.input_layernorm.weight",
        "transformer.layers.0.post_feedforward_layernorm.weight":
            "model.layers.0.post_feedforward_layernorm.weight",
        "transformer.layers.0.attention.q_layernorm.weight":
            "model.layers.0.self_attn.q_norm.weight",
        "transformer.ln_f.weight": "model.norm.weight",
        "transformer.vocab_embedding.weight": "model.embed_tokens.weight",
    }  # fmt: skip
    model = read(gemma.GEMMA3, head_dim=4)
    specs = list_target_tensors(model)
    tensors = {theirs: draw(*specs[ours].shape) for ours, theirs in names.items()}
    folder = write_folder(tmp_path / "m", {}, tensors)
    planned = plan(gemma.GEMMA3, folder, model, *names)
    for ours, theirs in names.items():
        addend = 0 if "embed" in theirs else 1
        assert np.array_equal(planned[ours], tensors[theirs] + np.float32(addend)), ours
    assert (model.rotary_base, model.rope_local_base_freq) == (1e6, 1e4)


@pytest.mark.parametrize(
    ("family", "config", "fact"),
    [
        (gemma.GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (gemma.GEMMA2, {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        (gemma.GEMMA3, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'a"),
        (gemma.GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (phi.PHI, {"qk_layernorm": True}, "qk_layernorm is True"),
        (phi.PHI3, {"layer_types": [SLIDING] * 4}, "layer_types is"),
        (qwen.QWEN2_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        (qwen.QWEN2_MOE, {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        (qwen.QWEN2_MOE, {"qkv_bias": False}, "qkv_bias is False"),
        (qwen.QWEN2_MOE, {"layer_types": [SLIDING] * 4}, "layer_types is"),
        (qwen.QWEN3_MOE, {"use_sliding_window": True}, "use_sliding_window is True"),
        (qwen.QWEN3_MOE, {"hidden_act": "gelu"}, "hidden_act is"),
        (opt.OPT, {"enable_bias": False}, "enable_bias is False"),
        (opt.OPT, {"_remove_final_layer_norm": True}, "_remove_final_layer_norm is True"),
        (opt.OPT, {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is"),
        (gpt2.GPT2, {"scale_attn_weights": False}, "scale_attn_weights is False"),
        (gpt2.GPT2, {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True"),
        (gpt2.GPT2, {"n_head": 3}, "n_embd 8 is not a multiple of n_head 3"),
        (SMOLLM3, {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\], not 0 or 1 for each of"
         " 4 layers"),
        (SMOLLM3, {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers is"),
        (SMOLLM3, {"sliding_window": 4, "use_sliding_window": True}, "use_sliding_window is True"),
        (STABLELM, {"head_dim": 8}, "head_dim is 8"),
        (STABLELM, {"qk_layernorm": True}, "qk_layernorm is True"),
        (qwen_hybrid.QWEN3_5, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (qwen_hybrid.QWEN3_5, {"layer_types": [LINEAR, FULL]}, "layer_types is .* for 4 layers"),
        (qwen_hybrid.QWEN3_5, {"layer_types": [LINEAR] * 3 + [SLIDING]}, "for 4 layers"),
        (qwen_hybrid.QWEN3_5_MOE, {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(family: Family, config: dict[str, Any], fact: str) -> None:
    sizes = {"ffn_dim": 6, "n_head": 2, "n_embd": 8, "n_layer": 4}
    with pytest.raises(SpecDecError, match=fact):
        read(family, **sizes | config)


@pytest.mark.parametrize(
    ("types", "pattern", "is_warned"),
    [
        ((SLIDING, FULL, SLIDING, FULL), 2, False), ((FULL,) * 4, 1, False),
        ((SLIDING,) * 4, 5, False), ((SLIDING, FULL, FULL, FULL), 2, True),
    ],
)  # fmt: skip
def test_tensorrt_llm_is_told_a_pattern(
    types: tuple[str, ...], pattern: int, is_warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(
        gemma.backend_logger, "warning", lambda text, *values: warnings.append(text % values)
    )
    described = describe(gemma.GEMMA3, read(gemma.GEMMA3, layer_types=list(types), head_dim=4))
    assert described["_sliding_window_pattern"] == pattern
    assert bool(warnings) is is_warned
    assert described["rope_local_base_freq"] == 1e4
    assert described["query_pre_attn_scalar"] == 256
    assert type(described["query_pre_attn_scalar"]) is int
    assert described["quantization"]["smoothquant_val"] is None
    assert "attn_logit_softcapping" not in described
    second = describe(gemma.GEMMA2, read(gemma.GEMMA2, query_pre_attn_scalar=4.5))
    assert (second["query_pre_attn_scalar"], second["attn_logit_softcapping"]) == (4.5, 50.0)
    assert second["inter_layernorms"]
    assert not describe(gemma.GEMMA, read(gemma.GEMMA))["inter_layernorms"]


# Qwen.


def test_qwen_s_biases_and_heads() -> None:
    """Those of Qwen2 are always there; Qwen3's heads have 128 dimensions, but for null."""
    assert read(qwen.QWEN2, num_key_value_heads="ABSENT").num_key_value_heads == 32
    assert read(qwen.QWEN2).attn_bias
    assert read(qwen.QWEN2).head_size == 4
    third = read(qwen.QWEN3)
    assert not third.attn_bias
    assert third.head_size == 128
    assert read(qwen.QWEN3, head_dim=None).head_size == 4
    assert read(qwen.QWEN3, attention_bias=True).attn_bias
    (norm,) = name_rows(qwen.QWEN3, "transformer.layers.2.attention.k_layernorm.weight")
    assert norm == SourceRows("model.layers.2.self_attn.k_norm.weight")
    described = describe(qwen.QWEN3, third)
    assert (described["qwen_type"], described["tie_word_embeddings"]) == ("qwen3", False)
    assert describe(qwen.QWEN2, read(qwen.QWEN2))["qwen_type"] == "qwen2"


@pytest.mark.parametrize(
    ("family", "sizes", "renormalizes"),
    [(qwen.QWEN2_MOE, (60, 4, 1408, 5632), False), (qwen.QWEN3_MOE, (128, 8, 768, 0), False)],
)
def test_qwen_s_mixtures(
    family: Family, sizes: tuple[int, ...], renormalizes: bool, tmp_path: Path
) -> None:
    """Defaults of transformers, the sizes that TensorRT-LLM is told, and one expert's rows."""
    experts = read(family).experts
    assert experts is not None
    assert (experts.num, experts.top_k, experts.inner, experts.shared_inner) == sizes
    assert experts.renormalizes is renormalizes
    changed = read(family, norm_topk_prob=True, num_experts=3, moe_intermediate_size=2)
    assert changed.experts is not None
    assert changed.experts.renormalizes
    described = describe(family, changed)
    assert described["moe_intermediate_size"] == 2
    assert described["moe_shared_expert_intermediate_size"] == sizes[3]
    assert described["qwen_type"] == family.name
    prefix = "model.layers.1.mlp.experts."
    tensors = {f"{prefix}{e}.{n}_proj.weight": draw(2, 8) for e in range(3) for n in ("up", "gate")}
    folder = write_folder(tmp_path / "m", {}, tensors)
    name = "transformer.layers.1.mlp.fc.weight"
    wanted = [
        np.concatenate([tensors[f"{prefix}{e}.{n}_proj.weight"] for n in ("up", "gate")])
        for e in range(3)
    ]
    assert np.array_equal(plan(family, folder, changed, name)[name], np.stack(wanted))


# Hybrids of Qwen.

HYBRID = {
    "head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3,
    "linear_value_head_dim": 5, "linear_conv_kernel_dim": 2, "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 6, "num_experts": 2,
}  # fmt: skip


def test_hybrids_are_read() -> None:
    """Every fourth layer attends; a quarter of each head is rotated; images do not matter."""
    model = read(qwen_hybrid.QWEN3_5)
    assert model.layer_types == (LINEAR, LINEAR, LINEAR, FULL)
    assert (model.head_size, model.rotary_pct, model.num_key_value_heads) == (256, 0.25, 1)
    sizes = model.linear_attention
    assert sizes is not None
    assert (sizes.num_key_heads, sizes.num_value_heads) == (16, 32)
    assert (sizes.key_size, sizes.value_size, sizes.num_taps) == (128, 128, 4)
    assert model.arithmetic.adds_one
    assert model.arithmetic.gates_attention
    assert model.arithmetic.mlp == "gated"
    small = read(qwen_hybrid.QWEN3_5, **HYBRID, full_attention_interval=2)
    assert small.layer_types == (LINEAR, FULL, LINEAR, FULL)
    described = describe(qwen_hybrid.QWEN3_5, small)
    assert described["linear_attention"]["value_size"] == 5
    full = read(qwen_hybrid.QWEN3_5, layer_types=[FULL] * 4)
    assert (full.layer_types, full.linear_attention) == (None, None)
    assert full.arithmetic.gates_attention
    assert "linear_attention" not in describe(qwen_hybrid.QWEN3_5, full)
    listed = [FULL, LINEAR, LINEAR, LINEAR]
    rotary = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [1, 1, 0],
              "mrope_interleaved": True, "partial_rotary_factor": 0.5}  # fmt: skip
    model = read(qwen_hybrid.QWEN3_5, layer_types=listed, rope_parameters=rotary)
    assert model.layer_types == tuple(listed)
    assert (model.rotary_base, model.rotary_pct, model.rotary_scaling) == (5e5, 0.5, None)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    sections = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    model = read(qwen_hybrid.QWEN3_5, rope_scaling=yarn | sections)  # as for transformers 4.57
    assert model.rotary_scaling == yarn


@pytest.mark.parametrize(
    ("family", "num", "top_k"),
    [(qwen_hybrid.QWEN3_5_MOE, 256, 8), (qwen_hybrid.QWEN3_NEXT, 512, 10)],
)
def test_mixtures_of_hybrids(family: Family, num: int, top_k: int) -> None:
    """Which need no size of a dense MLP."""
    model = read(family, intermediate_size="ABSENT")
    assert model.experts is not None
    assert (model.experts.num, model.experts.top_k) == (num, top_k)
    assert (model.experts.inner, model.experts.shared_inner) == (512, 512)
    assert model.experts.renormalizes
    assert model.arithmetic.mlp == "experts"
    assert read(family, num_key_value_heads="ABSENT").num_key_value_heads == 2
    assert describe(family, model)["moe_shared_expert_intermediate_size"] == 512


def test_queries_and_gates_are_dealt_by_heads(tmp_path: Path) -> None:
    """A head's query is followed by its gate in the source; a checkpoint has all queries first."""
    model = read(qwen_hybrid.QWEN3_5, **HYBRID)
    prefix, name = "model.layers.3.self_attn.", "transformer.layers.3.attention.qkv.weight"
    tensors = {f"{prefix}{part}_proj.weight": draw(4 if part != "q" else 16, 8) for part in "qkv"}
    folder = write_folder(tmp_path / "m", {}, tensors)
    heads = tensors[f"{prefix}q_proj.weight"].reshape(2, 2, 4, 8)
    keys, values = (tensors[f"{prefix}{part}_proj.weight"] for part in "kv")
    wanted = np.concatenate((heads[:, 0].reshape(8, 8), keys, values, heads[:, 1].reshape(8, 8)))
    assert np.array_equal(plan(qwen_hybrid.QWEN3_5, folder, model, name)[name], wanted)


def test_qwen3_next_s_projections_are_dealt_by_key_heads(tmp_path: Path) -> None:
    """Of 2 key heads: 3 rows of q and of k, 2 value heads of 5 rows of v and of z; 2 of b and a."""
    model = read(qwen_hybrid.QWEN3_NEXT, **HYBRID)
    prefix = "model.layers.0.linear_attn."
    names = [f"transformer.layers.0.linear_attention.{part}.weight" for part in ("qkvz", "ba")]
    tensors = {
        f"{prefix}in_proj_qkvz.weight": draw(52, 8),
        f"{prefix}in_proj_ba.weight": draw(8, 8),
    }
    folder = write_folder(tmp_path / "m", {}, tensors)
    groups = tensors[f"{prefix}in_proj_qkvz.weight"].reshape(2, 26, 8)
    sections = np.split(groups, [3, 6, 16], axis=1)
    planned = plan(qwen_hybrid.QWEN3_NEXT, folder, model, *names)
    wanted = np.concatenate([section.reshape(-1, 8) for section in sections])
    assert np.array_equal(planned[names[0]], wanted)
    strengths = tensors[f"{prefix}in_proj_ba.weight"].reshape(2, 2, 2, 8)
    wanted = np.concatenate((strengths[:, 0].reshape(4, 8), strengths[:, 1].reshape(4, 8)))
    assert np.array_equal(planned[names[1]], wanted)


def test_convolutions_become_vectors(tmp_path: Path) -> None:
    weights, other = draw(3, 1, 2), draw(3, 2)
    name = "model.layers.0.linear_attn.conv1d.weight"
    folder = write_folder(tmp_path / "m", {}, {name: weights, "model.norm.weight": other})
    folder = qwen_hybrid.prepare(folder, "float32")
    assert folder.tensors[name].shape == (6,)
    assert np.array_equal(folder.read(name), weights.reshape(6))
    assert np.array_equal(folder.read_block(name, 1, 5), weights.reshape(6)[1:5])
    assert np.array_equal(folder.read("model.norm.weight"), other)


# Phi.


def test_phi() -> None:
    model = read(phi.PHI)
    assert (model.hidden_act, model.rotary_pct, model.norm_epsilon) == ("gelu_new", 0.5, 1e-5)
    assert read(phi.PHI, hidden_act="gelu_pytorch_tanh").hidden_act == "gelu_new"
    assert read(phi.PHI, partial_rotary_factor=0.25).rotary_pct == 0.25
    (down,) = name_rows(phi.PHI, "transformer.layers.0.mlp.proj.bias")
    assert down.name == "model.layers.0.mlp.fc2.bias"
    assert name_rows(phi.PHI, "transformer.ln_f.bias")[0].name == "model.final_layernorm.bias"
    assert "transformer.layers.{layer}.post_layernorm" not in phi.PHI.modules, "side by side"


def test_phi_3_multiplies_before_it_activates(tmp_path: Path) -> None:
    """The source has [gate; up], the checkpoint [up; gate]."""
    model = read(phi.PHI3)
    assert (model.hidden_act, model.max_position_embeddings) == ("swiglu", 4096)
    stored, name = draw(12, 8), "transformer.layers.0.mlp.fc.weight"
    folder = write_folder(tmp_path / "m", {}, {"model.layers.0.mlp.gate_up_proj.weight": stored})
    wanted = np.concatenate((stored[6:], stored[:6]))
    assert np.array_equal(plan(phi.PHI3, folder, model, name)[name], wanted)


def test_phi_3_s_scaling_has_its_newer_name() -> None:
    scaling = {"type": "su", "short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}
    model = read(phi.PHI3, rope_scaling=scaling, original_max_position_embeddings=2048)
    assert model.rotary_scaling == {**scaling, "type": "longrope"}
    assert model.original_max_position_embeddings == 2048
    described = describe(phi.PHI3, model)
    assert described["position_embedding_type"] == "long_rope"
    assert described["longrope_scaling_short_factors"] == [1.0, 1.0]
    assert described["longrope_scaling_long_factors"] == [2.0, 3.0]
    assert "position_embedding_type" not in describe(phi.PHI3, read(phi.PHI3))
    assert phi.PHI3.find_problem_014(model) is None
    problem = phi.PHI3.find_problem_014(read(phi.PHI3, partial_rotary_factor=0.5))
    assert problem is not None
    assert problem[0] == "partial_rotary_factor is 0.5, which TensorRT-LLM 0.14's Phi-3 ignores"


# GPT-2 and OPT.


def test_gpt_2(tmp_path: Path) -> None:
    """Its linear layers are stored transposed; the causal mask is no weight."""
    sizes = {"n_head": 2, "n_embd": 8, "n_layer": 3}
    model = read(gpt2.GPT2, **sizes)
    assert (model.num_hidden_layers, model.intermediate_size) == (3, 32)
    assert (model.head_size, model.max_position_embeddings) == (4, 1024)
    assert (model.hidden_act, model.norm_epsilon) == ("gelu_new", 1e-5)
    assert read(gpt2.GPT2, **sizes, n_inner=10).intermediate_size == 10
    stored = {"transformer.h.2.attn.c_attn.weight": draw(8, 24),
              "transformer.wpe.weight": draw(1024, 8)}  # fmt: skip
    names = "transformer.layers.2.attention.qkv.weight", "transformer.position_embedding.weight"
    planned = plan(gpt2.GPT2, write_folder(tmp_path / "m", {}, stored), model, *names)
    assert np.array_equal(planned[names[0]], stored["transformer.h.2.attn.c_attn.weight"].T)
    assert np.array_equal(planned[names[1]], stored["transformer.wpe.weight"])
    assert "*.attn.bias" in gpt2.GPT2.ignored
    assert describe(gpt2.GPT2, model)["position_embedding_type"] == "learned_absolute"


def test_opt(tmp_path: Path) -> None:
    """The first two rows of positions are padding's; norms may stand after each part."""
    model = read(opt.OPT, ffn_dim=6, max_position_embeddings=5)
    assert (model.intermediate_size, model.hidden_act) == (6, "relu")
    assert not model.arithmetic.is_post_norm
    stored = draw(7, 8)
    folder = write_folder(tmp_path / "m", {}, {"decoder.embed_positions.weight": stored})
    name = "transformer.position_embedding.weight"
    assert np.array_equal(plan(opt.OPT, folder, model, name)[name], stored[2:])
    post = read(opt.OPT, ffn_dim=6, do_layer_norm_before=False, _remove_final_layer_norm=True)
    assert post.arithmetic.is_post_norm
    described = describe(opt.OPT, post)
    assert described["do_layer_norm_before"] is False
    assert described["mapping"] == {"world_size": 2, "tp_size": 2, "pp_size": 1}
    assert described["quantization"] == {"quant_algo": None}
    parallel = dataclasses.replace(LAYOUT, use_parallel_embedding=True)
    assert read(opt.OPT, parallel, ffn_dim=6).use_parallel_embedding
    narrow = read(opt.OPT, parallel, ffn_dim=6, word_embed_proj_dim=4)
    assert not narrow.use_parallel_embedding


OPT_350M = {"hidden_size": 6, "word_embed_proj_dim": 4}


@pytest.mark.parametrize("is_tied", [True, False])
def test_opt_350m_s_projections_are_folded(is_tied: bool, tmp_path: Path) -> None:
    """Embedding [V, P] by one, head by the other; whole, and in blocks."""
    tensors = {
        "decoder.embed_tokens.weight": draw(300, 4), "decoder.project_in.weight": draw(6, 4),
        "decoder.project_out.weight": draw(4, 6), "decoder.other": draw(2),
    }  # fmt: skip
    if not is_tied:
        tensors["lm_head.weight"] = draw(300, 4)
    folder = write_folder(tmp_path / "m", OPT_350M, tensors)
    folded = opt.fold_projections(folder, "float32")
    table = tensors["decoder.embed_tokens.weight"]
    embedding = table @ tensors["decoder.project_in.weight"].T
    head = tensors.get("lm_head.weight", table) @ tensors["decoder.project_out.weight"]
    assert folded.tensors.keys() == {
        "decoder.embed_tokens.weight",
        "lm_head.weight",
        "decoder.other",
    }
    assert folded.config["tie_word_embeddings"] is False
    for name, wanted in (("decoder.embed_tokens.weight", embedding), ("lm_head.weight", head)):
        np.testing.assert_allclose(folded.read(name), wanted, rtol=1e-5, atol=1e-6)
        whole = folded.read(name)
        assert np.array_equal(folded.read_block(name, 298, 300, (1, 4)), whole[298:, 1:4])
        assert np.array_equal(folded.read_block(name, 3, 5), whole[3:5])


def test_opt_s_projections_that_do_not_fit(tmp_path: Path) -> None:
    tensors = {
        "decoder.embed_tokens.weight": draw(9, 4),
        "decoder.project_in.weight": draw(4, 6),
    }
    folder = write_folder(tmp_path / "m", OPT_350M, tensors)
    with pytest.raises(SpecDecError, match=r"project_in.weight is \[4, 6\], not \[6, 4\]"):
        opt.fold_projections(folder, "float32")
    folder.config = {"hidden_size": 4, "word_embed_proj_dim": 4}
    assert opt.fold_projections(folder, "float32") is folder


# Families that TensorRT-LLM lacks.


def test_seed_oss_has_biases_on_one_side() -> None:
    arithmetic = read(SEED_OSS).arithmetic
    assert (arithmetic.qkv_bias, arithmetic.dense_bias, arithmetic.mlp_bias) == (True, False, False)
    changed = read(
        SEED_OSS, attention_bias=False, attention_out_bias=True, mlp_bias=True
    ).arithmetic
    assert (changed.qkv_bias, changed.dense_bias, changed.mlp_bias) == (False, True, True)
    assert read(SEED_OSS).head_size == 128


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (3,)), ({"no_rope_layer_interval": 2}, (1, 3)), ({"num_hidden_layers": 9}, (3, 7)),
        ({"no_rope_layers": [1, 0, 0, 1]}, (1, 2)), ({"no_rope_layers": [1] * 4}, ()),
    ],
)  # fmt: skip
def test_smollm3_s_layers_without_positions(
    config: dict[str, Any], layers: tuple[int, ...]
) -> None:
    model = read(SMOLLM3, **config)
    assert model.arithmetic.layers_without_positions == layers
    assert (model.rotary_base, model.arithmetic.qkv_bias) == (2e6, False)


def test_stablelm() -> None:
    model = read(STABLELM)
    assert (model.rotary_pct, model.norm_epsilon, model.head_size) == (0.25, 1e-5, 4)
    assert model.arithmetic.norm == "layer"
    assert not model.arithmetic.is_parallel
    changed = read(STABLELM, use_parallel_residual=True, use_qkv_bias=True, head_dim=4)
    assert changed.arithmetic.is_parallel
    assert changed.arithmetic.qkv_bias


# Wrappers of text models.


def test_wrappers_are_those_of_transformers() -> None:
    """Each is a class there that generates; the names of its text model are put in one form."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    assert set(WRAPPERS) <= set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values())
    assert len(set(WRAPPERS)) == len(WRAPPERS)

    def strip(name: str) -> str:
        start, bare = next((pair for pair in NAMES if name.startswith(pair[0])), ("", ""))
        return bare + name[len(start) :]

    assert strip("model.language_model.norm.weight") == "model.norm.weight"
    assert strip("language_model.model.norm.weight") == "model.norm.weight"
    assert strip("language_model.lm_head.weight") == "lm_head.weight"
    assert strip("model.norm.weight") == "model.norm.weight"


WRAPPER = {
    "architectures": ["LlavaForConditionalGeneration"], "dtype": "float16",
    "tie_word_embeddings": True, "quantization_config": {"bits": 4},
    "text_config": {
        "model_type": "mistral", "hidden_size": 8, "dtype": "bfloat16",
        "architectures": ["MistralModel"],  # by which transformers does not go
    },
}  # fmt: skip


@pytest.mark.parametrize("has_head", [True, False])
def test_a_text_model_is_taken_out(has_head: bool, tmp_path: Path) -> None:
    """Its own values come before the wrapper's and its class's; vision is left out.

    Without a head of its own it is tied where the wrapper is.
    """
    names = ["model.language_model.norm.weight", "vision_tower.a", "model.visual.b", "visual.c",
             "multi_modal_projector.d"] + ["lm_head.weight"] * has_head  # fmt: skip
    folder = write_folder(tmp_path / "m", WRAPPER, {name: draw(2) for name in names})
    folder = wrappers.unwrap(folder)
    assert folder.tensors.keys() == {"model.norm.weight", *["lm_head.weight"] * has_head}
    assert folder.config["hidden_size"] == 8
    assert folder.config["intermediate_size"] == 14336, "of transformers' Mistral"
    assert folder.config["dtype"] == "bfloat16"
    assert folder.config["quantization_config"] == {"bits": 4}
    assert ("tie_word_embeddings" in folder.config) is not has_head
    assert "architectures" not in folder.config


@pytest.mark.parametrize("architecture", ["PaliGemmaForConditionalGeneration", "LlamaForCausalLM"])
def test_other_models_are_left_as_they_are(architecture: str, tmp_path: Path) -> None:
    config = WRAPPER | {"architectures": [architecture]}
    folder = write_folder(tmp_path / "m", config, {"language_model.model.norm.weight": draw(2)})
    folder = wrappers.unwrap(folder)
    assert folder.config == config
    assert folder.tensors.keys() == {"language_model.model.norm.weight"}


@pytest.mark.parametrize(
    ("text", "is_warned"),
    [
        ({"model_type": "gemma2"}, True), ({"model_type": "gemma3_text"}, False),
        ({"model_type": "gemma2", "final_logit_softcapping": None}, False),
        ({"final_logit_softcapping": 20.0}, True), ({"logits_scaling": 1.0}, False),
        ({"logits_scaling": 8.0}, True),
    ],
)  # fmt: skip
def test_logits_that_a_wrapper_leaves_alone(
    text: dict[str, Any], is_warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 2 caps its logits by 30 where its configuration does not say so."""
    warnings: list[str] = []
    monkeypatch.setattr(wrappers.logger, "warning", lambda text, *_: warnings.append(text))
    folder = write_folder(tmp_path / "m", WRAPPER | {"text_config": text}, {"a": draw(2)})
    folder = wrappers.unwrap(folder)
    assert bool(warnings) is is_warned


# LFM2.


@pytest.mark.parametrize(
    ("config", "inner"),
    [
        ({"block_ff_dim": 6656}, 4608),  # LFM2-350M
        ({"block_ff_dim": 10240}, 6912),  # LFM2-700M
        ({"block_ff_dim": 12288, "intermediate_size": 1}, 8192),  # LFM2-1.2B; the older name counts
        ({"block_ff_dim": 12288, "block_ffn_dim_multiplier": None}, 8192),
        ({"block_ff_dim": 300, "block_multiple_of": 7, "block_ffn_dim_multiplier": 0.5}, 105),
        ({"intermediate_size": 11, "block_auto_adjust_ff_dim": False}, 11),
    ],
)  # fmt: skip
def test_lfm2_s_mlps(config: dict[str, Any], inner: int) -> None:
    model = read(lfm2.LFM2, **{"intermediate_size": "ABSENT"} | config)
    assert model.intermediate_size == inner


def test_lfm2_s_layers(tmp_path: Path) -> None:
    """Attention by number or by name; a convolution becomes a vector of all its taps."""
    by_number = read(lfm2.LFM2, full_attn_idxs=[1, 3])
    by_name = read(lfm2.LFM2, layer_types=[CONV, FULL, CONV, FULL])
    assert by_number.layer_types == by_name.layer_types == (CONV, FULL, CONV, FULL)
    assert by_name.short_conv is not None
    assert (by_name.short_conv.num_channels, by_name.short_conv.num_taps) == (8, 3)
    plain = read(lfm2.LFM2)
    assert (plain.layer_types, plain.short_conv) == (None, None)
    with pytest.raises(SpecDecError, match="for 4 layers"):
        read(lfm2.LFM2, layer_types=[CONV] * 3)
    with pytest.raises(SpecDecError, match="layer_types is"):
        read(lfm2.LFM2, layer_types=[CONV, {}, FULL, FULL])
    mixed = dataclasses.replace(by_name, layer_types=(CONV, {}, FULL, FULL))  # type: ignore[arg-type]
    assert any("layer_types is" in fact for fact, _ in mixed.find_problems())
    mixture = read(lfm2.LFM2_MOE, num_experts=4, num_dense_layers=9)
    assert mixture.experts is not None
    assert (mixture.experts.scores, mixture.experts.num_dense_layers) == ("sigmoid", 4)
    name, taps = "model.layers.0.conv.conv.weight", draw(8, 1, 3)
    folder = write_folder(tmp_path / "m", {"tie_embedding": False}, {name: taps})
    prepared = lfm2.prepare(folder, "float32")
    assert np.array_equal(prepared.read(name), taps.reshape(-1))
    assert prepared.config["tie_word_embeddings"] is False
