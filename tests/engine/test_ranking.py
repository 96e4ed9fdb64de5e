"""The order of tokens by score, of equal scores the lower id, by all that ranks tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.engine import native
from specdec.engine.draft_net import rank_logits
from specdec.engine.ranking import find_best, find_top, find_top_of_parts, sort_all
from tests.engine.kernels import in_every_form

Find = Callable[[Tensor, int], tuple[Tensor, Tensor]]
WAYS: dict[str, Find] = {"host": find_top, "device": find_top_of_parts}


def sort_slowly(scores: Tensor, count: int) -> Tensor:
    """Ids in the order of the rule."""
    rows = scores.reshape(-1, scores.shape[-1]).tolist()
    ids = [sorted(range(len(row)), key=lambda at: (-row[at], at))[:count] for row in rows]
    return torch.tensor(ids).view(*scores.shape[:-1], count)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("size", "count"), [(7, 7), (128, 1), (1000, 3), (9001, 50), (300, 299)])
def test_of_equal_scores_the_lower_id_comes_first(way: str, size: int, count: int) -> None:
    """Few values for many tokens, zeros of both signs and infinities among them."""
    generator = torch.Generator().manual_seed(size)
    scores = torch.randint(-3, 4, (2, 3, size), generator=generator).float() / 2
    scores[0, 1] = torch.where(scores[0, 1] == 0, -scores[0, 1] * 0.0, scores[0, 1])
    scores[0, 1, ::2] *= torch.tensor(-1.0)
    scores[1, 0] = -torch.inf
    scores[1, 1, : size // 2] = torch.inf
    scores[1, 2] = torch.randn(size, generator=generator)
    values, ids = WAYS[way](scores, count)
    assert torch.equal(ids, sort_slowly(scores, count))
    assert torch.equal(values, scores.gather(-1, ids))
    if way == "host":
        rising = torch.stack([sort_all(rows) for rows in scores])
        assert torch.equal(rising.flip(-1), sort_slowly(scores, size))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("size", "count"), [(128, 1), (1000, 3), (50257, 50), (32000, 50)])
def test_scores_without_ties_are_torchs(way: str, size: int, count: int) -> None:
    """Of equal parts, as a GPU takes them, and of the rest after them, in any dimensions."""
    generator = torch.Generator().manual_seed(size)
    scores = torch.randperm(2 * 3 * size, generator=generator).float().view(2, 3, size) - 3 * size
    scores[0, 0, -1] = scores.max() + 1
    expected = scores.topk(count, dim=-1)
    values, ids = WAYS[way](scores, count)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_number_does_no_harm(way: str) -> None:
    scores = torch.tensor([[torch.nan, 1, 1, torch.nan, 2, 2], [torch.nan] * 6])
    _, ids = WAYS[way](scores, 4)
    assert all(len(set(row)) == 4 and max(row) < 6 for row in ids.tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_best_token_is_torchs(library: Path, dtype: torch.dtype) -> None:
    """The first of equal ones, where some are infinite or no numbers, too."""
    logits = torch.randn(3, 40, 301, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0] = logits[0].round()
    logits[1, :5, 7:9] = torch.inf
    logits[1, 5:9, 100] = torch.nan
    logits[1, 9:12] = -torch.inf
    assert torch.equal(find_best(logits), logits.argmax(-1))
    assert torch.equal(find_best(logits[:, 0]), logits[:, 0].argmax(-1))
    found = native.NativeKernels(library, dtype).find_greatest(logits)
    assert torch.equal(torch.from_numpy(found), logits.argmax(-1))


@in_every_form
def test_the_kernels_rank_equal_logits_as_torch_does(library: Path) -> None:
    """Tokens of a draft tree: the head's rows stand there several times, so that logits tie."""
    kernels = native.NativeKernels(library, torch.float32)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(20, 24, generator=generator)[torch.arange(200) % 20]
    x = torch.randn(4, 24, generator=generator)
    packed = kernels.pack_matrix(weight)
    for width in (1, 2, 7, 50):
        ids, scores = kernels.rank_outputs(x, packed, None, 200, width)
        logits = torch.nn.functional.linear(x, weight).mul(4096).round() / 4096
        assert torch.equal(ids, sort_slowly(logits, width))
        assert torch.equal(ids, rank_logits(logits, width)[0])
        assert torch.equal(scores, scores.sort(dim=-1, descending=True).values)
    tied = torch.randint(5, (3, 333), generator=generator).float()
    assert kernels.find_greatest(tied).tolist() == tied.argmax(-1).tolist()
