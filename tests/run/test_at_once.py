"""Accepting on a device, or with one wait for it, comes to what the walk on the host does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec.decode.accept import (
    Candidates,
    accept,
    accept_at_once,
    accept_batch,
    accept_on_device,
)
from specdec.decode.sampling import Sampler, SamplingParams
from specdec.engine.step import pack_segments, place_tree
from specdec.engine.transfers import WAITS
from specdec.engine.tree import Tree, make_root, pack_beams

VOCAB = 6


class FakeCache:
    past_lens = np.array([3, 0, 9, 4, 1])


def make_trees(generator: np.random.Generator, count: int) -> list[Tree]:
    trees = []
    for at in range(count):
        if at == 1:
            trees.append(make_root(2))
            continue
        beams = generator.integers(0, 3, (generator.integers(1, 5), generator.integers(1, 5)))
        trees.append(pack_beams(int(generator.integers(0, VOCAB)), beams))
    return trees


@pytest.mark.parametrize("seed", range(20))
def test_greedy_acceptance_on_the_device(seed: int) -> None:
    generator = np.random.default_rng(seed)
    trees = make_trees(generator, 5)
    cache: Any = FakeCache()
    step = pack_segments([place_tree(t, at, cache) for at, t in enumerate(trees)], cache)
    choices = generator.integers(0, 3, step.tokens.shape)
    last, bonus = accept_on_device(trees, step.tree_mask, torch.from_numpy(choices))
    expected = [accept(tree, row) for tree, row in zip(trees, choices.tolist(), strict=True)]
    assert last.tolist() == [path[-1] for path, _ in expected]
    assert bonus.tolist() == [token for _, token in expected]


@pytest.mark.parametrize("seed", range(12))
def test_sampled_rows_with_one_wait(seed: int) -> None:
    """Trees, drawn chains, and both in a batch; every way a chain can end occurs."""
    generator = np.random.default_rng(seed)
    noise = torch.Generator().manual_seed(seed)
    trees = make_trees(generator, 3)
    candidates = [Candidates(tree) for tree in trees]
    kinds = {"all": 0, "none": 0, "some": 0}
    for _ in range(40):
        probs = (2 * torch.randn(3, VOCAB, generator=noise)).softmax(-1)
        tokens = torch.multinomial(probs, 1, generator=noise).T.numpy()
        chains = [*candidates, Candidates(pack_beams(1, tokens), list(probs))]
        chains.append(Candidates(make_root(3), []))
        size = max(c.tree.num_nodes for c in chains)
        logits = torch.randn(len(chains), size, VOCAB, generator=noise)
        logits[3, :3] = probs.log() + 0.5 * logits[3, :3]  # near enough to be accepted at times
        samplers = [
            Sampler(
                SamplingParams(
                    temperature=0.7 + 0.2 * at, seed=int(generator.integers(1000)),
                    top_k=4 * (at == 1), top_p=1 - 0.2 * (at == 3),
                ),
                16,
            )
            for at in range(len(chains))
        ]  # fmt: skip
        positions = generator.integers(0, 8, len(chains)).tolist()
        before = WAITS.count
        found = accept_at_once(chains, logits, samplers, positions)
        assert WAITS.count - before == 1
        assert found == accept_batch(chains, logits, samplers, positions)
        length = len(found[3][0])
        kinds["all" if length == 4 else "none" if length == 1 else "some"] += 1
    assert min(kinds.values()) > 0


def test_a_target_that_equals_its_draft() -> None:
    """Nothing is left of the target beyond the draft: rounding alone could reject."""
    logits = torch.zeros(1, 2, VOCAB)
    probs = torch.full((VOCAB,), 1 / VOCAB)
    for seed in range(20):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), 4)
        chain = [Candidates(pack_beams(0, np.array([[seed % VOCAB]])), [probs * 2])]
        expected = accept_batch(chain, logits, [sampler], [0])
        assert accept_at_once(chain, logits, [sampler], [0]) == expected
