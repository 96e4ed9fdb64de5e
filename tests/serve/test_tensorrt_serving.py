"""Engines of TensorRT-LLM behind the same front: its executor's requests, on a double of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine, Prompt, SpecDecError
from specdec.serve.server import load
from specdec.serve.settings import ServeSettings
from specdec.trtllm.facts import LABELS, load_facts
from tests.engines import run_cli_here
from tests.serve.servers import CLIENT, post, read_events, serve_here
from tests.trtllm.runtime_double import EngineDouble, free_memory, get_engine
from tests.trtllm.worlds import EXTERNAL, WAYS, World, forget_runtime, make_checkpoint, make_world

LENGTH = 14
PROMPTS = [[3 + (7 * at * at + 5 * n) % 120 for at in range(n)] for n in (4, 17, 9, 30, 6)]


@pytest.fixture(scope="module", params=LABELS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    yield from make_world(tmp_path_factory.mktemp("world"), request.param)


@pytest.fixture(scope="module")
def texts(world: World) -> list[str]:
    """What the target writes behind the prompts, by the torch engine."""
    folder = world.torch_engine("plain", world.checkpoint("plain"))
    prompts = [Prompt(token_ids=ids, temperature=0, end_ids=()) for ids in PROMPTS]
    with Engine.load(folder, device="cpu", tokenizer=world.target) as engine:
        return [output.text for output in engine.generate(prompts, max_output_len=LENGTH)]


def make_served(world: World, method: str) -> Path:
    return world.engine(f"{method}1", make_checkpoint(world, method), *WAYS[method].flags)


def serve(world: World, folder: Path, **settings: Any) -> Any:
    world.log.unlink(missing_ok=True)
    free_memory()
    get_engine(EngineDouble(folder, {}, load_facts(world.label)))  # what has to be built is built
    options: dict[str, Any] = {
        "device": "auto", "tokenizer_dir": str(world.target), "prompt_chunk": None,
    }  # fmt: skip
    return serve_here(folder, **(options | settings))


@pytest.mark.parametrize("method", ["plain", "redrafter", "medusa", "eagle", "lookahead"])
def test_texts_are_the_targets_own(world: World, texts: list[str], method: str) -> None:
    """More requests at once than the engine has rows, whole and as streams."""
    if world.label == "0.14" and method != "redrafter":
        return  # one of the older line, whose answers differ in what they tell, is enough
    body: dict[str, Any] = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    with serve(world, make_served(world, method)) as (_, url):
        whole = post(url, "/v1/completions", prompt=PROMPTS, **body)
        assert [choice["text"] for choice in whole["choices"]] == texts
        events = read_events(url, "/v1/completions", prompt=PROMPTS, **body)
        for index, text in enumerate(texts):
            own = [c for e in events for c in e["choices"] if c["index"] == index]
            assert "".join(choice["text"] for choice in own) == text
        assert whole["usage"]["completion_tokens"] == LENGTH * len(PROMPTS)
        stop = texts[1][5:7]
        end = texts[1].index(stop)
        cut = post(url, "/v1/completions", prompt=PROMPTS[1], stop=stop, **body)["choices"][0]
        assert (cut["text"], cut["finish_reason"]) == (texts[1][:end], "stop")
        model = CLIENT.get(f"{url}/v1/models").json()["data"][0]["specdec"]
        assert (model["backend"], model["method"]) == ("tensorrt-llm", method)
        # What the runtime does not tell is not told, and nothing is made up.
        told = whole["metrics"]["speculative_decoding"]
        asked = CLIENT.post(
            f"{url}/v1/completions", json={"prompt": PROMPTS[0], "return_origins": True, **body}
        )
        if method == "plain":
            assert told["num_draft_tokens"] == 0
            assert asked.status_code == 200
        else:
            assert told is None
            assert "completion_tokens_details" not in whole["usage"]
            assert asked.status_code == 400
            assert "does not tell how its tokens came" in asked.json()["error"]["message"]


def test_what_the_executor_is_not_asked_for_is_refused(world: World) -> None:
    with serve(world, make_served(world, "redrafter")) as (_, url):
        for given, param, message in (
            ({"presence_penalty": 1.0}, "presence_penalty", "a penalty, a bias, min_p or bans"),
            ({"logit_bias": {"3": 1}}, "logit_bias", "a penalty, a bias, min_p or bans"),
            ({"min_p": 0.1}, "min_p", "a penalty, a bias, min_p or bans"),
            ({"guided_regex": "a+"}, "guided_regex", "structured output"),
            ({"bad_words": ["a"]}, "bad_words", "a penalty, a bias, min_p or bans"),
            ({"allowed_token_ids": [3]}, "allowed_token_ids", "a penalty, a bias, min_p or bans"),
            ({"logprobs": 1}, "logprobs", "log-probabilities"),
            ({"speculation": False}, "speculation", "decoding without drafts"),
            ({"return_trees": True, "stream": True}, "return_trees", "draft trees"),
            ({"temperature": 0.5}, "temperature", "this engine always decodes greedily"),
            ({"max_tokens": 900}, "max_tokens", "asks for 900 more"),
        ):
            body = {"prompt": PROMPTS[0], "temperature": 0, **given}
            answer = CLIENT.post(f"{url}/v1/completions", json=body)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == param
            assert message in error["message"]


def test_who_leaves_is_cancelled_in_the_executor(world: World) -> None:
    """The request behind it gets the one row, for the executor has nothing more for the first."""
    with serve(world, make_served(world, "plain"), max_batch_size=1) as (server, url):
        core: Any = server.scheduler.engine._core
        await_responses, cancel = core.await_responses, core.cancel
        is_read, is_cancelled = threading.Event(), threading.Event()

        def wait() -> list[Any]:
            if is_read.wait(0.05) and not is_cancelled.wait(0.05):
                return []
            return await_responses()

        def note(number: int) -> None:
            is_cancelled.set()
            cancel(number)

        core.await_responses, core.cancel = wait, note
        body = {"prompt": PROMPTS[0], "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        with CLIENT.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as answer:
            next(answer.iter_lines())
            is_read.set()
        after = post(url, "/v1/completions", **(body | {"max_tokens": 3}))
        assert after["usage"]["completion_tokens"] == 3
    assert len(world.calls("cancel_request")) == 1
    assert len(world.calls("enqueue_request")) == 3


def test_an_error_of_the_executor_is_a_500_and_the_server_goes_on(world: World) -> None:
    with serve(world, make_served(world, "plain")) as (server, url):
        core: Any = server.scheduler.engine._core
        await_responses = core.await_responses

        def fail() -> list[Any]:
            core.await_responses = await_responses
            raise SpecDecError("TensorRT-LLM failed to generate: out of memory", "a hint")

        core.await_responses = fail
        body = {"prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0}
        answer = CLIENT.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 500
        assert "out of memory" in answer.json()["error"]["message"]
        post(url, "/v1/completions", **body)


def test_engines_that_are_not_served(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    external = world.engine("external", world.checkpoint("plain"), *EXTERNAL)
    plain = make_served(world, "plain")
    two = world.engine("plain2", make_checkpoint(world, "plain", 2), *WAYS["plain"].flags)

    def refuse(folder: Path, **settings: Any) -> str:
        free_memory()
        given = ServeSettings(engine_dir=folder, tokenizer_dir=str(world.target), **settings)
        with pytest.raises(SpecDecError) as caught:
            load(given).close()
        return caught.value.message

    assert "takes drafts from outside" in refuse(external)
    assert "takes drafts from outside" in refuse(plain, draft_engine_dir=plain)
    assert "takes drafts from outside" in refuse(plain, prompt_lookup_num_tokens=3)
    assert "--device cpu" in refuse(plain, device="cpu")
    assert "always speculates" in refuse(make_served(world, "redrafter"), no_speculation=True)
    assert "--prompt-chunk 64 has no effect" in refuse(plain, prompt_chunk=64)
    assert "--max-batch-size is 99, the engine's is 3" in refuse(plain, max_batch_size=99)
    if world.label == "0.14":
        assert "no orchestrator mode" in refuse(two)
    else:
        world.log.unlink(missing_ok=True)
        free_memory()
        load(ServeSettings(engine_dir=two, tokenizer_dir=str(world.target))).close()
        options = world.calls("from_dir")[0]["options"]
        assert options["is_orchestrator_mode"] is True
        assert options["device_ids"] == [0, 1]
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert "leads its ranks from a single one" in refuse(plain)


def test_without_tensorrt_llm_it_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_served(world, "plain")
    site = str(world.folder / "double" / "site")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != site])
    forget_runtime()
    done = run_cli_here("serve", "--engine-dir", engine, "--tokenizer-dir", world.target)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert lines[-2].startswith("error: ")
    assert "TensorRT-LLM" in lines[-2]
    assert "not installed" in lines[-2]
    assert lines[-1].startswith("hint: ")
