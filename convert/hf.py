"""Hugging Face folders, and GGUF files as such: a tensor is read when it is used."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.errors import Problems, SpecDecError, join_names, shorten
from specdec.files.folders import (
    INDEX_SUFFIX,
    UNFINISHED,
    WEIGHT_NAMES,
    WEIGHT_SUFFIXES,
    refuse_unfinished,
)
from specdec.files.reading import Array, is_inside, read_json
from specdec.files.tensor_file import TensorFile, TensorInfo
from specdec.model.config import FLOAT_DTYPES, ModelConfig
from specdec.model.tensors import TensorSpec
from specdec.system import logs

from .plan import RankPlan, SourceRows, TensorSource, plan_tensors
from .torch_file import TorchFile

logger = logs.get_logger(__name__)

_SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+(\.safetensors|\.bin)")
QUANTIZATION_NAME = "hf_quant_config.json"  # ModelOpt's description of its quantization


class HfFolder:
    """A model folder: `config`, the tensors by name, and the files that hold them."""

    def __init__(self, path: Path, *, weight_files: Sequence[str] = ()) -> None:
        self.path = path
        self.config: dict[str, Any] = {}
        self.files: list[Path] = []
        self.tensors: dict[str, TensorInfo] = {}
        self._holders: dict[str, TensorSource] = {}
        self._stored: dict[str, str] = {}  # name -> the one in the file, where `rename` changed it
        self.computed: frozenset[str] = frozenset()  # the names that `substitute` has put here
        self.left_out: dict[str, int] = {}  # vision tensors by module, which `unwrap` leaves out
        self.unplaced: set[str] = set()  # in a file, but in no entry of the index
        self._open_files: list[TensorSource] = []
        self._open(weight_files)
        refuse_unfinished(self.files)

    def _open(self, weight_files: Sequence[str]) -> None:
        path = self.path
        self.config, self.files = read_json(path / "config.json"), [path / "config.json"]
        # A link that leads nowhere counts as there: it is an error, not a reason to read another.
        weight_names = [
            name for name in (*weight_files, *WEIGHT_NAMES) if os.path.lexists(path / name)
        ]
        if not weight_names:
            raise refuse_folder(str(path), [entry.name for entry in path.iterdir()])
        if len(weight_names) > 1:
            logger.warning(
                "%s: reading %s, not %s", path, weight_names[0], join_names(weight_names[1:])
            )
        if weight_names[0].endswith(INDEX_SUFFIX):
            self._add_shards(path / weight_names[0])
        else:
            self._add_file(_open_weights(path / weight_names[0]))

    def rename(self, names: Mapping[str, str], *, left_out: Collection[str]) -> None:
        """Give tensors new names, mapped from their own; forget those that are left out."""
        problems = Problems()
        tensors: dict[str, TensorInfo] = {}
        for name, info in self.tensors.items():
            new_name = names.get(name, name)
            if name in left_out:
                continue
            if new_name in tensors:
                problems.add(
                    f"{self.path} has two namings of one tensor, {self._stored[new_name]} and"
                    f" {name}",
                    "keep one of them: which is the trained one cannot be known",
                )
            tensors[new_name], self._stored[new_name] = info, self._stored.get(name, name)
        problems.raise_all()
        self.tensors = tensors

    def repeat(self, names: Mapping[str, str]) -> None:
        """Add tensors under new names that are others of the folder, mapped to these."""
        for new_name, name in names.items():
            self.tensors[new_name] = self.tensors[name]
            self._stored[new_name] = self._stored.get(name, name)

    def read(self, name: str) -> Array:
        """Return a tensor in its storage type (bfloat16 as uint16)."""
        name = self._stored.get(name, name)
        return self._holders[name].read(name)

    def read_block(
        self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> Array:
        """Return a copy of some rows of a tensor, all columns or columns [first, last)."""
        name = self._stored.get(name, name)
        return self._holders[name].read_block(name, start, stop, columns)

    def raw(self, name: str) -> tuple[Any, tuple[int, ...], Any] | None:
        """Return a tensor in GGML's blocks, see `GgufModel.raw`; None where it is in none."""
        name = self._stored.get(name, name)
        read = getattr(self._holders[name], "raw", None)
        return None if read is None else read(name)

    def locate(self, name: str) -> tuple[Path, int] | None:
        """Return the file and offset of a tensor's bytes, or None where they are no such run."""
        name = self._stored.get(name, name)
        return self._holders[name].locate(name)

    def release(self) -> None:
        """Let go of the memory of what was read."""
        for holder in self._open_files:
            holder.release()

    def substitute(self, source: TensorSource, replaced: Collection[str]) -> HfFolder:
        """Return a folder like this with a source's tensors in the place of some of its own."""
        changed = copy.copy(self)
        changed.tensors = {n: info for n, info in self.tensors.items() if n not in replaced}
        changed.tensors |= source.tensors
        changed.computed = self.computed | frozenset(source.tensors)
        changed._holders = self._holders | dict.fromkeys(source.tensors, source)
        changed._stored = {
            n: stored_name for n, stored_name in self._stored.items() if n not in source.tensors
        }
        return changed

    def select(self, names: Collection[str]) -> HfFolder:
        """Return a folder like this with some of its tensors alone."""
        selection = copy.copy(self)
        selection.tensors = {name: info for name, info in self.tensors.items() if name in names}
        return selection

    def find_dtype(self) -> str:
        """Return the dtype that config.json names, or else the one that most weights have."""
        for key in ("dtype", "torch_dtype"):
            value = self.config.get(key)
            if value is not None:
                dtype = str(value).removeprefix("torch.")
                if dtype not in FLOAT_DTYPES:
                    raise SpecDecError(
                        f"{self.path}: config.json gives {key} {shorten(value)}",
                        f"choose one of {', '.join(FLOAT_DTYPES)} with --dtype",
                    )
                return dtype
        sizes: dict[str, int] = {}
        for info in self.tensors.values():
            sizes[info.dtype] = sizes.get(info.dtype, 0) + math.prod(info.shape)
        usual_dtype = max(sizes, key=lambda dtype: sizes[dtype], default="no tensors")
        if usual_dtype not in FLOAT_DTYPES:
            raise SpecDecError(
                f"{self.path}: config.json names no dtype, and its weights are {usual_dtype}",
                f"choose one of {', '.join(FLOAT_DTYPES)} with --dtype",
            )
        return usual_dtype

    def _add_file(self, file: TensorFile | TorchFile, names: Collection[str] | None = None) -> None:
        """Add a file, and of its tensors those named, or all."""
        self.files.append(file.path)
        self._open_files.append(file)
        for name, info in file.tensors.items():
            if names is None or name in names:
                self.tensors[name] = info
                self._holders[name] = file

    def _add_shards(self, index: Path) -> None:
        self.files.append(index)
        indexed = read_index(index)
        absent_files = [name for name in indexed if not _is_there(self.path / name)]
        if absent_files:
            raise SpecDecError(
                f"{index} names {len(absent_files)} of {len(indexed)} files that are not there:"
                f" {join_names(absent_files)}",
                "finish the download of the folder",
            )
        problems = Problems()
        placed = set().union(*indexed.values())
        for filename, names in indexed.items():
            file = _open_weights(self.path / filename)
            missing_names = sorted(names - file.tensors.keys())
            if missing_names:
                problems.add(
                    f"{file.path} lacks tensors that the index places there:"
                    f" {join_names(missing_names)}",
                    "download the file and the index again",
                )
            # This file holds a stale copy of what the index places in another file.
            unplaced = sorted(file.tensors.keys() - placed)
            self.unplaced.update(unplaced)
            if unplaced and problems:  # they may be what is lacking, by another name
                problems.add(
                    f"{file.path} holds tensors that the index does not place there:"
                    f" {join_names(unplaced)}",
                    "download the file and the index again",
                )
            self._add_file(file, names)
        problems.raise_all()
        if self.unplaced:
            logger.warning(
                "%s: not read: %d tensors that no entry of %s names: %s",
                self.path, len(self.unplaced), index.name, join_names(sorted(self.unplaced)),
            )  # fmt: skip


