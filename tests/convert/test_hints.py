"""Hints of the converter are followed to where they lead, each by its own words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import (
    change_tensors,
    make_dflash_drafter,
    make_eagle_drafter,
    make_llama,
    make_tokenizer,
)
from tests.convert.checkpoints import read_config, set_config
from tests.convert.conftest import Converter
from tests.convert.quantized import CASES, make_quantized
from tests.engines import call

FILE = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tokenizer(make_llama(tmp_path))


def read_rank(folder: Path) -> bytes:
    return (folder / "rank0.safetensors").read_bytes()


def take_section(folder: Path) -> dict[str, Any]:
    """Take quantization_config out of a folder's config.json."""
    config = read_config(folder)
    section: dict[str, Any] = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    return section


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_a_section_in_a_file_of_its_own_is_read(
    kind: str, tmp_path: Path, convert: Converter
) -> None:
    """As early versions of AutoGPTQ and AutoAWQ wrote it, with other keys."""
    case = next(case for name, case in CASES.items() if name.startswith(kind))
    folder, _ = make_quantized(tmp_path, case)
    expected = read_rank(convert(model_dir=folder, output_dir=tmp_path / "expected"))
    section = take_section(folder)
    names = ("bits", "group_size", "sym", "desc_act")
    own: dict[str, Any] = {name: section[name] for name in names if name in section}
    name = "quantize_config.json"
    if kind == "awq":
        name, own = "quant_config.json", {
            "zero_point": True, "q_group_size": section["group_size"], "w_bit": 4,
            "version": "GEMM",
        }  # fmt: skip
    (folder / name).write_text(json.dumps(own))
    assert read_rank(convert(model_dir=folder)) == expected
    sources = json.loads((convert.output / "manifest.json").read_text())["sources"]
    assert name in [Path(source["path"]).name for source in sources]


def test_a_file_of_another_name(model: Path, convert: Converter) -> None:
    (model / FILE).rename(model / "gptq_model-4bit-128g.safetensors")
    error = convert.fail(model_dir=model)
    assert f"if gptq_model-4bit-128g.safetensors has all weights, name it {FILE}" in error.hint
    (model / "gptq_model-4bit-128g.safetensors").rename(model / FILE)
    convert(model_dir=model)


