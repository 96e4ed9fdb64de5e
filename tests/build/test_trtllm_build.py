"""specdec-build --backend tensorrt-llm: commands, engines, scripts and failures, on the double."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecDecError
from specdec.files.reading import hash_file, read_json
from specdec.trtllm.facts import LABELS, load_facts
from tests.conftest import ROOT, read_error_lines, run_cli
from tests.engines import call, run_cli_here
from tests.trtllm.checkpoints import DRAFT_LENGTHS, METHOD_MODES, CheckpointStore, list_mode_flags
from tests.trtllm.double import (
    DRIVER,
    H100,
    check_engine_config,
    install_double,
    read_engine_file,
    write_script,
)

# 0.14 has no EAGLE.
LINES = [(method, label) for method in METHOD_MODES for label in LABELS
         if (method, label) != ("eagle", "0.14")]  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> CheckpointStore:
    return CheckpointStore(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that puts a double on this process's paths."""

    def do(label: str, **options: Any) -> dict[str, str]:
        environment = install_double(tmp_path / f"double-{label}", label, **options)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.syspath_prepend(environment["PYTHONPATH"].split(os.pathsep)[0])
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return environment

    return do


def find_program(environment: dict[str, str]) -> Path:
    """The double's trtllm-build."""
    return Path(environment["PATH"].split(os.pathsep)[0]) / "trtllm-build"


def list_words(checkpoint: Path, engine: Path, *flags: object) -> list[object]:
    return ["build", "--backend", "tensorrt-llm", "--checkpoint-dir", checkpoint, "--output-dir",
            engine, *flags]  # fmt: skip


def build(checkpoint: Path, engine: Path, *flags: object) -> None:
    call(*list_words(checkpoint, engine, *flags))  # type: ignore[arg-type]


def plan(checkpoint: Path, *flags: object) -> dict[str, Any]:
    """What --dry-run --json prints, on a machine with nothing installed."""
    never = checkpoint.parent / "never"
    done = run_cli_here(*list_words(checkpoint, never, "--dry-run", "--json", *flags))
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert not never.exists()
    return report


def run_script(script: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [script], cwd=script.parent, env={**os.environ, **environment}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "label", "tp_size"),
    [(method, label, 1 + at % 2) for at, (method, label) in enumerate(LINES)],
)
def test_every_mode_of_every_line_passes_the_contract(
    store: CheckpointStore, install: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    method: str, label: str, tp_size: int,
) -> None:  # fmt: skip
    install(label, gpus=[H100] * tp_size)
    checkpoint, engine = store.get(method, label, tp_size), tmp_path / "engine"
    flags = ["--max-seq-len", "200", "--max-batch-size", "16", "--workers", str(tp_size)]
    build(checkpoint, engine, *flags, *list_mode_flags(method), "--json")
    names = ["build.log", "config.json", "manifest.json"]
    assert sorted(p.name for p in engine.iterdir()) == [
        *names, *(f"rank{rank}.engine" for rank in range(tp_size))
    ]  # fmt: skip
    document = read_json(engine / "config.json")
    check_engine_config(document)
    assert "backend" not in document, "the file stays as trtllm-build wrote it"
    mode, facts = METHOD_MODES[method], load_facts(label)
    recorded = document["build_config"]
    assert recorded["speculative_decoding_mode"] == facts.modes[mode or "none"]
    content = read_engine_file(engine / f"rank{tp_size - 1}.engine")
    assert content["checkpoint_dir"] == str(checkpoint)
    assert (content["rank"], content["tp_size"], content["label"]) == (tp_size - 1, tp_size, label)
    # What was predicted is what the engine records.
    captured = capsys.readouterr()
    assert "as predicted" not in captured.err
    report = json.loads(captured.out)
    told = report["engine_records"]
    for name in ("max_seq_len", "max_num_tokens", "max_draft_len", "max_input_len"):
        assert told[name] == recorded[name] == report["build_config"][name]
    for name in ("use_paged_context_fmha", "use_fp8_context_fmha"):
        assert (told[name] == "enable") == recorded["plugin_config"][name]
    drafts = {"redrafter": 12, "medusa": 63, "plain": 0, "eagle": 63 + 4} | DRAFT_LENGTHS
    assert told["max_seq_len"] == 200 + drafts[method]


