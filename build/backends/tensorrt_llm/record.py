"""Prediction of an engine's config.json: trtllm-build rewrites some of its settings.

The rules are those of `builder.py` (`_init_max_seq_len`, `check_max_num_tokens`, `build`) of each
line; a rewritten number is not an error there, so that nobody notices it before the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from specdec.checkpoint.config import CheckpointConfig
from specdec.model.config import ModelConfig
from specdec.trtllm.environment import MIN_CAPABILITY_FP8
from specdec.trtllm.facts import Facts

ON, OFF = "enable", "disable"
# Quantizations with which attention over the prompt can run in FP8.
FP8_ATTENTION = ("FP8", "W4A8_AWQ", "NVFP4")
REDUCE_FUSION = {
    "0.14": ("LlamaForCausalLM",),
    "1.2": ("LlamaForCausalLM", "Gemma2ForCausalLM", "MedusaForCausalLM"),
}


@dataclasses.dataclass
class Record:
    """Values by flag name, as the engine will record them, and why one is not what was asked.

    growth: what is added to max_seq_len for speculation, in words; None without any.
    """

    values: dict[str, Any]
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    growth: str | None = None

    def bend(self, name: str, value: Any, reason: str) -> None:
        if self.values[name] != value:
            self.values[name] = value
            self.reasons[name] = reason

    def is_on(self, name: str) -> bool:
        return bool(self.values.get(name) == ON)


def predict_record(
    facts: Facts, checkpoint: CheckpointConfig, mode: str | None, given_flags: Mapping[str, Any],
    capability: tuple[int, int] | None,
) -> Record:  # fmt: skip
    """Work out what trtllm-build will record; capability: of the GPU, None if it is not known."""
    values = {name: flag.default for name, flag in facts.flags.items()} | dict(given_flags)
    record = Record(values)
    if values["max_seq_len"] is None:
        values["max_seq_len"] = deduce_max_seq_len(checkpoint.model, facts.label)
    limit = values["max_seq_len"]
    if values["max_input_len"] > limit:
        record.bend("max_input_len", limit, f"it is cut to max_seq_len={limit}")
    _bend_num_tokens(record)
    _add_drafts(record, checkpoint, mode)
    _bend_fusions(record, facts, checkpoint)
    if facts.label == "0.14":
        _bend_attention_014(record, checkpoint)
    else:
        _bend_attention_12(record, checkpoint, capability)
    if mode == "eagle":
        record.bend("use_paged_context_fmha", ON, "EAGLE needs it, and it is turned on")
    return record


def deduce_max_seq_len(model: ModelConfig, label: str) -> int:
    """Return trtllm-build's default length: positions times a rotary factor."""
    scaling = model.rotary_scaling or {}
    kind = scaling.get("type", scaling.get("rope_type"))
    unscaled = ("su", "longrope") if label == "0.14" else ("su", "longrope", "llama3")
    factor: Any = scaling.get("factor") if kind not in unscaled else 1
    is_number = isinstance(factor, (int, float))
    return math.ceil(model.max_position_embeddings * (factor if is_number else 1))


def _bend_num_tokens(record: Record) -> None:
    values = record.values
    max_tokens = values["max_seq_len"] * values["max_batch_size"]
    if values["max_num_tokens"] > max_tokens:
        record.bend(
            "max_num_tokens", max_tokens,
            f"it is cut to max_seq_len={values['max_seq_len']} x"
            f" max_batch_size={values['max_batch_size']}",
        )  # fmt: skip
    block = values["tokens_per_block"]
    if record.is_on("context_fmha") and values["max_num_tokens"] < block:
        record.bend("max_num_tokens", block, f"it is raised to tokens_per_block={block}")
    optimum = values["opt_num_tokens"]
    if optimum is not None and optimum > values["max_num_tokens"]:
        tokens = values["max_num_tokens"]
        record.bend("opt_num_tokens", tokens, f"it is cut to max_num_tokens={tokens}")


