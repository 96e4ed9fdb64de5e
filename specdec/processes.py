"""A stage called as its users call it: a process of its own, arguments in, JSON out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import specdec
from specdec.errors import SpecDecError


def call_run(arguments: Sequence[str]) -> dict[str, Any]:
    """Run `specdec run --json ARGUMENTS`; return its object, or raise its error as our own."""
    return call_stage("run", arguments)


def call_stage(stage: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run `specdec STAGE --json ARGUMENTS`; return its object, or raise its error as our own."""
    done = subprocess.run(
        [sys.executable, "-m", "specdec", stage, "--json", *arguments],
        env=make_environment(), capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    if done.returncode == 0:
        report: dict[str, Any] = json.loads(done.stdout)
        return report
    lines = done.stderr.rstrip("\n").split("\n")
    found = {
        label: line.removeprefix(label + ": ")
        for line in lines[-2:]
        for label in ("error", "hint")
        if line.startswith(label + ": ")
    }
    if len(found) == 2:
        raise SpecDecError(found["error"], found["hint"])
    raise SpecDecError(
        f"specdec {stage} ended with status {done.returncode}: {lines[-1] or 'it said nothing'}",
        f"call it by itself: specdec {stage} {' '.join(arguments)}",
    )


# What launchers of several processes tell each one; a command that one of them calls is none.
LAUNCHER_NAMES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_")


def make_environment() -> dict[str, str]:
    """The child imports the very package that we are, and nothing out of the current folder."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }
    environment["PYTHONSAFEPATH"] = "1"
    root = Path(specdec.__file__).resolve().parent.parent
    if (root / "pyproject.toml").is_file():  # a checkout, which may not be installed
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else str(root)
    return environment
