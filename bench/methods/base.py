"""What specdec tune asks of a method: an engine to try things on, and the settings to try."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec.decode.drafters.base import Drafter
from specdec.methods import Method
from specdec.processes import call_stage

from ..engine import Bench
from ..settings import TuneSettings

TREE_SIZES = (1, 3, 7, 15, 31, 63)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One setting; the options are those of the stages that it is chosen by."""

    name: str
    proposer: Drafter
    convert: dict[str, Any] = dataclasses.field(default_factory=dict)
    build: dict[str, Any] = dataclasses.field(default_factory=dict)
    run: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """An engine with room for every candidate: the checkpoint, and how it is built and loaded."""

    checkpoint: Path
    mode: str | None = None
    max_draft_len: int | None = None
    run: dict[str, Any] = dataclasses.field(default_factory=dict)


Prepare = Callable[[TuneSettings, Path], Trial]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a method is tuned.

    list_candidates: every setting to consider, as a proposer on the trial's engine. prepare: says
    what to build; files that are only for the trial go into the folder that it is given.
    """

    list_candidates: Callable[[Bench, TuneSettings], list[Candidate]]
    prepare: Prepare


def take_checkpoint(settings: TuneSettings, folder: Path) -> Trial:
    """The trial of a method whose checkpoint has room for every setting."""
    return Trial(checkpoint=settings.checkpoint_dir)


def take_plain(method: Method, max_draft_len: int, **run: Any) -> Prepare:
    """The trial of a method for any plain target: with room for the longest draft."""
    return lambda settings, folder: Trial(
        checkpoint=settings.checkpoint_dir, mode=method.mode, max_draft_len=max_draft_len, run=run
    )


def make_room(method: Method, num_tokens: int) -> dict[str, Any]:
    """The options of a build whose engine takes drafts of so many tokens from outside."""
    return {"speculative_decoding_mode": method.mode, "max_draft_len": num_tokens}


def call_build(checkpoint: Path, engine: Path, *flags: str) -> None:
    """Build an engine for torch with specdec-build."""
    call_stage(
        "build",
        ["--checkpoint-dir", str(checkpoint), "--output-dir", str(engine), "--backend", "torch",
         *flags],
    )  # fmt: skip
