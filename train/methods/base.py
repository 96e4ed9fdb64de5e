"""Base of the trainable methods. Legend: B rows, T tokens, D hidden, P draft positions.

Draft position i at place t of a row is about token t+2+i: token t+1 comes from the target itself.
N counts the labels of one position, V the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from specdec.errors import SpecDecError

from ..depth_weights import MEASURED_WEIGHTINGS, weigh_depths
from ..features import Features
from ..loss import (
    UNDRAFTABLE,
    Teacher,
    compute_loss,
    measure_acceptances,
    measure_positions,
)
from ..rows import TokenRows
from ..settings import TrainSettings
from ..target import FrozenTarget

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Labels:
    """Labels of one draft position."""

    mask: Tensor  # [B, T-2-i] places that have a label
    tokens: Tensor  # [N]
    weights: Tensor  # [N] weight of each label's loss in the sum
    hidden: Tensor  # [N, D] the target's states that predict the labels' tokens


@dataclasses.dataclass(frozen=True)
class HeadInput:
    """Input and matrices of the output layer that makes a position's logits.

    second_weight: [V, R], beside the weight. draft_tokens: [V], those of the logits; None for all
    of the target's.
    """

    x: Tensor  # [N, E], or [N, E + R]
    weight: Tensor  # [V, E]
    second_weight: Tensor | None = None
    draft_tokens: Tensor | None = None


def pick_labels(next_tokens: Tensor, labels: Labels) -> Tensor:
    """Return what the target says of the labels, [N]; next_tokens: of the token after each, [B, T].

    The labels are of a draft from every place of the rows.
    """
    first = next_tokens.shape[1] - 1 - labels.mask.shape[1]
    return next_tokens[:, first:-1][labels.mask]


def choose_mask_token(flag: str, requested_token: int | None, config: Any, table: Tensor) -> int:
    """Return the mask token: the flag's, or the target's padding or end token, or its first.

    The token's row of the target's embedding, table [V, D], is not trained. Many targets' padding
    has a row of zeros. Queries made of it would be zero, and nothing would be learned. Raises
    SpecDecError where the requested token has such a row, or is not in the vocabulary.
    """
    candidates = [requested_token]
    if requested_token is None:
        end_tokens = getattr(config, "eos_token_id", None)
        candidates = [getattr(config, "pad_token_id", None)]
        candidates += end_tokens if isinstance(end_tokens, list) else [end_tokens]
        candidates += range(len(table))
    usable_tokens = (n for n in candidates if n is not None and n < len(table) and table[n].any())
    token = next(usable_tokens, None)
    if token is None:
        raise SpecDecError(
            f"{flag} is {requested_token}: of the target's {len(table)} tokens it is none, or"
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


class OutputLayer(torch.nn.Linear):
    """Output layer of the drafter's own, without a bias, whose matrix a function uses.

    The matrices of a sharded drafter are whole only within the forward pass of their module.
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, bias=False)

    def forward(  # type: ignore[override]
        self, x: Tensor, use: Callable[[Tensor, Tensor], Result]
    ) -> Result:
        return use(x, self.weight)


