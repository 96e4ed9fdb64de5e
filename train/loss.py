"""Cross-entropy of a wide output layer without ever holding all the logits.

Legend: N labels, C labels of a chunk, E width of the last layer, R of a second matrix, V
vocabulary, P draft positions, K the largest k of top-k accuracy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .features import OutputHead

# Logits held at a time. Small enough for a processor's cache to help, large enough for a GPU.
CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 27}
NOT_MEASURED = -1


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The target's own distribution at the labels, and its share in what is learned, 0 to 1.

    With a share of 1 the labels no longer count: accuracies are then those of guessing the target's
    most probable tokens.
    """

    hidden: Tensor  # [N, D] the target's states
    head: OutputHead
    share: float

    def compute_logits(self, part: slice) -> Tensor:
        """Logits [C, V] at some of the labels, in float32."""
        return self.head.compute_logits(self.hidden[part])


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients with the loss, chunk by chunk, so that no logits are kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        label_weights: Tensor,
        measure: bool,
        teacher: Teacher | None,
        second_weight: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        compute = x.dtype
        weights = [weight] if second_weight is None else [weight, second_weight]
        casts = [part.to(compute) for part in weights]  # [V, E], [V, R]
        widths = [part.shape[1] for part in weights]
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device)  # [N]
        ranks = torch.full((len(x),), NOT_MEASURED, dtype=torch.int64, device=x.device)  # [N]
        needs = [ctx.needs_input_grad[1], ctx.needs_input_grad[6]][: len(weights)]
        needs_grad = ctx.needs_input_grad[0] or any(needs)
        grad_x = torch.empty_like(x) if needs_grad else None  # [N, E + R]
        grad_weights = [
            torch.zeros_like(part, dtype=torch.float32) if is_needed else None
            for part, is_needed in zip(weights, needs, strict=True)
        ]
        budget = CHUNK_ELEMENTS.get(x.device.type, CHUNK_ELEMENTS["cuda"])
        size = max(1, budget // len(weight))
        share = teacher.share if teacher is not None else 0.0
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            x_part, index = x[part], labels[part, None]  # [C, E], [C, 1]
            pieces = torch.split(x_part, widths, 1)
            logits = (pieces[0] @ casts[0].T).float()  # [C, V]
            if second_weight is not None:
                logits = logits.add_(pieces[1] @ casts[1].T)
            wanted = teacher.compute_logits(part) if teacher is not None else None  # [C, V]
            guessed = wanted.argmax(1, keepdim=True) if wanted is not None and share == 1 else index
            of_label = logits.gather(1, guessed)  # [C, 1]
            if measure:
                ranks[part] = rank_labels(logits, of_label, guessed)
            highest = logits.amax(1, keepdim=True)  # [C, 1]
            inner, entropy = None, None
            if wanted is not None:
                wanted = wanted.log_softmax(1)
                entropy = -(wanted.exp() * wanted).sum(1)  # [C]
                wanted = wanted.exp_()
                inner = (wanted * logits).sum(1)  # [C]
            exponentials = logits.sub_(highest).exp_()  # [C, V]
            total = exponentials.sum(1, keepdim=True)  # [C, 1]
            whole = (total.log() + highest)[:, 0]  # [C] logarithm of the softmax's denominator
            part_losses = whole - of_label[:, 0]
            if inner is not None and entropy is not None:
                # The divergence from the target's distribution, which is 0 at best.
                part_losses = (1 - share) * part_losses + share * (whole - inner - entropy)
            losses[part] = part_losses
            if grad_x is not None:
                row_weights = label_weights[part, None]  # [C, 1]
                # Softmax minus what is wanted, times the weight of the label.
                gradient = exponentials.mul_(row_weights / total)
                if share < 1:
                    gradient = gradient.scatter_add_(1, index, (share - 1) * row_weights)
                if wanted is not None:
                    gradient = gradient.sub_(wanted.mul_(share * row_weights))
                scaled = gradient.to(compute)
                grad_x[part] = torch.cat([scaled @ cast for cast in casts], 1)
                for gradient_sum, piece in zip(grad_weights, pieces, strict=True):
                    if gradient_sum is not None:
                        gradient_sum += scaled.T @ piece
        ctx.save_for_backward(grad_x, *grad_weights)
        ctx.dtypes = [part.dtype for part in weights]
        ctx.mark_non_differentiable(losses, ranks)
        return (losses * label_weights).sum(), losses, ranks

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, *sums = ctx.saved_tensors
        of_weight, of_more = [
            None if own is None else (own * grads[0]).to(dtype)
            for own, dtype in zip(sums, ctx.dtypes, strict=True)
        ] + [None] * (2 - len(sums))
        return grad_x * grads[0], of_weight, None, None, None, None, of_more


def rank_labels(logits: Tensor, of_label: Tensor, index: Tensor) -> Tensor:
    """Count the tokens that come before each label in order of logit; ties go to the lower id.

    logits [C, V], of_label and index [C, 1] -> [C]; rank 0 is the best, so top-k holds rank < k.
    """
    above = (logits > of_label).sum(1)
    lower_ids = torch.arange(logits.shape[1], device=logits.device) < index  # [C, V]
    return above + ((logits == of_label) & lower_ids).sum(1)


def compute_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    label_weights: Tensor,
    *,
    measure: bool,
    teacher: Teacher | None = None,
    second_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weighted sum of the labels' losses, each one of them, and the labels' ranks.

    x [N, E], or [N, E + R] with `second_weight` [V, R] beside the weight [V, E], labels and
    label_weights [N] -> scalar, [N], [N]. A loss is the label's cross-entropy and, as far as a
    teacher has a share, the divergence from its distribution. Only the first result is
    differentiable. Ranks are NOT_MEASURED unless `measure`. N may be 0. Fused linear and cross-
    entropy as in https://arxiv.org/abs/2410.10989.
    """
    results: tuple[Tensor, Tensor, Tensor] = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x, weight, labels, label_weights, measure, teacher, second_weight
    )
    return results


@dataclasses.dataclass
class Measures:
    """Sums over labels, to be added up over batches and processes; positions are draft positions.

    `chain` counts the draft tokens that a greedy chain gets right before its first mistake, over
    `num_chains` places of the text.
    """

    loss: Tensor  # [P] summed losses in nats
    num_labels: Tensor  # [P]
    hits: Tensor  # [P, K] labels among the top k; zero where accuracy was not measured
    chain: Tensor  # []
    num_chains: Tensor  # []

    def pack(self) -> Tensor:
        """Flatten into one vector, for one reduction over the processes."""
        parts = (self.loss, self.num_labels, self.hits.flatten(), self.chain, self.num_chains)
        return torch.cat([p.reshape(-1).float() for p in parts])

    @staticmethod
    def unpack(vector: Tensor, num_positions: int) -> Measures:
        """Undo `pack`."""
        values = vector.double().cpu()
        loss, num_labels = values[: 2 * num_positions].reshape(2, -1)
        rest = values[2 * num_positions :]
        return Measures(
            loss=loss,
            num_labels=num_labels,
            hits=rest[:-2].reshape(num_positions, -1),
            chain=rest[-2],
            num_chains=rest[-1],
        )

    def summarize(self) -> dict[str, Any]:
        """Turn the sums into means: losses in nats, accuracies from 0 to 1."""
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
    """Sum up what the labels of a batch gave.

    losses and ranks [N] hold the labels of position 0, then of position 1, and so on; each in the
    order of its mask. label_masks[i] [B, T_i] tells which places t have a label at position i;
    place t is in the same column of all of them.
    """
    counts = [int(m.sum()) for m in label_masks]
    parts = torch.split(ranks, counts)
    zeros = losses.new_zeros(())
    hits = torch.stack(
        [torch.stack([(r < k).sum() for k in range(1, max_k + 1)]) for r in parts]
    ).float()  # [P, K]
    measured = not (ranks == NOT_MEASURED).any()
    chain, num_chains = zeros, zeros
    width = label_masks[-1].shape[1]
    if measured and width:
        alive = torch.stack([m[:, :width] for m in label_masks]).all(0)  # [B, width]
        num_chains = alive.sum().float()
        for mask, rank in zip(label_masks, parts, strict=True):
            hit = torch.zeros_like(mask)
            hit[mask] = rank == 0
            alive = alive & hit[:, :width]
            chain = chain + alive.sum()
    return Measures(
        loss=torch.stack([part.sum() for part in torch.split(losses, counts)]),
        num_labels=losses.new_tensor(counts),
        hits=hits if measured else torch.zeros_like(hits),
        chain=chain,
        num_chains=num_chains,
    )
