"""Draft-target: a smaller model of the same vocabulary drafts, in an engine of its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.settings import setting

from .base import Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTargetDraft:
    """Options of every command that decodes."""

    draft_engine_dir: Path | None = setting(
        kind="path", metavar="DRAFT", help="Draft-target: the draft model's plain engine."
    )
    draft_tokenizer_dir: str | None = setting(
        metavar="DIR", help="Draft-target: compare this tokenizer with --tokenizer-dir's."
    )
    draft_len: str | None = setting(
        metavar="N|auto",
        help="Draft-target: tokens drafted a step; auto, the default, follows measured acceptance"
        " and cost. With other methods, auto drafts only while that pays.",
    )
    use_logits: bool = setting(
        False, kind="flag",
        help="Draft-target: accept sampled tokens by the ratio of probabilities.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTargetRun:
    """Options of specdec-run alone."""

    draft_target_model_config: str | None = setting(
        metavar="[LEN,[DRAFT],[TARGET],LOGITS]",
        help="Draft-target: draft length, both models' devices and whether to use logits, as"
        " TensorRT-LLM takes them: [4,[0],[1],True].",
    )
    draft_devices: str | None = setting(
        metavar="N[,N...]", help="Draft-target: devices of the draft model."
    )
    target_devices: str | None = setting(
        metavar="N[,N...]", help="Draft-target: devices of the target."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTargetTune:
    """Options of specdec tune."""

    draft_checkpoint_dir: Path | None = setting(
        kind="path", metavar="CKPT", help="Draft-target: the draft model's checkpoint folder."
    )


METHOD = Method(
    name="draft_target",
    title="Draft-target",
    paper="https://arxiv.org/abs/2211.17192",
    mode="draft_tokens_external",
    source="engine",
    options={"draft": DraftTargetDraft, "run": DraftTargetRun, "tune": DraftTargetTune},
)
