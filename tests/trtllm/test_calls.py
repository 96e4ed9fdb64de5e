"""Calls of TensorRT-LLM's runtime on doubles: groups, followed requests, logits, the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.decode.loop import Interrupted, Options
from specdec.decode.requests import Request
from specdec.decode.sampling import SamplingParams
from specdec.errors import SpecDecError, UsageError
from specdec.run.backends import embedded, tensorrt_llm
from specdec.run.backends.base import OpenedEngine
from specdec.run.backends.tensorrt_call import Call, fill_results, group_requests
from specdec.run.backends.tensorrt_llm import TensorRTLLMEngine
from specdec.run.settings import RunSettings
from specdec.trtllm.engine_folder import EXTERNAL
from specdec.trtllm.followed import UNTOLD, UNTOLD_STEPS, Followed
from specdec.trtllm.runner import NO_END, RowOutput

PLAIN: Any = SimpleNamespace(mode=None, max_draft_len=0, max_batch_size=2, world_size=1)
DRAFTING: Any = SimpleNamespace(mode="medusa", max_draft_len=3, max_batch_size=2, world_size=1)
HOT = SamplingParams(temperature=1.0, seed=5)


class Letters:
    """A tokenizer whose tokens are letters: 0 is a."""

    all_special_ids: tuple[int, ...] = ()

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 97 for letter in text]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(97 + token) for token in ids)


def make_request(index: int = 0, ids: Sequence[int] = (1,), **changes: Any) -> Request:
    values: dict[str, Any] = {"max_output_len": 4, "end_ids": frozenset({9})}
    return Request(index=index, input_ids=list(ids), **values | changes)


# tensorrt_call.py


def test_a_call_has_one_setting_and_one_length() -> None:
    """Greedy requests are alike whatever their seed; a call holds a batch at most."""
    requests = [
        make_request(0), make_request(1, sampling=HOT),
        make_request(2, sampling=SamplingParams(seed=7)),
        make_request(3, max_output_len=5), make_request(4), make_request(5, end_ids=frozenset({8})),
    ]  # fmt: skip
    groups = sorted(group_requests(requests, False, 2))
    assert groups == [[0, 2], [1], [3], [4], [5]]
    assert sorted(group_requests(requests, True, 2)) == [[0, 2, 3, 4], [1], [5]]


def test_results_of_requests_that_never_ran() -> None:
    requests = [make_request(0), make_request(1)]
    ran: Any = SimpleNamespace(output_ids=[3])
    results = fill_results(requests, {1: ran})
    assert results[1] is ran
    assert (results[0].request, results[0].output_ids) == (requests[0], [])


class FakeRunner:
    """A runner that returns what it was made with, and notes what it was asked."""

    def __init__(self, *outputs: RowOutput, steps: Sequence[Any] = ()) -> None:
        self.outputs, self.steps = list(outputs), steps
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def generate(self, texts: Any, **arguments: Any) -> list[RowOutput]:
        self.calls.append((texts, arguments))
        return self.outputs[: len(texts)]

    def stream(self, texts: Any, **arguments: Any) -> Iterator[Any]:
        self.calls.append((texts, arguments))
        yield from self.steps

    def list_iterations(self, num_rows: int) -> list[int | None]:
        return [None] * num_rows

    def widen(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.float()


def make_logits(*tokens: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), 10).half()


def test_a_call_runs_to_the_end() -> None:
    """One request reaches its limit, one ends at its end token, which the runtime leaves out."""
    runner: Any = FakeRunner(
        RowOutput([4, 5, 6, 7], make_logits(4, 5, 6, 7, 0)),
        RowOutput([4, 5], make_logits(4, 5, 9)),
    )  # fmt: skip
    reports: list[list[int]] = []
    options = Options(
        keep_logits=True, on_progress=lambda moved: reports.append([a.request.index for a in moved])
    )
    requests = [make_request(0, ids=[1, 2]), make_request(1, ids=[3])]
    results = Call(runner, PLAIN, requests, options).run()
    assert [result.output_ids for result in results] == [[4, 5, 6, 7], [4, 5, 9]]
    assert [result.finish_reason for result in results] == ["length", "eos"]
    assert [len(result.kept_logits[0]) for result in results] == [4, 3]
    assert reports == [[0, 1]], "all of them, where no text is followed"
    ((texts, arguments),) = runner.calls
    assert texts == [[1, 2], [3]]
    assert (arguments["max_new_tokens"], arguments["end_id"]) == (4, 9)
    assert arguments["keep_logits"]


def test_logits_of_other_tokens_are_refused() -> None:
    """The best of each row must be the token of a greedy request; of a sampled one it need not."""
    wrong = RowOutput([4, 5, 6, 7], make_logits(4, 5, 6, 8))
    with pytest.raises(SpecDecError, match="generation logits of prompt 3 do not belong to its 4"):
        Call(FakeRunner(wrong), PLAIN, [make_request(3)], Options()).run()
    runner: Any = FakeRunner(wrong)
    Call(runner, PLAIN, [make_request(sampling=HOT)], Options()).run()
    assert runner.calls[0][1]["seed"] == 5
    short = RowOutput([4, 5, 6, 7], make_logits(4, 5, 6))
    with pytest.raises(SpecDecError, match="do not belong to its 4 tokens"):
        Call(FakeRunner(short), PLAIN, [make_request(sampling=HOT)], Options()).run()


def test_a_stream_reports_what_moves() -> None:
    steps = [[[4], []], [[4], [5]], [[4], [5, 6]], [[4], [5, 6, 7, 8]]]
    reports: list[list[int]] = []
    options = Options(
        follow_text=True, tokenizer=Letters(),
        on_progress=lambda moved: reports.append([a.request.index for a in moved]),
    )  # fmt: skip
    requests = [make_request(0), make_request(1)]
    results = Call(FakeRunner(steps=steps), PLAIN, requests, options).stream()
    assert [result.output_ids for result in results] == [[4, 9], [5, 6, 7, 8]]
    assert reports == [[0], [1], [1], [1], [0]], "the last: which the runtime ended early"


# followed.py


def follow(folder: Any = PLAIN, **changes: Any) -> Followed:
    return Followed(make_request(**changes), 0, folder, Letters(), follows_text=False)


def test_tokens_are_emitted_once() -> None:
    followed = follow()
    assert not followed.take([])
    assert followed.take([4, 5])
    assert not followed.take([4, 5])
    assert followed.take([4, 5, 6])
    assert followed.active.output_ids == [4, 5, 6]
    assert followed.take([4, 5, 6, 7])
    assert followed.active.finish_reason == "length"
    assert not followed.take([4, 5, 6, 7, 8])
    assert followed.active.output_ids == [4, 5, 6, 7]


def test_sequences_that_end_early() -> None:
    """The smallest end token is the runtime's; others, and stop words, are sequences."""
    followed = follow(end_ids=frozenset({7, 2, 9}), stop=("ab",))
    assert followed.end_id == 2
    assert followed.stop_ids == [[7], [9], [0, 1]]
    assert follow(end_ids=frozenset()).end_id == NO_END
    assert followed.take([5, 0, 1])
    assert followed.active.finish_reason == "stop"
    assert not followed.end([5, 0, 1], None), "the text had ended it"


