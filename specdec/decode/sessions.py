"""Sessions: what rows of the cache hold goes to disk by blocks, and comes back after a restart.

A block has the values that a `CachedTensor` has for `BLOCK_TOKENS` tokens of a text: the target's
keys and values, or what a drafter keeps. Its key is made of all tokens up to its end, and of all
that the values depend on besides. A hybrid's states are written after prompts and texts, with the
values after the last whole block. Blocks are copied between two steps, and written by a thread of
their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.decode.drafters.base import Drafter
from specdec.decode.requests import ActiveRequest
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import CachedTensor, KVCache
from specdec.files.reading import Array
from specdec.files.session_files import BlockName, SessionFolder
from specdec.system import logs

logger = logs.get_logger(__name__)
BLOCK_TOKENS = 64
LEAST_TOKENS = 16  # more than the cache holds, from which on a text is taken from the disk
KEY_DIGITS = 40
# Copies that wait to be written. Requests that run wait with further ones; of those that have
# ended, some times as much may wait, and the rest is not kept.
WAITING_BYTES = 256 << 20
MOST_WAITING = 8


class TextKeys:
    """Keys of a growing text's blocks; each depends on all tokens before its end."""

    def __init__(self, seed: bytes) -> None:
        """seed: of all that the numbers depend on besides the text."""
        self._sums = [seed]

    def extend(self, tokens: Sequence[int]) -> int:
        """Take the text so far, which may have grown; return the number of its whole blocks."""
        num_blocks = len(tokens) // BLOCK_TOKENS
        for block in range(len(self._sums) - 1, num_blocks):
            block_tokens = tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
            self._sums.append(_hash(self._sums[-1], _encode(block_tokens)))
        return num_blocks

    def name(self, tensor_name: str, num_blocks: int, tokens: Sequence[int] = ()) -> str:
        """Return the key of what a tensor has after so many blocks and some tokens."""
        digest = _hash(self._sums[num_blocks], tensor_name.encode() + b"\0" + _encode(tokens))
        return digest.hex()[:KEY_DIGITS]


def _hash(seed: bytes, data: bytes) -> bytes:
    return hashlib.sha256(seed + data).digest()


def _encode(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, "<i4").tobytes()


@dataclasses.dataclass
class _Row:
    """A request's row. counts: of each cached tensor, the blocks that are kept; ends: lengths."""

    request: ActiveRequest
    keys: TextKeys
    used_at: float
    counts: list[int]
    ends: set[int] = dataclasses.field(default_factory=set)

    @property
    def text(self) -> list[int]:
        """Tokens of the prompt and of the output so far."""
        return [*self.request.request.input_ids, *self.request.output_ids]


@dataclasses.dataclass(frozen=True)
class _Stop:
    """Place where a text can go on: after so many blocks, and after an end of a text if any."""

    num_blocks: int
    end: BlockName | None = None

    @property
    def length(self) -> int:
        """Number of tokens before it."""
        return self.num_blocks * BLOCK_TOKENS + (self.end.num_tail if self.end else 0)


@dataclasses.dataclass(frozen=True)
class _Task:
    """A block to be written, or without arrays, keys to be touched."""

    used_at: float
    keys: Sequence[str] = ()
    name: BlockName | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Sequence[memoryview] = ()
    num_tokens: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(map(len, self.arrays))


