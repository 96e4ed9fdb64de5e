"""A GGUF model under Hugging Face's names: config.json, and tensors that are read when used."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import SpecDecError, join_names
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo

from .config import Metadata, find_architecture, read_config
from .file import PLAIN, Stored, decode, import_gguf, merge_tensors, open_parts
from .names import NAMES, Architecture, separate
from .special import read_special

LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor under Hugging Face's name: some rows of a stored one.

    start: the first row. num_heads: of a projection whose rows are put back, see `separate`. shift:
    what is taken off every value, in float32.
    """

    stored: Stored
    shape: tuple[int, ...]
    start: int = 0
    num_heads: int | None = None
    shift: float = 0.0

    @property
    def info(self) -> TensorInfo:
        dtype = PLAIN.get(self.stored.kind, "float32") if not self.shift else "float32"
        return TensorInfo(dtype, self.shape)

    def read_rows(self, start: int, stop: int) -> Array:
        """Bytes of rows [start, stop), uint8 [rows, row bytes]."""
        if self.num_heads is None or stop == start:
            return self.stored.read(self.start + start, self.start + stop)
        order = separate(np.arange(self.info.num_rows), self.num_heads)[start:stop]
        first, last = int(order.min()), int(order.max())
        rows = self.stored.read(self.start + first, self.start + last + 1)
        sorted_rows: Array = rows[order - first]
        return sorted_rows


class RawRows:
    """Rows of blocks, uint8 [rows, bytes], which are read where they are indexed by two slices."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.shape = (entry.info.num_rows, entry.stored.row_bytes)
        self.dtype = np.dtype(np.uint8)

    def __getitem__(self, key: slice | tuple[slice, ...]) -> Array:
        rows, *columns = key if isinstance(key, tuple) else (key,)
        start, stop, step = rows.indices(self.shape[0])
        return self._entry.read_rows(start, max(start, stop))[(slice(None, None, step), *columns)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self[:].astype(dtype or np.uint8, copy=False)


class GgufModel:
    """`config` as config.json has it, `tensors` by Hugging Face's name, and where they lie.

    Quantized tensors have the values of the package `gguf`, in float32. `files`: all parts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        parts = open_parts(path)
        self.files = [part.path for part in parts]
        self.metadata = parts[0].metadata
        self.digest = "".join(part.digest for part in parts)
        stored = merge_tensors(parts)
        data = Metadata(path, self.metadata, stored)
        self.architecture = find_architecture(data)
        self.config = read_config(data, self.architecture) | read_special(self.metadata)
        self.entries: dict[str, Entry] = {}
        unknown = []
        for name, tensor in stored.items():
            entries = dict(self._name(name, tensor))
            self.entries |= entries
            if not entries and name not in FACTORS:
                unknown.append(name)
        if unknown:
            raise SpecDecError(
                f"{path} holds {len(unknown)} tensors that are not known in a model of architecture"
                f" {data.name}: {join_names(unknown)}",
                "take the Hugging Face folder that it was made from",
            )
        self.tensors = {name: entry.info for name, entry in self.entries.items()}

    def _name(self, name: str, stored: Stored) -> Iterator[tuple[str, Entry]]:
        """The names of what a tensor holds, with their parts of it."""
        own = self.architecture
        match = LAYER.fullmatch(name)
        if match is None:
            module, _, kind = name.rpartition(".")
            for theirs, ours in NAMES.items():
                if ours == module and theirs.startswith(("model.", "lm_head")):
                    shift = own.shift if theirs == "model.norm" else 0.0
                    yield f"{theirs}.{kind}", Entry(stored, stored.shape, shift=shift)
            return
        layer, module, kind = match.groups()
        prefix, config = f"model.layers.{layer}", self.config
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        for theirs, ours in own.experts.items() if len(stored.shape) == 3 else ():
            for expert in range(stored.shape[0]) if ours == module else ():
                rows = stored.shape[1]
                yield (
                    f"{prefix}.{theirs.format(expert=expert)}.{kind}",
                    Entry(stored, stored.shape[1:], start=expert * rows),
                )
        if (found := find_module(own, module)) is not None:
            is_row = found == "mlp.shared_expert_gate" and len(stored.shape) == 1
            shape = (1, *stored.shape) if is_row else stored.shape
            if shape != stored.shape:  # a vector is a matrix of one row
                stored = dataclasses.replace(
                    stored, shape=shape, row_bytes=stored.row_bytes * shape[-1]
                )
            yield f"{prefix}.{found}.{kind}", Entry(
                stored, shape, num_heads=heads.get(module) if own.interleaves else None,
                shift=own.shift if found.endswith("norm") else 0.0,
            )  # fmt: skip
        elif module == "attn_qkv":
            start = 0
            for part, count in (*heads.items(), ("attn_v", heads["attn_k"])):
                rows = count * config["head_dim"]
                yield f"{prefix}.{find_module(own, part)}.{kind}", Entry(
                    stored, (rows, *stored.shape[1:]), start=start,
                    num_heads=count if own.interleaves and part != "attn_v" else None,
                )  # fmt: skip
                start += rows

    def read_block(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> Array:
        """Return rows [start, stop) of a tensor, all columns or columns [first, last)."""
        entry = self.entries[name]
        values = decode(entry.read_rows(start, stop), entry.stored.kind)
        if entry.shift:
            values = self._widen(values, entry.stored.kind) - np.float32(entry.shift)
        values = values.reshape(stop - start, *entry.info.row_shape)
        if columns is not None:
            values = np.ascontiguousarray(values[:, slice(*columns)])
        return values

    def _widen(self, values: Array, kind: str) -> Array:
        from specdec.files.casts import cast

        return cast(values, PLAIN.get(kind, "float32"), "float32")

    def read(self, name: str) -> Array:
        """Return a tensor in its storage type (bfloat16 as uint16)."""
        info = self.tensors[name]
        return self.read_block(name, 0, info.num_rows).reshape(info.shape)

    def raw(self, name: str) -> tuple[int, tuple[int, ...], Any]:
        """ggml's type of a tensor, its shape, and its rows of blocks, uint8 [rows, bytes].

        The rows are in Hugging Face's order, and are read where they are indexed (`RawRows`).
        """
        entry = self.entries[name]
        gguf = import_gguf(f"reading {self.path}")
        kind = getattr(gguf.GGMLQuantizationType, entry.stored.kind)
        return kind, entry.shape, RawRows(entry)

    def locate(self, name: str) -> tuple[Path, int] | None:
        """Return where a tensor's bytes lie as they are read, None where they are computed."""
        entry = self.entries[name]
        if entry.stored.kind not in PLAIN or entry.shift or entry.num_heads is not None:
            return None
        return (
            entry.stored.file.path, entry.stored.offset + entry.start * entry.stored.row_bytes
        )  # fmt: skip

    def release(self) -> None:
        """Nothing that was read is kept."""


def find_module(architecture: Architecture, module: str) -> str | None:
    """Hugging Face's name of a layer's module, None where it has none."""
    return next((theirs for theirs, ours in architecture.layer.items() if ours == module), None)
