"""A GGUF model under Hugging Face's names: config.json, and tensors that are read when used."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import SpecDecError, join_names, shorten
from specdec.files.casts import cast
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo
from specdec.model.config import FULL
from specdec.system.libraries import import_gguf

from .config import find_architecture, read_config
from .file import PLAIN, StoredTensor, decode, open_parts
from .gemma4 import read_heads
from .metadata import Metadata
from .names import MTP_NAMES, NAMES, order_turned
from .special import LISTS, PREFIX, read_special

LAYER = re.compile(r"blk\.(\d+)\.(.+?)(\.weight|\.bias|)")
SIZED = ("in_proj_qkv", "in_proj_z", "conv1d", "out_proj")  # of linear attention, by a head's size
BARE = (  # by no kind of number
    "A_log", "dt_bias", "sinks", "expert_bias", "mamba.D", "layer_scalar",
)  # fmt: skip
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor under Hugging Face's name: some rows of a stored one.

    start: the first row. order, columns: where each row and column lies, if they are put back.
    change: what is computed of every value, in float32.
    """

    stored: StoredTensor
    shape: tuple[int, ...]
    start: int = 0
    order: Array | None = None
    columns: Array | None = None
    change: Callable[[Array], Array] | None = None

    @property
    def info(self) -> TensorInfo:
        dtype = PLAIN.get(self.stored.kind, "float32") if self.change is None else "float32"
        return TensorInfo(dtype, self.shape)

    def read_rows(self, start: int, stop: int) -> Array:
        """Return the bytes of rows [start, stop), uint8 [rows, row bytes]."""
        if self.order is None or stop == start:
            return self.stored.read(self.start + start, self.start + stop)
        order = self.order[start:stop]
        first_row, last_row = int(order.min()), int(order.max())
        rows = self.stored.read(self.start + first_row, self.start + last_row + 1)
        sorted_rows: Array = rows[order - first_row]
        return sorted_rows


