"""Hidden states of the target on disk: computed once, read in every epoch without the target.

    manifest.json               facts that the states depend on, and the rows of each file
    target.safetensors          the target's embedding, and its output layer for some methods
    train-00000.safetensors     `hidden` [tokens, D] and `layer.K` [tokens, D] of some of the rows,
    heldout-00000.safetensors   one after another; in FP8 also `hidden.scale` and `layer.K.scale`
                                [tokens] in float32

The folder is written as a hidden one next to it, file by file, so that a killed run can go on.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import gc
import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.command.settings import need
from specdec.errors import SpecDecError
from specdec.files.manifest import read_manifest, write_manifest
from specdec.files.reading import Array, hash_file, read_json, write_json
from specdec.files.staging import measure_free_space, stage_folder
from specdec.files.tensor_file import (
    DTYPES,
    TensorFile,
    TensorInfo,
    measure_tensor_file,
    write_tensor_file,
)
from specdec.files.torch_tensors import TORCH_DTYPES, to_array, to_tensor, view_tensor
from specdec.files.unfinished import JOURNAL_NAME, get_partial
from specdec.system.logs import get_logger

from . import fp8
from .features import OutputHead
from .rows import TokenRows
from .settings import LAYERS_FLAG
from .setup import Setup, list_inputs, open_target, read_bytes
from .state import list_inferred, name_source, refuse_changes
from .target import FrozenTarget, RowBatch, get_name, join_rows, make_batch, make_head

KIND = "hidden-states"  # `kind` of the manifest
REMAKE_HINT = "name another folder, or remove this one: it is then made again"
SHARD_BYTES = 1 << 28  # approximate limit of a file, which is built in memory
MAX_OPEN_FILES = 64  # files that are mapped at a time
TARGET_FILE = "target.safetensors"
DTYPE_FACT = "--hidden-states-dtype"
SHARD_KEYS = ("part", "number", "first", "stop")  # keys of a file's entry in the manifest

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class StatesFile:
    """File of hidden states: rows `first_row` to before `end_row` of one split."""

    split: str  # "train" or "heldout"
    number: int
    first_row: int
    end_row: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05}.safetensors"

    @property
    def num_rows(self) -> int:
        return self.end_row - self.first_row

    def to_json(self) -> dict[str, Any]:
        """Return the file's entry in the manifest."""
        return dict(zip(SHARD_KEYS, dataclasses.astuple(self), strict=True))

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> StatesFile:
        """Return the file of an entry in the manifest."""
        return StatesFile(*(entry[key] for key in SHARD_KEYS))


@dataclasses.dataclass(frozen=True)
class StatesPlan:
    """Plan of a folder of hidden states: its facts, layers, number types and files.

    dtype: of the states in the files. compute_dtype: of the states as they are read. max_bytes:
    of the folder; None: any number.
    """

    facts: Mapping[str, Any]
    splits: Mapping[str, TokenRows]
    layers: tuple[int, ...]
    vocab_size: int
    hidden_size: int
    dtype: str
    compute_dtype: str
    max_bytes: int | None = None

    @property
    def names(self) -> list[str]:
        """Names of the states in a file, in the order in which a target gives them."""
        return ["hidden", *(f"layer.{layer}" for layer in self.layers)]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the files."""
        infos = self._describe_states(1).values()
        return sum(info.num_bytes for info in infos)

    @property
    def table_bytes(self) -> int:
        """Bytes of the target's embedding and output layer, which may be one."""
        return TensorInfo(self.compute_dtype, (2, self.vocab_size, self.hidden_size)).num_bytes

    def describe(self) -> dict[str, Any]:
        """Return the plan's entries in the journal and the manifest."""
        return {
            "facts": dict(self.facts),
            "layers": list(self.layers),
            "dtype": self.dtype,
            "hidden_size": self.hidden_size,
            "shards": [shard.to_json() for shard in self.shards],
        }

    @functools.cached_property
    def shards(self) -> list[StatesFile]:
        """Files of the folder: of all rows, or of the first ones, as many as may be kept."""
        shards = [
            shard for split, rows in self.splits.items() for shard in self._list_shards(split, rows)
        ]
        if self.max_bytes is None:
            return shards
        sizes = itertools.accumulate(map(self.measure, shards), initial=self.table_bytes)
        num_kept = sum(size <= self.max_bytes for size in itertools.islice(sizes, 1, None))
        if not num_kept:
            raise SpecDecError(
                f"--max-disk leaves {self.max_bytes} bytes, but the target's tables take"
                f" {self.table_bytes} and the first of {len(shards)} files"
                f" {self.measure(shards[0])}",
                "give more, or leave out --hidden-states-dir",
            )
        return shards[:num_kept]

    def _list_shards(self, split: str, rows: TokenRows) -> list[StatesFile]:
        first_rows = [0]
        for row in range(1, len(rows)):
            if (
                int(rows.bounds[row + 1] - rows.bounds[first_rows[-1]]) * self.token_bytes
                > SHARD_BYTES
            ):
                first_rows.append(row)
        end_rows = [*first_rows[1:], len(rows)]
        return [
            StatesFile(split, number, first_row, end_row)
            for number, (first_row, end_row) in enumerate(zip(first_rows, end_rows, strict=True))
        ]

    def list_tensors(self, shard: StatesFile) -> dict[str, TensorInfo]:
        """List the tensors of a file."""
        bounds = self.splits[shard.split].bounds
        num_tokens = int(bounds[shard.end_row] - bounds[shard.first_row])
        return self._describe_states(num_tokens)

    def _describe_states(self, num_tokens: int) -> dict[str, TensorInfo]:
        info = TensorInfo(self.dtype, (num_tokens, self.hidden_size))
        tensors = dict.fromkeys(self.names, info)
        if self.dtype == fp8.DTYPE:
            scale = TensorInfo("float32", (num_tokens,))
            tensors |= {f"{name}.scale": scale for name in self.names}
        return tensors

    def describe_rows(self, shard: StatesFile) -> dict[str, str]:
        """Return the metadata of a file, by which a file of other rows in its place is seen."""
        rows = f"{shard.split} {shard.first_row} to {shard.end_row}"
        return {"rows": rows, "data": self.facts[_name_rows_fact(shard.split)]}

    def measure(self, shard: StatesFile) -> int:
        """Return the size of a file in bytes."""
        return measure_tensor_file(self.list_tensors(shard), self.describe_rows(shard))


