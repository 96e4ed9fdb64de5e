"""FP8 made from Hugging Face models, against ModelOpt's own output; and what must be refused."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.checkpoint.config import read_checkpoint_config
from specdec.convert.plan import OutputBlock
from specdec.convert.quantize import calibration
from specdec.convert.quantize.formats import FORMATS
from specdec.convert.quantize.rounded import Scales
from specdec.convert.quantize.scales import Quantizer
from specdec.files.tensor_file import TensorInfo
from specdec.model.sharding import join
from specdec.model.tensors import list_linears, list_target_tensors
from specdec.system import logs
from tests.conftest import make_drafter, make_eagle_drafter, make_llama, make_tokenizer
from tests.convert.checkpoints import read_config, set_config
from tests.convert.conftest import Converter
from tests.convert.golden_models import GOLDEN, summarize_rank

MODELOPT = GOLDEN / "modelopt"
# Golden checkpoint -> (model, flags).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-fp8-tp1": ("llama", {}),
    "llama-fp8-tp2": ("llama", {"tp_size": 2}),
    "llama-fp8-fp8kv-tp1": ("llama", {"kv_cache_dtype": "fp8"}),
    "qwen2-fp8-tp1": ("qwen2", {}),
}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_rows(path: Path, num_rows: int = 4, length: int = 12, vocab: int = 128) -> Path:
    """Write random rows of tokens."""
    tokens = np.random.default_rng(0).integers(0, vocab, (num_rows, length))
    return write_rows(path, [{"input_ids": row} for row in tokens.tolist()])


def get_flags(data: Path, **flags: Any) -> dict[str, Any]:
    return {"quantization": "fp8", "calibration_data": data, **flags}


# ---- Against ModelOpt.


@pytest.mark.parametrize("name", CASES)
def test_we_write_what_modelopt_writes(name: str, convert: Converter, tmp_path: Path) -> None:
    model, flags = CASES[name]
    batches = json.loads((MODELOPT / "calib_ids.json").read_text())
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": r} for b in batches for r in b])
    convert(
        model_dir=MODELOPT / "hf" / model, use_parallel_embedding=True,
        **get_flags(data, calib_batch_size=2, calib_size=8), **flags,
    )  # fmt: skip
    theirs = MODELOPT / "trtllm" / name
    files = sorted(path.name for path in theirs.glob("rank*"))
    assert files == sorted(path.name for path in convert.output.glob("rank*"))
    for file in files:
        ours, golden = summarize_rank(convert.output / file), summarize_rank(theirs / file)
        values, expected = load_file(convert.output / file), load_file(theirs / file)
        assert ours.keys() == golden.keys()
        for tensor in golden:
            if tensor.endswith("activation_scaling_factor"):
                # Equal here; another CPU's bfloat16 products may differ in their last bit.
                torch.testing.assert_close(values[tensor], expected[tensor], rtol=2**-7, atol=0)
                assert ours[tensor][:2] == golden[tensor][:2]
            else:
                assert ours[tensor] == golden[tensor], tensor
    config, golden_config = read_config(convert.output), read_config(theirs)
    for section in ("quantization", "mapping"):
        assert golden_config.pop(section).items() <= config.pop(section).items()
    differing = [k for k, v in golden_config.items() if k in config and config[k] != v]
    assert differing == ["logits_dtype"]
    assert config["logits_dtype"] == "float32"  # as TensorRT-LLM's own converters write


DEFAULTS = [
    "*lm_head", "*router", "*vocab_embedding", "*position_embedding", "*block_embedding",
    "*shared_expert_gate",
]  # fmt: skip
MODULES = {
    "redrafter": [
        "drafter", "drafter.layers", "drafter.lm_head", "drafter.rnn_u", "drafter.rnn_w",
        "drafter.layers.0", "drafter.layers.0.linear", "drafter.layers.1",
        "drafter.layers.1.linear", "drafter.input_proj",
    ],
    "medusa": [
        f"medusa_heads.{head}.{module}"
        for head in (0, 1) for module in ("medusa_layers.0.linear", "lm_head")
    ],
    "eagle": ["eagle_nets.*"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "name", "listed", "version"),
    [
        *(("redrafter", name, ["lm_head"], "1.2") for name in CASES),
        ("redrafter", "llama-fp8-tp2", ["lm_head"], "0.14"),
        ("redrafter", "llama-fp8-tp1", None, "1.2"), ("redrafter", "llama-fp8-tp1", [], "1.2"),
        ("redrafter", "llama-fp8-fp8kv-tp1", None, "0.14"),
        ("redrafter", "llama-fp8-fp8kv-tp1", [], "0.14"),
        *(("medusa", name, listed, "1.2") for name in ("llama-fp8-tp2", "qwen2-fp8-tp1")
          for listed in (["lm_head"], None, [])),
        ("eagle", "llama-fp8-tp2", ["lm_head"], "1.2"),
    ],
)  # fmt: skip
def test_modelopts_own_output_takes_a_drafter(
    method: str, name: str, listed: list[str] | None, version: str, convert: Converter,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The target keeps its bytes; no module of the drafter is said to be quantized."""
    base = tmp_path / "base"
    shutil.copytree(MODELOPT / "trtllm" / name, base, copy_function=shutil.copyfile)
    own = read_config(base)
    set_config(base, quantization=own["quantization"] | {"exclude_modules": listed})
    drafter = GOLDEN / "medusa" / "modelopt_llama"
    if method != "medusa":
        make: Any = make_eagle_drafter if method == "eagle" else make_drafter
        drafter = make(tmp_path, vocab=512, **({} if method == "eagle" else {"exit_dim": 96}))
    folder = "drafter_model_dir" if method == "redrafter" else f"{method}_model_dir"
    convert(base_model_checkpoint_dir=base, trtllm_version=version, **{folder: str(drafter)})
    config = read_config(convert.output)
    assert config["quantization"]["exclude_modules"] == (listed or DEFAULTS) + MODULES[method]
    is_qwen = "qwen2" in name  # of whose biases and type ModelOpt's config.json says nothing
    assert "attn_bias" not in own or not is_qwen
    assert config.get("qwen_type") == ("qwen2" if is_qwen else None)
    if method == "redrafter":
        assert (config["architecture"] == "ReDrafterForQWenLM") == is_qwen
    if method == "medusa":
        assert config["model_type"] == name.split("-")[0]
    for path in sorted(base.glob("rank*")):
        ours, theirs = summarize_rank(convert.output / path.name), summarize_rank(path)
        added = {key: ours.pop(key) for key in ours.keys() - theirs.keys()}
        assert ours == theirs
        assert added
        assert {dtype for dtype, _, _ in added.values()} == {"bfloat16"}
    parsed = read_checkpoint_config(convert.output)
    assert parsed.quantization.quant_algo == "FP8"
    assert all(parsed.quantization.excludes(module) for module in MODULES[method])
    assert parsed.quantization.excludes("transformer.layers.0.mlp.fc") is False


