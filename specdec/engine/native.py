"""Native kernels: compiled by specdec-build for this machine, called over a plain C interface."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec import logs
from specdec.engine.compiler import describe_cpu as describe_cpu
from specdec.engine.compiler import find_compiler as find_compiler
from specdec.engine.layers import Norm, name_activation
from specdec.engine.rotary import RotaryTable
from specdec.engine.tree import BoolArray, IntArray
from specdec.errors import SpecDecError
from specdec.schema import ModelConfig

logger = logs.get_logger(__name__)
SOURCE = Path(__file__).with_name("kernels.cpp")
LIBRARY_NAME = "kernels.so"
ABI_VERSION = 3
TILE = 32  # outputs side by side in a packed matrix, kTile in kernels.cpp
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
# Activations of a gated MLP, by the kernel that computes them.
GATES = {
    "silu": "silu", "swiglu": "silu", "gelu_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
}  # fmt: skip
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def describe_coverage(model: ModelConfig) -> str:
    """Tell which of a model's operations have kernels; torch's own operators do the others."""
    activation = name_activation(model)
    covered = ["norms", "attention"]
    if model.arithmetic.mlp != "plain" and activation in GATES:
        covered.append(f"gated {activation}")
        return ", ".join(covered)
    return f"{', '.join(covered)}; torch computes {activation}"


def compile_kernels(folder: Path) -> dict[str, str]:
    """Compile the kernels into `folder` and return what they were compiled with.

    Raises SpecDecError with the compiler's last lines when there is no compiler or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise SpecDecError(
            "no C++ compiler: neither $CXX nor g++, c++ or clang++ is on the PATH",
            "install one (Debian: apt install g++), or build with --optimize none",
        )
    command = [compiler, *FLAGS, "-shared", "-fPIC", str(SOURCE), "-o", str(folder / LIBRARY_NAME)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise SpecDecError(
            f"{compiler} failed with status {done.returncode}: {tail}",
            "set CXX to a compiler with OpenMP, or build with --optimize none",
        )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return {
        "compiler": (version.stdout.splitlines() or [compiler])[0],
        "flags": " ".join(FLAGS),
        "cpu": describe_cpu(),
        "source_sha256": hashlib.sha256(SOURCE.read_bytes()).hexdigest(),
    }


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step's index arrays as the kernels take them, kept alive while pointers are used."""

    arrays: tuple[np.ndarray[Any, Any], ...]
    pointers: tuple[int, ...]
    batch: int
    num_tokens: int


class NativeKernels:
    """The compiled kernels of an engine, for one dtype; tensors are contiguous, on the CPU."""

    def __init__(self, library: Path, dtype: torch.dtype) -> None:
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise SpecDecError(
                f"{library} does not load: {error}", "build the engine again on this machine"
            ) from None
        self._library.specdec_abi_version.restype = _INT
        version = self._library.specdec_abi_version()
        if version != ABI_VERSION:
            raise SpecDecError(
                f"{library} has kernel interface {version}, this specdec needs {ABI_VERSION}",
                "build the engine again",
            )
        suffix = _SUFFIXES[dtype]
        self._add_norm = self._bind(
            f"specdec_add_norm_{suffix}", [_POINTER] * 5 + [_INT] * 2 + [_FLOAT]
        )
        self._gate_muls = {
            name: self._bind(f"specdec_{kernel}_mul_{suffix}", [_POINTER] * 2 + [_INT] * 2)
            for name, kernel in GATES.items()
        }
        self._attend = self._bind(f"specdec_attend_{suffix}", [_POINTER] * 10 + [_INT] * 9)
        self._search_beams = self._bind(
            f"specdec_search_beams_{suffix}",
            [_POINTER] * 9 + [_INT] + [_POINTER] * 2 + [_INT] * 7,
        )

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Whether there are kernels for a type."""
        return dtype in _SUFFIXES

    def _bind(self, name: str, types: list[Any]) -> Any:
        function = getattr(self._library, name)
        function.argtypes = types
        function.restype = None
        return function

    def plan_step(
        self,
        rows: IntArray,
        positions: IntArray,
        lines: IntArray,
        past: IntArray,
        tree_mask: BoolArray,
    ) -> StepPlan:
        """Prepare a step's indices: rows, past [B]; positions, lines [B, T]; tree_mask [B, T, T].

        lines: of the rotary tables.
        """
        arrays = tuple(np.ascontiguousarray(a) for a in (rows, positions, lines, past, tree_mask))
        return StepPlan(arrays, tuple(a.ctypes.data for a in arrays), *positions.shape)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Norm of [..., D]."""
        return self.add_norm(x, None, norm)

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """Add `delta` to `x` in place and return the norm of the sum. x, delta: [..., D]."""
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._add_norm(
            x.data_ptr(), _get_pointer(delta), norm.weight.data_ptr(), _get_pointer(norm.bias),
            out.data_ptr(), x.numel() // size, size, norm.epsilon,
        )  # fmt: skip
        return out

    def gate_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """[..., 2 I] -> [..., I]: the first half activated times the second."""
        inner = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], inner))
        self._gate_muls[activation](gate_up.data_ptr(), out.data_ptr(), out.numel() // inner, inner)
        return out

    def attend(
        self,
        qkv: Tensor,
        cache: Tensor,
        table: RotaryTable | None,
        plan: StepPlan,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        window: int | None,
    ) -> Tensor:
        """Rotate, write keys and values, attend over the visible positions only.

        qkv: [B, T, (N + 2K) H], overwritten; cache: [2, R, K, S, H] of one layer.
        Returns [B, T, N H].
        """
        out = qkv.new_empty((plan.batch, plan.num_tokens, num_heads * head_size))
        cos, sin = (table.cos, table.sin) if table else (None, None)
        self._attend(
            qkv.data_ptr(), cache.data_ptr(), _get_pointer(cos), _get_pointer(sin),
            *plan.pointers, out.data_ptr(),
            plan.batch, plan.num_tokens, num_heads, num_kv_heads, head_size,
            cache.shape[1], cache.shape[3], 0 if cos is None else cos.shape[1], window or 0,
        )  # fmt: skip
        return out

    @staticmethod
    def pack_matrix(weight: Tensor) -> Tensor:
        """Lay out a matrix [N, depth] for `search_beams`: [ceil(N / TILE), depth, TILE]."""
        num_rows, depth = weight.shape
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -num_rows % TILE))
        return padded.view(-1, TILE, depth).transpose(1, 2).contiguous()

    def search_beams(
        self, drafter: PackedDrafter, hidden: Tensor, tokens: Tensor, width: int, length: int
    ) -> Tensor:
        """ReDrafter's beam search in one call: hidden [B, D], tokens [B] -> drafts [B, W, L]."""
        batch = tokens.shape[0]
        hidden = hidden.contiguous()
        beams = torch.empty((batch, width, length), dtype=torch.int64)
        vocab_size, size = drafter.embedding.shape
        self._search_beams(
            drafter.embedding.data_ptr(), hidden.data_ptr(), tokens.data_ptr(),
            _get_pointer(drafter.rnn_w), _get_pointer(drafter.rnn_u),
            _get_pointer(drafter.rnn_u_bias), _get_pointer(drafter.input_proj),
            _get_pointer(drafter.input_bias), ctypes.addressof(drafter.block_pointers),
            len(drafter.blocks), drafter.lm_head.data_ptr(), beams.data_ptr(),
            batch, width, length, vocab_size, size, drafter.exit_dim, drafter.num_candidates,
        )  # fmt: skip
        return beams