class GgufFolder(HfFolder):
    """A GGUF file, with its tensors and configuration under Hugging Face's names."""

    def _open(self, weight_files: Sequence[str]) -> None:
        from specdec.gguf.model import GgufModel

        self._model = GgufModel(self.path)
        self.config, self.files = self._model.config, list(self._model.files)
        self.tensors = dict(self._model.tensors)
        self._holders = dict.fromkeys(self.tensors, self._model)
        self._open_files = [self._model]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetTensors:
    """A Hugging Face target as its tensors are planned from it.

    specs: its tensors; source_rows: the rows of the folder's tensors that make each.
    ignored: see `plan_tensors`. problems: all that is wrong so far.
    """

    folder: HfFolder
    model: ModelConfig
    specs: Mapping[str, TensorSpec]
    source_rows: Mapping[str, tuple[SourceRows, ...]]
    ignored: Sequence[str]
    problems: Problems

    def plan(self, specs: Mapping[str, TensorSpec], **changed: Any) -> list[RankPlan]:
        """Plan these tensors; changed: arguments of `plan_tensors` in the place of the target's."""
        options: dict[str, Any] = {
            "source_rows": self.source_rows, "source": self.folder, "model": self.model,
            "dtype": self.model.dtype, "ignored": self.ignored, "problems": self.problems,
        }  # fmt: skip
        return plan_tensors(specs, **options | changed)


