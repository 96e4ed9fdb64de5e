"""llama.cpp through its own server: it decodes in C++ and is asked for whole texts."""

from __future__ import annotations

import atexit
import json
import sys
import time
import urllib.request
from typing import Any

from .. import wire
from ..wire import Calls, cut_at_end, serve

START_SECONDS = 300.0
NGRAM_SIZE = 3  # looked up by prompt lookup


class Server(wire.Server):
    """A process of llama-server for one way of decoding."""

    def __init__(self, words: list[str]) -> None:
        local = ["--host", "127.0.0.1"]
        super().__init__([*words, *local], START_SECONDS, stdout=sys.stderr, stderr=sys.stderr)

    def complete(
        self, prompt: list[int], max_output_len: int, *, ends: bool = True
    ) -> dict[str, Any]:
        """Continue a prompt of tokens greedily; nothing of earlier prompts is used again.

        ends: whether the model's own end of a text ends it.
        """
        body = {
            "prompt": prompt, "n_predict": max_output_len, "temperature": 0.0, "top_k": 1,
            "cache_prompt": False, "return_tokens": True, "samplers": ["top_k"],
            "ignore_eos": not ends,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.address}/completion", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


class Servers:
    """One server that decodes plainly, and one for the newest setting of each other way."""

    def __init__(
        self, server: str, flags: list[str], target: str, draft: str, threads: int, positions: int
    ) -> None:
        self._common = [
            server, *flags, "--model", target,
            "--threads", str(threads), "--threads-batch", str(threads),
            "--ctx-size", str(positions), "--parallel", "1", "--cache-ram", "0", "--fit", "off",
        ]  # fmt: skip
        self.draft, self._threads = draft, threads
        self._running: dict[str, tuple[dict[str, Any], Server]] = {}

    def get(self, way: str, setting: dict[str, Any]) -> Server:
        """Return a server for the setting, started if need be."""
        known = self._running.get(way)
        if known is not None and known[0] == setting:
            return known[1]
        if known is not None:
            self._running.pop(way)[1].end()
        words, length = list(self._common), setting.get("length")
        if way == "prompt lookup":
            words += [
                "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(NGRAM_SIZE),
                "--spec-ngram-simple-size-m", str(length),
            ]  # fmt: skip
        elif way != "plain":
            words += [
                "--spec-type", "draft-simple", "--spec-draft-model", self.draft,
                "--spec-draft-threads", str(self._threads),
                "--spec-draft-threads-batch", str(self._threads),
            ]  # fmt: skip
        if length is not None:
            words += ["--spec-draft-n-max", str(length)]
        server = Server(words)
        self._running[way] = (setting, server)
        return server

    def end(self) -> None:
        """End all servers: they would outlive this process."""
        for _, server in self._running.values():
            server.end()

    def run(
        self, way: str, setting: dict[str, Any], prompts: list[list[int]], max_output_len: int,
        end_id: int,
    ) -> dict[str, Any]:  # fmt: skip
        """Decode each prompt by itself; starting a server is not timed."""
        server = self.get(way, setting)
        began = time.perf_counter()
        found = [server.complete(prompt, max_output_len) for prompt in prompts]
        seconds = time.perf_counter() - began
        timings = [answer["timings"] for answer in found]
        predicted = sum(timing["predicted_n"] for timing in timings)
        accepted = sum(timing.get("draft_n_accepted", 0) for timing in timings)
        steps = predicted - len(found) - accepted
        own_seconds = sum(timing["predicted_ms"] + timing["prompt_ms"] for timing in timings) / 1000
        return {
            "seconds": seconds,
            "num_tokens": predicted,
            "texts": [cut_at_end(answer["tokens"], end_id) for answer in found],
            "acceptance_length": (predicted - len(found)) / steps
            if way != "plain" and steps > 0
            else None,
            "own_tokens_per_second": predicted / max(1e-12, own_seconds),
        }


def start(
    server: str, flags: list[str], target: str, draft: str, threads: int, positions: int,
    version: str, computes_in: str,
) -> tuple[dict[str, Any], Calls]:  # fmt: skip
    servers = Servers(server, flags, target, draft, threads, positions)
    atexit.register(servers.end)
    about = {
        "load_seconds": servers.get("plain", {}).load_seconds,
        "versions": {"llama.cpp": version},
        "computes_in": computes_in,
    }
    return about, {"run": servers.run}


if __name__ == "__main__":
    serve(start)