def _get_pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class PackedDrafter:
    """A ReDrafter drafter's weights as `NativeKernels.search_beams` takes them.

    `weights` are a checkpoint's `drafter.*` tensors; absent ones are those the drafter has not.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], embedding: Tensor, *, num_layers: int,
        exit_dim: int, num_candidates: int,
    ) -> None:  # fmt: skip
        def pack(name: str) -> Tensor | None:
            weight = weights.get(f"drafter.{name}.weight")
            return None if weight is None else NativeKernels.pack_matrix(weight)

        self.embedding = embedding
        self.exit_dim = exit_dim
        self.num_candidates = num_candidates
        self.rnn_w, self.rnn_u = pack("rnn_w"), pack("rnn_u")
        self.rnn_u_bias = weights.get("drafter.rnn_u.bias")
        self.input_proj = pack("input_proj")
        self.input_bias = weights.get("drafter.input_proj.bias")
        self.lm_head = NativeKernels.pack_matrix(weights["drafter.lm_head.weight"])
        self.blocks = [
            (
                NativeKernels.pack_matrix(weights[f"drafter.layers.{i}.linear.weight"]),
                weights[f"drafter.layers.{i}.linear.bias"],
            )
            for i in range(num_layers)
        ]
        pointers = [tensor.data_ptr() for pair in self.blocks for tensor in pair]
        self.block_pointers = (ctypes.c_void_p * max(1, len(pointers)))(*pointers)
