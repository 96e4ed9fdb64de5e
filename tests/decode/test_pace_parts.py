"""The parts of the pace, alone, in numbers that a reader can follow: acceptance, account, merging.

Their decisions together are in tests/run/test_pace.py and test_pace_simulation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch

from specdec.decode.accept import Candidates
from specdec.decode.cost_table import CostTable
from specdec.decode.drafters.account import Account
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.calibration import (
    AcceptanceCounts,
    Calibration,
    follow_chances,
    follow_text,
    read_confidence,
)
from specdec.decode.drafters.drift import (
    FIRST_PLAIN_STEP,
    KEPT_STEPS,
    MAX_CHANGE,
    MAX_RATIO,
    MAX_SHARE,
    MAX_WEIGHT,
    PLAIN_STEPS,
    Drift,
)
from specdec.decode.drafters.forecast import Credit, DrafterSet, forecast_steps
from specdec.decode.drafters.joined import JoinedDrafter
from specdec.decode.drafters.merging import join_candidates, merge_candidates
from specdec.decode.drafters.pace import Pace
from specdec.decode.drafters.paced import PacedDrafter
from specdec.decode.drafters.prices import Prices
from specdec.decode.drafters.promise import MAX_PRICE_RATIO, DrafterValue, Promise
from specdec.decode.requests import ActiveRequest
from specdec.engine.step import States
from specdec.engine.tree import Tree, make_root
from specdec.files.acceptance import MAX_DEPTH, MAX_NODES, Acceptance
from tests.costs import make_costs, make_grid


def make_tree(tokens: Sequence[int], parents: Sequence[int]) -> Tree:
    """A tree by its nodes' tokens and parents, root first."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return Tree(*(np.array(column, np.int64) for column in (tokens, parents, depths)))


def make_draft(
    tokens: Sequence[int], parents: Sequence[int], confidence: Sequence[float] | None = None,
    source: int = 0,
) -> Candidates:  # fmt: skip
    sure = None if confidence is None else np.array(confidence)
    return Candidates(make_tree(tokens, parents), None, sure, source)


PAIR = make_draft([7, 4, 5], [-1, 0, 1], [1.0, 0.55, 0.25])  # a chain
FORK = make_draft([7, 4, 5, 6], [-1, 0, 0, 1], [1.0, 0.5, 0.3, 0.9])  # 4 6, and 5 beside it


# ---- Calibration.


def test_a_draft_counts_when_it_is_learned() -> None:
    """The first token was right, the second wrong; the drafter's word weighs as four drafts."""
    calibration = Calibration()
    calibration.record([PAIR], [[0, 1]])
    assert calibration.estimate(PAIR) == [1.0, 0.55, 0.25]
    calibration.learn()
    # 1 of 1 + 4 at this depth, 4 of 1 + 4 left for all depths, and of those 4 of 5 for its word.
    right, wrong = calibration.estimate(PAIR)[1:]
    assert right == pytest.approx(1 / 5 + 4 / 5 * (1 / 5 + 4 / 5 * 0.55))
    assert wrong == pytest.approx(4 / 5 * (4 / 5 * 0.25))
    calibration.learn()
    assert calibration.estimate(PAIR)[1] == right, "it counts once"
    # Elsewhere the word stands, or is what all depths say of it.
    other = make_draft([7, 1, 2], [-1, 0, 1], [1.0, 0.75, 0.55])
    assert calibration.estimate(other)[1:] == pytest.approx([0.75, 1 / 5 + 4 / 5 * 0.55])
    assert calibration.estimate(FORK, PAIR)[4:] == [1.0, right, wrong]


def test_an_older_draft_weighs_less() -> None:
    calibration, chain = Calibration(), make_draft([7, 4], [-1, 0], [1.0, 0.55])
    for path in ([0, 1], [0]):
        calibration.record([chain], [path])
    calibration.learn()
    share = 4 / (1.98 + 4)
    expected = 0.98 / 5.98 + share * (0.98 / 5.98 + share * 0.55)
    assert calibration.estimate(chain)[1] == pytest.approx(expected)


def test_what_nobody_looked_at_is_not_counted() -> None:
    """A token below one that was not accepted, and a root alone, which makes nothing older."""
    calibration = Calibration()
    calibration.record([FORK, Candidates(make_root(7))], [[0, 2], [0]])
    calibration.learn()
    chances = calibration.estimate(FORK)
    # Confidences of 0.5 and 0.3, in buckets whose middles are 0.55 and 0.35.
    share = 4 * 0.55 / (0.5 + 4 * 0.55)
    assert chances[1] == pytest.approx(share * share * 0.5)
    expected = 0.3 + 4 * 0.35
    ratio = (1 + 4 * 0.35) / expected
    assert chances[2] == pytest.approx(0.3 * (1 + 4 * 0.35 * ratio) / expected)
    assert chances[3] == 0.9


def test_of_unlikely_tokens_the_least_likely_are_right_the_least_often() -> None:
    """Tokens of confidence 0.08 are right half as often; of ones of 0.004 nothing was seen."""
    calibration = Calibration()
    seen = make_draft([7, 1], [-1, 0], [1.0, 0.08])
    for number in range(2000):
        calibration.record([seen], [[0, 1] if number % 25 == 0 else [0]])
    calibration.learn()
    draft = make_draft([7, 1, 2], [-1, 0, 0], [1.0, 0.08, 0.004])
    assert calibration.estimate(draft)[1:] == pytest.approx([0.04, 0.002], rel=0.35)


