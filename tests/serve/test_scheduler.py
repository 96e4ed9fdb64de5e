"""Requests under load get what each gets alone, leave when they are cancelled, and fail alone."""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine, Event, Prompt, PromptError, SpecDecError, Stream, UsageError
from specdec.decode import engine as engine_module
from specdec.decode.loop import Batch
from specdec.decode.prefill import PromptReader
from specdec.decode.prompt_chunks import CHUNK_SHARE, LEAST_CHUNK, MOST_TIMES
from specdec.decode.schedule import DRAFTER_SHARE
from specdec.engine.decoder import Decoder
from specdec.engine.layout import read_engine_config
from specdec.engine.step import Step
from specdec.serve.protocol import BadRequest
from specdec.serve.scheduler import Job, JobScheduler
from tests.conftest import (
    make_drafter,
    make_eagle_drafter,
    make_llama,
    make_mtp_head,
    make_tokenizer,
)
from tests.costs import make_costs
from tests.engine.kernels import needs_compiler
from tests.engines import call, make_engine, make_tree_engine
from tests.families import make_hybrid
from tests.serve.servers import wait_until

CHUNK = 16
DEAR = lambda tokens: 0.02 + 0.0005 * tokens  # noqa: E731 - seconds of a step by its tokens


def drain(scheduler: JobScheduler, seconds: float) -> bool:
    """Take no more requests and wait for those there are; whether they have ended in time."""
    scheduler.close()
    deadline = time.monotonic() + seconds
    while (scheduler.num_running or scheduler.num_waiting) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not (scheduler.num_running or scheduler.num_waiting)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("scheduler")
    target, drafter = make_llama(parent, seed=5), make_drafter(parent, exit_dim=96, scale=3.0)
    make_tokenizer(target)
    for dtype in ("float32", "bfloat16"):
        make_engine(
            parent, target, drafter, beams=3, length=4, dtype=dtype,
            build=["--max-batch-size", 8, "--tokenizer-dir", target, "--max-seq-len", 256],
        ).rename(parent / dtype)  # fmt: skip
    plain = parent / "ckpt"
    call("convert", "--model-dir", target, "--output-dir", plain)
    external = ["--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 4]
    slow = ["--optimize", "none"]
    for name, flags in (
        ("pair", [*slow, *external]), ("draft", slow), ("native pair", external),
        ("short draft", [*slow, "--max-seq-len", 70]),
    ):  # fmt: skip
        call(
            "build", "--checkpoint-dir", plain, "--output-dir", parent / name,
            "--max-batch-size", 4, *flags,
        )  # fmt: skip
    make_tree_engine("eagle", parent, target, make_eagle_drafter(parent), optimize="none")
    return parent


def make_hybrid_engine(parent: Path) -> None:
    """An engine of a hybrid, whose own head drafts."""
    hybrid = make_tokenizer(make_hybrid(parent, seed=5))
    call(
        "convert", "--model-dir", hybrid, "--mtp-model-dir", make_mtp_head(parent, hybrid),
        "--mtp-max-draft-len", 3, "--output-dir", parent / "hybrid ckpt",
    )  # fmt: skip
    call(
        "build", "--checkpoint-dir", parent / "hybrid ckpt", "--output-dir", parent / "hybrid",
        "--max-batch-size", 8, "--tokenizer-dir", hybrid, "--max-seq-len", 256,
    )  # fmt: skip


def load(folder: Path, name: str = "float32", **options: Any) -> Engine:
    return Engine.load(
        folder / name, device="cpu", prompt_chunk=CHUNK, kv_cache_enable_block_reuse=True, **options
    )


def mix_prompts(number: int) -> list[Prompt]:
    """Short and long prompts, shared beginnings, greedy, sampled and shaped, stops and ends."""
    dice = random.Random(7)
    shared = [dice.randrange(3, 128) for _ in range(60)]
    prompts = []
    for index in range(number):
        ids = [dice.randrange(3, 128) for _ in range(dice.randint(1, 90))]
        if index % 3 == 0:
            ids = shared[: dice.randint(10, 60)] + ids[:20]
        settings: dict[str, Any] = {}
        if index % 2:
            settings |= {"temperature": dice.choice([0.6, 1.2]), "top_p": dice.choice([1, 0.8])}
            settings |= {"top_k": dice.choice([0, 9]), "seed": dice.randrange(2**64)}
        if index % 5 == 0:
            settings |= {"stop": [chr(dice.randrange(97, 123)), "xq"]}
        if index % 7 == 0:
            settings |= {"frequency_penalty": 0.7, "min_p": 0.01, "logit_bias": {9: 1.5}}
        ends = dice.sample(range(128), 9) if index % 4 == 0 else []
        prompts.append(
            Prompt(token_ids=ids, max_output_len=dice.randint(1, 30), end_ids=ends, **settings)
        )
    return prompts


class Run:
    """A scheduler, and what was made of the jobs that it was given."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.scheduler = JobScheduler(engine, **{"max_queue": 100, **options})
        self.scheduler.start()

    def prepare(self, prompt: Prompt | list[int], **settings: Any) -> Job:
        if isinstance(prompt, list):
            prompt = Prompt(token_ids=prompt, end_ids=(), **settings)
        return Job(self.scheduler.engine.prepare(prompt), lambda: None)

    def submit(self, prompt: Prompt | list[int], **settings: Any) -> Job:
        job = self.prepare(prompt, **settings)
        self.scheduler.submit([job])
        return job

    def finish(self, job: Job) -> tuple[list[int], str, str | None]:
        """Wait for a job: its tokens, text and finish reason."""
        events: list[Event] = []

        def has_ended() -> bool:
            events.extend(job.take())
            return bool(events) and events[-1].finish_reason is not None

        wait_until(has_ended)
        tokens = [token for event in events for token in event.token_ids]
        return tokens, "".join(e.text for e in events), events[-1].finish_reason


class Counter:
    """Takes down whether an answer's end could be had before it was counted."""

    def __init__(self) -> None:
        self.early: list[bool] = []

    def note_step(self, jobs: Sequence[tuple[Job, Event]]) -> None:
        pass

    def note_end(self, job: Job, reason: str) -> None:
        self.early.append(any(event.finish_reason for event in job.take()))


@pytest.fixture
def run(folder: Path) -> Iterator[Run]:
    with load(folder) as engine:
        run = Run(engine)
        yield run
        run.scheduler.stop()


def test_an_answer_is_counted_before_it_can_be_had(folder: Path) -> None:
    counter = Counter()
    with load(folder) as engine:
        run = Run(engine, watcher=counter)
        run.finish(run.submit([5, 6, 7], max_output_len=4))
        run.scheduler.stop()
    assert counter.early == [False]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "count", "least", "options"),
    [
        ("float32", 72, 200, {}),
        ("bfloat16", 72, 200, {}),
        ("hybrid", 40, 20, {"draft_budget": "fixed"}),
    ],
)
def test_text_under_load_is_each_requests_own(
    folder: Path, name: str, count: int, least: int, options: dict[str, Any]
) -> None:
    """At concurrency 32: chunks, prefixes, drafts and neighbours that are cancelled change none."""
    if name == "hybrid":
        make_hybrid_engine(folder)
    prompts = mix_prompts(count)
    with Engine.load(folder / name, device="cpu", speculation=False) as engine:
        expected = [
            (output.token_ids, output.text, output.finish_reason)
            for prompt in prompts
            for output in engine.generate(prompt)
        ]
    assert {reason for *_, reason in expected} == {"length", "eos", "stop"}
    found: list[Any] = [None] * len(prompts)
    left = iter(enumerate(prompts))
    lock = threading.Lock()
    with load(folder, name, **options) as engine:
        run = Run(engine)

        def ask() -> None:
            dice = random.Random(threading.get_ident())
            while True:
                with lock:
                    number, prompt = next(left, (None, None))
                if prompt is None or number is None:
                    return
                if number % 4 == 1:  # somebody who leaves again
                    job = run.submit(prompt)
                    time.sleep(0.02 * dice.random())
                    run.scheduler.cancel(job)
                found[number] = run.finish(run.submit(prompt))

        threads = [threading.Thread(target=ask) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert drain(run.scheduler, 10)
        assert engine.num_reused_tokens > least
        run.scheduler.stop()
    assert found == expected


@dataclasses.dataclass(frozen=True)
class Plan:
    """How many tokens of prompts a pass reads, of so many, next to what else."""

    decoder: object
    size: int
    left: int
    options: dict[str, Any]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """What readers of prompts plan."""
    found: list[Plan] = []
    plan = PromptReader.plan

    def note(reader: PromptReader, *arguments: Any, **options: Any) -> Any:
        left, chunk = reader.num_unread, plan(reader, *arguments, **options)
        found.append(Plan(reader._decoder, sum(chunk.counts), left, options))
        return chunk

    monkeypatch.setattr(PromptReader, "plan", note)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "options", "own"),
    [
        ("float32", {}, 2),
        ("engine", {}, 5),
        ("engine", {"draft_len": "auto"}, 5),
        ("pair", {"draft_len": 3}, 2),
        ("pair", {"draft_tree_tokens": 3}, 4),
    ],
)
def test_a_long_prompt_makes_others_wait_for_one_chunk_a_step(
    folder: Path, plans: list[Plan], name: str, options: dict[str, Any], own: int
) -> None:
    """The stated bound: one pass of so many prompt tokens per step, four times that of a drafter.

    own: tokens of each request that a drafter may read besides.
    """
    draft = {"draft": folder / "draft"} if name == "pair" else {}
    with load(folder, name, **draft, **options) as engine:
        first = engine.stream([5, 6, 7], max_output_len=60, end_ids=())
        next(first)
        prompt = list(range(3, 123))
        second = engine.stream(prompt, max_output_len=4, end_ids=())
        num_steps, got = 0, None
        while got is None:
            plans.clear()
            engine.step()
            num_steps += 1
            assert first.take() is not None, "the other goes on at every step"
            got = second.take()
            assert engine._batch is not None
            for decoder in {plan.decoder for plan in plans}:
                sizes = [p.size for p in plans if p.decoder is decoder and p.size > own]
                is_target = decoder is engine._batch.decoder
                assert sum(sizes) <= (CHUNK if is_target else DRAFTER_SHARE * CHUNK + 2 * own)
        assert num_steps == -(-len(prompt) // CHUNK)
        tokens = [*got.token_ids, *(t for event in second for t in event.token_ids)]
        for _ in first:
            pass
        (alone,) = engine.generate([prompt], max_output_len=4, end_ids=())
        assert tokens == alone.token_ids


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "limit"), [("pair", 4), ("engine", 8)])
def test_drafters_keep_up_with_prompts_that_never_end(folder: Path, name: str, limit: int) -> None:
    """While the target reads a chunk at each step, everybody is soon drafted for."""
    options: dict[str, Any] = {"draft_budget": "fixed"}
    if name == "pair":
        options |= {"draft": folder / "draft", "draft_len": 3}
    dice = random.Random(3)
    with load(folder, name, **options) as engine:
        streams: list[Stream] = []
        waited: list[int] = []  # of each stream, steps after its first token without a draft
        num_ended = 0
        for _ in range(80):
            while len(streams) < limit:
                prompt = [dice.randrange(3, 128) for _ in range(40)]
                streams.append(engine.stream(prompt, max_output_len=30, end_ids=()))
                waited.append(0)
            engine.step()
            for at, stream in enumerate(streams, num_ended):
                if stream.take() is not None and not stream.stats.num_draft_tokens:
                    waited[at] += 1
            assert max(waited) <= 3
            while streams and streams[0].output.finish_reason is not None:
                del streams[0]
                num_ended += 1
        assert num_ended > 3


