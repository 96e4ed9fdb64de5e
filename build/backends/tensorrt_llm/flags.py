"""The flags of one line's trtllm-build: from settings and passed-on options, and what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.errors import Problems, UsageError, suggest
from specdec.options import get_flags, name_flag
from specdec.trtllm.facts import Facts, list_lines_with

from ...settings import BuildSettings
from .plan import TensorRTPlan

# Fields of BuildSettings that trtllm-build has by the same name.
SHARED_FIELDS = (
    "max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_draft_len",
    "max_beam_width", "gemm_plugin", "use_paged_context_fmha", "use_fp8_context_fmha",
    "kv_cache_type", "workers",
)  # fmt: skip
# Flags whose values are paths that trtllm-build reads.
READ_PATHS = ("model_cls_file", "input_timing_cache", "lora_dir")
# Flags whose values are paths: they are made absolute, as the child runs in another folder.
PATHS = (*READ_PATHS, "output_timing_cache", "visualize_network")
# Flags that trtllm-build would take, and no check here could see through.
REFUSED = {
    "build_config": "a build_config file replaces every other flag without a word",
    "model_config": "the checkpoint's own config.json is what the engine is built from",
    "paged_kv_cache": "it is deprecated: give --kv-cache-type paged",
    "strip_plan": "it leaves the weights out of the engine, which specdec-run cannot put back",
}
# Flags of older lines and other tools, and where they went.
MOVED = {
    "builder_force_num_profiles": "the line reads the environment variable"
    " BUILDER_FORCE_NUM_PROFILES instead",
    "max_output_len": "it became --max-seq-len, prompt plus output, in 0.12",
    "tp_size": "the checkpoint has it: specdec-convert --tp-size",
    "pp_size": "the checkpoint has it: specdec-convert --pp-size",
    "dtype": "the checkpoint has it: specdec-convert --dtype",
    "strongly_typed": "every engine is, since 0.11",
    "use_custom_all_reduce": "it was removed in 0.12",
    "multi_block_mode": "it is an option of the run since 0.12",
}
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
# Parts of the engine for FP8 only, and the quantizations that have them.
FP8_PLUGINS = {
    "gemm_swiglu_plugin": ("FP8",),
    "low_latency_gemm_plugin": ("FP8",),
    "low_latency_gemm_swiglu_plugin": ("FP8",),
    "fp8_rowwise_gemm_plugin": ("FP8_PER_CHANNEL_PER_TOKEN",),
}
# Least values of numbers that may not be 0.
MINIMA = {"workers": 1, "max_lora_rank": 1, "opt_num_tokens": 1, "tokens_per_block": 1}


def collect_flags(settings: BuildSettings, facts: Facts) -> dict[str, Any]:
    """Return the values given for trtllm-build's flags, by name.

    Their types and choices are trtllm-build's to check, but for whole numbers, which are predicted.
    """
    given_flags: dict[str, Any] = {}
    for name in SHARED_FIELDS:
        value = getattr(settings, name)
        if isinstance(value, bool):
            value = "enable" if value else "disable"
        if value is not None:
            given_flags[name] = facts.flags[name].parse([str(value)])
    fields = get_flags(BuildSettings)
    for name, option in settings.unknown_options.items():
        flag = facts.find_flag(name)
        if flag is None:
            raise _explain_unknown(name, facts)
        if flag.name in REFUSED:
            raise UsageError(
                f"{name_flag(flag.name)} is not passed on: {REFUSED[flag.name]}",
                "leave it out",
            )
        if flag.name in fields:
            raise UsageError(
                f"{name_flag(name)} is another name of {name_flag(flag.name)}",
                f"give {name_flag(flag.name)}",
            )
        value = flag.parse(option.words)
        if flag.name in PATHS:
            paths = [str(Path(p).resolve()) for p in (value if flag.is_list else [value])]
            value = paths if flag.is_list else paths[0]
        given_flags[flag.name] = value
    return given_flags


def _explain_unknown(name: str, facts: Facts) -> UsageError:
    flag_names = [*facts.list_flag_names(), *get_flags(BuildSettings)]
    nearest = suggest(name, flag_names).replace("_", "-")
    other_lines = [label for label in list_lines_with(name) if label != facts.label]
    hint = "check the name, or leave it out"
    if name in MOVED:
        hint = MOVED[name]
    elif other_lines:
        hint = f"leave it out: only the line {', '.join(other_lines)} has it"
    return UsageError(
        f"neither specdec-build nor trtllm-build of TensorRT-LLM {facts.label} has"
        f" {name_flag(name)}{nearest}",
        hint,
    )


def find_flag_problems(build: TensorRTPlan) -> Problems:
    """List flags that the engine's reader or the run would stumble over, or that have no effect."""
    values, given_flags, mode = build.record.values, build.given_flags, build.mode
    beams, ranks = values["max_beam_width"], build.num_ranks
    gathered = "context" if values["gather_context_logits"] else "all-token"
    gathers = values["gather_context_logits"] or values["gather_all_token_logits"]
    padding, plugin = (
        given_flags.get("remove_input_padding"),
        given_flags.get("gpt_attention_plugin"),
    )
    problems = Problems.from_table(
        (beams != 1,
         f"--max-beam-width {beams}: "
         + ("drafts and beams exclude each other" if mode else "specdec-run has no beam search"),
         "use --max-beam-width 1"),
        (mode and gathers,
         f"--gather-{gathered}-logits does not go with speculation (max_draft_len"
         f" {values['max_draft_len']})",
         "give --gather-generation-logits, which is what acceptance by logits needs"),
        *((is_wrong,
           f"{name_flag(name)} {given_flags.get(name)}: such an engine has no in-flight batching,"
           " which is all that specdec-run uses", f"leave {name_flag(name)} out")
          for name, is_wrong in (
              ("remove_input_padding", padding not in (None, "enable")),
              ("gpt_attention_plugin", plugin == "disable"),
              ("kv_cache_type", given_flags.get("kv_cache_type", "paged") != "paged"),
          )),
        (given_flags.get("streamingllm") == "enable" and build.label == "0.14",
         "--streamingllm enable: no mode of speculation has it", "leave --streamingllm out"),
        (given_flags.get("auto_parallel", 1) != 1,
         f"--auto-parallel {given_flags.get('auto_parallel')}: the checkpoint decides over how many"
         " ranks the model is split", "convert with --tp-size"),
        (given_flags.get("workers", 1) > ranks,
         f"--workers {given_flags.get('workers')} for {ranks} rank(s)",
         f"use --workers {ranks} or fewer"),
    )  # fmt: skip
    for find in (_find_number_problems, _find_idle_problems, _find_plugin_problems):
        problems += find(build)
    return problems


