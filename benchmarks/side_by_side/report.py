"""A report as Markdown: the machine, and the ways side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.measure.report import format_spread

from .ways import describe_setting

HEADING = "## Beside others, {size}: `peers.py`"


def format_markdown(report: Mapping[str, Any]) -> str:
    """The whole section."""
    blocks = [
        HEADING.format(size=report["size"]),
        format_conditions(report),
        format_ways(report),
        format_peers(report),
        *(f"**Doubtful:** {warning}." for warning in report["warnings"]),
    ]
    return "\n\n".join(blocks) + "\n"


def lay_out(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(escape(cell) for cell in line) + " |" for line in lines)


def escape(text: str) -> str:
    """A cell that breaks no table: errors of peers are any text."""
    return text.replace("|", "\\|").replace("\n", " ")


def format_conditions(report: Mapping[str, Any]) -> str:
    others = report["processors_used_by_others"]
    instructions = ", ".join(report["instructions"]) or "none"
    return (
        f"{report['date']}, {report['processor']}, {report['usable_cores']} cores,"
        f" {report['memory_gb']:.0f} GB, instructions for bfloat16: {instructions}."
        f" specdec {report['specdec']} ({report['commit']}), {report['threads']} threads, load"
        f" average {report['load_average']} before, processors used by others meanwhile:"
        f" {'unknown' if others is None else others}.\n"
        f"Target of {report['target_gb']:.2f} GB in {report['dtype']}, {report['num_prompts']}"
        f" pycode prompts, up to {report['max_output_len']} tokens, greedy, one request at a time;"
        f" {report['rounds']} rounds in which all take turns, medians (lowest-highest). Settings"
        f" are the fastest of those tried in the same run. ReDrafter's own weights are int8."
    )


def format_ways(report: Mapping[str, Any]) -> str:
    """The side-by-side; what could not be measured has its reason."""
    head = (
        "peer", "way", "setting", "tokens/s", "tokens a step", "first token, s",
        "equal texts (own plain)", "first difference",
    )  # fmt: skip
    rows = []
    for row in report["ways"]:
        if "rates" not in row:
            rows.append([row["peer"], row["way"], "", f"not measured: {row['error']}", *[""] * 4])
            continue
        texts, length = row["texts"], row["acceptance_length"]
        first = row.get("first_token_seconds")
        ours, own = texts["of_reference"], texts["of_own_plain"]
        where = ours.get("first_difference")
        rows.append(
            [
                row["peer"], row["way"],
                "" if row["way"] == "plain" else describe_setting(row["setting"]),
                format_spread(row["tokens_per_second"]),
                "" if row["way"] == "plain" else "untold" if length is None else f"{length:.2f}",
                "" if first is None else format_spread(first),
                f"{ours['equal']} of {ours['compared']} ({own['equal']})",
                "" if where is None else f"prompt {where['prompt']}, token {where['token']}",
            ]
        )  # fmt: skip
    reference = next((r["texts"]["reference"] for r in report["ways"] if "texts" in r), None)
    return f"{lay_out(head, rows)}\n\nTexts are held against those of {reference}."


def format_peers(report: Mapping[str, Any]) -> str:
    rows = []
    for name, about in report["peers"].items():
        if "error" in about:
            rows.append([name, f"not measured: {about['error']}", "", "", ""])
            continue
        rows.append(
            [
                name,
                ", ".join(f"{what} {version}" for what, version in about["versions"].items()),
                about["computes_in"],
                f"{about['load_seconds']:.2f}",
                f"{about['start_seconds']:.2f}",
            ]
        )
    return lay_out(("peer", "versions", "computes in", "load, s", "with its start, s"), rows)