def test_each_drafter_of_a_chain_has_its_own_record() -> None:
    calibration, second = Calibration(), make_draft([7, 4, 5], [-1, 0, 1], [1.0, 0.55, 0.25], 1)
    calibration.record([second], [[0]])
    calibration.learn()
    assert calibration.estimate(PAIR, second)[:3] == [1.0, 0.55, 0.25]
    assert calibration.estimate(second)[1] == pytest.approx(16 / 25 * 0.55)


def test_a_drafter_forgets_by_its_own_drafts_alone() -> None:
    calibration, second = Calibration(), make_draft([7, 4], [-1, 0], [1.0, 0.55], 1)
    calibration.record([PAIR], [[0, 1]])
    calibration.learn()
    known = calibration.estimate(PAIR)
    calibration.record([second] * 300, [[0]] * 300)
    calibration.learn()
    assert calibration.estimate(PAIR) == known
    assert calibration.estimate(second)[1] < 0.01


@pytest.mark.parametrize(
    ("emitted", "num_judged", "path"),
    [([4, 6, 9], 3, [0, 1, 3]), ([4, 8], 3, [0, 1]), ([5], 2, [0, 2]), ([1], 2, [0]), ([], 0, [0])],
)
def test_a_text_judges_a_draft_that_was_not_verified(
    emitted: list[int], num_judged: int, path: list[int]
) -> None:
    """As far as it goes: of what follows its last token, nothing is known."""
    judged, followed = follow_text(FORK, emitted)
    assert (judged.tree.num_draft_tokens, followed) == (num_judged, path)
    assert judged.confidence is not None
    assert judged.confidence.tolist() == [1.0, 0.5, 0.3, 0.9][: 1 + num_judged]


def test_deep_tokens_count_as_the_deepest_that_are_told_apart() -> None:
    depth = MAX_DEPTH + 3
    deep = make_draft(range(depth + 1), range(-1, depth), [1.0, *[0.55] * depth])
    calibration = Calibration()
    calibration.record([deep], [list(range(depth))])  # all but the last
    calibration.learn()
    chances = calibration.estimate(deep)
    # Depths 12 to 15 together: 3 of 4; depth 1 alone: 1 of 1; of all depths 14 of 15.
    everywhere = 14 / 19 + 4 / 19 * 0.55
    assert chances[-1] == chances[-4] == pytest.approx(3 / 8 + 4 / 8 * everywhere)
    assert chances[1] == pytest.approx(1 / 5 + 4 / 5 * everywhere)


def test_small_numbers_again_are_the_same_numbers() -> None:
    """A weight grows by a fiftieth a draft, and would leave the numbers after 35,000."""
    calibration, chain = Calibration(), make_draft([7, 4], [-1, 0], [1.0, 0.55])
    for count in (500, 11_500):
        calibration.record([chain] * count, [[0, 1]] * count)
        calibration.learn()
        # 1 + 0.98 + 0.98 ** 2 ... = 50 drafts.
        share = 4 / 54
        expected = 50 / 54 + share * (50 / 54 + share * 0.55)
        assert calibration.estimate(chain)[1] == pytest.approx(expected, abs=1e-5)


def test_confidence_by_rank_where_a_drafter_has_none() -> None:
    """0.6 of the best token, a quarter of that for the next; 0.8 of it one deeper."""
    tree = make_draft([7, 4, 5, 6], [-1, 0, 0, 1])
    assert read_confidence(tree)[1:].tolist() == pytest.approx([0.6, 0.15, 0.48])
    (paths,) = follow_chances([FORK.tree], FORK.confidence.tolist())  # type: ignore[union-attr]
    assert paths == pytest.approx([1.0, 0.5, 0.3, 0.45])
    both = follow_chances([PAIR.tree, FORK.tree], [1.0, 0.5, 0.5, 1.0, 0.1, 0.2, 0.5])
    assert both == [[1.0, 0.5, 0.25], pytest.approx([1.0, 0.1, 0.2, 0.05])]


# ---- Counts for the record of a drafter.


def test_counts_of_a_fork() -> None:
    """Nodes are counted in the order of their paths' chances: 4, then 4 6, then 5."""
    counts = AcceptanceCounts()
    counts.record([FORK, Candidates(make_root(7))], [[0, 2], [0]])
    record = counts.make_record(num_prompts=3)
    assert record is not None
    assert (record.num_drafts, record.about) == (1, {"num_prompts": 3})
    seen = {(1, 5): 1, (1, 3): 1}
    for depth in range(1, MAX_DEPTH + 1):
        for bucket in range(10):
            assert record.seen[depth - 1][bucket] == seen.get((depth, bucket), 0)
            assert record.right[depth - 1][bucket] == ((depth, bucket) == (1, 3))
    assert record.gains == (0.0, 0.0, *[1.0] * (MAX_NODES - 2))


def test_counts_of_deep_and_certain_tokens_and_of_many_nodes() -> None:
    counts, depth = AcceptanceCounts(), MAX_DEPTH + 2
    deep = make_draft(range(depth + 1), range(-1, depth), [1.0] * (depth + 1))
    counts.record([deep], [list(range(depth + 1))])
    wide = make_draft(range(MAX_NODES + 3), [-1] + [0] * (MAX_NODES + 2))
    counts.record([wide], [[0, MAX_NODES + 2]])  # the least likely: beyond what is told
    record = counts.make_record()
    assert record is not None
    assert [row[9] for row in record.right] == [1] * 11 + [3], "confidence 1 is in the last tenth"
    assert record.gains[0] == 0.5
    assert record.gains[-1] == depth / 2


