"""The C++ compiler of this machine, and the CPU that it compiles for; needs no torch."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from pathlib import Path


def find_compiler() -> str | None:
    """Path of a C++ compiler: $CXX, or the first of g++, c++, clang++ that is installed."""
    chosen = os.environ.get("CXX")
    for name in [chosen] if chosen else ["g++", "c++", "clang++"]:
        if path := shutil.which(name):
            return path
    return None


def describe_cpu() -> str:
    """Identify the instruction set that `-march=native` compiles for."""
    features = ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.split(":")[0].strip() in ("flags", "Features"):
                features = " ".join(sorted(line.split(":", 1)[1].split()))
                break
    except OSError:
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:16]}"
