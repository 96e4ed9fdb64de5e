"""The largest numbers that a configuration may name.

They lie far above any model's, and below what fills a memory or a day: readers check them before
anything is listed or allocated by such a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from specdec.errors import Problems, shorten

MAX_MODULES = 1000  # layers of a model, layers and heads of a drafter: each is a list of tensors
MAX_RANKS = 1024
MAX_EXPERTS = 10 * MAX_MODULES  # of a layer
MAX_DRAFT_TOKENS = 4096  # of a verify step, whose mask has the square of that
MAX_HEAD_SIZE = 1 << 16
MAX_SIZE = (1 << 31) - 1  # any other number; TensorRT-LLM too counts in 32 bits
MAX_ROTARY_ELEMENTS = 1 << 28  # rotated dimensions x positions: two tables of 1 GiB in float32

# Fields of a Hugging Face config.json, any family's, by which transformers makes modules or tables.
_HF_BOUNDS = (
    (re.compile(r"(^|_)(n_)?(layers?|blocks)$"), MAX_MODULES),
    (re.compile(r"(^|_)experts$"), MAX_EXPERTS),
    (re.compile(r"(^|_)head_dim$"), MAX_HEAD_SIZE),
    (re.compile(r"^(num|n|max)_|(^|_)(size|dim|embd|inner|positions)$"), MAX_SIZE),
)


def find_out_of_bounds(rows: Iterable[tuple[str, Any, int, int]], remedy: str) -> Problems:
    """List the numbers that are not within their bounds: name, value, least and largest value."""
    return Problems.from_table(*(
        (not minimum <= value <= maximum,
         f"{name} is {shorten(value)}, not of {minimum} to {maximum}", remedy)
        for name, value, minimum, maximum in rows
    ))  # fmt: skip


def check_model_sizes(config: Mapping[str, Any], config_name: object) -> None:
    """Raise SpecDecError for a Hugging Face config.json of sizes that no model has.

    For what transformers is to load: it makes every layer before it looks at the weights.
    """
    problems = Problems()
    for name, value, limit in _find_large(config):
        problems.add(
            f"{config_name}: {name} is {value}, more than {limit}",
            "copy the model's config.json again",
        )
    problems.raise_all()


def _find_large(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int, int]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _find_large(value, f"{prefix}{name}.")
        elif type(value) is int:
            limit = next((limit for pattern, limit in _HF_BOUNDS if pattern.search(name)), None)
            if limit is not None and value > limit:
                yield prefix + name, value, limit