def copy_base(folder: Path, **values: Any) -> Path:
    """Copy ModelOpt's Llama with other values in its config.json; None leaves a key out."""
    base = MODELOPT / "trtllm" / "llama-fp8-fp8kv-tp1"
    folder.mkdir()
    (folder / "rank0.safetensors").write_bytes((base / "rank0.safetensors").read_bytes())
    config = {k: v for k, v in {**read_config(base), **values}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


FC_SCALE = "transformer.layers.1.mlp.fc.weights_scaling_factor"
CACHE = "transformer.layers.1.attention.kv_cache_scaling_factor"


@pytest.mark.parametrize(
    ("values", "left_out", "words", "hint"),
    [
        ({"rotary_base": None}, (), "rotary_base is missing, as ModelOpt leaves it out",
         "rope_theta and rope_scaling of the model's own config.json"),
        ({}, (CACHE,), f"lacks 1 tensor: {CACHE}", ""),
        ({}, (FC_SCALE,), f"lacks 1 tensor: {FC_SCALE}", ""),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*.mlp.fc"]}}, (),
         "layers.0.mlp.fc is float8_e4m3fn, config.json says unquantized", ""),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["*.layers.7.*"]}}, (),
         "lm_head is bfloat16, config.json says FP8", ""),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_not_whole(
    values: dict[str, Any], left_out: tuple[str, ...], words: str, hint: str, convert: Converter,
    tmp_path: Path,
) -> None:  # fmt: skip
    base = copy_base(tmp_path / "base", **values)
    tensors = load_file(base / "rank0.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    save_file(kept, base / "rank0.safetensors")
    drafter = make_drafter(tmp_path, vocab=512)
    error = convert.fail(base_model_checkpoint_dir=base, drafter_model_dir=drafter)
    assert words in error.message
    assert hint in error.hint


@pytest.mark.parametrize("listed", [[], None])
def test_a_quantized_head_stays_so_in_1_x(
    listed: list[str] | None, convert: Converter, tmp_path: Path
) -> None:
    """An empty list quantizes the head in 1.x; the defaults that replace it must not exclude it."""
    quantization = {"quant_algo": "FP8", "exclude_modules": listed}
    base = copy_base(tmp_path / "base", quantization=quantization)
    tensors = load_file(base / "rank0.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    for kind in ("weights", "activation"):
        tensors[f"lm_head.{kind}_scaling_factor"] = torch.ones(1)
    save_file(tensors, base / "rank0.safetensors")
    flags: dict[str, Any] = {
        "base_model_checkpoint_dir": base, "drafter_model_dir": make_drafter(tmp_path, vocab=512),
    }  # fmt: skip
    if listed is None:  # which means TensorRT-LLM's defaults, and those exclude the head
        assert "lm_head is float8_e4m3fn" in convert.fail(**flags).message
        return
    error = convert.fail(**flags, trtllm_version="0.14")
    assert "quantized lm_head, which TensorRT-LLM 0.14 cannot load" in error.message
    convert(**flags)
    excluded = read_config(convert.output)["quantization"]["exclude_modules"]
    assert "*lm_head" not in excluded
    assert "*router" in excluded
    assert "drafter.lm_head" in excluded


# ---- Hugging Face folders that are FP8 already.


def copy_unified(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """Copy ModelOpt's unified export with some tensors replaced, or left out for None."""
    source = MODELOPT / "unified_hf" / "llama-fp8"
    folder.mkdir()
    for name in ("config.json", "hf_quant_config.json"):
        (folder / name).write_text((source / name).read_text())
    changed = {**load_file(source / "model.safetensors"), **tensors}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_unified_export_gets_the_shared_scales(
    tp_size: int, convert: Converter, tmp_path: Path
) -> None:
    source = MODELOPT / "unified_hf" / "llama-fp8"
    convert(model_dir=source, tp_size=tp_size, use_parallel_embedding=True)
    theirs = load_file(source / "model.safetensors")
    ours = load_file(convert.output / "rank0.safetensors")
    golden = load_file(MODELOPT / "trtllm" / f"llama-fp8-tp{tp_size}" / "rank0.safetensors")
    assert ours.keys() == golden.keys()
    for name, tensor in golden.items():
        if tensor.dtype != torch.float8_e4m3fn:  # every scale is the one of the other export
            assert torch.equal(ours[name], tensor), name
    for layer in range(2):
        for module, parts in (
            ("attention.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("attention.dense", ("self_attn.o_proj",)),
            ("mlp.fc", ("mlp.gate_proj",)),
            ("mlp.gate", ("mlp.up_proj",)),
        ):
            shared = ours[f"transformer.layers.{layer}.{module}.weights_scaling_factor"]
            expected = []
            for part in parts:
                weight = theirs[f"model.layers.{layer}.{part}.weight"]
                own = theirs[f"model.layers.{layer}.{part}.weight_scale"]
                rows = weight.float()
                if own != shared:
                    rows = (rows * own / shared).to(torch.float8_e4m3fn).float()
                rows = rows.chunk(tp_size, 1 if module == "attention.dense" else 0)[0]
                expected.append(rows)
            found = ours[f"transformer.layers.{layer}.{module}.weight"]
            assert found.dtype == torch.float8_e4m3fn
            assert torch.equal(found.float(), torch.cat(expected))
    quantization = read_config(convert.output)["quantization"]
    assert quantization["quant_algo"] == "FP8"
    assert quantization["kv_cache_quant_algo"] is None
    assert quantization["exclude_modules"] == ["lm_head"]
    manifest = json.loads((convert.output / "manifest.json").read_text())
    read = {Path(file["path"]).name for file in manifest["sources"]}
    assert read == {"config.json", "hf_quant_config.json", "model.safetensors"}


def test_linears_that_a_unified_export_left_alone(convert: Converter, tmp_path: Path) -> None:
    dense = "model.layers.1.self_attn.o_proj"
    scale = torch.tensor(2.0)
    source = copy_unified(
        tmp_path / "source",
        **{
            f"{dense}.weight": torch.ones(64, 64, dtype=torch.bfloat16),
            f"{dense}.weight_scale": None,
            f"{dense}.input_scale": None,
            **{f"model.layers.{i}.self_attn.k_proj.k_scale": 1 * scale for i in range(2)},
            **{f"model.layers.{i}.self_attn.v_proj.v_scale": 2 * scale for i in range(2)},
        },
    )
    convert(model_dir=source, drafter_model_dir=make_drafter(tmp_path, vocab=512))
    quantization = read_config(convert.output)["quantization"]
    excluded = quantization["exclude_modules"]
    assert excluded[:2] == ["lm_head", "transformer.layers.1.attention.dense"]
    assert "drafter.lm_head" in excluded
    assert quantization["kv_cache_quant_algo"] == "FP8"
    tensors = load_file(convert.output / "rank0.safetensors")
    prefix = "transformer.layers.1.attention."
    assert tensors[prefix + "dense.weight"].dtype == torch.bfloat16
    assert prefix + "dense.weights_scaling_factor" not in tensors
    found = {k: tensors[f"{prefix}{k}_cache_scaling_factor"].item() for k in ("kv", "k", "v")}
    assert found == {"kv": 4.0, "k": 2.0, "v": 4.0}


def test_a_promised_cache_without_scales_means_one(convert: Converter, tmp_path: Path) -> None:
    source = copy_unified(tmp_path / "source")
    export = json.loads((source / "hf_quant_config.json").read_text())
    export["quantization"]["kv_cache_quant_algo"] = "FP8"
    (source / "hf_quant_config.json").write_text(json.dumps(export))
    convert(model_dir=source, trtllm_version="0.14")
    assert read_config(convert.output)["quantization"]["kv_cache_quant_algo"] == "FP8"
    tensors = load_file(convert.output / "rank0.safetensors")
    cache = {name: t.item() for name, t in tensors.items() if "cache_scaling" in name}
    prefix = "transformer.layers.{}.attention.kv_cache_scaling_factor"
    assert cache == {prefix.format(0): 1.0, prefix.format(1): 1.0}
    export["quantization"]["kv_cache_quant_algo"] = "NVFP4"
    (source / "hf_quant_config.json").write_text(json.dumps(export))
    error = convert.fail(model_dir=source, output_dir=tmp_path / "other")
    assert "is quantized (modelopt): kv_cache_quant_algo is 'NVFP4'" in error.message


SCALE = "model.layers.0.mlp.up_proj.weight_scale"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({SCALE: None}, f"lacks 1 tensor: {SCALE}"),
        ({SCALE: torch.ones(128)}, f"{SCALE} is float32 of shape [128]"),
        ({SCALE: torch.tensor(0.0)}, f"{SCALE} is 0.0"),
        (
            {"model.layers.1.self_attn.k_scale": torch.ones(1)},
            "lacks 3 tensors: model.layers.0.self_attn.k_scale, model.layers.0.self_attn.v_scale,"
            " model.layers.1.self_attn.v_scale",
        ),
        ({SCALE: torch.tensor(float("nan"))}, f"{SCALE} is nan"),
        (
            {"model.layers.0.self_attn.k_proj.weight": torch.ones(32, 64, dtype=torch.bfloat16)},
            "of model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj",
        ),
        (
            {"lm_head.weight": torch.ones(512, 64).to(torch.float8_e4m3fn)},
            "lm_head is quantized, of which",
        ),
        ({"model.layers.0.self_attn.q_proj.other": torch.ones(1)}, "would not use"),
    ],
)
def test_a_damaged_unified_export(
    changes: dict[str, Any], message: str, convert: Converter, tmp_path: Path
) -> None:
    source = copy_unified(tmp_path / "source", **changes)
    assert message in convert.fail(model_dir=source).message


STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
GROUP = {"weights": STATIC, "input_activations": STATIC}


@pytest.mark.parametrize(
    ("section", "is_taken"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        ({"quant_method": "fp8", "activation_scheme": "static"}, True),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, False),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, False),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]},
            False,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {**GROUP, "input_activations": {**STATIC, "dynamic": True}}},
            },
            False,
        ),
        ({"quant_method": "gptq", "bits": 4}, False),
        ("fp8", False),
    ],
)
def test_kinds_of_quantized_folders(
    section: Any, is_taken: bool, convert: Converter, tmp_path: Path
) -> None:
    source = copy_unified(tmp_path / "source")
    (source / "hf_quant_config.json").unlink()
    config = read_config(source) | {"quantization_config": section}
    (source / "config.json").write_text(json.dumps(config))
    if is_taken:
        convert(model_dir=source, dry_run=True)
        assert convert.report["config"]["hidden_size"] == 64
    else:
        message = convert.fail(model_dir=source).message
        assert "is quantized (" in message or "down_proj: it has an input_scale" in message


