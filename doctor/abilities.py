"""Abilities of a machine, reasons for those that it lacks, and versions that go together."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from specdec.errors import name_extra
from specdec.trt.library import Library
from specdec.trtllm.environment import MIN_CAPABILITY, MIN_CAPABILITY_FP8, Environment
from specdec.trtllm.facts import (
    LABELS,
    Facts,
    explain_unknown,
    find_facts,
    load_facts,
    order_release,
)

MIN_TORCH = (2, 9)
MIN_VERSIONS = {"torch": MIN_TORCH, "transformers": (4, 57)}


def list_abilities(machine: dict[str, Any], environment: Environment) -> dict[str, list[str]]:
    """Return what specdec can do, by name, with the reasons why it cannot be done here."""
    packages, launchers = machine["packages"], machine["mpi"]["launchers"]
    torch = _find_torch_reasons(packages["torch"])
    tensorrt = _find_tensorrt_reasons(machine, environment)
    trt_facts = machine["tensorrt"]
    library = Library(trt_facts["name"], trt_facts["compute_capabilities"])
    networks = _choose((trt_facts["error"], trt_facts["error"]))
    gpu_reasons = [
        library.explain(gpu.name, gpu.compute_capability) for gpu in environment.gpus[:1]
    ]
    has_no_command = not machine["trtllm_build"] and environment.tensorrt_llm is not None
    builds = tensorrt + _choose((has_no_command, "trtllm-build is not on PATH"))
    return {
        "convert checkpoints": [],
        "read and write GGUF files": _choose(
            (not packages["gguf"], f"the package gguf is not installed: {name_extra('gguf')}")
        ),
        "write a TensorRT-LLM build down (--dry-run, --emit-script)": [],
        "build and run on the torch backend": torch + _choose(
            (not packages["transformers"], "transformers is not installed")
        ),
        "native CPU kernels of the torch backend": torch + _choose(
            (not machine["compiler"], "no C++ compiler is found: install g++")
        ),
        "the torch backend on a GPU": torch + _choose(
            (environment.cuda is None, "the installed torch is built without CUDA"),
            (not environment.gpus, "no GPU is visible"),
        ),
        "build engines of TensorRT's own layers": networks + _choose(
            (not library.compute_capabilities and not environment.gpus,
             "no GPU is visible, and only TensorRT-RTX builds for others than this machine's"),
        ),
        "run engines of TensorRT's own layers": networks + torch + _choose(
            *((reason, reason) for reason in gpu_reasons),
            (not environment.gpus, "no GPU is visible"),
            (environment.cuda is None, "the installed torch is built without CUDA"),
        ),
        "build TensorRT-LLM engines": builds,
        "build TensorRT-LLM engines of an FP8 checkpoint": (
            builds + _find_capability_reasons(environment, MIN_CAPABILITY_FP8)
        ),
        "run TensorRT-LLM engines": tensorrt,
        "run TensorRT-LLM engines of several ranks": tensorrt + _choose(
            (not can_start_ranks(launchers), "neither mpirun nor srun is found"),
            (len(environment.gpus) == 1, "one GPU is visible"),
        ),
    }  # fmt: skip


def _choose(*rows: tuple[object, str]) -> list[str]:
    """Return the reasons of the rows (condition, reason) whose condition holds."""
    return [reason for condition, reason in rows if condition]


def can_start_ranks(launchers: Collection[str]) -> bool:
    """Return whether several ranks can be started.

    specdec-run calls mpirun, or is called by srun.
    """
    return bool({"mpirun", "srun"} & set(launchers))


def _find_torch_reasons(version: str | None) -> list[str]:
    if version is None:
        return ["torch is not installed"]
    min_version = ".".join(map(str, MIN_TORCH))
    fact = f"torch {version} is older than {min_version}, the first that loads files safely"
    return _choose((order_release(version) < MIN_TORCH, fact))


def _find_capability_reasons(
    environment: Environment, min_capability: tuple[int, int]
) -> list[str]:
    return [
        f"{gpu.name} has compute capability {gpu.compute_capability},"
        f" {min_capability[0]}.{min_capability[1]} is needed"
        for gpu in environment.gpus[:1]
        if gpu.capability < min_capability
    ]


def _find_tensorrt_reasons(machine: dict[str, Any], environment: Environment) -> list[str]:
    version, driver = environment.tensorrt_llm, environment.cuda_driver
    runtime = machine["cuda"]["runtime"]
    reasons = _choose((version is None, "TensorRT-LLM is not installed"))
    if version is not None and find_facts(version) is None:
        reasons.append(explain_unknown(version)[0])
    is_old = runtime and driver and order_release(driver) < order_release(runtime)
    return [
        *reasons,
        *_choose(
            (version is not None and machine["packages"].get("mpi4py") is None,
             "mpi4py is not installed, and TensorRT-LLM does not load without it"),
            (not environment.gpus, "no GPU is visible"),
        ),
        *_find_capability_reasons(environment, MIN_CAPABILITY),
        *_choose((is_old, f"the driver runs CUDA {driver} at most, torch is built for {runtime}")),
    ]  # fmt: skip


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


def find_pin_problems(machine: dict[str, Any], environment: Environment) -> list[str]:
    """List the packages that are installed in another version than goes with TensorRT-LLM."""
    facts = find_facts(environment.tensorrt_llm) if environment.tensorrt_llm else None
    # The pins are those of the line's own release; an earlier 1.x had others.
    release = ".".join(map(str, order_release(environment.tensorrt_llm or "")))
    if facts is None or facts.label != release:
        return []
    installed = {"python": machine["python"], "cuda": environment.cuda, **machine["packages"]}
    problems = []
    for name, pinned in facts.pins.items():
        version = installed.get(name)
        releases = [order_release(text) for text in pinned.split(", ")]
        if version is not None and order_release(version) not in releases:
            problems.append(
                f"TensorRT-LLM {environment.tensorrt_llm} goes with {name}"
                f" {pinned.replace(', ', ' or ')}, here is {version}"
            )
    return problems
