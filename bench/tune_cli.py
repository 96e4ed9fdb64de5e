"""specdec tune."""

from __future__ import annotations

from typing import Any

from specdec.command.stages import show_report, stage_command

from .settings import TuneSettings

MAX_ROWS = 25  # of a table; the settings that should be fastest come first


@stage_command("tune", TuneSettings)
def command(settings: TuneSettings) -> None:
    """Find the fastest setting of a drafter on this machine."""
    from .tune import tune

    show_report(tune(settings), settings, format_report)


def format_report(report: dict[str, Any]) -> str:
    """The table: the settings that were measured against plain decoding, then those that fell."""
    from .report import format_machine, format_spread, format_table

    lines = [
        f"{report['checkpoint_dir']}: {report['method']} in {report['dtype']} on"
        f" {report['device']}",
        *format_machine(report),
    ]
    head = [
        "setting", "tokens per step", "verified", "draft ms", "last round", "ratio there",
        "tokens/s", "times plain",
    ]  # fmt: skip
    for batch in report["batches"]:
        rows = [
            ["plain", "1.00", "1.0", "0.000", "-", "-",
             format_spread(batch["plain"]["tokens_per_second"], 1), "1.00"],
        ]  # fmt: skip
        for row in batch["settings"][:MAX_ROWS]:
            found = row["measured"]
            rows.append(
                [
                    row["name"],
                    f"{row['acceptance_length']:.2f}",
                    f"{row['tokens_per_step']:.1f}",
                    f"{row['draft_ms']:.3f}",
                    "-" if row["round"] is None else str(row["round"]),
                    "-" if row["trial_ratio"] is None else f"{row['trial_ratio']:.2f}",
                    "-" if found is None else format_spread(found["tokens_per_second"], 1),
                    "-" if found is None else format_spread(found["ratio"]),
                ]
            )
        rest = len(batch["settings"]) - MAX_ROWS
        lines += [
            "",
            f"batch size {batch['batch_size']}",
            *format_table(head, rows),
            *([f"{rest} more fell in earlier rounds; --json lists them"] if rest > 0 else []),
            f"best: {batch['best']}" + (", doubtful" if report["warnings"] else ""),
        ]
    lines += ["", *report["commands"], *(f"note: {note}" for note in report["notes"])]
    lines += [f"warning: {warning}" for warning in report["warnings"]]
    return "\n".join(lines)
