"""Granite 4, whose layers are Mamba-2 or attention, and the mixtures of Granite 3 and 4.

Every token takes a shared expert as well, which has no gate; without other experts it is the MLP.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from specdec.errors import shorten
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorInfo
from specdec.model.architectures import Architecture
from specdec.model.bounds import MAX_MODULES
from specdec.model.config import FULL, MAMBA, ModelConfig
from specdec.model.config_reader import ConfigReader
from specdec.model.mamba2 import KEY, Mamba2Sizes

from ..hf import HfFolder
from ..plan import ComputedTensors, SourceRows
from .base import (
    Family,
    Layout,
    add_keys,
    describe_rotary,
    read_decoder,
    read_experts,
    refuse_unless,
)
from .convolutions import flatten_convolutions
from .llama import (
    BESIDE_MLP,
    HF_LAYER,
    MULTIPLIERS,
    OUR_LAYER,
    Modules,
    read_multipliers,
)
from .llama import describe as describe_llama
from .qwen import describe_sizes

_EXPERTS, _SHARED = HF_LAYER + "block_sparse_moe.", HF_LAYER + "shared_mlp."
_EXPERT = _EXPERTS + "experts.{expert}."
_MAMBA, _OUR_MAMBA = HF_LAYER + "mamba.", OUR_LAYER + "mamba."
JOINT = ".shared_mlp.input_linear.weight"  # the rows that are activated, then the others
# Published names, and those that transformers 5 has in memory for the same.
_NEW_NAMES = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.weight": ".block_sparse_moe.router.weight",
    ".shared_mlp.output_linear.weight": ".shared_mlp.down_proj.weight",
}
# transformers' names of a layer's type, and the published ones.
LAYER_TYPES = {"linear_attention": MAMBA, MAMBA: MAMBA, FULL: FULL, "attention": FULL}


def _list_projections(model: ModelConfig) -> tuple[int, ...]:
    """Return the sections of a layer's first product: z, x, B, C, and the rates of steps."""
    assert model.mamba2 is not None
    c_rows, b_rows, x_rows = model.mamba2.sections
    return x_rows, x_rows, b_rows, c_rows, model.mamba2.num_value_heads


def _list_channels(model: ModelConfig) -> tuple[int, ...]:
    """Return the sections of a convolution's channels: x, B and C."""
    return _list_projections(model)[1:4]


def _list_taps(model: ModelConfig) -> tuple[int, ...]:
    """Return the sections of a convolution's taps."""
    assert model.mamba2 is not None
    return tuple(rows * model.mamba2.num_taps for rows in _list_channels(model))


def _deal(
    name: str, sections: Callable[[ModelConfig], tuple[int, ...]], order: tuple[int, ...]
) -> tuple[SourceRows, ...]:
    """Return the sections of a module in the order that a checkpoint has them."""
    return tuple(SourceRows(name, sections=sections, section=number) for number in order)


MAMBA_MODULES: Modules = {
    _OUR_MAMBA.removesuffix("."): (_MAMBA.removesuffix("."),),  # of A_log, D and dt_bias
    _OUR_MAMBA + "in_proj": _deal(_MAMBA + "in_proj", _list_projections, (3, 2, 1, 0, 4)),
    _OUR_MAMBA + "conv": _deal(_MAMBA + "conv1d", _list_taps, (2, 1, 0)),
    _OUR_MAMBA + "channels": _deal(_MAMBA + "conv1d", _list_channels, (2, 1, 0)),
    _OUR_MAMBA + "norm": (_MAMBA + "norm",),
    _OUR_MAMBA + "dense": (_MAMBA + "out_proj",),
}
DENSE_MODULES: Modules = BESIDE_MLP | {
    OUR_LAYER + "mlp.fc": (_SHARED + "gate_proj",),
    OUR_LAYER + "mlp.gate": (_SHARED + "up_proj",),
    OUR_LAYER + "mlp.proj": (_SHARED + "down_proj",),
}
MIXTURE_MODULES: Modules = BESIDE_MLP | {
    OUR_LAYER + "mlp.router": (_EXPERTS + "router",),
    # The matrix of each expert whose output is multiplied, then the one that is activated.
    OUR_LAYER + "mlp.fc": (_EXPERT + "up_proj", _EXPERT + "gate_proj"),
    OUR_LAYER + "mlp.proj": (_EXPERT + "down_proj",),
}
SHARED_MODULES: Modules = {
    OUR_LAYER + "mlp.shared_expert.fc": (_SHARED + "up_proj", _SHARED + "gate_proj"),
    OUR_LAYER + "mlp.shared_expert.proj": (_SHARED + "down_proj",),
}


