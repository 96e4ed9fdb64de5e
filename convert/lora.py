"""LoRA adapters that PEFT saved, merged into a target's weights while these are read.

A merged matrix is W + (alpha / r) B A, computed in float32 and rounded once, as PEFT's
`merge_and_unload` does (Hu et al., arXiv 2106.09685; https://huggingface.co/docs/peft).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import Problems, SpecDecError, shorten
from specdec.files.casts import FLOATS, cast
from specdec.files.folders import ADAPTER_CONFIG, refuse_absent
from specdec.files.reading import Array, read_json
from specdec.files.tensor_file import TensorFile, TensorInfo
from specdec.model.wrappers import NAMES

from .families.base import Family
from .hf import HfFolder
from .plan import ComputedTensors, collect
from .torch_file import TorchFile

FLAG = "--lora-dir"
CONFIG, WEIGHTS = ADAPTER_CONFIG, ("adapter_model.safetensors", "adapter_model.bin")
MERGE = "merge it with PEFT's merge_and_unload, save that with save_pretrained, and convert it"
# Keys of adapter_config.json that are read here, and those that cannot change a merged weight.
READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
HARMLESS = frozenset("""
    task_type auto_mapping peft_version base_model_name_or_path revision inference_mode
    target_modules exclude_modules lora_dropout fan_in_fan_out bias modules_to_save
    layers_to_transform layers_pattern megatron_config megatron_core loftq_config eva_config
    corda_config lora_ga_config runtime_config qalora_group_size ensure_weight_tying
