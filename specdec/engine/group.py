"""Exchange between the ranks of a tensor-parallel engine: partial sums, slices of rows, messages.

Each rank holds some heads and a part of every MLP; a sum over the ranks follows each of the two
(Megatron-LM, https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor


class PeerLost(Exception):
    """Another rank has ended, or cannot be reached."""


class Group:
    """The ranks of torch.distributed's default process group, one process each.

    Every rank makes the same calls in the same order.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def sum(self, x: Tensor) -> Tensor:
        """Sum up the ranks' `x`, on all of them. `x` is used up."""
        # On a CPU in float32: the partial sums of half types are rounded once, not at every hop.
        total = x.float() if x.device.type == "cpu" else x
        total = total.contiguous()
        self._call(lambda: torch.distributed.all_reduce(total))
        return total.to(x.dtype)

    def gather(self, share: Tensor) -> Tensor:
        """Gather the ranks' shares [..., n] side by side on rank 0; others return their own."""
        share = share.contiguous()
        if self.rank:
            self._call(lambda: torch.distributed.gather(share, dst=0))
            return share
        rank_shares = [torch.empty_like(share) for _ in range(self.size)]
        self._call(lambda: torch.distributed.gather(share, rank_shares, dst=0))
        return torch.cat(rank_shares, dim=-1)

    def broadcast(self, x: Tensor) -> None:
        """Fill `x` on every rank with rank 0's."""
        self._call(lambda: torch.distributed.broadcast(x, src=0))

    def _call(self, exchange: Callable[[], Any]) -> None:
        try:
            exchange()
        except RuntimeError as error:  # all that torch.distributed raises
            raise PeerLost(str(error)) from error
