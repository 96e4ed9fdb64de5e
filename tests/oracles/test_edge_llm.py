"""TensorRT Edge-LLM's own exporter reads what `--to edge-llm` writes, on a CPU.

Its environment is `edge-llm` in the folder of environments, with tensorrt-edgellm 0.11.0.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engines import call
from tests.oracles.models import PYCODE

EXPORT_SECONDS = 300


@pytest.fixture(scope="module")
def exporter(environments: Path) -> Path:
    program = environments / "edge-llm" / "bin" / "tensorrt-edgellm-export"
    if not program.is_file():
        pytest.skip(f"{program} is not there")
    return program


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=EXPORT_SECONDS,
        check=False,
    )  # fmt: skip


def test_its_exporter_takes_the_drafter_and_its_target(exporter: Path, tmp_path: Path) -> None:
    target, folder = tmp_path / "target", tmp_path / "drafter"
    shutil.copytree(PYCODE / "target", target)
    refused = run(exporter, target, tmp_path / "refused", "--eagle-base")
    assert "does not provide a chat template" in refused.stderr
    (target / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    call(
        "export", "--model-dir", target, "--eagle-model-dir", PYCODE / "eagle3", "--to", "edge-llm",
        "--output-dir", folder,
    )  # fmt: skip
    tensors = load_file(folder / "model.safetensors")
    for source, out, flags in ((folder, "draft", []), (target, "base", ["--eagle-base"])):
        done = run(exporter, source, tmp_path / out, *flags)
        assert done.returncode == 0, done.stderr[-2000:]
    draft = tmp_path / "draft" / "llm"
    config = json.loads((draft / "config.json").read_text())
    assert (config["spec_decode_type"], config["engine_role"]) == ("eagle3", "draft")
    assert config["eagle3_config"] == {"target_layer_ids": [2, 6, 9], "num_target_layers": 3}
    weights = (draft / "model.onnx.data").read_bytes() + (draft / "model.onnx").read_bytes()
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            assert tensor.to(torch.float16).numpy().tobytes() in weights, name
    assert load_file(draft / "d2t.safetensors")["d2t"].equal(tensors["d2t"].int())
