"""Every --quantization: against ModelOpt's output, a second reader's numbers, and over ranks."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.checkpoint.config import read_checkpoint_config
from specdec.convert.plan import PlannedTensor
from specdec.convert.quantize import calibration, evaluate, search
from specdec.convert.quantize.calibration import Inputs
from specdec.convert.quantize.formats import FORMATS, Format
from specdec.convert.quantize.rounded import RoundedMatrix, Scales
from specdec.files.tensor_file import TensorInfo
from specdec.model.sharding import join
from specdec.model.tensors import list_linears, list_target_tensors
from tests.conftest import make_drafter, make_llama
from tests.convert.checkpoints import read_config
from tests.convert.conftest import Converter
from tests.convert.golden_models import GOLDEN, summarize_rank
from tests.convert.test_fp8 import make_rows, write_rows

MODELOPT = GOLDEN / "modelopt"
LAYOUTS = json.loads((MODELOPT / "layouts.json").read_text())
FLAGS: dict[str, dict[str, Any]] = {
    "fp8_pc_pt": {}, "nvfp4": {}, "int8_sq": {}, "int4_awq": {"group_size": 32},
    "w4a8_awq": {"group_size": 32},
}  # fmt: skip


def get_flags(quantization: str, data: Path, **flags: Any) -> dict[str, Any]:
    flags = {"quantization": quantization, **FLAGS[quantization], **flags}
    return flags if quantization == "fp8_pc_pt" else flags | {"calibration_data": data}


def make_target(parent: Path, **options: Any) -> Path:
    """A Llama whose second MLP sees an input of which some parts are far larger than others."""
    target = make_llama(parent, intermediate=128, dtype="bfloat16", **options)
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"][:3] *= 20
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


# ---- A second reader, in torch.


def restore(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """What a stored matrix stands for, for inputs that are not scaled: float32 [out, in]."""

    def get(kind: str) -> torch.Tensor | None:
        return tensors.get(f"{module}.{kind}")

    stored, scales = tensors[f"{module}.weight"], get("weights_scaling_factor")
    if scales is None:
        scales = get("per_channel_scale")
    assert scales is not None
    scales = scales.float()
    if stored.dtype == torch.uint8:  # two of a row's columns a byte
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = torch.cat([values, -values])
        codes = torch.stack([stored & 15, stored >> 4], -1).flatten(1).long()
        numbers = values[codes] * tensors[f"{module}.weights_scaling_factor_2"]
    elif stored.dtype == torch.int8 and scales.dim() == 2:  # two rows a byte, in two's complement
        codes = torch.stack([stored & 15, (stored >> 4) & 15], 1).flatten(0, 1).int()
        numbers = torch.where(codes > 7, codes - 16, codes).float()
    else:
        numbers = stored.float()
    if scales.dim() == 2:
        scales = scales.repeat_interleave(numbers.shape[1] // scales.shape[1], 1)
    else:
        scales = scales[:, None]
    prequant = get("prequant_scaling_factor")
    return numbers * scales * (1 if prequant is None else prequant.float())


# ---- Against ModelOpt.


@pytest.mark.parametrize("golden", LAYOUTS, ids=lambda g: f"{g['quantization']}-{g['group_size']}")
def test_modelopts_layout(golden: dict[str, Any], convert: Converter, tmp_path: Path) -> None:
    """Names, types and shapes of all; and ModelOpt's bytes where nothing is searched for."""
    batches = json.loads((MODELOPT / "calib_ids.json").read_text())
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": r} for b in batches for r in b])
    flags = get_flags(golden["quantization"], data) | {"group_size": golden["group_size"]}
    if golden["quantization"] != "fp8_pc_pt":
        flags |= {"calib_size": 8, "calib_batch_size": 2}
    convert(
        model_dir=MODELOPT / "hf" / "llama", use_parallel_embedding=True,
        tp_size=golden["tp_size"], **flags,
    )  # fmt: skip
    for rank, theirs in enumerate(golden["ranks"]):
        ours = summarize_rank(convert.output / f"rank{rank}.safetensors")
        if "transformer.layers.1.mlp.fc.weight" in theirs:
            assert ours.keys() == theirs.keys()
        else:  # a golden of the first layer
            assert {k for k in ours if ".layers.1." not in k} == theirs.keys()
        for name, (dtype, shape, sha256) in theirs.items():
            # ModelOpt writes NVFP4's scalars without a dimension, TensorRT-LLM declares one.
            assert ours[name][:2] == [dtype, shape or [1]], name
            is_measured = name.endswith("activation_scaling_factor")  # another CPU may differ
            if sha256 is not None and not is_measured:
                assert ours[name][2] == sha256, name
    section = read_config(convert.output)["quantization"]
    excluded = section.pop("exclude_modules")
    assert excluded == ["lm_head", *FORMATS[golden["quantization"]].excluded]
    assert {**golden["section"], "exclude_modules": None}.items() <= {
        **section, "exclude_modules": None,
    }.items()  # fmt: skip


