"""States of layers without keys and values for each row; a rejected draft leaves no trace in them.

A state cannot be cut back to an earlier token. So a step writes into it only what is certain: the
root of a draft and the tokens of prompts. Of every drafted token it keeps what its update is made
of: key, delta and decay, and the input of the convolution. The next step applies the updates of
those that were accepted, which are the same to the last bit as if they had been decoded one by one,
while it reads the state anyway. So nothing is copied, and nothing is computed twice. A short
convolution's state is the inputs of the newest tokens alone.

Legend: L layers of linear attention or short convolutions, R cache rows, C channels of the
convolution, P logged tokens, K key heads, V value heads, I and J their sizes, N runs.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.engine.transfers import to_device
from specdec.engine.tree import IntArray
from specdec.model.config import Recurrence

MAX_SNAPSHOTS = 3  # of a row, each as large as the row's state
# A copy of a row's state: how many tokens are in it, the state [L, V, I, J], the window
# [L, taps - 1, C], and the logs of the tokens after those, by kind.
Snapshot = tuple[int, Tensor, Tensor, list[Tensor]]


class Runs(NamedTuple):
    """The tokens of a step, one run for each cache row, all [N].

    rows: of the cache. first_tokens: each run's first token, counted through the rows of the step.
    counts: its tokens. certain: how many of them, from the first, are certain to be committed.
    folded: how many logged tokens of the step before were accepted.
    """

    rows: IntArray
    first_tokens: IntArray
    counts: IntArray
    certain: IntArray
    folded: IntArray


class LinearStates:
    """The states of all rows, what the convolutions still read, and what was drafted last.

    state: float32 [L, R, V, I, J]. window: the inputs of the newest tokens, [L, R, taps - 1, C].
    Of logged tokens: keys [L, R, P, K, I], deltas [L, R, P, V, J] and decays [L, R, P, V], float32,
    and inputs [L, R, P, C]. Short convolutions have the window and the inputs alone.
    """

    def __init__(
        self, sizes: Recurrence, num_layers: int, num_rows: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """sizes: of one rank; num_layers: of those that have a state."""
        self.sizes, shape = sizes, (num_layers, num_rows)
        self.state = torch.zeros((*shape, *sizes.state_shape), device=device)
        width = (sizes.num_taps - 1, sizes.num_channels)
        self.window = torch.zeros((*shape, *width), dtype=dtype, device=device)
        self.log = [
            self.state.new_zeros((*shape, 0, *logged_shape)) for logged_shape in sizes.logged_shapes
        ]
        self.log.append(self.window[:, :, :0])
        self.lens: IntArray = np.zeros(num_rows, np.int64)
        self.num_logged: IntArray = np.zeros(num_rows, np.int64)
        # Copies of each row's state, by the number of tokens before them; and those to be made.
        self._snapshots: list[dict[int, Snapshot]] = [{} for _ in range(num_rows)]
        self._requested: list[set[int]] = [set() for _ in range(num_rows)]
        # Copies since the last step, for other ranks: source, row and length of each, with a source
        # of -1 for a snapshot.
        self.moves: list[int] = []
        # The runs of the step that was begun last, as kernels take them.
        self.table: IntArray = np.zeros((0, len(Runs._fields)), np.int64)

    def begin(
        self, rows: IntArray, positions: IntArray, past: IntArray, counts: IntArray | None,
        certain_counts: IntArray | None,
    ) -> Runs:  # fmt: skip
        """Return the runs of a step, which may now be computed; arguments as in `Step`.

        Rows in which one text goes on are joined. past: [B], positions that each row sees.
        """
        self.moves.clear()
        batch, size = positions.shape
        counts = np.full(batch, size) if counts is None else counts
        if certain_counts is None:
            certain_counts = np.zeros(batch, np.int64)
        offsets = positions - past[:, None] - np.arange(size)
        assert not (offsets * (np.arange(size) < counts[:, None])).any(), "a state follows one text"
        starts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
        assert len(set(rows[starts].tolist())) == len(starts), "a text's parts lie side by side"
        last_rows = np.append(starts[1:], len(rows)) - 1
        runs = Runs(
            rows=rows[starts],
            first_tokens=starts * size,
            counts=(last_rows - starts) * size + counts[last_rows],
            certain=np.add.reduceat(certain_counts, starts),
            folded=past[starts] - self.lens[rows[starts]],
        )
        assert (counts <= size).all()
        assert ((0 <= runs.certain) & (runs.certain <= runs.counts)).all()
        assert (0 <= runs.folded).all()
        assert (runs.folded <= self.num_logged[runs.rows]).all(), "no state for what is committed"
        self.table = np.ascontiguousarray(np.stack(runs, axis=1), np.int64)
        self._make_room(int((runs.counts - runs.certain).max(initial=0)))
        return runs

    def _make_room(self, num_logged: int) -> None:
        """Make room for so many logged tokens of each row; what is logged stays."""
        num_more = num_logged - self.log[-1].shape[2]
        if num_more > 0:
            self.log = [
                pad(kind_log, (0, 0) * (kind_log.dim() - 3) + (0, num_more))
                for kind_log in self.log
            ]

    def finish(self, runs: Runs) -> None:
        """Note what a step has written."""
        self.lens[runs.rows] += runs.folded + runs.certain
        self.num_logged[runs.rows] = runs.counts - runs.certain

    def find_length(self, row: int, length: int, past: int) -> int:
        """Find the most tokens, up to `length`, after which a row's text can go on.

        past: number of the row's committed tokens.
        """
        if self.lens[row] <= past and self.lens[row] <= length:
            return min(length, past)
        return max((n for n in self._snapshots[row] if n <= length), default=0)

    def request_snapshots(self, row: int, lengths: Collection[int]) -> bool:
        """Copy a row's state when so many tokens of it are committed.

        Returns whether there is a snapshot after each of the lengths, or will be.
        """
        self._requested[row] |= {length for length in lengths if length > self.lens[row]}
        return set(lengths) <= self._requested[row] | self._snapshots[row].keys()

    def find_stop(self, row: int) -> int:
        """Return the length at which a row's next snapshot is due; a huge one if none is."""
        return min((n for n in self._requested[row] if n > self.lens[row]), default=sys.maxsize)

    def reach(self, row: int, past: int) -> None:
        """Copy a row's state if a snapshot was requested after `past` tokens."""
        if past in self._requested[row]:
            self._requested[row].remove(past)
            self.take_snapshot(row, past)

    def take_snapshot(self, row: int, length: int) -> None:
        """Copy a row's state after `length` tokens in place of the least recently used copy."""
        snapshots = self._snapshots[row]
        lens, state, window, logs = self._view(row, length)
        snapshots[length] = lens, state.clone(), window.clone(), [log.clone() for log in logs]
        if len(snapshots) > MAX_SNAPSHOTS:
            del snapshots[next(iter(snapshots))]
        self.moves += [-1, row, length]

    def copy(self, source: int, row: int, length: int) -> None:
        """Let a row go on after `length` tokens of another row, or of itself.

        length: of `find_length`.
        """
        snapshots = self._snapshots[source]
        self._requested[row] = set()
        self.moves += [source, row, length]
        if length == 0:
            self.state[:, row], self.window[:, row] = 0, 0
            self.lens[row] = self.num_logged[row] = 0
            self._snapshots[row] = {}
            return
        is_live = self._is_live(source, length)
        if not is_live:
            snapshots[length] = snapshots.pop(length)  # used last
        snapshot = self._view(source, length) if is_live else snapshots[length]
        if source != row or not is_live:
            self._put(row, snapshot)
        self.lens[row], self.num_logged[row] = snapshot[0], length - snapshot[0]
        self._snapshots[row] = {n: snapshot for n, snapshot in snapshots.items() if n <= length}

    def _is_live(self, row: int, length: int) -> bool:
        """Return whether a row's present state tells that after so many tokens."""
        return bool(self.lens[row] <= length <= self.lens[row] + self.num_logged[row])

    def _put(self, row: int, snapshot: Snapshot) -> None:
        _, self.state[:, row], self.window[:, row], logs = snapshot
        for row_logs, log in zip(self.log, logs, strict=True):
            row_logs[:, row, : log.shape[1]] = log

    def list_snapshots(self, row: int) -> list[int]:
        """Return the numbers of tokens after which a row's states are kept."""
        return [*self._snapshots[row]]

    def get_snapshot(self, row: int, length: int) -> Snapshot | None:
        """Return a row's state after so many tokens, which is not copied; None if there is none.

        The logs of the present state are those of the tokens before `length` alone.
        """
        kept_snapshot = self._snapshots[row].get(length)
        if kept_snapshot is None and self._is_live(row, length):
            return self._view(row, length)
        return kept_snapshot

    def make_snapshot(self, length: int, num_state: int) -> Snapshot:
        """Make an empty snapshot of so many tokens, `num_state` of which are in its state."""
        logs = [
            log.new_empty((log.shape[0], length - num_state, *log.shape[3:])) for log in self.log
        ]
        state, window = torch.empty_like(self.state[:, 0]), torch.empty_like(self.window[:, 0])
        return num_state, state, window, logs

    def restore(self, row: int, length: int, snapshot: Snapshot) -> None:
        """Let a row go on after so many tokens by a state that was kept elsewhere, also later."""
        self._make_room(length - snapshot[0])
        self._put(row, snapshot)
        self.lens[row], self.num_logged[row] = snapshot[0], length - snapshot[0]
        self.take_snapshot(row, length)

    def repeat(self, moves: Sequence[int]) -> None:
        """Do what another rank's states noted as `moves`."""
        for source, row, length in zip(moves[::3], moves[1::3], moves[2::3], strict=True):
            if source < 0:
                self.take_snapshot(row, length)
            else:
                self.copy(source, row, length)

    def _view(self, row: int, length: int) -> Snapshot:
        """Return the present state of a row after `length` tokens, which is not copied."""
        lens = int(self.lens[row])
        logs = [log[:, row, : length - lens] for log in self.log]
        return lens, self.state[:, row], self.window[:, row], logs


def take_tokens(tokens: Tensor, starts: IntArray, count: int) -> Tensor:
    """Take `count` tokens of each row [n, ..., C] from `starts` on."""
    token_index = to_device(starts[:, None] + np.arange(count), tokens.device)
    return tokens[torch.arange(len(tokens), device=tokens.device)[:, None], token_index]
