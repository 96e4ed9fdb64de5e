"""A GGUF file's keys, names and orders, judged by the package `gguf`, transformers and llama.cpp.

Files are written by the package's own methods, so that a key's name is never told here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.errors import SpecDecError
from specdec.gguf import file as gguf_file
from specdec.gguf import special
from specdec.gguf.config import choose_dtype, find_architecture, read_config
from specdec.gguf.file import open_parts
from specdec.gguf.metadata import Metadata
from specdec.gguf.model import order_values
from specdec.gguf.names import ARCHITECTURES, MTP_NAMES, NAMES, READ, order_turned
from tests.blocks import finish

KINDS = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
HEADS, KV_HEADS, HEAD_DIM = 6, 3, 20
COMMON: dict[str, Any] = {
    "context_length": 640, "embedding_length": 96, "block_count": 4, "feed_forward_length": 224,
    "head_count": HEADS, "head_count_kv": KV_HEADS, "key_length": HEAD_DIM,
    "value_length": HEAD_DIM, "rope_dimension_count": HEAD_DIM, "rope_freq_base": 5e5,
    "layer_norm_rms_eps": 3e-6,
}  # fmt: skip
EXPECTED: dict[str, Any] = {
    "max_position_embeddings": 640, "hidden_size": 96, "num_hidden_layers": 4,
    "intermediate_size": 224, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "rope_theta": 5e5, "rms_norm_eps": 3e-6, "vocab_size": 50,
    "dtype": "float32", "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 40}
HYBRID = {
    "ssm_conv_kernel": 4, "ssm_state_size": 24, "ssm_group_count": 2, "ssm_time_step_rank": 6,
    "ssm_inner_size": 6 * 16, "full_attention_interval": 2,
}  # fmt: skip
CHOSEN = {"expert_count": 8, "expert_used_count": 2}  # of the size of an MLP
MAMBA_KEYS = {
    "ssm_conv_kernel": 4, "ssm_state_size": 24, "ssm_group_count": 2, "ssm_time_step_rank": 6,
    "ssm_inner_size": 2 * 96,
}  # fmt: skip
MAMBA = MAMBA_KEYS | {
    "head_count_kv": [0, KV_HEADS, 0, KV_HEADS], "logit_scale": 8.0,
    "rope_scaling_finetuned": False,
}  # fmt: skip
MAMBA_FIELDS = {
    "model_type": "granitemoehybrid", "mamba_d_conv": 4, "mamba_d_state": 24, "mamba_n_groups": 2,
    "mamba_n_heads": 6, "mamba_d_head": 32, "mamba_expand": 2, "mamba_conv_bias": True,
    "mamba_proj_bias": False, "position_embedding_type": "nope", "attention_bias": False,
    "layer_types": ["mamba", "full_attention"] * 2,
}  # fmt: skip
HYBRID_FIELDS = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_value_head_dim": 16, "mtp_num_hidden_layers": 0,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4: dict[str, Any] = {
    "key_length": 8, "value_length": 8, "rope_dimension_count": 8, "key_length_swa": 12,
    "value_length_swa": 12, "rope_dimension_count_swa": 12, "head_count_kv": [KV_HEADS, 1] * 2,
    "shared_kv_layers": 0, "embedding_length_per_layer_input": 0, "sliding_window": 16,
    "sliding_window_pattern": [True, False] * 2,
}  # fmt: skip
GEMMA4_FIELDS: dict[str, Any] = {
    "model_type": "gemma4_text", "head_dim": 12, "global_head_dim": 8, "attention_k_eq_v": True,
    "num_global_key_value_heads": 1, "layer_types": [SLIDING, FULL] * 2, "sliding_window": 16,
    "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "enable_moe_block": False,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        FULL: {"rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": 1.0},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4}},
}  # fmt: skip
# llama.cpp's architecture, what is called of GGUFWriter's add_..., tensors, fields of config.json.
CASES: list[tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any]]] = [
    ("llama", {}, (), {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False,
        "mlp_bias": False}),
    ("llama", {"vocab_size": 50}, ("output.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate.bias"), {
        "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"sliding_window": 77}, (), {"model_type": "mistral", "sliding_window": 77}),
    ("llama", {"expert_count": 8, "expert_used_count": 2}, (), {
        "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
        "sliding_window": None}),
    ("llama", {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 2.5}, (), {
        "rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    ("mistral3", {}, (), {"model_type": "mistral", "sliding_window": None}),
    ("mistral3", {"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": 4.0,
                  "rope_scaling_orig_ctx_len": 160, "attn_temperature_scale": 0.1,
                  "rope_scaling_yarn_log_mul": 1.0}, (), {
        "model_type": "ministral3",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 160}}),
    ("mistral3", {"attn_temperature_scale": 0.25}, (), {
        "rope_scaling": {"rope_type": "default", "llama_4_scaling_beta": 0.25,
                         "original_max_position_embeddings": 640}}),
    ("qwen2", {}, (), {"model_type": "qwen2"}),
    ("qwen2", {"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": 4.0,
               "rope_scaling_orig_ctx_len": 160, "rope_scaling_yarn_beta_fast": 30.0,
               "rope_scaling_yarn_beta_slow": 2.0}, (), {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 30.0, "beta_slow": 2.0,
                         "original_max_position_embeddings": 160}}),
    ("qwen3", {}, ("blk.0.attn_q.bias",), {"model_type": "qwen3", "attention_bias": True}),
    ("qwen2moe", EXPERTS | {"expert_shared_feed_forward_length": 72}, (), {
        "model_type": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 40, "shared_expert_intermediate_size": 72,
        "norm_topk_prob": False}),
    ("qwen3moe", EXPERTS, (), {
        "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 40,
        "norm_topk_prob": True, "attention_bias": False}),
    # Of those that see: the sections and layers of images change nothing.
    ("qwen2vl", {"rope_dimension_sections": [4, 3, 3, 0]}, (), {"model_type": "qwen2"}),
    ("qwen3vl", {"rope_dimension_sections": [4, 3, 3, 0], "num_deepstack_layers": 3}, (), {
        "model_type": "qwen3", "attention_bias": False}),
    ("qwen3vlmoe", EXPERTS | {"rope_dimension_sections": [4, 3, 3, 0]}, (), {
        "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 40,
        "norm_topk_prob": True, "attention_bias": False}),
    ("gemma", {}, (), {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh"}),
    ("gemma2", {"sliding_window": 64, "attn_logit_softcapping": 40.0,
                "final_logit_softcapping": 20.0}, (), {
        "attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0, "sliding_window": 64,
        "query_pre_attn_scalar": HEAD_DIM, "layer_types": [SLIDING, FULL] * 2}),
    # Of the published 27B: 4608 / 32 and 5376 / 32, beside heads of 128.
    ("gemma2", {"block_count": 46, "embedding_length": 4608, "head_count": 32, "head_count_kv": 16,
                "key_length": 128, "value_length": 128, "rope_dimension_count": 128}, (), {
        "query_pre_attn_scalar": 144, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "sliding_window": 4096, "hidden_size": 4608,
        "num_hidden_layers": 46, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128}),
    ("gemma3", {"block_count": 62, "embedding_length": 5376, "head_count": 32, "head_count_kv": 16,
                "key_length": 128, "value_length": 128, "rope_dimension_count": 128,
                "sliding_window": 1024}, (), {
        "query_pre_attn_scalar": 168, "rope_local_base_freq": 10000.0, "sliding_window": 1024,
        "layer_types": ([*[SLIDING] * 5, FULL] * 11)[:62], "hidden_size": 5376,
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128}),
    ("gemma3", {"sliding_window": 16, "sliding_window_pattern": [True, False, False, True],
                "rope_freq_base_swa": 2e4}, (), {
        "layer_types": [SLIDING, FULL, FULL, SLIDING], "rope_local_base_freq": 2e4}),
    ("gemma4", GEMMA4, ("rope_freqs.weight",), GEMMA4_FIELDS),
    # As E4B: the last layers read the keys of the two before them, and have MLPs twice as wide.
    ("gemma4", GEMMA4 | {
        "block_count": 6, "sliding_window_pattern": [True, False] * 3, "shared_kv_layers": 4,
        "feed_forward_length": [224] * 2 + [448] * 4, "head_count_kv": KV_HEADS,
        "embedding_length_per_layer_input": 7, "final_logit_softcapping": 9.0,
        "rope_freq_base_swa": 2e4},
     ("rope_freqs.weight", "per_layer_token_embd.weight", "blk.1.attn_v.weight"), GEMMA4_FIELDS | {
        "num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True, "attention_k_eq_v": False, "hidden_size_per_layer_input": 7,
        "num_global_key_value_heads": KV_HEADS, "vocab_size_per_layer_input": 4,
        "final_logit_softcapping": 9.0, "rope_parameters": {
            FULL: GEMMA4_FIELDS["rope_parameters"][FULL],
            SLIDING: {"rope_type": "default", "rope_theta": 2e4}}}),
    # As 26B-A4B, but with values of their own beside keys that differ in number.
    ("gemma4", GEMMA4 | EXPERTS, ("rope_freqs.weight", "blk.0.ffn_gate_inp.weight",
                                  "blk.1.attn_qkv.weight", "blk.3.attn_v.weight"), {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "attention_k_eq_v": False,
        "moe_intermediate_size": 40, "head_dim": 12, "per_layer_config": dict.fromkeys(
            "13", {"head_dim": 8, "num_key_value_heads": 1})}),
    ("phi3", {"sliding_window": 64, "rope_scaling_orig_ctx_len": 160}, (), {
        "model_type": "phi3", "sliding_window": 64, "original_max_position_embeddings": 160}),
    ("granite", {"embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 8.0,
                 "attention_scale": 0.0625}, (), {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 8.0,
        "attention_multiplier": 0.0625}),
    # As llama.cpp writes a Granite 4 whose layers all attend.
    ("granite", MAMBA_KEYS | {"logit_scale": 8.0, "expert_shared_feed_forward_length": 224}, (), {
        "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
        "attention_multiplier": 1 / math.sqrt(HEAD_DIM)}),
    ("stablelm", {"layer_norm_eps": 1e-5, "layer_norm_rms_eps": None, "rope_dimension_count": 5,
                  "parallel_residual": True},
     ("blk.0.ffn_norm.weight", "blk.0.attn_qkv.bias"), {
        "model_type": "stablelm", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25,
        "use_qkv_bias": True, "use_parallel_residual": False}),
    ("smollm3", {}, (), {"model_type": "smollm3", "no_rope_layer_interval": 4}),
    ("gpt-oss", {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 40,
                 "sliding_window": 77},
     ("output.weight", "blk.0.attn_q.bias"), {
        "model_type": "gpt_oss", "attention_bias": True, "num_local_experts": 8,
        "num_experts_per_tok": 2, "intermediate_size": 40, "sliding_window": 77,
        "tie_word_embeddings": False, "layer_types": [SLIDING, FULL] * 2,
        "rope_scaling": {"rope_type": "default"}}),
    ("seed_oss", {}, ("blk.0.attn_output.bias",), {
        "model_type": "seed_oss", "attention_bias": False, "attention_out_bias": True}),
    ("lfm2", {"head_count_kv": [0, KV_HEADS, 0, KV_HEADS], "shortconv_l_cache": 4}, (), {
        "model_type": "lfm2", "layer_types": ["conv", FULL] * 2, "conv_L_cache": 4,
        "block_auto_adjust_ff_dim": False, "norm_eps": 3e-6}),
    ("lfm2", {"shortconv_l_cache": 3, "sliding_window": 0}, (), {
        "layer_types": [FULL] * 4, "norm_eps": 3e-6}),
    ("lfm2moe", EXPERTS | {
        "head_count_kv": [0, 0, KV_HEADS, 0], "shortconv_l_cache": 3,
        "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID,
        "leading_dense_block_count": 1, "expert_weights_scale": 1.0}, (), {
        "model_type": "lfm2_moe", "layer_types": ["conv", "conv", FULL, "conv"],
        "num_dense_layers": 1, "num_experts": 8, "num_experts_per_tok": 2, "norm_eps": 3e-6,
        "moe_intermediate_size": 40, "norm_topk_prob": True}),
    ("granitemoe", CHOSEN | {"logit_scale": 8.0}, ("blk.2.attn_q.bias",), {
        "model_type": "granitemoe", "num_local_experts": 8, "num_experts_per_tok": 2,
        "attention_bias": True, "logits_scaling": 8.0}),
    ("granitemoe", MAMBA_KEYS | CHOSEN | {
        "logit_scale": 8.0, "expert_shared_feed_forward_length": 72}, (), {
        "model_type": "granitemoeshared", "shared_intermediate_size": 72}),
    ("granitehybrid", MAMBA | CHOSEN | {"expert_shared_feed_forward_length": 72},
     ("blk.0.ssm_conv1d.bias",), MAMBA_FIELDS | {
        "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 72}),
    ("granitehybrid", MAMBA | {"rope_scaling_finetuned": True, "logit_scale": None},
     ("blk.1.attn_q.bias",), MAMBA_FIELDS | {
        "logits_scaling": 1.0,
        "num_local_experts": 0, "shared_intermediate_size": 224, "mamba_conv_bias": False,
        "position_embedding_type": "rope", "attention_bias": True}),
    ("qwen35", HYBRID, (), HYBRID_FIELDS | {  # transformers rotates a quarter, llama.cpp all
        "model_type": "qwen3_5_text", "partial_rotary_factor": 1.0}),
    ("qwen35", HYBRID | {"rope_dimension_count": 20}, (), {"partial_rotary_factor": 1.0}),
    ("qwen35", HYBRID | {"block_count": 5, "nextn_predict_layers": 1, "rope_dimension_count": 5},
     (), HYBRID_FIELDS | {"mtp_num_hidden_layers": 1, "partial_rotary_factor": 0.25}),
    ("qwen35moe", HYBRID | EXPERTS | {"expert_shared_feed_forward_length": 72}, (),
     HYBRID_FIELDS | {
        "model_type": "qwen3_5_moe_text", "num_experts": 8, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 72}),
    ("qwen3next", HYBRID | EXPERTS, (), {
        "model_type": "qwen3_5_moe_text", "partial_rotary_factor": 1.0}),
]  # fmt: skip

# Fields that transformers reads, or keeps, though its classes have no default for them.
WITHOUT_DEFAULT = {
    "rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq", "head_dim",
    "hidden_activation", "mtp_num_hidden_layers", "intermediate_size", "decoder_sparse_step",
    "norm_topk_prob", "mlp_only_layers", "global_head_dim", "num_global_key_value_heads",
}  # fmt: skip


def write(
    path: Path, architecture: str, calls: dict[str, Any], tensors: dict[str, Any]
) -> Metadata:
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (COMMON | calls).items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    for name, values in ({"token_embd.weight": np.zeros((50, 96), np.float32)} | tensors).items():
        writer.add_tensor(name, np.asarray(values))
    finish(writer)
    files, stored = open_parts(path)
    return Metadata(path, files[0].metadata, stored)


def read(tmp_path: Path, architecture: str, calls: dict[str, Any], **tensors: Any) -> Any:
    data = write(tmp_path / "m.gguf", architecture, calls, tensors)
    return read_config(data, find_architecture(data))


@pytest.mark.parametrize(("architecture", "calls", "tensors", "fields"), CASES)
def test_keys_are_fields(
    architecture: str, calls: dict[str, Any], tensors: tuple[str, ...], fields: dict[str, Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    found = read(tmp_path, architecture, calls, **{n: np.ones(4, np.float32) for n in tensors})
    expected = EXPECTED | fields
    if {"layer_norm_eps", "norm_eps"} & fields.keys():
        del expected["rms_norm_eps"]
    assert {name: found.get(name) for name in expected} == expected
    # The fields are those of transformers' class: a misspelt one would be ignored.
    default = transformers.AutoConfig.for_model(found["model_type"])
    known = default.to_dict() | default.attribute_map
    assert {name for name in found if name not in known} <= WITHOUT_DEFAULT


def test_every_architecture_is_llama_cpps_and_has_a_case() -> None:
    assert READ.keys() <= KINDS.keys()
    assert {architecture for architecture, *_ in CASES} == set(READ)
    for record in READ.values():
        model = getattr(transformers, record.architecture)
        assert model.config_class.model_type == record.model_type
        assert ARCHITECTURES[record.architecture] in READ


@pytest.mark.parametrize("name", list(READ))
def test_modules_have_the_packages_names(name: str) -> None:
    """Where the package knows the module in such a model; the others are no tensors of one."""
    names = gguf.get_tensor_name_map(KINDS[name], 2)
    tensors = {gguf.TENSOR_NAMES[kind].format(bid=1) for kind in gguf.MODEL_TENSORS[KINDS[name]]}
    unknown = set()
    for hf_module, gguf_module in READ[name].layer.items():
        module = hf_module.replace(".{expert}", "")
        prefix = "" if ".experts.w" in module else "model."  # as the converter merges LFM2's
        theirs = names.get_name(f"{prefix}layers.1.{module}")
        if theirs is None:
            unknown.add(gguf_module)
        else:
            assert theirs == f"blk.1.{gguf_module}", hf_module
    lost = {module for module in unknown if f"blk.1.{module}" in tensors}
    # Qwen3-Next's are one tensor, ssm_ba; dt_bias is dt_proj.bias to the converter.
    # Granite's gate and up are one tensor, too.
    joint = {f"ffn_{part}_{kind}" for part in ("gate", "up", "down") for kind in ("exps", "shexp")}
    joint = joint | {"ffn_gate_inp"} if name in ("granitemoe", "granitehybrid") else set()
    assert lost <= {"ssm_dt", "ssm_beta", "ssm_alpha"} | joint
    for hf_module, gguf_module in NAMES.items():
        if hf_module.startswith(("model.", "lm_head")):
            assert names.get_name(hf_module) in (gguf_module, None)
    if any("nextn" in tensor for tensor in tensors):
        nextn = {tensor.removeprefix("blk.1.") for tensor in tensors if "nextn" in tensor}
        assert nextn - MTP_NAMES.keys() <= {"nextn.embed_tokens", "nextn.shared_head_head"}


def test_types_and_tokens_have_the_packages_numbers() -> None:
    tokens = gguf.Keys.Tokenizer
    for name, key in special.NAMES.items():
        assert f"{special.PREFIX}{key}_token_id" == getattr(tokens, f"{name.upper()}_ID")
    lists = {"tokens": "LIST", "token_type": "TOKEN_TYPE", "scores": "SCORES", "merges": "MERGES"}
    assert {special.PREFIX + name for name in special.LISTS} == {
        getattr(tokens, name) for name in lists.values()
    }
    for name in ("NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE"):
        assert getattr(special, name) == gguf.TokenType[name]
    sizes = {"u": "UINT", "i": "INT", "f": "FLOAT"}
    for number, numpy_name in gguf_file.SCALARS.items():
        dtype = np.dtype(numpy_name)
        kind = "BOOL" if dtype.kind == "b" else f"{sizes[dtype.kind]}{8 * dtype.itemsize}"
        assert gguf.GGUFValueType(number).name == kind
    numbers = gguf.GGUFValueType
    assert (gguf_file.FLOAT, gguf_file.TEXT, gguf_file.ARRAY) == (
        numbers.FLOAT32, numbers.STRING, numbers.ARRAY,
    )  # fmt: skip
    assert {gguf.GGMLQuantizationType[kind] for kind in gguf_file.TYPES}


def test_special_tokens_of_a_file() -> None:
    """Those beyond the vocabulary are no tokens; a SentencePiece file has usual ones."""
    tokens = ["<unk>", "<s>", "</s>", "a", "<|eot_id|>", "<|im_end|>"]
    values: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.model": "gpt2"}
    values |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 3,
               "tokenizer.ggml.padding_token_id": 9, "tokenizer.ggml.eot_token_id": 5}  # fmt: skip
    assert special.list_special(values) == {"bos": 1, "eos": 3}
    assert special.read_special(values) == {
        "bos_token_id": 1, "eos_token_id": 3, "pad_token_id": None,
    }  # fmt: skip
    assert special.list_ends(values) == [3, 5, 2, 4]
    pieces = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.model": "llama"}
    assert special.list_special(pieces) == {"bos": 1, "eos": 2, "unk": 0}
    # Of Gemma 4, where </s> is a word.
    gemma = {"tokenizer.ggml.tokens": [*tokens, "<|tool_response>"]}
    assert special.list_ends(values | gemma) == [3, 5, 4, 6]


@pytest.mark.parametrize("last", ["<|return|>", "<|flush|>"])
def test_the_end_of_a_part_does_not_end_an_answer(last: str) -> None:
    """With harmony's tokens `<|end|>` ends the reasoning, after which comes the answer."""
    tokens = ["a", "<|end|>", "<|call|>", last]
    values: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.model": "gpt2"}
    values |= {"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": 1}
    assert special.list_ends(values) == [3, 2]
    values["tokenizer.ggml.tokens"] = [*tokens[:2], "b", last]
    assert special.list_ends(values) == [3, 1]
    values["tokenizer.ggml.eot_token_id"] = 9
    values["tokenizer.ggml.tokens"] = tokens
    assert special.list_ends(values) == [3, 2]


