"""What stands in for CUDA graphs on a CPU: a tape of torch's operators, replayed.

As in a graph, everything but the contents of memory is fixed when a call is recorded: which
operators, on which tensors, with which numbers. A value that comes to the host meanwhile is an
error. `StrictGraphs` besides overwrites what a caller gave once it is used, so that a call which
reads it, instead of the graph's own buffers, comes out wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec.engine import ranking
from specdec.engine.graphs import CudaRecorder, Graphs, Outputs

# Operators whose result is a value on the host, or whose shape depends on one.
WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")


class HostAccess(Exception):
    """The host read a tensor, or made one, in a call that is being recorded."""


def list_tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


Mode: Any = TorchDispatchMode


class _Tape(Mode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[Any, Any, Any, list[Tensor | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(word in func.name() for word in WAITING):
            raise HostAccess(func.name())
        result = func(*args, **kwargs)
        places = {t.untyped_storage().data_ptr() for t in list_tensors(args, kwargs)}
        # A view, or what was written in place, follows what it shares memory with.
        own = [
            None if t.untyped_storage().data_ptr() in places else t for t in list_tensors(result)
        ]
        if any(place is not None for place in own) or func._schema.is_mutable:  # no mere view
            self.entries.append((func, args, kwargs, own))
        return result

    def replay(self) -> None:
        for func, args, kwargs, kept in self.entries:
            result = func(*args, **kwargs)
            found = [result] if isinstance(result, Tensor) else list_tensors(result)
            for place, tensor in zip(kept, found, strict=True):
                if place is not None:
                    place.copy_(tensor)


class TapeRecorder(CudaRecorder):
    """Records on the CPU."""

    num_starts = 0

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def warm_up(self, compute: Callable[[], Outputs]) -> Outputs:
        with mock.patch.object(ranking, "is_on_host", return_value=False):
            return compute()

    def record(self, compute: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        # Tokens are ranked as on a device, without a look at what the scores are.
        with mock.patch.object(ranking, "is_on_host", return_value=False), _Tape() as tape:
            outputs = compute()
        for output in outputs:  # a graph that is recorded has computed nothing
            output.fill_(0)
        return outputs, tape.replay

    def start_over(self) -> None:
        self.num_starts += 1


class StrictGraphs(Graphs):
    """Spoils a call's inputs when it is done with them."""

    def call(
        self,
        owner: object,
        key: Hashable,
        inputs: Sequence[Tensor],
        compute: Callable[..., Outputs],
        **options: Any,
    ) -> Outputs | None:
        found = super().call(owner, key, inputs, compute, **options)
        if found is not None:
            for tensor in inputs:
                if not tensor.is_floating_point():
                    tensor.fill_(0)
                else:
                    tensor.fill_(torch.nan)
        return found