# ---- Making one.


def dequantize(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    return tensors[f"{module}.weight"].float() * tensors[f"{module}.weights_scaling_factor"]


def test_every_linear_is_rounded_and_every_input_seen(convert: Converter, tmp_path: Path) -> None:
    """Against transformers with hooks of the test's own, a pass at a time."""
    from transformers import AutoModelForCausalLM

    target = make_llama(tmp_path, attention_bias=True, dtype="bfloat16")
    plain = convert(model_dir=target, output_dir=tmp_path / "plain")
    data = make_rows(tmp_path / "rows.jsonl")
    convert(model_dir=target, **get_flags(data, kv_cache_dtype="fp8"))
    before = load_file(plain / "rank0.safetensors")
    after = load_file(convert.output / "rank0.safetensors")
    linears = list_linears(read_checkpoint_config(convert.output).model)
    assert len(linears) == 2 * 5
    for module in linears:
        scale = after[f"{module}.weights_scaling_factor"]
        whole = before[f"{module}.weight"].float()
        if module.rpartition(".")[2] in ("fc", "gate"):
            pair = [module.rpartition(".")[0] + kind for kind in (".fc", ".gate")]
            whole = torch.cat([before[f"{name}.weight"].float() for name in pair])
        assert scale.item() == (whole.abs().max() / 448).item()
        step = 2**-4 * before[f"{module}.weight"].float().abs() + scale * 2**-10
        rounded = dequantize(after, module)
        assert ((rounded - before[f"{module}.weight"].float()).abs() <= step * 1.001).all()
    unchanged = [name for name in before if name.removesuffix(".weight") not in linears]
    assert len(unchanged) > 8
    assert all(torch.equal(before[name], after[name]) for name in unchanged)
    assert set(after) - set(before) == {
        *(f"{m}.{k}_scaling_factor" for m in linears for k in ("weights", "activation")),
        *(f"transformer.layers.{i}.attention.{k}_cache_scaling_factor"
          for i in range(2) for k in ("kv", "k", "v")),
    }  # fmt: skip

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    seen: dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _m, args, name=name: seen.update(
                    {name: max(seen.get(name, 0.0), args[0].abs().max().item())}
                )
            )
    for line in data.read_text().splitlines():
        model(torch.tensor([json.loads(line)["input_ids"]]))
    for ours, theirs in (
        ("attention.qkv", "self_attn.v_proj"), ("attention.dense", "self_attn.o_proj"),
        ("mlp.fc", "mlp.gate_proj"), ("mlp.gate", "mlp.up_proj"), ("mlp.proj", "mlp.down_proj"),
    ):  # fmt: skip
        found = after[f"transformer.layers.1.{ours}.activation_scaling_factor"].item()
        assert found == pytest.approx(seen[f"model.layers.1.{theirs}"] / 448, rel=1e-6)


