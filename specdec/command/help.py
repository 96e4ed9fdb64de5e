"""What `--help` and `specdec help` show: an example first, options by purpose and by method.

`--help` explains the options of a group that most people need and only names the others;
`specdec help CMD` explains all. Options are listed here by name; what is in no group comes last.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

import specdec
from specdec.command.settings import get_flags
from specdec.methods import METHODS


@dataclasses.dataclass(frozen=True)
class Page:
    """A command's page. groups: title -> names of the options that `--help` explains.

    more: title -> names that `--help` only lists. Those of the methods follow by themselves.
    """

    examples: tuple[str, ...]
    docs: str
    groups: Mapping[str, Sequence[str]]
    more: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)


def list_method_options() -> dict[str, list[str]]:
    """The options of each method, by its title, whatever the command."""
    return {
        method.title: [name for kind in method.options.values() for name in get_flags(kind)]
        for method in METHODS.values()
    }


DRAFTER_FOLDERS = [method.folder for method in METHODS.values() if method.folder]
TARGET_STARTERS = [
    method.starter for method in METHODS.values() if method.source == "target" and method.starter
]
# Beside the methods' own options, in every command that has them.
SHARED: Mapping[str, Sequence[str]] = {
    "Typical acceptance (lossy)": ("acceptance", "typical_epsilon", "typical_delta"),
}
GENERAL = ("dry_run", "force", "json", "config", "debug", "version", "help")
PAGES: Mapping[str, Page] = {
    "generate": Page(
        (
            'specdec generate --model-dir BASE --drafter-model-dir DRAFTER "def main():"',
            'specdec generate --model-dir BASE --prompt-lookup-num-tokens 8 "def main():"',
        ),
        "generate",
        {
            "Models": (
                "model_dir", *DRAFTER_FOLDERS, "draft_model_dir", *TARGET_STARTERS, "tokenizer_dir",
            ),
            "Text": (
                "input_file", "apply_chat_template", "max_output_len", "temperature", "top_k",
                "top_p", "random_seed", "stop_words", "streaming", "show_drafts",
            ),
            "Drafting": ("no_speculation", "draft_len"),
            "Kept engines": ("no_cache", "clear_cache"),
        },
        {
            "More on drafting": (
                "draft_tree_tokens", "draft_budget", "draft_chain", "draft_vocabulary",
            ),
            "Engine": (
                "dtype", "quantization", "drafter_weights", "dequantize", "max_batch_size",
                "max_seq_len", "backend", "device",
            ),
        },
    ),
    "convert": Page(
        ("specdec-convert --model-dir BASE --drafter-model-dir DRAFTER --output-dir checkpoint",),
        "convert",
        {
            "Models": (
                "model_dir", "base_model_checkpoint_dir", *DRAFTER_FOLDERS,
            ),
            "Checkpoint": ("output_dir", "dtype", "tp_size", "pp_size", "trtllm_version"),
        },
        {
            "Quantization": (
                "quantization", "group_size", "dequantize", "kv_cache_dtype", "calibration_data",
                "calib_size",
                "calib_batch_size", "calib_max_seq_length", "calib_device",
            ),
            "Embedding": (
                "use_parallel_embedding", "embedding_sharding_dim", "use_embedding_sharing",
            ),
            "Experts": ("moe_tp_size", "moe_ep_size"),
            "Work": ("workers", "allow_nonfinite"),
        },
    ),
    "build": Page(
        ("specdec-build --checkpoint-dir checkpoint --output-dir engine",),
        "build",
        {
            "Folders": ("checkpoint_dir", "output_dir", "tokenizer_dir"),
            "Engine": (
                "backend", "quantization", "group_size", "optimize", "packed_weights",
            ),
            "Sizes": (
                "max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens",
                "max_beam_width",
            ),
            "Speculation": (
                "speculative_decoding_mode", "max_draft_len", "drafter_weights", "draft_vocab_file",
                "draft_vocab_size",
            ),
        },
        {
            "TensorRT-LLM": (
                "gemm_plugin", "use_paged_context_fmha", "use_fp8_context_fmha", "kv_cache_type",
                "workers", "trtllm_version", "emit_script", "launcher",
            ),
            "Triton": (
                "emit_triton", "triton_templates", "triton_draft_engine_dir", "triton_parameters",
            ),
        },
    ),
    "run": Page(
        (
            'specdec-run --engine-dir engine --tokenizer-dir BASE --input-text "def main():"',
            "specdec-run --engine-dir engine --tokenizer-dir BASE --input-file FILE.jsonl --json",
        ),
        "run",
        {
            "Engine and prompts": (
                "engine_dir", "tokenizer_dir", "input_text", "input_file", "apply_chat_template",
            ),
            "Text": (
                "max_output_len", "temperature", "top_k", "top_p", "random_seed", "stop_words",
                "end_id",
            ),
            "Drafting": ("no_speculation", "draft_len"),
            "Output": ("streaming", "show_drafts", "output_file"),
        },
        {
            "More on drafting": ("draft_budget", "draft_chain"),
            "Machine": (
                "device", "kv_cache_enable_block_reuse", "kv_cache_free_gpu_memory_fraction",
            ),
            "Measurement": ("run_profiling", "output_generation_logits", "verify_hashes"),
        },
    ),
    "serve": Page(
        (
            "specdec-serve --engine-dir engine",
            "specdec-serve --engine-dir engine --host 0.0.0.0 --api-key-file key.txt",
        ),
        "serve",
        {
            "Engine": ("engine_dir", "tokenizer_dir", "served_model_name"),
            "Address": ("host", "port", "api_key_file", "allow_anonymous"),
            "Drafting": ("no_speculation", "draft_len", "draft_budget", "draft_chain"),
            "Load": (
                "max_batch_size", "max_seq_len", "kv_cache_free_gpu_memory_fraction", "max_queue",
                "prompt_chunk", "request_timeout",
            ),
        },
        {"Machine": ("device", "max_body_mb", "metrics_prefix")},
    ),
    "train": Page(
        (
            "specdec-train --model-dir BASE --data data.jsonl --output-dir drafter",
            "specdec-train data --help    # make the data with the target itself",
        ),
        "train",
        {
            "Models and data": (
                "method", "model_dir", "data", "output_dir", "eval_data", "start_from",
            ),
            "Length and speed": (
                "max_steps", "num_epochs", "learning_rate", "batch_size",
                "gradient_accumulation_steps", "model_max_length", "dtype",
            ),
            "Interruption": ("resume", "save_steps"),
        },
        {
            "Optimizer": ("warmup_ratio", "weight_decay", "max_grad_norm", "seed"),
            "What is learned": ("self_distillation",),
            "Evaluation": (
                "eval_steps", "eval_rows", "eval_prompts", "eval_output_len",
                "stop_at_acceptance", "report_top_k", "logging_steps", "sanity",
            ),
            "Large targets": ("shard_target", "hidden_states_dir"),
            "Output": ("save_dtype", "push_to_hub"),
        },
    ),
    "train data": Page(
        (
            "specdec-train data --input chats.jsonl --output data.jsonl"
            " --base-url URL/v1 --model NAME",
        ),
        "data",
        {
            "Data": ("input", "output", "max_rows", "dataset_split", "completion", "system_prompt"),
            "A server of the target": ("base_url", "model", "concurrency"),
            "Or its engine": ("engine_dir", "tokenizer_dir", "device"),
            "Answers": ("max_tokens", "temperature", "top_p", "seed"),
            "Failures": ("resume", "timeout", "max_retries", "drop_truncated", "allow_failures"),
        },
    ),
    "verify": Page(
        (
            "specdec-verify --engine-dir engine --model-dir BASE",
            "specdec-verify --checkpoint-dir checkpoint",
        ),
        "verify",
        {
            "An engine's text": (
                "engine_dir", "model_dir", "prompts", "max_output_len", "num_alone", "device",
                "verify_hashes",
            ),
            "Its sampling": ("sampling", "num_samples", "temperature", "top_k", "random_seed"),
            "A checkpoint's files": ("checkpoint_dir", "workers"),
        },
        {"Drafting": ("draft_len", "draft_budget", "draft_chain")},
    ),
    "bench": Page(
        ("specdec-bench --engine-dir engine --tokenizer-dir BASE --prompts prompts.jsonl",),
        "bench",
        {
            "Engine and prompts": (
                "engine_dir", "tokenizer_dir", "prompts", "max_output_len", "device",
            ),
            "Measurement": (
                "repeat", "batch_sizes", "draft_len", "draft_budget", "draft_chain",
            ),
            "Output": ("output",),
        },
    ),
    "tune": Page(
        (
            "specdec tune --checkpoint-dir checkpoint --tokenizer-dir BASE --output-file best.yaml",
        ),
        "tune",
        {
            "Checkpoint and prompts": (
                "checkpoint_dir", "tokenizer_dir", "prompts", "max_output_len", "device",
            ),
            "Measurement": ("repeat", "batch_sizes", "num_measured", "max_length"),
            "Output": ("output_file",),
        },
    ),
    "diagnose": Page(
        ("specdec diagnose --engine-dir engine --tokenizer-dir BASE",),
        "bench",
        {
            "Engine and prompts": (
                "engine_dir", "tokenizer_dir", "prompts", "max_output_len", "device",
            ),
            "Measurement": (
                "repeat", "batch_sizes", "draft_len", "draft_budget", "draft_chain",
            ),
        },
    ),
    "export": Page(
        (
            "specdec-export --model-dir BASE --eagle-model-dir DRAFTER --to vllm --output-dir out",
            "specdec-export --model-dir BASE --to gguf --output-dir out",
        ),
        "export",
        {
            "Models": ("checkpoint_dir", "model_dir", *DRAFTER_FOLDERS),
            "Format": ("to", "output_dir", "dtype", "gguf_type", "trtllm_version"),
            "Use": ("num_draft_tokens",),
        },
    ),
    "audit": Page(
        (
            "specdec audit --base-url URL --model NAME --reference-engine engine --same-drafter",
            "specdec audit --base-url URL --model NAME --reference-url URL2 --json",
        ),
        "audit",
        {
            "Server": ("base_url", "model", "api_key_file", "metrics_url", "timeout"),
            "Reference": (
                "reference_engine", "same_drafter", "tokenizer_dir", "device", "reference_url",
                "reference_model", "reference_api_key_file",
            ),
            "What is checked": (
                "checks", "prompts", "max_tokens", "near_tie", "min_acceptance_length",
            ),
        },
    ),
    "doctor": Page(
        ("specdec doctor", "specdec doctor --engine-dir engine"),
        "doctor",
        {"Engine": ("engine_dir", "verify_hashes")},
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Section:
    """A group of options as it is shown. is_brief: `--help` only names them."""

    title: str
    options: list[click.Parameter]
    is_brief: bool = False


def list_sections(name: str, params: Iterable[click.Parameter]) -> list[Section]:
    """Sort a command's visible options into the groups of its page."""
    left = {
        name_option(param): param
        for param in params
        if isinstance(param, click.Option) and not param.hidden
    }

    def take(names: Iterable[str]) -> list[click.Parameter]:
        return [left.pop(name) for name in names if name in left]

    page = PAGES.get(name)
    explained = page.groups if page else {}
    sections = [Section(title, take(names)) for title, names in explained.items()]
    more = list_method_options()
    for title, names in (*SHARED.items(), *(page.more if page else {}).items()):
        more.setdefault(title, []).extend(names)
    brief = [Section(title, take(names), is_brief=True) for title, names in more.items()]
    general = Section("General", take(GENERAL))
    others = Section("Other options", take(list(left)))
    return [part for part in (*sections, *brief, others, general) if part.options]


