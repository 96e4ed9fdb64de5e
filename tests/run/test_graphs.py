"""Steps replayed from graphs write what they write without; on the CPU, from tests/tape.py."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.decode import engine as torch_engine
from specdec.decode.ahead import PlainAhead
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.draft_target import attach_draft
from specdec.decode.drafters.levels import DynamicTree
from specdec.decode.drafters.medusa import MedusaDrafter
from specdec.decode.drafters.pace import Pace
from specdec.decode.drafters.trees import grow_choices
from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Batch, Options, generate
from specdec.decode.requests import ActiveRequest, Request
from specdec.decode.sampling import SamplingParams
from specdec.decode.timing import Timing
from specdec.engine import ranking
from specdec.engine.graphs import (
    Graphs,
    StepGraphs,
    StepShape,
    _check_replay,
    round_positions,
    round_tokens,
)
from specdec.engine.step import Step
from specdec.engine.torch_layers import build_full_mask
from specdec.engine.transfers import WAITS, Arrival, Waits
from specdec.errors import SpecDecError
from tests.conftest import make_drafter, make_llama
from tests.costs import bind, make_costs
from tests.engines import make_engine
from tests.methods import build_methods
from tests.parity.models import make_model
from tests.tape import HostAccess, StrictGraphs, TapeRecorder

METHODS = (
    "redrafter", "medusa", "eagle", "eagle3", "dflash", "mtp", "draft_target", "draft_target, tree",
)  # fmt: skip
LIMIT = 30


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = make_llama(tmp_path_factory.mktemp("graphs"), layers=3, seed=3)
    names = ("redrafter", "medusa", "eagle", "eagle3", "dflash", "mtp", "pair", "noisy")
    build_methods(target, *names, layers=3, build=["--optimize", "none", "--max-batch-size", 3])
    return target.parent


def load(parent: Path, method: str, *, with_graphs: bool, speculate: bool = True) -> Any:
    def open_engine(name: str) -> TorchEngine:
        recorder = TapeRecorder() if with_graphs else None
        folder = parent / f"{name}-engine"
        return TorchEngine(folder, device="cpu", recorder=recorder, speculate=speculate)

    name, _, variant = method.partition(", ")
    if name == "draft_target":
        engine, tree_tokens = open_engine("pair"), 3 if variant == "tree" else None
        draft = open_engine("noisy")
        attach_draft(engine, draft, draft_len=3, use_logits=False, tree_tokens=tree_tokens)
        return engine
    engine = open_engine(name)
    if isinstance(engine.drafter, MedusaDrafter):  # as on a GPU
        engine.drafter.use_tree(grow_choices(3, 7, 128))
    return engine


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_engine, "Graphs", StrictGraphs)


def make_requests(count: int, limit: int = LIMIT, **sampling: Any) -> list[Request]:
    return [
        Request(
            index=i, input_ids=list(range(3 + i, 8 + 17 * i)), max_output_len=limit - 9 * (i % 3),
            end_ids=frozenset(), sampling=SamplingParams(seed=i, **sampling),
        )
        for i in range(count)
    ]  # fmt: skip


def run(engine: TorchEngine, requests: list[Request], **options: Any) -> list[list[int]]:
    return [r.output_ids for r in engine.generate(requests, Options(**options))]


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_the_text_is_that_without_graphs(parent: Path, method: str) -> None:
    """Rows that end at different steps and are refilled, prefixes shared, one request, again."""
    engine = load(parent, method, with_graphs=True)
    requests = make_requests(5)
    expected = run(load(parent, method, with_graphs=False), requests)
    assert run(engine, requests) == expected
    assert run(engine, requests[1:2]) == expected[1:2]
    graphs = engine.graphs
    before = graphs.num_replayed, graphs.num_warm_ups
    assert graphs.num_recorded > 0
    assert run(engine, requests, reuse_blocks=True) == expected
    # Known by now; the cache, too, is where it was.
    assert graphs.num_replayed - before[0] > 3 * (graphs.num_warm_ups - before[1])
    report = graphs.describe()
    assert report["graphs"] <= graphs.max_graphs
    assert report["buffer_bytes"] > 0
    # A prompt of more than 64 tokens, and that alone, is run without.
    assert set(report["eager"]) == {"over 64 tokens a row"}


def test_plain_steps_are_begun_ahead(parent: Path) -> None:
    """Rows are refilled while a step is in flight, and ended by tokens that nobody foresaw."""
    eager = load(parent, "redrafter", with_graphs=False, speculate=False)
    engine = load(parent, "redrafter", with_graphs=True, speculate=False)
    requests = make_requests(6)
    texts = run(eager, requests)
    stopping = [
        dataclasses.replace(r, end_ids=frozenset(text[4 + 3 * r.index :][:1]))
        for r, text in zip(requests, texts, strict=True)
    ]
    for some in (requests, stopping, stopping[2:3], [stopping[1], requests[2]]):
        steps: list[list[Any]] = [[], []]
        for chosen, into in ((eager, steps[0]), (engine, steps[1])):
            results = chosen.generate(some, Options(reuse_blocks=len(some) == 6))
            into += [(r.output_ids, r.finish_reason, r.stats) for r in results]
        assert steps[0] == steps[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainAhead, "step", None)
        with pytest.raises(TypeError):
            run(engine, requests)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["redrafter", "eagle3", "dflash", "draft_target, tree"])
def test_steps_are_begun_ahead_while_a_drafter_rests(
    parent: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps with drafts, five without; the drafter sees the states of all of them."""
    requests = make_requests(5)
    expected = run(load(parent, method, with_graphs=False), requests)
    engine, calls = load(parent, method, with_graphs=True), list[int]()
    turn = itertools.cycle((1, 1, 0))
    engine.drafter, step = bind(engine.drafter, make_costs()), PlainAhead.step

    def plan(pace: Pace, remaining: Sequence[int], *_: int) -> bool:
        pace.begin_step(len(remaining))
        pace.drafts_on = bool(next(turn))
        pace._plan_steps = 0 if pace.drafts_on else 5
        pace.prices.step_seconds = [0.0] * (pace.max_tokens + 1)
        return pace.drafts_on

    def count(ahead: PlainAhead, active: Sequence[ActiveRequest]) -> Any:
        calls.append(len(active))
        return step(ahead, active)

    monkeypatch.setattr(Pace, "plan", plan)
    monkeypatch.setattr(PlainAhead, "step", count)

    def check(chosen: slice, *, is_exact: bool) -> list[tuple[int, int]]:
        nonlocal turn
        turn, timing = itertools.cycle((1, 1, 0)), Timing(is_exact=is_exact)
        calls.clear()
        found = generate(
            engine.decoder, engine.drafter, requests[chosen], Options(max_batch_size=3), timing
        )
        assert [r.output_ids for r in found] == expected[chosen]
        assert is_exact or len(calls) > timing.num_steps / 3
        return [(r.stats.num_draft_tokens, r.stats.num_accepted) for r in found]

    check(slice(None), is_exact=False)
    for at in range(2):  # steps whose parts are timed are not begun ahead
        drafted = check(slice(at, at + 1), is_exact=False)
        assert drafted == check(slice(at, at + 1), is_exact=True)
        assert drafted[0][0] > 0


