"""Names that llama.cpp has for architectures and tensors, for reading and for writing.

Names are those of llama.cpp at 0c1e57098 (gguf-py/gguf/tensor_mapping.py, src/llama-arch.cpp).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from specdec.files.reading import Array

# Hugging Face's module -> GGUF's. Those without `model.` are of drafters.
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.embedding_norm": "token_embd_norm",  # LFM2's last
    "model.embed_tokens_per_layer": "per_layer_token_embd",  # Gemma 4's
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "embed_tokens": "token_embd", "norm": "output_norm", "fc": "fc",
    "input_norm": "enc.output_norm",
}  # fmt: skip
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
PHI3_NAMES = LAYER_NAMES | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
SANDWICH_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
GEMMA4_NAMES = (
    SANDWICH_NAMES
    | {
        "layer_scalar": "layer_output_scale",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "router.proj": "ffn_gate_inp",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.{expert}.gate_up_proj": "ffn_gate_up_exps",
    }
    | {f"experts.{{expert}}.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")}
)
SEED_NAMES = LAYER_NAMES | {"post_attention_layernorm": "post_attention_norm"}
# With {expert}: what one tensor [experts, out, in] holds for all.
MIXTRAL_NAMES = LAYER_NAMES | {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.{expert}.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.{expert}.w2": "ffn_down_exps",
    "block_sparse_moe.experts.{expert}.w3": "ffn_up_exps",
}  # fmt: skip
QWEN_NAMES = LAYER_NAMES | {
    f"mlp.{module}.{name}_proj": f"ffn_{name}_{kind}" for name in ("gate", "up", "down")
    for module, kind in (("experts.{expert}", "exps"), ("shared_expert", "shexp"))
} | {"mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp"}  # fmt: skip
# Those of the converter's --fuse-gate-up-exps: gate's rows come first.
_FUSED_NAMES = {"mlp.experts.{expert}.gate_up_proj": "ffn_gate_up_exps"}
GPT_OSS_NAMES = SEED_NAMES | {
    f"mlp.experts.{{expert}}.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")
} | {"mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks"}  # fmt: skip

LFM2_NAMES = {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_output",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}  # fmt: skip
LFM2_MOE_NAMES = LFM2_NAMES | {
    "feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b",
    "feed_forward.experts.{expert}.w1": "ffn_gate_exps",
    "feed_forward.experts.{expert}.w2": "ffn_down_exps",
    "feed_forward.experts.{expert}.w3": "ffn_up_exps",
}  # fmt: skip

_GRANITE_MLP = {f"shared_mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
GRANITE_NAMES = {
    hf_module: module for hf_module, module in LAYER_NAMES.items() if "mlp." not in hf_module
} | {
    f"{hf_module}.{name}_proj": f"ffn_{name}_{kind}" for name in ("gate", "up", "down")
    for hf_module, kind in (("block_sparse_moe.experts.{expert}", "exps"), ("shared_mlp", "shexp"))
} | {"block_sparse_moe.router": "ffn_gate_inp"}  # fmt: skip
# Without other experts the shared one has an MLP's names.
GRANITE_DENSE_NAMES = GRANITE_NAMES | _GRANITE_MLP
MAMBA_NAMES = {
    "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d", "mamba.dt_bias": "ssm_dt",
    "mamba.A_log": "ssm_a", "mamba.D": "ssm_d", "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}  # fmt: skip

# Layers of linear attention, and the layer that drafts: `nextn` stands after the others.
HYBRID_NAMES = SEED_NAMES | {
    f"linear_attn.{hf_module}": gguf_module
    for hf_module, gguf_module in {
        "in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_b": "ssm_beta",
        "in_proj_a": "ssm_alpha", "conv1d": "ssm_conv1d", "A_log": "ssm_a", "dt_bias": "ssm_dt",
        "norm": "ssm_norm", "out_proj": "ssm_out",
    }.items()
}  # fmt: skip
MTP_NAMES = {
    "nextn.eh_proj": "mtp.fc", "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden", "nextn.shared_head_norm": "mtp.norm",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GgufArchitecture:
    """One of llama.cpp's, as transformers has it.

    interleaves: rows of q and k lie in the order of `order_turned`. shift: what the file's norms
    are larger by, but those of linear attention. deals_heads: value heads of linear attention come
    one of each key head, see `order_values`.
    """

    architecture: str
    model_type: str
    layer: Mapping[str, str] = dataclasses.field(default_factory=lambda: LAYER_NAMES)
    interleaves: bool = False
    shift: float = 0.0
    deals_heads: bool = False

    @functools.cached_property
    def modules(self) -> dict[str, str]:
        """Hugging Face's name of a layer's module by GGUF's; of several the last."""
        return {gguf_module: hf_module for hf_module, gguf_module in self.layer.items()}


