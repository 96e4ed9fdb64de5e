"""specdec-build on other families than Llama: what it stacks, leaves out and refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.engine.layers import ACTIVATIONS, name_activation
from specdec.engine.layout import count_positions, list_engine_tensors
from specdec.engine.native_layers import describe_coverage
from specdec.errors import SpecDecError
from specdec.files.reading import read_json, write_json
from specdec.files.tensor_file import TensorFile
from specdec.model.architectures import ARCHITECTURES
from specdec.model.experts import Experts
from tests.conftest import read_error_lines
from tests.engine.models import make_model as make_config
from tests.engines import call, run_cli_here
from tests.parity.models import make_model

LAYER = "transformer.layers.1."
Convert = Callable[..., Path]


@pytest.fixture
def convert(tmp_path: Path) -> Convert:
    def make(name: str, *flags: object, **settings: Any) -> Path:
        target = make_model(tmp_path / "target", name, **settings)
        call("convert", "--model-dir", target, "--output-dir", tmp_path / "ckpt", *flags)
        return tmp_path / "ckpt"

    return make


def build(checkpoint: Path, *flags: object) -> TensorFile:
    engine = checkpoint.parent / "engine"
    call(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", engine, "--optimize", "none",
        *flags,
    )  # fmt: skip
    return TensorFile(engine / "weights.safetensors")


def test_a_fused_gate_is_stacked_as_the_others(convert: Convert) -> None:
    """The activated half first, as transformers has it; the checkpoint holds it second."""
    checkpoint = convert("Phi3ForCausalLM-plain")
    weights = build(checkpoint)
    source = TensorFile(checkpoint.parent / "target" / "model.safetensors")
    np.testing.assert_array_equal(
        weights.read(LAYER + "mlp.gate_up.weight"),
        source.read("model.layers.1.mlp.gate_up_proj.weight"),
    )
    fc = TensorFile(checkpoint / "rank0.safetensors").read(LAYER + "mlp.fc.weight")
    assert not np.array_equal(fc, weights.read(LAYER + "mlp.gate_up.weight"))
    assert LAYER + "mlp.fc.weight" not in weights.tensors


def test_biases_are_stacked_as_their_weights(convert: Convert) -> None:
    checkpoint = convert("LlamaForCausalLM-biases")
    weights, source = build(checkpoint), TensorFile(checkpoint / "rank0.safetensors")
    parts = [source.read(f"{LAYER}mlp.{part}.bias") for part in ("fc", "gate")]
    np.testing.assert_array_equal(weights.read(LAYER + "mlp.gate_up.bias"), np.concatenate(parts))


@pytest.mark.parametrize("name", ["GPT2LMHeadModel-gelu_new", "PhiForCausalLM-gelu_new"])
def test_a_plain_mlp_keeps_its_tensors(convert: Convert, name: str) -> None:
    checkpoint = convert(name)
    weights, source = build(checkpoint), TensorFile(checkpoint / "rank0.safetensors")
    assert set(weights.tensors) == set(source.tensors)
    np.testing.assert_array_equal(
        weights.read(LAYER + "mlp.fc.bias"), source.read(LAYER + "mlp.fc.bias")
    )


def test_a_shared_head_is_not_stored_twice(convert: Convert) -> None:
    weights = build(convert("GemmaForCausalLM-tied"))
    assert "transformer.vocab_embedding.weight" in weights.tensors
    assert not [name for name in weights.tensors if name.startswith("lm_head")]


@pytest.mark.parametrize("dimension", [0, 1])
def test_a_parallel_embedding_of_one_rank_is_the_embedding(
    convert: Convert, dimension: int
) -> None:
    checkpoint = convert(
        "OPTForCausalLM-relu", "--use-parallel-embedding", "--embedding-sharding-dim", dimension
    )
    assert read_json(checkpoint / "config.json")["use_parallel_embedding"] is True
    weights = build(checkpoint)
    assert weights.tensors["transformer.vocab_embedding.weight"].shape == (131, 64)


def test_a_checkpoint_of_pipeline_stages_is_refused(convert: Convert) -> None:
    checkpoint = convert("GPT2LMHeadModel-gelu_new", "--pp-size", 2)
    with pytest.raises(SpecDecError, match="pp_size=2"):
        build(checkpoint)
    assert not (checkpoint.parent / "engine").exists()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_act": "gelu_approx"}, "hidden_act='gelu_approx' is not known for GPT2LMHead"),
        ({"hidden_act": "silu"}, "hidden_act='silu' is not known for GPT2LMHeadModel"),
        ({"num_hidden_layers": 1}, "12 unknown: transformer.layers.1"),
    ],
)
def test_a_checkpoint_the_engine_cannot_run_is_refused(
    convert: Convert, changes: dict[str, Any], match: str
) -> None:
    checkpoint = convert("GPT2LMHeadModel-gelu_new")
    config = read_json(checkpoint / "config.json")
    write_json(checkpoint / "config.json", {**config, **changes})
    with pytest.raises(SpecDecError, match=match):
        build(checkpoint)


def test_the_log_says_what_has_kernels(convert: Convert) -> None:
    checkpoint = convert("PhiForCausalLM-gelu_new")
    done = run_cli_here(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", checkpoint.parent / "engine"
    )
    assert done.returncode == 0, done.stderr
    assert "native kernels: products, norms, attention, gelu_new" in done.stderr


def test_coverage_of_gated_models() -> None:
    assert describe_coverage(make_config()) == "products, norms, attention, gated silu"
    gemma = make_config(architecture="GemmaForCausalLM", hidden_act="gelu")
    assert describe_coverage(gemma) == "products, norms, attention, gated gelu_tanh"
    split = make_config(architecture="PhiForCausalLM", hidden_act="gelu_new", tp_size=2)
    assert describe_coverage(split) == "products, norms, attention; torch computes gelu_new"


def test_every_activation_of_every_architecture_is_executed() -> None:
    for architecture, arithmetic in ARCHITECTURES.items():
        for activation in arithmetic.activations:
            experts = Experts(num=2, top_k=1, inner=64) if arithmetic.mlp == "experts" else None
            model = make_config(architecture=architecture, hidden_act=activation, experts=experts)
            assert name_activation(model) in ACTIVATIONS
            is_stacked = any("gate_up" in name for name in list_engine_tensors(model, None))
            assert is_stacked == (arithmetic.mlp not in ("plain", "experts"))


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 2048),
        ({"rope_type": "linear", "factor": 2.5}, 5120),
        ({"type": "dynamic", "factor": 4}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "llama3", "factor": 8.0}, 2048),
    ],
)
def test_positions_that_a_model_is_for(scaling: dict[str, Any] | None, positions: int) -> None:
    assert count_positions(make_config(rotary_scaling=scaling)) == positions


def test_more_positions_than_the_scaling_gives_are_refused(convert: Convert) -> None:
    checkpoint = convert("LlamaForCausalLM-dynamic")
    done = run_cli_here(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", checkpoint.parent / "engine",
        "--max-seq-len", 1025,
    )  # fmt: skip
    assert done.returncode == 1
    error, hint = read_error_lines(done.stderr)
    assert "max_seq_len=1025" in error
    assert "max_position_embeddings=256 times the factor of its rotary scaling, 1024" in error
    assert "--max-seq-len 1024" in hint
    build(checkpoint, "--max-seq-len", 1024)
