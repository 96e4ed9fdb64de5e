"""A target that is networks: the part of a `Decoder` that the loop and drafters deal with.

Legend: B rows in the step, T tokens per row, S cache positions, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.engine.decoder import MAX_CHUNK_TOKENS, Decoder
from specdec.engine.graphs import StepGraphs
from specdec.engine.group import Group
from specdec.engine.kv_cache import KVCache
from specdec.engine.linear import Linear
from specdec.engine.rotary import RotaryTable
from specdec.engine.step import Step
from specdec.engine.torch_layers import build_full_mask, find_lines, find_past
from specdec.engine.transfers import to_device
from specdec.engine.tree import IntArray
from specdec.errors import SpecDecError
from specdec.files.torch_tensors import TORCH_DTYPES
from specdec.model.config import ModelConfig
from specdec.trt.network import Sizes
from specdec.trt.runtime import EngineRunner
from specdec.trt.target import list_masks


def run_rows(
    runner: EngineRunner, inputs: Mapping[str, Tensor], max_rows: int
) -> dict[str, Tensor]:
    """Run a network whose inputs have a row each, at most so many rows at a time."""
    size = len(next(iter(inputs.values())))
    return _join([
        runner.run({
            name: tensor[start : start + max_rows].contiguous() for name, tensor in inputs.items()
        })
        for start in range(0, size, max_rows)
    ])  # fmt: skip


def _join(row_outputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the outputs of some rows after others."""
    if len(row_outputs) == 1:
        return row_outputs[0]
    return {name: torch.cat([outputs[name] for outputs in row_outputs]) for name in row_outputs[0]}


class NetworkDecoder(Decoder):
    """`Decoder` whose layers and head are networks, and none of torch's."""

    graphs: StepGraphs | None = None  # TensorRT records its own

    def __init__(  # the base class's would make layers
        self, model: ModelConfig, body: EngineRunner, head: EngineRunner, *, sizes: Sizes,
        num_positions: int, device: torch.device, group: Group | None = None,
    ) -> None:  # fmt: skip
        """body, head: of the networks that `write_target` and `write_head` write."""
        self.model, self.device, self.sizes = model, device, sizes
        self.num_positions, self.dtype = num_positions, TORCH_DTYPES[model.dtype]
        self.group, self.rank = group, group.rank if group else 0
        self.kernels, self.is_prepacked, self.is_fused = None, False, False
        self.observed_layers, self.observed_outputs = (), None
        self.lm_head = Linear(torch.empty(0, 0), prepack=False)  # in the head's network
        self.rotary = None
        if model.arithmetic.positions == "rotary":
            # Lines are places in the tables of the network, which has as many positions.
            self.rotary = RotaryTable(model, sizes.positions, self.dtype, torch.device("cpu"))
        self._body, self._head = body, head
        self._masks = list_masks(model)

    @property
    def max_chunk_tokens(self) -> int:
        return min(MAX_CHUNK_TOKENS, self.sizes.tokens)

    def make_cache(self, num_rows: int, num_positions: int) -> KVCache:
        """Allocate a cache of so many rows, each of as many positions as the network has."""
        if num_positions > self.sizes.positions:
            raise SpecDecError(
                f"the text and its drafts may take {num_positions} positions, the engine's caches"
                f" have {self.sizes.positions}",
                "ask for fewer tokens, or build the engine with a larger --max-seq-len",
            )
        return super().make_cache(num_rows, self.sizes.positions)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] of hidden states [..., D]."""
        states = hidden.reshape(-1, hidden.shape[-1])
        logits = run_rows(self._head, {"states": states}, self.sizes.states)["logits"]
        # Where the vocabulary does not divide, the last rank's rows end in padding.
        return logits.view(*hidden.shape[:-1], -1)[..., : self.model.vocab_size]

    def forward(self, step: Step, cache: KVCache, tokens: Tensor | None = None) -> Tensor:
        """Run a step, write its keys and values, return the normed last hidden state [B, T, D]."""
        if tokens is None:
            tokens = to_device(step.tokens, self.device)
        outputs = self.run_step(step, cache, {"tokens": tokens})
        self.observed_outputs = outputs.get("layers")
        return outputs["hidden_states"]

    def run_step(
        self, step: Step, cache: KVCache, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Run the layers' network over a step; what it returns besides caches.

        inputs: [B, T, ...], what the network reads of each token besides its place.
        """
        self._check_lengths(step, cache)
        past, (num_tokens, num_new) = find_past(step, cache), step.tree_mask.shape[1:]
        if num_tokens > self.sizes.tokens:
            raise SpecDecError(
                f"a step has {num_tokens} tokens of a row, the engine was built for"
                f" {self.sizes.tokens}",
                "draft fewer tokens, or build with a larger --max-num-tokens",
            )
        lines = find_lines(step, cache)
        if self.rotary is None:
            lines = lines.clip(max=self.model.max_position_embeddings - 1)
        ends = (past + num_new).astype(np.int32)
        step_inputs = {
            **inputs, "positions": to_device(lines, self.device),
            "write_indices": to_device(ends - num_tokens, self.device),
        }  # fmt: skip
        if "lengths" in self._body.input_names:
            step_inputs["lengths"] = to_device(ends, self.device)
        for name, window in self._masks.items():
            mask = build_full_mask(
                past, step.tree_mask, step.mask_positions, self.sizes.positions, window
            )
            step_inputs[name] = to_device(mask, self.device)
        span_outputs = []
        for first_row, end_row in _list_spans(step.rows, self.sizes.rows):
            row = int(step.rows[first_row])
            blocks = cache.blocks[:, :, row : row + end_row - first_row]
            key = blocks.data_ptr(), blocks.shape, blocks.stride()
            self._body.bind_caches(key, functools.partial(_list_caches, blocks))
            span_outputs.append(self._body.run(
                {
                    name: tensor[first_row:end_row].contiguous()
                    for name, tensor in step_inputs.items()
                }
            ))  # fmt: skip
        return _join(span_outputs)

    @property
    def runners(self) -> list[EngineRunner]:
        """Runners of the decoder's networks."""
        return [self._body, self._head]


def _list_caches(blocks: Tensor) -> dict[str, Tensor]:
    """Return each layer's keys and values of [layers, 2, B, N, S, H] as the network's inputs."""
    return {
        f"past_{kind}_{layer}": rows
        for layer, keys_and_values in enumerate(blocks)
        for kind, rows in zip(("key", "value"), keys_and_values, strict=True)
    }


def _list_spans(rows: IntArray, max_rows: int) -> Iterator[tuple[int, int]]:
    """List where in a step rows begin and end that lie one after the other in the cache."""
    assert (np.diff(rows) > 0).all()  # a row is once in a step
    span_start = 0
    for index in range(1, len(rows) + 1):
        if (
            index == len(rows)
            or rows[index] != rows[index - 1] + 1
            or index - span_start == max_rows
        ):
            yield span_start, index
            span_start = index
