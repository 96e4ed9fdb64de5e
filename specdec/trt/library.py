"""Which TensorRT is installed, and what it builds for."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

from specdec.errors import SpecDecError

# 10.15 is the first full TensorRT with attention, cache and rotary layers.
OTHER = "use tensorrt 10.15 or newer, which builds for its machine's GPU, in place of tensorrt_rtx"
INSTALL = "pip install 'specdec-toolchain[tensorrt]', or tensorrt 10.15 or newer"


def find_package() -> str | None:
    """The module of TensorRT that is installed: of RTX where that is, else full TensorRT's."""
    for name in ("tensorrt_rtx_bindings", "tensorrt_rtx", "tensorrt"):
        if importlib.util.find_spec(name) is not None:
            return name
    return None


@functools.cache
def load_tensorrt() -> Any:
    """Import TensorRT; raise SpecDecError where it is missing, does not load or is too old."""
    name = find_package()
    if name is None:
        raise SpecDecError("neither tensorrt_rtx nor tensorrt is installed", INSTALL)
    try:
        if name == "tensorrt_rtx_bindings":  # which loads what this wheel brings
            importlib.import_module("tensorrt_rtx_libs")
        trt = importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise SpecDecError(f"{name} is installed and does not load: {error}", INSTALL) from error
    if not hasattr(trt.INetworkDefinition, "add_kv_cache_update"):
        raise SpecDecError(
            f"{name} {trt.__version__} has no layer that updates a cache of keys and values",
            "install tensorrt 10.15 or newer, or tensorrt_rtx",
        )
    return trt


def describe_library(trt: Any) -> str:
    """The name and version of what builds and runs engines, as an engine records it."""
    kind = "tensorrt_rtx" if "rtx" in trt.__name__ else "tensorrt"
    return f"{kind} {trt.__version__}"


def list_capabilities(trt: Any) -> list[str]:
    """The compute capabilities that engines can be built for without their GPU, such as 8.9."""
    kinds = getattr(trt, "ComputeCapability", None)
    names = [name for name in getattr(kinds, "__members__", {}) if name.startswith("SM")]
    return [f"{name[2:-1]}.{name[-1]}" for name in names]


def explain_capability(library: str, usable: list[str], name: str, capability: str) -> str:
    """Why a library that builds for some capabilities builds no engine for a GPU; "" if it does."""
    if not usable or capability in usable:
        return ""
    return f"{name} has compute capability {capability}, {library} builds for {', '.join(usable)}"


def make_logger(trt: Any) -> Any:
    """A logger for TensorRT that keeps errors; its `tell` returns the first, for messages."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.kept: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                self.kept.append(message)

        def tell(self) -> str:
            """That a GPU is missing is none of a build's errors."""
            told = [message for message in self.kept if "catchCudaError" not in message]
            return (told or self.kept or ["TensorRT does not say why"])[0]

    return Logger()
