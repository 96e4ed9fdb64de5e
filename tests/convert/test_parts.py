"""Parts of the converter, called by themselves with small arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.convert import lora
from specdec.convert.families import FAMILIES, compare_modules
from specdec.convert.hf import HfFolder
from specdec.convert.methods import base, dflash, eagle, medusa
from specdec.convert.quantize import blocks, float4, matrices, packed, unified
from specdec.errors import Problems, SpecDecError
from specdec.files.casts import cast
from specdec.model.config_reader import ConfigReader
from specdec.model.tensors import EMBEDDING, HEAD
from tests.blocks import write_gguf
from tests.conftest import make_llama, save_folder
from tests.convert.hint_scenes import GGUF_MODULES, make_adapter
from tests.convert.quantized import CASES, GROUP

STEM = "model.layers.0.self_attn.q_proj"
SHAPE = (48, 64)


def pack(tmp_path: Path, case: str) -> tuple[HfFolder, np.ndarray[Any, Any]]:
    """Write one random matrix as a format has it; return its folder, and the weights."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(SHAPE, generator=generator).to(getattr(torch, CASES[case].dtype))
    tensors, restored = CASES[case].pack(weight, generator)
    folder = save_folder(tmp_path / case, {f"{STEM}.{k}": v for k, v in tensors.items()}, {})
    return HfFolder(folder), restored.float().numpy()


MATRICES: dict[str, Any] = {
    "awq": lambda f: matrices.AwqMatrix(f, STEM, GROUP),
    "gptq": lambda f: matrices.GptqMatrix(f, STEM, GROUP, 4, 1, carries=False),
    "gptq-v2": lambda f: matrices.GptqMatrix(f, STEM, GROUP, 4, 0, carries=False),
    "gptq-8-bits": lambda f: matrices.GptqMatrix(f, STEM, GROUP, 8, 1, carries=False),
    "gptq-act-order": lambda f: matrices.GptqMatrix(f, STEM, GROUP, 4, 1, carries=False),
    "compressed": lambda f: matrices.PackedMatrix(f, STEM, GROUP, 4),
    "compressed-channel": lambda f: matrices.PackedMatrix(f, STEM, -1, 4),
    "modelopt-int4": lambda f: matrices.ModeloptInt4Matrix(f, STEM, GROUP),
    "fp8-dynamic": lambda f: matrices.Float8Matrix(f, STEM, None, in_scale_dtype=False),
    "fp8-block": lambda f: matrices.Float8Matrix(f, STEM, (24, 40), in_scale_dtype=False),
    "compressed-nvfp4": lambda f: float4.PackedFloat4Matrix(f, STEM),
    "modelopt-nvfp4": lambda f: float4.Nvfp4Matrix(f, STEM, rounds_inputs=True),
}


@pytest.mark.parametrize("case", MATRICES)
def test_a_matrix_is_what_its_format_stands_for(case: str, tmp_path: Path) -> None:
    """All rows at once, and some of them, which need not begin where a word does."""
    folder, expected = pack(tmp_path, case)
    matrix: matrices.Matrix = MATRICES[case](folder)
    assert matrix.shape == SHAPE
    assert set(matrix.used_names) <= folder.tensors.keys()
    for start, stop in ((0, 48), (5, 19)):
        weights = cast(matrix.compute(start, stop), matrix.info.dtype, "float32")
        np.testing.assert_allclose(weights, expected[start:stop], rtol=1e-6, atol=1e-7)


def test_numbers_in_words() -> None:
    """The lowest bits are the first number."""
    words = np.array([[0x76543210, -1]], np.int32)
    assert matrices.unpack_words(words, 4).tolist() == [[*range(8), *[15] * 8]]
    assert matrices.unpack_words(words, 8).tolist() == [[16, 50, 84, 118, *[255] * 4]]


def test_biases_of_zeros_have_no_use(tmp_path: Path) -> None:
    folder = HfFolder(save_folder(tmp_path / "model", {
        "a.weight": torch.ones(2, 2), "a.bias": torch.zeros(2),
        "b.weight": torch.ones(2, 2), "b.bias": torch.ones(2),
    }, {}))  # fmt: skip
    rows = {"x": (base.SourceRows("a.weight"),), "y": (base.SourceRows("b.weight"),)}
    assert packed.list_read(rows) == {"a.weight", "b.weight"}
    assert packed.find_empty_biases(folder, rows) == ["a.bias"]


@pytest.mark.parametrize(
    ("value", "fact"), [(0.5, ""), (0.0, "a.scale is 0.0"), (float("inf"), "a.scale is inf")]
)
def test_scales_are_positive_numbers(value: float, fact: str, tmp_path: Path) -> None:
    folder = HfFolder(save_folder(tmp_path / "model", {"a.scale": torch.tensor([value])}, {}))
    reader, problems = unified.ScaleReader(folder), Problems()
    assert reader.get("a.scale") == (1 if fact else value)
    assert reader.get("b.scale") == 1
    reader.report(problems)
    facts = [text for text, _ in problems]
    assert any("b.scale" in text for text in facts)
    assert any(fact in text for text in facts)


def test_blocks_of_a_layer_that_is_stacked_stay_together(tmp_path: Path) -> None:
    """A gate that is plain keeps `fc` from staying in blocks, and nothing else."""
    from specdec.convert.pipeline import convert_model
    from specdec.convert.settings import ConvertSettings

    kinds = dict.fromkeys(GGUF_MODULES, 8) | {"ffn_gate": 0}
    file = write_gguf(tmp_path / "model.gguf", kinds)
    convert_model(ConvertSettings(model_dir=str(file), output_dir=tmp_path / "out"))
    stored = load_file(tmp_path / "out" / "rank0.safetensors")
    types = {name.split(".", 3)[-1] for name in stored if name.endswith(blocks.BLOCK_TYPES)}
    assert types == {f"{module}.{blocks.BLOCK_TYPES}" for module in (
        "attention.qkv", "attention.dense", "mlp.proj")} | {
        f"vocab_embedding.{blocks.BLOCK_TYPES}".split(".", 3)[-1]}  # fmt: skip


