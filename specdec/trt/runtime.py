"""Runs engines by TensorRT's runtime: CUDA tensors of torch, bound by their addresses."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from specdec.engine.group import Group
from specdec.engine.kernel_cache import find_kept, keep
from specdec.errors import SpecDecError
from specdec.trt.library import describe_library, load_tensorrt, make_logger
from specdec.trt.network import name_types

# Bytes that TensorRT wants the addresses of tensors to be multiples of.
ALIGNMENT = 256


class GpuKernels:
    """Kernels that TensorRT-RTX compiles of an engine for this GPU, kept for the next process.

    They lie in the user's cache beside those of CPUs. TensorRT refuses what another GPU, driver or
    release compiled; then it compiles them again.
    """

    SUFFIX = ".tensorrt"

    def __init__(self, trt: Any, path: Path, device: torch.device) -> None:
        """path: of the engine, of which another one has its own kernels."""
        status = path.stat()
        self._info = {
            "engine": str(path.resolve()), "bytes": str(status.st_size),
            "changed": str(status.st_mtime_ns), "library": describe_library(trt).name,
            "device": str(device),
        }  # fmt: skip
        self._entry: Path | None = None
        self._cache: Any = None

    def attach(self, config: Any) -> None:
        """Let contexts of a runtime config take kernels from the cache and put new ones there."""
        cache, entry = config.create_runtime_cache(), find_kept(self._info, self.SUFFIX)
        if entry is not None:
            self._entry = entry
            with contextlib.suppress(OSError):  # another process has replaced it meanwhile
                cache.deserialize(entry.read_bytes())
        if config.set_runtime_cache(cache):
            self._cache = cache

    def keep(self) -> None:
        """Write the kernels that there are by now, in place of those that were read."""
        content = self._cache and self._cache.serialize()
        if not content:
            return
        entry = keep(bytes(content), self._info, self.SUFFIX)
        if entry is None:
            return
        previous_entry, self._entry = self._entry, entry
        if previous_entry is not None and previous_entry != entry:
            with contextlib.suppress(OSError):
                previous_entry.unlink(missing_ok=True)


class EngineRunner:
    """A serialized engine on a GPU, with one execution context and a stream of its own.

    TensorRT-RTX makes a CUDA graph of steps whose shapes come again, which the default stream of
    CUDA does not allow. Full TensorRT launches its kernels one by one, and so does a rank, for what
    ranks exchange is not recorded.
    """

    def __init__(self, path: Path, device: torch.device, group: Group | None = None) -> None:
        """group: of the ranks that the network exchanges tensors with."""
        trt, self._device, self._group = load_tensorrt(), device, group
        self._logger = make_logger(trt)
        self._kernels: GpuKernels | None = None
        self._shapes: set[Hashable] = set()  # of inputs, each of which may need new kernels
        self._num_kept = 0  # of those, when the kernels were written
        self._bound: Hashable = None
        with torch.cuda.device(device):
            self._runtime = trt.Runtime(self._logger)
            self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
            self._context = self._engine and self._make_context(trt, path)
            self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if not self._context:
            messages = self._logger.tell()
            raise SpecDecError(f"TensorRT does not load {path}: {messages}", "build it again")
        types = {kind: dtype for dtype, kind in name_types(trt).items()}
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        kinds = {name: self._engine.get_tensor_mode(name) for name in names}
        self.input_names = {name for name in names if kinds[name] == trt.TensorIOMode.INPUT}
        self._outputs = {
            name: types[self._engine.get_tensor_dtype(name)]
            for name in names
            if name not in self.input_names and not name.startswith("present_")
        }

    def _make_context(self, trt: Any, path: Path) -> Any:
        if self._group is not None or not hasattr(trt, "CudaGraphStrategy"):
            return self._engine.create_execution_context()
        config = self._engine.create_runtime_config()
        config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        if hasattr(config, "create_runtime_cache"):
            self._kernels = GpuKernels(trt, path, self._device)
            self._kernels.attach(config)
        return self._engine.create_execution_context(config)

    def keep_kernels(self) -> None:
        """Keep compiled kernels for the next process, if shapes have come since the last time."""
        if self._kernels is not None and len(self._shapes) > self._num_kept:
            self._num_kept = len(self._shapes)
            with torch.cuda.device(self._device):
                self._kernels.keep()

    def _meet(self, group: Group) -> None:
        """Give the context NCCL's communicator of the ranks, of which each makes this call."""
        group.sum(torch.zeros(1, device=self._device))  # which makes it, where none was made
        world: Any = torch.distributed.group.WORLD
        pack = ctypes.pythonapi.PyCapsule_New
        pack.restype = ctypes.py_object
        pack.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        communicator = pack(world._get_backend(self._device)._comm_ptr(), None, None)
        if not self._context.set_communicator(communicator):
            messages = self._logger.tell()
            raise SpecDecError(f"TensorRT takes no communicator: {messages}", "see its message")

    def bind_caches(self, key: Hashable, list_caches: Callable[[], Mapping[str, Tensor]]) -> None:
        """Set the caches that steps read and update, by their inputs' names.

        key: of their memory and shapes; nothing is done where it is the last call's.
        """
        if key == self._bound:
            return
        for name, cache in list_caches().items():
            self._set_input(name, cache)
            self._context.set_tensor_address(name.replace("past_", "present_"), cache.data_ptr())
        self._bound = key

    def _set_input(self, name: str, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        if not self._context.set_input_shape(name, tuple(tensor.shape)):
            raise SpecDecError(
                f"{name} of {list(tensor.shape)} is beyond what the engine was built for",
                "build it with larger limits",
            )
        self._context.set_tensor_address(name, tensor.data_ptr())

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the outputs of inputs besides caches, which are updated where they lie.

        What follows on the current stream waits for it.
        """
        if self._group is not None:
            self._meet(self._group)
            self._group = None
        context, outputs, held_tensors = self._context, {}, []
        for name, tensor in inputs.items():
            if tensor.data_ptr() % ALIGNMENT:
                tensor = tensor.clone()  # rows of another, where a step is run in parts
                held_tensors.append(tensor)
            self._set_input(name, tensor)
        for name, dtype in self._outputs.items():
            shape = tuple(context.get_tensor_shape(name))
            outputs[name] = torch.empty(shape, dtype=dtype, device=self._device)
            context.set_tensor_address(name, outputs[name].data_ptr())
        stream = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(stream)
        if not context.execute_async_v3(self._stream.cuda_stream):
            raise SpecDecError(f"TensorRT's step failed: {self._logger.tell()}", "see its message")
        stream.wait_stream(self._stream)
        self._shapes.add(tuple(tuple(tensor.shape) for tensor in inputs.values()))
        return outputs
