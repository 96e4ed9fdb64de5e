"""Tables of costs that tests decide by."""

from __future__ import annotations

from collections.abc import Callable

from specdec.decode.cost_table import CostTable, Curve, Grid, smooth
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.paced import PacedDrafter

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def make_grid(costs: Callable[[int], float], num_rows: int = 1) -> Grid:
    """Return what a function says of sizes, for one number of requests."""
    return Grid(((num_rows, smooth({size: costs(size) for size in SIZES})),))


def make_costs(
    num_drafters: int = 1, step: Callable[[int], float] = lambda tokens: 1.0 + 0.02 * tokens,
    draft: Callable[[int], float] = lambda levels: 0.06 * levels, reading: float = 0.0,
    prompts: Callable[[int], float] | None = None,
) -> CostTable:  # fmt: skip
    """Return a table of costs in any unit: of steps by tokens, of drafts by levels."""
    line: Curve | None = None
    if prompts is not None:
        line = smooth({size: prompts(size) for size in range(1, 1024)})
    return CostTable(
        steps=make_grid(step), drafts=(make_grid(draft),) * num_drafters, reading=reading,
        prompts=line,
    )  # fmt: skip


def bind(drafter: Drafter, costs: CostTable) -> PacedDrafter:
    """Return what drafts as a drafter does, as far as that is worth its time."""
    return PacedDrafter(drafter.groups or [[drafter]], costs)