def test_with_auto_more_requests_read_more_of_prompts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, plans: list[Plan]
) -> None:
    """Their own tokens count among those of the step, which cost more than others do."""
    monkeypatch.setattr(engine_module, "find_costs", lambda *given: make_costs(len(given[3]), DEAR))
    with Engine.load(folder / "float32", device="cpu", prompt_chunk="auto") as engine:
        streams = [engine.stream([5, 6], max_output_len=60, end_ids=())]
        next(streams[0])
        for number, wanted in ((1, LEAST_CHUNK - 1), (6, CHUNK_SHARE * 8 - 1)):
            prompts = [[n + 9] * 200 for n in range(number)]
            streams += [engine.stream(ids, max_output_len=2, end_ids=()) for ids in prompts]
            plans.clear()
            engine.step()
            assert [plan.size for plan in plans] == [wanted]
        with pytest.raises(UsageError, match="prompt_chunk is 0"):
            Engine.load(folder / "float32", device="cpu", prompt_chunk=0)


@pytest.mark.parametrize("name", [pytest.param("float32", marks=needs_compiler), "draft"])
def test_with_auto_a_step_is_bounded_by_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Under a clock by which every token takes a second, and a pass four at least.

    Prompts share the passes of the first engine, and have their own in the second.
    """
    now = 0.0
    forward = Decoder.forward

    def take_time(decoder: Decoder, step: Step, *arguments: Any) -> Any:
        nonlocal now
        now += max(4, step.tokens.size)
        return forward(decoder, step, *arguments)

    def take(tokens: int) -> float:
        return float(max(4, tokens))

    monkeypatch.setattr(Decoder, "forward", take_time)
    monkeypatch.setattr(engine_module, "find_costs", lambda *_: make_costs(0, take, prompts=take))
    prompts = [[n + 9, *range(3, 113)] for n in range(2)]
    options: dict[str, Any] = {"device": "cpu", "speculation": False, "prompt_chunk": "auto"}
    with Engine.load(folder / name, **options) as engine:
        running = [engine.stream([n, 6], max_output_len=90, end_ids=()) for n in (5, 7)]
        for _ in range(4):
            engine.step()
        waiting = [engine.stream(prompt, max_output_len=3, end_ids=()) for prompt in prompts]
        steps = []
        while not all(stream.stats.num_output_tokens for stream in waiting):
            before = now
            engine.step()
            steps.append(now - before)
        assert all(stream.take() is not None for stream in running)
        assert max(steps) <= 1.4 * MOST_TIMES * 4, "with padding"
        assert len(steps) <= 11, "and they are not much shorter"
        for stream in (*running, *waiting):
            for _ in stream:
                pass
        found = [stream.output.token_ids for stream in waiting]
        alone = engine.generate(prompts, max_output_len=3, end_ids=())
        assert found == [output.token_ids for output in alone]


@needs_compiler
def test_with_auto_prompts_and_drafts_share_the_tokens_of_a_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, plans: list[Plan]
) -> None:
    """The bound of a step: prompts go first, and drafts take what these leave."""
    monkeypatch.setattr(engine_module, "find_costs", lambda *given: make_costs(len(given[3]), DEAR))
    options: dict[str, Any] = {"draft": folder / "draft", "draft_len": 3, "prompt_chunk": "auto"}
    options["draft_budget"] = "fixed"
    with Engine.load(folder / "native pair", device="cpu", **options) as engine:
        first = engine.stream([5, 6, 7], max_output_len=60, end_ids=())
        while not first.stats.num_draft_tokens:
            engine.step()
        second = engine.stream(list(range(3, 103)), max_output_len=9, end_ids=())
        got = None
        while got is None:
            engine.step()
            got = second.take()
        shared = [plan for plan in plans if plan.options.get("num_others")]
        sizes = [plan.options["min_size"] for plan in shared]  # tokens of the other request
        assert [plan.size + n for plan, n in zip(shared, sizes, strict=True)] == [LEAST_CHUNK, 41]
        assert (sizes, [plan.left for plan in shared]) == ([1, 4], [100, 37])
        tokens = [*got.token_ids, *(t for event in second for t in event.token_ids)]
        for _ in first:
            pass
        (alone,) = engine.generate([list(range(3, 103))], max_output_len=9, end_ids=())
        assert tokens == alone.token_ids


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps that decoders run."""
    found: list[Step] = []
    forward = Decoder.forward

    def note(decoder: Decoder, step: Step, *arguments: Any) -> Any:
        found.append(step)
        return forward(decoder, step, *arguments)

    monkeypatch.setattr(Decoder, "forward", note)
    return found


