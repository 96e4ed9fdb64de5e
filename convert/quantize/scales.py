"""What is quantized and how its scales come about: the plan of an FP8 checkpoint.

Scales, all float32, one per tensor and before any split over ranks:
weight: the largest magnitude of the weight / 448, shared by q, k and v, and by fc and gate;
activation: the largest magnitude of the linear's input in the calibration / 448;
K/V cache: the largest magnitude of K's and V's outputs / 448, at least 1.
A layer that only ever saw zeros has scale 1.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec import logs
from specdec.errors import SpecDecError, join_names
from specdec.files.reading import Array
from specdec.files.tensor_file import DTYPES, TensorInfo
from specdec.model.config import ModelConfig
from specdec.model.quantization import (
    ACTIVATION_SCALE,
    FLOAT8,
    FLOAT8_MAX,
    FP8,
    KV_SCALES,
    WEIGHT_SCALE,
)
from specdec.model.sharding import Block
from specdec.model.tensors import list_linears
from specdec.threads import Pool

from ..plan import Chunk, Part, Piece, PlannedTensor, RankPlan
from .calibration import Watch
from .float8 import Requantizer, find_amax

logger = logs.get_logger(__name__)

SCALE_INFO = TensorInfo("float32", (1,))
# The head stays in the model's type; embeddings and norms are no linears.
EXCLUDED = ("lm_head",)
MIN_KV_SCALE = np.float32(1)  # ModelOpt's rule: small keys and values are not scaled up
# What each K/V scale is the largest of.
_KV_PARTS = dict(zip(KV_SCALES, (("k", "v"), ("k",), ("v",)), strict=True))


class Scales:
    """The scales of a checkpoint, known only after they were measured; a source of tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self._values: dict[str, np.float32] = {}

    def add(self, name: str, value: np.float32 | None = None) -> PlannedTensor:
        """Plan a scale, of which the value may be told later."""
        self.tensors[name] = SCALE_INFO
        if value is not None:
            self._values[name] = value
        return PlannedTensor(SCALE_INFO, (Piece(self, name, Block(0, 1)),))

    def set(self, name: str, value: np.float32) -> None:
        """Tell a scale's value."""
        self._values[name] = np.float32(value)

    def get(self, name: str) -> np.float32:
        """Return a scale that was measured."""
        return self._values[name]

    def read(self, name: str) -> Array:
        return np.array([self._values[name]], np.float32)

    def read_block(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> Array:
        assert columns is None
        return self.read(name)[start:stop]

    def locate(self, name: str) -> None:
        """Return None: a scale lies in no file."""

    def release(self) -> None:
        """Do nothing: a scale has four bytes."""


@dataclasses.dataclass(frozen=True)
class QuantizedTensor(PlannedTensor):
    """A tensor that is rounded to float8 as its chunks go by. inner: as it is before that."""

    inner: PlannedTensor
    scales: Scales
    scale: str

    def list_chunks(self) -> Iterator[Chunk]:
        requantize = Requantizer(self.inner.info.dtype, self.scales.get(self.scale))
        for chunk in self.inner.list_chunks():
            yield change_chunk(chunk, self.inner.info.dtype, requantize)


def change_chunk(chunk: Chunk, dtype: str, change: Callable[[Array], Array]) -> Chunk:
    """Return a chunk whose elements become one byte each by `change`. dtype: their type."""
    itemsize = np.dtype(DTYPES[dtype][1]).itemsize
    return Chunk(chunk.num_bytes // itemsize, lambda: change(chunk.make()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantizer:
    """What `measure` needs to find every scale. weights: by the scale they share."""

    model_dir: Path
    scales: Scales
    weights: Mapping[str, tuple[PlannedTensor, ...]]
    watches: tuple[Watch, ...]
    calibrate: Callable[[Sequence[Watch]], dict[str, np.float32]]

    def measure(self, workers: int) -> None:
        """Read all weights, run the calibration, and set every scale."""
        with Pool(workers) as pool:
            tasks = {
                name: pool.submit(_measure, tensors, pool.is_ending)
                for name, tensors in self.weights.items()
            }
            done = logs.show_progress(tasks.values(), label="measuring", total=len(tasks))
            for task in done:
                task.result()
        weights = {name: task.result() for name, task in tasks.items()}
        broken = [
            name.rpartition(".")[0] for name, amax in weights.items() if not np.isfinite(amax)
        ]
        if broken:
            raise SpecDecError(
                f"{self.model_dir} has weights that are NaN or infinite, and no scale, in"
                f" {join_names(broken)}",
                "copy or download the folder again",
            )
        amaxes = weights | self.calibrate(self.watches)
        dead = [name.rpartition(".")[0] for name, amax in amaxes.items() if amax == 0]
        if dead:
            logger.warning("only zeros, so the scale is 1: %s", join_names(dead))
        found = {name: _divide(amax) for name, amax in amaxes.items()}
        for name in self.scales.tensors:
            module, _, kind = name.rpartition(".")
            if kind in KV_SCALES:
                parts = [found[f"{module}.{part}"] for part in _KV_PARTS[kind]]
                self.scales.set(name, np.maximum(max(parts), MIN_KV_SCALE))
            else:
                self.scales.set(name, found[f"{find_group(module)}.{kind}"])


def _divide(amax: np.float32) -> np.float32:
    return np.float32(amax / np.float32(FLOAT8_MAX)) if amax else np.float32(1)


def find_group(module: str) -> str:
    """The module whose scales a module has: fc and gate share theirs."""
    return module.removesuffix(".gate") + ".fc" if module.endswith(".mlp.gate") else module


def _measure(tensors: Sequence[PlannedTensor], is_ending: threading.Event) -> np.float32:
    """Return the largest magnitude of tensors, chunk by chunk."""
    largest = np.float32(0)
    for tensor in tensors:
        for chunk in tensor.list_chunks():
            if is_ending.is_set():
                break
            largest = np.maximum(largest, find_amax(chunk.make(), tensor.info.dtype))
    return largest


def quantize_config(
    config: Mapping[str, Any], *, has_kv_scales: bool, kept: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a checkpoint's config.json that says what is quantized. kept: linears that are not."""
    section = {
        **config["quantization"],
        "quant_algo": FP8,
        "kv_cache_quant_algo": FP8 if has_kv_scales else None,
        "exclude_modules": [*EXCLUDED, *kept],
    }
    return {**config, "quantization": section}


def name_kv_scales(version: str) -> tuple[str, ...]:
    """The K/V scales that a line of TensorRT-LLM reads."""
    return KV_SCALES[:1] if version == "0.14" else KV_SCALES


def plan_quantizer(
    ranks: Sequence[RankPlan],
    sources: Mapping[str, tuple[Part, ...]],
    model: ModelConfig,
    *,
    model_dir: Path,
    kv_scales: Sequence[str],
    calibrate: Callable[[Sequence[Watch]], dict[str, np.float32]],
) -> tuple[list[RankPlan], Quantizer]:
    """Replace every linear's weight by a rounded one with its scales, on every rank.

    sources: the Hugging Face tensors of each canonical one; kv_scales: the K/V scales to write.
    """
    scales = Scales(model_dir)
    linears = set(list_linears(model))
    weights: dict[str, list[PlannedTensor]] = {}
    quantized = []
    for rank in ranks:
        tensors: RankPlan = {}
        for name, tensor in rank.items():
            module = name.removesuffix(".weight")
            if module not in linears:
                tensors[name] = tensor
                continue
            scale = f"{module}.{WEIGHT_SCALE}"
            weights.setdefault(f"{find_group(module)}.{WEIGHT_SCALE}", []).append(tensor)
            info = TensorInfo(FLOAT8, tensor.info.shape)
            tensors[name] = QuantizedTensor(info, tensor.pieces, tensor, scales, scale)
            added = [f"{module}.{kind}" for kind in (WEIGHT_SCALE, ACTIVATION_SCALE)]
            if module.endswith(".attention.qkv"):
                added += [module.removesuffix("qkv") + kind for kind in kv_scales]
            tensors |= {name: scales.add(name) for name in added}
        quantized.append(tensors)
    quantizer = Quantizer(
        model_dir=model_dir,
        scales=scales,
        weights={name: tuple(tensors) for name, tensors in weights.items()},
        watches=tuple(_list_watches(sources, model, has_kv_scales=bool(kv_scales))),
        calibrate=calibrate,
    )
    return quantized, quantizer


def _list_watches(
    sources: Mapping[str, tuple[Part, ...]], model: ModelConfig, *, has_kv_scales: bool
) -> Iterator[Watch]:
    """The model's linears to watch; one that makes two of ours is watched once for each."""
    q_size = model.num_attention_heads * model.head_size
    kv_size = model.num_key_value_heads * model.head_size
    for module in list_linears(model):
        outputs: list[list[tuple[str, slice]]] = [[], [], []]
        parts = [part.name.removesuffix(".weight") for part in sources[f"{module}.weight"]]
        if has_kv_scales and module.endswith(".qkv"):
            attention = module.removesuffix(".qkv")
            is_fused = len(parts) == 1
            for i, start in ((1, q_size), (2, q_size + kv_size)):
                columns = slice(start, start + kv_size) if is_fused else slice(None)
                outputs[0 if is_fused else i].append((f"{attention}.{'qkv'[i]}", columns))
        name = f"{find_group(module)}.{ACTIVATION_SCALE}"
        for part, watched in zip(parts, outputs, strict=False):
            yield Watch(part, name, tuple(watched))
