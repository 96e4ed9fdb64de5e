"""Convert, build and run of every mode, line and number of ranks, on the doubles.

What comes out is compared with the torch engine's text of the same target, which is that of every
method.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from specdec.errors import SpecDecError
from specdec.text.pretrained import load_tokenizer
from specdec.trtllm.facts import LABELS
from tests.conftest import read_error_lines, run_cli
from tests.trtllm.worlds import (
    PAGED,
    WAYS,
    World,
    install_mpirun,
    make_checkpoint,
    make_prompts,
    make_world,
)

REQUESTS = make_prompts(4, 17, max_output_len=14)


@pytest.fixture(scope="module", params=LABELS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    yield from make_world(tmp_path_factory.mktemp("world"), request.param)


def list_draft_settings(world: World, tp_size: int) -> dict[str, Any]:
    devices = ",".join(map(str, range(1, 1 + tp_size)))
    draft = world.engine("draft", world.draft(), *PAGED)
    return {
        "draft_engine_dir": draft, "draft_len": "4", "draft_devices": "0",
        "target_devices": devices,
    }  # fmt: skip


def list_texts(report: Any) -> list[Any]:
    return [(output["output_ids"], output["finish_reason"]) for output in report["outputs"]]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("method", ["plain", "draft_target"])
def test_the_targets_text_on_both_numbers_of_ranks(
    world: World, monkeypatch: pytest.MonkeyPatch, method: str, tp_size: int
) -> None:
    check_mode(world, monkeypatch, method, tp_size)


@pytest.mark.parametrize("method", [way for way in WAYS if way not in ("plain", "draft_target")])
def test_every_mode_writes_the_targets_text(
    world: World, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """On one rank by one line of TensorRT-LLM, on two by the other."""
    check_mode(world, monkeypatch, method, 1 + (world.label == LABELS[[*WAYS].index(method) % 2]))


def check_mode(
    world: World, monkeypatch: pytest.MonkeyPatch, method: str, tp_size: int
) -> None:  # fmt: skip
    if method == "eagle" and world.label == "0.14":
        with pytest.raises(SpecDecError, match="0.14"):
            world.eagle()
        return
    expected = world.run(world.torch_engine("plain", world.checkpoint("plain")), REQUESTS)
    checkpoint = make_checkpoint(world, method, tp_size)
    engine = world.engine(f"{method}{tp_size}", checkpoint, *WAYS[method].flags)
    settings: dict[str, Any] = {}
    if method == "draft_target":
        settings = list_draft_settings(world, tp_size)
    elif tp_size > 1:  # as the first rank of those that mpirun has started
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(tp_size))
    if method == "draft_target" and tp_size > 1 and world.label == "0.14":
        with pytest.raises(SpecDecError, match="no orchestrator mode"):
            world.run(engine, REQUESTS, None, **settings)
        return
    report = world.run(engine, REQUESTS, None, **settings)
    assert list_texts(report) == list_texts(expected)
    stats = report["stats"]
    assert (stats["method"], stats["tp_size"]) == (method, tp_size)
    is_told = world.label == "1.2" or method in ("plain", "draft_target")
    assert stats["acceptance_length"] >= 1 if is_told else stats["acceptance_length"] is None
    loaded = world.calls("from_dir")[0]["options"]
    assert ("multi_block_mode" in loaded) == (method in ("medusa", "eagle"))
    if method == "medusa":
        assert len(loaded["medusa_choices"]) == 6, "as many as the checkpoint has room for"


def check_streaming(world: World, printed: str, texts: list[Any]) -> None:
    """Pieces of text are all that standard output has."""
    assert "TensorRT" not in printed
    tokenizer = load_tokenizer(world.target)
    for ids, _ in texts:
        assert tokenizer.decode(ids) in printed


# Processes, as users start them: both lines, one and two ranks.
COMMANDS = [("0.14", "plain", 1), ("1.2", "redrafter", 2)]


@pytest.mark.parametrize(("world", "method", "tp_size"), COMMANDS, indirect=["world"])
def test_commands_as_processes(world: World, method: str, tp_size: int) -> None:
    """Prompts come from stdin; of several ranks, the first one alone reads and prints."""
    install_mpirun(world)
    checkpoint = make_checkpoint(world, method, tp_size)
    engine = world.engine(f"{method}{tp_size}", checkpoint, *WAYS[method].flags)
    world.log.unlink(missing_ok=True)
    form = ("--streaming", "--tokenizer-dir", world.target) if method == "plain" else ("--json",)
    done = run_cli(
        "run", "--engine-dir", engine, "--input-file", "-", *form, "--end-id", 127,
        env=world.environment,
        stdin="".join(json.dumps(request) + "\n" for request in REQUESTS),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in ("TensorRT-LLM version: ", "[TRT-LLM] [I] Load engine", "[INFO] Executor shutdown"):
        assert done.stderr.count(line) >= tp_size
    torch_engine = world.torch_engine("plain", world.checkpoint("plain"))
    calls = world.calls("from_dir")
    ranks = sorted(entry["options"]["rank"] for entry in calls)
    assert ranks == list(range(tp_size))
    assert len({entry["pid"] for entry in calls}) == tp_size
    texts = list_texts(world.run(torch_engine, REQUESTS))
    if method == "plain":
        check_streaming(world, done.stdout, texts)
        return
    report = json.loads(done.stdout)  # and no banner or log line of TensorRT-LLM, of any rank
    assert list_texts(report) == texts
    assert (report["stats"]["method"], report["stats"]["tp_size"]) == (method, tp_size)
    failed = run_cli(
        "run", "--engine-dir", engine, "--input-file", "-", "--max-output-len", 5000,
        env=world.environment, stdin=json.dumps({"input_ids": [5, 6]}) + "\n",
    )  # fmt: skip
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "5000 more" in read_error_lines(failed.stderr)[0], "mpirun's grumbling is left out"
