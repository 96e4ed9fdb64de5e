"""Tiny random Gemma 4 targets and their assistants, as transformers saves them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.models import make_model

VOCAB = 128  # which 16 centroids divide
TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
COPIED = (
    "vocab_size", "head_dim", "num_attention_heads", "num_key_value_heads", "sliding_window",
    "rope_parameters", "attention_k_eq_v", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip


def make_target(folder: Path, variant: str = "equal_values", **changes: Any) -> Path:
    """Write a Gemma 4 of a vocabulary that centroids divide."""
    return make_model(folder, f"Gemma4ForCausalLM-{variant}", vocab_size=VOCAB, **changes)


def make_mtp_assistant(
    parent: Path, target: Path, *, centroids: int = 0, name: str = "assistant", seed: int = 5,
    **text: Any,
) -> Path:  # fmt: skip
    """Write a random assistant of a Gemma 4 that transformers saved; return its folder.

    centroids: of its head, 0 for a head of all tokens. text: changed fields of its layers.
    """
    import transformers

    if not hasattr(transformers, "Gemma4AssistantForCausalLM"):
        pytest.skip("this transformers has no assistants of Gemma 4")
    config = json.loads((target / "config.json").read_text())
    fields = {key: config[key] for key in COPIED if key in config}
    overrides: dict[str, dict[str, Any]] = config.get("per_layer_config") or {}
    full = next(iter(overrides.values()), {})
    fields |= {
        "global_head_dim": full.get("head_dim", config["head_dim"]),
        "num_global_key_value_heads": full.get("num_key_value_heads"),
        "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": len(TYPES),
        "layer_types": TYPES, "num_kv_shared_layers": len(TYPES), "enable_moe_block": False,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "tie_word_embeddings": True, "use_double_wide_mlp": False,
    }  # fmt: skip
    model = transformers.Gemma4AssistantForCausalLM(
        transformers.Gemma4AssistantConfig(
            text_config=transformers.Gemma4TextConfig(**copy.deepcopy(fields | text)),
            backbone_hidden_size=config["hidden_size"], use_ordered_embeddings=bool(centroids),
            num_centroids=centroids or 2048, centroid_intermediate_top_k=3,
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in (*model.named_parameters(), *model.named_buffers()):
            noise = torch.randn(weight.shape, generator=generator)
            if key.endswith("token_ordering"):
                weight.copy_(torch.randperm(len(weight), generator=generator))
            elif key.endswith("layer_scalar"):
                weight.copy_(0.8 + 0.1 * noise)
            elif weight.dim() == 1 and key.endswith("norm.weight"):
                weight.copy_(1 + 0.1 * noise)
            elif weight.dim() > 1:
                # So that no token is much likelier than another, and trees are broad.
                scale = 0.02 if "embed_tokens" in key else 2.0 / weight.shape[1] ** 0.5
                weight.copy_(noise * scale)
    model.save_pretrained(parent / name)
    return parent / name