""".split())  # fmt: skip
# Ways to begin a training that leave the base model's weights as they are.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
# The product of this many rows is computed at once, whichever of them are wanted: a weight's bits
# depend neither on the number of ranks nor on that of threads.
TILE_ROWS = 512
_ADAPTER_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)"
    r"(?:\.(?P<side>lora_(?:embedding_)?[AB])(?:\.weight)?"
    r"|(?:\.base_layer|\.modules_to_save)?\.(?P<kind>weight|bias))"
)


@dataclasses.dataclass
class Update:
    """Update of one tensor by an adapter: the names of the adapter's tensors, and the scale.

    down, up: A [r, in] and B [out, r]. value: the tensor that replaces the target's, if any.
    is_turned: the target's is stored as [in, out].
    """

    down: str | None = None
    up: str | None = None
    value: str | None = None
    scale: float = 0.0
    is_turned: bool = False

    def check_shape(self, adapter: Adapter, name: str, stored: tuple[int, ...]) -> None:
        """Raise SpecDecError where the adapter's tensors do not fit the target's."""
        factors = [adapter.tensors[name].shape for name in (self.up, self.down) if name]
        value = adapter.tensors[self.value].shape if self.value else stored
        if value == stored and self._multiply(factors, stored) == stored:
            return
        tensors = ", ".join(
            f"{tensor} {list(adapter.tensors[tensor].shape)}"
            for tensor in (self.value, self.up, self.down)
            if tensor
        )
        raise SpecDecError(
            f"{adapter.path}: {tensors} cannot be merged into {name} {list(stored)}",
            "give the base model that the adapter was trained on, and all of the adapter",
        )

    def _multiply(
        self, factors: Sequence[tuple[int, ...]], stored: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        """Return the shape of B A, which is `stored` without factors; None where it has none."""
        if not factors:
            return stored
        if len(factors) != 2 or any(len(shape) != 2 for shape in factors):
            return None
        (num_rows, rank), (depth, num_columns) = factors
        if rank != depth:
            return None
        return (num_columns, num_rows) if self.is_turned else (num_rows, num_columns)


class Adapter:
    """A folder of PEFT's `save_pretrained`: its configuration, checked, and its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise refuse_absent(path, f"{FLAG} {path}")
        weight_paths = [path / name for name in WEIGHTS if (path / name).exists()]
        if not (path / CONFIG).is_file() or not weight_paths:
            raise SpecDecError(
                f"{FLAG} {path} lacks {CONFIG} or {WEIGHTS[0]}",
                "give the folder that PEFT's save_pretrained wrote",
            )
        self.config = read_json(path / CONFIG)
        self._file = (TensorFile if weight_paths[0].suffix == ".safetensors" else TorchFile)(
            weight_paths[0]
        )
        self.files = [path / CONFIG, weight_paths[0]]
        self.tensors = self._file.tensors
        self._check_config()

    def _check_config(self) -> None:
        problems = Problems()
        if self.config.get("peft_type") != "LORA":
            problems.add(
                f"{self.path}: peft_type is {shorten(self.config.get('peft_type'))}, not LORA",
                MERGE,
            )
        start = self.config.get("init_lora_weights")
        if start not in PLAIN_STARTS:
            problems.add(
                f"{self.path}: init_lora_weights is {shorten(start)}, which changes the base too",
                MERGE,
            )
        for name in ("rank_pattern", "alpha_pattern"):
            with collect(problems):
                _compile(self.config.get(name) or {}, f"{self.path}: {name}")
        known_keys = READ | HARMLESS | {"init_lora_weights"}
        problems.extend(
            (f"{self.path}: {key} is {shorten(value)}, which is not supported", MERGE)
            for key, value in self.config.items()
            if key not in known_keys and value not in (None, False, "", [], {})
        )
        problems.extend(
            (f"{self.path}: {name} is {info.dtype}", "save the adapter in a float type")
            for name, info in self.tensors.items()
            if info.dtype not in FLOATS
        )
        problems.raise_all()

    def read(self, name: str) -> Array:
        return cast(self._file.read(name), self.tensors[name].dtype, "float32")

    def find_scale(self, module: str, rank: int) -> float:
        """Return alpha / r, or alpha / sqrt(r), of a module whose factors have a rank."""
        expected = self._find("rank_pattern", module, "r")
        if rank != expected:
            raise SpecDecError(
                f"{self.path}: {CONFIG} gives {module} rank {shorten(expected)}, and its factors"
                f" have {rank}",
                "take both files from the same training",
            )
        alpha = self._find("alpha_pattern", module, "lora_alpha")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise SpecDecError(
                f"{self.path}: lora_alpha is {shorten(alpha)}", "give the number that it had"
            )
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def _find(self, pattern: str, module: str, default: str) -> Any:
        """Return the value of the first pattern that a module's name ends with, or of all."""
        for key, value in (self.config.get(pattern) or {}).items():
            if re.fullmatch(rf"(.*\.)?({key})", module):
                return value
        return self.config.get(default)


def _compile(patterns: Any, description: str) -> None:
    """Raise SpecDecError unless `patterns` is an object with patterns of modules as keys."""
    try:
        for key in patterns.keys():
            re.compile(key)
    except (AttributeError, re.error) as error:
        raise SpecDecError(
            f"{description} is {shorten(patterns)}, not patterns and numbers: {error}",
            "copy or download the adapter again",
        ) from None


def merge_adapter(
    folder: HfFolder, adapter: Adapter, family: Family, *, is_quantized: bool
) -> HfFolder:
    """Return a folder like this, with an adapter merged into the tensors that it names.

    They are the folder's own, before `prepare` divides and renames them. Where the embedding and
    the head are one tensor, an adapter of either is refused, since PEFT's own result then depends
    on how the model was loaded. Raises SpecDecError with everything that does not fit.
    """
    if is_quantized:
        raise SpecDecError(
            f"{folder.path} is quantized, and {FLAG} adds to plain weights",
            "give --dequantize, too",
        )
    problems = Problems()
    updates = _list_updates(folder, adapter, family, problems)
    for name, update in updates.items():
        with collect(problems):
            update.check_shape(adapter, name, folder.tensors[name].shape)
    if not updates and not problems:
        problems.add(f"{adapter.path} holds no tensors", "copy or download the adapter again")
    problems.raise_all()
    merged = folder.substitute(_compute(folder, adapter, updates), ())
    merged.computed = folder.computed  # a merged tensor lies as it is stored
    return merged


