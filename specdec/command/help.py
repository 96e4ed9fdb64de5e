"""Texts of `--help`, `--all` and `specdec help`: an example first, then options by purpose.

`--help` explains the options that most people need, `--all` the others too. The options of a
drafting method, which several commands have, stand in one place: `specdec help METHOD`. Each
option's group is declared with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

import specdec
from specdec.methods import METHODS, Method
from specdec.options import Flag, get_flags

GENERAL = "General"
# Options at the end of the general group.
LAST_OPTIONS = ("dry_run", "force", "json", "config", "debug", "version", "help")
# Examples of each command, each a line to be copied.
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "generate": (
        'specdec generate --model-dir BASE --drafter-model-dir DRAFTER "def main():"',
        'specdec generate --model-dir BASE --prompt-lookup-num-tokens 8 "def main():"',
    ),
    "convert": (
        "specdec-convert --model-dir BASE --drafter-model-dir DRAFTER --output-dir checkpoint",
    ),
    "build": ("specdec-build --checkpoint-dir checkpoint --output-dir engine",),
    "run": (
        'specdec-run --engine-dir engine --tokenizer-dir BASE --input-text "def main():"',
        "specdec-run --engine-dir engine --tokenizer-dir BASE --input-file FILE.jsonl --json",
    ),
    "serve": (
        "specdec-serve --model-dir model.gguf",
        "specdec-serve --engine-dir engine --host 0.0.0.0 --api-key-file key.txt",
    ),
    "train": (
        "specdec-train --model-dir BASE --data data.jsonl --output-dir drafter",
        "specdec-train data --help    # make the data with the target itself",
        "specdec-train ngrams --help  # a table of n-grams instead of a drafter",
    ),
    "train data": (
        "specdec-train data --input chats.jsonl --output data.jsonl --base-url URL/v1 --model NAME",
    ),
    "train ngrams": (
        "specdec-train ngrams --data data.jsonl --tokenizer-dir BASE --output table.safetensors",
    ),
    "verify": (
        "specdec-verify --engine-dir engine --model-dir BASE",
        "specdec-verify --checkpoint-dir checkpoint",
    ),
    "bench": ("specdec-bench --engine-dir engine --tokenizer-dir BASE --prompts prompts.jsonl",),
    "diagnose": ("specdec diagnose --engine-dir engine --tokenizer-dir BASE",),
    "match": (
        "specdec match --model-dir BASE --among FOLDER",
        "specdec match --model-dir FILE.gguf --json",
    ),
    "recipe": ("specdec recipe configs/medusa-pycode.yaml --to slurm --output-dir jobs",),
    "export": (
        "specdec-export --model-dir BASE --eagle-model-dir DRAFTER --to vllm --output-dir out",
        "specdec-export --model-dir BASE --to gguf --output-dir out",
    ),
    "audit": (
        "specdec audit --base-url URL --model NAME --reference-engine engine --same-drafter",
        "specdec audit --base-url URL --model NAME --reference-url URL2 --json",
    ),
    "doctor": (
        "specdec doctor",
        "specdec doctor --engine-dir engine",
        "specdec doctor --clear-cache",
    ),
}
# Pages of commands whose names differ from the command's.
PAGES = {"train data": "data", "train ngrams": "methods/ngram", "recipe": "jobs"}


def list_sections(command: click.Command, *, is_long: bool) -> dict[str, list[click.Parameter]]:
    """List a command's visible options by group, in the order of its settings.

    Options of methods are left out, unless they have a group in commands too.
    """
    options = _list_visible_options(command)
    sections: dict[str, list[click.Parameter]] = {}
    for name, flag in _list_flags(command).items():
        if flag.group and (option := options.pop(name, None)) and (is_long or not flag.rare):
            sections.setdefault(flag.group, []).append(option)
    method_options = list_method_options()
    general_names = [name for name in options if name not in method_options]
    general_names.sort(key=lambda name: LAST_OPTIONS.index(name) if name in LAST_OPTIONS else -1)
    return {**sections, GENERAL: [options[name] for name in general_names]}


def _list_visible_options(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command that its help may show, by name."""
    return {
        name_option(param): param
        for param in command.get_params(click.Context(command))
        if isinstance(param, click.Option) and not param.hidden
    }


def name_option(option: click.Parameter) -> str:
    """Return an option's longest name, with underscores."""
    return max(option.opts, key=len).lstrip("-").replace("-", "_")


def list_method_options() -> dict[str, list[Method]]:
    """Map each option of the methods to its methods."""
    methods_by_option: dict[str, list[Method]] = {}
    for method in METHODS.values():
        for kind in method.options.values():
            for name in get_flags(kind):
                methods_by_option.setdefault(name, []).append(method)
    return methods_by_option


def _list_flags(command: click.Command) -> dict[str, Flag]:
    settings_class: Any = getattr(command, "settings_class", None)
    flags = get_flags(settings_class) if settings_class else {}
    return {name: flag for name, (flag, _) in flags.items() if not flag.hidden}


def write_options(
    name: str, ctx: click.Context, formatter: click.HelpFormatter, *, is_long: bool
) -> None:
    """Write the options of a command by groups, and the commands that explain the others."""
    command = ctx.command
    for title, options in list_sections(command, is_long=is_long).items():
        _write_section(title, options, ctx, formatter)
    methods = list_method_options()
    method_names = {m.name: None for flag in _list_flags(command) for m in methods.get(flag, ())}
    formatter.write_paragraph()
    if not is_long:
        formatter.write_text(f"All options: specdec {name} --all.")
    if method_names:
        formatter.write_text(
            "Those of a drafting method: specdec help METHOD, with one of"
            f" {', '.join(method_names)}."
        )
    if name in EXAMPLES:
        formatter.write_text(f"The page: specdec docs {PAGES.get(name, name)}")


def write_method(
    method: Method, commands: Mapping[str, click.Command], formatter: click.HelpFormatter
) -> None:
    """Write the options of a method, grouped by the commands that have them."""
    formatter.write_text(f"{method.title}: {method.paper}")
    sections: dict[tuple[str, ...], list[click.Parameter]] = {}
    for kind in method.options.values():
        for name in get_flags(kind):
            having = [
                (command, option)
                for command, click_command in commands.items() if name in _list_flags(click_command)
                for option in click_command.params if option.name == name
            ]  # fmt: skip
            if having:
                sections.setdefault(tuple(n for n, _ in having), []).append(having[0][1])
    for names, options in sections.items():
        command = commands[names[0]]
        title = f"Options of specdec {', '.join(names)}"
        _write_section(title, options, click.Context(command), formatter)
    formatter.write_paragraph()
    formatter.write_text(f"The page: specdec docs methods/{method.name}")


def _write_section(
    title: str, options: Iterable[click.Parameter], ctx: click.Context,
    formatter: click.HelpFormatter,
) -> None:  # fmt: skip
    if records := [record for option in options if (record := option.get_help_record(ctx))]:
        with formatter.section(title):
            formatter.write_dl(records, col_max=34)


def write_examples(name: str, formatter: click.HelpFormatter) -> None:
    """Write a command's examples, each on a line of its own, to be copied."""
    if examples := EXAMPLES.get(name, ()):
        with formatter.section("Examples" if len(examples) > 1 else "Example"):
            for example in examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


def find_pages() -> dict[str, Path]:
    """Find the pages of the documentation by name, `run` or `methods/eagle`: a wheel's too."""
    folders = [Path(root) / "docs" for root in specdec.__path__]
    folder = next(folder for folder in folders if folder.is_dir())
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in sorted(folder.rglob("*.md"))
    }