def name_option(option: click.Parameter) -> str:
    """Return an option's longest name, with underscores."""
    return max(option.opts, key=len).lstrip("-").replace("-", "_")


def write_options(
    name: str, ctx: click.Context, formatter: click.HelpFormatter, *, is_long: bool
) -> None:
    """Write the options of a command, group by group."""
    brief: list[Section] = []
    for section in list_sections(name, ctx.command.get_params(ctx)):
        if section.is_brief and not is_long:
            brief.append(section)
            continue
        if section.title == "General":
            _write_brief(brief, name, formatter)
        records = [record for o in section.options if (record := o.get_help_record(ctx))]
        with formatter.section(section.title):
            formatter.write_dl(records, col_max=34)


def _write_brief(sections: Sequence[Section], name: str, formatter: click.HelpFormatter) -> None:
    """Name the options of some groups; click would break their names at hyphens."""
    if not sections:
        return
    indent = 4 + max(len(section.title) for section in sections)
    with formatter.section(f"More, explained by `specdec help {name}`"):
        for section in sections:
            flags = " ".join(max(option.opts, key=len) for option in section.options)
            text = textwrap.fill(
                flags, formatter.width, initial_indent=f"  {section.title}".ljust(indent),
                subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False,
            )  # fmt: skip
            formatter.write(f"{text}\n")


def write_examples(name: str, formatter: click.HelpFormatter) -> None:
    """Write a command's examples, each on a line of its own, to be copied."""
    if page := PAGES.get(name):
        with formatter.section("Examples" if len(page.examples) > 1 else "Example"):
            for example in page.examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


def write_link(name: str, formatter: click.HelpFormatter, *, is_long: bool) -> None:
    """Write where there is more to read."""
    if page := PAGES.get(name):
        formatter.write_paragraph()
        more = "" if is_long else f"All options explained: specdec help {name}. "
        formatter.write_text(f"{more}The page: specdec docs {page.docs}")


def find_pages() -> dict[str, Path]:
    """The pages of the documentation by their names, `run` or `methods/eagle`: a wheel's too."""
    folders = [Path(place) / "docs" for place in specdec.__path__]
    folder = next(folder for folder in folders if folder.is_dir())
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in sorted(folder.rglob("*.md"))
    }
