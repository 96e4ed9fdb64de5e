"""OPT."""

from __future__ import annotations

from typing import Any

from specdec.model.config import ModelConfig

from ..hf import ConfigReader
from ..plan import Part
from .base import Family, Layout, make_model, name_activation, refuse_unless

_SELF = "model.decoder.layers.{layer}."
_OURS = "transformer.layers.{layer}."

MODULES: dict[str, tuple[str | Part, ...]] = {
    "transformer.vocab_embedding": ("model.decoder.embed_tokens",),
    # The first two rows belong to padding.
    "transformer.position_embedding": (Part("model.decoder.embed_positions", skipped=2),),
    _OURS + "input_layernorm": (_SELF + "self_attn_layer_norm",),
    _OURS + "attention.qkv": (
        _SELF + "self_attn.q_proj", _SELF + "self_attn.k_proj", _SELF + "self_attn.v_proj",
    ),
    _OURS + "attention.dense": (_SELF + "self_attn.out_proj",),
    _OURS + "post_layernorm": (_SELF + "final_layer_norm",),
    _OURS + "mlp.fc": (_SELF + "fc1",),
    _OURS + "mlp.proj": (_SELF + "fc2",),
    "transformer.ln_f": ("model.decoder.final_layer_norm",),
    "lm_head": ("lm_head",),
}  # fmt: skip


def read_config(reader: ConfigReader, layout: Layout) -> ModelConfig:
    """Read an OPT config.json; an absent optional field has the value transformers gives it."""
    num_heads, hidden_size = reader.get_int("num_attention_heads"), reader.get_int("hidden_size")
    if hidden_size % num_heads:
        reader.refuse(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}",
            "correct num_attention_heads",
        )
    remedy = "this variant of OPT is not supported; the usual ones normalize before each layer"
    refuse_unless(reader, "do_layer_norm_before", True, remedy=remedy)
    refuse_unless(reader, "_remove_final_layer_norm", False, remedy=remedy)
    refuse_unless(reader, "layer_norm_elementwise_affine", True, remedy=remedy)
    refuse_unless(
        reader, "word_embed_proj_dim", hidden_size,
        remedy=f"embeddings that are projected to hidden_size {hidden_size} are not supported",
    )  # fmt: skip
    refuse_unless(
        reader, "enable_bias", True, remedy="OPT without biases (Galactica) is not supported"
    )
    activation = reader.get_text("activation_function", "relu")
    values = {
        "vocab_size": reader.get_int("vocab_size"),
        "hidden_size": hidden_size,
        "num_hidden_layers": reader.get_int("num_hidden_layers"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_size": max(1, hidden_size // num_heads),
        "intermediate_size": reader.get_int("ffn_dim"),
        "norm_epsilon": 1e-5,  # torch's default, for which OPT has no field
        "max_position_embeddings": reader.get_int("max_position_embeddings", 2048),
        "hidden_act": name_activation(reader, activation),
    }
    return make_model(reader, layout, "OPTForCausalLM", values)


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's OPT config, whose own writer leaves the nested ones short."""
    mapping = {key: config["mapping"][key] for key in ("world_size", "tp_size", "pp_size")}
    return config | {
        "position_embedding_type": "learned_absolute",
        "do_layer_norm_before": True,
        "mapping": mapping,
        "quantization": {"quant_algo": None},
    }


FAMILY = Family(
    name="opt",
    model_type="opt",
    architectures=("OPTForCausalLM",),
    modules=MODULES,
    prefixes=("model.decoder.", "decoder."),
    is_tied_by_default=True,
    read_config=read_config,
    describe=describe,
)
