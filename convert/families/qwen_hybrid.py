"""Qwen3.5 and 3.6, their mixtures of experts, and Qwen3-Next: three of four layers are linear.

The others attend with a gate for each head and rotate a quarter of it. All norms but the gated one
are stored less one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec.errors import SpecDecError, shorten
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo
from specdec.model.architectures import Architecture
from specdec.model.config import FULL, LINEAR, list_layer_types
from specdec.model.config_reader import ConfigReader
from specdec.model.linear_attention import LinearAttention

from ..hf import HfFolder
from ..plan import CASTABLE, Computed
from .base import (
    Family,
    Layout,
    describe_rotary,
    read_decoder,
    read_experts,
    refuse_unless,
)
from .llama import BESIDE_MLP, MODULES, OURS, SELF, Modules
from .qwen import EXPERTS, HEAD_NORMS, SHARED, describe_sizes, refuse_uneven_layers

_ATTENTION, _LINEAR = SELF + "self_attn.", SELF + "linear_attn."
_OURS_LINEAR = OURS + "linear_attention"

# `prepare` gives every folder these names: gate_proj is a half of q_proj.
_SHARED_MODULES: Modules = {
    OURS + "attention.qkv": tuple(f"{_ATTENTION}{part}_proj" for part in ("q", "k", "v", "gate")),
    _OURS_LINEAR: (_LINEAR.removesuffix("."),),  # of A_log and dt_bias
    _OURS_LINEAR + ".qkvz": (_LINEAR + "in_proj_qkv", _LINEAR + "in_proj_z"),
    _OURS_LINEAR + ".ba": (_LINEAR + "in_proj_b", _LINEAR + "in_proj_a"),
    _OURS_LINEAR + ".conv": (_LINEAR + "conv1d",),
    _OURS_LINEAR + ".norm": (_LINEAR + "norm",),
    _OURS_LINEAR + ".dense": (_LINEAR + "out_proj",),
}


def read_linear(reader: ConfigReader) -> LinearAttention:
    """Read the sizes of linear attention; the defaults are transformers'."""
    return LinearAttention(
        num_key_heads=reader.get_int("linear_num_key_heads", 16),
        num_value_heads=reader.get_int("linear_num_value_heads", 32),
        key_size=reader.get_int("linear_key_head_dim", 128),
        value_size=reader.get_int("linear_value_head_dim", 128),
        num_taps=reader.get_int("linear_conv_kernel_dim", 4),
    )


def read_hybrid(
    reader: ConfigReader, activation: str = "silu", num_kv_heads: int = 4
) -> dict[str, Any]:
    """Read the fields of `ModelConfig` that all of these models have.

    What says how positions of images are told (M-RoPE) changes nothing where there is text alone.
    """
    rotary = reader.get_object("rope_parameters")
    text = {key: value for key, value in rotary.items() if not key.startswith("mrope_")}
    values = read_decoder(
        reader.enter({**reader.config, "rope_parameters": text}), max_positions=32768,
        num_kv_heads=num_kv_heads, head_dim=256, rotary_fraction=0.25,
    )  # fmt: skip
    refuse_unless(reader, "hidden_act", "silu", remedy="hybrids are supported with silu")
    bias, num_layers = reader.get_bool("attention_bias", False), values["num_hidden_layers"]
    types: tuple[Any, ...] = list_layer_types(
        num_layers, reader.get_int("full_attention_interval", 4), kind=LINEAR
    )
    if isinstance(listed := reader.config.get("layer_types"), list):
        types = tuple(listed)
    if not {LINEAR} <= set(types) <= {LINEAR, FULL} or len(types) != num_layers:
        reader.refuse(
            f"layer_types is {shorten(list(types))} for {num_layers} layers",
            f"hybrids are supported whose layers are {LINEAR} or {FULL}",
        )
        types = (LINEAR,) * num_layers
    return {
        **values,
        "linear_attention": read_linear(reader),
        "layer_types": types,
        "own_arithmetic": Architecture(
            qk_norm=True, adds_one=True, qkv_bias=bias, dense_bias=bias, gates_attention=True,
            activations=(activation,), mlp="gated" if activation == "silu" else "experts",
        ),
    }  # fmt: skip


def read_mixture(
    reader: ConfigReader, layout: Layout, *, num: int = 256, top_k: int = 8, is_next: bool = False
) -> dict[str, Any]:
    """Read a mixture's config.json, which need not tell the size of a dense MLP.

    num, top_k: transformers' defaults. is_next: whether it is Qwen3-Next's.
    """
    if not is_next:
        refuse_unless(
            reader, "norm_topk_prob", True,
            remedy="Qwen3.5's mixtures always normalize the weights of the chosen experts",
        )  # fmt: skip
    refuse_uneven_layers(reader)
    inner = reader.get_int("moe_intermediate_size", 512)
    values = read_hybrid(reader.enter({"intermediate_size": inner, **reader.config}), "swiglu", 2)
    return values | read_experts(
        reader, layout, values, num=num, top_k=top_k, inner=("moe_intermediate_size", 512),
        shared_inner=("shared_expert_intermediate_size", 512),
        renormalizes=reader.get_bool("norm_topk_prob", True),
    )  # fmt: skip


