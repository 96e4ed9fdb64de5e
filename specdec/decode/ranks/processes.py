"""The processes of a tensor-parallel engine, as rank 0 sees them: started, joined, watched, ended.

Under a launcher such as torchrun (RANK and WORLD_SIZE are set) the processes are there already;
elsewhere rank 0, the process that the user called, starts the others on this machine. They hold a
pipe from it, so that they end when it does, however that comes about.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import errors
from specdec.errors import EngineLostError, SpecDecError, summarize
from specdec.system import logs
from specdec.system.mpi import check_meeting_place, find_launch
from specdec.system.processes import is_stopped, keep_stdout_clean, make_environment

if TYPE_CHECKING:
    from specdec.engine.group import Group
    from specdec.files.reading import Array

logger = logs.get_logger(__name__)

# Ranks wait for rank 0 as long as it likes; what watches for dead ones are pipes and sockets.
LONGEST_WAIT = timedelta(days=7)
# A rank that ended breaks the exchange that the others are in; on GPUs it may hang instead.
GRACE_SECONDS = 10.0
INTERRUPT_SECONDS = 2.0  # from Ctrl-C until ranks that rank 0 still waits for are ended by force
END_SECONDS = 5.0  # that ranks have to end after they were told to
STATUS_BYTES = 2048  # of a rank's report on what it loaded
ENDING_SIGNALS = {  # Windows has no SIGHUP
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
}
LOST_STATUS = 76  # of a rank that ends because another one has; EX_PROTOCOL in sysexits.h


def open_store(path: str, size: int) -> Any:
    """Open a store for ranks on one machine: a file, since a free port may be taken again."""
    import torch.distributed

    distributed: Any = torch.distributed  # which does not declare its stores
    return distributed.FileStore(path, size)


def join_group(rank: int, size: int, store: Any) -> Group:
    """Meet the other ranks; where there is no store, as the launcher says."""
    import torch
    import torch.distributed

    from specdec.engine.group import Group

    has_cuda = torch.cuda.is_available()
    if has_cuda:
        launch = find_launch()
        torch.cuda.set_device(launch.local_rank if launch is not None else rank)
    meeting_place = "their store" if store else check_meeting_place()
    try:
        with keep_stdout_clean():
            torch.distributed.init_process_group(
                # Messages go between CPUs, sums between the devices that computed them.
                "cpu:gloo,cuda:nccl" if has_cuda else "gloo",
                rank=rank, world_size=size, store=store, timeout=LONGEST_WAIT,
                init_method=None if store else "env://",
            )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise SpecDecError(
            f"rank {rank} of {size} cannot reach the other ranks at {meeting_place}:"
            f" {summarize(error)}",
            "check MASTER_ADDR and MASTER_PORT, and that every rank has its own RANK",
        ) from None
    group = Group(rank, size)
    # From here on the store is not read: rank 0 may remove it.
    exchange_status(group, None)
    return group


class Ranks:
    """All ranks of this process's engines. `group` is set once they have met."""

    group: Group

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_launched = logs.get_launched_rank() is not None
        self.is_ended = False
        self._num_engines = 0
        self._has_met = False
        self._handles = itertools.count()
        self._dropped: list[int] = []
        self._exchange_start: float | None = None  # when the exchange began that rank 0 is in
        self._children: list[subprocess.Popen[bytes]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._signals: int | None = None  # where the numbers of signals are read from
        self._silent: SpecDecError | None = None  # why the ranks were killed that did not answer
        self.stopped: list[str] = []  # ranks that get no time, as after SIGSTOP, in words
        self._num_threads: int | None = None  # of this process, when it had the machine to itself
        if not self.is_launched:
            self._start()

    def _start(self) -> None:
        import torch

        self._folder = tempfile.TemporaryDirectory(prefix="specdec-ranks-")
        environment = make_environment()
        if "OMP_NUM_THREADS" not in environment:
            self._num_threads = torch.get_num_threads()
            num_threads = max(1, self._num_threads // self.size)
            torch.set_num_threads(num_threads)
            environment["OMP_NUM_THREADS"] = str(num_threads)
        if sys.platform == "linux":  # this machine's name may lead nowhere
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment |= {"WORLD_SIZE": str(self.size), "LOCAL_WORLD_SIZE": str(self.size)}
        for rank in range(1, self.size):
            child = subprocess.Popen(
                [sys.executable, "-m", "specdec.decode.ranks.follower", self._store_path],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                # Ctrl-C at a terminal is for rank 0, which then ends the others.
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            self._children.append(child)
        self._signals = _open_signals()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def _store_path(self) -> str:
        assert self._folder is not None
        return str(Path(self._folder.name) / "store")

    def meet(self) -> None:
        """Wait until every rank is there."""
        if self._has_met:
            return
        import torch

        with self.together():
            if self.is_launched:
                self.group = join_group(0, self.size, None)
            else:
                self.group = self._meet_children()
                if not torch.cuda.is_available():  # NCCL meets once more, at its first sum
                    self._clean_up()
        self._has_met = True
        logger.info("%d ranks", self.size)

    def _meet_children(self) -> Group:
        store = open_store(self._store_path, self.size)
        while not store.check([f"rank{rank}" for rank in range(1, self.size)]):
            self._check_children()
            time.sleep(0.01)
        old_interface = os.environ.get("GLOO_SOCKET_IFNAME")
        if old_interface is None and sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            return join_group(0, self.size, store)
        finally:
            if old_interface is None:
                os.environ.pop("GLOO_SOCKET_IFNAME", None)

    def join(self) -> None:
        """Count another engine that is split over these ranks."""
        self._num_engines += 1

    def leave(self) -> None:
        """Count one engine less; with the last, the ranks end."""
        self._num_engines -= 1
        if self._num_engines == 0:
            self.end()

    def make_handle(self) -> int:
        """Return a new number for an object that every rank has its part of."""
        return next(self._handles)

    def drop_with_owner(self, owner: object, handle: int) -> None:
        """Let the other ranks drop their parts when `owner` is gone."""
        weakref.finalize(owner, self._dropped.append, handle).atexit = False

    def tell(self, call: str, arrays: dict[str, Array], **values: Any) -> None:
        """Tell the other ranks what to do next; inside of `together`."""
        from specdec.decode.ranks.messages import Message, send

        dropped = self._dropped.copy()
        del self._dropped[: len(dropped)]
        send(self.group, Message(call, {**values, "dropped": dropped}, arrays))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Surround what all ranks do; if it is left by an exception, they can do no more."""
        from specdec.engine.group import PeerLost

        if self.is_ended:
            raise EngineLostError(
                "the other ranks of this engine have ended", "load the engine again"
            )
        self._check_children()
        self._exchange_start = time.monotonic()
        try:
            yield
        except BaseException as error:  # Ctrl-C too: the others still are where rank 0 was
            try:
                explained = self._explain(error) if isinstance(error, PeerLost) else None
            finally:
                self.end()
            if explained is not None:
                raise explained from None
            raise
        finally:
            self._exchange_start = None

    def check_loaded(self) -> None:
        """Raise what another rank reports of its part of an engine; inside of `together`."""
        for line in exchange_status(self.group, None):
            if line:
                message, hint = json.loads(line)
                raise SpecDecError(message, hint)

    def end(self, *, is_done: bool = False) -> None:
        """End the other ranks. is_done: they are told to end well where a launcher reads it."""
        if self.is_ended:
            return
        self.is_ended = True
        if is_done and self.is_launched and self._has_met:
            with contextlib.suppress(Exception):
                self.tell("end", {})
        self._end_children()
        if self._num_threads is not None:
            import torch

            torch.set_num_threads(self._num_threads)
        if self._has_met:
            import torch.distributed

            with contextlib.suppress(RuntimeError):
                torch.distributed.destroy_process_group()
        self._clean_up()

    def _clean_up(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def _end_children(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        try:
            for child in self._children:
                if child.stdin is not None:
                    child.stdin.close()
            for child in self._children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, deadline - time.monotonic()))
        finally:  # a second Ctrl-C too
            self._kill_children()

    def _kill_children(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()

    def _check_children(self) -> None:
        if any(child.poll() is not None for child in self._children):
            explained = self._explain(None)
            self.end()
            raise explained

    def _explain(self, exchange_error: Exception | None) -> SpecDecError:
        """Say which rank ended and how. lost: what the exchange with it ended in."""
        if self._silent is not None:
            return self._silent
        deadline = time.monotonic() + (2.0 if self._children else 0.0)
        # The rank that took the others along may be the last whose end is seen: memory is returned
        # to the system after connections are closed.
        while (ended_rank := self._find_ended()) is None or ended_rank[1] == LOST_STATUS:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        if not ended_rank:
            return SpecDecError(
                f"another of {self.size} ranks cannot be reached:"
                f" {' '.join(str(exchange_error).split())}",
                "what it wrote to stderr, or its launcher's log, says why",
            )
        rank, status = ended_rank
        ending = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return SpecDecError(
            f"rank {rank} of {self.size} {ending}; the other ranks were stopped",
            "run it again; what the rank wrote to stderr, or the machine's memory, may explain it",
        )

    def leave_signals(self) -> None:
        """Take no signal as a sign that the work is to be given up."""
        self._signals = None

    def leave_silent(self, patience: float) -> None:
        """Let a thread out of an exchange that has lasted so many seconds, by killing the ranks.

        Called by another thread. Where a launcher started the ranks, this process ends.
        """
        exchange_start = self._exchange_start
        if exchange_start is None or self.is_ended or self._silent is not None:
            return
        if (seconds := time.monotonic() - exchange_start) < patience:
            return
        self._silent = self._explain_silence(seconds)
        if self._children:
            self._kill_children()
        else:
            self._give_up(self._silent, 1)

    def _give_up(self, error: SpecDecError, status: int) -> None:
        """Let the program end this process, which hangs in an exchange; else say that it does."""
        if errors.on_hang is not None:
            errors.on_hang(error, status, self._kill_children)
        else:
            logger.error("%s; %s", error.message, error.hint)
            self._kill_children()

    def _explain_silence(self, seconds: float) -> SpecDecError:
        if stopped := self._list_stopped():
            return SpecDecError(
                f"{', '.join(stopped)}: no answer for {seconds:.0f} seconds",
                "find out who sent SIGSTOP or SIGTSTP, and start this again",
            )
        return SpecDecError(
            f"another of {self.size} ranks has not answered for {seconds:.0f} seconds",
            "what it wrote to stderr, or its launcher's log, says why",
        )

    def _list_stopped(self) -> list[str]:
        return [
            f"rank {rank} of {self.size} is stopped (process {child.pid})"
            for rank, child in enumerate(self._children, 1)
            if is_stopped(child.pid)
        ]

    def _find_ended(self) -> tuple[int, int] | None:
        """Find a rank that has ended, and its status: the first to end, if that is known."""
        ended_ranks = [
            (rank, status)
            for rank, child in enumerate(self._children, 1)
            if (status := child.poll()) is not None
        ]
        return min(ended_ranks, key=lambda rank_status: rank_status[1] == LOST_STATUS, default=None)

    def _watch(self) -> None:
        """Free this process where it hangs in an exchange: a rank has ended, or is stuck at Ctrl-C.

        Ctrl-C becomes an exception only when the exchange is over: killing the ranks ends it.
        """
        self._take_interrupt()  # of ranks before these
        while not self.is_ended:
            time.sleep(0.25)
            self.stopped = self._list_stopped()
            exchange_start, is_interrupted = self._exchange_start, self._take_interrupt()
            if exchange_start is None or not (is_interrupted or self._find_ended()):
                continue
            if is_interrupted:
                time.sleep(INTERRUPT_SECONDS)
                if self._exchange_start != exchange_start or self.is_ended:
                    continue
                self._kill_children()
            time.sleep(GRACE_SECONDS)
            if self._exchange_start == exchange_start and not self.is_ended:
                explained = self._explain(None)
                if is_interrupted:
                    explained = SpecDecError("interrupted", "run it again")
                self._give_up(explained, 130 if is_interrupted else 1)

    def _take_interrupt(self) -> bool:
        """Return whether Ctrl-C, SIGTERM or SIGHUP has come since the last call."""
        if self._signals is None:
            return False
        try:
            return not ENDING_SIGNALS.isdisjoint(os.read(self._signals, 4096))
        except BlockingIOError:  # nothing has come
            return False


_signal_pipe: tuple[int, int] | None = None


def _open_signals() -> int | None:
    """Open what the number of each signal is read from at once, whatever the main thread is in.

    None where this is not the main thread, or another reader has them already. Never closed.
    """
    global _signal_pipe
    if threading.current_thread() is not threading.main_thread():
        return None
    reader, writer = _signal_pipe = _signal_pipe or os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    old_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if old_descriptor not in (-1, writer):
        signal.set_wakeup_fd(old_descriptor)
        return None
    return reader


def exchange_status(group: Group, problem: tuple[str, str] | None) -> list[str]:
    """Report a problem or none to rank 0; there, return what each rank reports, as JSON."""
    import torch

    text = json.dumps(problem).encode() if problem else b""
    if len(text) > STATUS_BYTES and problem:
        text = json.dumps([problem[0][: STATUS_BYTES // 16], problem[1][:80]]).encode()
    report = torch.zeros(STATUS_BYTES, dtype=torch.uint8)
    report[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    reports = bytes(group.gather(report).tolist())
    rows = [
        reports[offset : offset + STATUS_BYTES] for offset in range(0, len(reports), STATUS_BYTES)
    ]
    return [row.rstrip(b"\0").decode() for row in rows]


_ranks: Ranks | None = None


def open_ranks(size: int) -> Ranks | None:
    """Return the ranks that an engine of `size` is split over; None for an engine of one rank.

    All engines of a process share their ranks; one rank's engine may draft for several ranks'.
    """
    global _ranks
    is_open = _ranks is not None and not _ranks.is_ended
    if logs.get_launched_rank() is not None and not (size == 1 and is_open):
        launch = find_launch()
        world_size = launch.size if launch is not None else 1
        if world_size != size:
            raise SpecDecError(
                f"WORLD_SIZE is {world_size}, the engine's tp_size is {size}",
                f"start {size} process{'es' if size > 1 else ''}, or none but this one: without a"
                " launcher specdec-run starts the others",
            )
    if size == 1:
        return None
    if is_open and _ranks is not None:
        if _ranks.size == size:
            return _ranks
        _ranks.end()
    _ranks = Ranks(size)
    return _ranks


def leave_signals() -> None:
    """Let SIGTERM and Ctrl-C leave this process's ranks alone: it has work to finish first."""
    if _ranks is not None:
        _ranks.leave_signals()


def list_stopped_ranks() -> list[str]:
    """List the ranks of this process that were stopped, as by SIGSTOP, in words."""
    return _ranks.stopped if _ranks is not None and not _ranks.is_ended else []


def leave_silent_ranks(patience: float) -> None:
    """Let another thread out of an exchange that has lasted so many seconds; see `Ranks`."""
    if _ranks is not None:
        _ranks.leave_silent(patience)


def end_ranks(*, is_done: bool = False) -> None:
    """End the other ranks of this process's engines, if it has any."""
    if _ranks is not None:
        _ranks.end(is_done=is_done)


atexit.register(end_ranks)
