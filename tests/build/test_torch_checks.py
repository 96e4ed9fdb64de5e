"""Each check before an engine of torch is built, alone: settings, limits, files of the ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from specdec.build.backends import torch_checks
from specdec.build.limits import resolve_limits
from specdec.build.settings import BuildSettings
from specdec.checkpoint.config import CheckpointConfig
from specdec.checkpoint.inventory import list_tensors
from specdec.errors import SpecDecError
from specdec.files.tensor_file import TensorFile
from specdec.methods import METHODS
from specdec.methods.medusa import MedusaParams
from specdec.model.quantization import Quantization
from tests.engine.models import make_model

PLAIN = CheckpointConfig(model=make_model(), method=None, drafter=None, raw={})
QUANTIZED = dataclasses.replace(PLAIN, quantization=Quantization(quant_algo="W4A16_AWQ"))
NVFP4 = dataclasses.replace(PLAIN, quantization=Quantization(quant_algo="NVFP4"))
MEDUSA = dataclasses.replace(
    PLAIN, method=METHODS["medusa"],
    drafter=MedusaParams(max_draft_len=9, num_heads=3, num_layers=1),
)  # fmt: skip


def with_model(**changes: Any) -> CheckpointConfig:
    return dataclasses.replace(PLAIN, model=make_model(**changes))


@pytest.mark.parametrize(
    ("settings", "checkpoint", "fact", "hint"),
    [
        ({"kv_cache_type": "paged"}, PLAIN, "the torch backend has a continuous KV cache only",
         "leave --kv-cache-type out"),
        ({}, with_model(pp_size=2), "the checkpoint is split for pp_size=2; the torch backend has"
         " no pipeline stages", "convert it again with --pp-size 1"),
        ({}, with_model(hidden_act="tanh"), "hidden_act='tanh'", "the torch backend executes silu"),
        ({}, NVFP4, "the checkpoint is quantized (NVFP4), which the torch backend does not execute",
         "it executes "),
        ({"quantization": "int8"}, QUANTIZED,
         "--quantization int8: the checkpoint is quantized already (W4A16_AWQ)", "leave it out"),
        ({"packed_weights": True, "optimize": "none"}, PLAIN, "--packed-weights enable: weights are"
         " packed for native kernels, and --optimize none leaves these out", "leave out one"),
        ({"group_size": 32}, PLAIN, "--group-size without --quantization int4", "leave it out"),
        ({"group_size": 48, "quantization": "int4"}, PLAIN, "--group-size 48",
         "use 32, 64 or 128"),
        ({"drafter_weights": "int8"}, PLAIN,
         "--drafter-weights int8: the checkpoint has no drafter", "leave it out"),
    ],
)  # fmt: skip
def test_settings_and_checkpoints_that_torch_does_not_take(
    settings: dict[str, Any], checkpoint: CheckpointConfig, fact: str, hint: str
) -> None:
    (problem,) = torch_checks.find_problems(BuildSettings(**settings), checkpoint)
    assert problem[0] == fact
    assert problem[1].startswith(hint)
    with pytest.raises(SpecDecError) as caught:
        torch_checks.check_config(BuildSettings(**settings), checkpoint)
    assert caught.value.message == fact


@pytest.mark.parametrize("is_installed", [False, True])
def test_another_backend_is_named_where_it_is_installed(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.trtllm.support.is_installed", lambda: is_installed)
    raw = {"architecture": NVFP4.model.architecture, "num_attention_heads": 4}
    checkpoint = dataclasses.replace(NVFP4, raw=raw)
    ((_, hint),) = torch_checks.find_problems(BuildSettings(), checkpoint)
    assert ("use --backend tensorrt-llm, or convert a published model" in hint) == is_installed
    assert ("tensorrt-llm" in hint) == is_installed


def test_what_torch_takes() -> None:
    for checkpoint in (PLAIN, QUANTIZED, MEDUSA):
        assert torch_checks.find_problems(BuildSettings(), checkpoint) == []
    torch_checks.check_config(BuildSettings(quantization="int4", group_size=32), PLAIN)


@pytest.mark.parametrize(
    ("settings", "checkpoint", "fact"),
    [
        ({"max_seq_len": 2049}, PLAIN, "max_seq_len=2049 exceeds the model's"
         " max_position_embeddings=2048"),
        ({"max_input_len": 2048}, PLAIN,
         "max_input_len=2048 leaves no room for output in max_seq_len=2048"),
        ({"max_draft_len": 4}, PLAIN,
         "--max-draft-len 4 contradicts the checkpoint: a plain engine drafts nothing"),
        ({"max_draft_len": 4}, MEDUSA,
         "--max-draft-len 4 contradicts the checkpoint: its max_draft_len is 9"),
        ({"max_beam_width": 2}, PLAIN,
         "max_beam_width=2: beam search over the output is not supported"),
        # 8 requests of 9 draft tokens and their root are 80 tokens a step.
        ({"max_batch_size": 8, "max_num_tokens": 79}, MEDUSA,
         "max_num_tokens=79 is less than max_batch_size=8 x (max_draft_len=9 + 1) = 80"),
        ({"speculative_decoding_mode": "draft_tokens_external"}, PLAIN,
         "--speculative-decoding-mode draft_tokens_external needs the most tokens that may be"
         " drafted at once"),
        ({"speculative_decoding_mode": "eagle"}, MEDUSA,
         "--speculative-decoding-mode eagle does not fit a medusa checkpoint (medusa)"),
    ],
)  # fmt: skip
def test_limits_that_contradict(
    settings: dict[str, Any], checkpoint: CheckpointConfig, fact: str
) -> None:
    with pytest.raises(SpecDecError) as caught:
        resolve_limits(BuildSettings(**settings), checkpoint)
    assert [problem[0] for problem in caught.value.problems] == [fact]


def test_limits_that_follow() -> None:
    limits = resolve_limits(BuildSettings(max_batch_size=8, max_num_tokens=80), MEDUSA)
    assert (limits.max_seq_len, limits.max_input_len) == (2048, 2047)
    assert (limits.max_draft_len, limits.speculative_decoding_mode) == (9, "medusa")


# ---- Files of the ranks.

SMALL = dataclasses.replace(
    PLAIN, model=make_model(
        hidden_size=32, num_hidden_layers=1, head_size=8, intermediate_size=48
    ),
)  # fmt: skip


def write_rank(path: Path, **changes: np.ndarray[Any, Any] | None) -> TensorFile:
    """A file with every tensor of SMALL, changed by canonical name."""
    shapes = {name: spec.shape for name, spec in list_tensors(SMALL.model, None).items()}
    arrays: dict[str, Any] = {n: np.ones(shape, np.float32) for n, shape in shapes.items()}
    save_file({n: a for n, a in (arrays | changes).items() if a is not None}, path)
    return TensorFile(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm_head.weight": None}, "lm_head.weight"),
        ({"more.weight": np.ones(3, np.float32)}, "more.weight"),
        ({"lm_head.weight": np.ones((128, 31), np.float32)}, r"\[128, 31\]"),
        ({"lm_head.weight": np.ones((128, 32), np.float16)},
         "config.json says dtype=float32, the tensors are float16"),
    ],
)  # fmt: skip
def test_a_file_beside_its_config(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert torch_checks.check_sources([write_rank(tmp_path / "whole")], SMALL) == set()
    with pytest.raises(SpecDecError, match=message):
        torch_checks.check_sources([write_rank(tmp_path / "rank", **changes)], SMALL)


def test_copies_twins_and_quantized_drafters(tmp_path: Path) -> None:
    first, copy = (f"eagle_nets.{net}.drafter.fc.weight" for net in (0, 1))
    save_file({first: np.ones((2, 2), np.float32), copy: np.zeros((2, 2), np.float32)},
              tmp_path / "nets")  # fmt: skip
    with pytest.raises(SpecDecError, match=r"eagle_nets\.1\.drafter\.fc\.weight differs from"):
        torch_checks.check_copies(TensorFile(tmp_path / "nets"), [first, copy])
    torch_checks.check_copies(TensorFile(tmp_path / "nets"), [first])
    fc, gate = (f"transformer.layers.0.mlp.{name}.weight" for name in ("fc", "gate"))
    rank = write_rank(tmp_path / "rank")
    torch_checks.check_twins(rank, {fc, gate})
    with pytest.raises(SpecDecError, match="gate.weight is quantized, .*fc.weight is float32"):
        torch_checks.check_twins(rank, {gate})
    with pytest.raises(SpecDecError, match="the drafter's a are quantized already"):
        torch_checks.check_drafter({"a": (2, 2)}, {"a"}, PLAIN.model, has_tokens=False)
