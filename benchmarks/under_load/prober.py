"""Asks for a path so many times a second for a while, pauses as long, and so on until it is ended.

A process of its own without an event loop, as the servers' processors are also ours.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from urllib.parse import urlsplit

from benchmarks.under_load.client import make_head


def main(address: str, path: str, per_second: float, seconds: float) -> None:
    """Print a line [begin, end, requests] after each while: times of time.perf_counter."""
    parts = urlsplit(address)
    request = make_head(address, path, None, keep=True)
    with socket.create_connection((parts.hostname, parts.port or 80)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            count, began = 0, time.perf_counter()
            while (due := count / per_second) < seconds:
                time.sleep(max(0.0, began + due - time.perf_counter()))
                connection.sendall(request)
                answer = connection.recv(1 << 16)  # short, and so in one piece
                if not answer.startswith(b"HTTP/1.1 200"):
                    raise SystemExit(f"{address}{path}: {answer[:200]!r}")
                count += 1
            print(json.dumps([began, time.perf_counter(), count]), flush=True)
            time.sleep(seconds)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
