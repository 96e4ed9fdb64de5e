"""The same engine on a CUDA device writes what it writes on the CPU, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.decode.drafters.draft_target import attach_draft
from specdec.decode.engine import TorchEngine
from specdec.decode.requests import Request
from specdec.decode.sampling import SamplingParams
from tests.conftest import make_drafter, make_llama
from tests.engines import make_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize(("beams", "length"), [(1, 3), (4, 5)])
def test_cuda_equals_cpu(
    tmp_path: Path, heads: int, kv_heads: int, beams: int, length: int
) -> None:
    target = make_llama(tmp_path, heads=heads, kv_heads=kv_heads, seed=3)
    drafter = make_drafter(tmp_path, exit_dim=96, scale=3.0)
    folder = make_engine(tmp_path, target, drafter, beams=beams, length=length)
    requests = [
        Request(
            index=i, input_ids=list(range(3, 8 + 9 * i)), max_output_len=48, end_ids=frozenset()
        )
        for i in range(4)
    ]
    outputs = {}
    for device in ("cpu", "cuda"):
        for speculate in (True, False):
            engine = TorchEngine(folder, device=device, speculate=speculate)
            results = engine.generate(requests)
            outputs[device, speculate] = [r.output_ids for r in results]
    assert all(ids == outputs["cpu", False] for ids in outputs.values())


@pytest.mark.parametrize("use_logits", [False, True])
def test_a_draft_model_on_another_device(tmp_path: Path, use_logits: bool) -> None:
    """On a CPU where there is one GPU: probabilities of two devices meet in the accept rule."""
    target = make_llama(tmp_path, seed=3)
    folder = make_engine(
        tmp_path, target,
        build=["--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 4],
    ).rename(tmp_path / "pair")  # fmt: skip
    draft_folder = make_engine(tmp_path / "draft", make_llama(tmp_path, seed=4, name="draft-hf"))
    requests = [
        Request(
            index=i, input_ids=[5 + i, 9], max_output_len=24, end_ids=frozenset(),
            sampling=SamplingParams(temperature=i * 0.7, seed=i),
        )
        for i in range(6)
    ]  # fmt: skip
    engine = TorchEngine(folder, device="cuda", devices=[0])
    expected = [r.output_ids for r in engine.generate(requests)]
    if torch.cuda.device_count() > 1:
        draft = TorchEngine(draft_folder, device="cuda", devices=[1])
    else:
        draft = TorchEngine(draft_folder, device="cpu")
    attach_draft(engine, draft, draft_len=3, use_logits=use_logits)
    outputs = [r.output_ids for r in engine.generate(requests)]
    assert outputs[0] == expected[0]
    assert all(len(tokens) == 24 for tokens in outputs)
    if not use_logits:
        assert outputs == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_runs(tmp_path: Path, dtype: str) -> None:
    target, drafter = make_llama(tmp_path), make_drafter(tmp_path, exit_dim=96)
    folder = make_engine(tmp_path, target, drafter, dtype=dtype)
    engine = TorchEngine(folder, device="cuda")
    request = Request(index=0, input_ids=[5, 6, 7], max_output_len=32, end_ids=frozenset())
    result = engine.generate([request])[0]
    assert len(result.output_ids) == 32
    assert engine.decoder.dtype is getattr(torch, dtype)
