"""Rank files against config.json: names, shapes, types, scales, and the set of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.checkpoint.config import CheckpointConfig, read_checkpoint_config
from specdec.checkpoint.inventory import compare_tensors, describe_rank, find_rank_files
from specdec.errors import SpecDecError
from specdec.files.tensor_file import TensorFile, TensorInfo
from specdec.model.config import FLOAT_DTYPES


def check_contents(folder: Path, problems: list[str]) -> dict[str, Any] | None:
    """Append the faults of the contents; return their description, None where none can be read."""
    try:
        checkpoint = read_checkpoint_config(folder)
    except SpecDecError as error:
        problems.append(error.message)
        return None
    model = checkpoint.model
    ranks_text = f"tp_size {model.tp_size}"
    if model.pp_size > 1:
        ranks_text += f" x pp_size {model.pp_size}"
    paths, rank_problems = find_rank_files(folder, model.tp_size * model.pp_size, ranks_text)
    problems += [fact for fact, _ in rank_problems]
    num_tensors = 0
    for path in paths:
        try:
            file = TensorFile(path)
        except SpecDecError as error:
            problems.append(error.message)
            continue
        num_tensors += len(file.tensors)
        rank = int(path.stem.removeprefix("rank"))
        problems += [f"{path} {fact}" for fact in _check_rank(file, checkpoint, rank)]
    return {
        "architecture": checkpoint.raw["architecture"],
        "method": checkpoint.method.name if checkpoint.method else "plain",
        "dtype": model.dtype,
        "quantization": checkpoint.quantization.quant_algo,
        "tp_size": model.tp_size,
        "pp_size": model.pp_size,
        "num_tensors": num_tensors,
        "files": 1 + len(paths),
    }


def _check_rank(file: TensorFile, checkpoint: CheckpointConfig, rank: int) -> list[str]:
    num_layers = checkpoint.model.num_hidden_layers
    if num_layers > len(file.tensors) * checkpoint.model.pp_size:
        return [f"holds {len(file.tensors)} tensors, config.json says {num_layers} layers"]
    expected = _find_drafter_dtype(describe_rank(checkpoint, rank), file.tensors)
    comparison = compare_tensors(file.tensors, expected, checkpoint.quantization)
    return comparison.list_faults()


def _find_drafter_dtype(
    expected: dict[str, TensorInfo], stored: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    """Expect the drafter's tensors in their stored type, which config.json does not name."""
    drafter_names = [name for name in expected if not name.startswith(("transformer.", "lm_head."))]
    dtypes = {stored[name].dtype for name in drafter_names if name in stored}
    if len(dtypes) != 1 or not dtypes <= set(FLOAT_DTYPES):
        return expected
    (dtype,) = dtypes
    return expected | {
        name: dataclasses.replace(expected[name], dtype=dtype) for name in drafter_names
    }