# ---- The rotary embedding.


@pytest.mark.parametrize(
    ("head_dim", "base", "scaling"),
    [
        # Llama 3.1 8B, Llama 3.2 1B, and one whose frequencies are all within the band.
        (128, 5e5, {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192}),
        (64, 5e5, {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192}),
        (96, 1e4, {"factor": 2.5, "low_freq_factor": 1.0, "high_freq_factor": 8.0,
                   "original_max_position_embeddings": 1000}),
    ],
)  # fmt: skip
def test_factors_of_a_file_are_the_scaling_that_made_them(
    head_dim: int, base: float, scaling: dict[str, Any], tmp_path: Path
) -> None:
    """As llama.cpp's converter computes rope_freqs: by what transformers divides a frequency."""
    rotary = scaling | {"rope_type": "llama3", "rope_theta": base}
    config = transformers.LlamaConfig(
        head_dim=head_dim, rope_parameters=rotary, max_position_embeddings=131072
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = base ** -(np.arange(0, head_dim, 2) / head_dim)
    factors = (plain / scaled.double().numpy()).astype(np.float32)
    sizes = dict.fromkeys(("key_length", "value_length", "rope_dimension_count"), head_dim)
    calls = sizes | {"rope_freq_base": base, "context_length": 131072}
    found = read(tmp_path, "llama", calls, **{"rope_freqs.weight": factors})
    assert found["rope_scaling"] == scaling | {"rope_type": "llama3"}
    even = read(tmp_path, "llama", calls, **{"rope_freqs.weight": np.ones_like(factors)})
    assert "rope_scaling" not in even
    factors[len(factors) // 2] *= 1.01
    with pytest.raises(SpecDecError, match="rope_freqs"):
        read(tmp_path, "llama", calls, **{"rope_freqs.weight": factors})


@pytest.mark.parametrize(
    # sqrt(1 + ln(640 / 160) / ln(160)) is what transformers takes where nothing is said.
    ("attention", "told"),
    [(math.sqrt(1 + math.log(4) / math.log(160)), None), (1.5, 1.5)],
)
def test_factors_of_longrope(attention: float, told: float | None, tmp_path: Path) -> None:
    short, long = np.linspace(1, 1.9, 10, dtype=np.float32), np.linspace(1.5, 9.7, 10)
    calls = {"rope_scaling_orig_ctx_len": 160, "rope_scaling_attn_factors": attention}
    tensors: dict[str, Any] = {
        "rope_factors_short.weight": short, "rope_factors_long.weight": long,
    }  # fmt: skip
    found = read(tmp_path, "phi3", calls, **{n: v.astype(np.float32) for n, v in tensors.items()})
    scaling = found["rope_scaling"]
    assert (scaling["type"], scaling.get("attention_factor")) == ("longrope", told)
    np.testing.assert_allclose(scaling["short_factor"], short, rtol=1e-6)
    np.testing.assert_allclose(scaling["long_factor"], long, rtol=1e-6)
    assert found["original_max_position_embeddings"] == 160
    config = transformers.Phi3Config(
        hidden_size=120, num_attention_heads=6, max_position_embeddings=640,
        original_max_position_embeddings=160, rope_parameters=scaling | {
            "rope_type": "longrope", "rope_theta": 5e5},
    )  # fmt: skip
    assert ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))[1] == pytest.approx(
        attention
    )


