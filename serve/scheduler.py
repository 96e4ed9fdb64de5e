"""Continuous batching: requests from any thread, one thread that owns the engine.

Requests join and leave between two steps. The engine's thread never waits for a thread that takes
events, and a thread that submits or cancels never waits for a step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from specdec import Engine, Event, RequestStats, SpecDecError, Stream
from specdec.decode.ranks.processes import leave_silent_ranks, list_stopped_ranks
from specdec.decode.requests import Request
from specdec.system import logs

from .protocol import BadRequest

logger = logs.get_logger(__name__)
SILENT_SECONDS = 10.0  # longest silence of other ranks when the server ends
HURRIED_SECONDS = 2.0  # longest silence after a second signal
IDLE_SECONDS = 1.0  # between two steps of an idle engine, which check its other ranks


class Job:
    """Request in the queue or the engine, whose events its submitter takes at any time.

    Events that wait to be taken hold at most the request's own output. Times are those of
    time.perf_counter, None for an event that has not happened yet.
    """

    def __init__(
        self, request: Request, on_change: Callable[[], None], *, has_output: bool = True
    ) -> None:
        """on_change: called in the engine's thread when `take` has something to return.

        has_output: whether new tokens are asked for, or only the prompt.
        """
        self.request, self.has_output = request, has_output
        self.queue_time = time.perf_counter()
        self.row_time: float | None = None  # when it got its row of the cache
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.num_new_tokens = 0  # tokens of all events so far
        self.gaps: list[float] = []  # seconds between the steps that brought tokens
        self.stream: Stream | None = None
        self.steps: list[tuple[int, int]] = []  # of each verify step: tokens drafted, accepted
        self.num_new_steps = 0  # verify steps of the newest event
        self.stats: RequestStats | None = None  # when the request has ended
        self.error: Exception | None = None
        self.is_cancelled = False
        self.on_change = on_change
        self._events: deque[Event] = deque()
        self._step_counts = 0, 0  # tokens drafted and accepted in `steps`

    @property
    def is_over(self) -> bool:
        return self.stats is not None or self.error is not None

    @property
    def num_output_tokens(self) -> int:
        """Number of new tokens so far, 0 where only the prompt was asked for."""
        return self.num_new_tokens if self.has_output else 0

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens in its row of the cache, 0 until its prompt was read."""
        return len(self.request.input_ids) + self.num_new_tokens if self.num_new_tokens else 0

    def take(self) -> list[Event]:
        """Return the events since the last call; raise the error that ended the request."""
        events = [self._events.popleft() for _ in range(len(self._events))]
        if self.error is not None:
            raise self.error
        return events

    def note(self, event: Event, stats: RequestStats) -> None:
        """Count an event of the request, before `give`."""
        now = time.perf_counter()
        self.num_new_tokens += len(event.token_ids)
        if event.token_ids:
            if self.last_token_time is None:
                self.first_token_time = now
            else:
                self.gaps.append(now - self.last_token_time)
            self.last_token_time = now
        self.num_new_steps = int(stats.num_verify_steps > len(self.steps))
        if self.num_new_steps:
            drafted, accepted = self._step_counts
            self._step_counts = stats.num_draft_tokens, stats.num_accepted
            self.steps.append((self._step_counts[0] - drafted, self._step_counts[1] - accepted))
        self.stats = event.stats

    def give(self, event: Event) -> None:
        """Let an event be taken."""
        self._events.append(event)
        self.on_change()


class Watcher(Protocol):
    """Receiver of steps and ends of requests, in the engine's thread; for metrics."""

    def note_step(self, jobs: Sequence[tuple[Job, Event]]) -> None: ...

    def note_end(self, job: Job, reason: str) -> None: ...


