"""Drafters of a loaded engine in other shapes, which benchmarks measure beside each other."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import cast

from specdec.decode.cost_measuring import Measuring
from specdec.decode.cost_table import CostTable
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.draft_model import LoadedModel, ModelDrafter
from specdec.decode.drafters.draft_target import ModelChainDrafter
from specdec.decode.drafters.draft_tree import ModelTreeDrafter
from specdec.decode.drafters.paced import PacedDrafter
from specdec.decode.drafters.redrafter import BeamDrafter, BeamTreeDrafter
from specdec.decode.drafters.suffix import SuffixDrafter
from specdec.errors import count
from specdec.measure.engine import Bench
from specdec.methods.suffix import SuffixOptions

NUM_SUFFIX_TOKENS = 15  # that suffix decoding drafts in a chain


@dataclasses.dataclass(frozen=True)
class Shape:
    """Drafter of one shape, and the name that a table has for it."""

    name: str
    drafter: Drafter
    numbers: tuple[int, ...] = ()  # by which options of specdec-run ask for this shape


def pace(bench: Bench, drafter: Drafter) -> Drafter:
    """Return a copy of a drafter that drafts as far as that pays."""
    drafter = copy.copy(drafter.fit_budget())  # what a run changes is made again for each
    groups = drafter.groups or [[drafter]]
    return PacedDrafter(groups, measure_costs(bench, groups))


def measure_costs(bench: Bench, groups: Sequence[Sequence[Drafter]]) -> CostTable:
    """Measure what the engine's steps and some drafters' drafts cost; nothing is kept."""
    build = bench.engine.config.build
    measuring = Measuring(
        bench.engine.decoder, [[drafter.make_twin() for drafter in group] for group in groups],
        max_batch_size=build.max_batch_size, max_seq_len=build.max_seq_len,
        max_num_tokens=build.max_num_tokens,
    )  # fmt: skip
    return measuring.measure()[0]


def put_suffix_before(
    bench: Bench, drafter: Drafter, num_tokens: int = NUM_SUFFIX_TOKENS
) -> Drafter:
    """Return a chain: suffix decoding where that promises more, else the drafter."""
    suffix = SuffixDrafter(SuffixOptions(max_tokens=num_tokens))
    groups: list[list[Drafter]] = [[suffix], [drafter]]
    return PacedDrafter(groups, measure_costs(bench, groups), is_fixed=True)


def list_lengths(bench: Bench, max_length: int) -> list[Shape]:
    """Return the engine's draft model with each length of draft from 1 on."""
    model = _find_model(bench)
    return [
        Shape(count(length, "token"), ModelChainDrafter(model, length, use_logits=False), (length,))
        for length in range(1, max_length + 1)
    ]


def list_trees(bench: Bench, sizes: Sequence[int]) -> list[Shape]:
    """Return the engine's draft model with trees of so many tokens."""
    model = _find_model(bench)
    return [Shape(f"tree of {size}", ModelTreeDrafter(model, size, None)) for size in sizes]


def list_searches(
    bench: Bench, beams: Sequence[int], max_length: int, sizes: Sequence[int]
) -> list[Shape]:
    """Return the engine's ReDrafter with every number of beams and length of draft.

    Each also with dynamic trees of these sizes, where they are smaller than the search. All of them
    share the engine's network.
    """
    head = cast(BeamDrafter, bench.engine.drafter).head
    shapes = []
    for num_beams in beams:
        for length in range(1, max_length + 1):
            other = copy.copy(head)
            other.params = dataclasses.replace(
                head.params, num_beams=num_beams, draft_len_per_beam=length
            )
            name, numbers = f"{num_beams} x {length}", (num_beams, length)
            shapes.append(Shape(name, BeamDrafter(other), numbers))
            shapes += [
                Shape(f"{name}, best {size}", BeamTreeDrafter(other, size), (*numbers, size))
                for size in sizes
                if length < size < num_beams * length
            ]
    return shapes


def _find_model(bench: Bench) -> LoadedModel:
    drafter = bench.engine.drafter
    return cast(ModelDrafter, drafter.members[0] if drafter.members else drafter).model
