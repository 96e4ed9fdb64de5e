"""Every mode decodes on networks as it does on the torch backend: drafts, texts and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.decode.drafters import read_drafting
from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Options
from specdec.decode.requests import ActiveRequest
from specdec.decode.sampling import SamplingParams
from specdec.decode.settings import DecodeSettings
from tests.conftest import make_drafter, make_eagle_drafter, make_llama, make_medusa_heads
from tests.engines import call
from tests.trt.networks import NEEDS_TENSORRT, load_here, make_requests

pytestmark = NEEDS_TENSORRT
PROMPTS = [[5, 9, 77], [3] * 20, [100], [8, 60, 8, 60, 8, 60, 8]]
SAMPLED = SamplingParams(temperature=0.9, top_k=40, seed=5)
# What each way converts, and how it builds and runs.
WAYS: dict[str, tuple[str, dict[str, Any], Sequence[object]]] = {
    "redrafter": ("redrafter", {}, ("--redrafter-num-beams", 3)),
    "redrafter-embedding": ("redrafter", {"rnn": False, "layers": 1, "exit_dim": 96}, ()),
    "medusa": ("medusa", {}, ()),
    "eagle1": ("eagle", {}, ()),
    "eagle1-two-layers": (
        "eagle", {"layers": 2, "bias": False, "own_embedding": False, "kv_heads": 4}, (),
    ),
    "eagle3": ("eagle", {"version": 3, "aux_layers": (0, 2)}, ()),
    "eagle3-reduced": (
        "eagle", {"version": 3, "draft_vocab": 70, "kv_heads": 1, "norm_before_residual": True}, (),
    ),
    "eagle3-input-norm": (
        "eagle", {"version": 3, "norm_before_fc": True, "norm_output": True}, (),
    ),
    "eagle3-fc-norm": (
        "eagle", {"version": 3, "aux_layers": (0, 2), "fc_norm": True, "norm_output": True}, (),
    ),
}  # fmt: skip
MAKERS: dict[str, Any] = {
    "redrafter": make_drafter,
    "medusa": make_medusa_heads,
    "eagle": make_eagle_drafter,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("target"), layers=3, seed=3)


def compare(torch_engine: TorchEngine, engine: TorchEngine) -> list[ActiveRequest]:
    """Texts, drafts and counts of greedy and sampled requests are the same."""
    limit = 10
    requests = make_requests(PROMPTS, limit) + make_requests(PROMPTS[:1], limit, SAMPLED)
    options = Options(keep_rejected=True)
    expected, found = (each.generate(requests, options) for each in (torch_engine, engine))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.output_ids == theirs.output_ids
        assert ours.rejected == theirs.rejected
        assert ours.stats == theirs.stats
    return found


def build_torch(checkpoint: Path, folder: Path, *flags: object) -> Path:
    call(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", folder, "--backend", "torch",
        "--optimize", "none", *flags,
    )  # fmt: skip
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_drafters_of_checkpoints(way: str, target: Path, tmp_path: Path) -> None:
    method, sizes, flags = WAYS[way]
    drafter = MAKERS[method](tmp_path, **sizes)
    checkpoint = tmp_path / "checkpoint"
    call(
        "convert", "--model-dir", target, "--drafter-model-dir", drafter, "--output-dir",
        checkpoint, *flags,
    )  # fmt: skip
    batch = ("--max-batch-size", 3)
    found = compare(
        TorchEngine(build_torch(checkpoint, tmp_path / "torch", *batch), device="cpu"),
        load_here(checkpoint, tmp_path / "engine", *batch),
    )
    assert any(any(result.rejected.values()) for result in found)


@pytest.fixture(scope="module")
def plain(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = tmp_path_factory.mktemp("plain") / "checkpoint"
    call("convert", "--model-dir", target, "--output-dir", checkpoint)
    return checkpoint


EXTERNAL = (
    "--speculative-decoding-mode",
    "draft_tokens_external",
    "--max-draft-len",
    6,
    "--max-num-tokens",
    21,
)
LOOKAHEAD = ("--speculative-decoding-mode", "lookahead_decoding", "--max-draft-len", 11)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["prompt_lookup", "suffix", "lookahead", "draft_model", "draft_tree", "draft_networks"]
)
def test_drafts_without_weights(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever drafts, the networks verify; a draft model's engine is of torch, or of networks."""
    draft = tmp_path / "draft"
    ways: dict[str, dict[str, Any]] = {
        "prompt_lookup": {"prompt_lookup_num_tokens": 5},
        "suffix": {"suffix_max_tokens": 6},
        "lookahead": {"lookahead_config": "[3,3,3]"},
        "draft_model": {"draft_engine_dir": draft, "draft_len": "4"},
        "draft_tree": {"draft_engine_dir": draft, "draft_tree_tokens": 6},
        "draft_networks": {"draft_engine_dir": draft, "draft_len": "4"},
    }
    if name.startswith("draft"):
        build_torch(plain, draft, "--max-batch-size", 3)
    if name == "draft_networks":
        networks = load_here(plain, tmp_path / "other", "--max-batch-size", 3)
        opened = [TorchEngine(draft, device="cpu"), networks]
        monkeypatch.setattr(TorchEngine, "open_draft_engine", lambda *_: opened.pop(0))
    mode = LOOKAHEAD if name == "lookahead" else EXTERNAL
    flags = (*mode, "--max-batch-size", 3)
    folder = build_torch(plain, tmp_path / "torch", *flags)
    settings: dict[str, Any] = {"engine_dir": folder, "draft_budget": "fixed", **ways[name]}
    drafting = read_drafting(DecodeSettings(**settings), None)
    found = compare(
        TorchEngine(folder, device="cpu", drafting=drafting),
        load_here(plain, tmp_path / "engine", *flags, drafting=drafting),
    )
    counts = [result.stats for result in found]
    assert sum(stats.num_draft_tokens for stats in counts) > 10
    assert ("draft" in name) == (sum(stats.num_accepted for stats in counts) > 25)
