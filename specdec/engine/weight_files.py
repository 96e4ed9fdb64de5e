"""Weight files of an engine folder: opened, and held against its config.json.

Needs no torch; loading.py takes weights into memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from specdec.checkpoint.inventory import find_rank_files
from specdec.engine.layout import (
    DRAFTER_NAME,
    PACKED_FOLDER,
    EngineConfig,
    describe_tensors,
    list_engine_files,
)
from specdec.errors import Problems, SpecDecError, shorten
from specdec.files.reading import parse_json
from specdec.files.tensor_file import DTYPES, TensorFile, TensorInfo, hash_header


def make_metadata(name: str, build_id: str, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Make a weight file's metadata: its name, its engine's id, and a sum of its header."""
    return {"part": name, "build_id": build_id, "header_sha256": hash_header(tensors)}


def find_engine_problems(folder: Path, config: EngineConfig) -> Problems:
    """Find what is wrong with an engine's weight files, each fault with a remedy."""
    model = config.checkpoint.model
    if model.tp_size > 1:
        _, problems = find_rank_files(folder, model.tp_size, f"tp_size={model.tp_size}")
        if problems:
            return problems
    problems = Problems()
    for name in list_engine_files(model, config.checkpoint.drafter):
        try:
            open_engine_file(folder, config, name)
        except SpecDecError as error:
            problems.add(error.message, error.hint)
    return problems


@dataclasses.dataclass(frozen=True)
class WeightFile:
    """A weight file of an engine, and its matrices that are packed, where there are any.

    replaced: the tensors that these stand for: the matrices, and the scales beside them.
    """

    plain: TensorFile
    packed: TensorFile | None
    replaced: Mapping[str, TensorInfo]


def open_engine_file(folder: Path, config: EngineConfig, name: str) -> WeightFile:
    """Open a weight file; raise SpecDecError unless it is whole, this one, and of this engine.

    Checked are the names, shapes and types of its tensors against config.json, its place among the
    ranks, and the sum of its header; for the tensors' own bytes there is --verify-hashes.
    """
    num_layers = config.checkpoint.model.num_hidden_layers
    file = open_part(folder, config, name)
    packed_file, replaced_tensors = open_packed_file(folder, config, name)
    if twice := sorted(replaced_tensors.keys() & file.tensors.keys()):
        raise SpecDecError(
            f"{file.path} has {twice[0]}, which {PACKED_FOLDER}/{name} has too",
            "the folder is a mixture of two: build the engine again",
        )
    tensors = {**file.tensors, **replaced_tensors}
    # Before the names of so many are listed.
    if name != DRAFTER_NAME and num_layers > len(tensors):
        raise SpecDecError(
            f"{file.path} holds {len(tensors)} tensors, config.json says {num_layers} layers",
            "make the engine again; config.json and the tensors must come from one run",
        )
    expected = describe_tensors(config, name, tensors)
    shapes = {tensor: info.shape for tensor, info in expected.items()}
    dtypes = {tensor: info.dtype for tensor, info in expected.items()}
    check_inventory(file.path, tensors, shapes, "engine", dtypes)
    return WeightFile(file, packed_file, replaced_tensors)


def open_part(folder: Path, config: EngineConfig, name: str) -> TensorFile:
    """Open a file; raise SpecDecError unless it is whole, of that name, and of this engine."""
    file = TensorFile(folder / name)
    metadata = file.metadata
    if metadata.get("build_id") != config.build_id:
        raise SpecDecError(
            f"{file.path} belongs to another engine than config.json: their build_id differ",
            "copy the whole folder from one place, or build the engine again",
        )
    if metadata.get("part") != name:
        raise SpecDecError(
            f"{file.path} was written as {shorten(metadata.get('part'))}: the files of an engine"
            " were mixed up",
            "copy the whole folder again, or build the engine again",
        )
    if metadata.get("header_sha256") != file.hash_header():
        raise SpecDecError(
            f"{file.path} has a header that is not the one that was written",
            "the file is damaged: copy it again, or build the engine again",
        )
    return file


def open_packed_file(
    folder: Path, config: EngineConfig, name: str
) -> tuple[TensorFile | None, dict[str, TensorInfo]]:
    """Open the packed matrices of a weight file, and list what they stand for; none: None, {}."""
    if config.packing is None:
        return None, {}
    file = open_part(folder, config, f"{PACKED_FOLDER}/{name}")
    if file.metadata.get("packing") != config.packing:
        raise SpecDecError(
            f"{file.path} was packed as {shorten(file.metadata.get('packing'))}, config.json says"
            f" {config.packing}",
            "copy the whole folder from one place, or build the engine again",
        )
    try:
        replaced_tensors = decode_tensors(file.metadata.get("replaced", ""))
    except ValueError:
        replaced_tensors = {}
    modules = {tensor.rpartition(".")[0] for tensor in file.tensors}
    is_right = file.tensors.keys() <= replaced_tensors.keys()
    if not is_right or {n.rpartition(".")[0] for n in replaced_tensors} != modules:
        raise SpecDecError(
            f"{file.path} does not say which tensors its matrices stand for",
            "the file is damaged: copy it again, or build the engine again",
        )
    return file, replaced_tensors


def encode_tensors(tensors: Mapping[str, TensorInfo]) -> str:
    """Encode types and shapes for a file's metadata."""
    entries = {name: [info.dtype, *info.shape] for name, info in sorted(tensors.items())}
    return json.dumps(entries, separators=(",", ":"))


def decode_tensors(text: str) -> dict[str, TensorInfo]:
    """Decode what `encode_tensors` encoded; raise ValueError where it did not."""
    entries = parse_json(text.encode())
    is_table = isinstance(entries, dict) and all(
        isinstance(entry, list) and len(entry) > 1 and entry[0] in DTYPES
        and all(type(size) is int and 0 < size < 2**31 for size in entry[1:])
        for entry in entries.values()
    )  # fmt: skip
    if not is_table:
        raise ValueError("no table of types and shapes")
    return {name: TensorInfo(dtype, tuple(shape)) for name, (dtype, *shape) in entries.items()}


def check_inventory(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    expected: Mapping[str, tuple[int, ...]],
    kind_of_folder: str,
    dtypes: Mapping[str, str] | None = None,
) -> None:
    """Raise SpecDecError that names every missing, unknown or different tensor of a file.

    expected: name -> shape; dtypes: name -> type, where that is to be checked, too.
    """
    missing_names = sorted(set(expected) - set(tensors))
    unknown_names = sorted(set(tensors) - set(expected))
    common_infos = [(name, tensors[name]) for name in sorted(expected) if name in tensors]
    misshapen = [
        f"{name} is {list(info.shape)}, expected {list(expected[name])}"
        for name, info in common_infos
        if info.shape != expected[name]
    ]
    mistyped = [
        f"{name} is {info.dtype}, expected {dtypes[name]}"
        for name, info in common_infos
        if dtypes is not None and info.dtype != dtypes[name]
    ]
    kinds = {
        "missing": missing_names, "unknown": unknown_names, "misshapen": misshapen,
        "of another type": mistyped,
    }  # fmt: skip
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}"
        for kind, names in kinds.items()
        if names
    ]
    if problems:
        raise SpecDecError(
            f"{path} does not hold the {kind_of_folder} that config.json describes: "
            + "; ".join(problems),
            f"make the {kind_of_folder} again; config.json and the tensors must come from one run",
        )
