"""The decoder: executes a checkpoint's own tensors, one step over any tree of tokens.

Legend: B rows in the step, T tokens per row, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from subprocess import SubprocessError

import numpy as np
import torch
from torch import Tensor

from specdec.engine.blocks import BlockMatrix
from specdec.engine.graphs import StepGraphs
from specdec.engine.group import Group
from specdec.engine.integers import (
    IntegerMatrix,
    lay_out,
    take_matrix,
    take_tensor,
)
from specdec.engine.kv_cache import POSITION_BLOCK, KVCache
from specdec.engine.layers import Norm, cap
from specdec.engine.linear import Linear, can_prepack
from specdec.engine.linear_states import LinearStates
from specdec.engine.module_maker import InputTable, ModuleMaker, Table
from specdec.engine.native import NativeKernels
from specdec.engine.native_layers import KernelLayers, NativeLayers, choose_native
from specdec.engine.native_matrices import KernelMatrix, Weight
from specdec.engine.native_models import PackedLayers
from specdec.engine.rotary import RotaryTable, make_tables
from specdec.engine.step import Step
from specdec.engine.torch_layers import TorchLayers, find_past
from specdec.engine.transfers import to_device
from specdec.engine.tree import IntArray
from specdec.errors import SpecDecError, summarize
from specdec.files.torch_tensors import TORCH_DTYPES
from specdec.model.config import ModelConfig
from specdec.model.tensors import (
    HEAD_BIAS,
)
from specdec.system import logs

logger = logs.get_logger(__name__)

# Most tokens of a row in a pass over prompts, which bounds the memory of its mask and scores.
MAX_CHUNK_TOKENS = 512
# Most tokens of a row in a native pass over prompts: with 64 it computes as verify steps do, to the
# last bit.
NATIVE_CHUNK_TOKENS = 64
# Most tokens of all rows of a native pass over prompts. More make it no faster: reading the weights
# takes a small part of its time.
NATIVE_PASS_TOKENS = 512
# Most tokens of a row in a native step: its attention compares all of them with one another.
MAX_NATIVE_TOKENS = 256


class Decoder:
    """A target of any family; weights come under the names of `list_engine_tensors`.

    head: another decoder's, which this one has too; the weights' own if None. prepack: lay weights
    out for a CPU, and on a CUDA device run the layers by fused kernels, where either is possible.

    For a model that is split over ranks it is one rank's part. All ranks of the group make the same
    calls; hidden states are whole on every rank, logits on rank 0.
    """

    cache_class = KVCache

    def __init__(
        self,
        model: ModelConfig,
        weights: Mapping[str, Weight],
        *,
        num_positions: int,
        device: torch.device,
        prepack: bool = True,
        kernels: NativeKernels | None = None,
        group: Group | None = None,
        head: Linear | None = None,
    ) -> None:
        assert model.tp_size == (group.size if group else 1)
        self.model = model
        self.group = group
        self.rank = group.rank if group else 0
        self.device = device
        self.num_positions = num_positions
        # Layers whose outputs are kept, and those of the last step side by side, [B, T, n * D].
        self.observed_layers: tuple[int, ...] = ()
        self.observed_outputs: Tensor | None = None
        self.recording_layers: TorchLayers | None = None  # that every step goes through, if any
        self.dtype = TORCH_DTYPES[model.dtype]
        self.kernels = kernels
        is_asked, prepack = prepack, prepack and can_prepack(self.dtype, device)
        self.is_prepacked = prepack

        embedding = take_matrix(weights, "transformer.vocab_embedding")
        assert not isinstance(embedding, IntegerMatrix)
        self.embedding: Table = embedding
        self.position_embedding: Tensor | None = None
        self.rotary: RotaryTable | None = None
        local_rotary: RotaryTable | None = None
        if model.arithmetic.positions == "learned":
            name = "transformer.position_embedding.weight"
            self.position_embedding = take_tensor(weights, name)
        else:
            tables = _make_used_tables(model, num_positions, self.dtype, device)
            self.rotary, local_rotary = tables
        self.embedding_scale = compute_embedding_scale(model)
        maker = ModuleMaker(
            model=model, weights=weights, rank=self.rank, tables=(self.rotary, local_rotary),
            prepack=prepack, kernels=kernels,
        )  # fmt: skip
        self.stack = maker.make_stack(group)
        self.layer_inputs = maker.make_layer_inputs()
        fused = find_fused(device) if is_asked and device.type == "cuda" else None
        self.is_fused = fused is not None  # whether layers run by the kernels of fused.py
        self._torch = (fused or TorchLayers)(self.stack)
        self._native = choose_native(self.stack, kernels) if kernels is not None else None
        self.lm_head = self._make_head(weights, maker) if head is None else head

    def _make_head(self, weights: Mapping[str, Weight], maker: ModuleMaker) -> Linear:
        """Make the linear of logits, whose matrix may be the embedding."""
        if not self.model.share_embedding_table:
            return maker.make_linear("lm_head")
        bias = take_tensor(weights, HEAD_BIAS) if self.model.arithmetic.head_bias else None
        rows = cut_head(self.embedding, self.model, self.rank)
        return lay_out(rows, bias, prepack=self.is_prepacked, kernels=self.kernels)

    @property
    def graphs(self) -> StepGraphs | None:
        """Recorded steps, on a device that has graphs."""
        return self._torch.graphs

    @graphs.setter
    def graphs(self, graphs: StepGraphs | None) -> None:
        self._torch.graphs = graphs

    def make_cache(self, num_rows: int, num_positions: int) -> KVCache:
        """Allocate a cache of `num_positions` a row, rounded up to whole blocks."""
        blocks, states = -(-num_positions // POSITION_BLOCK), None
        model, heads = self.model, list[tuple[int, int]]()
        if model.recurrence is not None:
            sizes = model.recurrence.split(model.tp_size)
            states = LinearStates(sizes, model.num_recurrent, num_rows, self.dtype, self.device)
        if model.layer_sizes is not None:
            resized = [model.resize(layer) for layer in model.attending_layers]
            heads = [(layer.get_num_kv_heads(), layer.head_size) for layer in resized]
        return self.cache_class(
            num_layers=len(model.attending_layers),
            num_rows=num_rows,
            num_heads=model.get_num_kv_heads(),
            num_positions=blocks * POSITION_BLOCK,
            head_size=model.head_size,
            dtype=self.dtype,
            device=self.device,
            lender=self.graphs or self.kernels,
            states=states,
            heads=heads,
        )

    def start_row(self, cache: KVCache, row: int, prompt_len: int) -> None:
        """Give a cache row to a request whose prompt has so many tokens.

        Decides which rotary table the request has; a prefix that the row holds from another request
        is dropped where it was rotated by another table.
        """
        start = self.rotary.find_start(prompt_len) if self.rotary else 0
        if start != cache.rotary_starts[row]:
            cache.copy_prefix(row, row, 0)
        cache.rotary_starts[row] = start

    @property
    def max_chunk_tokens(self) -> int:
        """The most prompt tokens that a row of a step should have."""
        return MAX_CHUNK_TOKENS if self.kernels is None else NATIVE_CHUNK_TOKENS

    @property
    def max_joined_tokens(self) -> int | None:
        """The most prompt tokens of a step whose rows may go on in each other; None where not.

        Attention by torch copies a row's keys for each part of its text.
        """
        return None if self.kernels is None else NATIVE_PASS_TOKENS

    def count_experts(self) -> tuple[float, ...]:
        """Count steps so far, their tokens, and the experts that a layer read for them, on average.

        Nothing where there are no experts.
        """
        if self.model.experts is None:
            return ()
        counters = [
            layer.experts.counters for layer in self.stack.layers if layer.experts is not None
        ]
        return tuple(np.mean(counters, axis=0).tolist())

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return input embeddings, [..., D]."""
        return self._embed(tokens, positions)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits of hidden states: [..., D] -> [..., V]."""
        logits = self.lm_head(hidden)
        if self.group is not None:
            # Where the vocabulary does not divide, the last rank's rows end in padding.
            logits = self.group.gather(logits)[..., : self.model.vocab_size]
        scale, limit = self.model.output_multiplier_scale, self.model.final_logit_softcapping
        if limit is None:
            return logits if scale == 1 else logits * scale
        if self.kernels is not None:
            return self.kernels.cap_logits(logits.contiguous(), scale, limit)
        return cap(logits.float() * scale, limit).to(logits.dtype)

    def find_best(self, logits: Tensor) -> IntArray | None:
        """Find the likeliest tokens of logits [..., V] by the kernels; None where these do not."""
        kernels = self.kernels
        if kernels is None or logits.dtype is not kernels.dtype or not logits.is_contiguous():
            return None
        return kernels.find_greatest(logits)

    @property
    def separate_layers(self) -> TorchLayers | KernelLayers:
        """The way through the layers in which each part of one is computed by a call of its own."""
        if isinstance(self._native, NativeLayers):
            return KernelLayers(self.stack, self._native.kernels)
        return self._torch if self._native is None else self._native

    @property
    def packed_layers(self) -> PackedLayers | None:
        """All layers as one native call takes them; None where they go another way."""
        if self.recording_layers is None and isinstance(self._native, NativeLayers):
            return self._native.packed
        return None

    def forward(self, step: Step, cache: KVCache, tokens: Tensor | None = None) -> Tensor:
        """Run a step, write its keys and values, return the normed last hidden state [B, T, D].

        tokens: [B, T] on the device, instead of the step's, where the host does not know them yet.
        """
        self._check_lengths(step, cache)
        if tokens is None:
            tokens = to_device(step.tokens, self.device)
        positions = None
        if self.position_embedding is not None:
            positions = to_device(step.positions, self.device)
        x = self._embed(tokens, positions)
        layers, options = self._choose_layers(step), dict[str, Tensor]()
        if self.layer_inputs is not None:
            options["inputs"] = self._read_layer_inputs(self.layer_inputs, x, tokens)
        normed, self.observed_outputs = layers.run(
            x, step, cache, self.observed_layers, is_normed=True, **options
        )
        return normed

    def _read_layer_inputs(self, inputs: InputTable, x: Tensor, tokens: Tensor) -> Tensor:
        """Compute each layer's own numbers of tokens, [B, T, L, P].

        They are the token's row of a table, and a projection of its embedding x.
        """
        size = len(inputs.norm.weight)
        scale = float(torch.tensor(size**0.5, dtype=self.dtype))
        looked_up = self.read_rows(inputs.table, tokens) * scale
        projected = inputs.proj(x.contiguous()) * self.model.hidden_size**-0.5
        projected = self.norm(projected.view(*tokens.shape, -1, size), inputs.norm)
        summed: Tensor = (projected + looked_up.view(projected.shape)) * 2.0**-0.5
        return summed

    def run_layers(
        self, x: Tensor, step: Step, cache: KVCache, first_input: Tensor | None = None
    ) -> Tensor:
        """Run the layers over [B, T, D], write keys and values; the result is not normed.

        first_input: what the first layer's attention reads instead of its normed input.
        """
        layers = self._choose_layers(step)
        x, self.observed_outputs = layers.run(x, step, cache, self.observed_layers, first_input)
        return x

    def _choose_layers(self, step: Step) -> TorchLayers | KernelLayers | NativeLayers:
        if self.recording_layers is not None:
            return self.recording_layers
        is_long = step.tokens.shape[1] > MAX_NATIVE_TOKENS
        return self._native if self._native is not None and not is_long else self._torch

    def _embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        x = self._look_up(self.embedding, tokens)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        if self.position_embedding is not None:
            assert positions is not None
            # Drafts may run past the last position; what is beyond it is never emitted.
            last_position = self.model.max_position_embeddings - 1
            x = x + self._look_up(self.position_embedding, positions.clamp(max=last_position))
        return self.stack.sum(x) if self.model.use_parallel_embedding else x

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Return the norm of [..., D], outside of the layers."""
        return norm(x) if self.kernels is None else self.kernels.norm(x.contiguous(), norm)

    def read_rows(self, table: Table, indices: Tensor) -> Tensor:
        """Read rows [..., D] of a table."""
        if isinstance(table, KernelMatrix):
            return table.look_up(indices)
        if isinstance(table, BlockMatrix):
            return table.look_up(indices, self.kernels).to(self.dtype)
        return torch.embedding(table, indices)

    def _look_up(self, table: Table, indices: Tensor) -> Tensor:
        """Read rows [..., D] of a table; zeros for values of a split one that other ranks hold.

        The sum over the ranks is then the row itself, to the last bit.
        """
        if self.group is None or not self.model.use_parallel_embedding:
            return self.read_rows(table, indices)
        height, width = table.shape
        if self.model.embedding_sharding_dim == 1:
            num_columns_before = self.rank * width
            row_values = self.read_rows(table, indices)
            return torch.nn.functional.pad(
                row_values,
                (num_columns_before, self.model.hidden_size - num_columns_before - width),
            )
        local_indices = indices - self.rank * height
        is_elsewhere = (local_indices < 0) | (local_indices >= height)
        row_values = self.read_rows(table, local_indices.clamp(0, height - 1))
        return row_values.masked_fill(is_elsewhere[..., None], 0.0)

    def _check_lengths(self, step: Step, cache: KVCache) -> None:
        """Raise SpecDecError for a sequence that has outgrown its rotary table."""
        switch = self.rotary.switch_len if self.rotary else None
        if switch is None:
            return
        is_short = cache.rotary_starts[step.rows] == 0
        past = find_past(step, cache)
        if (is_short & (past >= switch)).any():
            raise SpecDecError(
                f"a sequence of more than {switch} tokens began with a prompt of fewer: longrope"
                " scaling changes all keys there",
                "ask for fewer tokens, or give a longer prompt",
            )


