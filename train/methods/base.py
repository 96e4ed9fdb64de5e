"""What every trainable method provides. Legend: B rows, T tokens, D hidden, P draft positions.

Draft position i at place t of a row is about token t+2+i: token t+1 comes from the target itself.
N counts the labels of one position, V the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from specdec.errors import SpecDecError

from ..features import Features
from ..loss import Teacher, compute_loss, measure_positions
from ..settings import TrainSettings
from ..target import Target


@dataclasses.dataclass(frozen=True)
class Labels:
    """The labels of one draft position."""

    mask: Tensor  # [B, T-2-i] which places have one
    tokens: Tensor  # [N]
    weights: Tensor  # [N] of each one's loss in the whole
    hidden: Tensor  # [N, D] the target's states by which it predicts the same tokens itself


def choose_mask_token(flag: str, given: int | None, config: Any, table: Tensor) -> int:
    """The mask token: given by `flag`, or the target's padding or end token, or its first.

    The token's row of the target's embedding, table [V, D], is not trained. Many targets' padding
    has a row of zeros. Queries made of it would be zero, and nothing would be learned. Raises
    SpecDecError where the given token has such a row, or is not in the vocabulary.
    """
    ends = getattr(config, "eos_token_id", None)
    padding = getattr(config, "pad_token_id", None)
    found = [padding, *(ends if isinstance(ends, list) else [ends]), *range(len(table))]
    found = found if given is None else [given]
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

    A method writes `draft` or `guess`, and mostly `judge`, or a `forward` of its own.
    """

    def __init__(
        self, settings: TrainSettings, *, num_positions: int, loss_decay: float, vocab_size: int
    ) -> None:
        super().__init__()
        self.num_positions, self.loss_decay = num_positions, loss_decay
        self.max_k = min(settings.report_top_k, vocab_size)
        self.share = settings.self_distillation or 0.0  # of the target's distribution

    def count_labels(self, mask: Tensor) -> Tensor:
        """Count the labels of each draft position. mask [B, T] bool -> [P]."""
        return torch.stack([mask[:, 2 + i :].sum() for i in range(self.num_positions)])

    def find_labels(
        self, features: Features, mask: Tensor, num_labels: Tensor, position: int
    ) -> Labels:
        """Return the labels of a draft position; num_labels [P] as `forward` has them."""
        here = mask[:, 2 + position :]
        tokens = features.tokens[:, 2 + position :][here]
        return Labels(
            mask=here,
            tokens=tokens,
            weights=self.weigh(position, num_labels).float().expand(len(tokens)),
            hidden=features.hidden[:, 1 + position : 1 + position + here.shape[1]][here],
        )

    def weigh(self, position: int, num_labels: Tensor) -> Tensor:
        """The weight of each label of a position in the loss."""
        return self.loss_decay**position / num_labels[position].clamp(min=1)

    def draft(self, features: Features) -> list[Tensor]:
        """What each position's guesses are made from at every place, [B, T-2-i, D or more]."""
        raise NotImplementedError

    def guess(
        self, features: Features, mask: Tensor, num_labels: Tensor
    ) -> Iterator[tuple[Tensor, Labels]]:
        """Yield each position's labels, and what was drafted at them, [N, D or more]."""
        for position, drafted in enumerate(self.draft(features)):
            labels = self.find_labels(features, mask, num_labels, position)
            yield drafted[labels.mask], labels

    def judge(
        self, features: Features, position: int, x: Tensor, labels: Labels, *, measure: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the labels' losses and their ranks; x: what was drafted at them.

        Here by the target's own output layer.
        """
        head = features.head
        assert head is not None
        x = head.join_input(x)
        return self.compare(features, x, head.joint_weight, labels, measure=measure)

    def compare(
        self, features: Features, x: Tensor, weight: Tensor, labels: Labels, *, measure: bool,
        more: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`compute_loss` of an output layer, taught by the target as far as it has a share."""
        teacher = None
        if self.share:
            assert features.head is not None
            teacher = Teacher(labels.hidden, features.head, self.share)
        return compute_loss(
            x, weight, labels.tokens, labels.weights, measure=measure, teacher=teacher, more=more
        )

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
        for position, (x, labels) in enumerate(self.guess(features, mask, num_labels)):
            loss, own_losses, own_ranks = self.judge(features, position, x, labels, measure=measure)
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
    new_parts: beginnings of tensors' names that a drafter to start from may lack; they begin again.
    """

    build: Callable[[TrainSettings, Target], Drafter]
    describe: Callable[[Any, Target], Mapping[str, Any]]
    convert_folder: str
    convert_flags: Callable[[TrainSettings], list[str]] = lambda settings: []
    list_shared: Callable[[Target], Mapping[str, Tensor]] = lambda target: {}
    choose_layers: Callable[[TrainSettings, Any], tuple[int, ...]] = lambda settings, config: ()
    new_parts: tuple[str, ...] = ()
    weights_name: str = "model.safetensors"
    needs_head: bool = False
