"""Loading of one rank's part of an engine, which is all of it where there is one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.engine.decoder import Decoder
from specdec.engine.engine_kernels import load_engine_kernels
from specdec.engine.group import Group
from specdec.engine.layout import (
    EngineConfig,
    name_weight_file,
    read_engine_config,
)
from specdec.engine.linear import can_prepack
from specdec.engine.loading import load_weights
from specdec.engine.verification import Verification
from specdec.errors import SpecDecError
from specdec.files.backends import TENSORRT, find_backend, read_backend
from specdec.files.torch_tensors import TORCH_DTYPES
from specdec.model.blocks import GGUF
from specdec.model.int4 import INT4_ALGORITHMS
from specdec.system import logs
from specdec.system.mpi import find_launch

logger = logs.get_logger(__name__)


def load_decoder(folder: Path, device: torch.device, group: Group) -> Decoder:
    """Load the part of a rank other than 0."""
    if read_backend(folder) == TENSORRT:
        decoder: Decoder = find_backend(folder).load("engine").open_part(folder, device, group)
        return decoder
    config = read_engine_config(folder)
    if logs.get_launched_rank() is not None:  # perhaps on another machine than rank 0
        name = name_weight_file(config.checkpoint.model, group.rank)
        Verification(folder, (name,)).finish()
    options = list_options(config, folder, device)
    weights = load_weights(
        folder, config, device, rank=group.rank, is_packed=is_packed(config, options),
        kernels=options["kernels"],
    )  # fmt: skip
    return Decoder(config.checkpoint.model, weights, group=group, **options)


def list_options(config: EngineConfig, folder: Path, device: torch.device) -> dict[str, Any]:
    """Return the arguments of an engine's decoder besides its model and weights."""
    kernels = load_engine_kernels(config, folder, device)
    algorithm = config.checkpoint.quantization.quant_algo
    integers = config.quantization or (algorithm if algorithm in INT4_ALGORITHMS else None)
    if algorithm == GGUF and kernels is None:
        logger.info(
            "GGUF: no native kernels run here: weights are widened to %s, and inputs are not"
            " rounded", config.checkpoint.model.dtype,
        )  # fmt: skip
    if integers is not None and kernels is None:
        logger.info(
            "%s: no native kernels run here: weights are widened in every step, which is slow, and"
            " inputs are not rounded",
            integers,
        )
    return {
        "num_positions": config.num_positions,
        "device": device,
        "prepack": config.prepack,
        "kernels": kernels,
    }


def is_packed(config: EngineConfig, options: Mapping[str, Any]) -> bool:
    """Return whether a decoder with these options packs its matrices."""
    if options["kernels"] is not None:
        return True
    dtype = TORCH_DTYPES[config.checkpoint.model.dtype]
    return bool(options["prepack"]) and can_prepack(dtype, options["device"])


def choose_device(name: str, num_ranks: int, devices: Sequence[int] | None = None) -> torch.device:
    """Choose the device that `--device` means, one on every rank.

    devices: the GPU that an engine of one rank is to have, of those that torch sees.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise SpecDecError("--device cuda: torch sees no CUDA device", "use --device cpu or auto")
    launch = find_launch() if logs.get_launched_rank() is not None else None
    num_local = num_ranks if launch is None else launch.local_size
    if num_gpus < num_local:
        raise SpecDecError(
            f"--device {name}: {num_local} ranks need a GPU each, torch sees {num_gpus}",
            f"use --device cpu, or convert with --tp-size {num_gpus}",
        )
    if num_ranks > 1 or devices is None or len(devices) > 1:
        return torch.device("cuda")
    if devices[0] >= num_gpus:
        raise SpecDecError(
            f"device {devices[0]} is asked for, torch sees {num_gpus} of them",
            f"name one of 0 to {num_gpus - 1}; two models may share it",
        )
    return torch.device("cuda", devices[0])