# ---- By a second reader.

LIMITS = {"fp8_pc_pt": 0.04, "nvfp4": 0.12, "int8_sq": 0.04, "int4_awq": 0.12, "w4a8_awq": 0.12}


@pytest.mark.thorough
@pytest.mark.parametrize("quantization", FLAGS)
def test_ranks_have_parts_of_the_same_numbers(
    quantization: str, convert: Converter, tmp_path: Path
) -> None:
    target, data = make_target(tmp_path), make_rows(tmp_path / "rows.jsonl", 9)
    flags = get_flags(quantization, data)
    whole = load_file(
        convert(model_dir=target, output_dir=tmp_path / "one", workers=1, **flags)
        / "rank0.safetensors"
    )
    plain = load_file(
        convert(model_dir=target, output_dir=tmp_path / "plain") / "rank0.safetensors"
    )
    convert(model_dir=target, tp_size=2, workers=2, **flags)
    ranks = [load_file(convert.output / f"rank{rank}.safetensors") for rank in range(2)]
    checkpoint = read_checkpoint_config(convert.output)
    model, specs = checkpoint.model, list_target_tensors(checkpoint.model)
    assert checkpoint.quantization.quant_algo == FORMATS[quantization].name
    for module in list_linears(model):
        spec = specs[f"{module}.weight"]
        numbers = restore(whole, module)
        parts = [restore(rank, module).numpy() for rank in ranks]
        assert np.array_equal(join(parts, spec, model), numbers.numpy()), module
        assert checkpoint.quantization.excludes(module) is False
        wanted = plain[f"{module}.weight"].float()
        error = ((numbers - wanted).norm() / wanted.norm()).item()
        assert 0 < error < LIMITS[quantization], module
    untouched = [name for name in plain if name.removesuffix(".weight") not in list_linears(model)]
    assert all(torch.equal(whole[name], plain[name]) for name in untouched)


def test_int4_codes_are_the_nearest(convert: Converter, tmp_path: Path) -> None:
    """Given the stored scales; and these keep one of the allowed parts of each group's largest."""
    target, data = make_target(tmp_path), make_rows(tmp_path / "rows.jsonl", 9)
    plain = load_file(
        convert(model_dir=target, output_dir=tmp_path / "plain") / "rank0.safetensors"
    )
    convert(model_dir=target, **get_flags("int4_awq", data))
    tensors = load_file(convert.output / "rank0.safetensors")
    has_scales, kept = False, set()
    for module in ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj"):
        module = f"transformer.layers.1.{module}"
        prequant = tensors[f"{module}.prequant_scaling_factor"].float()
        has_scales |= bool((prequant != 1).any())
        scales = tensors[f"{module}.weights_scaling_factor"][:, :, None]
        values = (plain[f"{module}.weight"].float() / prequant).reshape(*scales.shape[:2], 32)
        codes = (values / scales).round().clamp(-8, 7)
        expected = (codes * scales).flatten(1) * prequant
        assert torch.equal(restore(tensors, module), expected)
        parts = scales[:, :, 0] * 7 / values.abs().amax(2)
        kept |= {round(part, 3) for part in parts.flatten().tolist()}
        pair = module.replace(".fc", ".gate")
        assert torch.equal(tensors[f"{pair}.prequant_scaling_factor"].float(), prequant)
    assert has_scales
    assert 1 < len(kept)
    assert kept <= set(search.KEPT_SHARES)


