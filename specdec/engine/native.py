"""Native kernels: compiled by specdec-build for this machine, called over a plain C interface."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.engine.compiler import FLAGS as FLAGS
from specdec.engine.compiler import SOURCE as SOURCE
from specdec.engine.compiler import call_compiler, hash_source
from specdec.engine.compiler import describe_cpu as describe_cpu
from specdec.engine.compiler import find_compiler as find_compiler
from specdec.engine.kernel_cache import find_kept, keep
from specdec.engine.layers import Attention, Norm, name_activation
from specdec.engine.linear_states import LinearStates
from specdec.engine.rotary import RotaryTable
from specdec.engine.tree import BoolArray, FloatArray, IntArray
from specdec.errors import SpecDecError
from specdec.model.blocks import TYPES
from specdec.model.config import ModelConfig
from specdec.model.int4 import ENGINE_GROUPS
from specdec.system import logs
from specdec.system.cache import find_cache

logger = logs.get_logger(__name__)
LIBRARY_NAME = "kernels.so"
ABI_VERSION = 25
ALIGNMENT = 64  # bytes: a line of the cache, which a packed matrix begins with
TILE = 32  # a multiple of the outputs side by side in a packed matrix, kTile in kernels/gemm.h
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
_INT64 = np.dtype(np.int64)
_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# Types of arguments and results by the letters that a library tells them by, see kernels.cpp.
_LETTERS = {"v": None, "p": _POINTER, "i": _INT, "f": _FLOAT, "d": ctypes.c_double}


# What a layer has by name, each with its bias, and the norms of its heads, which have none.
_MATRICES = ("qkv", "dense", "up", "down")
_NORMS = ("norm", "post", "dense_norm", "down_norm")
_HEAD_NORMS = ("q_norm", "k_norm")


class Layer(ctypes.Structure):
    """A layer as the kernels take it, see `Layer` in kernels/layers.h."""

    _fields_ = [
        *(
            (name + suffix, _POINTER)
            for part in ("norm", "qkv", "dense", "post", "up", "down")
            for name, suffix in ((part, ""), (part, "_bias"))
        ),
        *((name, _POINTER) for name in _HEAD_NORMS),
        *((name + suffix, _POINTER) for name in _NORMS[2:] for suffix in ("", "_bias")),
        ("cosine", _POINTER), ("sine", _POINTER), ("window", _INT), ("experts", _POINTER),
    ]  # fmt: skip


class Experts(ctypes.Structure):
    """A rank's part of a layer's experts, see `Experts` in kernels/layers.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("router", "up", "down", "shared_up", "shared_down")),
        ("gate", _POINTER), ("seen", _POINTER),
        *((name, _INT) for name in ("num", "top_k", "first", "count", "I", "shared_I")),
        ("renormalizes", _INT),
    ]  # fmt: skip


class Shape(ctypes.Structure):
    """Sizes of `NativeKernels.run_layers`, see `Shape` in kernels/layers.h."""

    _fields_ = [
        (name, _INT)
        for name in (
            *("B", "T", "C", "first_depth", "D", "N", "K", "H", "I", "R", "S", "rotated"),
            *("num_layers", "activation", "is_gated", "observing", "is_integer"),
        )
    ]


class Scalars(ctypes.Structure):
    """Its other numbers, see `Scalars` in kernels/layers.h."""

    _fields_ = [(name, _FLOAT) for name in ("epsilon", "scale", "cap", "share")]


class SearchShape(ctypes.Structure):
    """Sizes of ReDrafter's searches, see `SearchShape` in kernels/search.h."""

    _fields_ = [(name, _INT) for name in ("B", "W", "L", "N", "V", "H", "X", "C", "is_integer")]


class DeltaSizes(ctypes.Structure):
    """Sizes of a layer of linear attention, see `DeltaSizes` in kernels/delta_net.h."""

    _fields_ = [(name, _INT) for name in ("K", "V", "I", "J", "taps", "P")]


def describe_coverage(model: ModelConfig) -> str:
    """Tell which of a model's operations have kernels; torch's own operators do the others."""
    activation = name_activation(model)
    covered = ["products", "norms", "attention", *(["experts"] if model.experts else [])]
    covered += ["linear attention"] if model.linear_attention is not None else []
    if model.arithmetic.mlp != "plain" and activation in GATES:
        return ", ".join([*covered, f"gated {activation}"])
    if model.arithmetic.mlp == "plain" and activation in PLAIN_ACTIVATIONS and model.tp_size == 1:
        return ", ".join([*covered, activation])
    return f"{', '.join(covered)}; torch computes {activation}"


def compile_kernels(folder: Path, reason: str = "") -> dict[str, str]:
    """Compile the kernels into `folder` and return what they were compiled with.

    reason: why this is done now, for people. What this compiler made of this source on this machine
    before is taken from the user's cache.
    Raises SpecDecError with the compiler's last lines when there is no compiler or it fails.
    """
    found = find_compiler()
    if found is None:
        raise SpecDecError(
            "no C++ compiler: neither $CXX nor g++, c++ or clang++ is on the PATH",
            "install one (Debian: apt install g++), or build with --optimize none",
        )
    compiler = shlex.split(found)
    version = call_compiler([*compiler, "--version"])
    info = {
        "compiler": " ".join([(version.splitlines() or compiler)[0], *compiler[1:]]),
        **_describe_kernels(),
    }
    library = folder / LIBRARY_NAME
    if kept := find_kept(info):
        # One that this process has loaded may lie there: written into, it would break under us.
        library.unlink(missing_ok=True)
        shutil.copyfile(kept, library)
        logger.debug("kernels taken from %s", kept)
        return info
    objects = folder / "kernels.o"
    if reason:
        logger.info("%s", reason)
    label = f"compiling the native kernels for this CPU with {info['compiler']}, once"
    with logs.show_waiting(label, logger):
        call_compiler(
            [*compiler, *FLAGS, "-c", "-fPIC", str(SOURCE), "-o", str(objects)], output=objects
        )
        call_compiler(
            [*compiler, "-shared", "-pthread", str(objects), "-o", str(library)], output=library
        )
    objects.unlink()
    _load_library(library)  # what does not load is not kept
    keep(library.read_bytes(), info)
    return info


