"""Quantized Hugging Face folders: the weights are the library's, bit for bit; faults are named."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.checkpoint.config import read_checkpoint_config
from specdec.checkpoint.inventory import compare_tensors, describe_rank
from specdec.convert.quantize.float8 import E8M0, to_float32
from specdec.convert.quantize.sections import METHODS, REFUSED, SOURCE_FORMATS
from specdec.files.tensor_file import TensorFile
from specdec.model import int4
from specdec.model.tensors import list_linears
from tests.conftest import make_drafter, make_llama
from tests.convert.checkpoints import set_config
from tests.convert.conftest import Converter
from tests.convert.quantized import (
    CASES,
    FLOAT4,
    GROUP,
    Case,
    Tensors,
    change_folder,
    describe_int,
    make_quantized,
)
from tests.families import CLASSES, CONVOLVING, EXPERTS, GRANITES, HYBRIDS
from tests.four_bits import read_weight

FOUR_BITS = [name for name, case in CASES.items() if case.kept in int4.INT4_ALGORITHMS]
Q_PROJ = "model.layers.0.self_attn.q_proj"


def list_plain(plain: Tensors, layer: int = 0) -> Tensors:
    """The weights of a layer's linears, as a checkpoint stacks them."""
    own = {
        name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): weight
        for name, weight in plain.items()
        if name.startswith(f"model.layers.{layer}.")
    }
    return {
        "attention.qkv": torch.cat([own[f"self_attn.{part}_proj"] for part in "qkv"]),
        "attention.dense": own["self_attn.o_proj"],
        "mlp.fc": own["mlp.gate_proj"],
        "mlp.gate": own["mlp.up_proj"],
        "mlp.proj": own["mlp.down_proj"],
    }


def test_every_format_has_its_cases() -> None:
    assert {case.format for case in CASES.values()} == set(SOURCE_FORMATS)
    kept = {case.format for case in CASES.values() if case.kept}
    assert kept == {name for name, format in SOURCE_FORMATS.items() if format.stored_as}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_plain_weights_are_the_librarys(name: str, convert: Converter, tmp_path: Path) -> None:
    case = CASES[name]
    source, plain = make_quantized(tmp_path, case)
    convert(model_dir=source, dequantize=True)
    written = load_file(convert.output / "rank0.safetensors")
    dtype = getattr(torch, case.dtype)
    for layer in range(2):
        for module, weight in list_plain(plain, layer).items():
            found = written.pop(f"transformer.layers.{layer}.{module}.weight")
            assert found.dtype == dtype
            assert torch.equal(found.view(torch.int16), weight.to(dtype).view(torch.int16)), module
    assert torch.equal(written["lm_head.weight"], plain["lm_head.weight"])
    assert not any("scal" in tensor for tensor in written)
    checkpoint = read_checkpoint_config(convert.output)
    assert not checkpoint.quantization.is_quantized


@pytest.mark.parametrize(
    "name", ["fp8-block", "fp8-block-bfloat16", "fp8-block-e8m0", "modelopt-int4"]
)
def test_weights_in_float32_are_rounded_once(name: str, convert: Converter, tmp_path: Path) -> None:
    """Blocks of float8 and ModelOpt's formats, whatever type their scales have; transformers 5.24
    multiplies blocks in float32, too."""
    source, plain = make_quantized(tmp_path, CASES[name], layers=1)
    convert(model_dir=source, dequantize=True, dtype="float32")
    written = load_file(convert.output / "rank0.safetensors")
    for module, weight in list_plain(plain).items():
        assert weight.dtype == torch.float32
        assert torch.equal(written[f"transformer.layers.0.{module}.weight"], weight), module
    if name == "fp8-block-e8m0":  # bytes, as files of older versions of safetensors have them
        stored = load_file(source / "model.safetensors")
        scales = {n: t.view(torch.uint8) for n, t in stored.items() if n.endswith("scale_inv")}
        change_folder(source, scales)
        convert(model_dir=source, dequantize=True, dtype="float32", force=True)
        again = load_file(convert.output / "rank0.safetensors")
        assert all(torch.equal(again[name], tensor) for name, tensor in written.items())


def test_byte_255_of_e8m0_is_not_a_number(convert: Converter, tmp_path: Path) -> None:
    """2 ** (byte - 127), but for the last one; in either way in which files have such scales."""
    scales = to_float32(np.array([0, 127, 254, 255], np.uint8), E8M0)
    assert scales[:3].tolist() == [2.0**-127, 1, 2.0**127]
    assert np.isnan(scales[3])
    source, _ = make_quantized(tmp_path, CASES["fp8-block-e8m0"], layers=1)
    name = f"{Q_PROJ}.weight_scale_inv"
    stored = load_file(source / "model.safetensors")[name].view(torch.uint8).clone()
    stored[1, 0] = 255
    for tensor in (stored, stored.view(torch.float8_e8m0fnu)):
        change_folder(source, {name: tensor})
        message = convert.fail(model_dir=source, dequantize=True).message
        assert f"{Q_PROJ}: weight_scale_inv has 1 scales that are NaN or infinite" in message


