"""The accept rule: the longest path of draft tokens that the target itself would have emitted."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.engine.tree import Tree


def accept(tree: Tree, choices: Sequence[int]) -> tuple[list[int], int]:
    """Follow the target through a tree; return the accepted nodes, root first, and the bonus token.

    choices[n] is the token that the target emits after node n: its argmax when decoding greedily.
    From the root, the child holding the target's token is entered while there is one. So every
    emitted token, the accepted ones and the bonus token, is the target's own choice given what
    precedes it, whatever was drafted: the output is that of decoding one token a step.
    """
    children = {
        (int(parent), int(token)): node
        for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    path = [0]
    while True:
        token = int(choices[path[-1]])
        child = children.get((path[-1], token))
        if child is None:
            return path, token
        path.append(child)
