"""Drafter whose weights, gradients and optimizer states are split over processes, by FSDP2.

A process keeps a shard of every tensor, along its first dimension. A matrix is gathered for the
forward pass of its module and again for the backward pass, whose gradient is added up over the
processes and split at once, so that few matrices are whole at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from .methods.base import TrainableDrafter

# Of the largest module: its weights, the next one's, its gradient, and that added up.
GATHERED_COPIES = 4


def shard_drafter(drafter: TrainableDrafter, device: torch.device, num_processes: int) -> None:
    """Split the drafter's weights; all processes call this with equal weights."""
    mesh = init_device_mesh(device.type, (num_processes,))
    for module in list_matrix_modules(drafter):
        fully_shard(module, mesh=mesh)
    fully_shard(drafter, mesh=mesh)  # norms, biases and single rows, whole during a step
    for module in drafter.modules():
        if device.type == "cpu" and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no averages
    drafter.is_sharded = True


def list_matrix_modules(drafter: torch.nn.Module) -> list[torch.nn.Module]:
    """List the modules inside of a drafter that have matrices of their own."""
    return [
        module
        for module in drafter.modules()
        if module is not drafter
        and any(weight.dim() > 1 for weight in module.parameters(recurse=False))
    ]


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor whole; all processes call this for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_weights(drafter: TrainableDrafter, *, keeps: bool) -> dict[str, Tensor]:
    """Gather the drafter's tensors by name, one after another; all processes call this.

    keeps: whether this process keeps those of a sharded drafter, on the CPU; others get none.
    """
    weights = drafter.state_dict()
    if not drafter.is_sharded:
        return dict(weights)
    return _gather_all(weights, keeps=keeps)


def gather_states(
    states: Mapping[int, Mapping[str, Tensor]], *, keeps: bool
) -> dict[int, dict[str, Tensor]]:
    """Gather an optimizer's states as `gather_weights` gathers weights."""
    return {index: _gather_all(state, keeps=keeps) for index, state in states.items()}


def _gather_all(tensors: Mapping[str, Tensor], *, keeps: bool) -> dict[str, Tensor]:
    whole_tensors = {}
    for name, tensor in tensors.items():
        whole = gather_tensor(tensor).detach()
        if keeps:
            whole_tensors[name] = whole.cpu()
    return whole_tensors


def shard_as(whole: Tensor, weight: Tensor) -> Tensor:
    """Return this process's shard of a tensor, split as a weight of the drafter is, or all of it.

    Numbers without dimensions, such as an optimizer's step, are never split.
    """
    if not isinstance(weight, DTensor) or not whole.dim():
        return whole
    shard: Tensor = distribute_tensor(
        whole.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None
    )
    return shard.clone()


class ShardedMuon(torch.optim.Muon):
    """Muon of sharded matrices, gathered for their steps, as a step is of a whole matrix."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step by one matrix after another; all processes compute the steps of all."""
        assert closure is None
        for group in self.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_whole(weight, options)

    def _step_whole(self, weight: Tensor, options: Mapping[str, Any]) -> None:
        whole = torch.nn.Parameter(gather_tensor(weight.detach()))
        assert weight.grad is not None
        whole.grad = gather_tensor(weight.grad)
        optimizer = torch.optim.Muon([whole], **options)
        state = self.state[weight]
        optimizer.state[whole].update({name: gather_tensor(t) for name, t in state.items()})
        optimizer.step()  # type: ignore[no-untyped-call]
        weight.copy_(shard_as(whole.detach(), weight))
        state.update({n: shard_as(t, weight) for n, t in optimizer.state[whole].items()})


def estimate_bytes(drafter: TrainableDrafter, optimizers: Mapping[str, Any]) -> dict[str, Any]:
    """Estimate the bytes of weights, gradients and optimizer states on each of several processes.

    whole: each has all of them, and once more the gradients, in which torch's DDP adds them up.
    sharded: by the number of processes; each has its part, and beside it, of the largest module,
    the weights, the gradient, and the copies in which it is added up, with the next one's weights.
    """
    num_states = {"optimizer": 2, "muon": 1}  # of AdamW and of Muon, for each weight
    num_kept = sum(
        (2 + num_states[key]) * weight.numel()
        for key, optimizer in optimizers.items()
        for group in optimizer.param_groups
        for weight in group["params"]
    )
    num_weights = sum(weight.numel() for weight in drafter.parameters())
    largest = max(
        sum(weight.numel() for weight in module.parameters(recurse=False))
        for module in [drafter, *list_matrix_modules(drafter)]
    )
    return {
        "whole": 4 * (num_kept + num_weights),
        "sharded": {
            str(count): 4 * (num_kept // count + GATHERED_COPIES * largest) for count in (2, 4, 8)
        },
    }