class RawRows:
    """Rows of blocks, uint8 [rows, bytes], which are read where they are indexed by two slices.

    order: where each byte of a row lies, None where all are in their places.
    """

    def __init__(self, entry: GgufTensor, order: Array | None = None) -> None:
        self._entry, self._order = entry, order

    def __getitem__(self, key: slice | tuple[slice, ...]) -> Array:
        rows, *columns = key if isinstance(key, tuple) else (key,)
        start, stop, _ = rows.indices(self._entry.info.num_rows)
        blocks = self._entry.read_rows(start, stop)
        if self._order is not None:
            blocks = blocks[:, self._order]
        return blocks[(slice(None), *columns)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self[:].astype(dtype or np.uint8, copy=False)


class GgufModel:
    """`config` as config.json has it, `tensors` by Hugging Face's name, and where they lie.

    Quantized tensors have the values of the package `gguf`, in float32. `files`: all parts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        files, stored = open_parts(path)
        self.files = [file.path for file in files]
        self.metadata = files[0].metadata
        data = Metadata(path, self.metadata, stored)
        for key, kind in LISTS.items():
            value = self.metadata.get(PREFIX + key, [])
            if not isinstance(value, list) or not all(
                type(element) is kind for element in value[:1]
            ):
                data.refuse(f"{PREFIX}{key} is {shorten(value)}, not a list of {kind.__name__}")
        self.architecture = find_architecture(data)
        self.config = read_config(data, self.architecture) | read_special(self.metadata)
        self.entries: dict[str, GgufTensor] = {}
        unknown_names = []
        for name, tensor in stored.items():
            entries = dict(self._name(name, tensor))
            self._refuse_second(name, entries)
            self.entries |= entries
            if not entries and name not in FACTORS:
                unknown_names.append(name)
        if unknown_names:
            raise SpecDecError(
                f"{path} holds {len(unknown_names)} tensors that are not known in a model of"
                f" architecture {data.name}: {join_names(unknown_names)}",
                "take the Hugging Face folder that it was made from",
            )
        self.tensors = {name: entry.info for name, entry in self.entries.items()}

    def _refuse_second(self, name: str, entries: Mapping[str, GgufTensor]) -> None:
        """Raise SpecDecError where the file has a tensor in two, such as attn_q and attn_qkv."""
        for hf_name in entries:
            if hf_name in self.entries:
                raise SpecDecError(
                    f"{self.path} holds {hf_name} twice, in {self.entries[hf_name].stored.name} and"
                    f" in {name}",
                    "take the Hugging Face folder that it was made from",
                )

    def _name(self, name: str, stored: StoredTensor) -> Iterator[tuple[str, GgufTensor]]:
        """Yield Hugging Face's names of the tensors within a stored one, with their rows."""
        match = LAYER.fullmatch(name)
        if match is None:
            module, _, kind = name.rpartition(".")
            for hf_module, gguf_module in NAMES.items():
                if gguf_module == module and hf_module.startswith(("model.", "lm_head")):
                    change = self._find_change(hf_module)
                    yield f"{hf_module}.{kind}", GgufTensor(stored, stored.shape, change=change)
            return
        layer, module, kind = match.groups()
        config, num_layers = self.config, self.config["num_hidden_layers"]
        prefix = f"model.layers.{layer}"
        if int(layer) >= num_layers and config.get("mtp_num_hidden_layers"):
            prefix = f"mtp.layers.{int(layer) - num_layers}"
            if (hf_module := MTP_NAMES.get(module, "")) and int(layer) == num_layers:
                yield (
                    hf_module + kind,
                    GgufTensor(stored, stored.shape, change=self._find_change(hf_module)),
                )
                return
        for inner_module, entry in self._name_part(module, stored, int(layer)):
            bare = inner_module.endswith(BARE)
            yield f"{prefix}.{inner_module}{'' if bare else kind}", entry

    def _name_part(
        self, module: str, stored: StoredTensor, layer: int
    ) -> Iterator[tuple[str, GgufTensor]]:
        """Yield the modules of a layer within a stored tensor, with their rows."""
        hf_module = self.architecture.modules.get(module)
        is_turned = self.architecture.interleaves and module in ("attn_q", "attn_k")
        if module == "attn_qkv" and self._attends(hf_module, layer):
            yield from self._split_heads(("attn_q", "attn_k", "attn_v"), stored, layer)
        elif module == "ssm_ba" and hf_module is None:
            yield from self._split_letters(stored)
        elif hf_module is None:
            return
        elif "{expert}" in hf_module:
            yield from _split_experts(hf_module, stored)
        elif is_turned:
            yield from self._split_heads((module,), stored, layer)
        else:
            yield hf_module, self._open(hf_module, stored)

    def _attends(self, fused_module: str | None, layer: int) -> bool:
        """Return whether attn_qkv holds a layer's queries, keys and values.

        fused_module: what it is in other layers: the input of linear attention, in hybrids.
        """
        types = self.config.get("layer_types") or []
        return fused_module is None or (
            "linear_attn" in fused_module and types[layer : layer + 1] in ([], [FULL])
        )

    def _split_letters(self, stored: StoredTensor) -> Iterator[tuple[str, GgufTensor]]:
        """Yield the projections b and a, whose rows each key head has one after the other."""
        key_heads, count = (self.config[f"linear_num_{k}_heads"] for k in ("key", "value"))
        turns = np.arange(2 * count).reshape(key_heads, 2, -1).swapaxes(0, 1).reshape(2, -1)
        for letter, order in zip("ba", turns, strict=True):
            shape = (count, *stored.shape[1:])
            yield f"linear_attn.in_proj_{letter}", GgufTensor(stored, shape, order=order)

    def _split_heads(
        self, modules: tuple[str, ...], stored: StoredTensor, layer: int
    ) -> Iterator[tuple[str, GgufTensor]]:
        """Yield the attention's modules whose heads a stored tensor holds one after another."""
        architecture, num = self.architecture, self.config["num_attention_heads"]
        size, num_kv = read_heads(self.config, layer)
        heads = {module: num if module == "attn_q" else num_kv for module in modules}
        if architecture.modules.get("attn_qkv") is not None and "attn_q" in heads:
            heads["attn_q"] *= 2  # those of a hybrid's gates, too
        total = sum(heads.values())
        if stored.num_rows != total * size:
            raise SpecDecError(
                f"{self.path}: {stored.name} has {stored.num_rows} rows, for {total} heads of"
                f" {size} it would have {total * size}",
                "the file is damaged: copy or download it again",
            )
        start = 0
        for module, count in heads.items():
            shape = (count * size, *stored.shape[1:])
            is_turned = architecture.interleaves and module != "attn_v"
            order = order_turned(shape[0], count) if is_turned else None
            yield architecture.modules[module], GgufTensor(stored, shape, start=start, order=order)
            start += shape[0]

    def _open(self, hf_module: str, stored: StoredTensor) -> GgufTensor:
        """Return a whole stored tensor under Hugging Face's name of its module."""
        shape = stored.shape
        if hf_module == "mlp.shared_expert_gate" and len(shape) == 1:
            shape = (1, *shape)  # a vector is a matrix of one row
            stored = dataclasses.replace(
                stored, shape=shape, row_bytes=stored.row_bytes * shape[-1]
            )
        elif hf_module in ("linear_attn.conv1d", "conv.conv", "mamba.conv1d") and len(shape) > 1:
            shape = (shape[0], 1, *shape[1:])
        elif hf_module in ("mamba.A_log", "mamba.D", "mamba.norm") and stored.kind in PLAIN:
            shape, row_size = (math.prod(shape),), math.prod(shape[1:])  # of matrices, by groups
            row_bytes = stored.row_bytes // max(1, row_size)
            stored = dataclasses.replace(stored, shape=shape, row_bytes=row_bytes)
        order, columns = None, None
        if self.architecture.deals_heads:
            order, columns = order_values(hf_module, self.config)
        return GgufTensor(
            stored, shape, order=order, columns=columns, change=self._find_change(hf_module)
        )

    def _find_change(self, module: str) -> Callable[[Array], Array] | None:
        """Return the function from a module's stored values to Hugging Face's, if they differ."""
        shift = np.float32(self.architecture.shift)
        if module in ("linear_attn.A_log", "mamba.A_log"):
            return lambda values: np.log(-values)
        is_shifted = "norm" in module.rpartition(".")[2] and module != "linear_attn.norm"
        return (lambda values: values - shift) if shift and is_shifted else None

    def read_block(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> Array:
        """Return rows [start, stop) of a tensor, all columns or columns [first, last)."""
        entry = self.entries[name]
        values = decode(entry.read_rows(start, stop), entry.stored.kind)
        if entry.change is not None:
            values = entry.change(cast(values, PLAIN.get(entry.stored.kind, "float32"), "float32"))
        if entry.columns is not None:
            values = values[:, entry.columns]
        values = values.reshape(stop - start, *entry.info.row_shape)
        if columns is not None:
            values = np.ascontiguousarray(values[:, slice(*columns)])
        return values

    def read(self, name: str) -> Array:
        """Return a tensor in its storage type (bfloat16 as uint16)."""
        info = self.tensors[name]
        return self.read_block(name, 0, info.num_rows).reshape(info.shape)

    def raw(self, name: str) -> tuple[Any, tuple[int, ...], RawRows | None]:
        """Return a tensor's ggml type, its shape, and its rows of blocks, uint8 [rows, bytes].

        The rows and blocks are in Hugging Face's order, and are read where they are indexed. There
        are None where blocks would have to be taken apart.
        """
        entry = self.entries[name]
        gguf = import_gguf(f"reading {self.path}")
        kind = getattr(gguf.GGMLQuantizationType, entry.stored.kind)
        order, (size, num_bytes) = None, gguf.GGML_QUANT_SIZES[kind]
        if entry.columns is not None:
            blocks = entry.columns[::size]
            if not np.array_equal((blocks[:, None] + np.arange(size)).reshape(-1), entry.columns):
                return kind, entry.shape, None
            order = (blocks[:, None] // size * num_bytes + np.arange(num_bytes)).reshape(-1)
        return kind, entry.shape, RawRows(entry, order)

    def locate(self, name: str) -> tuple[Path, int] | None:
        """Return where a tensor's bytes lie as they are read, None where they are computed."""
        entry = self.entries[name]
        stored, moved = entry.stored, (entry.order, entry.columns, entry.change)
        if stored.kind not in PLAIN or any(change is not None for change in moved):
            return None
        return stored.file.path, stored.offset + entry.start * stored.row_bytes

    def release(self) -> None:
        """Do nothing: nothing that was read is kept."""


def order_values(module: str, config: dict[str, Any]) -> tuple[Array | None, Array | None]:
    """Return where rows and columns of linear attention's module lie; None where nothing is moved.

    Hugging Face has the value heads of one key head together, a file one of each key head.
    """
    num, count = (config.get(f"linear_num_{kind}_heads", 0) for kind in ("key", "value"))
    projection = module.removeprefix("linear_attn.")
    if num == count or projection == module or projection == "norm":
        return None, None
    size = config["linear_value_head_dim"] if projection in SIZED else 1
    order = np.arange(count * size).reshape(count // num, num, size).swapaxes(0, 1).reshape(-1)
    if projection == "out_proj":
        return None, order
    if projection in ("in_proj_qkv", "conv1d"):
        num_qk_rows = 2 * num * config["linear_key_head_dim"]
        order = np.concatenate([np.arange(num_qk_rows), num_qk_rows + order])
    return order, None


def _split_experts(hf_module: str, stored: StoredTensor) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the experts' matrices of a stored tensor [E, rows, columns], or biases of [E, rows].

    Those of gate and up may be one, gate's rows first.
    """
    if len(stored.shape) == 2 and stored.kind in PLAIN:  # of a vector each element is a row
        row_bytes = stored.row_bytes // max(1, stored.shape[1])
        stored = dataclasses.replace(stored, shape=(*stored.shape, 1), row_bytes=row_bytes)
    if len(stored.shape) != 3:
        return
    stem, separator, _ = hf_module.partition("gate_up_proj")
    names = [f"{stem}{half}_proj" for half in ("gate", "up")] if separator else [hf_module]
    num_rows = stored.shape[1] // len(names)
    shape = (num_rows,) if stored.name.endswith(".bias") else (num_rows, *stored.shape[2:])
    for number in range(stored.shape[0] * len(names)):
        expert, half = divmod(number, len(names))
        yield names[half].format(expert=expert), GgufTensor(stored, shape, start=number * num_rows)
