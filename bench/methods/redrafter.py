"""ReDrafter: numbers of beams with every length, and of each the likeliest tokens alone."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from specdec.decode.drafters.redrafter import DynamicProposer, ReDrafterProposer
from specdec.errors import count
from specdec.files.reading import read_json, write_json
from specdec.methods.redrafter import ReDrafterTune
from specdec.options import as_options

from ..engine import Bench
from ..settings import TuneSettings, read_counts
from .base import Candidate, Trial

TREE_SIZES = (7, 15)  # of dynamic trees


def read_beams(settings: TuneSettings) -> list[int]:
    """The numbers of beams to consider; raise UsageError."""
    return read_counts("--beams", as_options(settings, ReDrafterTune).beams)


def prepare(settings: TuneSettings, folder: Path) -> Trial:
    """Make a checkpoint of the same tensors with the most beams and the longest drafts."""
    source, made = settings.checkpoint_dir, folder / "checkpoint"
    made.mkdir()
    config = read_json(source / "config.json") | {
        "redrafter_num_beams": max(read_beams(settings)),
        "redrafter_draft_len_per_beam": settings.max_length,
    }
    write_json(made / "config.json", config)
    for path in source.glob("rank*.safetensors"):
        (made / path.name).symlink_to(path.resolve())
    return Trial(checkpoint=made)


def list_candidates(bench: Bench, settings: TuneSettings) -> list[Candidate]:
    """Every number of beams with every length."""
    return list_searches(bench, read_beams(settings), settings.max_length)


def list_searches(
    bench: Bench, beams: Sequence[int], max_length: int, sizes: Sequence[int] = TREE_SIZES
) -> list[Candidate]:
    """Every number of beams with every length, and with dynamic trees of these sizes.

    All share the engine's network.
    """
    head = cast(ReDrafterProposer, bench.engine.proposer).head
    candidates = []
    for num_beams in beams:
        for length in range(1, max_length + 1):
            other = copy.copy(head)
            other.params = dataclasses.replace(
                head.params, num_beams=num_beams, draft_len_per_beam=length
            )
            name = f"{count(num_beams, 'beam')} x {count(length, 'token')}"
            shape = {
                "redrafter_num_beams": num_beams,
                "redrafter_draft_len_per_beam": length,
            }
            candidates.append(Candidate(name, ReDrafterProposer(other), convert=shape))
            candidates += [
                Candidate(
                    f"{name}, best {size}", DynamicProposer(other, size), convert=shape,
                    run={"redrafter_tree_tokens": size},
                )
                for size in sizes if length < size < num_beams * length
            ]  # fmt: skip
    return candidates