def prepare(folder: HfFolder, dtype: str) -> HfFolder:
    """Return the folder with the names of `_SHARED_MODULES`.

    q_proj has each head's query and its gate one below the other. Qwen3-Next has queries, keys,
    values and gates of each key head together. The convolution becomes a vector.
    """
    reader = ConfigReader(folder.config, folder.path / "config.json")
    heads, size = reader.get_int("num_attention_heads"), reader.get_int("head_dim", 256)
    dealt = _list_parts(heads, size, read_linear(reader))
    reader.finish()
    sources: dict[str, tuple[str, Array]] = {}
    infos: dict[str, TensorInfo] = {}
    replaced = []
    for name, info in folder.tensors.items():
        stem, _, kind = name.rpartition(".")
        module = stem.rpartition(".")[2]
        if module not in dealt or kind not in ("weight", "bias"):
            continue
        if info.dtype not in CASTABLE:
            raise SpecDecError(
                f"{folder.path}: {name} is {info.dtype}: of a hybrid, quantized weights cannot be"
                " kept",
                "give --dequantize, or convert the unquantized model",
            )
        wanted = dealt[module][0] * sum(rows for _, rows in dealt[module][1])
        if len(info.shape) == 0 or wanted != info.shape[0]:
            raise SpecDecError(
                f"{folder.path}: {name} is {list(info.shape)}, and config.json tells of {wanted}"
                " rows",
                "its config.json and tensors disagree: take both from the same model",
            )
        replaced.append(name)
        for part, rows in _deal(*dealt[module]).items():
            own = f"{stem.rpartition('.')[0]}.{part}.{kind}"
            shape = (len(rows), *info.shape[1:])
            # A convolution's is [channels, 1, taps].
            shape = (math.prod(shape),) if len(shape) == 3 else shape
            sources[own], infos[own] = (name, rows), TensorInfo(info.dtype, shape)

    def compute(name: str, start: int, stop: int, columns: tuple[int, int] | None) -> Array:
        own, rows = sources[name]
        if len(folder.tensors[own].shape) == 3:
            return folder.read(own).reshape(-1)[start:stop]
        rows = rows[start:stop]
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        return np.concatenate(
            [folder.read_block(own, int(run[0]), int(run[-1]) + 1, columns) for run in runs]
        )

    return folder.substitute(Computed(folder, infos, compute, sources), replaced)


def _list_parts(
    heads: int, size: int, sizes: LinearAttention
) -> dict[str, tuple[int, list[tuple[str, int]]]]:
    """By module: how many groups of rows it has, and what each group holds: modules and rows."""
    num, share = sizes.num_key_heads, sizes.num_value_heads // max(1, sizes.num_key_heads)
    keys, values = ("in_proj_qkv", sizes.key_size), share * sizes.value_size
    return {
        "q_proj": (heads, [("q_proj", size), ("gate_proj", size)]),
        "conv1d": (1, [("conv1d", sizes.num_channels)]),
        "in_proj_qkvz": (num, [keys, keys, ("in_proj_qkv", values), ("in_proj_z", values)]),
        "in_proj_ba": (num, [("in_proj_b", share), ("in_proj_a", share)]),
    }


def _deal(num_groups: int, parts: list[tuple[str, int]]) -> dict[str, Array]:
    """The rows of each module that groups hold which lie one below the other."""
    ends = np.cumsum([size for _, size in parts])
    rows = np.split(np.arange(num_groups * ends[-1]).reshape(num_groups, -1), ends[:-1], axis=1)
    return {
        name: np.concatenate([
            own.reshape(-1) for own, (other, _) in zip(rows, parts, strict=True) if other == name
        ])
        for name, _ in parts
    }  # fmt: skip


def describe_hybrid(model: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Add the sizes of linear attention and of experts to a checkpoint's config.json."""
    config = describe_rotary(model, config) | {"linear_attention": vars(model.linear_attention)}
    return config if model.experts is None else config | describe_sizes(model)


_COMMON: Mapping[str, Any] = {
    "prefixes": ("model.", "model.language_model.", ""), "prepare": prepare,
    "describe": describe_hybrid,
}  # fmt: skip
_MIXTURE_MODULES = BESIDE_MLP | HEAD_NORMS | EXPERTS | SHARED | _SHARED_MODULES
QWEN3_5 = Family(
    name="qwen3_5", model_type="qwen3_5_text", architectures=("Qwen3_5ForCausalLM",),
    modules=MODULES | HEAD_NORMS | _SHARED_MODULES,
    read_config=lambda reader, _: read_hybrid(reader), **_COMMON,
)  # fmt: skip
QWEN3_5_MOE = Family(
    name="qwen3_5_moe", model_type="qwen3_5_moe_text", architectures=("Qwen3_5MoeForCausalLM",),
    modules=_MIXTURE_MODULES, read_config=read_mixture, **_COMMON,
)  # fmt: skip
QWEN3_NEXT = Family(
    name="qwen3_next", architectures=("Qwen3NextForCausalLM",),
    modules=_MIXTURE_MODULES, **_COMMON,
    read_config=functools.partial(read_mixture, num=512, top_k=10, is_next=True),
)  # fmt: skip
