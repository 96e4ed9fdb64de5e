"""Gated short convolution, LFM2's layer in place of attention (https://arxiv.org/abs/2511.23404)."""

from __future__ import annotations

import dataclasses

from specdec.errors import Problems
from specdec.model.bounds import MAX_SIZE, find_out_of_bounds
from specdec.model.linear_attention import MAX_TAPS

KEY = "short_conv"  # of a checkpoint's config.json


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortConvSizes:
    """The sizes of a layer that mixes each channel of a token with those of the tokens before it.

    num_channels: of the gated input. num_taps: tokens that are read of each channel, the newest
    included. has_bias: whether the convolution and both products have one.
    """

    num_channels: int
    num_taps: int
    has_bias: bool = False

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a state besides the convolution's inputs: it has no numbers."""
        return (0,)

    @property
    def logged_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what a token's update is made of, besides the convolution's input: none."""
        return ()

    def split(self, tp_size: int) -> ShortConvSizes:
        """Return the sizes of one rank, which has whole channels."""
        return dataclasses.replace(self, num_channels=self.num_channels // tp_size)

    def find_problems(self, tp_size: int) -> Problems:
        """List what is inconsistent for so many ranks, each with a remedy."""
        rows = (
            (f"{KEY}.num_channels", self.num_channels, 1, MAX_SIZE),
            (f"{KEY}.num_taps", self.num_taps, 2, MAX_TAPS),
        )
        remedy = "check the source model's config.json"
        return find_out_of_bounds(rows, remedy) or Problems.from_table(
            (self.num_channels % tp_size,
             f"{self.num_channels} channels of the short convolutions do not split over"
             f" tp_size={tp_size}", "use a tp_size that divides them"),
        )  # fmt: skip
