"""`--draft-budget`: whether drafts are as long as the options say, or as what they cost allows."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from specdec.errors import UsageError
from specdec.options import (
    Contradiction,
    as_options,
    no_speculation,
    refuse_contradictions,
    setting,
)

from .draft_target import DraftTargetDraft
from .mtp import MtpDraft

Mode = Literal["auto", "fixed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetDraft:
    """Options of every command that decodes."""

    draft_budget: str | None = setting(
        choices=("auto", "fixed"),
        help="auto: draft only while that is faster, and verify of each draft only what is worth"
        " its time. fixed: draft as the other options say. If not given: auto.",
        group="Drafting",
        rare=True,
    )


@dataclasses.dataclass(frozen=True)
class DraftBudget:
    """A budget, and the flag that asked for it; mode is None where no flag did."""

    mode: Mode | None = None
    flag: str = ""


CONTRADICTIONS: tuple[Contradiction, ...] = (
    no_speculation("draft_budget"),
    (lambda s: s.no_speculation and s.draft_len == "auto",
     "--draft-len auto has no effect with --no-speculation", "leave one of them out"),
)  # fmt: skip


def read_budget(settings: Any) -> DraftBudget:
    """Return what is asked for; raise UsageError where two options contradict one another."""
    refuse_contradictions(settings, CONTRADICTIONS)
    text = as_options(settings, BudgetDraft).draft_budget
    pair = as_options(settings, DraftTargetDraft)
    head = as_options(settings, MtpDraft).mtp_num_draft_tokens
    lengths = {"--draft-len auto": pair.draft_len, "--mtp-num-draft-tokens auto": head}
    auto = [flag for flag, length in lengths.items() if length == "auto"]
    if text is None:
        return DraftBudget("auto", auto[0]) if auto else DraftBudget()
    if text == "auto":
        return DraftBudget("auto", "--draft-budget auto")
    if auto:
        raise UsageError(f"--draft-budget fixed and {auto[0]} are both given", "give one")
    draft_sizes = (pair.draft_len, pair.draft_target_model_config, pair.draft_tree_tokens)
    if pair.draft_engine_dir is not None and all(size is None for size in draft_sizes):
        raise UsageError("--draft-budget fixed without --draft-len", "give --draft-len N")
    return DraftBudget("fixed", "--draft-budget fixed")