def _make_used_tables(
    model: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[RotaryTable | None, RotaryTable | None]:
    """Make the tables of rotations; none for a model whose layers rotate nothing."""
    if len(model.arithmetic.layers_without_positions) == model.num_hidden_layers:
        return None, None
    return make_tables(model, num_positions, dtype, device)


def compute_embedding_scale(model: ModelConfig) -> float:
    """Return the factor of embeddings, rounded to the model's type as the family was trained."""
    scale = model.embedding_multiplier
    if model.arithmetic.scales_embedding:
        scale *= float(torch.tensor(model.hidden_size**0.5, dtype=TORCH_DTYPES[model.dtype]))
    return scale


@functools.cache
def find_fused(device: torch.device) -> type[TorchLayers] | None:
    """Return the class of fused layers; None, with a warning, where a device cannot run them."""
    try:
        from specdec.engine.fused import FusedLayers, gate

        with torch.cuda.device(device):
            gate(torch.zeros(2, device=device), "silu")
    # Errors of Triton without a compiler of C, without its headers, without the driver's library.
    except (ImportError, OSError, RuntimeError, AssertionError, SubprocessError) as error:
        logger.warning(
            "fused kernels: %s; torch's own operators run in their place, slower: install triton,"
            " gcc and Python's headers", summarize(error),
        )  # fmt: skip
        return None
    return FusedLayers


def cut_head(embedding: Table, model: ModelConfig, rank: int) -> Table:
    """Return a rank's rows of a head that is the embedding; zeros beyond the vocabulary."""
    if model.tp_size == 1 or model.use_parallel_embedding:
        return embedding
    height = -(-model.vocab_size // model.tp_size)
    assert not isinstance(embedding, KernelMatrix), "it is packed where the head is all of it"
    if isinstance(embedding, BlockMatrix):
        return embedding.take_rows(rank * height, height)
    rows = embedding[rank * height : (rank + 1) * height]
    return torch.nn.functional.pad(rows, (0, 0, 0, height - len(rows)))
