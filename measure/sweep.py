"""Sweep of specdec-bench over values of options, each measured against plain decoding."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

from specdec.errors import SpecDecError, UsageError, suggest
from specdec.files.staging import check_output_dir
from specdec.methods import name_options
from specdec.options import check_value, get_flags, name_flag
from specdec.system import logs

from .pipeline import run_bench
from .report import write_report
from .settings import BenchSettings

logger = logs.get_logger(__name__)


def read_sweep(settings: BenchSettings) -> list[dict[str, Any]]:
    """Return the options of each measurement: every combination of the values of --sweep.

    Raises UsageError for an option that is not one of drafting, and for a wrong value.
    """
    options = [*name_options("draft"), "max_output_len"]
    flags = get_flags(type(settings))
    axes: dict[str, list[Any]] = {}
    for text in settings.sweep:
        option, equals, values = text.partition("=")
        name = option.strip().lstrip("-").replace("-", "_")
        if not equals or not values.strip():
            raise UsageError(
                f"--sweep is {text!r}", "give OPTION=VALUE,VALUE, as eagle_tree_tokens=8,16"
            )
        if name not in options:
            raise UsageError(
                f"--sweep has no option {option!r}{suggest(name, options)}",
                "it takes the options of drafting, which `specdec help METHOD` explains",
            )
        if name in axes:
            raise UsageError(f"--sweep has {name} twice", "give all of its values at once")
        axes[name] = [check_value(name, v.strip(), flags[name][0]) for v in split_values(values)]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def split_values(text: str) -> list[str]:
    """Split at commas outside of brackets: `[4,[0],[1],True]` is one value."""
    values, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return values


def run_sweep(settings: BenchSettings) -> dict[str, Any]:
    """Measure each combination as specdec-bench measures one; return the object of `--json`.

    With --output each report is written as soon as it is measured, so that an interrupted run
    leaves the finished reports. A combination that the engine refuses has its error instead.
    """
    combinations = read_sweep(settings)
    if settings.output is not None:
        # The folders of the reports are replaced, not the one that holds them.
        check_output_dir(settings.output, force=settings.force, is_own=True)
        for options in combinations:
            check_output_dir(settings.output / name_combination(options), force=settings.force)
    rows: list[dict[str, Any]] = []
    for options in combinations:
        label = name_combination(options)
        logger.info("%s: %d of %d", label, len(rows) + 1, len(combinations))
        row_settings = dataclasses.replace(settings, sweep=[], output=None, **options)
        try:
            report = run_bench(row_settings)
        except SpecDecError as error:
            logger.warning("%s is left out: %s; %s", label, error.message, error.hint)
            rows.append({"options": options, "error": error.message, "hint": error.hint})
            continue
        rows.append({"options": options, "report": report})
        ratio = report["batches"][0]["ratio"]["median"]
        logger.info("%s: %.2f times plain decoding", label, ratio)
        if settings.output is not None:
            write_report(report, settings.output / label, force=settings.force)
    measured_rows = [row for row in rows if "report" in row]
    if not measured_rows:
        raise SpecDecError(
            f"no value of --sweep can be measured: {rows[0]['error']}", rows[0]["hint"]
        )
    return {"sweep": rows, "best": list_fastest(measured_rows)}


def name_combination(options: dict[str, Any]) -> str:
    """Return a combination of options as text, which also names its folder."""
    text = ",".join(f"{name}={value}" for name, value in options.items())
    return re.sub(r"[^\w=,.\[\]-]", "_", text)


def list_fastest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fastest combination at each number of requests; `options` is None for none.

    A combination is faster than plain decoding where the median of its ratio is above 1.
    """
    fastest: dict[int, tuple[float, dict[str, Any] | None]] = {}  # ratio and options, by batch size
    for row in rows:
        for batch in row["report"]["batches"]:
            size, ratio = batch["batch_size"], batch["ratio"]["median"]
            if ratio > fastest.setdefault(size, (1.0, None))[0]:
                fastest[size] = ratio, row["options"]
    return [
        {
            "batch_size": size,
            "ratio": ratio,
            "options": options,
            "flags": [f"{name_flag(name)} {value}" for name, value in (options or {}).items()],
        }
        for size, (ratio, options) in fastest.items()
    ]
