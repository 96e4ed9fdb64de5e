"""Prompt lookup: what followed the newest n-gram where it stood before in the text is the draft."""

from __future__ import annotations

import dataclasses

from specdec.settings import setting

from .base import Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookupDraft:
    """Options of every command that decodes."""

    prompt_lookup_num_tokens: int | None = setting(
        kind="int", minimum=1, metavar="N", help="Prompt lookup: most tokens drafted a step."
    )
    max_matching_ngram_size: int | None = setting(
        kind="int", minimum=1, metavar="M",
        help="Prompt lookup: longest end of the text that is looked up.  [default: 4]",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookupRun:
    """Options of specdec-run alone."""

    prompt_lookup_config: str | None = setting(
        metavar="[LEN,SIZE,[TARGET]]",
        help="Prompt lookup: tokens drafted a step, longest n-gram looked up and the engine's"
        " devices, as TensorRT-LLM takes them: [10,2,[0]].",
    )


METHOD = Method(
    name="prompt_lookup",
    title="Prompt lookup",
    paper="https://github.com/apoorvumang/prompt-lookup-decoding",
    mode="draft_tokens_external",
    source="target",
    options={"draft": PromptLookupDraft, "run": PromptLookupRun},
)
