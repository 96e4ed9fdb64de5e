"""Execution of a plan: bytes go from the sources to their offsets in the rank files as a stream.

A rank file is cut into writes of a few MB, each at its own offset: bytes that stay as they are, by
the kernel alone; others by way of a small buffer. After the writers comes one reader a file, which
hashes what is in the file, in order, while it is in the page cache. The source files are read once
more, each from its beginning, for their hashes and for weights that are no finite numbers. So
memory depends on the number of threads alone, every byte that is hashed is one that a file holds,
and a file whose first bytes have a known hash can be gone on with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from specdec.files.reading import FileStates, check_states, describe_state, read_into
from specdec.files.tensor_file import (
    BLOCK_BYTES,
    DTYPES,
    TensorInfo,
    encode_header,
    measure_tensor_file,
    sort_tensors,
)
from specdec.system import logs

from .finite import FlawCounter, Flaws, describe_flaws, refuse_flaws
from .plan import (
    OUTPUT_BLOCK_BYTES,
    ConversionPlan,
    OutputBlock,
    PlannedTensor,
    RankPlan,
    TensorSource,
    get_infos,
)
from .zeros import ZeroFinder, find_hole, may_be_zero, refuse_zeros

logger = logs.get_logger(__name__)

T = TypeVar("T")
METADATA = {"format": "pt"}  # safetensors readers ask for it
WRITES_AHEAD = 32  # of the hash: what is hashed should still be in the page cache
SYNC_BYTES = 256 << 20  # written between two calls that send them to the disk
COPIES_A_WRITER = 4  # of a write's bytes in memory at once, at most: read, widened, cast, tiled
# Errors of copy_file_range where it does not know how, or not between these files.
CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


@dataclasses.dataclass(frozen=True)
class WriteResult:
    """Result of a stream: sha256 by file name, the sources' manifest entries, flaws.

    zeros: tensors with zeros in the place of weights.
    """

    hashes: dict[str, str]
    sources: list[dict[str, Any]]
    flaws: dict[str, Flaws]
    zeros: list[str]


@dataclasses.dataclass(frozen=True)
class ShardWrite:
    """Write of the next bytes of a rank file."""

    offset: int
    num_bytes: int
    blocks: tuple[OutputBlock, ...]


@dataclasses.dataclass(frozen=True)
class SourceRead:
    """Read of a source tensor of which rows are written, in some types.

    may_be_zero: of `zeros.may_be_zero`.
    """

    source: TensorSource
    name: str
    rows: tuple[int, int]
    dtypes: frozenset[str]
    may_be_zero: bool | None

    @property
    def info(self) -> TensorInfo:
        """Type and shape of the whole source tensor."""
        return self.source.tensors[self.name]

    @property
    def span(self) -> tuple[int, int]:
        """Bytes of the tensor that the rows take."""
        row_bytes = self.info.num_bytes // max(1, self.info.num_rows)
        return self.rows[0] * row_bytes, self.rows[1] * row_bytes


class Inspection:
    """Inspection of a source tensor while it is read, for weights that are no numbers, or zeros."""

    def __init__(self, read: SourceRead) -> None:
        self.read, self.finder = read, ZeroFinder()
        self.counter = FlawCounter(read.info.dtype, read.dtypes)


class StreamStopped(Exception):
    """End of a task where another thread has failed, or the conversion is known to fail."""


def write_plan(
    plan: ConversionPlan,
    folder: Path,
    *,
    workers: int,
    states: FileStates | None = None,
    allow_nonfinite: bool = False,
    allow_zeros: bool = False,
) -> WriteResult:
    """Write every rank's file into `folder`; raise SpecDecError for weights that are none.

    These are no finite numbers, or zeros where a download was not finished.

    states: the sources' as they were when the plan was made; what they are now, if not given.
    """
    accepted = (allow_nonfinite, allow_zeros)
    result = _Stream(plan, folder, workers, accepted, states or get_states(plan)).run()
    if result.zeros:
        error = refuse_zeros(result.zeros)
        if not allow_zeros:
            raise error
        logger.warning("%s", error)
    if result.flaws:
        dtypes = {info.dtype for rank in plan.ranks for info in get_infos(rank).values()}
        if not allow_nonfinite:
            raise refuse_flaws(result.flaws, dtypes)
        logger.warning("%s", describe_flaws(result.flaws, dtypes))
    return result


def name_rank(rank: int) -> str:
    """Return the file name of a rank's tensors."""
    return f"rank{rank}.safetensors"


