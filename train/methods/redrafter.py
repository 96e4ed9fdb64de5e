"""ReDrafter: a recurrent head over the target's last hidden state (https://arxiv.org/abs/2403.09919).

With h_t the target's last hidden state and e the target's embedding, draft step i at place t reads
token t+1+i and predicts token t+2+i:

    s_i = silu(W e(x_{t+1+i}) + U s_{i-1} + b)    or, without rnn,    s_i = s_{i-1} + e(x_{t+1+i})
    p_i = softmax(H R_m(...R_1([h_t ; s_i])))     with R(x) = x + silu(A x + a), s_{-1} = 0

The loss is the mean cross-entropy of each step, summed over the steps, as in Apple's recipe.
Legend: B rows, T tokens, D hidden, E exit dimension, N labels, V vocabulary, P draft steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from specdec.methods.redrafter import ReDrafterTrain
from specdec.options import as_options

from ..depth_weights import MEASURED_WEIGHTINGS
from ..features import Features, TargetShape
from ..loss import measure_positions
from ..settings import TrainSettings
from ..target import FrozenTarget
from .base import (
    HeadInput,
    Labels,
    OutputLayer,
    ResidualBlock,
    Result,
    TrainableDrafter,
    TrainingMethod,
)


class RecurrentDrafter(TrainableDrafter):
    """ReDrafter and its loss, with the parameter names of Apple's published drafters."""

    def __init__(self, settings: TrainSettings, shape: TargetShape) -> None:
        options = as_options(settings, ReDrafterTrain)
        super().__init__(
            settings, num_positions=options.redrafter_predict_n_tokens,
            loss_decay=options.redrafter_loss_decay, vocab_size=shape.vocab_size,
        )  # fmt: skip
        self.shape = shape
        self.num_layers, self.is_rnn = options.redrafter_num_layers, options.redrafter_rnn
        self.exit_dim = options.redrafter_exit_dim or 2 * shape.hidden_size
        self.input_proj: torch.nn.Linear | None = None
        if self.exit_dim != 2 * shape.hidden_size:
            self.input_proj = torch.nn.Linear(2 * shape.hidden_size, self.exit_dim)
        self.lm_head = torch.nn.Sequential(
            *(ResidualBlock(self.exit_dim) for _ in range(self.num_layers)),
            OutputLayer(self.exit_dim, shape.vocab_size),
        )
        self.output_layers = (f"lm_head.{self.num_layers}.weight",)
        if self.is_rnn:
            self.rnn_u = torch.nn.Linear(shape.hidden_size, shape.hidden_size)
            self.rnn_w = torch.nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
            # Factor by which a state is larger than the table's rows.
            self.rnn_w.weight.data *= shape.embedding_scale

    def compute_states(self, embedded: Tensor) -> list[Tensor]:
        """Run the recurrence from every place. embedded [B, T, D] -> P tensors [B, T-2-i, D]."""
        # W e(x) is the same for all steps that read x, so it is computed once.
        token_inputs = self.rnn_w(embedded) if self.is_rnn else embedded  # [B, T, D]
        state = torch.zeros_like(token_inputs[:, 2:])  # [B, T-2, D]
        states = []
        for step in range(self.num_positions):
            num_places = max(0, embedded.shape[1] - 2 - step)
            token = token_inputs[:, 1 + step : 1 + step + num_places]
            state = state[:, :num_places]
            state = silu(token + self.rnn_u(state)) if self.is_rnn else token + state
            states.append(state)
        return states

    def use_head(
        self, features: Features, position: int, x: Tensor, use: Callable[[HeadInput], Result]
    ) -> Result:
        result: Result = self.lm_head[-1](x, lambda x, weight: use(HeadInput(x, weight)))
        return result

    def forward(
        self, features: Features, mask: Tensor, num_labels: Tensor, measure: bool
    ) -> tuple[Tensor, Tensor]:
        states = self.compute_states(features.embedded)
        step_labels = [
            self.find_labels(features, mask, num_labels, i) for i in range(self.num_positions)
        ]
        inputs = []
        for state, labels in zip(states, step_labels, strict=True):
            hidden = features.hidden[:, : state.shape[1]]  # [B, T-2-i, D]
            # Only places with a label go through the head, which is nearly all of the work.
            inputs.append(torch.cat((hidden[labels.mask], state[labels.mask]), dim=-1))
        x = torch.cat(inputs)  # [N, 2D]
        if self.input_proj is not None:
            x = self.input_proj(x)
        *blocks, _ = self.lm_head.children()
        for block in blocks:
            x = block(x)  # [N, E]
        if self.depth_weighting in MEASURED_WEIGHTINGS:
            with torch.no_grad():
                acceptances = self.measure_position(features, 0, x, join_labels(step_labels))
            sizes = [len(labels.tokens) for labels in step_labels]
            step_labels = self.weigh_depths(torch.split(acceptances, sizes), step_labels)
        loss, losses, ranks = self.compute_position_loss(
            features, 0, x, join_labels(step_labels), measure=measure
        )
        masks = [labels.mask for labels in step_labels]
        return loss, measure_positions(losses, ranks, masks, self.max_k).pack()


def join_labels(step_labels: Sequence[Labels]) -> Labels:
    """Join the labels of all steps, one step after another; the mask is the first step's."""
    return Labels(
        mask=step_labels[0].mask,
        **{
            name: torch.cat([getattr(labels, name) for labels in step_labels])
            for name in ("tokens", "weights", "hidden")
        },
    )


def describe_redrafter(drafter: RecurrentDrafter, target: FrozenTarget) -> Mapping[str, Any]:
    """Return the keys of Apple's drafter config.json, and the number of trained draft tokens."""
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


METHOD = TrainingMethod(
    build=lambda settings, target: RecurrentDrafter(settings, target.shape),
    describe=describe_redrafter,
    convert_folder="--drafter-model-dir",
    convert_flags=lambda settings: [
        "--redrafter-draft-len-per-beam",
        str(as_options(settings, ReDrafterTrain).redrafter_predict_n_tokens),
    ],
)  # fmt: skip
