"""What launchers say through the environment: numbers that can be, or one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.errors import SpecDecError
from specdec.system import logs
from specdec.system.mpi import Launch, check_meeting_place, find_launch, find_world
from tests.conftest import ROOT, read_error_lines
from tests.engines import make_engine, run_cli_here

GOOD = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_what_torchrun_says() -> None:
    assert find_launch(GOOD) == Launch(1, 4, 1, 2)
    assert find_launch({"RANK": "3", "WORLD_SIZE": "4"}) == Launch(3, 4, 3, 4)
    assert find_launch({}) is None
    assert find_launch({"WORLD_SIZE": "1"}) is None
    assert find_launch({"RANK": "0"}) is None
    place = {"MASTER_ADDR": "here", "MASTER_PORT": "29500"}
    assert check_meeting_place(place) == "here:29500"


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"RANK": None}, "WORLD_SIZE is '4', and RANK is not set"),
        ({"WORLD_SIZE": None}, "RANK is '1', and WORLD_SIZE is not set"),
        ({"RANK": "one"}, "RANK is 'one', not a whole number from 0 to 3"),
        ({"RANK": "4"}, "RANK is '4', not"),
        ({"RANK": "-1"}, "RANK is '-1', not"),
        ({"RANK": ""}, "RANK is '', not"),
        ({"RANK": "\u0663"}, "RANK is '\u0663', not"),
        ({"RANK": "1" * 5000}, "RANK is '1111"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', not a whole number of at least 1"),
        ({"WORLD_SIZE": "4.0"}, "WORLD_SIZE is '4.0', not"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is '2', not a whole number from 0 to 1"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE is '5', not a whole number from 1 to 4"),
    ],
)
def test_what_cannot_be(changes: dict[str, str | None], fact: str) -> None:
    environ = {k: v for k, v in (GOOD | changes).items() if v is not None}
    with pytest.raises(SpecDecError) as caught:
        find_launch(environ)
    assert caught.value.message.startswith(fact)
    assert len(caught.value.message) < 200
    assert "torchrun" in caught.value.hint


@pytest.mark.parametrize(
    ("environ", "fact"),
    [
        ({"MASTER_PORT": "1"}, "MASTER_ADDR, the machine of rank 0, is not set"),
        ({"MASTER_ADDR": "a"}, "MASTER_PORT, the port of rank 0, is not set"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "http"}, "MASTER_PORT is 'http', not a whole number"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "65536"}, "MASTER_PORT is '65536'"),
    ],
)
def test_a_meeting_place_that_cannot_be(environ: dict[str, str], fact: str) -> None:
    with pytest.raises(SpecDecError, match=fact):
        check_meeting_place(environ)


def test_a_world_that_cannot_be() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "many"}
    for environ in (
        {"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "4"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", **step},
    ):
        with pytest.raises(SpecDecError, match="is . of "):
            find_world(environ)


def test_logs_are_set_up_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "one")
    monkeypatch.setenv("WORLD_SIZE", "2")
    logs.set_up()
    with pytest.raises(SpecDecError):
        logs.get_launched_rank()


@pytest.mark.parametrize("stage", ["run", "train"])
@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "zero", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"},
    ],
)
def test_a_stage_says_it_in_two_lines(stage: str, environ: dict[str, str], tmp_path: Path) -> None:
    """Without an engine for run: what it says first is what a launcher has to mend first."""
    (tmp_path / "d.txt").write_text("text " * 50)
    pycode = ROOT / "examples" / "pycode"
    arguments = ["--model-dir", pycode / "draft", "--data", tmp_path / "d.txt", "--output-dir",
                 tmp_path / "out", "--method", "redrafter"]  # fmt: skip
    if stage == "run":
        ranks = ["--tp-size", 2]
        engine = make_engine(tmp_path, pycode / "draft", optimize="none", convert=ranks)
        (tmp_path / "p.jsonl").write_text('{"input_ids": [1, 2, 3]}\n')
        arguments = ["--engine-dir", engine, "--input-file", tmp_path / "p.jsonl"]
    done = run_cli_here(stage, *arguments, env=environ)
    assert done.returncode == 1, done.stderr
    fact, hint = read_error_lines(done.stderr)
    assert next(name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name in fact)
    assert "torchrun" in hint
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
