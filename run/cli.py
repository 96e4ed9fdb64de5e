"""Command specdec-run: text of an engine folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from specdec.command.stages import stage_command
from specdec.command.stdout import claim_stdout
from specdec.errors import SpecDecError, count
from specdec.files.staging import write_whole
from specdec.system import logs

from .settings import RunSettings

WORTH_SAYING = 0.1  # share of verify steps without drafts from which it is reported


@stage_command("run", RunSettings)
def command(settings: RunSettings) -> None:
    """Generate text with an engine, and count how well its drafter did."""
    from specdec.decode.ranks.processes import end_ranks

    if logs.get_launched_rank():  # rank 0 reads, decides and writes; this rank computes with it
        from specdec.decode.ranks.follower import follow_launcher

        return follow_launcher()
    from .pipeline import run_engine

    claim_stdout()

    pieces: list[str] = []

    def write(piece: str) -> None:
        click.echo(piece, nl=False)
        pieces.append(piece)

    report = run_engine(settings, write)
    if report is None:  # another process has written it
        return None
    write_report(report, settings, pieces)
    if not settings.json and not settings.dry_run:
        click.echo(format_stats(report["stats"]), err=True)
    if report.get("interrupted"):
        raise describe_interruption(report["outputs"])
    end_ranks(is_done=True)


def write_report(report: dict[str, Any], settings: RunSettings, pieces: Sequence[str]) -> None:
    """Write the output that streaming has not written, and --output-file, each if the other fails.

    pieces: of the output, that streaming has written.
    """
    is_streamed = settings.streaming and not settings.dry_run
    lines: list[str] = []
    if settings.json and is_streamed:
        lines = [json.dumps(document) + "\n" for document in split_report(report)]
        text = "".join([*pieces, *lines])
    else:
        text = (json.dumps(report) if settings.json else format_report(report)) + "\n"
    try:
        if settings.output_file is not None and not settings.dry_run:
            write_whole(settings.output_file, text, force=settings.force)
    finally:
        if not is_streamed:
            in_colour = not settings.json and _shows_colours()
            lines = [format_report(report, in_colour=True) + "\n" if in_colour else text]
        for line in lines:
            click.echo(line, nl=False)


def _shows_colours() -> bool:
    """Return whether stdout is a terminal whose user has not turned colours off."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def split_report(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a report as the documents of JSON Lines: one for each output, then the statistics."""
    statistics = {key: value for key, value in report.items() if key != "outputs"}
    return [*({"output": output} for output in report["outputs"]), statistics]


def describe_interruption(outputs: Sequence[dict[str, Any]]) -> SpecDecError:
    """Return the error of a run that Ctrl-C ended."""
    num_finished = sum(output["finish_reason"] is not None for output in outputs)
    return SpecDecError(
        f"interrupted: {num_finished} of {len(outputs)} prompts were finished",
        "what was done is shown; a finish_reason of null marks what was not",
    )


def format_report(report: dict[str, Any], *, in_colour: bool = False) -> str:
    """Return the text form: one Input and one Output line a prompt.

    in_colour: whether --show-drafts marks tokens by colours.
    """
    from .drafts import format_legend, format_pieces

    if "outputs" not in report:
        return "\n".join(f"{key}: {value}" for key, value in report.items())
    lines = []
    if any("pieces" in output for output in report["outputs"]):
        lines.append(format_legend(in_colour=in_colour))
    for output in report["outputs"]:
        index = output["index"]
        text = output["output_text"]
        if "pieces" in output:
            text = format_pieces(output["pieces"], in_colour=in_colour)
        lines.append(f'Input [Text {index}]: "{output["input_text"]}"')
        lines.append(f'Output [Text {index} Beam 0]: "{text}"')
    return "\n".join(lines)


def describe_plain_steps(stats: dict[str, Any]) -> str:
    """Return how many steps had no drafts, where these are worth saying."""
    drafted, steps = stats["num_drafted_steps"], stats["num_verify_steps"]
    if stats["method"] == "plain" or drafted is None:
        return ""
    if steps and not drafted:
        return ", nothing drafted: the speed is plain decoding's"
    is_much = steps - drafted >= max(1, steps * WORTH_SAYING)
    return f", nothing drafted in {steps - drafted} of {steps}" if is_much else ""


def format_stats(stats: dict[str, Any]) -> str:
    """Return the line of statistics that goes to stderr."""
    weights = f", {stats['quantization']} weights" if stats.get("quantization") else ""
    line = (
        f"{stats['method']} on {stats['device']} ({stats['dtype']}{weights}):"
        f" {count(stats['num_output_tokens'], 'token')} in {stats['generate_seconds']:.2f} s,"
        f" {stats['tokens_per_second']:.1f} tokens/s"
    )
    if stats["acceptance_length"]:  # 0 where the prompts' own passes ended all texts
        line += f", {stats['acceptance_length']:.2f} tokens per verify step"
    line += describe_plain_steps(stats)
    if profile := stats.get("profile_seconds"):
        part_times = [
            f"{name} {value:.2f} s" for name, value in profile.items() if value is not None
        ]
        line += "; " + (
            ", ".join(part_times) or "the runtime does not report the times of its parts"
        )
    return line
