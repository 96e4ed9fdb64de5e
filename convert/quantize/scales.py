"""Plan of a quantized checkpoint: its quantized matrices, and how their scales are found.

Scales of whole matrices, all float32, before any split over ranks (448 is float8's largest number,
`formats` has what others divide by):
weight: the largest magnitude of the weight / 448, shared by q, k and v, and by fc and gate;
activation: the largest magnitude of the linear's input in the calibration / 448;
K/V cache: the largest magnitude of K's and V's outputs / 448, at least 1.
A layer that only ever saw zeros has scale 1.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import SpecDecError, join_names
from specdec.files.casts import cast
from specdec.files.tensor_file import TensorInfo
from specdec.model.quantization import (
    ACTIVATION_SCALE,
    FLOAT8_MAX,
    FP8,
    INPUT_SCALE,
    KV_SCALES,
    WEIGHT_SCALE,
)
from specdec.model.sharding import Block, list_blocks
from specdec.model.tensors import list_linears
from specdec.system import logs
from specdec.system.threads import Pool

from ..hf import TargetTensors
from ..plan import PlannedTensor, RankPlan
from .calibration import Observations, Watch
from .float8 import find_amax
from .formats import Format
from .rounded import Float8Tensor, RoundedMatrix, RowTensor, Scales
from .search import search_inputs

logger = logs.get_logger(__name__)

# The head stays in the model's type; embeddings and norms are no linears.
EXCLUDED = ("lm_head",)
MIN_KV_SCALE = np.float32(1)  # ModelOpt's rule: small keys and values are not scaled up
# Each K/V scale is the largest of these.
_KV_PARTS = dict(zip(KV_SCALES, (("k", "v"), ("k",), ("v",)), strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantizer:
    """Inputs of `measure`, which finds every scale. weights: by the scale they share.

    matrices: what is rounded by rows, by module. evaluate: compares the quantized model with the
    model, where there is text for that.
    """

    format: Format
    model_dir: Path
    scales: Scales
    weights: Mapping[str, tuple[PlannedTensor, ...]]
    watches: tuple[Watch, ...]
    calibrate: Callable[[Sequence[Watch]], Observations]
    matrices: Mapping[str, RoundedMatrix] = dataclasses.field(default_factory=dict)
    evaluate: Callable[[Quantizer], dict[str, Any] | None] = lambda quantizer: None

    def measure(self, workers: int) -> dict[str, Any] | None:
        """Find every scale, of weights and inputs; return what the quantization costs, if known."""
        amaxes = self._measure_weights(workers) if self.format.smooths is None else {}
        observations = self.calibrate(self.watches)
        amaxes |= observations.largest
        if self.format.smooths is not None:
            amaxes |= self._search(observations, workers)
        dead = [name.rpartition(".")[0] for name, amax in amaxes.items() if amax == 0]
        if dead:
            logger.warning("only zeros, so the scale is 1: %s", join_names(dead))
        for name in self.scales.tensors:
            module, _, kind = name.rpartition(".")
            if kind in KV_SCALES:
                scales = [
                    _divide(amaxes[f"{module}.{letter}"], FLOAT8_MAX) for letter in _KV_PARTS[kind]
                ]
                self.scales.set(name, np.maximum(max(scales), MIN_KV_SCALE))
            elif kind != INPUT_SCALE:
                self.scales.set(
                    name, _divide(amaxes[f"{find_group(module)}.{kind}"], self._get_maximum(kind))
                )
        return self.evaluate(self)

    def _get_maximum(self, kind: str) -> float:
        maximum = self.format.inputs
        if self.format.weight is not None and self.format.weight[0] == kind:
            maximum = self.format.weight[1]
        assert maximum is not None
        return maximum

    def _measure_weights(self, workers: int) -> dict[str, np.float32]:
        """Return the largest magnitude of the weights under each scale."""
        calls = {
            name: functools.partial(_measure, tensors) for name, tensors in self.weights.items()
        }
        with Pool(workers) as pool:
            weights = pool.gather(calls, "measuring")
        self._refuse_broken([name for name, amax in weights.items() if not np.isfinite(amax)])
        return weights

    def _search(self, observations: Observations, workers: int) -> dict[str, np.float32]:
        """Find the inputs' scales; return the largest magnitudes of what they leave."""
        groups: dict[str, list[RoundedMatrix]] = {}
        for module, matrix in self.matrices.items():
            groups.setdefault(find_group(module), []).append(matrix)
        calls = {
            group: functools.partial(
                search_inputs,
                members,
                observations.inputs[f"{group}.{ACTIVATION_SCALE}"],
                self.format,
            )
            for group, members in groups.items()
        }
        with Pool(workers) as pool:
            results = pool.gather(calls, "searching scales")
        self._refuse_broken(
            [f"{g}." for g, found in results.items() if not np.isfinite(found.error)]
        )
        amaxes = {}
        for group, found in results.items():
            for member in groups[group]:
                name = f"{member.module}.{INPUT_SCALE}"
                dtype = self.scales.tensors[name].dtype
                assert member.input_scale is not None
                self.scales.set(name, cast(member.input_scale, "float32", dtype))
            amaxes[f"{group}.{ACTIVATION_SCALE}"] = found.largest_input
            if self.format.weight is not None:
                amaxes[f"{group}.{self.format.weight[0]}"] = found.largest_weight
        return amaxes

    def _refuse_broken(self, names: Sequence[str]) -> None:
        broken = [name.rpartition(".")[0] for name in names]
        if broken:
            raise SpecDecError(
                f"{self.model_dir} has weights that are NaN or infinite, and no scale, in"
                f" {join_names(broken)}",
                "copy or download the folder again",
            )