def list_writes(tensors: RankPlan) -> Iterator[ShardWrite]:
    """Cut a rank's file into writes of OUTPUT_BLOCK_BYTES, or one block where that has more."""
    infos = get_infos(tensors)
    offset = len(encode_header(infos, METADATA))
    blocks: list[OutputBlock] = []
    num_bytes = 0
    for name in sort_tensors(infos):
        for block in tensors[name].list_output_blocks():
            if blocks and num_bytes + block.num_bytes > OUTPUT_BLOCK_BYTES:
                yield ShardWrite(offset, num_bytes, tuple(blocks))
                offset, num_bytes, blocks = offset + num_bytes, 0, []
            blocks.append(block)
            num_bytes += block.num_bytes
    if blocks:
        yield ShardWrite(offset, num_bytes, tuple(blocks))


def list_reads(plan: ConversionPlan) -> list[SourceRead]:
    """List the source tensors that are written, each once, with the rows that some rank takes."""
    reads: dict[tuple[int, str], SourceRead] = {}
    adds_one = plan.checkpoint.model.arithmetic.adds_one
    for rank in plan.ranks:
        for canonical, tensor in rank.items():
            is_added_to = adds_one and ("norm." in canonical or "ln_f." in canonical)
            for source_slice in tensor.slices:
                rows = (source_slice.block.start, source_slice.block.stop)
                if source_slice.is_transposed:
                    rows = (0, source_slice.source.tensors[source_slice.name].num_rows)
                read = SourceRead(
                    source_slice.source, source_slice.name, rows, frozenset([tensor.info.dtype]),
                    may_be_zero(canonical, is_added_to=is_added_to or bool(source_slice.addend)),
                )  # fmt: skip
                key = (id(source_slice.source), source_slice.name)
                reads[key] = _join_reads(reads[key], read) if key in reads else read
    return list(reads.values())


def _join_reads(read: SourceRead, other_read: SourceRead) -> SourceRead:
    """Return the read of a tensor for all outputs of two reads."""
    rows = (min(read.rows[0], other_read.rows[0]), max(read.rows[1], other_read.rows[1]))
    strictest = min((read.may_be_zero, other_read.may_be_zero), key=(False, None, True).index)
    return SourceRead(read.source, read.name, rows, read.dtypes | other_read.dtypes, strictest)


def measure_buffers(plan: ConversionPlan, workers: int) -> int:
    """Return the most bytes of tensor data that are in memory at once."""
    largest_bytes = 0
    for rank in plan.ranks:
        for tensor in rank.values():
            if not _is_copied(tensor):
                row_bytes = tensor.info.num_bytes // max(1, tensor.info.num_rows)
                chunk_bytes = max(row_bytes, min(tensor.info.num_bytes, OUTPUT_BLOCK_BYTES))
                largest_bytes = max(largest_bytes, chunk_bytes * _find_widening(tensor))
    return workers * (COPIES_A_WRITER * largest_bytes + 2 * BLOCK_BYTES)