@needs_compiler
def test_prompts_share_the_passes_of_steps(folder: Path, passes: list[Step]) -> None:
    """The weights are read once a step, for who decodes and for the tokens of several prompts."""
    with load(folder, "bfloat16") as engine:
        first = engine.stream([5, 6, 7], max_output_len=60, end_ids=())
        next(first)
        prompts = [list(range(start, start + 7)) for start in (20, 40, 60)]
        others = [engine.stream(prompt, max_output_len=6, end_ids=()) for prompt in prompts]
        passes.clear()
        engine.step()
        assert len(passes) == 1
        rows = passes[0].rows.tolist()
        assert len(set(rows)) == 4
        assert sorted(set(rows[1:])) == [1, 2, 3]
        assert [other.take() is not None for other in others] == [True, True, False]
        engine.step()
        assert len(passes) == 2
        while any(other.stats.num_output_tokens < 6 for other in others):
            engine.step()
        tokens = [other.output.token_ids for other in others]
        for _ in first:
            pass
        alone = engine.generate(prompts, max_output_len=6, end_ids=())
        assert tokens == [output.token_ids for output in alone]


def test_the_first_token_comes_before_anything_is_drafted(folder: Path, passes: list[Step]) -> None:
    """A draft model reads the prompt when the client has its first token."""
    with load(folder, "pair", draft=folder / "draft", draft_len=3) as engine:
        stream = engine.stream(list(range(3, 43)), max_output_len=9, end_ids=())
        engine.step()
        event = stream.take()
        assert event is not None
        assert len(event.token_ids) == 1
        assert len(passes) == 1
        stream.close()


