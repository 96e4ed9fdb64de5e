"""An int4 engine: rounded by the build, or of a checkpoint that has four bits already."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.decode.engine import TorchEngine
from specdec.decode.prefill import fill_cache
from specdec.engine import int4 as rounding
from specdec.engine.decoder import Decoder
from specdec.engine.layout import WEIGHTS_NAME, list_integers, read_engine_config
from specdec.engine.native_layers import KernelLayers, NativeLayers, choose_native
from specdec.errors import SpecDecError
from specdec.files.reading import read_json
from specdec.files.tensor_file import TensorFile
from specdec.model import int4
from tests.conftest import make_llama
from tests.engine.kernels import needs_compiler
from tests.engines import (
    build_plain,
    continue_greedily,
    renew_sums,
    round_inputs,
    save_weights,
)
from tests.four_bits import read_weight
from tests.parity.models import VOCAB
from tests.parity.test_families import assert_near
from tests.parity.test_parallel_layers import compute, load_ranks
from tests.run.test_int8_engine import (
    LIMIT,
    PROMPTS,
    build,
    change_config,
    check_text,
    convert,
    generate,
    make_engines,
)

INT4 = ("--quantization", "int4", "--group-size", 32)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engines(tmp_path_factory.mktemp("int4"), *INT4, intermediate=96)


@needs_compiler
@pytest.mark.parametrize(
    "method",
    ["redrafter", "medusa", "eagle, dynamic", "draft_target by wide", "suffix", "lookahead"],
)
def test_speculative_text_is_that_of_plain_decoding(parent: Path, method: str) -> None:
    check_text(parent, method, "int4")


@needs_compiler
def test_layers_of_several_types_go_kernel_by_kernel(parent: Path) -> None:
    """As of a checkpoint that leaves some modules unquantized: one call takes one type."""
    decoder = TorchEngine(parent / "redrafter-engine", device="cpu", speculate=False).decoder
    wide = TorchEngine(parent / "wide-engine", device="cpu").decoder
    assert decoder.kernels is not None
    assert type(choose_native(decoder.stack, decoder.kernels)) is NativeLayers
    first, *others = decoder.stack.layers
    first = dataclasses.replace(first, down=wide.stack.layers[0].down)
    mixed = dataclasses.replace(decoder.stack, layers=[first, *others])
    way = choose_native(mixed, decoder.kernels)
    assert type(way) is KernelLayers
    text = list(range(3, 20))
    whole = compute_prompt(decoder, text)
    decoder._native = KernelLayers(decoder.stack, decoder.kernels)
    assert torch.equal(compute_prompt(decoder, text), whole)
    decoder._native = way
    logits = torch.stack([compute_prompt(decoder, text), whole, compute_prompt(wide, text)])
    assert float(torch.corrcoef(logits).min()) > 0.9


@torch.inference_mode()
def compute_prompt(decoder: Decoder, text: list[int]) -> torch.Tensor:
    """Logits after a prompt, float32 [V]."""
    cache = decoder.make_cache(1, len(text))
    hidden = fill_cache(decoder, cache, [0], [text], 8192)
    return decoder.compute_logits(hidden)[0].float()


# ---- Checkpoints that have four bits.


def quantize_checkpoint(checkpoint: Path, *, is_full: bool, **changes: Any) -> Path:
    """Round a checkpoint's layers to four bits in place.

    is_full: with zeros (but not of the gate), scales of inputs and an order of these.
    """
    tensors = load_file(checkpoint / "rank0.safetensors")
    generator = torch.Generator().manual_seed(0)
    names = [n for n, t in tensors.items() if ".layers." in n and t.ndim == 2]
    lists: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name in names:
        weight, module = tensors[name].float(), name.removesuffix(".weight")
        place = module.replace(".gate", ".fc")  # which read the same inputs
        if place not in lists:
            depth = weight.shape[1]
            lists[place] = (
                torch.rand(depth, generator=generator) + 0.5,
                torch.randperm(depth, generator=generator).to(torch.int32),
            )
        scale, order = lists[place]
        if is_full:
            weight = (weight / scale)[:, order]
            tensors[f"{module}.prequant_scaling_factor"] = scale.clone()
            tensors[f"{module}.input_permutation"] = order.clone()
        scales = rounding.choose_scales(weight, 32, name)
        codes = rounding.round_weight(weight, scales).to(torch.int16)
        if is_full and ".gate" not in name:
            zeros = torch.randint(6, 11, scales.shape, generator=generator).to(torch.uint8)
            codes = (codes + (zeros.short() - 8).repeat_interleave(32, 1)).clamp(0, 15)
            tensors[f"{module}.weights_zero_point"] = zeros
        tensors[name] = torch.from_numpy(int4.pack(codes.to(torch.uint8).numpy()))
        tensors[f"{module}.weights_scaling_factor"] = scales.half()
    save_file(tensors, checkpoint / "rank0.safetensors")
    algorithm = int4.INT4_GROUPS if is_full else int4.W4A16_AWQ
    section = {"quant_algo": algorithm, "group_size": 32, "kv_cache_quant_algo": None}
    change_config(checkpoint, lambda config: config.update(quantization=section | changes))
    return checkpoint


def widen_checkpoint(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The matrices that a checkpoint stands for, float32, scales of inputs multiplied in."""
    source, widened = TensorFile(checkpoint / "rank0.safetensors"), {}
    for name in source.tensors:
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and int4.is_int4(module, source.tensors):
            matrix = int4.Int4Matrix(source, module)
            widened[module] = torch.from_numpy(read_weight(matrix, 0, matrix.shape[0]))
    return widened


