"""Draft-target: lengths of the draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from specdec.command.settings import as_options
from specdec.decode.drafters.draft_target import DraftTargetProposer
from specdec.decode.drafters.pacing import DraftLength
from specdec.methods.draft_target import METHOD, DraftTargetTune

from .base import Candidate, Trial, call_build

if TYPE_CHECKING:
    from ..engine import Bench
    from ..replay import Recording
    from ..settings import TuneSettings


def prepare(settings: TuneSettings, folder: Path) -> Trial:
    """Build the draft model's engine; the target's has room for the longest draft."""
    source = as_options(settings, DraftTargetTune).draft_checkpoint_dir
    assert source is not None
    call_build(source, folder / "draft", "--max-batch-size", str(settings.max_batch_size))
    return Trial(
        checkpoint=settings.checkpoint_dir,
        mode=METHOD.mode,
        max_draft_len=settings.max_length,
        run={"draft_engine_dir": folder / "draft", "draft_len": str(settings.max_length)},
    )


def list_candidates(
    bench: Bench, recordings: Sequence[Recording], settings: TuneSettings
) -> list[Candidate]:
    """Every draft length."""
    return list_lengths(bench, settings.max_length)


def list_lengths(bench: Bench, max_length: int) -> list[Candidate]:
    """Every draft length, of one draft model."""
    drafter = cast(DraftTargetProposer, bench.engine.proposer).decoder
    config = bench.engine.config
    return [
        Candidate(
            name=f"{length} tokens",
            proposer=DraftTargetProposer(
                drafter, DraftLength(length), use_logits=False,
                target_vocab_size=config.checkpoint.model.vocab_size,
                max_num_tokens=config.build.max_num_tokens,
            ),
            build={"speculative_decoding_mode": METHOD.mode, "max_draft_len": length},
            run={"draft_len": str(length)},
        )
        for length in range(1, max_length + 1)
    ]  # fmt: skip
