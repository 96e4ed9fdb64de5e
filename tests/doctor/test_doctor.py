"""specdec doctor: what is here, what can be done, whether an engine can run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.doctor.abilities import list_abilities
from specdec.doctor.engine import check_engine
from specdec.doctor.machine import describe_machine, read_memory
from specdec.doctor.report import examine, find_error, format_report
from specdec.doctor.settings import DoctorSettings
from specdec.engine import compiler
from specdec.engine.doctor import describe_kernels
from specdec.errors import SpecDecError
from specdec.files.reading import read_json, write_json
from specdec.system.machine import Gpu
from specdec.trtllm.doctor import find_pin_problems, list_pins
from specdec.trtllm.environment import Environment
from tests.conftest import ROOT, make_llama, read_error_lines, run_cli
from tests.engine.kernels import FORMS, needs_compiler
from tests.engines import call, make_engine, run_cli_here
from tests.trtllm.checkpoints import CheckpointStore
from tests.trtllm.double import H100, install_double, write_script

T4 = Gpu(name="Tesla T4", compute_capability="7.5", memory_bytes=16 << 30)
ENVIRONMENT = Environment(
    tensorrt_llm="1.2.0", tensorrt="10.13.3.9", cuda="13.0", cuda_driver="13.0", gpus=(H100,)
)
MACHINE: dict[str, Any] = {
    "python": "3.12.3", "compiler": "/usr/bin/g++", "trtllm_build": "/usr/bin/trtllm-build",
    "packages": {"torch": "2.9.0", "transformers": "4.57.1", "tensorrt": "10.13.3.9",
                 "tensorrt_rtx": "1.7.1.116", "tensorrt_llm": "1.2.0", "modelopt": None,
                 "mpi4py": "4.1.0", "gguf": "0.17.1"},
    "tensorrt": {"name": "tensorrt_rtx 1.7.1.116", "compute_capabilities": ["8.9", "9.0"],
                 "error": None},
    "cuda": {"runtime": "13.0", "driver": "13.0", "driver_version": "580"},
    "mpi": {"launchers": {"mpirun": "/usr/bin/mpirun"}, "version": "mpirun (Open MPI) 4.1"},
    "cpu": {"cores": 8, "memory_bytes": 64 << 30, "available_bytes": 32 << 30},
}  # fmt: skip


def put(machine: dict[str, Any], environment: Environment) -> dict[str, Any]:
    """A machine's report with the versions and GPUs of an environment."""
    versions = {"tensorrt_llm": environment.tensorrt_llm, "tensorrt": environment.tensorrt}
    return machine | {
        "gpus": environment.to_json()["gpus"], "packages": machine["packages"] | versions,
        "cuda": {"runtime": environment.cuda, "driver": environment.cuda_driver,
                 "driver_version": environment.driver},
    }  # fmt: skip


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An engine of each backend."""
    parent = tmp_path_factory.mktemp("engines")
    torch = make_engine(parent, make_llama(parent), optimize="none")
    store = CheckpointStore(tmp_path_factory.mktemp("checkpoints"))
    environment = install_double(parent / "double", "1.2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", environment["PATH"])
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.syspath_prepend(str(parent / "double" / "site"))
        call("build", "--backend", "tensorrt-llm", "--checkpoint-dir", store.get("redrafter"),
             "--output-dir", parent / "tensorrt")  # fmt: skip
    return {"torch": torch, "tensorrt-llm": parent / "tensorrt"}


def test_report_of_this_machine() -> None:
    process = run_cli("doctor", "--json")
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    report = json.loads(process.stdout)
    import torch

    # A package's own version need not tell the build: torch of the index says +cu130 only itself.
    assert torch.__version__.startswith(report["packages"]["torch"])
    assert report["packages"]["tensorrt_llm"] is None
    can = {ability["what"]: ability["can"] for ability in report["abilities"]}
    assert can["convert checkpoints"]
    assert can["build and run on the torch backend"]
    assert not can["build TensorRT-LLM engines"]
    assert report["cpu"]["cores"] == os.cpu_count()
    assert 0 < report["cpu"]["available_bytes"] <= report["cpu"]["memory_bytes"]
    assert read_memory("NoSuchKey") is None
    assert [row["tensorrt_llm"] for row in report["pins"]] == ["1.2", "0.14"]
    assert "engine" not in report


def test_text_tells_the_same(tmp_path: Path) -> None:
    environment = install_double(tmp_path / "double", "1.2", gpus=[H100, H100])
    write_script(tmp_path / "double" / "bin" / "mpirun", "#!/bin/sh\necho 'mpirun (Toy) 1.0'\n")
    process = run_cli("doctor", env=environment)
    assert process.returncode == 0, process.stderr
    for line in (
        "  tensorrt_llm: 1.2.0", "  tensorrt: 10.13.3.9", "  MPI: mpirun (Toy) 1.0",
        f"  GPU 1: {H100.name}, compute capability 9.0, 80 GiB",
        "  yes build TensorRT-LLM engines", "  yes run TensorRT-LLM engines of several ranks",
    ):  # fmt: skip
        assert line in process.stdout.splitlines()
    assert "Versions that go together:" in process.stdout


@needs_compiler
@pytest.mark.parametrize("form", FORMS)
def test_arithmetic_of_the_kernels(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the compiler reads the kernels' source, whatever this processor is."""
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, *FORMS[form]))
    kinds = describe_kernels()
    if form in ("pairs", "bands"):
        assert kinds["bfloat16"] == form
    if form == "sse2":
        assert set(kinds.values()) == {"product and sum"}
    if form in ("avx2", "bands"):
        assert kinds["others"] == "fused"
    assert set(kinds) == {"others", "bfloat16"}


