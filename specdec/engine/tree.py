"""Draft trees: beams packed into deduplicated nodes, with the mask a verify step needs.

Toy example, root token 7 and two beams of three draft tokens:

    beams   4 5 6        nodes    7 4 5 6 8      (index 0 is the root)
            4 5 8        parents -1 0 1 2 2
                         depths   0 1 2 3 3
                         mask row of node 4 (token 8): itself and its ancestors 0, 1, 2

Legend: W beams, L draft tokens a beam, T nodes including the root.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]


@dataclasses.dataclass(slots=True)
class Tree:
    """Candidates sharing a root. Nodes are ordered so that a parent precedes its children.

    tokens, parents, depths: [T]; parents[0] = -1; no two children of a node hold the same token.
    """

    tokens: IntArray
    parents: IntArray
    depths: IntArray

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def num_draft_tokens(self) -> int:
        return len(self.tokens) - 1

    @property
    def depth(self) -> int:
        """Number of draft tokens on the longest path."""
        return int(self.depths.max()) if len(self.tokens) > 1 else 0

    def keep(self, nodes: Sequence[int] | IntArray) -> Tree:
        """Return the tree of only these nodes, in their order: parents are kept, and come first."""
        kept_nodes = np.asarray(nodes, np.int64)
        new_numbers = np.full(self.num_nodes + 1, -1)  # the last stands for the root's parent
        new_numbers[kept_nodes] = np.arange(len(kept_nodes))
        return Tree(
            self.tokens[kept_nodes], new_numbers[self.parents[kept_nodes]], self.depths[kept_nodes]
        )

    def list_below(self, node: int) -> list[int]:
        """List the tokens below a node, along the first child at every fork."""
        tokens = []
        for child in range(node + 1, self.num_nodes):
            if self.parents[child] == node:
                tokens.append(int(self.tokens[child]))
                node = child
        return tokens


def make_root(token: int) -> Tree:
    """Make a tree of only the root: a verify step that drafts nothing."""
    return Tree(np.array([token], np.int64), *_ROOT)


# Parents and depths of every such tree, and its mask.
_ROOT, _ROOT_MASK = (np.array([-1], np.int64), np.zeros(1, np.int64)), np.ones((1, 1), np.bool_)
for _array in (*_ROOT, _ROOT_MASK):
    _array.flags.writeable = False


def pack_beams(root: int, beams: IntArray) -> Tree:
    """Merge the common prefixes of `beams` [W, L] under the token `root`.

    Nodes are ordered by depth, then by beam, as in recurrent drafting's prefix tree
    (https://arxiv.org/abs/2403.09919, section 3.2).
    """
    width, length = beams.shape
    same_prefix = np.logical_and.accumulate(beams[:, None, :] == beams[None, :, :], axis=2)
    first_beams = same_prefix.argmax(axis=1)  # [W, L], the first beam with this prefix
    is_node = first_beams == np.arange(width)[:, None]
    is_node_by_depth = is_node.T.reshape(-1)  # [L * W]
    numbers = np.cumsum(is_node_by_depth).reshape(length, width).T  # [W, L], right where is_node
    nodes = np.take_along_axis(numbers, first_beams, axis=0)  # [W, L], of each beam
    parents = np.zeros((width, length), np.int64)
    parents[:, 1:] = nodes[:, :-1]
    depths = np.broadcast_to(np.arange(1, length + 1), (width, length))
    return Tree(
        np.concatenate(([root], beams.T.reshape(-1)[is_node_by_depth])),
        np.concatenate(([-1], parents.T.reshape(-1)[is_node_by_depth])),
        np.concatenate(([0], depths.T.reshape(-1)[is_node_by_depth])),
    )


def build_tree_mask(tree: Tree) -> BoolArray:
    """Build the mask [T, T], true where a node (row) sees a node (column) or itself."""
    if tree.num_nodes == 1:
        return _ROOT_MASK
    mask = np.eye(tree.num_nodes, dtype=np.bool_)
    for node in range(1, tree.num_nodes):
        mask[node] |= mask[tree.parents[node]]
    return mask


class TreeBuilder:
    """Builder of a tree, node by node; equal paths from the root become one."""

    def __init__(self, root: int) -> None:
        self._tokens, self._parents, self._depths = [root], [-1], [0]
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        """Return the child of `parent` that holds `token`, a new one if there is none."""
        node = self._children.setdefault((parent, token), len(self._tokens))
        if node == len(self._tokens):
            self._tokens.append(token)
            self._parents.append(parent)
            self._depths.append(self._depths[parent] + 1)
        return node

    def build(self) -> Tree:
        columns = (self._tokens, self._parents, self._depths)
        return Tree(*(np.array(column, np.int64) for column in columns))