def _name_rows_fact(split: str) -> str:
    return f"sha256 of the {split} rows"


def hash_rows(rows: TokenRows) -> str:
    """Return the sha256 of the rows' tokens and bounds, whatever integer types hold them."""
    digest = hashlib.sha256(np.ascontiguousarray(rows.bounds, np.int64).data)
    for start in range(0, len(rows.tokens), 1 << 20):
        digest.update(np.ascontiguousarray(rows.tokens[start : start + (1 << 20)], np.int32).data)
    return digest.hexdigest()


def write_states(
    folder: Path, plan: StatesPlan, setup: Setup, sources: list[dict[str, Any]]
) -> None:
    """Run the target over the data and write its hidden states into `folder`.

    All processes call this and share the work. sources: files that the manifest names.
    """
    wait = setup.accelerator.wait_for_everyone
    if not setup.accelerator.is_main_process:
        wait()  # until the main process has made the folder
        _write_share(get_partial(folder), plan, _open_writer(plan, setup), setup)
        wait()  # until all files are written
        wait()  # until the main process has renamed the folder
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise SpecDecError(f"{folder} holds no hidden states", "name an empty or a new folder")
    with stage_folder(
        folder, force=False, inputs=list_inputs(setup.settings), resume=True,
        full_disk_hint="make room on its disk and run it again: it goes on with what is written",
    ) as partial:  # fmt: skip
        _start_folder(folder, partial, plan, list_inferred(setup.settings))
        wait()
        target = _open_writer(plan, setup)
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


def _open_writer(plan: StatesPlan, setup: Setup) -> FrozenTarget:
    """Open the target whose states are written."""
    target = open_target(setup)
    target.check_rows(plan.splits)
    return target


def _start_folder(folder: Path, partial: Path, plan: StatesPlan, inferred: list[str]) -> None:
    """Check the files of a killed run, and that the disk has room for the missing ones.

    inferred: see `refuse_changes`.
    """
    journal = partial / JOURNAL_NAME
    if journal.is_file():
        journal_facts = read_json(journal)
        refuse_changes(
            f"{partial} was started with something else",
            {**_read_facts(journal_facts), "layers": journal_facts["layers"]},
            {**plan.facts, "layers": list(plan.layers)},
            hint="remove it, or name another folder", inferred=inferred,
        )  # fmt: skip
    write_json(journal, plan.describe())
    missing_shards = [shard for shard in plan.shards if not _is_complete(partial, plan, shard)]
    if len(missing_shards) < len(plan.shards):
        logger.info(
            "hidden states: %d of %d files are there already",
            len(plan.shards) - len(missing_shards), len(plan.shards),
        )  # fmt: skip
    num_bytes = sum(plan.measure(shard) for shard in missing_shards) + plan.table_bytes
    disk_folder, free_bytes = measure_free_space(folder)
    logger.info(
        "hidden states: %.1f MB in %s go to %s, where %.1f MB are free",
        num_bytes / 1e6, plan.dtype, folder, free_bytes / 1e6,
    )  # fmt: skip
    if num_bytes > free_bytes:
        raise SpecDecError(
            f"--hidden-states-dir {folder}: {num_bytes} bytes are needed, {free_bytes} are free in"
            f" {disk_folder}",
            "name a folder on a larger disk, or train without it",
        )


