"""A table of costs: measured by the loop itself, kept, and measured again where it is of others."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.decode import cost_keeping, cost_measuring
from specdec.decode.cost_keeping import FOLDER_NAME, find_costs
from specdec.decode.cost_measuring import (
    FAR_POSITION,
    MAX_CONTEXT_NODES,
    MAX_SECONDS,
    Measuring,
    find_quartile,
)
from specdec.decode.cost_table import CostTable
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.suffix import SuffixDrafter
from specdec.decode.engine import TorchEngine
from specdec.engine.decoder import Decoder
from specdec.engine.step import Step
from specdec.methods.suffix import SuffixOptions
from tests.conftest import make_llama
from tests.costs import make_costs
from tests.methods import build_methods, load_method


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = make_llama(tmp_path_factory.mktemp("costs"), layers=2, seed=3)
    build_methods(
        target,
        "medusa",
        "eagle",
        "lookahead",
        "pair",
        "noisy",
        layers=2,
        build=["--max-batch-size", 4],
    )
    return target.parent


class Machine:
    """Clock by which a pass takes 10 units, one or more for a token, and one for 100 positions."""

    now = 0.0
    is_multiplied = False  # whether each node takes one for 100 positions
    target: Decoder | None = None  # beside which others take a tenth of the time

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, units_per_second: float = 1e4, token: float = 1.0
    ) -> None:
        self._units_per_second = units_per_second
        forward = Decoder.forward

        def take_time(decoder: Decoder, step: Step, *arguments: Any) -> Any:
            num_readers = step.tokens.shape[1] if self.is_multiplied else 1
            units = 10 + token * step.tokens.size + num_readers * step.positions.max() / 100
            self.now += units * (0.1 if self.target not in (None, decoder) else 1)
            return forward(decoder, step, *arguments)

        monkeypatch.setattr(Decoder, "forward", take_time)

    def make(
        self, engine: TorchEngine, groups: list[list[Drafter]], max_batch_size: int = 4
    ) -> Measuring:
        return Measuring(
            engine.decoder, groups, max_batch_size=max_batch_size, max_seq_len=400,
            max_num_tokens=8192, clock=lambda: self.now / self._units_per_second,
        )  # fmt: skip

    def measure(self, engine: TorchEngine, groups: list[list[Drafter]]) -> tuple[CostTable, bool]:
        return self.make(engine, groups).measure()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["medusa", "eagle", "suffix"])
def test_what_is_measured(parent: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps by requests and nodes, though a lookup finds nothing in texts of random tokens."""
    engine = load_method(parent, "pair" if name == "suffix" else name, "noisy")
    drafter = SuffixDrafter(SuffixOptions(max_tokens=6)) if name == "suffix" else engine.drafter
    table, is_quiet = Machine(monkeypatch).measure(engine, [[drafter]])
    assert is_quiet
    assert [rows for rows, _ in table.steps.curves] == [1, 4]
    for rows, sizes in itertools.product((1, 4), ((1,), (1, 3, drafter.max_draft_tokens + 1))):
        seconds = table.estimate_steps(rows, np.array(sizes)) * 1e4
        assert seconds == pytest.approx([10 + rows * size for size in sizes], abs=4), "of a context"
    prices = table.context.estimate(np.array([1, MAX_CONTEXT_NODES, 2 * MAX_CONTEXT_NODES])) * 1e4
    assert prices == pytest.approx([1 / 100] * 3, rel=0.1)
    assert table.prompts is not None
    levels = [curve.sizes for _, curve in table.drafts[0].curves]
    assert levels == [(drafter.num_levels,), (drafter.num_levels,)]
    assert FAR_POSITION > 400


