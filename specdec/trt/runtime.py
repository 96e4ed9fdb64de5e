"""Runs engines by TensorRT's runtime: CUDA tensors of torch, bound by their addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from specdec.engine.group import Group
from specdec.errors import SpecDecError
from specdec.trt.library import load_tensorrt, make_logger
from specdec.trt.network import name_types

# Bytes that TensorRT wants the addresses of tensors to be multiples of.
ALIGNMENT = 256


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
        with torch.cuda.device(device):
            self._runtime = trt.Runtime(self._logger)
            self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
            self._context = self._engine and self._make_context(trt)
            self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if not self._context:
            told = self._logger.tell()
            raise SpecDecError(f"TensorRT does not load {path}: {told}", "build it again")
        types = {kind: dtype for dtype, kind in name_types(trt).items()}
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self._outputs = {
            name: types[self._engine.get_tensor_dtype(name)]
            for name in names
            if self._engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT
        }

    def _make_context(self, trt: Any) -> Any:
        if self._group is not None or not hasattr(trt, "CudaGraphStrategy"):
            return self._engine.create_execution_context()
        config = self._engine.create_runtime_config()
        config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return self._engine.create_execution_context(config)

    def _meet(self, group: Group) -> None:
        """Give the context NCCL's communicator of the ranks, of which each makes this call."""
        group.sum(torch.zeros(1, device=self._device))  # which makes it, where none was made
        world: Any = torch.distributed.group.WORLD
        pack = ctypes.pythonapi.PyCapsule_New
        pack.restype = ctypes.py_object
        pack.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        communicator = pack(world._get_backend(self._device)._comm_ptr(), None, None)
        if not self._context.set_communicator(communicator):
            told = self._logger.tell()
            raise SpecDecError(f"TensorRT takes no communicator: {told}", "see its message")

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the outputs besides caches, which are updated where they lie.

        What follows on the current stream waits for it.
        """
        if self._group is not None:
            self._meet(self._group)
            self._group = None
        context, outputs, kept = self._context, {}, []
        for name, tensor in inputs.items():
            assert tensor.is_contiguous()
            if tensor.data_ptr() % ALIGNMENT and not name.startswith("past_"):
                tensor = tensor.clone()  # rows of another, where a step is run in parts
                kept.append(tensor)
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise SpecDecError(
                    f"{name} of {list(tensor.shape)} is beyond what the engine was built for",
                    "build it with larger limits",
                )
            context.set_tensor_address(name, tensor.data_ptr())
        for name, dtype in self._outputs.items():
            output = inputs.get(name.replace("present_", "past_"))
            if output is None:
                shape = tuple(context.get_tensor_shape(name))
                output = outputs[name] = torch.empty(shape, dtype=dtype, device=self._device)
            context.set_tensor_address(name, output.data_ptr())
        stream = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(stream)
        if not context.execute_async_v3(self._stream.cuda_stream):
            raise SpecDecError(f"TensorRT's step failed: {self._logger.tell()}", "see its message")
        stream.wait_stream(self._stream)
        return outputs