def test_manifest_records_the_machine_and_the_checkpoint(
    store: CheckpointStore, install: Any, tmp_path: Path
) -> None:
    install("1.2")
    engine = tmp_path / "engine"
    build(store.get("redrafter"), engine, "--reduce_fusion", "disable")
    manifest = read_json(engine / "manifest.json")
    assert manifest["kind"] == "engine"
    assert (manifest["backend"], manifest["trtllm_version"]) == ("tensorrt-llm", "1.2")
    assert manifest["method"] == "redrafter"
    environment = manifest["environment"]
    assert (environment["tensorrt_llm"], environment["tensorrt"]) == ("1.2.0", "10.13.3.9")
    assert environment["driver"] == DRIVER
    assert environment["gpus"] == [
        {"name": H100.name, "compute_capability": "9.0", "memory_bytes": H100.memory_bytes}
    ]
    assert manifest["checkpoint"] == read_json(store.get("redrafter") / "manifest.json")
    assert manifest["settings"]["reduce_fusion"] == ["disable"]
    assert manifest["build_commands"][0]["argv"][0] == "trtllm-build"
    hashes = {output["path"]: output["sha256"] for output in manifest["outputs"]}
    assert hashes["rank0.engine"] == hash_file(engine / "rank0.engine")
    assert "Build TensorRT engine" in (engine / "build.log").read_text()


