"""Record of each backend: its name, and the module that loads its engine folders."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.files.folders import TENSORRT, TENSORRT_LLM, TORCH, read_backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """One backend of specdec-build, as every stage knows it.

    title: its name in pages and messages. engine_module: of `open_engine(folder, **options)` and
    `open_part(folder, device, group)`, which load an engine folder and a rank's part of it; None
    for a runtime that loads its engines itself.
    """

    name: str
    title: str
    engine_module: str | None

    def load_module(self) -> Any:
        """Import the module that loads the backend's engines."""
        assert self.engine_module is not None
        return importlib.import_module(self.engine_module)


BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(name=TORCH, title="torch", engine_module="specdec.decode.engine"),
        Backend(name=TENSORRT, title="TensorRT", engine_module="specdec.trt.engine"),
        Backend(name=TENSORRT_LLM, title="TensorRT-LLM", engine_module=None),
    )
}


def find_backend(folder: Path) -> Backend:
    """Return the record of the backend that an engine folder was built for."""
    return BACKENDS[read_backend(folder)]