def test_each_node_of_a_tree_multiplies_with_the_context(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As measured by four nodes; a drafter of fewer is measured by all that it has."""
    engine = load_method(parent, "pair", "noisy")
    for max_tokens, least_nodes in ((22, MAX_CONTEXT_NODES), (1, 2)):
        machine = Machine(monkeypatch)
        machine.is_multiplied = True
        measuring = machine.make(engine, [[SuffixDrafter(SuffixOptions(max_tokens=max_tokens))]])
        curve = measuring._measure_context()
        assert curve.sizes == (1, least_nodes)
        prices = curve.estimate(np.array([1, 4, 16])) * 1e4
        assert prices == pytest.approx([0.01, 0.04, 0.16], rel=0.1)


def test_steps_that_are_timed_more_often_are_not_the_cheaper_for_that() -> None:
    chance = np.random.default_rng(0)
    means = [
        np.mean([find_quartile((1 + chance.exponential(size=size)).tolist()) for _ in range(2000)])
        for size in (3, 4, 5, 6, 11, 16, 48)
    ]
    assert max(means) == pytest.approx(min(means), rel=0.06)
    assert find_quartile([3.0]) == 3
    assert find_quartile([9.0, 1.0, 2.0, 9.0, 9.0]) == 1.5


def test_an_engine_without_drafters(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_method(parent, "pair", "noisy")
    table, _ = Machine(monkeypatch).measure(engine, [])
    assert table.drafts == ()
    assert table.estimate_steps(2, np.array([1])) * 1e4 == pytest.approx([12], abs=4)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the machine was quiet, of each measuring; the last value is for all that follow."""
    quiet = [True]

    def measure(_: Measuring) -> tuple[CostTable, bool]:
        quiet.append(quiet[-1])
        return make_costs(step=lambda size: 1.0 + size / len(quiet)), quiet[-1]

    monkeypatch.setattr(Measuring, "measure", measure)
    return quiet


def find(engine: TorchEngine, folder: Path, **drafting: str) -> CostTable:
    return find_costs(folder, engine.config, engine.decoder, [[engine.drafter]], drafting)


def test_a_table_is_measured_once(
    parent: Path, tmp_path: Path, measured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the machine or the way to draft is another, or the file is damaged."""
    engine = load_method(parent, "medusa", "noisy")
    first = find(engine, tmp_path)
    assert find(engine, tmp_path) == first
    assert len(measured) == 2
    (path,) = (tmp_path / FOLDER_NAME).iterdir()
    assert "processor" in json.loads(path.read_text(encoding="utf-8"))["key"]
    assert find(engine, tmp_path, medusa="other choices") != first
    monkeypatch.setattr(cost_keeping, "read_processor", lambda: "another")
    assert find(engine, tmp_path) != first
    monkeypatch.undo()


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"key": 1}', "\0"])
def test_a_damaged_table_is_measured_again(
    parent: Path, tmp_path: Path, measured: list[bool], content: str
) -> None:
    engine = load_method(parent, "medusa", "noisy")
    first = find(engine, tmp_path)
    (path,) = (tmp_path / FOLDER_NAME).iterdir()
    path.write_text(content, encoding="utf-8")
    assert find(engine, tmp_path) != first
    assert len(measured) == 3
    assert json.loads(path.read_text(encoding="utf-8"))["table"]


def test_a_folder_that_cannot_be_written(
    parent: Path, tmp_path: Path, measured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's cache has the table then."""
    engine, blocked = load_method(parent, "medusa", "noisy"), tmp_path / "engine"
    blocked.write_text("a file, where no folder can be made", encoding="utf-8")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", os.fspath(tmp_path / "cache"))
    first = find(engine, blocked)
    assert find(engine, blocked) == first
    assert len([*(tmp_path / "cache" / FOLDER_NAME).iterdir()]) == 1
    monkeypatch.setenv("SPECDEC_CACHE_DIR", os.fspath(blocked / "cache"))
    assert find(engine, blocked) != first, "nowhere: measured at each load"


def test_what_a_busy_machine_delayed_is_not_kept(
    parent: Path, tmp_path: Path, measured: list[bool]
) -> None:
    engine = load_method(parent, "medusa", "noisy")
    measured.append(False)
    find(engine, tmp_path)
    assert not (tmp_path / FOLDER_NAME).exists()


def test_a_drafter_that_reads_prompts_in_a_chain(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading is what a draft takes longer for it; each drafter is measured for all requests."""
    engine = load_method(parent, "draft_target, tree", "noisy")
    groups: list[list[Drafter]] = [[SuffixDrafter(SuffixOptions(max_tokens=6))], [engine.drafter]]
    table, _ = Machine(monkeypatch).measure(engine, groups)
    assert table.reading * 1e4 == pytest.approx(1, abs=0.1), "a token's price in a pass"
    for drafts in table.drafts:
        assert [rows for rows, _ in drafts.curves] == [1, 4]


@pytest.mark.parametrize(("token", "seconds_behind"), [(1.0, 0.8), (6.0, 1.9)])
def test_a_slow_engine(
    parent: Path, token: float, seconds_behind: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 70 ms and more: the time is kept to, small steps and all drafters have turns.

    Sizes beyond one that costs more than two plain steps lie on a line.
    """
    engine = load_method(parent, "draft_target, tree", "noisy")
    groups: list[list[Drafter]] = [[SuffixDrafter(SuffixOptions(max_tokens=22))], [engine.drafter]]
    machine = Machine(monkeypatch, units_per_second=150, token=token)
    machine.target = engine.decoder
    measuring = machine.make(engine, groups, max_batch_size=1)
    table, is_quiet = measuring.measure()
    assert is_quiet
    assert machine.now / 150 < MAX_SECONDS + seconds_behind
    ((_, steps),) = table.steps.curves
    assert steps.sizes == ((1, 2, 4, 8, 16) if token == 1 else (1, 2, 4))
    assert min(len(measuring._steps._seconds[1][size]) for size in (1, 2, 4)) >= 3
    for size in (1, 2, 4, 8, 22):
        assert steps.estimate_one(size) * 150 == pytest.approx(10 + token * size, abs=1), (
            "of a context"
        )
    for levels in (1, engine.drafter.max_draft_depth):
        assert table.estimate_draft(1, levels, 1) * 150 > levels
    assert table.reading * 150 == pytest.approx(0.1 * token, rel=0.2)


@pytest.mark.thorough
def test_whole_drafts_are_measured_where_any_draft_is_dear(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside so many requests that two tokens each take twice a plain step's time."""
    monkeypatch.setattr(cost_measuring, "DEAR_RATIO", 0.5)
    engine = load_method(parent, "draft_target, tree", "noisy")
    lookup: Drafter = SuffixDrafter(SuffixOptions(max_tokens=22))
    for groups in ([[engine.drafter]], [[lookup], [engine.drafter]]):
        table, _ = Machine(monkeypatch).measure(engine, groups)
        assert table.steps.curves[0][1].sizes[-1] == 4
        for _, curve in table.drafts[-1].curves:
            assert curve.sizes[-1] == engine.drafter.max_draft_depth