def test_arithmetic_where_nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    report = examine(DoctorSettings())
    for words, message in (
        ("false", " failed with status 1: it printed no message"),
        ("true", " leaves out of the kernels' source how they multiply bfloat16 weights"),
    ):
        monkeypatch.setenv("CXX", words)
        lines = format_report(report | {"kernels": describe_kernels()}).splitlines()
        (line,) = [line for line in lines if "arithmetic" in line]
        assert line == f"  arithmetic of the native kernels: {shutil.which(words)}{message}"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert describe_kernels() == {}
    assert "arithmetic" not in format_report(report | {"kernels": {}})


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from specdec.doctor.report import examine;"
        " from specdec.doctor.settings import DoctorSettings; examine(DoctorSettings());"
        " print([m for m in ('torch', 'transformers', 'tensorrt_llm') if m in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=True)  # fmt: skip
    assert process.stdout.strip() == "[]"


A100 = dataclasses.replace(H100, name="A100", compute_capability="8.0")
OLD_TORCH = {"packages": {**MACHINE["packages"], "torch": "2.4.0"}}
NO_MPI4PY = {"packages": {**MACHINE["packages"], "mpi4py": None}}
MPIEXEC = {"mpi": {"launchers": {"mpiexec": "/usr/bin/mpiexec"}, "version": None}}
RUN, BUILD = "run TensorRT-LLM engines", "build TensorRT-LLM engines"


@pytest.mark.parametrize(
    ("machine", "change", "ability", "reason"),
    [
        ({}, {"tensorrt_llm": None}, BUILD, "TensorRT-LLM is not installed"),
        ({}, {"gpus": ()}, RUN, "no GPU is visible"),
        ({}, {"gpus": (T4,)}, RUN, "has compute capability 7.5, 8.0 is needed"),
        ({}, {"tensorrt_llm": "0.17.0"}, RUN, "0.17.0 is of a line"),
        ({}, {"cuda_driver": "12.4"}, RUN, "the driver runs CUDA 12.4 at most"),
        ({}, {}, f"{RUN} of several ranks", "one GPU is visible"),
        ({}, {"cuda": None}, "the torch backend on a GPU", "built without CUDA"),
        ({}, {"gpus": (A100,)}, f"{BUILD} of an FP8 checkpoint",
         "A100 has compute capability 8.0, 8.9 is needed"),
        (OLD_TORCH, {}, "build and run on the torch backend", "torch 2.4.0 is older than 2.9"),
        (NO_MPI4PY, {}, BUILD, "mpi4py is not installed"),
        (NO_MPI4PY, {}, RUN, "mpi4py is not installed"),
        # specdec-run starts its ranks with mpirun, not with mpiexec.
        (MPIEXEC, {}, f"{RUN} of several ranks", "neither mpirun nor srun"),
        ({}, {"gpus": ()}, "run engines of TensorRT's own layers", "no GPU is visible"),
        ({"tensorrt": {**MACHINE["tensorrt"], "compute_capabilities": ["8.9", "12.0"]}}, {},
         "run engines of TensorRT's own layers",
         f"{H100.name} has compute capability 9.0, tensorrt_rtx 1.7.1.116 builds for 8.9, 12.0"),
        ({"tensorrt": {**MACHINE["tensorrt"], "error": "tensorrt has no layer"}}, {},
         "build engines of TensorRT's own layers", "tensorrt has no layer"),
        ({"packages": {**MACHINE["packages"], "gguf": None}}, {}, "read and write GGUF files",
         "the package gguf is not installed: pip install 'gguf>="),
    ],
)  # fmt: skip
def test_what_stands_in_the_way(
    machine: dict[str, Any], change: dict[str, Any], ability: str, reason: str
) -> None:
    environment = dataclasses.replace(ENVIRONMENT, **change)
    abilities = list_abilities(put(MACHINE, environment) | machine)
    assert any(reason in text for text in abilities[ability]), abilities[ability]