# ---- Drafters.


@pytest.mark.parametrize(
    ("depth", "num_layers", "expected"), [(36, 5, [1, 9, 17, 25, 33]), (28, 1, [14])]
)
def test_layers_that_dflash_reads_by_default(
    depth: int, num_layers: int, expected: list[int], tmp_path: Path
) -> None:
    """As z-lab's drafters of Qwen3 8B list them."""
    model = HfFolder(make_llama(tmp_path))
    config = {"dflash_config": {"mask_token_id": 1}}
    reader = ConfigReader(config, model.path)
    target: Any = type("Target", (), {"num_hidden_layers": depth})
    section = reader.enter(config["dflash_config"])
    assert dflash._find_outputs(reader, section, num_layers, target) == expected


def test_heads_of_medusa_by_their_names(tmp_path: Path) -> None:
    names = ("medusa_head.0.0.linear.weight", "medusa_head.1.1.weight", "lm_head.weight")
    tensors = {name: torch.ones(2, 2) for name in names}
    folder = HfFolder(save_folder(tmp_path / "heads", tensors, {}))
    assert medusa.list_heads(folder) == [0, 1]
    assert medusa.find_prefix(folder) == "medusa_head."


def test_an_eagle_drafter_is_taken_from_its_target(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": torch.ones(2), "eagle_module.fc.weight": torch.ones(2, 4),
               "eagle_module.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}  # fmt: skip
    config = {"model_type": "qwen2", "num_hidden_layers": 9, "quantization_config": {}}
    alone = eagle.separate(HfFolder(save_folder(tmp_path / "both", tensors, config)))
    assert set(alone.tensors) == {"fc.weight", "layers.0.mlp.up_proj.weight"}
    assert alone.config == {"model_type": "llama", "num_hidden_layers": 1}


def test_a_naming_is_the_only_one(tmp_path: Path) -> None:
    folder = HfFolder(save_folder(tmp_path / "model", {"a.weight": torch.ones(2)}, {}))
    namings = {"a": "a.*", "b": "b.*"}
    assert base.take_naming(folder, {"a"}, namings, "a head", "heads") == "a"
    for present in (set[str](), {"a", "b"}):
        with pytest.raises(SpecDecError, match="a head"):
            base.take_naming(folder, present, namings, "a head", "heads")


def test_excluded_modules_replace_defaults_that_are_named() -> None:
    config = {"quantization": {"quant_algo": "FP8", "exclude_modules": None}}
    excluded = base.exclude_modules(config, ["drafter"], is_head_quantized=True)
    names = excluded["quantization"]["exclude_modules"]
    assert names[-1] == "drafter"
    assert "*lm_head" not in names
    assert base.exclude_modules({}, ["drafter"], is_head_quantized=False) == {}


# ---- Adapters and families.


@pytest.mark.parametrize("dimensions", [(64, 4), (4, 64)])
def test_a_merged_matrix(dimensions: tuple[int, int], tmp_path: Path) -> None:
    """W + (alpha / r) B A."""
    model, adapter = make_llama(tmp_path, name="model"), make_adapter(tmp_path)
    generator = torch.Generator().manual_seed(1)
    factors = load_file(adapter / "adapter_model.safetensors")
    factors = {name: torch.randn(t.shape, generator=generator) for name, t in factors.items()}
    save_file(factors, adapter / "adapter_model.safetensors")
    folder = HfFolder(model)
    merged = lora.merge_adapter(
        folder, lora.Adapter(adapter), FAMILIES["LlamaForCausalLM"], is_quantized=False
    )
    down, up = (next(t for n, t in factors.items() if f"lora_{side}" in n) for side in "AB")
    expected = folder.read(f"{STEM}.weight") + 8 / 4 * (up.numpy() @ down.numpy())
    start, stop = min(dimensions), max(dimensions)
    np.testing.assert_allclose(
        merged.read_block(f"{STEM}.weight", start, stop), expected[start:stop], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_family_finds_its_tensors_under_either_beginning(prefix: str, tmp_path: Path) -> None:
    model = make_llama(tmp_path)
    stored = load_file(model / "model.safetensors")
    renamed = {prefix + n.removeprefix("model.") if "lm_head" not in n else n: t
               for n, t in stored.items()}  # fmt: skip
    save_file(renamed, model / "model.safetensors", metadata={"format": "pt"})
    folder, family = HfFolder(model), FAMILIES["LlamaForCausalLM"]
    rows = family.find_source_rows([EMBEDDING, HEAD], folder)
    assert rows[EMBEDDING][0].name == f"{prefix}embed_tokens.weight"
    assert rows[HEAD][0].name == "lm_head.weight"
    assert compare_modules(family, folder.tensors) == ([], [])


def test_modules_that_a_family_has_not() -> None:
    family = FAMILIES["LlamaForCausalLM"]
    names = ["model.layers.7.mlp.extra.weight", "model.norm.weight"]
    others, missing = compare_modules(family, names)
    assert others == ["model.layers.N.mlp.extra"]
    assert "model.layers.N.mlp.up_proj" in missing
    assert json.dumps(missing).count("lm_head") == 0
