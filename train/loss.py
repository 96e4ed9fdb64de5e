"""Loss of a wide output layer, computed chunk by chunk without all logits at once.

Legend: N labels, C labels of a chunk, E width of the last layer, R of a second matrix, V
vocabulary, P draft positions, K the largest k of top-k accuracy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .features import OutputHead, count_rows_at_once
from .loss_table import LOSSES, compute_acceptance

NOT_MEASURED = -1  # rank of a label without measurement
UNDRAFTABLE = torch.iinfo(torch.int64).max  # rank of a label outside of the draft vocabulary


@dataclasses.dataclass(frozen=True)
class Teacher:
    """Distribution of the target at the labels; share: its weight in the loss, 0 to 1.

    With a share of 1 the text's labels do not count: ranks are then of the target's most probable
    tokens among those that can be drafted. loss: a name of LOSSES. draft_tokens: [V], those that
    can be drafted; None for all. normalizers: [N], of `Features`, where only some can be drafted.
    """

    hidden: Tensor  # [N, D] the target's states
    head: OutputHead
    share: float
    loss: str = "kl"
    draft_tokens: Tensor | None = None
    normalizers: Tensor | None = None

    @functools.cached_property
    def draft_head(self) -> OutputHead:
        return self.head if self.draft_tokens is None else self.head.keep_tokens(self.draft_tokens)

    def compute_logits(self, chunk: slice) -> Tensor:
        """Compute the target's logits [C, V] at a chunk of the labels, in float32."""
        return self.draft_head.compute_logits(self.hidden[chunk])

    def compute_probabilities(self, chunk: slice) -> Tensor:
        """Compute the draft tokens' probabilities [C, V], which other tokens have a part of."""
        logits = self.compute_logits(chunk)
        if self.normalizers is None:
            assert self.draft_tokens is None
            return logits.softmax(1)
        return logits.sub_(self.normalizers[chunk, None]).exp_()


@dataclasses.dataclass(frozen=True)
class _LossOptions:
    """Options of `compute_loss`."""

    measure: bool
    defers_gradients: bool


class _LinearLoss(torch.autograd.Function):
    """Loss whose gradients are computed with it, so that no logits are kept.

    Deferred gradients are computed in the backward pass, from logits that are computed once more:
    a matrix's gradient, as large as the matrix, is then there only while it is needed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        label_weights: Tensor,
        teacher: Teacher | None,
        second_weight: Tensor | None,
        options: _LossOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = [weight] if second_weight is None else [weight, second_weight]
        needs_weight_grads = [ctx.needs_input_grad[1], ctx.needs_input_grad[5]][: len(weights)]
        needs_grad = ctx.needs_input_grad[0] or any(needs_weight_grads)
        computes_now = needs_grad and not options.defers_gradients
        gradients = _Gradients(x, weights, needs_weight_grads) if computes_now else None
        losses, ranks = _walk_chunks(
            x, weights, labels, label_weights, teacher, gradients, measure=options.measure
        )
        ctx.dtypes = [matrix.dtype for matrix in weights]
        if gradients is not None:
            ctx.save_for_backward(gradients.grad_x, *gradients.sums)
        elif needs_grad:
            ctx.save_for_backward(x, labels, label_weights, *weights)
            ctx.needs_weight_grads, ctx.teacher = needs_weight_grads, teacher
            kind = x.device.type
            ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.defers = options.defers_gradients
        ctx.mark_non_differentiable(losses, ranks)
        return (losses * label_weights).sum(), losses, ranks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.defers:
            x, labels, label_weights, *weights = ctx.saved_tensors
            gradients = _Gradients(x, weights, ctx.needs_weight_grads)
            kind, dtype, is_autocast = ctx.autocast
            with torch.autocast(kind, dtype, enabled=is_autocast):
                _walk_chunks(
                    x, weights, labels, label_weights, ctx.teacher, gradients, measure=False
                )
            grad_x, sums = gradients.grad_x, gradients.sums
        else:
            grad_x, *sums = ctx.saved_tensors
        scale = Tensor.mul_ if ctx.defers else Tensor.mul  # saved tensors may be read again
        grad_weight, grad_second_weight = [
            None if gradient_sum is None else scale(gradient_sum, grads[0]).to(dtype)
            for gradient_sum, dtype in zip(sums, ctx.dtypes, strict=True)
        ] + [None] * (2 - len(sums))
        return grad_x * grads[0], grad_weight, None, None, None, grad_second_weight, None


class _Gradients:
    """Gradients of the loss by x [N, E + R] and by the matrices that need theirs, summed up."""

    def __init__(self, x: Tensor, weights: list[Tensor], needs_sums: list[bool]) -> None:
        self.grad_x = torch.empty_like(x)
        self.sums = [
            torch.zeros_like(matrix, dtype=torch.float32) if needs_sum else None
            for matrix, needs_sum in zip(weights, needs_sums, strict=True)
        ]

    def add(self, layer: _OutputLayer, x: Tensor, chunk: slice, gradient: Tensor) -> None:
        """Add the gradient of a chunk's logits, [C, V]."""
        self.grad_x[chunk] = layer.multiply_transposed(gradient)
        for gradient_sum, inputs in zip(self.sums, layer.split(x[chunk]), strict=True):
            if gradient_sum is not None:
                gradient_sum += gradient.T @ inputs


