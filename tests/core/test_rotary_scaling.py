"""Rotary scalings: what transformers writes passes, what no model can mean is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from specdec.checkpoint.config import parse_checkpoint_config
from specdec.errors import SpecDecError
from specdec.methods.eagle import EagleParams
from specdec.model.config_reader import ConfigReader, read_rotary
from specdec.model.rotary_scaling import find_scaling_problems, get_kind
from tests.core.test_schema import LLAMA

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
# As model folders have them, by transformers 4.57 and before, and 5.
KNOWN: list[dict[str, Any]] = [
    {"type": "linear", "factor": 2},
    {"rope_type": "linear", "type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
    {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "finetuned": True},
    {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512,
        "attention_factor": 1.1, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
        "mscale_all_dim": 0, "truncate": False, "partial_rotary_factor": 1.0,
    },
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": None},
    {"type": "su", **FACTORS},
    {"type": "su", "rope_type": "longrope", **FACTORS},
    {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 512, **FACTORS},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
]  # fmt: skip
SENSELESS: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "llama3"}, "has no factor, low_freq_factor, high_freq_factor, original_max"),
    ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "not more than low_freq_factor"),
    ({"rope_type": "llama3", **LLAMA3, "factor": None}, "has no factor"),
    ({"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 0}, "embeddings 0"),
    ({"type": "linear", "factor": 0}, "factor 0"),
    ({"type": "linear", "factor": -2.0}, "factor -2.0"),
    ({"type": "linear", "factor": 1e300}, "factor 1e+300"),
    ({"type": "linear", "factor": [2.0]}, "factor [2.0]"),
    ({"rope_type": "yarn", "factor": 4.0, "extrapolation": 1, "beta": 2}, "unknown beta, extrap"),
    ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}, "less than beta_slow"),
    ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 5e-324}, "beta_fast 5e-324"),
    ({"rope_type": "longrope", **FACTORS, "long_factor": [1.0]}, "long_factor of 1 values, not 8"),
    ({"rope_type": "longrope", "factor": 3.0, "original_max_position_embeddings": 512, **FACTORS},
     "is 4 times the original 512"),
    ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "rope_type 'linear' and type 'yarn'"),
    ({"rope_type": "default", "type": "linear", "factor": 2.0}, "which disagree"),
    ({"rope_type": "mrope", "mrope_section": [1]}, "'mrope' is not supported"),
    ({"rope_type": 7}, "rotary scaling 7 is not supported"),
    ({"factor": 2.0}, "unknown factor"),
]  # fmt: skip


def find(scaling: dict[str, Any], **sizes: Any) -> list[tuple[str, str]]:
    values = {"rotary_size": 16, "rotary_base": 1e4, "max_positions": 2048} | sizes
    return find_scaling_problems(copy.deepcopy(scaling), **values)


@pytest.mark.parametrize("scaling", KNOWN, ids=str)
def test_what_model_folders_have_passes(scaling: dict[str, Any]) -> None:
    assert find(scaling) == []
    assert get_kind(scaling) in ("longrope", scaling.get("type"), scaling.get("rope_type"))


@pytest.mark.parametrize(("scaling", "message"), SENSELESS, ids=str)
def test_what_means_nothing_is_refused(scaling: dict[str, Any], message: str) -> None:
    ((fact, remedy),) = find(scaling)
    assert message in fact
    assert remedy
    # Of a checkpoint or an engine, whatever is done with it.
    with pytest.raises(SpecDecError) as caught:
        parse_checkpoint_config({**LLAMA, "max_position_embeddings": 2048,
                                 "rotary_scaling": scaling})  # fmt: skip
    assert message in caught.value.message
    opt = {**LLAMA, "architecture": "OPTForCausalLM", "hidden_act": "relu"}
    assert parse_checkpoint_config({**opt, "rotary_scaling": scaling}), "it rotates nothing"


def test_what_has_no_table_is_refused() -> None:
    assert "needs more than 2" in find({"type": "dynamic", "factor": 2.0}, rotary_size=2)[0][0]
    assert "needs more than 1" in find({"type": "yarn", "factor": 2.0}, rotary_base=1.0)[0][0]


def test_a_drafter_s_own_scaling_is_checked() -> None:
    net = {
        "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_size": 16, "intermediate_size": 96, "norm_epsilon": 1e-5,
        "max_position_embeddings": 2048, "rotary_base": 1e4, "hidden_act": "silu",
    }  # fmt: skip
    for scaling in KNOWN:
        EagleParams.read_net({EagleParams.NET: net | {"rotary_scaling": scaling}})
    for scaling, message in SENSELESS:
        with pytest.raises(SpecDecError) as caught:
            EagleParams.read_net({EagleParams.NET: net | {"rotary_scaling": scaling}})
        assert message in caught.value.message


@pytest.mark.parametrize(
    ("earlier", "later", "disagree"),
    [
        ({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}, True),
        ({"rope_type": "linear", "factor": 2.0}, {"rope_type": "default", "rope_theta": 1.0}, True),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}, True),
        ({"rope_type": "linear", "factor": 2.0}, {"rope_theta": 1.0}, False),
        (None, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1.0}, False),
        ({"rope_type": "default"}, {"rope_type": "default", "rope_theta": 1.0}, False),
    ],
)
def test_the_two_places_of_a_scaling(earlier: Any, later: Any, disagree: bool) -> None:
    from pathlib import Path

    reader = ConfigReader({"rope_scaling": earlier, "rope_parameters": later}, Path("config.json"))
    read_rotary(reader)
    assert ["disagree" in fact for fact, _ in reader.problems] == [True] * disagree