# ---- The order of rows.


def test_rows_are_turned_as_llama_cpp_turns_them() -> None:
    """Its converter's `permute`: reshape(heads, 2, half, ...).swapaxes(1, 2)."""
    rows = np.arange(24 * 5).reshape(24, 5)
    stored = rows.reshape(3, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)
    np.testing.assert_array_equal(stored[order_turned(24, 3)], rows)


def test_value_heads_are_dealt() -> None:
    """Two key heads of three value heads each: a file has heads 0, 3, 1, 4, 2, 5 of theirs."""
    config = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 2,
              "linear_key_head_dim": 4}  # fmt: skip
    theirs = np.arange(12)
    stored = theirs.reshape(6, 2)[[0, 3, 1, 4, 2, 5]].reshape(-1)
    order, columns = order_values("linear_attn.in_proj_z", config)
    np.testing.assert_array_equal(stored[order], theirs)
    assert columns is None
    order, columns = order_values("linear_attn.out_proj", config)
    np.testing.assert_array_equal(stored[columns], theirs)
    assert order is None
    order, _ = order_values(
        "linear_attn.in_proj_qkv", config
    )  # 2 * 2 * 4 rows of q and k lie first
    np.testing.assert_array_equal(np.r_[:16, 16 + stored][order], np.arange(28))
    order, _ = order_values("linear_attn.A_log", config)
    np.testing.assert_array_equal(np.array([0, 3, 1, 4, 2, 5])[order], np.arange(6))
    for module in ("linear_attn.norm", "self_attn.q_proj"):
        assert order_values(module, config) == (None, None)
    assert order_values("linear_attn.in_proj_z", config | {"linear_num_value_heads": 2})[0] is None


