"""Quantization: how checkpoints store matrices, int8 as engines have it; the names of scales.

FP8 is float8 e4m3 (4 exponent, 3 mantissa bits, largest value 448) with two scales of one float32
each: weight = stored value * weights_scaling_factor, and the runtime divides the linear's input by
activation_scaling_factor before it rounds it to the same type. ALGORITHMS has the others.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from specdec.errors import SpecDecError
from specdec.files.tensor_file import TensorInfo

FLOAT8 = "float8_e4m3fn"
FLOAT8_MAX = 448.0
FP8 = "FP8"
EXECUTED = (None, FP8, "W4A16_AWQ", "INT4_GROUPS", "GGUF")  # by the torch backend
WEIGHT_SCALE = "weights_scaling_factor"
ACTIVATION_SCALE = "activation_scaling_factor"
SCALES = (WEIGHT_SCALE, ACTIVATION_SCALE)
WHOLE_ROWS = -1  # a group_size
NVFP4_GROUP_SIZE = 16
WEIGHT_SCALE_2 = "weights_scaling_factor_2"
CHANNEL_SCALE = "per_channel_scale"
INPUT_SCALE = "prequant_scaling_factor"
# Scales of an attention module; every line of TensorRT-LLM reads the first, 1.x also its parts.
KV_SCALES = ("kv_cache_scaling_factor", "k_cache_scaling_factor", "v_cache_scaling_factor")
# Older writers label float8 bytes as int8.
FLOAT8_STORAGE = (FLOAT8, "int8", "uint8")

# Types that specdec-build makes of a checkpoint that is not quantized: the matrices of the target's
# layers as integers, of 8 bits with one float32 scale per row or of 4 as int4.py has them.
INT8 = "int8"
INT4 = "int4"
INT8_SCALES = CHANNEL_SCALE

# Modules that TensorRT-LLM leaves unquantized where a checkpoint lists nothing.
DEFAULT_EXCLUDED = (
    "*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding",
    "*shared_expert_gate",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """How a matrix [out, in] of a `quant_algo` is stored, as ModelOpt exports it.

    dtype: of `weight`, [out / rows, in / columns]; scales: its further tensors and what there is
    one of: `matrix`, `row`, `group` (of a row's columns) or `input`; an input's scale has the
    model's type, a group's `group_dtype`, all others float32. group_sizes: of 1.x and our own.
    """

    dtype: str
    scales: Mapping[str, str]
    rows: int = 1
    columns: int = 1
    group_sizes: tuple[int, ...] = ()
    group_dtype: str = "float32"

    def describe(
        self, shape: tuple[int, int], dtype: str, group_size: int
    ) -> dict[str, TensorInfo]:
        """Return types and shapes of `weight` and the scales of a matrix [out, in], by kind."""
        num_rows, num_inputs = shape
        stored = (num_rows // self.rows, num_inputs // self.columns)
        kinds = {
            "matrix": TensorInfo("float32", (1,)),
            "row": TensorInfo("float32", (num_rows,)),
            "input": TensorInfo(dtype, (num_inputs,)),
        }
        if self.group_sizes:
            kinds["group"] = TensorInfo(self.group_dtype, (num_rows, num_inputs // group_size))
        scales = {kind: kinds[extent] for kind, extent in self.scales.items()}
        return {"weight": TensorInfo(self.dtype, stored), **scales}


# An int4 byte is of two rows, the lower in its low nibble, both in two's complement. A byte of
# NVFP4 is of two columns in the same order, each four bits e2m1.
ALGORITHMS = {
    FP8: Algorithm(
        dtype=FLOAT8, scales={WEIGHT_SCALE: "matrix", ACTIVATION_SCALE: "matrix"}
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": Algorithm(dtype=FLOAT8, scales={CHANNEL_SCALE: "row"}),
    "W8A8_SQ_PER_CHANNEL": Algorithm(
        dtype="int8",
        scales={WEIGHT_SCALE: "row", ACTIVATION_SCALE: "matrix", INPUT_SCALE: "input"},
    ),
    "W4A16_AWQ": Algorithm(
        dtype="int8", rows=2, group_sizes=(32, 64, 128),
        scales={WEIGHT_SCALE: "group", INPUT_SCALE: "input"},
    ),
    "W4A8_AWQ": Algorithm(
        dtype="int8", rows=2, group_sizes=(32, 64, 128),
        scales={
            WEIGHT_SCALE: "group", WEIGHT_SCALE_2: "matrix", ACTIVATION_SCALE: "matrix",
            INPUT_SCALE: "input",
        },
    ),
    "NVFP4": Algorithm(
        dtype="uint8", columns=2, group_sizes=(NVFP4_GROUP_SIZE,), group_dtype=FLOAT8,
        scales={WEIGHT_SCALE: "group", WEIGHT_SCALE_2: "matrix", ACTIVATION_SCALE: "matrix"},
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """A checkpoint's `quantization` section.

    exclude_modules: patterns of modules that stay in the model's type; None where the checkpoint
    lists nothing, which means DEFAULT_EXCLUDED. An empty list means that in 0.14 and "none" in 1.x.
    group_size: of weights that share a scale, where they are in groups.
    """

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    exclude_modules: tuple[str, ...] | None = None
    group_size: int = 128

    @property
    def is_quantized(self) -> bool:
        return self.quant_algo is not None or self.kv_cache_quant_algo is not None

    def excludes(self, module: str) -> bool | None:
        """Return whether a module stays unquantized; None where TensorRT-LLM's versions differ.

        Also where the tensors tell it, as those of GGUF do.
        """
        if self.quant_algo is None:
            return True
        if self.quant_algo == "GGUF":
            return None
        listed_patterns = self.exclude_modules
        patterns = listed_patterns or DEFAULT_EXCLUDED
        is_match = any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns)
        return None if is_match and listed_patterns == () else is_match


def parse_quantization(config: Mapping[str, Any]) -> Quantization:
    """Read the `quantization` section of a checkpoint's config.json."""
    section = config.get("quantization")
    if section is None:
        return Quantization()
    if not isinstance(section, dict):
        raise SpecDecError(
            f"checkpoint config: quantization is {section!r}, not an object", "correct the key"
        )
    # TensorRT-LLM has a name for "none" as well.
    fields: dict[str, Any] = {
        key: None if section.get(key) in ("", "NO_QUANT") else section.get(key)
        for key in ("quant_algo", "kv_cache_quant_algo")
    }
    fields |= {key: section[key] for key in ("exclude_modules", "group_size") if key in section}
    for key, value in fields.items():
        is_good, expected_words = FIELD_CHECKS[key]
        if not is_good(value):
            fact = f"quantization.{key} is {section.get(key)!r}, not {expected_words}"
            raise SpecDecError(f"checkpoint config: {fact}", "correct the key")
    if fields.get("exclude_modules") is not None:
        fields["exclude_modules"] = tuple(fields["exclude_modules"])
    return Quantization(**fields)


def _is_text(value: Any) -> bool:
    return isinstance(value, str | None)


def _are_names(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and all(isinstance(name, str) for name in value)
    )


def _is_group_size(value: Any) -> bool:
    return type(value) is int and (value >= 1 or value == WHOLE_ROWS)


# By field of a checkpoint's `quantization`: a check of its value, and the words for a good one.
FIELD_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "quant_algo": (_is_text, "a text or null"),
    "kv_cache_quant_algo": (_is_text, "a text or null"),
    "exclude_modules": (_are_names, "a list of names"),
    "group_size": (_is_group_size, "a positive number"),
}


def find_contradictions(
    quantization: Quantization, modules: Iterable[str], stored: Mapping[str, str]
) -> list[str]:
    """List the modules whose weights are stored otherwise than the section says.

    modules: those that may be quantized; stored: types by tensor name.
    """
    problems = []
    for module in modules:
        dtype = stored.get(f"{module}.weight")
        is_excluded = quantization.excludes(module)
        if dtype is None or is_excluded is None:
            continue
        if is_excluded == (dtype in FLOAT8_STORAGE):
            claim = "unquantized: its module is excluded"
            if not is_excluded:
                claim = f"{quantization.quant_algo}: its module is not excluded"
            problems.append(f"{module} is {dtype}, config.json says {claim}")
    return problems


def is_scale(name: str, tensors: Mapping[str, Any]) -> bool:
    """Return whether a name is that of a scale that belongs to one of the model's `tensors`."""
    module, _, kind = name.rpartition(".")
    if kind in KV_SCALES:
        return f"{module}.qkv.weight" in tensors
    return kind in SCALES and f"{module}.weight" in tensors
