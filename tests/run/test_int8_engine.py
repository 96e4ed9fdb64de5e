"""An int8 engine: its text is that of its rounded weights, with every method and tp_size."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.decode.engine import TorchEngine
from specdec.engine.integers import ROW_GROUP
from specdec.engine.layout import (
    WEIGHTS_NAME,
    list_integers,
    name_int8_scales,
    read_engine_config,
)
from specdec.engine.linear import Linear
from specdec.errors import SpecDecError, UsageError
from specdec.files.reading import read_json
from tests.conftest import make_llama
from tests.engine.kernels import needs_compiler
from tests.engines import (
    build_plain,
    call,
    continue_greedily,
    list_requests,
    round_inputs,
    run_cli_here,
    save_weights,
)
from tests.methods import build_methods, load_method
from tests.parity.models import VOCAB, make_model
from tests.parity.test_families import assert_near
from tests.parity.test_parallel_layers import compute, load_ranks

PROMPTS = [[5, 17, 30], list(range(3, 17)), [64], [9, 9, 4] * 6]
LIMIT = 30
INT8 = ("--quantization", "int8")


def build(checkpoint: Path, name: str, *flags: object) -> Path:
    engine = checkpoint.parent / name
    call("build", "--checkpoint-dir", checkpoint, "--output-dir", engine, *flags)
    return engine


def convert(target: Path, checkpoint: Path, *flags: object) -> Path:
    call("convert", "--model-dir", target, "--output-dir", checkpoint, *flags)
    return checkpoint


def generate(engine: TorchEngine) -> tuple[list[list[int]], int]:
    """The texts, and how many drafted tokens were accepted."""
    requests = list_requests(PROMPTS, LIMIT)
    results = engine.generate(requests)
    return [r.output_ids for r in results], sum(r.stats.num_accepted for r in results)


class Rounding:
    """A linear whose inputs are rounded, as those of an int8 engine are."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(round_inputs(x, ROW_GROUP))


def load_rounding(engine: Path) -> TorchEngine:
    """An engine without kernels that rounds the inputs of its layers' products."""
    loaded = TorchEngine(engine, device="cpu")
    layers = loaded.decoder.stack.layers
    for index, layer in enumerate(layers):
        linears = {name: getattr(layer, name) for name in ("qkv", "dense", "up", "down")}
        parts: dict[str, Any] = {n: Rounding(own) for n, own in linears.items() if own is not None}
        layers[index] = dataclasses.replace(layer, **parts)
        experts: Any = layer.experts
        if experts is not None:
            experts.up, experts.down = (list(map(Rounding, s)) for s in (experts.up, experts.down))
            experts.shared_expert = (
                *map(Rounding, experts.shared_expert[:2]),
                experts.shared_expert[2],
            )
    return loaded


def widen_engine(engine: Path, folder: Path) -> Path:
    """The engine without int8: its weights as the integers times their scales."""
    build_plain(Path(shutil.copytree(engine, folder)))
    tensors = load_file(folder / WEIGHTS_NAME)
    for name in list_integers(read_engine_config(engine).checkpoint.model):
        scales = tensors.pop(name_int8_scales(name))
        assert tensors[name].dtype is torch.int8
        tensors[name] = tensors[name].float() * scales[..., None]
    save_weights(tensors, folder / WEIGHTS_NAME)
    change_config(
        folder, lambda config: config["torch_config"].update(quantization=None, kernels=None)
    )
    return folder


def change_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = read_json(folder / "config.json")
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