# ---- What is refused.


@pytest.mark.parametrize(
    ("architecture", "calls", "tensors", "fact"),
    [
        ("llama", {"clamp_kqv": 8.0}, (), "llama.attention.clamp_kqv 8.0"),
        ("llama", {"value_length": 24}, (), "its keys and values differ in size"),
        ("llama", {"head_count_kv": [3, 6, 3, 3]}, (), "head_count_kv differs from layer to layer"),
        ("llama", {"block_count": 0}, (), "block_count is 0, not a whole number from 1 to"),
        ("llama", {"rope_freq_base": -1.0}, (), "rope.freq_base is -1.0, not a positive number"),
        ("llama", {"rope_scaling_type": gguf.RopeScalingType.LONGROPE}, (),
         "rope.scaling.type is 'longrope'"),
        ("llama", {}, ("rope_freqs.weight",), "rope_freqs has 3 factors for 20 rotated dimensions"),
        ("llama", {"rope_dimension_count": 7}, ("rope_freqs.weight",),
         "rope_freqs has 3 factors for 7 rotated dimensions"),
        ("qwen35", HYBRID | {"ssm_inner_size": 97}, (),
         "ssm.inner_size 97 is no multiple of ssm.time_step_rank 6"),
        ("phi3", {"rope_scaling_orig_ctx_len": 9}, ("rope_factors_long.weight",),
         "the tensor rope_factors_short.weight is missing"),
        ("gemma3", {}, (), "a Gemma 3 without a window is not read"),
        ("gemma4", GEMMA4, (), "the tensor rope_freqs.weight is missing"),
        ("gemma4", GEMMA4, ("rope_freqs.weight",), "rope_freqs.weight is [2.0, 2.0, 2.0], not 4"),
        ("gemma4", GEMMA4 | {"sliding_window_pattern": [False, True] * 2}, (),
         "not a list for 4 layers, the last of which sees all tokens"),
        ("gemma4", GEMMA4 | {"sliding_window_pattern": 2}, (), "sliding_window_pattern is 2, not"),
        ("gemma4", GEMMA4 | {"shared_kv_layers": 4}, (), "shared_kv_layers is 4 of 4 layers"),
        ("gemma4", GEMMA4 | {"shared_kv_layers": 1}, (),
         "layers of full_attention after layer 2 would read the keys of layer 2"),
        ("gemma4", GEMMA4 | {"head_count_kv": [3, 1, 2, 1]}, (),
         "head_count_kv differs among its layers of sliding_attention: [3, 1, 2, 1]"),
        ("gemma4", GEMMA4 | {"head_count_kv": [3, 0, 3, 0]}, (), "not whole numbers from 1 to"),
        ("gemma4", GEMMA4 | {"feed_forward_length": [24, 24, 24, 48]}, (),
         "feed_forward_length is [24, 24, 24, 48]: all but the last 0 layers have one size"),
        ("gemma4", GEMMA4 | {"rope_dimension_count_swa": 6}, (),
         "rope.dimension_count_swa is 6 beside keys of 12"),
        ("gemma4", GEMMA4, ("blk.1.attn_v.weight",), "some of its layers of full_attention have"),
        ("gemma4", GEMMA4 | {"rope_scaling_type": gguf.RopeScalingType.LINEAR,
                             "rope_scaling_factor": 2.0}, (), "it scales rotary frequencies"),
        ("granite", {}, (), "the key granite.logit_scale is missing"),
        ("granite", {"logit_scale": 8.0, "rope_scaling_finetuned": False}, (),
         "a Granite without rotary embedding is not read"),
        ("stablelm", {}, (), "the key stablelm.attention.layer_norm_epsilon is missing"),
        ("lfm2moe", EXPERTS | {"shortconv_l_cache": 3, "expert_weights_scale": 2.5,
                               "expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID}, (),
         "lfm2moe.expert_weights_scale 2.5"),
        ("qwen35", HYBRID | {"ssm_group_count": 4}, (),
         "ssm.time_step_rank 6 is no multiple of ssm.group_count 4"),
        ("gptneox", {}, (), "holds an architecture that is not read: gptneox"),
        ("gemma4-assistant", {}, (), "holds a Gemma 4's assistant (gemma4-assistant)"),
        ("llama", {"type": "adapter"}, (), "is no model but what goes with one: llama ('adapter')"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(
    architecture: str, calls: dict[str, Any], tensors: tuple[str, ...], fact: str, tmp_path: Path
) -> None:
    named = {name: np.full(3, 2, np.float32) for name in tensors}
    with pytest.raises(SpecDecError) as caught:
        read(tmp_path, architecture, calls, **named)
    assert fact in caught.value.message
    assert caught.value.hint


def test_the_type_is_that_of_most_numbers(tmp_path: Path) -> None:
    few, many = np.zeros((2, 96), np.float32), np.zeros((200, 96), np.float16)
    data = write(tmp_path / "m.gguf", "llama", {}, {"output.weight": few, "a": many})
    assert choose_dtype(data.tensors) == "float16"
    assert choose_dtype({"output.weight": data.tensors["output.weight"]}) == "float32"
