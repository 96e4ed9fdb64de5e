"""Typed flags of trtllm-build that contradict one another, or that it takes without effect."""

from __future__ import annotations

from pathlib import Path

from specdec.errors import Problems
from specdec.options import name_flag
from specdec.trtllm.facts import BuildFlag

from .checks import Build
from .flags import READ_PATHS

# Flags of parts that no model here has: trtllm-build takes them for any, and they do nothing.
IDLE = {
    "bert_attention_plugin": "an encoder",
    "bert_context_fmha_fp32_acc": "an encoder",
    "lookup_plugin": "prompt tuning",
    "mamba_conv1d_plugin": "Mamba",
    "max_encoder_input_len": "an encoder and a decoder",
    "moe_plugin": "a mixture of experts",
    "paged_state": "Mamba",
}
# Parts of the engine for FP8 alone, and the quantizations that have them.
FP8_PLUGINS = {
    "gemm_swiglu_plugin": ("FP8",),
    "low_latency_gemm_plugin": ("FP8",),
    "low_latency_gemm_swiglu_plugin": ("FP8",),
    "fp8_rowwise_gemm_plugin": ("FP8_PER_CHANNEL_PER_TOKEN",),
}
TYPES = ("float16", "bfloat16", "float32", "int32")
LEAST = {"workers": 1, "max_lora_rank": 1, "opt_num_tokens": 1, "tokens_per_block": 1}


def find_flag_problems(build: Build) -> Problems:
    """Flags that the engine's reader, the run or trtllm-build itself would stumble over."""
    values, given, mode = build.values, build.given, build.mode
    problems = Problems()
    add = problems.add
    if values["max_beam_width"] != 1:
        reason = "drafts and beams exclude each other" if mode else "specdec-run has no beam search"
        add(f"--max-beam-width {values['max_beam_width']}: {reason}", "use --max-beam-width 1")
    if mode and (values["gather_context_logits"] or values["gather_all_token_logits"]):
        name = "context" if values["gather_context_logits"] else "all_token"
        add(
            f"--gather-{name.replace('_', '-')}-logits does not go with speculation"
            f" (max_draft_len {values['max_draft_len']})",
            "give --gather-generation-logits, which is what acceptance by logits needs",
        )
    wanted = {
        "remove_input_padding": "enable", "gpt_attention_plugin": None, "kv_cache_type": "paged",
    }  # fmt: skip
    for name, needed in wanted.items():
        if name in given and (
            given[name] == "disable" if needed is None else given[name] != needed
        ):
            add(
                f"{name_flag(name)} {given[name]}: such an engine has no in-flight batching,"
                " which is all that specdec-run uses",
                f"leave {name_flag(name)} out",
            )
    if given.get("multiple_profiles") == "enable" and values["opt_num_tokens"] is not None:
        add("--multiple-profiles and --opt-num-tokens exclude each other", "give one of the two")
    if given.get("streamingllm") == "enable":
        add(
            "--streamingllm enable: the 1.x line refuses it, and no mode of speculation has it",
            "leave --streamingllm out",
        )
    if given.get("auto_parallel", 1) != 1:
        add(
            f"--auto-parallel {given['auto_parallel']}: the checkpoint decides over how many ranks"
            " the model is split",
            "convert with --tp-size",
        )
    if "workers" in given and given["workers"] > build.num_ranks:
        add(
            f"--workers {given['workers']} for {build.num_ranks} rank(s)",
            f"use --workers {build.num_ranks} or fewer",
        )
    for find in (_find_number_problems, _find_idle_problems, _find_plugin_problems):
        problems += find(build)
    return problems


def find_path_problems(build: Build) -> Problems:
    """Files that are to be read and are not on this machine."""
    problems = Problems()
    for name in READ_PATHS:
        value = build.given.get(name, [])
        for path in value if isinstance(value, list) else [value]:
            if not Path(path).exists():
                problems.add(f"{name_flag(name)} {path} does not exist", "check the path")
    return problems


