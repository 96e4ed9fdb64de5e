"""`specdec recipe`: files of three schedulers, stages that are run, recipes that are refused.

SPECDEC_WRITE_GOLDEN=1 writes tests/golden/jobs anew. Its files were read by others' checkers when
they were written: docs/jobs.md says which.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.options import get_flags
from specdec.recipe.keys import count_seconds
from specdec.recipe.settings import KEYS_OF_SCHEDULERS, SCHEDULERS, JobsSettings
from tests.conftest import ROOT, read_error_lines
from tests.engines import run_cli_here

GOLDEN = ROOT / "tests" / "golden" / "jobs"
RECIPE: dict[str, Any] = {
    "jobs": {
        "name": "my-run", "workdir": "/shared/my run", "before": ["target recipe.yaml"],
        "setup": "source /shared/venv/bin/activate",
        "env": {"HF_HUB_OFFLINE": "1", "GREETING": "it's"},
        "secrets": ["SPECDEC_API_KEY"], "storage": "specdec-work", "storage_size": "500Gi",
        "image": "registry.example/specdec:0.1", "partition": "cpu", "account": "research",
        "infra": "aws/us-east-1", "spot": True, "namespace": "lab", "cpus": 4, "memory": 16,
        "time": "2h",
        "data": {
            "shards": 4, "gpus": 1, "gpu_type": "H100", "server": "vllm serve BASE --port $port",
        },
        "train": {
            "nodes": 2, "gpus": 8, "gpu_type": "H100", "time": "2d", "retries": 9,
            "partition": "gpu",
        },
        "serve": {"replicas": 2, "gpus": 1, "gpu_type": "H100"},
    },
    "data": {
        "input": "prompts one.jsonl", "output": "out/my data.jsonl", "model": "BASE",
        "base_url": "http://127.0.0.1:8000/v1",
    },
    "train": {
        "method": "medusa", "model_dir": "BASE", "data": "out/my data.jsonl",
        "output_dir": "out/heads",
    },
    "convert": {"model_dir": "BASE", "medusa_model_dir": "out/heads", "output_dir": "out/ckpt"},
    "build": {"checkpoint_dir": "out/ckpt", "output_dir": "out/engine"},
    "verify": {"engine_dir": "out/engine", "model_dir": "BASE"},
    "export": {
        "model_dir": "BASE", "medusa_model_dir": "out/heads", "to": "vllm",
        "output_dir": "out/vllm",
    },
    "serve": {
        "engine_dir": "out/engine", "host": "0.0.0.0", "port": 8100, "served_model_name": "mine",
    },
    "audit": {"base_url": "http://127.0.0.1:8100/v1", "model": "mine"},
    "run": {"engine_dir": "out/engine"},
}  # fmt: skip
TARGET = {"convert": {"model_dir": "BASE", "output_dir": "out/target"}}
STAGES = ["prepare", "data", "merge", "train", "engine", "export", "audit", "serve"]


def change(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with changed values; those that are None are left out."""
    changed = dict(recipe)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(changed.get(key), dict):
            changed[key] = change(changed[key], value)
        elif value is None:
            changed.pop(key, None)
        else:
            changed[key] = value
    return changed


