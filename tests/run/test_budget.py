"""`--draft-budget auto`: of what is drafted that is verified which pays, whatever the text."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.decode.accept import Candidates
from specdec.decode.drafters import Drafting
from specdec.decode.drafters.base import ALL_LEVELS
from specdec.decode.drafters.budget import (
    FIRST_PIECE,
    Budget,
    BudgetProposer,
    Calibration,
    bind,
    follow_chances,
)
from specdec.decode.drafters.draft_target import attach_draft
from specdec.decode.drafters.draft_tree import DraftTreeProposer
from specdec.decode.drafters.eagle import EagleProposer
from specdec.decode.drafters.lookahead import LookaheadProposer
from specdec.decode.drafters.pacing import (
    MODEL_LOSS,
    PROBE_SHARE,
    REST_STEPS,
    Account,
    bound_loss,
)
from specdec.decode.drafters.prompt_lookup import PromptLookupProposer
from specdec.decode.drafters.redrafter import DynamicProposer, ReDrafterProposer
from specdec.decode.drafters.suffix import SuffixProposer
from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Options
from specdec.decode.requests import ActiveRequest, Request
from specdec.decode.sampling import SamplingParams
from specdec.engine.tree import pack_beams
from specdec.errors import SpecDecError, UsageError
from specdec.methods.budget import DraftBudget
from specdec.methods.lookahead import LookaheadConfig
from specdec.methods.prompt_lookup import LookupOptions
from specdec.methods.suffix import SuffixOptions
from tests.conftest import (
    make_dflash_drafter,
    make_drafter,
    make_eagle_drafter,
    make_llama,
    make_medusa_heads,
)
from tests.engines import call, list_paths, make_engine, make_noisy_copy, make_tree_engine, run_here

METHODS = (
    "draft tree", "redrafter", "redrafter tree", "medusa", "eagle", "eagle3", "dflash",
    "prompt_lookup", "suffix", "lookahead",
)  # fmt: skip
LIMIT = 128


# ---- What it costs, on simulated clocks.

Cost = Callable[[int], float]
# Seconds of a verify step by its tokens: bound by memory for a while, or by arithmetic at once.
FLAT: Cost = lambda tokens: 1.0 + 0.02 * tokens  # noqa: E731
STEEP: Cost = lambda tokens: 0.3 + 0.2 * tokens  # noqa: E731
ROOF: Cost = lambda tokens: max(1.0 + 0.006 * tokens, 0.085 * tokens)  # noqa: E731
CHEAP: Cost = lambda requests: 0.06  # noqa: E731
DEAR: Cost = lambda requests: 0.2 + 0.05 * requests  # noqa: E731


@dataclasses.dataclass
class Machine:
    """What steps cost; drafts are chains of `length` tokens, each right at a rate.

    verify: seconds of a step by its tokens; draft: by requests. noise: the most by which a step is
    slower than it would be alone. sure: what the drafter says of its tokens, by their place.
    beside: prompt tokens that each step reads, too. is_whole: drafts are verified whole.
    """

    verify: Cost
    draft: Cost
    rate: float
    noise: float = 0.0
    length: int = 8
    sure: float = 0.7
    beside: int = 0
    is_whole: bool = False

    def run(
        self, num_rows: int, limit: int = LIMIT, budget: Budget | None = None
    ) -> tuple[float, list[int]]:
        """Time relative to plain decoding, and the tokens that steps verified for a request."""
        chance = random.Random(f"{num_rows} {self.rate} {self.noise}")
        budget = budget or Budget(self.length, is_whole=self.is_whole)
        left, seconds = [limit] * num_rows, 0.0
        confidence = np.array([1.0, *[self.sure] * self.length])
        chain = Candidates(pack_beams(0, np.arange(1, self.length + 1)[None]), None, confidence)
        sizes = []
        while any(left):
            active = [row for row, count in enumerate(left) if count]
            size, drafting = 1, None
            if budget.plan([left[row] for row in active], self.beside):
                drafting = self.draft(len(active)) * (1 + self.noise * chance.random())
                chances = np.cumprod(budget.calibration.estimate(chain))[1:]
                whole = self.length if self.is_whole else None
                size += whole or budget.choose([chances] * len(active))
            took = self.verify(len(active) * size + self.beside) * (
                1 + self.noise * chance.random()
            )
            counts = []
            for row in active:
                accepted = 0
                while accepted < size - 1 and chance.random() < self.rate:
                    accepted += 1
                if size > 1:
                    kept = Candidates(chain.tree.keep(range(size)), None, confidence[:size])
                    budget.calibration.record(kept, [*range(1, accepted + 1), 99])
                counts.append(min(left[row], accepted + 1))
                left[row] -= counts[-1]
            budget.record(drafting, took, size, counts)
            seconds += took + (drafting or 0.0)
            sizes.append(size if drafting is not None else 0)
        plain = self.verify(num_rows + self.beside)
        return seconds / (limit * plain * (1 + self.noise / 2)), sizes

    def find_best(self, num_rows: int) -> float:
        """The same for the best fixed length, with as many tokens as there are on average."""
        found = [1.0]
        for length in range(1, self.length + 1):
            emitted = sum(self.rate**depth for depth in range(length + 1))
            step = self.draft(num_rows) + self.verify(num_rows * (length + 1))
            found.append(step / emitted / self.verify(num_rows))
        return min(found)


@pytest.mark.parametrize(("num_rows", "most"), [(1, 1.045), (4, 1.03), (16, 1.03)])
@pytest.mark.parametrize("verify", [FLAT, STEEP, ROOF])
@pytest.mark.parametrize("draft", [CHEAP, DEAR])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_loses_little_where_drafts_do_not_pay(
    num_rows: int, most: float, verify: Cost, draft: Cost, noise: float
) -> None:
    for rate in (0.0, 0.3, 0.6, 0.9):
        for sure in (0.2, 0.7, 1.0):  # also a drafter that is always sure
            machine = Machine(verify, draft, rate, noise, sure=sure)
            ratio, _ = machine.run(num_rows)
            if machine.find_best(num_rows) > 0.9:
                assert ratio <= most + noise / 10, (rate, sure)
            assert ratio <= 1.045 + noise / 10, (rate, sure)


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("rate", [0.6, 0.9])
def test_it_is_nearly_as_fast_as_the_best_fixed_length(num_rows: int, rate: float) -> None:
    for verify in (FLAT, ROOF):
        machine = Machine(verify, CHEAP, rate)
        if machine.find_best(num_rows) < 0.9:
            assert machine.run(num_rows, 400)[0] <= 1.15 * machine.find_best(num_rows)


def test_fewer_nodes_are_verified_where_they_cost_more() -> None:
    means = [statistics.mean(Machine(ROOF, CHEAP, 0.8).run(n, 400)[1][40:]) for n in (1, 4, 8)]
    assert means[0] > 1.5 * means[1]
    assert means[1] > 1.2 * means[2]


def test_the_first_steps_are_plain_and_so_is_the_first_of_half_as_many_requests() -> None:
    budget = Budget(4)
    for _ in range(2):
        assert not budget.plan([50, 50])
        budget.record(None, 1.0, 1, [1, 1])
    assert budget.plan([50, 50])
    budget.record(0.1, 1.1, 2, [2, 2])
    assert budget.plan([50, 50])
    assert not budget.plan([50, 50, 50])
    assert not budget.plan([50])
    budget.record(None, 1.0, 1, [1])
    assert budget.plan([50])
    assert not budget.plan([1])


@pytest.mark.parametrize("num_rows", [1, 4])
def test_the_next_run_begins_with_what_the_last_has_measured(num_rows: int) -> None:
    machine, budget = Machine(FLAT, CHEAP, 0.9), Budget(8)
    first, tried = machine.run(num_rows, 64, budget)
    second, sizes = machine.run(num_rows, 64, budget)
    assert tried[:2] == [0, 0]
    assert min(sizes[:4]) >= 6
    assert second < 0.9 * first


def test_what_few_requests_won_pays_for_no_drafts_of_many() -> None:
    machine, budget = Machine(ROOF, CHEAP, 0.6), Budget(8)
    assert sum(machine.run(1, 400, budget)[0] for _ in range(8)) < 0.8 * 8
    assert machine.find_best(16) == 1.0
    ratio, sizes = machine.run(16, 48, budget)
    assert ratio <= 1.08
    assert sizes.count(2) + sizes.count(3) <= 3


@pytest.mark.parametrize(("num_rows", "most"), [(1, 1.06), (4, 1.02), (16, 1.02)])
@pytest.mark.parametrize("verify", [FLAT, STEEP, ROOF])
def test_drafts_that_are_verified_whole_lose_little(
    num_rows: int, most: float, verify: Cost
) -> None:
    for rate in (0.0, 0.3, 0.6, 0.9):
        machine = Machine(verify, CHEAP, rate, length=16, is_whole=True)
        budget = Budget(16, is_whole=True)
        for _ in range(3):
            ratio, sizes = machine.run(num_rows, LIMIT, budget)
            assert ratio <= most, rate
            assert {*sizes} <= {0, 17}


def test_drafts_that_are_verified_whole_go_on_where_they_pay() -> None:
    """With several requests they begin where fewer have shown what such a step costs."""
    machine = Machine(FLAT, CHEAP, 0.8, length=16, is_whole=True)
    budget = Budget(16, is_whole=True)
    assert [machine.run(num_rows, 400, budget)[0] < 0.8 for num_rows in (1, 2)] == [True, True]
    assert machine.run(4, 400, Budget(16, is_whole=True))[1] == [0] * 400


def test_winnings_pay_for_nothing_that_is_known_not_to_pay() -> None:
    account = Account()
    account.spend(16, 10.0)
    account.lose(-100.0)
    assert account.find_limit(16, 5.0, MODEL_LOSS) > 100
    account.is_probe = True
    expected = bound_loss(16, MODEL_LOSS) * PROBE_SHARE * 10
    assert account.find_limit(16, 5.0, MODEL_LOSS) == pytest.approx(expected)
    account.lose(101.0)
    assert account.find_limit(16, 5.0, MODEL_LOSS) < expected


def test_plain_steps_are_not_measured_again_where_drafts_win_clearly() -> None:
    """They are where drafts win little: there a plain step's time decides."""
    shares = []
    for rate in (0.9, 0.45):
        drafted = Machine(FLAT, CHEAP, rate).run(1, 400)[1][8:-1]
        assert statistics.median(drafted) >= 2
        shares.append(drafted.count(0) / len(drafted))
    assert shares[0] == 0
    assert shares[1] > 0.02


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_drafts_where_every_step_reads_prompts_too(num_rows: int, noise: float) -> None:
    """As under a load that never ends; not where tokens are dear."""
    seconds, sizes = Machine(FLAT, CHEAP, 0.9, noise, beside=70).run(num_rows)
    assert max(sizes[:16]) > 1
    assert seconds < (1.0 if noise else 0.75)  # which may hide what a few tokens more cost
    seconds, _ = Machine(STEEP, CHEAP, 0.3, noise, beside=70).run(num_rows)
    assert seconds < 1.05


