"""The accept rule against a slow reference, and the counts that come from it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decode.accept import accept
from specdec.decode.requests import RequestStats, sum_stats
from specdec.engine.tree import make_root, pack_beams
from tests.engines import list_paths

SMALL = st.integers(0, 2)


@given(st.integers(1, 5), st.integers(1, 5), st.data())
@settings(max_examples=400, deadline=None)
def test_accept_is_the_longest_agreeing_path(width: int, length: int, data: st.DataObject) -> None:
    beams = np.array(
        data.draw(st.lists(st.lists(SMALL, min_size=length, max_size=length), min_size=width,
                           max_size=width))
    )  # fmt: skip
    tree = pack_beams(9, beams)
    size = tree.num_nodes
    choices = data.draw(st.lists(SMALL, min_size=size, max_size=size))
    best: list[int] = [0]
    for path in list_paths(tree):
        agreed = 1
        while agreed < len(path) and tree.tokens[path[agreed]] == choices[path[agreed - 1]]:
            agreed += 1
        best = max(best, path[:agreed], key=len)
    accepted, bonus = accept(tree, choices)
    assert accepted == best
    assert bonus == choices[best[-1]]
    assert accept(make_root(4), choices) == ([0], choices[0])


def test_statistics_of_known_steps() -> None:
    stats = RequestStats(accepted_histogram=[0, 0, 0, 0])
    stats.count_step(num_draft_tokens=6, depth=3, num_accepted=2)
    stats.count_step(num_draft_tokens=5, depth=3, num_accepted=0)
    stats.num_output_tokens = 1 + 3 + 1  # the prompt's own token, then two steps
    assert stats.acceptance_length == 2.0
    assert stats.acceptance_rate == 2 / 6
    assert stats.accepted_histogram == [1, 0, 1, 0]
    assert stats.num_drafted_steps == 2
    totals = sum_stats([SimpleNamespace(stats=stats)] * 2)
    assert totals["num_output_tokens"] == 10
    assert totals["num_verify_steps"] == totals["num_drafted_steps"] == 4
    stats.count_step(num_draft_tokens=0, depth=0, num_accepted=0)
    assert stats.to_json()["num_drafted_steps"] == 2
    assert totals["acceptance_length"] == 2.0
    not_begun = RequestStats(accepted_histogram=[0])  # as an interrupt leaves requests that wait
    totals = sum_stats([SimpleNamespace(stats=each) for each in (stats, not_begun)])
    assert totals["acceptance_length"] == round(4 / 3, 4)
