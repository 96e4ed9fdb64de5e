"""Mamba-2 (https://arxiv.org/abs/2405.21060), Granite 4's layer in place of attention."""

from __future__ import annotations

import dataclasses

from specdec.errors import Problems
from specdec.model.bounds import MAX_SIZE, find_out_of_bounds
from specdec.model.linear_attention import MAX_TAPS, HeadStateSizes

KEY = "mamba2"  # of a checkpoint's config.json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Sizes(HeadStateSizes):
    """The sizes of a Mamba-2 layer, in the names of linear attention.

    A key head is a group of B and C, of the state's size; a value head is a head of x. conv_bias:
    whether the convolution has a bias; has_bias: whether the layer's first and last product have.
    """

    conv_bias: bool = True
    has_bias: bool = False

    def splits_groups(self, tp_size: int) -> bool:
        """Return whether each rank has groups of its own; otherwise all have the only one."""
        return self.num_key_heads % tp_size == 0

    def split(self, tp_size: int) -> Mamba2Sizes:
        """Return the sizes of one rank, which has whole heads."""
        num_groups = self.num_key_heads
        return dataclasses.replace(
            self,
            num_key_heads=num_groups // tp_size if self.splits_groups(tp_size) else num_groups,
            num_value_heads=self.num_value_heads // tp_size,
        )

    def find_problems(self, tp_size: int) -> Problems:
        """List what is inconsistent for so many ranks, each with a remedy."""
        heads, groups = self.num_value_heads, self.num_key_heads
        rows = (
            (f"{KEY}.num_key_heads", groups, 1, MAX_SIZE),
            (f"{KEY}.num_value_heads", heads, 1, MAX_SIZE),
            (f"{KEY}.key_size", self.key_size, 1, MAX_SIZE),
            (f"{KEY}.value_size", self.value_size, 1, MAX_SIZE),
            (f"{KEY}.num_taps", self.num_taps, 2, MAX_TAPS),
        )
        remedy = "check the source model's config.json"
        return find_out_of_bounds(rows, remedy) or Problems.from_table(
            (heads % groups, f"{heads} heads of Mamba-2 are not a multiple of its {groups} groups",
             remedy),
            (heads % tp_size or not (self.splits_groups(tp_size) or groups == 1),
             f"{heads} heads in {groups} groups of Mamba-2 do not split over tp_size={tp_size}",
             "use a tp_size that divides them"),
        )  # fmt: skip
