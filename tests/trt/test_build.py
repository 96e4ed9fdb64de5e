"""Real engines of tiny models, and what a build refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.decode.engine import open_engine
from specdec.errors import SpecDecError
from specdec.trt.engine import read_network_config
from tests.engines import call, run_cli_here
from tests.parity.models import make_model
from tests.trt.networks import NEEDS_TENSORRT

pytestmark = NEEDS_TENSORRT


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    model = make_model(folder / "model", "LlamaForCausalLM-plain", dtype="float16")
    call("convert", "--model-dir", model, "--output-dir", folder / "checkpoint")
    return folder / "checkpoint"


def build(checkpoint: Path, folder: Path, *flags: object) -> Any:
    return run_cli_here(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", folder, "--backend", "tensorrt",
        *flags,
    )  # fmt: skip


def test_real_engines(checkpoint: Path, tmp_path: Path) -> None:
    done = build(
        checkpoint, tmp_path / "engine", "--compute-capability", "8.0,8.9", "--json",
        "--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 4,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["compute_capabilities"] == ["8.0", "8.9"]
    config, networks = read_network_config(tmp_path / "engine")
    assert config.build.max_draft_len == 4
    assert networks.compute_capabilities == ["8.0", "8.9"]
    for name in ("rank0.engine", "head0.engine"):
        assert (tmp_path / "engine" / name).stat().st_size > 10_000
    with pytest.raises(SpecDecError, match="runs on a GPU"):
        open_engine(tmp_path / "engine", device="cpu")