@pytest.mark.thorough
@pytest.mark.parametrize("optimize", ["auto", "none"])
@pytest.mark.parametrize("kind", ["plain", "full", "int4_awq"])
def test_text_is_what_transformers_makes_of_a_checkpoint(
    kind: str, optimize: str, tmp_path: Path
) -> None:
    """Transformers with the widened weights, inputs scaled and, as by the kernels, rounded."""
    from transformers import AutoModelForCausalLM

    target = make_llama(tmp_path, seed=3, intermediate=96)
    if kind == "int4_awq":  # as convert makes it of data
        rows = tmp_path / "rows.jsonl"
        rows.write_text("".join(f'{{"input_ids": [5, {i}, 9, 30, 2]}}\n' for i in range(4)))
        flags = ("--quantization", kind, "--group-size", 32, "--calibration-data", rows)
        checkpoint = convert(target, tmp_path / "checkpoint", *flags)
    else:
        checkpoint = convert(target, tmp_path / "checkpoint")
        quantize_checkpoint(checkpoint, is_full=kind == "full")
        renew_sums(checkpoint)
    engine = build(checkpoint, "engine", "--optimize", optimize)
    widened, stored = widen_checkpoint(checkpoint), load_file(checkpoint / "rank0.safetensors")
    model = AutoModelForCausalLM.from_pretrained(target)
    before = continue_greedily(model, PROMPTS, LIMIT)
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        for name, parts in {
            "attention.qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
            "attention.dense": (attention.o_proj,),
            "mlp.fc": (mlp.gate_proj,),
            "mlp.gate": (mlp.up_proj,),
            "mlp.proj": (mlp.down_proj,),
        }.items():
            module = f"transformer.layers.{index}.{name}"
            sizes = [part.weight.shape[0] for part in parts]
            scale = stored.get(f"{module}.prequant_scaling_factor", torch.ones(()))
            order = stored.get(f"{module}.input_permutation")
            order = torch.arange(parts[0].weight.shape[1]) if order is None else order
            back = order.argsort()

            def transform(
                _: Any, x: Any, scale: torch.Tensor = scale, order: torch.Tensor = order,
                back: torch.Tensor = back,
            ) -> torch.Tensor:  # fmt: skip
                inputs = (x[0] * scale)[..., order]
                return (inputs if optimize == "none" else round_inputs(inputs, 32))[..., back]

            for part, weight in zip(parts, torch.split(widened[module], sizes), strict=True):
                part.weight.data = weight.clone()
                part.register_forward_pre_hook(transform)
    expected = continue_greedily(model, PROMPTS, LIMIT)
    loaded = TorchEngine(engine, device="cpu")
    assert generate(loaded)[0] == expected
    assert expected != before, "the rounding is seen in these texts"
    assert sum(len(set(text)) for text in expected) > 20, "the texts vary"


def test_two_ranks_hold_the_weights_of_one(tmp_path: Path) -> None:
    target = make_llama(tmp_path, seed=4, intermediate=128, vocab=VOCAB)
    whole = build_plain(build(convert(target, tmp_path / "one"), "engine-1", *INT4))
    checkpoint = convert(target, tmp_path / "two", "--tp-size", 2)
    split = build_plain(build(checkpoint, "engine-2", *INT4))
    assert_near(compute(load_ranks(split)), compute(load_ranks(whole)), "two ranks")
    parts = [
        int4.Int4Matrix(TensorFile(folder / file), "transformer.layers.1.mlp.proj")
        for folder, file in (
            (whole, WEIGHTS_NAME), (split, "rank0.safetensors"), (split, "rank1.safetensors")
        )
    ]  # fmt: skip
    weights = [read_weight(part, 0, part.shape[0]) for part in parts]
    assert np.array_equal(weights[0], np.concatenate(weights[1:], axis=1))


