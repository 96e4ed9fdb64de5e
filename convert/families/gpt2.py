"""GPT-2."""

from __future__ import annotations

from typing import Any

from specdec.model.config_reader import ConfigReader

from ..config import MOE_014
from ..plan import Part
from .base import Family, Layout, add_keys, name_activation, refuse_unless

_SELF = "transformer.h.{layer}."
_OURS = "transformer.layers.{layer}."

# Its linear layers are stored as [in, out].
MODULES: dict[str, tuple[str | Part, ...]] = {
    "transformer.vocab_embedding": ("transformer.wte",),
    "transformer.position_embedding": ("transformer.wpe",),
    _OURS + "input_layernorm": (_SELF + "ln_1",),
    _OURS + "attention.qkv": (Part(_SELF + "attn.c_attn", is_transposed=True),),
    _OURS + "attention.dense": (Part(_SELF + "attn.c_proj", is_transposed=True),),
    _OURS + "post_layernorm": (_SELF + "ln_2",),
    _OURS + "mlp.fc": (Part(_SELF + "mlp.c_fc", is_transposed=True),),
    _OURS + "mlp.proj": (Part(_SELF + "mlp.c_proj", is_transposed=True),),
    "transformer.ln_f": ("transformer.ln_f",),
    "lm_head": ("lm_head",),
}


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a GPT-2 config.json; an absent optional field has the value transformers gives it."""
    num_heads, hidden_size = reader.get_int("n_head"), reader.get_int("n_embd")
    if hidden_size % num_heads:
        reader.refuse(
            f"n_embd {hidden_size} is not a multiple of n_head {num_heads}", "correct n_head"
        )
    remedy = "TensorRT-LLM's GPT-2 computes otherwise; this model is not supported"
    refuse_unless(reader, "scale_attn_weights", True, remedy=remedy)
    refuse_unless(reader, "scale_attn_by_inverse_layer_idx", False, remedy=remedy)
    refuse_unless(reader, "reorder_and_upcast_attn", False, remedy=remedy)
    refuse_unless(reader, "add_cross_attention", False, remedy=remedy)
    activation = reader.get_text("activation_function", "gelu_new")
    return {
        "vocab_size": reader.get_int("vocab_size"),
        "hidden_size": hidden_size,
        "num_hidden_layers": reader.get_int("n_layer"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_size": max(1, hidden_size // num_heads),
        "intermediate_size": reader.get_int("n_inner", 4 * hidden_size),
        "norm_epsilon": reader.get_float("layer_norm_epsilon", 1e-5),
        "max_position_embeddings": reader.get_int("n_positions", 1024),
        "hidden_act": name_activation(reader, activation),
    }


GPT2 = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    modules=MODULES,
    prefixes=("transformer.", ""),
    ignored=("*.attn.bias", "*.attn.masked_bias"),  # the causal mask
    is_tied_by_default=True,
    read_config=read_config,
    describe=add_keys(
        gpt_variant="gpt2", bias=True, q_scaling=1, embedding_scale=None,
        apply_query_key_layer_scaling=False, rotary_pct=1.0, rotary_base=10000.0,
        rotary_scaling=None, inner_layernorm=False, norm_before_bmm1=False,
        moe=MOE_014 | {"normalization_mode": 1}, position_embedding_type="learned_absolute",
    ),
)  # fmt: skip
