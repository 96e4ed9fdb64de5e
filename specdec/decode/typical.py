"""Typical acceptance: longer drafts are accepted, and the text is no longer the target's own.

Medusa, https://arxiv.org/abs/2401.10774, section 2.3.1. Used only on request; docs/exactness.md.
Legend: T tree nodes, V vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec import logs
from specdec.decode.sampling import TypicalRule
from specdec.engine.transfers import to_device, to_host
from specdec.engine.tree import Tree
from specdec.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.decode.requests import Request
    from specdec.decode.settings import DecodeSettings

logger = logs.get_logger(__name__)
TYPICAL = "typical"


def accept_typical(tree: Tree, probs: Tensor, rule: TypicalRule) -> tuple[list[int], int]:
    """Return the deepest path of likely enough tokens, root first, and the bonus token.

    probs: [T, V], the target's after each node. A token is likely enough where its probability
    exceeds min(epsilon, delta * exp(-entropy)) of the distribution that it stands in; of several
    deepest paths the most probable is taken. The bonus token is the likeliest one at its end: it is
    emitted whatever was drafted, as the root of the next tree.
    """
    entropies = torch.special.entr(probs).sum(-1)  # [T]
    thresholds = (rule.delta * torch.exp(-entropies)).clamp(max=rule.epsilon)
    tokens = to_device(tree.tokens[1:], probs.device)
    parents = to_device(tree.parents[1:], probs.device)
    # For every node but the root, given its parent.
    found = to_host(thresholds, probs[parents, tokens], probs.argmax(-1))
    bounds, likelihoods, likeliest = (values.tolist() for values in found)
    rated: dict[int, tuple[int, float]] = {0: (0, 0.0)}  # accepted node: depth, log-probability
    for node, likelihood in enumerate(likelihoods, 1):
        parent = int(tree.parents[node])
        if parent in rated and likelihood > bounds[parent]:
            depth, score = rated[parent]
            rated[node] = depth + 1, score + math.log(likelihood)
    node = max(rated, key=rated.__getitem__)
    path = [node]
    while path[-1]:
        path.append(int(tree.parents[path[-1]]))
    return path[::-1], likeliest[node]


def read_typical_rule(settings: DecodeSettings) -> TypicalRule | None:
    """Read the flags; None for exact acceptance."""
    values = {
        name: getattr(settings, f"typical_{name}")
        for name in ("epsilon", "delta")
        if getattr(settings, f"typical_{name}") is not None
    }
    if settings.acceptance != TYPICAL:
        if values:
            raise UsageError(
                f"--typical-{next(iter(values))} has no effect with --acceptance exact",
                "leave it out, or give --acceptance typical",
            )
        return None
    for name, value in values.items():
        if not 0 < value <= 1:
            raise UsageError(
                f"--typical-{name} is {value:g}", "give a number above 0 and at most 1"
            )
    if settings.no_speculation:
        raise UsageError(
            "--acceptance typical has no effect with --no-speculation", "leave one of them out"
        )
    return TypicalRule(**values)


def check_typical(method: str, *, use_logits: bool) -> None:
    """Raise UsageError where an engine of a method decodes without the rule."""
    if method == "plain":
        raise UsageError(
            "--acceptance typical has no effect with an engine that runs plain", "leave it out"
        )
    if use_logits:
        raise UsageError(
            "--acceptance typical and use of the draft model's logits are two accept rules",
            "leave one of them out",
        )
    logger.warning("--acceptance typical is lossy: sampled text is not distributed as the target's")


def refuse_greedy(requests: Sequence[Request]) -> None:
    """Raise UsageError where every request is decoded without the rule."""
    if all(request.sampling.is_greedy for request in requests):
        raise UsageError(
            "--acceptance typical has no effect on greedy requests: where only the likeliest token"
            " has any probability",
            "give --temperature, such as 0.7",
        )
