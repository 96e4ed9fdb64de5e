"""Ranks that a launcher has started: torchrun and its like, mpirun of any MPI, or srun."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from specdec.errors import SpecDecError, shorten

# Rank and size of a process, by launcher.
LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI, srun --mpi=pmi2
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH2
    ("SLURM_PROCID", "SLURM_NTASKS"),  # srun
)


@dataclasses.dataclass(frozen=True)
class World:
    """This process's number among those that were started together, and how many they are."""

    rank: int
    size: int
    source: str


def find_world(environ: Mapping[str, str] | None = None) -> World | None:
    """Return what a launcher says of this process, None where there is none.

    A batch script of Slurm has the counts of its job but is no task of a step: nothing started its
    commands together.
    """
    environ = os.environ if environ is None else environ
    for rank_name, size_name in LAUNCHERS:
        rank, size = environ.get(rank_name, ""), environ.get(size_name, "")
        if not (rank.isdecimal() and size.isdecimal()):
            continue
        if rank_name == "SLURM_PROCID":
            if "SLURM_STEP_ID" not in environ:
                continue
            size = environ.get("SLURM_STEP_NUM_TASKS", size)
        if not size.isdecimal() or not int(rank) < int(size):
            raise SpecDecError(
                f"{rank_name} is {rank} of {size_name} {shorten(size)}",
                "start the command with mpirun or srun itself, which set both",
            )
        return World(int(rank), int(size), size_name)
    return None


@dataclasses.dataclass(frozen=True)
class Launch:
    """A process's place by torchrun and its like; `local_`: among the ranks of this machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


_REMEDY = "launch with torchrun, which sets it, or unset RANK and WORLD_SIZE"


def find_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Return what RANK, WORLD_SIZE and their local counterparts say, None where they are not set.

    Raises SpecDecError where one of the first two is missing or one of them is no such number.
    """
    environ = os.environ if environ is None else environ
    variables = {name: environ[name] for name in ("RANK", "WORLD_SIZE") if name in environ}
    # In a world of one process either may be left out, as some clusters do.
    if not variables or variables in ({"RANK": "0"}, {"WORLD_SIZE": "1"}):
        return None
    for name, other_name in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in variables:
            raise SpecDecError(
                f"{other_name} is {shorten(variables[other_name])}, and {name} is not set", _REMEDY
            )
    size = _read_number(environ, "WORLD_SIZE", 1, None)
    rank = _read_number(environ, "RANK", 0, size)
    local_size = _read_number(environ, "LOCAL_WORLD_SIZE", 1, size + 1, str(size))
    local_rank = _read_number(environ, "LOCAL_RANK", 0, local_size, str(rank % local_size))
    return Launch(rank, size, local_rank, local_size)


def check_meeting_place(environ: Mapping[str, str] | None = None) -> str:
    """Return where the ranks of a launcher meet, host:port; raise SpecDecError if that is unset."""
    environ = os.environ if environ is None else environ
    if not environ.get("MASTER_ADDR"):
        raise SpecDecError("MASTER_ADDR, the machine of rank 0, is not set", _REMEDY)
    if "MASTER_PORT" not in environ:
        raise SpecDecError("MASTER_PORT, the port of rank 0, is not set", _REMEDY)
    port = _read_number(environ, "MASTER_PORT", 1, 65536)
    return f"{environ['MASTER_ADDR']}:{port}"


def _read_number(
    environ: Mapping[str, str], name: str, minimum: int, end: int | None, default: str = ""
) -> int:
    """Read a variable as a number from `minimum` to `end` - 1."""
    text = environ.get(name, default)
    value = int(text) if len(text) < 10 and text.isascii() and text.isdecimal() else -1
    if value < minimum or end is not None and value >= end:
        bounds = f"of at least {minimum}" if end is None else f"from {minimum} to {end - 1}"
        raise SpecDecError(f"{name} is {shorten(text)}, not a whole number {bounds}", _REMEDY)
    return value
