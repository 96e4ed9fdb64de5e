"""How much of a draft is verified, and whether to draft: as long as the gain exceeds the price.

A drafter says how sure it is of each token. How often such tokens have been right turns that into
the chance that a token is accepted. A row's best nodes are those of the greatest chance from the
root on, as in EAGLE-2 (https://arxiv.org/abs/2406.16858, section 4.2); how many of them a step
verifies depends on what it costs here, for so many rows, as in Sequoia
(https://arxiv.org/abs/2402.12374, section 3.3), by times that are measured as the run goes on.

Legend: B rows, T nodes of a row's tree, the root among them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import ALL_LEVELS, Drafter, DrafterGroup
from specdec.decode.drafters.pacing import (
    FEW_UNREAD,
    HORIZON,
    KEEP,
    MODEL_LOSS,
    REST_STEPS,
    Account,
    Costs,
    is_plain_due,
    round_prompt_tokens,
)
from specdec.decode.drafters.trees import estimate_accuracy
from specdec.decode.requests import ActiveRequest
from specdec.engine.step import States
from specdec.engine.transfers import Array
from specdec.engine.tree import Tree

MAX_DEPTH = 12  # deeper tokens are counted as these
NUM_BUCKETS = 10  # of a drafter's confidence
FIRST_TRIALS = 4.0  # that what the drafter says of itself weighs as much as
FIRST_RATE = 0.7  # believed: of the drafted tokens that are reached, those that are accepted
FIRST_ROWS = 3.0  # that this belief weighs as much as
FASTER = 0.8  # a plain step takes this share of what it did, or less: the machine got faster
SURE = 0.999  # no more than this is believed of a token
# Tokens of prompts by which it is learnt what reading them costs, and that are read for a trial of
# drafts that are known not to pay: enough for one request or two.
FIRST_PIECE = 2 * FEW_UNREAD
# Of what is won for a batch, what counts: its requests win unequally, and the last one to end
# decides when it ends.
BATCH_WIN = 0.85


class Calibration:
    """How often drafted tokens were right, by drafter, depth and the drafter's own confidence.

    Where little is known of a depth, what is known of all depths counts, and where that is little,
    the drafter's word. Newer steps count more.
    """

    def __init__(self) -> None:
        self._counts: dict[int, Array] = {}  # by source: [2, depth, bucket], right ones and all

    def estimate(self, candidates: Candidates) -> Array:
        """[T], the chance that a node is accepted where its parent is; 1 for the root."""
        confidence = read_confidence(candidates)
        chances = self.rate(candidates.tree.depths, confidence, candidates.source)
        chances[0] = 1.0
        return chances

    def rate(self, tree_depths: Array, confidence: Array, source: int = 0) -> Array:
        """The chances of tokens at these depths, from 1, of which the drafter is so sure."""
        depths, buckets = _place(tree_depths, confidence)
        counts = self._get(source)
        all_right, all_seen = counts.sum(1)[:, buckets]
        anywhere = (all_right + FIRST_TRIALS * confidence) / (all_seen + FIRST_TRIALS)
        right, seen = counts[:, depths, buckets]
        chances = (right + FIRST_TRIALS * anywhere) / (seen + FIRST_TRIALS)
        return np.asarray(np.minimum(chances, SURE))

    def record(self, candidates: Candidates, emitted: Sequence[int]) -> None:
        """Take what was emitted after the root: on the way through the tree, what was right."""
        tree = candidates.tree
        if tree.num_nodes == 1:
            return
        depths, buckets = _place(tree.depths, read_confidence(candidates))
        counts = self._get(candidates.source)
        counts *= KEEP
        node = 0
        for token in emitted:
            children = np.flatnonzero(tree.parents == node)
            if not len(children):
                break
            counts[1, depths[children], buckets[children]] += 1
            entered = children[tree.tokens[children] == token]
            if not len(entered):
                break
            node = int(entered[0])
            counts[0, depths[node], buckets[node]] += 1

    def _get(self, source: int) -> Array:
        if source not in self._counts:
            self._counts[source] = np.zeros((2, MAX_DEPTH, NUM_BUCKETS))
        return self._counts[source]


def _place(tree_depths: Array, confidence: Array) -> tuple[Array, Array]:
    """By which depth and bucket each node is counted; the root's are of no use."""
    depths = np.minimum(tree_depths, MAX_DEPTH) - 1
    buckets = np.minimum((confidence * NUM_BUCKETS).astype(np.int64), NUM_BUCKETS - 1)
    return depths, buckets


