"""Doctor's section of the torch backend: what it builds and runs here, and an engine of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.checkpoint.config import CheckpointConfig
from specdec.engine.compiler import describe_arithmetic, describe_cpu, find_compiler
from specdec.engine.kernel_cache import find_kept
from specdec.engine.layout import EngineConfig, read_engine_config
from specdec.engine.weight_files import find_engine_problems
from specdec.errors import Problems, SpecDecError
from specdec.system.machine import order_release
from specdec.system.requirements import (
    MIN_VERSIONS,
    choose_reasons,
    find_memory_problems,
    find_torch_reasons,
    read_gpus,
)

Machine = Mapping[str, Any]
PACKAGES = {name: (name,) for name in ("torch", "transformers", "numpy", "safetensors")} | {
    "triton": ("triton", "pytorch-triton")
}


def describe_machine() -> dict[str, Any]:
    """Return the compiler of a machine's report, and how its kernels multiply."""
    return {"compiler": find_compiler(), "kernels": describe_kernels()}


def describe_kernels() -> dict[str, str]:
    """Return how the native kernels multiply here, or the error where they do not compile."""
    compiler = find_compiler()
    if compiler is None:
        return {}
    try:
        return describe_arithmetic(compiler)
    except SpecDecError as error:
        return {"error": error.message}


def list_abilities(machine: Machine) -> dict[str, list[str]]:
    """Return what can be done with the backend, with the reasons why it cannot be done here."""
    torch = find_torch_reasons(machine)
    return {
        "build and run on the torch backend": torch + choose_reasons(
            (not machine["packages"]["transformers"], "transformers is not installed")
        ),
        "native CPU kernels of the torch backend": torch + choose_reasons(
            (not machine["compiler"], "no C++ compiler is found: install g++")
        ),
        "the torch backend on a GPU": torch + choose_reasons(
            (machine["cuda"]["runtime"] is None, "the installed torch is built without CUDA"),
            (not machine["gpus"], "no GPU is visible"),
        ),
    }  # fmt: skip


def describe_pins(machine: Machine) -> dict[str, Any]:
    """Return nothing: the package's own requirements are what pip has installed."""
    return {}


def check_engine(
    folder: Path, document: Mapping[str, Any], checkpoint: CheckpointConfig, machine: Machine
) -> tuple[Problems, list[str]]:
    """Return what keeps an engine from running here, and notes beside it."""
    problems = Problems()
    torch, min_torch = machine["packages"]["torch"], MIN_VERSIONS["torch"]
    if torch is None or order_release(torch) < min_torch:
        problems.add(
            f"the torch backend needs torch {min_torch[0]}.{min_torch[1]} or newer, here is"
            f" {torch or 'none'}",
            "pip install --upgrade torch",
        )
    config = read_engine_config(folder)
    problems += find_engine_problems(folder, config)
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    ranks, cores = checkpoint.model.tp_size, machine["cpu"]["cores"] or 1
    gpus = read_gpus(machine)
    notes: list[str] = []
    if gpus and machine["cuda"]["runtime"] is not None and config.packing is None:
        problems += find_memory_problems(-(-size // ranks), gpus[0].memory_bytes, gpus[0].name)
        if len(gpus) < ranks:
            notes.append(f"its {ranks} ranks will not have a GPU each: {len(gpus)} visible")
    else:
        if config.packing is None:
            notes += _describe_engine_kernels(config.kernels, machine)
        elif not problems:
            packing_problems, packing_notes = _check_packing(folder, config, machine)
            problems += packing_problems
            notes += packing_notes
        memory_bytes = machine["cpu"]["available_bytes"] or 0
        problems += find_memory_problems(size, memory_bytes, "this machine")
        if cores < ranks > 1:
            notes.append(f"its {ranks} ranks share {cores} cores")
    return problems, notes


def _check_packing(
    folder: Path, config: EngineConfig, machine: Machine
) -> tuple[Problems, list[str]]:
    """Check whether this machine's kernels read an engine's packed matrices."""
    kernels = config.kernels or {}
    is_kept = kernels.get("cpu") == describe_cpu() and find_kept(kernels)
    if machine["compiler"] and not is_kept:  # compiling takes a minute, and is left to a run
        return Problems(), [
            f"its matrices are packed for {kernels.get('cpu')}, and its native kernels are not kept"
            f" here ({describe_cpu()}): the first run compiles them, and tells whether they read it"
        ]
    from specdec.engine.engine_kernels import check_machine

    problems = Problems()
    try:
        check_machine(folder)
    except SpecDecError as error:
        problems.add(error.message, error.hint)
    return problems, []


def _describe_engine_kernels(kernels: dict[str, Any] | None, machine: Machine) -> list[str]:
    """Return a note where an engine's native kernels are not ready on this machine."""
    if kernels is None:
        return ["it has no native kernels: it runs on torch's own operators"]
    if kernels.get("cpu") == describe_cpu() and find_kept(kernels):
        return []
    if machine["compiler"]:
        return ["its native kernels are not kept here: the first run compiles them"]
    return [
        "its native kernels are not kept here and there is no C++ compiler: it runs on torch's own"
        " operators, slower"
    ]