@pytest.mark.thorough
@pytest.mark.parametrize("name", FOUR_BITS)
def test_four_bits_are_kept(name: str, convert: Converter, tmp_path: Path) -> None:
    """Numbers, scales, zeros and order are the source's: the products in float32 are equal."""
    case = CASES[name]
    source, plain = make_quantized(tmp_path, case)
    convert(model_dir=source)
    file = TensorFile(convert.output / "rank0.safetensors")
    checkpoint = read_checkpoint_config(convert.output)
    section = checkpoint.raw["quantization"]
    assert section["quant_algo"] == case.kept
    assert section["group_size"] == (
        -1 if name in ("gptq-whole-rows", "compressed-channel") else GROUP
    )
    modules = list_linears(checkpoint.model)
    assert all(int4.is_int4(module, file.tensors) for module in modules)
    assert section["has_zero_point"] == any(int4.Int4Matrix(file, m).has_zeros for m in modules)
    for module, wanted in list_plain(plain).items():
        matrix = int4.Int4Matrix(file, f"transformer.layers.0.{module}")
        assert int4.find_damage(matrix) == []
        weight = torch.from_numpy(read_weight(matrix, 0, matrix.shape[0]))
        inputs = matrix.read_input_scale()
        if inputs is not None:
            weight = weight * torch.from_numpy(inputs)
        assert torch.equal(weight.to(wanted.dtype), wanted), module
        stored = file.tensors[f"{matrix.module}.weights_scaling_factor"].dtype
        assert stored == str(wanted.dtype).removeprefix("torch.")


@pytest.mark.parametrize("name", ["fp8-dynamic", "fp8-channel", "modelopt-nvfp4"])
def test_other_numbers_are_kept(name: str, convert: Converter, tmp_path: Path) -> None:
    """In ModelOpt's layouts: what they stand for is what the source's do, on every rank."""
    source, plain = make_quantized(tmp_path, CASES[name], layers=1, intermediate=128)
    for tp_size in (1, 2):
        convert(model_dir=source, tp_size=tp_size, force=True)
        checkpoint = read_checkpoint_config(convert.output)
        assert checkpoint.quantization.quant_algo == CASES[name].kept
        files = [load_file(convert.output / f"rank{rank}.safetensors") for rank in range(tp_size)]
        found = {
            module: [restore(file, f"transformer.layers.0.{module}", name) for file in files]
            for module in ("attention.dense", "mlp.gate", "mlp.proj")
        }
        for module, parts in found.items():
            weight = torch.cat(parts, 0 if module == "mlp.gate" else 1)
            wanted = list_plain(plain)[module]
            assert torch.equal(weight.to(wanted.dtype), wanted), module
        rank = TensorFile(convert.output / "rank0.safetensors").tensors
        expected = describe_rank(checkpoint, 0)
        inventory = compare_tensors(rank, expected, checkpoint.quantization)
        assert inventory.list_faults() == []


def restore(file: Tensors, module: str, name: str) -> torch.Tensor:
    """The weight that ModelOpt's layouts stand for, in float32."""
    weight, own = file[f"{module}.weight"], name == "modelopt-nvfp4"
    if not own:
        return weight.float() * file[f"{module}.per_channel_scale"][:, None]
    codes = torch.stack([weight & 15, weight >> 4], 2).flatten(1).long()
    scales = file[f"{module}.weights_scaling_factor"].float()
    scales = scales * file[f"{module}.weights_scaling_factor_2"]
    assert file[f"{module}.activation_scaling_factor"].item() == 0.25
    return FLOAT4[codes] * scales.repeat_interleave(16, 1)


@pytest.mark.parametrize("name", ["awq", "gptq-whole-rows", "modelopt-int4"])
def test_ranks_have_their_part_of_the_four_bits(
    name: str, convert: Converter, tmp_path: Path
) -> None:
    source, _ = make_quantized(tmp_path, CASES[name], intermediate=128)
    whole = TensorFile(convert(model_dir=source, output_dir=tmp_path / "one") / "rank0.safetensors")
    convert(model_dir=source, tp_size=2)
    parts = [TensorFile(convert.output / f"rank{rank}.safetensors") for rank in range(2)]
    for module, axis in (("attention.dense", 1), ("mlp.proj", 1), ("mlp.gate", 0)):
        matrices = [
            int4.Int4Matrix(file, f"transformer.layers.1.{module}") for file in (whole, *parts)
        ]
        weights = [read_weight(matrix, 0, matrix.shape[0]) for matrix in matrices]
        assert np.array_equal(np.concatenate(weights[1:], axis), weights[0])
        inputs = [matrix.read_input_scale() for matrix in matrices]
        if inputs[0] is not None and axis == 1:
            assert np.array_equal(np.concatenate(inputs[1:]), inputs[0])  # type: ignore[arg-type]
    # Rank 1 has query heads 2 and 3 of 4, and the second of 2 K/V heads, of size 16.
    rows = [*range(32, 64), *range(80, 96), *range(112, 128)]
    qkv = [
        int4.Int4Matrix(file, "transformer.layers.1.attention.qkv") for file in (whole, parts[1])
    ]
    assert np.array_equal(read_weight(qkv[0], 0, 128)[rows], read_weight(qkv[1], 0, 64))


# The experts of some are narrower than a group. AWQ, too, for biases and fused projections.
FAMILY_CASES = [
    *(
        (f, "gptq-whole-rows" if f.endswith("_moe") else "gptq-act-order")
        for f in CLASSES
        if f not in (*HYBRIDS, *GRANITES, "gemma4")
    ),
    *((family, "awq") for family in ("qwen2", "phi3", "gpt2")),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "name"), FAMILY_CASES)
