"""Reports as text for people, and as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.errors import count, name_extra
from specdec.files.manifest import write_manifest
from specdec.files.reading import write_json
from specdec.files.staging import stage_folder
from specdec.system import logs

from .engine import PHASES

logger = logs.get_logger(__name__)


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay out a table: the first column aligned left, the others right."""
    table = [list(head), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def format_spread(values: dict[str, float], digits: int = 2) -> str:
    """Return the median, and the lowest and the highest value after it, as text."""
    return (
        f"{values['median']:.{digits}f}"
        f" ({values['lowest']:.{digits}f}-{values['highest']:.{digits}f})"
    )


def format_head(report: dict[str, Any]) -> list[str]:
    """Return lines about the engine, the machine and its load."""
    quantization, load = report.get("quantization"), report["processors_used_by_others"]
    weights = f" with {quantization} weights" if quantization else ""
    return [
        f"{report['engine_dir']}: {report['method']} in {report['dtype']}{weights}"
        f" on {report['device']}",
        f"{report['processor']}, {count(report['usable_cores'], 'core')},"
        f" {count(report['threads'], 'thread')}, {report.get('gpu', 'no GPU')},"
        f" torch {report['torch']}, {report['date']}",
        f"load average {report['load_average']}, processors used by others meanwhile:"
        f" {'unknown' if load is None else load}",
    ]


def format_report(report: dict[str, Any]) -> str:
    """Return a report of specdec-bench as lines of text."""
    lines = [
        *format_head(report),
        f"{report['num_prompts']} prompts, up to {report['max_output_len']} tokens, medians of"
        f" {report['repeat']} rounds (lowest-highest)",
        "",
    ]
    rows = [
        [
            str(batch["batch_size"]),
            format_spread(batch["plain"]["tokens_per_second"], 1),
            format_spread(batch["speculation"]["tokens_per_second"], 1),
            format_spread(batch["ratio"]),
            f"{batch['acceptance']['acceptance_length']:.2f}",
            f"{batch['texts']['equal']} of {batch['texts']['compared']}",
        ]
        for batch in report["batches"]
    ]
    head = ["batch", "plain, tokens/s", "speculation", "ratio", "tokens a step", "equal texts"]
    lines += format_table(head, rows)
    for batch in report["batches"]:
        lines += ["", *format_batch(batch)]
    lines += ["", f"peak memory {report['memory']['peak_mb']} MB"]
    lines += [f"warning: {warning}" for warning in report["warnings"]]
    return "\n".join(lines)


def format_batch(batch: dict[str, Any]) -> list[str]:
    """Return tables of a step's phases, of acceptance by position, and of the categories."""
    rows = [
        [name, *(f"{batch[name]['step_ms'][phase]:.3f}" for phase in (*PHASES, "total"))]
        for name in ("plain", "speculation")
    ]
    lines = format_table([f"batch {batch['batch_size']}, ms a step", *PHASES, "total"], rows)
    shares = batch["acceptance"]["accepted_by_position"]
    lines.append(
        "steps that accept at least 1, 2, ... draft tokens: "
        + (", ".join(f"{share:.0%}" for share in shares) or "none is drafted")
    )
    if len(batch["categories"]) > 1:
        lines += format_table(
            ["category", "prompts", "ratio", "tokens a step", "equal texts"],
            [
                [
                    name,
                    str(category["num_prompts"]),
                    format_spread(category["ratio"]),
                    f"{category['acceptance']['acceptance_length']:.2f}",
                    f"{category['texts']['equal']} of {category['texts']['compared']}",
                ]
                for name, category in batch["categories"].items()
            ],
        )
    return lines


def format_sweep(report: dict[str, Any]) -> str:
    """Return a report of --sweep as a table, with the best options at its end."""
    cells = [line for row in report["sweep"] for line in list_sweep_cells(row)]
    reports = [row["report"] for row in report["sweep"] if "report" in row]
    lines = [
        *format_head(reports[-1]),
        *format_table(["options", "batch", "tokens/s", "times plain", "tokens a step"], cells),
        *(f"{row['options']}: error: {row['error']}" for row in report["sweep"] if "error" in row),
    ]
    for choice in report["best"]:
        options = " ".join(choice["flags"]) or "plain decoding, --no-speculation"
        lines.append(f"best at batch size {choice['batch_size']}: {options}")
    warnings = dict.fromkeys(text for result in reports for text in result["warnings"])
    return "\n".join([*lines, *(f"warning: {text}" for text in warnings)])


def list_sweep_cells(row: dict[str, Any]) -> list[list[str]]:
    """Return the table's cells for one combination of options, a line for each batch size."""
    name = ", ".join(f"{name} {value}" for name, value in row["options"].items())
    if "error" in row:
        return [[name, "-", "-", "-", "-"]]
    return [
        [
            name,
            str(batch["batch_size"]),
            format_spread(batch["speculation"]["tokens_per_second"], 1),
            format_spread(batch["ratio"]),
            f"{batch['acceptance']['acceptance_length']:.2f}",
        ]
        for batch in row["report"]["batches"]
    ]


def format_diagnosis(report: dict[str, Any]) -> str:
    """Return the causes by batch size, each with its evidence and remedy, as text."""
    lines = format_head(report)
    if experts := report["experts"]:
        lines.append(
            f"a mixture: one token reads {experts['per_token']} of a layer's {experts['per_layer']}"
            f" experts, a verify step of {experts['tokens_per_step']:.1f} tokens"
            f" {experts['per_step']:.1f} (batch size {experts['batch_size']})"
        )
    for batch in report["batches"]:
        lines += [
            "",
            f"batch size {batch['batch_size']}: {format_spread(batch['ratio'])} times plain"
            f" decoding; {batch['acceptance_length']:.2f} tokens a step, break-even at"
            f" {batch['break_even']:.2f}",
        ]
        for number, cause in enumerate(batch["causes"], 1):
            gain = f", {cause['gain']:.2f} times as fast without" if cause["gain"] else ""
            note = ", certain" if cause["is_certain"] else "" if cause["gain"] else ", perhaps"
            lines += [
                f"{number}. {cause['name']}{gain}{note}",
                f"   {cause['evidence']}",
                f"   -> {cause['remedy']}",
            ]
        if not batch["causes"]:
            lines.append("no single cause costs 5 % or more")
    lines += [f"warning: {warning}" for warning in report["warnings"]]
    return "\n".join(lines)


def write_report(report: dict[str, Any], folder: Path, *, force: bool) -> None:
    """Write report.json, report.txt, and plots where matplotlib is installed."""
    from .plots import has_matplotlib, plot_report

    with stage_folder(folder, force=force, inputs=[]) as staged:
        write_json(staged / "report.json", report)
        (staged / "report.txt").write_text(format_report(report) + "\n", encoding="utf-8")
        if has_matplotlib():
            plot_report(report, staged)
        else:
            logger.warning(
                "no plots: matplotlib is not installed; %s installs it", name_extra("plot")
            )
        write_manifest(staged, kind="report", settings={}, sources=[])
    logger.info("the report is in %s", folder)
