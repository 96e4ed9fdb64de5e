"""LoRA adapters: the merged checkpoint is what PEFT's own merge and a conversion of it give."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specdec.errors import SpecDecError
from specdec.text.pretrained import load_model
from tests.conftest import make_llama
from tests.convert.checkpoints import join_checkpoint
from tests.convert.conftest import Converter
from tests.families import make_family_model

RANK = "rank0.safetensors"

LINEAR = {"target_modules": ["q_proj", "v_proj", "down_proj"], "r": 4, "lora_alpha": 12}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", LINEAR),
    "patterns": ("llama", {**LINEAR, "use_rslora": True, "rank_pattern": {"v_proj": 2},
                           "alpha_pattern": {"layers.0.self_attn.q_proj": 7}}),
    "embedding and head": ("llama", {**LINEAR, "target_modules": ["embed_tokens", "lm_head"]}),
    "saved modules": ("llama", {**LINEAR, "modules_to_save": ["lm_head", "norm"]}),
    "biases": ("qwen2", {**LINEAR, "bias": "lora_only"}),
    "turned": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "r": 3, "lora_alpha": 5}),
    "hybrid": ("qwen3_5", {"target_modules": "all-linear", "r": 4}),
    "hybrid, one projection for all": (
        "qwen3_next",
        {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"], "r": 4},
    ),
    "projections of an embedding": (
        "opt-350m", {"target_modules": ["project_in", "project_out", "fc1"], "r": 4}
    ),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 4}),
}  # fmt: skip


def train(base: Path, folder: Path, options: dict[str, Any], dtype: str = "float32") -> Any:
    """Save an adapter whose every tensor differs from its start; return the model with it.

    PEFT is imported here: it takes 2 s of a processor, which other files' processes do without.
    """
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(7)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) / 4
    model.save_pretrained(folder)
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_a_merged_checkpoint_is_that_of_the_merge_by_peft(case: str, tmp_path: Path) -> None:
    """On one rank and on two."""
    family, options = CASES[case]
    family, _, size = family.partition("-")
    narrow: dict[str, Any] = {"word_embed_proj_dim": 32, "do_layer_norm_before": False}
    small = narrow if size else {}
    base = make_family_model(tmp_path, family, **small)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    train(base, adapter, options).merge_and_unload().save_pretrained(merged)

    def convert(name: str, model: Path, **flags: Any) -> dict[str, Any]:
        return join_checkpoint(Converter(tmp_path / name)(model_dir=model, **flags))

    plain, theirs = convert("plain", base), convert("theirs", merged)
    ours = convert("ours", base, lora_dir=adapter)
    split = convert("split", base, lora_dir=adapter, tp_size=2)
    assert split.keys() == ours.keys()
    assert all(np.array_equal(split[key], value) for key, value in ours.items())
    assert ours.keys() == theirs.keys()
    changed = {key for key in plain if not np.array_equal(plain[key], theirs[key])}
    assert len(changed) >= 2
    for key, value in theirs.items():
        is_near = np.allclose(ours[key], value, rtol=1e-5, atol=1e-6)
        assert is_near if key in changed else np.array_equal(ours[key], value), key


def test_the_bits_do_not_depend_on_ranks_and_a_sum_is_rounded_once(tmp_path: Path) -> None:
    """In bfloat16 only sums that lie next to the border of two values may differ from PEFT's."""
    base = make_llama(tmp_path, hidden=64, intermediate=1100, dtype="bfloat16")
    merged = train(base, tmp_path / "adapter", LINEAR, "bfloat16").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    joined = [
        join_checkpoint(
            Converter(tmp_path / f"out{tp_size}{model}")(
                model_dir=tmp_path / model, tp_size=tp_size,
                lora_dir=tmp_path / "adapter" if model == "target" else None,
            )
        )
        for model, tp_size in (("target", 1), ("target", 2), ("merged", 1))
    ]  # fmt: skip
    for name, value in joined[0].items():
        assert np.array_equal(value, joined[1][name])
        different = np.count_nonzero(value != joined[2][name])
        assert different <= value.size / 1000, name


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base and an adapter of it, not to be changed."""
    folder = tmp_path_factory.mktemp("lora")
    base = make_llama(folder)
    train(base, folder / "adapter", LINEAR)
    return base, folder / "adapter"


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', not LORA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"r": 8}, "rank 8, and its factors have 4"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"rank_pattern": {"q_proj(": 4}}, "rank_pattern is {'q_proj(': 4}, not patterns"),
        ({"alpha_pattern": [4]}, "alpha_pattern is [4], not patterns and numbers"),
    ],
)
def test_what_an_adapter_cannot_be_is_told(
    changes: dict[str, Any], fact: str, linear: tuple[Path, Path], tmp_path: Path,
    convert: Converter,
) -> None:  # fmt: skip
    base, adapter = linear
    path = Path(shutil.copytree(adapter, tmp_path / "adapter")) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert fact in str(convert.fail(model_dir=base, lora_dir=path.parent))


def test_tensors_that_do_not_fit_are_told_with_their_shapes(
    linear: tuple[Path, Path], tmp_path: Path, convert: Converter
) -> None:
    base, adapter = linear
    shutil.copytree(adapter, tmp_path / "adapter")
    other = make_llama(tmp_path, name="wide", hidden=96)
    assert "cannot be merged into" in str(
        convert.fail(model_dir=other, lora_dir=tmp_path / "adapter")
    )
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    half = next(name for name in tensors if "lora_A" in name)
    tensors["base_model.model.model.layers.9.mlp.gate.weight"] = tensors.pop(half)
    save_file(tensors, weights)
    fact = str(convert.fail(model_dir=base, lora_dir=tmp_path / "adapter"))
    assert "layers.9.mlp.gate.weight is not in the target" in fact
    assert "cannot be merged into" in fact


def test_an_adapter_that_was_trained_within_a_wrapper(tmp_path: Path, convert: Converter) -> None:
    """Its names have the part that the wrapper puts before the text model's."""
    base = make_family_model(tmp_path, "qwen3_5", name="base")
    train(base, tmp_path / "adapter", {"target_modules": ["q_proj", "in_proj_z"], "r": 4})
    expected = join_checkpoint(Converter(tmp_path / "plain")(
        model_dir=base, lora_dir=tmp_path / "adapter"
    ))  # fmt: skip
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    for theirs in ("model.language_model.", "language_model.model."):
        named = {name.replace("model.layers", f"{theirs}layers"): tensor
                 for name, tensor in load_file(weights).items()}  # fmt: skip
        (tmp_path / theirs).mkdir()
        save_file(named, tmp_path / theirs / weights.name)
        config = (tmp_path / "adapter" / "adapter_config.json").read_text()
        (tmp_path / theirs / "adapter_config.json").write_text(config)
        found = join_checkpoint(convert(model_dir=base, lora_dir=tmp_path / theirs, force=True))
        assert all(np.array_equal(found[name], value) for name, value in expected.items())


