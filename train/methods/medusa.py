"""Medusa: heads that each read the target's last hidden state (https://arxiv.org/abs/2401.10774).

With h_t the target's last hidden state, head i at place t predicts token t+2+i:

    p_i = softmax(H_i R_im(...R_i1(h_t)))     with R(x) = x + silu(A x + a)

The loss is the mean of each head's own, summed over the heads with weights decay^i. As in the
paper, H_i begins as the target's output layer and A as zero (so does a here): every head begins by
predicting what the target predicts for token t+1, and learns from there.
Legend: B rows, T tokens, D hidden, N labels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.methods.medusa import MedusaTrain
from specdec.options import as_options

from ..features import Features, OutputHead
from ..settings import TrainSettings
from ..target import FrozenTarget
from .base import (
    HeadInput,
    OutputLayer,
    ResidualBlock,
    Result,
    TrainableDrafter,
    TrainingMethod,
)


class Medusa(TrainableDrafter):
    """Medusa heads and their loss, with the published heads' parameter names, H.L.linear.*."""

    def __init__(self, settings: TrainSettings, head: OutputHead) -> None:
        """Make heads that predict as the target's output layer does."""
        options = as_options(settings, MedusaTrain)
        vocab_size, hidden_size = head.weight.shape
        super().__init__(
            settings, num_positions=options.medusa_num_heads, vocab_size=vocab_size,
            loss_decay=options.medusa_loss_decay,
        )  # fmt: skip
        self.num_layers = options.medusa_num_layers
        for number in range(self.num_positions):
            blocks = [ResidualBlock(hidden_size) for _ in range(self.num_layers)]
            for block in blocks:
                torch.nn.init.zeros_(block.linear.weight)
                torch.nn.init.zeros_(block.linear.bias)
            output = OutputLayer(hidden_size, vocab_size)
            output.weight.data = head.weight.detach().float() * head.scale
            self.add_module(str(number), torch.nn.Sequential(*blocks, output))
        self.output_layers = tuple(
            f"{number}.{self.num_layers}.weight" for number in range(self.num_positions)
        )

    def draft_states(self, features: Features) -> list[Tensor]:
        """Return the target's states, from which every head makes its guess."""
        num_places = features.hidden.shape[1] - 2
        return [features.hidden[:, : max(0, num_places - i)] for i in range(self.num_positions)]

    def use_head(
        self, features: Features, position: int, x: Tensor, use: Callable[[HeadInput], Result]
    ) -> Result:
        *blocks, output = self.get_submodule(str(position)).children()
        for block in blocks:
            x = block(x)
        result: Result = output(x, lambda x, weight: use(HeadInput(x, weight)))
        return result


def build_medusa(settings: TrainSettings, target: FrozenTarget) -> Medusa:
    assert target.head is not None
    return Medusa(settings, target.head)


def describe_medusa(drafter: Medusa, target: FrozenTarget) -> Mapping[str, Any]:
    """Return the keys of the published heads' config.json."""
    return {
        "base_model_name_or_path": target.name,
        "medusa_num_heads": drafter.num_positions,
        "medusa_num_layers": drafter.num_layers,
    }


METHOD = TrainingMethod(
    build=build_medusa,
    describe=describe_medusa,
    convert_folder="--medusa-model-dir",
    weights_name="medusa_lm_head.safetensors",
    needs_head=True,
)
