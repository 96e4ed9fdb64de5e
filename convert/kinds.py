"""Marks of what a model computes, in its config.json and tensor names, for an unknown class.

For models that no family here is for: what they have that nothing here computes, and which family
is nearest by that. A name tells nothing: OPT and gpt-oss are spelled alike.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Mark:
    """Mark of an operation that some models compute and a plain Llama does not.

    keys: of config.json, any of which says so unless it is null, false, 0, 1.0 (which multiplies
    nothing) or empty. tensors: patterns of names, any of which does. families: those here that
    compute it.
    """

    description: str
    keys: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    families: tuple[str, ...] = ()

    def find(self, config: Mapping[str, Any], tensors: Collection[str]) -> str | None:
        """Return the key or tensor that shows the operation; None where nothing does."""
        for key in self.keys:
            value = config.get(key)
            if value and not (isinstance(value, float) and value == 1):
                return key
        for pattern in self.tensors:
            matching_name = next(
                (name for name in tensors if fnmatch.fnmatchcase(name, pattern)), None
            )
            if matching_name is not None:
                return matching_name
        return None


_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe")
_GEMMAS = ("gemma2", "gemma3")
_MULTIPLIED = ("granite", "granitemoe")
MARKS = (
    Mark(
        "experts",
        ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        ("*.experts.*",), _EXPERTS,
    ),
    Mark(
        "experts that every token takes",
        ("n_shared_experts", "shared_expert_intermediate_size", "shared_intermediate_size"),
        ("*.shared_expert*",), ("qwen2_moe",),
    ),
    Mark("attention over a compressed cache (MLA)", ("kv_lora_rank",), ("*.kv_a_proj*",)),
    Mark("attention sinks", (), ("*.sinks",)),
    Mark("four-bit experts (MXFP4)", (), ("*_blocks",)),
    Mark(
        "state space, convolution or linear attention layers",
        (
            "state_size", "mamba_d_state", "ssm_state_size", "ssm_cfg", "conv_L_cache",
            "linear_num_key_heads", "rwkv", "time_step_rank",
        ),
        ("*.A_log", "*.conv1d.weight", "*.linear_attn.*"),
    ),
    Mark("an encoder", ("is_encoder_decoder", "num_decoder_layers"), ("encoder.*",)),
    Mark(
        "positions as a bias of the attention",
        ("alibi", "relative_attention_num_buckets", "slow_but_exact"),
    ),
    Mark("positions that the images share (M-RoPE)", ("mrope_section",)),
    Mark(
        "queries and keys that are normalized", ("use_qk_norm", "qk_norm", "qk_layernorm"),
        ("*.q_norm.weight", "*.q_layernorm.weight"), ("qwen3", "qwen3_moe", "gemma3"),
    ),
    Mark(
        "layers without positions", ("no_rope_layers", "no_rope_layer_interval"), (), ("smollm3",)
    ),
    Mark("attention in chunks", ("attention_chunk_size",)),
    Mark(
        "soft caps of scores or logits", ("attn_logit_softcapping", "final_logit_softcapping"), (),
        _GEMMAS,
    ),
    Mark(
        "norms after the attention and the MLP", (),
        ("*.post_feedforward_layernorm.weight",), _GEMMAS,
    ),
    Mark("inputs of its own for each layer", ("vocab_size_per_layer_input",)),
    Mark(
        "multipliers of embedding, residuals or logits",
        (
            "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
            "scale_emb", "scale_depth", "logit_scale",
        ),
        (), _MULTIPLIED,
    ),
    Mark(
        "experts chosen by a sigmoid with a correction", (), ("*.e_score_correction_bias",),
    ),
    Mark("first layers without experts", ("first_k_dense_replace",)),
    Mark(
        "layer norms", ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        ("*norm.bias", "*.ln_?.bias", "*.ln_f.bias"), ("phi", "gpt2", "opt", "stablelm"),
    ),
    Mark(
        "attention and MLP side by side", ("parallel_attn", "use_parallel_residual"), (),
        ("phi", "stablelm"),
    ),
    Mark("learned positions", ("n_positions",), ("*wpe.weight",), ("gpt2", "opt")),
    Mark("a rotary embedding of a part of each head", ("partial_rotary_factor", "rotary_pct"), (),
         ("phi", "phi3", "stablelm")),
    Mark("gate and up projection in one", (), ("*.gate_up_proj.weight",), ("phi3",)),
)  # fmt: skip


def describe_kind(
    config: Mapping[str, Any], tensors: Collection[str], families: Collection[str]
) -> tuple[str, list[str]]:
    """Return the nearest family and the operations of a model that this one does not compute.

    families: the names of those that there are; of equally near ones the first is taken, a plain
    Llama before all.
    """
    signs = {mark: sign for mark in MARKS if (sign := mark.find(config, tensors)) is not None}

    def measure(family: str) -> int:
        return sum((family in mark.families) != (mark in signs) for mark in MARKS)

    nearest = min(sorted(families, key=lambda family: family != "llama"), key=measure)
    differences = [
        f"{mark.description} ({sign})"
        for mark, sign in signs.items()
        if nearest not in mark.families
    ]
    return nearest, differences