def load_kernels(wanted: Mapping[str, str], dtype: torch.dtype) -> NativeKernels:
    """The kernels of this version for this CPU: those an engine was built with, or made again.

    wanted: what the engine's were compiled with. They come out of the user's cache; an engine
    folder's own copy is code of whoever built it, and is not looked at. Raises SpecDecError where
    they are not in the cache and cannot be compiled.
    """
    is_ours = all(wanted.get(key) == value for key, value in _describe_kernels().items())
    if is_ours and (kept := find_kept(wanted)):
        return NativeKernels(kept, dtype)
    try:
        with tempfile.TemporaryDirectory(prefix="specdec-kernels-") as folder:
            info = compile_kernels(
                Path(folder),
                f"no kernels for this engine are kept in {find_cache() or 'a home folder'}, and"
                " those in its folder are not used, as code may be anybody's: they are compiled",
            )
            return NativeKernels(find_kept(info) or Path(folder) / LIBRARY_NAME, dtype)
    except OSError as error:
        raise SpecDecError(
            f"the native kernels cannot be compiled: {error.strerror or error}",
            "free space in the folder for temporary files, or set TMPDIR to another one",
        ) from None


def _describe_kernels() -> dict[str, str]:
    """What makes a library right for this machine and this version of specdec."""
    return {
        "flags": " ".join(FLAGS),
        "cpu": describe_cpu(),
        "source_sha256": hash_source(SOURCE),
    }


