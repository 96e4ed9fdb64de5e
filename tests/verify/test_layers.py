"""Of a broken model the layer and the part that is broken are named; of a right one nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.decode.engine import TorchEngine
from specdec.engine.native_layers import NativeLayers
from specdec.files.reading import read_json, write_json
from specdec.verify.engine import verify_engine
from specdec.verify.layers import compare_layers, find_first_difference
from specdec.verify.reference import load_reference
from specdec.verify.reference_parts import compute_parts
from specdec.verify.report import find_error, format_report
from specdec.verify.settings import VerifySettings
from tests.engines import make_engine
from tests.parity.models import VOCAB, make_model

TOKENS = torch.randint(3, VOCAB, (70,), generator=torch.Generator().manual_seed(5)).tolist()
Change = Callable[[torch.Tensor], object]


def scale(tensor: torch.Tensor) -> None:
    tensor *= 1.01


def raise_row(tensor: torch.Tensor) -> None:
    tensor[-1] += 0.1


# Family -> (end of a tensor's name, its change, the part that then differs first); a key of
# config.json has its value for a change. Each family has another layout of modules.
BREAKS: dict[str, list[tuple[str, Change | float, str]]] = {
    "LlamaForCausalLM-plain": [
        ("embed_tokens.weight", scale, "the embedding"),
        ("layers.1.input_layernorm.weight", scale, "layer 1's input norm"),
        ("layers.1.self_attn.q_proj.weight", scale, "layer 1's attention"),
        ("layers.0.post_attention_layernorm.weight", scale, "layer 0's norm before the MLP"),
        ("layers.1.mlp.down_proj.weight", raise_row, "layer 1's MLP"),
        ("model.norm.weight", scale, "the final norm"),
        ("lm_head.weight", raise_row, "the output head"),
        ("rope_theta", 5000.0, "layer 0's attention"),
    ],
    "OPTForCausalLM-relu": [
        ("layers.1.fc1.weight", raise_row, "layer 1's MLP"),
        ("embed_positions.weight", scale, "the embedding"),
    ],
    "Gemma3ForCausalLM-windows": [
        ("layers.1.post_feedforward_layernorm.weight", scale, "layer 1's output after MLP"),
        ("layers.2.self_attn.k_norm.weight", scale, "layer 2's attention"),
    ],
    "Qwen3NextForCausalLM-plain": [
        ("layers.1.linear_attn.conv1d.weight", raise_row, "layer 1's linear attention"),
        ("layers.2.mlp.shared_expert_gate.weight", raise_row, "layer 2's experts"),
    ],
    "Lfm2ForCausalLM-plain": [
        ("layers.2.conv.conv.weight", raise_row, "layer 2's convolution"),
    ],
    "GraniteMoeHybridForCausalLM-tiny": [
        ("layers.2.mamba.A_log", raise_row, "layer 2's Mamba-2"),
        ("layers.1.shared_mlp.output_linear.weight", raise_row, "layer 1's experts"),
        ("layers.2.block_sparse_moe.router.layer.weight", raise_row, "layer 2's experts"),
    ],
    "GptOssForCausalLM-plain": [
        ("layers.1.self_attn.sinks", raise_row, "layer 1's attention"),
        ("layers.2.mlp.router.bias", raise_row, "layer 2's experts"),
    ],
}  # fmt: skip


def break_model(model: Path, folder: Path, name: str, change: Change | float) -> Path:
    """Copy a model with one tensor or one key of config.json changed."""
    shutil.copytree(model, folder)
    if not callable(change):
        config = read_json(folder / "config.json")
        section = config.get("rope_parameters", config)  # transformers 4 has it beside the sizes
        assert name in section
        section[name] = change
        write_json(folder / "config.json", config)
        return folder
    tensors = load_file(folder / "model.safetensors")
    (key,) = [key for key in tensors if key.endswith(name)]
    change(tensors[key])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("family", BREAKS)
def test_the_broken_part_is_named(family: str, tmp_path: Path) -> None:
    """Each break is the only one of its model; first the whole model, in which none differs."""
    model = make_model(tmp_path / "model", family)
    engine = TorchEngine(make_engine(tmp_path, model, optimize="none"), device="cpu")
    breaks = [("", None, None), *BREAKS[family]]
    for number, (name, change, expected) in enumerate(breaks):
        broken = model
        if change is not None:
            broken = break_model(model, tmp_path / f"broken-{number}", name, change)
        reference = compute_parts(load_reference(str(broken), "float32", "cpu"), TOKENS)
        assert reference is not None
        first = find_first_difference(engine.decoder, reference, TOKENS, "float32")
        assert (None if first is None else first.name) == expected, name
        if first is not None:
            assert first.difference > first.tolerance
            assert 0 < first.tokens <= len(TOKENS)
            assert first.layer is None or f"layers.{first.layer}" in first.module


def test_no_part_differs_where_drafts_or_a_kernel_of_all_layers_are_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right engine in half precision has the model's logits; a wrong kernel shows in these."""
    model = make_model(tmp_path / "model", "LlamaForCausalLM-plain", dtype="bfloat16")
    engine = make_engine(tmp_path, model)
    expected = {"num_tokens": len(TOKENS), "first": None, "plain_is_right": True}
    assert compare_layers(engine, str(model), TOKENS, "bfloat16", "cpu") == expected
    honest = NativeLayers.run

    def run(layers: NativeLayers, *arguments: Any, **options: Any) -> Any:
        normed, observed_outputs = honest(layers, *arguments, **options)
        return normed * 1.5, observed_outputs

    monkeypatch.setattr(NativeLayers, "run", run)
    expected["plain_is_right"] = False
    assert compare_layers(engine, str(model), TOKENS, "bfloat16", "cpu") == expected


@pytest.mark.thorough
def test_verify_names_the_part_in_its_report_and_its_error(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "LlamaForCausalLM-plain")
    engine = make_engine(tmp_path, model, optimize="none")
    flags: dict[str, Any] = {"num_alone": 0, "max_output_len": 12}

    def verify(name: str, change: Change) -> dict[str, Any]:
        broken = break_model(model, tmp_path / name, "layers.1.self_attn.q_proj.weight", change)
        settings = VerifySettings(engine_dir=engine, model_dir=str(broken), **flags)
        report: dict[str, Any] = verify_engine(settings)
        return report

    wrong = verify("wrong", lambda tensor: tensor.mul_(3))
    assert wrong["verdict"] == "differs"
    first = wrong["layers"]["first"]
    assert (first["layer"], first["part"]) == (1, "mixer")
    assert first["module"] == "model.layers.1.self_attn"
    error = find_error(wrong)
    assert error is not None
    for text in (error.message, format_report(wrong)):
        assert "layer 1's attention differs first (model.layers.1.self_attn of the model)" in text
    # Texts that are equal by luck hide nothing.
    slight = verify("slight", scale)
    assert slight["logit_difference"] > slight["logit_bound"]
    assert "layer 1's attention differs first" in format_report(slight)


def test_a_model_is_proved_without_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine is made in the cache, of the type that is asked for."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "none")  # kernels are not what is tested
    model = make_model(tmp_path / "model", "LlamaForCausalLM-plain", dtype="bfloat16")
    settings = VerifySettings(
        model_dir=str(model), dtype="float32", num_alone=0, max_output_len=8, device="cpu"
    )
    report = verify_engine(settings)
    assert (report["verdict"], report["dtype"]) == ("exact", "float32")
    assert Path(report["engine_dir"]).is_relative_to(tmp_path / "cache")
    assert "layers" not in report
