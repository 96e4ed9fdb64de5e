"""Server-sent events, whose form is checked one by one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from specdec.errors import shorten

from .answers import INCOMPLETE, read_text

END_MARK = "[DONE]"
KINDS = {True: "chat.completion.chunk", False: "text_completion"}


@dataclasses.dataclass(frozen=True)
class StreamFault:
    """Fault of a stream's format. is_mild: whether clients tolerate it."""

    text: str
    is_mild: bool = False


def read_events(data: bytes) -> tuple[list[dict[str, Any]], list[StreamFault]]:
    """Return the chunks of a stream, and the faults of its lines and documents."""
    payloads, faults = _read_payloads(data)
    chunks = []
    for payload in payloads:
        if payload == END_MARK:
            continue
        try:
            chunk = json.loads(payload)
        except (ValueError, RecursionError):
            chunk = None
        if isinstance(chunk, dict):
            chunks.append(chunk)
        else:
            faults.append(StreamFault(f"an event is no JSON object: {shorten(payload)}"))
    return chunks, faults


def _read_payloads(data: bytes) -> tuple[list[str], list[StreamFault]]:
    """Return the text of each `data:` line, and the faults of the lines."""
    faults = []
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        faults.append(StreamFault(f"byte {error.start} is not UTF-8"))
        text = data.decode(errors="replace")
    lines = text.replace("\r\n", "\n").split("\n")
    payloads = [line[5:].strip() for line in lines if line.startswith("data:")]
    if strays := [line for line in lines if line and not line.startswith(("data:", ":"))]:
        faults.append(StreamFault(f"a line is neither data nor a comment: {shorten(strays[0])}"))
    num_marks = payloads.count(END_MARK)
    if num_marks != 1 or payloads[-1] != END_MARK:
        detail = f", the first after {payloads.index(END_MARK)} events" if num_marks else ""
        faults.append(StreamFault(f"{num_marks} times [DONE]{detail}; it must be the last, once"))
    return payloads, faults


def find_faults(
    chunks: Sequence[dict[str, Any]], *, is_chat: bool, has_usage: bool
) -> list[StreamFault]:  # fmt: skip
    """Return the faults of a stream of one choice. has_usage: whether it should have a usage."""
    faults = [
        StreamFault(f"an event is an error: {shorten(chunk['error'], 200)}")
        for chunk in chunks
        if "error" in chunk
    ]
    faults += _find_field_faults(chunks, is_chat=is_chat)
    choices = [choice for chunk in chunks for choice in chunk.get("choices") or []]
    if is_chat and (not choices or (choices[0].get("delta") or {}).get("role") != "assistant"):
        faults.append(StreamFault("the first chunk has no role"))
    return faults + _find_end_faults(choices) + _find_usage_faults(chunks, has_usage=has_usage)


def _find_field_faults(chunks: Sequence[dict[str, Any]], *, is_chat: bool) -> list[StreamFault]:
    """Return faults of the fields that all chunks of a stream share."""
    faults = []
    for name in ("id", "model", "created", "object"):
        values = list(dict.fromkeys(shorten(chunk.get(name)) for chunk in chunks))
        if len(values) > 1:
            many = ", ".join(values[:3])
            faults.append(StreamFault(f"{name} changes: {many}", is_mild=name == "created"))
    kind = chunks[0].get("object") if chunks else None
    if kind != KINDS[is_chat]:
        faults.append(StreamFault(f"object is {shorten(kind)}, not {KINDS[is_chat]!r}"))
    return faults


def _find_end_faults(choices: Sequence[dict[str, Any]]) -> list[StreamFault]:
    """Return faults of the finish_reason: there must be one, and no text after it."""
    faults = []
    reasons = [choice.get("finish_reason") for choice in choices]
    ends = [index for index, reason in enumerate(reasons) if reason is not None]
    if len(ends) != 1:
        texts = shorten([reasons[index] for index in ends])
        faults.append(StreamFault(f"{len(ends)} finish_reasons: {texts}; there must be one"))
    if ends and any(read_text(choice) for choice in choices[ends[0] + 1 :]):
        faults.append(StreamFault("text comes after the finish_reason"))
    return faults


def _find_usage_faults(chunks: Sequence[dict[str, Any]], *, has_usage: bool) -> list[StreamFault]:
    usage_indices = [i for i, chunk in enumerate(chunks) if chunk.get("usage") is not None]
    if not has_usage:
        fault = StreamFault("usage is told that was not asked for", is_mild=True)
        return [fault] if usage_indices else []
    if len(usage_indices) != 1:
        return [
            StreamFault(f"{len(usage_indices)} chunks have a usage; include_usage asks for one")
        ]
    faults = []
    if chunks[usage_indices[0]].get("choices"):
        text = "the chunk with the usage has choices; they must be empty"
        faults.append(StreamFault(text, is_mild=True))
    if usage_indices[0] != len(chunks) - 1:
        faults.append(StreamFault("chunks come after that with the usage"))
    return faults


def find_broken_characters(chunks: Sequence[dict[str, Any]], full_text: str) -> list[StreamFault]:
    """Return a fault where chunks hold halves of characters that the full text has whole."""
    pieces = [read_text(choice) for chunk in chunks for choice in chunk.get("choices") or []]
    num_broken = sum(piece.count(INCOMPLETE) for piece in pieces)
    if num_broken > full_text.count(INCOMPLETE):
        return [
            StreamFault(f"{num_broken - full_text.count(INCOMPLETE)} halves of characters are sent")
        ]
    return []