def test_float32_bits_where_the_shapes_are_the_same(parent: Path) -> None:
    """A step of one or four tokens of one row is the eager one, to the last bit."""
    eager = load(parent, "redrafter", with_graphs=False).decoder
    engine = load(parent, "redrafter", with_graphs=True)
    caches = [decoder.make_cache(2, 200) for decoder in (eager, engine.decoder)]
    generator = np.random.default_rng(3)
    for _ in range(3):
        for size in (1, 4, 1, 4):
            tokens = generator.integers(3, 128, (2, size))
            step = Step(
                rows=np.arange(2), tokens=tokens,
                positions=caches[0].past_lens[:, None] + np.arange(size),
                tree_mask=np.tile(np.tril(np.ones((size, size), np.bool_)), (2, 1, 1)),
            )  # fmt: skip
            with torch.inference_mode():
                found = [
                    decoder.forward(step, cache)
                    for decoder, cache in zip((eager, engine.decoder), caches, strict=True)
                ]
            assert torch.equal(*found)
            for cache in caches:
                for row in range(2):
                    cache.commit(row, list(range(size)))
    assert engine.graphs.num_replayed == 10


def test_results_outlive_the_next_replay(parent: Path) -> None:
    decoder = load(parent, "redrafter", with_graphs=True).decoder
    cache = decoder.make_cache(1, 64)
    with torch.inference_mode():
        found = []
        for token in (5, 9, 77):
            step = Step(
                rows=np.zeros(1, np.int64), tokens=np.array([[token]]),
                positions=np.zeros((1, 1), np.int64), tree_mask=np.ones((1, 1, 1), np.bool_),
            )  # fmt: skip
            x = decoder.embed(torch.tensor([[token]]), torch.zeros(1, 1, dtype=torch.int64))
            found.append(decoder.run_layers(x, step, cache))
            kept = [states.clone() for states in found]
        decoder.run_layers(found[0].clone(), step, cache)
    assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
    assert not torch.equal(found[0], found[2])