def test_scales_do_not_depend_on_the_split(convert: Converter, tmp_path: Path) -> None:
    """tp 2, tp 4 with duplicated heads, pipeline stages: the same scales, the same bytes."""
    target = make_llama(tmp_path, dtype="bfloat16", layers=4)
    data = make_rows(tmp_path / "rows.jsonl")
    whole = load_file(
        convert(model_dir=target, output_dir=tmp_path / "whole", **get_flags(data))
        / "rank0.safetensors"
    )
    for tp_size in (2, 4):
        out = convert(
            model_dir=target, tp_size=tp_size, output_dir=tmp_path / f"tp{tp_size}",
            **get_flags(data),
        )  # fmt: skip
        ranks = [load_file(out / f"rank{r}.safetensors") for r in range(tp_size)]
        model = read_checkpoint_config(out).model
        specs = list_target_tensors(model)
        for name, tensor in whole.items():
            if name not in specs:
                assert all(torch.equal(rank[name], tensor) for rank in ranks), name
                continue
            bits = torch.uint8 if tensor.dtype == torch.float8_e4m3fn else torch.int16
            parts = [rank[name].view(bits).numpy() for rank in ranks]
            assert np.array_equal(join(parts, specs[name], model), tensor.view(bits).numpy())
    out = convert(
        model_dir=target, pp_size=2, output_dir=tmp_path / "pp", kv_cache_dtype="fp8",
        **get_flags(data),
    )  # fmt: skip
    second = load_file(out / "rank1.safetensors")
    for ours, theirs in (("layers.1.mlp.proj", "layers.3.mlp.proj"),):
        for kind in ("weight", "weights_scaling_factor", "activation_scaling_factor"):
            first = second[f"transformer.{ours}.{kind}"].float()
            assert torch.equal(first, whole[f"transformer.{theirs}.{kind}"].float())
    assert "transformer.layers.1.attention.kv_cache_scaling_factor" in second


