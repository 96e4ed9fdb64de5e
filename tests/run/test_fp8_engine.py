"""An FP8 checkpoint on the torch engine: the text is that of transformers on the rounded weights.

On a CPU the weights are float8 * scale and activations are not rounded; the arithmetic of GPUs that
multiply in float8 is checked by itself.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.decode.engine import TorchEngine
from specdec.engine import compiler
from specdec.engine.float8 import Float8Linear, round_input, widen
from specdec.engine.layout import WEIGHTS_NAME
from specdec.errors import SpecDecError
from tests.conftest import make_drafter, make_llama
from tests.engines import call, continue_by_transformers, list_requests, renew_sums
from tests.families import make_family_model

PROMPTS = [[5, 17, 30], list(range(3, 17)), [64]]
LIMIT = 30


def make_rows(path: Path, vocab: int) -> Path:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, vocab, (4, 16), generator=generator).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def quantize(parent: Path, target: Path, drafter: Path | None = None, vocab: int = 128) -> Path:
    """Convert a target to FP8 with a drafter, and return the checkpoint."""
    words: list[object] = [] if drafter is None else ["--drafter-model-dir", drafter]
    call(
        "convert", "--model-dir", target, "--output-dir", parent / "ckpt", "--quantization", "fp8",
        "--kv-cache-dtype", "fp8", "--calibration-data", make_rows(parent / "rows.jsonl", vocab),
        *words,
    )  # fmt: skip
    return parent / "ckpt"


def build(checkpoint: Path, *, optimize: str = "none") -> Path:
    engine = checkpoint.parent / f"{checkpoint.name}-{optimize}"
    call("build", "--checkpoint-dir", checkpoint, "--output-dir", engine, "--optimize", optimize)
    return engine


def round_target(target: Path, checkpoint: Path, folder: Path) -> Path:
    """Write a Llama-like target anew, its linears rounded as the checkpoint has them."""
    shutil.copytree(target, folder)
    tensors = load_file(target / "model.safetensors")
    quantized = load_file(checkpoint / "rank0.safetensors")
    modules = {
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.dense": ("self_attn.o_proj",), "mlp.fc": ("mlp.gate_proj",),
        "mlp.gate": ("mlp.up_proj",), "mlp.proj": ("mlp.down_proj",),
    }  # fmt: skip
    for layer in range(2):
        for module, parts in modules.items():
            ours = f"transformer.layers.{layer}.{module}"
            weight = quantized[ours + ".weight"].view(torch.float8_e4m3fn).float()
            whole = weight * quantized[ours + ".weights_scaling_factor"]
            names = [f"model.layers.{layer}.{part}.weight" for part in parts]
            start = 0
            for name in names:
                part = whole[start : start + len(tensors[name])].to(tensors[name].dtype)
                assert not torch.equal(part, tensors[name])
                tensors[name] = part.contiguous()
                start += len(part)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def generate(folder: Path, **options: Any) -> list[list[int]]:
    engine = TorchEngine(folder, device="cpu", **options)
    requests = list_requests(PROMPTS, LIMIT)
    return [result.output_ids for result in engine.generate(requests)]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_greedy_text_is_that_of_the_rounded_weights(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "llama":
        target = make_llama(tmp_path, attention_bias=True)
    else:
        target = make_family_model(tmp_path, family, vocab=128)
    drafter = make_drafter(tmp_path, exit_dim=96, scale=3.0)
    checkpoint = quantize(tmp_path, target, drafter)
    rounded = round_target(target, checkpoint, tmp_path / "rounded")
    expected = continue_by_transformers(rounded, PROMPTS, LIMIT)
    assert expected != continue_by_transformers(target, PROMPTS, LIMIT)
    plain = build(checkpoint)
    assert generate(plain) == expected
    assert generate(plain, speculate=False) == expected
    # Prepacked; kernels take seconds to compile, and read no linear's weights.
    monkeypatch.setattr(compiler, "find_compiler", lambda: None)
    assert generate(build(checkpoint, optimize="auto")) == expected


def test_bfloat16_engine_keeps_its_weights_at_one_byte(tmp_path: Path) -> None:
    target = make_llama(tmp_path, dtype="bfloat16")
    checkpoint = quantize(tmp_path, target)
    engine = build(checkpoint)
    stored = load_file(engine / WEIGHTS_NAME)
    kinds = {name: tensor.dtype for name, tensor in stored.items()}
    prefix = "transformer.layers.1."
    for module in ("attention.qkv", "attention.dense", "mlp.gate_up", "mlp.proj"):
        assert kinds[f"{prefix}{module}.weight"] == torch.float8_e4m3fn
        assert kinds[f"{prefix}{module}.activation_scaling_factor"] == torch.float32
    assert len(stored[prefix + "mlp.gate_up.weights_scaling_factor"]) == 2
    assert kinds["lm_head.weight"] == torch.bfloat16
    assert not any("cache_scaling" in name for name in stored)
    rounded = round_target(target, checkpoint, tmp_path / "rounded")
    call("convert", "--model-dir", rounded, "--output-dir", tmp_path / "wide")
    wide = build(tmp_path / "wide")
    assert generate(engine) == generate(wide)
    ours, theirs = (
        TorchEngine(folder, device="cpu").decoder.stack.layers[1].up for folder in (engine, wide)
    )
    assert ours is not None
    assert theirs is not None
    assert ours.weight is not None
    assert theirs.weight is not None
    assert torch.equal(ours.weight, theirs.weight)


def change_checkpoint(checkpoint: Path, folder: Path, change: Any) -> Path:
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "rank0.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "rank0.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("fp8")
    return quantize(parent, make_llama(parent))


def test_checkpoints_of_older_and_newer_writers(checkpoint: Path, tmp_path: Path) -> None:
    """Bytes labelled int8; fc and gate with scales of their own; 1.x's quantized head."""

    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float8_e4m3fn:
                tensors[name] = tensor.view(torch.int8)
            if name.endswith(".mlp.gate.weights_scaling_factor"):
                tensors[name] = tensor * 3
        head = tensors["lm_head.weight"]
        scale = head.abs().max().reshape(1) / 448
        tensors["lm_head.weight"] = (head / scale).to(torch.float8_e4m3fn)
        tensors["lm_head.weights_scaling_factor"] = scale
        tensors["lm_head.activation_scaling_factor"] = torch.ones(1)
        config["quantization"]["exclude_modules"] = []

    changed = change_checkpoint(checkpoint, tmp_path / "ckpt", change)
    renew_sums(changed)
    quantized = load_file(changed / "rank0.safetensors")
    rounded = round_target(checkpoint.parent / "target", changed, tmp_path / "rounded")
    tensors = load_file(rounded / "model.safetensors")
    tensors["lm_head.weight"] = (
        quantized["lm_head.weight"].float() * quantized["lm_head.weights_scaling_factor"]
    )
    save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})
    expected = continue_by_transformers(rounded, PROMPTS, LIMIT)
    assert generate(build(changed)) == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mlp.gate.weights_scaling_factor", "1 missing: transformer.layers.1.mlp.gate.weights_"),
        ("mlp.proj.activation_scaling_factor", "1 missing: transformer.layers.1.mlp.proj.activ"),
    ],
)
def test_a_missing_scale_is_named(checkpoint: Path, tmp_path: Path, name: str, words: str) -> None:
    folder = change_checkpoint(
        checkpoint, tmp_path / "ckpt", lambda t, c: t.pop(f"transformer.layers.1.{name}")
    )
    with pytest.raises(SpecDecError, match=words):
        build(folder)