def find_path_problems(build: TensorRTPlan) -> Problems:
    """List files that are to be read and are not on this machine."""
    problems = Problems()
    for name in READ_PATHS:
        value = build.given_flags.get(name, [])
        for path in value if isinstance(value, list) else [value]:
            if not Path(path).exists():
                problems.add(f"{name_flag(name)} {path} does not exist", "check the path")
    return problems


def _find_number_problems(build: TensorRTPlan) -> Problems:
    """List numbers that argparse takes and no engine does."""
    size = build.record.values["tokens_per_block"]
    return Problems.from_table(
        *((build.facts.flags[name].kind == "int" and value < MINIMA.get(name, 0),
           f"{name_flag(name)} {value}", f"give {MINIMA.get(name, 0)} or more")
          for name, value in build.given_flags.items()),
        (size > 0 and size & (size - 1),
         f"--tokens-per-block {size}: the kernels take powers of two alone",
         f"give {1 << max(0, size.bit_length() - 1)} or {1 << size.bit_length()}"),
    )  # fmt: skip


def _find_idle_problems(build: TensorRTPlan) -> Problems:
    """List flags that would do nothing for this checkpoint or alongside the others."""
    given_flags = build.given_flags
    loras = [
        name for name in given_flags
        if name.startswith("lora_") and name != "lora_plugin" or name == "max_lora_rank"
        or (name == "dora_plugin" and given_flags[name] == "enable")
    ]  # fmt: skip
    splits = [name for name in ("gpus_per_node", "cluster_key") if name in given_flags]
    adds = given_flags.get("gemm_allreduce_plugin", "disable") != "disable"
    return Problems.from_table(
        *((name in given_flags, f"{name_flag(name)} is for models with {kind}, this is not one",
           f"leave {name_flag(name)} out") for name, kind in IDLE.items()),
        (given_flags.get("pp_reduce_scatter") == "enable",
         "--pp-reduce-scatter is for Mixtral alone", "leave --pp-reduce-scatter out"),
        (loras and build.record.values["lora_plugin"] == "disable",
         f"{', '.join(map(name_flag, loras))} without --lora-plugin has no effect",
         "add --lora-plugin auto, or leave them out"),
        (splits and given_flags.get("auto_parallel", 1) == 1,
         f"{', '.join(map(name_flag, splits))} without --auto-parallel has no effect", "leave out"),
        (adds and build.checkpoint.model.tp_size == 1,
         "--gemm-allreduce-plugin adds up what several ranks have computed, this is one",
         "leave it out, or convert with a larger --tp-size"),
    )  # fmt: skip


def _find_plugin_problems(build: TensorRTPlan) -> Problems:
    """List parts of the engine for quantized weights, of which this checkpoint has none."""
    algorithm, given_flags = build.checkpoint.quantization.quant_algo, build.given_flags
    weights = f"for a checkpoint that is {algorithm or 'not quantized'}"
    gemm, dtype = given_flags.get("gemm_plugin"), build.checkpoint.model.dtype
    lacks_mlp = build.record.values["use_fused_mlp"] == "disable"
    chosen_plugins = {
        name: algorithms for name, algorithms in FP8_PLUGINS.items()
        if given_flags.get(name, "disable") != "disable"
    }  # fmt: skip
    return Problems.from_table(
        *((algorithm not in algorithms,
           f"{name_flag(name)} {given_flags[name]} {weights}: it is for {' and '.join(algorithms)}",
           f"leave {name_flag(name)} out, or quantize the target")
          for name, algorithms in chosen_plugins.items()),
        *(("swiglu" in name and lacks_mlp,
           f"{name_flag(name)} needs the fused MLP", "leave --use-fused-mlp out")
          for name in chosen_plugins),
        (gemm in ("fp8", "nvfp4") and algorithm != str(gemm).upper(),
         f"--gemm-plugin {gemm} {weights}",
         "quantize the target first (specdec-convert --quantization fp8), or give --gemm-plugin"
         f" {dtype}"),
        (given_flags.get("fuse_fp4_quant") == "enable" and algorithm != "NVFP4",
         f"--fuse-fp4-quant enable {weights}: it is for NVFP4", "leave --fuse-fp4-quant out"),
    )  # fmt: skip
