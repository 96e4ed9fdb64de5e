"""Hugging Face folders that are FP8 already: ModelOpt's unified export and its relatives.

There each projection has scales of its own (`weight_scale`, `input_scale`), where TensorRT-LLM's
layout has one for q, k and v, and one for fc and gate: the largest of them. A matrix that had a
smaller one is rounded again: value * own scale / shared scale, in float32, to the nearest float8,
ties to even.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec.errors import Problems, SpecDecError, join_names
from specdec.model.int4 import SCALE_DTYPES
from specdec.model.quantization import ACTIVATION_SCALE, FLOAT8, KV_SCALES, WEIGHT_SCALE
from specdec.model.tensors import TensorSpec
from specdec.system import logs

from ..hf import HfFolder, TargetTensors
from ..plan import RankPlan, report_missing
from .float8 import E8M0, to_float32
from .rounded import Float8Tensor, Scales
from .scales import find_group
from .sections import read_sections

logger = logs.get_logger(__name__)

SOURCE_SCALES = {"weight_scale": WEIGHT_SCALE, "input_scale": ACTIVATION_SCALE}
DEQUANTIZE = "add --dequantize, which writes plain weights in --dtype"
# Facts of a kv_cache_scheme whose cache a checkpoint can hold.
_FP8_CACHE = {"type": "float", "num_bits": 8, "dynamic": False, "strategy": "tensor"}
# Where the writers put the scales of K and V, from the attention module.
KV_NAMES = (("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale"))


def find_stored(folder: HfFolder) -> set[str]:
    """Return the modules of a folder whose weights are float8."""
    return {
        name.removesuffix(".weight") for name, info in folder.tensors.items()
        if name.endswith(".weight") and info.dtype == FLOAT8
    }  # fmt: skip


def plan_fp8(
    target: TargetTensors,
    weights: Mapping[str, TensorSpec],
    reader: ScaleReader,
    stored: Collection[str],
) -> list[RankPlan]:
    """Plan the weights of quantized linears and their scales. stored: of `find_stored`."""
    folder, source_rows = target.folder, target.source_rows
    names = {rows.name for name in weights for rows in source_rows[name]}
    reader.used_names |= names | {f"{stem}.{kind}" for stem in stored for kind in SOURCE_SCALES}
    ranks = target.plan(weights, source=folder.select(names), dtype=FLOAT8, ignored=())
    scales = Scales(folder.path)
    num_rounded = 0
    for members, kind in itertools.product(_group_modules(weights), SOURCE_SCALES):
        sources = [rows.name for m in members for rows in source_rows[f"{m}.weight"]]
        own_scales = {name: reader.get(name.removesuffix("weight") + kind) for name in sources}
        num_rounded += _plan_scale(ranks, members, SOURCE_SCALES[kind], own_scales, scales)
    if num_rounded:
        logger.warning(
            "%s: %d of %d matrices are rounded once more, to the scale that they share with others"
            " of their linear; --dequantize writes what they stand for as it is",
            folder.path, num_rounded, len(names),
        )  # fmt: skip
    return ranks


def _group_modules(weights: Iterable[str]) -> list[list[str]]:
    """Return the modules of weights, in groups that share their scales."""
    groups: dict[str, list[str]] = {}
    for name in weights:
        module = name.removesuffix(".weight")
        groups.setdefault(find_group(module), []).append(module)
    return list(groups.values())


def _plan_scale(
    ranks: Sequence[RankPlan], members: Sequence[str], kind: str,
    own_scales: Mapping[str, np.float32], scales: Scales,
) -> int:  # fmt: skip
    """Plan the scale that linears have in common on every rank; round their weights to it.

    kind: that of the checkpoint's scale; own_scales: those of the tensors that make the linears.
    Returns how many weights are rounded once more, as their own scale is another one.
    """
    common_scale = np.float32(max(own_scales.values()))
    for module, rank in itertools.product(members, ranks):
        scale_name, name = f"{module}.{kind}", f"{module}.weight"
        rank[scale_name] = scales.add(scale_name, common_scale)
        if kind == WEIGHT_SCALE and name in rank:  # else a problem was found
            plain, find_scale = rank[name], functools.partial(scales.get, scale_name)
            rank[name] = Float8Tensor(plain.info, plain.slices, FLOAT8, find_scale, own_scales)
    is_weight = kind == WEIGHT_SCALE
    return sum(scale != common_scale for scale in own_scales.values()) if is_weight else 0


def sort_linears(
    target: TargetTensors, linears: Sequence[str], stored: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the linears that are quantized, and the tensors of the target that are plain.

    What a checkpoint has no place for is in neither, and a problem: a linear that is quantized in
    part, and another tensor than a linear's that is quantized. stored: the folder's quantized
    modules. A part that the folder lacks is whoever plans the linear's to report.
    """
    quantized: list[str] = []
    plain: list[str] = []
    misplaced: list[str] = []
    for name in target.specs:
        module = name.removesuffix(".weight")
        stems = [rows.name.removesuffix(".weight") for rows in target.source_rows[name]]
        stored_stems = [stem for stem in stems if stem in stored]
        if module == name or not stored_stems:
            plain.append(name)
        elif module not in linears:
            misplaced += stored_stems
        elif not _list_plain(target.folder, stems, stored):
            quantized.append(module)
        else:
            _report_mixed(target, stems, stored_stems)
    if misplaced:
        names = list(dict.fromkeys(misplaced))
        verb = "is" if len(names) == 1 else "are"
        target.problems.add(
            f"{target.folder.path}: {join_names(names)} {verb} quantized, of which a checkpoint"
            " holds plain weights only",
            DEQUANTIZE,
        )
    return quantized, plain


