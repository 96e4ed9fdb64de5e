"""Command specdec-verify: checks of a checkpoint or an engine."""

from __future__ import annotations

from typing import Any

from specdec.command.stages import show_report, stage_command
from specdec.errors import SpecDecError

from .settings import VerifySettings


@stage_command("verify", VerifySettings)
def command(settings: VerifySettings) -> None:
    """Prove that a checkpoint is intact, or that an engine's text is its model's own."""
    is_of_engine = settings.engine_dir is not None or settings.model_dir is not None
    if is_of_engine and settings.checkpoint_dir is None:
        from .engine import verify_engine
        from .report import find_error
        from .report import format_report as format_engine_report

        engine_report = verify_engine(settings)
        return show_report(engine_report, settings, format_engine_report, find_error(engine_report))
    from .pipeline import verify_checkpoint

    report = verify_checkpoint(settings)
    error = None
    if problems := report["problems"]:
        others_text = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        error = SpecDecError(
            f"{report['checkpoint_dir']} is damaged: {problems[0]}{others_text}",
            "copy it again from where it is intact, or convert it again",
        )
    show_report(report, settings, format_report, error)


def format_report(report: dict[str, Any]) -> str:
    """Return a report as lines of text."""
    manifest, contents, sources = report["manifest"], report["contents"], report["sources"]
    passed = "FAIL" if report["problems"] else "PASS"
    lines = [f"{passed}: {report['checkpoint_dir']}: {report['verdict']}"]
    if contents is not None:
        lines.append(
            f"  {contents['architecture']} ({contents['method']}), {contents['dtype']},"
            f" tp_size {contents['tp_size']}, pp_size {contents['pp_size']},"
            f" {contents['num_tensors']} tensors"
        )
    if manifest is None:
        lines.append(
            "  no manifest.json: names, shapes and types were checked, the weights could not be"
        )
    else:
        lines.append(
            f"  {report['files']} files, {manifest['bytes'] / 1e6:,.1f} MB, written by"
            f" {manifest['tool']} {manifest['tool_version']}"
        )
        lines += [f"  without a sha256 to compare: {path}" for path in manifest["unhashed"]]
        counts = (f"{len(paths)} {state}" for state, paths in sources.items())
        lines.append(f"  sources: {', '.join(counts)}")
        lines += [f"  changed since: {path}" for path in sources["changed"]]
    lines += [f"  problem: {problem}" for problem in report["problems"]]
    return "\n".join(lines)
