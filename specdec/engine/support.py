"""Facts of the torch backend by which the stages choose: it is always here, and what it executes.

`auto` takes it where nothing before it suits the machine.
"""

from __future__ import annotations

from specdec.checkpoint.config import CheckpointConfig
from specdec.errors import Problems
from specdec.model.quantization import EXECUTED


def is_installed() -> bool:
    """Return True: the package brings it."""
    return True


def suits_machine() -> bool:
    """Return True: it runs on every machine."""
    return True


def find_checkpoint_problems(
    checkpoint: CheckpointConfig, label: str | None = None
) -> Problems | None:
    """List why a checkpoint cannot be executed by torch, of whatever line its names are."""
    algorithm, stages = checkpoint.quantization.quant_algo, checkpoint.model.pp_size
    return Problems.from_table(
        (stages != 1, f"the torch backend has no pipeline stages, and pp_size is {stages}",
         "convert it again with --pp-size 1"),
        (algorithm not in EXECUTED, f"the torch backend does not execute {algorithm}",
         "convert a published model with --dequantize"),
    )  # fmt: skip


def takes_flag(name: str) -> bool:
    """Return False: it has the flags of specdec-build alone."""
    return False
