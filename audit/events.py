"""Server-sent events: their form, checked one by one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from specdec.errors import shorten

from .answers import INCOMPLETE, read_text

DONE = "[DONE]"
KINDS = {True: "chat.completion.chunk", False: "text_completion"}


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something wrong. is_mild: clients live with it."""

    text: str
    is_mild: bool = False


def read_events(data: bytes) -> tuple[list[dict[str, Any]], list[Fault]]:
    """The chunks of a stream, and what is wrong with how they were sent."""
    faults = []
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        faults.append(Fault(f"byte {error.start} is not UTF-8"))
        text = data.decode(errors="replace")
    lines = text.replace("\r\n", "\n").split("\n")
    sent = [line[5:].strip() for line in lines if line.startswith("data:")]
    if others := [line for line in lines if line and not line.startswith(("data:", ":"))]:
        faults.append(Fault(f"a line is neither data nor a comment: {shorten(others[0])}"))
    if sent.count(DONE) != 1 or sent[-1] != DONE:
        where = "" if DONE not in sent else f", the first after {sent.index(DONE)} events"
        faults.append(Fault(f"{sent.count(DONE)} times [DONE]{where}; it must be the last, once"))
    chunks = []
    for one in sent:
        if one == DONE:
            continue
        try:
            chunk = json.loads(one)
        except (ValueError, RecursionError):
            chunk = None
        if isinstance(chunk, dict):
            chunks.append(chunk)
        else:
            faults.append(Fault(f"an event is no JSON object: {shorten(one)}"))
    return chunks, faults


def find_faults(
    chunks: Sequence[dict[str, Any]], *, is_chat: bool, has_usage: bool
) -> list[Fault]:  # fmt: skip
    """What is wrong with a stream of one choice. has_usage: it was asked for."""
    faults = [
        Fault(f"an event is an error: {shorten(chunk['error'], 200)}")
        for chunk in chunks
        if "error" in chunk
    ]
    for name in ("id", "model", "created", "object"):
        values = list(dict.fromkeys(shorten(chunk.get(name)) for chunk in chunks))
        if len(values) > 1:
            many = ", ".join(values[:3])
            faults.append(Fault(f"{name} changes: {many}", is_mild=name == "created"))
    kind = chunks[0].get("object") if chunks else None
    if kind != KINDS[is_chat]:
        faults.append(Fault(f"object is {shorten(kind)}, not {KINDS[is_chat]!r}"))
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or []]
    if is_chat and (not choices or (choices[0].get("delta") or {}).get("role") != "assistant"):
        faults.append(Fault("the first chunk has no role"))
    ends = [at for at, choice in enumerate(choices) if choice.get("finish_reason") is not None]
    if len(ends) != 1:
        reasons = [choices[at]["finish_reason"] for at in ends]
        faults.append(Fault(f"{len(ends)} finish_reasons: {shorten(reasons)}; there must be one"))
    if ends and any(read_text(choice) for choice in choices[ends[0] + 1 :]):
        faults.append(Fault("text comes after the finish_reason"))
    return faults + _find_usage_faults(chunks, has_usage=has_usage)


def _find_usage_faults(chunks: Sequence[dict[str, Any]], *, has_usage: bool) -> list[Fault]:
    told = [at for at, chunk in enumerate(chunks) if chunk.get("usage") is not None]
    if not has_usage:
        fault = Fault("usage is told that was not asked for", is_mild=True)
        return [fault] if told else []
    if len(told) != 1:
        return [Fault(f"{len(told)} chunks have a usage; include_usage asks for one")]
    faults = []
    if chunks[told[0]].get("choices"):
        text = "the chunk with the usage has choices; they must be empty"
        faults.append(Fault(text, is_mild=True))
    if told[0] != len(chunks) - 1:
        faults.append(Fault("chunks come after that with the usage"))
    return faults


def find_broken_characters(chunks: Sequence[dict[str, Any]], whole: str) -> list[Fault]:
    """Faults where pieces hold halves of characters that the whole text has in one."""
    pieces = [read_text(choice) for chunk in chunks for choice in chunk.get("choices") or []]
    num_broken = sum(piece.count(INCOMPLETE) for piece in pieces)
    if num_broken > whole.count(INCOMPLETE):
        return [Fault(f"{num_broken - whole.count(INCOMPLETE)} halves of characters are sent")]
    return []
