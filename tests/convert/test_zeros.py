"""Zeros in the place of weights: unfinished downloads are errors, legitimate zeros are none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.convert.zeros import ZeroFinder
from specdec.errors import SpecDecError
from specdec.text.pretrained import load_model
from tests import families
from tests.conftest import change_tensors, make_llama, make_medusa_heads, make_tokenizer
from tests.convert.conftest import Converter
from tests.engines import call

FILE, BIN = "model.safetensors", "pytorch_model.bin"
EMBEDDING, FC = "model.embed_tokens.weight", "model.layers.1.mlp.gate_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tokenizer(make_llama(tmp_path, hidden=128))


def fill(path: Path, start: float, stop: float) -> None:
    """Put zeros into a part of a file, given by shares of its size."""
    data = bytearray(path.read_bytes())
    first, last = (int(share * len(data)) for share in (start, stop))
    data[first:last] = bytes(last - first)
    path.write_bytes(data)


@pytest.mark.thorough
@pytest.mark.parametrize(("start", "stop"), [(0.5, 1), (0.9, 1), (0.97, 1), (0.3, 0.4)])
@pytest.mark.parametrize("kind", [FILE, BIN, "gguf"])
def test_a_file_that_was_not_finished(
    kind: str, start: float, stop: float, model: Path, convert: Converter, tmp_path: Path
) -> None:
    """Its size is right from the beginning; a piece in the middle is one client's of several."""
    path = model / kind
    if kind == BIN:
        torch.save(load_file(model / FILE), path)
        (model / FILE).unlink()
        stop = min(stop, 0.98)  # after the weights is what a zip file ends with
    if kind == "gguf":
        call("export", "--model-dir", model, "--to", "gguf", "--output-dir", tmp_path / "exported")
        path = tmp_path / "exported" / "model.gguf"
    fill(path, start, stop)
    error = convert.fail(model_dir=path if kind == "gguf" else model)
    if "cannot be read as weights alone" in error.message:  # a record's header is gone
        assert kind == BIN
        return
    assert "with zeros in the place of weights: " in error.message
    assert "finish or repeat the download" in error.hint
    convert(model_dir=path if kind == "gguf" else model, allow_zeros=True)


@pytest.mark.parametrize("name", [EMBEDDING, FC, "model.norm.weight", "lm_head.weight"])
def test_a_tensor_that_is_zero(name: str, model: Path, convert: Converter) -> None:
    with change_tensors(model) as tensors:
        tensors[name].zero_()
    message = convert.fail(model_dir=model, tp_size=2).message
    assert message.startswith(f"1 tensor with zeros in the place of weights: {name} (all of it)")


def test_what_may_be_zero(model: Path, convert: Converter, log: pytest.LogCaptureFixture) -> None:
    """Padding after a vocabulary and an inner size; a layer that does nothing is told."""
    with change_tensors(model) as tensors:
        tensors[EMBEDDING][-60:] = 0
        tensors[FC][-40:] = 0
        tensors[DOWN][:, -40:] = 0
        tensors["model.layers.0.self_attn.o_proj.weight"].zero_()
    convert(model_dir=model)
    assert "layers.0.self_attn.o_proj.weight is all zero, so that it does nothing" in log.text


@pytest.mark.thorough
@pytest.mark.parametrize("family", families.CLASSES)
def test_what_transformers_begins_with(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, and norms to which 1 is added, are zero in a new model."""
    monkeypatch.setattr(families, "_randomize", lambda *_: None)
    Converter(tmp_path / "out")(model_dir=families.make_family_model(tmp_path, family))


def test_heads_that_were_not_trained(model: Path, convert: Converter, tmp_path: Path) -> None:
    heads = make_medusa_heads(tmp_path, hidden=128)
    (path,) = heads.glob("*.safetensors")
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "linear" in name:
            tensor.zero_()
    save_file(tensors, path)
    convert(model_dir=model, medusa_model_dir=str(heads))
    fill(path, 0.5, 1)
    error = convert.fail(model_dir=model, medusa_model_dir=str(heads), force=True)
    assert "zeros in the place of weights" in error.message


@pytest.mark.parametrize("suffix", [".aria2", ".part", ".incomplete", ".crdownload"])
def test_what_a_download_leaves_beside_its_file(
    suffix: str, model: Path, convert: Converter, tmp_path: Path
) -> None:
    (model / f"other.bin{suffix}").write_bytes(b"")  # of what nobody reads
    convert(model_dir=model)
    call("export", "--model-dir", model, "--to", "gguf", "--output-dir", tmp_path / "exported")
    mark = model / f"{FILE}{suffix}"
    mark.write_bytes(b"")
    error = convert.fail(model_dir=model, force=True)
    assert f"{mark} is beside it" in error.message
    with pytest.raises(SpecDecError, match="is beside it"):
        load_model(model)
    mark.unlink()  # as the hint says
    assert f"remove {mark}" in error.hint
    convert(model_dir=model, force=True)
    file = tmp_path / "exported" / "model.gguf"
    (mark := Path(f"{file}{suffix}")).write_bytes(b"")
    assert f"{mark} is beside it" in convert.fail(model_dir=file, force=True).message
    shutil.move(model / FILE, model / f"{FILE}{suffix}")
    error = convert.fail(model_dir=model, force=True)
    assert f"{FILE}{suffix}" in error.message
    assert "finish the download" in error.hint


@pytest.mark.parametrize("sizes", [(100,), (4096 * 3,), (5000, 4096 * 2, 7)])
def test_runs_of_zeros(sizes: tuple[int, ...]) -> None:
    finder = ZeroFinder()
    for size in sizes:
        finder.add(np.zeros(size, np.uint8))
    assert finder.is_zero
    finder.add(np.ones(1, np.uint8))
    assert not finder.is_zero
    rest: Any = np.zeros(4096 * 2, np.uint8)
    rest[-1] = 1
    finder.add(rest)
    start = sum(sizes) + 1
    assert finder.runs[-1] == (start, start + 4096)