# ---- Means of drafts.


def test_a_drafters_value() -> None:
    value = DrafterValue(2)
    first = 0.7 + 0.49  # of untried drafts half bring twice that, half bring nothing
    assert value.expect_more(0.0) == pytest.approx(first)
    assert value.expect_more(1.0) == pytest.approx((2 * first - 1) / 2)
    assert value.expect_more(3.0) == 0
    value.record([2.0, 1.0])
    assert value.expect_more(0.0) == pytest.approx((3.0 + 3 * first) / (2 + 3))
    assert value.expect_more(1.5) == pytest.approx((0.5 + 3 * (first - 0.75)) / (2 + 3))
    assert value.average(lambda gain: gain - 1.5) == pytest.approx(0.25)
    assert DrafterValue(2).average(lambda gain: gain) == 0
    value.ask(0.0, None)
    assert (value.share, value.num_levels) == (0.875, 2.0)
    value.ask(0.875, 6)
    assert (value.share, value.num_levels) == (0.875, 3.0)


def test_a_drafter_is_believed_as_at_first_again_if_it_is_not_tried_for_long() -> None:
    value = DrafterValue(2)
    first = value.expect_more(0.0)
    value.record([0.0] * 1000)
    low = value.expect_more(0.0)
    assert low < 0.1 * first
    for _ in range(9):
        value.rest(1.0, 10.0)
    value.ask(1.0, 1)  # a draft: its trial is paid anew
    value.rest(1.0, 10.0)
    assert value.expect_more(0.0) == low
    for _ in range(9):
        value.rest(1.0, 10.0)
    assert low < value.expect_more(0.0) < 1.1 * low
    for _ in range(1000):
        value.rest(1.0, 10.0)
    assert value.expect_more(0.0) == pytest.approx(first)


def test_an_untried_drafter_promises_what_its_record_tells() -> None:
    rows = ((60,) * 10,) * 12
    record = Acceptance(
        right=rows, seen=((100,) * 10,) * 12, gains=(0.5, 0.8), num_drafts=9, about={}
    )
    pace = Pace(4, make_costs(num_drafters=2), max_depths=(4, 4), record=record, recorded_drafter=1)
    untried, recorded = (drafter.expect_more(0.0) for drafter in pace.drafters)
    assert recorded == pytest.approx(0.8)
    assert untried == pytest.approx(0.7 + 0.49 + 0.343 + 0.2401)


def test_a_promise_of_trees_and_of_chains() -> None:
    tree, chain = Promise(3, is_chain=False), Promise(3, is_chain=True)
    first = [0.7, 1.19, 1.533]
    assert tree.gains == pytest.approx(first)
    assert chain.gains == pytest.approx(first)
    tree.take_emitted([3, 1], 4)  # two tokens were accepted, then none
    weight = (3 * 0.98 + 1) * 0.98 + 1
    sums = [(3 * 0.98 * gain + 2) * 0.98 for gain in first]
    assert tree.gains == pytest.approx([total / weight for total in sums])
    # Of the tokens that were looked at, two of three were right: all, then the first was wrong.
    chain.take_emitted([3, 1], 3)
    right, reached = (2.1 * 0.99 + 2) * 0.99, (3 * 0.99 + 2) * 0.99 + 1
    rate = right / reached
    assert chain.gains == pytest.approx([rate, rate + rate**2, rate + rate**2 + rate**3])


def test_a_new_text_is_expected_to_be_like_those_before() -> None:
    promise = Promise(1, is_chain=False)
    promise.take_emitted([1] * 50, 2)  # a text in which nothing is right
    low = float(promise.gains[0])
    assert low < 0.2
    promise.start(1.0)  # no text had ended: it is all that is known
    assert promise.gains[0] == pytest.approx(low)
    promise.take_emitted([2] * 400, 2)
    assert promise.gains[0] == pytest.approx(1, abs=1e-3)
    promise.start(1.0)
    usual = (50 * low + 400) / 450
    assert promise.gains[0] == pytest.approx(usual, abs=1e-3), "by the drafts of each text"
    promise.take_emitted([1] * 25, 2)
    newest = float(promise.gains[0])
    promise.start(1.0)
    before = promise.gains[0]
    assert before == pytest.approx(0.8 * usual + 0.2 * newest, abs=1e-3), (
        "of earlier ones a hundred"
    )
    promise.start(1.0)  # a text for which nothing was drafted
    assert promise.gains[0] == pytest.approx(before, abs=1e-3)
    promise.take_emitted([1] * 400, 2)
    promise.start(0.0)
    assert promise.gains[0] < 0.001 < before


def test_what_many_drafts_brought_is_relied_on() -> None:
    for is_chain in (False, True):
        promise = Promise(2, is_chain=is_chain)
        assert promise.trust == 0
        promise.take_emitted([2] * 4, 2)
        known = 1 + 0.95 + 0.95**2 + 0.95**3
        assert promise.trust == pytest.approx(known / (known + 4))
        promise.start(1.0)  # another text: half as much is known of it
        assert promise.trust == pytest.approx(known / (known + 8))
    promise = Promise(2, is_chain=False)
    promise.take_promised(4, [2.0, 3.0], 2)
    assert promise.trust == pytest.approx(0.5)
    forecast = forecast_steps(DrafterSet(promise), Credit(), 1, 1.0, [1.1, 1.2], [0.1, 0.1])
    assert forecast.sure_gain == pytest.approx(0.5 * promise.gains[forecast.best_size - 1])


