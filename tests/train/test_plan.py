"""The plan of a training: what it says is what the training then takes, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.files.tensor_file import TensorFile
from specdec.train import plan

FLAGS = (
    "--method", "eagle", "--eagle-version", 3, "--dtype", "bfloat16", "--model-max-length", 32,
    "--batch-size", 2, "--gradient-accumulation-steps", 2, "--num-epochs", 1, "--eval-prompts", 0,
)  # fmt: skip


def count_states(folder: Path) -> int:
    """Bytes of the states alone, without headers."""
    return sum(
        info.num_bytes
        for file in folder.glob("*-0*.safetensors")
        for info in TensorFile(file).tensors.values()
    )


@pytest.mark.thorough
def test_a_plan_is_what_the_training_takes(
    run_train: Any, target_dir: Path, data_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(plan, "MEASURED_SECONDS", 0.0)
    options = ("--model-dir", target_dir, "--data", data_file, *FLAGS)
    done = run_train(*options, "--plan", "--json", "--output-dir", tmp_path / "out")
    planned = json.loads(done.out)
    assert not list(tmp_path.iterdir())
    assert f"{planned['steps']} steps of 4 rows" in done.err
    assert planned["target_tokens_per_second"] > 0
    assert planned["hours"]["with_target"] > 0
    assert planned["peak_memory_bytes"] > 1e7
    sizes = planned["drafter_bytes"]
    assert sizes["whole"] == 20 * planned["drafter_parameters"]
    assert sizes["sharded"]["8"] < sizes["sharded"]["2"] < sizes["whole"]
    assert f"with --shard-drafter {sizes['sharded']['2'] / 1e9:.2f} GB of 2" in done.err

    trained = json.loads(
        run_train(
            *options, "--json", "--output-dir", tmp_path / "out",
            "--hidden-states-dir", tmp_path / "states",
        ).out
    )  # fmt: skip
    assert trained["steps"] == planned["steps"]
    assert trained["tokens"] == pytest.approx(planned["training_tokens"], rel=0.05)
    table_bytes = 2 * 320 * 32 * 2
    sizes = planned["hidden_states_bytes"]
    assert count_states(tmp_path / "states") == sizes["bfloat16"] - table_bytes
    assert sizes["fp8"] - table_bytes == (sizes["bfloat16"] - table_bytes) * (32 + 4) / 64
    assert sizes["float32"] - table_bytes == (sizes["bfloat16"] - table_bytes) * 2


def test_hours_follow_from_the_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tokens a second of training, forty of the target; once over the data, or each time."""
    seconds = iter([0.1, 0.025])
    monkeypatch.setattr(plan, "measure_token_seconds", lambda work: next(seconds))
    found = plan.estimate_hours(None, data_tokens=360_000, training_tokens=720_000)
    assert found == {
        "target_tokens_per_second": 40,
        "training_tokens_per_second": 10,
        "hours": {"with_target": 20.0, "with_hidden_states_dir": 17.5},
    }


def test_a_rate_leaves_out_the_first_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(plan.time, "monotonic", lambda: clock[0])
    durations = iter([50.0, 2.0, 5.0, 2.0])

    def work() -> int:
        clock[0] += next(durations)
        return 4

    assert plan.measure_token_seconds(work) == pytest.approx((2.0 + 5.0 + 2.0) / 12)
