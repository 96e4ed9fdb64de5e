"""Which TensorRT is installed, and what it builds for."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, NamedTuple

from specdec.errors import SpecDecError, name_extra

# 10.15 is the first full TensorRT with attention, cache and rotary layers.
OTHER_RELEASE = (
    "use tensorrt 10.15 or newer, which builds for its machine's GPU, in place of tensorrt_rtx"
)
INSTALL = f"{name_extra('tensorrt')}, or tensorrt 10.15 or newer"


def find_package() -> str | None:
    """Import the installed TensorRT: TensorRT-RTX where there is one, else the full one."""
    names = ("tensorrt_rtx_bindings", "tensorrt_rtx", "tensorrt")
    return next((name for name in names if importlib.util.find_spec(name) is not None), None)


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


class Library(NamedTuple):
    """TensorRT that builds and runs engines: name and version, as an engine records them.

    compute_capabilities: those that it builds for without their GPU, such as 8.9; none where it
    builds for its machine's only.
    """

    name: str
    compute_capabilities: list[str]

    def explain(self, gpu: str, capability: str) -> str:
        """Explain why it builds no engine for a GPU of this name; "" if it does."""
        capabilities = self.compute_capabilities
        fact = f"{gpu} has compute capability {capability}, {self.name} builds for"
        return (
            ""
            if not capabilities or capability in capabilities
            else f"{fact} {', '.join(capabilities)}"
        )


def describe_library(trt: Any) -> Library:
    """Describe an installed module of TensorRT."""
    kind = "tensorrt_rtx" if "rtx" in trt.__name__ else "tensorrt"
    kinds = getattr(getattr(trt, "ComputeCapability", None), "__members__", {})
    capabilities = [f"{name[2:-1]}.{name[-1]}" for name in kinds if name.startswith("SM")]
    return Library(f"{kind} {trt.__version__}", capabilities)


def make_logger(trt: Any) -> Any:
    """Return a logger for TensorRT that keeps errors; its `tell` returns the first."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                self.messages.append(message)

        def tell(self) -> str:
            """Return the first error; that a GPU is missing is none of a build's errors."""
            messages = [message for message in self.messages if "catchCudaError" not in message]
            return (messages or self.messages or ["TensorRT does not say why"])[0]

    return Logger()
