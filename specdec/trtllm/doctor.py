"""Doctor's section of TensorRT-LLM: what it builds and runs here, its pins, and an engine of it."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from specdec.checkpoint.config import CheckpointConfig
from specdec.errors import Problems, join_names
from specdec.files.reading import read_json
from specdec.system.machine import order_release
from specdec.system.requirements import (
    MIN_VERSIONS,
    choose_reasons,
    find_memory_problems,
    read_gpus,
)

from .engine_folder import list_mode_names
from .environment import (
    BUILD_COMMAND,
    MIN_CAPABILITY,
    MIN_CAPABILITY_FP8,
    Environment,
    compare_environments,
)
from .facts import LABELS, Facts, explain_unknown, find_facts, load_facts
from .lacks import list_defects
from .support import is_installed

Machine = Mapping[str, Any]
PACKAGES = {
    "tensorrt_llm": ("tensorrt-llm",), "modelopt": ("nvidia-modelopt",), "mpi4py": ("mpi4py",),
}  # fmt: skip
COLUMNS = ("tensorrt_llm", "python", "tensorrt", "cuda", "torch", "transformers", "modelopt")


def describe_machine() -> dict[str, Any]:
    """Return where its command is; of a package that cannot be imported, that there is none."""
    report: dict[str, Any] = {"trtllm_build": shutil.which(BUILD_COMMAND)}
    if not is_installed():
        report["packages"] = {"tensorrt_llm": None}
    return report


def list_abilities(machine: Machine) -> dict[str, list[str]]:
    """Return what can be done with TensorRT-LLM, with the reasons why it cannot be done here."""
    reasons = _find_reasons(machine)
    has_no_command = not machine["trtllm_build"] and machine["packages"]["tensorrt_llm"] is not None
    builds = reasons + choose_reasons((has_no_command, f"{BUILD_COMMAND} is not on PATH"))
    return {
        "write a TensorRT-LLM build down (--dry-run, --emit-script)": [],
        "build TensorRT-LLM engines": builds,
        "build TensorRT-LLM engines of an FP8 checkpoint": (
            builds + _find_capability_reasons(machine, MIN_CAPABILITY_FP8)
        ),
        "run TensorRT-LLM engines": reasons,
        "run TensorRT-LLM engines of several ranks": reasons + choose_reasons(
            (not _can_start_ranks(machine["mpi"]["launchers"]),
             "neither mpirun nor srun is found"),
            (len(machine["gpus"]) == 1, "one GPU is visible"),
        ),
    }  # fmt: skip


def _can_start_ranks(launchers: Collection[str]) -> bool:
    """Return whether several ranks can be started.

    specdec-run calls mpirun, or is called by srun.
    """
    return bool({"mpirun", "srun"} & set(launchers))


def _find_capability_reasons(machine: Machine, min_capability: tuple[int, int]) -> list[str]:
    return [
        f"{gpu.name} has compute capability {gpu.compute_capability},"
        f" {min_capability[0]}.{min_capability[1]} is needed"
        for gpu in read_gpus(machine)[:1]
        if gpu.capability < min_capability
    ]


def _find_reasons(machine: Machine) -> list[str]:
    """Return why its engines are neither built nor run here."""
    version, cuda = machine["packages"]["tensorrt_llm"], machine["cuda"]
    runtime, driver = cuda["runtime"], cuda["driver"]
    is_old = runtime and driver and order_release(driver) < order_release(runtime)
    is_unknown = version is not None and find_facts(version) is None
    return [
        *choose_reasons(
            (version is None, "TensorRT-LLM is not installed"),
            (is_unknown, explain_unknown(version)[0] if is_unknown else ""),
            (version is not None and machine["packages"].get("mpi4py") is None,
             "mpi4py is not installed, and TensorRT-LLM does not load without it"),
            (not machine["gpus"], "no GPU is visible"),
        ),
        *_find_capability_reasons(machine, MIN_CAPABILITY),
        *choose_reasons(
            (is_old, f"the driver runs CUDA {driver} at most, torch is built for {runtime}")
        ),
    ]  # fmt: skip


def describe_pins(machine: Machine) -> dict[str, Any]:
    """Return the versions that go together, and what of this machine's does not.

    rows: of the table, one for each line of TensorRT-LLM; columns: those of its text.
    """
    return {
        "columns": COLUMNS, "rows": list_pins(), "clashes": list_clashes(),
        "problems": find_pin_problems(machine),
    }  # fmt: skip


def list_pins() -> list[dict[str, Any]]:
    """Return the table of versions that go together, one row for each line of TensorRT-LLM."""
    rows = []
    for label in LABELS:
        facts = load_facts(label)
        first_release, end = facts.releases
        rows.append(
            {"tensorrt_llm": label, "releases": f">={first_release},<{end}", **facts.pins,
             "fits": not find_clashes(facts), "source": facts.pins_source}
        )  # fmt: skip
    return rows


def find_clashes(facts: Facts) -> list[str]:
    """List the packages that a line pins older than specdec asks for.

    pip cannot install such a line and specdec together.
    """
    return [
        f"{name} {facts.pins[name]}"
        for name, min_version in MIN_VERSIONS.items()
        if order_release(facts.pins[name]) < min_version
    ]


def list_clashes() -> list[str]:
    """Return why some lines do not fit into one environment with specdec, a text for each."""
    requirements = " and ".join(
        f"{name} {'.'.join(map(str, version))}" for name, version in MIN_VERSIONS.items()
    )
    return [
        f"TensorRT-LLM {label} brings {' and '.join(clashes)}, specdec asks for {requirements} or"
        " newer: pip cannot install them together"
        for label in LABELS
        if (clashes := find_clashes(load_facts(label)))
    ]


def find_pin_problems(machine: Machine) -> list[str]:
    """List the packages that are installed in another version than goes with TensorRT-LLM."""
    packages = machine["packages"]
    installed_release = packages["tensorrt_llm"]
    facts = find_facts(installed_release) if installed_release else None
    # The pins are those of the line's own release; an earlier 1.x had others.
    release = ".".join(map(str, order_release(installed_release or "")))
    if facts is None or facts.label != release:
        return []
    installed = {"python": machine["python"], "cuda": machine["cuda"]["runtime"], **packages}
    problems = []
    for name, pinned in facts.pins.items():
        version = installed.get(name)
        releases = [order_release(text) for text in pinned.split(", ")]
        if version is not None and order_release(version) not in releases:
            problems.append(
                f"TensorRT-LLM {installed_release} goes with {name}"
                f" {pinned.replace(', ', ' or ')}, here is {version}"
            )
    return problems


def check_engine(
    folder: Path, document: Mapping[str, Any], checkpoint: CheckpointConfig, machine: Machine
) -> tuple[Problems, list[str]]:
    """Return what keeps an engine from running here, and notes beside it."""
    num_ranks = checkpoint.model.tp_size * checkpoint.model.pp_size
    paths = [folder / f"rank{rank}.engine" for rank in range(num_ranks)]
    problems = Problems()
    notes: list[str] = []
    if missing_files := [path.name for path in paths if not path.is_file()]:
        problems.add(f"{folder} lacks {join_names(missing_files)}", "copy the folder again")
    manifest = folder / "manifest.json"
    build_environment = read_json(manifest).get("environment") if manifest.is_file() else None
    if not isinstance(build_environment, dict):
        notes.append("it has no record of the machine that built it: only its version is compared")
        build_environment = {"tensorrt_llm": document.get("version")}
    environment = read_reported(machine)
    stops, warnings = compare_environments(build_environment, environment, num_ranks=num_ranks)
    problems += stops
    notes += [f"{fact}: {remedy}" for fact, remedy in warnings]
    mode = list_mode_names().get(document["build_config"].get("speculative_decoding_mode"))
    notes += list_defects(str(document.get("version")), mode, checkpoint.raw)
    problems += Problems.from_table(
        (num_ranks > 1 and not _can_start_ranks(machine["mpi"]["launchers"]),
         f"the engine has {num_ranks} ranks and no mpirun is found", "install OpenMPI"),
        (environment.tensorrt_llm is not None and machine["packages"].get("mpi4py") is None,
         "TensorRT-LLM does not load without mpi4py, which is not installed",
         "pip install mpi4py"),
    )  # fmt: skip
    if environment.gpus and not missing_files:
        size, gpu = max(path.stat().st_size for path in paths), environment.gpus[0]
        problems += find_memory_problems(size, gpu.memory_bytes, gpu.name)
    return problems, notes


def read_reported(machine: Machine) -> Environment:
    """Return the environment of a machine's report, as an engine's manifest would record it."""
    packages, cuda = machine["packages"], machine["cuda"]
    return Environment(
        tensorrt_llm=packages["tensorrt_llm"], tensorrt=packages["tensorrt"],
        cuda=cuda["runtime"], cuda_driver=cuda["driver"], driver=cuda["driver_version"],
        gpus=read_gpus(machine),
    )  # fmt: skip
