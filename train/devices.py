"""Devices of a training: `torchrun`'s device of this process, else one GPU or the CPU."""

from __future__ import annotations

import datetime
from typing import Any

from specdec.errors import SpecDecError, UsageError, name_extra, summarize
from specdec.options import name_flag
from specdec.system.machine import read_cpu_flags
from specdec.system.mpi import check_meeting_place, find_launch
from specdec.system.processes import keep_stdout_clean

from .settings import TrainSettings

PATIENCE = datetime.timedelta(hours=6)  # longest wait for the slowest process


def start_accelerator(settings: TrainSettings) -> Any:
    """Open the devices; raise SpecDecError or UsageError for devices that cannot train."""
    accelerator = _open_accelerator(settings)
    kind = str(accelerator.distributed_type.value)
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise SpecDecError(
            f"accelerate found devices of the kind {kind}, which cannot train a drafter here",
            "launch on GPUs or CPUs: torchrun --nproc-per-node N $(which specdec-train) ...",
        )
    for name in ("shard_target", "shard_drafter"):
        if getattr(settings, name) and accelerator.num_processes == 1:
            raise UsageError(
                f"{name_flag(name)} has no effect in a training of one process",
                "leave it out, or launch several: torchrun --nproc-per-node N"
                " $(which specdec-train)",
            )
    return accelerator


def _has_fast_bf16() -> bool:
    """Return whether the processor multiplies bfloat16 matrices in hardware."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= (8, 0)
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(read_cpu_flags())


def _open_accelerator(settings: TrainSettings) -> Any:
    """Make accelerate's Accelerator, once all ranks have met."""
    try:
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs
    except ImportError:
        raise SpecDecError("accelerate is not installed", name_extra("train")) from None
    import torch

    has_gpu = torch.cuda.is_available()
    use_bf16 = settings.dtype == "bfloat16" or settings.dtype == "auto" and _has_fast_bf16()
    launch = find_launch()
    meeting_place = check_meeting_place() if launch is not None and launch.size > 1 else ""
    try:
        with keep_stdout_clean():
            accelerator = Accelerator(
                cpu=not has_gpu and not torch.backends.mps.is_available(),
                mixed_precision="bf16" if use_bf16 else "no",
                # Other processes wait while the main one tokenizes the data and measures an engine.
                kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
            )
    except (RuntimeError, ValueError) as error:
        if not meeting_place:
            raise
        raise SpecDecError(
            f"rank {launch.rank if launch else 0} cannot reach the other ranks at {meeting_place}:"
            f" {summarize(error)}",
            "check MASTER_ADDR and MASTER_PORT, and that every rank has its own RANK",
        ) from None
    return accelerator
