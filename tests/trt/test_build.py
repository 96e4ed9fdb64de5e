"""Real engines of tiny models, and what a build refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.decode.engine import open_engine
from specdec.errors import SpecDecError
from specdec.trt.engine import read_network_config
from tests.conftest import make_drafter, make_eagle_drafter, make_llama, make_medusa_heads
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


MAKERS: dict[str, Any] = {
    "redrafter": make_drafter, "medusa": make_medusa_heads, "eagle": make_eagle_drafter
}  # fmt: skip


@pytest.mark.parametrize("method", MAKERS)
def test_real_engines_of_drafters(method: str, tmp_path: Path) -> None:
    target = make_llama(tmp_path, layers=2, dtype="float16")
    more = {"version": 3} if method == "eagle" else {}
    drafter = MAKERS[method](tmp_path, dtype="float16", **more)
    call(
        "convert", "--model-dir", target, "--drafter-model-dir", drafter, "--output-dir",
        tmp_path / "checkpoint",
    )  # fmt: skip
    done = build(
        tmp_path / "checkpoint", tmp_path / "engine", "--compute-capability", "8.0,8.9", "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["method"] == method
    assert "drafter0.engine" in report["networks"]
    for name in report["networks"]:
        assert (tmp_path / "engine" / name).stat().st_size > 10_000


@pytest.mark.parametrize("flags", [("int8",), ("int4", "--group-size", 32)])
def test_real_engines_of_integers(flags: tuple[object, ...], tmp_path: Path) -> None:
    call(
        "convert", "--model-dir", make_llama(tmp_path, layers=1, dtype="float16", intermediate=96),
        "--output-dir", tmp_path / "checkpoint",
    )  # fmt: skip
    done = build(
        tmp_path / "checkpoint", tmp_path / "engine", "--compute-capability", "8.0,8.9",
        "--quantization", *flags,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
