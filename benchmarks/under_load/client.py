"""A client of OpenAI-compatible servers that takes little of the processor it shares with them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

PATH = "/v1/completions"
Body = dict[str, Any]


@dataclasses.dataclass
class Reply:
    """Outcome of one request. arrivals: when its events with text came, and the text of each."""

    began: float
    arrivals: list[tuple[float, str]] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    num_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.arrivals)


async def ask(address: str, body: Body, *, leave_after: int | None = None) -> Reply:
    """Ask for one completion, streamed or not; SystemExit where the server refuses it.

    leave_after: events after which the connection is closed, in the middle of the text.
    """
    reply = Reply(time.perf_counter())
    for moment, document in await ask_documents(address, PATH, body, leave_after=leave_after):
        for choice in document["choices"]:
            if choice.get("text"):
                reply.arrivals.append((moment, choice["text"]))
            reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        if document.get("usage"):
            reply.num_tokens = document["usage"]["completion_tokens"]
    return reply


async def ask_documents(
    address: str, path: str, body: Body, *, leave_after: int | None = None
) -> list[tuple[float, dict[str, Any]]]:
    """The answer or, of a stream, its events, with the times at which they came; see `ask`."""
    reader, writer = await _send(address, path, json.dumps(body).encode())
    received: list[tuple[float, bytes]] = []
    try:
        status, headers = await _read_head(reader)
        if status != 200 or not body.get("stream"):
            document = await _read_rest(reader, headers)
            if status != 200:
                raise SystemExit(f"{address}: status {status}: {document[:500]!r}")
            return [(time.perf_counter(), json.loads(document))]
        async for piece in _read_chunks(reader, headers):
            received.append((time.perf_counter(), piece))
            if leave_after is not None and len(received) > leave_after:
                return []
    finally:
        writer.close()
    # Read afterwards: others are being waited for until then.
    found = [(moment, json.loads(data)) for moment, data in _split_events(received)]
    if failed := [event["error"] for _, event in found if event.get("error")]:
        raise SystemExit(f"the stream ended with {failed[0]}")
    return found


async def ask_bytes(address: str, path: str, body: Body) -> bytes:
    """Return the whole of an answer or stream, of any protocol; SystemExit where it is refused."""
    reader, writer = await _send(address, path, json.dumps(body).encode())
    try:
        status, headers = await _read_head(reader)
        answer = await _read_rest(reader, headers)
    finally:
        writer.close()
    if status != 200:
        raise SystemExit(f"{address}: status {status}: {answer[:500]!r}")
    return answer


async def get(address: str, path: str) -> bytes:
    """The body that a path has."""
    reader, writer = await _send(address, path, None)
    try:
        _, headers = await _read_head(reader)
        return await _read_rest(reader, headers)
    finally:
        writer.close()


async def ask_all(address: str, bodies: Sequence[Body], concurrency: int) -> list[Reply]:
    """Ask for completions in their order, so many at a time."""
    left = iter(enumerate(bodies))
    replies: dict[int, Reply] = {}

    async def work() -> None:
        for at, body in left:
            replies[at] = await ask(address, body)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return [replies[at] for at in range(len(bodies))]


async def _send(
    address: str, path: str, body: bytes | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(make_head(address, path, body) + (body or b""))
    return reader, writer


def make_head(address: str, path: str, body: bytes | None, *, keep: bool = False) -> bytes:
    """Return the head before a request's body; keep: the connection, for another."""
    lines = [
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        f"Host: {urlsplit(address).netloc}", f"Connection: {'keep-alive' if keep else 'close'}",
    ]  # fmt: skip
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.strip().split(b"\r\n")
    pairs = (line.split(b":", 1) for line in lines)
    return int(first.split()[1]), {name.lower(): value.strip() for name, value in pairs}


async def _read_rest(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> bytes:
    return b"".join([piece async for piece in _read_chunks(reader, headers)])


async def _read_chunks(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> Any:
    """Yield a body's parts: the chunks, or the whole of it."""
    if headers.get(b"transfer-encoding", b"").lower() != b"chunked":
        length = headers.get(b"content-length")
        yield await (reader.read() if length is None else reader.readexactly(int(length)))
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readline()


def _split_events(received: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of server-sent events, each with the time at which the last of it came."""
    kept = b""
    for moment, piece in received:
        *events, kept = (kept + piece).split(b"\n\n")
        for event in events:
            data = event.strip().split(b"\n")[-1].removeprefix(b"data:").strip()
            if data and data != b"[DONE]":
                yield moment, data
