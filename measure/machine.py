"""Description of the measuring machine, and of the load by other programs."""

from __future__ import annotations

import datetime
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.system.machine import read_processor
from specdec.system.threads import count_usable_cores

CPU_TIMES = Path("/proc/stat")
SELF_STATUS = Path("/proc/self/status")
BUSY_SHARE = 0.1  # share of the processors for other programs, above which figures are doubtful


def describe_machine() -> dict[str, Any]:
    """Return the head of every report: date, processor, cores, threads, libraries, load."""
    machine: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "specdec": __version__,
        "processor": read_processor(),
        "cores": os.cpu_count(),
        "usable_cores": count_usable_cores(),
        "memory_gb": round(_read_total_memory() / 1e9, 1),
        "platform": platform.platform(terse=True),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    if (torch := sys.modules.get("torch")) is not None:
        machine |= {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
        if torch.cuda.is_available():
            machine["gpu"] = torch.cuda.get_device_name()
    return machine


def _read_total_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def measure_memory() -> dict[str, float | None]:
    """Return the process's peak memory, and the GPU's, in MB."""
    lines = SELF_STATUS.read_text().splitlines() if SELF_STATUS.exists() else []
    peak = next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
    gpu = None
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        gpu = round(torch.cuda.max_memory_allocated() / 1e6, 1)
    return {"peak_mb": None if peak is None else round(peak * 1024 / 1e6, 1), "peak_gpu_mb": gpu}


class LoadMeter:
    """Meter of the processors that other programs use, from its creation until `measure`."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._busy_start, self._process_start = _read_busy_seconds(), sum(os.times()[:4])

    def measure(self) -> float | None:
        """Return the mean number of processors that other programs used; None where unknown."""
        busy_end = _read_busy_seconds()
        if busy_end is None or self._busy_start is None:
            return None
        process_seconds = sum(os.times()[:4]) - self._process_start
        other_seconds = max(0.0, busy_end - self._busy_start - process_seconds)
        return round(other_seconds / (time.monotonic() - self._start), 2)


def _read_busy_seconds() -> float | None:
    """Return the seconds that all processors have worked since the machine started."""
    if not CPU_TIMES.exists():
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal
    ticks = [int(word) for word in CPU_TIMES.read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def describe_load(used_processors: float | None) -> list[str]:
    """Return a warning where other programs kept the machine busy during a measurement."""
    cores = os.cpu_count() or 1
    if used_processors is None or used_processors <= BUSY_SHARE * cores:
        return []
    return [
        f"other programs kept {used_processors:.1f} of {cores} processors busy meanwhile:"
        " the figures are doubtful"
    ]