def _name_types(types: Any) -> Any:
    """Return a list of layers' types under one name each; anything else as it is."""
    if not isinstance(types, list):
        return types
    return [LAYER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in types]


def _list_types(reader: ConfigReader) -> Any:
    """Return the types that a config.json lists under either of their names; None for neither."""
    names = ("layer_types", "layers_block_type")
    types, earlier_types = (_name_types(reader.config.get(name)) for name in names)
    if None not in (types, earlier_types) and types != earlier_types:
        values = " and ".join(f"{name} {shorten(reader.config[name])}" for name in names)
        reader.refuse(f"{values} disagree", "remove the wrong one")
    return earlier_types if types is None else types


def read_layers(reader: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """Read which layers attend; all are of Mamba-2 where nothing tells."""
    types = _list_types(reader)
    if types is None:
        types = [MAMBA for _ in range(min(num_layers, MAX_MODULES))]
    is_known = isinstance(types, list) and all(isinstance(kind, str) for kind in types)
    if not is_known or len(types) != num_layers or not {*types} <= {*LAYER_TYPES}:
        reader.refuse(
            f"layer_types is {shorten(types)} for {num_layers} layers",
            f"Granite is supported with layers of {', '.join(LAYER_TYPES)}",
        )
        types = [FULL for _ in range(min(num_layers, MAX_MODULES))]
    return tuple(LAYER_TYPES[kind] for kind in types)


def read_mamba(reader: ConfigReader, hidden_size: int) -> Mamba2Sizes:
    """Read the sizes of the layers of Mamba-2; a head's may be left to be computed."""
    num_heads = reader.get_int("mamba_n_heads", 128)
    width = reader.get_int("mamba_expand", 2) * hidden_size
    head_size = max(1, width // num_heads)
    if reader.config.get("mamba_d_head", "auto") != "auto":
        head_size = reader.get_int("mamba_d_head")
    if num_heads * head_size != width:
        reader.refuse(
            f"mamba_n_heads {num_heads} times mamba_d_head {head_size} is not mamba_expand times"
            f" hidden_size, {width}", "correct the wrong one of these sizes of Mamba-2",
        )  # fmt: skip
    refuse_unless(reader, "hidden_act", "silu", remedy="hybrids are supported with silu")
    limit = reader.config.get("time_step_limit")
    infinities: tuple[Any, ...] = (math.inf, {"__float__": "Infinity"})
    if limit is not None and limit not in [[0.0, infinity] for infinity in infinities]:
        reader.refuse(
            f"time_step_limit is {shorten(limit)}", "steps are supported that nothing limits"
        )
    return Mamba2Sizes(
        num_key_heads=reader.get_int("mamba_n_groups", 1), num_value_heads=num_heads,
        key_size=reader.get_int("mamba_d_state", 256), value_size=head_size,
        num_taps=reader.get_int("mamba_d_conv", 4),
        conv_bias=reader.get_bool("mamba_conv_bias", True),
        has_bias=reader.get_bool("mamba_proj_bias", False),
    )  # fmt: skip


def read_mixture(
    reader: ConfigReader, layout: Layout, *, has_shared: bool, shared_size: int = 0,
    **arithmetic: Any,
) -> dict[str, Any]:  # fmt: skip
    """Read the fields of `ModelConfig` of a mixture, or of a model that has no experts but one.

    has_shared: whether there is a shared expert, of shared_size if nothing is said. arithmetic:
    further flags.
    """
    has_experts = not has_shared or reader.config.get("num_local_experts", 8) != 0
    shared_inner = 0
    if has_shared:  # of size 0 there is none
        minimum = 0 if has_experts else 1
        shared_inner = reader.get_int("shared_intermediate_size", shared_size, minimum=minimum)
    inner = {} if has_experts else {"intermediate_size": shared_inner}
    values = read_decoder(
        reader.enter({"intermediate_size": 11008, **reader.config, **inner}), max_positions=2048
    )
    bias = reader.get_bool("attention_bias", False)
    flags = Architecture(qkv_bias=bias, dense_bias=bias, mlp_bias=False, **arithmetic)
    values |= read_multipliers(reader, layout, values)
    if not has_experts:
        return values | {"own_arithmetic": flags}
    values |= read_experts(reader, layout, values, num=8, top_k=2, renormalizes=True)
    if not has_shared:
        return values | {"attn_bias": bias}
    experts = dataclasses.replace(values["experts"], shared_inner=shared_inner, gates_shared=False)
    flags = dataclasses.replace(flags, mlp="experts", activations=("swiglu",))
    return values | {"experts": experts, "own_arithmetic": flags}


def read_hybrid(reader: ConfigReader, layout: Layout) -> dict[str, Any]:
    """Read the fields of `ModelConfig` of Granite 4."""
    num_layers = reader.get_int("num_hidden_layers")
    types, more = read_layers(reader, num_layers), dict[str, Any]()
    kind = reader.config.get("position_embedding_type")
    refuse_unless(
        reader, "position_embedding_type", "rope", "nope",
        remedy="Granite is supported with rotary positions (rope) or without (nope)",
    )  # fmt: skip
    if kind != "rope":
        more["layers_without_positions"] = tuple(range(min(num_layers, MAX_MODULES)))
    values = read_mixture(reader, layout, has_shared=True, shared_size=1024, **more)
    if MAMBA not in types:
        return values
    mamba2 = read_mamba(reader, values["hidden_size"])
    return values | {"mamba2": mamba2, "layer_types": types}


def prepare(folder: HfFolder, dtype: str) -> HfFolder:
    """Return the folder with its convolutions as vectors, and its shared experts' rows in two."""
    new_names = {
        name: name.replace(old, new)
        for name in folder.tensors for old, new in _NEW_NAMES.items() if name.endswith(old)
    }  # fmt: skip
    folder.rename(new_names, left_out=())
    folder = flatten_convolutions(folder, ".mamba.conv1d.weight")
    infos, rows = dict[str, TensorInfo](), dict[str, tuple[str, int]]()
    for name, info in folder.tensors.items():
        if name.endswith(JOINT):
            half = info.shape[0] // 2
            for number, part in enumerate(("gate_proj", "up_proj")):
                part_name = name.replace("input_linear", part)
                rows[part_name] = name, number * half
                infos[part_name] = TensorInfo(info.dtype, (half, *info.shape[1:]))

    def compute(name: str, start: int, stop: int, columns: tuple[int, int] | None) -> Array:
        joint, first = rows[name]
        return folder.read_block(joint, first + start, first + stop, columns)

    joints = {joint for joint, _ in rows.values()}
    return folder.substitute(ComputedTensors(folder, infos, compute), joints)


def describe(model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    """Add the multipliers, the sizes of Mamba-2 and of experts to a checkpoint's config.json."""
    config = add_keys(*MULTIPLIERS, base=describe_rotary)(model, config)
    if model.mamba2 is not None:
        config[KEY] = vars(model.mamba2)
    return config if model.experts is None else config | describe_sizes(model)


GRANITE_MOE = Family(
    name="granitemoe", architectures=("GraniteMoeForCausalLM",), modules=MIXTURE_MODULES,
    prepare=prepare, describe=add_keys(*MULTIPLIERS, base=describe_llama),
    read_config=functools.partial(read_mixture, has_shared=False),
)  # fmt: skip
GRANITE_SHARED = Family(
    name="granitemoeshared", architectures=("GraniteMoeSharedForCausalLM",),
    modules=MIXTURE_MODULES | SHARED_MODULES, dense_modules=DENSE_MODULES, prepare=prepare,
    describe=describe,
    read_config=functools.partial(read_mixture, has_shared=True),
)  # fmt: skip
GRANITE_HYBRID = Family(
    name="granitemoehybrid", architectures=("GraniteMoeHybridForCausalLM",),
    modules=MIXTURE_MODULES | SHARED_MODULES | MAMBA_MODULES, dense_modules=DENSE_MODULES,
    prepare=prepare, describe=describe, read_config=read_hybrid,
)  # fmt: skip