def test_a_request_that_ends_early() -> None:
    stopped = follow(end_ids=frozenset({2, 7}))
    stopped.take([4])
    assert stopped.end([4, 7], None)
    assert stopped.active.finish_reason == "stop"
    endless = follow(end_ids=frozenset(), index=2)
    endless.take([4])
    with pytest.raises(SpecDecError, match="after 1 of 4 tokens, without an end token or a stop"):
        endless.end([4], None)


@pytest.mark.parametrize(
    ("num_tokens", "num_iterations", "num_steps"),
    [(5, 3, 2), (5, 2, 1), (5, 5, 4), (5, 6, None), (5, 1, None), (5, None, None), (6, 3, None)],
)
def test_steps_are_counted_where_they_can_be(
    num_tokens: int, num_iterations: int | None, num_steps: int | None
) -> None:
    """5 tokens: the prompt's and 4, of 1 to 4 steps of at most 4; else the count is not known."""
    followed, tokens = follow(DRAFTING, max_output_len=5), [4] * num_tokens
    followed.take(tokens)
    assert not followed.end(tokens, num_iterations)
    stats = followed.active.stats
    assert set(UNTOLD) <= set(stats.unknown_keys)
    assert (set(UNTOLD_STEPS) <= set(stats.unknown_keys)) == (num_steps is None)
    if num_steps is not None:
        assert stats.num_verify_steps == num_steps
    assert followed.active.origins == []


def test_steps_of_a_plain_engine() -> None:
    followed = follow()
    followed.take([4, 5, 6, 7])
    followed.end([4, 5, 6, 7], None)
    assert followed.active.stats.num_verify_steps == 3
    assert not set(UNTOLD) & set(followed.active.stats.unknown_keys)
    assert len(followed.active.origins) == 4


# tensorrt_llm.py, embedded.py, base.py


def make_engine(runner: Any, folder: Any = PLAIN) -> TensorRTLLMEngine:
    """An engine that is loaded, without its checks of a machine."""
    engine = TensorRTLLMEngine.__new__(TensorRTLLMEngine)
    values: dict[str, Any] = {
        "folder": folder, "draft": None, "_runner": runner, "_drafter": None, "_lookup": None,
        "_tokenizer": Letters(), "check_requests": lambda requests: None,
    }  # fmt: skip
    for name, value in values.items():
        setattr(engine, name, value)
    return engine