def _get_mark(folder: Path, shard: StatesFile) -> Path:
    """Return the path of a complete file's sha256, which exists until all files are complete."""
    return folder / f"{shard.name}.sha256"


def _is_complete(folder: Path, plan: StatesPlan, shard: StatesFile) -> bool:
    path, mark = folder / shard.name, _get_mark(folder, shard)
    return mark.is_file() and path.is_file() and path.stat().st_size == plan.measure(shard)


def _write_share(folder: Path, plan: StatesPlan, target: FrozenTarget, setup: Setup) -> None:
    """Write this process's share of the missing files."""
    accelerator = setup.accelerator
    # Processes with shards of the target must read equally often.
    in_step = setup.settings.shard_target
    missing_shards = [shard for shard in plan.shards if not _is_complete(folder, plan, shard)]
    accelerator.wait_for_everyone()  # so that all see one list of missing files
    for start in range(0, len(missing_shards), accelerator.num_processes):
        group = missing_shards[start : start + accelerator.num_processes]
        process_index = accelerator.process_index
        num_reads = max(shard.num_rows for shard in group)
        if process_index < len(group):
            shard = group[process_index]
            arrays = _read_shard(plan, shard, target, setup, num_reads if in_step else 0)
            partial = folder / f"{shard.name}.partial"
            sha256 = write_tensor_file(
                partial, plan.list_tensors(shard), arrays.__getitem__, plan.describe_rows(shard)
            )
            partial.replace(folder / shard.name)
            _get_mark(folder, shard).write_text(sha256, encoding="utf-8")
        elif in_step:
            empty = dataclasses.replace(group[0], end_row=group[0].first_row)
            _read_shard(plan, empty, target, setup, num_reads)
        num_done = min(len(missing_shards), start + accelerator.num_processes)
        logger.info("hidden states: %d of %d files", num_done, len(missing_shards))


def _read_shard(
    plan: StatesPlan, shard: StatesFile, target: FrozenTarget, setup: Setup, num_reads: int
) -> dict[str, Array]:
    """Return the states of a shard's rows; repeat its first row up to `num_reads` reads in all."""
    rows = plan.splits[shard.split]
    infos = plan.list_tensors(shard)
    arrays = {name: np.empty(t.shape, DTYPES[t.dtype][1]) for name, t in infos.items()}
    shard_rows = list(range(shard.first_row, shard.end_row))
    indices = shard_rows + [shard.first_row] * (num_reads - len(shard_rows))
    shard_start = int(rows.bounds[shard.first_row])
    target.expect(rows, shard_rows)
    with torch.no_grad():
        size = setup.settings.batch_size
        for batch_start in range(0, len(indices), size):
            batch = make_batch(
                rows, indices[batch_start : batch_start + size], setup.accelerator.device
            )
            states = target.find_states(batch)
            real_rows = zip(
                shard_rows[batch_start : batch_start + size], batch.lengths, strict=False
            )
            for i, (row, length) in enumerate(real_rows):
                first_token = int(rows.bounds[row]) - shard_start
                place = slice(first_token, first_token + length)
                for name, state in zip(plan.names, states, strict=True):
                    _store_states(arrays, name, place, state[i, :length].cpu())
    return arrays


def _store_states(arrays: dict[str, Array], name: str, tokens: slice, states: Tensor) -> None:
    """Put a row's states into a file's arrays."""
    if f"{name}.scale" in arrays:
        states, scales = fp8.quantize_states(states)
        arrays[f"{name}.scale"][tokens] = scales.numpy()
    arrays[name][tokens] = to_array(states)


def _write_target(path: Path, target: FrozenTarget) -> None:
    """Write the target's tables, which are read with its hidden states."""
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


