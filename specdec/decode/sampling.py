"""Sampling: the target's processed distribution, and each request's own random numbers.

Legend: B rows, T tree nodes, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.engine.ranking import find_top, sort_all
from specdec.engine.transfers import to_device, to_host
from specdec.engine.tree import Tree

# Streams of a request's random numbers. Each emitted token reads each stream at its own position,
# so what a token is drawn with depends neither on the batch nor on how many steps it took.
CHOICE, DRAFT, ACCEPT = range(3)
COLD = 1e-30  # below this temperature, logits divided by it may be too large for float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings by which a request's tokens are chosen.

    temperature: 0 decodes greedily. top_k: 0 keeps all. top_p: 1 keeps all. min_p: least share of
    the likeliest token's probability, 0 keeps all. Applied in this order, as transformers' logits
    processors are. Before them, shaping.py: logit_bias, (token, what is added to its logit), and
    the penalties; then what leaves tokens out: all but allowed_ids (None allows all), the last
    token of each of bad_words, tokens in order, after its others, and ends before min_tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    allowed_ids: frozenset[int] | None = None
    bad_words: frozenset[tuple[int, ...]] = frozenset()
    min_tokens: int = 0

    @property
    def is_greedy(self) -> bool:
        """Return whether the most likely token is the only one left."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def is_shaped(self) -> bool:
        """Return whether logits depend on more than the target."""
        return self.is_penalized or self.is_restricted

    @property
    def is_penalized(self) -> bool:
        """Return whether there are penalties or a bias."""
        penalties = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias)

    @property
    def is_restricted(self) -> bool:
        """Return whether tokens are left out."""
        return bool(self.bad_words or self.min_tokens) or self.allowed_ids is not None


GREEDY = SamplingParams()


class Shaper(Protocol):
    """Function of one request's logits: a penalty, a ban, a grammar's mask."""

    def shape(self, tree: Tree, logits: Tensor) -> Tensor:
        """Return float32 logits [T, V] for those after each node; the tree may be padded there."""


class Sampler:
    """Random numbers of one request: uniform on [0, 1), by stream and output position.

    They come from Philox counters keyed only by the seed (Salmon et al., "Parallel random numbers:
    as easy as 1, 2, 3", 2011), so equal seeds give equal numbers in any batch.
    shaper: what changes the request's logits before they are sampled from.
    """

    def __init__(
        self, params: SamplingParams, num_positions: int, shaper: Shaper | None = None
    ) -> None:
        self.params, self.shaper = params, shaper
        if params.is_greedy:
            return
        key = np.array([params.seed & (2**64 - 1), 0], np.uint64)
        self._uniforms = np.empty((3, num_positions))
        for stream in (CHOICE, DRAFT, ACCEPT):
            key[1] = stream
            self._uniforms[stream] = np.random.Generator(np.random.Philox(key=key)).random(
                num_positions
            )

    def get_uniform(self, stream: int, position: int) -> float:
        """Return the number that the output token at `position` uses from a stream."""
        return float(self._uniforms[stream, position])


def take_rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows of logits [B, ...], in order."""
    return logits if len(rows) == len(logits) else logits[to_device(rows, logits.device)]


def process_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the probabilities [B, V] in float32 that each row's settings leave.

    logits: [B, V]; no row may be greedy. Temperature, then top-k, then top-p (the smallest set of
    the likeliest tokens whose probabilities sum to top_p or more), then min-p
    (https://arxiv.org/abs/2407.01082). Which tokens are likelier is decided by the logits as they
    are, of equal ones by the lower id: so the likeliest token is that of greedy decoding.
    """
    device = logits.device
    scores = logits.float()
    if min(p.temperature for p in params) < COLD:
        scores = scores - scores.amax(-1, keepdim=True)
    limits = torch.finfo(torch.float32)
    temperatures = [min(max(p.temperature, limits.tiny), limits.max) for p in params]
    temperature = to_device(np.array(temperatures, np.float32), device)
    scores = scores / temperature[:, None]
    scores = _keep_top_k(scores, logits, [p.top_k for p in params])
    scores = _keep_top_p(scores, logits, [p.top_p for p in params])
    if any(p.min_p for p in params):
        probs = scores.softmax(-1)
        least_share = to_device(np.array([p.min_p for p in params], np.float32), device)[:, None]
        scores = scores.masked_fill(probs < least_share * probs.amax(-1, True), -torch.inf)
    return scores.softmax(-1)


def _keep_top_k(scores: Tensor, logits: Tensor, limits: Sequence[int]) -> Tensor:
    """Leave in each row of scores [B, V] its top_k tokens by the logits; a limit of 0 keeps all."""
    device, vocab_size = scores.device, scores.shape[-1]
    top_k = [min(limit, vocab_size) or vocab_size for limit in limits]
    if min(top_k) == vocab_size:
        return scores
    limited = [k if k < vocab_size else 1 for k in top_k]
    _, best_tokens = find_top(logits, max(limited))
    is_kept = np.arange(max(limited)) < np.array(limited)[:, None]
    is_left = to_device(np.array([[k == vocab_size] for k in top_k]), device)
    is_left = is_left.repeat(1, vocab_size)
    is_left.scatter_(1, best_tokens, to_device(is_kept, device) | is_left[:, :1])
    return scores.masked_fill(~is_left, -torch.inf)


def _keep_top_p(scores: Tensor, logits: Tensor, top_p: Sequence[float]) -> Tensor:
    """Leave in each row of scores [B, V] the likeliest tokens whose probabilities sum to top_p."""
    if min(top_p) >= 1:
        return scores
    device, order = scores.device, sort_all(logits)
    mass = scores.gather(1, order).softmax(-1).cumsum(-1)
    is_tail = mass <= 1 - to_device(np.array(top_p, np.float32), device)[:, None]
    is_tail &= to_device(np.array([p < 1 for p in top_p]), device)[:, None]
    is_tail[:, -1] = False
    return scores.masked_fill(is_tail.scatter(1, order, is_tail), -torch.inf)


def draw(probs: Tensor, uniforms: Sequence[float]) -> list[int]:
    """Draw a token for each row as `draw_tokens` does; return them on the host."""
    (tokens,) = to_host(draw_tokens(probs, uniforms))
    token_ids: list[int] = tokens.tolist()
    return token_ids


def draw_tokens(probs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """Return for each row of probs [B, V] the token at which the cumulative sum passes uniform.

    The sums are taken in float64 and need not end at 1; a token of probability 0 is never drawn.
    """
    sums = probs.double().cumsum(-1)
    thresholds = to_device(np.array(uniforms, np.float64), probs.device) * sums[:, -1]
    return torch.searchsorted(sums, thresholds[:, None], right=True)[:, 0]


def find_residual(target: Tensor, draft: Tensor) -> Tensor:
    """Return the part of target [..., V] that exceeds draft [..., V], not normalized.

    Where none does, as only rounding can bring about after a rejection, return the target itself.
    """
    residual = (target - draft.to(target.device)).clamp(min=0)  # models on two devices
    return torch.where(residual.any(-1, keepdim=True), residual, target)


def draw_residual(target: Tensor, draft: Tensor, uniform: float) -> int:
    """Draw from the part of target [V] that exceeds draft [V], normalized."""
    return draw(find_residual(target, draft)[None], [uniform])[0]
