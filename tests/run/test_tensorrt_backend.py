"""Calls of TensorRT-LLM's runtime by specdec-run, alone: who shares one, and what it brings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.decode.loop import Interrupted, Options
from specdec.decode.requests import ActiveRequest, Request
from specdec.decode.sampling import SamplingParams
from specdec.errors import SpecDecError, UsageError
from specdec.run.backends import tensorrt_llm
from specdec.run.backends.tensorrt_call import Call, fill_results, group_requests
from specdec.run.backends.tensorrt_llm import TensorRTLLMEngine
from specdec.run.settings import RunSettings
from specdec.trtllm.runner import RowOutput


def make_request(index: int, limit: int = 4, heat: float = 0.0, end: int = 2) -> Request:
    return Request(
        index=index, input_ids=[index + 1], max_output_len=limit, end_ids=frozenset({end}),
        sampling=SamplingParams(temperature=heat),
    )  # fmt: skip


def list_groups(requests: list[Request], size: int, *, is_external: bool = False) -> Any:
    groups = list(group_requests(requests, is_external, size))
    assert sorted(index for group in groups for index in group) == [*range(len(requests))]
    return sorted(groups)


def test_requests_of_one_setting_share_a_call() -> None:
    requests = [
        make_request(0), make_request(1, limit=5), make_request(2), make_request(3, heat=0.5),
        make_request(4, end=3), make_request(5), make_request(6, heat=0.5),
    ]  # fmt: skip
    assert list_groups(requests, 8) == [[0, 2, 5], [1], [3, 6], [4]]
    assert list_groups(requests, 2) == [[0, 2], [1], [3, 6], [4], [5]]
    # With drafts of another engine the loop is ours: lengths and the size of a batch are too.
    assert list_groups(requests, 2, is_external=True) == [[0, 1, 2, 5], [3, 6], [4]]
    odd = [make_request(0), make_request(1, heat=0.0)]
    odd[1] = Request(**{**vars_of(odd[1]), "sampling": SamplingParams(top_k=1, seed=7)})
    assert list_groups(odd, 8) == [[0, 1]], "greedy is greedy"


def vars_of(request: Request) -> dict[str, Any]:
    names = ("index", "input_ids", "max_output_len", "end_ids", "sampling")
    return {name: getattr(request, name) for name in names}


def test_results_in_the_order_of_the_requests() -> None:
    requests = [make_request(n) for n in range(3)]
    ended = ActiveRequest(requests[1], 0, max_depth=0, text_stream=None)
    results = fill_results(requests, {1: ended})
    assert results[1] is ended
    assert [r.request.index for r in results] == [0, 1, 2]
    assert results[0].output_ids == []


class Runner:
    """A runtime that writes given rows, at once or in two steps."""

    def __init__(self, rows: list[list[int]], logits: Any = None) -> None:
        self.rows, self.logits, self.asked = rows, logits, list[Any]()

    def generate(self, texts: Any, *, keep_logits: bool, **arguments: Any) -> list[RowOutput]:
        self.asked.append((texts, keep_logits, arguments))
        return [RowOutput(row, self.logits) for row in self.rows]

    def stream(self, texts: Any, **arguments: Any) -> Any:
        self.asked.append((texts, arguments))
        yield [row[:1] for row in self.rows]
        yield self.rows

    def list_iterations(self, count: int) -> list[int]:
        return [9] * count

    def widen(self, logits: Any) -> Any:
        return logits.float()


FOLDER: Any = SimpleNamespace(mode=None, max_draft_len=0)


def test_a_call_runs_to_the_end() -> None:
    """The first reaches its limit, the second ends at its end token, which is not returned."""
    runner: Any = Runner([[5, 6, 7, 8], [9]])
    call = Call(runner, FOLDER, [make_request(0), make_request(1)], Options())
    first, second = call.run()
    assert (first.output_ids, first.finish_reason) == ([5, 6, 7, 8], "length")
    assert second.output_ids == [9, 2]
    ((texts, keep_logits, arguments),) = runner.asked
    assert (texts, keep_logits) == ([[1], [2]], False)
    assert arguments == {
        "max_new_tokens": 4, "sampling": SamplingParams(), "seed": 0, "end_id": 2,
        "stop_ids": [[], []],
    }  # fmt: skip


def test_a_call_reports_what_comes() -> None:
    reported: list[Any] = []

    def note(active: Any) -> None:
        reported.append([(a.request.index, list(a.output_ids)) for a in active])

    runner: Any = Runner([[5, 6, 7, 8], [9]])
    options = Options(on_progress=note, follow_text=True)
    first, second = Call(runner, FOLDER, [make_request(0), make_request(1)], options).stream()
    assert reported == [[(0, [5]), (1, [9])], [(0, [5, 6, 7, 8])], [(1, [9, 2])]]
    assert first.stats.num_verify_steps == 3


def test_logits_are_those_of_the_tokens() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([5, 6, 7, 8, 0]), 10).half()
    runner: Any = Runner([[5, 6, 7, 8]], logits)
    (active,) = Call(runner, FOLDER, [make_request(0)], Options(keep_logits=True)).run()
    assert active.kept_logits[0].argmax(-1).tolist() == [5, 6, 7, 8]
    assert runner.asked[0][1] is True
    for wrong in (logits.roll(1, 0), logits[:3]):
        runner = Runner([[5, 6, 7, 8]], wrong)
        with pytest.raises(SpecDecError, match="logits of prompt 0 do not belong to its 4 tokens"):
            Call(runner, FOLDER, [make_request(0)], Options(keep_logits=True)).run()


# ---- The engine.


def make_engine(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Any:
    """An engine without its folder's checks, which runs each group by `run_group`."""
    values = {
        "mode": None, "dtype": "float16", "tp_size": 2, "max_batch_size": 2, "method": "plain",
        "world_size": 2,
    }  # fmt: skip
    engine: Any = TensorRTLLMEngine.__new__(TensorRTLLMEngine)
    engine.folder, engine.draft = SimpleNamespace(**values | fields), None
    engine._settings, engine._options, engine._tokenizer = RunSettings(), None, None
    engine._lookup = engine._drafter = None
    engine._runner = object()
    engine.timing = SimpleNamespace(list_seconds=lambda: {"draft": 1.5})
    monkeypatch.setattr(tensorrt_llm, "check_requests", lambda *given: None)
    return engine


