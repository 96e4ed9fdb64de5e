"""Tiny random models of every family, as transformers saves them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

# Family -> its configuration's class in transformers, and that of its model.
CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "phi": ("PhiConfig", "PhiForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "opt": ("OPTConfig", "OPTForCausalLM"),
    "gemma": ("GemmaConfig", "GemmaForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "ministral": ("MinistralConfig", "MinistralForCausalLM"),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM"),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM"),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    "granitemoeshared": ("GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM"),
    "granitemoehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
}
# Those that TensorRT-LLM has no class for, 0.14 or none; and those whose checkpoint is another's.
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
CONVOLVING = ("lfm2", "lfm2_moe")
GRANITES = ("granitemoe", "granitemoeshared", "granitemoehybrid")
OWN = (
    "gemma4", "gpt_oss", "ministral3", "seed_oss", "smollm3", "stablelm", *HYBRIDS, *CONVOLVING,
    *GRANITES[1:],
)  # fmt: skip
NOT_IN_014 = (*OWN, "gemma3", "granite", "granitemoe", "qwen3", "qwen3_moe")
WRITTEN_AS = {"ministral": "MistralForCausalLM"}
MAX_POSITIONS = 48
SCALED_QUERIES = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 12, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
_LINEAR = {
    "head_dim": 32, "linear_num_key_heads": 24, "linear_num_value_heads": 48,
    "linear_key_head_dim": 4, "linear_value_head_dim": 2, "full_attention_interval": 2,
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 48,
    },
}
EXPERTS["gpt_oss"] = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6,
    "swiglu_limit": 1.5, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
}  # fmt: skip
_MIXTURE = EXPERTS["qwen2_moe"] | _LINEAR
EXPERTS |= {
    "qwen3_5_moe": _MIXTURE, "qwen3_next": _MIXTURE, "gemma4": {"num_experts": 4},
    "lfm2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "num_dense_layers": 1, "routed_scaling_factor": 1.5,
    },
    **dict.fromkeys(GRANITES, {
        "num_local_experts": 4, "num_experts_per_tok": 2,
        "embedding_multiplier": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.6,
        "logits_scaling": 1.5,
    }),
}  # fmt: skip
for _family in GRANITES[1:]:
    EXPERTS[_family] = EXPERTS[_family] | {"shared_intermediate_size": 48}


def make_family_model(
    parent: Path,
    family: str,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 8,
    kv_heads: int = 2,
    vocab: int = 67,
    intermediate: int = 48,
    dtype: str = "float32",
    seed: int = 0,
    name: str = "target",
    **config: Any,
) -> Path:
    """Write a random model of a family and return its folder, `parent / name`.

    Norms and biases are random too, so that a forgotten one shows. GPT-2 and OPT have no K/V heads
    of their own.
    """
    import torch
    import transformers

    if not hasattr(transformers, CLASSES[family][1]):
        pytest.skip(f"this transformers has no {family}")
    values: dict[str, Any] = {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if family == "gpt2":
        renamed = {
            "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
        }  # fmt: skip
        values = {renamed.get(key, key): value for key, value in values.items()}
    elif family == "opt":
        values |= {"ffn_dim": values.pop("intermediate_size"), "word_embed_proj_dim": hidden}
    elif family in ("gemma", "gemma2", "gemma3", "ministral", "ministral3", "qwen3", "seed_oss"):
        values["head_dim"] = hidden // heads
        if family == "ministral3":
            values["rope_parameters"] = SCALED_QUERIES
    elif family == "qwen3_5":
        values |= _LINEAR
    elif family == "gemma4":
        values |= _list_gemma4(layers, hidden // heads, vocab)
    elif family in EXPERTS:
        values |= EXPERTS[family]
        if family in CONVOLVING:
            kinds = ("conv", "full_attention")
            values["layer_types"] = [kinds[layer % 2] for layer in range(layers)]
        elif family == "granitemoehybrid":
            kinds = ("mamba", "attention")  # as published; transformers 4 knows no others
            values |= {"mamba_n_heads": heads, "mamba_d_state": 16, "mamba_n_groups": 1}
            values["layer_types"] = [kinds[layer % 2] for layer in range(layers)]
    elif family == "lfm2":
        values |= {"block_auto_adjust_ff_dim": False, "full_attn_idxs": [1, 3]}
    elif family == "stablelm":
        values["partial_rotary_factor"] = 0.5
    if family in ("gpt2", "opt"):
        del values["num_key_value_heads"]
    config_class, model_class = (getattr(transformers, each) for each in CLASSES[family])
    # A copy: transformers 5 writes into the dictionaries that it is given.
    model = model_class(config_class(**values | copy.deepcopy(config)))
    _randomize(model, family, hidden, seed)
    folder = parent / name
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def _list_gemma4(layers: int, head_size: int, vocab: int) -> dict[str, Any]:
    """List the fields of a Gemma 4 that has all that some of its sizes have."""
    types = ["sliding_attention" if (layers - layer) % 2 == 0 else "full_attention"
             for layer in range(layers)]  # fmt: skip
    return {
        "head_dim": head_size, "global_head_dim": 2 * head_size, "layer_types": types,
        "sliding_window": 16, "num_kv_shared_layers": max(0, layers - 2),
        "use_double_wide_mlp": True, "attention_k_eq_v": True, "enable_moe_block": True,
        "num_global_key_value_heads": 1, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 24, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": vocab,
    }  # fmt: skip


def _randomize(model: Any, family: str, hidden: int, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in (*model.named_parameters(), *model.named_buffers()):
            if "rotary_emb" in key:
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1 and "embed" in key or "wte" in key or "wpe" in key:
                weight.copy_(noise)
            elif key.endswith((".conv.conv.weight", "expert_bias", ".mamba.conv1d.weight")):
                weight.copy_(noise)
            elif weight.dim() > 1:
                weight.copy_(noise * (2.0 / hidden**0.5))
            elif key.endswith(".bias"):
                weight.copy_(0.3 * noise)
            elif key.endswith("A_log"):
                weight.copy_(noise)
            else:  # those of Gemma, and of hybrids but their gated ones, have one less
                is_less = family in ("gemma", "gemma2", "gemma3") or (
                    family in HYBRIDS and ".linear_attn." not in key
                )
                weight.copy_((0 if is_less else 1) + 0.1 * noise)


def make_convolving(parent: Path, **config: Any) -> Path:
    """Write a random mixture of LFM2's of the size of the other tests' targets."""
    sizes: dict[str, Any] = {
        "heads": 4, "kv_heads": 2, "layers": 4, "intermediate": 128, "norm_eps": 0.1, "vocab": 128,
        "moe_intermediate_size": 64, "max_position_embeddings": 256, "tie_word_embeddings": False,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    }  # fmt: skip
    return make_family_model(parent, "lfm2_moe", **sizes | config)


def make_mamba(parent: Path, **config: Any) -> Path:
    """Write a random Granite 4 of the size of the other tests' targets."""
    sizes: dict[str, Any] = {
        "heads": 4, "kv_heads": 2, "layers": 4, "intermediate": 128, "rms_norm_eps": 0.1,
        "vocab": 128, "shared_intermediate_size": 64, "max_position_embeddings": 256,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
    }  # fmt: skip
    return make_family_model(parent, "granitemoehybrid", **sizes | config)


def make_hybrid(parent: Path, *, vocab: int = 128, **config: Any) -> Path:
    """Write a random Qwen3.5 of the size of the other tests' targets."""
    sizes: dict[str, Any] = {
        "heads": 4, "kv_heads": 2, "layers": 4, "intermediate": 112, "rms_norm_eps": 0.1,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 24, "max_position_embeddings": 256,
    }  # fmt: skip
    return make_family_model(parent, "qwen3_5", vocab=vocab, **sizes | config)
