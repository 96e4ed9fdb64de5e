"""Weights of the labels of a draft by their depth, from what is measured before them.

With a_j the probability that the token of depth j is accepted where all before it were, and q_j
the drafter's probability of the right token there, the text's or the target's most probable one:

    reach  the probability that depth i is reached, prod_{j < i} a_j
    dpace  D-PACE's (https://arxiv.org/abs/2605.18810), sum_{k >= i} prod_{j <= k} (q_j + 1) / 2, as
           speculators weighs a block (https://github.com/vllm-project/speculators): without the
           smoothing the derivative of a greedy draft's expected length by log q_i

Legend: N labels, P depths, B rows, T places where a draft begins (one column for all depths).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SMOOTHING = 0.5  # least probability that D-PACE counts with
MEASURED_WEIGHTINGS = ("reach", "dpace")


def weigh_depths(kind: str, acceptances: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights of each depth's labels, [N_i], without a gradient.

    kind: one of MEASURED_WEIGHTINGS. acceptances: of each depth's labels, [N_i], a or q. masks:
    [B, T_i], true for places with a label; a token that is none counts as accepted.
    """
    num_rows, num_places = masks[0].shape
    shape = (len(masks), num_rows, num_places)
    values = acceptances[0].new_ones(shape)  # [P, B, T]
    is_label = torch.zeros(shape, dtype=torch.bool, device=values.device)
    for depth, (acceptance, mask) in enumerate(zip(acceptances, masks, strict=True)):
        is_label[depth, :, : mask.shape[1]] = mask
        values[depth][is_label[depth]] = acceptance.detach()
    if kind == "reach":
        weights = torch.cat((torch.ones_like(values[:1]), values.cumprod(0)[:-1]))
    else:
        smooth = torch.where(is_label, (1 - SMOOTHING) * values + SMOOTHING, values)
        prefixes = smooth.cumprod(0) * is_label
        weights = prefixes.flip(0).cumsum(0).flip(0)
    return [weights[depth][is_label[depth]] for depth in range(len(masks))]
