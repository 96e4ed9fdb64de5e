"""Native kernels: compiled by specdec-build for this machine, called over a plain C interface."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
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
ABI_VERSION = 8
TILE = 32  # a multiple of the outputs side by side in a packed matrix, kTile in kernels.cpp
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
# Activations of a gated MLP, by the kernel that computes them.
GATES = {
    "silu": "silu", "swiglu": "silu", "gelu_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
}  # fmt: skip
# Those of a plain one, and of a gated one, by the number that the kernels know them by.
PLAIN_ACTIVATIONS = {
    **dict.fromkeys([name for name, kernel in GATES.items() if kernel == "gelu"], 1),
    "gelu": 2,
    "relu": 3,
}
GATED_ACTIVATIONS = {name: int(kernel == "gelu") for name, kernel in GATES.items()}
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def describe_coverage(model: ModelConfig) -> str:
    """Tell which of a model's operations have kernels; torch's own operators do the others."""
    activation = name_activation(model)
    covered = ["products", "norms", "attention"]
    if model.arithmetic.mlp != "plain" and activation in GATES:
        return ", ".join([*covered, f"gated {activation}"])
    if model.arithmetic.mlp == "plain" and activation in PLAIN_ACTIVATIONS and model.tp_size == 1:
        return ", ".join([*covered, activation])
    return f"{', '.join(covered)}; torch computes {activation}"


def compile_kernels(folder: Path) -> dict[str, str]:
    """Compile the kernels into `folder` and return what they were compiled with.

    What this compiler made of this source on this machine before is taken from `find_cache`.
    Raises SpecDecError with the compiler's last lines when there is no compiler or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise SpecDecError(
            "no C++ compiler: neither $CXX nor g++, c++ or clang++ is on the PATH",
            "install one (Debian: apt install g++), or build with --optimize none",
        )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    info = {
        "compiler": (version.stdout.splitlines() or [compiler])[0],
        "flags": " ".join(FLAGS),
        "cpu": describe_cpu(),
        "source_sha256": hashlib.sha256(SOURCE.read_bytes()).hexdigest(),
    }
    library = folder / LIBRARY_NAME
    key = hashlib.sha256(json.dumps([compiler, version.stdout, info]).encode()).hexdigest()
    cache = find_cache()
    kept = cache / "kernels" / f"{key[:32]}.so" if cache else None
    if kept and _take_kept(kept, library):
        logger.debug("kernels taken from %s", kept)
        return info
    objects = folder / "kernels.o"
    label = f"compiling kernels for this processor with {Path(compiler).name}, once"
    with logs.show_waiting(label, logger):
        _call_compiler([compiler, *FLAGS, "-c", "-fPIC", str(SOURCE), "-o", str(objects)])
    # GCC's OpenMP is loaded with torch, whose threads the kernels then share: two teams would
    # wait for each other's processors. Clang's kernels bring their own.
    openmp = ["-fopenmp"] if "clang" in version.stdout else []
    _call_compiler([compiler, "-shared", str(objects), "-o", str(library), *openmp])
    objects.unlink()
    if kept:
        _keep(library, kept)
    return info


