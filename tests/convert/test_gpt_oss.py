"""gpt-oss's folders: MXFP4 is what transformers makes of it, and what GGML's blocks hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.convert import mxfp4
from specdec.convert.families.gpt_oss import GPT_OSS, prepare
from specdec.convert.hf import HfFolder
from specdec.model.config import FULL, SLIDING
from tests.convert.checkpoints import read_config, set_config
from tests.convert.conftest import Converter
from tests.convert.golden_models import summarize_rank
from tests.families import make_family_model

SIZES: dict[str, Any] = {"hidden": 64, "intermediate": 96, "dtype": "bfloat16"}
SECTION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
EXPERTS = "model.layers.0.mlp.experts."


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose experts have numbers of four bits."""
    return make_family_model(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss", **SIZES)


@pytest.fixture(scope="module")
def packed(plain: Path) -> Path:
    """Its experts in MXFP4, as OpenAI's folders have them; `plain` gets their values."""
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    folder, generator = plain.parent / "packed", torch.Generator().manual_seed(3)
    shutil.copytree(plain, folder)
    tensors = load_file(plain / "model.safetensors")
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, depth, rows = tensors[name].shape
        blocks, scales = (
            torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)
            for low, high, shape in (
                (0, 256, (count, rows, depth // 32, 16)), (120, 126, (count, rows, depth // 32)),
            )
        )  # fmt: skip
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert(blocks, scales).contiguous()
    save_file(packed, folder / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    return set_config(folder, quantization_config=SECTION)


@pytest.mark.parametrize("flags", [{}, {"tp_size": 2}, {"tp_size": 4, "moe_ep_size": 2}])
def test_mxfp4_is_what_transformers_makes_of_it(
    flags: dict[str, int], plain: Path, packed: Path, convert: Converter
) -> None:
    """Bit for bit, whole and in parts of ranks; --dequantize asks for floats."""
    output = convert(model_dir=packed, dequantize=True, **flags)
    ranks = [summarize_rank(path) for path in sorted(output.glob("rank*"))]
    convert(model_dir=plain, force=True, **flags)
    assert [summarize_rank(path) for path in sorted(output.glob("rank*"))] == ranks
    message = convert.fail(model_dir=plain, force=True, dequantize=True).message
    assert "does not say that it is quantized" in message


def test_the_blocks_are_ggml_s(packed: Path) -> None:
    gguf = pytest.importorskip("gguf")
    folder = prepare(HfFolder(packed), "bfloat16")
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"{EXPERTS}3.{part}.weight"
        raw = folder.raw(name)
        assert raw is not None
        kind, shape, rows = raw
        blocks = np.ascontiguousarray(rows[0 : shape[0], :])
        weights = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))
        expected = folder.read(name).astype(np.uint32) << 16
        assert np.array_equal(weights, expected.view(np.float32))
        assert np.array_equal(rows[5:9, 17:34], blocks[5:9, 17:34])
    assert folder.raw(f"{EXPERTS}3.gate_proj.bias") is folder.raw("lm_head.weight") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{EXPERTS}down_proj_scales"), "down_proj_scales is missing"),
        (lambda tensors: tensors[f"{EXPERTS}gate_up_proj_scales"].fill_(255), "up_proj.weight (4"),
        (
            lambda tensors: tensors.update({f"{EXPERTS}down_proj": torch.zeros(4, 96, 64)}),
            "down_proj and, in MXFP4, model.layers.0.mlp.experts.down_proj_blocks",
        ),
        (lambda tensors: tensors.update({f"{EXPERTS}down_proj_bias": torch.zeros(4)}), "down_proj"),
        (lambda tensors: tensors.pop("model.layers.1.self_attn.sinks"), "lacks 1 tensor"),
    ],
    ids=["no powers", "powers that are none", "two forms", "biases", "sinks"],
)  # fmt: skip
def test_damage_is_refused_by_name(
    change: Any, message: str, packed: Path, tmp_path: Path, convert: Converter
) -> None:
    folder = Path(shutil.copytree(packed, tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    error = convert.fail(model_dir=folder, dequantize=True)
    assert message in error.message
    assert not convert.output.exists()


def test_absent_fields_are_transformers_defaults(plain: Path, tmp_path: Path) -> None:
    """As OpenAI's config.json leaves some of them out."""
    transformers = pytest.importorskip("transformers")
    from tests.convert.test_convert_families import read_family

    folder = Path(shutil.copytree(plain, tmp_path / "copy"))
    sizes = (
        "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "model_type",
    )  # fmt: skip
    config = {key: read_config(plain)[key] for key in sizes}
    (folder / "config.json").write_text(json.dumps(config))
    model, default = read_family(GPT_OSS, folder), transformers.GptOssConfig()
    assert model.layer_types == (SLIDING, FULL)
    assert model.sliding_window == default.sliding_window
    assert model.head_size == default.head_dim
    assert model.norm_epsilon == default.rms_norm_eps
    assert model.experts is not None
    assert (model.experts.num, model.experts.top_k) == (128, default.num_experts_per_tok)
    rotary = {"rope_theta": model.rotary_base, **(model.rotary_scaling or {})}
    assert rotary == default.rope_parameters
    arithmetic = model.arithmetic
    assert arithmetic.gate_limit == default.swiglu_limit
    assert arithmetic.gate_slope == default.swiglu_alpha


def test_numbers_of_four_bits_by_hand() -> None:
    """The low bits are the first of a pair; e2m1 is told apart by the power of its group."""
    numbers = np.zeros((1, 2, 16), np.uint8)
    numbers[0, 0, :3], numbers[0, 1, 15] = (0x21, 0x7F, 0x08), 0xC3
    powers = np.array([[127, 129]], np.uint8)
    bits = mxfp4.widen(numbers, powers)
    weights = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()[0]
    assert weights[:6].tolist() == [0.5, 1.0, -6.0, 6.0, 0.0, 0.0]
    assert weights[-2:].tolist() == [1.5 * 4, -2.0 * 4]
    blocks = mxfp4.make_blocks(numbers, powers).reshape(2, mxfp4.BLOCK_BYTES)
    assert blocks[:, 0].tolist() == [127, 129], "the power comes first"
    # Then the first 16 numbers in the low bits, and the one 16 further in the high ones.
    assert blocks[0, 1:7].tolist() == [1, 2, 15, 7, 8, 0]
    assert blocks[1, 15:].tolist() == [3 << 4, 12 << 4]
