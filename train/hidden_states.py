"""The target's hidden states on disk: computed once, read in every epoch without the target.

    manifest.json               what they were computed from, and which file holds which rows
    target.safetensors          the target's embedding, and its output layer where one is read
    train-00000.safetensors     `hidden` [tokens, D] and `layer.K` [tokens, D] of some of the rows,
    heldout-00000.safetensors   one after another

The folder is written as a hidden one next to it, file by file, so that a killed run can go on.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import gc
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specdec.command.settings import need
from specdec.errors import SpecDecError
from specdec.files.manifest import write_manifest
from specdec.files.reading import Array, read_json, write_json
from specdec.files.staging import JOURNAL_NAME, get_partial, measure_free_space, stage_folder
from specdec.files.tensor_file import (
    DTYPES,
    TensorFile,
    TensorInfo,
    measure_tensor_file,
    write_tensor_file,
)
from specdec.files.torch_tensors import to_array, to_tensor, view_tensor
from specdec.system.logs import get_logger

from .features import OutputHead
from .job import list_inputs, load_target
from .rows import Rows
from .state import refuse_changes
from .target import Batch, LiveTarget, Target, get_name, join_rows, make_batch, make_head

if TYPE_CHECKING:
    from .job import Setup

KIND = "hidden-states"  # in the manifest
ANEW = "name another folder, or remove this one: it is then made again"
SHARD_BYTES = 1 << 28  # about; held in memory before it is written
MAX_OPEN = 64  # files mapped at a time
TARGET_FILE = "target.safetensors"

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class StatesFile:
    """A file of hidden states: rows `first` to before `stop` of one of the parts."""

    part: str
    number: int
    first: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.part}-{self.number:05}.safetensors"


@dataclasses.dataclass(frozen=True)
class StatesPlan:
    """What a folder of hidden states holds: facts by which it is known, layers, type, files."""

    facts: Mapping[str, Any]
    parts: Mapping[str, Rows]
    layers: tuple[int, ...]
    vocab_size: int
    hidden_size: int
    dtype: str

    def describe(self) -> dict[str, Any]:
        """Return what is kept of it in the folder."""
        return {
            "facts": dict(self.facts),
            "layers": list(self.layers),
            "dtype": self.dtype,
            "hidden_size": self.hidden_size,
            "shards": [dataclasses.asdict(shard) for shard in self.shards],
        }

    @functools.cached_property
    def shards(self) -> list[StatesFile]:
        return [s for part, rows in self.parts.items() for s in self._cut(part, rows)]

    def _cut(self, part: str, rows: Rows) -> list[StatesFile]:
        size = TensorInfo(self.dtype, (self.hidden_size,)).num_bytes * (1 + len(self.layers))
        firsts = [0]
        for row in range(1, len(rows)):
            if int(rows.bounds[row + 1] - rows.bounds[firsts[-1]]) * size > SHARD_BYTES:
                firsts.append(row)
        stops = [*firsts[1:], len(rows)]
        return [StatesFile(part, i, *at) for i, at in enumerate(zip(firsts, stops, strict=True))]

    def list_tensors(self, shard: StatesFile) -> dict[str, TensorInfo]:
        """List the tensors of a file."""
        bounds = self.parts[shard.part].bounds
        num_tokens = int(bounds[shard.stop] - bounds[shard.first])
        info = TensorInfo(self.dtype, (num_tokens, self.hidden_size))
        return dict.fromkeys(["hidden", *(f"layer.{layer}" for layer in self.layers)], info)


def hash_rows(rows: Rows) -> str:
    """Return the sha256 of the rows' tokens and bounds, whatever integer types hold them."""
    digest = hashlib.sha256(np.ascontiguousarray(rows.bounds, np.int64).data)
    for start in range(0, len(rows.tokens), 1 << 20):
        digest.update(np.ascontiguousarray(rows.tokens[start : start + (1 << 20)], np.int32).data)
    return digest.hexdigest()


def write_states(
    folder: Path, plan: StatesPlan, setup: Setup, sources: list[dict[str, Any]]
) -> None:
    """Run the target over the data and write its hidden states into `folder`.

    All processes call this and share the work. sources: what the manifest names.
    """
    wait = setup.accelerator.wait_for_everyone
    if not setup.accelerator.is_main_process:
        wait()  # until the folder is there
        _write_share(get_partial(folder), plan, load_target(setup), setup)
        wait()  # until all files are
        wait()  # until the folder has its name
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise SpecDecError(f"{folder} holds no hidden states", "name an empty or a new folder")
    with stage_folder(
        folder, force=False, inputs=list_inputs(setup.settings), resume=True,
        full_disk_hint="make room on its disk and run it again: it goes on with what is written",
    ) as partial:  # fmt: skip
        _begin(folder, partial, plan)
        wait()
        target = load_target(setup)
        _write_share(partial, plan, target, setup)
        _write_target(partial / TARGET_FILE, target)
        wait()
        marks = {shard.name: _get_mark(partial, shard) for shard in plan.shards}
        hashes = {name: mark.read_text() for name, mark in marks.items()}
        for mark in marks.values():
            mark.unlink()
        write_manifest(
            partial, kind=KIND, settings={}, sources=sources, hashes=hashes,
            **plan.describe(),
        )  # fmt: skip
    wait()
    logger.info("hidden states: they are in %s", folder)