class TrainableDrafter(torch.nn.Module):
    """Network in training, whose parameters are named as in the written file.

    `finish_weights` makes the file's tensors of them. A method overrides `draft_states` or
    `iterate_guesses`, and mostly `use_head`, or `forward`. Matrices are read within the forward
    pass of their modules, which all processes call equally often: those of a sharded drafter are
    gathered there.
    """

    output_layers: tuple[str, ...] = ()  # names of matrices with a row for each token
    row_seeds: Sequence[int] = ()  # of the batch's rows, for `draw_uniform`
    is_sharded = False  # by `sharding.shard_drafter`

    def __init__(
        self, settings: TrainSettings, *, num_positions: int, loss_decay: float, vocab_size: int
    ) -> None:
        super().__init__()
        self.num_positions = num_positions
        self.depth_weighting = settings.depth_weighting
        self.loss_decay = loss_decay if self.depth_weighting == "decay" else 1.0
        self.max_k = min(settings.report_top_k, vocab_size)
        # Weight of the target's distribution in the loss.
        self.teacher_share = settings.self_distillation or 0.0
        self.loss_name = settings.loss

    def finish_weights(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors that are written, by the whole tensors of `state_dict`."""
        return weights

    def draw_uniform(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Draw numbers from 0 to 1, [B, ...], each row's by its seed alone.

        So a row's are equal whichever process reads it, and on a CPU however long its batch is.
        """
        rows = [torch.Generator(device).manual_seed(seed) for seed in self.row_seeds]
        if not rows:
            return torch.rand(*shape, device=device)
        return torch.stack([torch.rand(*shape[1:], generator=g, device=device) for g in rows])

    def count_labels(self, mask: Tensor) -> Tensor:
        """Count the labels of each draft position. mask [B, T] bool -> [P]."""
        return torch.stack([mask[:, 2 + i :].sum() for i in range(self.num_positions)])

    def find_labels(
        self, features: Features, mask: Tensor, num_labels: Tensor, position: int
    ) -> Labels:
        """Return the labels of a draft position; num_labels [P]: of `forward`."""
        label_mask = mask[:, 2 + position :]
        tokens = features.tokens[:, 2 + position :][label_mask]
        return Labels(
            mask=label_mask,
            tokens=tokens,
            weights=self.weigh_labels(position, num_labels).float().expand(len(tokens)),
            hidden=features.hidden[:, 1 + position : 1 + position + label_mask.shape[1]][
                label_mask
            ],
        )

    def weigh_labels(self, position: int, num_labels: Tensor) -> Tensor:
        """Return the weight of each label of a position in the loss."""
        return self.loss_decay**position / num_labels[position].clamp(min=1)

    def draft_states(self, features: Features) -> list[Tensor]:
        """Return each position's states, which predict its tokens: [B, T-2-i, D or more]."""
        raise NotImplementedError

    def iterate_guesses(
        self, features: Features, mask: Tensor, num_labels: Tensor
    ) -> Iterator[tuple[Tensor, Labels]]:
        """Yield each position's states [N, D or more] at its labels, and the labels."""
        for position, states in enumerate(self.draft_states(features)):
            labels = self.find_labels(features, mask, num_labels, position)
            yield states[labels.mask], labels

    def use_head(
        self, features: Features, position: int, x: Tensor, use: Callable[[HeadInput], Result]
    ) -> Result:
        """Return what a function makes of a position's output layer and its input.

        Here the layer is the target's. x: [N, D or more], as guessed.
        """
        head = features.head
        assert head is not None
        return use(HeadInput(head.join_input(x), head.joint_weight))

    def make_teacher(
        self, features: Features, labels: Labels, draft_tokens: Tensor | None
    ) -> Teacher | None:
        """Return the target's distribution at the labels; None where only the text teaches."""
        if not self.teacher_share:
            return None
        assert features.head is not None
        normalizers = None
        if draft_tokens is not None and self._reads_probabilities:
            normalizers = pick_labels(features.normalizers, labels)
        return Teacher(
            labels.hidden, features.head, self.teacher_share, self.loss_name, draft_tokens,
            normalizers,
        )  # fmt: skip

    @property
    def _reads_probabilities(self) -> bool:
        """Return whether the target's probabilities count, and not their shares alone."""
        return self.loss_name != "kl" or self.depth_weighting == "reach"

    def compute_position_loss(
        self, features: Features, position: int, x: Tensor, labels: Labels, *, measure: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a position's loss, its labels' losses and ranks.

        x: [N, D or more], the drafter's states at the labels.
        """
        return self.use_head(
            features, position, x,
            lambda head_input: self.compute_head_loss(
                features, head_input, labels, measure=measure
            ),
        )  # fmt: skip

    def compute_head_loss(
        self, features: Features, head_input: HeadInput, labels: Labels, *, measure: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `compute_loss` of an output layer; the target teaches where it has a share.

        The target's choices outside of the draft vocabulary are among no drafter's best tokens.
        """
        tokens = labels.tokens
        if head_input.draft_tokens is not None:
            # Labels are the target's choices among the draft tokens, not the text's tokens.
            tokens = torch.zeros_like(tokens)
        weights = (head_input.weight, head_input.second_weight)
        loss, losses, ranks = compute_loss(
            head_input.x,
            head_input.weight,
            tokens,
            labels.weights,
            measure=measure,
            teacher=self.make_teacher(features, labels, head_input.draft_tokens),
            second_weight=head_input.second_weight,
            # A gradient that waited for the backward pass would be whole all that time.
            defers_gradients=self.is_sharded
            and any(weight is not None and weight.requires_grad for weight in weights),
        )
        if measure and head_input.draft_tokens is not None:
            _, is_drafted = self.find_choices(features, labels, head_input.draft_tokens)
            ranks = ranks.masked_fill(~is_drafted, UNDRAFTABLE)
        return loss, losses, ranks

    def find_choices(
        self, features: Features, labels: Labels, draft_tokens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the rows of the output layer for the right tokens, and which have one, both [N].

        They are the text's tokens, or the target's choices where it alone teaches. A token outside
        of the draft vocabulary has no row; its number is any.
        """
        tokens = labels.tokens
        if draft_tokens is None:
            if self.teacher_share == 1:
                assert features.head is not None
                tokens = features.head.choose_tokens(labels.hidden)
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        if self.teacher_share == 1:
            tokens = pick_labels(features.choices, labels)
        draft_tokens = draft_tokens.to(tokens.device)
        rows = torch.searchsorted(draft_tokens, tokens).clamp(max=len(draft_tokens) - 1)
        return rows, draft_tokens[rows] == tokens

    def measure_position(
        self, features: Features, position: int, x: Tensor, labels: Labels
    ) -> Tensor:
        """Return `measure_head` of a position; x: [N, D or more], as guessed."""
        return self.use_head(
            features, position, x,
            lambda head_input: self.measure_head(features, head_input, labels),
        )  # fmt: skip

    def measure_head(self, features: Features, head_input: HeadInput, labels: Labels) -> Tensor:
        """Return the probability that each label's draft token is accepted, [N].

        D-PACE has the drafter's probability of the right token instead.
        """
        if self.depth_weighting == "dpace":
            rows, is_drafted = self.find_choices(features, labels, head_input.draft_tokens)
            return is_drafted * measure_acceptances(
                head_input.x, head_input.weight, rows, second_weight=head_input.second_weight
            )
        return measure_acceptances(
            head_input.x, head_input.weight, labels.tokens,
            teacher=self.make_teacher(features, labels, head_input.draft_tokens),
            second_weight=head_input.second_weight,
        )  # fmt: skip

    def weigh_depths(self, acceptances: Sequence[Tensor], labels: Sequence[Labels]) -> list[Labels]:
        """Return each position's labels with weights by the acceptance of the depths."""
        weights = weigh_depths(self.depth_weighting, acceptances, [item.mask for item in labels])
        return [
            dataclasses.replace(item, weights=item.weights * weight)
            for item, weight in zip(labels, weights, strict=True)
        ]

    def list_guesses(
        self, features: Features, mask: Tensor, num_labels: Tensor
    ) -> list[tuple[Tensor, Labels]]:
        """List the states and labels of `iterate_guesses`, weighted by depth."""
        guesses = list(self.iterate_guesses(features, mask, num_labels))
        if self.depth_weighting not in MEASURED_WEIGHTINGS:
            return guesses
        with torch.no_grad():
            acceptances = [
                self.measure_position(features, position, x, labels)
                for position, (x, labels) in enumerate(guesses)
            ]
        all_labels = self.weigh_depths(acceptances, [labels for _, labels in guesses])
        return [(x, labels) for (x, _), labels in zip(guesses, all_labels, strict=True)]

    def forward(
        self, features: Features, mask: Tensor, num_labels: Tensor, measure: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the packed Measures of a batch.

        mask: [B, T], true for tokens that are labels. num_labels: [P], labels of each position in
        the whole optimizer step, over all of its batches and processes; the losses are divided by
        them, so that a step has one result for any division into batches. measure: whether
        accuracies are measured.
        """
        total = features.hidden.new_zeros((), dtype=torch.float32)
        losses, ranks, masks = [], [], []
        for position, (x, labels) in enumerate(self.list_guesses(features, mask, num_labels)):
            loss, label_losses, label_ranks = self.compute_position_loss(
                features, position, x, labels, measure=measure
            )
            total = total + loss
            losses.append(label_losses)
            ranks.append(label_ranks)
            masks.append(labels.mask)
        measures = measure_positions(torch.cat(losses), torch.cat(ranks), masks, self.max_k)
        return total, measures.pack()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingMethod:
    """Entry of a method in the registry.

    describe: a drafter and its target -> its config.json. convert_flags: arguments of
    specdec-convert besides the drafter's folder, which follows `convert_folder`. choose_layers: the
    target's layers, from 0, whose outputs are read as `Features.auxiliary`, from the settings and
    the target's configuration. find_first_weights: gives a drafter that has taken no step better
    weights to begin with, from the target's states of training rows, alike in every process.
    list_written_copies: tensors of the target that the written file repeats, by their names there.

    Of the file of --start-from, which others may have written: list_accepted_copies, tensors of the
    target that it may repeat, by their names there, and that must be equal; optional_prefixes,
    beginnings of the names of tensors that it may lack, which begin anew; published_prefixes, other
    beginnings of names -> ours; derived_tensors, which follow from the others and are passed over.
    """

    build: Callable[[TrainSettings, FrozenTarget], TrainableDrafter]
    describe: Callable[[Any, FrozenTarget], Mapping[str, Any]]
    convert_folder: str
    convert_flags: Callable[[TrainSettings], list[str]] = lambda settings: []
    choose_layers: Callable[[TrainSettings, Any], tuple[int, ...]] = lambda settings, config: ()
    find_first_weights: Callable[[TrainSettings, Any, FrozenTarget, TokenRows], None] | None = None
    list_written_copies: Callable[[FrozenTarget], Mapping[str, Tensor]] = lambda target: {}
    list_accepted_copies: Callable[[FrozenTarget], Mapping[str, Tensor]] = lambda target: {}
    optional_prefixes: tuple[str, ...] = ()
    published_prefixes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    derived_tensors: tuple[str, ...] = ()
    weights_name: str = "model.safetensors"
    needs_head: bool = False
