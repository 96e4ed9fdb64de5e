"""Draft-target: lengths of the draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specdec.command.settings import as_options, list_given
from specdec.decode.drafters.draft_target import DraftTargetProposer
from specdec.decode.drafters.pacing import DraftLength
from specdec.methods.draft_target import METHOD, DraftTargetTokens, DraftTargetTune

from .base import Candidate, Trial, call_build

if TYPE_CHECKING:
    from ..engine import Bench
    from ..replay import Recording
    from ..settings import TuneSettings


def prepare(settings: TuneSettings, folder: Path) -> Trial:
    """Build the draft model's engine; the target's has room for the longest draft."""
    pair = as_options(settings, DraftTargetTune)
    source = pair.draft_checkpoint_dir
    assert source is not None
    call_build(source, folder / "draft", "--max-batch-size", str(settings.max_batch_size))
    return Trial(
        checkpoint=settings.checkpoint_dir,
        mode=METHOD.mode,
        max_draft_len=settings.max_length,
        run={"draft_engine_dir": folder / "draft", "draft_len": str(settings.max_length)}
        | list_tokens(pair),
    )


def list_candidates(
    bench: Bench, recordings: Sequence[Recording], settings: TuneSettings
) -> list[Candidate]:
    """Every draft length."""
    run = list_tokens(as_options(settings, DraftTargetTune))
    return list_lengths(bench, settings.max_length, run)


def list_tokens(pair: DraftTargetTune) -> dict[str, Any]:
    """The options of a run by which the draft model's tokens are known."""
    return {name: getattr(pair, name) for name in list_given(pair, DraftTargetTokens)}


def list_lengths(
    bench: Bench, max_length: int, run: Mapping[str, Any] | None = None
) -> list[Candidate]:
    """Every draft length, of one draft model. run: further options of a run with it."""
    drafter = cast(DraftTargetProposer, bench.engine.proposer)
    return [
        Candidate(
            name=f"{length} tokens",
            proposer=DraftTargetProposer(
                drafter.decoder, DraftLength(length), use_logits=False, tokens=drafter.tokens,
                max_num_tokens=drafter.max_num_tokens, max_seq_len=drafter.max_seq_len,
            ),
            build={"speculative_decoding_mode": METHOD.mode, "max_draft_len": length},
            run={"draft_len": str(length), **(run or {})},
        )
        for length in range(1, max_length + 1)
    ]  # fmt: skip
