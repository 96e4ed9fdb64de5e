"""Folders as SpecForge 0.2.0 and speculators 0.9.0 write them: read, and written back the same.

Their names, shapes, types and config.json were recorded by tests/oracles/exporters.py; the numbers
are made here. ModelOpt's is in tests/convert/test_eagle.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.export.pipeline import export_model
from specdec.export.settings import ExportSettings
from specdec.files.reading import read_json
from tests.conftest import ROOT, make_llama, make_tokenizer
from tests.engines import call

RECORDED = json.loads((ROOT / "tests" / "golden" / "eagle" / "exporters.json").read_text())
VOCAB, DRAFTED = 131, 70
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_llama(tmp_path_factory.mktemp("target"), layers=8, vocab=VOCAB, intermediate=96)
    make_tokenizer(folder, vocab=VOCAB)
    return folder


def write_folder(folder: Path, recorded: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The recorded folder with numbers; 66 even tokens are drafted and the first four odd ones."""
    torch.manual_seed(5)
    tensors = {
        name: torch.randn(shape).to(DTYPES[dtype])
        for name, (dtype, shape) in recorded["tensors"].items()
        if dtype in DTYPES
    }
    drafted = sorted([*range(0, VOCAB, 2), *range(1, VOCAB, 2)][:DRAFTED])
    tensors["d2t"] = torch.tensor(drafted) - torch.arange(DRAFTED)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    tensors["t2d"][drafted] = True
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        name: shape for name, (_, shape) in recorded["tensors"].items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(recorded["config"]))
    return tensors


@pytest.mark.parametrize("name", list(RECORDED))
def test_what_others_write(name: str, target: Path, tmp_path: Path) -> None:
    """Nothing is lost: the checkpoint is exported again, and every tensor is the one that came."""
    config = RECORDED[name]["config"]
    tensors = write_folder(tmp_path / "theirs", RECORDED[name])
    call(
        "convert", "--model-dir", target, "--eagle-model-dir", tmp_path / "theirs",
        "--output-dir", tmp_path / "checkpoint",
        "--dtype", "bfloat16" if name.startswith("specforge") else "float32",
    )  # fmt: skip
    told = read_json(tmp_path / "checkpoint" / "config.json")
    assert told["eagle3"]["aux_layers"] == [1, 3, 4]
    for norm in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert told["eagle3"].get(norm, False) is config.get(norm, False), norm
    net = config.get("transformer_layer_config", config)
    rotary = net["rope_parameters"]
    assert told["eagle_net_config"]["rotary_base"] == rotary["rope_theta"] == 5e5
    scaling = told["eagle_net_config"]["rotary_scaling"]
    assert (scaling or {"rope_type": "default"})["rope_type"] == rotary["rope_type"]
    assert told["eagle_net_config"]["norm_epsilon"] == net["rms_norm_eps"] == 1e-5
    to = "sglang" if name == "specforge-sglang" else "speculators"
    settings = ExportSettings(
        output_dir=tmp_path / "again", checkpoint_dir=tmp_path / "checkpoint", to=to,
        model_dir=str(target),
    )  # fmt: skip
    export_model(settings)
    again = load_file(tmp_path / "again" / "model.safetensors")
    if name == "specforge-hf":
        tensors = {key.replace("midlayer.", "layers.0."): tensors[key] for key in tensors}
    assert set(again) == set(tensors)
    for key, tensor in tensors.items():
        assert again[key].dtype == tensor.dtype, key
        assert torch.equal(again[key], tensor), key
