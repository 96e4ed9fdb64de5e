"""A checked build for TensorRT-LLM: its command, what the engine will record, what it takes."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from specdec.checkpoint.config import CheckpointConfig
from specdec.files.tensor_file import DTYPES, TensorFile, TensorInfo
from specdec.methods import find_mode
from specdec.model.config import ModelConfig
from specdec.trtllm.environment import BUILD_COMMAND
from specdec.trtllm.facts import Facts

from .record import Record

# Flags whose values an engine records that users are shown, as what became of their own.
SHOWN_FLAGS = (
    "max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_draft_len",
    "max_beam_width", "speculative_decoding_mode", "gemm_plugin", "tokens_per_block",
    "use_paged_context_fmha", "use_fp8_context_fmha", "gather_generation_logits",
)  # fmt: skip
ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}  # lines reach the log as they are printed


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRTPlan:
    """A checked build.

    given_flags: those that were typed. record: the values that the engine will have. files: the
    checkpoint's, one a rank. notes: what the user should know although nothing is wrong.
    """

    facts: Facts
    checkpoint: CheckpointConfig
    checkpoint_dir: Path
    output_dir: Path
    mode: str | None
    given_flags: dict[str, Any]
    record: Record
    files: list[TensorFile]
    notes: list[str] = dataclasses.field(default_factory=list)
    environment: dict[str, str] = dataclasses.field(default_factory=lambda: dict(ENVIRONMENT))

    @property
    def label(self) -> str:
        return self.facts.label

    @property
    def num_ranks(self) -> int:
        return self.checkpoint.model.tp_size * self.checkpoint.model.pp_size

    @property
    def gpus_per_node(self) -> int:
        count = (self.checkpoint.raw.get("mapping") or {}).get("gpus_per_node", 8)
        return count if isinstance(count, int) and count > 0 else 8

    @property
    def method(self) -> str:
        method = self.checkpoint.method or find_mode(self.mode)
        return method.name if method is not None else "plain"

    @property
    def weights_bytes(self) -> list[int]:
        return [sum(info.num_bytes for info in file.tensors.values()) for file in self.files]

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of the KV cache of one sequence of max_seq_len tokens, on one rank."""
        model, cache = self.checkpoint.model, self.checkpoint.quantization.kv_cache_quant_algo
        dtype = "uint8" if cache in ("FP8", "INT8") else model.dtype
        return count_cache_bytes(model, dtype) * int(self.record.values["max_seq_len"])

    def make_argv(self, checkpoint_dir: Path, output_dir: Path) -> list[str]:
        """Return trtllm-build's command line for these folders."""
        mode = ["--speculative_decoding_mode", self.mode] if self.mode else []
        return [
            BUILD_COMMAND, "--checkpoint_dir", str(checkpoint_dir), "--output_dir", str(output_dir),
            *mode, *list_words(self.given_flags),
        ]  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """Return what `--dry-run` and `--json` report."""
        argv = self.make_argv(self.checkpoint_dir, self.output_dir)
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        shell = " ".join([*variables, shlex.join(argv)])
        return {
            "engine_dir": str(self.output_dir), "method": self.method, "backend": "tensorrt-llm",
            "trtllm_version": self.label, "tp_size": self.checkpoint.model.tp_size,
            "pp_size": self.checkpoint.model.pp_size,
            "commands": [{"argv": argv, "shell": shell, "env": dict(self.environment)}],
            "engine_records": {name: self.record.values[name] for name in SHOWN_FLAGS},
            "weights_bytes": self.weights_bytes,
            "kv_cache_bytes_per_sequence": self.kv_cache_bytes, "notes": list(self.notes),
        }  # fmt: skip


def count_cache_bytes(model: ModelConfig, dtype: str) -> int:
    """Count the bytes of the KV cache that one token takes on one rank."""
    assert dtype in DTYPES
    shape = (2, model.num_hidden_layers // model.pp_size, model.get_num_kv_heads(), model.head_size)
    return TensorInfo(dtype, shape).num_bytes


def list_words(given_flags: dict[str, Any]) -> list[str]:
    """Return the words of a command line that give these values."""
    words: list[str] = []
    for name, value in given_flags.items():
        if name == "max_beam_width" and value == 1:
            continue
        words.append(f"--{name}")
        if value is True:
            continue
        words += map(str, value) if isinstance(value, list) else [str(value)]
    return words
