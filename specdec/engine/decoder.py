"""The decoder: executes a checkpoint's own tensors, one step over any tree of tokens.

Legend: B rows in the step, T tokens per row, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from subprocess import SubprocessError

import numpy as np
import torch
from torch import Tensor

from specdec.engine.blocks import BlockMatrix
from specdec.engine.delta_net import DeltaNet
from specdec.engine.experts import ExpertLayer, Router
from specdec.engine.float8 import Float8Linear
from specdec.engine.graphs import StepGraphs
from specdec.engine.group import Group
from specdec.engine.integers import (
    IntegerMatrix,
    find_tensor,
    lay_out,
    list_experts,
    take_matrix,
    take_tensor,
)
from specdec.engine.kv_cache import POSITION_BLOCK, KVCache
from specdec.engine.layers import Attention, CutGate, Norm, cap, name_activation
from specdec.engine.linear import Linear, can_prepack
from specdec.engine.linear_states import LinearStates
from specdec.engine.native import NativeKernels
from specdec.engine.native_layers import KernelLayers, NativeLayers, choose_native
from specdec.engine.native_matrices import KernelMatrix, Weight
from specdec.engine.rotary import RotaryTable, make_tables
from specdec.engine.short_conv import ShortConv
from specdec.engine.step import Step
from specdec.engine.torch_layers import Layer, Stack, TorchLayers, find_past
from specdec.engine.transfers import to_device
from specdec.errors import SpecDecError, summarize
from specdec.files.torch_tensors import TORCH_DTYPES
from specdec.model.config import ModelConfig, Recurrence
from specdec.model.linear_attention import LinearAttention
from specdec.model.quantization import SCALES
from specdec.model.short_conv import ShortConvSizes
from specdec.model.tensors import (
    CONV_MODULE,
    DENSE_MODULE,
    HEAD_BIAS,
    LINEAR_MODULE,
    ROUTER,
    ROUTER_BIAS,
    SCORE_BIAS,
)
from specdec.system import logs

logger = logs.get_logger(__name__)

Table = Tensor | BlockMatrix | KernelMatrix  # whose rows are looked up

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
            self.rotary, local_rotary = make_tables(model, num_positions, self.dtype, device)
        self.embedding_scale = compute_embedding_scale(model)
        maker = _ModuleMaker(
            model=model, weights=weights, rank=self.rank, tables=(self.rotary, local_rotary),
            prepack=prepack, kernels=kernels,
        )  # fmt: skip
        self.stack = maker.make_stack(group)
        fused = find_fused(device) if is_asked and device.type == "cuda" else None
        self.is_fused = fused is not None  # whether layers run by the kernels of fused.py
        self._torch = (fused or TorchLayers)(self.stack)
        self._native = choose_native(self.stack, kernels) if kernels is not None else None
        self.lm_head = self._make_head(weights, maker) if head is None else head

    def _make_head(self, weights: Mapping[str, Weight], maker: _ModuleMaker) -> Linear:
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
        num_recurrent = self.model.num_recurrent
        if self.model.recurrence is not None:
            sizes = self.model.recurrence.split(self.model.tp_size)
            states = LinearStates(sizes, num_recurrent, num_rows, self.dtype, self.device)
        return self.cache_class(
            num_layers=self.model.num_hidden_layers - num_recurrent,
            num_rows=num_rows,
            num_heads=self.model.get_num_kv_heads(),
            num_positions=blocks * POSITION_BLOCK,
            head_size=self.model.head_size,
            dtype=self.dtype,
            device=self.device,
            lender=self.graphs or self.kernels,
            states=states,
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
        layers = self._choose_layers(step)
        normed, self.observed_outputs = layers.run(
            x, step, cache, self.observed_layers, is_normed=True
        )
        return normed

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
    # What Triton raises without a compiler of C, without its headers, without the driver's library.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ModuleMaker:
    """Maker of a decoder's modules from its weights, laid out for the machine.

    tables: of rotations, the second one that of layers with a window.
    """

    model: ModelConfig
    weights: Mapping[str, Weight]
    rank: int
    tables: tuple[RotaryTable | None, RotaryTable | None]
    prepack: bool
    kernels: NativeKernels | None

    def make_linear(self, name: str, *, is_summed: bool = False) -> Linear:
        """Make a linear; is_summed: its products are summed over the ranks, the first adds bias."""
        weights, prepack, kernels = self.weights, self.prepack, self.kernels
        weight = weights[name + ".weight"]
        bias = None if is_summed and self.rank else find_tensor(weights, name + ".bias")
        if isinstance(weight, Tensor) and weight.dtype is torch.float8_e4m3fn:
            weight_scales, input_scale = (take_tensor(weights, f"{name}.{kind}") for kind in SCALES)
            return Float8Linear(weight, weight_scales, input_scale, bias)
        return lay_out(take_matrix(weights, name), bias, prepack=prepack, kernels=kernels)

    def make_norm(self, name: str) -> Norm:
        has_bias = self.model.arithmetic.norm == "layer"
        bias = take_tensor(self.weights, name + ".bias") if has_bias else None
        arithmetic = self.model.arithmetic
        return Norm(
            take_tensor(self.weights, name + ".weight"), bias, self.model.norm_epsilon,
            arithmetic.norm_offset,
        )  # fmt: skip

    def make_stack(self, group: Group | None) -> Stack:
        """Make all layers of the rank."""
        model, arithmetic = self.model, self.model.arithmetic
        return Stack(
            layers=[self.make_layer(index) for index in range(model.num_hidden_layers)],
            final_norm=None if arithmetic.is_post_norm else self.make_norm("transformer.ln_f"),
            num_heads=model.num_attention_heads // model.tp_size,
            num_kv_heads=model.get_num_kv_heads(),
            head_size=model.head_size,
            activation=name_activation(model),
            is_gated=arithmetic.mlp != "plain",
            group=group,
            share=model.residual_multiplier,
            has_gates=arithmetic.gates_attention,
        )

    def make_layer(self, index: int) -> Layer:
        prefix, arithmetic = f"transformer.layers.{index}.", self.model.arithmetic
        post_norm = None if arithmetic.is_parallel else self.make_norm(prefix + "post_layernorm")
        dense_norm = down_norm = None
        if arithmetic.inner_norms:
            dense_norm, post_norm = post_norm, self.make_norm(prefix + "pre_feedforward_layernorm")
            down_norm = self.make_norm(prefix + "post_feedforward_layernorm")
        up, down = "mlp.fc" if arithmetic.mlp == "plain" else "mlp.gate_up", "mlp.proj"
        if self.model.experts is not None:
            up, down = f"{DENSE_MODULE}fc", f"{DENSE_MODULE}proj"
        has_experts = self.model.get_experts(index) is not None
        recurrence, mixer, product = self._make_recurrence(index, prefix)
        return Layer(
            attention=self.make_attention(
                index, prefix + "attention.", has_norms=recurrence is None
            ),
            input_norm=self.make_norm(prefix + "input_layernorm"),
            qkv=self.make_linear(prefix + mixer + product),
            dense=self.make_linear(f"{prefix}{mixer}dense", is_summed=True),
            recurrence=recurrence,
            post_norm=post_norm,
            up=None if has_experts else self.make_linear(prefix + up),
            down=None if has_experts else self.make_linear(prefix + down, is_summed=True),
            experts=self._make_experts(prefix) if has_experts else None,
            dense_norm=dense_norm,
            down_norm=down_norm,
        )

    def _make_recurrence(
        self, index: int, prefix: str
    ) -> tuple[DeltaNet | ShortConv | None, str, str]:
        """Make what a layer has in place of attention; return it, its module and first product."""
        sizes, layer_types = self.model.get_recurrence(index), self.model.layer_types
        if sizes is None or layer_types is None:
            return None, "attention.", "qkv"
        number = layer_types[:index].count(layer_types[index])
        if isinstance(sizes, ShortConvSizes):
            short_conv = self._make_short_conv(sizes, number, prefix + CONV_MODULE)
            return short_conv, CONV_MODULE, "in_proj"
        delta_net = self._make_delta_net(sizes, number, prefix + LINEAR_MODULE)
        return delta_net, LINEAR_MODULE, "qkvz"

    def _make_short_conv(self, sizes: ShortConvSizes, number: int, prefix: str) -> ShortConv:
        rank_sizes = sizes.split(self.model.tp_size)
        bias = take_tensor(self.weights, prefix + "conv.bias").float() if sizes.has_bias else None
        return ShortConv(
            sizes=rank_sizes,
            index=number,
            taps=self._take_taps(rank_sizes, prefix),
            bias=bias,
            kernels=self.kernels,
        )

    def _take_taps(self, sizes: Recurrence, prefix: str) -> Tensor:
        """Take the taps of a convolution [taps, C], which is stored channel by channel."""
        taps = take_tensor(self.weights, prefix + "conv.weight").float()
        return taps.view(sizes.num_channels, sizes.num_taps).T.contiguous()

    def _make_delta_net(self, sizes: LinearAttention, number: int, prefix: str) -> DeltaNet:
        model, weights = self.model, self.weights
        rank_sizes = sizes.split(model.tp_size)
        return DeltaNet(
            sizes=rank_sizes,
            index=number,
            ba=self.make_linear(prefix + "ba"),
            taps=self._take_taps(rank_sizes, prefix),
            decay=-take_tensor(weights, prefix + "A_log").exp(),
            bias=take_tensor(weights, prefix + "dt_bias"),
            norm=Norm(take_tensor(weights, prefix + "norm.weight"), None, model.norm_epsilon),
            kernels=self.kernels,
        )

    def make_attention(self, index: int, prefix: str, *, has_norms: bool = True) -> Attention:
        model, norms = self.model, []
        is_sliding = model.is_sliding(index)
        is_rotated = index not in model.arithmetic.layers_without_positions
        for letter in "qk" if model.arithmetic.qk_norm and has_norms else "":
            weight = take_tensor(self.weights, f"{prefix}{letter}_layernorm.weight")
            offset = model.arithmetic.norm_offset
            norms.append(Norm(weight, None, model.norm_epsilon, offset))
        q_norm, k_norm = norms or (None, None)
        has_sinks = model.arithmetic.has_sinks and has_norms
        return Attention(
            scale=model.attention_scale, cap=model.attn_logit_softcapping,
            window=model.sliding_window if is_sliding else None,
            rotary=self.tables[is_sliding] if is_rotated else None, q_norm=q_norm, k_norm=k_norm,
            sinks=take_tensor(self.weights, f"{prefix}sinks").clone() if has_sinks else None,
        )  # fmt: skip

    def _make_experts(self, prefix: str) -> ExpertLayer:
        sizes, weights = self.model.experts, self.weights
        assert sizes is not None
        up, down = (self._make_matrices(f"{prefix}mlp.{name}") for name in ("fc", "proj"))
        shared_expert, arithmetic = None, self.model.arithmetic
        activation: str | CutGate = name_activation(self.model)
        if arithmetic.gate_limit is not None:
            activation = CutGate(arithmetic.gate_limit, arithmetic.gate_slope)
        router = take_tensor(weights, prefix + ROUTER)
        if sizes.shared_inner:
            name = prefix + sizes.shared_name
            # Not in a file that may be let go.
            gate = take_tensor(weights, f"{name}_gate.weight").clone()
            up_linear, down_linear = (self.make_linear(f"{name}.{kind}") for kind in ("fc", "proj"))
            shared_expert = up_linear, down_linear, gate
        return ExpertLayer(
            sizes, self.rank, activation,
            Router(
                router, *(find_tensor(weights, prefix + name) for name in (ROUTER_BIAS, SCORE_BIAS))
            ),
            up, down, shared_expert, self.kernels,
        )  # fmt: skip

    def _make_matrices(self, name: str) -> list[Linear]:
        """Make the linears of the rank's experts, whose matrices lie in one tensor."""
        matrices = list_experts(self.weights, name)
        return [
            lay_out(matrix, bias, prepack=self.prepack, kernels=self.kernels)
            for matrix, bias in zip(matrices, self._cut_biases(name, len(matrices)), strict=True)
        ]

    def _cut_biases(self, name: str, count: int) -> Sequence[Tensor | None]:
        """Return the biases of the rank's experts: of sums over ranks the first part's alone."""
        sizes, biases = self.model.experts, find_tensor(self.weights, f"{name}.bias")
        assert sizes is not None
        part, is_summed = sizes.get_part(self.rank), name.endswith("proj")
        if biases is None or (is_summed and part):
            return [None] * count
        experts = sizes.list_rank_experts(self.rank)
        rows = biases.view(sizes.num, -1)[experts.start : experts.stop]
        if not is_summed:  # the part's rows of both halves
            rows = torch.cat([half.chunk(sizes.tp_size, 1)[part] for half in rows.chunk(2, 1)], 1)
        return list(rows.clone().unbind())