def test_nothing_stands_in_the_way_of_a_whole_machine() -> None:
    environment = dataclasses.replace(ENVIRONMENT, gpus=(H100, H100))
    with_srun = {**MACHINE, "mpi": {"launchers": {"srun": "/usr/bin/srun"}, "version": None}}
    for machine in (MACHINE, with_srun):
        assert [
            name for name, lacks in list_abilities(put(machine, environment)).items() if lacks
        ] == []
    assert find_pin_problems(put(MACHINE, environment)) == []


@pytest.mark.parametrize(
    ("package", "version", "problem"),
    [
        ("torch", "2.10.0", "TensorRT-LLM 1.2.0 goes with torch 2.9, here is 2.10.0"),
        ("tensorrt", "10.4.0", "goes with tensorrt 10.13, here is 10.4.0"),
        ("transformers", "5.0.1", "goes with transformers 4.57, here is 5.0.1"),
    ],
)
def test_versions_that_do_not_go_together(package: str, version: str, problem: str) -> None:
    machine = {**MACHINE, "packages": {**MACHINE["packages"], package: version}}
    (text,) = find_pin_problems(put(MACHINE, ENVIRONMENT) | machine)
    assert problem in text
    # The pins of another release of the line are not known, and not held against it.
    other = machine["packages"] | {"tensorrt_llm": "1.0.0"}
    assert find_pin_problems(put(MACHINE, ENVIRONMENT) | {"packages": other}) == []


