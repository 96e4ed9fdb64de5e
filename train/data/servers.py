"""Servers of one target: a request is repeated, at one after the other, until an answer comes.

Requests are given to whichever server has room, so that a slow one gets fewer. One that fails rests
for a while, its requests go to the others, and then a single request finds out whether it is back.
"""

from __future__ import annotations

import threading
import time

from specdec.errors import SpecDecError
from specdec.system.http_client import choose_wait
from specdec.system.logs import get_logger
from specdec.text.chat import Conversation

from .client import Client, TargetAnswer, TransientFailure, write_body
from .dialogues import RowError
from .settings import DataSettings

logger = get_logger(__name__)


class TargetServer:
    """One server's requests and failures. A lock of `Servers` guards it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.num_running = 0
        self.num_failures = 0  # in succession
        self.rest_began = self.rest_ends = 0.0  # by time.monotonic()

    def has_room(self, now: float, concurrency: int) -> bool:
        """Return whether to ask it; after a failure, one request at a time, until one succeeds."""
        limit = 1 if self.num_failures else concurrency
        return self.rest_ends <= now and self.num_running < limit

    def rest(self, wait: float) -> float:
        """Ask it no more for some seconds, `wait` at least; return how many."""
        now = time.monotonic()
        seconds = max(choose_wait(self.num_failures), wait)
        self.num_failures += 1
        self.rest_began, self.rest_ends = now, now + seconds
        return seconds


class Servers:
    """All servers of the target, which threads may share."""

    def __init__(self, settings: DataSettings) -> None:
        self.settings = settings
        self.servers = [TargetServer(Client(settings, url)) for url in settings.base_url]
        self._condition = threading.Condition()
        self._is_closed = False

    @property
    def concurrency(self) -> int:
        """Requests that run at once, at all servers together."""
        return self.settings.concurrency * len(self.servers)

    def close(self) -> None:
        """End all waits: no more answers are needed."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def ask(
        self, context: str | Conversation, seed: int | None, preferred: TargetServer | None = None
    ) -> tuple[TargetAnswer, TargetServer]:
        """Return the target's answer to a prompt or a conversation, and who gave it.

        preferred: the server that has the conversation so far in its cache. Raises RowError where
        this row gets no answer, and SpecDecError where no row can get one.
        """
        body = write_body(self.settings, context, seed)
        tries = self.settings.max_retries + 1
        for number in range(tries):
            server = self._take(preferred)
            began = time.monotonic()
            try:
                answer = server.client.ask(body)
            except TransientFailure as failure:
                self._note_failure(server, failure, began)
                if number + 1 == tries:
                    count = f"{tries} tries" if tries > 1 else "1 try"
                    raise RowError(f"{failure.reason} (after {count})", is_transient=True) from None
                if len(self.servers) == 1:
                    self._pause(failure.reason, max(choose_wait(number), failure.wait))
            else:
                self._note_success(server)
                return answer, server
            finally:
                self._give_back(server)
        raise AssertionError("the last try returns or raises")

    def _take(self, preferred: TargetServer | None) -> TargetServer:
        """Wait for a server with room, and begin a request there."""
        with self._condition:
            while not self._is_closed:
                now = time.monotonic()
                ready = [s for s in self.servers if s.has_room(now, self.settings.concurrency)]
                if ready:
                    server = preferred if preferred in ready else None
                    server = server or min(ready, key=lambda s: s.num_running)
                    server.num_running += 1
                    return server
                rests = [s.rest_ends - now for s in self.servers if s.rest_ends > now]
                self._condition.wait(min(rests, default=None))
        raise RowError("the run has ended", is_transient=True)

    def _give_back(self, server: TargetServer) -> None:
        with self._condition:
            server.num_running -= 1
            self._condition.notify_all()

    def _note_success(self, server: TargetServer) -> None:
        with self._condition:
            if server.num_failures:
                logger.info("%s answers again", server.client.url)
            server.num_failures = 0

    def _note_failure(self, server: TargetServer, failure: TransientFailure, began: float) -> None:
        """Let a server rest; requests that ended with the one before it tell nothing new.

        Raises SpecDecError where all have failed, each as often as a request is tried.
        """
        if len(self.servers) == 1:
            return
        with self._condition:
            if began < server.rest_began:
                return
            seconds = server.rest(failure.wait)
            num_failures = min(s.num_failures for s in self.servers)
            if num_failures > self.settings.max_retries:
                raise SpecDecError(
                    f"{len(self.servers)} servers have failed {num_failures} times or more in"
                    f" succession, the last one: {failure.reason}",
                    "check the servers, then run the same command with --resume",
                )
            level = logger.debug if server.num_failures > 1 else logger.warning
            level(
                "%s: %s; its rows go to the other servers, and it is asked again in %.0f s",
                server.client.url, failure.reason, seconds,
            )  # fmt: skip

    def _pause(self, reason: str, wait: float) -> None:
        """Wait before a repetition at the only server; raise RowError where all was closed."""
        logger.debug("%s; again in %.1f s", reason, wait)
        with self._condition:
            if self._condition.wait_for(lambda: self._is_closed, wait):
                raise RowError(reason, is_transient=True)
