"""Models of which llama.cpp's own converter made tests/golden/gguf/NAME.gguf."""

from __future__ import annotations

from typing import Any

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "rope_theta": 10000.0,
    "long_factor": [1.5, 2.0, 3.0, 4.0], "original_max_position_embeddings": 48,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}  # fmt: skip
GPT_OSS_YARN = YARN | {
    "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 150000.0,
}  # fmt: skip
HYBRID = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "head_dim": 64, "heads": 2, "kv_heads": 1,
}  # fmt: skip
GRANITE_LAYERS = ["mamba", "attention", "mamba"]
# Name -> family in tests/families.py and fields of its configuration.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": (
        "llama",
        {"rope_parameters": LLAMA3, "heads": 2, "max_position_embeddings": 512,
         "tie_word_embeddings": True},
    ),
    "mixtral": ("mixtral", {}),
    "qwen2": ("qwen2", {"rope_parameters": YARN, "max_position_embeddings": 64}),
    "qwen3": ("qwen3", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3", {"layers": 6, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    # All that E4B and 26B-A4B have.
    "gemma4": ("gemma4", {"layers": 4, "intermediate": 32, "sliding_window": 6}),
    "gemma4_dense": (
        "gemma4",
        {"heads": 4, "kv_heads": 2, "layers": 3, "num_kv_shared_layers": 0, "sliding_window": 6,
         "use_double_wide_mlp": False, "attention_k_eq_v": False, "enable_moe_block": False,
         "hidden_size_per_layer_input": 0, "final_logit_softcapping": 9.0},
    ),
    "phi3": (
        "phi3",
        {"rope_parameters": LONG, "max_position_embeddings": 192, "pad_token_id": 0,
         "original_max_position_embeddings": 48},
    ),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
         "logits_scaling": 4.0},
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "smollm3": ("smollm3", {"layers": 4}),
    "seed_oss": ("seed_oss", {}),
    "gpt_oss": (
        "gpt_oss",
        {"rope_parameters": GPT_OSS_YARN, "max_position_embeddings": 64, "swiglu_limit": 7.0},
    ),
    "lfm2": ("lfm2", {"conv_L_cache": 4}),
    "lfm2_moe": ("lfm2_moe", {"layers": 3, "layer_types": ["conv", "full_attention", "conv"],
                              "routed_scaling_factor": 1.0}),
    "granite_hybrid": (
        "granitemoehybrid", {"layers": 3, "mamba_n_groups": 2, "layer_types": GRANITE_LAYERS}
    ),
    "granite_hybrid_dense": (
        "granitemoehybrid",
        {"layers": 3, "mamba_n_groups": 1, "layer_types": GRANITE_LAYERS, "num_local_experts": 0,
         "num_experts_per_tok": 0, "intermediate": 48},
    ),
    "granite_moe": ("granitemoe", {}),
    "qwen35": ("qwen3_5", HYBRID),
    "qwen35_moe": ("qwen3_5_moe", HYBRID),
    "qwen3_next": ("qwen3_next", HYBRID),
}  # fmt: skip
