"""Gemma 4 in a GGUF file: layers of two kinds, which differ in heads, and the last also in MLPs.

Keys are those of llama.cpp at 0c1e57098 (conversion/gemma.py and src/models/gemma4.cpp).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import shorten
from specdec.model.bounds import MAX_SIZE
from specdec.model.config import FULL, SLIDING

from .metadata import Metadata

UNROTATED = 1e29  # at least the divisor of frequencies of what is not rotated


@dataclasses.dataclass(frozen=True)
class Layers:
    """Kinds of the layers. num_own: the first of them, which have keys and values of their own."""

    types: tuple[str, ...]
    num_own: int

    def take(self, data: Metadata, key: str, values: Sequence[Any], kind: str) -> Any:
        """Return the value that all layers of a kind have; None where there is none of it."""
        different_values = {v for v, other in zip(values, self.types, strict=True) if other == kind}
        if len(different_values) > 1:
            data.refuse(f"{key} differs among its layers of {kind}: {shorten(list(values))}")
        return next(iter(different_values), None)


def read_layers(data: Metadata, num_layers: int) -> Layers:
    """Read which layers have a window, and how many of the last read the keys of earlier ones."""
    pattern = data.get(key := "attention.sliding_window_pattern", all_layers=True)
    if not isinstance(pattern, list) or len(pattern) != num_layers or pattern[-1]:
        data.refuse(
            f"{key} is {shorten(pattern)}, not a list for {num_layers} layers, the last of which"
            " sees all tokens"
        )
    types = tuple(SLIDING if is_sliding else FULL for is_sliding in pattern)
    num_reusing = data.get("attention.shared_kv_layers", 0)
    if type(num_reusing) is not int or not 0 <= num_reusing < num_layers:
        data.refuse(f"attention.shared_kv_layers is {shorten(num_reusing)} of {num_layers} layers")
    layers = Layers(types, num_layers - num_reusing)
    for kind in set(types[layers.num_own :]):
        # llama.cpp lets them read the last layer with keys, or that before it, by their kind.
        source = layers.num_own - (2 if kind == SLIDING else 1)
        if source < 0 or types[source] != kind:
            data.refuse(
                f"layers of {kind} after layer {layers.num_own - 1} would read the keys of layer"
                f" {source}, which is none of these"
            )
    return layers


def _list_counts(data: Metadata, key: str, num_layers: int) -> list[int]:
    """List a number of each layer, which a file has for each or for all."""
    value = data.get(key, all_layers=True)
    values = value if isinstance(value, list) else [value] * num_layers
    is_right = len(values) == num_layers and all(
        type(count) is int and 1 <= count <= MAX_SIZE for count in values
    )
    if not is_right:
        data.refuse(
            f"{key} is {shorten(value)}, not whole numbers from 1 to {MAX_SIZE} for {num_layers}"
            " layers"
        )
    return values


def _check_heads(data: Metadata, full_size: int, size: int) -> None:
    """Raise SpecDecError unless values, and what is rotated, are as large as keys."""
    for name, expected in (
        ("attention.value_length", full_size), ("attention.value_length_swa", size),
        ("rope.dimension_count", full_size), ("rope.dimension_count_swa", size),
    ):  # fmt: skip
        if (value := data.get(name, expected)) != expected:
            data.refuse(f"{name} is {shorten(value)} beside keys of {expected}")


def _find_values(data: Metadata, layers: Layers) -> bool:
    """Return whether layers of full attention have values that are not the keys: all or none."""
    has_values = {
        f"blk.{layer}.attn_v.weight" in data.tensors
        or f"blk.{layer}.attn_qkv.weight" in data.tensors
        for layer, kind in enumerate(layers.types[: layers.num_own]) if kind == FULL
    }  # fmt: skip
    if len(has_values) > 1:
        data.refuse(f"some of its layers of {FULL} have the tensor attn_v, others have not")
    return has_values != {False}


def read_gemma4_sizes(data: Metadata, num_layers: int) -> dict[str, Any]:
    """Read the sizes of heads and MLPs, as config.json has them."""
    layers = read_layers(data, num_layers)
    counts = _list_counts(data, key := "attention.head_count_kv", num_layers)
    full_count = layers.take(data, key, counts, FULL)
    count = layers.take(data, key, counts, SLIDING) or full_count
    full_size, size = data.count("attention.key_length"), data.count("attention.key_length_swa")
    _check_heads(data, full_size, size)
    inner_sizes = _list_counts(data, key := "feed_forward_length", num_layers)
    own_sizes, reusing_sizes = inner_sizes[: layers.num_own], set(inner_sizes[layers.num_own :])
    inner = own_sizes[0]
    if set(own_sizes) != {inner} or reusing_sizes not in (set(), {inner}, {2 * inner}):
        data.refuse(
            f"{key} is {shorten(inner_sizes)}: all but the last {num_layers - layers.num_own}"
            " layers have one size, and these that or its double"
        )
    has_values = _find_values(data, layers)
    fields = {
        "num_key_value_heads": count, "head_dim": size, "intermediate_size": inner,
        "layer_types": list(layers.types), "num_kv_shared_layers": num_layers - layers.num_own,
        "use_double_wide_mlp": reusing_sizes == {2 * inner},
        "attention_k_eq_v": not has_values,
        "global_head_dim": full_size, "num_global_key_value_heads": full_count,
    }  # fmt: skip
    if has_values and full_count != count:
        # transformers reads the number of full attention's keys only where these are the values.
        heads = {"head_dim": full_size, "num_key_value_heads": full_count}
        overrides = {str(n): heads for n, kind in enumerate(layers.types) if kind == FULL}
        fields["per_layer_config"] = overrides
    return fields


def read_heads(config: Mapping[str, Any], layer: int) -> tuple[int, int]:
    """Return the size of a layer's heads, and how many of keys it has."""
    kind = "" if config.get("layer_types", [])[layer : layer + 1] != [FULL] else "global_"
    size = config.get(f"{kind}head_dim", config["head_dim"])
    return size, config.get(f"num_{kind}key_value_heads", config["num_key_value_heads"])