def open_kept(path: Path) -> TensorFile:
    """Open a file of kept states, which can be made again where it is damaged."""
    try:
        return TensorFile(path)
    except SpecDecError as error:
        raise SpecDecError(error.message, REMAKE_HINT) from None


def _read_hashes(folder: Path) -> dict[str, str | None]:
    """Return the sha256 of each file of a folder of states."""
    return {entry.path: entry.sha256 for entry in read_manifest(folder, KIND).outputs}


class StoredTarget(FrozenTarget):
    """Target whose hidden states are read from a folder, mapped, not loaded.

    A file is compared with its sha256 before the first of its rows is read.
    """

    def __init__(self, folder: Path, plan: StatesPlan, setup: Setup) -> None:
        manifest = read_json(folder / "manifest.json")
        self._unread_hashes = _read_hashes(folder)
        missing_layers = sorted(set(plan.layers) - set(manifest["layers"]))
        if missing_layers:
            raise SpecDecError(
                f"{folder} lacks the outputs of the target's layers"
                f" {', '.join(map(str, missing_layers))}, which this drafter reads",
                REMAKE_HINT,
            )
        self.folder = folder
        self.plan = dataclasses.replace(plan, layers=tuple(manifest["layers"]))
        shards = [StatesFile.from_json(entry) for entry in manifest["shards"]]
        self.shards = {
            split: [shard for shard in shards if shard.split == split] for split in plan.splits
        }
        counts = {split: sum(s.num_rows for s in shards) for split, shards in self.shards.items()}
        is_whole = all(counts[split] == len(rows) for split, rows in plan.splits.items())
        # Gives the states of the rows that are not kept.
        self.rest = None if is_whole else _open_writer(plan, setup)
        if self.rest is not None:
            num_rows = sum(map(len, plan.splits.values()))
            logger.info(
                "hidden states: %d of %d rows are in %s, the others are computed whenever they are"
                " read", sum(counts.values()), num_rows, folder,
            )  # fmt: skip
        self._open = functools.lru_cache(maxsize=MAX_OPEN_FILES)(self._open_shard)
        for shard in itertools.chain(*self.shards.values()):
            self._open(shard)
        embedding, head = self._read_target(setup)
        name = get_name(setup.settings.model_dir)
        super().__init__(embedding, setup.config, name=name, head=head, aux_layers=plan.layers)

    def _read_target(self, setup: Setup) -> tuple[torch.nn.Embedding, OutputHead | None]:
        file = open_kept(self.folder / TARGET_FILE)
        self._compare(TARGET_FILE)
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
                REMAKE_HINT,
            )
        weight = weights["head" if kind == "own" else "embedding"]
        return table, make_head(setup.config, weight, weights.get("head_bias"))

    def _open_shard(self, shard: StatesFile) -> TensorFile:
        file = open_kept(self.folder / shard.name)
        expected = (self.plan.list_tensors(shard), self.plan.describe_rows(shard))
        if (file.tensors, file.metadata) != expected:
            raise SpecDecError(
                f"{file.path} does not hold the rows that manifest.json says",
                REMAKE_HINT,
            )
        return file

    def _compare(self, name: str) -> None:
        """Raise SpecDecError where a file that was not read yet is not as it was written."""
        if name in self._unread_hashes:
            if hash_file(self.folder / name) != self._unread_hashes[name]:
                raise SpecDecError(
                    f"{self.folder / name} is damaged: it has another sha256 than when it was"
                    " written",
                    REMAKE_HINT,
                )
            del self._unread_hashes[name]

    def _find_shard(self, rows: TokenRows, row: int) -> StatesFile | None:
        """Return the file that has a row, None where it is not kept."""
        split = next(split for split, split_rows in self.plan.splits.items() if split_rows is rows)
        shards = self.shards[split]
        index = bisect.bisect([shard.first_row for shard in shards], row) - 1
        return shards[index] if shards and row < shards[index].end_row else None

    def expect(self, rows: TokenRows, indices: list[int]) -> None:
        """Let the rest prepare for the rows that are not kept."""
        if self.rest is not None:
            self.rest.expect(rows, [i for i in indices if self._find_shard(rows, i) is None])

    def find_states(self, batch: RowBatch) -> tuple[Tensor, ...]:
        """Read the hidden states of a batch from the files; those of rows not kept are computed."""
        names = ["hidden", *(f"layer.{layer}" for layer in self.aux_layers)]
        row_states: dict[str, list[Tensor]] = {name: [] for name in names}
        for row, length in zip(batch.indices, batch.lengths, strict=True):
            shard = self._find_shard(batch.rows, row)
            if shard is None:
                states = self._compute_row(batch, row)
            else:
                first_token = int(batch.rows.bounds[row] - batch.rows.bounds[shard.first_row])
                file = self._open(shard)
                self._compare(shard.name)
                tokens = slice(first_token, first_token + length)
                states = [self._read_states(file, name, tokens) for name in names]
            for name, state in zip(names, states, strict=True):
                row_states[name].append(state)
        return tuple(join_rows(row_states[name]).to(batch.tokens.device) for name in names)

    def _compute_row(self, batch: RowBatch, row: int) -> list[Tensor]:
        """Return a row's states from the target, rounded as kept ones are."""
        assert self.rest is not None
        row_batch = make_batch(batch.rows, [row], batch.tokens.device)
        states = [state[0].cpu() for state in self.rest.find_states(row_batch)]
        if self.plan.dtype != fp8.DTYPE:
            return states
        dtype = TORCH_DTYPES[self.plan.compute_dtype]
        return [fp8.restore_states(*fp8.quantize_states(state), dtype) for state in states]

    def _read_states(self, file: TensorFile, name: str, tokens: slice) -> Tensor:
        states = view_tensor(file.read(name)[tokens], self.plan.dtype)
        if self.plan.dtype != fp8.DTYPE:
            return states
        scales = view_tensor(file.read(f"{name}.scale")[tokens], "float32")
        return fp8.restore_states(states, scales, TORCH_DTYPES[self.plan.compute_dtype])


