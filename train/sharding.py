"""A target whose layers lie on several processes, by torch's `fully_shard`."""

from __future__ import annotations

from typing import Any

import torch

from specdec.errors import SpecDecError


def make_mesh(device: torch.device, num_processes: int) -> Any:
    """Line up the processes to split something over all of them; all call this."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, (num_processes,))


def shard_layers(model: Any, config: Any, mesh: Any) -> None:
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
            f"--shard-target: the target has {len(stacks)} stacks of"
            f" {config.num_hidden_layers} layers, not one",
            "train without splitting it",
        )
    for layer in stacks[0]:
        fully_shard(layer, mesh=mesh)
        # Each layer is a root to torch, which would leave it put together.
        layer.register_forward_hook(lambda module, *_: module.reshard())
