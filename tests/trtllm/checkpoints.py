"""Checkpoints for the TensorRT-LLM backend: every kind, line and number of ranks, made once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec.files.reading import Array, read_json, write_json
from specdec.files.tensor_file import TensorFile, TensorInfo, write_tensor_file
from specdec.model.quantization import FLOAT8, SCALES
from tests.conftest import make_drafter, make_eagle_drafter, make_llama, make_medusa_heads
from tests.engines import call

BEAMS, LENGTH = 3, 4
METHOD_MODES = {
    "plain": None, "redrafter": "explicit_draft_tokens", "medusa": "medusa",
    "eagle": "eagle", "draft_target": "draft_tokens_external", "lookahead": "lookahead_decoding",
}  # fmt: skip
DRAFT_LENGTHS = {"draft_target": 5, "lookahead": 83}


class CheckpointStore:
    """Converts a tiny Llama with each drafter when it is first asked for."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self.target = make_llama(parent, kv_heads=4)
        self.drafter = make_drafter(parent, exit_dim=96)
        self.heads = make_medusa_heads(parent)
        self.eagle = make_eagle_drafter(parent)

    def get(self, kind: str, label: str = "1.2", tp_size: int = 1) -> Path:
        """Return the checkpoint that an engine of a method is built from; do not change it."""
        folder = self.parent / f"{kind}-{label}-{tp_size}"
        if folder.exists():
            return folder
        words: dict[str, list[object]] = {
            "redrafter": [
                "--drafter-model-dir", self.drafter, "--redrafter-num-beams", BEAMS,
                "--redrafter-draft-len-per-beam", LENGTH,
            ],
            "medusa": ["--medusa-model-dir", self.heads],
            "eagle": ["--eagle-model-dir", self.eagle],
        }  # fmt: skip
        call(
            "convert", "--model-dir", self.target, "--output-dir", folder, "--tp-size", tp_size,
            "--trtllm-version", label, *words.get(kind, []),
        )  # fmt: skip
        return folder

    def copy(self, folder: Path, kind: str, label: str = "1.2", **config: Any) -> Path:
        """Return a checkpoint of one's own, with other keys in config.json; None removes one."""
        shutil.copytree(self.get(kind, label), folder)
        changed = {**read_json(folder / "config.json"), **config}
        kept = {key: value for key, value in changed.items() if value is not None}
        write_json(folder / "config.json", kept)
        return folder


def list_mode_flags(method: str) -> list[str]:
    """Return the flags that make a plain checkpoint an engine of a method."""
    if method not in DRAFT_LENGTHS:
        return []
    flags = ["--speculative-decoding-mode", str(METHOD_MODES[method])]
    flags += ["--max-draft-len", str(DRAFT_LENGTHS[method])]
    if method == "draft_target":
        flags += ["--use-paged-context-fmha", "enable"]
    return flags


def quantize_checkpoint(folder: Path, *, with_cache: bool, names: Sequence[str] = ()) -> None:
    """Make a checkpoint of one rank FP8, with numbers that nobody looks at.

    names: tensors to quantize besides the layers' linears, of modules that are then not excluded.
    """
    path = folder / "rank0.safetensors"
    file = TensorFile(path)
    linears = {n for n in file.tensors if n.startswith("transformer.layers.")
               and n.endswith(".weight") and len(file.tensors[n].shape) == 2}  # fmt: skip
    linears |= set(names)
    tensors, arrays = dict(file.tensors), {n: np.array(file.read(n)) for n in file.tensors}
    one: Array = np.ones(1, np.float32)
    for name in linears:
        tensors[name] = TensorInfo(FLOAT8, file.tensors[name].shape)
        arrays[name] = np.zeros(file.tensors[name].shape, np.uint8)
        added = [f"{name.removesuffix('weight')}{scale}" for scale in SCALES]
        if with_cache and ".qkv." in name:
            added.append(name.replace("qkv.weight", "kv_cache_scaling_factor"))
        for scale in added:
            tensors[scale], arrays[scale] = TensorInfo("float32", (1,)), one
    config = read_json(folder / "config.json")
    config["quantization"] |= {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8" if with_cache else None,
        "exclude_modules": [
            pattern
            for pattern in ("*lm_head", "*vocab_embedding", "drafter*")
            if f"{pattern.lstrip('*')}.weight" not in names
        ],
    }
    write_json(folder / "config.json", config)
    partial = folder / "new.safetensors"
    write_tensor_file(partial, tensors, lambda name: arrays[name])
    partial.replace(path)
