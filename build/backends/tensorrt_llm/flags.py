"""Settings and passed-on options to the flags of one line's trtllm-build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.errors import UsageError, suggest
from specdec.options import get_flags, name_flag
from specdec.trtllm.facts import Facts, list_lines_with

from ...settings import BuildSettings

# Fields of BuildSettings that trtllm-build has by the same name.
SHARED = (
    "max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_draft_len",
    "max_beam_width", "gemm_plugin", "use_paged_context_fmha", "use_fp8_context_fmha",
    "kv_cache_type", "workers",
)  # fmt: skip
# Flags whose values are paths: the child runs in another folder. The first of them are read.
READ_PATHS = ("model_cls_file", "input_timing_cache", "lora_dir")
PATHS = (*READ_PATHS, "output_timing_cache", "visualize_network")
# What trtllm-build would take, and no check here could see through.
REFUSED = {
    "build_config": "a build_config file replaces every other flag without a word",
    "model_config": "the checkpoint's own config.json is what the engine is built from",
    "paged_kv_cache": "it is deprecated: give --kv-cache-type paged",
    "strip_plan": "it leaves the weights out of the engine, which specdec-run cannot put back",
}
# What users of older lines and other tools give, and where it went.
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


def collect_flags(settings: BuildSettings, facts: Facts) -> dict[str, Any]:
    """Return the values given for trtllm-build's flags, checked against the line's facts."""
    given: dict[str, Any] = {}
    for name in SHARED:
        value = getattr(settings, name)
        if isinstance(value, bool):
            value = "enable" if value else "disable"
        if value is not None:
            given[name] = facts.flags[name].parse([str(value)])
    fields = get_flags(BuildSettings)
    for name, other in settings.others.items():
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
        value = flag.parse(other.words)
        if flag.name in PATHS:
            paths = [str(Path(p).resolve()) for p in (value if flag.is_list else [value])]
            value = paths if flag.is_list else paths[0]
        given[flag.name] = value
    return given


def list_words(given: dict[str, Any]) -> list[str]:
    """Return the words of a command line that give these values."""
    words: list[str] = []
    for name, value in given.items():
        if name == "max_beam_width" and value == 1:
            continue
        words.append(f"--{name}")
        if value is True:
            continue
        words += map(str, value) if isinstance(value, list) else [str(value)]
    return words


def _explain_unknown(name: str, facts: Facts) -> UsageError:
    known = [*facts.list_flag_names(), *get_flags(BuildSettings)]
    nearest = suggest(name, known).replace("_", "-")
    elsewhere = [label for label in list_lines_with(name) if label != facts.label]
    hint = "check the name, or leave it out"
    if name in MOVED:
        hint = MOVED[name]
    elif elsewhere:
        hint = f"leave it out: only the line {', '.join(elsewhere)} has it"
    return UsageError(
        f"neither specdec-build nor trtllm-build of TensorRT-LLM {facts.label} has"
        f" {name_flag(name)}{nearest}",
        hint,
    )