def _read_proportion(data: Metadata, size: int) -> float:
    """Read the part of a head of full attention that is rotated: the others' divisors are huge."""
    factors = data.read_factors(name := "rope_freqs.weight").tolist()
    num_rotated = sum(factor == 1 for factor in factors)
    rotated, others = factors[:num_rotated], factors[num_rotated:]
    if len(factors) != size // 2 or set(rotated) - {1.0} or min(others, default=1e30) < UNROTATED:
        data.refuse(
            f"{name} is {shorten(factors)}, not {size // 2} divisors, of 1 and then of"
            f" {UNROTATED:g} at least"
        )
    return float(2 * num_rotated / size)


def read_gemma4(data: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read what Gemma 4 has besides its sizes."""
    if "rope_scaling" in config:
        data.refuse(f"it scales rotary frequencies: {shorten(config['rope_scaling'])}")
    full_rotary = {
        "rope_type": "proportional", "rope_theta": config["rope_theta"],
        "partial_rotary_factor": _read_proportion(data, config["global_head_dim"]),
    }  # fmt: skip
    local_base = data.positive("rope.freq_base_swa", 10000.0)
    return _read_inputs(data) | _read_mixture(data) | {
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
        "sliding_window": data.count("attention.sliding_window"),
        "final_logit_softcapping": data.get("final_logit_softcapping") or None,
        "rope_parameters": {
            FULL: full_rotary, SLIDING: {"rope_type": "default", "rope_theta": local_base},
        },
    }  # fmt: skip


def _read_inputs(data: Metadata) -> dict[str, Any]:
    """Read the sizes of the table of what each layer reads of a token; 0 where there is none."""
    size = data.get(key := "embedding_length_per_layer_input", 0)
    if type(size) is not int or not 0 <= size <= MAX_SIZE:
        data.refuse(f"{key} is {shorten(size)}")
    table = data.tensors.get(name := "per_layer_token_embd.weight")
    if bool(size) != (table is not None):
        data.refuse(f"{key} is {size}, and the tensor {name} is {'there' if table else 'missing'}")
    return {
        "hidden_size_per_layer_input": size,
        "vocab_size_per_layer_input": 0 if table is None else table.shape[0],
    }


def _read_mixture(data: Metadata) -> dict[str, Any]:
    """Read the experts beside the MLP of each layer; there are none where no layer has a router.

    Then llama.cpp and transformers read no number of them, which a file may have all the same.
    """
    keys = ("expert_count", "expert_used_count", "expert_feed_forward_length")
    if not any(name.endswith(".ffn_gate_inp.weight") for name in data.tensors):
        data.used_keys.update(keys)
        return {"enable_moe_block": False}
    num_experts, top_k, inner = map(data.count, keys)
    return {
        "enable_moe_block": True, "num_experts": num_experts, "top_k_experts": top_k,
        "moe_intermediate_size": inner,
    }  # fmt: skip
