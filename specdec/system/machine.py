"""Packages, GPUs and CUDA of this machine, read without importing what takes seconds to load."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
SMI_QUERY = "index,name,compute_cap,memory.total,driver_version,uuid"
SMI_SECONDS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One visible GPU; `compute_capability` as in "9.0"."""

    name: str
    compute_capability: str
    memory_bytes: int

    @property
    def capability(self) -> tuple[int, int]:
        return order_release(self.compute_capability)


def order_release(version: str) -> tuple[int, int]:
    """Return a release's first two numbers, (-1, -1) where it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def find_version(*names: str) -> str | None:
    """Return the version of the first of some distributions that is installed."""
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def is_importable(name: str) -> bool:
    """Return whether a top-level package is there; it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def read_processor() -> str:
    """Return the processor's name."""
    return _read_cpu_info("model name") or platform.processor()


def read_cpu_flags() -> list[str]:
    """List the names of the processor's instruction sets; none where they are unknown."""
    return sorted(_read_cpu_info("flags", "Features").split())


def _read_cpu_info(*names: str) -> str:
    """Return the first entry that has one of some names; an empty text where there is none."""
    with contextlib.suppress(OSError), CPU_INFO.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return ""


def list_gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """List the GPUs that CUDA_VISIBLE_DEVICES leaves visible, and the driver's version."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return (), None
    try:
        process = subprocess.run(
            [command, f"--query-gpu={SMI_QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=SMI_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return (), None
    if process.returncode != 0:
        return (), None
    rows: list[tuple[str, str, Gpu]] = []
    driver = None
    for line in process.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(SMI_QUERY.split(",")):
            index, name, capability, mebibytes, driver, uuid = cells
            size = int(mebibytes) << 20 if mebibytes.isdigit() else 0
            gpu = Gpu(name=name, compute_capability=capability, memory_bytes=size)
            rows.append((index, uuid, gpu))
    return _filter_visible(rows, os.environ.get("CUDA_VISIBLE_DEVICES")), driver


def _filter_visible(rows: list[tuple[str, str, Gpu]], visible: str | None) -> tuple[Gpu, ...]:
    """Choose as CUDA does: in the order given, up to the first entry that is no GPU."""
    if visible is None:
        return tuple(gpu for _, _, gpu in rows)
    gpus = []
    for entry in (word.strip() for word in visible.split(",")):
        match = [gpu for index, uuid, gpu in rows if entry and (entry == index or
                 (entry.startswith("GPU-") and uuid.startswith(entry)))]  # fmt: skip
        if not match:
            break
        gpus.append(match[0])
    return tuple(gpus)


def read_torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for, without importing torch."""
    if not is_importable("torch"):
        return None
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def read_cuda_driver() -> str | None:
    """Return the newest CUDA version that the installed driver can run."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"
