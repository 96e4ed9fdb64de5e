"""An audit: ask the server, check what it wrote, judge."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from specdec.errors import SpecDecError
from specdec.http_client import HttpClient, read_key
from specdec.logs import get_logger
from specdec.texts import TEXTS

from .acceptance import Round, check_acceptance
from .answers import AnyPrompt, BadAnswer
from .checks import FAILED, OK, SKIPPED, SUSPECT, TEXT_CHECKS, Audit, Check
from .drafter import check_drafter
from .reference import EngineReference, open_reference
from .server import Counters, Refused, Server
from .settings import CHECKS, AuditSettings, check_settings

logger = get_logger(__name__)
FLAGS = ("--base-url", "--model", "--api-key-file or SPECDEC_API_KEY")


def audit_server(settings: AuditSettings) -> dict[str, Any]:
    """Audit a server; return the report. SpecDecError where it cannot be audited."""
    check_settings(settings)
    key = read_key(settings.api_key_file)
    prompts = read_prompts(settings)
    server = Server(settings.base_url, settings.model, key, settings.timeout, FLAGS)
    try:
        server.open()
        with open_reference(settings) as reference:
            audit = Audit(server, prompts, reference, settings.max_tokens, settings.near_tie)
            checks = run_checks(settings, audit, open_counters(settings, server, key))
    except (Refused, BadAnswer) as error:
        raise SpecDecError(
            f"{server.base} does not answer a plain request as such servers do: {error}",
            "look at the server's log, and check --base-url",
        ) from None
    found = [check.verdict for check in checks]
    verdict = next((v for v in (FAILED, SUSPECT) if v in found), OK)
    return {
        "verdict": verdict,
        "server": server.facts,
        "reference": None if audit.reference is None else audit.reference.name,
        "prompts": len(prompts),
        "requests": len(server.answers),
        "checks": [check.to_json() for check in checks],
    }


def open_counters(settings: AuditSettings, server: Server, key: str | None) -> Counters:
    """The metrics page; the key goes to no other host than the server's."""
    given = settings.metrics_url
    url = given or f"{server.root}/metrics"
    if given is not None and _find_origin(given) != _find_origin(server.root):
        key = None
    return Counters(server, url, HttpClient(key, settings.timeout), is_given=given is not None)


def _find_origin(url: str) -> tuple[str, str, int | None]:
    import httpx

    parts = httpx.URL(url)
    return parts.scheme, parts.host, parts.port


def run_checks(settings: AuditSettings, audit: Audit, counters: Counters) -> list[Check]:
    """Ask for the greedy texts, twice, with all checks in between."""
    wanted = settings.checks or CHECKS
    server = audit.server

    def run_round() -> Round:
        before = counters.read()
        answers = [
            server.complete(prompt, max_tokens=audit.max_tokens, **(server.offer.ids or {}))
            for prompt in audit.prompts
        ]
        audit.rounds.append(answers)
        after = counters.read()
        counted = None if before is None or after is None else after - before
        return Round(answers, counted)

    logger.info("%s: %d prompts, %d tokens each", server.base, len(audit.prompts), audit.max_tokens)
    rounds = [run_round()]
    audit.told = [
        server.ask_told(prompt, max_tokens=audit.max_tokens) for prompt in audit.prompts
    ]  # fmt: skip
    found: dict[str, Check] = {}
    for name, check in TEXT_CHECKS.items():
        if name in wanted and name not in ("repeat", "usage"):
            found[name] = _guard(name, functools.partial(check, audit))
            logger.info("%s: %s", name, found[name].verdict)
    try:
        rounds.append(run_round())
    except (Refused, BadAnswer) as error:
        lost = Check("repeat", FAILED, "the server answers no longer", [str(error)])
        return [lost, *found.values()]
    for name in ("repeat", "usage"):
        if name in wanted:
            found[name] = _guard(name, functools.partial(TEXT_CHECKS[name], audit))
    if "acceptance" in wanted:
        found["acceptance"] = _guard(
            "acceptance", lambda: check_acceptance(audit, rounds, settings.min_acceptance_length)
        )
    if "drafter" in wanted:
        found["drafter"] = _guard("drafter", lambda: compare_drafters(settings, audit, counters))
    return [found[name] for name in CHECKS if name in found]


def compare_drafters(settings: AuditSettings, audit: Audit, counters: Counters) -> Check:
    """The drafter against the reference's, where that is said to be the same one."""
    if not settings.same_drafter or not isinstance(audit.reference, EngineReference):
        return Check("drafter", SKIPPED, "no --reference-engine was given with --same-drafter")
    return check_drafter(audit, audit.reference, counters.read)


def _guard(name: str, check: Callable[[], Check]) -> Check:
    """A check's result, also where the server refuses what it asks for."""
    try:
        return check()
    except Refused as refusal:
        if refusal.is_fault:
            return Check(name, FAILED, "the server failed", [str(refusal)])
        return Check(name, SKIPPED, f"the server does not take such requests: {refusal}")
    except BadAnswer as error:
        return Check(name, FAILED, "an answer is not what such servers send", [str(error)])


def read_prompts(settings: AuditSettings) -> list[AnyPrompt]:
    """The prompts of --prompts, or our own."""
    path = settings.prompts
    if path is None:
        return list(TEXTS)
    from specdec.decode.prompts import SOURCES
    from specdec.decode.prompts import read_prompts as read_file

    given = [line.prompt.list_given() for line in read_file(path, "--prompts")]
    return [next(one[kind] for kind in SOURCES.values() if kind in one) for one in given]