def test_one_command_quantizes_and_adds_a_drafter(convert: Converter, tmp_path: Path) -> None:
    target = make_llama(tmp_path, dtype="bfloat16")
    drafter = make_drafter(tmp_path, exit_dim=96)
    data = make_rows(tmp_path / "rows.jsonl")
    convert(
        model_dir=target, drafter_model_dir=drafter, trtllm_version="0.14",
        **get_flags(data, kv_cache_dtype="fp8"),
    )  # fmt: skip
    config = read_config(convert.output)
    assert config["architecture"] == "ReDrafterForCausalLM"
    assert "drafter.input_proj" in config["quantization"]["exclude_modules"]
    tensors = load_file(convert.output / "rank0.safetensors")
    assert tensors["drafter.input_proj.weight"].dtype == torch.bfloat16
    scales = {name.rpartition(".")[2] for name in tensors if "cache_scaling" in name}
    assert scales == {"kv_cache_scaling_factor"}  # 0.14 knows no other
    manifest = json.loads((convert.output / "manifest.json").read_text())
    assert str(data) in {source["path"] for source in manifest["sources"]}


def test_large_keys_and_values_raise_the_cache_scale(convert: Converter, tmp_path: Path) -> None:
    target = make_llama(tmp_path, dtype="float32", attention_bias=True)
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.bias"][3] = 4480.0
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    data = make_rows(tmp_path / "rows.jsonl")
    convert(model_dir=target, **get_flags(data, kv_cache_dtype="fp8"))
    after = load_file(convert.output / "rank0.safetensors")
    prefix = "transformer.layers.{}.attention.{}_cache_scaling_factor"
    found = {(i, k): after[prefix.format(i, k)].item() for i in (0, 1) for k in ("kv", "k", "v")}
    assert found[1, "k"] == found[1, "kv"] == pytest.approx(10, rel=0.05)
    assert found[0, "kv"] == found[0, "k"] == found[1, "v"] == 1.0


