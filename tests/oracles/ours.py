"""What specdec does with the same models, prompts and chains of drafts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec import Engine, Prompt
from tests.engines import call

# Runtimes draft at every step: to count as they do, so must specdec.
FIXED: dict[str, Any] = {"draft_budget": "fixed"}
MARGIN = 8  # tokens beyond the last one that is compared: a runtime counts its last step whole


@dataclasses.dataclass(frozen=True)
class Counters:
    """vLLM's counters of speculation, summed over requests."""

    drafts: int
    proposed: int
    accepted: int
    by_position: tuple[int, ...]


def make_engine(
    folder: Path, target: Path, convert: Sequence[object], build: Sequence[object]
) -> Path:
    """Convert and build in float32."""
    checkpoint, engine = folder / "checkpoint", folder / "engine"
    call(
        "convert", "--model-dir", target, "--output-dir", checkpoint, "--dtype", "float32", *convert
    )
    call("build", "--checkpoint-dir", checkpoint, "--output-dir", engine, *build)
    return engine


def chain(length: int) -> str:
    """The tree of one path."""
    return json.dumps([[0] * depth for depth in range(1, length + 1)])


def decode(
    engine: Path, prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any
) -> list[Any]:
    """Continue prompts one by one, past `max_tokens` and past the end token."""
    requests = [Prompt(token_ids=list(ids), end_ids=()) for ids in prompts]
    with Engine.load(engine, device="cpu", **options) as loaded:
        return [
            loaded.generate([request], max_output_len=max_tokens + MARGIN)[0]
            for request in requests
        ]


def count(
    outputs: Sequence[Any], max_tokens: int, length: int, *, is_cut: bool = False
) -> Counters:
    """The counters of the steps up to the one that reaches `max_tokens`, each of `length` drafts.

    Token 0 comes of the prompt; a step's tokens are its accepted drafts and the target's own.
    is_cut: as a runtime counts that drafts no more than the request may still emit.
    """
    drafts, proposed, by_position = 0, 0, [0] * length
    for output in outputs:
        place = 1
        while place < max_tokens:
            room = min(length, max_tokens - place - 1) if is_cut else length
            accepted = 0
            while accepted < room and output.origins[place + accepted] == "draft":
                accepted += 1
            drafts += room > 0
            proposed += room
            for position in range(accepted):
                by_position[position] += 1
            place += accepted + 1
    return Counters(drafts, proposed, sum(by_position), tuple(by_position))


def look_up(
    prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], max_tokens: int,
    *, length: int, ngram: int,
) -> Counters:  # fmt: skip
    """vLLM's prompt lookup, told anew: of the longest n-gram, the place where it occurred first.

    texts: continuations, some tokens longer than what is counted.
    """
    drafts, proposed, by_position = 0, 0, [0] * length
    for prompt, output in zip(prompts, texts, strict=True):
        place = 1
        while place < max_tokens:
            text = [*prompt, *output[:place]]
            draft: list[int] = []
            for size in range(ngram, 0, -1):
                places = range(len(text) - size)
                found = [at for at in places if text[at : at + size] == text[-size:]]
                if found:
                    draft = text[found[0] + size :][:length]
                    break
            accepted = 0
            while accepted < len(draft) and draft[accepted] == output[place + accepted]:
                accepted += 1
            drafts += bool(draft)
            proposed += len(draft)
            for position in range(accepted):
                by_position[position] += 1
            place += accepted + 1
    return Counters(drafts, proposed, sum(by_position), tuple(by_position))
