"""Sizes in which a target's layers differ: full attention's heads, keys that later layers read."""

from __future__ import annotations

import dataclasses

from specdec.errors import Problems, shorten
from specdec.model.bounds import MAX_HEAD_SIZE, MAX_SIZE, find_out_of_bounds

KEY = "layer_sizes"  # of a checkpoint's config.json


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes of some layers of a target; all others have those of its `ModelConfig`.

    full_head_size, full_num_kv_heads: of the layers of full attention.
    num_reusing: the last layers, which have no keys and values: each attends to those of the last
    layer of its type before them all. reusing_inner: the intermediate size of their MLPs.
    input_size: numbers of a token that each layer reads from a table of its own, besides the layer
    before it; 0 where there are none. input_vocab_size: rows of these tables.
    """

    full_head_size: int
    full_num_kv_heads: int
    num_reusing: int = 0
    reusing_inner: int = 0
    input_size: int = 0
    input_vocab_size: int = 0

    def find_problems(self, layer_types: tuple[str, ...], num_heads: int, tp_size: int) -> Problems:
        """List what is inconsistent with a target of these layers, each with a remedy."""
        least_inner = 1 if self.num_reusing else 0
        least_rows = 1 if self.input_size else 0
        rows = (
            (f"{KEY}.full_head_size", self.full_head_size, 1, MAX_HEAD_SIZE),
            (f"{KEY}.full_num_kv_heads", self.full_num_kv_heads, 1, MAX_SIZE),
            (f"{KEY}.num_reusing", self.num_reusing, 0, len(layer_types) - 1),
            (f"{KEY}.reusing_inner", self.reusing_inner, least_inner, MAX_SIZE),
            (f"{KEY}.input_size", self.input_size, 0, MAX_SIZE),
            (f"{KEY}.input_vocab_size", self.input_vocab_size, least_rows, MAX_SIZE),
        )
        problems = find_out_of_bounds(rows, "check the source model's config.json")
        if problems:
            return problems
        kept_types = set(layer_types[: len(layer_types) - self.num_reusing])
        heads, inner = self.full_num_kv_heads, self.reusing_inner
        fits = [not (heads % n and n % heads or inner % n) for n in range(1, 17)]
        usable_sizes = ", ".join(str(size) for size, does_fit in enumerate(fits, 1) if does_fit)
        return Problems.from_table(
            (not set(layer_types) <= kept_types,
             f"the last {self.num_reusing} layers read keys of earlier ones, and are of types"
             f" {shorten(sorted(set(layer_types)))}, those before of {shorten(sorted(kept_types))}",
             "check the source model's config.json"),
            (num_heads % heads,
             f"num_attention_heads={num_heads} is no multiple of {KEY}.full_num_kv_heads={heads}",
             "check the source model's config.json"),
            (heads % tp_size and tp_size % heads or inner % tp_size,
             f"{KEY}.full_num_kv_heads={heads} and reusing_inner={inner} do not split over"
             f" tp_size={tp_size}", f"use a tp_size of {usable_sizes}"),
        )  # fmt: skip
