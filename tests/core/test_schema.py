"""Checkpoint configurations: what is read, and a message with the numbers for what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.checkpoint.config import parse_checkpoint_config, read_checkpoint_config
from specdec.errors import SpecDecError
from specdec.methods import METHODS, find_method
from specdec.methods.medusa import MedusaParams
from specdec.methods.redrafter import ReDrafterParams

LLAMA: dict[str, Any] = {
    "architecture": "LlamaForCausalLM", "dtype": "float16", "vocab_size": 128, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 112, "norm_epsilon": 1e-5, "max_position_embeddings": 256,
    "hidden_act": "silu", "rotary_base": 10000, "mapping": {"tp_size": 1, "world_size": 1},
}  # fmt: skip
REDRAFTER: dict[str, Any] = {
    "architecture": "ReDrafterForLLaMALM", "redrafter_num_layers": 2, "redrafter_hidden_size": 64,
    "redrafter_exit_dim": 96, "redrafter_is_rnn": True, "redrafter_num_beams": 5,
    "redrafter_draft_len_per_beam": 4, "redrafter_greedy_search": True,
}  # fmt: skip
MEDUSA: dict[str, Any] = {
    "architecture": "MedusaForCausalLM", "num_medusa_heads": 4, "num_medusa_layers": 1,
    "max_draft_len": 63,
}  # fmt: skip


def test_plain_target_is_read_with_its_defaults() -> None:
    config = parse_checkpoint_config({**LLAMA, "num_key_value_heads": None})
    model = config.model
    assert (model.num_key_value_heads, model.head_size, model.tp_size) == (4, 16, 1)
    assert (config.method, config.drafter, config.mode) == (None, None, None)
    assert config.raw["intermediate_size"] == 112


@pytest.mark.parametrize(
    ("architecture", "keys", "mode", "drafter", "sizes"),
    [
        *((name, REDRAFTER, "explicit_draft_tokens", ReDrafterParams(
            num_layers=2, hidden_size=64, exit_dim=96, is_rnn=True, num_beams=5,
            draft_len_per_beam=4, greedy_search=True,
        ), (20, 4)) for name in METHODS["redrafter"].architectures),
        *((name, MEDUSA, "medusa", MedusaParams(num_heads=4, num_layers=1, max_draft_len=63),
           (63, 4)) for name in ("MedusaForCausalLM", "MedusaLlamaForCausalLM")),
    ],
)  # fmt: skip
def test_a_drafter_is_read(
    architecture: str, keys: dict[str, Any], mode: str, drafter: Any, sizes: tuple[int, int]
) -> None:
    config = parse_checkpoint_config({**LLAMA, **keys, "architecture": architecture})
    assert config.mode == mode
    assert config.model.architecture == "LlamaForCausalLM"
    assert config.drafter == drafter
    assert drafter.to_checkpoint().items() <= keys.items()
    assert (drafter.max_draft_tokens, drafter.max_draft_depth) == sizes


@pytest.mark.parametrize(
    ("keys", "architecture"),
    [
        ({}, "LlamaForCausalLM"),
        ({"model_type": "llama"}, "LlamaForCausalLM"),
        ({"model_type": "qwen2", "qwen_type": "qwen2"}, "Qwen2ForCausalLM"),
        ({"base_architecture": "MistralForCausalLM", "model_type": "llama"}, "MistralForCausalLM"),
        ({"base_architecture": "MedusaQwen2ForCausalLM", "decoder": "qwen"}, "Qwen2ForCausalLM"),
    ],
)
def test_the_target_is_found_in_either_lines_config(
    keys: dict[str, Any], architecture: str
) -> None:
    config = parse_checkpoint_config({**LLAMA, **MEDUSA, **keys})
    assert config.model.architecture == architecture


def test_input_projection_is_there_unless_sizes_agree() -> None:
    drafter = parse_checkpoint_config({**LLAMA, **REDRAFTER}).drafter
    wide = parse_checkpoint_config({**LLAMA, **REDRAFTER, "redrafter_exit_dim": 128}).drafter
    assert isinstance(drafter, ReDrafterParams)
    assert isinstance(wide, ReDrafterParams)
    assert drafter.has_input_proj
    assert not wide.has_input_proj


TARGETS_FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"architecture": "LlamaForCausalLMM"}, ["'LlamaForCausalLMM'", "did you mean LlamaFor"]),
    ({"architecture": None}, ["architecture None is not supported"]),
    ({"architecture": ["LlamaForCausalLM"]}, ["is not supported"]),
    ({"vocab_size": None}, ["vocab_size is None"]),
    ({"vocab_size": "128"}, ["vocab_size is '128'"]),
    ({"hidden_size": True}, ["hidden_size is True"]),
    ({"hidden_size": 64.0, "dtype": 16}, ["2 problems", "hidden_size is 64.0", "dtype is 16"]),
    ({"dtype": "int8"}, ["dtype 'int8'"]),
    ({"vocab_size": 0, "num_hidden_layers": -1}, ["vocab_size=0", "num_hidden_layers=-1"]),
    ({"num_attention_heads": 0}, ["num_attention_heads=0"]),
    ({"norm_epsilon": 0}, ["norm_epsilon=0"]),
    ({"norm_epsilon": float("nan")}, ["norm_epsilon=nan"]),
    ({"rotary_base": -1.0}, ["rotary_base=-1.0"]),
    ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
    ({"num_key_value_heads": True}, ["num_key_value_heads is True"]),
    ({"head_size": 15}, ["head_size=15 with rotary_pct=1.0 rotates 15 dimensions"]),
    ({"head_size": "16"}, ["head_size is '16'"]),
    ({"attn_bias": 1}, ["attn_bias is 1"]),
    ({"rotary_scaling": "linear"}, ["rotary_scaling is 'linear'"]),
    ({"rotary_scaling": {"rope_type": "llama3"}}, ["'llama3' has no factor, low_freq_factor"]),
    ({"embedding_sharding_dim": 2}, ["embedding_sharding_dim=2"]),
    ({"num_hidden_layers": 10**9}, ["num_hidden_layers=1000000000 is more than 1000"]),
    ({"head_size": 10**9}, ["head_size=1000000000 is more than 65536"]),
    ({"vocab_size": 2**62}, ["vocab_size=4611686018427387904 is more than 2147483647"]),
    ({"max_position_embeddings": 2**31}, ["max_position_embeddings=2147483648 is more than"]),
    ({"original_max_position_embeddings": 1}, ["original_max_position_embeddings=1"]),
    ({"mapping": {"tp_size": 10**9}, "num_attention_heads": 10**9}, ["tp_size=1000000000 is"]),
    ({"mapping": {"pp_size": 10**9}}, ["pp_size=1000000000 is more than 1024"]),
    ({"mapping": 4}, ["mapping is 4, not an object"]),
    ({"mapping": {"tp_size": "2"}}, ["mapping.tp_size is '2'"]),
    ({"mapping": {"tp_size": 0}}, ["tp_size=0"]),
    ({"mapping": {"pp_size": 3}}, ["pp_size=3"]),
    ({"mapping": {"tp_size": 3}}, ["num_attention_heads=4", "=112", "over tp_size=3"]),
    ({"mapping": {"tp_size": 4}, "intermediate_size": 110}, ["=110", "over tp_size=4"]),
    ({"linear_attention": 3}, ["linear_attention is 3, not an object"]),
    ({"linear_attention": {"num_taps": "4"}}, ["num_key_heads is None", "num_taps is '4'"]),
    ({"linear_attention": {"num_tap": 4}}, ["num_taps is None", "'num_tap', which is not known"]),
    ({"layer_types": ["linear_attention"] * 2}, ["disagree on whether there are layers of"]),
    (
        {
            "mapping": {"tp_size": 2}, "use_parallel_embedding": True,
            "embedding_sharding_dim": 1, "hidden_size": 63, "head_size": 16,
        },
        ["hidden_size=63", "over tp_size=2"],
    ),
]  # fmt: skip
REDRAFTERS_FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"redrafter_num_beams": 0}, ["redrafter_num_beams is 0"]),
    ({"redrafter_num_layers": -1}, ["redrafter_num_layers is -1"]),
    ({"redrafter_exit_dim": None}, ["redrafter_exit_dim is None"]),
    ({"redrafter_exit_dim": True}, ["redrafter_exit_dim is True"]),
    ({"redrafter_is_rnn": 1}, ["redrafter_is_rnn is 1, not true or false"]),
    ({"redrafter_num_beam": 3}, ["unknown keys redrafter_num_beam"]),
    ({"redrafter_hidden_size": 32}, ["hidden_size=32 differs from the target's 64"]),
    ({"redrafter_exit_dim": 97, "mapping": {"tp_size": 2}}, ["exit_dim=97", "tp_size=2"]),
    ({"base_model_architecture": "Falcon"}, ["'Falcon' is not supported"]),
    ({"redrafter_num_layers": 10**9}, ["num_layers is 1000000000, not a whole number from 0"]),
    ({"redrafter_draft_len_per_beam": 100_000}, ["is 100000, not a whole number from 1 to"]),
    (
        {"redrafter_num_beams": 65, "redrafter_draft_len_per_beam": 64},
        ["65 beams of 64 draft tokens are 4160, more than 4096"],
    ),
]  # fmt: skip
MEDUSAS_FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"num_medusa_heads": 0}, ["num_medusa_heads is 0, not a whole number from 1 to 1000"]),
    ({"num_medusa_heads": None}, ["num_medusa_heads is None"]),
    ({"num_medusa_heads": 10**9}, ["num_medusa_heads is 1000000000, not a whole number from 1"]),
    ({"num_medusa_layers": -1}, ["num_medusa_layers is -1, not a whole number from 0 to 1000"]),
    ({"max_draft_len": True}, ["max_draft_len is True"]),
    ({"max_draft_len": 10**9}, ["max_draft_len is 1000000000, not a whole number from 1"]),
    (
        {"num_medusa_heads": 1000, "num_medusa_layers": 1000},
        ["1000 Medusa heads of 1000 layers are 1000000, more than 1000"],
    ),
    ({"medusa_hidden_act": "gelu"}, ["unknown keys medusa_hidden_act"]),
    ({"base_architecture": "MedusaFalcon"}, ["'Falcon' is not supported"]),
    ({"base_architecture": 7}, ["7 is not supported"]),
    (
        {"hidden_size": 66, "head_size": 16, "num_key_value_heads": 4,
         "mapping": {"tp_size": 4}},
        ["the Medusa heads' hidden_size=66 does not split over tp_size=4"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("drafter", "change", "messages"),
    [
        (drafter, *row)
        for drafter, rows in (
            ({}, TARGETS_FAULTS), (REDRAFTER, REDRAFTERS_FAULTS), (MEDUSA, MEDUSAS_FAULTS),
        )
        for row in rows
    ],
)  # fmt: skip
def test_what_is_inconsistent_is_refused_with_its_numbers(
    drafter: dict[str, Any], change: dict[str, Any], messages: list[str]
) -> None:
    with pytest.raises(SpecDecError) as caught:
        parse_checkpoint_config({**LLAMA, **drafter, **change})
    for message in messages:
        assert message in caught.value.message
    assert caught.value.hint


def test_split_hint_lists_sizes_that_do_split() -> None:
    with pytest.raises(SpecDecError) as caught:
        parse_checkpoint_config({**LLAMA, "mapping": {"tp_size": 3}})
    assert caught.value.hint == "use a tp_size of 1, 2, 4"
    for tp_size in (1, 2, 4):
        parse_checkpoint_config({**LLAMA, "mapping": {"tp_size": tp_size}})


def test_every_architecture_belongs_to_one_method() -> None:
    owners = [(a, m.name) for m in METHODS.values() for a in m.architectures]
    assert len({architecture for architecture, _ in owners}) == len(owners)
    for architecture, name in owners:
        found = find_method({"architecture": architecture})
        assert found is not None
        assert (found.name, METHODS[name]) == (name, found)


def test_folder_is_read(tmp_path: Path) -> None:
    with pytest.raises(SpecDecError, match="absent does not exist"):
        read_checkpoint_config(tmp_path / "absent")
    with pytest.raises(SpecDecError, match="is an empty folder, not a checkpoint folder"):
        read_checkpoint_config(tmp_path)
    (tmp_path / "manifest.json").touch()
    with pytest.raises(SpecDecError, match=r"config.json does not exist"):
        read_checkpoint_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_checkpoint_config(tmp_path).model.vocab_size == 128