def test_a_draft_models_context_limits_only_requests_with_drafts(folder: Path) -> None:
    with load(folder, "pair", speculation=False) as alone:
        prompts = [Prompt(token_ids=range(3, 60 + n), max_output_len=9, end_ids=()) for n in (0, 6)]
        expected = [output.token_ids for output in alone.generate(prompts)]
        text = alone.generate(list(range(3, 60)), max_output_len=30, end_ids=())[0].token_ids
    pair = {"draft": folder / "short draft", "draft_len": 3, "draft_budget": "fixed"}
    with load(folder, "pair", **pair) as engine:
        assert engine.max_seq_len == 70
        with pytest.raises(PromptError, match=r"has 63 tokens and .* max_seq_len is 70"):
            engine.prepare(prompts[1])
        plain = dataclasses.replace(prompts[1], speculation=False)
        outputs = engine.generate([prompts[0], plain, prompts[0]])
        assert [output.token_ids for output in outputs] == [*expected, expected[0]]
        assert outputs[0].stats.num_draft_tokens > 0 == outputs[1].stats.num_draft_tokens
        room = engine.prepare(dataclasses.replace(plain, max_output_len=None), max_output_len=None)
        longest = read_engine_config(folder / "pair").build.max_seq_len
        assert len(room.input_ids) + room.max_output_len == longest > 70
        long = dataclasses.replace(prompts[0], speculation=False, max_output_len=30)
        streams = [engine.stream(one) for one in (long, prompts[0], plain)]
        while any(stream.output.finish_reason is None for stream in streams):
            engine.step()
        assert [s.output.token_ids for s in streams] == [text, *expected]


