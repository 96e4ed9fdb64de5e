"""Engine folders of the tensorrt backend whose networks the interpreter runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from specdec.decode.engine import TorchEngine
from specdec.decode.requests import Request
from specdec.decode.sampling import SamplingParams
from specdec.trt.engine import TensorRTEngine
from specdec.trt.library import find_package
from tests.engines import call
from tests.trt.interpreter import Interpreter

NEEDS_TENSORRT = pytest.mark.skipif(
    find_package() is None, reason="no TensorRT is installed: pip install 'specdec-toolchain[dev]'"
)


def build_here(checkpoint: Path, folder: Path, *flags: object) -> dict[str, Interpreter]:
    """Build, the engines' files left empty; return their networks by file name."""
    from specdec.build.backends import tensorrt

    found: dict[str, Interpreter] = {}

    def keep(trt: Any, weights: Any, checkpoint: Any, networks: Any, folder: Path) -> int:
        builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        for name, writer in tensorrt.write_networks(trt, builder, weights, checkpoint, networks):
            found[name] = Interpreter(trt, writer.network, writer.ranges)
            (folder / name).write_bytes(b"")
        return 0

    with mock.patch.object(tensorrt, "write_engines", keep):
        call(
            "build", "--checkpoint-dir", checkpoint, "--output-dir", folder, "--backend",
            "tensorrt", "--compute-capability", "8.9", *flags,
        )  # fmt: skip
    return found


def load_here(checkpoint: Path, folder: Path, *flags: object, **options: Any) -> TensorRTEngine:
    """`build_here`, and the engine that runs it."""
    networks = build_here(checkpoint, folder, *flags)
    return TensorRTEngine(folder, device="cpu", open_runner=networks.__getitem__, **options)


def make_requests(
    prompts: list[list[int]], limit: int, sampling: SamplingParams | None = None
) -> list[Request]:
    """Greedy requests, or others, without an end token."""
    return [
        Request(
            index=i,
            input_ids=prompt,
            max_output_len=limit,
            end_ids=frozenset(),
            sampling=sampling or SamplingParams(),
        )
        for i, prompt in enumerate(prompts)
    ]


def list_texts(engine: TorchEngine, requests: list[Request]) -> list[list[int]]:
    return [result.output_ids for result in engine.generate(requests)]
