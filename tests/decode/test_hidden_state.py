"""Drafters that draft from the newest token's hidden state: which state, and when."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.decode.drafters.hidden_state import HiddenStateDrafter
from specdec.decode.requests import ActiveRequest, Request
from specdec.engine.step import States
from specdec.engine.transfers import Array
from specdec.engine.tree import Tree, TreeBuilder


class Adder(HiddenStateDrafter):
    """Drafter of two tokens: the root and its state's first number, and that plus one."""

    def __init__(self) -> None:
        super().__init__(graphs=None)
        self.calls: list[tuple[list[float], list[int]]] = []

    def compute_drafts(self, hidden: Tensor, roots: Tensor) -> Tensor:
        self.calls.append((hidden[:, 0].tolist(), roots.tolist()))
        first = roots + hidden[:, 0].long()
        return torch.stack([first, first + 1], -1)

    def make_tree(self, root: int, draft: Array) -> Tree:
        builder, node = TreeBuilder(root), 0
        for token in draft.tolist():
            node = builder.add(node, token)
        return builder.build()


def make_request(row: int, *tokens: int) -> ActiveRequest:
    request = Request(index=row, input_ids=[1], max_output_len=8, end_ids=frozenset())
    active = ActiveRequest(request, row, max_depth=2, text_stream=None)
    active.output_ids = list(tokens)
    return active


def make_states(*rows: Sequence[float]) -> States:
    """Return states [B, T, 1] with these numbers."""
    return States(torch.tensor(rows)[..., None])


def list_drafts(drafter: Adder, requests: Sequence[ActiveRequest]) -> list[list[int]]:
    return [candidates.tree.tokens.tolist() for candidates in drafter.propose(requests)]


def test_a_draft_follows_the_state_of_the_path_s_last_node() -> None:
    drafter, requests = Adder(), [make_request(0, 5, 7), make_request(3, 9)]
    drafter.allocate(4, 16)
    drafter.start(requests)
    drafter.observe(requests, make_states([10, 20, 30], [40, 50, 60]), [[0, 2], [0]])
    assert list_drafts(drafter, requests) == [[7, 37, 38], [9, 49, 50]]
    assert drafter.calls == [([30, 40], [7, 9])], "both rows are drafted for at once"


def test_rows_of_several_steps_are_drafted_for_together() -> None:
    """A row whose prompt has just ended has its state of another step, of other sizes."""
    drafter, old, new = Adder(), make_request(0, 5), make_request(1, 6)
    drafter.observe([old], make_states([1, 2]), [[0, 1]])
    drafter.observe([new], make_states([3, 4, 8]), [[2]])
    assert list_drafts(drafter, [new, old]) == [[6, 14, 15], [5, 7, 8]]


def test_drafts_that_came_ahead_are_taken_once_and_never_by_another_request() -> None:
    drafter, request = Adder(), make_request(0, 5)
    drafter.observe([request], make_states([1]), [[0]])
    drafter.take_drafts([request], [5], np.array([[70, 71]]))
    assert list_drafts(drafter, [request]) == [[5, 70, 71]]
    assert not drafter.calls, "it was computed ahead"
    assert list_drafts(drafter, [request]) == [[5, 6, 7]]
    drafter.take_drafts([request], [5], np.array([[70, 71]]))
    successor = make_request(0, 5)
    drafter.start([successor])
    drafter.observe([successor], make_states([2]), [[0]])
    assert list_drafts(drafter, [successor]) == [[5, 7, 8]]


def test_a_draft_of_another_root_is_a_fault() -> None:
    drafter, request = Adder(), make_request(0, 5)
    drafter.take_drafts([request], [4], np.array([[70, 71]]))
    with pytest.raises(AssertionError):
        drafter.propose([request])


def test_nothing_is_left_after_new_memory() -> None:
    drafter, request = Adder(), make_request(0, 5)
    drafter.observe([request], make_states([1]), [[0]])
    drafter.take_drafts([request], [5], np.array([[70, 71]]))
    drafter.allocate(1, 16)
    with pytest.raises(KeyError):
        drafter.propose([request])