# Attention and MLP side by side with biases, a fused MLP, a plain one with learned positions, and
# experts.
FAMILIES = ("LlamaForCausalLM-plain", "PhiForCausalLM-gelu_new", "Phi3ForCausalLM-plain",
            "GPT2LMHeadModel-gelu_untied", "Qwen2MoeForCausalLM-plain")  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("optimize", ["auto", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_that_of_the_rounded_weights(family: str, optimize: str, tmp_path: Path) -> None:
    target = make_model(tmp_path / "hf", family)
    checkpoint = convert(target, tmp_path / "checkpoint", "--dtype", "float32")
    engine = build(checkpoint, "engine", *INT8, "--optimize", optimize)
    texts, _ = generate(TorchEngine(engine, device="cpu"))
    wide = widen_engine(engine, tmp_path / "wide")
    plain = TorchEngine(wide, device="cpu") if optimize == "none" else load_rounding(wide)
    assert generate(plain)[0] == texts
    assert sum(len(set(text)) for text in texts) > 20, "the texts vary"


def test_text_is_what_transformers_makes_of_the_rounded_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    target = make_llama(tmp_path, seed=3)
    engine = build_plain(build(convert(target, tmp_path / "checkpoint"), "engine", *INT8))
    tensors = load_file(engine / WEIGHTS_NAME)
    model = AutoModelForCausalLM.from_pretrained(target)
    before = continue_greedily(model, PROMPTS, LIMIT)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            for name, parts in {
                "attention.qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
                "attention.dense": (attention.o_proj,),
                "mlp.gate_up": (mlp.gate_proj, mlp.up_proj),
                "mlp.proj": (mlp.down_proj,),
            }.items():
                name = f"transformer.layers.{index}.{name}"
                scales = tensors[f"{name}.per_channel_scale"]
                whole = tensors[f"{name}.weight"].float() * scales[:, None]
                rows = [part.weight.shape[0] for part in parts]
                for part, weight in zip(parts, torch.split(whole, rows), strict=True):
                    part.weight.copy_(weight)
                    part.register_forward_pre_hook(lambda _, x: round_inputs(x[0], ROW_GROUP))
    expected = continue_greedily(model, PROMPTS, LIMIT)
    assert generate(TorchEngine(engine, device="cpu"))[0] == expected
    assert expected != before, "the rounding is seen in these texts"


def make_engines(parent: Path, *quantization: object, intermediate: int = 112) -> Path:
    """One target after every method, quantized, in bfloat16."""
    target = make_llama(parent, seed=5, intermediate=intermediate)
    names = ("redrafter", "medusa", "eagle", "dflash", "pair", "draft")
    build_methods(target, *names, convert=("--dtype", "bfloat16"), build=quantization)
    build(parent / "pair-ckpt", "wide-engine")
    return parent


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engines(tmp_path_factory.mktemp("int8"), *INT8)


METHODS = ["redrafter", "medusa", "eagle", "eagle, dynamic", "dflash", "draft_target",
           "draft_target by wide", "prompt_lookup", "suffix", "lookahead"]  # fmt: skip


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("method", METHODS)
def test_speculative_text_is_that_of_plain_decoding(parent: Path, method: str) -> None:
    check_text(parent, method, "int8")


def check_text(parent: Path, method: str, quantization: str) -> None:
    """Drafts are accepted, and the text is that of the same engine without them."""
    engine = load_method(parent, *method.split(" by "))
    texts, num_accepted = generate(engine)
    plain = TorchEngine(parent / "redrafter-engine", device="cpu", speculate=False)
    assert texts == generate(plain)[0]
    assert num_accepted > 0 or method == "medusa"
    assert engine.describe()["quantization"] == quantization


def test_folders_say_what_they_hold(parent: Path) -> None:
    engine, wide = build_plain(parent / "redrafter-engine"), parent / "wide-engine"
    assert read_json(engine / "config.json")["torch_config"]["quantization"] == "int8"
    assert read_json(engine / "manifest.json")["settings"]["quantization"] == "int8"
    assert read_json(wide / "config.json")["torch_config"]["quantization"] is None
    tensors = load_file(engine / WEIGHTS_NAME)
    integers = {name for name, tensor in tensors.items() if tensor.dtype is torch.int8}
    modules = ("attention.qkv", "attention.dense", "mlp.gate_up", "mlp.proj")
    assert integers == {
        f"transformer.layers.{layer}.{module}.weight" for layer in range(2) for module in modules
    }
    for name in integers:
        scales = tensors[name.replace("weight", "per_channel_scale")]
        assert (scales.dtype, scales.shape) == (torch.float32, tensors[name].shape[:1])
    kinds = {t.dtype for n, t in tensors.items() if n not in integers and "per_channel" not in n}
    assert kinds == {torch.bfloat16}, "embedding, head, norms and the drafter stay"


@pytest.mark.parametrize(("flags", "axis"), [([], 2), (["--moe-ep-size", 2], 0)])
def test_several_ranks_hold_the_experts_of_one(
    flags: list[object], axis: int, tmp_path: Path
) -> None:
    """Parts of each expert with the scales of its whole rows, or whole experts."""
    target = make_model(tmp_path / "hf", "MixtralForCausalLM-plain")
    whole = load_file(
        build_plain(build(convert(target, tmp_path / "one"), "engine-1", *INT8)) / WEIGHTS_NAME
    )
    checkpoint = convert(target, tmp_path / "two", "--tp-size", 2, *flags)
    split = build(checkpoint, "engine-2", *INT8, "--optimize", "none")
    ranks = [load_file(split / f"rank{rank}.safetensors") for rank in range(2)]
    name = "transformer.layers.1.mlp.proj."
    codes, scales = (
        [rank[name + kind] for rank in ranks] for kind in ("weight", "per_channel_scale")
    )
    assert torch.equal(torch.cat(codes, axis), whole[name + "weight"])
    joined = torch.cat(scales) if axis == 0 else scales[1]
    assert torch.equal(joined, whole[name + "per_channel_scale"])
    router = "transformer.layers.1.mlp.router.weight"
    assert all(torch.equal(rank[router], whole[router]) for rank in ranks)
    assert whole[router].dtype is torch.float32


def test_several_ranks_hold_the_weights_of_one(tmp_path: Path) -> None:
    """Scales are of whole rows, also where ranks hold a part of each, and here whole groups."""
    target = make_llama(tmp_path, seed=4, hidden=128, intermediate=128, vocab=VOCAB)
    whole = build_plain(build(convert(target, tmp_path / "one"), "engine-1", *INT8))
    checkpoint = convert(target, tmp_path / "two", "--tp-size", 2)
    split = build_plain(build(checkpoint, "engine-2", *INT8))
    tensors = load_file(whole / WEIGHTS_NAME)
    ranks = [load_file(split / f"rank{rank}.safetensors") for rank in range(2)]
    for layer in range(2):
        for module in ("attention.dense", "mlp.proj"):
            name = f"transformer.layers.{layer}.{module}"
            parts = [rank[f"{name}.weight"] for rank in ranks]
            assert torch.equal(torch.cat(parts, dim=1), tensors[f"{name}.weight"])
            for rank in ranks:
                scales = rank[f"{name}.per_channel_scale"]
                assert torch.equal(scales, tensors[f"{name}.per_channel_scale"])
            assert any((part.abs().amax(1) < 127).any() for part in parts)
        for name in (f"transformer.layers.{layer}.mlp.gate_up", "attention.qkv"):
            rows = [rank[f"{name}.weight"] for rank in ranks if f"{name}.weight" in rank]
            assert all((part.abs().amax(1) == 127).all() for part in rows)
    expected = compute(load_ranks(whole))
    assert_near(compute(load_ranks(split)), expected, "two ranks")


# ---- What is refused.


@pytest.fixture
def engine(parent: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "engine"
    shutil.copytree(parent / "draft-engine", folder)
    return folder


SCALES = "transformer.layers.1.mlp.proj.per_channel_scale"
WEIGHT = "transformer.layers.0.attention.dense.weight"


def set_scale(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[SCALES][7] = value

    return change


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_scale(float("nan")), rf"{SCALES}: 1 of 64 scales .* row 7: nan"),
        (set_scale(0.0), "1 of 64 scales are not finite and positive.* row 7: 0"),
        (set_scale(-1e-3), "row 7: -0.001"),
        (set_scale(float("inf")), "row 7: inf"),
        (lambda t: t.pop(SCALES), f"1 missing: {SCALES}"),
        (lambda t: t.update({SCALES: t[SCALES][:1].clone()}), r"is \[1\], expected \[64\]"),
        (lambda t: t.update({SCALES: t[SCALES].bfloat16()}), f"{SCALES} is bfloat16, expected fl"),
        (lambda t: t.update({WEIGHT: t[WEIGHT].bfloat16()}), f"{WEIGHT} is bfloat16, expected int"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].char()}), "lm_head.* is int8"),
    ],
)
def test_damaged_engines_are_refused(engine: Path, change: Any, words: str) -> None:
    tensors = load_file(build_plain(engine) / WEIGHTS_NAME)
    change(tensors)
    save_weights(tensors, engine / WEIGHTS_NAME)
    with pytest.raises(SpecDecError, match=words):
        TorchEngine(engine, device="cpu")


