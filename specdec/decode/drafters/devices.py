"""Checks of the devices that a run lists for its target and its draft model."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.decode.drafters.base import EngineHandle
from specdec.errors import SpecDecError, count
from specdec.system import logs

logger = logs.get_logger(__name__)


def check_count(model_name: str, devices: Sequence[int], tp_size: int) -> None:
    """Raise SpecDecError for a list that does not fit the engine's tp_size."""
    if len(devices) != tp_size:
        raise SpecDecError(
            f"the {model_name}'s device list {list(devices)} has {len(devices)} entries, its"
            f" engine's tp_size is {tp_size}",
            f"name {count(tp_size, 'device')}",
        )


def check_devices(model_name: str, devices: Sequence[int] | None, engine: EngineHandle) -> None:
    """Raise SpecDecError for a list that does not fit the engine's tp_size; report one on a CPU.

    what: the model, as messages name it.
    """
    if devices is None:
        return
    tp_size = engine.config.checkpoint.model.tp_size
    check_count(model_name, devices, tp_size)
    if engine.device.type == "cpu":
        logger.info("%s devices %s: running on the CPU", model_name, list(devices))
    elif tp_size > 1 and list(devices) != list(range(tp_size)):
        # Rank r runs on the r-th that torch sees.
        raise SpecDecError(
            f"the {model_name}'s devices are {list(devices)}, but its engine runs on"
            f" {list(range(tp_size))}",
            "choose the GPUs with CUDA_VISIBLE_DEVICES; both models share them",
        )