def test_the_report_is_what_the_checkpoint_costs(convert: Converter, tmp_path: Path) -> None:
    """Perplexity and KL on the rows held out, by transformers with the stored numbers put in."""
    from transformers import AutoModelForCausalLM

    target, data = make_target(tmp_path), make_rows(tmp_path / "rows.jsonl", 16)
    convert(model_dir=target, **get_flags("int4_awq", data))
    report = convert.report["quality"]
    tensors = load_file(convert.output / "rank0.safetensors")
    rows = [json.loads(line)["input_ids"] for line in data.read_text().splitlines()][14:]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    with torch.inference_mode():
        before = [model(torch.tensor([row])).logits[0, :-1].float() for row in rows]
        for i, layer in enumerate(model.model.layers):
            prefix = f"transformer.layers.{i}."
            qkv = restore(tensors, prefix + "attention.qkv")
            for linear, numbers in (
                (layer.self_attn.q_proj, qkv[:64]), (layer.self_attn.k_proj, qkv[64:96]),
                (layer.self_attn.v_proj, qkv[96:]),
                (layer.self_attn.o_proj, restore(tensors, prefix + "attention.dense")),
                (layer.mlp.gate_proj, restore(tensors, prefix + "mlp.fc")),
                (layer.mlp.up_proj, restore(tensors, prefix + "mlp.gate")),
                (layer.mlp.down_proj, restore(tensors, prefix + "mlp.proj")),
            ):  # fmt: skip
                linear.weight.copy_(numbers)
        after = [model(torch.tensor([row])).logits[0, :-1].float() for row in rows]
    own = torch.cat(before).log_softmax(1)
    found = torch.cat(after).log_softmax(1)
    tokens = torch.tensor([token for row in rows for token in row[1:]])
    assert report["num_tokens"] == len(tokens) == 22
    for name, predictions in (("perplexity", found), ("unquantized_perplexity", own)):
        loss = torch.nn.functional.nll_loss(predictions, tokens)
        assert report[name] == pytest.approx(loss.exp().item(), rel=1e-5)
    distance = torch.nn.functional.kl_div(found, own, log_target=True, reduction="batchmean")
    assert report["kl"] == pytest.approx(distance.item(), rel=1e-3)
    assert report["kl"] > 1e-5


