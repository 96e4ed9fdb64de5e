"""On a CUDA device: steps replayed from graphs write what they write without, and do not wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from specdec.decode.drafters.draft_target import attach_draft
from specdec.decode.engine import TorchEngine
from specdec.decode.requests import Request
from specdec.decode.sampling import SamplingParams
from tests.conftest import make_drafter, make_eagle_drafter, make_llama, make_medusa_heads
from tests.engines import make_engine, make_noisy_copy, make_tree_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
METHODS = ("plain", "redrafter", "medusa", "eagle", "eagle3", "draft_target")


def make(method: str, parent: Path, dtype: str = "float32") -> list[Path]:
    """Engine folders: the target's, and a draft model's."""
    target = make_llama(parent, layers=3, seed=3, dtype=dtype)
    if method == "medusa":
        heads = make_medusa_heads(parent, scale=3.0, dtype=dtype)
        return [make_tree_engine("medusa", parent, target, heads)]
    if method in ("eagle", "eagle3"):
        version = 3 if method == "eagle3" else 1
        return [
            make_tree_engine(
                "eagle", parent, target, make_eagle_drafter(parent, version=version, scale=2.0)
            )
        ]
    if method == "draft_target":
        make_noisy_copy(target, parent / "noisy")
        flags = ["--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 3]
        return [
            make_engine(parent / "pair", target, build=flags),
            make_engine(parent / "draft", parent / "noisy"),
        ]
    drafter = make_drafter(parent, exit_dim=96, scale=3.0, dtype=dtype)
    return [make_engine(parent, target, drafter if method == "redrafter" else None)]


def load(folders: list[Path], device: str = "cuda") -> TorchEngine:
    engine = TorchEngine(folders[0], device=device)
    if len(folders) > 1:
        draft = TorchEngine(folders[1], device=device)
        attach_draft(engine, draft, draft_len=3, use_logits=False)
    return engine


def make_requests(count: int, temperature: float = 0.0) -> list[Request]:
    return [
        Request(
            index=i, input_ids=list(range(3 + i, 8 + 17 * i)), max_output_len=60 - 9 * (i % 3),
            end_ids=frozenset(), sampling=SamplingParams(temperature=temperature, seed=i),
        )
        for i in range(count)
    ]  # fmt: skip


def run(engine: TorchEngine, requests: list[Request]) -> list[list[int]]:
    return [r.output_ids for r in engine.generate(requests)]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device, other than `to_host`, is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", METHODS)
def test_graphs_equal_eager_and_the_cpu(tmp_path: Path, method: str) -> None:
    folders = make(method, tmp_path)
    requests = make_requests(5)
    expected = run(load(folders, "cpu"), requests)
    engine = load(folders)
    assert engine.graphs is not None
    for _ in range(3):
        assert run(engine, requests) == expected
    assert engine.graphs.num_replayed > engine.graphs.num_recorded > 0
    assert [run(engine, [request])[0] for request in requests[:2]] == expected[:2]
    assert engine.graphs.pool_bytes >= 0
    engine.graphs.is_enabled = False
    assert run(engine, requests) == expected
    assert engine.graphs.num_eager["switched off"] > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_waits_but_to_host(tmp_path: Path, method: str, temperature: float) -> None:
    engine = load(make(method, tmp_path))
    requests = make_requests(3, temperature)
    expected = run(engine, requests)
    for _ in range(2):  # all shapes are recorded
        assert run(engine, requests) == expected
    with no_waiting():
        assert run(engine, requests) == expected


@pytest.mark.parametrize("method", ["redrafter", "medusa"])
def test_bfloat16(tmp_path: Path, method: str) -> None:
    engine = load(make(method, tmp_path, dtype="bfloat16"))
    requests = make_requests(1)
    first = run(engine, requests)
    assert all(run(engine, requests) == first for _ in range(3)), "replays differ from each other"
    assert len(first[0]) == 60


def test_optimize_none_has_no_graphs(tmp_path: Path) -> None:
    folder = make_engine(tmp_path, make_llama(tmp_path), optimize="none")
    assert TorchEngine(folder, device="cuda").graphs is None
