"""Trees of tokens that are ranked place by place, each place by itself.

Static ones are paths of ranks, TensorRT-LLM's and Medusa's own form: the path [0, 2] is the third
most probable token after the most probable one. Others have each step's most probable paths.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specdec.decode.accept import Candidates
from specdec.engine.tree import IntArray, Tree
from specdec.errors import Problems, SpecDecError
from specdec.methods.base import Choices

# Draft tokens of a tree that nobody chose, on a CPU: there a verify step over 8 tokens costs 1.1
# to 2 times one of a token, and over 32 2.8 to 7.8 times (benchmarks/RESULTS.md).
DEFAULT_CPU_TOKENS = 7
BUDGET_CPU_TOKENS = 20  # the same where only those of them are verified that pay
# The prior by which that tree grows: the best token at depth i (from 0) is the target's with
# probability 0.6 * 0.8 ** i, and that of rank r (from 0) is so 1 / (r + 1) ** 2 times as often.
FIRST_ACCURACY = 0.6
ACCURACY_DECAY = 0.8


def get_cpu_tokens(*, has_budget: bool) -> int:
    """Return the draft tokens of a tree that nobody chose, on a CPU.

    has_budget: whether only those of them are verified that pay.
    """
    return BUDGET_CPU_TOKENS if has_budget else DEFAULT_CPU_TOKENS


def check_paths(
    choices: Choices,
    flag: str,
    *,
    max_depth: int,
    depth_source: str,
    max_tokens: int,
    tokens_flag: str,
    vocab_size: int,
) -> None:
    """Raise SpecDecError that lists what is wrong with a tree, for an engine of these limits.

    depth_source: what sets max_depth, and tokens_flag: the option that sets max_tokens, for the
    messages.
    """
    problems = Problems()
    path_set = set(choices)
    if len(path_set) < len(choices):
        twice = next(path for path in choices if choices.count(path) > 1)
        problems.add(f"{flag} has {list(twice)} twice", "give every path once")
    orphans = [path for path in choices if len(path) > 1 and path[:-1] not in path_set]
    if orphans:
        path = list(orphans[0])
        problems.add(f"{flag} has {path} but not {path[:-1]}", "give every path's beginning too")
    depth, highest_rank = max(map(len, choices)), max(map(max, choices))
    limits = (
        (depth, max_depth, f"{flag} is {depth} deep, the engine has {depth_source}",
         f"give paths of at most {max_depth} ranks"),
        (len(choices), max_tokens,
         f"{flag} has {len(choices)} paths, the engine's max_draft_len is {max_tokens}",
         f"give fewer, or convert with a larger {tokens_flag}"),
        (highest_rank, vocab_size - 1,
         f"{flag} has rank {highest_rank}, the vocabulary {vocab_size} tokens",
         "give ranks below that"),
    )  # fmt: skip
    for size, limit, fact, hint in limits:
        if size > limit:
            problems.add(fact, hint)
    problems.raise_all()


def check_num_tokens(flag: str, num_tokens: int, max_tokens: int, convert_flag: str) -> None:
    """Raise SpecDecError for more tokens of a dynamic tree than an engine has room for."""
    if num_tokens > max_tokens:
        raise SpecDecError(
            f"{flag} is {num_tokens}, the engine's max_draft_len is {max_tokens}",
            f"give at most {max_tokens}, or convert with a larger {convert_flag}",
        )


def count_paths(depth: int, width: int) -> int:
    """Count the paths of `width` tokens a place, those of 17 and more places left out."""
    return depth if width == 1 else sum(width**d for d in range(1, min(depth, 16) + 1))


def estimate_accuracy(depth: Any, rank: Any) -> Any:
    """Return the prior above: how often a token of that rank is right below a right path.

    Of numbers, or of arrays of them.
    """
    return FIRST_ACCURACY * ACCURACY_DECAY**depth / (rank + 1) ** 2


def grow_choices(
    max_depth: int,
    num_tokens: int,
    vocab_size: int,
    accuracy: Callable[[int, int], float] = estimate_accuracy,
) -> Choices:
    """Return the `num_tokens` paths that are most probable, or all there are.

    accuracy: of a depth and a rank, both from 0; it must not rise with the rank.
    """
    # A path's beginning and its better sibling rate no lower, so the best of what they lead to
    # is the best of all that are left. With each waits the rating of its beginning.
    path_heap: list[tuple[float, tuple[int, ...], float]] = [(-accuracy(0, 0), (0,), 1.0)]
    paths: list[tuple[int, ...]] = []
    while path_heap and len(paths) < num_tokens:
        rating, path, parent_rating = heapq.heappop(path_heap)
        depth, rank = len(path), path[-1] + 1
        paths.append(path)
        if rank < vocab_size:
            sibling = -parent_rating * accuracy(depth - 1, rank)
            heapq.heappush(path_heap, (sibling, (*path[:-1], rank), parent_rating))
        if depth < max_depth:
            heapq.heappush(path_heap, (rating * accuracy(depth, 0), (*path, 0), -rating))
    return tuple(paths)


def grow_tree(
    root: int, tokens: IntArray, probabilities: np.ndarray, num_tokens: int
) -> Candidates:
    """Return the most probable paths of tokens [P, K], which differ in a place, best first."""
    ranked_tokens, chances = tokens.tolist(), probabilities.tolist()
    # A path's beginning is at least as probable, and comes first.
    paths = grow_choices(
        len(ranked_tokens),
        num_tokens,
        len(ranked_tokens[0]),
        lambda depth, rank: chances[depth][rank],
    )
    tree_tokens = np.array(
        [root, *(ranked_tokens[len(path) - 1][path[-1]] for path in paths)], np.int64
    )
    confidence = np.array([1.0, *(chances[len(path) - 1][path[-1]] for path in paths)])
    return Candidates(Tree(tree_tokens, *lay_out_paths(paths)), confidence=confidence)


def lay_out_paths(paths: Sequence[tuple[int, ...]]) -> tuple[IntArray, IntArray]:
    """Return parents and depths of a tree's nodes, root first; paths follow their prefixes."""
    nodes = {path: node for node, path in enumerate([(), *paths])}
    parents = [nodes[path[:-1]] for path in paths]
    return np.array([-1, *parents], np.int64), np.array([0, *map(len, paths)], np.int64)
