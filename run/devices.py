"""Which devices the two models of a draft-target run are on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec import logs
from specdec.errors import raise_problems

from .draft_options import DraftOptions

if TYPE_CHECKING:
    from .backends.torch_engine import TorchEngine

logger = logs.get_logger(__name__)


def check_devices(options: DraftOptions, target: TorchEngine, draft: TorchEngine) -> None:
    """Raise SpecDecError for lists that do not fit the engines' tp_size; report those on a CPU."""
    problems = []
    for what, devices, engine in (
        ("draft", options.draft_devices, draft),
        ("target", options.target_devices, target),
    ):
        if devices is None:
            continue
        tp_size = engine.config.checkpoint.model.tp_size
        if len(devices) != tp_size:
            problems.append(
                (
                    f"the {what}'s device list {list(devices)} has {len(devices)} entries, its"
                    f" engine's tp_size is {tp_size}",
                    f"name {tp_size} device{'s' if tp_size > 1 else ''}",
                )
            )
        elif engine.device.type == "cpu":
            logger.info("%s devices %s: running on the CPU", what, list(devices))
        elif devices != (engine.device.index or 0,):
            problems.append(
                (
                    f"the {what}'s device is {devices[0]}, but the engine runs on {engine.device}",
                    "choose the GPU with CUDA_VISIBLE_DEVICES; both models share one process",
                )
            )
    raise_problems(problems)