def _list_plain(folder: HfFolder, stems: Sequence[str], stored: Collection[str]) -> list[str]:
    """Return those of some modules that are not quantized and that the folder has."""
    return [s for s in stems if s not in stored and f"{s}.weight" in folder.tensors]


def _report_mixed(target: TargetTensors, stems: Sequence[str], stored_stems: Sequence[str]) -> None:
    """Note a linear of which some modules are quantized and others are not."""
    verb = "is" if len(stored_stems) == 1 else "are"
    target.problems.add(
        f"{target.folder.path}: of {join_names(stems)}, which make one linear of the checkpoint,"
        f" {len(stored_stems)} {verb} quantized: {join_names(stored_stems)}",
        DEQUANTIZE,
    )


def plan_kv_scales(
    target: TargetTensors, linears: Sequence[str], kv_scales: Sequence[str], reader: ScaleReader
) -> tuple[RankPlan, bool]:
    """Plan the K/V scales of every layer; return them and whether the folder has any."""
    attentions = {}
    for module in linears:
        if module.endswith(".qkv"):
            first_module = target.source_rows[f"{module}.weight"][0].name.removesuffix(".weight")
            attentions[module.removesuffix("qkv")] = first_module.rpartition(".")[0] + "."
    cache = _read_kv_scales(target.folder, attentions, reader)
    scales = Scales(target.folder.path)
    planned_scales = {
        prefix + kind: scales.add(prefix + kind, values[kind])
        for prefix, values in cache.items()
        for kind in kv_scales
    }
    return planned_scales, bool(cache)


def _read_kv_scales(
    folder: HfFolder, attentions: Mapping[str, str], reader: ScaleReader
) -> dict[str, dict[str, np.float32]]:
    """Read the K/V scales of every layer, or of none where the folder has none.

    attentions: our attention modules and the folder's. A folder that promises an FP8 cache and
    holds no scales means scales of 1, which its writers leave out and every runtime assumes.
    """
    tensors = folder.tensors
    is_promised = any([_promises_cache(folder, section) for _, section in read_sections(folder)])
    folder_attentions = attentions.values()
    stored_pairs = [
        pair
        for pair in KV_NAMES
        if any(a + name in tensors for a in folder_attentions for name in pair)
    ]
    pairs: dict[str, tuple[np.float32, np.float32]]
    if stored_pairs:
        k_name, v_name = stored_pairs[0]
        pairs = {
            ours: (reader.get(attention + k_name), reader.get(attention + v_name))
            for ours, attention in attentions.items()
        }
    elif is_promised:
        logger.info("%s has an FP8 K/V cache without scales, which means 1", folder.path)
        pairs = dict.fromkeys(attentions, (np.float32(1), np.float32(1)))
    else:
        return {}
    return {
        prefix: dict(zip(KV_SCALES, (max(k, v), k, v), strict=True))
        for prefix, (k, v) in pairs.items()
    }


def _promises_cache(folder: HfFolder, section: Mapping[str, Any]) -> bool:
    """Return whether a section names an FP8 K/V cache; SpecDecError for another type."""
    scheme = section.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        cache_words = {key: scheme[key] for key in _FP8_CACHE if scheme.get(key) is not None}
        if not cache_words.items() <= _FP8_CACHE.items():
            raise SpecDecError(
                f"{folder.path}: kv_cache_scheme has {cache_words}, and a checkpoint holds a cache"
                " in FP8 with a fixed scale for each layer",
                f"remove kv_cache_scheme from its config.json, or {DEQUANTIZE}",
            )
    return scheme is not None or section.get("kv_cache_quant_algo") is not None


class ScaleReader:
    """Reads scales of one element, and notes what is wrong with them."""

    def __init__(self, folder: HfFolder) -> None:
        self.folder = folder
        self.used_names: set[str] = set()
        self.missing_names: list[str] = []
        self.bad: list[str] = []

    def get(self, name: str) -> np.float32:
        """Return a scale; 1 instead of one that is missing or wrong."""
        self.used_names.add(name)
        info = self.folder.tensors.get(name)
        if info is None:
            self.missing_names.append(name)
        elif math.prod(info.shape) != 1 or info.dtype not in (*SCALE_DTYPES, E8M0):
            self.bad.append(f"{name} is {info.dtype} of shape {list(info.shape)}")
        else:
            value = np.float32(to_float32(self.folder.read(name), info.dtype).reshape(()))
            if 0 < value < np.inf:
                return value
            self.bad.append(f"{name} is {value}")
        return np.float32(1)

    def report(self, problems: Problems) -> None:
        """Append what was wrong."""
        report_missing(self.folder, self.missing_names, problems)
        if self.bad:
            problems.add(
                f"{self.folder.path}: {'; '.join(dict.fromkeys(self.bad))}",
                "give an FP8 model with one static, positive scale per tensor",
            )