def _list_updates(
    folder: HfFolder, adapter: Adapter, family: Family, problems: Problems
) -> dict[str, Update]:
    """Return the update of each tensor that an adapter names; append what does not fit."""
    tied_names = family.list_tied(folder)
    updates: dict[str, Update] = {}
    for adapter_name in adapter.tensors:
        match = _ADAPTER_NAME.fullmatch(adapter_name)
        module, side = (match["module"], match["side"]) if match else (adapter_name, None)
        base_name = f"{module}.{match['kind'] or 'weight'}" if match else adapter_name
        name = _find_tensor(base_name, folder.tensors)
        if name is None or name in tied_names:
            is_tied = name is not None or base_name in tied_names
            lack = "is tied to another" if is_tied else "is not in the target"
            problems.add(f"{adapter.path}: {adapter_name}: {base_name} {lack}", MERGE)
            continue
        update = updates.setdefault(name, Update(is_turned=family.is_turned(folder, name)))
        update.is_turned |= side is not None and "embedding" in side
        problems += _add_tensor(update, adapter, adapter_name, module, side)
    return updates


def _add_tensor(
    update: Update, adapter: Adapter, adapter_name: str, module: str, side: str | None
) -> Problems:
    """Add a tensor of an adapter to an update; return what does not fit. side: None of a value."""
    problems = Problems()
    field = "value" if side is None else "down" if side.endswith("A") else "up"
    if getattr(update, field) is not None:
        problems.add(
            f"{adapter.path} has {adapter_name} twice", "copy or download the adapter again"
        )
    setattr(update, field, adapter_name)
    if field == "down":
        with collect(problems):
            update.scale = adapter.find_scale(module, adapter.tensors[adapter_name].shape[0])
    return problems


def _find_tensor(base_name: str, names: Iterable[str]) -> str | None:
    """Return the tensor of a name, or the only one whose name differs by a prefix."""
    names = set(names)
    for wrapper_prefix, prefix in (("", ""), *NAMES):  # as it is, or as a wrapper calls it
        name = prefix + base_name.removeprefix(wrapper_prefix)
        if base_name.startswith(wrapper_prefix) and name in names:
            return name
    alike = [n for n in names if n.endswith(f".{base_name}") or base_name.endswith(f".{n}")]
    return alike[0] if len(alike) == 1 else None


def _compute(folder: HfFolder, adapter: Adapter, updates: dict[str, Update]) -> ComputedTensors:
    infos = {name: TensorInfo("float32", folder.tensors[name].shape) for name in updates}

    def read_base(name: str, start: int, stop: int) -> Array:
        update = updates[name]
        if update.value is not None:
            return adapter.read(update.value)[start:stop].copy()
        rows = folder.read_block(name, start, stop)
        return cast(rows, folder.tensors[name].dtype, "float32")

    def compute(name: str, start: int, stop: int, columns: tuple[int, int] | None) -> Array:
        rows, update = read_base(name, start, stop), updates[name]
        if update.down is not None and update.up is not None:
            up_factor, down_factor = adapter.read(update.up), adapter.read(update.down)
            if update.is_turned:
                up_factor, down_factor = down_factor.T, up_factor.T
            for top in range(start // TILE_ROWS * TILE_ROWS, stop, TILE_ROWS):
                tile = (up_factor[top : top + TILE_ROWS] @ down_factor) * np.float32(update.scale)
                upper, lower = max(top, start), min(top + TILE_ROWS, stop)
                rows[upper - start : lower - start] += tile[upper - top : lower - top]
        if columns is not None:
            rows = rows[:, columns[0] : columns[1]]
        return np.ascontiguousarray(rows)

    return ComputedTensors(folder, infos, compute)