def _begin(folder: Path, partial: Path, plan: StatesPlan) -> None:
    """Check what a killed run left, and that the disk has room for the rest."""
    journal = partial / JOURNAL_NAME
    if journal.is_file():
        before = read_json(journal)
        refuse_changes(
            f"{partial} was started with something else",
            {**before["facts"], "layers": before["layers"]},
            {**plan.facts, "layers": list(plan.layers)},
            hint="remove it, or name another folder",
        )
    write_json(journal, plan.describe())
    missing = [shard for shard in plan.shards if not _is_complete(partial, plan, shard)]
    if len(missing) < len(plan.shards):
        logger.info(
            "hidden states: %d of %d files are there already",
            len(plan.shards) - len(missing), len(plan.shards),
        )  # fmt: skip
    num_bytes = sum(measure_tensor_file(plan.list_tensors(shard)) for shard in missing)
    tables = TensorInfo(plan.dtype, (2, plan.vocab_size, plan.hidden_size))
    num_bytes += tables.num_bytes  # at most: embedding and output layer may be one
    place, free = measure_free_space(folder)
    logger.info(
        "hidden states: %.1f MB in %s go to %s, where %.1f MB are free",
        num_bytes / 1e6, plan.dtype, folder, free / 1e6,
    )  # fmt: skip
    if num_bytes > free:
        raise SpecDecError(
            f"--hidden-states-dir {folder}: {num_bytes} bytes are needed, {free} are free in"
            f" {place}",
            "name a folder on a larger disk, or train without it",
        )


def _get_mark(folder: Path, shard: StatesFile) -> Path:
    """Return the file that holds a complete file's sha256 while others are missing."""
    return folder / f"{shard.name}.sha256"


def _is_complete(folder: Path, plan: StatesPlan, shard: StatesFile) -> bool:
    path, mark = folder / shard.name, _get_mark(folder, shard)
    size = measure_tensor_file(plan.list_tensors(shard))
    return mark.is_file() and path.is_file() and path.stat().st_size == size


def _write_share(folder: Path, plan: StatesPlan, target: LiveTarget, setup: Setup) -> None:
    """Write this process's part of the files that are missing."""
    accelerator = setup.accelerator
    in_step = setup.settings.shard_target  # each holds a part of it: all must read equally often
    missing = [shard for shard in plan.shards if not _is_complete(folder, plan, shard)]
    accelerator.wait_for_everyone()  # so that all see the same ones
    for start in range(0, len(missing), accelerator.num_processes):
        group = missing[start : start + accelerator.num_processes]
        mine = accelerator.process_index
        most = max(shard.stop - shard.first for shard in group)
        if mine < len(group):
            shard = group[mine]
            arrays = _read_shard(plan, shard, target, setup, most if in_step else 0)
            partial = folder / f"{shard.name}.partial"
            sha256 = write_tensor_file(partial, plan.list_tensors(shard), arrays.__getitem__)
            partial.replace(folder / shard.name)
            _get_mark(folder, shard).write_text(sha256, encoding="utf-8")
        elif in_step:
            empty = dataclasses.replace(group[0], stop=group[0].first)
            _read_shard(plan, empty, target, setup, most)
        done = min(len(missing), start + accelerator.num_processes)
        logger.info("hidden states: %d of %d files", done, len(missing))


def _read_shard(
    plan: StatesPlan, shard: StatesFile, target: LiveTarget, setup: Setup, num_reads: int
) -> dict[str, Array]:
    """Return the states of a shard's rows; read some row over again up to `num_reads` in all."""
    rows = plan.parts[shard.part]
    infos = plan.list_tensors(shard)
    arrays = {name: np.empty(t.shape, DTYPES[t.dtype][1]) for name, t in infos.items()}
    wanted = list(range(shard.first, shard.stop))
    indices = wanted + [shard.first] * (num_reads - len(wanted))
    start = int(rows.bounds[shard.first])
    with torch.no_grad():
        size = setup.settings.batch_size
        for at in range(0, len(indices), size):
            batch = make_batch(rows, indices[at : at + size], setup.accelerator.device)
            states = target.find_states(batch)
            mine = zip(wanted[at : at + size], batch.lengths, strict=False)
            for i, (row, length) in enumerate(mine):
                first = int(rows.bounds[row]) - start
                for array, state in zip(arrays.values(), states, strict=True):
                    array[first : first + length] = to_array(state[i, :length].cpu())
    return arrays


