#!/usr/bin/env python3
"""Install torch's build for CPUs from PyTorch's own index: `install_torch.py URL torch==2.13.0`.

Run by the Python that it is for. The index is asked for torch alone, since pip asks an extra index
for each package, and asks again for minutes where that cannot be reached. Where this leaves torch
out (pip was told where to look, URL is empty, or nobody answers there), the next installation
takes it from pip's usual places.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
PATIENCE = ("--timeout", "5", "--retries", "1")  # seconds for an answer


def install_torch(index: str, requirement: str) -> int:
    """Return an exit status: that of pip, where it gets as far as to install something."""
    version = requirement.removeprefix("torch==")
    if not index or get_installed().partition("+")[0] == version or is_told_where_to_look():
        return 0
    source = ("--index-url", index)
    asking = [*PIP, "index", "versions", "torch", *source, *PATIENCE]
    if subprocess.run(asking, capture_output=True, check=False).returncode != 0:
        print(
            f"{index} does not answer: torch {version} comes from the package index (on Linux the"
            " CUDA build, several GB)",
            file=sys.stderr,
        )
        return 0
    command = [*PIP, "install", "--quiet", "--no-compile", "--no-deps", *source, requirement]
    return subprocess.run(command, check=False).returncode


def get_installed() -> str:
    """Return the installed torch's version, or an empty text."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def is_told_where_to_look() -> bool:
    """Return whether pip's configuration or environment names an index or a folder of wheels."""
    done = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    return "index-url" in done.stdout or "find-links" in done.stdout


if __name__ == "__main__":
    sys.exit(install_torch(*sys.argv[1:]))