def test_an_account() -> None:
    account = Account()
    assert account.find_limit(50.0) == pytest.approx(1.0)
    account.add(10.0, 0.5, is_trial=False)
    assert (account.spent_seconds, account.lost_seconds, account.trial_allowance) == (
        10.0,
        0.5,
        0.0,
    )
    assert account.find_limit(40.0) == pytest.approx(0.02 * 50 - 0.5)
    account.add(100.0, 0.25, is_trial=True)
    assert (account.spent_seconds, account.lost_seconds) == (110.0, 0.75)
    assert account.trial_allowance == pytest.approx(0.009 * 100 - 0.25)
    # A share of 110 + 40 seconds; what has been won counts, too, what was lost does not.
    assert account.find_reading_limit(40.0) == pytest.approx(0.04 * 150)
    account.read(5.0, is_trial=True)
    assert (account.spent_seconds, account.reading_seconds) == (115.0, 5.0)
    assert account.trial_allowance == pytest.approx(0.009 * 100 - 0.25 - 5)
    account.lost_seconds = -1.0
    assert account.find_reading_limit(35.0) == pytest.approx(0.04 * 150 - 5 + 1)
    account.reading_seconds = 50.0
    assert account.find_reading_limit(35.0) == 0


# ---- Forecasts.


def test_a_forecast_is_of_the_size_with_the_most_tokens_a_second() -> None:
    """Drafts that nothing is known of: 0.7 of the tokens are right."""
    drafter_set = DrafterSet(Promise(3, is_chain=False), frozenset({1}))
    forecast = forecast_steps(drafter_set, Credit(), 2, 1.0, [1.1, 1.2, 2.0], [0.5, 0.5, 0.5])
    rates = [2 * 1.7 / 1.6, 2 * 2.19 / 1.7, 2 * 2.533 / 2.5]
    assert (forecast.best_size, forecast.drafter_set) == (2, drafter_set)
    assert forecast.rate == pytest.approx(rates[1])
    assert forecast.gain == pytest.approx(rates[1] / 2)
    assert forecast.gains == pytest.approx([0.7, 1.19, 1.533])
    # Plain steps emit more than dear drafts do; a draft that is verified whole has one size.
    dear = forecast_steps(drafter_set, Credit(), 2, 1.0, [1.3], [9.0])
    assert (dear.best_size, dear.rate) == (3, 2.0)
    assert dear.gain == pytest.approx(2.533 / 10.3)


def test_drafts_are_expected_to_keep_what_they_kept_of_their_promises() -> None:
    drafter_set, credit = DrafterSet(Promise(2, is_chain=False)), Credit()

    def forecast() -> Sequence[float]:
        return forecast_steps(drafter_set, credit, 1, 1.0, [1.0, 1.0], [0.0, 0.0]).gains

    first = forecast()
    for _ in range(1000):
        credit.judge(2.0, 1.5)
    assert forecast() == pytest.approx([0.75 * gain for gain in first], rel=0.01)


def test_a_step_judges_the_promises_of_what_it_verified() -> None:
    pace = Pace(3, CHEAP)
    assert pace.plan([64, 64])
    size = pace.choose([[0.9, 0.8, 0.5], [0.9]])
    assert size == 3
    pace.record(1 + size, [3, 1], [])
    before = pace.credit.promised_tokens, pace.credit.accepted_tokens
    assert before == pytest.approx((0.99 * 20 + 3.1, 0.99 * 20 + 2.0))
    pace.plan([64, 64])
    pace.record(1, [1, 1], [])  # where drafters propose nothing, nothing is judged
    assert (pace.credit.promised_tokens, pace.credit.accepted_tokens) == before


# ---- Merging.


def test_a_merged_tree_is_as_sure_as_the_surer_of_both() -> None:
    one = make_draft([7, 4, 5], [-1, 0, 1], [1.0, 0.5, 0.9])
    two = make_draft([7, 3, 4, 5, 6], [-1, 0, 0, 2, 2], [1.0, 0.1, 0.8, 0.2, 0.3])
    merged = merge_candidates([one, two])
    assert merged.tree.tokens.tolist() == [7, 4, 5, 3, 6]
    assert merged.tree.parents.tolist() == [-1, 0, 1, 0, 1]
    assert merged.confidence is not None
    assert merged.confidence.tolist() == [1.0, 0.8, 0.9, 0.1, 0.3]
    joined = join_candidates([one, Candidates(make_root(7)), two])
    assert joined.tree.tokens.tolist() == merged.tree.tokens.tolist()
    assert join_candidates([Candidates(make_root(7)), two]) is two


# ---- Drafters that are joined, and drafters under one pace.


class Scripted(Drafter):
    """Drafts by request's root, with what it is told and what it sees kept."""

    max_draft_tokens = max_draft_depth = 3

    def __init__(self, drafts: dict[int, Candidates], **attributes: Any) -> None:
        self.drafts, self.asked, self.seen = drafts, list[list[int]](), list[Any]()
        self.num_unread = 0
        vars(self).update(attributes)

    def count_unread(self, requests: Sequence[ActiveRequest]) -> int:
        return self.num_unread

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        roots = [request.output_ids[-1] for request in requests]
        self.asked.append(roots)
        return [self.drafts.get(root, Candidates(make_root(root))) for root in roots]

    def observe(self, requests: Any, states: Any, paths: Sequence[Sequence[int]]) -> None:
        self.seen.append([list(path) for path in paths])


