"""Counts of n-grams: a corpus of tokens -> a table that drafts for every model of its vocabulary.

Contexts are counted from the shortest on. A next token's share after a context is its count over
that of the context and of the kinds of tokens there, and the rest of it is shared as after the
context without its first token (Witten and Bell, https://doi.org/10.1109/18.87000).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from specdec.files.ngrams import FACTOR, SHARE_STEPS, NgramTable
from specdec.files.reading import Array

END = -1  # of a text
KEPT_WHILE_COUNTING = 24  # continuations of a context, from which longer contexts are interpolated
LEAST_SHARE = 0.05  # of a continuation that is kept


@dataclasses.dataclass(frozen=True)
class NgramOrder:
    """Contexts of one length, with their continuations.

    keys: [contexts], rising. rows, tokens, shares: [continuations], of the contexts `rows`, each
    context's likeliest first. news: [contexts], the largest difference from the share that the
    shorter context has of a token.
    """

    keys: Array
    rows: Array
    tokens: Array
    shares: Array
    news: Array


def join_texts(texts: Iterable[Array]) -> Array:
    """Lay texts end to end, END after each."""
    parts = [np.append(text, END) for text in texts]
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


def count_ngrams(
    corpus: Array, *, max_order: int, min_count: int, num_continuations: int, least_news: float
) -> list[NgramOrder]:
    """Count the n-grams of a corpus, as `join_texts` lays it out; return the orders from 1 on.

    min_count: of contexts of two tokens or more. num_continuations: of a context, at most.
    least_news: contexts that tell less beyond the shorter one are left out.
    """
    tokens = corpus.astype(np.uint64)
    is_inside = corpus != END
    keys, is_whole = np.zeros(len(corpus), np.uint64), np.ones(len(corpus), bool)
    lower: NgramOrder | None = None
    kept: list[NgramOrder] = []
    with np.errstate(over="ignore"):
        for order in range(1, max_order + 1):
            shift = order - 1
            shifted = np.roll(tokens, shift)
            shifted_inside = np.roll(is_inside, shift)
            shifted_inside[:shift] = False
            shorter_keys = keys
            keys = keys * np.uint64(FACTOR) + shifted + np.uint64(1)
            is_whole = is_whole & shifted_inside
            places = np.flatnonzero(is_whole[:-1] & is_inside[1:])
            lower = _count_order(
                keys[places].view(np.int64), shorter_keys[places].view(np.int64),
                corpus[places + 1], lower, min_count if order > 1 else 1,
            )  # fmt: skip
            kept.append(_prune(lower, num_continuations, least_news if order > 1 else 0.0))
    return kept


def _count_order(
    keys: Array, shorter_keys: Array, next_tokens: Array, lower: NgramOrder | None, min_count: int
) -> NgramOrder:
    """Count what follows each context, and interpolate with what the shorter contexts have."""
    order = np.lexsort((next_tokens, keys))
    keys, shorter_keys, next_tokens = keys[order], shorter_keys[order], next_tokens[order]
    firsts, key_firsts = _find_firsts(keys, next_tokens), _find_firsts(keys)
    counts, totals = (np.diff(np.append(f, len(keys))) for f in (firsts, key_firsts))
    rows = np.searchsorted(key_firsts, firsts, side="right") - 1
    kinds = np.bincount(rows, minlength=len(key_firsts))
    shares = counts / (totals + kinds)[rows]
    is_kept = totals >= min_count
    entries = is_kept[rows]
    rows = (np.cumsum(is_kept) - 1)[rows[entries]]
    tokens, shares = next_tokens[firsts][entries], shares[entries]
    kept_keys = keys[key_firsts][is_kept]
    if lower is None:
        return _rank(kept_keys, rows, tokens, shares, np.ones(len(kept_keys)))
    # Shares of the shorter contexts, weighed by the rest.
    rests = (kinds / (totals + kinds))[is_kept]
    places = np.searchsorted(lower.keys, shorter_keys[key_firsts][is_kept])
    starts = np.searchsorted(lower.rows, np.arange(len(lower.keys) + 1))
    lower_rows, spots = _list_spots(starts[places], np.diff(starts)[places])
    lower_shares = lower.shares[spots]
    all_rows, all_tokens = np.append(rows, lower_rows), np.append(tokens, lower.tokens[spots])
    order = np.lexsort((all_tokens, all_rows))
    all_rows, all_tokens = all_rows[order], all_tokens[order]
    heads = _find_firsts(all_rows, all_tokens)
    shares, before = (
        np.add.reduceat(np.append(own_shares, added_shares)[order], heads)
        for own_shares, added_shares in (
            (shares, rests[lower_rows] * lower_shares), (np.zeros(len(rows)), lower_shares),
        )
    )  # fmt: skip
    rows, news = all_rows[heads], np.zeros(len(kept_keys))
    np.maximum.at(news, rows, np.abs(shares - before))
    return _rank(kept_keys, rows, all_tokens[heads], shares, news)


def _find_firsts(*columns: Array) -> Array:
    """Return where runs of equal elements begin, in all of some sorted columns together."""
    is_first = np.ones(len(columns[0]), bool)
    is_first[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.flatnonzero(is_first)


def _list_spots(starts: Array, lengths: Array) -> tuple[Array, Array]:
    """List all places of some spans, one span after another, and the number of each one's span."""
    rows = np.repeat(np.arange(len(starts)), lengths)
    return rows, np.arange(len(rows)) + (starts - np.cumsum(lengths) + lengths)[rows]