def write_recipe(folder: Path, changes: Mapping[str, Any] = {}) -> Path:
    (folder / "target recipe.yaml").write_text(yaml.safe_dump(TARGET))
    path = folder / "recipe one.yaml"
    path.write_text(yaml.safe_dump(change(RECIPE, changes), sort_keys=False))
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_files_are_those_that_were_checked(scheduler: str, here: Path) -> None:
    done = run_cli_here("recipe", write_recipe(here), "--to", scheduler, "--output-dir", "my jobs")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "bash 'my jobs/submit.sh'\n"
    assert f"--to {scheduler}: sections without a job: run" in done.stderr
    unused = {key for key, users in KEYS_OF_SCHEDULERS.items() if scheduler not in users}
    assert f"keys without a use there: {', '.join(sorted(unused))}" in done.stderr
    folder = here / "my jobs"
    assert {path.stem for path in folder.glob("*.sh")} == {*STAGES, "submit"}
    assert (folder / "recipe.yaml").read_text() == (here / "recipe one.yaml").read_text()
    assert (folder / "before-0.yaml").read_text() == (here / "target recipe.yaml").read_text()
    # The stages' scripts are those of every scheduler.
    names = sorted(
        path.name for path in folder.iterdir()
        if path.suffix != ".sh" or scheduler == "slurm" or path.stem == "submit"
        if path.name not in ("recipe.yaml", "before-0.yaml", "manifest.json")
    )  # fmt: skip
    text = "".join(f"==> {name} <==\n{(folder / name).read_text()}" for name in names)
    golden = GOLDEN / f"{scheduler}.txt"
    if os.environ.get("SPECDEC_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    for path in folder.glob("*.yaml"):
        assert [*yaml.safe_load_all(path.read_text())]
    for path in [*folder.glob("*.sh"), *folder.glob("*.sbatch")]:
        subprocess.run(["bash", "-n", path], check=True)


COMMAND = """#!/bin/bash
# Notes its words, and fails where the file `fail` has its name. Makes an output.
echo "${0##*/} $*" >> "$LOG"
[ "$(cat "$FAIL" 2>/dev/null)" != "${0##*/} $1" ] || exit 1
while [ $# -gt 0 ]; do
  case $1 in
  --shard) mkdir -p out; touch "out/my data.${2/\\//-of-}.jsonl" ;;
  --output) touch "$2" ;;
  esac
  shift
done
"""


class Place:
    """Workdir with a stub for each command, which notes how it was called."""

    def __init__(self, folder: Path, changes: Mapping[str, Any]) -> None:
        self.work, self.jobs = folder / "my work", folder / "jobs"
        self.log, self.fail = folder / "log", folder / "fail"
        programs = folder / "bin"
        programs.mkdir()
        for name in ("train", "convert", "build", "verify", "export", "serve"):
            (programs / f"specdec-{name}").write_text(COMMAND)
            (programs / f"specdec-{name}").chmod(0o755)
        jobs = {"workdir": str(self.work), "setup": "", "train": {"nodes": None, "gpus": None}}
        recipe = write_recipe(folder, change({"jobs": jobs}, changes))
        done = run_cli_here("recipe", recipe, "--to", "slurm", "--output-dir", self.jobs)
        assert done.returncode == 0, done.stderr
        self.environment = {
            **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "LOG": str(self.log),
            "FAIL": str(self.fail),
        }  # fmt: skip

    def run(self, stage: str, index: int = 0, status: int = 0) -> tuple[list[str], str]:
        """Run a stage; return the commands that it called, and its stderr."""
        self.log.write_text("")
        done = subprocess.run(
            ["bash", self.jobs / f"{stage}.sh"], capture_output=True, text=True, check=False,
            env=self.environment | {"SPECDEC_INDEX": str(index)},
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        return self.log.read_text().splitlines(), done.stderr


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_stages_go_on_where_they_were_ended(here: Path) -> None:
    server = {"jobs": {"data": {"server": None, "shards": 2}}}
    place = Place(here, server)
    recipe = f"--config {place.jobs}/recipe.yaml"
    place.fail.write_text("specdec-train data")
    called = [f"specdec-train data {recipe} --resume --shard 1/2"]
    assert place.run("data", 1, status=1)[0] == called
    place.fail.unlink()
    assert place.run("data", 1)[0] == called
    calls, text = place.run("data", 1)
    assert (calls, ".1-of-2: done before" in text) == ([], True)
    # Killed between its end and our note of it.
    (mark,) = place.work.glob(".specdec-jobs/my-run/data-*.1-of-2.done")
    mark.unlink()
    assert place.run("data", 1)[0] == []
    assert mark.exists()
    place.run("data", 0)
    shards = "out/my data.0-of-2.jsonl out/my data.1-of-2.jsonl"
    merged = f"specdec-train data --merge {shards} --output out/my data.jsonl"
    assert place.run("merge")[0] == [merged]
    # An output that somebody else wrote is not taken for the stage's.
    (place.work / "out" / "heads").mkdir()
    calls, text = place.run("train", status=2)
    assert (calls, text) == ([], (
        "error: out/heads exists, and these jobs have not written it\n"
        "hint: move it away, or leave its section out of the recipe\n"
    ))  # fmt: skip
    (place.work / "out" / "heads").rmdir()
    assert place.run("train")[0] == [f"specdec-train {recipe} --resume"]
    place.fail.write_text("specdec-verify --config")
    steps = [f"specdec-{name} {recipe}" for name in ("convert", "build", "verify")]
    assert place.run("engine", status=1)[0] == steps
    place.fail.unlink()
    assert place.run("engine")[0] == steps[2:], "only what is not done"
    assert place.run("prepare")[0] == [f"specdec-convert --config {place.jobs}/before-0.yaml"]
    assert place.run("serve", 1)[0] == [f"specdec-serve {recipe} --port 8101"]
    assert (here / "my work").is_dir()


def test_a_server_runs_beside_a_shard(here: Path) -> None:
    """Each shard's at a port of its own, from the first answer to the end of the shard's rows."""
    port = find_port()
    data = {"base_url": f"http://localhost:{port - 1}/v1"}
    command = 'bash -c "echo began >> $LOG; exec python3 -m http.server --bind 127.0.0.1 $port"'
    jobs = {"data": {"shards": 2, "server": command}}
    place = Place(here, {"jobs": jobs, "data": data})
    calls, _ = place.run("data", 1)
    url = f"--base-url http://127.0.0.1:{port}/v1"
    recipe = f"--config {place.jobs}/recipe.yaml"
    assert calls == ["began", f"specdec-train data {recipe} --resume {url} --shard 1/2"]
    with contextlib.closing(socket.socket()) as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "it ended with the stage"
    assert place.run("data", 1)[0] == [], "and is not started for what is done"


def test_a_server_that_ends_ends_the_stage(here: Path) -> None:
    jobs = {"data": {"shards": 1, "server": "false"}}
    url = f"http://127.0.0.1:{find_port()}/v1"
    calls, text = Place(here, {"jobs": jobs, "data": {"base_url": url}}).run("data", status=1)
    assert calls == []
    assert f"error: the server ended before it answered at {url}" in text


SLURM = """#!/bin/bash
echo "${0##*/} $*" >> "$LOG"
"""


@pytest.mark.parametrize(
    ("ending", "restarts", "is_again"),
    [
        (1, 8, True), (1, 9, False), (2, 0, False), (0, 0, False), ("USR1", 0, True),
        ("TERM", 0, False),
    ],
)  # fmt: skip
def test_a_failed_job_is_queued_again(
    ending: int | str, restarts: int, is_again: bool, here: Path
) -> None:
    """By its own request where it failed or its time is over, not where Slurm ended it."""
    write_recipe(here)
    run_cli_here("recipe", "recipe one.yaml", "--to", "slurm", "--output-dir", "jobs")
    batch = (here / "jobs" / "train.sbatch").read_text()
    begun = here / "begun"
    stage = f"exit {ending}" if isinstance(ending, int) else f"touch '{begun}'; sleep 60"
    (here / "jobs" / "train.sh").write_text(stage)
    (here / "bin").mkdir()
    for name in ("scontrol", "srun"):
        text = SLURM if name == "scontrol" else '#!/bin/bash\nexec "$@"\n'
        (here / "bin" / name).write_text(text)
        (here / "bin" / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{here / 'bin'}:{os.environ['PATH']}", "LOG": str(here / "log"),
        "SLURM_SUBMIT_DIR": str(here / "jobs"), "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT":
        str(restarts), "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "n[1-2]",
    }  # fmt: skip
    (here / "spooled").write_text(batch)
    job = subprocess.Popen(["bash", "spooled"], env=environment)
    if isinstance(ending, str):
        while not begun.exists():
            assert job.poll() is None
        job.send_signal(getattr(signal, f"SIG{ending}"))
    assert job.wait(timeout=60) == (ending if isinstance(ending, int) else 128 + signal.SIGTERM)
    log = (here / "log").read_text().splitlines()
    assert log == ["scontrol show hostnames n[1-2]", *["scontrol requeue 7"] * is_again]


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("slurm", {"jobs": {"gpu": 1}}, "unknown key 'gpu' in jobs (did you mean gpus?)",
     "the keys are"),
    ("slurm", {"jobs": {"trian": {}}}, "unknown key 'trian' in jobs (did you mean train?)",
     "the keys"),
    ("slurm", {"jobs": {"data": {"nodes": 2}}}, "unknown key 'nodes' in jobs.data", "jobs.train"),
    ("slurm", {"jobs": {"train": {"image": 3.5, "storage": "a"}}},
     "unknown key 'storage' in jobs.train", "it is a key of jobs"),
    ("slurm", {"jobs": {"time": 14400}}, "jobs.time is '14400'", "give 30m, 12h or 2d"),
    ("slurm", {"jobs": {"partition": "a\n#SBATCH b"}}, "jobs.partition is 'a\\n#", "give one word"),
    ("slurm", {"jobs": {"name": "My_run"}}, "jobs.name is 'My_run'", "a-z, 0-9"),
    ("k8s", {"jobs": {"workdir": "/a\n- b"}}, "jobs.workdir is '/a\\n- b'", "a path of one line"),
    ("k8s", {"jobs": {"workdir": "a/b"}}, "jobs.workdir is a/b, where the storage is to be mounted",
     "begins with /"),
    ("slurm", {"jobs": {"cpus": 0}}, "jobs.cpus: expected at least 1, got 0", "give jobs.cpus"),
    ("slurm", {"jobs": {"env": {"A B": "1"}}}, "jobs.env: 'A B' is no variable's name", "HF_TOKEN"),
    ("slurm", {"jobs": {"env": {"A": True}}}, "jobs.env.A is True, not a text", "put it in quotes"),
    ("slurm", {"jobs": {"env": {"A": "x\0"}}}, "jobs.env.A is 'x\\x00', not a text", "in quotes"),
    ("slurm", {"jobs": {"secrets": ["$(ls)"]}}, "jobs.secrets: '$(ls)' is no", "HF_TOKEN"),
    ("slurm", {"jobs": [1]}, "jobs is not a mapping", "key: value"),
    ("slurm", {"jobs": {"train": 3}}, "jobs.train is not a mapping", "key: value"),
    ("slurm", {"export": None, "jobs": {"export": {"cpus": 2}}}, "jobs.export, and no such job",
     "the jobs are prepare, data"),
    ("slurm", {"train": {"force": True}}, "force in section train, of which a job is made",
     "leave it"),
    ("slurm", {"data": {"shard": "0/2"}}, "shard in section data", "jobs.data.shards"),
    ("slurm", {"train": {"learning_rat": 1}}, "unknown key 'learning_rat' in section train"
     " (did you mean learning_rate?)", "lists the keys"),
    ("slurm", {"build": {"output_dir": None}}, "section build: missing --output-dir", "give it"),
    ("slurm", {"jobs": {"data": {"server": "vllm serve BASE --port 8000"}}},
     "jobs.data.server without $port, and 4 shards", "--port $port"),
    ("slurm", {"jobs": {"data": {"server": "cd x && serve --port $port"}}}, "the server's command"
     " is 'cd x && serve --port $port', which is not one command", "into jobs.setup"),
    ("slurm", {"jobs": {"data": {"server": "A=1 serve --port $port"}}}, "is not one command",
     "variables into jobs.env"),
    ("slurm", {"jobs": {"data": {"server": "serve '--port $port"}}}, "No closing quotation",
     "close it"),
    ("slurm", {"jobs": {"data": {"server": " "}}}, "the server's command is ''", "jobs.setup"),
    ("slurm", {"data": {"base_url": "http://127.0.0.1:65533/v1"}}, "4 shards have one each up to"
     " 65536", "at most 65532"),
    ("slurm", {"data": {"base_url": "http://far:8000/v1"}}, "data.base_url is 'http://far:8000/v1'",
     "http://127.0.0.1:8000/v1"),
    ("slurm", {"data": {"engine_dir": "e"}}, "jobs.data.server, and section data names 1 servers"
     " and an engine", "no engine_dir"),
    ("slurm", {"jobs": {"train": {"server": "vllm serve"}}}, "jobs.train.server on 2 nodes",
     "nodes 1"),
    ("slurm", {"audit": {"base_url": "http://127.0.0.1:8000/v1"}},
     "audit.base_url has port 8000, and the server that is audited 8100", ":8100/v1"),
    ("slurm", {"audit": {"model": "other"}}, "audit.model is 'other', and the model is served as"
     " 'mine'", "give audit.model mine"),
    ("slurm", {"jobs": {"serve": {"server": "vllm serve"}}},
     "jobs.serve.server and a section serve", "keep one"),
    ("slurm", {"serve": {"port": 0}}, "serve.port is 0", "a number"),
    ("slurm", {"jobs": {"before": ["prompts"]}}, "recipe prompts does not exist", "check its path"),
    ("slurm", {"jobs": {"before": ["recipe one.yaml"]}}, "recipe one.yaml has jobs.before itself",
     "list all of them in jobs.before"),
    ("slurm", {"jobs": {"before": ["target recipe.yaml"] * 2}}, "specdec-convert of job prepare and"
     " specdec-convert of job prepare both write out/target", "give each its own output"),
    ("slurm", {"build": {"output_dir": "./out/ckpt"}}, "specdec-convert of job engine and"
     " specdec-build of job engine both write out/ckpt", "give each its own output"),
    ("slurm", {"serve": {"session_dir": "s"}}, "jobs.serve.replicas is 2, and serve.session_dir is"
     " s", "leave one of them out"),
    ("k8s", {"jobs": {"storage": None, "image": None}, "serve": {"host": "127.0.0.1"}},
     "3 problems: (1) jobs.storage is missing", "(3) give serve.host 0.0.0.0"),
    ("skypilot", {"jobs": {"serve": {"gpu_type": None}}},
     "jobs.gpu_type is missing for audit, serve", "as H100"),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("scheduler", "changes", "fact", "hint"), REFUSED)
def test_recipes_that_are_refused(
    scheduler: str, changes: dict[str, Any], fact: str, hint: str, here: Path
) -> None:
    words = ("recipe", write_recipe(here, changes), "--to", scheduler, "--output-dir", "jobs")
    done = run_cli_here(*words)
    assert done.returncode in (1, 2)
    error, remedy = read_error_lines(done.stderr)
    assert fact in error
    assert hint in remedy
    assert sorted(path.name for path in here.iterdir()) == ["recipe one.yaml", "target recipe.yaml"]


def test_the_output_folder_is_replaced_only_by_force(here: Path) -> None:
    words = ("recipe", write_recipe(here), "--to", "slurm", "--output-dir", "jobs")
    assert run_cli_here(*words).returncode == 0
    (here / "jobs" / "mine").write_text("")
    done = run_cli_here(*words)
    assert (done.returncode, "exists and is not empty" in done.stderr) == (1, True)
    assert (here / "jobs" / "mine").exists()
    assert run_cli_here(*words, "--force").returncode == 0
    assert not (here / "jobs" / "mine").exists()
    done = run_cli_here("recipe", "--to", "slurm", "--output-dir", "other")
    assert (done.returncode, "0 recipes are given, not one" in done.stderr) == (2, True)
    done = run_cli_here("recipe", here / "none.yaml", *words[2:], "--force")
    assert (done.returncode, "none.yaml does not exist" in done.stderr) == (2, True)
    os.mkfifo(here / "pipe")  # of which no second reader sees anything
    done = run_cli_here("recipe", "pipe", *words[2:], "--force")
    assert (done.returncode, "recipe pipe is no file" in done.stderr) == (2, True)
    (here / "other.yaml").write_bytes(b"\xff")
    done = run_cli_here("recipe", "other.yaml", *words[2:], "--force")
    assert (done.returncode, "other.yaml is not readable" in done.stderr) == (2, True)
    (here / "other.yaml").write_text("run: {engine_dir: e}")
    done = run_cli_here("recipe", "other.yaml", *words[2:], "--force")
    assert (done.returncode, "no section that a job is made of" in done.stderr) == (1, True)


def test_every_key_is_on_the_page() -> None:
    page = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    for name in get_flags(JobsSettings):
        assert f"`{name}`" in page
    assert (count_seconds("90m"), count_seconds("2d"), count_seconds(None)) == (5400, 172800, None)
