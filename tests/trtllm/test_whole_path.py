"""Convert, build and run of every mode, line and number of ranks, on the doubles.

What comes out is compared with the torch engine's text of the same target, which is that of every
method.
"""

from __future__ import annotations

import atexit
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.errors import SpecDecError
from specdec.run.backends import tensorrt_ranks
from specdec.text.pretrained import load_tokenizer
from specdec.trtllm.facts import LABELS
from tests.conftest import read_error_lines, run_cli
from tests.forks import fork, run_main
from tests.trtllm.runtime_double import free_memory
from tests.trtllm.worlds import (
    PAGED,
    WAYS,
    World,
    forget_runtime,
    install_mpirun,
    list_texts,
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


@pytest.mark.thorough
@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("method", ["plain", "draft_target"])
def test_the_targets_text_on_both_numbers_of_ranks(
    world: World, monkeypatch: pytest.MonkeyPatch, method: str, tp_size: int
) -> None:
    check_mode(world, monkeypatch, method, tp_size)


@pytest.mark.thorough
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


def run_copies(*args: object, stdin: str, env: Mapping[str, str]) -> CompletedProcess[str]:
    """Do what `run_cli` does, by a copy of this process, of which mpirun and its ranks are copies.

    Each imports TensorRT-LLM itself; what else it needs it has.
    """

    def start_mpirun(
        command: Sequence[str], *, env: Mapping[str, str], stdout: Any, stderr: Any, **_: object
    ) -> subprocess.Popen[str]:
        def work() -> None:
            sys.argv = [*command]
            try:
                runpy.run_path(command[0], run_name="__main__")
            finally:
                atexit._run_exitfuncs()  # of TensorRT-LLM, which says there that it ends

        return fork(work, env, stdin=None, stdout=stdout, stderr=stderr)

    def work() -> None:
        forget_runtime()
        free_memory()
        # Left of the first process; by pytest the double knows that it does not end.
        atexit._clear()
        sys.modules.pop("pytest")
        starts = {**vars(subprocess), "Popen": start_mpirun}
        vars(tensorrt_ranks)["subprocess"] = SimpleNamespace(**starts)
        run_main(*args)

    process = fork(work, env)
    out, err = process.communicate(stdin)
    return CompletedProcess([], process.returncode, out, err)


# Processes, as users start them: both lines, one and two ranks.
COMMANDS = [("0.14", "plain", 1), ("1.2", "redrafter", 2)]


@pytest.mark.thorough
@pytest.mark.parametrize(("world", "method", "tp_size"), COMMANDS, indirect=["world"])
def test_commands_as_processes(world: World, method: str, tp_size: int) -> None:
    """Prompts come from stdin; of several ranks, the first one alone reads and prints.

    One command begins anew; that of several ranks, and they, are copies of this process.
    """
    run_command = run_cli if tp_size == 1 else run_copies
    install_mpirun(world)
    checkpoint = make_checkpoint(world, method, tp_size)
    engine = world.engine(f"{method}{tp_size}", checkpoint, *WAYS[method].flags)
    world.log.unlink(missing_ok=True)
    form = ("--streaming", "--tokenizer-dir", world.target) if method == "plain" else ("--json",)
    done = run_command(
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
    failed = run_command(
        "run", "--engine-dir", engine, "--input-file", "-", "--max-output-len", 5000,
        env=world.environment, stdin=json.dumps({"input_ids": [5, 6]}) + "\n",
    )  # fmt: skip
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "5000 more" in read_error_lines(failed.stderr)[0], "mpirun's grumbling is left out"
