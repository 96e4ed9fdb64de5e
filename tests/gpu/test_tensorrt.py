"""Engines of TensorRT's own layers on a GPU write what the torch backend writes, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.decode.engine import TorchEngine
from specdec.errors import SpecDecError
from specdec.trt.engine import TensorRTEngine
from specdec.trt.library import describe_library, find_package, load_tensorrt
from specdec.trt.runtime import EngineRunner
from tests.conftest import make_drafter, make_eagle_drafter, make_llama, make_medusa_heads
from tests.engines import call
from tests.parity.models import make_model
from tests.trt.networks import list_texts, make_requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(find_package() is None, reason="no TensorRT is installed"),
    pytest.mark.usefixtures("usable_gpu"),
]
PROMPTS = [[5, 9, 77], [3] * 20, [100], [8, 60, 8, 60, 8, 60, 8]]
MAKERS: dict[str, Any] = {
    "redrafter": make_drafter, "medusa": make_medusa_heads, "eagle": make_eagle_drafter
}  # fmt: skip


@pytest.fixture(scope="module")
def usable_gpu() -> None:
    """Skip on a GPU that the installed TensorRT builds no engine for."""
    library, own = describe_library(load_tensorrt()), torch.cuda.get_device_capability()
    if fact := library.explain(torch.cuda.get_device_name(), "{}.{}".format(*own)):
        pytest.skip(fact)


def build(checkpoint: Path, folder: Path, *flags: object) -> Path:
    call("build", "--checkpoint-dir", checkpoint, "--output-dir", folder, *flags)
    return folder


@pytest.mark.parametrize("method", [None, *MAKERS])
def test_texts_equal_torch(method: str | None, tmp_path: Path) -> None:
    """Without TF32, whose products TensorRT rounds: logits of random models lie well apart."""
    target, words = make_llama(tmp_path, layers=3, seed=3), []
    if method is not None:
        words = ["--drafter-model-dir", MAKERS[method](tmp_path)]
    checkpoint = tmp_path / "checkpoint"
    call("convert", "--model-dir", target, "--output-dir", checkpoint, *words)
    theirs = TorchEngine(build(checkpoint, tmp_path / "torch", "--optimize", "none"), device="cpu")
    folder = build(checkpoint, tmp_path / "engine", "--backend", "tensorrt")
    for speculate in (True, False):
        ours = TensorRTEngine(folder, speculate=speculate)
        requests = make_requests(PROMPTS, 24)
        assert list_texts(ours, requests) == list_texts(theirs, requests)


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM-caps", "Phi3ForCausalLM-longrope"])
def test_families_equal_torch(name: str, tmp_path: Path) -> None:
    model, checkpoint = make_model(tmp_path / "model", name), tmp_path / "checkpoint"
    call("convert", "--model-dir", model, "--output-dir", checkpoint)
    theirs = TorchEngine(build(checkpoint, tmp_path / "torch", "--optimize", "none"), device="cpu")
    ours = TensorRTEngine(build(checkpoint, tmp_path / "engine", "--backend", "tensorrt"))
    requests = make_requests(PROMPTS, 24)
    assert list_texts(ours, requests) == list_texts(theirs, requests)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two GPUs")
@pytest.mark.parametrize("method", [None, "redrafter", "eagle"])
def test_two_ranks_equal_one(method: str | None, tmp_path: Path) -> None:
    """Their networks sum over NCCL; embeddings are split too."""
    target = make_llama(tmp_path, layers=3, seed=3)
    words = [] if method is None else ["--drafter-model-dir", MAKERS[method](tmp_path)]
    for name, flags in {"one": [], "two": ["--tp-size", 2, "--use-parallel-embedding"]}.items():
        call("convert", "--model-dir", target, "--output-dir", tmp_path / name, *words, *flags)
    theirs = TorchEngine(
        build(tmp_path / "one", tmp_path / "torch", "--optimize", "none"), device="cpu"
    )
    ours = TensorRTEngine(build(tmp_path / "two", tmp_path / "engine", "--backend", "tensorrt"))
    requests = make_requests(PROMPTS, 24)
    assert list_texts(ours, requests) == list_texts(theirs, requests)
    ours.close()


def test_steps_are_graphs(tmp_path: Path) -> None:
    """TensorRT-RTX records them; a shape that comes again gives the same logits."""
    trt = load_tensorrt()
    if not hasattr(trt, "CudaGraphStrategy"):
        pytest.skip("full TensorRT records no graphs by itself")
    call("convert", "--model-dir", make_llama(tmp_path), "--output-dir", tmp_path / "checkpoint")
    folder = build(tmp_path / "checkpoint", tmp_path / "engine", "--backend", "tensorrt")
    runner = EngineRunner(folder / "head0.engine", torch.device("cuda"))
    strategy = runner._context.get_runtime_config().cuda_graph_strategy
    assert strategy == trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    states = torch.randn(4, 64, device="cuda")
    found = [runner.run({"states": states.clone()})["logits"] for _ in range(20)]
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_another_capability_is_refused(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    other = "8.0" if (major, minor) != (8, 0) else "8.9"
    call("convert", "--model-dir", make_llama(tmp_path), "--output-dir", tmp_path / "checkpoint")
    folder = build(
        tmp_path / "checkpoint", tmp_path / "engine", "--backend", "tensorrt",
        "--compute-capability", other,
    )  # fmt: skip
    with pytest.raises(SpecDecError, match=f"has {major}.{minor}"):
        TensorRTEngine(folder)
