"""Published formats from folder to text: dequantized, it is transformers' on the same weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdec.decode.engine import TorchEngine
from specdec.errors import SpecDecError
from specdec.files.tensor_file import TensorFile
from specdec.model import int4
from tests.conftest import make_drafter
from tests.convert.quantized import CASES, Tensors, make_quantized
from tests.engines import call, continue_greedily, list_requests
from tests.four_bits import read_weight

PARTS = {
    "attention.qkv": [f"self_attn.{part}_proj" for part in "qkv"],
    "attention.dense": ["self_attn.o_proj"], "mlp.fc": ["mlp.gate_proj"],
    "mlp.gate": ["mlp.up_proj"], "mlp.proj": ["mlp.down_proj"],
}  # fmt: skip
PROMPTS = [[5, 17, 30], list(range(3, 13)), [64]]
LIMIT = 24


def continue_with_transformers(folder: Path, plain: Tensors) -> list[list[int]]:
    """Greedy text of the unquantized model with the weights that the numbers stand for."""
    from transformers import AutoModelForCausalLM

    unquantized = folder.parent / "plain"
    shutil.copytree(folder, unquantized)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (unquantized / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.float().contiguous() for name, tensor in plain.items()}
    save_file(tensors, unquantized / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(unquantized, dtype=torch.float32)
    return continue_greedily(model, PROMPTS, LIMIT)


# One a format; two where it has numbers that a checkpoint holds and others that it does not.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    ["awq", "gptq-act-order", "gptq-8-bits", "compressed-asymmetric", "fp8-static", "fp8-channel",
     "fp8-block", "modelopt-int4", "modelopt-nvfp4"],
)  # fmt: skip
def test_dequantized_text_is_transformers(name: str, tmp_path: Path) -> None:
    source, plain = make_quantized(tmp_path, CASES[name])
    drafter = make_drafter(tmp_path, vocab=67, scale=3.0)
    call(
        "convert", "--model-dir", source, "--output-dir", tmp_path / "ckpt", "--dequantize",
        "--dtype", "float32", "--drafter-model-dir", drafter,
    )  # fmt: skip
    engine_dir = tmp_path / "engine"
    call(
        "build", "--checkpoint-dir", tmp_path / "ckpt", "--output-dir", engine_dir,
        "--optimize", "none",
    )  # fmt: skip
    assert generate(engine_dir) == continue_with_transformers(source, plain)


def generate(engine_dir: Path) -> list[list[int]]:
    requests = list_requests(PROMPTS, LIMIT)
    return [r.output_ids for r in TorchEngine(engine_dir, device="cpu").generate(requests)]


def test_a_backend_that_lacks_a_layout_names_the_way_out(tmp_path: Path) -> None:
    for name, backend in (("awq", "tensorrt-llm"), ("fp8-channel", "torch")):
        source, _ = make_quantized(tmp_path, CASES[name], name=name)
        checkpoint = tmp_path / f"ckpt-{name}"
        call("convert", "--model-dir", source, "--output-dir", checkpoint)
        words = ("--checkpoint-dir", checkpoint, "--output-dir", tmp_path / "engine")
        with pytest.raises(SpecDecError) as caught:
            call("build", *words, "--backend", backend, "--dry-run")
        assert str(CASES[name].kept) in caught.value.message
        assert "--dequantize" in caught.value.hint


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    ["awq", "gptq-act-order", "gptq-whole-rows", "compressed-asymmetric", "modelopt-int4"],
)
def test_four_bits_run_as_they_are(name: str, tmp_path: Path) -> None:
    """Without kernels inputs are not rounded: the text is transformers' on (code - zero) * scale.

    That product is exact in float32, where the format's own library rounds it to 16 bits.
    """
    source, plain = make_quantized(tmp_path, CASES[name])
    checkpoint, engine_dir = tmp_path / "ckpt", tmp_path / "engine"
    drafter = make_drafter(tmp_path, vocab=67, scale=3.0)
    call(
        "convert", "--model-dir", source, "--output-dir", checkpoint, "--dtype", "float32",
        "--drafter-model-dir", drafter,
    )  # fmt: skip
    call("build", "--checkpoint-dir", checkpoint, "--output-dir", engine_dir, "--optimize", "none")
    file = TensorFile(checkpoint / "rank0.safetensors")
    for layer in range(2):
        for module, names in PARTS.items():
            matrix = int4.Int4Matrix(file, f"transformer.layers.{layer}.{module}")
            weight = torch.from_numpy(read_weight(matrix, 0, matrix.shape[0]))
            inputs = matrix.read_input_scale()
            if inputs is not None:
                weight = weight * torch.from_numpy(inputs)
            keys = [f"model.layers.{layer}.{part}.weight" for part in names]
            start = 0
            for key in keys:
                stop = start + len(plain[key])
                plain[key], start = weight[start:stop], stop
    assert generate(engine_dir) == continue_with_transformers(source, plain)
