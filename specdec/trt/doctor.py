"""Doctor's section of the tensorrt backend: what it builds and runs here, and an engine of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.checkpoint.config import CheckpointConfig
from specdec.errors import Problems, SpecDecError
from specdec.system.requirements import (
    choose_reasons,
    find_memory_problems,
    find_torch_reasons,
    read_gpus,
)

from .library import Library, describe_library, load_tensorrt

Machine = Mapping[str, Any]
PACKAGES = {
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt_rtx": ("tensorrt-rtx-cu12-bindings", "tensorrt-rtx-cu13-bindings", "tensorrt-rtx"),
}


def describe_machine() -> dict[str, Any]:
    """Return the library of a machine's report that builds the engines, its GPUs, or its error."""
    try:
        trt = load_tensorrt()
    except SpecDecError as error:
        error_text = f"{error.message}: {error.hint}"
        return {"tensorrt": {**Library("none", [])._asdict(), "error": error_text}}
    return {"tensorrt": {**describe_library(trt)._asdict(), "error": None}}


def list_abilities(machine: Machine) -> dict[str, list[str]]:
    """Return what can be done with the backend, with the reasons why it cannot be done here."""
    library, error, gpus = _read_library(machine), machine["tensorrt"]["error"], read_gpus(machine)
    networks = choose_reasons((error, error))
    gpu_reasons = [library.explain(gpu.name, gpu.compute_capability) for gpu in gpus[:1]]
    return {
        "build engines of TensorRT's own layers": networks + choose_reasons(
            (not library.compute_capabilities and not gpus,
             "no GPU is visible, and only TensorRT-RTX builds for others than this machine's"),
        ),
        "run engines of TensorRT's own layers": networks + find_torch_reasons(machine)
        + choose_reasons(
            *((reason, reason) for reason in gpu_reasons),
            (not gpus, "no GPU is visible"),
            (machine["cuda"]["runtime"] is None, "the installed torch is built without CUDA"),
        ),
    }  # fmt: skip


def _read_library(machine: Machine) -> Library:
    return Library(machine["tensorrt"]["name"], machine["tensorrt"]["compute_capabilities"])


def describe_pins(machine: Machine) -> dict[str, Any]:
    """Return nothing: the extra's own requirements are what pip has installed."""
    return {}


def check_engine(
    folder: Path, document: Mapping[str, Any], checkpoint: CheckpointConfig, machine: Machine
) -> tuple[Problems, list[str]]:
    """Return what keeps an engine from running here, and notes beside it."""
    from .engine import (
        find_machine_problems,
        find_network_problems,
        list_files,
        read_network_config,
    )

    _, networks = read_network_config(folder)
    problems = find_network_problems(folder, checkpoint)
    ranks, gpus = checkpoint.model.tp_size, read_gpus(machine)
    problems += Problems.from_table(
        (0 < len(gpus) < ranks,
         f"its {ranks} ranks need a GPU each, {len(gpus)} visible", "use more GPUs"),
        (not gpus, "it runs on a GPU, and none is visible", "use a machine with a GPU"),
    )  # fmt: skip
    for gpu in gpus[:1]:
        problems += find_machine_problems(
            folder, networks, _read_library(machine), gpu.name, gpu.compute_capability
        )
        if not problems:
            size = sum((folder / file).stat().st_size for file in list_files(checkpoint))
            problems += find_memory_problems(-(-size // ranks), gpu.memory_bytes, gpu.name)
    return problems, []