def test_requests_run_in_groups_and_return_in_order() -> None:
    runner = FakeRunner(RowOutput([4, 5, 6, 7]), RowOutput([5, 5, 5, 5]))
    requests = [make_request(n, ids=[n]) for n in range(3)]
    requests.insert(1, make_request(9, ids=[9], max_output_len=2))
    results = make_engine(runner).run(requests)
    assert [result.request.index for result in results] == [0, 9, 1, 2]
    assert [texts for texts, _ in runner.calls] == [[[9]], [[0], [1]], [[2]]]
    assert [result.output_ids for result in results] == [
        [4, 5, 6, 7], [4, 5], [5, 5, 5, 5], [4, 5, 6, 7],
    ]  # fmt: skip


def test_an_interrupted_run_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of the calls before; and Ctrl-C is told to the caller as `Interrupted`."""
    runner = FakeRunner(RowOutput([4, 5, 6, 7]))
    generate = runner.generate

    def interrupt(texts: Any, **arguments: Any) -> Any:
        if runner.calls:
            raise KeyboardInterrupt
        return generate(texts, **arguments)

    monkeypatch.setattr(runner, "generate", interrupt)
    requests = [make_request(0, max_output_len=5), make_request(1)]
    with pytest.raises(Interrupted) as caught:
        make_engine(runner).run(requests)
    assert [result.output_ids for result in caught.value.results] == [[], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("mode", "lookup", "draft", "method", "tells"),
    [
        (None, None, None, "plain", True), ("medusa", None, None, "medusa", False),
        (EXTERNAL, 1, None, "prompt_lookup", True), (EXTERNAL, None, 1, "draft_target", True),
    ],
)  # fmt: skip
def test_what_an_engine_says_of_itself(
    mode: str | None, lookup: Any, draft: Any, method: str, tells: bool
) -> None:
    folder = SimpleNamespace(mode=mode, method=mode or "plain", dtype="float16", tp_size=2)
    engine = make_engine(None, folder)
    engine._lookup, engine.draft = lookup, draft
    engine.timing = SimpleNamespace(list_seconds=lambda: {"verify": 2.0})
    assert engine.method == method
    assert engine.tells_origins is tells
    assert engine.describe() == {
        "method": method, "backend": "tensorrt-llm", "device": "cuda", "dtype": "float16",
        "tp_size": 2,
    }  # fmt: skip
    assert engine.describe_profile() == {"verify": 2.0 if mode == EXTERNAL else None}


def make_settings(**changes: Any) -> RunSettings:
    return RunSettings(**{"engine_dir": Path("engine"), "input_text": ["a"], **changes})


@pytest.mark.parametrize(
    ("changes", "flag"), [({"draft_budget": "3"}, "--draft-budget"), ({"draft_len": "auto"}, "--")]
)
def test_drafts_that_adapt_are_for_torch(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag}.* without --draft-engine-dir is for engines of"):
        tensorrt_llm.open_engine(make_settings(**changes), None, None)


def test_engines_are_opened_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM's is its own core and loads when it is told."""
    made: list[tuple[Any, ...]] = []
    fake = SimpleNamespace(load=lambda: made.append(("loaded",)))

    def make(*arguments: Any) -> Any:
        made.append(arguments)
        return fake

    monkeypatch.setattr(tensorrt_llm, "TensorRTLLMEngine", make)
    settings = make_settings()
    opened = tensorrt_llm.open_engine(settings, None, "words")
    assert isinstance(opened, OpenedEngine)
    assert opened.runner is opened.core is fake
    opened.load([])
    assert made == [(settings, None, "words"), ("loaded",)]


def test_torch_s_engine_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    import specdec

    warnings: list[str] = []
    monkeypatch.setattr(embedded.logger, "warning", lambda text: warnings.append(text))
    begun: list[Any] = []
    engine = SimpleNamespace(core=SimpleNamespace(begin_drafts=begun.append))
    calls: list[tuple[Any, ...]] = []

    def open_here(*arguments: Any, measuring: str) -> Any:
        calls.append((*arguments, measuring))
        return engine

    monkeypatch.setattr(specdec, "Engine", SimpleNamespace(open=open_here))
    assert embedded.follow_ranks(make_settings()) is False
    for fraction in (None, 0.5):
        settings = make_settings(kv_cache_free_gpu_memory_fraction=fraction)
        opened = embedded.open_engine(settings, None, "words")
        assert opened.runner is engine
        assert opened.core is engine.core
        opened.load([make_request()])
        assert begun.pop() == [make_request()], "what drafting costs is measured for these"
        assert calls[-1] == (settings, "words", "late")
        assert len(warnings) == (fraction is not None)
