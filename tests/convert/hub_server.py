"""A Hugging Face Hub on this machine: as much of its HTTP as huggingface_hub asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.loopback import LoopbackServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(LoopbackServer):
    """Serves model folders by id, counts what was asked for, and refuses or breaks off on demand.

    refusals: id -> (status, error code) of every answer about it. cuts: file name -> bytes after
    which its first download breaks off.
    """

    def __init__(self, models: Mapping[str, Path]) -> None:
        self.models = models
        self.refusals: dict[str, tuple[int, str]] = {}
        self.cuts: dict[str, int] = {}
        self.requests: list[tuple[str, str]] = []  # method, path
        self.ranges: list[str] = []
        self.tokens: set[str | None] = set()

    def list_fetched(self) -> list[str]:
        """Names of the files whose bytes were asked for."""
        return sorted(
            {path.rpartition("/")[2] for method, path in self.requests
             if method == "GET" and not path.startswith("/api/")}
        )  # fmt: skip

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(handler.path.partition("?")[0])
        self.requests.append((handler.command, path))
        self.tokens.add(handler.headers.get("Authorization"))
        if path.startswith("/api/models/"):
            rest = path.removeprefix("/api/models/").partition("/revision/")[0]
            hub_id, tree, _ = rest.partition("/tree/")  # which releases from 1.0 on ask for
            self._describe(handler, hub_id, is_tree=bool(tree))
            return
        if path.startswith("/cdn/"):
            hub_id, _, name = path.removeprefix("/cdn/").rpartition("/")
        else:
            hub_id, _, rest = path.removeprefix("/").partition("/resolve/")
            name = rest.partition("/")[2]
        if self._refuse(handler, hub_id):
            return
        file = self.models[hub_id] / name
        etag = f'"{hashlib.sha256(file.read_bytes()).hexdigest()}"'
        size = file.stat().st_size
        if not path.startswith("/cdn/") and file.suffix in (".safetensors", ".bin"):
            headers = {
                "Location": f"{self.url}/cdn/{hub_id}/{name}", "X-Repo-Commit": COMMIT,
                "X-Linked-Etag": etag, "X-Linked-Size": str(size), "Content-Length": "0",
            }  # fmt: skip
            _send(handler, 302, headers)
            return
        self._send_file(handler, file, {"ETag": etag, "X-Repo-Commit": COMMIT})

    def _describe(self, handler: BaseHTTPRequestHandler, hub_id: str, *, is_tree: bool) -> None:
        if self._refuse(handler, hub_id):
            return
        files = sorted(self.models[hub_id].iterdir())
        document: Any = {
            "id": hub_id, "sha": COMMIT, "siblings": [{"rfilename": path.name} for path in files]
        }  # fmt: skip
        if is_tree:
            document = [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": p.name}
                for p in files
            ]
        content = json.dumps(document).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        _send(handler, 200, headers, content)

    def _refuse(self, handler: BaseHTTPRequestHandler, hub_id: str) -> bool:
        status, code = self.refusals.get(hub_id, (0, ""))
        if hub_id not in self.models:
            status, code = 404, "RepoNotFound"
        if status:
            headers = {"X-Error-Code": code, "X-Error-Message": "no", "Content-Length": "0"}
            _send(handler, status, headers)
        return bool(status)

    def _send_file(
        self, handler: BaseHTTPRequestHandler, file: Path, headers: dict[str, str]
    ) -> None:
        content, status = file.read_bytes(), 200
        if wanted := handler.headers.get("Range"):
            self.ranges.append(wanted)
            first = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            content, status = content[first:], 206
        headers["Content-Length"] = str(len(content))
        if handler.command == "GET" and file.name in self.cuts:
            content = content[: self.cuts.pop(file.name)]
        _send(handler, status, headers, content)


def _send(
    handler: BaseHTTPRequestHandler, status: int, headers: Mapping[str, str], content: bytes = b""
) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command == "GET":
        handler.wfile.write(content)