def open_states(
    setup: Setup, splits: Mapping[str, TokenRows], vocab_size: int,
    sources: list[dict[str, Any]], facts: Mapping[str, str],
) -> StoredTarget:  # fmt: skip
    """Open the folder of hidden states as the target; compute the states that it lacks.

    sources, facts: files of target and data, and their hashes; on the main process only.
    """
    folder = need(setup.settings.hidden_states_dir)
    hashes = {_name_rows_fact(split): hash_rows(rows) for split, rows in splits.items()}
    option = setup.settings.hidden_states_dtype
    plan = make_plan(setup, splits, vocab_size, fp8.DTYPE if option == "fp8" else setup.dtype)
    types = {"--dtype": setup.dtype, DTYPE_FACT: option}
    facts = {**types, **name_source(setup), **facts, **hashes}
    max_disk = setup.settings.max_disk
    plan = dataclasses.replace(
        plan, facts=facts, max_bytes=None if max_disk is None else read_bytes(max_disk)
    )
    if not (folder / "manifest.json").is_file():
        write_states(folder, plan, setup, sources)
        gc.collect()  # frees the target, which may be large and has reference cycles
    elif setup.accelerator.is_main_process:
        is_typed = setup.settings.hidden_states_layers is not None
        check_states(folder, plan, compares_layer_ids=is_typed)
    setup.accelerator.wait_for_everyone()
    return StoredTarget(folder, plan, setup)


def make_plan(
    setup: Setup, splits: Mapping[str, TokenRows], vocab_size: int, dtype: str
) -> StatesPlan:
    """Make the plan, still without facts, of the states that a training reads; dtype: stored."""
    return StatesPlan(
        facts={}, splits=splits, layers=setup.method.choose_layers(setup.settings, setup.config),
        vocab_size=vocab_size, hidden_size=int(setup.config.hidden_size), dtype=dtype,
        compute_dtype=setup.dtype,
    )  # fmt: skip


def _read_facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a journal or manifest, of which early ones lack the states' type."""
    return {DTYPE_FACT: "auto", **record["facts"]}


def check_states(folder: Path, plan: StatesPlan, *, compares_layer_ids: bool = True) -> None:
    """Raise SpecDecError where a folder's hidden states are of another target or data.

    compares_layer_ids: whether vLLM's ids are compared also where the folder was made for a drafter
    that reads other layers, by whose needs ids that were not given differ.
    """
    manifest = read_json(folder / "manifest.json")
    if manifest.get("kind") != KIND:
        raise SpecDecError(
            f"{folder} holds no hidden states", "name the folder of an earlier training"
        )
    facts, folder_facts = dict(plan.facts), _read_facts(manifest)
    is_known = LAYERS_FLAG in folder_facts  # early folders lack it
    if not is_known or not (compares_layer_ids or manifest["layers"] == list(plan.layers)):
        facts.pop(LAYERS_FLAG, None)
        folder_facts.pop(LAYERS_FLAG, None)
    refuse_changes(f"{folder} is not of the same", folder_facts, facts, hint=REMAKE_HINT)
