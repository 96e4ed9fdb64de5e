"""What every trainable method provides. Legend: B rows, T tokens, D hidden, P draft positions."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """Sizes of the target that a drafter has to fit."""

    hidden_size: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class Features:
    """What the frozen target says about a batch of rows."""

    tokens: Tensor  # [B, T] int64
    hidden: Tensor  # [B, T, D] last hidden states, after the final norm
    embedded: Tensor  # [B, T, D] the target's own embeddings of the tokens


class Drafter(torch.nn.Module, abc.ABC):
    """A network being trained; its parameters' names are those of the written file."""

    num_positions: int

    @abc.abstractmethod
    def count_labels(self, mask: Tensor) -> Tensor:
        """Count the labels of each draft position. mask [B, T] bool -> [P]."""

    @abc.abstractmethod
    def forward(
        self, features: Features, mask: Tensor, num_labels: Tensor, measure: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the packed Measures of a batch.

        mask [B, T] tells which tokens are labels. num_labels [P] are the counts that the losses of
        the positions are divided by: those of the whole optimizer step, over all of its batches and
        processes, so that how the step is cut up does not matter. `measure`: accuracies too.
        """


@dataclasses.dataclass(frozen=True)
class TrainingMethod:
    """A method's entry in the registry."""

    build: Callable[[TrainSettings, TargetShape], Drafter]
    describe: Callable[[Any], Mapping[str, Any]]  # a drafter -> its part of config.json
