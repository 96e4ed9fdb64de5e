"""Plots of a report; matplotlib comes with the extra `plot`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .engine import PHASES

Report = dict[str, Any]


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed, which draws plots."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_report(report: Report, folder: Path) -> None:
    """Draw speed-up by setting, acceptance by position and time per step, as three PNG files."""
    for name, draw in (
        ("speedup.png", draw_speedup), ("acceptance.png", draw_acceptance), ("step.png", draw_step),
    ):  # fmt: skip
        draw(report).savefig(folder / name, dpi=120, bbox_inches="tight")


def draw_speedup(report: Report) -> Any:
    """Draw the ratio, with its spread, as a bar for each batch size and each of its categories."""
    figure, axes = _start(report, "speculation / plain, tokens per second")
    bars = []
    for name, batch in _name_batches(report):
        bars.append((name, batch["ratio"]))
        if len(batch["categories"]) > 1:
            bars += [(f"{name}\n{c}", group["ratio"]) for c, group in batch["categories"].items()]
    medians = [ratio["median"] for _, ratio in bars]
    spread = [
        [ratio["median"] - ratio["lowest"] for _, ratio in bars],
        [ratio["highest"] - ratio["median"] for _, ratio in bars],
    ]
    axes.bar(range(len(bars)), medians, yerr=spread, capsize=3)
    axes.set_xticks(range(len(bars)), [name for name, _ in bars], fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    return figure


def draw_acceptance(report: Report) -> Any:
    """Draw the share of steps that accept a position, as a line for each batch size."""
    figure, axes = _start(report, "share of steps that accept it")
    for name, batch in _name_batches(report):
        shares = batch["acceptance"]["accepted_by_position"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    axes.set_xlabel("draft position")
    axes.set_ylim(0, 1)
    axes.legend()
    return figure


def draw_step(report: Report) -> Any:
    """Draw a plain and a speculative step for each batch size as bars, by phase from below."""
    figure, axes = _start(report, "milliseconds a step")
    columns = [
        (f"{name}\n{kind}", batch[kind]["step_ms"])
        for name, batch in _name_batches(report)
        for kind in ("plain", "speculation")
    ]
    bottom = [0.0] * len(columns)
    for phase in PHASES:
        heights = [times[phase] for _, times in columns]
        axes.bar(range(len(columns)), heights, bottom=bottom, label=phase)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(columns)), [name for name, _ in columns], fontsize=7)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))  # alongside the bars, not over them
    return figure


def _start(report: Report, label: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5))
    axes = figure.subplots()
    axes.set_ylabel(label)
    axes.set_title(f"{report['method']}, {report['dtype']}, {report['processor']}", fontsize=8)
    return figure, axes


def _name_batches(report: Report) -> list[tuple[str, dict[str, Any]]]:
    return [(f"batch {batch['batch_size']}", batch) for batch in report["batches"]]
