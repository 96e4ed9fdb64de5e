"""Facts of the TensorRT-LLM backend by which the stages choose: installed, fit, able to load."""

from __future__ import annotations

from specdec.checkpoint.config import CheckpointConfig
from specdec.errors import Problems
from specdec.system.machine import is_importable, list_gpus

from .facts import DEFAULT_LABEL, list_lines_with
from .lacks import find_lack, find_layout_problems


def is_installed() -> bool:
    """Return whether TensorRT-LLM is here; it is not imported."""
    return is_importable("tensorrt_llm")


def suits_machine() -> bool:
    """Return whether `auto` takes it: where it is installed and a GPU is visible."""
    return is_installed() and bool(list_gpus()[0])


def find_checkpoint_problems(
    checkpoint: CheckpointConfig, label: str | None = None
) -> Problems | None:
    """List why a line of TensorRT-LLM cannot load a checkpoint: no class for it, or its layout."""
    line, target = label or DEFAULT_LABEL, checkpoint.model
    lack = find_lack(line, checkpoint.raw, target.architecture)
    problems = Problems() if lack is None else Problems([lack])
    problems += find_layout_problems(line, checkpoint.quantization, target)
    return problems


def takes_flag(name: str) -> bool:
    """Return whether trtllm-build of some line has a flag, which specdec-build then passes on."""
    return bool(list_lines_with(name))
