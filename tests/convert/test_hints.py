"""Hints of the converter are followed to where they lead: each has a case, or a reason why not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.errors import SpecDecError
from tests.conftest import (
    change_tensors,
    make_dflash_drafter,
    make_eagle_drafter,
    make_llama,
    make_tokenizer,
)
from tests.convert import hint_cases, hint_core_cases
from tests.convert.checkpoints import read_config, set_config
from tests.convert.conftest import Converter
from tests.convert.hint_scenes import Case, Scene, apply, make_base, make_flags
from tests.convert.hint_texts import fits, list_hints
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


def make_int8(folder: Path) -> None:
    """As bitsandbytes stores it."""
    with change_tensors(folder) as tensors:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name.replace("weight", "SCB")] = torch.ones(len(tensors[name]))
            tensors[name] = tensors[name].to(torch.int8)


@pytest.mark.parametrize("quantize", [make_float8, make_int8])
def test_a_quantized_drafter(
    quantize: Callable[[Path], None], model: Path, convert: Converter, tmp_path: Path
) -> None:
    """A section without quantized matrices is the target's, and leads nowhere astray."""
    drafter = make_eagle_drafter(tmp_path, version=3)
    flags: dict[str, Any] = {"model_dir": model, "eagle_model_dir": str(drafter)}
    plain = shutil.copytree(drafter, tmp_path / "plain")
    set_config(drafter, quantization_config={"quant_method": "fp8"})
    convert(**flags, output_dir=tmp_path / "leaked")
    quantize(drafter)
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


# ---- Every hint.

ROOT = Path(__file__).parents[2]
FILES = [
    *sorted((ROOT / "convert").rglob("*.py")),
    *(path for name in ("model", "gguf", "checkpoint")
      for path in sorted((ROOT / "specdec" / name).rglob("*.py"))),
    *(ROOT / f"specdec/files/{name}.py"
      for name in ("folders", "reading", "tensor_file", "staging")),
]  # fmt: skip
HINT_CASES: list[Case] = [
    case
    for module in (hint_cases, hint_core_cases)
    for table in vars(module).values() if isinstance(table, list)
    for case in table if isinstance(case, Case)
]  # fmt: skip
RACE, NOT_CONVERT = "something else writes at the same time", "other commands than convert give it"
# Hint -> why no case here follows it.
WITHOUT_CASE = {
    "run it again": f"{RACE}: the Hub",
    "let nothing write to the file, and run it again": RACE,
    "wait for it, or choose another folder": f"{RACE}: see test_convert_stream.py",
    "move it away, or choose another name, and run this again": RACE,
    "free some space, or choose another folder": "a disk that is full: see test_convert_errors.py",
    "free some space there, or name another folder with SPECDEC_CACHE_DIR": "a disk that is full",
    "name a folder in it, such as {}": "a mount point",
    "check the path and its permissions": "root, who runs the tests, may read all",
    "use a machine with more memory{}, or give an FP8 model that is quantized already": "hardware",
    "lower --calib-batch-size or --calib-max-seq-length, or use --calib-device cpu": "a GPU",
    "use the transformers version that the model was made for": "another transformers",
    "this model does not compute as its config.json says; it cannot be calibrated":
        "transformers would not compute what it was given",
    "use --dtype bfloat16 or float32 if the model overflows float16":
        "weights that overflow only when they are rounded",
    "convert the model again": f"{NOT_CONVERT}: what it wrote is read",
    "the file is damaged: make it again, or repair the model": NOT_CONVERT,
    "the file is damaged: make it again": NOT_CONVERT,
    "its config.json belongs to another conversion: copy the folder again": NOT_CONVERT,
    "copy the model's config.json again": f"{NOT_CONVERT}: before transformers loads a model",
    "the file is damaged: copy or download it again": "see test_gguf.py",
    "take the Hugging Face folder of the model, here or as --tokenizer-dir":
        "a warning of convert, which goes on; an error of build",
    "name another file, or replace it with --force": NOT_CONVERT,
    "name another file": NOT_CONVERT,
    "choose a shorter name": "the limit of the disk: see test_output_folders.py",
    "move it away, or choose another folder": f"{RACE}: see test_output_folders.py",
    "name a file for the output": NOT_CONVERT,
}  # fmt: skip


@pytest.fixture
def scene(request: pytest.FixtureRequest, lasting_dir: Path, tmp_path: Path) -> Scene:
    """A copy of a base's folders, each of which is made once."""
    made = lasting_dir / "hint_bases" / request.param
    if not made.exists():
        made.mkdir(parents=True)
        make_base(request.param, made)
    scene = Scene(tmp_path / "scene", **make_flags(request.param))
    for folder in (scene.root, scene.copy):
        shutil.copytree(made, folder)
    return scene


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("scene", "case"), [(case.base, case) for case in HINT_CASES], indirect=["scene"],
    ids=[f"{case.base}-{case.hint[:50]}" for case in HINT_CASES],
)  # fmt: skip
def test_a_hint_leads_where_it_says(scene: Scene, case: Case, tmp_path: Path) -> None:
    """To a checkpoint, or to an error that says more; or it says what is not supported."""
    apply(case.spoil, scene)
    with pytest.raises(SpecDecError) as caught:
        scene.convert(tmp_path / "out")
    assert any(fits(case.hint, remedy) for _, remedy in caught.value.problems), caught.value.hint
    if case.follow is None:
        assert "supported" in caught.value.hint
        return
    apply(case.follow, scene)
    if case.error:
        with pytest.raises(SpecDecError) as caught:
            scene.convert(tmp_path / "out")
        assert case.error in f"{caught.value.message}; {caught.value.hint}"
        return
    scene.convert(tmp_path / "out")


def test_every_hint_has_a_case() -> None:
    hints = list_hints(FILES, ROOT / "specdec/methods/base.py")
    followed = {case.hint for case in HINT_CASES}
    missing_hints = {hint: hints[hint] for hint in hints.keys() - followed - WITHOUT_CASE.keys()}
    assert not missing_hints, "add a case to hint_cases.py, or a reason to WITHOUT_CASE"
    assert not (followed | WITHOUT_CASE.keys()) - hints.keys(), "no code gives these hints"
    assert not followed & WITHOUT_CASE.keys()
