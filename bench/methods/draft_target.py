"""Draft-target: lengths of the draft, and trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from specdec.decode.drafters.draft_model import DraftModel, LoadedModel
from specdec.decode.drafters.draft_target import DraftTargetProposer
from specdec.decode.drafters.draft_tree import DraftTreeProposer
from specdec.errors import count
from specdec.methods.draft_target import METHOD, DraftTargetTokens, DraftTargetTune
from specdec.options import as_options, list_given

from ..engine import Bench
from ..settings import TuneSettings
from .base import Candidate, Trial, call_build, make_room

TREE_SIZES = (7, 15, 31)


def prepare(settings: TuneSettings, folder: Path) -> Trial:
    """Build the draft model's engine; the target's has room for the longest draft."""
    pair = as_options(settings, DraftTargetTune)
    source = pair.draft_checkpoint_dir
    assert source is not None
    call_build(source, folder / "draft", "--max-batch-size", str(settings.max_batch_size))
    return Trial(
        checkpoint=settings.checkpoint_dir,
        mode=METHOD.mode,
        max_draft_len=max(settings.max_length, *TREE_SIZES),
        run={"draft_engine_dir": folder / "draft", "draft_len": str(settings.max_length)}
        | list_tokens(pair),
    )


def list_candidates(bench: Bench, settings: TuneSettings) -> list[Candidate]:
    """Every draft length, and trees."""
    run = list_tokens(as_options(settings, DraftTargetTune))
    return [
        *list_lengths(bench, settings.max_length, run),
        *list_trees(bench, TREE_SIZES, run),
    ]


def list_tokens(pair: DraftTargetTune) -> dict[str, Any]:
    """The options of a run by which the draft model's tokens are known."""
    return {name: getattr(pair, name) for name in list_given(pair, DraftTargetTokens)}


def list_lengths(
    bench: Bench, max_length: int, run: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """Every draft length, of one draft model. run: further options of a run with it."""
    model = _find_model(bench)
    return [
        Candidate(
            name=count(length, "token"),
            proposer=DraftTargetProposer(model, length, use_logits=False),
            build=make_room(METHOD, length),
            run={"draft_len": str(length), **(run or {})},
        )
        for length in range(1, max_length + 1)
    ]


def list_trees(
    bench: Bench, sizes: Sequence[int], run: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """Trees of so many tokens, of one draft model. run: further options of a run with it."""
    model = _find_model(bench)
    return [
        Candidate(
            name=f"tree of {size}",
            proposer=DraftTreeProposer(model, size, None),
            build=make_room(METHOD, size),
            run={"draft_tree_tokens": size, **(run or {})},
        )
        for size in sizes
    ]


def _find_model(bench: Bench) -> LoadedModel:
    proposer = bench.engine.proposer
    return cast(DraftModel, proposer.members[0] if proposer.members else proposer).model