def test_reading_prompts_is_no_price_of_a_draft() -> None:
    """It has an account of its own, and its price is learned from the first piece."""
    budget = Budget(4)
    for _ in range(2):
        budget.record(None, 1.0, 1, [1] * 4)
    assert budget.plan([100] * 4, 0, 2000)
    budget.record(0.128, 1.0, 1, [1] * 4, num_prefilled=128)
    assert budget.read_seconds == pytest.approx(0.001)
    assert not budget.plan([100] * 4, 0, 20_000), "more than may be lost"
    assert not budget.plan([2] * 4, 0, 2000), "more than can be won"
    for _ in range(REST_STEPS):
        budget.record(None, 1.0, 1, [1] * 4)
    assert budget.plan([100] * 4, 0, 1872)
    budget.record(2.1, 1.02, 2, [2] * 4, num_prefilled=1872)
    assert budget.plan([100] * 4)
    assert budget.price_level() == ALL_LEVELS, "what a draft costs is not known yet"
    budget.record(0.05, 1.02, 2, [2] * 4)
    assert budget.plan([100] * 4)
    assert budget.price_level() < 1


def test_trials_that_are_known_not_to_pay_read_a_piece() -> None:
    """Of many requests; a single one's prompt is read whole, or no draft comes of it."""
    budget = Budget(4)
    for num_rows, seconds in ((1, 1.0), (16, 4.0)):
        for _ in range(2):
            budget.record(None, seconds, 1, [1] * num_rows)
    budget.record(0.1, 8.0, 2, [1] * 16)
    budget.record(0.228, 4.0, 1, [1] * 16, num_prefilled=128)
    for _ in range(400):
        budget.record(None, 4.0, 1, [1] * 16)
    assert not budget.plan([2] * 16, 0, 20_000), "two tokens win nothing back"
    assert budget.account.is_probe
    while not budget.plan([100] * 16, 0, 20_000):
        budget.record(None, 4.0, 1, [1] * 16)
    assert budget.reads_piece
    allowed = budget.account.find_limit(16, 0.0, MODEL_LOSS)
    assert FIRST_PIECE * 0.001 < allowed < 20_000 * 0.001


