"""Outputs of the public API: the finished text of a prompt, and the events of a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specdec.decode.requests import (
    ActiveRequest,
    DraftTree,
    FinishReason,
    Origin,
    RequestStats,
    TokenLogprob,
)
from specdec.text.text_stream import decode_output


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Continuation of one prompt.

    text: without the stop word, empty where the engine has no tokenizer. token_ids: the new tokens,
    the one that ended them included. origins: how each new token came: "draft", an accepted draft;
    "bonus", the target's own token after a draft; "plain", a token for which nothing was drafted.
    finish_reason: "length", "eos", "stop" or "cancelled"; None of a stream that goes on.
    logprobs: one a token where the prompt asks for them, else empty. prompt_logprobs: those of the
    prompt's tokens, None of the first. logits: [tokens, V] in float32, where `generate` was to
    keep them. message: the answer of a chat as a message.
    """

    prompt: str
    prompt_ids: list[int]
    text: str
    token_ids: list[int]
    origins: list[Origin]
    finish_reason: FinishReason | None
    stats: RequestStats
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = dataclasses.field(default_factory=list)
    logits: Tensor | None = None
    message: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Tokens and text that a stream has gained since its last event.

    text: the text that has become certain; a character of several tokens, or the beginning of a
    stop word, comes later than its tokens. ends: by token, how many characters the stream's text
    has with it; empty without a tokenizer. trees: the draft tree of each step, the prompt's own
    pass first, where the prompt asks for them. prompt_logprobs: as of Output, in the first event
    only. finish_reason, stats: in the last event only, and stop_word, where one ended the text.
    """

    text: str
    token_ids: list[int]
    origins: list[Origin]
    ends: list[int]
    logprobs: list[TokenLogprob]
    trees: list[DraftTree] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None
    stop_word: str | None = None


def describe_output(result: ActiveRequest, tokenizer: Any) -> Output:
    """Return the output of a request so far, without changing the request."""
    stream, is_cancelled = result.text_stream, result.is_cancelled
    if stream is not None:
        text = stream.full_text if result.is_over else stream.certain
    else:
        text = "" if tokenizer is None else decode_output(tokenizer, result.output_ids)
    return Output(
        prompt=result.request.input_text,
        prompt_ids=result.request.input_ids,
        text=text,
        token_ids=list(result.output_ids),
        origins=list(result.origins),
        logprobs=list(result.logprobs),
        prompt_logprobs=list(result.prompt_logprobs),
        logits=result.logits,
        finish_reason=result.finish_reason or ("cancelled" if is_cancelled else None),
        stats=result.stats,
    )