def make_requests(*roots: int) -> list[ActiveRequest]:
    prompt = SimpleNamespace(input_ids=[3])
    return [
        cast(ActiveRequest, SimpleNamespace(output_ids=[root], remaining=99, request=prompt))
        for root in roots
    ]  # fmt: skip


def test_joined_drafters_are_all_told_of_everything() -> None:
    """The calls of one are the calls of each, and what they answer is put together."""
    members = [create_autospec(Drafter, instance=True) for _ in range(3)]
    for number, member in enumerate(members):
        member.max_draft_tokens = member.max_draft_depth = number + 1
        member.follows_prompts, member.reads_hidden = number == 2, False
        member.count_unread.return_value, member.list_cached_tensors.return_value = (
            10**number,
            [number],
        )
    drafter = JoinedDrafter([members[:2], members[2:]])
    assert (drafter.max_draft_tokens, drafter.max_draft_depth) == (3, 3)
    assert (drafter.follows_prompts, drafter.reads_hidden) == (True, False)
    calls: dict[str, tuple[Any, ...]] = {
        "take_cache": (object(),), "allocate": (2, 64), "start": ([],),
        "follow": ([0], [1], [2], STATES),
        "observe": ([], STATES, [[0]]), "copy_prefix": (0, 1, 9), "settle": (1,), "resume": (1, 9),
        "keep": (),
    }  # fmt: skip
    for name, values in calls.items():
        getattr(drafter, name)(*values)
        for member in members:
            getattr(member, name).assert_called_once_with(*values)
    assert drafter.count_unread([]) == 111
    assert cast(Any, drafter.list_cached_tensors()) == [0, 1, 2]


STATES = States(torch.zeros(1, 1, 1))
CHEAP = make_costs(step=lambda tokens: 1.0 + 0.002 * tokens)


def list_tokens(drafts: Sequence[Candidates]) -> list[list[int]]:
    return [candidates.tree.tokens.tolist() for candidates in drafts]


def test_the_likeliest_nodes_are_verified() -> None:
    """A node more takes a tenth of a step's time: 0.9 is worth it, 0.45 is, 0.01 is not."""
    draft = make_draft([7, 1, 2, 3], [-1, 0, 0, 2], [1.0, 0.01, 0.9, 0.5])
    member = Scripted({7: draft})
    drafter = PacedDrafter([[member]], make_costs(step=lambda tokens: 1.0 + 0.1 * tokens))
    (kept,) = drafter.propose(make_requests(7))
    assert kept.tree.tokens.tolist() == [7, 2, 3]
    assert kept.tree.parents.tolist() == [-1, 0, 1]
    assert kept.confidence is not None
    assert kept.confidence.tolist() == [1.0, 0.9, 0.5]
    drafter.observe(make_requests(7), STATES, [[0, 1, 2]])
    assert member.seen == [[[0, 1, 2]]]
    # A draft of a pass, 0.06, and a step of three nodes, 1.3, have emitted three tokens.
    account = drafter.pace.account
    assert account.lost_seconds == pytest.approx(0.06 + 1.3 - 3 * 1.1)
    assert account.spent_seconds == pytest.approx(0.06 + 1.3 - 1.1), (
        "the first plan is of no step before"
    )
    drafter.pace.calibration.learn()
    assert drafter.pace.calibration.estimate(draft)[2] > 0.9


def test_what_was_drawn_and_what_is_fixed_is_verified_whole() -> None:
    confidence = np.array([1.0, 0.001, 0.001])
    drawn = Candidates(PAIR.tree, [torch.ones(9) / 9] * 2, confidence)
    unsure = Candidates(PAIR.tree, None, confidence)
    for draft, is_fixed, tokens in (
        (drawn, False, [7, 4, 5]), (unsure, True, [7, 4, 5]), (unsure, False, [7]),
    ):  # fmt: skip
        drafter = PacedDrafter([[Scripted({7: draft})]], CHEAP, is_fixed=is_fixed)
        assert list_tokens(drafter.propose(make_requests(7))) == [tokens]


def test_later_drafters_are_asked_for_what_the_first_has_nothing_for() -> None:
    draft = make_draft([7, 1, 2], [-1, 0, 1], [1.0, 0.95, 0.95])
    first = Scripted({7: draft})
    second = Scripted({8: make_draft([8, 4, 5], [-1, 0, 1], [1.0, 0.9, 0.9])}, num_levels=2)
    costs = CostTable(
        steps=make_grid(lambda tokens: 1.0 + 0.002 * tokens),
        drafts=(make_grid(lambda levels: 0.01), make_grid(lambda levels: 0.1 * levels)),
    )  # fmt: skip
    drafter = PacedDrafter([[first], [second]], costs)
    requests = make_requests(7, 8)
    drafts = drafter.propose(requests)
    assert list_tokens(drafts) == [[7, 1, 2], [8, 4, 5]]
    assert [candidates.source for candidates in drafts] == [0, 1]
    assert (first.asked, second.asked) == ([[7, 8]], [[8]])
    drafter.observe(requests, STATES, [[0], [0, 1, 2]])
    assert first.seen == second.seen == [[[0], [0, 1, 2]]]
    # Two drafts of the first, one of two levels of the second, and a step of six nodes, that has
    # emitted four tokens; a plain one of two nodes emits two.
    assert drafter.pace.account.lost_seconds == pytest.approx(
        2 * 0.01 + 0.2 + 1.012 - 1.004 * 4 / 2
    )
    assert drafter.pace.drafters[1].share == pytest.approx(1 - 0.5 / 8)


