"""One forward pass: which tokens, where, and what each of them sees. Legend: B rows, T tokens."""

from __future__ import annotations

import dataclasses

from specdec.engine.tree import BoolArray, IntArray


@dataclasses.dataclass(frozen=True)
class Step:
    """One forward pass: row b of the step is row rows[b] of the cache.

    tokens, positions: [B, T]; tree_mask: [B, T, T], true where a token sees a token of this step;
    every token sees all committed positions of its row. Padding tokens see themselves. A mask of
    more columns, [B, T, N], begins with those of earlier steps that were not committed.
    past: [B], positions that each row sees, where these are not what is committed: of a text that
    goes on in several rows of the step, each sees those before it.
    wanted: [B, T], the tokens whose last states are read; None is all. What a forward pass returns
    of others may be anything: the last layer need not go on with them.
    """

    rows: IntArray
    tokens: IntArray
    positions: IntArray
    tree_mask: BoolArray
    past: IntArray | None = None
    wanted: BoolArray | None = None
