"""OPT, with the smaller embedding and the norms after each part that OPT-350m has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec.errors import SpecDecError
from specdec.files.casts import cast
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo
from specdec.model.architectures import ARCHITECTURES
from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader
from specdec.model.tensors import HEAD

from ..hf import HfFolder
from ..plan import ComputedTensors, SourceRows
from .base import Family, Layout, logger, read_plain_heads, refuse_unless

MIN_ROWS = 256
_HF_LAYER = "model.decoder.layers.{layer}."
_OUR_LAYER = "transformer.layers.{layer}."

MODULES: dict[str, tuple[str | SourceRows, ...]] = {
    "transformer.vocab_embedding": ("model.decoder.embed_tokens",),
    # The first two rows belong to padding.
    "transformer.position_embedding": (SourceRows("model.decoder.embed_positions", skipped=2),),
    _OUR_LAYER + "input_layernorm": (_HF_LAYER + "self_attn_layer_norm",),
    _OUR_LAYER + "attention.qkv": (
        _HF_LAYER + "self_attn.q_proj",
        _HF_LAYER + "self_attn.k_proj",
        _HF_LAYER + "self_attn.v_proj",
    ),
    _OUR_LAYER + "attention.dense": (_HF_LAYER + "self_attn.out_proj",),
    _OUR_LAYER + "post_layernorm": (_HF_LAYER + "final_layer_norm",),
    _OUR_LAYER + "mlp.fc": (_HF_LAYER + "fc1",),
    _OUR_LAYER + "mlp.proj": (_HF_LAYER + "fc2",),
    "transformer.ln_f": ("model.decoder.final_layer_norm",),
    "lm_head": ("lm_head",),
}  # fmt: skip


def read_config(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read an OPT config.json; an absent optional field has the value transformers gives it."""
    values = read_plain_heads(reader, "num_attention_heads", "hidden_size", "relu")
    is_post_norm = not reader.get_bool("do_layer_norm_before", True)
    remedy = "this variant of OPT is not supported; the usual ones have all norms, with weights"
    if not is_post_norm:
        refuse_unless(reader, "_remove_final_layer_norm", False, remedy=remedy)
    refuse_unless(reader, "layer_norm_elementwise_affine", True, remedy=remedy)
    refuse_unless(
        reader, "enable_bias", True, remedy="OPT without biases (Galactica) is not supported"
    )
    if reader.config.get("word_embed_proj_dim") not in (None, values["hidden_size"]):
        values["use_parallel_embedding"] = False  # as TensorRT-LLM's converter has it
        if layout.use_parallel_embedding:
            logger.warning(
                "%s: --use-parallel-embedding has no effect: embedding and positions stay whole"
                " where word_embed_proj_dim is not hidden_size",
                reader.path,
            )
    plain_arithmetic = ARCHITECTURES["OPTForCausalLM"]
    return values | {
        "num_hidden_layers": reader.get_int("num_hidden_layers"),
        "intermediate_size": reader.get_int("ffn_dim"),
        "norm_epsilon": 1e-5,  # torch's default, for which OPT has no field
        "max_position_embeddings": reader.get_int("max_position_embeddings", 2048),
        "own_arithmetic": dataclasses.replace(plain_arithmetic, is_post_norm=True)
        if is_post_norm
        else None,
    }


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the keys of TensorRT-LLM's OPT config, whose own writer leaves the nested ones short."""
    mapping = {key: config["mapping"][key] for key in ("world_size", "tp_size", "pp_size")}
    return config | {
        "position_embedding_type": "learned_absolute",
        "do_layer_norm_before": not model.arithmetic.is_post_norm,
        "mapping": mapping,
        "quantization": {"quant_algo": None},
    }


def fold_projections(folder: HfFolder, dtype: str) -> HfFolder:
    """Return the folder with embedding and head of the hidden size, as TensorRT-LLM has them.

    OPT-350m's embedding is smaller. One projection leads from it to the layers, another back to the
    head. Both are matrices only, so either may be multiplied with the table: as TensorRT-LLM's
    converter does it, in `dtype` first, then in float32 by torch, to the same bytes.
    """
    prefix = next(
        (name for name in OPT.prefixes if f"{name}embed_tokens.weight" in folder.tensors),
        OPT.prefixes[0],
    )
    table, inward, outward = (
        f"{prefix}{name}.weight" for name in ("embed_tokens", "project_in", "project_out")
    )
    size, width = folder.config.get("hidden_size"), folder.config.get("word_embed_proj_dim")
    if width in (None, size) or table not in folder.tensors:
        return folder
    is_tied = folder.config.get("tie_word_embeddings") is not False
    is_tied = is_tied and not OPT.stores_other_head(folder)
    head = table if is_tied or HEAD not in folder.tensors else HEAD
    shapes = {
        inward: (size, width), outward: (width, size),
        **{name: (folder.tensors[name].shape[0], width) for name in (table, head)},
    }  # fmt: skip
    _check_shapes(folder, shapes, width)
    # Its table, [V, P], its projection, and whether the projection is stored as [D, P].
    products = {table: (table, inward, True), HEAD: (head, outward, False)}

    def widen(name: str, values: Array) -> Any:
        import torch

        rounded = cast(values, folder.tensors[name].dtype, dtype)
        return torch.from_numpy(cast(rounded, dtype, "float32").copy())

    def compute(name: str, start: int, stop: int, columns: tuple[int, int] | None) -> Array:
        """Multiply, [V, D] in float32."""
        table_name, projection, is_turned = products[name]
        num_rows, num_columns = infos[name].shape
        # With few rows at a time, torch adds in another order.
        top = max(0, min(start, num_rows - MIN_ROWS))
        bottom = max(stop, min(num_rows, top + MIN_ROWS))
        rows = widen(table_name, folder.read_block(table_name, top, bottom))
        factor = widen(projection, folder.read(projection))
        product: Array = (rows @ (factor.T if is_turned else factor)).numpy()
        left_column, right_column = columns or (0, num_columns)
        return np.ascontiguousarray(product[start - top : stop - top, left_column:right_column])

    infos = {
        name: TensorInfo("float32", (folder.tensors[source].shape[0], shapes[inward][0]))
        for name, (source, _, _) in products.items()
    }
    folded = folder.substitute(ComputedTensors(folder, infos, compute), (inward, outward))
    folded.config = folder.config | {"tie_word_embeddings": False}
    return folded


def _check_shapes(folder: HfFolder, shapes: Mapping[str, tuple[Any, Any]], width: object) -> None:
    """Raise SpecDecError where tables or projections are missing or have other shapes."""
    for name, shape in shapes.items():
        info = folder.tensors.get(name)
        if info is None or info.shape != shape:
            raise SpecDecError(
                f"{folder.path}: word_embed_proj_dim is {width}, but {name} is"
                f" {'missing' if info is None else list(info.shape)}, not {list(shape)}",
                "its config.json and tensors disagree: take both from the same model",
            )


OPT = Family(
    name="opt",
    architectures=("OPTForCausalLM",),
    modules=MODULES,
    prefixes=("model.decoder.", "decoder."),
    ignored=(),
    is_tied_by_default=True,
    prepare=fold_projections,
    read_config=read_config,
    describe=describe,
)
