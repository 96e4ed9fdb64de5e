"""A target's sizes and options, and what is inconsistent about them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from specdec.errors import Problems, shorten
from specdec.model.architectures import ARCHITECTURES, Architecture
from specdec.model.bounds import MAX_HEAD_SIZE, MAX_MODULES, MAX_RANKS, MAX_SIZE
from specdec.model.experts import Experts
from specdec.model.layer_sizes import LayerSizes
from specdec.model.linear_attention import LinearAttention
from specdec.model.mamba2 import Mamba2Sizes
from specdec.model.rotary_scaling import find_scaling_problems
from specdec.model.short_conv import ShortConvSizes

FLOAT_DTYPES = ("float16", "bfloat16", "float32")
# Kinds of a layer's attention, in transformers' names: of a window, of all tokens, or linear; or
# a short convolution or Mamba-2 in its place.
LAYER_TYPES = ("sliding_attention", "full_attention", "linear_attention", "conv", "mamba")
SLIDING, FULL, LINEAR, CONV, MAMBA = LAYER_TYPES
RECURRENT = (LINEAR, CONV, MAMBA)  # which keep a state instead of keys and values
Recurrence = LinearAttention | ShortConvSizes | Mamba2Sizes


def size(maximum: int = MAX_SIZE, *, minimum: int = 1, **default: Any) -> Any:
    """Declare a field that is a whole number within bounds, or None where that is its default."""
    return dataclasses.field(metadata={"bounds": (minimum, maximum)}, **default)


def positive(**default: Any) -> Any:
    """Declare a field that is a positive number, or None where that is its default."""
    return dataclasses.field(metadata={"is_number": True}, **default)


def list_layer_types(
    num_layers: int, pattern: int | None, first_layer: int = 0, kind: str = SLIDING
) -> tuple[str, ...]:
    """Return `kind` for layers from `first_layer` on, but FULL for every `pattern`-th and before.

    There are none for a number of layers that no model has.
    """
    return tuple(
        kind if number > first_layer and (pattern is None or number % pattern) else FULL
        for number in range(1, num_layers + 1 if num_layers <= MAX_MODULES else 1)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The target of a checkpoint, in TensorRT-LLM's field names; sizes are of the whole model.

    rotary_pct: the rotated part of each head. sliding_window: a token sees that many tokens, itself
    included; None sees all. share_embedding_table: `lm_head.weight` is not stored, the embedding
    stands for it. original_max_position_embeddings: of longrope scaling, the length it switches at;
    of scaled queries, the length from which they are. query_scaling_beta: queries are multiplied by
    1 + beta log(1 + floor(position / original_max_position_embeddings)); None leaves them.
    experts: the MLPs of a mixture; intermediate_size may then be any. own_arithmetic: what an
    architecture computes that ARCHITECTURES does not have.

    linear_attention, short_conv, mamba2: the sizes of the LINEAR, the CONV and the MAMBA layers of
    a hybrid; None where there are none. layer_sizes: the sizes in which layers differ, see
    `resize`; None where all are alike. layer_types: of LAYER_TYPES for each layer, None where all
    are alike: SLIDING if there is a window. rope_local_base_freq: rotary base, without scaling, of
    SLIDING layers; None where the others' base is theirs too. embedding_multiplier: of token
    embeddings; residual_multiplier: of what attention and MLP yield; attention_multiplier: of
    scores, as well as 1 / sqrt(head_size); output_multiplier_scale: of logits.
    query_pre_attn_scalar: scores are divided by its root instead of the root of head_size.
    attn_logit_softcapping, final_logit_softcapping: a score or logit x becomes cap tanh(x / cap).
    """

    architecture: str
    dtype: str
    vocab_size: int = size()
    hidden_size: int = size()
    num_hidden_layers: int = size(MAX_MODULES)
    num_attention_heads: int = size()
    num_key_value_heads: int = size()
    head_size: int = size(MAX_HEAD_SIZE)
    intermediate_size: int = size()
    norm_epsilon: float = positive()
    max_position_embeddings: int = size()
    hidden_act: str = "silu"
    rotary_base: float = positive(default=10000.0)
    rotary_scaling: dict[str, Any] | None = None
    attn_bias: bool = False
    mlp_bias: bool = False
    rotary_pct: float = 1.0
    sliding_window: int | None = size(default=None)
    original_max_position_embeddings: int | None = size(minimum=2, default=None)
    query_scaling_beta: float | None = positive(default=None)
    use_parallel_embedding: bool = False
    embedding_sharding_dim: int = 0
    share_embedding_table: bool = False
    layer_types: tuple[str, ...] | None = None
    rope_local_base_freq: float | None = positive(default=None)
    embedding_multiplier: float = positive(default=1.0)
    attention_multiplier: float = positive(default=1.0)
    residual_multiplier: float = positive(default=1.0)
    output_multiplier_scale: float = positive(default=1.0)
    query_pre_attn_scalar: float | None = positive(default=None)
    attn_logit_softcapping: float | None = positive(default=None)
    final_logit_softcapping: float | None = positive(default=None)
    tp_size: int = size(MAX_RANKS, default=1)
    pp_size: int = size(MAX_RANKS, default=1)
    experts: Experts | None = None
    linear_attention: LinearAttention | None = None
    short_conv: ShortConvSizes | None = None
    mamba2: Mamba2Sizes | None = None
    layer_sizes: LayerSizes | None = None
    own_arithmetic: Architecture | None = None

    def __post_init__(self) -> None:
        if self.own_arithmetic is None and self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"nothing tells what {self.architecture} computes: own_arithmetic must"
            )
        if (self.experts is not None) != self.arithmetic.has_experts:
            raise ValueError(f"{self.architecture} with experts={self.experts}")

    @property
    def arithmetic(self) -> Architecture:
        """Return the flags of the architecture's arithmetic."""
        return self.own_arithmetic or ARCHITECTURES[self.architecture]

    @property
    def has_qkv_bias(self) -> bool:
        fixed_bias = self.arithmetic.qkv_bias
        return self.attn_bias if fixed_bias is None else fixed_bias

    @property
    def has_dense_bias(self) -> bool:
        fixed_bias = self.arithmetic.dense_bias
        return self.attn_bias if fixed_bias is None else fixed_bias

    @property
    def has_mlp_bias(self) -> bool:
        fixed_bias = self.arithmetic.mlp_bias
        return self.mlp_bias if fixed_bias is None else fixed_bias

    @property
    def query_parts(self) -> int:
        """Rows of qkv for each dimension of a query: 2 where it has a gate."""
        return 2 if self.arithmetic.gates_attention else 1

    @property
    def rotary_size(self) -> int:
        """Rotated dimensions of each head; the others pass as they are."""
        return int(self.head_size * self.rotary_pct)

    @property
    def attention_scale(self) -> float:
        """Return the factor of attention scores."""
        return self.attention_multiplier / math.sqrt(self.query_pre_attn_scalar or self.head_size)

    @property
    def usual_layer_types(self) -> tuple[str, ...] | None:
        """Return the `layer_types` that follow from the architecture alone."""
        pattern = self.arithmetic.window_pattern
        return None if pattern is None else list_layer_types(self.num_hidden_layers, pattern)

    def is_sliding(self, layer: int) -> bool:
        """Return whether a layer attends to a window."""
        if self.layer_types is None:
            return self.sliding_window is not None
        return self.layer_types[layer] == SLIDING

    @property
    def recurrence(self) -> Recurrence | None:
        """Return the sizes of a hybrid's layers that keep a state; None where there are none."""
        return self.linear_attention or self.short_conv or self.mamba2

    def get_recurrence(self, layer: int) -> Recurrence | None:
        """Return the sizes of a layer that keeps a state; None where it attends to keys."""
        is_recurrent = self.layer_types is not None and self.layer_types[layer] in RECURRENT
        return self.recurrence if is_recurrent else None

    def get_experts(self, layer: int) -> Experts | None:
        """Return a layer's experts; None where it has an MLP."""
        has_experts = self.experts is not None and layer >= self.experts.num_dense_layers
        return self.experts if has_experts else None

    def get_source(self, layer: int) -> int | None:
        """Return the earlier layer whose keys and values a layer reads, None if it has its own."""
        sizes, types = self.layer_sizes, self.layer_types
        if sizes is None or types is None or layer < self.num_hidden_layers - sizes.num_reusing:
            return None
        earlier_types = types[: self.num_hidden_layers - sizes.num_reusing]
        return max(i for i, kind in enumerate(earlier_types) if kind == types[layer])

    def resize(self, layer: int) -> ModelConfig:
        """Return the model with a layer's sizes as those of all its layers."""
        sizes, changes = self.layer_sizes, dict[str, Any]()
        if sizes is None:
            return self
        if not self.is_sliding(layer):
            changes["head_size"] = sizes.full_head_size
            changes["num_key_value_heads"] = sizes.full_num_kv_heads
        if self.get_source(layer) is not None:
            changes["intermediate_size"] = sizes.reusing_inner
        return dataclasses.replace(self, layer_sizes=None, **changes)

    @property
    def num_recurrent(self) -> int:
        """How many layers keep a state instead of keys and values."""
        return sum(kind in RECURRENT for kind in self.layer_types or ())

    @property
    def attending_layers(self) -> list[int]:
        """The layers that have keys and values."""
        return [
            layer for layer in range(self.num_hidden_layers)
            if self.get_recurrence(layer) is None and self.get_source(layer) is None
        ]  # fmt: skip

    def get_num_kv_heads(self) -> int:
        """Return the K/V heads of one rank; fewer heads than ranks are duplicated."""
        return max(1, self.num_key_value_heads // self.tp_size)

    def find_scaling_problems(self) -> Problems:
        """List what is wrong with the rotary scaling, each with a remedy."""
        if self.arithmetic.positions != "rotary":
            return Problems()
        return find_scaling_problems(
            self.rotary_scaling, rotary_size=self.rotary_size, rotary_base=self.rotary_base,
            max_positions=self.max_position_embeddings,
            original_positions=self.original_max_position_embeddings,
        )  # fmt: skip

    def find_problems(self) -> Problems:
        """List what is inconsistent, each with a remedy."""
        problems = self._find_wrong_values()
        problems += self._find_layer_problems()
        dim, shares = self.embedding_sharding_dim, self.share_embedding_table
        is_parallel = self.use_parallel_embedding
        problems += Problems.from_table(
            (dim not in (0, 1), f"embedding_sharding_dim={dim}", "use 0 or 1"),
            (not 0 < self.rotary_pct <= 1,
             f"rotary_pct={self.rotary_pct}", "give a number above 0, at most 1"),
            (shares and is_parallel and dim == 1 and self.tp_size > 1,
             "share_embedding_table with embedding_sharding_dim=1: a rank's columns of the"
             " embedding are not part of the head",
             "use embedding_sharding_dim 0, or store the head"),
            (shares and self.pp_size > 1,
             f"share_embedding_table with pp_size={self.pp_size}: the last stage, which has the"
             " head, has no embedding", "store the head, or use pp_size 1"),
        )  # fmt: skip
        if self.experts is not None:
            problems += self.experts.find_problems(self.tp_size)
        if self.recurrence is not None:
            problems += self.recurrence.find_problems(self.tp_size)
        if self._needs_sizes and self.layer_sizes is None:
            problems.add("layer_sizes are missing, which the arithmetic needs", "convert it again")
        if self.layer_sizes is not None and not problems:
            problems += self._find_size_problems(self.layer_sizes)
        return problems or self._find_contradictions()

    def _find_wrong_values(self) -> Problems:
        """List fields that are out of their own bounds."""
        problems = Problems()
        if self.dtype not in FLOAT_DTYPES:
            problems.add(f"dtype {self.dtype!r}", f"use one of {', '.join(FLOAT_DTYPES)}")
        for name, (minimum, maximum) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                problems.add(f"{name}={value}", f"{name} must be at least {minimum}")
            elif value is not None and value > maximum:
                fact = f"{name}={shorten(value)} is more than {maximum}"
                problems.add(fact, "no model has that: copy its config.json again")
        for name in NUMBERS:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                problems.add(f"{name}={value}", f"{name} must be positive")
        return problems

    def _find_layer_problems(self) -> Problems:
        """List what is wrong with the types of layers."""
        types = self.layer_types or ()
        is_complete = self.layer_types is None or (
            len(types) == self.num_hidden_layers
            and all(kind in (*LAYER_TYPES,) for kind in types)  # a faulty one may be a list
        )
        return Problems.from_table(
            (not is_complete,
             f"layer_types is {shorten(list(types))} for {self.num_hidden_layers} layers",
             f"give one of {', '.join(LAYER_TYPES)} for each layer"),
            *((((sizes is None) == (kind in types)),
               f"layer_types and {name}={sizes} disagree on whether there are layers of {kind}",
               "convert the model again")
              for name, sizes, kind in (
                  ("linear_attention", self.linear_attention, LINEAR),
                  ("short_conv", self.short_conv, CONV),
                  ("mamba2", self.mamba2, MAMBA),
              )),
            (sum(kind in types for kind in RECURRENT) > 1,
             f"layer_types has {' and '.join(kind for kind in RECURRENT if kind in types)}",
             "convert the model again"),
        )  # fmt: skip

    @property
    def _needs_sizes(self) -> bool:
        """Tell if the arithmetic has parts that only layers of several sizes are computed with."""
        arithmetic = self.arithmetic
        return arithmetic.norms_values or arithmetic.scales_layers or arithmetic.adds_experts

    def _find_size_problems(self, sizes: LayerSizes) -> Problems:
        """List what is wrong with sizes in which layers differ."""
        return Problems.from_table(
            (self.layer_types is None, "layer_sizes without layer_types", "convert it again"),
            (self.pp_size != 1, f"layers of several sizes with pp_size={self.pp_size}",
             "use pp_size 1"),
        ) or sizes.find_problems(
            self.layer_types or (), self.num_attention_heads, self.tp_size
        )  # fmt: skip

    def _find_contradictions(self) -> Problems:
        """List what sizes, each good by itself, have against one another."""
        heads, kv_heads, tp_size = (
            self.num_attention_heads, self.num_key_value_heads, self.tp_size
        )  # fmt: skip
        inners = " and ".join(map(str, self._split_inners))
        usable_sizes = [str(n) for n in (1, 2, 3, 4, 6, 8, 16) if self._splits(n)]
        kind = "intermediate_size" if self.experts is None else "the sizes of its MLPs"
        problems = Problems.from_table(
            (heads % kv_heads,
             f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}",
             "check the source model's config.json"),
            (not self._splits(tp_size),
             f"num_attention_heads={heads}, num_key_value_heads={kv_heads},"
             f" {kind}={inners}, hidden_size={self.hidden_size} do not split over"
             f" tp_size={tp_size}", f"use a tp_size of {', '.join(usable_sizes)}"),
            (self.arithmetic.positions == "rotary" and self.rotary_size % 2,
             f"head_size={self.head_size} with rotary_pct={self.rotary_pct} rotates"
             f" {self.rotary_size} dimensions, which is odd",
             "correct head_dim or the rotated share of it: rotary embedding needs pairs"),
            (self.query_scaling_beta is not None
             and (self.original_max_position_embeddings is None or self.rotary_pct != 1),
             f"query_scaling_beta={self.query_scaling_beta} with"
             f" original_max_position_embeddings={self.original_max_position_embeddings} and"
             f" rotary_pct={self.rotary_pct}",
             "copy the model's config.json again: queries that are scaled by their positions need"
             " that length, and heads that are rotated whole"),
        )  # fmt: skip
        problems += self.find_scaling_problems()
        problems += Problems.from_table(
            (self.hidden_act not in self.arithmetic.activations,
             f"hidden_act={self.hidden_act!r} is not known for {self.architecture}",
             f"the known ones are {', '.join(self.arithmetic.activations)}"),
            (self.num_hidden_layers % self.pp_size,
             f"num_hidden_layers={self.num_hidden_layers} does not split over"
             f" pp_size={self.pp_size}", "use a pp_size that divides it"),
        )  # fmt: skip
        return problems

    def describe_sizes(self) -> dict[str, Any]:
        """Return the sizes under their names in the Hugging Face config.json of a Llama."""
        return {
            "vocab_size": self.vocab_size, "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads, "head_dim": self.head_size,
            "hidden_act": self.hidden_act, "rms_norm_eps": self.norm_epsilon,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rotary_base, "rope_scaling": self.rotary_scaling,
        }  # fmt: skip

    def _splits(self, tp_size: int) -> bool:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        kv_fits = kv_heads % tp_size == 0 or tp_size % kv_heads == 0
        embedding_fits = True
        if self.use_parallel_embedding and self.embedding_sharding_dim == 1:
            embedding_fits = self.hidden_size % tp_size == 0
        elif self.use_parallel_embedding and self.arithmetic.positions == "learned":
            embedding_fits = self.max_position_embeddings % tp_size == 0
        return (
            heads % tp_size == 0 and kv_fits
            and all(inner % tp_size == 0 for inner in self._split_inners)
            and embedding_fits
        )  # fmt: skip

    @property
    def _split_inners(self) -> list[int]:
        """Sizes of MLPs that all ranks share; experts have a division of their own."""
        if self.experts is None:
            return [self.intermediate_size]
        has_mlp = self.experts.num_dense_layers or self.arithmetic.adds_experts
        return [self.experts.shared_inner, *([self.intermediate_size] if has_mlp else [])]


# The least and the largest of the fields that are whole numbers, and the positive numbers.
_FIELDS = dataclasses.fields(ModelConfig)
BOUNDS: dict[str, tuple[int, int]] = {
    field.name: field.metadata["bounds"] for field in _FIELDS if "bounds" in field.metadata
}
NUMBERS = [field.name for field in _FIELDS if field.metadata.get("is_number")]
