"""What layers of linear attention keep of each row, and how a rejected draft leaves no trace in it.

A state cannot be cut back to an earlier token. So a step writes into it only what is certain: the
root of a draft and the tokens of prompts. Of every drafted token it keeps what its update is made
of: key, delta and decay, and the input of the convolution. The next step applies the updates of
those that were accepted, which are the same to the last bit as if they had been decoded one by one,
while it reads the state anyway. So nothing is copied, and nothing is computed twice.

Legend: L layers of linear attention, R cache rows, C channels of the convolution, P logged tokens,
K key heads, V value heads, I and J their sizes, N runs.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.engine.tree import IntArray
from specdec.model.linear_attention import LinearAttention

MAX_PLACES = 3  # kept of a row, each as large as the row's state
# A row's state after a token of its text: how many tokens are in it, the state [L, V, I, J], the
# window [L, taps - 1, C], and of each kind what is logged of the tokens behind those.
Place = tuple[int, Tensor, Tensor, list[Tensor]]


class Runs(NamedTuple):
    """The tokens of a step, one run for each cache row, all [N].

    rows: of the cache. firsts: each run's first token, counted through the rows of the step.
    counts: its tokens. kept: how many of them, from the first, are certain. folded: logged tokens
    of the step before that were accepted.
    """

    rows: IntArray
    firsts: IntArray
    counts: IntArray
    kept: IntArray
    folded: IntArray


class LinearStates:
    """The states of all rows, what the convolutions still read, and what was drafted last.

    state: float32 [L, R, V, I, J]. window: the inputs of the newest tokens, [L, R, taps - 1, C].
    Of logged tokens: keys [L, R, P, K, I], deltas [L, R, P, V, J] and decays [L, R, P, V], float32,
    and inputs [L, R, P, C].
    """

    def __init__(
        self, sizes: LinearAttention, num_layers: int, num_rows: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """sizes: of one rank; num_layers: of linear attention."""
        self.sizes, shape = sizes, (num_layers, num_rows)
        keys, values = sizes.num_key_heads, sizes.num_value_heads
        heads = (values, sizes.key_size, sizes.value_size)
        self.state = torch.zeros((*shape, *heads), device=device)
        width = (sizes.num_taps - 1, sizes.num_channels)
        self.window = torch.zeros((*shape, *width), dtype=dtype, device=device)
        logged = (keys, sizes.key_size), (values, sizes.value_size), (values,)
        self.log = [self.state.new_zeros((*shape, 0, *own)) for own in logged]
        self.log.append(self.window[:, :, :0])
        self.lens: IntArray = np.zeros(num_rows, np.int64)
        self.num_logged: IntArray = np.zeros(num_rows, np.int64)
        self._places: list[dict[int, Place]] = [{} for _ in range(num_rows)]
        self._wanted: list[set[int]] = [set() for _ in range(num_rows)]
        # What was done since the last step, for other ranks: source, row and place of each copy,
        # with a source of -1 where a place was kept.
        self.moves: list[int] = []
        # The runs of the step that was begun last, as kernels take them.
        self.table: IntArray = np.zeros((0, len(Runs._fields)), np.int64)

    def begin(
        self, rows: IntArray, positions: IntArray, past: IntArray, counts: IntArray | None,
        kept: IntArray | None,
    ) -> Runs:  # fmt: skip
        """The runs of a step, which may now be computed; arguments as in `Step`.

        Rows in which one text goes on are joined. past: [B], positions that each row sees.
        """
        self.moves.clear()
        batch, size = positions.shape
        counts = np.full(batch, size) if counts is None else counts
        kept = np.zeros(batch, np.int64) if kept is None else kept
        offsets = positions - past[:, None] - np.arange(size)
        assert not (offsets * (np.arange(size) < counts[:, None])).any(), "a state follows one text"
        starts = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
        assert len(set(rows[starts].tolist())) == len(starts), "a text's parts lie side by side"
        last = np.append(starts[1:], len(rows)) - 1
        runs = Runs(
            rows=rows[starts],
            firsts=starts * size,
            counts=(last - starts) * size + counts[last],
            kept=np.add.reduceat(kept, starts),
            folded=past[starts] - self.lens[rows[starts]],
        )
        assert (counts <= size).all()
        assert ((0 <= runs.kept) & (runs.kept <= runs.counts)).all()
        assert (0 <= runs.folded).all()
        assert (runs.folded <= self.num_logged[runs.rows]).all(), "no state for what is committed"
        self.table = np.ascontiguousarray(np.stack(runs, axis=1), np.int64)
        more = int((runs.counts - runs.kept).max(initial=0)) - self.log[0].shape[2]
        if more > 0:  # room for more logged tokens; what is logged stays
            self.log = [pad(part, (0, 0) * (part.dim() - 3) + (0, more)) for part in self.log]
        return runs

    def finish(self, runs: Runs) -> None:
        """Note what a step has written."""
        self.lens[runs.rows] += runs.folded + runs.kept
        self.num_logged[runs.rows] = runs.counts - runs.kept

    def find_place(self, row: int, length: int, past: int) -> int:
        """The most tokens, up to `length`, behind which a row's text can go on.

        past: tokens of the row that are committed.
        """
        if self.lens[row] <= past and self.lens[row] <= length:
            return min(length, past)
        return max((place for place in self._places[row] if place <= length), default=0)

    def want(self, row: int, places: Collection[int]) -> bool:
        """Keep a row's state when so many tokens of it are committed; whether it is or will be."""
        self._wanted[row] |= {place for place in places if place > self.lens[row]}
        return set(places) <= self._wanted[row] | self._places[row].keys()

    def find_stop(self, row: int) -> int:
        """The next of a row's places at which its state is kept, far away where there is none."""
        return min((p for p in self._wanted[row] if p > self.lens[row]), default=sys.maxsize)

    def reach(self, row: int, past: int) -> None:
        """Keep a row's state if that is wanted behind `past` tokens."""
        if past in self._wanted[row]:
            self._wanted[row].remove(past)
            self.keep(row, past)

    def keep(self, row: int, place: int) -> None:
        """Keep a row's state behind `place` tokens; what was used longest ago makes room."""
        places = self._places[row]
        lens, state, window, log = self._take(row, place)
        places[place] = lens, state.clone(), window.clone(), [part.clone() for part in log]
        if len(places) > MAX_PLACES:
            del places[next(iter(places))]
        self.moves += [-1, row, place]

    def copy(self, source: int, row: int, place: int) -> None:
        """Let a row go on behind `place` tokens of another, or of itself, as `find_place` told."""
        places = self._places[source]
        self._wanted[row] = set()
        self.moves += [source, row, place]
        if place == 0:
            self.state[:, row], self.window[:, row] = 0, 0
            self.lens[row] = self.num_logged[row] = 0
            self._places[row] = {}
            return
        is_live = self.lens[source] <= place <= self.lens[source] + self.num_logged[source]
        if not is_live:
            places[place] = places.pop(place)  # used last
        lens, state, window, log = self._take(source, place) if is_live else places[place]
        if source != row or not is_live:
            self.state[:, row], self.window[:, row] = state, window
            for whole, part in zip(self.log, log, strict=True):
                whole[:, row, : part.shape[1]] = part
        self.lens[row], self.num_logged[row] = lens, place - lens
        self._places[row] = {p: kept for p, kept in places.items() if p <= place}

    def repeat(self, moves: Sequence[int]) -> None:
        """Do what another rank's states noted as `moves`."""
        for source, row, place in zip(moves[::3], moves[1::3], moves[2::3], strict=True):
            if source < 0:
                self.keep(row, place)
            else:
                self.copy(source, row, place)

    def _take(self, row: int, place: int) -> Place:
        lens = int(self.lens[row])
        log = [part[:, row, : place - lens] for part in self.log]
        return lens, self.state[:, row], self.window[:, row], log