def test_rounding_takes_the_scale_of_least_error() -> None:
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    weight[0, :32] = 0
    scales = rounding.choose_scales(weight, 32, "w")
    assert scales[0, 0] == 1
    codes = rounding.round_weight(weight, scales)
    assert codes.max() <= 15

    def find_error(scales: torch.Tensor) -> torch.Tensor:
        codes = rounding.round_weight(weight, scales).reshape(6, 8, 32).double()
        restored = (codes - 8) * scales.double()[..., None]
        return (restored - weight.double().reshape(6, 8, 32)).square().sum(-1)

    groups = weight.reshape(6, 8, 32)
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))[..., 0]
    largest[0, 0] = -8
    for ratio in rounding.RATIOS:
        assert (find_error(scales) <= find_error(largest / ratio) + 1e-5).all()
    weight[3, 40] = float("inf")
    with pytest.raises(SpecDecError, match="w has NaN or infinite"):
        rounding.choose_scales(weight, 32, "w")


def test_a_folder_says_what_it_holds(parent: Path) -> None:
    engine = build_plain(parent / "redrafter-engine")
    assert read_json(engine / "config.json")["torch_config"]["quantization"] == "int4"
    tensors = load_file(engine / WEIGHTS_NAME)
    names = {name for name, tensor in tensors.items() if tensor.dtype is torch.int8}
    assert names == set(list_integers(read_engine_config(engine).checkpoint.model))
    for name in names:
        rows, depth = tensors[name].shape
        scales = tensors[name.replace("weight", "weights_scaling_factor")]
        assert (scales.dtype, scales.shape) == (torch.float32, (2 * rows, depth // 32))


# ---- What is refused.


def test_builds_that_are_refused(parent: Path, tmp_path: Path) -> None:
    def refuse(checkpoint: Path, words: str, *flags: object) -> None:
        with pytest.raises(SpecDecError, match=words):
            build(checkpoint, "refused", *flags)

    plain = parent / "pair-ckpt"
    refuse(plain, "mlp.proj.weight is .64, 96.*groups of 64", *INT4[:2], "--group-size", 64)
    refuse(plain, "--group-size 48", *INT4[:2], "--group-size", 48)
    refuse(plain, "--group-size without --quantization int4", "--group-size", 32)
    four = quantize_checkpoint(convert(parent / "target", tmp_path / "ckpt"), is_full=True)
    refuse(four, r"quantized already \(INT4_GROUPS\)", *INT4)
    file = four / "rank0.safetensors"
    good = load_file(file)
    fc = "transformer.layers.0.mlp.fc"
    for changed, words in (
        ({f"{fc}.input_permutation": good[f"{fc}.input_permutation"].flip(0)}, "orders of inputs"),
        ({f"{fc}.weights_zero_point": good[f"{fc}.weights_zero_point"] + 10}, "above 16"),
        ({f"{fc}.weights_scaling_factor": good[f"{fc}.weights_scaling_factor"] * torch.nan}, "NaN"),
        ({f"{fc}.weights_scaling_factor": torch.ones(96, 4)}, "groups of 16"),
    ):
        save_file(good | changed, file)
        refuse(four, words)
    save_file(good, file)
    refuse(quantize_wrongly(four), r"quantized \(W4A8_AWQ\)")


def quantize_wrongly(checkpoint: Path) -> Path:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(read_json(path) | {"quantization": {"quant_algo": "W4A8_AWQ"}}))
    return checkpoint


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("weights_scaling_factor", lambda t: t * torch.inf, "NaN or infinite"),
        ("weights_scaling_factor", lambda t: t[:2], r"is \[2, 3\], expected \[64, 3\]"),
        ("weights_scaling_factor", None, "1 missing"),
        ("weight", lambda t: t[:2], r"is \[2, 96\], expected \[32, 96\]"),
        ("weight", lambda t: t.bfloat16(), "is bfloat16, expected int8"),
    ],
)
def test_damaged_engines_are_refused(
    parent: Path, tmp_path: Path, kind: str, change: Any, words: str
) -> None:
    import shutil

    engine = tmp_path / "engine"
    build_plain(Path(shutil.copytree(parent / "draft-engine", engine)))
    tensors = load_file(engine / WEIGHTS_NAME)
    name = f"transformer.layers.1.mlp.proj.{kind}"
    changed = tensors.pop(name)
    if change is not None:
        tensors[name] = change(changed).clone()
    save_weights(tensors, engine / WEIGHTS_NAME)
    with pytest.raises(SpecDecError, match=words):
        TorchEngine(engine, device="cpu")