def test_the_better_draft_is_kept_and_the_text_judges_the_other() -> None:
    """The second promised more than the first, and then has less; next time it has more."""
    costs = CostTable(
        steps=make_grid(lambda tokens: 1.0 + 0.002 * tokens),
        drafts=(make_grid(lambda levels: 0.01),) * 2,
    )  # fmt: skip
    fair = make_draft([7, 1, 2], [-1, 0, 1], [1.0, 0.5, 0.5])
    for confidence, tokens, source in ((0.2, [7, 1, 2], 0), (0.9, [7, 4, 5], 1)):
        other = make_draft([7, 4, 5], [-1, 0, 1], [1.0, confidence, confidence])
        drafter = PacedDrafter([[Scripted({7: fair})], [Scripted({7: other})]], costs)
        (kept,) = drafter.propose(make_requests(7))
        assert (kept.tree.tokens.tolist(), kept.source) == (tokens, source)
        ((_, _, judged),) = drafter._displaced
        assert judged.source == 1 - source


def test_members_of_a_group_share_a_tree_and_chains_are_their_best_paths() -> None:
    one = make_draft([7, 1, 2], [-1, 0, 1], [1.0, 0.8, 0.8])
    two = make_draft([7, 3, 1], [-1, 0, 0], [1.0, 0.7, 0.9])
    drafter = PacedDrafter([[Scripted({7: one}), Scripted({7: two})]], CHEAP)
    assert drafter.max_draft_tokens == 6
    assert list_tokens(drafter.propose(make_requests(7))) == [[7, 1, 2, 3]]
    drafter = PacedDrafter([[Scripted({7: one}), Scripted({7: two})]], CHEAP)
    drafter.chains_only = True
    assert list_tokens(drafter.propose(make_requests(7))) == [[7, 1, 2]]


def test_what_members_are_told_and_what_is_known_of_them() -> None:
    planned = Scripted({}, is_planned=True, follows_prompts=True)
    planned.max_draft_tokens = planned.max_draft_depth = 8
    drafter = PacedDrafter([[planned]], make_costs(draft=lambda levels: 0.3 * levels))
    assert (drafter.follows_prompts, drafter.reads_hidden, drafter.is_indivisible) == (
        True, False, False,
    )  # fmt: skip
    drafter.plan_step(0, 40)
    assert list_tokens(drafter.propose(make_requests(7))) == [[7]]
    assert planned.max_prefill == 40
    # Of 1 + 0.7 + 0.7 ** 2 ... tokens in 1.02 + 0.32 n seconds, two levels make the most.
    assert planned.max_levels == drafter.pace.max_levels == 2
    whole = PacedDrafter([[Scripted({}, is_indivisible=True)]], make_costs())
    assert whole.is_indivisible
    assert whole.pace.is_whole
    lone = Scripted({}, reads_hidden=True)
    pair = PacedDrafter([[lone, planned]], make_costs())
    assert (pair.reads_hidden, pair.is_indivisible, pair.pace.is_planned) == (True, False, False)
    lone.num_unread, planned.num_unread = 5, 6
    assert pair.count_unread(make_requests(7)) == 11


def test_a_drafter_that_does_not_pay_rests() -> None:
    """Nothing is asked of it while the pace rests, and the loop may skip it."""
    member = Scripted({7: make_draft([7, 1], [-1, 0], [1.0, 0.01])})
    drafter = PacedDrafter([[member]], make_costs(step=lambda n: float(n), draft=lambda n: 1.0))
    rests = 0
    for _ in range(100):
        if drafter.rests(1):
            drafter.skip(1)
            rests += 1
        elif drafter.propose(make_requests(7)):
            drafter.observe(make_requests(7), STATES, [[0]])
    assert rests > 80
    assert len(member.asked) < 5


# ---- Drift of the costs.


def test_steps_drift_by_classes_and_none_is_dearer_than_a_larger_one() -> None:
    drift = Drift()
    counts, table = [1, 2, 7, 13, 17], [1.0, 1.0, 1.2, 2.0, 4.0]
    timed: dict[int, tuple[float, float]] = {}

    def record(num_tokens: int, table_seconds: float, seconds: float) -> list[float]:
        timed[num_tokens] = table_seconds, seconds
        for _ in range(200):  # by turns, so that none is forgotten
            for number, pair in timed.items():
                drift.record(number, *pair)
        return drift.correct(counts, table)

    assert drift.correct(counts, table) == table
    # Classes without a timed step drift as the nearest below does, else the nearest above.
    assert record(7, 1.2, 1.8) == pytest.approx([1.5, 1.5, 1.8, 3.0, 6.0])
    assert record(3, 1.0, 0.6) == pytest.approx([0.6, 0.6, 1.8, 3.0, 6.0])
    assert record(16, 2.0, 1.0) == pytest.approx([0.6, 0.6, 1.0, 1.0, 2.0])
    assert record(1, 1.0, 0.9) == pytest.approx([0.6, 0.6, 1.0, 1.0, 2.0])


def test_one_delayed_step_hardly_counts() -> None:
    drift = Drift()
    for _ in range(MAX_WEIGHT):
        drift.record(1, 1.0, 1.0)
    drift.record(1, 1.0, 100.0)
    assert drift.correct([1], [1.0]) == pytest.approx([1 + (MAX_CHANGE - 1) / MAX_WEIGHT])
    drift = Drift()
    drift.record(1, 1.0, 0.0)  # the first of a class counts as much as the table
    assert drift.correct([1], [1.0]) == pytest.approx([(1 + 1 / MAX_RATIO) / 2])


