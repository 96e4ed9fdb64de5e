"""ReDrafter: a recurrent head over the target's last hidden state (https://arxiv.org/abs/2403.09919).

With h_t the target's last hidden state and e the target's embedding, draft step i at place t reads
token t+1+i and predicts token t+2+i:

    s_i = silu(W e(x_{t+1+i}) + U s_{i-1} + b)    or, without rnn,    s_i = s_{i-1} + e(x_{t+1+i})
    p_i = softmax(H R_m(...R_1([h_t ; s_i])))     with R(x) = x + silu(A x + a), s_{-1} = 0

The loss is the mean cross-entropy of each step, summed over the steps, as in Apple's recipe.
Legend: B rows, T tokens, D hidden, E exit dimension, N labels, V vocabulary, P draft steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..loss import compute_loss, measure_positions
from .base import Drafter, Features, TargetShape, TrainingMethod

if TYPE_CHECKING:
    from ..settings import TrainSettings


class ResidualBlock(torch.nn.Module):
    """x + silu(A x + a)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(self.linear(x))


class ReDrafter(Drafter):
    """The drafter and its loss; parameter names are those of Apple's published drafters."""

    def __init__(
        self,
        shape: TargetShape,
        *,
        num_layers: int,
        num_positions: int,
        exit_dim: int | None = None,
        is_rnn: bool = True,
        max_k: int = 5,
        loss_decay: float = 1.0,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.num_layers = num_layers
        self.num_positions = num_positions
        self.exit_dim = exit_dim or 2 * shape.hidden_size
        self.is_rnn = is_rnn
        self.max_k = min(max_k, shape.vocab_size)
        self.loss_decay = loss_decay
        self.input_proj: torch.nn.Linear | None = None
        if self.exit_dim != 2 * shape.hidden_size:
            self.input_proj = torch.nn.Linear(2 * shape.hidden_size, self.exit_dim)
        self.lm_head = torch.nn.Sequential(
            *(ResidualBlock(self.exit_dim) for _ in range(num_layers)),
            torch.nn.Linear(self.exit_dim, shape.vocab_size, bias=False),
        )
        if is_rnn:
            self.rnn_u = torch.nn.Linear(shape.hidden_size, shape.hidden_size)
            self.rnn_w = torch.nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def compute_states(self, embedded: Tensor) -> list[Tensor]:
        """Run the recurrence from every place. embedded [B, T, D] -> P tensors [B, T-2-i, D]."""
        # W e(x) is the same for all steps that read x, so it is computed once.
        read = self.rnn_w(embedded) if self.is_rnn else embedded  # [B, T, D]
        state = torch.zeros_like(read[:, 2:])  # [B, T-2, D]
        states = []
        for step in range(self.num_positions):
            num_places = max(0, embedded.shape[1] - 2 - step)
            token = read[:, 1 + step : 1 + step + num_places]
            state = state[:, :num_places]
            state = silu(token + self.rnn_u(state)) if self.is_rnn else token + state
            states.append(state)
        return states

    def count_labels(self, mask: Tensor) -> Tensor:
        return torch.stack([mask[:, 2 + i :].sum() for i in range(self.num_positions)])

    def forward(
        self, features: Features, mask: Tensor, num_labels: Tensor, measure: bool
    ) -> tuple[Tensor, Tensor]:
        inputs, labels, label_weights, label_masks = [], [], [], []
        for step, state in enumerate(self.compute_states(features.embedded)):
            label_mask = mask[:, 2 + step :]  # [B, T-2-i]
            hidden = features.hidden[:, : state.shape[1]]  # [B, T-2-i, D]
            # Only places with a label go through the head, which is nearly all of the work.
            inputs.append(torch.cat((hidden[label_mask], state[label_mask]), dim=-1))
            labels.append(features.tokens[:, 2 + step :][label_mask])
            weight = self.loss_decay**step / num_labels[step].clamp(min=1)
            label_weights.append(weight.float().expand(len(labels[-1])))
            label_masks.append(label_mask)
        x = torch.cat(inputs)  # [N, 2D]
        if self.input_proj is not None:
            x = self.input_proj(x)
        for block in self.lm_head.children():
            if isinstance(block, ResidualBlock):
                x = block(x)  # [N, E]
        output = self.lm_head[self.num_layers].weight  # [V, E]
        assert isinstance(output, Tensor)
        loss, losses, ranks = compute_loss(
            x, output, torch.cat(labels), torch.cat(label_weights), measure=measure
        )
        return loss, measure_positions(losses, ranks, label_masks, self.max_k).pack()


def build_redrafter(settings: TrainSettings, shape: TargetShape) -> ReDrafter:
    """Make a drafter with fresh weights."""
    return ReDrafter(
        shape,
        num_layers=settings.redrafter_num_layers,
        num_positions=settings.redrafter_predict_n_tokens,
        exit_dim=settings.redrafter_exit_dim,
        is_rnn=settings.redrafter_rnn,
        max_k=settings.redrafter_top_k,
        loss_decay=settings.redrafter_loss_decay,
    )


def describe_redrafter(drafter: ReDrafter) -> Mapping[str, Any]:
    """Return the keys of Apple's drafter config.json, and how many tokens were trained."""
    return {
        "architectures": ["Drafter"],
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": drafter.shape.vocab_size,
        "hidden_size": drafter.shape.hidden_size,
        "exit_dim": drafter.exit_dim,
        "num_draft_layers": drafter.num_layers,
        "num_lookback_tokens": -1,
        "rnn": drafter.is_rnn,
        "predict_n_tokens": drafter.num_positions,
    }


METHOD = TrainingMethod(build=build_redrafter, describe=describe_redrafter)
