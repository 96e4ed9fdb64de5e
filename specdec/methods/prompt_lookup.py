"""Prompt lookup: what followed the newest n-gram where it stood before in the text is the draft."""

from __future__ import annotations

import dataclasses
from typing import Any

from specdec.errors import UsageError
from specdec.options import as_options, name_flag, setting

from .base import Method, is_device_list, read_literal
from .chain import ChainDraft
from .draft_target import DraftTargetDraft


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookupDraft:
    """Options of every command that decodes."""

    prompt_lookup_num_tokens: int | None = setting(
        minimum=1,
        metavar="N",
        help="Look for drafts in the text itself, up to N tokens in a step.",
        group="Drafting",
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


def read_options(settings: Any) -> LookupOptions | None:
    """Return the options of a prompt-lookup run, None of any other; raise UsageError."""
    options = as_options(settings, PromptLookupDraft)
    joined = options.prompt_lookup_config
    num_tokens = options.prompt_lookup_num_tokens
    given = [name_flag(n) for n in LOOKUP_OPTIONS if getattr(options, n) is not None]
    if joined is None and not given:
        return None
    name = given[0] if given else "--prompt-lookup-config"
    if settings.no_speculation:
        raise UsageError(f"{name} has no effect with --no-speculation", "leave one of them out")
    in_chain = as_options(settings, ChainDraft).draft_chain is not None
    if as_options(settings, DraftTargetDraft).draft_engine_dir is not None and not in_chain:
        raise UsageError(
            f"{name} and --draft-engine-dir are both given", "let one or the other draft"
        )
    if joined is not None:
        if given:
            raise UsageError(
                f"--prompt-lookup-config and {name} are both given", "use one way or the other"
            )
        return _read_joined(joined)
    if num_tokens is None:
        raise UsageError(
            f"{name} without --prompt-lookup-num-tokens", "say how many tokens to draft a step"
        )
    size = options.max_matching_ngram_size or DEFAULT_NGRAM_SIZE
    return LookupOptions(num_tokens=num_tokens, max_ngram_size=size)


def _read_joined(text: str) -> LookupOptions:
    value = read_literal("--prompt-lookup-config", text, LOOKUP_FORM, length=3)
    *sizes, devices = value
    if any(type(size) is not int or size < 1 for size in sizes) or not is_device_list(devices):
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
