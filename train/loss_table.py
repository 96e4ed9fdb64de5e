"""Losses between the target's distribution p and the drafter's q, by their names in the papers.

With a = sum min(p, q), the probability that speculative sampling accepts a token drafted from q
(https://arxiv.org/abs/2211.17192):

    kl         divergence of q from p, sum p log(p / q)
    ce         cross-entropy of the most probable token of p, -log q(token)
    tv         total variation, 1 - a
    lk         acceptance likelihood, -log a (https://arxiv.org/abs/2602.23881)
    lk_hybrid  w kl + (1 - w) tv with w = exp(-3 a), a constant to the gradient (the same paper)
    ce_l1      0.1 ce + 0.9 sum |p - q|, DSpark's (https://github.com/deepseek-ai/DeepSpec)

Where only some of the target's tokens can be drafted, p has the target's probabilities of those
alone, which sum up to less than 1: the rest can never be accepted, and is part of every total
variation. kl and ce, which would be infinite, are of p divided by its sum.
Legend: N labels, V tokens that can be drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

HYBRID_RATE = 3.0  # by which the weight of lk_hybrid's kl falls as the acceptance rises
CE_SHARE, L1_SHARE = 0.1, 0.9
# Below this an acceptance has no logarithm of use.
LEAST_ACCEPTANCE = 1e-20

Loss = Callable[[Tensor, Tensor], Tensor]


def compute_acceptance(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Return the probability that a token drafted from the logits' distribution is accepted, [N].

    logits: the drafter's, [N, V]. probabilities: the target's, [N, V].
    """
    return torch.minimum(logits.softmax(1), probabilities).sum(1)


def compute_kl(logits: Tensor, probabilities: Tensor) -> Tensor:
    sums = probabilities.sum(1, keepdim=True).clamp_min(torch.finfo(probabilities.dtype).tiny)
    shares = probabilities / sums
    return (torch.xlogy(shares, shares) - shares * logits.log_softmax(1)).sum(1)


def compute_ce(logits: Tensor, probabilities: Tensor) -> Tensor:
    tokens = probabilities.argmax(1, keepdim=True)
    return -logits.log_softmax(1).gather(1, tokens)[:, 0]


def compute_tv(logits: Tensor, probabilities: Tensor) -> Tensor:
    return 1 - compute_acceptance(logits, probabilities)


def compute_lk(logits: Tensor, probabilities: Tensor) -> Tensor:
    return -compute_acceptance(logits, probabilities).clamp_min(LEAST_ACCEPTANCE).log()


def compute_lk_hybrid(logits: Tensor, probabilities: Tensor) -> Tensor:
    acceptance = compute_acceptance(logits, probabilities)
    kl_weights = (-HYBRID_RATE * acceptance.detach()).exp()
    return kl_weights * compute_kl(logits, probabilities) + (1 - kl_weights) * (1 - acceptance)


def compute_ce_l1(logits: Tensor, probabilities: Tensor) -> Tensor:
    distances = (probabilities - logits.softmax(1)).abs().sum(1) + (1 - probabilities.sum(1))
    return CE_SHARE * compute_ce(logits, probabilities) + L1_SHARE * distances


# Logits of the drafter and probabilities of the target, both [N, V] -> losses [N] in nats.
LOSSES: Mapping[str, Loss] = {
    "kl": compute_kl,
    "ce": compute_ce,
    "tv": compute_tv,
    "lk": compute_lk,
    "lk_hybrid": compute_lk_hybrid,
    "ce_l1": compute_ce_l1,
}
