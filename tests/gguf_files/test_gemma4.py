"""Gemma 4's layers in a GGUF file, by a table in memory: kinds, sources of keys, sizes."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdec.errors import SpecDecError
from specdec.gguf import gemma4
from specdec.gguf.metadata import Metadata
from specdec.model.config import FULL, SLIDING

SIZES: dict[str, Any] = {
    "attention.sliding_window_pattern": [True, False, True, False, True, False],
    "attention.shared_kv_layers": 2, "attention.head_count_kv": [4, 2] * 3,
    "attention.key_length": 16, "attention.key_length_swa": 8, "feed_forward_length": 24,
}  # fmt: skip
ABSENT = object()


def make_data(*tensors: str, **changes: Any) -> Metadata:
    """Metadata of a file; a key's dots are written as `__`."""
    values = SIZES | {key.replace("__", "."): value for key, value in changes.items()}
    values = {f"gemma4.{key}": value for key, value in values.items() if value is not ABSENT}
    stored: Any = dict.fromkeys(tensors, SimpleNamespace(shape=(50, 8)))
    return Metadata(Path("m.gguf"), values | {"general.architecture": "gemma4"}, stored)


def test_sources_of_keys_are_transformers_in_every_pattern() -> None:
    """Of 6 layers and any that share: either both rules name one source, or it is refused.

    llama.cpp counts back from the last layer with keys; transformers takes the last of a kind.
    """
    num_read, num_refused = 0, 0
    for kinds in itertools.product((True, False), repeat=6):
        for num_reusing in range(7):
            data = make_data(
                attention__sliding_window_pattern=[*kinds],
                attention__shared_kv_layers=num_reusing,
            )
            types = [SLIDING if is_sliding else FULL for is_sliding in kinds]
            own_types = types[: 6 - num_reusing]
            is_readable = not kinds[-1] and num_reusing < 6
            for kind in set(types[6 - num_reusing :]) if is_readable else ():
                llama_cpp_source = len(own_types) - (2 if kind == SLIDING else 1)
                sources = [n for n, other in enumerate(own_types) if other == kind]
                is_readable = is_readable and sources[-1:] == [llama_cpp_source]
            if is_readable:
                layers = gemma4.read_layers(data, 6)
                assert (layers.types, layers.num_own) == (tuple(types), len(own_types))
                num_read += 1
            else:
                with pytest.raises(SpecDecError, match=r"sliding_window_pattern|shared_kv|layers"):
                    gemma4.read_layers(data, 6)
                num_refused += 1
    assert (num_read, num_refused) == (80, 368)


