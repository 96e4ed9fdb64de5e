"""Description of this machine, read without importing its packages; TensorRT alone is asked."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.files.backends import BACKENDS
from specdec.system.machine import (
    find_version,
    is_importable,
    list_gpus,
    read_cuda_driver,
    read_torch_cuda,
)
from specdec.system.processes import read_memory

LAUNCHERS = ("mpirun", "mpiexec", "srun")
MPI_SECONDS = 10
# Distributions by the name that users know, beside those of the backends.
PACKAGES = {name: (name,) for name in ("accelerate", "gguf")}


def describe_machine() -> dict[str, Any]:
    """Return the machine's part of a report."""
    gpus, driver = list_gpus()
    sections = [backend.load("doctor") for backend in BACKENDS.values()]
    names = {
        name: each
        for part in (PACKAGES, *(s.PACKAGES for s in sections))
        for name, each in part.items()
    }
    packages = {name: find_version(*distributions) for name, distributions in names.items()}
    if not is_importable("torch"):
        packages["torch"] = None
    report: dict[str, Any] = {
        "specdec": __version__, "python": platform.python_version(),
        "platform": platform.platform(), "packages": packages,
        "cuda": {"runtime": read_torch_cuda(), "driver": read_cuda_driver(),
                 "driver_version": driver},
        "mpi": describe_mpi(), "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
        "cpu": {"cores": os.cpu_count(), "memory_bytes": read_memory("MemTotal"),
                "available_bytes": read_memory("MemAvailable")},
        "disk": {"path": str(Path.cwd()), "free_bytes": shutil.disk_usage(Path.cwd()).free},
    }  # fmt: skip
    for section in sections:
        described = section.describe_machine()
        packages |= described.pop("packages", {})
        report |= described
    return report


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
