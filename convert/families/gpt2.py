"""GPT-2."""

from __future__ import annotations

from typing import Any

from specdec.model.config_reader import ConfigReader

from ..config import MOE_014
from ..plan import SourceRows
from .base import Family, Layout, add_keys, read_plain_heads, refuse_unless

_HF_LAYER = "transformer.h.{layer}."
_OUR_LAYER = "transformer.layers.{layer}."

# Its linear layers are stored as [in, out].
MODULES: dict[str, tuple[str | SourceRows, ...]] = {
    "transformer.vocab_embedding": ("transformer.wte",),
    "transformer.position_embedding": ("transformer.wpe",),
    _OUR_LAYER + "input_layernorm": (_HF_LAYER + "ln_1",),
    _OUR_LAYER + "attention.qkv": (SourceRows(_HF_LAYER + "attn.c_attn", is_transposed=True),),
    _OUR_LAYER + "attention.dense": (SourceRows(_HF_LAYER + "attn.c_proj", is_transposed=True),),
    _OUR_LAYER + "post_layernorm": (_HF_LAYER + "ln_2",),
    _OUR_LAYER + "mlp.fc": (SourceRows(_HF_LAYER + "mlp.c_fc", is_transposed=True),),
    _OUR_LAYER + "mlp.proj": (SourceRows(_HF_LAYER + "mlp.c_proj", is_transposed=True),),
    "transformer.ln_f": ("transformer.ln_f",),
    "lm_head": ("lm_head",),
}


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read a GPT-2 config.json; an absent optional field has the value transformers gives it."""
    values = read_plain_heads(reader, "n_head", "n_embd", "gelu_new")
    remedy = (
        "this variant of GPT-2 is not supported; the usual ones scale scores by the head's size"
    )
    refuse_unless(reader, "scale_attn_weights", True, remedy=remedy)
    for key in (
        "scale_attn_by_inverse_layer_idx",
        "reorder_and_upcast_attn",
        "add_cross_attention",
    ):
        refuse_unless(reader, key, False, remedy=remedy)
    return values | {
        "num_hidden_layers": reader.get_int("n_layer"),
        "intermediate_size": reader.get_int("n_inner", 4 * values["hidden_size"]),
        "norm_epsilon": reader.get_float("layer_norm_epsilon", 1e-5),
        "max_position_embeddings": reader.get_int("n_positions", 1024),
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
