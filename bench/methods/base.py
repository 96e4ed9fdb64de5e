"""What specdec tune asks of a method: an engine to try things on, and the settings to try."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from specdec.decode.drafters.base import Drafter
from specdec.methods import Method
from specdec.processes import call_stage

if TYPE_CHECKING:
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


class Tuning(Protocol):
    """A module of this package."""

    def prepare(self, settings: TuneSettings, folder: Path) -> Trial:
        """Say what to build; files that are only for the trial go into `folder`."""

    def list_candidates(self, bench: Bench, settings: TuneSettings) -> list[Candidate]:
        """Every setting to consider, as a proposer on the trial's engine."""


def take_checkpoint(settings: TuneSettings, folder: Path) -> Trial:
    """The trial of a method whose checkpoint has room for every setting."""
    return Trial(checkpoint=settings.checkpoint_dir)


def take_plain(settings: TuneSettings, method: Method, max_draft_len: int, **run: Any) -> Trial:
    """The trial of a method for any plain target: with room for the longest draft."""
    return Trial(
        checkpoint=settings.checkpoint_dir, mode=method.mode, max_draft_len=max_draft_len, run=run
    )


def call_build(checkpoint: Path, engine: Path, *flags: str) -> None:
    """Build an engine for torch with specdec-build."""
    call_stage(
        "build",
        ["--checkpoint-dir", str(checkpoint), "--output-dir", str(engine), "--backend", "torch",
         *flags],
    )  # fmt: skip
