"""Kernels of an engine on this machine, or why it cannot run here."""

from __future__ import annotations

from pathlib import Path

import torch

from specdec.engine.compiler import describe_cpu
from specdec.engine.kernel_cache import find_fault, list_entries
from specdec.engine.layout import EngineConfig, read_engine_config, suggest_build
from specdec.engine.native import NativeKernels, load_kernels
from specdec.engine.packed import identify_packing
from specdec.errors import SpecDecError
from specdec.files.torch_tensors import TORCH_DTYPES
from specdec.system import logs

logger = logs.get_logger(__name__)


def prefer_cpu(device: str, folder: Path, config: EngineConfig) -> str:
    """Return what `--device` means for an engine: "auto" is the CPU that it was packed for."""
    if device != "auto" or config.packing is None:
        return device
    if torch.cuda.is_available():
        logger.warning(
            "%s holds its matrices packed for a CPU, and runs there, though torch sees a GPU; one"
            " for the GPU: %s",
            folder, suggest_build(folder, {"--packed-weights": "disable"}),
        )  # fmt: skip
    return "cpu"


def check_machine(folder: Path) -> None:
    """Raise SpecDecError for an engine whose packed matrices this machine does not read."""
    config = read_engine_config(folder)
    if config.packing is not None:
        load_engine_kernels(config, folder, torch.device("cpu"))


def check_packing(folder: Path, config: EngineConfig, kernels: NativeKernels) -> None:
    """Raise SpecDecError for an engine whose packed matrices these kernels do not read."""
    if config.packing is not None and (packing := identify_packing(kernels)) != config.packing:
        raise SpecDecError(
            f"{folder} {describe_packing(config)}; the kernels here pack as {packing} (for"
            f" {describe_cpu()})",
            f"build it again on this machine: {suggest_build(folder)}",
        )


def describe_packing(config: EngineConfig) -> str:
    """Describe how an engine is packed, and for what processor."""
    cpu = (config.kernels or {}).get("cpu", "an unknown processor")
    return f"holds its matrices packed as {config.packing} (for {cpu})"


def load_engine_kernels(
    config: EngineConfig, folder: Path, device: torch.device
) -> NativeKernels | None:
    if config.kernels is None:
        return None
    if device.type != "cpu":
        if config.packing is None:
            return None
        raise SpecDecError(
            f"{folder} {describe_packing(config)}, and {device.type} reads none that are packed",
            "use --device cpu, or build it again for both:"
            f" {suggest_build(folder, {'--packed-weights': 'disable'})}",
        )
    try:
        kernels = load_kernels(config.kernels, TORCH_DTYPES[config.checkpoint.model.dtype])
    except SpecDecError as error:
        hint = error.hint
        if any(find_fault(path) is None for path in list_entries(folder, config.kernels)):
            hint = (
                f"install g++, or set SPECDEC_CACHE_DIR={folder} to take the engine's own copy,"
                " which is code from whoever built it"
            )
        if config.packing is not None:
            changes = {"--optimize": "none", "--packed-weights": None}
            raise SpecDecError(
                f"{folder} {describe_packing(config)}, and no kernels run here that have a packing:"
                f" {error.message}",
                f"{hint}; or build it again for torch's own operators:"
                f" {suggest_build(folder, changes)}",
            ) from None
        logger.warning(
            "native kernels: %s; torch's own operators run in their place, slower: %s",
            error.message, hint,
        )  # fmt: skip
        return None
    check_packing(folder, config, kernels)
    return kernels