def _add_drafts(record: Record, checkpoint: CheckpointConfig, mode: str | None) -> None:
    values = record.values
    values["speculative_decoding_mode"] = mode or "none"
    if checkpoint.drafter is not None:
        values["max_draft_len"] = checkpoint.drafter.max_draft_tokens
    if mode is None:
        return
    draft_len, max_seq_len = values["max_draft_len"], values["max_seq_len"]
    layers = checkpoint.raw.get("num_eagle_layers", 0) if mode == "eagle" else 0
    values["max_seq_len"] = max_seq_len + draft_len + layers
    layers_term = f" + num_eagle_layers {layers}" if layers else ""
    record.growth = f"{max_seq_len} + max_draft_len {draft_len}{layers_term}"
    tokens = values["max_batch_size"] * (draft_len + 1)
    if values["max_num_tokens"] < tokens:
        record.bend(
            "max_num_tokens", tokens,
            f"it is raised to max_batch_size={values['max_batch_size']} x"
            f" (max_draft_len={draft_len} + 1)",
        )  # fmt: skip


def _bend_fusions(record: Record, facts: Facts, checkpoint: CheckpointConfig) -> None:
    architecture, algorithm = checkpoint.raw["architecture"], checkpoint.quantization.quant_algo
    fits = REDUCE_FUSION[facts.label]
    if checkpoint.model.tp_size == 1 or architecture not in fits:
        record.bend(
            "reduce_fusion", OFF,
            f"it is for tp_size > 1 and {', '.join(fits)} alone, this is {architecture} with"
            f" tp_size={checkpoint.model.tp_size}",
        )  # fmt: skip
    if "user_buffer" in facts.flags and not record.is_on("reduce_fusion"):
        record.bend("user_buffer", OFF, "it needs reduce_fusion")
    if "norm_quant_fusion" in facts.flags and (
        record.is_on("reduce_fusion") or architecture != "LlamaForCausalLM" or algorithm != "NVFP4"
    ):
        record.bend(
            "norm_quant_fusion", OFF, "it is for NVFP4 LlamaForCausalLM without reduce_fusion alone"
        )
    if facts.label == "0.14" and algorithm not in (None, "FP8", "MIXED_PRECISION"):
        record.bend("use_fused_mlp", OFF, f"it is turned off for {algorithm}")


def _bend_attention_12(  # noqa: C901 - trtllm-build's own rules, in its order
    record: Record, checkpoint: CheckpointConfig, capability: tuple[int, int] | None
) -> None:
    quantization = checkpoint.quantization
    has_fp8_cache = quantization.kv_cache_quant_algo == "FP8"
    fp8, paged = "use_fp8_context_fmha", "use_paged_context_fmha"
    capability_name = ".".join(map(str, MIN_CAPABILITY_FP8))
    if record.is_on("streamingllm"):
        record.bend(paged, OFF, "StreamingLLM does without it")
    if not record.is_on("context_fmha"):
        for name in (fp8, paged):
            record.bend(name, OFF, "it needs context_fmha")
    elif quantization.quant_algo not in FP8_ATTENTION:
        record.bend(fp8, OFF, _tell_weights(checkpoint))
        if has_fp8_cache:
            record.bend(paged, OFF, "with an FP8 KV cache it needs FP8 weights too")
    elif capability is not None and capability < MIN_CAPABILITY_FP8:
        record.bend(fp8, OFF, f"it needs compute capability {capability_name}")
        if has_fp8_cache:
            record.bend(
                paged, OFF, f"with an FP8 KV cache it needs compute capability {capability_name}"
            )
    elif record.is_on(paged) and has_fp8_cache:
        record.bend(fp8, ON, "paged context FMHA with an FP8 KV cache needs it")
    elif record.is_on(paged):
        record.bend(fp8, OFF, "with paged context FMHA it needs an FP8 KV cache")
    if quantization.kv_cache_quant_algo == "INT8":
        record.bend(paged, OFF, "it does not work with an INT8 KV cache")


def _bend_attention_014(record: Record, checkpoint: CheckpointConfig) -> None:
    quantization, fp8 = checkpoint.quantization, "use_fp8_context_fmha"
    if quantization.quant_algo != "FP8":
        record.bend(fp8, OFF, _tell_weights(checkpoint))
    elif quantization.kv_cache_quant_algo == "FP8" and record.is_on("use_paged_context_fmha"):
        record.bend(fp8, ON, "paged context FMHA with an FP8 KV cache needs it")


def _tell_weights(checkpoint: CheckpointConfig) -> str:
    algorithm = checkpoint.quantization.quant_algo or "not quantized"
    return f"it needs FP8 weights, these are {algorithm}"
