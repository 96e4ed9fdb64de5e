"""Options of specdec audit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.command.settings import require
from specdec.decode.settings import DecodeSettings
from specdec.errors import UsageError, suggest
from specdec.options import like, option_group, setting
from specdec.system.http_client import SERVER_KEY_VARIABLE, check_url

SERVER = option_group("Server")
REFERENCE = option_group("Reference")
WHAT_CHECKED = option_group("What is checked")

# Checks in the order of the report; `usage` and `acceptance` judge the answers of the others.
CHECKS = (
    "greedy", "repeat", "own_choice", "narrow_sampling", "seeds", "stops", "limits", "stream",
    "usage", "acceptance", "drafter",
)  # fmt: skip
DEFAULT_CONTEXT = 4096  # tokens of an agent's longest prompt
ANSWER_SECONDS = 120.0  # that an answer may take
TOKENS_PER_SECOND = 32  # that a slow server reads of an agent's longest prompt, beyond these


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditSettings:
    """Options of specdec audit: each field is a flag."""

    base_url: str = SERVER(
        required=True, metavar="URL",
        help="The server that is audited, such as http://127.0.0.1:8000/v1.",
    )  # fmt: skip
    model: str = SERVER(required=True, metavar="NAME", help="The model's name at the server.")
    reference_engine: Path | None = REFERENCE(
        folder="engine", metavar="ENGINE",
        help="Engine of ours with the same weights; its plain decoding is the reference.",
    )  # fmt: skip
    same_drafter: bool = REFERENCE(
        False, help="--reference-engine holds the server's drafter: the server's must do as well."
    )
    reference_url: str | None = REFERENCE(
        metavar="URL", help="Another server of the same model without speculation, as reference."
    )
    reference_model: str | None = REFERENCE(
        metavar="NAME", help="The model's name at --reference-url; --model if not given."
    )
    tokenizer_dir: str | None = REFERENCE(
        metavar="DIR", help="Tokenizer of --reference-engine; the one it holds if not given."
    )
    device: str = like(DecodeSettings, "device", "Device of --reference-engine.", group="Reference")
    metrics_url: list[str] = SERVER(
        [],
        metavar="URL...",
        help="The server's counters, or those of each replica behind a router, which are summed;"
        " /metrics beside /v1 if not given.",
    )
    api_key_file: Path | None = SERVER(
        help="File that holds the server's key; if not given, SPECDEC_API_KEY."
    )
    reference_api_key_file: Path | None = REFERENCE(
        help="File that holds the key of --reference-url; none if not given."
    )
    prompts: Path | None = WHAT_CHECKED(
        metavar="FILE",
        help="Prompts, a line each of FILE.txt or FILE.jsonl; a few built-in ones if not given.",
    )  # fmt: skip
    max_tokens: int = WHAT_CHECKED(64, minimum=8, metavar="N", help="New tokens of each prompt.")
    near_tie: float = WHAT_CHECKED(
        0.5, minimum=0, metavar="X",
        help="Tokens whose logits differ by at most X at the reference tie: what half precision"
        " may swap.",
    )  # fmt: skip
    min_acceptance_length: float | None = WHAT_CHECKED(
        minimum=1, metavar="X",
        help="Fail where fewer tokens come per draft and its verify step, e.g. 2.5.",
    )  # fmt: skip
    checks: list[str] = WHAT_CHECKED(
        [], metavar="NAME...", help=f"Only these checks, of {', '.join(CHECKS)}."
    )
    agent: bool = WHAT_CHECKED(
        False,
        help="Ask as an agent does instead: turns over a growing prefix, tools, grammars,"
        " temperature 1; and check that no answer depends on the requests before it.",
    )  # fmt: skip
    agent_context: int | None = WHAT_CHECKED(
        minimum=64, metavar="N",
        help=f"Tokens that --agent's prompts grow to.  [default: {DEFAULT_CONTEXT}]",
    )  # fmt: skip
    timeout: float | None = SERVER(
        minimum=0.1, maximum=10**6, metavar="S",
        help=f"Seconds that an answer may take.  [default: {ANSWER_SECONDS:g}, and one more for"
        f" every {TOKENS_PER_SECOND} tokens of --agent-context]",
    )  # fmt: skip
    json: bool = setting(False, help="Print one JSON object on stdout.")

    @property
    def answer_seconds(self) -> float:
        """Seconds that an answer may take, to an agent's longest prompt on a slow server too."""
        if self.timeout is not None:
            return self.timeout
        num_tokens = (self.agent_context or DEFAULT_CONTEXT) if self.agent else 0
        return ANSWER_SECONDS + num_tokens / TOKENS_PER_SECOND


def check_settings(settings: AuditSettings) -> None:
    """Raise the errors of the settings that show before the server is asked."""
    require(settings)
    if settings.reference_engine is not None and settings.reference_url is not None:
        raise UsageError(
            "--reference-engine and --reference-url are both given", "one reference is enough"
        )
    for names, reference_name in (
        (("tokenizer_dir", "same_drafter"), "reference_engine"),
        (("reference_model", "reference_api_key_file"), "reference_url"),
    ):
        for name in names:
            if getattr(settings, name) and getattr(settings, reference_name) is None:
                flags = f"--{name} without --{reference_name}".replace("_", "-")
                raise UsageError(flags, "leave it out")
    _check_agent(settings)
    _check_urls(settings)
    for name in settings.checks:
        if name not in CHECKS:
            raise UsageError(
                f"--checks: there is no check {name!r}{suggest(name, CHECKS)}",
                f"the checks are {', '.join(CHECKS)}",
            )


def _check_urls(settings: AuditSettings) -> None:
    """Raise the errors of addresses that are none, and of a metrics page that is named twice."""
    source = f"--api-key-file or {SERVER_KEY_VARIABLE}"
    for flag, urls in (
        ("--base-url", [settings.base_url]),
        ("--reference-url", [settings.reference_url]),
        ("--metrics-url", settings.metrics_url),
    ):
        for url in urls:
            if url is not None:
                check_url(url, flag, "audit", source)
    if len(set(settings.metrics_url)) < len(settings.metrics_url):
        raise UsageError("--metrics-url names a page twice", "give each replica's page once")


def _check_agent(settings: AuditSettings) -> None:
    """Raise UsageError for options that an agent's session has no use for, or that need one."""
    if not settings.agent and settings.agent_context is not None:
        raise UsageError("--agent-context without --agent", "give both, or leave it out")
    for name in ("checks", "prompts", "same_drafter", "reference_engine", "min_acceptance_length"):
        if settings.agent and getattr(settings, name):
            remedy = "leave one out" if name != "reference_engine" else "give a --reference-url"
            raise UsageError(f"--{name.replace('_', '-')} has no effect with --agent", remedy)