def test_the_extra_asks_for_a_line_that_can_be_installed() -> None:
    """Each line of TensorRT-LLM pins torch and transformers; pip knows no way around that."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    project = (ROOT / "pyproject.toml").read_text()
    (requirement,) = re.findall(r'^tensorrt-llm = \["(.+)"\]$', project, re.MULTILINE)
    releases = Requirement(requirement).specifier
    texts = re.findall(r'^  "((?:torch|transformers)[<>=][^"]+)",$', project, re.MULTILINE)
    specifiers = {dependency.name: dependency.specifier for dependency in map(Requirement, texts)}
    assert set(specifiers) == {"torch", "transformers"}
    for row in list_pins():
        assert row["source"]
        assert {"python", "tensorrt", "cuda", "torch", "modelopt"} <= set(row)
        fits = all(Version(f"{row[name]}.1") in specifier for name, specifier in specifiers.items())
        assert row["fits"] == fits == (Version(f"{row['tensorrt_llm']}.0") in releases)
    assert Version("1.1.0") not in releases
    assert Version("1.3.0") not in releases
    report = format_report(examine(DoctorSettings()))
    assert "TensorRT-LLM 0.14 brings torch 2.4 and transformers 4.42, specdec asks for" in report
    assert "TensorRT-LLM 1.2 brings" not in report


# Engines


def test_torch_engine_can_run_here(engines: dict[str, Path]) -> None:
    process = run_cli_here("doctor", "--engine-dir", engines["torch"], "--json")
    assert process.returncode == 0, process.stderr
    engine = json.loads(process.stdout)["engine"]
    assert engine["can_run"]
    assert (engine["backend"], engine["tp_size"], engine["dtype"]) == ("torch", 1, "float32")
    assert engine["notes"] == ["it has no native kernels: it runs on torch's own operators"]


def test_tensorrt_engine_cannot_run_here(engines: dict[str, Path]) -> None:
    process = run_cli_here("doctor", "--engine-dir", engines["tensorrt-llm"], "--json")
    assert process.returncode == 1
    fact, hint = read_error_lines(process.stderr)
    assert "built with TensorRT-LLM 1.2.0, which is not installed here, and 1 more" in fact
    assert "tensorrt-llm==1.2.0" in hint
    engine = json.loads(process.stdout)["engine"]
    assert not engine["can_run"]
    assert len(engine["problems"]) == 2


def test_tensorrt_engine_where_it_was_built(engines: dict[str, Path]) -> None:
    report = check_engine(engines["tensorrt-llm"], put(MACHINE, ENVIRONMENT))
    assert report["can_run"], report["problems"]
    assert (report["backend"], report["method"]) == ("tensorrt-llm", "redrafter")
    environment = dataclasses.replace(ENVIRONMENT, tensorrt="10.4.0", gpus=(T4,))
    facts = [problem["fact"] for problem in check_engine(
        engines["tensorrt-llm"], put(MACHINE, environment))["problems"]]  # fmt: skip
    assert "built with TensorRT 10.13.3.9, here is 10.4.0" in facts[0]
    assert "built for compute capability 9.0" in facts[1]


def test_engine_of_trtllm_build_alone_has_only_its_version(
    engines: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(engines["tensorrt-llm"], tmp_path / "engine")
    (folder / "manifest.json").unlink()
    report = check_engine(folder, put(MACHINE, ENVIRONMENT))
    assert report["can_run"]
    assert "no record of the machine" in report["notes"][0]
    assert not any("issue 3125" in note for note in report["notes"])
    document = read_json(folder / "config.json")
    write_json(folder / "config.json", document | {"version": "0.14.0"})
    assert any(
        "issue 3125" in note for note in check_engine(folder, put(MACHINE, ENVIRONMENT))["notes"]
    )
    write_json(folder / "config.json", document)
    newer = dataclasses.replace(ENVIRONMENT, tensorrt_llm="1.2.1")
    assert "built with TensorRT-LLM 1.2.0, here is 1.2.1" in check_engine(
        folder, put(MACHINE, newer))["problems"][0]["fact"]  # fmt: skip


def test_missing_rank_missing_weights_and_little_memory(
    engines: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(engines["tensorrt-llm"], tmp_path / "trt")
    (folder / "rank0.engine").unlink()
    assert (
        "lacks rank0.engine"
        in check_engine(folder, put(MACHINE, ENVIRONMENT))["problems"][0]["fact"]
    )
    folder = shutil.copytree(engines["torch"], tmp_path / "torch")
    small = {**MACHINE, "cpu": {**MACHINE["cpu"], "available_bytes": 1000}}
    cpu = Environment()
    assert "this machine has 0.0 GB" in check_engine(folder, put(small, cpu))["problems"][0]["fact"]
    (folder / "weights.safetensors").unlink()
    fact = check_engine(folder, put(MACHINE, cpu))["problems"][0]["fact"]
    assert "weights.safetensors does not exist" in fact


def test_kernels_of_another_cpu_are_noted(engines: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(engines["torch"], tmp_path / "engine")
    document = read_json(folder / "config.json")
    document["torch_config"]["kernels"] = {"cpu": "another"}
    write_json(folder / "config.json", document)
    for compiler_, message in (
        ("g++", "not kept here: the first run compiles them"),
        (None, "there is no C++ compiler: it runs on torch's own operators"),
    ):
        report = check_engine(folder, put({**MACHINE, "compiler": compiler_}, Environment()))
        assert report["can_run"]
        assert message in report["notes"][0]


@pytest.mark.parametrize("content", [None, "{}", "[]", '{"build_config": 3}', "{"])
def test_folder_that_is_no_engine(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(SpecDecError):
        check_engine(tmp_path, put(MACHINE, ENVIRONMENT))


def test_text_of_an_engine_that_cannot_run(engines: dict[str, Path]) -> None:
    machine = describe_machine()
    environment = dataclasses.replace(ENVIRONMENT, gpus=())
    report = {
        **machine, "abilities": [], "pins": list_pins(), "problems": [],
        "engine": check_engine(engines["tensorrt-llm"], put(MACHINE, environment)),
    }  # fmt: skip
    text = format_report(report)
    assert ": cannot run here" in text
    assert "no GPU is visible" in text
    error = find_error(report)
    assert error is not None
    assert "no GPU is visible" in error.message
    assert find_error({"engine": {"can_run": True}}) is None
    assert find_error({}) is None