def test_what_a_drafter_is_sure_of_is_held_against_what_was_accepted() -> None:
    """Tokens that it calls certain are right half the time, those it doubts always."""
    calibration = Calibration()
    sure = Candidates(pack_beams(0, np.array([[1, 2, 3]])), None, np.array([1.0, 0.95, 0.35, 0.95]))
    assert np.allclose(calibration.estimate(sure), [1, 0.95, 0.35, 0.95])
    for step in range(200):
        calibration.record(sure, [1, 2, 3, 9] if step % 2 else [8])
    chances = calibration.estimate(sure)
    assert chances[1] == pytest.approx(0.5, abs=0.05)
    assert chances[2] > 0.9
    assert chances[3] > 0.9
    other = Candidates(sure.tree, None, sure.confidence, source=1)
    assert np.allclose(calibration.estimate(other), [1, 0.95, 0.35, 0.95])


def test_a_tree_is_cut_to_its_likeliest_nodes() -> None:
    """By their whole paths; siblings count as the drafter ranks them where it tells no more."""
    tree = pack_beams(7, np.array([[4, 5, 6], [4, 5, 8], [3, 5, 8]]))
    chances = follow_chances(tree, Calibration().estimate(Candidates(tree)))
    kept = tree.keep(np.sort(np.argsort(-chances, kind="stable")[:4]))
    assert list_paths(kept) == [[0, 2], [0, 1, 3]]
    assert kept.tokens.tolist() == [7, 4, 3, 5]
    everything = tree.keep(range(tree.num_nodes))
    assert everything.parents.tolist() == tree.parents.tolist()


