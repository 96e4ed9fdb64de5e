"""The fused kernels without a GPU: in Triton's interpreter, where Triton can be imported."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.decode.engine import TorchEngine
from specdec.decode.requests import Request
from specdec.engine.decoder import find_fused
from tests.engines import make_engine
from tests.fused_checks import CHECKS, MODELS
from tests.parity.models import make_model


@pytest.fixture(scope="module")
def _interpreted() -> Iterator[None]:
    """Triton decides when it is imported whether it compiles or interprets."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton cannot be imported")
    if "triton" in sys.modules or torch.cuda.is_available():
        pytest.skip("triton compiles in this process: tests/gpu/test_cuda_fused.py is for that")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        del sys.modules[name]
    del sys.modules["specdec.engine.fused"]


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # bfloat16 it rounds down
@pytest.mark.parametrize(("check", "case"), CHECKS)
def test_kernels(check: Callable[..., None], case: Any, dtype: torch.dtype) -> None:
    check(case, dtype, "cpu")


@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("name", MODELS)
def test_texts(name: str, tmp_path: Path) -> None:
    from specdec.engine.fused import FusedLayers

    folder = make_engine(tmp_path, make_model(tmp_path / "target", name), optimize="none")
    requests = [
        Request(index=i, input_ids=[5, 9, 3 + i], max_output_len=6 - i, end_ids=frozenset())
        for i in range(2)
    ]
    texts = []
    for is_fused in (False, True):
        engine = TorchEngine(folder, device="cpu")
        if is_fused:
            engine.decoder._torch = FusedLayers(engine.decoder.stack)
        texts.append([result.output_ids for result in engine.generate(requests)])
    assert texts[0] == texts[1]


def test_a_device_without_them_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert find_fused(torch.device("cuda", 99)) is None
    (record,) = caplog.records
    assert "fused kernels: " in record.getMessage()
    assert "torch's own operators run in their place, slower" in record.getMessage()
