"""Requirements that several backends have of a machine, as doctor's lines word what is missing.

machine: the report of the doctor's `describe_machine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import Problems
from specdec.system.machine import Gpu, order_release

MIN_VERSIONS = {"torch": (2, 9), "transformers": (4, 57)}


def choose_reasons(*rows: tuple[object, str]) -> list[str]:
    """Return the reasons of the rows (condition, reason) whose condition holds."""
    return [reason for condition, reason in rows if condition]


def read_gpus(machine: Mapping[str, Any]) -> tuple[Gpu, ...]:
    """Return the visible GPUs of a machine's report."""
    return tuple(Gpu(**gpu) for gpu in machine["gpus"])


def find_torch_reasons(machine: Mapping[str, Any]) -> list[str]:
    """Return why the installed torch does not do: it is absent or too old."""
    version = machine["packages"]["torch"]
    if version is None:
        return ["torch is not installed"]
    min_version = ".".join(map(str, MIN_VERSIONS["torch"]))
    fact = f"torch {version} is older than {min_version}, the first that loads files safely"
    return choose_reasons((order_release(version) < MIN_VERSIONS["torch"], fact))


def find_memory_problems(weight_bytes: int, memory_bytes: int, device: str) -> Problems:
    """Return a problem where the weights do not fit; memory of 0 bytes is not known."""
    fact = f"the weights take {weight_bytes / 1e9:.1f} GB, {device} has {memory_bytes / 1e9:.1f} GB"
    remedy = "use a machine with more memory, more ranks or a quantized model"
    return Problems.from_table((0 < memory_bytes < weight_bytes, fact, remedy))