@pytest.mark.parametrize("has_both", [False, True])
def test_mlx_folders(has_both: bool, model: Path, convert: Converter, tmp_path: Path) -> None:
    """Their own tool writes plain weights, which are read."""
    plain = shutil.copytree(model, tmp_path / "plain")
    section = {"group_size": 32, "bits": 4}
    set_config(model, quantization=section)
    if has_both:
        set_config(model, quantization_config=section)
    with change_tensors(model) as tensors:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            rows, columns = tensors[name].shape
            tensors[name] = torch.zeros(rows, columns // 8, dtype=torch.uint32)
            for kind in ("scales", "biases"):
                tensors[name.replace("weight", kind)] = torch.ones(rows, columns // 32)
    error = convert.fail(model_dir=model)
    assert "is quantized (mlx)" in error.message
    assert "mlx_lm.convert --hf-path FOLDER --dequantize --mlx-path PLAIN" in error.hint
    convert(model_dir=plain)


def make_float8(folder: Path) -> None:
    with change_tensors(folder) as tensors:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = torch.ones(1)


def test_a_quantized_drafter(model: Path, convert: Converter, tmp_path: Path) -> None:
    """A section without quantized matrices is the target's, and leads nowhere astray."""
    drafter = make_eagle_drafter(tmp_path, version=3)
    flags: dict[str, Any] = {"model_dir": model, "eagle_model_dir": str(drafter)}
    plain = shutil.copytree(drafter, tmp_path / "plain")
    set_config(drafter, quantization_config={"quant_method": "fp8"})
    convert(**flags, output_dir=tmp_path / "leaked")
    make_float8(drafter)
    error = convert.fail(**flags)
    assert "holds a drafter with quantized matrices" in error.message
    checkpoint = convert(**flags | {"eagle_model_dir": str(plain)})
    call("build", "--checkpoint-dir", checkpoint, "--output-dir", tmp_path / "engine",
         "--optimize", "none", "--drafter-weights", "int8")  # fmt: skip
    assert "specdec-build --drafter-weights int8" in error.hint


@pytest.mark.parametrize("kind", ["yarn", "default"])
def test_queries_that_are_scaled_by_their_positions(
    kind: str, model: Path, convert: Converter
) -> None:
    """Ministral 3's: to remove the field alone would change what long texts are."""
    scaling: dict[str, Any] = {
        "rope_type": kind, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    scaling |= {"factor": 4.0} if kind == "yarn" else {}
    set_config(model, rope_parameters=scaling, max_position_embeddings=128)
    error = convert.fail(model_dir=model)
    assert "llama_4_scaling_beta is 0.1: queries are scaled" in error.message
    assert "correct it" not in error.hint
    assert "set max_position_embeddings to that (32) and remove llama_4_scaling_beta" in error.hint
    del scaling["llama_4_scaling_beta"]
    set_config(model, rope_parameters=scaling, max_position_embeddings=32)
    convert(model_dir=model)
    assert read_config(convert.output)["max_position_embeddings"] == 32


def test_a_field_that_a_drafter_has_from_its_target(
    model: Path, convert: Converter, tmp_path: Path
) -> None:
    drafter = make_dflash_drafter(tmp_path, target_layers=2, aux_layers=(0,))
    flags: dict[str, Any] = {"model_dir": model, "dflash_model_dir": str(drafter)}
    expected = read_rank(convert(**flags, output_dir=tmp_path / "expected"))
    set_config(drafter, partial_rotary_factor=0.25)
    assert "remove the field if it was copied" in convert.fail(**flags).hint
    config = read_config(drafter)
    del config["partial_rotary_factor"]
    (drafter / "config.json").write_text(json.dumps(config))
    assert read_rank(convert(**flags)) == expected


def split(model: Path) -> Path:
    """Write a model's weights as two shards; return the index."""
    tensors, places = load_file(model / FILE), dict[str, str]()
    for number in (1, 2):
        part = {name: tensors[name] for name in sorted(tensors)[number - 1 :: 2]}
        save_file(part, model / f"model-0000{number}-of-00002.safetensors")
        places |= dict.fromkeys(part, f"model-0000{number}-of-00002.safetensors")
    (model / FILE).unlink()
    index = model / f"{FILE}.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return index


Break = Callable[[Path], dict[str, Any]]


def take_shard(model: Path) -> dict[str, Any]:
    (split(model).parent / "model-00001-of-00002.safetensors").rename(model / "elsewhere")
    return {}


def take_entry(model: Path) -> dict[str, Any]:
    index = split(model)
    places = json.loads(index.read_text())
    del places["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(places))
    return {}


def name_no_type(model: Path) -> dict[str, Any]:
    set_config(model, dtype="float24", torch_dtype="float24")
    return {}


def put_nan(model: Path) -> dict[str, Any]:
    with change_tensors(model) as tensors:
        tensors["model.norm.weight"][3] = float("nan")
    return {}


def put_zeros(model: Path) -> dict[str, Any]:
    with change_tensors(model) as tensors:
        tensors["lm_head.weight"].zero_()
    return {}


def add_tensor(model: Path) -> dict[str, Any]:
    with change_tensors(model) as tensors:
        tensors["model.layers.0.extra.weight"] = torch.ones(4, 4)
    return {}


def save_again(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(model).save_pretrained(model)


def store_integers(model: Path) -> dict[str, Any]:
    with change_tensors(model) as tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int32)
    return {}


def store_floats(model: Path) -> None:
    with change_tensors(model) as tensors:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float32) + 1


def cut_file(model: Path) -> dict[str, Any]:
    shutil.copy(model / FILE, model / "whole")
    (model / FILE).write_bytes((model / "whole").read_bytes()[:-100])
    return {}


def take_config(model: Path) -> dict[str, Any]:
    set_config(model, num_key_value_heads=1)
    return {}


# What is wrong, what the hint says, and what follows it: options, or a change of the folder.
HINTS: list[tuple[Break, str, dict[str, Any] | Callable[[Path], Any]]] = [
    (take_shard, "finish the download of the folder",
     lambda model: (model / "elsewhere").rename(model / "model-00001-of-00002.safetensors")),
    (take_entry, "add them to the index's weight_map",
     lambda model: set_entry(model / f"{FILE}.index.json")),
    (name_no_type, "with --dtype", {"dtype": "float32"}),
    (put_nan, "--allow-nonfinite", {"allow_nonfinite": True}),
    (put_zeros, "--allow-zeros", {"allow_zeros": True}),
    (add_tensor, "load it with transformers and save_pretrained()", save_again),
    (store_integers, "give a folder with float64, float32, float16, bfloat16", store_floats),
    (cut_file, "copy or download it again", lambda model: (model / "whole").replace(model / FILE)),
    (take_config, "take both from the same model",
     lambda model: set_config(model, num_key_value_heads=2)),
    (lambda _: {"embedding_sharding_dim": 3, "use_parallel_embedding": True}, "give 0",
     {"embedding_sharding_dim": 0}),
    (lambda _: {"quantization": "fp8_pc_pt", "calib_size": 3}, "leave it out",
     {"calib_size": None}),
    (lambda _: {"quantization": "fp8"}, "give a .txt", {"quantization": None}),
    (lambda _: {"workers": 1, "dtype": "auto", "moe_ep_size": 2}, "leave it out",
     {"moe_ep_size": None}),
    (lambda _: {"dequantize": True}, "leave it out", {"dequantize": False}),
    (lambda _: {"tp_size": 3}, "use", {"tp_size": 2}),
    (lambda _: {"moe_tp_size": 2}, "leave it out", {"moe_tp_size": None}),
    (lambda _: {"embedding_sharding_dim": 1}, "give both",
     {"embedding_sharding_dim": 1, "use_parallel_embedding": True}),
    (lambda _: {"group_size": 64}, "leave the option out", {"group_size": None}),
    (lambda _: {"use_embedding_sharing": True}, "convert for 0.14",
     {"use_embedding_sharing": False, "trtllm_version": "0.14"}),
    (lambda model: {"base_model_checkpoint_dir": model}, "give",
     {"base_model_checkpoint_dir": None}),
]  # fmt: skip


def set_entry(index: Path) -> None:
    places = json.loads(index.read_text())
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    held = {name: file for file in files for name in load_file(index.parent / file)}
    index.write_text(json.dumps(places | {"weight_map": held}))


@pytest.mark.parametrize(("spoil", "hint", "remedy"), HINTS)
def test_a_hint_leads_to_a_checkpoint(
    spoil: Break, hint: str, remedy: Any, model: Path, convert: Converter
) -> None:
    flags = {"model_dir": model} | spoil(model)
    assert hint in convert.fail(**flags).hint
    if callable(remedy):
        remedy(model)
    else:
        flags |= remedy
    convert(**flags)
