"""The scheduler alone: rows, chunks of prompts, cached beginnings and cancellations, by hand."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec.decode.drafters.base import Drafter
from specdec.decode.prompt_chunks import choose_chunk
from specdec.decode.requests import ActiveRequest, Request
from specdec.decode.schedule import ForwardPlan, Scheduler
from specdec.decode.timing import Timing
from specdec.engine.kv_cache import KVCache
from tests.costs import make_costs


class Limits:
    """What a scheduler asks of a decoder: how many tokens a row of a step and a pass may have."""

    max_chunk_tokens = 512

    def __init__(self, max_joined_tokens: int | None) -> None:
        self.max_joined_tokens = max_joined_tokens

    def start_row(self, cache: KVCache, row: int, prompt_len: int) -> None:
        """There is one rotary table."""


class World:
    """A scheduler of some rows whose passes compute nothing."""

    def __init__(self, rows: int, *, joins: bool = True, reuses: bool = False, **options: Any):
        self.cache = KVCache(
            num_layers=1, num_rows=rows, num_heads=1, num_positions=256, head_size=2,
            dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        self.timing, self.passes = Timing(), list[tuple[bool, dict[int, int]]]()
        limits: Any = Limits(512 if joins else None)
        self.scheduler = Scheduler(
            limits, self.cache, Drafter(), self.timing,
            max_num_tokens=512, reuses_prefixes=reuses,
            **{"prompt_chunk": None, **options},
        )  # fmt: skip

    def add(self, prompt: Sequence[int], limit: int = 99, **settings: Any) -> ActiveRequest:
        request = Request(
            index=0, input_ids=list(prompt), max_output_len=limit, end_ids=frozenset(), **settings
        )
        self.scheduler.queue.append(
            active := ActiveRequest(request, -1, max_depth=0, text_stream=None)
        )
        return active

    def step(self, nodes: int = 1) -> list[ForwardPlan]:
        """Run the passes of a step; every running request emits a token, as plain decoding does."""
        plans = []
        for plan in self.scheduler.plan():
            plans.append(plan)
            running = list(self.scheduler.active) if plan.verifies else []
            chunk = self.scheduler.plan_chunk(plan, len(running), nodes)
            self.passes.append(
                (plan.verifies, dict(zip(chunk.rows, chunk.counts, strict=True)) if chunk else {})
            )
            self.scheduler.record(plan, len(running), nodes)
            self.scheduler.commit(running, [([0], 7)] * len(running))
            for request in running:
                request.emit([7])
            if chunk is not None:
                for request in self.scheduler.finish_chunk(chunk):
                    request.emit([7])
        return plans


def test_rows_go_round_in_the_order_of_the_queue() -> None:
    """Two rows, four requests: a row is given when its request has ended, the lowest first."""
    world = World(2)
    requests = [world.add([1, 2, 3], limit) for limit in (3, 2, 1, 2)]
    order = []
    while world.scheduler.is_busy:
        world.step()
        order.append([request.row for request in requests])
    # A prompt's own pass emits the first token, so three tokens take a pass and two steps.
    assert order[0] == [0, 1, -1, -1]
    assert order[2] == [0, 1, 1, -1]
    # Row 0 still waits for its third token: whole prompts are read first.
    assert order[3] == [0, 1, 1, 1]
    assert [len(r.output_ids) for r in requests] == [3, 2, 1, 2]
    assert [r.finish_reason for r in requests] == ["length"] * 4
    world.scheduler.retire()
    assert (world.scheduler.active, world.scheduler.prefilling) == ([], [])


def test_whole_prompts_are_read_before_running_requests_go_on() -> None:
    world = World(2)
    world.add([1] * 5)
    world.step()
    world.add([2] * 40)
    plans = world.step()
    assert plans == [ForwardPlan(reads_prompts=True)]
    assert world.passes == [(False, {0: 5}), (False, {1: 40})]
    assert world.step() == [ForwardPlan(verifies=True)]


@pytest.mark.parametrize("joins", [True, False])
def test_prompts_come_in_chunks_beside_running_requests(joins: bool) -> None:
    """16 tokens of a prompt of 40 a step, in their pass or in one of their own before it."""
    world = World(2, joins=joins, prompt_chunk=16)
    first = world.add([1] * 5)
    world.step()
    world.add([2] * 40)
    for unread in (40, 24, 8):
        plans = world.step()
        if joins:
            num_tokens = min(16, unread)
            assert plans == [ForwardPlan(True, True, True, 16, False, num_tokens)]
        else:
            assert plans == [
                ForwardPlan(reads_prompts=True, max_tokens=16),
                ForwardPlan(verifies=True),
            ]
    assert [read for _, read in world.passes[1:] if read] == [{1: 16}, {1: 16}, {1: 8}]
    assert world.scheduler.max_prefill == 4 * 16  # of a drafter, in a step
    assert len(first.output_ids) == 4  # no step went by without a token of the running request
    assert [r.row for r in world.scheduler.active] == [0, 1]


def test_the_short_prompt_overtakes_and_the_long_one_is_not_starved() -> None:
    """A prompt of n tokens is due when n more were read: 60 are, after four of 15."""
    world = World(8, prompt_chunk=15)
    world.add([1] * 5)
    world.step()
    long = world.add([2] * 60)
    ended_at = None
    for number in range(12):
        world.add([3] * 15, limit=1)
        world.step()
        if ended_at is None and long.output_ids:
            ended_at = number
    assert [read for _, read in world.passes[1:5]] == [{2: 15}, {2: 15}, {2: 15}, {1: 15}]
    assert ended_at == 6


def test_drafts_of_running_requests_share_the_chunk_with_prompts() -> None:
    """Chunks by cost: 64 tokens, without costs, of 2 requests; a prompt of 61 leaves no room."""
    assert choose_chunk(None, 1, 2) == 64
    world = World(2, prompt_chunk="auto")
    world.add([1] * 5)
    world.step()
    world.step(nodes=8)
    world.add([2] * 61)
    (plan,) = world.step(nodes=1)
    # 61 + 8 drafted nodes are more than 64: nothing is drafted, and the prompt is read whole.
    assert plan == ForwardPlan(True, False, True, 64, True, 61)
    assert world.passes[-1] == (True, {1: 61})
    world = World(2, prompt_chunk="auto")
    world.add([1] * 5)
    world.step()
    world.step(nodes=8)
    world.add([2] * 100)
    world.scheduler._drafter.is_indivisible = True
    (plan,) = world.step(nodes=8)
    assert plan.allows_drafts
    assert world.passes[-1] == (True, {1: 64 - 8})


def test_chunks_of_a_processor_where_tokens_cost() -> None:
    """A plain step takes 1 s: a step with prompts takes twice that in any case, six times at most.

    64 tokens, or 13 a request if that is more, are usual, 512 the most.
    """
    for seconds, num_tokens in ((0.05, 64), (0.02, 100), (0.001, 512), (0.1, 60)):
        costs = make_costs(step=lambda _: 1.0, prompts=functools.partial(operator.mul, seconds))
        assert choose_chunk(costs, 1, 1) == pytest.approx(num_tokens, abs=1)
    assert (choose_chunk(None, 0, 20), choose_chunk(None, 0, 99)) == (13 * 20, 512)
    dear = make_costs(step=lambda tokens: 1.0, prompts=lambda tokens: 1.0 * tokens)
    assert choose_chunk(dear, 1, 1) == 17  # one running, and 16 of a prompt whatever that takes


def test_a_cancelled_request_leaves_with_the_next_step() -> None:
    world = World(2, prompt_chunk=16)
    running, reading, waiting = world.add([1] * 5), world.add([2] * 90), world.add([3] * 4)
    world.scheduler.plan_chunk(ForwardPlan(), 0, 1)
    world.step()
    assert (running.row, reading.row, waiting.row) == (0, 1, -1)
    running.is_cancelled = reading.is_cancelled = True
    assert [request.finish_reason for request in (running, reading)] == [None, None]
    assert world.scheduler.is_busy
    world.step()
    assert [request.finish_reason for request in (running, reading)] == ["cancelled"] * 2
    assert waiting.row == 0
    assert waiting.output_ids == [7]
    late = world.add([4] * 4)
    late.is_cancelled = True
    world.step()
    assert (late.finish_reason, late.row) == ("cancelled", -1)
    assert not world.scheduler.queue


# ---- Cached beginnings.


def test_a_prompt_goes_on_behind_what_a_row_holds() -> None:
    """Prompt and output of the first are 1 2 3 4 7 7, of which the last is not in the cache."""
    world = World(3, reuses=True)
    world.add([1, 2, 3, 4], limit=2)
    world.step()
    world.step()
    world.cache.blocks[:, :, 0, :, :5] = torch.arange(5.0)[:, None]
    second = world.add([1, 2, 3, 4, 7, 9])
    world.step()
    assert second.row == 0  # the row that holds it is free, so nothing moves
    assert world.passes[-1] == (False, {0: 1})
    assert (world.timing.num_sought_tokens, world.timing.num_reused_tokens) == (4 + 6, 5)
    # While that row is in use, another one gets a copy; the last token is always run.
    third = world.add([1, 2, 3])
    world.step()
    assert third.row == 1
    assert world.passes[-1] == (False, {1: 1})
    assert world.cache.blocks[0, 0, 1, 0, :2, 0].tolist() == [0.0, 1.0]
    # Another text takes nothing over, and without reuse none does.
    world.add([9, 2, 3])
    world.step()
    assert world.passes[-1] == (False, {2: 3})
    plain = World(2)
    for _ in range(2):
        plain.add([1, 2, 3, 4])
        plain.step()
    assert plain.passes == [(False, {0: 4}), (False, {1: 4})]
    assert plain.timing.num_sought_tokens == 0


def test_log_probabilities_of_a_prompt_need_all_of_it() -> None:
    world = World(2, reuses=True)
    world.add([1, 2, 3, 4], limit=1)
    world.step()
    world.add([1, 2, 3, 4], wants_prompt_logprobs=True, num_logprobs=1)
    world.step()
    assert world.passes[-1][1] == {0: 4}


def test_an_output_without_drafts_is_not_gone_on_from() -> None:
    """A drafter has not seen it."""
    world = World(2, reuses=True)
    world.add([1, 2, 3, 4], limit=3, allows_drafts=False)
    for _ in range(3):
        world.step()
    world.add([1, 2, 3, 4, 7, 7, 8])
    world.step()
    assert world.passes[-1][1] == {0: 3}


@pytest.mark.parametrize(("shared", "reused"), [(15, 0), (16, 8), (30, 16)])
def test_a_request_waits_for_the_same_beginning(shared: int, reused: int) -> None:
    """It does so in chunks, here of 8, while 16 tokens or more are to come of that beginning."""
    world = World(3, reuses=True, prompt_chunk=8)
    world.add([9])
    world.step()
    world.add([1] * 40)
    second = world.add([1] * shared + [2] * 5)
    world.step()
    assert (second.row == -1) is (reused > 0)
    while not second.output_ids:
        world.step()
    assert world.timing.num_reused_tokens == reused
