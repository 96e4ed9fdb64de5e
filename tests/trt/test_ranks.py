"""Engines of two ranks, whose networks meet in memory, write what one rank of torch writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.decode.engine import TorchEngine
from specdec.engine import loading
from specdec.trt import target
from specdec.trt.network import NetworkWriter
from tests.conftest import make_drafter, make_eagle_drafter, make_llama, make_medusa_heads
from tests.engines import call, run_cli_here
from tests.parity.models import make_model
from tests.parity.test_families import check_logits
from tests.run.test_fp8_engine import make_rows
from tests.trt.networks import NEEDS_TENSORRT, load_here
from tests.trt.test_modes import build_torch, compare

pytestmark = NEEDS_TENSORRT
BATCH = ("--max-batch-size", 3)
# Vocabulary and positions by rows, or the states' width by columns.
ROWS = ("--use-parallel-embedding",)
COLUMNS = (*ROWS, "--embedding-sharding-dim", 1)
FAMILIES: dict[str, Sequence[object]] = {
    "LlamaForCausalLM-biases": (), "LlamaForCausalLM-tied_head_dim": ROWS,
    "Gemma2ForCausalLM-caps": (), "Gemma3ForCausalLM-windows": ROWS,
    "GPT2LMHeadModel-gelu_new": ROWS, "OPTForCausalLM-350m": COLUMNS,
    "PhiForCausalLM-gelu_new": COLUMNS, "GraniteForCausalLM-multipliers": (),
}  # fmt: skip


def load_both(
    target: Path, parent: Path, *flags: object, drafter: Path | None = None,
    convert: Sequence[object] = (), build: Sequence[object] = BATCH, **options: Any,
) -> Iterator[TorchEngine]:  # fmt: skip
    """Torch's engine of one rank, and networks of two, whose conversion has `flags` as well."""
    words = [*convert, *([] if drafter is None else ["--drafter-model-dir", drafter])]
    for name, more in {"one": [], "two": ["--tp-size", 2, *flags]}.items():
        call("convert", "--model-dir", target, "--output-dir", parent / name, *words, *more)
    folder = build_torch(parent / "one", parent / "torch", *build)
    yield TorchEngine(folder, device="cpu", **options)
    yield load_here(parent / "two", parent / "engine", *build, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    target = make_model(tmp_path / "model", name)
    theirs, ours = load_both(target, tmp_path, *FAMILIES[name])
    compare(theirs, ours)
    check_logits(ours.decoder, target)
    ours.close()


MAKERS: dict[str, Callable[..., Path]] = {
    "redrafter": make_drafter, "medusa": make_medusa_heads, "eagle": make_eagle_drafter,
    "eagle3": lambda parent: make_eagle_drafter(parent, version=3, draft_vocab=70),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "flags"),
    [("redrafter", ROWS), ("medusa", ()), ("eagle", ROWS), ("eagle3", ()), ("eagle3", ROWS)],
)
def test_drafters(method: str, flags: Sequence[object], tmp_path: Path) -> None:
    """Which run on rank 0 alone, with the whole embedding."""
    target = make_llama(tmp_path, layers=3, seed=3)
    theirs, ours = load_both(target, tmp_path, *flags, drafter=MAKERS[method](tmp_path))
    assert any(any(result.rejected.values()) for result in compare(theirs, ours))
    ours.close()


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [("int8",), ("int4", "--group-size", 32), ("fp8",)])
def test_quantized_weights(
    flags: Sequence[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole rows have one int8 scale, and groups lie within a rank's columns; FP8 has one scale."""
    target = make_llama(tmp_path, layers=2, seed=3, intermediate=128)
    options: dict[str, Any] = {"build": (*BATCH, "--quantization", *flags)}
    if flags == ("fp8",):
        rows = make_rows(tmp_path / "rows.jsonl", 128)
        options = {"convert": ("--quantization", *flags, "--calibration-data", rows)}
        monkeypatch.setattr(loading, "can_multiply", lambda weight, device: True)
    theirs, ours = load_both(target, tmp_path, *ROWS, **options)
    compare(theirs, ours)
    ours.close()


@pytest.mark.thorough
def test_real_engines(tmp_path: Path) -> None:
    """Of both ranks, whose layers sum, look up and join."""
    target = make_llama(tmp_path, layers=2, dtype="float16")
    drafter = make_eagle_drafter(tmp_path, dtype="float16", version=3)
    checkpoint = tmp_path / "checkpoint"
    call(
        "convert", "--model-dir", target, "--drafter-model-dir", drafter, "--output-dir",
        checkpoint, "--tp-size", 2, *ROWS,
    )  # fmt: skip
    done = run_cli_here(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", tmp_path / "engine", "--backend",
        "tensorrt", "--compute-capability", "8.0,8.9", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout)["networks"]
    assert names[:4] == ["rank0.engine", "head0.engine", "rank1.engine", "head1.engine"]
    assert all((tmp_path / "engine" / name).stat().st_size > 10_000 for name in names)


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "no sum": (NetworkWriter, "sum_ranks", lambda found: lambda self, x, num_ranks: x),
    "a bias on every rank": (
        target, "multiply", lambda multiply: lambda *rest, has_bias=True: multiply(*rest)
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_show(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, change = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    target = make_model(tmp_path / "model", "LlamaForCausalLM-biases")
    _, ours = load_both(target, tmp_path)
    with pytest.raises(AssertionError, match="of the largest logit"):
        check_logits(ours.decoder, target)
    ours.close()
