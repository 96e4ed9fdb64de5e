"""Tiny random models of every family, with what each variant of its arithmetic switches on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

VOCAB = 131
POSITIONS = 256
# Of the scalings that change with the length, the length at which they do.
SWITCH = 48
WINDOW = 16
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_COMMON = {"vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "intermediate_size": 112}
# The norms' epsilon is large, so that it shows.
_PHI = {
    **_SIZES, **_COMMON, "num_key_value_heads": 2, "tie_word_embeddings": False,
    "layer_norm_eps": 0.1,
}  # fmt: skip
_GQA = {
    **_SIZES, **_COMMON, "num_key_value_heads": 2, "tie_word_embeddings": False,
    "rms_norm_eps": 0.1,
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCAB, "n_positions": POSITIONS, "n_embd": 64, "n_layer": 2, "n_head": 4,
    "bos_token_id": 1, "eos_token_id": 2, "layer_norm_epsilon": 0.1,
}  # fmt: skip
_OPT = {
    **_SIZES, "vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "ffn_dim": 112,
    "word_embed_proj_dim": 64,
}  # fmt: skip
_QWEN_MOE = {
    **_GQA, "num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
}  # fmt: skip
_GPT_OSS = {
    **_GQA, "num_hidden_layers": 3, "head_dim": 16, "num_local_experts": 8,
    "num_experts_per_tok": 3, "sliding_window": WINDOW, "intermediate_size": 40,
}  # fmt: skip
_PHI3 = {**_GQA, "pad_token_id": 0}
_GEMMA4 = {
    **_GQA, "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32,
    "sliding_window": WINDOW, "tie_word_embeddings": True, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "pad_token_id": 0,
}  # fmt: skip
_LINEAR = {
    "head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24,
}  # fmt: skip
_HYBRID = {**_GQA, **_LINEAR, "num_hidden_layers": 4}
_HYBRID_MOE = {**_QWEN_MOE, **_LINEAR, "num_hidden_layers": 3, "full_attention_interval": 3}
_LFM2 = {
    **_SIZES, **_COMMON, "num_key_value_heads": 2, "norm_eps": 0.1, "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}  # fmt: skip
_LFM2_MOE = {
    **_LFM2, "num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 40,
    "num_dense_layers": 2,
}  # fmt: skip
_GRANITE = {
    **_GQA, "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 40,
    "embedding_multiplier": 1.5, "attention_multiplier": 0.1, "residual_multiplier": 0.6,
    "logits_scaling": 3.0,
}  # fmt: skip
_MAMBA = {
    "num_hidden_layers": 4, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

_SCALED = {
    "type": "yarn", "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3,
    "max_position_embeddings": POSITIONS, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip


def _longrope(size: int) -> dict[str, Any]:
    return {
        "type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(size // 2)],
        "long_factor": [1.5 + 0.6 * i for i in range(size // 2)],
    }


# Architecture -> variant -> settings of its transformers configuration.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "LlamaForCausalLM": {
        "plain": _GQA,
        "biases": {**_GQA, "attention_bias": True, "mlp_bias": True},
        "tied_head_dim": {**_GQA, "head_dim": 24, "tie_word_embeddings": True},
        "linear": {**_GQA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "llama3": {**_GQA, "rope_scaling": _LLAMA3, "tie_word_embeddings": True},
        "yarn": {**_GQA, "rope_scaling": _YARN},
        "dynamic": {**_GQA, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    },
    "MistralForCausalLM": {
        "window": {**_GQA, "sliding_window": WINDOW},
        "no_window": {**_GQA, "sliding_window": None, "head_dim": 32},
    },
    "Qwen2ForCausalLM": {
        "plain": _GQA,
        "window_tied": {
            **_GQA, "tie_word_embeddings": True, "use_sliding_window": True,
            "sliding_window": WINDOW, "max_window_layers": 0,
        },
        "yarn": {**_GQA, "rope_scaling": _YARN},
        "upper_window": {
            **_GQA, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
        },
    },
    "Qwen3ForCausalLM": {
        "plain": {**_GQA, "head_dim": 24},
        "window_biases": {
            **_GQA, "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True,
            "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0,
        },
    },
    "PhiForCausalLM": {
        "gelu_new": {**_PHI, "partial_rotary_factor": 0.5},
        "gelu_narrow": {**_PHI, "partial_rotary_factor": 0.25, "hidden_act": "gelu"},
        "gelu_fast": {**_PHI, "hidden_act": "gelu_fast"},
    },
    "Phi3ForCausalLM": {
        "plain": {**_PHI3, "sliding_window": None},
        "window": {**_PHI3, "sliding_window": WINDOW},
        "longrope": {
            **_PHI3, "sliding_window": None, "original_max_position_embeddings": SWITCH,
            "rope_scaling": _longrope(16),
        },
        "mini": {
            **_PHI3, "sliding_window": None, "original_max_position_embeddings": SWITCH,
            "rope_scaling": _longrope(12), "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
        },
    },
    "GPT2LMHeadModel": {
        "gelu_new": _GPT2,
        "gelu_untied": {**_GPT2, "activation_function": "gelu", "tie_word_embeddings": False},
    },
    "OPTForCausalLM": {
        "relu": _OPT,
        "gelu": {**_OPT, "activation_function": "gelu"},
        "350m": {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
    },
    "GemmaForCausalLM": {
        "tied": {**_GQA, "head_dim": 24, "num_key_value_heads": 1, "tie_word_embeddings": True},
    },
    "Gemma2ForCausalLM": {
        "caps": {
            **_GQA, "head_dim": 24, "tie_word_embeddings": True, "sliding_window": WINDOW,
            "query_pre_attn_scalar": 10, "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 9.0,
        },
        "no_caps": {
            **_GQA, "head_dim": 32, "sliding_window": WINDOW, "attn_logit_softcapping": None,
            "final_logit_softcapping": None, "rope_theta": 500.0,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    },
    "Gemma3ForCausalLM": {
        "windows": {
            **_GQA, "num_hidden_layers": 3, "head_dim": 24, "tie_word_embeddings": True,
            "sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 10,
            "rope_theta": 2e4, "rope_local_base_freq": 50.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
        "caps": {
            **_GQA, "head_dim": 16, "num_key_value_heads": 1, "sliding_window": WINDOW,
            "final_logit_softcapping": 9.0, "attention_bias": True,
        },
    },
    "Gemma4ForCausalLM": {
        "equal_values": {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        "mixture": {
            **_GEMMA4, "num_hidden_layers": 3, "enable_moe_block": True, "num_experts": 12,
            "top_k_experts": 4, "moe_intermediate_size": 40, "final_logit_softcapping": 9.0,
            "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        "tables": {
            **_GEMMA4, "num_key_value_heads": 1, "hidden_size_per_layer_input": 12,
            "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": VOCAB,
        },
    },
    "GraniteForCausalLM": {
        "multipliers": {
            **_GQA, "embedding_multiplier": 1.5, "attention_multiplier": 0.1,
            "residual_multiplier": 0.6, "logits_scaling": 3.0,
        },
        "unscaled": {**_GQA, "attention_bias": True, "mlp_bias": True},
    },
    "GraniteMoeForCausalLM": {
        "plain": _GRANITE,
        "biases": {**_GRANITE, "attention_bias": True},
    },
    "GraniteMoeSharedForCausalLM": {"plain": _GRANITE},
    "GraniteMoeHybridForCausalLM": {
        "tiny": {**_GRANITE, **_MAMBA},
        "micro": {
            **_GRANITE, **_MAMBA, "num_local_experts": 0, "mamba_n_groups": 1, "mamba_d_conv": 3,
            "mamba_proj_bias": True, "mamba_conv_bias": False, "tie_word_embeddings": True,
            "layer_types": ["attention", "mamba"] * 2,
            "position_embedding_type": "rope", "attention_bias": True,
        },
        "attention": {
            **_GRANITE, "num_local_experts": 0, "layer_types": ["attention"] * 2,
            "position_embedding_type": "rope",
        },
    },
    "MinistralForCausalLM": {
        "mixed": {
            **_GQA, "head_dim": 16, "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "window": {**_GQA, "head_dim": 24, "sliding_window": WINDOW},
    },
    "Ministral3ForCausalLM": {
        "scaled": {**_GQA, "head_dim": 24, "rope_parameters": _SCALED},
        "unscaled": {
            **_GQA, "head_dim": 16, "tie_word_embeddings": True, "sliding_window": WINDOW,
            "rope_parameters": {**_SCALED, "llama_4_scaling_beta": 0.0, "mscale_all_dim": 0.5},
        },
    },
    "MixtralForCausalLM": {
        "plain": {**_GQA, "num_local_experts": 8},
        "window_top3": {
            **_GQA, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": WINDOW,
        },
    },
    "Qwen2MoeForCausalLM": {
        "plain": _QWEN_MOE,
        "renormalized": {**_QWEN_MOE, "norm_topk_prob": True, "tie_word_embeddings": True},
    },
    "Qwen3MoeForCausalLM": {
        "renormalized": {**_QWEN_MOE, "norm_topk_prob": True, "head_dim": 24},
        "biases": {**_QWEN_MOE, "attention_bias": True, "head_dim": 16, "rope_scaling": _YARN},
    },
    "Qwen3_5ForCausalLM": {
        "plain": _HYBRID,
        "tied": {
            **_HYBRID, "tie_word_embeddings": True, "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 3, "attention_bias": True,
            "layer_types": ["full_attention", "linear_attention"] * 2,
            "rope_parameters": {  # long texts, as Qwen3.5's page has it
                **_YARN, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 0], "mrope_interleaved": True,
            },
        },
    },
    "Qwen3_5MoeForCausalLM": {"plain": _HYBRID_MOE},
    "Qwen3NextForCausalLM": {
        "plain": _HYBRID_MOE,
        "kept_weights": {**_HYBRID_MOE, "norm_topk_prob": False, "tie_word_embeddings": True},
    },
    "GptOssForCausalLM": {
        "plain": {**_GPT_OSS, "swiglu_limit": 1.5},
        "yarn": {
            **_GPT_OSS, "head_dim": 24, "num_experts_per_tok": 1, "attention_bias": False,
            "tie_word_embeddings": True, "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {**_YARN, "rope_theta": 150000.0, "truncate": False},
        },
    },
    "Lfm2ForCausalLM": {
        "plain": {**_LFM2, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.3},
        "biases": {
            **_LFM2, "conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False,
            "block_auto_adjust_ff_dim": False, "rope_parameters": _YARN | {"rope_theta": 10000.0},
        },
        "attention": {**_LFM2, "layer_types": None},
    },
    "Lfm2MoeForCausalLM": {
        "plain": {**_LFM2_MOE, "routed_scaling_factor": 1.5},
        "kept_weights": {
            **_LFM2_MOE, "norm_topk_prob": False, "use_expert_bias": False, "num_dense_layers": 0,
            "routed_scaling_factor": 2.5, "conv_bias": True, "tie_word_embeddings": False,
        },
        "attention": {
            **_LFM2_MOE, "layer_types": ["full_attention"] * 4, "tie_word_embeddings": False,
        },
    },
    "SeedOssForCausalLM": {
        "plain": {**_GQA, "head_dim": 16},
        "biases": {
            **_GQA, "head_dim": 24, "attention_bias": False, "attention_out_bias": True,
            "mlp_bias": True, "rope_scaling": _YARN,
        },
    },
    "SmolLM3ForCausalLM": {
        "every_second": {
            **_GQA, "no_rope_layer_interval": 2, "pad_token_id": 0, "tie_word_embeddings": True,
        },
        "listed": {
            **_GQA, "no_rope_layers": [0, 1], "attention_bias": True, "mlp_bias": True,
            "rope_scaling": _YARN, "pad_token_id": 0,
        },
    },
    "StableLmForCausalLM": {
        "plain": {**_PHI, "partial_rotary_factor": 0.5},
        "parallel": {
            **_PHI, "partial_rotary_factor": 0.25, "use_parallel_residual": True,
            "use_qkv_bias": True, "tie_word_embeddings": True,
        },
    },
}  # fmt: skip
NAMES = [f"{name}-{variant}" for name, variants in VARIANTS.items() for variant in variants]
FIRST_NAMES = [f"{name}-{next(iter(variants))}" for name, variants in VARIANTS.items()]
# Every model with kernels, and one of each family without.
WITH_KERNELS_OR_NOT = [(name, "auto") for name in NAMES] + [(name, "none") for name in FIRST_NAMES]


# Keys that transformers 5 reads, and 4 leaves aside: its model has other numbers then.
NEW_KEYS = {"rope_parameters", "swiglu_limit"}


def make_model(
    folder: Path, name: str, *, dtype: str = "float32", seed: int = 2, **changes: Any
) -> Path:
    """Write a model of NAMES as transformers saves it; every parameter is random.

    transformers starts biases at 0 and norms at 1, where a dropped one would not show. The matrices
    are scaled so that greedy text varies.
    """
    import torch
    import transformers

    architecture, _, variant = name.partition("-")
    settings = copy.deepcopy({**VARIANTS[architecture][variant], **changes})
    model_class = getattr(transformers, architecture, None)
    if model_class is None:
        pytest.skip(f"this transformers has no {architecture}")
    if transformers.__version__.startswith("4.") and (keys := NEW_KEYS & {*settings}):
        pytest.skip(f"transformers 4 does not read {', '.join(sorted(keys))}")
    if transformers.__version__.startswith("4.") and settings.get("mamba_n_groups", 1) > 1:
        pytest.skip("transformers 4 norms all groups of Mamba-2 as one, 5 and llama.cpp each")
    model = model_class(model_class.config_class(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = (entry for entry in model.named_buffers() if entry[0].endswith("expert_bias"))
        for key, weight in (*model.named_parameters(), *biases):
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1 and ("norm" in key or ".ln_" in key) and key.endswith("weight"):
                is_less = architecture[: -len("ForCausalLM")] in ("Gemma", "Gemma2", "Gemma3") or (
                    hasattr(model.config, "linear_num_key_heads") and "linear_attn" not in key
                )
                weight.copy_((0.0 if is_less else 1.0) + 0.1 * noise)
            elif weight.dim() == 1:
                weight.copy_((1.0 if key.endswith("scale") else 0.0) + 0.3 * noise)
            elif "embed" in key or ".wte." in key or ".wpe." in key:
                # Where it is the head too, larger ones would repeat each token for ever; Gemma
                # multiplies by the square root of the hidden size, and norms what is added to it.
                scale = 0.5 if model.config.tie_word_embeddings else 1.0
                divisors = {"Gemma": 8, "Gemma2": 32, "Gemma3": 32, "Gemma4": 32}
                weight.copy_(noise * scale / divisors.get(architecture[: -len("ForCausalLM")], 1))
            else:
                inputs = weight.shape[0] if architecture == "GPT2LMHeadModel" else weight.shape[1]
                weight.copy_(noise * (2.0 / inputs**0.5))
        for key, buffer in model.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.3 * torch.rand(buffer.shape, generator=generator))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
