"""The target architectures: what each computes besides its sizes.

The decoder and the list of tensors read these flags, so that a family is a row here and a table of
names in `convert/families/`, never a model file of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """How a target computes.

    norm: root-mean-square, or layer norm with a bias.
    positions: rotary embedding, or a learned table added to the token embedding.
    mlp: `gated` has fc (activated) and gate side by side; `fused` stacks them in fc as
    [gate; fc]; `plain` has fc alone.
    is_parallel: attention and MLP read one norm, and both are added to the layer's input.
    qkv_bias, dense_bias, mlp_bias: None where the configuration's attn_bias or mlp_bias decides.
    scales_embedding: token embeddings are multiplied by the square root of the hidden size.
    exact_gelu: whether hidden_act `gelu` means the error function; elsewhere it is the tanh form.
    norm_epsilon: where a checkpoint's config.json need not tell it.
    """

    norm: Literal["rms", "layer"] = "rms"
    positions: Literal["rotary", "learned"] = "rotary"
    mlp: Literal["gated", "fused", "plain"] = "gated"
    is_parallel: bool = False
    qkv_bias: bool | None = None
    dense_bias: bool | None = None
    mlp_bias: bool | None = None
    head_bias: bool = False
    scales_embedding: bool = False
    exact_gelu: bool = True
    activations: tuple[str, ...] = ("silu",)
    norm_epsilon: float | None = None


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(),
    "Qwen2ForCausalLM": Architecture(qkv_bias=True, dense_bias=False),
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
}  # fmt: skip