def test_a_second_cache_is_not_the_first(parent: Path) -> None:
    """Two runs at once: the later one goes without graphs, and neither sees the other."""
    engine = load(parent, "redrafter", with_graphs=True, speculate=False)
    requests = make_requests(2)
    expected = run(load(parent, "redrafter", with_graphs=False, speculate=False), requests)
    size = engine.max_seq_len
    batches = [
        Batch(engine.decoder, Drafter(), Options(), Timing(), num_rows=1, max_seq_len=size)
        for _ in requests
    ]
    active = [batch.submit(request) for batch, request in zip(batches, requests, strict=True)]
    while any(batch.is_busy for batch in batches):
        for batch in batches:
            batch.step()
    assert [request.output_ids for request in active] == expected
    assert engine.graphs.num_eager["another cache"] > 20
    assert engine.graphs.num_replayed > 20


@pytest.mark.parametrize("speculate", [False, True])
def test_requests_join_and_leave_between_steps(parent: Path, *, speculate: bool) -> None:
    """Greedy ones run ahead of the host until a sampled one joins, and again once it has left."""
    greedy, sampled = make_requests(4), make_requests(2, limit=15, temperature=0.9)[::-1]
    eager = load(parent, "redrafter", with_graphs=False, speculate=speculate)
    expected = [run(eager, [request])[0] for request in (*greedy, *sampled)]
    engine = load(parent, "redrafter", with_graphs=True, speculate=speculate)
    batch = Batch(
        engine.decoder, engine.drafter, engine.fill_options(Options()), Timing(),
        num_rows=3, max_seq_len=engine.max_seq_len,
    )  # fmt: skip
    assert not batch.is_busy
    batch.step()  # with nothing to do
    active = [batch.submit(request) for request in greedy[:2]]
    ways = []

    def step(count: int) -> None:
        for _ in range(count):
            batch.step()
            ways.append(batch._ahead.is_flying)

    step(3)
    active.append(batch.submit(sampled[0]))
    step(2)
    batch.cancel(active[1])
    active += [batch.submit(request) for request in (*greedy[2:], sampled[1])]
    assert active[1].finish_reason is None, "a step takes the note when it begins"
    step(1)
    assert active[1].finish_reason == "cancelled"
    assert len(batch.scheduler.active) == 3
    batch.cancel(active[-1])  # which still waits
    left = active[0], active[2], active[3], active[4]
    while any(request.finish_reason is None for request in left):
        step(1)
    assert not batch.is_busy
    outputs = [request.output_ids for request in active]
    assert [outputs[0], *outputs[2:5]] == [expected[0], expected[4], *expected[2:4]]
    assert 3 <= len(outputs[1]) < len(expected[1])
    assert outputs[1] == expected[1][: len(outputs[1])]
    assert outputs[5] == []
    # Ahead, not with the sampled one, ahead again.
    changes = [way for at, way in enumerate(ways) if at == 0 or way != ways[at - 1]]
    assert changes[:3] == ([False] if speculate else [False, True, False])


def test_no_more_graphs_than_allowed(parent: Path) -> None:
    eager = load(parent, "redrafter", with_graphs=False)
    engine = load(parent, "redrafter", with_graphs=True)
    engine.graphs.max_graphs = 2
    requests = make_requests(2)
    assert run(engine, requests) == run(eager, requests)
    assert engine.graphs.describe()["graphs"] <= 2
    assert engine.graphs.num_eager["over 2 graphs"] > 10


def test_graphs_can_be_switched_off(parent: Path) -> None:
    engine = load(parent, "redrafter", with_graphs=True)
    engine.graphs.is_enabled = False
    requests = make_requests(1)
    assert run(engine, requests) == run(load(parent, "redrafter", with_graphs=False), requests)
    assert engine.graphs.num_replayed == 0
    assert set(engine.graphs.num_eager) == {"switched off"}


