"""Models whose parts lie on several processes, by torch's `fully_shard`.

A weight that is split is a DTensor; what is written anywhere is whole, so a checkpoint does not
depend on how the work was split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.errors import SpecDecError

from .launch import Split


def make_mesh(device: torch.device, num_processes: int) -> Any:
    """Line up the processes to split something over all of them; all call this."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (num_processes,))


def shard_layers(model: Any, config: Any, mesh: Any, split: Split) -> None:
    """Let every process hold its part of each decoder layer, which is put together while it runs.

    Embedding, last norm and output layer stay whole: drafters read them too.
    """
    from torch.distributed.fsdp import fully_shard

    model.eval().requires_grad_(False)
    stacks = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if len(stacks) != 1:
        raise SpecDecError(
            f"{split.asked_by}: the target has {len(stacks)} stacks of"
            f" {config.num_hidden_layers} layers, not one",
            "train without splitting it",
        )
    found = {type(layer).__name__ for layer in stacks[0]}
    if split.layer_class is not None and set(split.layer_class.split(",")) != found:
        raise SpecDecError(
            f"--fsdp_transformer_layer_cls_to_wrap is {split.layer_class}, the target's layers are"
            f" {', '.join(sorted(found))}",
            "leave it out: it is the target's layers that are split",
        )
    for layer in stacks[0]:
        fully_shard(layer, mesh=mesh)
        # Each layer is a root to torch, which would leave it put together.
        layer.register_forward_hook(lambda module, *_: module.reshard())


def shard_drafter(drafter: torch.nn.Module, mesh: Any, split: Split) -> None:
    """Let every process hold its part of the drafter, and so of its gradients and optimizer.

    It is put together as a whole: its parts read one another's weights.
    """
    from torch.distributed.fsdp import fully_shard

    fully_shard(drafter, mesh=mesh, reshard_after_forward=split.regathers)


def gather(state: Any, *, keep: bool) -> Any:
    """Put a state dict's split tensors together, on the CPU; all processes call this.

    keep: whether this process wants them; one after another, so that a device never holds all.
    """
    from torch.distributed.tensor import DTensor

    if isinstance(state, DTensor):
        whole = state.full_tensor()
        return whole.cpu() if keep else None
    if isinstance(state, dict):
        return {key: gather(value, keep=keep) for key, value in state.items()}
    return state


def scatter(whole: Tensor, like: Tensor) -> Tensor:
    """Split a whole tensor as another one is split; all processes call this."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)


def scatter_optimizer(state: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Split the numbers that an optimizer holds for each weight as the weight is."""
    entries = {
        index: {
            name: scatter(value, parameters[index])
            if isinstance(value, Tensor) and value.shape == parameters[index].shape
            else value
            for name, value in entry.items()
        }
        for index, entry in state["state"].items()
    }
    return {**state, "state": entries}