def test_what_an_engine_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch)
    assert engine.describe() == {
        "method": "plain", "backend": "tensorrt-llm", "device": "cuda", "dtype": "float16",
        "tp_size": 2,
    }  # fmt: skip
    assert engine.describe_profile() == {"draft": None}
    assert (engine.tells_origins, engine.counts_drafts) == (True, False)
    external = make_engine(monkeypatch, mode=tensorrt_llm.EXTERNAL)
    assert external.describe_profile() == {"draft": 1.5}
    assert external.tells_origins
    external._lookup = SimpleNamespace()
    assert external.method == "prompt_lookup"
    external.draft = SimpleNamespace()
    assert external.method == "draft_target"
    assert not make_engine(monkeypatch, mode="medusa").tells_origins


def test_groups_run_one_after_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(monkeypatch)
    ran: list[Any] = []

    def run_group(requests: Any, options: Options) -> Any:
        ran.append(([r.index for r in requests], options.max_batch_size))
        results = [ActiveRequest(r, 0, max_depth=0, text_stream=None) for r in requests]
        if len(ran) == 3:
            raise Interrupted(results)
        return results

    engine._run = run_group
    requests = [make_request(n) for n in range(3)]
    with caplog.at_level("INFO"):
        results = engine.run(requests)
    assert [r.request.index for r in results] == [0, 1, 2]
    assert ran == [([0, 1], 2), ([2], 2)]
    assert "3 prompts in 2 calls: one has room for 2" in caplog.text
    engine.draft = SimpleNamespace(max_batch_size=1)
    with pytest.raises(Interrupted) as caught:
        engine.run(requests)
    assert [r.request.index for r in caught.value.results] == [0, 1, 2]
    assert ran[2] == ([0], 1)


def test_settings_that_only_engines_of_torch_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--draft-budget.* is for engines of torch"):
        tensorrt_llm.open_engine(RunSettings(draft_budget="auto"), None, None)
    folder = SimpleNamespace(world_size=2)
    monkeypatch.setattr(tensorrt_llm, "read_engine_folder", lambda path: folder)
    for field, flag in (("has_own_tokens", "--draft-vocabulary shared"),
                        ("tree_tokens", "--draft-tree-tokens")):  # fmt: skip
        values = {"engine_dir": "d", "has_own_tokens": False, "tree_tokens": None, field: 3}
        with pytest.raises(UsageError, match=f"{flag} is for engines of torch"):
            TensorRTLLMEngine(RunSettings(), SimpleNamespace(**values))


def test_a_world_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch)
    engine._runner = None
    monkeypatch.setattr(tensorrt_llm, "import_runtime", lambda: None)
    monkeypatch.setattr(tensorrt_llm, "find_rank", lambda: (0, 3))
    with pytest.raises(SpecDecError, match="MPI has 3 processes, the engine has 2 ranks") as caught:
        engine.load()
    assert caught.value.hint == "start it with mpirun -n 2, or without mpirun"