@pytest.mark.parametrize(
    "name", ["MistralForCausalLM-window", "Gemma2ForCausalLM-caps", "Gemma3ForCausalLM-windows"]
)
def test_a_windowed_target(name: str, tmp_path: Path) -> None:
    """In all layers, and in some, which have a rotary table of their own, with caps and norms."""
    make_model(tmp_path / "target", name, vocab_size=128)
    drafter = make_drafter(tmp_path, exit_dim=96, scale=3.0)
    folder = make_engine(tmp_path, tmp_path / "target", drafter, optimize="none")
    requests = make_requests(2)
    engine: Any = TorchEngine(folder, device="cpu", recorder=TapeRecorder())
    assert run(engine, requests) == run(TorchEngine(folder, device="cpu"), requests)
    assert engine.graphs.num_replayed > 20


# ---- The parts.


@pytest.mark.parametrize(
    ("rows", "tokens", "columns", "window"),
    [(1, 1, 1, None), (3, 5, 5, None), (2, 3, 8, None), (1, 1, 1, 4), (3, 5, 5, 4), (2, 3, 8, 2)],
)
def test_the_mask_made_on_the_device(
    rows: int, tokens: int, columns: int, window: int | None
) -> None:
    generator = np.random.default_rng(rows)
    past = generator.integers(0, 40, rows)
    mask = generator.random((rows, tokens, columns)) < 0.5
    newest = np.arange(columns - tokens, columns)
    mask[:, np.arange(tokens), newest] = True
    places = past[:, None] + generator.integers(0, 3, (rows, columns))
    earlier, positions = np.split(places, [columns - tokens], axis=1)
    step = Step(
        rows=np.arange(rows) * 2, tokens=positions, positions=positions, tree_mask=mask,
        earlier_positions=earlier,
    )  # fmt: skip
    shape = StepShape(4, 8, 8, 64, is_prefix=False)
    packed = shape.unpack(torch.from_numpy(shape.pack(step, past, positions + 7)))
    bias = packed.build_bias(64, window, torch.float32)
    expected = build_full_mask(past, mask, places, 64, window)
    assert set(bias.flatten().tolist()) == {-torch.inf, 0.0}
    seen = (bias == 0).numpy()
    assert (seen[:rows, :, :tokens] == expected).all()
    # Padding stands for what is there: a row's last token, the first row.
    assert (seen[:rows, :, tokens:] == expected[:, :, -1:]).all()
    assert (seen[rows:] == seen[:1]).all()
    assert (packed.slots[:rows, :tokens].numpy() == past[:, None] + newest).all()
    assert (packed.slots[rows:] == packed.slots[:1]).all()
    assert (packed.slots[:, tokens:] == packed.slots[:, tokens - 1 : tokens]).all()
    assert packed.cache_rows.tolist() == [*(np.arange(rows) * 2), *[0] * (4 - rows)]
    assert (packed.lines == packed.positions + 7).all()


def test_sizes() -> None:
    assert [round_tokens(n) for n in (1, 2, 3, 8, 21, 64)] == [1, 2, 4, 8, 32, 64]
    assert [round_positions(n) for n in (1, 64, 65, 500, 513, 1025)] == [
        64, 64, 128, 512, 640, 1280,
    ]  # fmt: skip
    for count in range(1, 5000, 7):
        assert count <= round_positions(count) < count + max(64, count / 4 + 1)


def test_the_tape_refuses_values_on_the_host() -> None:
    """What a CUDA graph cannot hold: else the tests on the CPU would prove nothing."""
    x = torch.arange(3.0)
    with pytest.raises(HostAccess):
        TapeRecorder().record(lambda: (x * float(x.sum()),))


def test_owners_share_no_graphs() -> None:
    recorder = TapeRecorder()
    graphs = Graphs(recorder)
    owners = [StepGraphs(graphs) for _ in range(2)]
    for value in (1.0, 2.0, 3.0):
        for add, owner in enumerate(owners):
            found: Any = graphs.call(
                owner, 1, [torch.full((1,), value)], lambda x, add=add: (x + add,)
            )
            assert found[0].item() == value + add
    graphs.forget(owners[0])
    assert graphs.describe()["graphs"] == 1
    assert recorder.num_starts == 0
    graphs.forget(owners[1])
    assert graphs.describe()["graphs"] == 0
    assert recorder.num_starts == 1, "the pool of graphs that are gone is used again"