def test_a_dead_linear_has_scale_one_and_is_told(
    convert: Converter, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    target = make_llama(tmp_path)
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"].zero_()
    tensors["model.layers.0.self_attn.o_proj.weight"].zero_()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    convert(model_dir=target, allow_zeros=True, **get_flags(make_rows(tmp_path / "rows.jsonl")))
    after = load_file(convert.output / "rank0.safetensors")
    dead = ("layers.0.attention.dense.weights", "layers.1.mlp.proj.activation")
    for name in dead:
        assert after[f"transformer.{name}_scaling_factor"].item() == 1.0
    assert after["transformer.layers.1.mlp.gate.weights_scaling_factor"].item() < 0.1  # fc's
    assert (
        "only zeros, so the scale is 1: transformer.layers.0.attention.dense,"
        " transformer.layers.1.mlp.proj" in log.text
    )


# ---- Calibration data.


def read(path: Path, tokenizer: Any = None, **options: Any) -> list[list[int]]:
    options = {"size": None, "max_length": 100, "vocab_size": 128, **options}
    rows: list[list[int]] = calibration.read_rows(path, lambda: tokenizer, **options)
    return rows


def test_texts_conversations_and_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path / "t", add_bos=True))
    lines = tmp_path / "lines.txt"
    lines.write_text("first line\n\n  second\n", encoding="utf-8-sig")
    expected = [tokenizer(text)["input_ids"] for text in ("first line", "  second")]
    assert read(lines, tokenizer) == expected
    assert expected[0][0] == 1  # as a prompt begins
    assert read(lines, tokenizer, max_length=3) == [row[:3] for row in expected]
    assert read(lines, tokenizer, size=1) == expected[:1]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rows = [
        {"input_ids": [5, 6]}, {"text": "first line"}, {"messages": messages},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
    ]  # fmt: skip
    found = read(write_rows(tmp_path / "rows.jsonl", rows), tokenizer)
    assert found[:2] == [[5, 6], expected[0]]
    assert found[2] == found[3]
    assert tokenizer.decode(found[2]) == "<s>USER: hi ASSISTANT: yo</s>"
    assert found[2].count(1) == 1  # the template writes it, not the tokenizer again


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": []}, "line 1 cannot be used: input_ids is not a list"),
        ({"input_ids": [1, "2"]}, "line 1 cannot be used: input_ids is not a list"),
        ({"input_ids": [1, 128]}, "token 128 is outside the vocabulary of 128"),
        ({"prompt": "x"}, "it has none of the keys text, messages, conversations or input_ids"),
        ([1, 2], "it is a list, not an object"),
    ],
)
def test_a_bad_row(row: Any, words: str, convert: Converter, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [row])
    assert words in convert.fail(model_dir=make_llama(tmp_path), **get_flags(data)).message