def _find_widening(tensor: PlannedTensor) -> int:
    """Return the width of a tensor's widest source over its own element's, at least 1."""
    dtypes = {
        source_slice.source.tensors[source_slice.name].dtype for source_slice in tensor.slices
    }
    widths = [int(np.dtype(DTYPES[dtype][1]).itemsize) for dtype in (tensor.info.dtype, *dtypes)]
    return max(1, max(widths) // widths[0])


def _is_copied(tensor: PlannedTensor) -> bool:
    """Return whether every byte of a tensor lies in a file unchanged."""
    return type(tensor) is PlannedTensor and all(
        source_slice.locate(source_slice.block, tensor.info.dtype) is not None
        for source_slice in tensor.slices
    )


def measure_hash_seconds(plan: ConversionPlan, workers: int) -> float:
    """Return the time that the hashes alone take, from this machine's speed, measured now."""
    import time

    block = np.zeros(BLOCK_BYTES, np.uint8)
    start_time = time.perf_counter()
    num_rounds = 0
    while (elapsed := time.perf_counter() - start_time) < 0.03:
        hashlib.sha256(block.data).digest()
        num_rounds += 1
    sizes = [measure_tensor_file(get_infos(rank), METADATA) for rank in plan.ranks]
    sizes += [path.stat().st_size for path in plan.source_files]
    # A file is hashed by one thread from its beginning to its end.
    return max(*sizes, sum(sizes) / workers) * elapsed / (num_rounds * BLOCK_BYTES)


class _Stream:
    """One run: its threads, its open files, and what they share."""

    def __init__(
        self,
        plan: ConversionPlan,
        folder: Path,
        workers: int,
        accepted: tuple[bool, bool],
        states: FileStates,
    ) -> None:
        """Begin. accepted: whether weights that are not finite, and zeros, are written."""
        self.plan = plan
        self.folder = folder
        self.workers = workers
        self.allow_nonfinite, self.allow_zeros = accepted
        self.zeros: list[str] = []
        self.is_stopping = threading.Event()  # something failed: all end as soon as they can
        self.is_doomed = threading.Event()  # a flaw was found: only look for others
        self.failure: BaseException | None = None  # the first, which has stopped all others
        self.descriptors: dict[Path, int] = {}
        self.states = states
        self.reads = list_reads(plan)
        self.placed: dict[Path, list[tuple[int, SourceRead]]] = {}
        self.mapped: dict[int, TensorSource] = {}  # what is read of them stays, until let go
        for read in self.reads:
            location = read.source.locate(read.name)
            if location is not None:
                path, offset = location
                self.placed.setdefault(path, []).append((offset, read))
            else:
                self.mapped[id(read.source)] = read.source

    def run(self) -> WriteResult:
        """Write all rank files and read all sources; return the hashes and flaws."""
        sizes = [measure_tensor_file(get_infos(rank), METADATA) for rank in self.plan.ranks]
        total = sum(sizes) + sum(size for size, _ in self.states.values())
        with contextlib.ExitStack() as stack:
            self._open_sources(stack)
            self.advance = stack.enter_context(logs.track("converting", total=total, of_bytes=True))
            # Hashers wait for writers, and writers for nobody, so they cannot lock up. They end in
            # that order too: a hasher that stops waits for the writes that it has given away.
            self.syncer = stack.enter_context(ThreadPoolExecutor(1, "syncer"))
            self.writers = stack.enter_context(ThreadPoolExecutor(self.workers, "writer"))
            hashers = stack.enter_context(ThreadPoolExecutor(self.workers, "hasher"))
            stack.push(self._stop_on_error)
            # A file is one thread's work, so the longest come first: none is left for the end.
            work: list[tuple[int, Callable[..., Any], Any]] = [
                (size, self._write_rank, rank) for rank, size in enumerate(sizes)
            ]
            work += [(self.states[p][0], self._read_source, p) for p in self.plan.source_files]
            work.sort(key=lambda item: -item[0])
            tasks = {key: hashers.submit(self._watch, do, key) for _, do, key in work}
            ranks = {name_rank(rank): tasks[rank] for rank in range(len(sizes))}
            sources = [tasks[path] for path in self.plan.source_files]
            unplaced_task = hashers.submit(self._watch, self._search_unplaced)
            self._await({*tasks.values(), unplaced_task})
        check_states(self.states)
        flaws = add_flaws([*(task.result()[1] for task in sources), unplaced_task.result()])
        if self.is_doomed.is_set():
            return WriteResult({}, [], flaws, self.zeros)
        entries = [
            {"path": str(path), "bytes": self.states[path][0], "sha256": task.result()[0]}
            for path, task in zip(self.plan.source_files, sources, strict=True)
        ]
        hashes = {name: task.result() for name, task in ranks.items()}
        return WriteResult(hashes, entries, flaws, self.zeros)

    def _open_sources(self, stack: contextlib.ExitStack) -> None:
        """Open every source file, to be closed with the stack."""
        for path in (*self.plan.source_files, *self.placed):
            if path not in self.descriptors:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                self.descriptors[path] = descriptor

    def _await(self, tasks: set[Future[Any]]) -> None:
        """Wait for all tasks; raise what failed first in one of them or in a write."""
        while tasks:
            # Woken up now and then, a main thread takes a signal at once.
            finished_tasks, tasks = wait(tasks, timeout=0.2, return_when=FIRST_EXCEPTION)
            for task in finished_tasks:
                task.result()
        if self.failure is not None:  # of a write that nobody waited for any more
            raise self.failure

    def _stop_on_error(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let all tasks and writes end as soon as they look.

        No pool may drop its writes instead: a thread that waits for a dropped write waits for
        ever.
        """
        if kind is not None:
            self.is_stopping.set()

    def _watch(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do a task; let it end quietly where its result is no longer wanted."""
        try:
            self._check()
            return work(*args)
        except StreamStopped:
            return None
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Keep what failed first, and let all else end."""
        if self.failure is None:
            self.failure = error
        self.is_stopping.set()

    def _check(self) -> None:
        """Raise StreamStopped where all tasks are to end."""
        if self.is_stopping.is_set():
            raise StreamStopped

    # ---- Rank files.

    def _write_rank(self, rank: int) -> str:
        """Write a rank's file and return its sha256."""
        path, tensors = self.folder / name_rank(rank), self.plan.ranks[rank]
        header = encode_header(get_infos(tensors), METADATA)
        digest, position, num_unsynced = hashlib.sha256(header), len(header), 0
        buffer = np.empty(BLOCK_BYTES, np.uint8)
        syncs: list[Future[None]] = []
        with path.open("w+b", buffering=0) as file:
            write_at(file.fileno(), header, 0)
            self.advance(position)
            tasks = (functools.partial(self._do, j, file.fileno()) for j in list_writes(tensors))
            try:
                for write in run_ahead(tasks, self.writers, WRITES_AHEAD):
                    if self.is_doomed.is_set():
                        raise StreamStopped
                    assert write.offset == position, path
                    position += write.num_bytes
                    span = (write.offset, position)
                    self._feed(path, file.fileno(), span, digest, None, buffer)
                    num_unsynced += write.num_bytes
                    if num_unsynced >= SYNC_BYTES:  # they go to the disk while others are written
                        self._sync(file.fileno(), syncs)
                        num_unsynced = 0
                for sync in syncs:
                    sync.result()
            finally:  # the file is closed next
                end_all(syncs)
            os.fsync(file.fileno())
        assert position == measure_tensor_file(get_infos(tensors), METADATA), path
        return digest.hexdigest()

    def _sync(self, descriptor: int, syncs: list[Future[None]]) -> None:
        """Let a file's bytes go to the disk; raise the error of an earlier call at once."""
        for sync in filter(Future.done, syncs):
            sync.result()
        syncs.append(self.syncer.submit(os.fdatasync, descriptor))

    def _do(self, write: ShardWrite, descriptor: int) -> ShardWrite:
        """Do a write and return it; let all tasks end where it fails."""
        self._check()
        try:
            self._write_blocks(write, descriptor)
        except StreamStopped:
            raise
        except BaseException as error:
            self._fail(error)  # the write's turn to be waited for may come late, or never
            raise
        return write

    def _write_blocks(self, write: ShardWrite, descriptor: int) -> None:
        """Copy or compute the blocks of a write, one after the other."""
        position = write.offset
        for block in write.blocks:
            if block.origin is not None:
                path, offset = block.origin
                source = self.descriptors[path]
                copy_range(path, source, offset, descriptor, position, block.num_bytes)
            else:
                array = np.ascontiguousarray(block.make())
                assert array.nbytes == block.num_bytes
                write_at(descriptor, array.reshape(-1).view(np.uint8).data, position)
                self._release()
            position += block.num_bytes

    def _release(self) -> None:
        """Let go of the memory of sources that are mapped."""
        for source in self.mapped.values():
            source.release()

    # ---- Source files.

    def _read_source(self, path: Path) -> tuple[str, dict[str, Flaws]]:
        """Hash a source file and search it for flaws, from its beginning to its end."""
        digest, descriptor = hashlib.sha256(), self.descriptors[path]
        buffer = np.empty(BLOCK_BYTES, np.uint8)
        flaws: dict[str, Flaws] = {}
        position = 0
        for offset, read in sorted(self.placed.get(path, []), key=lambda item: item[0]):
            start, stop = (offset + edge for edge in read.span)
            if stop <= position:  # a second tensor of the same bytes
                continue
            is_whole = start == max(start, position)
            start = max(start, position)
            self._feed(path, descriptor, (position, start), digest, None, buffer)
            inspection = Inspection(read)
            self._feed(path, descriptor, (start, stop), digest, inspection, buffer)
            position = stop
            self._judge(inspection, flaws, is_whole=is_whole)
        end = self.states[path][0]
        self._feed(path, descriptor, (position, end), digest, None, buffer)
        return digest.hexdigest(), flaws

    def _feed(
        self, path: Path, descriptor: int, span: tuple[int, int], digest: Any,
        inspection: Inspection | None, buffer: Any,
    ) -> None:  # fmt: skip
        """Read bytes [start, stop) of a file into its digest and the inspection of a tensor."""
        for begin in range(*span, BLOCK_BYTES):
            self._check()
            is_doomed = self.is_doomed.is_set()
            if is_doomed and inspection is None:
                return
            block = buffer[: min(BLOCK_BYTES, span[1] - begin)]
            read_into(descriptor, block, begin, path)
            if not is_doomed:
                digest.update(block.data)
            if inspection is not None:
                self._count(inspection, block)
            self.advance(block.size)

    def _search_unplaced(self) -> dict[str, Flaws]:
        """Search the tensors whose bytes lie in no file as they are, such as a trainer's `.pt`."""
        flaws: dict[str, Flaws] = {}
        for read in self.reads:
            if read.source.locate(read.name) is not None:
                continue
            inspection = Inspection(read)
            num_rows = max(1, read.info.num_rows)
            height = max(1, OUTPUT_BLOCK_BYTES // max(1, read.info.num_bytes // num_rows))
            for top in range(*read.rows, height):
                self._check()
                bottom = min(top + height, read.rows[1])
                rows = read.source.read_block(read.name, top, bottom)
                self._count(inspection, np.ascontiguousarray(rows))
                self._release()
            self._judge(inspection, flaws)
        return flaws

    def _count(self, inspection: Inspection, data: Any) -> None:
        """Add bytes to an inspection; give up the conversion at a flaw that is not accepted."""
        inspection.counter.add(data)
        inspection.finder.add(data)
        if inspection.counter.flaws and not self.allow_nonfinite:
            self.is_doomed.set()

    def _judge(
        self, inspection: Inspection, flaws: dict[str, Flaws], *, is_whole: bool = True
    ) -> None:
        """Note the flaws and zeros of a tensor that was read. is_whole: from its first row on."""
        read = inspection.read
        if inspection.counter.flaws:
            flaws[read.name] = inspection.counter.flaws
        if inspection.finder.is_zero and read.may_be_zero is None:
            logger.warning(
                "%s: %s is all zero, so that it does nothing", read.source.path, read.name
            )
        hole = "all of it" if inspection.finder.is_zero and read.may_be_zero is False else None
        if is_whole and hole is None:
            hole = find_hole(inspection.finder, read.source, read.name, read.rows[0])
        if hole is not None:
            self.zeros.append(f"{read.name} ({hole})")
            if not self.allow_zeros:
                self.is_doomed.set()


def add_flaws(found_flaws: Iterable[dict[str, Flaws]]) -> dict[str, Flaws]:
    """Return the flaws of each tensor, which the files of several ranks may have."""
    sums: dict[str, Flaws] = {}
    for flaws in found_flaws:
        for name, flaw in flaws.items():
            sums[name] = sums.get(name, Flaws()) + flaw
    return sums


def run_ahead(tasks: Iterable[Callable[[], T]], executor: Executor, num_ahead: int) -> Iterator[T]:
    """Yield the tasks' results in order while the next few are being worked on."""
    futures: deque[Future[T]] = deque()
    try:
        for task in tasks:
            futures.append(executor.submit(task))
            if len(futures) > num_ahead:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:  # the file that they write to is closed next
        end_all(futures)


def end_all(futures: Collection[Future[Any]]) -> None:
    """Cancel what has not begun and wait for the rest, whether it succeeds or not."""
    for future in futures:
        future.cancel()
    wait(futures)


def copy_range(
    path: Path, source: int, offset: int, target: int, position: int, num_bytes: int
) -> None:
    """Copy bytes from one open file to another, inside the kernel where it can."""
    copy = getattr(os, "copy_file_range", None)
    while copy is not None and num_bytes:
        try:
            copied = copy(source, target, num_bytes, offset, position)
        except OSError as error:
            if error.errno not in CANNOT_COPY:
                raise
            break
        if copied == 0:  # the end of the source, or a file system that pretends it is
            break
        offset, position, num_bytes = offset + copied, position + copied, num_bytes - copied
    buffer = np.empty(min(num_bytes, BLOCK_BYTES), np.uint8)
    for begin in range(0, num_bytes, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, num_bytes - begin)]
        read_into(source, block, offset + begin, path)
        write_at(target, block.data, position + begin)


def write_at(descriptor: int, data: Any, offset: int) -> None:
    """Write all of the data at an offset."""
    view = memoryview(data)
    while view:
        num_bytes = os.pwrite(descriptor, view, offset)
        view, offset = view[num_bytes:], offset + num_bytes


def get_states(plan: ConversionPlan, opened_states: FileStates | None = None) -> FileStates:
    """Return each source's state, as it was when the plan opened it; refuse one that is another."""
    states = {
        path: (opened_states or {}).get(path) or describe_state(path.stat())
        for path in plan.source_files
    }
    check_states(states)
    return states