def _divide(amax: np.float32, maximum: float) -> np.float32:
    return np.float32(amax / np.float32(maximum)) if amax else np.float32(1)


def find_group(module: str) -> str:
    """Return the module whose scales a module has: fc and gate share theirs."""
    return module.removesuffix(".gate") + ".fc" if module.endswith(".mlp.gate") else module


def _measure(tensors: Sequence[PlannedTensor], is_ending: threading.Event) -> np.float32:
    """Return the largest magnitude of tensors, chunk by chunk."""
    largest = np.float32(0)
    for tensor in tensors:
        for chunk in tensor.list_output_blocks():
            if is_ending.is_set():
                break
            largest = np.maximum(largest, find_amax(chunk.make(), tensor.info.dtype))
    return largest


def describe_section(
    format_: Format, *, has_kv_scales: bool, group_size: int | None = None
) -> dict[str, Any]:
    """Return what a checkpoint's config.json says of its quantization."""
    section: dict[str, Any] = {
        "quant_algo": format_.name,
        "kv_cache_quant_algo": FP8 if has_kv_scales else None,
        "exclude_modules": [*EXCLUDED, *format_.excluded],
    }
    if group_size is not None:
        section["group_size"] = group_size
        if INPUT_SCALE in format_.algorithm.scales:
            section |= {"has_zero_point": False, "pre_quant_scale": True}
    return section


def name_kv_scales(version: str) -> tuple[str, ...]:
    """Return the K/V scales that a line of TensorRT-LLM reads."""
    return KV_SCALES[:1] if version == "0.14" else KV_SCALES


def plan_quantizer(
    target: TargetTensors, format_: Format, ranks: Sequence[RankPlan], whole_rank: RankPlan, *,
    group_size: int, kv_scales: Sequence[str], **calls: Any,
) -> tuple[list[RankPlan], Quantizer]:  # fmt: skip
    """Replace every linear's weight by a rounded one with its scales, on every rank.

    whole_rank: the linears' weights on one rank; kv_scales: the K/V scales to write; calls: what
    `Quantizer` calls.
    """
    model, scales = target.model, Scales(target.folder.path)
    rounding = format_.make_rounding(group_size)
    matrices = {
        module: RoundedMatrix(module, whole_rank[f"{module}.weight"], rounding, scales)
        for module in list_linears(model)
    }
    quantized = []
    for i, rank in enumerate(ranks):
        tensors: RankPlan = {}
        for name, tensor in rank.items():
            module = name.removesuffix(".weight")
            if module not in matrices:
                tensors[name] = tensor
                continue
            blocks = tuple(list_blocks(target.specs[name], model, i))
            tensors |= _plan_matrix(matrices[module], tensor, blocks, format_, group_size)
            if module.endswith(".attention.qkv"):
                prefix = module.removesuffix("qkv")
                tensors |= {prefix + kind: scales.add(prefix + kind) for kind in kv_scales}
        quantized.append(tensors)
    moments = None if format_.smooths is None else format_.group_size and group_size or 1
    watches = _list_watches(
        target, has_inputs=format_.needs_data, has_kv_scales=bool(kv_scales), group_size=moments
    )
    quantizer = Quantizer(
        format=format_, model_dir=target.folder.path, scales=scales,
        weights=_list_weights(format_, ranks, matrices),
        watches=tuple(watches), matrices=matrices, **calls,
    )  # fmt: skip
    return quantized, quantizer


