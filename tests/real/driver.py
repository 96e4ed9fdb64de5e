"""What TensorRT-LLM's runtime gives its networks in each step: packed rows, pages, masks."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.engines import call
from tests.real.network import Machine

MAX_BATCH, MAX_LENGTH, PAGE = 3, 192, 64
LIMITS = ("--max-batch-size", MAX_BATCH, "--max-input-len", 40)


@dataclass
class Row:
    """A request in a step: the new tokens, after `past` cached ones.

    A prompt sees itself causally. What a generation step reads has its depths and mask.
    """

    tokens: list[int]
    past: int
    slot: int = 0
    offsets: list[int] | None = None  # of a step of a tree: the depth of each token
    mask: Tensor | None = None  # [n, n], which tokens of the step each sees
    is_prompt: bool = True
    num_logits: int = 1  # from the end

    @property
    def pages(self) -> Tensor:
        """Page numbers of keys and of values, [2, pages]: not in order, so that order shows."""
        count = MAX_LENGTH // PAGE
        return torch.tensor([
            [(self.slot * 2 + kind) * count + (i + 1) % count for i in range(count)]
            for kind in range(2)
        ], dtype=torch.int32)  # fmt: skip


def pack_mask(mask: Tensor, most: int) -> Tensor:
    """[n, n] to words of 32 bits, [n, ceil(most / 32)]."""
    words = torch.zeros(len(mask), -(-most // 32), dtype=torch.int64)
    for column in range(mask.shape[1]):
        words[:, column // 32] |= mask[:, column].long() << column % 32
    return words.where(words < 2**31, words - 2**32).int()


def make_inputs(shapes: dict[str, Any], rows: list[Row], most: int = 1) -> dict[str, Tensor]:
    """The inputs that all networks have, for rows with the prompts first.

    most: tokens of a step at most, which the masks' width is made for.
    """
    layers = shapes["host_kv_cache_pool_mapping"][0]
    ints: dict[str, Any] = {
        "input_ids": [token for row in rows for token in row.tokens],
        "position_ids": [
            row.past + at for row in rows for at in row.offsets or range(len(row.tokens))
        ],
        "sequence_length": [row.past + len(row.tokens) for row in rows],
        "host_past_key_value_lengths": [row.past + len(row.tokens) for row in rows],
        "context_lengths": [len(row.tokens) if row.is_prompt else row.past for row in rows],
        "host_request_types": [0 if row.is_prompt else 1 for row in rows],
        "host_kv_cache_pool_mapping": [0] * layers,
        "host_max_attention_window_sizes": [MAX_LENGTH] * layers,
        "host_sink_token_length": [0],
    }
    ints["host_context_lengths"] = ints["context_lengths"]
    ends = torch.tensor([len(row.tokens) for row in rows]).cumsum(0)
    ints["last_token_ids"] = torch.cat([
        end - torch.arange(row.num_logits).flip(0) for row, end in zip(rows, ends, strict=True)
    ])  # fmt: skip
    pages = torch.stack([row.pages for row in rows])[None]
    ints |= {"kv_cache_block_offsets": pages, "host_kv_cache_block_offsets": pages,
             "cache_indirection": torch.zeros(len(rows), 1, MAX_LENGTH)}  # fmt: skip
    if "spec_decoding_packed_mask" in shapes:
        drafted = [row for row in rows if not row.is_prompt]
        longest = max([len(row.tokens) for row in drafted], default=1)
        ints["spec_decoding_generation_lengths"] = [len(row.tokens) for row in drafted]
        ints["spec_decoding_position_offsets"] = torch.tensor([
            [*row.offsets, *[0] * (longest - len(row.offsets))] for row in drafted
            if row.offsets
        ]).reshape(len(drafted), longest)  # fmt: skip
        ints["spec_decoding_packed_mask"] = torch.cat([
            torch.zeros(0, -(-most // 32), dtype=torch.int),
            *[pack_mask(row.mask, most) for row in drafted if row.mask is not None],
        ])  # fmt: skip
    found = {name: torch.as_tensor(value).int() for name, value in ints.items()}
    for name in ("host_runtime_perf_knobs", "all_reduce_workspace", "host_kv_cache_pool_pointers"):
        if name in shapes:
            found[name] = torch.zeros(shapes[name], dtype=torch.int64)
    return {name: value for name, value in found.items() if name in shapes}


def plan_build(checkpoint: Path, *flags: object) -> list[str]:
    """Return the command line that specdec-build makes of a checkpoint."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        call("build", "--backend", "tensorrt-llm", "--trtllm-version", "0.14", "--checkpoint-dir",
             checkpoint, "--output-dir", checkpoint.with_name("engine"), "--dry-run", "--force",
             "--json", *LIMITS, *flags)  # fmt: skip
    (command,) = json.loads(printed.getvalue())["commands"]
    return command["argv"]


@dataclass
class Network:
    """The networks of a checkpoint's ranks."""

    machine: Machine
    argv: list[str]
    most: int = 1
    shapes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.number, self.shapes = self.machine.call("build", self.argv)

    def run(self, rows: list[Row], **more: Tensor) -> dict[str, Tensor]:
        """Compute a step on all ranks; what they return must be equal."""
        inputs = make_inputs(self.shapes, rows, self.most) | more
        first, *others = self.machine.call("call", self.number, "run", inputs)
        for other in others:
            for name, value in first.items():
                assert torch.equal(value, other[name]), name
        return first

    def accept(self, row: Row, kept: list[int]) -> None:
        """Let a step's accepted tokens follow the row's past in the cache."""
        self.machine.call("call", self.number, "move", row.pages, row.past, kept)