def test_a_class_without_steps_for_long_is_tried_as_if_it_had_none() -> None:
    """Steps of 9 nodes became dear in a slow minute, and were not tried when memory was fast."""
    drift = Drift()
    for num_nodes in (1, 9, 8):
        drift.record(num_nodes, 1.0, 2.0)
    for _ in range(KEPT_STEPS - 1):
        drift.record(8, 1.0, 1.0)
    seconds = drift.correct([1, 8, 9], [1.0, 1.0, 1.0])
    assert seconds == pytest.approx([1.0, 1.0, 1.75], abs=0.01)
    drift.record(8, 1.0, 1.0)
    assert drift.correct([1, 8, 9], [1.0, 1.0, 1.0]) == pytest.approx([1.0] * 3, abs=0.01)
    assert drift.correct([1], [1.0]) == pytest.approx([1.5])  # plain steps have a turn


def test_a_plain_step_after_many_drafted_ones_counts_as_much_as_what_was_known() -> None:
    drift = Drift()
    for num_nodes in (*[1] * MAX_WEIGHT, *[3] * PLAIN_STEPS):
        drift.record(num_nodes, 1.0, 1.0)
    drift.record(1, 1.0, 0.9)
    assert drift.correct([1], [1.0]) == pytest.approx([1 - 0.1 * MAX_SHARE])
    drift.record(1, 1.0, 0.9)  # right after it
    assert drift.correct([1], [1.0]) == pytest.approx([0.95 - 0.05 / MAX_WEIGHT])


def test_a_plain_step_is_due_where_all_steps_are_drafted() -> None:
    drift = Drift()
    for first, num_steps in ((True, FIRST_PLAIN_STEP), (False, PLAIN_STEPS)):
        for step in range(num_steps):
            assert not drift.needs_plain, (first, step)
            drift.record(3, 1.0, 1.0)
        assert drift.needs_plain
        drift.record(1, 1.0, 1.0)


def test_steps_of_other_numbers_of_requests_drift_by_themselves() -> None:
    """A plain step of four requests has as many tokens as one of a tree of four nodes."""
    pace = Pace(4, CHEAP)
    pace.plan([50])
    for _ in range(40):
        pace.prices.take_step(4, 3.0)
    assert pace.prices.drift.correct([1, 4], [1.0, 1.0]) == pytest.approx([2.0, 2.0], rel=0.02)
    pace.plan([50] * 4)
    assert pace.prices.drift.correct([1, 4], [1.0, 1.0]) == [1.0, 1.0]
    pace.plan([50])
    assert pace.prices.drift.correct([1, 4], [1.0, 1.0]) == pytest.approx([2.0, 2.0], rel=0.02)