def read_index(path: Path) -> dict[str, set[str]]:
    """Read an index of shards: the files in order, all alongside it, and the tensors in each."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(filename, str) for filename in weight_map.values()
    ):
        raise SpecDecError(
            f"{path} has no weight_map of tensor names to file names",
            "copy or download the folder again",
        )
    indexed: dict[str, set[str]] = {name: set() for name in sorted(set(weight_map.values()))}
    outside = [name for name in indexed if not is_inside(name)]
    if outside:
        raise SpecDecError(
            f"{path} names files outside the folder: {join_names(outside)}",
            "do not trust this folder; get it from its origin",
        )
    for name, filename in weight_map.items():
        indexed[filename].add(name)
    return indexed


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that no file can have
        return False


def _open_weights(path: Path) -> TensorFile | TorchFile:
    return TensorFile(path) if path.suffix == ".safetensors" else TorchFile(path)


def refuse_folder(folder: str, names: Collection[str]) -> SpecDecError:
    """Return the error for a folder without weights, or none that can be read."""
    unfinished_files = sorted(name for name in names if name.endswith(UNFINISHED))
    weight_files = (
        sorted(name for name in names if name.endswith(WEIGHT_SUFFIXES)) + unfinished_files
    )
    contents = f"; it holds {join_names(weight_files)}" if weight_files else ""
    fact = f"{folder} holds neither {' nor '.join(WEIGHT_NAMES)}{contents}"
    if unfinished_files:
        return SpecDecError(fact, f"finish the download of {join_names(unfinished_files)}")
    if shard := next(filter(None, map(_SHARD.fullmatch, weight_files)), None):
        index = f"{shard[1]}{shard[2]}{INDEX_SUFFIX}"
        return SpecDecError(fact, f"download {index} too, which says which file has a tensor")
    safetensors_files = [name for name in weight_files if name.endswith(".safetensors")]
    rename = (
        f"if {safetensors_files[0]} has all weights, name it {WEIGHT_NAMES[0]}; "
        if len(safetensors_files) == 1
        else ""
    )
    return SpecDecError(
        fact,
        f"{rename}give the folder that holds the model's weights; other formats are first loaded"
        f" with transformers and saved with save_pretrained, which writes {WEIGHT_NAMES[0]}",
    )
