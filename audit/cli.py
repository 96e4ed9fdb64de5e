"""Command `specdec audit`."""

from __future__ import annotations

from typing import Any

from specdec.command.stages import show_report, stage_command
from specdec.errors import SpecDecError

from .settings import AuditSettings

MAX_FAULTS = 6  # faults of a check that are printed; the JSON has all of them
HINTS = {
    "greedy": "the server's text is not the reference's: check that both have the same weights and"
    " precision, then the server's accept rule",
    "repeat": "greedy text must be the same each time, near-ties apart",
    "own_choice": "the server writes tokens that its own model does not prefer: its accept rule"
    " is lossy",
    "narrow_sampling": "sampling from one token must give the greedy text: check the rule that"
    " accepts sampled drafts",
    "seeds": "the server does not keep to the request's seed",
    "stops": "text after a stop word reaches clients: the server checks it once per block",
    "limits": "max_tokens must hold inside of an accepted block",
    "stream": "clients read the stream wrongly, or other text than without it",
    "usage": "clients are billed by these counts",
    "acceptance": "check that the drafter was trained for this model, its aux layers and d2t"
    " (specdec-export writes both as each runtime wants them), and that speculation is on",
    "probes": "an equal prompt has another answer later: look at what the cache keeps of earlier"
    " requests, and at drafted tokens that were rejected",
    "turns": "an answer depends on the requests before it, or on drafts: the JSON report has the"
    " shortest sequence of requests; try it without the prefix cache, then without drafts",
    "forks": "two texts share a beginning in the cache, and one has changed it",
    "grammar": "structured output must hold where drafts end it: check that a grammar follows the"
    " accepted tokens alone, each once",
    "tools": "a required call must keep to its schema: check the grammar with drafts, and the"
    " parser",
    "sampled": "drawn tokens must have the model's distribution: check the rule that accepts drafts"
    " at temperature 1",
    "drafter": "the same drafter accepts more in the reference: check its aux layers, norms and"
    " d2t at the server, and that the reference was made of the same two folders",
}


@stage_command("audit", AuditSettings)
def command(settings: AuditSettings) -> None:
    """Tell whether a running server is lossless, and whether its speculation works."""
    from .pipeline import audit_server

    report = audit_server(settings)
    show_report(report, settings, format_report, find_error(report))


def format_report(report: dict[str, Any]) -> str:
    """Return a report as lines of text."""
    facts, reference = report["server"], report["reference"]
    kind = " ".join(str(facts[key]) for key in ("owned_by", "version") if facts.get(key))
    lines = [
        f"{facts['base_url']}: {report['verdict']}",
        f"  {facts['model']}" + (f" ({kind})" if kind else "") + f", {facts['endpoint']},"
        f" {report['requests']} answers; reference: {reference or 'none'}",
    ]
    for check in report["checks"]:
        lines.append(f"  {check['name']}: {check['verdict']}; {check['summary']}")
        faults = check["faults"]
        lines += [f"    {fault}" for fault in faults[:MAX_FAULTS]]
        if len(faults) > MAX_FAULTS:
            lines.append(f"    and {len(faults) - MAX_FAULTS} more")
    return "\n".join(lines)


def find_error(report: dict[str, Any]) -> SpecDecError | None:
    """Return the error of a report, with the gravest fault; None for the verdict ok."""
    if report["verdict"] == "ok":
        return None
    checks = [check for check in report["checks"] if check["verdict"] == report["verdict"]]
    names, fault = ", ".join(check["name"] for check in checks), checks[0]["faults"][0]
    return SpecDecError(
        f"{report['server']['base_url']} is {report['verdict']} in {names}: {fault}",
        HINTS[checks[0]["name"]],
    )