def test_every_family_is_read(family: str, name: str, convert: Converter, tmp_path: Path) -> None:
    """With plain weights, its checkpoint is byte for byte that of the unquantized model; and its
    four bits stand for the same, but for mixtures and hybrids, which are refused as they are."""
    case = CASES[name]
    source, plain = make_quantized(tmp_path, case, family=family)
    convert(model_dir=source, dequantize=True)
    if family in EXPERTS or family in CONVOLVING:
        error = convert.fail(model_dir=source, output_dir=tmp_path / "kept")
        assert re.search(r"is a (mixture|hybrid) of .*, and it is quantized", error.message)
    else:
        written = load_file(convert.output / "rank0.safetensors")
        kept = TensorFile(
            convert(model_dir=source, output_dir=tmp_path / "kept") / "rank0.safetensors"
        )
        for module in list_linears(read_checkpoint_config(convert.output).model):
            matrix, own = int4.Int4Matrix(kept, module), written[f"{module}.weight"]
            weight = torch.from_numpy(read_weight(matrix, 0, matrix.shape[0]))
            assert torch.equal(weight.half().to(own.dtype), own), module
    set_config(source, quantization_config=None)
    dtype = getattr(torch, case.dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in plain.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    unquantized = convert(model_dir=source, output_dir=tmp_path / "unquantized")
    for file in ("rank0.safetensors", "config.json"):
        assert (convert.output / file).read_bytes() == (unquantized / file).read_bytes()


@pytest.mark.parametrize("name", ["awq", "gptq-act-order", "modelopt-int4"])
def test_a_checkpoint_with_four_bits_takes_a_drafter(
    name: str, convert: Converter, tmp_path: Path
) -> None:
    """Its bytes are those of one conversion of both; what does not fit config.json is named."""
    source, _ = make_quantized(tmp_path, CASES[name])
    drafter = make_drafter(tmp_path, vocab=67, dtype=CASES[name].dtype)
    at_once = convert(model_dir=source, drafter_model_dir=drafter)
    quantization = read_checkpoint_config(at_once).quantization
    infos = TensorFile(at_once / "rank0.safetensors").tensors
    own = [name for name in infos if name.startswith("drafter.")]
    assert {infos[name].dtype for name in own} == {CASES[name].dtype}
    assert all(quantization.excludes(n[:-7]) for n in own if n.endswith(".weight"))
    assert quantization.excludes("transformer.layers.0.mlp.fc") is False
    base = convert(model_dir=source, output_dir=tmp_path / "base")
    added = convert(
        base_model_checkpoint_dir=base, drafter_model_dir=drafter, output_dir=tmp_path / "added"
    )
    file = "rank0.safetensors"
    assert (added / file).read_bytes() == (at_once / file).read_bytes()
    tensors = load_file(base / file)
    scale = "transformer.layers.0.mlp.proj.weights_scaling_factor"
    del tensors["transformer.layers.1.mlp.fc.weights_scaling_factor"]
    tensors[scale] = tensors[scale][:, :2].clone()
    tensors["transformer.layers.0.mlp.fc.weights_zero_points"] = torch.ones(1)
    save_file(tensors, base / file, metadata={"format": "pt"})
    error = convert.fail(
        base_model_checkpoint_dir=base, drafter_model_dir=drafter, output_dir=tmp_path / "other"
    )
    assert "lacks 1 tensor: transformer.layers.1.mlp.fc.weights_scaling_factor" in error.message
    assert "mlp.fc.weights_zero_points" in error.message


def test_inputs_that_are_not_scaled_have_ones_beside_others(
    convert: Converter, tmp_path: Path
) -> None:
    """ModelOpt folds some input scales into norms; TensorRT-LLM reads one of every linear."""
    source, _ = make_quantized(tmp_path, CASES["modelopt-int4"], layers=1)
    names = [f"{Q_PROJ[:-6]}{part}_proj.pre_quant_scale" for part in "qkv"]
    change_folder(source, dict.fromkeys(names))
    convert(model_dir=source)
    written = load_file(convert.output / "rank0.safetensors")
    ones = written["transformer.layers.0.attention.qkv.prequant_scaling_factor"]
    assert torch.equal(ones, torch.ones(64, dtype=torch.bfloat16))


def test_rules_that_leave_modules_out(convert: Converter, tmp_path: Path) -> None:
    """As in Qwen3.5-27B-GPTQ-Int4: the attention is not quantized. Beside them AutoRound's keys."""
    source, plain = make_quantized(tmp_path, CASES["gptq"], layers=1)
    attention = "model.layers.0.self_attn."
    stored = load_file(source / "model.safetensors")
    weights = {n: t.half() for n, t in plain.items() if n.startswith(attention)}
    packed = dict.fromkeys(n for n in stored if n.startswith(attention))
    rules: dict[str, Any] = dict.fromkeys(("-:lm_head", "-:.*attn.*", "-:.*mtp.*"), {})
    autoround = {"autoround_version": "0.8.0", "iters": 200, "low_gpu_mem_usage": True}
    change_folder(source, packed | weights, dynamic=rules, data_type="int", **autoround)
    convert(model_dir=source)
    checkpoint = read_checkpoint_config(convert.output)
    assert checkpoint.quantization.excludes("transformer.layers.0.attention.qkv")
    assert checkpoint.quantization.excludes("transformer.layers.0.mlp.fc") is False


def test_linears_that_are_left_alone_are_listed(convert: Converter, tmp_path: Path) -> None:
    source, plain = make_quantized(tmp_path, CASES["awq"])
    name = "model.layers.1.mlp.down_proj"
    kinds = dict.fromkeys([f"{name}.{kind}" for kind in ("qweight", "qzeros", "scales")])
    weight = plain[f"{name}.weight"].clone()
    change_folder(source, {**kinds, f"{name}.weight": weight}, modules_to_not_convert=["down_proj"])
    convert(model_dir=source)
    checkpoint = read_checkpoint_config(convert.output)
    assert checkpoint.quantization.excludes("transformer.layers.1.mlp.proj")
    written = load_file(convert.output / "rank0.safetensors")
    assert torch.equal(written["transformer.layers.1.mlp.proj.weight"], weight)


@pytest.mark.parametrize(
    ("name", "kind"), [("awq", "qweight"), ("gptq", "qweight"), ("compressed", "weight_packed")]
)
def test_matrices_that_are_there_plain_and_quantized(
    name: str, kind: str, convert: Converter, tmp_path: Path
) -> None:
    """The quantized one was taken without a word, whatever the other held."""
    source, plain = make_quantized(tmp_path, CASES[name], layers=1)
    weight = plain[f"{Q_PROJ}.weight"].to(torch.float16)
    change_folder(source, {f"{Q_PROJ}.weight": weight})
    for dequantize in (False, True):
        message = convert.fail(model_dir=source, dequantize=dequantize).message
        assert f"holds {Q_PROJ}.weight and, quantized, {Q_PROJ}.{kind}" in message


@pytest.mark.parametrize(
    ("name", "section", "words"),
    [
        ("awq", {"zero_point": False}, "zero_point false"),
        ("gptq-asymmetric", {"sym": True}, "sym true"),
        ("gptq", {"checkpoint_format": "gptq_v2"}, "sym true"),  # of whose zeros one was taken
        ("compressed-asymmetric", describe_int(4), "symmetric true"),
        ("compressed-asymmetric", describe_int(4, symmetric=None), "symmetric true"),
    ],
)
def test_zeros_of_a_section_that_has_none(
    name: str, section: dict[str, Any], words: str, convert: Converter, tmp_path: Path
) -> None:
    """vLLM's kernels of symmetric numbers pass zeros over, those of AutoGPTQ subtract them."""
    source, _ = make_quantized(tmp_path, CASES[name], layers=1)
    change_folder(source, {}, **section)
    message = convert.fail(model_dir=source).message
    assert f"q_proj: {words} in its section says that every zero is 8" in message
    assert re.search(r"and \d+ of its 128 are others, such as \d+", message)


@pytest.mark.parametrize("name", ["awq", "compressed"])
def test_zeros_that_are_the_middle_may_be_there(
    name: str, convert: Converter, tmp_path: Path
) -> None:
    """As AutoRound writes a symmetric model in AWQ's layout; a model without a key says nothing."""
    source, _ = make_quantized(tmp_path, CASES[name], layers=1)
    stored = load_file(source / "model.safetensors")
    middle = int(np.uint32(0x88888888).view(np.int32))
    if name == "awq":
        zeros = {key: torch.full_like(t, middle) for key, t in stored.items() if "qzeros" in key}
        change_folder(source, zeros, zero_point=False)
    else:
        change_folder(
            source,
            {
                key.replace("packed", "zero_point"): torch.full(
                    (len(t) // 8, 2 if t.shape[1] == 8 else 3), middle, dtype=torch.int32
                )
                for key, t in stored.items() if key.endswith("weight_packed")
            },
        )  # fmt: skip
    convert(model_dir=source)
    section = read_checkpoint_config(convert.output).raw["quantization"]
    assert not section["has_zero_point"]


def test_biases_of_zeros_are_left_out(convert: Converter, tmp_path: Path) -> None:
    source, _ = make_quantized(tmp_path, CASES["gptq"])
    bias = torch.zeros(64, dtype=torch.float16)
    change_folder(source, {f"{Q_PROJ}.bias": bias})
    convert(model_dir=source)
    bias[3] = 1
    change_folder(source, {f"{Q_PROJ}.bias": bias})
    error = convert.fail(model_dir=source, output_dir=tmp_path / "other")
    assert f"would not use: {Q_PROJ}.bias" in error.message


def test_scales_of_the_cache(
    convert: Converter, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """They come along; plain weights have none."""
    source, _ = make_quantized(tmp_path, CASES["modelopt-int4"])
    scales = {
        f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale": torch.tensor(value)
        for layer in range(2)
        for part, value in (("k", 0.25), ("v", 0.5))
    }
    change_folder(source, scales, kv_cache_quant_algo="FP8")
    convert(model_dir=source)
    written = load_file(convert.output / "rank0.safetensors")
    assert written["transformer.layers.1.attention.kv_cache_scaling_factor"].item() == 0.5
    assert read_checkpoint_config(convert.output).quantization.kv_cache_quant_algo == "FP8"
    convert(model_dir=source, dequantize=True, force=True)
    assert "the scales of its K/V cache are left out" in log.text
    assert not any("cache" in n for n in load_file(convert.output / "rank0.safetensors"))


@pytest.mark.parametrize(
    ("cache", "told"),
    [
        ({}, ""), ({"strategy": None}, ""), ({"type": "int"}, "'int'"), ({"num_bits": 4}, "4"),
        ({"dynamic": True, "strategy": "token"}, "True"), ({"strategy": "attn_head"}, "attn_head"),
    ],
)  # fmt: skip
def test_a_cache_that_is_not_fp8_with_fixed_scales(
    cache: dict[str, Any], told: str, convert: Converter, tmp_path: Path
) -> None:
    """As compressed-tensors names it, of linears whose section a writer has left as "frozen"."""
    source, _ = make_quantized(tmp_path, CASES["compressed"], layers=1)
    scheme = {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"} | cache
    change_folder(source, {}, kv_cache_scheme=scheme, quantization_status="frozen")
    if told:
        error = convert.fail(model_dir=source)
        assert "a checkpoint holds a cache in FP8" in error.message
        assert told in error.message
    convert(model_dir=source, dequantize=bool(told))
    read = read_checkpoint_config(convert.output).quantization.kv_cache_quant_algo
    assert read == (None if told else "FP8")


@pytest.mark.parametrize("name", ["fp8-weights", "modelopt-nvfp4-weights", "gptq-8-bits"])
def test_numbers_without_a_place_are_refused(name: str, convert: Converter, tmp_path: Path) -> None:
    source, _ = make_quantized(tmp_path, CASES[name])
    error = convert.fail(model_dir=source)
    assert "a checkpoint has no place for such numbers" in error.message
    assert "--dequantize" in error.hint


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        ("awq", {"version": "gemv"}, "version is 'gemv'"),
        ("awq-gptqmodel", {"checkpoint_format": "gemv"}, "checkpoint_format is 'gemv'"),
        ("awq-gptqmodel", {"dynamic": {"mlp": {"bits": 8}}}, "dynamic {'mlp': {'bits': 8}} gives"),
        ("awq", {"bits": 3}, "bits is 3"),
        ("awq", {"backend": "llm-awq"}, "backend is 'llm-awq'"),
        ("awq", {"group_size": 0}, "group_size is 0"),
        ("awq", {"group_size": 28}, "64 columns are no multiple of group_size 28"),
        ("awq", {"group_size": 16}, "scales is float16 [2, 64], not"),
        ("awq", {"outliers": [3]}, "outliers [3]: not known, and may change the numbers"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ("gptq", {"bits": 2}, "bits is 2"),
        ("gptq", {"bits": True}, "bits is True"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format True: not known"),
        ("gptq", {"dynamic": {"-:lm_head": {}, "+:.*mlp.*": {"bits": 8}}}, "some modules other"),
        ("gptq", {"dynamic": ["-:lm_head"]}, "dynamic ['-:lm_head'] gives some modules other"),
        ("gptq", {"data_type": "nv_fp"}, "data_type is 'nv_fp'"),
        ("gptq", {"rotation": "hadamard"}, "rotation 'hadamard': not known"),
        ("compressed", {"format": "int-quantized"}, "weights int of 4 bits by group"),
        ("compressed-nvfp4", {"format": "mxfp4-pack-quantized"}, "weights float of 4 bits by t"),
        ("compressed", describe_int(4, strategy="tensor", group_size=None), "of 4 bits by tensor"),
        ("compressed", {"transform_config": {"R1": 1}}, "transform_config rotates"),
        ("compressed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("compressed", {"config_groups": {}}, "config_groups is {}"),
        ("fp8-block", {"weight_block_size": [24]}, "a block of [24]"),
        ("fp8-block", {"weight_block_size": [16, 16]}, "weight_scale_inv is float32"),
        ("fp8-block", {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ("modelopt-int4", {"quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ'"),
        ("modelopt-int4", {"has_zero_point": True}, "has_zero_point is True"),
        ("gptq", {"quant_method": "bitsandbytes"}, "(bitsandbytes): its numbers are blocks"),
        ("gptq", {"quant_method": "hqq"}, "(hqq): a format that is not read"),
    ],
)  # fmt: skip
def test_sections_that_are_not_understood(
    name: str, section: dict[str, Any], message: str, convert: Converter, tmp_path: Path
) -> None:
    source, _ = make_quantized(tmp_path, CASES[name], layers=1)
    change_folder(source, {}, **section)
    assert message in convert.fail(model_dir=source, dequantize=True).message


@pytest.mark.parametrize(
    ("section", "kinds", "message"),
    [
        (None, ("weight", "SCB"), "(bitsandbytes): its numbers"),
        (None, ("weight", "weight.absmax", "weight.quant_map"), "(bitsandbytes): its numbers"),
        (None, ("q_weight", "q_scale", "q_scale_max"), "(exl2): a format that is not read"),
        (None, ("trellis", "suh", "svh"), "(exl3): a format that is not read"),
        (None, ("W_q", "scale", "zero"), "(hqq): a format that is not read"),
        (None, ("weight._data", "weight._scale"), "(quanto): a format that is not read"),
        (None, ("qweight", "scales"), "no quantization_config of config.json names the method"),
        ({"load_in_8bit": True}, ("weight", "SCB"), "(bitsandbytes): its numbers"),
        ({"bits": 4}, ("qweight",), "no quantization_config of config.json names the method"),
    ],
)
def test_methods_that_no_section_names(
    section: Any, kinds: tuple[str, ...], message: str, convert: Converter, tmp_path: Path
) -> None:
    """Exllama's and quanto's writers leave it out, early ones of bitsandbytes the method alone."""

    def pack(weight: torch.Tensor, _: torch.Generator) -> tuple[dict[str, torch.Tensor], Any]:
        return {kind: weight.to(torch.int8) for kind in kinds}, weight

    case = dataclasses.replace(CASES["gptq"], pack=pack)
    source, _ = make_quantized(tmp_path, case, layers=1)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": section}
    (source / "config.json").write_text(json.dumps(config))
    error = convert.fail(model_dir=source)
    assert message in error.message
    assert "convert the" in error.hint


@pytest.mark.parametrize("name", ["awq", "gptq", "fp8-block"])
def test_sections_as_transformers_saves_them(name: str, convert: Converter, tmp_path: Path) -> None:
    """Which has keys of its own for every default."""
    from transformers.utils import quantization_config

    section = dict(CASES[name].section)
    of_method = {"awq": "AwqConfig", "gptq": "GPTQConfig", "fp8": "FineGrainedFP8Config"}
    saver = getattr(quantization_config, of_method[section["quant_method"]])
    changes = {"dataset": None} if name == "gptq" else {}
    try:
        saved = saver.from_dict({**section, **changes}).to_dict()
    except ImportError as error:  # transformers 4.57 asks for the method's own packages
        pytest.skip(str(error))
    source, _ = make_quantized(tmp_path, CASES[name], layers=1)
    expected = convert(model_dir=source, dequantize=True, output_dir=tmp_path / "published")
    change_folder(source, {}, **json.loads(json.dumps(saved)))
    convert(model_dir=source, dequantize=True)
    data = [(f / "rank0.safetensors").read_bytes() for f in (expected, convert.output)]
    assert data[0] == data[1]


def test_groups_that_round_inputs_or_differ(convert: Converter, tmp_path: Path) -> None:
    source, _ = make_quantized(tmp_path, CASES["compressed"], layers=1)
    groups = json.loads((source / "config.json").read_text())["quantization_config"][
        "config_groups"
    ]
    weights = groups["group_0"]["weights"]
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    for changed, message in (
        ({"a": {"weights": weights, "input_activations": inputs}}, "inputs of linears are rounded"),
        (
            {"a": {"weights": weights}, "b": {"weights": weights | {"num_bits": 8}}},
            "different ways",
        ),
        (  # a matrix without zeros is of which?
            {"a": {"weights": weights}, "b": {"weights": weights | {"symmetric": False}}},
            "different ways",
        ),
        ({"a": {"weights": weights | {"clip": 3}}}, "clip 3: not known"),
        ({"a": {"weights": None}}, "config_groups.a is"),
        ({"a": {"weights": weights, "output_activations": inputs}}, "outputs of linears"),
    ):
        change_folder(source, {}, config_groups=changed)
        assert message in convert.fail(model_dir=source, dequantize=True).message


def damage(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[1] = value
    return changed


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind", "change", "message"),
    [
        ("awq", "qzeros", lambda t: t[:1].clone(), "qzeros is int32 [1, 8], not int32 [2, 8]"),
        ("awq", "qweight", lambda t: t[:, :4].clone(), "scales is float16 [2, 64], not"),
        ("awq", "qweight", lambda t: t.to(torch.int64), "qweight is int64"),
        ("awq", "scales", lambda t: damage(t, torch.nan), "1 NaN"),
        ("awq", "scales", lambda t: damage(t, torch.inf), "1 infinite"),
        ("awq", "scales", lambda t: None, "lacks model.layers.0.self_attn.q_proj.scales"),
        ("gptq", "g_idx", lambda t: damage(t, 1), "does not have each of 2 groups 32 times"),
        ("gptq", "g_idx", lambda t: damage(t, -5), "does not have each of 2 groups 32 times"),
        ("gptq", "qzeros", lambda t: damage(t, -1), "8 zeros are stored as 15"),
        ("gptq", "extra", lambda t: torch.ones(1), "would not use"),
        ("compressed", "weight_shape", lambda t: t * 2, "weight_packed is int32"),
        ("compressed", "weight_shape", lambda t: -t, "weight_shape is [-64, -64]"),
        ("compressed-asymmetric", "weight_zero_point", lambda t: None, "lacks model.layers.0.self"),
        ("modelopt-int4", "pre_quant_scale", lambda t: 2 * t, "different scales of their inputs"),
        ("gptq-act-order", "g_idx", lambda t: t.flip(0), "different orders of their inputs"),
        ("modelopt-nvfp4", "weight_scale_2", lambda t: 2 * t, "have different weight_scale_2"),
        ("modelopt-nvfp4", "input_scale", lambda t: None, "lacks model.layers.0.self_attn.q_proj"),
    ],
)
def test_damaged_tensors(
    name: str, kind: str, change: Any, message: str, convert: Converter, tmp_path: Path
) -> None:
    source, _ = make_quantized(tmp_path, CASES[name], layers=1)
    stored = load_file(source / "model.safetensors").get(f"{Q_PROJ}.{kind}", torch.ones(1))
    change_folder(source, {f"{Q_PROJ}.{kind}": change(stored)})
    assert message in convert.fail(model_dir=source).message


@pytest.mark.parametrize(
    ("name", "kind", "values"),
    [
        ("gptq-act-order", "g_idx", {}),
        ("compressed-act-order", "weight_g_idx", {"actorder": "group"}),
        ("compressed-act-order", "weight_g_idx", {"actorder": "dynamic"}),
        ("compressed-act-order", "weight_g_idx", {"actorder": True}),
    ],
)
def test_an_order_that_is_missing(
    name: str, kind: str, values: dict[str, Any], convert: Converter, tmp_path: Path
) -> None:
    """The numbers without their groups are those of other weights."""
    source, _ = make_quantized(tmp_path, change_weights(CASES[name], values), layers=1)
    change_folder(source, {f"{Q_PROJ}.{kind}": None})
    error = convert.fail(model_dir=source)
    fact = f"{Q_PROJ}: its 64 columns are in 2 groups by the order of activations, and {kind}"
    assert fact in error.message


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("gptq", {"desc_act": True, "static_groups": True}),
        ("gptq-whole-rows", {"desc_act": True}),
        ("compressed", {"actorder": "weight"}),
        ("compressed", {"actorder": "static"}),
        ("compressed-channel", {"actorder": "group"}),
    ],
)
def test_an_order_that_need_not_be_stored(
    name: str, values: dict[str, Any], convert: Converter, tmp_path: Path
) -> None:
    """Columns lie as they are grouped, or all of a row are one group."""
    source, plain = make_quantized(tmp_path, change_weights(CASES[name], values), layers=1)
    tensors = load_file(source / "model.safetensors")
    change_folder(source, {key: None for key in tensors if key.endswith(".g_idx")})
    convert(model_dir=source, dequantize=True, dtype="float32")
    written = load_file(convert.output / "rank0.safetensors")
    wanted = list_plain(plain)["attention.dense"].float()
    assert torch.equal(written["transformer.layers.0.attention.dense.weight"], wanted)


def change_weights(case: Case, values: dict[str, Any]) -> Case:
    """Change what a section says of weights."""
    section: dict[str, Any] = copy.deepcopy(dict(case.section))
    groups = section.get("config_groups")
    (section if groups is None else groups["group_0"]["weights"]).update(values)
    return dataclasses.replace(case, section=section)


KEPT = ["awq", "gptq", "compressed", "fp8-static", "fp8-channel", "modelopt-int4", "modelopt-nvfp4"]


@pytest.mark.thorough
@pytest.mark.parametrize("module", [Q_PROJ, "lm_head", "model.embed_tokens"])
@pytest.mark.parametrize("name", KEPT)
def test_what_a_checkpoint_holds_plain_only(
    name: str, module: str, convert: Converter, tmp_path: Path
) -> None:
    """A linear that is quantized in part, a head, an embedding: one problem, and the remedy that it
    names works."""
    case = CASES[name]
    source, plain = make_quantized(tmp_path, case, layers=1, vocab=64)
    weight = plain[f"{module}.weight"].to(getattr(torch, case.dtype))
    if module == Q_PROJ:
        own = [key for key in load_file(source / "model.safetensors") if key.startswith(Q_PROJ)]
        change_folder(source, {**dict.fromkeys(own), f"{Q_PROJ}.weight": weight})
        words = "which make one linear of the checkpoint, 2 are quantized"
        place = "transformer.layers.0.attention.qkv"
    else:
        packed, weight = case.pack(weight, torch.Generator().manual_seed(0))
        tensors = {f"{module}.{kind}": tensor for kind, tensor in packed.items()}
        change_folder(source, {f"{module}.weight": None, **tensors})
        words = f"{module} is quantized, of which a checkpoint holds plain weights only"
        place = "lm_head" if module == "lm_head" else "transformer.vocab_embedding"
    error = convert.fail(model_dir=source)
    assert words in error.message
    assert len(error.problems) == 1
    assert error.hint.startswith("add --dequantize")
    convert(model_dir=source, dequantize=True)
    written = load_file(convert.output / "rank0.safetensors")[f"{place}.weight"]
    assert torch.equal(written[: len(weight)], weight.to(written.dtype))


def test_splits_that_cut_groups_or_orders(convert: Converter, tmp_path: Path) -> None:
    source, _ = make_quantized(tmp_path, CASES["awq"], layers=1)
    error = convert.fail(model_dir=source, tp_size=2)
    assert "down_proj does not split over 2 ranks: its 3 groups of columns" in error.message
    source, _ = make_quantized(
        tmp_path, CASES["gptq-act-order"], layers=1, intermediate=128, name="ordered"
    )
    assert "an order of their own" in convert.fail(model_dir=source, tp_size=2).message
    convert(model_dir=source, tp_size=2, dequantize=True)


def test_gptqmodel_carries_ones_through_words(convert: Converter, tmp_path: Path) -> None:
    """Its writer takes one from whole words, so a zero of 0 borrows from the next one."""
    source, _ = make_quantized(tmp_path, CASES["gptq-v2"], layers=1)
    stored = load_file(source / "model.safetensors")
    words = {name: stored[name] & ~0xF0F for name in stored if name.endswith("qzeros")}
    change_folder(source, words)
    wanted = load_file(
        convert(model_dir=source, dequantize=True, output_dir=tmp_path / "v2") / "rank0.safetensors"
    )
    meta = {"quantizer": ["gptqmodel:7.7.0"]}
    words = {name: word - 0x11111111 for name, word in words.items()}
    change_folder(source, words, checkpoint_format="gptq", meta=meta)
    convert(model_dir=source, dequantize=True)
    written = load_file(convert.output / "rank0.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in wanted.items())
    change_folder(source, {}, meta={"quantizer": ["optimum:1.2"]})
    error = convert.fail(model_dir=source, dequantize=True, output_dir=tmp_path / "v1")
    assert "zeros are stored as 15" in error.message


def test_a_quantized_hybrid_is_dequantized(convert: Converter, tmp_path: Path) -> None:
    """A checkpoint cannot keep its codes, since the rows of queries lie among those of gates."""
    source, plain = make_quantized(tmp_path, CASES["gptq-whole-rows"], family="qwen3_5")
    error = convert.fail(model_dir=source)
    assert "is a hybrid of linear and full attention, and it is quantized" in error.message
    assert "give --dequantize" in error.hint
    convert(model_dir=source, dequantize=True)
    found = (convert.output / "rank0.safetensors").read_bytes()
    save_file(plain, source / "model.safetensors", metadata={"format": "pt"})
    set_config(source, quantization_config=None)
    convert(model_dir=source, output_dir=tmp_path / "plain")
    assert found == (tmp_path / "plain" / "rank0.safetensors").read_bytes()


def test_a_folder_that_does_not_say_that_it_is_quantized(
    convert: Converter, tmp_path: Path
) -> None:
    source, _ = make_quantized(tmp_path, CASES["fp8-static"], layers=1)
    set_config(source, quantization_config=None)
    error = convert.fail(model_dir=source, dequantize=True)
    assert "does not say that it is quantized" in error.message
    message = convert.fail(model_dir=source).message
    assert "q_proj.weight is float8_e4m3fn" in message
    assert "would not use" in message


@pytest.mark.parametrize("scheme", ["static", "dynamic"])
def test_a_folder_that_says_so_and_holds_plain_weights(
    scheme: str, convert: Converter, tmp_path: Path
) -> None:
    """As after a merge in plain weights: static FP8 became a checkpoint that is FP8 in name."""
    source = make_llama(tmp_path)
    section = {"quant_method": "fp8", "activation_scheme": scheme}
    set_config(source, quantization_config=section)
    error = convert.fail(model_dir=source)
    assert "is quantized" in error.message
    assert "but holds no" in error.message
    assert "remove quantization_config" in error.hint


def test_static_float8_in_transformers_names(convert: Converter, tmp_path: Path) -> None:
    """As Ministral 3 is published; the numbers are those of a folder in ModelOpt's names."""
    source, _ = make_quantized(tmp_path, CASES["fp8-static"], layers=1, vocab=64)

    def write(name: str) -> list[bytes]:
        outputs = [tmp_path / f"{name}-{form}" for form in ("stored", "plain")]
        for output, dequantize in zip(outputs, (False, True), strict=True):
            convert(model_dir=source, output_dir=output, dequantize=dequantize)
        return [(output / "rank0.safetensors").read_bytes() for output in outputs]

    expected = write("modelopt")
    names = {".weight_scale": ".weight_scale_inv", ".input_scale": ".activation_scale"}
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        for old, new in names.items():
            if name.endswith(old):
                change_folder(source, {name: None, name.removesuffix(old) + new: tensor})
    section = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None,
               "dequantize": False, "modules_to_not_convert": ["lm_head"]}  # fmt: skip
    set_config(source, quantization_config=section)
    assert write("transformers") == expected
    assert "model.layers.0.mlp.up_proj.activation_scale" in load_file(source / "model.safetensors")


@pytest.mark.parametrize(
    "name",
    ["compressed", "compressed-asymmetric", "compressed-channel", "compressed-8-bits",
     "compressed-nvfp4", "fp8-channel"],
)  # fmt: skip
def test_compressed_tensors_reads_the_same(name: str, tmp_path: Path) -> None:
    """The weights that the tests above compare with are those of the format's own library."""
    pytest.importorskip("compressed_tensors", reason="of the dev extra, from Python 3.11 on")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    source, plain = make_quantized(tmp_path, CASES[name], layers=1)
    section: Any = CASES[name].section
    compressor: Any = BaseCompressor.get_value_from_registry(section["format"])
    scheme = QuantizationScheme(**section["config_groups"]["group_0"])
    stored = load_file(source / "model.safetensors")
    for module in ("self_attn.q_proj", "mlp.down_proj"):
        prefix = f"model.layers.0.{module}."
        own = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}
        weight = compressor.decompress(own, scheme)["weight"]
        assert weight.dtype == plain[f"{prefix}weight"].dtype
        assert torch.equal(weight, plain[f"{prefix}weight"])


def test_methods_are_read_or_refused() -> None:
    assert not set(METHODS) & set(REFUSED)
