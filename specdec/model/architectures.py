"""Arithmetic of a target: flags that the decoder and the list of tensors read.

A model family is a file of names in `convert/families/`, never a model file of its own. What it
computes is told by the `architecture` of its checkpoint where TensorRT-LLM has that name, and by
flags in the checkpoint itself where it has not.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from specdec.errors import SpecDecError, join_names, shorten


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Flags of a target's arithmetic, by default a Llama's.

    Checkpoints leave the defaults out, so these never change.

    norm: root-mean-square, or layer norm with a bias.
    positions: rotary embedding, or a learned table added to the token embedding.
    mlp: `gated` has fc (activated) and gate side by side; `fused` stacks them in fc as
    [gate; fc]; `plain` has only fc; `experts` are fused, and a token takes some.
    is_parallel: attention and MLP read one norm, and both are added to the layer's input.
    qkv_bias, dense_bias, mlp_bias: None where the configuration's attn_bias or mlp_bias decides.
    scales_embedding: token embeddings are multiplied by the square root of the hidden size.
    exact_gelu: whether hidden_act `gelu` means the error function; elsewhere it is the tanh form.
    norm_epsilon: the value where a checkpoint's config.json leaves it out.
    qk_norm: each head's queries and keys are normed before they are rotated.
    is_post_norm: the sum of input and output of attention or MLP is normed, instead of the input;
    there is no norm after the last layer.
    window_pattern: every so many layers one sees all tokens, the others see a window; None where
    the configuration tells.
    inner_norms: the output of attention and MLP is normed before it is added to the input.
    layers_without_positions: the layers, from 0, whose queries and keys are not rotated.
    adds_one: norms multiply by their weights and one; but for those of linear attention.
    gates_attention: what attention yields is multiplied by the sigmoid of a gate for each head,
    whose rows lie in qkv after the values'.
    has_sinks: each query head has a score that takes its part of the softmax and has no value.
    gate_limit: of a gated MLP's g sigmoid(gate_slope g) (u + 1), where g is at most the limit and u
    within it on both sides; None where hidden_act tells. It is computed in mixtures alone, whose
    router and experts have biases where mlp_bias is true.
    norms_values: values are divided by their root mean square.
    scales_layers: each layer's output is multiplied by a number of its own.
    adds_experts: experts run beside the MLP; both outputs are normed, and their sum again. The
    router reads what the MLP's norm reads, normed and scaled otherwise, and scales each expert.
    """

    norm: Literal["rms", "layer"] = "rms"
    positions: Literal["rotary", "learned"] = "rotary"
    mlp: Literal["gated", "fused", "plain", "experts"] = "gated"
    is_parallel: bool = False
    qkv_bias: bool | None = None
    dense_bias: bool | None = None
    mlp_bias: bool | None = None
    head_bias: bool = False
    scales_embedding: bool = False
    exact_gelu: bool = True
    activations: tuple[str, ...] = ("silu",)
    norm_epsilon: float | None = None
    qk_norm: bool = False
    is_post_norm: bool = False
    inner_norms: bool = False
    window_pattern: int | None = None
    layers_without_positions: tuple[int, ...] = ()
    adds_one: bool = False
    gates_attention: bool = False
    has_sinks: bool = False
    gate_limit: float | None = None
    gate_slope: float = 1.0
    norms_values: bool = False
    scales_layers: bool = False
    adds_experts: bool = False

    @property
    def has_experts(self) -> bool:
        """Return whether a token goes through some of a layer's experts."""
        return self.mlp == "experts" or self.adds_experts

    @property
    def norm_offset(self) -> float:
        """Return the number that is added to the norms' weights."""
        return 1.0 if self.adds_one else 0.0