def _load_library(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise SpecDecError(
            f"the compiled kernels do not load: {error}",
            "set CXX to another C++ compiler, or build with --optimize none",
        ) from None


def _check_interface(path: Path, library: ctypes.CDLL) -> None:
    """Raise SpecDecError where a library is of another version, or has another size of a record."""
    try:
        library.specdec_abi_version.restype = _INT
        version = library.specdec_abi_version()
    except AttributeError:
        version = 0
    if version != ABI_VERSION:
        raise SpecDecError(
            f"{path} has kernel interface {version}, this specdec needs {ABI_VERSION}",
            "remove the file: it is compiled again",
        )
    for record in (Layer, Experts, Shape, Scalars, SearchShape, DeltaSizes):
        size = _INT.in_dll(library, f"specdec_size_of_{record.__name__}").value
        if size != ctypes.sizeof(record):
            raise RuntimeError(f"{record.__name__} has {ctypes.sizeof(record)} bytes, not {size}")


def _check_packed(
    what: str, packed: Tensor, dtype: torch.dtype, num_outputs: int, depth: int
) -> None:
    """The same of a packed matrix [num_outputs, depth], of integers or of `dtype`."""
    if packed.dtype is not torch.uint8:
        return _check(what, packed, dtype, *get_packed_shape(num_outputs, depth, dtype))
    _check(what, packed, torch.uint8, packed.numel())
    found = list((_INT * 2).from_address(packed.data_ptr()))  # as it was packed
    if found != [num_outputs, depth]:
        raise ValueError(f"{what} is {found}, not {[num_outputs, depth]}")


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step's index arrays as the kernels take them, kept alive while pointers are used."""

    arrays: tuple[np.ndarray[Any, Any], ...]
    pointers: tuple[int, ...]
    batch: int
    num_tokens: int
    num_newest: int  # tokens that the step's mask is about: its own, and before them others
    # What the indices reach: rows and positions of a cache, lines of the rotary tables.
    num_rows: int
    num_positions: int
    num_lines: int

    def check(self, num_rows: int, num_positions: int, num_lines: float) -> None:
        """Raise ValueError where a step reaches beyond its cache or the rotary tables."""
        found = (self.num_rows, self.num_positions, self.num_lines)
        if found[0] > num_rows or found[1] > num_positions or found[2] > num_lines:
            room = (num_rows, num_positions, num_lines)
            raise ValueError(f"a step reaches {found} rows, positions and angles of {room}")


def get_packed_shape(num_outputs: int, depth: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of a packed matrix [num_outputs, depth], see `NativeKernels.pack_matrix`."""
    pair = 4 // dtype.itemsize
    return -(-num_outputs // TILE), -(-depth // pair), TILE, pair


def _check(what: str, tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> None:
    """Raise ValueError where a tensor is not what a kernel takes it for: it would reach beyond it.

    What comes from an engine folder was checked when it was loaded; this is the last fence.
    """
    if tensor is None:
        return
    if (
        tensor.dtype is not dtype or tensor.shape != shape
        or not tensor.is_contiguous() or not tensor.is_cpu
    ):  # fmt: skip
        raise ValueError(
            f"{what} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, strides"
            f" {list(tensor.stride())}; the kernels take {dtype} {list(shape)} on the CPU,"
            " contiguous"
        )


def _count_lines(table: RotaryTable | None, dtype: torch.dtype) -> float:
    """How many positions a rotary table has; raise ValueError where it is not of a type."""
    if table is None:
        return math.inf
    _check("cos", table.cos, dtype, *table.cos.shape)
    _check("sin", table.sin, dtype, *table.cos.shape)
    return len(table.cos)


class NativeKernels:
    """The compiled kernels of an engine, for one dtype; tensors are contiguous, on the CPU."""

    def __init__(self, library: Path, dtype: torch.dtype) -> None:
        self._library = _load_library(library)
        _check_interface(library, self._library)
        self.dtype = dtype
        self._functions: dict[str, Any] = {}
        use_amx = self._ask_for_amx() if dtype is torch.bfloat16 else -1
        self.uses_amx = use_amx == 1
        if use_amx == 0:
            logger.warning(
                "this system lets no process use the processor's AMX (bfloat16 products): the same"
                " bits are computed without it, long steps at several times the cost"
            )
        # Weights that are mapped, by their address, and what they were packed into.
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def _ask_for_amx(self) -> int:
        """1 where products use AMX, 0 where the system refuses it, else -1."""
        return int(self._call("use_amx"))

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the library, that of our dtype where there is one for each."""
        if name not in self._functions:
            whole = f"specdec_{name}_{_SUFFIXES[self.dtype]}"
            whole = whole if hasattr(self._library, whole) else f"specdec_{name}"
            # The library tells the types that a function returns and takes.
            letters = ctypes.c_char_p.in_dll(self._library, f"{whole}_types").value or b""
            function = getattr(self._library, whole)
            function.restype, *function.argtypes = [_LETTERS[at] for at in letters.decode()]
            self._functions[name] = function
        return self._functions[name](*arguments)

    def _call_crew(self, name: str, *arguments: Any) -> Any:
        """The same of one that threads share, as many as torch has."""
        self._call("set_num_threads", torch.get_num_threads())
        return self._call(name, *arguments)

    def plan_step(
        self,
        rows: IntArray,
        positions: IntArray,
        lines: IntArray,
        past: IntArray,
        tree_mask: BoolArray,
    ) -> StepPlan:
        """Prepare a step's indices: rows, past [B]; lines [B, T]; tree_mask [B, T, N].

        lines: of the rotary tables. positions: [B, N], of the N newest tokens, which are the
        columns of tree_mask, the step's own last.
        """
        batch, num_tokens, num_newest = tree_mask.shape
        shapes = [(batch,), (batch, num_newest), (batch, num_tokens), (batch,)]
        given = (rows, positions, lines, past)
        if [a.shape for a in given] != shapes or {a.dtype for a in given} != {_INT64}:
            raise ValueError(f"a step's indices are {[(a.dtype, a.shape) for a in given]}")
        parts, mask = [a.ravel().tolist() for a in given], np.ascontiguousarray(tree_mask)
        numbers = [*parts[0], *parts[1], *parts[2], *parts[3]]
        if num_newest < num_tokens or mask.dtype != np.bool_ or min(numbers) < 0:
            raise ValueError(f"a step of {num_tokens} tokens has a mask of {num_newest} as"
                             f" {mask.dtype}, or has indices below 0")  # fmt: skip
        indices = np.array(numbers, np.int64)
        firsts = (0, batch, batch * (1 + num_newest), batch * (1 + num_newest + num_tokens))
        start = _get_address(indices)
        return StepPlan(
            (indices, mask), (*(start + 8 * at for at in firsts), _get_address(mask)),
            batch, num_tokens, num_newest, num_rows=max(parts[0]) + 1,
            num_positions=max(parts[3]) + num_newest, num_lines=max(parts[2]) + 1,
        )  # fmt: skip

    def lend_blocks(self, cache: object, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros for a cache, in large pages where there are some: long ones are read faster."""
        blocks = torch.zeros(tuple(shape), dtype=dtype)
        self._call("ask_for_huge_pages", blocks.data_ptr(), blocks.nbytes)
        return blocks

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Norm of [..., D]."""
        return self.add_norm(x, None, norm)

    def add_norm(
        self, x: Tensor, delta: Tensor | None, norm: Norm,
        delta_norm: Norm | None = None, share: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """Add `delta` to `x` in place and return the norm of the sum. x, delta: [..., D].

        delta_norm: of delta first, with the epsilon of `norm`. share: what delta is multiplied by.
        """
        size = x.shape[-1]
        _check("x", x, self.dtype, *x.shape)
        _check("delta", delta, self.dtype, *x.shape)
        weights = [
            tensor
            for each in (delta_norm, norm)
            for tensor in ((each.weight, each.bias) if each is not None else (None, None))
        ]
        for tensor in weights:
            _check("a norm's weight or bias", tensor, self.dtype, size)
        first, first_bias, last, last_bias = map(_get_pointer, weights)
        out = torch.empty_like(x)
        self._call(
            "add_norm",
            x.data_ptr(), _get_pointer(delta), first, first_bias, share, last, last_bias,
            out.data_ptr(), x.numel() // size, size, norm.epsilon, norm.offset,
        )  # fmt: skip
        return out

    def cap_logits(self, logits: Tensor, scale: float, limit: float) -> Tensor:
        """Turn logits x in place into limit tanh(scale x / limit), with one rounding."""
        _check("logits", logits, self.dtype, *logits.shape)
        self._call_crew("cap_logits", logits.data_ptr(), logits.numel(), scale, limit)
        return logits

    def gate_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """[..., 2 I] -> [..., I]: the first half activated times the second."""
        _check("gate_up", gate_up, self.dtype, *gate_up.shape)
        inner = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], inner))
        kernel = f"{GATES[activation]}_mul"
        self._call(kernel, gate_up.data_ptr(), out.data_ptr(), out.numel() // inner, inner)
        return out

    def attend(
        self,
        qkv: Tensor,
        cache: Tensor,
        how: Attention,
        plan: StepPlan,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
    ) -> Tensor:
        """Norm, rotate, write keys and values, attend over the visible positions only.

        qkv: [B, T, (N + 2K) H], overwritten; cache: [2, R, K, S, H] of one layer.
        Returns [B, T, N H].
        """
        width = (num_heads + 2 * num_kv_heads) * head_size
        _check("qkv", qkv, self.dtype, plan.batch, plan.num_tokens, width)
        _, num_rows, _, num_positions, _ = cache.shape
        _check("cache", cache, self.dtype, 2, num_rows, num_kv_heads, num_positions, head_size)
        norms = [None if norm is None else norm.weight for norm in (how.q_norm, how.k_norm)]
        for weight in norms:
            _check("the weight of a norm of heads", weight, self.dtype, head_size)
        plan.check(num_rows, num_positions, _count_lines(how.rotary, self.dtype))
        out = qkv.new_empty((plan.batch, plan.num_tokens, num_heads * head_size))
        cos, sin = (how.rotary.cos, how.rotary.sin) if how.rotary else (None, None)
        self._call(
            "attend",
            qkv.data_ptr(), cache.data_ptr(), *map(_get_pointer, (*norms, cos, sin)),
            *plan.pointers, out.data_ptr(),
            plan.batch, plan.num_tokens, plan.num_newest, num_heads, num_kv_heads, head_size,
            num_rows, num_positions, 0 if cos is None else cos.shape[1], how.window or 0,
            how.scale, how.cap or 0.0, how.q_norm.epsilon if how.q_norm else 0.0,
            how.q_norm.offset if how.q_norm else 0.0,
        )  # fmt: skip
        return out

    def run_delta_net(
        self, qkvz: Tensor, ba: Tensor, states: LinearStates, index: int,
        weights: tuple[Tensor, Tensor, Tensor], norm: Norm,
    ) -> Tensor:  # fmt: skip
        """What `DeltaNet.run` yields of [B, T, W] and [B, T, 2 V]; writes the layer's states.

        The runs are those that the states have begun.

        index: which of these layers it is. weights: float32, of the convolution [taps, C], and the
        rate and the bias of the decay, [V].
        """
        sizes, (batch, num_tokens) = states.sizes, qkvz.shape[:2]
        width, heads, channels = sizes.sections[2], sizes.num_value_heads, sizes.num_channels
        _check("qkvz", qkvz, self.dtype, batch, num_tokens, channels + width)
        _check("ba", ba, self.dtype, batch, num_tokens, 2 * heads)
        _check("a norm's weight", norm.weight, self.dtype, sizes.value_size)
        shapes = (sizes.num_taps, channels), (heads,), (heads,)
        for tensor, shape in zip(weights, shapes, strict=True):
            _check("taps or decay", tensor, torch.float32, *shape)
        parts = states.state[index], states.window[index], *(part[index] for part in states.log)
        out = qkvz.new_zeros((batch, num_tokens, width))
        record = DeltaSizes(
            sizes.num_key_heads, heads, sizes.key_size, sizes.value_size, sizes.num_taps,
            states.log[0].shape[2],
        )  # fmt: skip
        self._call(
            "run_delta_net",
            qkvz.data_ptr(), ba.data_ptr(), out.data_ptr(), states.table.ctypes.data,
            len(states.table),
            *(part.data_ptr() for part in (*parts, *weights, norm.weight)), norm.epsilon,
            ctypes.addressof(record),
        )  # fmt: skip
        return out

    def know_packed(self, weight: Tensor, packed: Tensor) -> None:
        """Take `packed` when `weight` is to be packed; its memory, which is mapped, is kept."""
        self._known[weight.data_ptr()] = (weight, packed)

    def _find_known(
        self, weight: Tensor, sizes: Sequence[int] = (), least: int = 0
    ) -> Tensor | None:
        """What a weight was packed into before; None if it was not.

        sizes: what it has to begin with where it is of integers; least: its bytes then. Raises
        SpecDecError where what is known cannot be what the weight was packed into.
        """
        known, packed = self._known.get(weight.data_ptr(), (None, None))
        if known is None or packed is None or known.shape != weight.shape:
            return None
        if not (known.dtype is weight.dtype and weight.is_contiguous()):
            return None
        if sizes:
            is_right = packed.dtype is torch.uint8 and packed.dim() == 1 and len(packed) >= least
            is_right = is_right and packed[: 8 * len(sizes)].view(torch.int64).tolist() == [*sizes]
        else:
            num_outputs, depth = weight.shape
            shape = get_packed_shape(num_outputs, depth, weight.dtype)
            is_right = packed.dtype is weight.dtype and packed.shape == shape
        if not is_right:
            raise SpecDecError(
                f"what the engine has as a packed matrix of {list(weight.shape)} is"
                f" {packed.dtype} {list(packed.shape)} of another matrix",
                "the file is damaged: build the engine again, or remove its folder `packed`",
            )
        return packed

    def measure_integers(self, sizes: Sequence[int]) -> int:
        """Bytes of a packed matrix with these sizes, see `Integers` in kernels/integers.h."""
        return int(self._call("measure_integers", np.array(sizes, np.int64).ctypes.data))

    def pack_matrix(self, weight: Tensor) -> Tensor:
        """Lay out a matrix [N, depth] by tiles of outputs, see kernels/gemm.h.

        float32: [ceil(N / TILE), depth, TILE]; half precision: [ceil(N / TILE), ceil(depth / 2),
        TILE, 2]. The order within is the kernels' own.
        """
        return self._pack("a matrix", weight, self.dtype, "pack_matrix")

    def pack_router(self, weight: Tensor) -> Tensor:
        """Lay out a float32 matrix [N, depth] with weights of any type, as `pack_matrix` does."""
        return self._pack("a router", weight, torch.float32, "pack_matrix_f32")

    def _pack(self, what: str, weight: Tensor, dtype: torch.dtype, kernel: str) -> Tensor:
        if (known := self._find_known(weight)) is not None:
            return known
        weight = weight.contiguous()
        num_outputs, depth = weight.shape
        _check(what, weight, dtype, num_outputs, depth)
        packed = weight.new_empty(get_packed_shape(num_outputs, depth, dtype))
        if num_outputs % TILE:
            packed[-1].zero_()  # kernels of narrow vectors end before it does
        self._call_crew(kernel, weight.data_ptr(), num_outputs, depth, packed.data_ptr())
        return packed

    def mix_experts(self, x: Tensor, experts: PackedExperts) -> Tensor:
        """[..., D] -> [..., D]: what a rank's experts of a layer add up to, see layers.h."""
        x = x.contiguous()
        _check("x", x, self.dtype, *x.shape[:-1], experts.hidden)
        out = torch.empty_like(x)
        self._call_crew(
            "mix_experts",
            x.data_ptr(), x.numel() // experts.hidden, experts.hidden, ctypes.byref(experts.record),
            out.data_ptr(), experts.is_integer,
        )  # fmt: skip
        return out

    def pack_integers(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        *,
        bits: int,
        group: int,
        input_scales: Tensor | None = None,
        order: Tensor | None = None,
    ) -> Tensor:
        """Lay out a matrix [N, depth] of integers, see `Integers` in kernels/integers.h.

        codes: int8 [N, depth], or of 4 bits [N / 2, depth] as specdec/model/int4.py packs them.
        scales: float32, zeros: uint8 (8 if None), of each group of `group` inputs [N, groups], or
        one a row [N, 1]. input_scales: float32 [depth], by which inputs are multiplied; order:
        int32 [depth], which of the inputs each column is for. Returns uint8 [n].
        """
        codes, scales = codes.contiguous(), scales.contiguous()
        rows, depth = codes.shape
        num_outputs = rows * 8 // bits
        num_groups = -(-depth // group)
        by_row = scales.shape == (num_outputs, 1)
        _check("codes", codes, torch.int8, rows, depth)
        _check("scales", scales, torch.float32, num_outputs, 1 if by_row else num_groups)
        _check("zeros", zeros, torch.uint8, *scales.shape)
        _check("input scales", input_scales, torch.float32, depth)
        _check("an order", order, torch.int32, depth)
        if group not in ENGINE_GROUPS or (bits, zeros is not None) == (8, True):
            raise ValueError(f"{bits} bits in groups of {group}, zeros {zeros is not None}")
        if order is not None and not 0 <= int(order.min()) <= int(order.max()) < depth:
            raise ValueError(f"an order of {depth} inputs has others")
        given = [t is not None for t in (zeros, input_scales, order)]
        sizes = np.array([num_outputs, depth, bits, group, by_row, *given], np.int64)
        num_bytes = self.measure_integers(sizes.tolist())
        # An order is among what is packed, and is checked here only.
        known = self._find_known(codes, sizes.tolist(), num_bytes) if order is None else None
        if known is not None:
            return known
        packed = codes.new_empty(num_bytes, dtype=torch.uint8)
        if any(given[1:]):
            packed.zero_()  # what is between lists
        self._call_crew(
            "pack_integers",
            codes.data_ptr(), scales.data_ptr(), _get_pointer(zeros), _get_pointer(input_scales),
            _get_pointer(order), sizes.ctypes.data, packed.data_ptr(),
        )  # fmt: skip
        return packed

    def _plan_blocks(
        self, parts: Sequence[tuple[int, int, int]], depth: int
    ) -> list[np.ndarray[Any, Any]]:
        """How each part begins, see `BlockRows` in kernels/blocks.h."""
        heads = []
        for kind, start, stop in parts:
            head = np.array([parts[-1][2], depth, 0, kind, stop - start, 0, 0, 0], np.int64)
            num_bytes = self._call("measure_blocks", head.ctypes.data)
            head[5] = -(-num_bytes // ALIGNMENT) * ALIGNMENT
            heads.append(head)
        return heads

    def measure_blocks(self, parts: Sequence[tuple[int, int, int]], depth: int) -> int:
        """Bytes of a packed matrix of these parts: type, first row, first row behind it."""
        return sum(int(head[5]) for head in self._plan_blocks(parts, depth))

    def pack_blocks(
        self, rows: Tensor, parts: Sequence[tuple[int, int, int]], depth: int
    ) -> Tensor:
        """Lay out a matrix [N, depth] in GGML's blocks, see kernels/blocks.h.

        rows: uint8 [N, bytes]; parts: of `measure_blocks`. Returns uint8 [n].
        """
        _check("rows of blocks", rows, torch.uint8, *rows.shape)
        for kind, _, stop in parts:
            own = TYPES.get(kind)
            if own is None or depth % own.size or stop > len(rows):
                raise ValueError(f"rows of type {kind} up to {stop} of {list(rows.shape)}")
            if own.count_bytes(depth) > rows.shape[1]:
                raise ValueError(f"rows of {rows.shape[1]} bytes for {depth} weights of {kind}")
        heads = self._plan_blocks(parts, depth)
        ends = np.cumsum([head[5] for head in heads]).tolist()
        heads[-1][5] = 0
        if (known := self._find_known(rows, heads[0].tolist(), ends[-1])) is not None:
            return known
        packed = rows.new_zeros(ends[-1])
        for head, (_, start, _), place in zip(heads, parts, [0, *ends], strict=False):
            given = rows[start].data_ptr(), rows.shape[1], head.ctypes.data
            self._call_crew("pack_blocks", *given, packed.data_ptr() + place)
        return packed

    def widen_blocks(self, rows: Tensor, types: Tensor, indices: Tensor, depth: int) -> Tensor:
        """Rows of a matrix in GGML's blocks by their numbers: float32 [..., depth].

        rows: uint8 [N, bytes]; types: uint8 [N], of each row.
        """
        chosen = indices.contiguous()
        _check("rows of blocks", rows, torch.uint8, *rows.shape)
        _check("types of rows", types, torch.uint8, len(rows))
        _check("numbers of rows", chosen, torch.int64, *indices.shape)
        out = torch.empty(*indices.shape, depth)
        done = self._call(
            "widen_blocks",
            rows.data_ptr(), *rows.shape, types.data_ptr(), chosen.data_ptr(), chosen.numel(),
            depth, out.data_ptr(),
        )  # fmt: skip
        if done < chosen.numel():
            row = int(chosen.flatten()[done])
            raise ValueError(f"row {row} of {list(rows.shape)} is not there, or no blocks")
        return out

    def multiply(self, x: Tensor, packed: Tensor, bias: Tensor | None, num_outputs: int) -> Tensor:
        """x W^T + bias: [..., depth] -> [..., num_outputs].

        `packed` is of `pack_matrix`, `pack_integers` or `pack_blocks`.

        A row's result is the same to the last bit whatever other rows there are.
        """
        x = x if x.is_contiguous() else x.contiguous()
        depth = x.shape[-1]
        _check("x", x, self.dtype, *x.shape)
        _check_packed("a packed matrix", packed, self.dtype, num_outputs, depth)
        _check("a bias", bias, self.dtype, num_outputs)
        y = x.new_empty((*x.shape[:-1], num_outputs))
        self._call_crew(
            "multiply_integers" if packed.dtype is torch.uint8 else "multiply",
            x.data_ptr(), x.numel() // depth, depth, packed.data_ptr(), _get_pointer(bias),
            num_outputs, y.data_ptr(),
        )  # fmt: skip
        return y

    def run_layers(
        self,
        x: Tensor,
        layers: PackedLayers,
        cache: Tensor,
        plan: StepPlan,
        observed_layers: Sequence[int],
        first_input: Tensor | None = None,
        wanted: BoolArray | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """All layers of a decoder over one step, in one call.

        x: [B, T, D], overwritten by the last layer's output; cache: [layers, 2, R, K, S, H];
        first_input: [B, T, F], what the first layer's attention reads, its normed input if None.
        wanted: [B, T], the tokens whose last output is computed; zeros are that of others. Not
        where the last layer is observed.
        Returns the last layer's output normed, [B, T, D], and the outputs of `observed_layers`,
        [B, T, n * D].
        """
        hidden, _, num_kv_heads, head_size, _ = layers.sizes
        first_depth = hidden if first_input is None else first_input.shape[-1]
        if layers.dtype is not self.dtype:
            raise ValueError(f"layers of {layers.dtype} do not go with {self.dtype}")
        _check_packed("the first matrix", layers.first, self.dtype, layers.num_qkv, first_depth)
        _check("x", x, self.dtype, plan.batch, plan.num_tokens, hidden)
        _check("the first layer's input", first_input, self.dtype, *x.shape[:2], first_depth)
        num_rows, num_positions = cache.shape[2], cache.shape[4]
        _check(
            "the cache", cache, self.dtype,
            layers.num_layers, 2, num_rows, num_kv_heads, num_positions, head_size,
        )  # fmt: skip
        plan.check(num_rows, num_positions, layers.num_lines)
        if any(not 0 <= layer < layers.num_layers for layer in observed_layers):
            raise ValueError(f"layers {observed_layers} of {layers.num_layers}")
        if wanted is not None:
            wanted = np.ascontiguousarray(wanted)
            if wanted.shape != x.shape[:2] or wanted.dtype != np.bool_:
                raise ValueError(f"wanted tokens are {wanted.dtype} {wanted.shape}, of {x.shape}")
            if layers.num_layers - 1 in observed_layers:
                raise ValueError("the last layer is observed, and not wanted of all tokens")
        out = x.new_empty(x.shape)
        observed = x.new_empty((len(observed_layers), *x.shape)) if observed_layers else None
        chosen = np.array(observed_layers, np.int64)
        shape = Shape(
            plan.batch, plan.num_tokens, plan.num_newest,
            0 if first_input is None else first_input.shape[-1], *layers.sizes,
            num_rows, num_positions, layers.rotated, layers.num_layers,
            layers.activation, layers.is_gated, len(observed_layers), layers.is_integer,
        )  # fmt: skip
        self._call_crew(
            "run_layers",
            x.data_ptr(), _get_pointer(first_input), out.data_ptr(), layers.records,
            layers.final, cache.data_ptr(), *plan.pointers, _get_address(chosen),
            _get_pointer(observed), None if wanted is None else _get_address(wanted),
            ctypes.byref(shape), ctypes.byref(layers.scalars),
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
        _check("x", x, self.dtype, *x.shape)
        _check_packed("a packed matrix", packed, self.dtype, num_outputs, depth)
        _check("a bias", bias, self.dtype, num_outputs)
        if not 0 < width <= num_outputs:
            raise ValueError(f"the best {width} of {num_outputs} outputs")
        tokens = x.new_empty((*x.shape[:-1], width), dtype=torch.int64)
        scores = torch.empty_like(tokens, dtype=torch.float32)
        self._call_crew(
            "rank_outputs",
            x.data_ptr(), x.numel() // depth, depth, packed.data_ptr(), _get_pointer(bias),
            num_outputs, width, tokens.data_ptr(), scores.data_ptr(), packed.dtype is torch.uint8,
        )  # fmt: skip
        return tokens, scores

    def search_beams(
        self, drafter: PackedDrafter, hidden: Tensor, tokens: Tensor, width: int, length: int
    ) -> Tensor:
        """ReDrafter's beam search in one call: hidden [B, D], tokens [B] -> drafts [B, W, L]."""
        beams = torch.empty((len(tokens), width, length), dtype=torch.int64)
        self._call_search(drafter, hidden, tokens, (width, length, 0), beams.data_ptr())
        return beams

    def search_trees(
        self, drafter: PackedDrafter, hidden: Tensor, tokens: Tensor, width: int, length: int,
        num_tokens: int, temperatures: FloatArray, least: float,
    ) -> FoundTrees:  # fmt: skip
        """ReDrafter's dynamic trees in one call: hidden [B, D], tokens [B], temperatures [B].

        least: another level is drafted while the newest promises more tokens than that.
        """
        batch = len(tokens)
        temperatures = np.ascontiguousarray(temperatures, np.float64)
        if temperatures.shape != (batch,) or not temperatures.min() > 0 or num_tokens < 1:
            raise ValueError(f"{num_tokens} tokens of {batch} rows, temperatures {temperatures}")
        nodes = np.empty((3, batch, num_tokens), np.int64)
        chances = np.empty((batch, num_tokens))
        num_levels = self._call_search(
            drafter, hidden, tokens, (width, length, num_tokens), nodes.ctypes.data, temperatures,
            least, chances.ctypes.data,
        )  # fmt: skip
        found = min(num_tokens, width + (num_levels - 1) * width**2)
        return FoundTrees(nodes[..., :found], chances[:, :found], num_levels)

    def _call_search(
        self, drafter: PackedDrafter, hidden: Tensor, tokens: Tensor, shape: tuple[int, int, int],
        found: int, temperatures: FloatArray | None = None, least: float = 0.0,
        chances: int | None = None,
    ) -> int:  # fmt: skip
        """shape: width, length, tokens of a tree; found, chances: where what is found goes."""
        batch, (width, length, _) = len(tokens), shape
        hidden, tokens = hidden.contiguous(), tokens.contiguous()
        vocab_size, size = drafter.embedding.shape
        if drafter.dtype is not self.dtype:
            raise ValueError(f"a drafter of {drafter.dtype} for kernels of {self.dtype}")
        _check("hidden", hidden, self.dtype, batch, size)
        _check("tokens", tokens, torch.int64, batch)
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise ValueError(f"tokens {tokens.tolist()} of {vocab_size}")
        if not 0 < width <= drafter.num_candidates or length < 1:
            raise ValueError(
                f"{width} beams of {length} tokens, of {drafter.num_candidates} candidates"
            )
        sizes = SearchShape(batch, *shape, *drafter.sizes)
        num_levels: int = self._call_crew(
            "search",
            drafter.embedding.data_ptr(), hidden.data_ptr(), tokens.data_ptr(),
            drafter.matrices.ctypes.data, drafter.biases.ctypes.data, drafter.blocks.ctypes.data,
            len(drafter.blocks) // 2, _get_pointer(drafter.tokens),
            None if temperatures is None else temperatures.ctypes.data, least, found, chances,
            ctypes.byref(sizes),
        )  # fmt: skip
        return num_levels


def _get_pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _get_address(array: np.ndarray[Any, Any]) -> int:
    """Where an array's first number is: NumPy's own way takes longer."""
    return torch.from_numpy(array).data_ptr()


class PackedExperts:
    """A rank's experts of a layer as the kernels take them: a record of pointers and sizes.

    router: float32 [E, hidden]; up, down: packed, of the rank's own experts, which are counted from
    `first`; shared: packed up and down, and the gate [1, hidden], or None; seen: three counters.
    The tensors are kept alive.
    """

    def __init__(
        self, kernels: NativeKernels, router: Tensor, up: Sequence[Tensor | None],
        down: Sequence[Tensor | None], shared: tuple[Tensor | None, Tensor | None, Tensor] | None,
        *, hidden: int, top_k: int, first: int, inner: int, shared_inner: int, renormalizes: bool,
        seen: np.ndarray[Any, Any],
    ) -> None:  # fmt: skip
        num = len(router)
        matrices = [(up, 2 * inner, hidden), (down, hidden, inner)]
        if shared is not None:
            matrices += [
                ([shared[0]], 2 * shared_inner, hidden), ([shared[1]], hidden, shared_inner)
            ]  # fmt: skip
            _check("a shared expert's gate", shared[2], kernels.dtype, 1, hidden)
        assert up[0] is not None
        self.matrix_dtype, self.hidden = up[0].dtype, hidden
        for tensors, num_outputs, depth in matrices:
            for tensor in tensors:
                if tensor is None or tensor.dtype is not self.matrix_dtype:
                    raise ValueError("an expert's matrix is not packed, or as another type")
                _check_packed("an expert's matrix", tensor, kernels.dtype, num_outputs, depth)
        if not 0 < top_k <= num or not 0 <= first <= first + len(up) <= num or len(up) != len(down):
            raise ValueError(f"{top_k} experts of {num}, {len(up)} and {len(down)} from {first} on")
        if seen.dtype != np.int64 or seen.shape != (3,):
            raise ValueError(f"counters are {seen.dtype} {seen.shape}")
        self.is_integer = int(self.matrix_dtype is torch.uint8)
        packed = kernels.pack_router(router)
        pointers = [np.array([_get_pointer(t) for t in each], np.uint64) for each in (up, down)]
        self._kept = (packed, up, down, shared, pointers, seen)
        self.record = Experts(
            packed.data_ptr(), *(each.ctypes.data for each in pointers),
            *(_get_pointer(tensor) for tensor in shared or (None, None, None)), seen.ctypes.data,
            num, top_k, first, len(up), inner, shared_inner, renormalizes,
        )  # fmt: skip


class PackedLayers:
    """A decoder's layers as `NativeKernels.run_layers` takes them.

    weights: of each layer its tensors by the names of `Layer`, absent ones left out or None. They
    are kept alive. The matrices are of one type, integers or that of all else. stack: a `Stack` of
    torch_layers.py, which imports this module; its layers attend alike but for window and table.
    activation: its number. experts: of each layer, which has no up and down then.
    """

    def __init__(
        self, weights: Sequence[Mapping[str, Tensor | None]], stack: Any, activation: int,
        experts: Sequence[PackedExperts] = (),
    ) -> None:  # fmt: skip
        assert stack.final_norm is not None
        final = stack.final_norm.weight, stack.final_norm.bias
        hidden, head_size, up = len(final[0]), stack.head_size, stack.layers[0].up
        num_heads, num_kv_heads, is_gated = stack.num_heads, stack.num_kv_heads, stack.is_gated
        inner = 0 if up is None else up.num_outputs // (2 if is_gated else 1)
        attending = [layer.attention for layer in stack.layers]
        self._kept, self._experts = (weights, final), experts
        tables = list(dict.fromkeys(how.rotary for how in attending))
        self.rotated = next((table.cos.shape[1] for table in tables if table), 0)
        scale, cap = attending[0].scale, attending[0].cap
        self.scalars = Scalars(stack.final_norm.epsilon, scale, cap or 0.0, stack.share)
        norm, qkv = weights[0]["norm"], weights[0]["qkv"]
        assert norm is not None
        assert qkv is not None
        self.dtype = norm.dtype
        self.num_lines = min(_count_lines(table, self.dtype) for table in tables)
        self.is_integer = qkv.dtype is torch.uint8
        self.first = qkv  # an EAGLE net's first layer may read more than others
        self.num_qkv = (num_heads + 2 * num_kv_heads) * head_size
        shapes = {
            "qkv": (self.num_qkv, hidden), "dense": (hidden, num_heads * head_size),
            "up": (inner * (2 if is_gated else 1), hidden), "down": (hidden, inner),
        }  # fmt: skip
        for index, row in enumerate(weights):
            self._check_layer(index, row, shapes, head_size)
        for tensor in final:
            _check("the last norm", tensor, self.dtype, hidden)
        if experts and {(e.hidden, e.matrix_dtype) for e in experts} != {(hidden, qkv.dtype)}:
            raise ValueError(f"experts of another size or type than {hidden} and {qkv.dtype}")
        if experts and len(experts) != len(weights):
            raise ValueError(f"experts of {len(experts)} layers, of {len(weights)}")
        self.records = (Layer * len(weights))()
        for index, (record, row, how) in enumerate(
            zip(self.records, weights, attending, strict=True)
        ):
            for name, tensor in row.items():
                setattr(record, name, _get_pointer(tensor))
            if how.rotary is not None:
                record.cosine, record.sine = how.rotary.cos.data_ptr(), how.rotary.sin.data_ptr()
            record.window = how.window or 0
            record.experts = ctypes.addressof(experts[index].record) if experts else None
        self._final = np.array([_get_pointer(t) or 0 for t in final], np.uint64)
        self.final = self._final.ctypes.data  # where its norm's pointers are
        self.sizes = (hidden, num_heads, num_kv_heads, head_size, inner)
        self.num_layers = len(weights)
        self.activation, self.is_gated = activation, int(is_gated)

    def _check_layer(
        self, index: int, row: Mapping[str, Tensor | None], shapes: Mapping[str, tuple[int, int]],
        head_size: int,
    ) -> None:  # fmt: skip
        """Raise ValueError where a layer's tensors are not as the others' are, see `shapes`."""
        hidden = shapes["down"][0]
        for name in _NORMS:
            for part in (name, f"{name}_bias"):
                _check(f"{part} of layer {index}", row.get(part), self.dtype, hidden)
        for name in _HEAD_NORMS:
            _check(f"{name} of layer {index}", row.get(name), self.dtype, head_size)
        for name in _MATRICES:
            what, tensor = f"{name} of layer {index}", row.get(name)
            _check(f"the bias of {what}", row.get(f"{name}_bias"), self.dtype, shapes[name][0])
            if tensor is None and self._experts and name in ("up", "down"):
                continue
            if tensor is None or (tensor.dtype is torch.uint8) != self.is_integer:
                raise ValueError(f"{what} is not of the first matrix's type")
            if tensor is not self.first:
                _check_packed(what, tensor, self.dtype, *shapes[name])


@dataclasses.dataclass(frozen=True)
class FoundTrees:
    """Dynamic trees of rows without their roots, which are node 0 of each.

    nodes: [3, B, N], tokens, parents and depths. chances: [B, N], of a node where its parent is
    right. num_levels: that were drafted.
    """

    nodes: IntArray
    chances: FloatArray
    num_levels: int


class PackedDrafter:
    """A ReDrafter drafter's weights as the searches of `NativeKernels` take them.

    parts: its linears, all packed by these kernels and of one type, integers or that of all else;
    absent ones are those the drafter has not. tokens: int64, of the head's outputs, None where
    these are all tokens.
    """

    def __init__(
        self, parts: Mapping[str, Any], embedding: Tensor, *, num_layers: int, exit_dim: int,
        num_candidates: int, kernels: NativeKernels, tokens: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.dtype = kernels.dtype
        vocab_size, size = embedding.shape
        num_outputs = vocab_size if tokens is None else len(tokens)
        names = ("rnn_w", "rnn_u", "context_proj", "state_proj", "lm_head")
        blocks = [f"layers.{i}.linear" for i in range(num_layers)]
        shapes = {
            "rnn_w": (size, size), "rnn_u": (size, size), "context_proj": (exit_dim, size),
            "state_proj": (exit_dim, size), "lm_head": (num_outputs, exit_dim),
            **dict.fromkeys(blocks, (exit_dim, exit_dim)),
        }  # fmt: skip
        _check("the embedding", embedding, self.dtype, vocab_size, size)
        _check("drafted tokens", tokens, torch.int64, num_outputs)
        if tokens is not None and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise ValueError(f"drafted tokens beyond {vocab_size}")
        if not 0 < num_candidates <= num_outputs:
            raise ValueError(f"{num_candidates} candidates of {num_outputs}")
        self._kept = dict(parts)
        for name, part in parts.items():
            if part.packed is None or part.num_outputs != shapes[name][0]:
                raise ValueError(f"drafter.{name} has {part.num_outputs} outputs, or is not packed")
            _check_packed(f"drafter.{name}", part.packed, self.dtype, *shapes[name])
            _check(f"the bias of drafter.{name}", part.bias, self.dtype, part.num_outputs)
        kinds = {part.packed.dtype for part in parts.values() if part.packed is not None}
        if len(kinds) != 1:
            raise ValueError(f"a drafter's matrices are packed as {kinds}")

        def point(names: Sequence[str], kind: str) -> list[int]:
            tensors = [getattr(parts.get(name), kind, None) for name in names]
            return [_get_pointer(tensor) or 0 for tensor in tensors]

        self.embedding, self.tokens, self.num_candidates = embedding, tokens, num_candidates
        self.matrices = np.array(point(names, "packed"), np.uint64)
        self.biases = np.array(point(["rnn_u", "context_proj"], "bias"), np.uint64)
        pairs = zip(point(blocks, "packed"), point(blocks, "bias"), strict=True)
        self.blocks = np.array([pointer for pair in pairs for pointer in pair], np.uint64)
        self.sizes = (num_outputs, size, exit_dim, num_candidates, torch.uint8 in kinds)