@pytest.mark.parametrize("wrong", [1.01, torch.nan])
def test_a_replay_that_computes_something_else_is_an_error(wrong: float) -> None:
    class Wrong(TapeRecorder):
        def record(self, compute: Any) -> Any:
            outputs, replay = super().record(compute)

            def replay_wrongly() -> None:
                replay()
                outputs[0].mul_(wrong)

            return outputs, replay_wrongly

    recorded = Graphs(Wrong())
    x = torch.arange(4.0)

    def call() -> Any:
        return recorded.call(recorded, "key", [x], lambda given: (given + 1,))

    assert torch.equal(call()[0], x + 1)
    with pytest.raises(SpecDecError, match="does not compute what it was recorded from"):
        call()


def test_a_recording_that_fails_is_an_error() -> None:
    class Broken(TapeRecorder):
        def record(self, compute: Callable[[], Any]) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs = Graphs(Broken())
    owner = StepGraphs(graphs)
    graphs.call(owner, 1, [torch.ones(1)], lambda x: (x,))
    with pytest.raises(SpecDecError, match="graph for StepGraphs .*not permitted") as caught:
        graphs.call(owner, 1, [torch.ones(1)], lambda x: (x,))
    assert "--optimize none" in caught.value.hint
    assert gc.isenabled()


def test_nothing_is_collected_while_a_graph_is_recorded() -> None:
    """Memory of the device that is freed meanwhile would end the recording."""
    states, graphs = [], Graphs(TapeRecorder())

    def compute(x: Tensor) -> tuple[Tensor]:
        states.append(gc.isenabled())
        return (x + 1,)

    for _ in range(2):
        graphs.call("owner", 1, [torch.ones(1)], compute)
    assert states == [True, False, True], "the warm-up, the recording, the check"
    assert gc.isenabled()


# ---- Waits for the device.


@pytest.fixture
def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a tensor on the host, other than through an `Arrival`, is an error."""
    inside = [False]
    plain = Arrival.wait

    def wait(arrival: Arrival) -> Any:
        inside[0] = True
        try:
            return plain(arrival)
        finally:
            inside[0] = False

    monkeypatch.setattr(Arrival, "wait", wait)

    def guard(name: str) -> None:
        real = getattr(torch.Tensor, name)

        def checked(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            assert inside[0], f"Tensor.{name} outside of an Arrival"
            return real(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, checked)

    # On a CPU NumPy finds the best tokens, and on the devices that are meant here torch does.
    monkeypatch.setattr(ranking, "is_on_host", lambda scores: False)
    for name in ("numpy", "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__"):
        guard(name)


WAITS_PER_STEP = {"plain": 1, "redrafter": 1, "medusa": 1, "draft_target": 2, "dflash": 2}


@pytest.mark.thorough
@pytest.mark.usefixtures("_guarded")
@pytest.mark.parametrize("method", [*WAITS_PER_STEP, "eagle", "eagle3", "draft_target, tree"])
def test_waits_of_a_step(parent: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_plain = method == "plain"
    engine = load(
        parent, "redrafter" if is_plain else method, with_graphs=True, speculate=not is_plain
    )
    checks = Waits()  # of the first replay of each graph

    def check(*arguments: Any) -> None:
        before = WAITS.count
        _check_replay(*arguments)
        checks.count += WAITS.count - before

    monkeypatch.setattr("specdec.engine.graphs._check_replay", check)
    monkeypatch.setattr(DynamicTree, "_is_settled", lambda *_: False)  # all levels are drafted
    timing = Timing()
    before = WAITS.count
    generate(engine.decoder, engine.drafter, make_requests(1), Options(), timing)
    # Besides: the prompt's own token, and the first draft where others come with the tokens.
    waits = WAITS.count - before - 1 - (method in ("redrafter", "medusa"))
    waits -= checks.count
    each = WAITS_PER_STEP.get(method) or 1 + engine.drafter.tree.depth
    # The last steps draft less where less is left to emit.
    assert timing.num_steps * each - 3 <= waits <= timing.num_steps * each