def test_another_record_than_predicted_is_told(
    store: CheckpointStore, install: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = find_program(install("1.2"))
    real = program.rename(program.with_name("real"))
    write_script(
        program,
        f'#!/bin/sh\n{real} "$@" && sed -i \'s/"max_seq_len": 512/"max_seq_len": 500/\''
        ' "$4/config.json"\n',
    )
    build(store.get("plain"), tmp_path / "engine")
    assert "the engine records max_seq_len 500, not 512 as predicted" in capsys.readouterr().err


def test_dry_run_needs_nothing_installed(store: CheckpointStore) -> None:
    report = plan(store.get("redrafter"), "--gemm_plugin", "float32", "--max_batch_size=4")
    assert (report["trtllm_version"], report["method"]) == ("1.2", "redrafter")
    (command,) = report["commands"]
    assert command["argv"][:1] == ["trtllm-build"]
    assert command["argv"][5:] == [
        "--speculative_decoding_mode", "explicit_draft_tokens", "--max_batch_size", "4",
        "--gemm_plugin", "float32",
    ]  # fmt: skip
    prefix = " ".join(f"{name}={value}" for name, value in command["env"].items())
    assert command["shell"] == f"{prefix} {shlex.join(command['argv'])}"
    assert any("not checked: the GPU" in note for note in report["notes"])
    assert any("max_seq_len 524 = 512 + max_draft_len 12" in note for note in report["notes"])
    assert len(report["weights_bytes"]) == 1, "one rank, one number"


def test_without_tensorrt_llm_a_build_ends_in_one_sentence(
    store: CheckpointStore, tmp_path: Path
) -> None:
    done = run_cli(*list_words(store.get("plain"), tmp_path / "engine"))
    assert done.returncode == 1
    fact, hint = read_error_lines(done.stderr)
    assert fact == "TensorRT-LLM is not installed here, and nothing else can build its engines"
    assert "--dry-run" in hint
    assert "--emit-script" in hint
    assert len(done.stderr.splitlines()) == 2
    assert not (tmp_path / "engine").exists()


def test_package_without_its_command_is_told(
    store: CheckpointStore, install: Any, tmp_path: Path
) -> None:
    find_program(install("1.2")).unlink()
    with pytest.raises(SpecDecError, match="trtllm-build of TensorRT-LLM 1.2.0 is not installed"):
        build(store.get("plain"), tmp_path / "engine")


def test_auto_takes_tensorrt_llm_where_a_gpu_is_visible(
    store: CheckpointStore, install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("1.2")
    words = ["build", "--checkpoint-dir", store.get("plain"), "--output-dir"]
    call(*words, tmp_path / "a")  # type: ignore[arg-type]
    assert (tmp_path / "a" / "rank0.engine").is_file()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    call(*words, tmp_path / "b", "--optimize", "none")  # type: ignore[arg-type]
    assert (tmp_path / "b" / "weights.safetensors").is_file()


@pytest.mark.parametrize(
    ("version", "reason"),
    [("0.17.0", "is of a line"), ("1.3.0rc21", "builds and runs no engines: 1.3.0rc20 was")],
)
def test_installed_release_of_an_unknown_line_is_refused(
    store: CheckpointStore, install: Any, tmp_path: Path, version: str, reason: str
) -> None:
    install("1.2", version=version)
    with pytest.raises(SpecDecError, match=f"TensorRT-LLM {version} {reason}") as caught:
        build(store.get("plain"), tmp_path / "engine")
    assert "--trtllm-version" in caught.value.hint


def test_stated_version_must_be_the_installed_one(
    store: CheckpointStore, install: Any, tmp_path: Path
) -> None:
    install("1.2")
    with pytest.raises(SpecDecError, match="--trtllm-version 0.14, but TensorRT-LLM 1.2.0 is"):
        build(store.get("plain", "0.14"), tmp_path / "engine", "--trtllm-version", "0.14")
    report = plan(store.get("plain", "0.14"), "--trtllm-version", "0.14")
    assert report["trtllm_version"] == "0.14"


@pytest.mark.parametrize("launcher", ["local", "mpirun", "srun"])
def test_script_is_valid_shell_and_builds(
    store: CheckpointStore, tmp_path: Path, launcher: str
) -> None:
    environment = install_double(tmp_path / "double", "1.2", gpus=[H100, H100])
    # Both launchers start the command once a rank, with the numbers that MPI or Slurm give.
    for name, flag in (("mpirun", "-n 2"), ("srun", "--ntasks=2")):
        write_script(
            find_program(environment).with_name(name),
            f'#!/bin/bash\ncase "$*" in *"{flag} "*) ;; *) exit 9;; esac\n'
            'while [ "$1" != trtllm-build ]; do shift; done\n'
            "for rank in 0 1; do\n"
            '  OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=$rank "$@" || exit 1\ndone\n',
        )
    script, engine = tmp_path / "scripts" / "build me.sh", tmp_path / "it's an engine"
    flags = ["--emit-script", script, "--launcher", launcher, "--json"]
    done = run_cli_here(*list_words(store.get("redrafter", tp_size=2), engine, *flags))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["script"] == str(script)
    subprocess.run(["bash", "-n", script], check=True)
    assert not engine.exists(), "a script builds nothing yet"
    assert [path.name for path in script.parent.iterdir()] == [script.name]
    ran = run_script(script, environment)
    assert ran.returncode == 0, ran.stderr
    written = ["config.json", "rank0.engine", "rank1.engine"]
    assert sorted(p.name for p in engine.iterdir()) == written
    assert not [*tmp_path.rglob("model.cache")], "the timing cache is not left behind"
    again = run_script(script, environment)
    assert again.returncode == 1
    assert "exists" in again.stderr


def test_script_leaves_nothing_of_a_failed_build(store: CheckpointStore, tmp_path: Path) -> None:
    environment = install_double(tmp_path / "double", "0.14")  # which knows no ReDrafter of 1.2
    script, engine = tmp_path / "build.sh", tmp_path / "engine"
    build(store.get("redrafter"), engine, "--emit-script", script)
    ran = run_script(script, environment)
    assert ran.returncode == 1
    assert "Unsupported model architecture" in ran.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("engine")]


def test_script_keeps_an_engine_that_appears_meanwhile(
    store: CheckpointStore, tmp_path: Path
) -> None:
    environment = install_double(tmp_path / "double", "1.2", gpus=[H100])
    script, engine = tmp_path / "build.sh", tmp_path / "engine"
    build(store.get("plain"), engine, "--emit-script", script)
    program = find_program(environment)
    program.rename(program.with_name("real-build"))
    write_script(
        program,
        f'#!/bin/bash\nmkdir "{engine}"; echo precious > "{engine}/x"; exec real-build "$@"\n',
    )
    ran = run_script(script, environment)
    assert ran.returncode == 1, ran.stderr
    assert [path.name for path in engine.iterdir()] == ["x"]


def test_script_for_several_nodes(store: CheckpointStore, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(store.get("plain", tp_size=2), tmp_path / "ckpt")
    config = read_json(checkpoint / "config.json")
    assert config["mapping"]["gpus_per_node"] == 8
    config["mapping"] |= {"gpus_per_node": 1}
    (checkpoint / "config.json").write_text(json.dumps(config))
    script = tmp_path / "build.sh"
    build(checkpoint, tmp_path / "engine", "--emit-script", script, "--launcher", "srun")
    text = script.read_text()
    assert "#SBATCH --nodes=2\n" in text
    assert "srun --mpi=pmix --nodes=2 --ntasks=2 --ntasks-per-node=1 trtllm-build" in text


@pytest.mark.parametrize(
    ("label", "flags", "match"),
    [
        ("0.14", ["--launcher", "mpirun"], "0.14 does not use MPI"),
        ("1.2", ["--launcher", "mpirun", "--workers", "2"], "--workers 2 has no effect under mpi"),
    ],
)
def test_launchers_that_would_not_do_as_told(
    store: CheckpointStore, tmp_path: Path, label: str, flags: list[str], match: str
) -> None:
    script = tmp_path / "build.sh"
    with pytest.raises(SpecDecError, match=match):
        build(
            store.get("plain", label, 2), tmp_path / "engine", "--trtllm-version", label,
            "--emit-script", script, *flags,
        )  # fmt: skip
    assert not script.exists()


def test_existing_script_needs_force(store: CheckpointStore, tmp_path: Path) -> None:
    script = tmp_path / "build.sh"
    script.write_text("precious")
    with pytest.raises(SpecDecError, match="exists"):
        build(store.get("plain"), tmp_path / "engine", "--emit-script", script)
    assert script.read_text() == "precious"


# Failures of the child

MESSAGES = [
    ("trtllm-build: error: unrecognized arguments: --foo", "does not know a flag or value: --foo"),
    ("AssertionError: Unsupported model architecture: XForY", "has no architecture XForY"),
    ("TypeError: Mapping.__init__() got an unexpected keyword argument 'cp_config'",
     "the key cp_config, which this TensorRT-LLM does not know"),
    ("KeyError: 'eagle_nets.0.drafter.fc.bias'", "lacks the tensor eagle_nets.0.drafter.fc.bias"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "the GPU's memory is full"),
    ("Requested amount of GPU memory (7 bytes) could not be allocated", "the GPU's memory is full"),
    ("std::bad_alloc", "this machine's memory is full"),
    ("OSError: [Errno 28] No space left on device", "the disk is full"),
    ("ValueError: max_workers must be greater than 0", "found no usable GPU or driver"),
    ("[TRT] [E] Could not find any implementation for node {A}.", "no kernel for {A}."),
    ("ImportError: libmpi.so.40: cannot open shared object file: No such file",
     "a library is missing: libmpi.so.40"),
    ("ModuleNotFoundError: No module named 'mpi4py'", "lacks the module mpi4py"),
    ("RuntimeError: something new\n  at line 3", "raised RuntimeError: something new"),
    ("gibberish", "failed with status 3"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "fact"), MESSAGES, ids=[fact[:24] for _, fact in MESSAGES])
def test_failure_is_explained(
    store: CheckpointStore, install: Any, tmp_path: Path, message: str, fact: str
) -> None:
    script = f"#!/bin/sh\ncat <<'EOF'\nfirst line\n{message}\nEOF\nexit 3\n"
    write_script(find_program(install("1.2")), script)
    with pytest.raises(SpecDecError) as caught:
        build(store.get("plain"), tmp_path / "engine")
    assert fact in caught.value.message
    assert message.splitlines()[-1].strip() in caught.value.message, "its last lines are shown"
    log = tmp_path / "engine.build.log"
    assert str(log) in caught.value.hint
    assert message in log.read_text()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"double-1.2", "engine.build.log"}, "no engine folder is left"


REFUSALS: list[tuple[str, str, tuple[str, ...], str]] = [
    ("plain", "0.14", ("--gemm-plugin", "int64"), "does not know a flag or value: 'int64'"),
    ("plain", "1.2", ("--logits-dtype", "bfloat16"), "does not know a flag or value: 'bfloat16'"),
    ("plain", "1.2", ("--multiple-profiles", "enable", "--opt-num-tokens", "64"),
     "raised RuntimeError: multiple_profiles is enabled"),
    ("eagle", "1.2", ("--max-batch-size", "513"), "raised AssertionError: Max batch size > 512"),
    ("plain 1.2", "0.14", (), "the key cp_config, which this TensorRT-LLM does not know"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "label", "flags", "fact"), REFUSALS)
def test_what_trtllm_build_refuses_is_left_to_it_and_explained(
    store: CheckpointStore, install: Any, tmp_path: Path, kind: str, label: str,
    flags: tuple[str, ...], fact: str,
) -> None:  # fmt: skip
    """Its own refusal ends the command with status 1, its last lines and nothing half-written."""
    install(label)
    method, _, line = kind.partition(" ")
    checkpoint = store.get(method, line or label)
    if line:
        mapping = read_json(checkpoint / "config.json")["mapping"] | {"cp_config": {}}
        checkpoint = store.copy(tmp_path / "checkpoint", method, line, mapping=mapping)
    done = run_cli_here(*list_words(checkpoint, tmp_path / "engine", *flags))
    assert (done.returncode, done.stdout) == (1, "")
    error, hint = read_error_lines(done.stderr)
    assert fact in error
    assert "its last lines: " in error
    assert str(tmp_path / "engine.build.log") in hint
    assert not (tmp_path / "engine").exists()


def test_full_disk_is_told_before_the_build(
    store: CheckpointStore, install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("1.2")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(SpecDecError, match="the engine takes at least 0.4 MB, .* 0.0 MB free"):
        build(store.get("plain"), tmp_path / "engine")


@pytest.mark.parametrize(
    ("line", "match"),
    [("kill -9 $$", "was killed, as the system does when memory is full"),
     ("exit 0", "without config.json, rank0.engine")],
)  # fmt: skip
def test_child_that_is_killed_or_writes_no_engine(
    store: CheckpointStore, install: Any, tmp_path: Path, line: str, match: str
) -> None:
    write_script(find_program(install("1.2")), f"#!/bin/sh\n{line}\n")
    with pytest.raises(SpecDecError, match=match):
        build(store.get("plain"), tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_interrupt_ends_the_child_and_its_workers(store: CheckpointStore, tmp_path: Path) -> None:
    environment = install_double(tmp_path / "double", "1.2")
    program = tmp_path / "double" / "bin" / "trtllm-build"
    # A worker that is deaf to polite signals, in the background of its parent.
    write_script(
        program,
        f"#!/bin/bash\n(trap '' INT TERM; echo $BASHPID > {tmp_path}/worker; sleep 60) &\n"
        "echo started\nwait\n",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec",
         *map(str, list_words(store.get("plain"), tmp_path / "engine"))],
        cwd=ROOT, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    worker = tmp_path / "worker"
    while not (worker.is_file() and worker.read_text().strip()):
        assert process.poll() is None, "ended before its worker began"
        time.sleep(0.05)
    number = int(worker.read_text())
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 130, stderr
    assert "error: interrupted" in stderr
    stat, deadline = Path(f"/proc/{number}/stat"), time.monotonic() + 300
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the worker was left behind"
        time.sleep(0.05)
    assert {path.name for path in tmp_path.iterdir()} == {"double", "worker"}
