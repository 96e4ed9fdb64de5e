"""The processes of a TensorRT-LLM engine of several ranks: MPI's, started here or found."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

from specdec.command.settings import to_arguments
from specdec.command.stdout import find_stdout
from specdec.errors import SpecDecError, UsageError
from specdec.methods.draft_target import DraftTargetDraft
from specdec.options import as_options
from specdec.system import logs
from specdec.system.mpi import find_world
from specdec.system.processes import end_family, make_environment
from specdec.trtllm.engine_folder import read_engine_folder

from ..settings import RunSettings

logger = logs.get_logger(__name__)

MARK = "SPECDEC_MPI_RANKS"  # set for the ranks that are started here
LABELS = ("error: ", "hint: ")


def run_ranks(settings: RunSettings, join: Callable[[], None]) -> bool:
    """Return whether other processes than this one do, or have done, the work.

    Without a launcher, all ranks are started and waited for; under one, ranks other than 0 join in
    until rank 0 is done. join: loads the engine, in which the runtime then works for rank 0 until
    that ends.
    """
    folder = read_engine_folder(settings.engine_dir)
    world = find_world()
    if as_options(settings, DraftTargetDraft).draft_engine_dir is not None:  # led from one process
        if world is not None and world.size > 1:
            raise SpecDecError(
                f"{world.source} is {world.size}, and a run with a draft engine is led from a"
                " single process",
                "run it without mpirun or srun; it starts what its engines need",
            )
        return False
    size = folder.world_size
    if world is None and size > 1:
        start_ranks(settings, size)
        return True
    if world is not None and world.size != size:
        raise SpecDecError(
            f"{world.source} is {world.size}, the engine has {size} ranks (tp_size"
            f" {folder.tp_size}, pp_size {folder.pp_size})",
            f"start {size} processes"
            + (", or call specdec-run alone: it starts them" if size > 1 else ""),
        )
    if world is None or world.rank == 0:
        return False
    join()
    return True


def start_ranks(settings: RunSettings, size: int) -> None:
    """Run this command with mpirun; its error, if it ends in one, becomes ours."""
    if MARK in os.environ:
        raise SpecDecError(
            f"this is one of {os.environ[MARK]} ranks that mpirun was to start, and it finds"
            " neither its rank nor their number",
            "use the mpirun of Open MPI or MPICH, or start the ranks with srun",
        )
    launcher = shutil.which("mpirun")
    if launcher is None:
        raise SpecDecError(
            f"the engine has {size} ranks, and there is no mpirun to start them",
            "install Open MPI, or start specdec-run with srun",
        )
    arguments = to_arguments(settings)
    command = [launcher, "-n", str(size), sys.executable, "-m", "specdec", "run", *arguments]
    environment = make_environment() | {MARK: str(size)}
    if os.geteuid() == 0:  # as in a container; Open MPI asks for both
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    logger.info("starting %d ranks with %s", size, launcher)
    child = subprocess.Popen(
        command, env=environment, stdout=find_stdout(), stderr=subprocess.PIPE, text=True,
        encoding="utf-8", errors="replace",
    )  # fmt: skip
    status, messages = _follow(child)
    if status == 0:
        return
    if len(messages) == len(LABELS):
        kind = UsageError if status == 2 else SpecDecError
        message, hint = (messages[label] for label in LABELS)
        raise kind(message, hint)
    raise SpecDecError(
        f"mpirun ended with status {status}", "what the ranks and mpirun said is above"
    )


def _follow(child: subprocess.Popen[str]) -> tuple[int, dict[str, str]]:
    """Pass mpirun's lines on until it ends; return its status, and the ranks' error and hint."""
    assert child.stderr is not None
    messages: dict[str, str] = {}
    try:
        for line in child.stderr:
            label = next((label for label in LABELS if line.startswith(label)), None)
            if label is None:
                sys.stderr.write(line)
            else:
                messages.setdefault(label, line.removeprefix(label).rstrip("\n"))
        status = child.wait()
    except BaseException:
        end_family(
            child, first_signal=signal.SIGTERM
        )  # mpirun then ends its ranks, unless it is stuck
        raise
    return status, messages
