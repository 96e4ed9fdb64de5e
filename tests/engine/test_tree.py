"""Packed trees restore their beams, and the mask is what a walk up the tree gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.tree import Tree, build_tree_mask, make_root, pack_beams
from tests.engines import list_paths


@st.composite
def beam_sets(draw: st.DrawFn) -> np.ndarray:
    """[W, L] of few distinct tokens, so that prefixes are shared often."""
    width, length = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    tokens = st.integers(0, draw(st.sampled_from([0, 1, 3, 50])))
    rows = st.lists(tokens, min_size=length, max_size=length)
    return np.array(draw(st.lists(rows, min_size=width, max_size=width)), np.int64)


def walk_up(tree: Tree, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = int(tree.parents[node])
    return path[::-1]


@given(beam_sets(), st.integers(0, 3))
@settings(max_examples=400, deadline=None)
def test_tree_unpacks_to_its_beams(beams: np.ndarray, root: int) -> None:
    """It is well-formed, and its mask is what brute force finds."""
    tree = pack_beams(root, beams)
    unpacked = {tuple(tree.tokens[path].tolist()) for path in list_paths(tree)}
    assert unpacked == {(root, *beam) for beam in beams.tolist()}
    prefixes = {tuple(b[:n]) for b in beams.tolist() for n in range(1, beams.shape[1] + 1)}
    assert tree.num_draft_tokens == len(prefixes), "every distinct prefix exactly once"
    assert (tree.parents[0], tree.depths[0]) == (-1, 0)
    brute = np.zeros((tree.num_nodes, tree.num_nodes), bool)
    for node in range(tree.num_nodes):
        brute[node, walk_up(tree, node)] = True
        parent = int(tree.parents[node])
        assert node == 0 or 0 <= parent < node
        assert node == 0 or tree.depths[node] == tree.depths[parent] + 1
    edges = set(zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist(), strict=True))
    assert len(edges) == tree.num_draft_tokens, "no two children of a node hold the same token"
    np.testing.assert_array_equal(build_tree_mask(tree), brute)


def test_the_documented_example() -> None:
    tree = pack_beams(7, np.array([[4, 5, 6], [4, 5, 8]]))
    assert tree.tokens.tolist() == [7, 4, 5, 6, 8]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 2]
    assert tree.depths.tolist() == [0, 1, 2, 3, 3]
    assert build_tree_mask(tree)[4].tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("token", [0, 5])
def test_root_alone(token: int) -> None:
    tree = make_root(token)
    assert (tree.num_nodes, tree.num_draft_tokens, tree.depth) == (1, 0, 0)
    assert build_tree_mask(tree).tolist() == [[True]]