def test_too_few_rows(convert: Converter, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    target, data = make_llama(tmp_path), make_rows(tmp_path / "rows.jsonl", 3)
    error = convert.fail(model_dir=target, **get_flags(data, calib_size=4))
    assert f"{data} holds 3 rows, --calib-size is 4" in error.message
    assert "--calib-size 3" in error.hint
    convert(model_dir=target, dry_run=True, **get_flags(data))
    assert "holds 3 rows: the scales fit what they show; 512 are usual" in log.text
    blank = tmp_path / "blank.txt"
    blank.write_text("\n \n")
    assert "holds no text" in convert.fail(model_dir=target, **get_flags(blank)).message


def test_rows_of_one_length_make_a_batch() -> None:
    rows = [[1], [2, 2], [3], [4, 4], [5]]
    batches = list(calibration.make_batches(rows, 2))
    assert batches == [[[1], [3]], [[5]], [[2, 2], [4, 4]]]


def test_text_needs_a_tokenizer(convert: Converter, tmp_path: Path) -> None:
    data = tmp_path / "lines.txt"
    data.write_text("some text\n")
    error = convert.fail(model_dir=make_llama(tmp_path), **get_flags(data))
    assert "holds text, and a tokenizer is needed: --model-dir" in error.message
    assert "or give rows of input_ids" in error.hint


@pytest.mark.parametrize(
    ("dtype", "names", "factor", "words", "hint"),
    [
        # float16 overflows where the second layer's MLP multiplies two large numbers.
        ("float16", ("mlp.gate_proj", "mlp.up_proj"), 2000,
         "NaN or infinite at transformer.layers.1.mlp.proj", "--dtype bfloat16"),
        ("float32", ("self_attn.v_proj",), float("nan"),
         "NaN or infinite, and no scale, in transformer.layers.1.attention.qkv", ""),
    ],
)  # fmt: skip
def test_numbers_that_are_not_finite_name_the_linear(
    dtype: str, names: tuple[str, ...], factor: float, words: str, hint: str, convert: Converter,
    tmp_path: Path,
) -> None:  # fmt: skip
    target = make_llama(tmp_path, dtype=dtype)
    tensors = load_file(target / "model.safetensors")
    for name in names:
        tensors[f"model.layers.1.{name}.weight"] *= factor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    error = convert.fail(model_dir=target, **get_flags(make_rows(tmp_path / "rows.jsonl")))
    assert words in error.message
    assert hint in error.hint


def test_a_batch_beyond_the_gpus_memory(
    convert: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaModel

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(LlamaModel, "forward", fail)
    data = make_rows(tmp_path / "rows.jsonl")
    error = convert.fail(model_dir=make_llama(tmp_path), **get_flags(data, calib_batch_size=3))
    assert "and 3 rows of 12 tokens" in error.message
    assert "lower --calib-batch-size" in error.hint


def test_a_model_beyond_the_memory_is_refused_with_bytes(
    convert: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, data = make_llama(tmp_path), make_rows(tmp_path / "rows.jsonl")
    num_bytes = sum(t.numel() * 4 for t in load_file(target / "model.safetensors").values())
    monkeypatch.setattr(calibration, "_measure_host", lambda: calibration.SPARE_BYTES + num_bytes)
    convert(model_dir=target, dry_run=True, **get_flags(data, calib_device="cpu"))
    monkeypatch.setattr(
        calibration, "_measure_host", lambda: calibration.SPARE_BYTES + num_bytes - 1
    )
    error = convert.fail(model_dir=target, **get_flags(data, calib_device="cpu"))
    assert f"({num_bytes:,} bytes)" in error.message


def test_this_machines_memory_is_measured() -> None:
    measured = calibration._measure_host()
    assert measured is None or 1 << 20 < measured < 1 << 50


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"quantization": "fp8", "calibration_data": Path("rows.csv")},
            "rows.csv is none of",
        ),
        ({"quantization": "fp8", "calibration_data": Path("no.txt")}, "no.txt does not exist"),
    ],
)
def test_data_that_is_not_there(
    flags: dict[str, Any], message: str, convert: Converter, tmp_path: Path
) -> None:
    error = convert.fail(model_dir=tmp_path / "never-opened", **flags)
    assert message in error.message