def test_sizes_of_both_kinds() -> None:
    """One number stands for all layers; values that are not the keys need heads of each layer."""
    fields = gemma4.read_gemma4_sizes(make_data(), 6)
    assert fields == {
        "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 24,
        "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": False, "attention_k_eq_v": True, "global_head_dim": 16,
        "num_global_key_value_heads": 2,
    }  # fmt: skip
    assert [gemma4.read_heads(fields, layer) for layer in (0, 1)] == [(8, 4), (16, 2)]
    wide = [24] * 4 + [48] * 2
    values = ("blk.1.attn_v.weight", "blk.3.attn_qkv.weight")
    fields = gemma4.read_gemma4_sizes(make_data(*values, feed_forward_length=wide), 6)
    assert (fields["use_double_wide_mlp"], fields["attention_k_eq_v"]) == (True, False)
    heads = {"head_dim": 16, "num_key_value_heads": 2}
    assert fields["per_layer_config"] == {"1": heads, "3": heads, "5": heads}
    even = make_data(*values, attention__head_count_kv=3)
    assert "per_layer_config" not in gemma4.read_gemma4_sizes(even, 6)
    all_full = {"attention__sliding_window_pattern": [False] * 6, "attention__head_count_kv": 3}
    fields = gemma4.read_gemma4_sizes(make_data(**all_full), 6)
    assert (fields["num_key_value_heads"], fields["num_global_key_value_heads"]) == (3, 3)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"attention__key_length": ABSENT}, "the key gemma4.attention.key_length is missing"),
        ({"attention__key_length_swa": ABSENT}, "attention.key_length_swa is missing"),
        ({"attention__value_length": 8}, "attention.value_length is 8 beside keys of 16"),
        ({"rope__dimension_count": 8}, "rope.dimension_count is 8 beside keys of 16"),
        ({"attention__head_count_kv": [4, 2]}, "not whole numbers from 1 to"),
        ({"attention__head_count_kv": [4, 2, 4, 3, 4, 2]}, "differs among its layers of full_"),
        ({"attention__head_count_kv": True}, "head_count_kv is True, not whole numbers"),
        ({"feed_forward_length": [24] * 3 + [48] * 3}, "all but the last 2 layers have one size"),
        ({"feed_forward_length": [24] * 5 + [48]}, "and these that or its double"),
        ({"attention__shared_kv_layers": -1}, "shared_kv_layers is -1 of 6 layers"),
        ({"attention__shared_kv_layers": True}, "shared_kv_layers is True of 6 layers"),
    ],
)  # fmt: skip
def test_sizes_that_are_refused(changes: dict[str, Any], fact: str) -> None:
    with pytest.raises(SpecDecError) as caught:
        gemma4.read_gemma4_sizes(make_data(**changes), 6)
    assert fact in caught.value.message
    assert "Hugging Face folder" in str(caught.value.hint)


def test_what_is_not_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divisors of 1 come first, huge ones after; tables and experts need all that is theirs."""
    factors = np.array([1.0, 1.0, 1e30, 1e30, 1e30, 1e30, 1e30, 1e30])
    monkeypatch.setattr(Metadata, "read_factors", lambda *_: factors)
    config = {"rope_theta": 1e6, "global_head_dim": 16}
    more = {"attention__sliding_window": 9, "rope__freq_base_swa": 1e3, "expert_count": 4}
    fields = gemma4.read_gemma4(make_data(**more), config)
    assert fields["rope_parameters"] == {
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        SLIDING: {"rope_type": "default", "rope_theta": 1e3},
    }
    assert fields["enable_moe_block"] is False
    mixed = make_data("blk.0.ffn_gate_inp.weight", **more, expert_used_count=2,
                      expert_feed_forward_length=6)  # fmt: skip
    fields = gemma4.read_gemma4(mixed, config)
    assert (fields["num_experts"], fields["top_k_experts"], fields["moe_intermediate_size"]) == (
        4, 2, 6,
    )  # fmt: skip
    tables = make_data("per_layer_token_embd.weight", **more, embedding_length_per_layer_input=4)
    fields = gemma4.read_gemma4(tables, config)
    assert (fields["hidden_size_per_layer_input"], fields["vocab_size_per_layer_input"]) == (4, 50)
    for tensors, changes, fact in (
        (("blk.0.ffn_gate_inp.weight",), {}, "expert_used_count is missing"),
        (("per_layer_token_embd.weight",), {}, "is 0, and the tensor per_layer_token_embd.weight"),
        ((), {"embedding_length_per_layer_input": 4}, "per_layer_token_embd.weight is missing"),
        ((), {"rope__freq_base_swa": 0.0}, "rope.freq_base_swa is 0.0, not a positive number"),
    ):
        with pytest.raises(SpecDecError, match=fact):
            gemma4.read_gemma4(make_data(*tensors, **more | changes), config)
    for wrong in (factors[:7], factors[::-1], np.where(factors == 1, 1, 2)):
        monkeypatch.setattr(Metadata, "read_factors", lambda *_, wrong=wrong: wrong)
        with pytest.raises(SpecDecError, match=r"rope_freqs.weight is .*, not 8 divisors"):
            gemma4.read_gemma4(make_data(**more), config)
