"""Plots of a report; matplotlib comes with the extra `plot`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .engine import PARTS


def has_matplotlib() -> bool:
    """Whether plots can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_report(report: dict[str, Any], folder: Path) -> None:
    """Draw speed-up by setting, acceptance by position and time per step, as three PNG files."""
    from matplotlib.figure import Figure

    batches = report["batches"]
    names = [f"batch {batch['batch_size']}" for batch in batches]
    title = f"{report['method']}, {report['dtype']}, {report['processor']}"

    def save(name: str, figure: Any, axes: Any, label: str) -> None:
        axes.set_ylabel(label)
        axes.set_title(title, fontsize=8)
        figure.savefig(folder / name, dpi=120, bbox_inches="tight")

    figure = Figure(figsize=(6, 3.5))
    axes = figure.subplots()
    bars = [(name, batch["ratio"]) for name, batch in zip(names, batches, strict=True)]
    for name, batch in zip(names, batches, strict=True):
        if len(batch["categories"]) > 1:
            bars += [(f"{name}\n{c}", found["ratio"]) for c, found in batch["categories"].items()]
    medians = [ratio["median"] for _, ratio in bars]
    spread = [
        [ratio["median"] - ratio["lowest"] for _, ratio in bars],
        [ratio["highest"] - ratio["median"] for _, ratio in bars],
    ]
    axes.bar(range(len(bars)), medians, yerr=spread, capsize=3)
    axes.set_xticks(range(len(bars)), [name for name, _ in bars], fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    save("speedup.png", figure, axes, "speculation / plain, tokens per second")

    figure = Figure(figsize=(6, 3.5))
    axes = figure.subplots()
    for name, batch in zip(names, batches, strict=True):
        shares = batch["acceptance"]["accepted_by_position"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    axes.set_xlabel("draft position")
    axes.set_ylim(0, 1)
    axes.legend()
    save("acceptance.png", figure, axes, "share of steps that accept it")

    figure = Figure(figsize=(6, 3.5))
    axes = figure.subplots()
    columns = [
        (f"{name}\n{kind}", batch[kind]["step_ms"])
        for name, batch in zip(names, batches, strict=True)
        for kind in ("plain", "speculation")
    ]
    bottom = [0.0] * len(columns)
    for part in PARTS:
        heights = [times[part] for _, times in columns]
        axes.bar(range(len(columns)), heights, bottom=bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(range(len(columns)), [name for name, _ in columns], fontsize=7)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))  # beside the bars, not over them
    save("step.png", figure, axes, "milliseconds a step")