def _find_number_problems(build: Build) -> Problems:
    """Numbers that argparse takes and no engine does."""
    problems = Problems()
    for name, value in build.given.items():
        least = LEAST.get(name, 0)
        if build.facts.flags[name].kind == "int" and value < least:
            problems.add(f"{name_flag(name)} {value}", f"give {least} or more")
    size = build.values["tokens_per_block"]
    if size > 0 and size & (size - 1):
        problems.add(
            f"--tokens-per-block {size}: the kernels take powers of two alone",
            f"give {1 << size.bit_length() - 1} or {1 << size.bit_length()}",
        )
    return problems


def _find_idle_problems(build: Build) -> Problems:
    """Flags that would do nothing for this checkpoint or beside the others."""
    values, given = build.values, build.given
    problems = Problems()
    for name, kind in IDLE.items():
        if name in given:
            problems.add(
                f"{name_flag(name)} is for models with {kind}, this is not one",
                f"leave {name_flag(name)} out",
            )
    if given.get("pp_reduce_scatter") == "enable":
        problems.add("--pp-reduce-scatter is for Mixtral alone", "leave --pp-reduce-scatter out")
    if values["lora_plugin"] == "disable":
        without = [
            name for name in given
            if name.startswith("lora_") and name != "lora_plugin" or name == "max_lora_rank"
            or (name == "dora_plugin" and given[name] == "enable")
        ]  # fmt: skip
        if without:
            problems.add(
                f"{', '.join(map(name_flag, without))} without --lora-plugin has no effect",
                "add --lora-plugin auto, or leave them out",
            )
    if given.get("auto_parallel", 1) == 1:
        idle = [name for name in ("gpus_per_node", "cluster_key") if name in given]
        if idle:
            problems.add(
                f"{', '.join(map(name_flag, idle))} without --auto-parallel has no effect",
                "leave out",
            )
    tp_size = build.checkpoint.model.tp_size
    if given.get("gemm_allreduce_plugin", "disable") != "disable" and tp_size == 1:
        problems.add(
            "--gemm-allreduce-plugin adds up what several ranks have computed, this is one",
            "leave it out, or convert with a larger --tp-size",
        )
    return problems


def _find_plugin_problems(build: Build) -> Problems:
    """Whether plugins' types and the checkpoint's go together."""
    checkpoint, given = build.checkpoint, build.given
    dtype, algorithm = checkpoint.model.dtype, checkpoint.quantization.quant_algo
    is_a = algorithm or "not quantized"
    problems = Problems()
    for name, value in given.items():
        if not _is_typed(build.facts.flags[name]) or name in IDLE:
            continue
        if value in TYPES and value != dtype:
            kinds = "disable" if name == "gemm_allreduce_plugin" else "auto"
            problems.add(
                f"{name_flag(name)} {value} for a {dtype} checkpoint: a plugin takes tensors of"
                " its own type alone",
                f"give {name_flag(name)} {dtype} or {kinds}",
            )
    if given.get("gemm_plugin") in ("fp8", "nvfp4"):
        wanted = given["gemm_plugin"]
        if algorithm != wanted.upper():
            problems.add(
                f"--gemm-plugin {wanted} for a checkpoint that is {is_a}",
                "quantize the target first (specdec-convert --quantization fp8), or give"
                f" --gemm-plugin {dtype}",
            )
    for name, algorithms in FP8_PLUGINS.items():
        if given.get(name, "disable") == "disable":
            continue
        if algorithm not in algorithms:
            problems.add(
                f"{name_flag(name)} {given[name]} for a checkpoint that is {is_a}: it is for"
                f" {' and '.join(algorithms)}",
                f"leave {name_flag(name)} out, or quantize the target",
            )
        if "swiglu" in name and build.values["use_fused_mlp"] == "disable":
            problems.add(f"{name_flag(name)} needs the fused MLP", "leave --use-fused-mlp out")
    if given.get("fuse_fp4_quant") == "enable" and algorithm != "NVFP4":
        problems.add(
            f"--fuse-fp4-quant enable for a checkpoint that is {is_a}: it is for NVFP4",
            "leave --fuse-fp4-quant out",
        )
    return problems


def _is_typed(flag: BuildFlag) -> bool:
    """Whether a plugin's value is the type that it computes in."""
    return flag.is_plugin and "float16" in flag.choices