def _list_weights(
    format_: Format, ranks: Sequence[RankPlan], modules: Collection[str]
) -> dict[str, tuple[PlannedTensor, ...]]:
    """Map each scale of weights that is measured beforehand to the weights that share it."""
    if format_.weight is None or format_.smooths is not None:
        return {}
    weights: dict[str, tuple[PlannedTensor, ...]] = {}
    for rank in ranks:
        for name, tensor in rank.items():
            module = name.removesuffix(".weight")
            if module in modules:
                scale_name = f"{find_group(module)}.{format_.weight[0]}"
                weights[scale_name] = (*weights.get(scale_name, ()), tensor)
    return weights


def _plan_matrix(
    matrix: RoundedMatrix, tensor: PlannedTensor, blocks: tuple[Block, ...], format_: Format,
    group_size: int,
) -> RankPlan:  # fmt: skip
    """Plan a rank's part of a matrix and its scales. tensor: the part before it is rounded."""
    module, scales = matrix.module, matrix.scales
    num_rows, num_inputs = tensor.info.shape
    planned_tensors: RankPlan = {}
    infos = format_.algorithm.describe((num_rows, num_inputs), tensor.info.dtype, group_size)
    for kind, info in infos.items():
        name, granularity = f"{module}.{kind}", format_.algorithm.scales.get(kind)
        if granularity == "matrix":
            planned_tensors[name] = scales.add(name)
        elif granularity == "input":
            of_all = TensorInfo(info.dtype, (matrix.shape[1],))
            planned_tensors[name] = scales.add(name, info=of_all, columns=blocks[0].columns)
        elif format_.name == FP8:
            scale = functools.partial(scales.get, f"{module}.{WEIGHT_SCALE}")
            planned_tensors[name] = Float8Tensor(info, tensor.slices, tensor.info.dtype, scale)
        else:
            planned_tensors[name] = RowTensor(info, tensor.slices, matrix, blocks, kind == "weight")
    return planned_tensors


def _list_watches(
    target: TargetTensors, *, has_inputs: bool, has_kv_scales: bool, group_size: int | None
) -> Iterator[Watch]:
    """Return the model's linears to watch; one that makes two of ours is watched once for each."""
    model = target.model
    q_size = model.num_attention_heads * model.head_size
    kv_size = model.num_key_value_heads * model.head_size
    for module in list_linears(model):
        outputs: list[list[tuple[str, slice]]] = [[], [], []]
        source_modules = [
            source_module.name.removesuffix(".weight")
            for source_module in target.source_rows[f"{module}.weight"]
        ]
        if has_kv_scales and module.endswith(".qkv"):
            attention = module.removesuffix(".qkv")
            is_fused = len(source_modules) == 1
            for i, start in ((1, q_size), (2, q_size + kv_size)):
                columns = slice(start, start + kv_size) if is_fused else slice(None)
                outputs[0 if is_fused else i].append((f"{attention}.{'qkv'[i]}", columns))
        name = f"{find_group(module)}.{ACTIVATION_SCALE}"
        is_first = find_group(module) == module
        for source_module, watched in zip(source_modules, outputs, strict=False):
            if has_inputs or watched:
                yield Watch(source_module, name, tuple(watched), group_size if is_first else None)
                is_first = False