def test_inputs_are_rounded_where_the_format_rounds_them(
    convert: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, data = make_target(tmp_path), make_rows(tmp_path / "rows.jsonl", 16)
    found = {}
    for name in ("nvfp4", "int8_sq", "w4a8_awq"):
        flags = {"model_dir": target, "output_dir": tmp_path / name, **get_flags(name, data)}
        convert(**flags)
        found[name] = convert.report["quality"]["kl"]
        with monkeypatch.context() as patch:
            patch.setattr(evaluate, "_make_hook", lambda *_: None)
            convert(**flags | {"output_dir": tmp_path / f"{name}-weights"})
        assert convert.report["quality"]["kl"] != found[name]
    assert found["int8_sq"] < found["nvfp4"]


# ---- The search.


def make_matrix(values: np.ndarray, format_: Format) -> Any:
    """A matrix of these numbers."""
    tensor = PlannedTensor(TensorInfo("float32", values.shape), ())
    matrix = RoundedMatrix("m", tensor, format_.make_rounding(32), Scales(Path()))
    matrix.read = lambda start, stop: values[start:stop].copy()
    return matrix


@pytest.mark.parametrize("name", ["int4_awq", "int8_sq"])
def test_the_search_lowers_the_error_of_outputs(name: str) -> None:
    """As tokens show it, not only by the search's own measure."""
    format_, generator = FORMATS[name], np.random.default_rng(0)
    tokens = generator.standard_normal((400, 64)).astype(np.float32)
    tokens[:, ::16] *= 30
    weights = generator.standard_normal((24, 64)).astype(np.float32)
    size = 32 if format_.group_size else 1
    grouped = tokens.reshape(400, -1, size).transpose(1, 0, 2)
    inputs = Inputs(
        np.abs(tokens).mean(0), np.abs(tokens).max(0), grouped.transpose(0, 2, 1) @ grouped / 400
    )

    def measure(matrix: RoundedMatrix) -> float:
        scale = np.ones(64, np.float32) if matrix.input_scale is None else matrix.input_scale
        seen = tokens * scale
        if format_.inputs:
            step = np.abs(seen).max() / 127
            seen = np.rint(seen / step) * step
        error = seen / scale @ matrix.restore(0, 24).T - tokens @ weights.T
        return float(np.square(error).sum(1).mean())

    matrix = make_matrix(weights, format_)
    plain = measure(matrix)
    found = search.search_inputs([matrix], inputs, format_, threading.Event())
    assert measure(matrix) < 0.6 * plain
    assert matrix.input_scale is not None
    if format_.group_size:  # clipping comes after the measured choice, and lowers the error
        assert 0.5 * found.error < measure(matrix) < found.error
    else:
        assert found.error == pytest.approx(measure(matrix), rel=0.1)
    assert found.largest_input == np.abs(tokens * matrix.input_scale).max()
    assert found.largest_weight == np.abs(weights / matrix.input_scale).max()


def test_dead_inputs_and_dead_weights_keep_a_scale() -> None:
    weights = np.zeros((4, 64), np.float32)
    weights[:, 0] = 1
    dead = Inputs(np.zeros(64, np.float32), np.zeros(64, np.float32), np.zeros((2, 32, 32)))
    matrix = make_matrix(weights, FORMATS["int4_awq"])
    search.search_inputs([matrix], dead, FORMATS["int4_awq"], threading.Event())
    assert matrix.input_scale is not None
    assert matrix.input_scale.tolist() == [1] * 64
    assert np.array_equal(matrix.restore(0, 4), weights)


# ---- What is refused.


@pytest.mark.parametrize(
    ("quantization", "flags", "message", "hint"),
    [
        ("int4_awq", {"group_size": None}, "64 columns that a rank has are no multiple", "size 64"),
        ("int4_awq", {"tp_size": 4}, "dense.weight: the 16 columns", "--tp-size"),
        ("nvfp4", {"trtllm_version": "0.14"}, "0.14 cannot load NVFP4", "convert it for 1.2"),
        (
            "fp8_pc_pt", {"trtllm_version": "0.14"}, "it rounds only the MLPs of the inner layers",
            "convert it for 1.2",
        ),
        (
            "int4_awq", {"trtllm_version": "0.14"},
            "TensorRT-LLM 0.14 has int4 kernels for groups of 64 and 128, not of 32",
            "--group-size 128",
        ),
        (
            "w4a8_awq", {"trtllm_version": "0.14", "group_size": 64},
            "transformer.layers.0.attention.qkv.weight is [128, 64], and TensorRT-LLM 0.14 loads"
            " W4A8_AWQ of sizes that are multiples of 128", "another --quantization",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_or_loaded(
    quantization: str,
    flags: dict[str, Any],
    message: str,
    hint: str,
    convert: Converter,
    tmp_path: Path,
) -> None:
    target, data = make_target(tmp_path), make_rows(tmp_path / "rows.jsonl")
    error = convert.fail(model_dir=target, **get_flags(quantization, data) | flags)
    assert message in error.message
    assert hint in error.hint


def test_rows_in_pairs(convert: Converter, tmp_path: Path) -> None:
    target = make_llama(tmp_path, heads=6, kv_heads=6, hidden=96, head_dim=32, intermediate=96)
    data = make_rows(tmp_path / "rows.jsonl")
    flags = get_flags("int4_awq", data)
    convert(model_dir=target, tp_size=3, dry_run=True, **flags)  # 32 of 96 rows each
    target = make_llama(tmp_path, name="odd", intermediate=33)
    error = convert.fail(model_dir=target, **flags)
    assert "mlp.fc.weight: a rank has rows 0 to 33, and four-bit rows" in error.message


def test_broken_numbers_are_told(
    convert: Converter, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    target, data = make_target(tmp_path), make_rows(tmp_path / "rows.jsonl")
    flags = {"model_dir": target, **get_flags("int4_awq", data)}
    convert(dry_run=True, calib_size=4, **flags)
    assert "has no rows beside the calibration's: what the quantization costs is not" in log.text
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][5, 7] = float("nan")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    assert "NaN or infinite at transformer.layers.1.attention.qkv" in convert.fail(**flags).message


def test_infinite_weights_that_meet_zeros() -> None:
    """Where no activation tells, the search's error does."""
    weights = np.ones((2, 64), np.float32)
    weights[1, 3] = np.nan
    inputs = Inputs(
        np.ones(64, np.float32), np.ones(64, np.float32), np.ones((2, 32, 32), np.float32)
    )
    matrix = make_matrix(weights, FORMATS["int4_awq"])
    found = search.search_inputs([matrix], inputs, FORMATS["int4_awq"], threading.Event())
    assert np.isnan(found.error)


def test_rows_are_held_out() -> None:
    rows = [[i] for i in range(20)]
    assert calibration.hold_out(rows, None, 128) == (rows[:18], rows[18:])
    assert calibration.hold_out(rows, None, 12) == (rows[:12], rows[12:])
    assert calibration.hold_out(rows, 20, 12) == (rows, [])
    assert calibration.hold_out(rows[:7], None, 12) == (rows[:7], [])


@pytest.mark.parametrize("quantization", FLAGS)
def test_a_quantized_checkpoint_takes_a_drafter(
    quantization: str, convert: Converter, tmp_path: Path
) -> None:
    """Byte for byte; and what is wrong with it is told."""
    target, data = make_target(tmp_path), make_rows(tmp_path / "rows.jsonl")
    base = convert(model_dir=target, output_dir=tmp_path / "base", **get_flags(quantization, data))
    drafter = make_drafter(tmp_path, exit_dim=96, dtype="bfloat16")
    flags = {"base_model_checkpoint_dir": base, "drafter_model_dir": drafter}
    convert(**flags)
    before = summarize_rank(base / "rank0.safetensors")
    after = summarize_rank(convert.output / "rank0.safetensors")
    assert before.items() <= after.items()
    assert "drafter.lm_head" in read_config(convert.output)["quantization"]["exclude_modules"]
    tensors = load_file(base / "rank0.safetensors")
    (base / "manifest.json").unlink()  # which has the sum of what specdec wrote
    module = "transformer.layers.1.mlp.proj"
    scale = next(name for name in tensors if name.startswith(f"{module}.") and "scal" in name)
    if quantization == "nvfp4":  # as ModelOpt writes its scalars
        name = f"{module}.weights_scaling_factor_2"
        save_file({**tensors, name: tensors[name].reshape(())}, base / "rank0.safetensors")
        convert(output_dir=tmp_path / "again", **flags)
    for change, words in (
        ({scale: None}, f"lacks 1 tensor: {scale}"),
        ({scale: torch.ones(3, 3)}, f"{scale}"),
        ({f"{module}.weight": tensors[f"{module}.weight"][1:]}, f"{module}.weight has shape"),
        ({f"{module}.other": torch.ones(1)}, "would not use"),
    ):
        changed = {name: t for name, t in {**tensors, **change}.items() if t is not None}
        save_file({n: t.contiguous() for n, t in changed.items()}, base / "rank0.safetensors")
        error = convert.fail(output_dir=tmp_path / "broken", **flags)
        assert words in error.message


def test_scales_of_the_cache(convert: Converter, tmp_path: Path) -> None:
    target, data = make_target(tmp_path), make_rows(tmp_path / "rows.jsonl")
    convert(model_dir=target, quantization="fp8_pc_pt", kv_cache_dtype="fp8", calibration_data=data)
    tensors = load_file(convert.output / "rank0.safetensors")
    assert tensors["transformer.layers.1.attention.kv_cache_scaling_factor"].item() == 1
    assert read_config(convert.output)["quantization"]["kv_cache_quant_algo"] == "FP8"
