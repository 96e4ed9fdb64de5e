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

    engine_module: module with `open_engine(folder, **options)`, and where other ranks than 0 need
    it `open_part(folder, device, group)`; None for a runtime that loads its engines itself.
    """

    name: str
    engine_module: str | None

    def load_module(self) -> Any:
        """Import the module that loads the backend's engines."""
        assert self.engine_module is not None
        return importlib.import_module(self.engine_module)


BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend(name=TORCH, engine_module="specdec.decode.engine"),
        Backend(name=TENSORRT, engine_module="specdec.trt.engine"),
        Backend(name=TENSORRT_LLM, engine_module=None),
    )
}


def find_backend(folder: Path) -> Backend:
    """Return the record of the backend that an engine folder was built for."""
    return BACKENDS[read_backend(folder)]
