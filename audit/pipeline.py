"""Pipeline of an audit: ask the server, check its answers, judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from specdec.errors import SpecDecError
from specdec.system.http_client import read_key
from specdec.system.logs import get_logger
from specdec.text.samples import TEXTS

from . import checks
from .acceptance import check_acceptance
from .agent import audit_agent
from .answers import AnyPrompt, BadAnswer
from .checks import FAILED, OK, SKIPPED, SUSPECT, Audit, Check
from .drafter import check_drafter
from .reference import open_reference
from .server import Counters, Refused, ServerClient
from .settings import CHECKS, AuditSettings, check_settings

logger = get_logger(__name__)
FLAGS = ("--base-url", "--model", "--api-key-file or SPECDEC_API_KEY")
FUNCTIONS: dict[str, Callable[[Audit], Check]] = {
    "greedy": checks.check_greedy, "repeat": checks.check_repeat,
    "own_choice": checks.check_own_choice, "narrow_sampling": checks.check_narrow_sampling,
    "seeds": checks.check_seeds, "stops": checks.check_stops, "limits": checks.check_limits,
    "stream": checks.check_stream, "usage": checks.check_usage, "acceptance": check_acceptance,
    "drafter": check_drafter,
}  # fmt: skip
FINAL_CHECKS = ("repeat", "usage", "acceptance", "drafter")  # after the second greedy round

UNTESTED_DISTRIBUTION = Check(
    "sampled", SKIPPED, "whether drawn tokens have the model's distribution was not tested: --agent"
    " tests it",
)  # fmt: skip


def audit_server(settings: AuditSettings) -> dict[str, Any]:
    """Audit a server; return the report. SpecDecError where it cannot be audited."""
    check_settings(settings)
    key = read_key(settings.api_key_file)
    prompts = read_prompts(settings)
    server = ServerClient(settings.base_url, settings.model, key, settings.answer_seconds, FLAGS)
    try:
        server.open()
        with open_reference(settings) as reference:
            counters = Counters(server, settings.metrics_url, key, settings.answer_seconds)
            audit = Audit(settings, server, counters, prompts, reference)
            results = audit_agent(audit) if settings.agent else run_checks(audit)
    except (Refused, BadAnswer) as error:
        raise SpecDecError(
            f"{server.base} does not answer a plain request as such servers do: {error}",
            "look at the server's log, and check --base-url",
        ) from None
    verdicts = [check.verdict for check in results]
    return {
        "verdict": next((verdict for verdict in (FAILED, SUSPECT) if verdict in verdicts), OK),
        "server": server.facts,
        "reference": None if reference is None else reference.name,
        "prompts": len(prompts),
        "requests": len(server.answers),
        "prompt_tokens": sum(answer.num_prompt_tokens for answer in server.answers),
        "checks": [dataclasses.asdict(check) for check in results],
    }


def run_checks(audit: Audit) -> list[Check]:
    """Ask for the greedy texts, twice, with most checks in between."""
    names = [name for name in CHECKS if name in (audit.settings.checks or CHECKS)]
    server, prompts, length = audit.server, audit.prompts, audit.settings.max_tokens
    logger.info("%s: %d prompts, %d tokens each", server.base, len(prompts), length)
    audit.ask_all()
    audit.detailed_answers = server.continue_all(prompts, length)
    results = {name: _run(name, audit) for name in names if name not in FINAL_CHECKS}
    try:
        audit.ask_all()
    except (Refused, BadAnswer) as error:
        failure = Check("repeat", FAILED, "the server answers no longer", [str(error)])
        return [failure, *results.values()]
    results |= {name: _run(name, audit) for name in names if name in FINAL_CHECKS}
    checks_made = [results[name] for name in names]
    return checks_made if audit.settings.checks else [*checks_made, UNTESTED_DISTRIBUTION]


def _run(name: str, audit: Audit) -> Check:
    """Return a check's result, also where the server refuses its requests."""
    try:
        check = FUNCTIONS[name](audit)
    except Refused as refusal:
        check = Check(name, SKIPPED, f"the server does not take such requests: {refusal}")
        if refusal.is_fault:
            check = Check(name, FAILED, "the server failed", [str(refusal)])
    except BadAnswer as error:
        check = Check(name, FAILED, "an answer is not what such servers send", [str(error)])
    logger.info("%s: %s", name, check.verdict)
    return check


def read_prompts(settings: AuditSettings) -> list[AnyPrompt]:
    """Return the prompts of --prompts, or the built-in ones."""
    if settings.prompts is None:
        return list(TEXTS)
    from specdec.text.prompts import SOURCES
    from specdec.text.prompts import read_prompts as read_file

    lines = [line.prompt.list_given() for line in read_file(settings.prompts, "--prompts")]
    return [next(fields[kind] for kind in SOURCES.values() if kind in fields) for fields in lines]
