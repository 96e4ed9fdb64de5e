"""Vocabulary of a drafter: the tokens that it can draft, by how often the data has them."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import count
from specdec.system.logs import get_logger

from .rows import Array

COVERED_SHARE = 0.99  # of the data's labels that `auto` lets a drafter draft
MIN_LABELS = 10_000  # of which one percent is a hundred tokens
ROUNDING = 64  # rows of an output layer that kernels multiply at a time

logger = get_logger(__name__)


def find_size(counts: Array) -> int | None:
    """Return the number of tokens that cover the data; None where the data is too small to say.

    counts: labels of each token of the vocabulary. New text has about as large a share of tokens
    that the data lacks as the data has of tokens that occur once (Good and Turing's estimate): a
    data set in which that is more than may be left out says nothing of what its texts leave out.
    """
    num_labels = int(counts.sum())
    num_singles = int((counts == 1).sum())
    if num_labels < MIN_LABELS or num_singles > (1 - COVERED_SHARE) * num_labels:
        return None
    covered = counts[counts.argsort(kind="stable")[::-1]].cumsum()
    size = int((covered < COVERED_SHARE * num_labels).sum()) + 1
    return -(-size // ROUNDING) * ROUNDING


def choose_draft_tokens(
    option: str, counts: Array, start_tokens: Tensor | None = None
) -> Tensor | None:
    """Return the most frequent tokens of the data, rising; None for all.

    option: `auto`, `full` or their number. start_tokens: of the drafter that is trained further,
    which `auto` and their number keep, whatever the data has.
    """
    size: int | None = len(counts)
    if option == "auto":
        size = find_size(counts) if start_tokens is None else len(start_tokens)
        if size is None:
            logger.info(
                "--eagle-draft-vocab-size auto: %s, of which %d tokens occur once, are too few to"
                " say which are needed: all %d tokens of the vocabulary are drafted",
                count(int(counts.sum()), "label"), int((counts == 1).sum()), len(counts),
            )  # fmt: skip
    elif option != "full":
        size = int(option)
    if size is None or size >= len(counts):
        return None
    if start_tokens is not None and len(start_tokens) == size:
        tokens = start_tokens
    else:
        order = torch.sort(torch.from_numpy(counts), descending=True, stable=True)
        tokens = order.indices[:size].sort().values
    share = float(counts[tokens.numpy()].sum()) / max(1, counts.sum())
    logger.info(
        "--eagle-draft-vocab-size %s: %d of %d tokens are drafted, %.2f%% of the data's %s",
        option, size, len(counts), 100 * share, count(int(counts.sum()), "label"),
    )  # fmt: skip
    return tokens
