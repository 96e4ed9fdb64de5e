"""Draft-target: a smaller model of the same vocabulary drafts, in an engine of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec.errors import UsageError
from specdec.model.bounds import MAX_DRAFT_TOKENS
from specdec.options import (
    as_options,
    like,
    name_flag,
    no_speculation,
    refuse_contradictions,
    setting,
)

from .base import Method, is_number_list, number, read_length, read_literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTargetTokens:
    """Options by which the draft model's tokens are known."""

    draft_tokenizer_dir: str | None = setting(
        metavar="DIR", help="The draft model's tokenizer, to be compared with --tokenizer-dir."
    )
    draft_vocabulary: str = setting(
        "same", choices=("same", "shared"),
        help="Whether the draft model has the target's tokens, or others: then those that both have"
        " are drafted. Needs both tokenizers.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTargetDraft:
    """Options of every command that decodes."""

    draft_engine_dir: Path | None = setting(
        folder="engine",
        metavar="DRAFT",
        help="The draft model's own engine, built without a drafter.",
    )
    draft_tokenizer_dir: str | None = like(DraftTargetTokens, "draft_tokenizer_dir")
    draft_vocabulary: str = like(DraftTargetTokens, "draft_vocabulary")
    draft_len: str | None = setting(
        metavar="N|auto",
        help="With a draft model: draft tokens in a step; auto, the default, drafts as many as gain"
        " time, on a CPU as a tree. With other methods, auto drafts only while that is faster.",
        group="Drafting",
    )
    draft_tree_tokens: int | None = number(
        maximum=MAX_DRAFT_TOKENS,
        help="With a draft model: draft a tree of so many tokens instead of a chain, the likeliest"
        " that the draft model finds; --draft-len N then bounds its depth. Not with --use-logits.",
    )
    use_logits: bool = setting(
        False, help="Accept sampled tokens by the ratio of both models' probabilities."
    )
    draft_target_model_config: str | None = setting(
        takes_list=True,
        metavar="[LEN,[DRAFT],[TARGET],LOGITS]",
        help="Draft length, devices of both models and whether to use logits, as TensorRT-LLM"
        " takes them: [4,[0],[1],True].",
    )
    draft_devices: str | None = setting(
        takes_list=True, metavar="N[,N...]", help="Devices of the draft model."
    )
    target_devices: str | None = setting(
        takes_list=True, metavar="N[,N...]", help="Devices of the target."
    )


OPTIONS = ("draft_len", "draft_devices", "target_devices", "use_logits")  # also in one
FORM = "[4,[0],[1],True]: draft length, draft devices, target devices, whether to use logits"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """How the draft model is used. draft_len: None adapts it. Devices: None where not given.

    tree_tokens: of a tree, whose depth draft_len then bounds; None for a chain. has_own_tokens:
    whether its vocabulary is not the target's.
    """

    engine_dir: Path
    tokenizer_dir: str | None
    draft_len: int | None
    draft_devices: tuple[int, ...] | None
    target_devices: tuple[int, ...] | None
    use_logits: bool
    has_own_tokens: bool = False
    tree_tokens: int | None = None

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens drafted a step, as far as an option says them; 0 where none does."""
        return max(self.draft_len or 0, self.tree_tokens or 0)

    @property
    def leaves_length(self) -> bool:
        """Return whether no option says how much to draft."""
        return self.draft_len is None and self.tree_tokens is None


def read_options(settings: Any) -> DraftOptions | None:
    """Return the options of a draft-target run, None of any other; raise UsageError."""
    pair = as_options(settings, DraftTargetDraft)
    combined_text = pair.draft_target_model_config
    given_options = [name for name in OPTIONS if getattr(pair, name)]
    names = ", ".join(name_flag(name) for name in given_options)
    if pair.draft_engine_dir is None:
        _refuse_without_engine(
            pair, given_options[1:] if adapts_drafts(settings) else given_options
        )
        return None
    refuse_contradictions(settings, [no_speculation("draft_engine_dir")])
    options = (
        _read_pair(pair) if combined_text is None else _read_joined(combined_text, names, pair)
    )
    if options.use_logits and options.tree_tokens is not None:
        raise UsageError(
            "--draft-tree-tokens with --use-logits: the tokens of a tree are not drawn from the"
            " draft model's probabilities",
            "leave one of them out",
        )
    return options


def _refuse_without_engine(pair: DraftTargetDraft, given_options: list[str]) -> None:
    """Raise UsageError for options of a draft model where no engine of one is named."""
    for name, is_given in (
        ("draft_tokenizer_dir", pair.draft_tokenizer_dir is not None),
        ("draft_vocabulary", pair.draft_vocabulary != "same"),
        ("draft_tree_tokens", pair.draft_tree_tokens is not None),
    ):
        if is_given:
            given_options = [name]
    if pair.draft_target_model_config is not None or given_options:
        names = ", ".join(name_flag(name) for name in given_options)
        raise UsageError(
            f"{names or '--draft-target-model-config'} without --draft-engine-dir",
            "give the draft model's engine",
        )


def _read_pair(pair: DraftTargetDraft) -> DraftOptions:
    """Return the options as they are given one by one."""
    assert pair.draft_engine_dir is not None
    return DraftOptions(
        engine_dir=pair.draft_engine_dir,
        tokenizer_dir=pair.draft_tokenizer_dir,
        draft_len=read_length("--draft-len", pair.draft_len),
        draft_devices=_read_devices("--draft-devices", pair.draft_devices),
        target_devices=_read_devices("--target-devices", pair.target_devices),
        use_logits=pair.use_logits,
        has_own_tokens=pair.draft_vocabulary != "same",
        tree_tokens=pair.draft_tree_tokens,
    )


def adapts_drafts(settings: Any) -> bool:
    """Return whether another method than draft-target drafts only while that pays."""
    pair = as_options(settings, DraftTargetDraft)
    return pair.draft_engine_dir is None and pair.draft_len == "auto"


def _read_joined(text: str, other_flags: str, pair: DraftTargetDraft) -> DraftOptions:
    """Return the options with four of them in TensorRT-LLM's form."""
    flag = "--draft-target-model-config"
    if other_flags:
        raise UsageError(f"{flag} and {other_flags} are both given", "use one way or the other")
    draft_len, draft_devices, target_devices, use_logits = read_literal(flag, text, FORM, length=4)
    is_good = is_number_list(draft_devices) and is_number_list(target_devices)
    if not is_good or type(draft_len) is not int or draft_len < 1 or type(use_logits) is not bool:
        raise UsageError(f"{flag} is {text!r}", f"write it as {FORM}")
    return dataclasses.replace(
        _read_pair(pair),
        draft_len=draft_len,
        draft_devices=tuple(draft_devices),
        target_devices=tuple(target_devices),
        use_logits=use_logits,
    )


def _read_devices(flag: str, text: str | Sequence[int] | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    entries = text.strip("[]").split(",") if isinstance(text, str) else list(map(str, text))
    if not entries or not all(entry.strip().isdecimal() for entry in entries):
        raise UsageError(f"{flag} is {text!r}", "give device numbers, as 0 or 0,1")
    return tuple(int(entry) for entry in entries)


METHOD = Method(
    name="draft_target",
    title="Draft-target",
    paper="https://arxiv.org/abs/2211.17192",
    mode="draft_tokens_external",
    source="engine",
    read=read_options,
    options={"draft": DraftTargetDraft},
)
