"""Setup of a training before its target is loaded, and the opening of the target."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import SpecDecError
from specdec.files.staging import list_local

from .settings import TrainSettings

if TYPE_CHECKING:
    from .methods.base import TrainingMethod
    from .target import FrozenTarget

DEFAULT_MAX_LENGTH = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings, devices, method and the target's configuration, before the target is loaded."""

    settings: TrainSettings
    accelerator: Any
    method: TrainingMethod
    config: Any  # the target's configuration
    dtype: str  # number type of the computation
    max_length: int  # most tokens of a row

    @property
    def needs_head(self) -> bool:
        """Return whether the target's output layer is read."""
        return self.method.needs_head or bool(self.settings.self_distillation)


def prepare_setup(settings: TrainSettings, accelerator: Any) -> Setup:
    """Read the target's configuration; choose the method, the type and the row length."""
    from .methods import load_method
    from .optimizer import check_optimizer
    from .target import load_config

    check_optimizer(settings)
    config = load_config(settings.model_dir)
    return Setup(
        settings=settings,
        accelerator=accelerator,
        method=load_method(settings.method),
        config=config,
        dtype="bfloat16" if accelerator.mixed_precision == "bf16" else "float32",
        max_length=choose_max_length(settings, config),
    )


def open_target(setup: Setup) -> FrozenTarget:
    """Load the parts of the target that the method reads; all processes call this."""
    settings, accelerator = setup.settings, setup.accelerator
    if (source := settings.hidden_states_from) is not None:
        from .engine_states import is_engine, open_engine_target
        from .extracted import open_extracted

        open_source = open_engine_target if is_engine(source) else open_extracted
        return open_source(
            settings, setup.config, setup.dtype, accelerator.device,
            layers=setup.method.choose_layers(settings, setup.config),
            with_head=setup.needs_head,
        )  # fmt: skip
    from .target import load_target

    mesh = None
    if settings.shard_target:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    target = load_target(
        settings.model_dir, setup.config, setup.dtype, accelerator.device,
        with_head=setup.needs_head, mesh=mesh,
        aux_layers=setup.method.choose_layers(settings, setup.config),
    )  # fmt: skip
    accelerator.wait_for_everyone()
    target.check_head()
    return target


def list_inputs(settings: TrainSettings) -> list[Path]:
    """List the local folders and files that are read, which --force may not replace."""
    return list_local(
        settings.model_dir, settings.data, settings.eval_data, settings.start_from,
        settings.hidden_states_from,
    )  # fmt: skip


UNITS = {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate(("", "K", "M", "G", "T", "P"))
    if prefix or suffix == "B"
}


def read_bytes(text: str) -> int | None:
    """Return the bytes of a size such as `1.5TB` or `64GiB`; None for any other text."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGTP]?i?B)?", text.strip())
    if match is None or match[2] == "iB":
        return None
    return int(float(match[1]) * UNITS[match[2] or "B"])


def choose_max_length(settings: TrainSettings, config: Any) -> int:
    """Return the row length in tokens, or raise where the target cannot read that many."""
    from .target import get_max_length

    limit = get_max_length(config)
    max_length = settings.model_max_length
    if max_length is None:
        return min(DEFAULT_MAX_LENGTH, limit or DEFAULT_MAX_LENGTH)
    if limit is not None and max_length > limit:
        raise SpecDecError(
            f"--model-max-length {max_length} is more than the {limit} positions of the target",
            f"use at most {limit}",
        )
    return max_length
