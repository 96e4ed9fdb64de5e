"""Abilities of a machine, those of each backend among them, with the reasons for what it lacks."""

from __future__ import annotations

from typing import Any

from specdec.errors import name_extra
from specdec.files.backends import BACKENDS
from specdec.system.requirements import choose_reasons


def list_abilities(machine: dict[str, Any]) -> dict[str, list[str]]:
    """Return what specdec can do, by name, with the reasons why it cannot be done here."""
    abilities = {
        "convert checkpoints": [],
        "read and write GGUF files": choose_reasons(
            (not machine["packages"]["gguf"],
             f"the package gguf is not installed: {name_extra('gguf')}")
        ),
    }  # fmt: skip
    for backend in BACKENDS.values():
        abilities |= backend.load("doctor").list_abilities(machine)
    return abilities


def list_pins(machine: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tables of versions that go together, of the backends that have one."""
    tables = (backend.load("doctor").describe_pins(machine) for backend in BACKENDS.values())
    return [table for table in tables if table]
