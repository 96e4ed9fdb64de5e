"""Medusa: heads that each read the target's last hidden state (https://arxiv.org/abs/2401.10774).

With h_t the target's last hidden state, head i at place t predicts token t+2+i:

    p_i = softmax(H_i R_im(...R_i1(h_t)))     with R(x) = x + silu(A x + a)

The loss is the mean of each head's own, summed over the heads with weights decay^i. As in the
paper, H_i begins as the target's output layer and A as zero (so does a here): every head begins by
predicting what the target predicts for token t+1, and learns from there.
Legend: B rows, T tokens, D hidden, N labels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.methods.medusa import MedusaTrain
from specdec.options import as_options

from ..features import Features, OutputHead
from ..loss import compute_loss
from ..settings import TrainSettings
from ..target import Target
from .base import Drafter, Labels, ResidualBlock, TrainingMethod, make_teacher


class MedusaHeads(Drafter):
    """The heads and their loss; parameter names are those of the published heads, H.L.linear.*."""

    def __init__(
        self,
        head: OutputHead,
        *,
        num_heads: int,
        num_layers: int,
        max_k: int = 5,
        loss_decay: float = 0.8,
        self_distillation: float = 0.0,
    ) -> None:
        super().__init__()
        vocab_size, hidden_size = head.weight.shape
        self.num_positions = num_heads
        self.num_layers = num_layers
        self.max_k = min(max_k, vocab_size)
        self.loss_decay = loss_decay
        self.self_distillation = self_distillation
        for number in range(num_heads):
            blocks = [ResidualBlock(hidden_size) for _ in range(num_layers)]
            for block in blocks:
                torch.nn.init.zeros_(block.linear.weight)
                torch.nn.init.zeros_(block.linear.bias)
            output = torch.nn.Linear(hidden_size, vocab_size, bias=False)
            output.weight.data = head.weight.detach().float() * head.scale
            self.add_module(str(number), torch.nn.Sequential(*blocks, output))

    def draft(self, features: Features) -> list[Tensor]:
        """The target's states, from which every head makes its own guess."""
        num_places = features.hidden.shape[1] - 2
        return [features.hidden[:, : max(0, num_places - i)] for i in range(self.num_positions)]

    def judge(
        self, features: Features, position: int, x: Tensor, labels: Labels, *, measure: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = self.get_submodule(str(position))
        assert isinstance(head, torch.nn.Sequential)
        for block in list(head)[: self.num_layers]:
            x = block(x)
        output = head[self.num_layers].weight  # [V, D]
        assert isinstance(output, Tensor)
        return compute_loss(
            x,
            output,
            labels.tokens,
            labels.weights,
            measure=measure,
            teacher=make_teacher(features, labels.hidden, self.self_distillation),
        )


def build_medusa(settings: TrainSettings, target: Target) -> MedusaHeads:
    """Make heads that predict as the target does."""
    assert target.head is not None
    options = as_options(settings, MedusaTrain)
    return MedusaHeads(
        target.head,
        num_heads=options.medusa_num_heads,
        num_layers=options.medusa_num_layers,
        max_k=settings.report_top_k,
        loss_decay=options.medusa_loss_decay,
        self_distillation=settings.self_distillation,
    )


def describe_medusa(drafter: MedusaHeads, target: Target) -> Mapping[str, Any]:
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