def _call_compiler(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise SpecDecError(
            f"{command[0]} failed with status {done.returncode}: {tail}",
            "set CXX to a compiler with OpenMP, or build with --optimize none",
        )


def find_cache() -> Path | None:
    """The user's folder of what can be made again: $SPECDEC_CACHE_DIR, or ~/.cache/specdec.

    None for a user without a home, as containers have them.
    """
    if chosen := os.environ.get("SPECDEC_CACHE_DIR"):
        return Path(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "specdec"
    try:
        return Path.home() / ".cache" / "specdec"
    except RuntimeError:
        return None


def _take_kept(kept: Path, library: Path) -> bool:
    """Copy a library from the cache, where it lies there whole: its sum is in its own name."""
    for path in kept.parent.glob(f"{kept.stem}-*.so"):
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest()[:32] == path.stem.rpartition("-")[2]:
            library.write_bytes(content)
            return True
    return False


def _keep(library: Path, kept: Path) -> None:
    content = library.read_bytes()
    name = f"{kept.stem}-{hashlib.sha256(content).hexdigest()[:32]}.so"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, kept.parent / name)
    except OSError as error:  # a cache that cannot be written costs time, nothing else
        logger.debug("kernels are not kept for the next build: %s", error)


def _load_library(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if "undefined symbol: GOMP" not in str(error) and "undefined symbol: omp" not in str(error):
            raise
    ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)  # of the compiler; torch has another kind
    return ctypes.CDLL(str(path))


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step's index arrays as the kernels take them, kept alive while pointers are used."""

    arrays: tuple[np.ndarray[Any, Any], ...]
    pointers: tuple[int, ...]
    batch: int
    num_tokens: int
    num_newest: int  # tokens that the step's mask is about: its own, and before them others


class NativeKernels:
    """The compiled kernels of an engine, for one dtype; tensors are contiguous, on the CPU."""

    def __init__(self, library: Path, dtype: torch.dtype) -> None:
        try:
            self._library = _load_library(library)
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
        self._attend = self._bind(f"specdec_attend_{suffix}", [_POINTER] * 10 + [_INT] * 10)
        self._set_num_threads = self._bind("specdec_set_num_threads", [_INT])
        self._pack_matrix = self._bind(
            f"specdec_pack_matrix_{suffix}", [_POINTER, _INT, _INT, _POINTER]
        )
        self._multiply = self._bind(
            f"specdec_multiply_{suffix}", [_POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _POINTER]
        )
        self._pack_int8 = self._bind(
            "specdec_pack_matrix_int8", [_POINTER, _POINTER, _INT, _INT, _POINTER]
        )
        self._multiply_int8 = self._bind(
            f"specdec_multiply_int8_{suffix}",
            [_POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _POINTER],
        )
        self._run_layers = self._bind(f"specdec_run_layers_{suffix}", [_POINTER] * 16 + [_FLOAT])
        self._rank_outputs = self._bind(
            f"specdec_rank_outputs_{suffix}",
            [_POINTER, _INT, _INT, _POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER],
        )
        self._search_beams = self._bind(
            f"specdec_search_beams_{suffix}",
            [_POINTER] * 10 + [_INT] + [_POINTER] * 2 + [_INT] * 7,
        )

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
        """Prepare a step's indices: rows, past [B]; positions, lines [B, T]; tree_mask [B, T, N].

        lines: of the rotary tables. tree_mask: of the N newest tokens, the step's own last.
        """
        arrays = tuple(np.ascontiguousarray(a) for a in (rows, positions, lines, past, tree_mask))
        pointers = tuple(a.ctypes.data for a in arrays)
        return StepPlan(arrays, pointers, *tree_mask.shape)

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
            plan.batch, plan.num_tokens, plan.num_newest, num_heads, num_kv_heads, head_size,
            cache.shape[1], cache.shape[3], 0 if cos is None else cos.shape[1], window or 0,
        )  # fmt: skip
        return out

    def pack_matrix(self, weight: Tensor) -> Tensor:
        """Lay out a matrix [N, depth] by tiles of outputs, see kernels.cpp.

        float32: [ceil(N / TILE), depth, TILE]; half precision: [ceil(N / TILE), ceil(depth / 2),
        TILE, 2]. The order within is the kernels' own.
        """
        weight = weight.contiguous()
        num_outputs, depth = weight.shape
        pair = 4 // weight.element_size()
        packed = weight.new_empty((-(-num_outputs // TILE), -(-depth // pair), TILE, pair))
        self._set_num_threads(torch.get_num_threads())
        self._pack_matrix(weight.data_ptr(), num_outputs, depth, packed.data_ptr())
        return packed

    def pack_int8(self, weight: Tensor, scales: Tensor) -> Tensor:
        """Lay out an int8 matrix [N, depth] and its rows' scales [N] by tiles, see kernels.cpp.

        [ceil(N / TILE), 1 + ceil(depth / 4), 4 TILE]: each tile's scales, then its numbers.
        """
        weight, scales = weight.contiguous(), scales.contiguous()
        num_outputs, depth = weight.shape
        packed = weight.new_empty((-(-num_outputs // TILE), 1 + -(-depth // 4), 4 * TILE))
        self._set_num_threads(torch.get_num_threads())
        self._pack_int8(weight.data_ptr(), scales.data_ptr(), num_outputs, depth, packed.data_ptr())
        return packed

    def multiply(self, x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
        """x W^T + bias: [..., depth] -> [..., num_outputs].

        `packed` is of `pack_matrix` or of `pack_int8`.

        A row's result is the same to the last bit whatever other rows there are.
        """
        x = x.contiguous()
        depth = x.shape[-1]
        y = x.new_empty((*x.shape[:-1], num_outputs))
        self._set_num_threads(torch.get_num_threads())
        run = self._multiply_int8 if packed.dtype is torch.int8 else self._multiply
        run(
            x.data_ptr(), x.numel() // depth, depth, packed.data_ptr(), _get_pointer(bias),
            num_outputs, y.data_ptr(),
        )  # fmt: skip
        return y

    def run_layers(
        self,
        x: Tensor,
        layers: PackedLayers,
        cache: Tensor,
        table: RotaryTable | None,
        plan: StepPlan,
        observed_layers: Sequence[int],
        first_input: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """All layers of a decoder over one step, in one call.

        x: [B, T, D], overwritten by the last layer's output; cache: [layers, 2, R, K, S, H];
        first_input: [B, T, F], what the first layer's attention reads, its normed input if None.
        Returns the last layer's output normed, [B, T, D], and the outputs of `observed_layers`,
        [B, T, n * D].
        """
        out = torch.empty_like(x)
        cos, sin = (table.cos, table.sin) if table else (None, None)
        num_rows, num_positions = cache.shape[2], cache.shape[4]
        observed = x.new_empty((len(observed_layers), *x.shape)) if observed_layers else None
        chosen = np.array(observed_layers, np.int64)
        shape = np.array(
            [
                plan.batch, plan.num_tokens, plan.num_newest,
                0 if first_input is None else first_input.shape[-1], *layers.sizes,
                num_rows, num_positions, 0 if cos is None else cos.shape[1],
                layers.window, layers.num_layers,
                layers.activation, layers.is_gated, len(observed_layers), layers.is_int8,
            ],
            np.int64,
        )  # fmt: skip
        self._set_num_threads(torch.get_num_threads())
        self._run_layers(
            x.data_ptr(), _get_pointer(first_input), out.data_ptr(), layers.pointers.ctypes.data,
            layers.final_pointers.ctypes.data, cache.data_ptr(), _get_pointer(cos),
            _get_pointer(sin), *plan.pointers, chosen.ctypes.data, _get_pointer(observed),
            shape.ctypes.data, layers.epsilon,
        )  # fmt: skip
        if observed is not None:
            observed = torch.cat(list(observed), dim=-1)
        return out, observed

    def rank_outputs(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int, width: int
    ) -> tuple[Tensor, Tensor]:
        """The `width` most probable outputs of x W^T + bias, best first: x [..., depth].

        Returns their numbers and their log-probabilities, both [..., width].
        """
        x = x.contiguous()
        depth = x.shape[-1]
        tokens = x.new_empty((*x.shape[:-1], width), dtype=torch.int64)
        scores = torch.empty_like(tokens, dtype=torch.float32)
        self._set_num_threads(torch.get_num_threads())
        self._rank_outputs(
            x.data_ptr(), x.numel() // depth, depth, packed.data_ptr(), _get_pointer(bias),
            num_outputs, width, tokens.data_ptr(), scores.data_ptr(),
        )  # fmt: skip
        return tokens, scores

    def search_beams(
        self, drafter: PackedDrafter, hidden: Tensor, tokens: Tensor, width: int, length: int
    ) -> Tensor:
        """ReDrafter's beam search in one call: hidden [B, D], tokens [B] -> drafts [B, W, L]."""
        batch = tokens.shape[0]
        hidden = hidden.contiguous()
        beams = torch.empty((batch, width, length), dtype=torch.int64)
        vocab_size, size = drafter.embedding.shape
        self._set_num_threads(torch.get_num_threads())
        self._search_beams(
            drafter.embedding.data_ptr(), hidden.data_ptr(), tokens.data_ptr(),
            _get_pointer(drafter.rnn_w), _get_pointer(drafter.rnn_u),
            _get_pointer(drafter.rnn_u_bias), _get_pointer(drafter.context_proj),
            _get_pointer(drafter.state_proj), _get_pointer(drafter.input_bias),
            ctypes.addressof(drafter.block_pointers), len(drafter.blocks),
            drafter.lm_head.data_ptr(), beams.data_ptr(),
            batch, width, length, vocab_size, size, drafter.exit_dim, drafter.num_candidates,
        )  # fmt: skip
        return beams


def _get_pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class PackedLayers:
    """A decoder's layers as `NativeKernels.run_layers` takes them: pointers and sizes.

    weights: of each layer input norm, QKV, dense, post norm (or None), up and down, every one its
    weight and its bias or None; final: of the last norm. The tensors are kept alive. The matrices
    are of one type, int8 or that of all else.
    """

    def __init__(
        self, weights: Sequence[Sequence[Tensor | None]], final: Sequence[Tensor | None],
        *, hidden: int, num_heads: int, num_kv_heads: int, head_size: int, inner: int,
        activation: int, is_gated: bool, window: int | None, epsilon: float,
    ) -> None:  # fmt: skip
        self._kept = (weights, final)
        self.pointers = np.array([_get_pointer(t) or 0 for row in weights for t in row], np.uint64)
        self.final_pointers = np.array([_get_pointer(t) or 0 for t in final], np.uint64)
        self.sizes = (hidden, num_heads, num_kv_heads, head_size, inner)
        self.num_layers = len(weights)
        self.activation, self.is_gated = activation, int(is_gated)
        self.window, self.epsilon = window or 0, epsilon
        qkv = weights[0][2]
        self.is_int8 = int(qkv is not None and qkv.dtype is torch.int8)


class PackedDrafter:
    """A ReDrafter drafter's weights as `NativeKernels.search_beams` takes them.

    `weights` are a checkpoint's `drafter.*` tensors; absent ones are those the drafter has not.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], embedding: Tensor, *, num_layers: int,
        exit_dim: int, num_candidates: int, kernels: NativeKernels,
    ) -> None:  # fmt: skip
        def pack(name: str) -> Tensor | None:
            weight = weights.get(f"drafter.{name}.weight")
            return None if weight is None else kernels.pack_matrix(weight)

        self.embedding = embedding
        self.exit_dim = exit_dim
        self.num_candidates = num_candidates
        self.rnn_w, self.rnn_u = pack("rnn_w"), pack("rnn_u")
        self.rnn_u_bias = weights.get("drafter.rnn_u.bias")
        self.context_proj = self.state_proj = None
        if (joint := weights.get("drafter.input_proj.weight")) is not None:
            halves = joint.chunk(2, dim=1)  # of the target's state, and of the recurrent one
            self.context_proj, self.state_proj = map(kernels.pack_matrix, halves)
        self.input_bias = weights.get("drafter.input_proj.bias")
        self.lm_head = kernels.pack_matrix(weights["drafter.lm_head.weight"])
        self.blocks = [
            (
                kernels.pack_matrix(weights[f"drafter.layers.{i}.linear.weight"]),
                weights[f"drafter.layers.{i}.linear.bias"],
            )
            for i in range(num_layers)
        ]
        pointers = [tensor.data_ptr() for pair in self.blocks for tensor in pair]
        self.block_pointers = (ctypes.c_void_p * max(1, len(pointers)))(*pointers)
