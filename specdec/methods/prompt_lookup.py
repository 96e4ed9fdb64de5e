"""Prompt lookup: what followed the newest n-gram where it stood before in the text is the draft."""

from __future__ import annotations

import dataclasses
from typing import Any

from specdec.errors import UsageError
from specdec.options import (
    Contradiction,
    as_options,
    find_given,
    no_speculation,
    refuse_contradictions,
    setting,
)

from .base import Method, is_number_list, number, read_literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookupDraft:
    """Options of every command that decodes."""

    prompt_lookup_num_tokens: int | None = number(
        help="Look for drafts in the text itself, up to N tokens in a step.", group="Drafting"
    )
    max_matching_ngram_size: int | None = setting(
        minimum=1, metavar="M",
        help="Tokens at the end of the text to look for, at most.  [default: 4]",
    )  # fmt: skip
    prompt_lookup_config: str | None = setting(
        takes_list=True,
        metavar="[LEN,SIZE,[TARGET]]",
        help="Draft tokens in a step, longest n-gram to look up and the engine's devices, as"
        " TensorRT-LLM takes them: [10,2,[0]].",
    )


DEFAULT_NGRAM_SIZE = 4
LOOKUP_OPTIONS = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
LOOKUP_FORM = "[10,2,[0]]: tokens drafted a step, longest n-gram looked up, devices of the engine"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupOptions:
    """num_tokens: most tokens drafted a step. max_ngram_size: longest end of the text looked up."""

    num_tokens: int
    max_ngram_size: int
    target_devices: tuple[int, ...] | None = None

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens drafted a step, which an engine is built for."""
        return self.num_tokens


CONTRADICTIONS: tuple[Contradiction, ...] = (
    no_speculation(*LOOKUP_OPTIONS, "prompt_lookup_config"),
    (
        lambda s: (
            s.draft_engine_dir is not None
            and s.draft_chain is None
            and find_given(s, *LOOKUP_OPTIONS, "prompt_lookup_config")
        ),
        "{found} and --draft-engine-dir are both given",
        "let one or the other draft",
    ),
    (
        lambda s: s.prompt_lookup_config is not None and find_given(s, *LOOKUP_OPTIONS),
        "--prompt-lookup-config and {found} are both given",
        "use one way or the other",
    ),
)


def read_options(settings: Any) -> LookupOptions | None:
    """Return the options of a prompt-lookup run, None of any other; raise UsageError."""
    options = as_options(settings, PromptLookupDraft)
    if (given_flag := find_given(settings, *LOOKUP_OPTIONS, "prompt_lookup_config")) is None:
        return None
    refuse_contradictions(settings, CONTRADICTIONS)
    if options.prompt_lookup_config is not None:
        return _read_joined(options.prompt_lookup_config)
    if options.prompt_lookup_num_tokens is None:
        raise UsageError(
            f"{given_flag} without --prompt-lookup-num-tokens",
            "say how many tokens to draft a step",
        )
    size = options.max_matching_ngram_size or DEFAULT_NGRAM_SIZE
    return LookupOptions(num_tokens=options.prompt_lookup_num_tokens, max_ngram_size=size)


def _read_joined(text: str) -> LookupOptions:
    value = read_literal("--prompt-lookup-config", text, LOOKUP_FORM, length=3)
    *sizes, devices = value
    if any(type(size) is not int or size < 1 for size in sizes) or not is_number_list(devices):
        raise UsageError(f"--prompt-lookup-config is {text!r}", f"write it as {LOOKUP_FORM}")
    return LookupOptions(
        num_tokens=sizes[0], max_ngram_size=sizes[1], target_devices=tuple(devices)
    )


METHOD = Method(
    name="prompt_lookup",
    title="Prompt lookup",
    paper="https://github.com/apoorvumang/prompt-lookup-decoding",
    mode="draft_tokens_external",
    source="target",
    read=read_options,
    options={"draft": PromptLookupDraft},
)