class Steps:
    """A clock that a step of a number of nodes moves on."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.now, self.seconds = 1.0, seconds

    def __call__(self) -> float:
        return self.now

    def run(self, drafter: PacedDrafter, *, num_accepted: int) -> int:
        """Run a step of one request; return its nodes."""
        if drafter.rests(1):
            drafter.skip(1)
            drafts = []
        else:
            drafts = drafter.propose(make_requests(7))
        size = drafts[0].tree.num_nodes if drafts else 1
        self.now += self.seconds(size)
        drafter.observe(make_requests(7), STATES, [[*range(min(size, 1 + num_accepted))]])
        return size


def test_a_table_of_a_slow_minute_is_set_right_by_the_steps() -> None:
    """In it nodes cost nothing; here each costs a plain step, and one of three is right."""
    draft = make_draft([7, 1, 2, 3], [-1, 0, 1, 2], [1.0, 0.4, 0.4, 0.4])
    costs = make_costs(step=lambda tokens: 1.0 + 0.001 * tokens, draft=lambda levels: 0.0)
    sizes: dict[bool, list[int]] = {}
    for is_timed in (False, True):
        steps = Steps(lambda size: 0.5 * size)
        clock = steps if is_timed else None
        drafter = PacedDrafter([[Scripted({7: draft})]], costs, clock=clock)
        sizes[is_timed] = [steps.run(drafter, num_accepted=n % 3 == 0) for n in range(300)]
    assert set(sizes[False]) == {4}
    assert sizes[True][0] == 4
    assert np.mean(sizes[True][100:]) < 1.5


def test_a_plain_step_that_is_due_waits_until_it_can_be_timed() -> None:
    """Prompts in every step would let none draft otherwise; and other requests have other costs."""
    draft = make_draft([7, 4, 5], [-1, 0, 1], [1.0, 0.9, 0.9])
    steps = Steps(lambda size: 1.0)
    drafter = PacedDrafter([[Scripted({7: draft})]], CHEAP, clock=steps)
    for _ in range(FIRST_PLAIN_STEP):
        assert steps.run(drafter, num_accepted=2) == 3
    assert drafter.pace.prices.drift.needs_plain
    drafter.plan_step(8, None)
    for _ in range(20):
        assert steps.run(drafter, num_accepted=2) == 3
    drafter.plan_step(0, None)
    assert steps.run(drafter, num_accepted=0) == 1
    assert not drafter.pace.prices.drift.needs_plain
    assert steps.run(drafter, num_accepted=2) == 3


def test_drafts_that_take_longer_than_the_table_says_are_dearer() -> None:
    """And those for which a prompt is read are not held against it, nor drawn ones."""

    def find_ratio(draft: Candidates, num_prefilled: int = 0) -> float:
        steps = Steps(lambda size: 1.0)
        member = Scripted({7: draft})
        propose = member.propose

        def take_time(requests: Sequence[ActiveRequest]) -> list[Candidates]:
            steps.now += 0.12  # twice what the table says of a draft of one level
            member.num_prefilled, member.num_levels = num_prefilled, 1
            return propose(requests)

        member.propose = take_time  # type: ignore[method-assign]
        drafter = PacedDrafter([[member]], CHEAP, clock=steps)
        for _ in range(200):
            steps.run(drafter, num_accepted=1)
        return drafter.pace.drafters[0].price_ratio

    sure = make_draft([7, 4, 5], [-1, 0, 1], [1.0, 0.9, 0.9])
    assert find_ratio(sure) == pytest.approx(2.0, rel=0.01)
    assert find_ratio(sure, num_prefilled=100) == 1.0
    assert find_ratio(Candidates(sure.tree, [torch.ones(9) / 9] * 2, sure.confidence)) == 1.0
    value = DrafterValue(4)
    for _ in range(1000):
        value.price(1000.0)
    assert value.price_ratio == MAX_PRICE_RATIO


def test_a_drafter_s_price_has_the_delay_of_the_steps_after_its_drafts() -> None:
    """Its weights take the target's out of a processor's caches."""
    costs = make_costs(num_drafters=2, step=lambda tokens: 1.0)
    drafters = [DrafterValue(1), DrafterValue(4)]
    prices = Prices(costs, [1, 2, 3], drafters)
    prices.num_rows = 1
    prices.plan(0, 0)
    first, later = (prices.price_draft(number, 1, 1) for number in (0, 1))
    for step in range(400):
        calls = [(0, 1, 1), (1, 1, 1)][: 1 + step % 2]
        prices.take_step(2, 1.3 if step % 2 else 1.0, calls)
        prices.plan(0, 0)
    assert prices.price_draft(0, 1, 1) == pytest.approx(first, abs=0.01), "as it always drafts"
    assert prices.price_draft(1, 1, 1) == pytest.approx(later + 0.3, abs=0.02)
    assert prices.price_calls([(1, 1, 1)]) == prices.price_draft(1, 1, 1)
    before = prices.price_draft(1, 1, 1)
    prices.take_step(2, 100.0, [(1, 1, 1)])  # as where another program ran
    assert before < prices.price_draft(1, 1, 1) < before + 0.02
    for _ in range(400):
        prices.take_drafts(later, [(1, 1, 1)])  # a draft takes no longer: the step after it does
    assert drafters[1].price_ratio == pytest.approx(1.0)
    value = DrafterValue(1)
    value.take_delay(-1.0, is_asked=True)
    assert value.delay == 0, "no draft makes a step shorter"


def test_steps_with_prompts_and_drawn_drafts_are_not_timed() -> None:
    def run(draft: Candidates, num_prompt_tokens: int) -> list[float]:
        steps = Steps(lambda size: 2.0)
        drafter = PacedDrafter([[Scripted({7: draft})]], CHEAP, clock=steps)
        for _ in range(20):
            drafter.plan_step(num_prompt_tokens, None)
            steps.run(drafter, num_accepted=1)
        return drafter.pace.prices.drift.correct([1, 2, 3], [1.0, 1.0, 1.0])

    sure = make_draft([7, 4, 5], [-1, 0, 1], [1.0, 0.9, 0.9])
    drawn = Candidates(sure.tree, [torch.ones(9) / 9] * 2, sure.confidence)
    assert max(run(sure, 0)) > 1.5
    assert run(sure, 8) == run(drawn, 0) == [1.0, 1.0, 1.0]


def test_prices_are_the_tables_until_steps_and_drafts_drift_from_it() -> None:
    costs = make_costs(num_drafters=2, step=lambda tokens: 1.0 + 0.5 * (tokens > 2))
    drafters = [DrafterValue(1), DrafterValue(4)]
    prices = Prices(costs, [1, 2, 3], drafters)
    prices.take_step(1, 9.0)  # before the first plan nothing is known of it
    prices.num_rows = 1
    prices.plan(0, 0)
    assert prices.step_seconds == costs.estimate_steps(1, np.arange(1, 5)).tolist()
    assert prices.plain_seconds == prices.price_step(1) == pytest.approx(1.0)
    assert prices.price_step(4) == pytest.approx(1.5)
    drafters[1].share = 0.5  # is asked for every other request
    both, first = prices.price_drafts(frozenset(), 1), prices.price_drafts(frozenset({1}), 1)
    assert both - first == pytest.approx(0.5 * prices.price_draft(1, 1, 1))
    calls = [(0, 1, 1), (1, 1, 2)]
    expected = prices.price_calls(calls)
    assert expected == pytest.approx(0.06 + 0.12)
    prices.take_drafts(1.5 * expected, calls)
    assert expected < prices.price_calls(calls) < 1.1 * expected, "one draft says little"
    for _ in range(200):
        prices.take_step(1, 1.2)
    prices.plan(0, 0)
    assert prices.plain_seconds == pytest.approx(1.2, rel=0.02)
    prices.num_rows = 8  # steps of other numbers of requests drift by themselves
    prices.plan(0, 0)
    assert prices.plain_seconds == pytest.approx(costs.estimate_steps(8, np.array([1]), 0)[0])