def test_fc_and_gate_of_two_kinds_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        module = "transformer.layers.1.mlp.gate"
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"].float()
        for kind in ("weights", "activation"):
            del tensors[f"{module}.{kind}_scaling_factor"]
        config["quantization"]["exclude_modules"].append(module)

    with pytest.raises(SpecDecError, match="mlp.fc.weight is quantized, .*gate.weight is float32"):
        build(change_checkpoint(checkpoint, tmp_path / "ckpt", change))


# ---- The arithmetic of GPUs that multiply in float8.


def make_linear(num_scales: int) -> tuple[Float8Linear, torch.Tensor]:
    """A linear of [32, 48] and the weight that it stands for."""
    generator = torch.Generator().manual_seed(num_scales)
    whole = torch.randn(32, 48, generator=generator)
    scales = torch.tensor([0.01, 0.02][:num_scales])
    rows = whole.chunk(num_scales)
    parts = [(p / s).to(torch.float8_e4m3fn) for p, s in zip(rows, scales, strict=True)]
    weight = torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    bias = torch.randn(32, generator=generator).bfloat16()
    linear = Float8Linear(weight, scales, torch.tensor([0.02]), bias)
    return linear, widen(weight, scales, torch.float32)


def multiplies_on_this_cpu() -> bool:
    values = torch.ones(16, 16).to(torch.float8_e4m3fn)
    one = torch.tensor(1.0)
    try:
        torch._scaled_mm(values, values.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError):
        return False
    return True


@pytest.mark.skipif(not multiplies_on_this_cpu(), reason="torch._scaled_mm is not made for CPUs")
@pytest.mark.parametrize("num_scales", [1, 2])
def test_scaled_products(num_scales: int) -> None:
    linear, whole = make_linear(num_scales)
    x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(9)).bfloat16()
    x[0, 0, 0] = 1000.0  # beyond what calibration saw: cut at 448 * scale
    rounded = round_input(x, linear.input_scale).float() * linear.input_scale
    assert rounded[0, 0, 0].item() == pytest.approx(448 * 0.02)
    expected = torch.nn.functional.linear(rounded, whole)
    assert linear.bias is not None
    y = linear(x)
    assert y.dtype == torch.bfloat16
    assert y.shape == (2, 5, 32)
    expected = (expected.bfloat16() + linear.bias).float()
    torch.testing.assert_close(y.float(), expected, rtol=2**-6, atol=2**-5)


def test_inputs_round_as_the_scale_says() -> None:
    scale = torch.tensor(0.5)
    x = torch.tensor([0.0, 0.5, 0.53, -0.53, 224.0, 1e6, -1e6]).bfloat16()
    found = round_input(x, scale).float() * scale
    assert found.tolist() == [0.0, 0.5, 0.5, -0.5, 224.0, 224.0, -224.0]