def _write_target(path: Path, target: LiveTarget) -> None:
    """Write the target's tables, which are read along with its hidden states."""
    table = target.table
    tensors = {"embedding": table}
    head = "none"
    if target.head is not None:
        head = "embedding" if target.head.weight.data_ptr() == table.data_ptr() else "own"
        if head == "own":
            tensors["head"] = target.head.weight
        if target.head.bias is not None:
            tensors["head_bias"] = target.head.bias
    arrays = {name: to_array(tensor.detach().cpu()) for name, tensor in tensors.items()}
    infos = {
        name: TensorInfo(str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in tensors.items()
    }
    write_tensor_file(path, infos, arrays.__getitem__, metadata={"head": head})


class StoredTarget(Target):
    """A target whose hidden states are read from a folder, mapped, not loaded."""

    def __init__(self, folder: Path, plan: StatesPlan, setup: Setup) -> None:
        manifest = read_json(folder / "manifest.json")
        absent = sorted(set(plan.layers) - set(manifest["layers"]))
        if absent:
            raise SpecDecError(
                f"{folder} lacks the outputs of the target's layers"
                f" {', '.join(map(str, absent))}, which this drafter reads",
                ANEW,
            )
        self.folder = folder
        self.plan = dataclasses.replace(plan, layers=tuple(manifest["layers"]))
        self.shards = {
            part: [StatesFile(**entry) for entry in manifest["shards"] if entry["part"] == part]
            for part in plan.parts
        }
        self._open = functools.lru_cache(maxsize=MAX_OPEN)(self._open_shard)
        for shard in [shard for shards in self.shards.values() for shard in shards]:
            self._open(shard)
        embedding, head = self._read_target(setup)
        name = get_name(setup.settings.model_dir)
        super().__init__(embedding, setup.config, name=name, head=head, aux_layers=plan.layers)

    def _read_target(self, setup: Setup) -> tuple[torch.nn.Embedding, OutputHead | None]:
        file = TensorFile(self.folder / TARGET_FILE)
        weights = {
            name: to_tensor(file.read(name), info.dtype).to(setup.accelerator.device)
            for name, info in file.tensors.items()
        }
        kind = file.metadata["head"]
        size, width = weights["embedding"].shape
        table = torch.nn.Embedding(size, width, _weight=weights["embedding"])
        table.requires_grad_(False)
        if not setup.needs_head:
            return table, None
        if kind == "none":
            raise SpecDecError(
                f"{self.folder} lacks the target's output layer, which this drafter reads",
                ANEW,
            )
        weight = weights["head" if kind == "own" else "embedding"]
        return table, make_head(setup.config, weight, weights.get("head_bias"))

    def _open_shard(self, shard: StatesFile) -> TensorFile:
        file = TensorFile(self.folder / shard.name)
        if file.tensors != self.plan.list_tensors(shard):
            raise SpecDecError(
                f"{file.path} does not hold the rows that manifest.json says",
                ANEW,
            )
        return file

    def find_states(self, batch: Batch) -> tuple[Tensor, ...]:
        """Read the rows' states."""
        part = next(part for part, rows in self.plan.parts.items() if rows is batch.rows)
        names = ["hidden", *(f"layer.{layer}" for layer in self.aux_layers)]
        read: dict[str, list[Tensor]] = {name: [] for name in names}
        shards = self.shards[part]
        for row, length in zip(batch.indices, batch.lengths, strict=True):
            shard = shards[bisect.bisect([s.first for s in shards], row) - 1]
            first = int(batch.rows.bounds[row] - batch.rows.bounds[shard.first])
            file = self._open(shard)
            for name in names:
                array = file.read(name)[first : first + length]
                read[name].append(view_tensor(array, self.plan.dtype))
        return tuple(join_rows(read[name]).to(batch.tokens.device) for name in names)


def open_states(
    setup: Setup, parts: Mapping[str, Rows], vocab_size: int,
    sources: list[dict[str, Any]], facts: Mapping[str, str],
) -> StoredTarget:  # fmt: skip
    """Return the target by its hidden states; where they are not on disk yet, compute them first.

    facts: hashes of the target's files and the data's, `sources`; both of the main process only.
    """
    folder = need(setup.settings.hidden_states_dir)
    hashes = {f"sha256 of the {name} rows": hash_rows(rows) for name, rows in parts.items()}
    plan = StatesPlan(
        facts={"--dtype": setup.dtype, **facts, **hashes},
        parts=parts,
        layers=setup.method.choose_layers(setup.settings, setup.config),
        vocab_size=vocab_size,
        hidden_size=int(setup.config.hidden_size),
        dtype=setup.dtype,
    )
    if not (folder / "manifest.json").is_file():
        write_states(folder, plan, setup, sources)
        gc.collect()  # the target, which may be large and full of cycles
    elif setup.accelerator.is_main_process:
        check_states(folder, plan)
    setup.accelerator.wait_for_everyone()
    return StoredTarget(folder, plan, setup)


def check_states(folder: Path, plan: StatesPlan) -> None:
    """Raise SpecDecError where a folder's hidden states are not of the same target and data."""
    manifest = read_json(folder / "manifest.json")
    if manifest.get("kind") != KIND:
        raise SpecDecError(
            f"{folder} holds no hidden states", "name the folder of an earlier training"
        )
    refuse_changes(f"{folder} is not of the same", manifest["facts"], plan.facts, hint=ANEW)