def test_a_cancelled_request_frees_its_row_within_a_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [run.prepare([9, n + 3], max_output_len=200) for n in range(8)]
    late = run.prepare([4, 4], max_output_len=3)
    step, has_begun = Batch.step, list[bool]()

    def cancel_after_the_fifth(batch: Batch) -> None:
        step(batch)
        has_begun.append(late.row_time is not None)
        if len(has_begun) == 5:
            run.scheduler.cancel(jobs[3])

    monkeypatch.setattr(Batch, "step", cancel_after_the_fifth)
    run.scheduler.submit([*jobs, late])
    assert run.finish(late)[2] == "length"
    assert has_begun[:6] == [False] * 5 + [True]
    run.scheduler.cancel(late)  # over already: nothing to do
    for job in jobs:
        run.scheduler.cancel(job)
    assert drain(run.scheduler, 10)
    assert run.scheduler.num_running == 0


def test_a_failing_step_fails_its_requests_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    step, is_broken = Batch.step, threading.Event()

    def break_once(batch: Batch) -> None:
        if is_broken.is_set():
            is_broken.clear()
            raise ValueError("out of order")
        step(batch)

    monkeypatch.setattr(Batch, "step", break_once)
    expected = run.finish(run.submit([5, 9], max_output_len=6))
    jobs = [run.submit([5, n + 3], max_output_len=200) for n in range(8)]
    late = run.submit([5, 9], max_output_len=6)
    wait_until(lambda: all(job.last_token_time for job in jobs))
    is_broken.set()
    for job in jobs:
        wait_until(functools.partial(getattr, job, "is_over"))
        with pytest.raises(ValueError, match="out of order"):
            job.take()
    assert run.finish(late) == expected, "one that waited is served by the next batch"
    assert run.scheduler.is_ready


def test_a_lost_engine_ends_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[SpecDecError] = []
    with load(folder) as engine:
        run = Run(engine, on_lost=told.append)
        job = run.submit([5, 9], max_output_len=200)
        wait_until(lambda: job.last_token_time is not None)
        monkeypatch.setattr(type(engine), "is_lost", True)

        def lose(batch: Batch) -> None:
            raise SpecDecError("rank 1 of 2 ended with status 1", "run it again")

        monkeypatch.setattr(Batch, "step", lose)
        wait_until(lambda: job.is_over)
        with pytest.raises(SpecDecError, match="rank 1 of 2"):
            job.take()
        with pytest.raises(SpecDecError, match="rank 1 of 2"):
            run.submit([5])
        assert not run.scheduler.is_ready
        run.scheduler.stop()
    assert [error.message for error in told] == ["rank 1 of 2 ended with status 1"]


def test_the_queue_has_a_bound_and_closes(folder: Path) -> None:
    with load(folder) as engine:
        run = Run(engine, max_queue=2)
        jobs = [run.submit([9, n + 3], max_output_len=200) for n in range(10)]
        with pytest.raises(BadRequest, match="requests wait already") as full:
            run.submit([5])
        assert full.value.status == 429
        assert int((full.value.headers or {})["Retry-After"]) >= 1
        for job in jobs:
            run.scheduler.cancel(job)
        assert run.finish(run.submit([5], max_output_len=2))[2] == "length"
        assert drain(run.scheduler, 10)
        with pytest.raises(BadRequest, match="about to end"):
            run.submit([5])
        run.scheduler.stop()
