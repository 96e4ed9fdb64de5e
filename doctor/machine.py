"""Description of this machine, read without importing its packages; TensorRT alone is asked."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.engine.compiler import describe_arithmetic, find_compiler
from specdec.errors import SpecDecError
from specdec.system.processes import read_memory
from specdec.trt.library import Library, describe_library, load_tensorrt
from specdec.trtllm.environment import (
    BUILD_COMMAND,
    Environment,
    find_version,
    is_importable,
    read_environment,
)

LAUNCHERS = ("mpirun", "mpiexec", "srun")
MPI_SECONDS = 10
# Distributions by the name that users know; several where a package has had several.
PACKAGES = {
    **{name: (name,) for name in ("torch", "transformers", "numpy", "safetensors", "accelerate")},
    "tensorrt_llm": ("tensorrt-llm",),
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt_rtx": ("tensorrt-rtx-cu12-bindings", "tensorrt-rtx-cu13-bindings", "tensorrt-rtx"),
    "modelopt": ("nvidia-modelopt",),
    "mpi4py": ("mpi4py",),
    "gguf": ("gguf",),
    "triton": ("triton", "pytorch-triton"),
}


def describe_machine() -> tuple[dict[str, Any], Environment]:
    """Return the machine's part of a report, and the environment of TensorRT-LLM's engines."""
    environment = read_environment()
    packages = {name: find_version(*names) for name, names in PACKAGES.items()}
    packages["tensorrt_llm"] = environment.tensorrt_llm
    if not is_importable("torch"):
        packages["torch"] = None
    report = {
        "specdec": __version__, "python": platform.python_version(),
        "platform": platform.platform(), "packages": packages,
        "cuda": {"runtime": environment.cuda, "driver": environment.cuda_driver,
                 "driver_version": environment.driver},
        "mpi": describe_mpi(), "trtllm_build": shutil.which(BUILD_COMMAND),
        "gpus": environment.to_json()["gpus"],
        "cpu": {"cores": os.cpu_count(), "memory_bytes": read_memory("MemTotal"),
                "available_bytes": read_memory("MemAvailable")},
        "compiler": find_compiler(), "kernels": describe_kernels(), "tensorrt": describe_tensorrt(),
        "disk": {"path": str(Path.cwd()), "free_bytes": shutil.disk_usage(Path.cwd()).free},
    }  # fmt: skip
    return report, environment


def describe_kernels() -> dict[str, str]:
    """Return how the native kernels multiply here, or the error where they do not compile."""
    compiler = find_compiler()
    if compiler is None:
        return {}
    try:
        return describe_arithmetic(compiler)
    except SpecDecError as error:
        return {"error": error.message}


def describe_tensorrt() -> dict[str, Any]:
    """Return the library that builds engines of TensorRT's layers, its GPUs, or its error."""
    try:
        trt = load_tensorrt()
    except SpecDecError as error:
        return {**Library("none", [])._asdict(), "error": f"{error.message}: {error.hint}"}
    return {**describe_library(trt)._asdict(), "error": None}


def describe_mpi() -> dict[str, Any]:
    """Return the installed launchers, and the version that the first of MPI's own prints."""
    launchers = {name: path for name in LAUNCHERS if (path := shutil.which(name)) is not None}
    launcher, version = launchers.get("mpirun") or launchers.get("mpiexec"), None
    if launcher is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            process = subprocess.run(
                [launcher, "--version"], capture_output=True, text=True, timeout=MPI_SECONDS,
                check=False,
            )  # fmt: skip
            version = next(iter(process.stdout.splitlines()), None)
    return {"launchers": launchers, "version": version}