def test_levels_end_where_another_is_not_worth_its_price() -> None:
    budget = Budget(8)
    for _ in range(2):
        budget.record(None, 1.0, 1, [1])
    assert budget.plan([100])
    assert budget.price_level() == ALL_LEVELS  # what a level costs is not known yet
    budget.record(0.4, 1.1, 2, [2], num_levels=2)
    assert budget.plan([100])
    assert 0.3 < budget.price_level() < 1.0


def test_a_level_does_not_pay_for_what_every_draft_costs() -> None:
    """The first token of a draft is dear, the next are not: one level more costs no more for it."""
    prices = []
    for plain in (1.0, 0.8):
        budget = Budget(8)
        for _ in range(2):
            budget.record(None, plain, 1, [1])
        for size in (2, 4, 8):
            assert budget.plan([100])
            budget.record(0.1, 1.0 + 0.01 * size, size, [size], num_levels=2)
        assert budget.plan([100])
        prices.append(budget.price_level())
    assert prices[0] == pytest.approx(prices[1], rel=0.01)
    assert prices[0] < 0.3


def test_a_slow_minute_is_forgotten() -> None:
    """Large sizes that were dear then are tried again, though nobody takes them meanwhile."""
    budget = Budget(4)
    chances = [0.9**depth for depth in range(1, 5)]
    sizes = []
    for step in range(80):
        size = 1 + budget.choose([np.array(chances)]) if budget.plan([100]) else 1
        slow = 3.0 if step < 12 and size > 2 else 1.0
        budget.record(0.01 if size > 1 else None, FLAT(size) * slow, size, [1 + size // 2])
        sizes.append(size)
    assert set(sizes[-20:]) == {5}


@pytest.mark.parametrize("num_rows", [1, 4, 16])
@pytest.mark.parametrize("slow", [1.6, 3.0])
def test_one_disturbed_step_does_not_end_drafting(num_rows: int, slow: float) -> None:
    """The first drafts are verified while another program runs, and seem dear."""
    budget = Budget(4)
    sizes: list[int] = []
    chances = [np.array([0.9**depth for depth in range(1, 5)])] * num_rows
    for _ in range(40):
        size = 1 + budget.choose(chances) if budget.plan([100] * num_rows) else 1
        disturbed = slow if size > 1 and max(sizes) == 1 else 1.0
        seconds = (1.0 + 0.005 * num_rows * size) * disturbed
        budget.record(0.01 if size > 1 else None, seconds, size, [size - size // 4] * num_rows)
        sizes.append(size)
    assert min(sizes[-20:]) > 1


def test_drafts_are_tried_again_when_the_machine_has_become_faster() -> None:
    """Plain steps show it, drafted ones do not: those would seem dear for good."""
    budget = Budget(4)
    sizes: list[int] = []
    chances = [np.array([0.6**depth for depth in range(1, 5)])] * 16
    for step in range(80):
        size = 1 + budget.choose(chances) if budget.plan([100] * 16) else 1
        seconds = (1.0 + 0.005 * 16 * size) * (1.8 if step < 9 else 1.0)
        emitted = [2, 2, 1, 2] * 4 if size > 1 else [1] * 16
        budget.record(0.01 if size > 1 else None, seconds, size, emitted)
        sizes.append(size)
    assert max(sizes[:9]) > 1
    assert sizes[-30:].count(1) <= 3


# ---- The text.


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("adaptive")
    target = make_llama(parent, layers=3, seed=3)
    found = {"redrafter": make_engine(parent / "r", target, make_drafter(parent, scale=3.0))}
    heads = make_medusa_heads(parent, scale=3.0)
    found["medusa"] = make_tree_engine("medusa", parent / "m", target, heads)
    eagles: dict[str, dict[str, Any]] = {
        "eagle": {}, "eagle3": {"version": 3, "aux_layers": (0, 2)},
    }  # fmt: skip
    for name, options in eagles.items():
        drafter = make_eagle_drafter(parent, scale=2.0, name=f"d-{name}", **options)
        found[name] = make_tree_engine("eagle", parent / name, target, drafter)
    dflash = make_dflash_drafter(parent, scale=2.0)
    found["dflash"] = make_tree_engine("dflash", parent / "dflash-engine", target, dflash)
    for name in ("redrafter tree", "prompt_lookup", "suffix", "lookahead"):
        found[name] = found["redrafter"]
    found["draft tree"] = parent / "pair"
    call("convert", "--model-dir", target, "--output-dir", parent / "pair-ckpt")
    call(
        "build", "--checkpoint-dir", parent / "pair-ckpt", "--output-dir", parent / "pair",
        "--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 6,
    )  # fmt: skip
    make_noisy_copy(target, parent / "draft-hf")
    found["draft"] = make_engine(parent / "d", parent / "draft-hf")
    return found


def load(folders: dict[str, Path], method: str) -> TorchEngine:
    if method == "prompt_lookup":
        engine = TorchEngine(folders[method], device="cpu", speculate=False)
        lookup = LookupOptions(num_tokens=4, max_ngram_size=2, target_devices=None)
        engine.use_method(method, PromptLookupProposer(lookup))
        return engine
    if method == "suffix":
        engine = TorchEngine(folders[method], device="cpu", speculate=False)
        engine.use_method(method, SuffixProposer(SuffixOptions(max_tokens=6, min_probability=0)))
        return engine
    if method == "lookahead":
        engine = TorchEngine(folders[method], device="cpu", speculate=False)
        engine.use_method(method, LookaheadProposer(LookaheadConfig(3, 3, 2), engine.decoder))
        return engine
    engine = TorchEngine(folders[method], device="cpu")
    if method == "draft tree":
        draft = TorchEngine(folders["draft"], device="cpu")
        attach_draft(engine, draft, draft_len=None, use_logits=False, tree_tokens=6)
    if method == "redrafter tree":
        assert isinstance(engine.proposer, ReDrafterProposer)
        engine.proposer = engine.proposer.fit_budget()
    return engine


def make_requests(**sampling: Any) -> list[Request]:
    return [
        Request(
            index=i, input_ids=list(range(3 + i, 8 + 13 * i)), max_output_len=30 - 9 * (i % 3),
            end_ids=frozenset(), sampling=SamplingParams(seed=i, **sampling),
        )
        for i in range(5)
    ]  # fmt: skip


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95}])
@pytest.mark.parametrize("method", METHODS)
def test_the_text_is_that_of_plain_decoding(
    folders: dict[str, Path], method: str, sampling: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Drafted and plain steps in any order, rows that are refilled and that share prefixes."""
    plain = TorchEngine(folders[method], device="cpu", speculate=False)
    requests = make_requests(**sampling)
    expected = [r.output_ids for r in plain.generate(requests)]
    engine = load(folders, method)
    engine.proposer = bind(engine.proposer)
    chance = random.Random(method)
    chosen: list[bool] = []

    def plan(
        self: Budget, remaining: Sequence[int], num_prompt_tokens: int, num_unread: int
    ) -> bool:
        chosen.append(chance.random() < 0.5)
        return chosen[-1]

    monkeypatch.setattr(Budget, "plan", plan)
    monkeypatch.setattr(Budget, "choose", lambda self, chances: chance.randrange(4))
    monkeypatch.setattr(Budget, "price_level", lambda self: chance.choice([-np.inf, 0.2, 1.0]))
    for options in (Options(), Options(reuse_blocks=True)):
        results = engine.generate(requests, options)
        assert [r.output_ids for r in results] == expected
        drafted = sum(r.stats.num_draft_tokens for r in results)
        assert drafted > 0 or method in ("prompt_lookup", "suffix")
    assert 0.2 < sum(chosen) / len(chosen) < 0.8
    assert engine.proposer.follows_prompts == method.startswith(("eagle", "dflash"))
    assert engine.proposer.is_indivisible == (method == "lookahead")


@pytest.mark.parametrize("method", ["eagle", "draft tree"])
def test_a_drafter_reads_a_piece_of_the_prompts_first(
    folders: dict[str, Path], method: str
) -> None:
    plain = TorchEngine(folders[method], device="cpu", speculate=False)
    requests = [
        Request(
            index=i, input_ids=[*range(3 + i, 83 + i)], max_output_len=30, end_ids=frozenset(),
        )
        for i in range(4)
    ]  # fmt: skip
    expected = [r.output_ids for r in plain.generate(requests)]
    engine = load(folders, method)
    drafter, read = engine.proposer, []
    assert isinstance(drafter, EagleProposer | DraftTreeProposer)
    propose = drafter.propose

    def watch(requests: Sequence[ActiveRequest]) -> list[Candidates]:
        num_unread, drafts = drafter.count_unread(requests), propose(requests)
        read.append(num_unread - drafter.count_unread(requests))
        assert read[-1] == drafter.num_prefilled
        return drafts

    drafter.propose = watch  # type: ignore[method-assign]
    engine.proposer = bound = BudgetProposer(drafter)
    assert [r.output_ids for r in engine.generate(requests)] == expected
    assert read[0] == FIRST_PIECE
    assert bound.budget.read_seconds is not None


def test_steps_are_timed_and_prompts_are_not(folders: dict[str, Path]) -> None:
    engine = load(folders, "redrafter")
    ticks = iter(range(10_000))
    engine.proposer = bound = BudgetProposer(engine.proposer, clock=lambda: float(next(ticks)))
    (result,) = engine.generate(make_requests()[:1])
    # Two readings for a verify step, two for a draft, one apart.
    assert next(ticks) == 2 * bound.budget.account.spent
    assert bound.budget.account.spent >= result.stats.num_verify_steps


# ---- The flag.


def write_prompt(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text('{"input_ids": [5, 6, 7]}\n', encoding="utf-8")
    return path


def test_the_command(folders: dict[str, Path], tmp_path: Path) -> None:
    flags = ["--engine-dir", str(folders["redrafter"]), "--max-output-len", "12"]
    flags += ["--input-file", str(write_prompt(tmp_path))]
    plain = run_here([*flags, "--no-speculation"])
    found = run_here([*flags, "--draft-len", "auto"])
    assert found["outputs"][0]["output_ids"] == plain["outputs"][0]["output_ids"]
    assert found["stats"]["method"] == "redrafter"


def test_trees_of_redrafter(folders: dict[str, Path], tmp_path: Path) -> None:
    """A size bounds what a step drafts; a budget has such trees by itself, and they end early."""
    folder = folders["redrafter"]  # 4 beams of 5 tokens
    flags = ["--engine-dir", str(folder), "--max-output-len", "12", "--draft-budget", "fixed"]
    flags += ["--input-file", str(write_prompt(tmp_path)), "--redrafter-tree-tokens"]
    plain = run_here([*flags[:4], *flags[6:8], "--no-speculation"])
    found = run_here([*flags, "7"])
    assert found["outputs"][0]["output_ids"] == plain["outputs"][0]["output_ids"]
    stats = found["outputs"][0]["stats"]
    assert 0 < stats["num_draft_tokens"] <= 7 * stats["num_verify_steps"]
    with pytest.raises(SpecDecError, match="tokens is 21, the engine has num_beams=4 x draft_len"):
        call("run", *flags, "21")
    with pytest.raises(UsageError, match="--redrafter-tree-tokens has no effect with an engine"):
        call("run", "--engine-dir", folders["medusa"], *flags[2:], "7")
    drafting = Drafting(options={}, flags={}, budget=DraftBudget("auto", "--draft-budget auto"))
    engine = TorchEngine(folder, device="cpu", drafting=drafting)
    assert isinstance(engine.proposer, BudgetProposer)
    drafter = engine.proposer.proposer
    assert isinstance(drafter, DynamicProposer)
    drafter.min_gain = 1.0
    drafter.allocate(2, 8)
    request = ActiveRequest(
        Request(index=0, input_ids=[5], max_output_len=9, end_ids=frozenset()), 1,
        max_depth=5, text=None,
    )  # fmt: skip
    request.output_ids.append(6)
    (candidates,) = drafter.propose([request])
    assert candidates.tree.depth == drafter.num_levels == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--draft-len", "auto", "--no-speculation"], "no effect with --no-speculation"),
        (["--draft-len", "3"], "--draft-len without --draft-engine-dir"),
        (["--draft-len", "auto", "--use-logits"], "--use-logits without --draft-engine-dir"),
    ],
)
def test_flags_that_have_no_effect(
    tmp_path: Path, folders: dict[str, Path], flags: list[str], message: str
) -> None:
    words = ["--engine-dir", folders["redrafter"], "--input-file", write_prompt(tmp_path), *flags]
    with pytest.raises(UsageError, match=message):
        call("run", *words)