READ = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", interleaves=True),
    "mistral3": GgufArchitecture("Ministral3ForCausalLM", "ministral3", interleaves=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": GgufArchitecture("Qwen2MoeForCausalLM", "qwen2_moe", QWEN_NAMES),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", "qwen3_moe", QWEN_NAMES),
    "gemma": GgufArchitecture("GemmaForCausalLM", "gemma", shift=1.0),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", "gemma2", SANDWICH_NAMES, shift=1.0),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", "gemma3_text", SANDWICH_NAMES, shift=1.0),
    "gemma4": GgufArchitecture("Gemma4ForCausalLM", "gemma4_text", GEMMA4_NAMES),
    "phi3": GgufArchitecture("Phi3ForCausalLM", "phi3", PHI3_NAMES),
    "granite": GgufArchitecture("GraniteForCausalLM", "granite", interleaves=True),
    "stablelm": GgufArchitecture("StableLmForCausalLM", "stablelm"),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", "smollm3", interleaves=True),
    "seed_oss": GgufArchitecture("SeedOssForCausalLM", "seed_oss", SEED_NAMES),
    "gpt-oss": GgufArchitecture("GptOssForCausalLM", "gpt_oss", GPT_OSS_NAMES),
    "lfm2": GgufArchitecture("Lfm2ForCausalLM", "lfm2", LFM2_NAMES),
    "lfm2moe": GgufArchitecture("Lfm2MoeForCausalLM", "lfm2_moe", LFM2_MOE_NAMES),
    "granitemoe": GgufArchitecture(
        "GraniteMoeForCausalLM", "granitemoe", GRANITE_NAMES, interleaves=True
    ),
    "granitehybrid": GgufArchitecture(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", GRANITE_NAMES | MAMBA_NAMES,
        interleaves=True,
    ),
    "qwen35": GgufArchitecture(
        "Qwen3_5ForCausalLM", "qwen3_5_text", HYBRID_NAMES, shift=1.0, deals_heads=True
    ),
    "qwen35moe": GgufArchitecture(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", QWEN_NAMES | HYBRID_NAMES | _FUSED_NAMES,
        shift=1.0, deals_heads=True,
    ),
}  # fmt: skip
# `llama` with a window, and with experts, are these kinds.
MISTRAL = GgufArchitecture("MistralForCausalLM", "mistral", interleaves=True)
MIXTRAL = GgufArchitecture("MixtralForCausalLM", "mixtral", MIXTRAL_NAMES, interleaves=True)
# `granitemoe` with a shared expert, and `granitehybrid` without other experts, are this kind.
GRANITE_SHARED = dataclasses.replace(
    READ["granitemoe"], architecture="GraniteMoeSharedForCausalLM", model_type="granitemoeshared"
)
GRANITE_DENSE = dataclasses.replace(READ["granitehybrid"], layer=GRANITE_DENSE_NAMES | MAMBA_NAMES)
# Hugging Face's architecture -> llama.cpp's.
ARCHITECTURES = {record.architecture: name for name, record in READ.items()} | {
    record.architecture: "llama" for record in (MISTRAL, MIXTRAL)
}
# Qwen3-Next computes what the mixtures of Qwen3.5 do, and a file has its projections as theirs.
READ["qwen3next"] = dataclasses.replace(READ["qwen35moe"], deals_heads=False)
# Text models of those that see; the encoders of images are files of their own.
READ |= {"qwen2vl": READ["qwen2"], "qwen3vl": READ["qwen3"], "qwen3vlmoe": READ["qwen3moe"]}


def order_turned(num_rows: int, num_heads: int) -> Array:
    """Return where a projection's rows lie in a file: llama.cpp turns a channel with the next one.

    Hugging Face rotates it with the one half a head further on.
    """
    pairs = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    order: Array = pairs.swapaxes(1, 2).reshape(-1)
    return order