def test_what_is_fp8_already_is_not_quantized_again(convert: Converter, tmp_path: Path) -> None:
    data = make_rows(tmp_path / "rows.jsonl")
    unified = MODELOPT / "unified_hf" / "llama-fp8"
    assert (
        "is quantized already (ModelOpt FP8)"
        in convert.fail(model_dir=unified, **get_flags(data)).message
    )
    error = convert.fail(
        base_model_checkpoint_dir=MODELOPT / "trtllm" / "llama-fp8-tp1",
        drafter_model_dir=make_drafter(tmp_path, vocab=512), **get_flags(data),
    )  # fmt: skip
    assert "takes a Hugging Face target" in error.message


def test_interrupted_measuring_ends_amid_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    chunk = OutputBlock(4, lambda: np.ones(4, np.float32))
    endless = SimpleNamespace(
        info=TensorInfo("float32", (4,)), list_output_blocks=lambda: itertools.repeat(chunk)
    )
    quantizer = Quantizer(
        format=FORMATS["fp8"], model_dir=Path(), scales=Scales(Path()), watches=(),
        calibrate=lambda watches: calibration.Observations({}),
        weights={str(i): (endless,) for i in range(3)},
    )  # fmt: skip
    monkeypatch.setattr(logs, "show_progress", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantizer.measure(workers=2)
