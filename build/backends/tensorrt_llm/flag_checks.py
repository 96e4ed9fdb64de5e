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
    beams, ranks = values["max_beam_width"], build.num_ranks
    gathered = "context" if values["gather_context_logits"] else "all-token"
    gathers = values["gather_context_logits"] or values["gather_all_token_logits"]
    padding, plugin = given.get("remove_input_padding"), given.get("gpt_attention_plugin")
    problems = Problems.where(
        (beams != 1,
         f"--max-beam-width {beams}: "
         + ("drafts and beams exclude each other" if mode else "specdec-run has no beam search"),
         "use --max-beam-width 1"),
        (mode and gathers,
         f"--gather-{gathered}-logits does not go with speculation (max_draft_len"
         f" {values['max_draft_len']})",
         "give --gather-generation-logits, which is what acceptance by logits needs"),
        *((is_wrong,
           f"{name_flag(name)} {given.get(name)}: such an engine has no in-flight batching, which"
           " is all that specdec-run uses", f"leave {name_flag(name)} out")
          for name, is_wrong in (
              ("remove_input_padding", padding not in (None, "enable")),
              ("gpt_attention_plugin", plugin == "disable"),
              ("kv_cache_type", given.get("kv_cache_type", "paged") != "paged"),
          )),
        (given.get("multiple_profiles") == "enable" and values["opt_num_tokens"] is not None,
         "--multiple-profiles and --opt-num-tokens exclude each other", "give one of the two"),
        (given.get("streamingllm") == "enable",
         "--streamingllm enable: the 1.x line refuses it, and no mode of speculation has it",
         "leave --streamingllm out"),
        (given.get("auto_parallel", 1) != 1,
         f"--auto-parallel {given.get('auto_parallel')}: the checkpoint decides over how many"
         " ranks the model is split", "convert with --tp-size"),
        (given.get("workers", 1) > ranks,
         f"--workers {given.get('workers')} for {ranks} rank(s)",
         f"use --workers {ranks} or fewer"),
    )  # fmt: skip
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
    size = build.values["tokens_per_block"]
    return Problems.where(
        *((build.facts.flags[name].kind == "int" and value < LEAST.get(name, 0),
           f"{name_flag(name)} {value}", f"give {LEAST.get(name, 0)} or more")
          for name, value in build.given.items()),
        (size > 0 and size & (size - 1),
         f"--tokens-per-block {size}: the kernels take powers of two alone",
         f"give {1 << max(0, size.bit_length() - 1)} or {1 << size.bit_length()}"),
    )  # fmt: skip


def _find_idle_problems(build: Build) -> Problems:
    """Flags that would do nothing for this checkpoint or alongside the others."""
    given = build.given
    loras = [
        name for name in given
        if name.startswith("lora_") and name != "lora_plugin" or name == "max_lora_rank"
        or (name == "dora_plugin" and given[name] == "enable")
    ]  # fmt: skip
    splits = [name for name in ("gpus_per_node", "cluster_key") if name in given]
    adds = given.get("gemm_allreduce_plugin", "disable") != "disable"
    return Problems.where(
        *((name in given, f"{name_flag(name)} is for models with {kind}, this is not one",
           f"leave {name_flag(name)} out") for name, kind in IDLE.items()),
        (given.get("pp_reduce_scatter") == "enable",
         "--pp-reduce-scatter is for Mixtral alone", "leave --pp-reduce-scatter out"),
        (loras and build.values["lora_plugin"] == "disable",
         f"{', '.join(map(name_flag, loras))} without --lora-plugin has no effect",
         "add --lora-plugin auto, or leave them out"),
        (splits and given.get("auto_parallel", 1) == 1,
         f"{', '.join(map(name_flag, splits))} without --auto-parallel has no effect", "leave out"),
        (adds and build.checkpoint.model.tp_size == 1,
         "--gemm-allreduce-plugin adds up what several ranks have computed, this is one",
         "leave it out, or convert with a larger --tp-size"),
    )  # fmt: skip


def _find_plugin_problems(build: Build) -> Problems:
    """Whether plugins' types and the checkpoint's go together."""
    checkpoint, given = build.checkpoint, build.given
    dtype, algorithm = checkpoint.model.dtype, checkpoint.quantization.quant_algo
    gemm, is_a = given.get("gemm_plugin"), algorithm or "not quantized"
    problems = Problems()
    for name, value in given.items():
        is_typed = _is_typed(build.facts.flags[name]) and name not in IDLE
        if is_typed and value in TYPES and value != dtype:
            other = "disable" if name == "gemm_allreduce_plugin" else "auto"
            problems.add(
                f"{name_flag(name)} {value} for a {dtype} checkpoint: a plugin takes tensors of"
                " its own type alone",
                f"give {name_flag(name)} {dtype} or {other}",
            )
    for name, algorithms in FP8_PLUGINS.items():
        if given.get(name, "disable") == "disable":
            continue
        flag, lacks_mlp = name_flag(name), build.values["use_fused_mlp"] == "disable"
        problems += Problems.where(
            (algorithm not in algorithms,
             f"{flag} {given[name]} for a checkpoint that is {is_a}: it is for"
             f" {' and '.join(algorithms)}", f"leave {flag} out, or quantize the target"),
            ("swiglu" in name and lacks_mlp,
             f"{flag} needs the fused MLP", "leave --use-fused-mlp out"),
        )  # fmt: skip
    problems += Problems.where(
        (gemm in ("fp8", "nvfp4") and algorithm != gemm.upper(),
         f"--gemm-plugin {gemm} for a checkpoint that is {is_a}",
         "quantize the target first (specdec-convert --quantization fp8), or give --gemm-plugin"
         f" {dtype}"),
        (given.get("fuse_fp4_quant") == "enable" and algorithm != "NVFP4",
         f"--fuse-fp4-quant enable for a checkpoint that is {is_a}: it is for NVFP4",
         "leave --fuse-fp4-quant out"),
    )  # fmt: skip
    return problems


def _is_typed(flag: BuildFlag) -> bool:
    """Whether a plugin's value is the type that it computes in."""
    return flag.is_plugin and "float16" in flag.choices
