"""On a CUDA device: the fused kernels compute what torch's operators do, alone and in an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.decode.engine import TorchEngine
from specdec.decode.requests import Request
from specdec.engine.step import Step
from tests.conftest import make_llama
from tests.engines import make_engine
from tests.fused_checks import CHECKS, MODELS
from tests.parity.models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("check", "case"), CHECKS)
def test_kernels(check: Callable[..., None], case: Any, dtype: torch.dtype) -> None:
    check(case, dtype, "cuda")


def make_requests(count: int) -> list[Request]:
    return [
        Request(index=i, input_ids=[5, 9, *range(3, 3 + 7 * i)], max_output_len=24 - 3 * i,
                end_ids=frozenset())
        for i in range(count)
    ]  # fmt: skip


def run(folder: Path, device: str, *, is_fused: bool, **options: Any) -> list[list[int]]:
    """Each text three times, from graphs where there are any: all the same."""
    engine = TorchEngine(folder, device=device, **options)
    assert engine.decoder.is_fused == is_fused, "see the log's `fused kernels:` line"
    found = [[r.output_ids for r in engine.generate(make_requests(4))] for _ in range(3)]
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize("name", MODELS)
def test_texts(name: str, tmp_path: Path) -> None:
    """Those of the CPU and of torch's operators on the GPU, in float32."""
    target = make_model(tmp_path / "target", name)
    auto, none = (make_engine(tmp_path, target, optimize=how) for how in ("auto", "none"))
    expected = run(auto, "cpu", is_fused=False)
    assert run(none, "cuda", is_fused=False) == expected
    assert run(auto, "cuda", is_fused=True) == expected


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_states_in_bfloat16(tmp_path: Path, num_tokens: int) -> None:
    """Those of torch's operators but for roundings; the same for a row whatever is beside it."""
    target = make_llama(tmp_path, layers=3, seed=3, dtype="bfloat16")
    found = []
    for optimize in ("auto", "none"):
        folder = make_engine(tmp_path, target, optimize=optimize)
        decoder = TorchEngine(folder, device="cuda").decoder
        assert decoder.is_fused == (optimize == "auto")
        cache = decoder.make_cache(2, 64)
        tokens = np.arange(5, 5 + num_tokens)[None].repeat(2, 0)
        step = Step(
            rows=np.arange(2), tokens=tokens, positions=tokens - 5,
            tree_mask=np.tril(np.ones((2, num_tokens, num_tokens), np.bool_)),
        )  # fmt: skip
        with torch.inference_mode():
            states = [decoder.forward(step, cache).float() for _ in range(3)]  # two replayed
        assert torch.equal(states[1], states[2]), "a replay differs"
        assert torch.equal(states[2][0], states[2][1]), "rows that hold the same differ"
        found.append(states[0])
    apart = (found[0] - found[1]).abs().max().item()
    assert apart <= 0.03 * found[1].abs().max().item(), f"{apart:.3g} apart"