def read_confidence(candidates: Candidates) -> Array:
    """[T], the drafter's confidence in each node; by its place among its siblings if not told."""
    if candidates.confidence is not None:
        return candidates.confidence
    tree = candidates.tree
    order = np.argsort(tree.parents, kind="stable")
    _, first, counts = np.unique(tree.parents[order], return_index=True, return_counts=True)
    ranks = np.empty(tree.num_nodes, np.int64)
    ranks[order] = np.arange(tree.num_nodes) - np.repeat(first, counts)
    return np.asarray(estimate_accuracy(np.maximum(tree.depths - 1, 0), ranks))


def follow_chances(tree: Tree, chances: Array) -> Array:
    """[T], the chance that the whole path to a node is accepted, by that of each node on it."""
    found = chances.copy()
    for depth in range(2, tree.depth + 1):
        level = tree.depths == depth
        found[level] *= found[tree.parents[level]]
    return found


class Budget:
    """Decides for each step whether to draft, and how many nodes of each row's tree to verify.

    A step of T nodes a row costs a draft and one verify step of B x T tokens, since rows are padded
    to the largest tree. It emits a token a row, and what is accepted of the T - 1 best nodes. What
    those promise is kept as a mean over the newest drafts, by their number; so the best number and
    the tokens a second that it promises are known for any B before anything is drafted. Those
    tokens a second are the price of a second: of the drafts that then come, as many nodes are kept
    as promise more tokens than the time that verifying them takes would emit.

    Sizes that no step had are tried by doubling, and the first steps are plain. An `Account` is
    kept: nothing is drafted that could lose more than it allows, if none of it were accepted. What
    a draft costs is not foreseen the first time.

    Prompts that a drafter has to read first are paid from an account of their own, as large as a
    draft model's, and only if what is left of the texts may win that back; for a trial of drafts
    that are known not to pay, only a piece of them.

    Steps that also read prompts are as long as their tokens in all say; see `Costs.predict_mixed`.

    Drafts that are verified whole leave only the first choice. Their step is long at once: of one
    for several requests that is more than twice as long as any before, the most is believed that it
    may cost.
    """

    def __init__(self, max_tokens: int, *, is_whole: bool = False) -> None:
        """max_tokens: of a row's draft. is_whole: whether all or nothing of it is verified."""
        self.max_tokens, self.is_whole = max_tokens, is_whole
        self.calibration = Calibration()
        # By tokens in the step; of a level of drafts, by requests.
        self._verify, self._draft = Costs(), Costs()
        self._reading = Costs()  # of a token of a prompt that the drafter reads, under size 1
        self._num_levels = 1.0  # a mean
        # Of steps by themselves, and of those that also read prompts: numbers of requests that
        # plain ones had, plain ones, and drafted ones since the last of these.
        self._known: tuple[set[int], set[int]] = set(), set()
        self._num_plain, self._since_plain = [0, 0], [0, 0]
        self._num_prompt_tokens = 0  # prompt tokens of the step that was planned last
        self._gains = FIRST_ROWS * np.cumsum(FIRST_RATE ** np.arange(1, self.max_tokens + 1))
        if is_whole:
            self._gains = self._gains[-1:]
        self._weight = FIRST_ROWS
        self._num_rows = 0  # of the step that was planned last
        self._is_retry = False  # whether that tries once more what seemed dear
        self._num_declined = 0  # requests of the newest step for which drafts seemed too dear
        # By requests: steps that verified drafts, and what a plain one cost at the last of them.
        self._tried: dict[int, tuple[int, float]] = {}
        self._rate = self._allowance = 0.0  # tokens a second; seconds that it may lose
        self._gain = 1.0  # how many times as fast as plain steps it promised to be
        self.account = Account()
        self._read = 0.0  # seconds, by the drafter, of prompts

    def plan(
        self, remaining: Sequence[int], num_prompt_tokens: int = 0, num_unread: int = 0
    ) -> bool:
        """Whether to draft.

        remaining: tokens that each request of the step may still emit. num_prompt_tokens: those of
        prompts that it reads, too. num_unread: those that the drafter has to read before it drafts.
        """
        num_rows = len(remaining)
        self._num_prompt_tokens = round_prompt_tokens(num_prompt_tokens)
        kind = self._num_prompt_tokens > 0
        if is_plain_due(self._num_plain[kind], self._since_plain[kind], self._gain):
            return False
        # With fewer requests a plain step costs no more; much less, perhaps.
        is_known = any(num_rows <= known < 2 * num_rows for known in self._known[kind])
        account = self.account
        if not is_known or account.is_at_rest(num_rows) or max(remaining) <= 1:
            return False
        self._num_rows, self._is_retry = num_rows, False
        seconds = self._predict_verify()
        plain, least = seconds[0], seconds[1]
        draft = self._num_levels * (self._draft.estimate(num_rows) or 0.0)
        gains = self._gains[: len(seconds) - 1] / self._weight
        won = _count_won(num_rows) * gains
        best = float((num_rows * (1 + won) / (draft + seconds[1:])).max())
        self._rate = max(best, num_rows / plain)
        self._gain = best * float(plain) / num_rows
        account.is_probe = best <= num_rows / plain
        ahead = min(max(remaining), HORIZON) * plain
        self._allowance = account.find_allowance(num_rows, ahead) - draft
        if num_rows > 1 and self.reads_piece:
            num_unread = min(num_unread, FIRST_PIECE)
        read = num_unread * (self.read_seconds or 0.0) if num_unread > FEW_UNREAD else 0.0
        may_read = not read or (
            (account.is_probe or read < ahead * (1 - 1 / self._gain))
            and self._read + read <= account.find_limit(num_rows, ahead, MODEL_LOSS)
        )
        if may_read and float(least - plain) <= self._allowance:
            return True
        # What was tried only once may have been disturbed, and the machine may have been slower:
        # drafts would seem dear for good.
        count, before = self._tried.get(num_rows, (0, 0.0))
        was_disturbed = (count == 1 or plain < FASTER * before) and not (read or self.is_whole)
        self._is_retry = was_disturbed and self._num_declined == num_rows
        self._num_declined = num_rows
        if not self._is_retry:
            account.rest(num_rows, REST_STEPS * plain)
        return self._is_retry

    @property
    def read_seconds(self) -> float | None:
        """Of a token of a prompt that the drafter reads; None where that was never measured."""
        return self._reading.estimate(1)

    @property
    def reads_piece(self) -> bool:
        """Whether no more than a piece of the prompts of several requests is worth reading."""
        return self.read_seconds is None or self.account.is_probe

    def price_level(self) -> float:
        """How much another level of a draft must promise to be worth its price.

        That is tokens of the newest level that are expected to be accepted, in all rows together
        and at most one in each.
        """
        level = self._draft.estimate(self._num_rows)
        if level is None:
            return ALL_LEVELS
        verify = self._predict_verify()[1:]  # that a draft is verified at all is paid for already
        token = (verify[-1] - verify[0]) / max(1, len(verify) - 1)
        price = self._rate * (level + token)
        return float(price * self._weight / (self._gains[0] * _count_won(self._num_rows)))

    def choose(self, chances: Sequence[Array]) -> int:
        """How many nodes of each row to verify beside the root, by their chances, best first."""
        seconds = self._predict_verify(is_hopeful=self.account.lost < 0)
        most = len(seconds) - 1
        gains = np.zeros(len(seconds))
        for row in chances:
            found = np.cumsum(row)
            size = min(len(found), self.max_tokens)
            # What a draft of this kind promises, whatever is verified of it.
            self._gains *= KEEP
            self._weight = KEEP * self._weight + 1
            if size:
                known = min(size, most)
                gains[1 : known + 1] += found[:known]
                gains[known + 1 :] += found[known - 1]
                self._gains[:size] += found[:size]
                self._gains[size:] += found[size - 1]
        worth = _count_won(self._num_rows) * gains - self._rate * seconds
        worth[seconds - seconds[0] > self._allowance] = -np.inf
        best = int(worth.argmax())
        return max(best, 1) if self.account.is_probe or self._is_retry else best

    def record(
        self,
        draft_seconds: float | None,
        verify_seconds: float,
        size: int,
        emitted: Sequence[int],
        num_levels: int = 1,
        num_prefilled: int = 0,
    ) -> None:
        """Take what a step cost, and how many tokens it emitted for each request.

        draft_seconds: None where nothing was drafted. size: T of the verify step. num_levels: of
        the drafts, where they are drafted one by one. num_prefilled: tokens of prompts that the
        drafter read for them.
        """
        num_rows, kind = len(emitted), self._num_prompt_tokens > 0
        self._verify.record(num_rows * size + self._num_prompt_tokens, verify_seconds)
        plain, step = self._verify.price_step(num_rows, size, self._num_prompt_tokens)
        self.account.spend(num_rows, (draft_seconds or 0.0) + (step if kind else verify_seconds))
        self._since_plain[kind] += 1
        if size == 1:
            self._known[kind].add(num_rows)
            self._num_plain[kind] += 1
            self._since_plain[kind] = 0
        if draft_seconds is None:
            return
        if num_prefilled > FEW_UNREAD:
            read = draft_seconds - num_levels * (self._draft.estimate(num_rows) or 0.0)
            self._reading.record(1, max(0.0, read) / num_prefilled)
            self._read += max(0.0, read)
            if size == 1:
                return
        else:
            self._draft.record(num_rows, draft_seconds / num_levels)
        self._num_levels += (num_levels - self._num_levels) / FIRST_TRIALS
        if size > 1:
            self._tried[num_rows] = self._tried.get(num_rows, (0, 0.0))[0] + 1, plain
        # What others delay is nobody's loss: costs of the same kind are compared.
        draft = num_levels * (self._draft.estimate(num_rows) or 0.0)
        won = _count_won(num_rows) * (sum(emitted) / num_rows - 1)
        self.account.lose(draft + step - (1 + won) * plain)
        if self.is_whole:
            for count in emitted:
                self._gains = KEEP * self._gains + count - 1
                self._weight = KEEP * self._weight + 1

    def _predict_verify(self, *, is_hopeful: bool = False) -> Array:
        """Seconds of a verify step by nodes a row, from 1 on to twice the tokens that were tried.

        The first is a plain step's; of whole drafts only theirs follows. is_hopeful: see `Costs`.
        """
        num_rows = self._num_rows
        if self.is_whole:
            sizes = num_rows * np.array([1, self.max_tokens + 1])
            seconds = self._verify.predict_mixed(sizes, self._num_prompt_tokens)
            times = sizes[1] / self._verify.largest
            if num_rows > 1 and times > 2:  # a token costs no more in a longer step
                seconds[1] = times * (self._verify.estimate(self._verify.largest) or 0.0)
            return seconds
        tried = 2 * self._verify.largest - self._num_prompt_tokens
        most = max(2, min(tried // num_rows, self.max_tokens + 1))
        sizes = num_rows * np.arange(1, most + 1)
        return self._verify.predict_mixed(sizes, self._num_prompt_tokens, is_hopeful=is_hopeful)


def _count_won(num_rows: int) -> float:
    return BATCH_WIN if num_rows > 1 else 1.0


class BudgetProposer(DrafterGroup):
    """Lets a drafter draft within a budget; what it watches, it watches at every step.

    Drafts that were drawn from what the accept rule is told are left as they are: to keep or to
    leave a token for its own sake would change the distribution.
    """

    def __init__(self, proposer: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__([proposer])
        self.proposer = proposer
        self.max_draft_tokens = proposer.max_draft_tokens
        self.is_indivisible = proposer.is_indivisible
        self.budget = Budget(proposer.max_draft_tokens, is_whole=self.is_indivisible)
        self._clock = clock
        self._began: float | None = None  # of the verify step that is under way
        self._draft_seconds: float | None = None
        self._drafts: list[Candidates] = []
        self._lengths: list[int] = []  # of the outputs when they were drafted

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Forget all requests; what was measured, and the account, go on."""
        self._began = None
        super().allocate(num_rows, num_positions)

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Return what pays of the other's drafts, or nothing but roots."""
        proposer, budget = self.proposer, self.budget
        self._draft_seconds = None
        self.num_prefilled = 0
        num_unread = proposer.count_unread(requests)
        remaining = [request.remaining for request in requests]
        if budget.plan(remaining, self.num_prompt_tokens, num_unread):
            if num_unread > FIRST_PIECE and budget.reads_piece:
                piece = min(FIRST_PIECE, self.max_prefill or FIRST_PIECE)
                proposer.plan_step(self.num_prompt_tokens, piece)
            proposer.min_gain = budget.price_level()
            began = self._clock()
            drafted = proposer.propose(requests)
            self.num_prefilled = proposer.num_prefilled
            self._drafts = self._cut(drafted)
            self._draft_seconds = self._clock() - began
        else:
            self._drafts = super().propose(requests)
        self._lengths = [len(request.output_ids) for request in requests]
        self._began = self._clock()
        return self._drafts

    def observe(
        self, requests: Sequence[ActiveRequest], states: States, paths: Sequence[Sequence[int]]
    ) -> None:
        """Let the other see the step; note what it cost, unless it was one over prompts alone."""
        super().observe(requests, states, paths)
        if self._began is None:
            return
        seconds, self._began = self._clock() - self._began, None
        emitted = [len(path) for path in paths]
        self.budget.record(
            self._draft_seconds, seconds, states.last.shape[1], emitted, self.proposer.num_levels,
            self.num_prefilled,
        )  # fmt: skip
        for request, candidates, length in zip(requests, self._drafts, self._lengths, strict=True):
            self.budget.calibration.record(candidates, request.output_ids[length:])

    def _cut(self, drafted: Sequence[Candidates]) -> list[Candidates]:
        """Keep as many nodes of each tree as pay, the likeliest."""
        if self.is_indivisible:
            return list(drafted)
        chances = [
            follow_chances(c.tree, self.budget.calibration.estimate(c)) for c in drafted
        ]  # fmt: skip
        orders = [np.argsort(-row[1:], kind="stable") + 1 for row in chances]
        found = [row[o] for row, o in zip(chances, orders, strict=True)]
        if self.num_prefilled > FEW_UNREAD:  # what is not read yet may promise something still
            found = [row for row in found if len(row)]
        most = self.budget.choose(found)
        return [
            candidates
            if candidates.draft_probs is not None or candidates.tree.num_draft_tokens <= most
            else _keep(candidates, order[:most])
            for candidates, order in zip(drafted, orders, strict=True)
        ]


def _keep(candidates: Candidates, nodes: Array) -> Candidates:
    """Candidates of the root and these nodes alone: a parent's chance is never the smaller."""
    kept = np.concatenate(([0], np.sort(nodes)))
    confidence = candidates.confidence
    return dataclasses.replace(
        candidates,
        tree=candidates.tree.keep(kept),
        confidence=None if confidence is None else confidence[kept],
    )


def bind(drafter: Drafter) -> Drafter:
    """What drafts as a drafter does, as far as that pays."""
    if drafter.paces_itself:
        drafter.pace()
        return drafter
    return BudgetProposer(drafter)