_GELU = ("gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast")
# TensorRT-LLM's architectures: the name in a checkpoint says what it computes, whoever wrote it.
ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, dense_bias=False),
    "Qwen3ForCausalLM": Architecture(qk_norm=True),
    "Qwen3MoeForCausalLM": Architecture(mlp="experts", qk_norm=True, activations=("swiglu",)),
    "MixtralForCausalLM": Architecture(mlp="experts", activations=("swiglu",)),
    "Qwen2MoeForCausalLM": Architecture(
        mlp="experts", qkv_bias=True, dense_bias=False, activations=("swiglu",),
    ),
    "PhiForCausalLM": Architecture(
        norm="layer", mlp="plain", is_parallel=True, qkv_bias=True, dense_bias=True,
        mlp_bias=True, head_bias=True, activations=("gelu_new", "gelu", "gelu_fast", "relu"),
    ),
    "Phi3ForCausalLM": Architecture(
        mlp="fused", qkv_bias=False, dense_bias=False, mlp_bias=False, activations=("swiglu",),
    ),
    "GPT2LMHeadModel": Architecture(
        norm="layer", positions="learned", mlp="plain", qkv_bias=True, dense_bias=True,
        mlp_bias=True, activations=("gelu_new", "gelu", "gelu_fast", "relu"),
    ),
    "OPTForCausalLM": Architecture(
        norm="layer", positions="learned", mlp="plain", qkv_bias=True, dense_bias=True,
        mlp_bias=True, activations=("relu", "gelu", "gelu_new"), norm_epsilon=1e-5,
    ),
    "GemmaForCausalLM": Architecture(
        scales_embedding=True, exact_gelu=False, activations=("gelu",),
    ),
    "Gemma2ForCausalLM": Architecture(
        scales_embedding=True, exact_gelu=False, activations=_GELU, inner_norms=True,
        window_pattern=2,
    ),
    "Gemma3ForCausalLM": Architecture(
        scales_embedding=True, exact_gelu=False, activations=_GELU, inner_norms=True,
        qk_norm=True, window_pattern=6,
    ),
    "GraniteForCausalLM": Architecture(),
    "GraniteMoeForCausalLM": Architecture(mlp="experts", activations=("swiglu",)),
}  # fmt: skip

# The key of a checkpoint's config.json with the flags of any other architecture.
KEY = "arithmetic"
_ACTIVATIONS = {name for entry in ARCHITECTURES.values() for name in entry.activations}


def find_arithmetic(config: Mapping[str, Any], architecture: str) -> Architecture | None:
    """Return what a target computes by its checkpoint's config.json, None if nothing there tells.

    Raises SpecDecError for flags that this release does not know, or that contradict the name.
    """
    named_architecture = ARCHITECTURES.get(architecture)
    if named_architecture is not None and config.get("do_layer_norm_before") is False:  # OPT-350m
        named_architecture = dataclasses.replace(named_architecture, is_post_norm=True)
    if config.get(KEY) is None:
        return named_architecture
    flagged_architecture = _read_flags(config[KEY])
    if named_architecture not in (None, flagged_architecture):
        raise SpecDecError(
            f"checkpoint config: {KEY} {shorten(config[KEY])} is not what {architecture} computes",
            f"remove {KEY}, or give the architecture another name",
        )
    return flagged_architecture


def list_flags(arithmetic: Architecture) -> dict[str, Any]:
    """List the flags that are not the default, as `find_arithmetic` reads them."""
    default = dataclasses.asdict(Architecture())
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(arithmetic).items() if value != default[name]
    }  # fmt: skip


def _read_flags(flags: Any) -> Architecture:
    kinds = get_type_hints(Architecture)
    if not isinstance(flags, dict):
        fact = f"checkpoint config: {KEY} is {shorten(flags)}, not an object"
        raise SpecDecError(fact, "convert it again")
    if unknown_flags := sorted(set(flags) - set(kinds)):
        raise SpecDecError(
            f"checkpoint config: {KEY} has {join_names(unknown_flags)}, which this release does not"
            " compute",
            f"use the release that wrote it; this one knows {', '.join(kinds)}",
        )
    wrong_flags = [
        f"{KEY}.{name} is {shorten(value)}"
        for name, value in flags.items()
        if not _fits(value, kinds[name])
        or (name == "activations" and not set(value) <= _ACTIVATIONS)
    ]
    if wrong_flags:
        raise SpecDecError(f"checkpoint config: {', '.join(wrong_flags)}", "convert it again")
    lists = {name: tuple(value) for name, value in flags.items() if isinstance(value, list)}
    return Architecture(**flags | lists)


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value from JSON is of a field's type."""
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return value in inner
    if get_origin(kind) is tuple:
        return isinstance(value, list) and all(type(item) is inner[0] for item in value)
    if get_origin(kind) in (Union, types.UnionType):
        return any(_fits(value, alternative) for alternative in inner)
    return type(value) is kind