def _walk_chunks(
    x: Tensor, weights: list[Tensor], labels: Tensor, label_weights: Tensor,
    teacher: Teacher | None, gradients: _Gradients | None, *, measure: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the labels' losses and ranks, both [N]; add up their gradients where wanted."""
    layer = _OutputLayer(weights, x.dtype)
    losses = torch.empty(len(x), dtype=torch.float32, device=x.device)  # [N]
    ranks = torch.full((len(x),), NOT_MEASURED, dtype=torch.int64, device=x.device)  # [N]
    for chunk in _split_labels(x, weights[0]):
        result = _compute_chunk(layer, x, labels, chunk, teacher, measure=measure)
        losses[chunk] = result.losses
        if result.ranks is not None:
            ranks[chunk] = result.ranks
        if gradients is not None:
            gradient = result.differentiate(label_weights[chunk, None]).to(x.dtype)  # [C, V]
            gradients.add(layer, x, chunk, gradient)
        del result  # frees its [C, V] before the next chunk
    return losses, ranks


class _OutputLayer:
    """Output layer of one matrix [V, E], or of two side by side, [V, E] and [V, R]."""

    def __init__(self, weights: list[Tensor], dtype: torch.dtype) -> None:
        self.matrices = [weight.to(dtype) for weight in weights]
        self.widths = [weight.shape[1] for weight in weights]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of each matrix: [C, E + R] -> [C, E], [C, R]."""
        return torch.split(x, self.widths, 1)

    def compute_logits(self, x: Tensor) -> Tensor:
        """Return logits [C, V] in float32; x: [C, E + R]."""
        inputs, *second_inputs = self.split(x)
        logits = (inputs @ self.matrices[0].T).float()
        for second_input in second_inputs:
            logits = logits.add_(second_input @ self.matrices[1].T)
        return logits

    def multiply_transposed(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the input: [C, V] -> [C, E + R]."""
        return torch.cat([gradient @ matrix for matrix in self.matrices], 1)


@dataclasses.dataclass(frozen=True)
class _ChunkResult:
    """Losses and ranks of a chunk of labels, and the tensors of their gradient."""

    losses: Tensor  # [C]
    ranks: Tensor | None  # [C], where measured
    labels: Tensor  # [C, 1]
    exponentials: Tensor  # [C, V] of the logits, each row less its highest
    totals: Tensor  # [C, 1] sums of the exponentials
    target_probabilities: Tensor | None  # [C, V]
    share: float  # weight of the target's distribution in the loss

    def differentiate(self, row_weights: Tensor) -> Tensor:
        """Return the gradient of the logits [C, V], in the memory of the exponentials.

        It is the softmax minus the learned distribution, times row_weights [C, 1].
        """
        share = self.share
        gradient = self.exponentials.mul_(row_weights / self.totals)
        if share < 1:
            gradient = gradient.scatter_add_(1, self.labels, (share - 1) * row_weights)
        if self.target_probabilities is not None:
            gradient = gradient.sub_(self.target_probabilities.mul_(share * row_weights))
        return gradient


def _compute_chunk(
    layer: _OutputLayer, x: Tensor, labels: Tensor, chunk: slice, teacher: Teacher | None, *,
    measure: bool,
) -> _ChunkResult | _TableChunkResult:  # fmt: skip
    """Compute the losses of a chunk of labels, and their ranks if `measure`."""
    if teacher is not None and teacher.loss != "kl":
        return _compute_table_chunk(layer, x, labels, chunk, teacher, measure=measure)
    index = labels[chunk, None]  # [C, 1]
    logits = layer.compute_logits(x[chunk])  # [C, V]
    share = teacher.share if teacher is not None else 0.0
    target_logits = teacher.compute_logits(chunk) if teacher is not None else None  # [C, V]
    tokens = index  # [C, 1] whose ranks count: the text's or the target's
    if target_logits is not None and share == 1:
        tokens = target_logits.argmax(1, keepdim=True)
    token_logits = logits.gather(1, tokens)  # [C, 1]
    ranks = rank_labels(logits, token_logits, tokens) if measure else None
    highest = logits.amax(1, keepdim=True)  # [C, 1]
    probabilities = None
    if target_logits is not None:
        log_probabilities = target_logits.log_softmax(1)
        del target_logits  # [C, V] less at a time
        entropies = -(log_probabilities.exp() * log_probabilities).sum(1)  # [C]
        probabilities = log_probabilities.exp_()
        mean_logits = (probabilities * logits).sum(1)  # [C] by the target's distribution
    exponentials = logits.sub_(highest).exp_()  # [C, V]
    totals = exponentials.sum(1, keepdim=True)  # [C, 1]
    normalizers = (totals.log() + highest)[:, 0]  # [C] logarithms of the softmax's denominators
    losses = normalizers - token_logits[:, 0]
    if probabilities is not None:
        # The divergence from the target's distribution, which is 0 at best.
        divergences = normalizers - mean_logits - entropies
        losses = (1 - share) * losses + share * divergences
    return _ChunkResult(losses, ranks, index, exponentials, totals, probabilities, share)


@dataclasses.dataclass(frozen=True)
class _TableChunkResult:
    """Losses and ranks of a chunk of labels, and the logits that torch differentiates them by."""

    losses: Tensor  # [C]
    ranks: Tensor | None  # [C], where measured
    differentiable_losses: Tensor  # [C]
    logits: Tensor  # [C, V]

    def differentiate(self, row_weights: Tensor) -> Tensor:
        """Return the gradient of the logits [C, V]; row_weights: [C, 1]."""
        (gradient,) = torch.autograd.grad(
            self.differentiable_losses, self.logits, grad_outputs=row_weights[:, 0]
        )
        return gradient


def _compute_table_chunk(
    layer: _OutputLayer, x: Tensor, labels: Tensor, chunk: slice, teacher: Teacher, *,
    measure: bool,
) -> _TableChunkResult:  # fmt: skip
    """Compute a chunk by any loss of LOSSES; `_compute_chunk` has kl's gradient without torch's."""
    logits = layer.compute_logits(x[chunk]).detach().requires_grad_()  # [C, V]
    probabilities = teacher.compute_probabilities(chunk)
    share, tokens = teacher.share, labels[chunk, None]
    with torch.enable_grad():
        losses = share * LOSSES[teacher.loss](logits, probabilities)
        if share < 1:
            text_losses = -logits.log_softmax(1).gather(1, tokens)[:, 0]
            losses = losses + (1 - share) * text_losses
    ranks = None
    if measure:
        if share == 1:
            tokens = probabilities.argmax(1, keepdim=True)
        values = logits.detach()
        ranks = rank_labels(values, values.gather(1, tokens), tokens)
    return _TableChunkResult(losses.detach(), ranks, losses, logits)


def rank_labels(logits: Tensor, label_logits: Tensor, index: Tensor) -> Tensor:
    """Count the tokens that come before each label in order of logit; ties go to the lower id.

    logits [C, V], label_logits, index [C, 1] -> [C]; rank 0 is the best, so top-k holds rank < k.
    """
    above = (logits > label_logits).sum(1)
    lower_ids = torch.arange(logits.shape[1], device=logits.device) < index  # [C, V]
    return above + ((logits == label_logits) & lower_ids).sum(1)


def _split_labels(x: Tensor, weight: Tensor) -> Iterator[slice]:
    """Yield chunks of the labels [N] whose logits fit the device."""
    size = count_rows_at_once(x.device, len(weight))
    for start in range(0, len(x), size):
        yield slice(start, start + size)


def measure_acceptances(
    x: Tensor, weight: Tensor, labels: Tensor, *, teacher: Teacher | None = None,
    second_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the probability that each draft token is accepted, [N] in float32.

    Without a teacher the text's tokens stand for the target's choice. Other arguments: of
    `compute_loss`.
    """
    layer = _OutputLayer([weight] if second_weight is None else [weight, second_weight], x.dtype)
    acceptances = torch.empty(len(x), dtype=torch.float32, device=x.device)
    with torch.no_grad():
        for chunk in _split_labels(x, weight):
            logits = layer.compute_logits(x[chunk])
            if teacher is not None:
                probabilities = teacher.compute_probabilities(chunk)
                acceptances[chunk] = compute_acceptance(logits, probabilities)
            else:
                acceptances[chunk] = logits.softmax(1).gather(1, labels[chunk, None])[:, 0]
    return acceptances


def compute_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_weights: Tensor,
    *,
    measure: bool,
    teacher: Teacher | None = None,
    second_weight: Tensor | None = None,
    defers_gradients: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted sum of the labels' losses, each label's loss, and each label's rank.

    x [N, E], or [N, E + R] with `second_weight` [V, R] beside the weight [V, E], labels and
    label_weights [N] -> scalar, [N], [N]. A loss is the label's cross-entropy and, as far as a
    teacher has a share, its loss from its distribution. Only the first result is
    differentiable. Ranks are NOT_MEASURED unless `measure`. N may be 0. defers_gradients: whether
    they are computed in the backward pass, to the same bits. Fused linear and cross-entropy as in
    https://arxiv.org/abs/2410.10989.
    """
    results: tuple[Tensor, Tensor, Tensor] = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        x,
        weight,
        labels,
        label_weights,
        teacher,
        second_weight,
        _LossOptions(measure, defers_gradients),
    )
    return results


@dataclasses.dataclass
class Measures:
    """Sums over labels, which are added up over batches and processes.

    chain: right draft tokens of a greedy chain before its first mistake, summed over `num_chains`
    positions of the text.
    """

    loss: Tensor  # [P] summed losses in nats
    num_labels: Tensor  # [P]
    hits: Tensor  # [P, K] labels among the top k; zero where accuracy was not measured
    chain: Tensor  # []
    num_chains: Tensor  # []

    def pack(self) -> Tensor:
        """Return one vector of all sums, for one reduction over the processes."""
        sums = (self.loss, self.num_labels, self.hits.flatten(), self.chain, self.num_chains)
        return torch.cat([p.reshape(-1).float() for p in sums])

    @staticmethod
    def unpack(vector: Tensor, num_positions: int) -> Measures:
        """Return the measures of a vector that `pack` made."""
        values = vector.double().cpu()
        loss, num_labels = values[: 2 * num_positions].reshape(2, -1)
        accuracy_sums = values[2 * num_positions :]
        return Measures(
            loss=loss,
            num_labels=num_labels,
            hits=accuracy_sums[:-2].reshape(num_positions, -1),
            chain=accuracy_sums[-2],
            num_chains=accuracy_sums[-1],
        )

    def summarize(self) -> dict[str, Any]:
        """Return the means for reports: losses in nats, accuracies from 0 to 1."""
        num_labels = self.num_labels.clamp(min=1)
        losses = (self.loss / num_labels).tolist()
        return {
            "loss": round(sum(losses), 4),
            "loss_per_position": [round(x, 4) for x in losses],
            "top_k_accuracy": [
                [round(x, 4) for x in row] for row in (self.hits / num_labels[:, None]).tolist()
            ],
            "chain_length": round(1 + float(self.chain / self.num_chains.clamp(min=1)), 4),
            "num_labels": int(self.num_labels[0]),
        }


def measure_positions(
    losses: Tensor, ranks: Tensor, label_masks: list[Tensor], max_k: int
) -> Measures:
    """Sum up losses and ranks of a batch's labels.

    losses, ranks: [N], of the labels of position 0, then of position 1, and so on; each in the
    order of its mask. label_masks: for each position i a mask [B, T_i], true for places with a
    label; a place of the text has one column in all masks.
    """
    counts = [int(m.sum()) for m in label_masks]
    position_ranks = torch.split(ranks, counts)
    zeros = losses.new_zeros(())
    hits = torch.stack(
        [torch.stack([(r < k).sum() for k in range(1, max_k + 1)]) for r in position_ranks]
    ).float()  # [P, K]
    is_measured = not (ranks == NOT_MEASURED).any()
    chain, num_chains = zeros, zeros
    width = label_masks[-1].shape[1]
    if is_measured and width:
        is_unbroken = torch.stack([m[:, :width] for m in label_masks]).all(0)  # [B, width]
        num_chains = is_unbroken.sum().float()
        for mask, rank in zip(label_masks, position_ranks, strict=True):
            hit = torch.zeros_like(mask)
            hit[mask] = rank == 0
            is_unbroken = is_unbroken & hit[:, :width]
            chain = chain + is_unbroken.sum()
    return Measures(
        loss=torch.stack(
            [position_losses.sum() for position_losses in torch.split(losses, counts)]
        ),
        num_labels=losses.new_tensor(counts),
        hits=hits if is_measured else torch.zeros_like(hits),
        chain=chain,
        num_chains=num_chains,
    )