@pytest.mark.parametrize("value", [None, "int3"])
def test_a_config_of_another_kind_is_refused(engine: Path, value: str | None) -> None:
    change_config(engine, lambda config: config["torch_config"].update(quantization=value))
    words = "quantization is 'int3', which this version" if value else "does not hold the engine"
    with pytest.raises(SpecDecError, match=words):
        TorchEngine(engine, device="cpu")


def test_builds_that_are_refused(parent: Path, tmp_path: Path) -> None:
    target = parent / "target"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"input_ids": [5, 6, 7, 8]}\n')
    fp8 = convert(
        target, tmp_path / "fp8", "--quantization", "fp8", "--calibration-data", rows
    )  # fmt: skip
    with pytest.raises(SpecDecError, match=r"int8: the checkpoint is quantized already \(FP8\)"):
        build(fp8, "engine", *INT8)
    with pytest.raises(UsageError, match="int3"):
        build(parent / "pair-ckpt", "int3", "--quantization", "int3")
    tensors = load_file(
        shutil.copytree(parent / "pair-ckpt", tmp_path / "ckpt") / "rank0.safetensors"
    )
    tensors["transformer.layers.0.mlp.fc.weight"][3, 1] = float("nan")
    save_file(tensors, tmp_path / "ckpt" / "rank0.safetensors")
    (tmp_path / "ckpt" / "manifest.json").unlink()
    with pytest.raises(SpecDecError, match="gate_up.weight has NaN or infinite values in 1 of"):
        build(tmp_path / "ckpt", "nan", *INT8)
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(("engine", "nan"))]


def test_what_is_lost_without_kernels_is_said(parent: Path, tmp_path: Path) -> None:
    engine = tmp_path / "none"
    done = run_cli_here(
        "build", "--checkpoint-dir", parent / "pair-ckpt", "--output-dir", engine, *INT8,
        "--optimize", "none",
    )  # fmt: skip
    assert done.returncode == 0
    assert "int8 without native kernels: " in done.stderr
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input_ids": [5, 6], "max_output_len": 4}\n')
    done = run_cli_here("run", "--engine-dir", engine, "--input-file", prompts, "--json")
    assert "int8: no native kernels run here" in done.stderr
    assert json.loads(done.stdout)["stats"]["quantization"] == "int8"
