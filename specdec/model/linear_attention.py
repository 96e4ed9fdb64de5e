"""Layers with a state for each head: Gated DeltaNet (https://arxiv.org/abs/2412.06464), Mamba-2."""

from __future__ import annotations

import dataclasses

from specdec.errors import Problems
from specdec.model.bounds import MAX_HEAD_SIZE, MAX_SIZE, find_out_of_bounds

KEY = "linear_attention"  # of a checkpoint's config.json
MAX_TAPS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadStateSizes:
    """The sizes of a layer that keeps a state for each head instead of keys and values.

    num_key_heads: of queries, and as many of keys; num_value_heads: of values, a multiple of them:
    value heads side by side share a key head. key_size, value_size: of a head. num_taps: tokens
    that the convolution in front of queries, keys and values reads, the newest included.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    num_taps: int

    @property
    def sections(self) -> tuple[int, int, int]:
        """Rows of queries, of keys and of values: what the convolution reads of a token."""
        width = self.num_key_heads * self.key_size
        return width, width, self.num_value_heads * self.value_size

    @property
    def num_channels(self) -> int:
        return sum(self.sections)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of a layer's state besides the convolution's inputs."""
        return self.num_value_heads, self.key_size, self.value_size

    @property
    def logged_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what a token's update is made of: its keys, deltas and decays."""
        keys, values = self.num_key_heads, self.num_value_heads
        return (keys, self.key_size), (values, self.value_size), (values,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearAttention(HeadStateSizes):
    """The sizes of a layer of Gated DeltaNet."""

    def split(self, tp_size: int) -> LinearAttention:
        """Return the sizes of one rank, which has whole heads."""
        return dataclasses.replace(
            self,
            num_key_heads=self.num_key_heads // tp_size,
            num_value_heads=self.num_value_heads // tp_size,
        )

    def find_problems(self, tp_size: int) -> Problems:
        """List what is inconsistent for so many ranks, each with a remedy."""
        limits = {"key_size": MAX_HEAD_SIZE, "value_size": MAX_HEAD_SIZE, "num_taps": MAX_TAPS}
        rows = [
            (f"{KEY}.{name}", size, 1, limits.get(name, MAX_SIZE))
            for name, size in vars(self).items()
        ]
        remedy = "check the source model's config.json"
        return find_out_of_bounds(rows, remedy) or Problems.from_table(
            (self.num_value_heads % max(1, self.num_key_heads),
             f"{self.num_value_heads} value heads of the linear attention are not a multiple of its"
             f" {self.num_key_heads} key heads", "check the source model's config.json"),
            (self.num_key_heads % tp_size,
             f"{self.num_key_heads} key heads of the linear attention do not split over"
             f" tp_size={tp_size}", "use a tp_size that divides them"),
        )  # fmt: skip
