"""Ranks that a launcher has started: mpirun of any MPI, or srun."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

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
        return World(int(rank), int(size), size_name)
    return None