class Sessions:
    """Sessions of an engine in a folder; one thread at a time calls it.

    num_restored_tokens: of prompts, taken from the disk. num_written_tokens: whose keys and values
    were written.
    """

    def __init__(self, folder: SessionFolder, identity: Mapping[str, Any]) -> None:
        """identity: of the engine, as JSON has it: all that a text's numbers depend on."""
        self.folder = folder
        self.num_restored_tokens = self.num_written_tokens = 0
        self._identity = json.dumps(identity, sort_keys=True).encode()
        self._rows: dict[int, _Row] = {}
        # Of the prompt that was counted last: it is counted at each step until it begins.
        self._prompt_keys: tuple[Sequence[int], TextKeys] | None = None
        self._tensors: list[CachedTensor] = []
        self._waiting_keys: set[str] = set()
        self._num_waiting_bytes = 0
        self._mutex = threading.Lock()  # of these two
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="sessions", daemon=True)
        self._thread.start()

    def attach(self, decoder: Decoder, cache: KVCache, drafter: Drafter) -> None:
        """Serve a new batch, whose caches are allocated."""
        self._decoder, self._cache, self._drafter = decoder, cache, drafter
        self._tensors = [cache.get_cached_tensor("target"), *drafter.list_cached_tensors()]
        self._rows, self._prompt_keys = {}, None
        forms = [
            (tensor.name, str(tensor.values.dtype), *tensor.view(0, 0, 1).shape)
            for tensor in self._tensors
        ]
        self._seed = _hash(self._identity, json.dumps(forms[:1]).encode())
        # A drafter's blocks are of its own sizes, too.
        self._tensor_names = [json.dumps([index, *form]) for index, form in enumerate(forms)]

    def _make_keys(self, prompt: Sequence[int]) -> TextKeys:
        rotary = self._decoder.rotary
        start = rotary.find_start(len(prompt)) if rotary is not None else 0
        return TextKeys(_hash(self._seed, b"long" if start else b""))

    def _take_keys(self, prompt: Sequence[int]) -> TextKeys:
        """Return the keys of a prompt: those by which it was counted, or new ones."""
        counted, self._prompt_keys = self._prompt_keys, None
        if counted is not None and counted[0] is prompt:
            return counted[1]
        return self._make_keys(prompt)

    def count_kept(self, prompt: Sequence[int]) -> int:
        """Count a prompt's first tokens that the disk has, without the prompt's last."""
        keys = self._take_keys(prompt)
        self._prompt_keys = prompt, keys
        stop = self._find_stop(keys, prompt[:-1])
        return stop.length if stop is not None else 0

    def _find_stop(self, keys: TextKeys, text: Sequence[int]) -> _Stop | None:
        """Find the longest beginning of a text whose blocks are all there."""
        most_blocks, num_blocks = keys.extend(text), 0
        while num_blocks < most_blocks and all(
            self._name_block(keys, index, num_blocks, text) in self.folder
            for index, tensor in enumerate(self._tensors) if tensor.is_needed
        ):  # fmt: skip
            num_blocks += 1
        if self._cache.states is None:
            return _Stop(num_blocks) if num_blocks else None
        for depth in range(num_blocks, -1, -1):
            start = depth * BLOCK_TOKENS
            for end in self.folder.list_ends(keys.name("end", depth)):
                tail = text[start : start + end.num_tail]
                if len(tail) == end.num_tail and end.key == keys.name("end", depth, tail):
                    return _Stop(depth, end)
        return None

    def _name_block(
        self, keys: TextKeys, index: int, block: int, text: Sequence[int]
    ) -> str:  # fmt: skip
        """Return the key of a tensor's block of a text, which is long enough."""
        end = (block + 1) * BLOCK_TOKENS
        ahead = text[end : end + self._tensors[index].num_ahead]
        return keys.name(self._tensor_names[index], block + 1, ahead)

    def begin(self, request: ActiveRequest, num_cached: int) -> int:
        """Follow a request's row, which holds so many tokens of its prompt; return how many then.

        More are put into the row where the disk has more.
        """
        prompt, index = request.request.input_ids, request.row
        row = _Row(request, self._take_keys(prompt), time.time(), [0] * len(self._tensors))
        self._rows[index] = row
        text = prompt[:-1]
        num_blocks = row.keys.extend(text)
        used_keys = [
            self._name_block(row.keys, number, block, prompt)
            for block in range(num_blocks) for number in range(len(self._tensors))
        ]  # fmt: skip
        self._tasks.put(_Task(row.used_at, used_keys))
        if request.request.wants_prompt_logprobs:
            return num_cached
        self._decoder.start_row(self._cache, index, len(prompt))
        num_cached = min(num_cached, int(self._cache.past_lens[index]))
        while (stop := self._find_stop(row.keys, text)) is not None:
            if stop.length < num_cached + LEAST_TOKENS:
                break
            try:
                self._restore(row, stop, num_cached)
            except KeyError:  # a damaged block, which is no longer there
                continue
            self.num_restored_tokens += stop.length - num_cached
            return stop.length
        return num_cached

    def _restore(self, row: _Row, stop: _Stop, num_cached: int) -> None:
        """Put the values before a stop into a row; KeyError where a block is damaged."""
        index, text = row.request.row, row.request.request.input_ids
        first_block = num_cached // BLOCK_TOKENS
        fields, tails = self.folder.read(stop.end.key) if stop.end is not None else ({}, [])
        for number, tensor in enumerate(self._tensors):
            if tensor.is_needed:
                for block in range(first_block, stop.num_blocks):
                    self._read_block(row, number, block, text)
        if stop.end is not None:
            self._restore_end(index, stop, stop.end, fields, tails)
        self._cache.past_lens[index] = stop.length
        self._drafter.resume(index, stop.length)
        for number, tensor in enumerate(self._tensors):
            if not tensor.is_needed:
                self._restore_further(row, number, stop.num_blocks)

    def _restore_end(
        self, index: int, stop: _Stop, end: BlockName, fields: Mapping[str, Any],
        arrays: Sequence[memoryview],
    ) -> None:  # fmt: skip
        """Put the end of a hybrid's text into a row; KeyError where it is none of such a text."""
        states, num_state = self._cache.states, fields.get("num_state")
        assert states is not None
        if type(num_state) is not int or not 0 <= num_state <= stop.length:
            raise self.folder.refuse(end.key)
        snapshot = states.make_snapshot(stop.length, num_state)
        start = stop.num_blocks * BLOCK_TOKENS
        tails = [
            tensor.view(index, start, stop.length) for tensor in self._tensors if tensor.is_needed
        ]
        self._fill_all(end.key, [*tails, snapshot[1], snapshot[2], *snapshot[3]], arrays)
        states.restore(index, stop.length, snapshot)

    def _fill_all(
        self, key: str, targets: Sequence[Tensor], arrays: Sequence[memoryview]
    ) -> None:  # fmt: skip
        """Write a block's arrays over tensors; KeyError where they are of other sizes."""
        if [len(array) for array in arrays] != [x.numel() * x.element_size() for x in targets]:
            raise self.folder.refuse(key)
        for target, array in zip(targets, arrays, strict=True):
            _fill(target, array)

    def _restore_further(self, row: _Row, number: int, num_blocks: int) -> None:
        """Put values that a text can do without into a row, as far as the disk has them."""
        index, text, lens = (
            row.request.row,
            row.request.request.input_ids,
            self._tensors[number].lens,
        )
        block = int(lens[index]) // BLOCK_TOKENS
        while block < num_blocks:
            try:
                self._read_block(row, number, block, text)
            except KeyError:
                return
            block += 1
            lens[index] = block * BLOCK_TOKENS

    def _read_block(self, row: _Row, number: int, block: int, text: Sequence[int]) -> None:
        key = self._name_block(row.keys, number, block, text)
        _, arrays = self.folder.read(key)
        start = block * BLOCK_TOKENS
        target = self._tensors[number].view(row.request.row, start, start + BLOCK_TOKENS)
        self._fill_all(key, [target], arrays)

    def note(self, requests: Iterable[ActiveRequest]) -> None:
        """Keep what a step has made whole of these requests' texts."""
        for request in requests:
            row = self._rows.get(request.row)
            if row is not None and row.request is request:
                self._keep(row, WAITING_BYTES)

    def finish(self, request: ActiveRequest) -> None:
        """Keep what there is of a request that has ended and still has its row."""
        row = self._rows.pop(request.row, None)
        if row is None or row.request is not request:
            return
        self._drafter.settle(request.row)
        if not self._keep(row, MOST_WAITING * WAITING_BYTES):
            logger.warning("--session-dir: the disk is too slow: a text's last blocks are not kept")
        if self._cache.states is not None:
            self._keep_end(row, self._count_tokens(row))

    def _count_tokens(self, row: _Row) -> int:
        """Count the tokens of a row's text whose keys and values the cache has."""
        request = row.request
        length = len(request.request.input_ids) + len(request.output_ids)
        return min(int(self._cache.past_lens[request.row]), length)

    def _keep(self, row: _Row, most_bytes: int) -> bool:
        """Copy what is whole and was not kept yet; return whether there was room for all."""
        index, text_len = row.request.row, self._count_tokens(row)
        counts = [
            (min(int(tensor.lens[index]), text_len) - tensor.num_ahead) // BLOCK_TOKENS
            for tensor in self._tensors
        ]
        states = self._cache.states
        snapshots = states.list_snapshots(index) if states is not None else []
        has_more = any(count > num for count, num in zip(counts, row.counts, strict=True))
        if not has_more and row.ends.issuperset(snapshots):
            return True
        text = row.text
        row.keys.extend(text)
        for number, tensor in enumerate(self._tensors):
            for block in range(row.counts[number], counts[number]):
                if self._num_waiting_bytes > most_bytes:
                    return False
                key = self._name_block(row.keys, number, block, text)
                start = block * BLOCK_TOKENS
                entries = tensor.view(index, start, start + BLOCK_TOKENS)
                num_tokens = BLOCK_TOKENS if number == 0 else 0
                self._put(BlockName(key, block), row, {}, [entries], num_tokens)
                row.counts[number] = block + 1
        row.ends |= {length for length in snapshots if self._keep_end(row, length)}
        return True

    def _keep_end(self, row: _Row, length: int) -> bool:
        """Keep a hybrid's state after so many tokens; return whether it is, or cannot be."""
        states, index = self._cache.states, row.request.row
        assert states is not None
        snapshot = states.get_snapshot(index, length)
        needed_tensors = [tensor for tensor in self._tensors if tensor.is_needed]
        if snapshot is None or length > self._count_tokens(row):
            return True
        if any(tensor.lens[index] < length for tensor in needed_tensors):
            return False  # a drafter has not read its tokens
        text = row.text[:length]
        depth = row.keys.extend(text)
        tail = text[depth * BLOCK_TOKENS :]
        name = BlockName(
            row.keys.name("end", depth, tail), depth, row.keys.name("end", depth), len(tail)
        )
        num_state, state, window, log = snapshot
        tails = [tensor.view(index, depth * BLOCK_TOKENS, length) for tensor in needed_tensors]
        self._put(name, row, {"num_state": num_state}, [*tails, state, window, *log])
        return True

    def _put(
        self, name: BlockName, row: _Row, fields: Mapping[str, Any], tensors: Sequence[Tensor],
        num_tokens: int = 0,
    ) -> None:  # fmt: skip
        """Copy a block for the thread that writes, unless it is there or on its way."""
        if name.key in self.folder or name.key in self._waiting_keys:
            return
        arrays = [_copy_bytes(tensor) for tensor in tensors]
        task = _Task(row.used_at, (), name, fields, arrays, num_tokens)
        with self._mutex:
            self._waiting_keys.add(name.key)
            self._num_waiting_bytes += task.num_bytes
        self._tasks.put(task)

    def _write_all(self) -> None:
        """Write blocks as they come, until `close`; the body of the thread."""
        while (task := self._tasks.get()) is not None:
            try:
                self._write(task)
            except Exception as error:  # noqa: BLE001 - a server goes on without its sessions
                logger.error("--session-dir: %s: %s", type(error).__name__, error, exc_info=error)

    def _write(self, task: _Task) -> None:
        if task.name is None:
            self.folder.touch(task.keys, task.used_at)
            return
        try:
            if self.folder.write(task.name, task.fields, task.arrays, task.used_at):
                self.num_written_tokens += task.num_tokens
        finally:
            with self._mutex:
                self._waiting_keys.discard(task.name.key)
                self._num_waiting_bytes -= task.num_bytes

    def close(self) -> None:
        """Write what waits, and let another process have the folder."""
        self._tasks.put(None)
        self._thread.join()
        self.folder.close()


def _copy_bytes(tensor: Tensor) -> memoryview:
    """Return the numbers of a tensor on any device, copied."""
    kept_numbers = torch.empty(tensor.shape, dtype=tensor.dtype)
    kept_numbers.copy_(tensor)
    array: Array = kept_numbers.flatten().view(torch.uint8).numpy()
    return memoryview(array.data)


def _fill(target: Tensor, array: memoryview) -> None:
    """Write the bytes of an array over a tensor of its size."""
    if target.numel():
        numbers = torch.frombuffer(array, dtype=torch.uint8).view(target.dtype)
        target.copy_(numbers.view(target.shape))
