"""Reads the golden cases and makes their input folders anew.

A golden file holds, for a model or `model+drafter`, cases of converter options with the config.json
and each rank's tensors as (dtype, shape, sha256) that NVIDIA's converters wrote. `sources/` tells
the input models: every tensor's values follow from its name alone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file as save_numpy

from specdec.files.casts import cast
from specdec.files.tensor_file import TensorFile, TensorInfo, write_tensor_file

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def read_cases() -> list[dict[str, Any]]:
    """Every golden case."""
    return [case for path in sorted(GOLDEN.glob("*.json")) for case in json.loads(path.read_text())]


def make_values(seed: str, name: str, shape: list[int], *, is_norm: bool) -> Any:
    """float32 values of a tensor: normal, scaled by 0.02, around 1 for norm weights."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))
    values = generator.standard_normal(tuple(shape), dtype=np.float32) * np.float32(0.02)
    return np.float32(1) + values if is_norm else values


def make_source(name: str, folder: Path) -> Path:
    """Write an input model's folder; every tensor is checked against its recorded sha256."""
    source = json.loads((GOLDEN / "sources" / f"{name}.json").read_text())
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(source["config"]))
    files: dict[str, dict[str, Any]] = {}
    for tensor, info in source["tensors"].items():
        origin = source["alias"].get(tensor, tensor)
        values = make_values(source["seed"], origin, info["shape"], is_norm=info["norm_weight"])
        array = np.ascontiguousarray(cast(values, "float32", info["dtype"]))
        assert hashlib.sha256(array.tobytes()).hexdigest() == info["sha256"], tensor
        files.setdefault(info["file"], {})[tensor] = array
    for filename, tensors in files.items():
        infos = {t: TensorInfo(source["tensors"][t]["dtype"], a.shape) for t, a in tensors.items()}
        write_tensor_file(folder / filename, infos, tensors.__getitem__, {"format": "pt"})
    if len(files) > 1:
        index = {"weight_map": {t: f for f, tensors in files.items() for t in tensors}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def summarize_rank(path: Path) -> dict[str, list[Any]]:
    """A rank file as the goldens tell it: name -> [dtype, shape, sha256]."""
    file = TensorFile(path)
    return {
        name: [info.dtype, list(info.shape), hashlib.sha256(file.read(name).tobytes()).hexdigest()]
        for name, info in file.tensors.items()
    }


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """The rank files of a checkpoint, as `summarize_rank` has each."""
    return [summarize_rank(path) for path in sorted(folder.glob("rank*.safetensors"))]


def read_tensors(path: Path) -> dict[str, Any]:
    """All tensors of a file, as stored."""
    file = TensorFile(path)
    return {name: file.read(name).copy() for name in file.tensors}


def rewrite(path: Path, tensors: dict[str, Any]) -> None:
    """Write tensors of plain numpy types into a safetensors file."""
    save_numpy(tensors, path, metadata={"format": "pt"})