def test_an_adapter_of_a_tied_head_is_refused(tmp_path: Path, convert: Converter) -> None:
    base = make_llama(tmp_path, tied=True)
    train(base, tmp_path / "adapter", {**LINEAR, "target_modules": ["embed_tokens", "q_proj"]})
    fact = str(convert.fail(model_dir=base, lora_dir=tmp_path / "adapter"))
    assert "model.embed_tokens.weight is tied to another" in fact


def test_an_adapter_beside_a_whole_model(tmp_path: Path) -> None:
    """transformers adds it: nobody may take the model without it unasked."""
    base = make_llama(tmp_path)
    train(base, tmp_path / "adapter", LINEAR)
    expected = Converter(tmp_path / "expected")(model_dir=base, lora_dir=tmp_path / "adapter")
    for file in (tmp_path / "adapter").glob("adapter_*"):
        shutil.copy(file, base)
    error = Converter(tmp_path / "none").fail(model_dir=base)
    assert f"{base} holds a LoRA adapter beside its weights" in error.message
    with pytest.raises(SpecDecError, match="holds a LoRA adapter beside its weights"):
        load_model(base)
    # Both remedies are followed.
    assert f"--lora-dir {base}" in error.hint
    merged = Converter(tmp_path / "merged")(model_dir=base, lora_dir=base)
    assert (merged / RANK).read_bytes() == (expected / RANK).read_bytes()
    (base / "adapter_config.json").rename(tmp_path / "elsewhere")
    assert (Converter(tmp_path / "plain")(model_dir=base) / RANK).read_bytes()
    load_model(base)
