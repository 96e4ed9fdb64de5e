"""FP8 engines on a GPU that multiplies in float8: the products, and an engine that speculates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.decode.engine import TorchEngine
from specdec.decode.requests import Request
from specdec.engine.float8 import FIRST_CAPABILITY, Float8Linear, round_input, widen
from tests.conftest import make_drafter, make_llama
from tests.run.test_fp8_engine import build, make_linear, quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < FIRST_CAPABILITY,
        reason="torch sees no CUDA device that multiplies in float8",
    ),
]


@pytest.mark.parametrize("num_scales", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 7, 64])
def test_scaled_products(num_scales: int, num_tokens: int) -> None:
    on_cpu, whole = make_linear(num_scales)
    assert on_cpu.weight is not None
    assert on_cpu.bias is not None
    scales = torch.stack([scale for _, scale in on_cpu.scaled_halves]).cuda()
    linear = Float8Linear(
        on_cpu.weight.cuda(), scales, on_cpu.input_scale.reshape(1).cuda(), on_cpu.bias.cuda()
    )
    x = torch.randn(2, num_tokens, 48, generator=torch.Generator().manual_seed(9)).bfloat16()
    rounded = round_input(x, on_cpu.input_scale).float() * on_cpu.input_scale
    expected = torch.nn.functional.linear(rounded, whole).bfloat16() + on_cpu.bias
    torch.testing.assert_close(linear(x.cuda()).cpu(), expected, rtol=2**-6, atol=2**-5)
    assert torch.equal(widen(on_cpu.weight.cuda(), scales, torch.float32).cpu(), whole)


def test_an_engine_speculates_in_float8(tmp_path: Path) -> None:
    target = make_llama(tmp_path, dtype="bfloat16")
    drafter = make_drafter(tmp_path, exit_dim=96, dtype="bfloat16")
    engine = TorchEngine(build(quantize(tmp_path, target, drafter)), device="cuda")
    layer = engine.decoder.stack.layers[0]
    assert all(isinstance(x, Float8Linear) for x in (layer.qkv, layer.dense, layer.up, layer.down))
    request = Request(index=0, input_ids=[5, 6, 7], max_output_len=32, end_ids=frozenset())
    assert len(engine.generate([request])[0].output_ids) == 32
