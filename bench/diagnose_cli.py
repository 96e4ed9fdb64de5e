"""specdec diagnose."""

from __future__ import annotations

from typing import Any

from specdec.command.stages import show_report, stage_command

from .settings import DiagnoseSettings


@stage_command("diagnose", DiagnoseSettings)
def command(settings: DiagnoseSettings) -> None:
    """Tell why speculation is not faster, the weightiest cause first."""
    from .diagnose import diagnose

    show_report(diagnose(settings), settings, format_report)


def format_report(report: dict[str, Any]) -> str:
    """Causes by batch size, each with its evidence and remedy."""
    from .report import format_machine, format_spread

    lines = [
        f"{report['engine_dir']}: {report['method']} in {report['dtype']} on {report['device']}",
        *format_machine(report),
    ]
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