def _rank(keys: Array, rows: Array, tokens: Array, shares: Array, news: Array) -> NgramOrder:
    """Order each context's continuations by their shares, and keep the first of them."""
    order = np.lexsort((tokens, -shares, rows))
    rows, tokens, shares = rows[order], tokens[order], shares[order]
    starts = np.searchsorted(rows, np.arange(len(keys)))
    is_kept = np.arange(len(rows)) - starts[rows] < KEPT_WHILE_COUNTING
    return NgramOrder(keys, rows[is_kept], tokens[is_kept], shares[is_kept], news)


def _prune(order: NgramOrder, num_continuations: int, least_news: float) -> NgramOrder:
    """Leave out contexts that tell little that is new, and unlikely continuations."""
    starts = np.searchsorted(order.rows, np.arange(len(order.keys)))
    ranks = np.arange(len(order.rows)) - starts[order.rows]
    is_likely = (ranks < num_continuations) & (order.shares >= LEAST_SHARE)
    has_any = np.bincount(order.rows[is_likely], minlength=len(order.keys)) > 0
    is_kept = (order.news >= least_news) & has_any
    entries = is_likely & is_kept[order.rows]
    rows = (np.cumsum(is_kept) - 1)[order.rows[entries]]
    return NgramOrder(
        order.keys[is_kept], rows, order.tokens[entries], order.shares[entries], order.news[is_kept]
    )


def make_table(orders: Sequence[NgramOrder], *, num_tokens: int, sha256: str) -> NgramTable:
    """Put contexts of all lengths into one table."""
    keys = np.concatenate([order.keys for order in orders])
    counts = np.concatenate([np.bincount(o.rows, minlength=len(o.keys)) for o in orders])
    tokens = np.concatenate([order.tokens for order in orders])
    shares = np.concatenate([order.shares for order in orders])
    # A key of two contexts stands for the shorter one.
    by_key = np.argsort(keys, kind="stable")
    by_key = by_key[_find_firsts(keys[by_key])]
    lengths = counts[by_key]
    _, spots = _list_spots((np.cumsum(counts) - counts)[by_key], lengths)
    steps = np.clip(np.rint(shares[spots] * SHARE_STEPS), 1, SHARE_STEPS)
    return NgramTable(
        keys=keys[by_key], counts=lengths.astype(np.uint8),
        tokens=tokens[spots].astype(np.int32), shares=steps.astype(np.uint8),
        max_order=len(orders), num_tokens=num_tokens, sha256=sha256,
    )  # fmt: skip
