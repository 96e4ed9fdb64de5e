"""What every trainable method provides. Legend: B rows, T tokens, D hidden, P draft positions.

Draft position i at place t of a row is about token t+2+i: token t+1 is the target's own, which
nobody has to guess. N counts the labels of one position, V the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from specdec.errors import SpecDecError

from ..features import Features
from ..loss import Teacher, measure_positions
from ..settings import TrainSettings
from ..target import Target


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels of one draft position."""

    mask: Tensor  # [B, T-2-i] which places have one
    tokens: Tensor  # [N]
    weights: Tensor  # [N] of each one's loss in the whole
    hidden: Tensor  # [N, D] the target's states by which it predicts the same tokens itself


def find_labels(
    features: Features, mask: Tensor, num_labels: Tensor, position: int, decay: float
) -> Labels:
    """Return the labels of a draft position; num_labels [P] as `Drafter.forward` has them."""
    here = mask[:, 2 + position :]
    tokens = features.tokens[:, 2 + position :][here]
    weight = decay**position / num_labels[position].clamp(min=1)
    return Labels(
        mask=here,
        tokens=tokens,
        weights=weight.float().expand(len(tokens)),
        hidden=features.hidden[:, 1 + position : 1 + position + here.shape[1]][here],
    )


def make_teacher(features: Features, hidden: Tensor, share: float) -> Teacher | None:
    """Let the target's distribution after its states `hidden` [N, D] be `share` of what is learned.

    None where it has no share.
    """
    if not share:
        return None
    assert features.head is not None
    return Teacher(hidden, features.head, share)


def choose_mask_token(flag: str, given: int | None, config: Any, table: Tensor) -> int:
    """The mask token: given by `flag`, or the target's padding or end token, or its first.

    Its row of the target's embedding, table [V, D], stays as it is. Many targets' padding has a row
    of zeros: queries made of it would be zero, and nothing would be learned. Raises SpecDecError
    where the given token has one, or is none.
    """
    ends = getattr(config, "eos_token_id", None)
    padding = getattr(config, "pad_token_id", None)
    found = [padding, *(ends if isinstance(ends, list) else [ends]), *range(len(table))]
    if given is not None:
        found = [given]
    usable = (n for n in found if n is not None and n < len(table) and table[n].any())
    token = next(usable, None)
    if token is None:
        raise SpecDecError(
            f"{flag} is {given}: of the target's {len(table)} tokens it is none, or"
            " one with a row of zeros in the embedding",
            "give another, or leave the option out",
        )
    return int(token)


class ResidualBlock(torch.nn.Module):
    """x + silu(A x + a)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + silu(self.linear(x))


class Drafter(torch.nn.Module):
    """A network being trained; its parameters' names are those of the written file.

    A method writes `draft` and `judge`, or a `forward` of its own.
    """

    num_positions: int
    max_k: int
    loss_decay: float

    def count_labels(self, mask: Tensor) -> Tensor:
        """Count the labels of each draft position. mask [B, T] bool -> [P]."""
        return torch.stack([mask[:, 2 + i :].sum() for i in range(self.num_positions)])

    def draft(self, features: Features) -> list[Tensor]:
        """What each position's guesses are made from at every place, [B, T-2-i, D or more]."""
        raise NotImplementedError

    def judge(
        self, features: Features, position: int, x: Tensor, labels: Labels, *, measure: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the labels' losses and their ranks; x: what was drafted at them."""
        raise NotImplementedError

    def forward(
        self, features: Features, mask: Tensor, num_labels: Tensor, measure: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the packed Measures of a batch.

        mask [B, T] tells which tokens are labels. num_labels [P] are the counts that the losses of
        the positions are divided by: those of the whole optimizer step, over all of its batches and
        processes, so that how the step is cut up does not matter. `measure`: accuracies too.
        """
        total = features.hidden.new_zeros((), dtype=torch.float32)
        losses, ranks, masks = [], [], []
        for position, drafted in enumerate(self.draft(features)):
            labels = find_labels(features, mask, num_labels, position, self.loss_decay)
            loss, own_losses, own_ranks = self.judge(
                features, position, drafted[labels.mask], labels, measure=measure
            )
            total = total + loss
            losses.append(own_losses)
            ranks.append(own_ranks)
            masks.append(labels.mask)
        measures = measure_positions(torch.cat(losses), torch.cat(ranks), masks, self.max_k)
        return total, measures.pack()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingMethod:
    """A method's entry in the registry.

    describe: a drafter and its target -> its config.json. convert_flags: what specdec-convert is
    given besides the drafter's folder, which follows `convert_folder`. list_shared: tensors of the
    target that the written file repeats, by their names there. choose_layers: the target's layers,
    from 0, whose outputs are read as `Features.auxiliary`, from the settings and its configuration.
    check_options: raises UsageError for options that exclude one another, before anything is read.
    new_parts: beginnings of tensors' names that a drafter to start from may lack; they begin anew.
    """

    build: Callable[[TrainSettings, Target], Drafter]
    describe: Callable[[Any, Target], Mapping[str, Any]]
    convert_folder: str
    convert_flags: Callable[[TrainSettings], list[str]] = lambda settings: []
    list_shared: Callable[[Target], Mapping[str, Tensor]] = lambda target: {}
    choose_layers: Callable[[TrainSettings, Any], tuple[int, ...]] = lambda settings, config: ()
    check_options: Callable[[TrainSettings], None] = lambda settings: None
    new_parts: tuple[str, ...] = ()
    weights_name: str = "model.safetensors"
    needs_head: bool = False