class JobScheduler:
    """Owner of an engine's steps. `start` it, `submit` to it, `stop` it."""

    def __init__(
        self, engine: Engine, *, max_queue: int, watcher: Watcher | None = None,
        on_lost: Callable[[SpecDecError], None] | None = None,
    ) -> None:  # fmt: skip
        """max_queue: requests that may wait for a row. on_lost: called when the engine is lost."""
        self.engine, self.max_queue = engine, max_queue
        self.lost_error: SpecDecError | None = None
        self._watcher, self._on_lost = watcher, on_lost
        self._changed = threading.Condition()
        self._waiting_jobs: deque[Job] = deque()
        self._running_jobs: list[Job] = []
        self._is_ready = self._is_draining = self._is_stopped = self._is_hurried = False
        self._seconds = 1.0  # moving mean of the seconds that a request takes
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_ready(self) -> bool:
        """True where a token has been made, and more can be."""
        is_open = self._is_ready and not self._is_draining and self.lost_error is None
        return is_open and not list_stopped_ranks()

    @property
    def running(self) -> Sequence[Job]:
        """Requests that have a row now."""
        return [job for job in self._running_jobs if not job.is_over]

    @property
    def num_running(self) -> int:
        return len(self._running_jobs)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting_jobs)

    def start(self) -> None:
        """Make a first token, which takes the memory of the cache, then wait for requests.

        Raises the engine's error where that fails.
        """
        self.engine.make_token()
        self._is_ready = True
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Let requests wait for their rows, all or none.

        Raises BadRequest where too many wait, or the server is about to end, and SpecDecError
        where the engine is lost.
        """
        with self._changed:
            if self.lost_error is not None:
                raise self.lost_error
            if self._is_draining:
                headers = {"Retry-After": "5"}
                raise BadRequest("the server is about to end", status=503, headers=headers)
            num_free = self.engine.max_batch_size - len(self._running_jobs)
            num_waiting = len(self._waiting_jobs)
            if num_waiting + len(jobs) > self.max_queue + max(0, num_free):
                seconds = max(1, round(self._seconds * num_waiting / self.engine.max_batch_size))
                raise BadRequest(
                    f"{num_waiting} request{'s wait' if num_waiting != 1 else ' waits'} already",
                    status=429, headers={"Retry-After": str(seconds)},
                )  # fmt: skip
            self._waiting_jobs.extend(jobs)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """End a request: its row is free from the next step on."""
        with self._changed:
            job.is_cancelled = True
            if job.stream is not None:
                job.stream.close()
            elif job in self._waiting_jobs:
                self._waiting_jobs.remove(job)
                self._end(job, "cancelled")
            self._changed.notify()

    def close(self) -> None:
        """Take no more requests."""
        self._is_draining = True

    def hurry(self) -> None:
        """Let `stop` give up silent ranks sooner; a signal's handler may call this."""
        self._is_hurried = True

    def stop(self) -> None:
        """End all requests and the thread; the engine is left as it is.

        Ranks that do not answer are given up: the engine is then lost.
        """
        with self._changed:
            self._is_draining = self._is_stopped = True
            for job in self._running_jobs:
                if job.stream is not None:
                    job.stream.close()
            self._changed.notify_all()
        while self._thread.is_alive() and not self._has_ended.wait(0.25):
            leave_silent_ranks(HURRIED_SECONDS if self._is_hurried else SILENT_SECONDS)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._running_jobs or self._waiting_jobs or self._is_stopped,
                    IDLE_SECONDS,
                )
                if self._is_stopped:
                    break
                self._admit()
            try:
                self.engine.step()
            except Exception as error:  # noqa: BLE001 - the server survives any error of a step
                self._fail(error)
                continue
            self._deliver()
        with self._changed:
            reason = self.lost_error or SpecDecError("the server was stopped", "ask again later")
            self._fail_all([*self._running_jobs, *self._waiting_jobs], reason)
            self._waiting_jobs.clear()
            self._running_jobs = []
            self._changed.notify_all()
        self._has_ended.set()

    def _admit(self) -> None:
        """Give free rows to waiting requests; the caller holds the lock."""
        for job in self._running_jobs:
            if job.is_cancelled:
                self._end(job, "cancelled")
        self._running_jobs = [job for job in self._running_jobs if not job.is_cancelled]
        while self._waiting_jobs and len(self._running_jobs) < self.engine.max_batch_size:
            job = self._waiting_jobs.popleft()
            job.row_time = time.perf_counter()
            try:
                job.stream = self.engine.stream(job.request)
            except Exception as error:  # noqa: BLE001 - only this request fails
                self._fail_all([job], error)
                continue
            self._running_jobs.append(job)

    def _deliver(self) -> None:
        """Count the events of a step and give them to their requests."""
        deliveries = []
        with self._changed:
            for job in self._running_jobs:
                assert job.stream is not None
                event = job.stream.take()
                if event is not None and not job.is_cancelled:
                    job.note(event, job.stream.stats)
                    deliveries.append((job, event))
            if self._watcher is not None:
                self._watcher.note_step(deliveries)
            for job, event in deliveries:
                if event.finish_reason is not None:
                    self._end(job, event.finish_reason)
            self._running_jobs = [job for job in self._running_jobs if not job.is_over]
            self._changed.notify_all()
        for job, event in deliveries:  # last: an answer is counted before a client can see it
            job.give(event)

    def _fail(self, error: Exception) -> None:
        """End the requests of a step that failed, or all where the engine is lost."""
        if not isinstance(error, SpecDecError):
            logger.error("a step failed: %s: %s", type(error).__name__, error, exc_info=error)
        else:
            logger.error("a step failed: %s", error.message)
        with self._changed:
            failed, self._running_jobs = self._running_jobs, []
            if self.engine.is_lost:
                self.lost_error = (
                    error if isinstance(error, SpecDecError)
                    else SpecDecError(f"the engine was lost: {error}", "start the server again")
                )  # fmt: skip
                failed += self._waiting_jobs
                self._waiting_jobs.clear()
                self._is_stopped = True
            self._fail_all(failed, self.lost_error or error)
            self._changed.notify_all()
        if self.lost_error is not None and self._on_lost is not None:
            self._on_lost(self.lost_error)

    def _fail_all(self, jobs: Sequence[Job], error: Exception) -> None:
        for job in jobs:
            job.error = error
            self._end(job, "error")
            job.on_change()

    def _end(self, job: Job, reason: str) -> None:
        """Count a request that has ended; the caller holds the lock."""
        job.stream = None  # releases the row of the cache
        self._seconds += 0.1 * (time.perf_counter() - job.queue_time - self._seconds)
        if self._watcher is not None:
            self._watcher.note_end(job, reason)
