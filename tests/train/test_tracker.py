"""Trackers of a training: each library has the numbers of training_log.jsonl."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.errors import SpecDecError
from specdec.train import tracker
from specdec.train.settings import TRACKERS, TrainSettings

LINES: list[dict[str, Any]] = [
    {"step": 1, "tokens": 8, "mean_loss": 2.5, "top_k_accuracy": [[0.25, 0.5], [0.0, 0.125]]},
    {"step": 2, "tokens": 16, "eval": {"loss": 1.5, "acceptance": {"acceptance_length": 2.0}}},
]
NUMBERS = {
    ("train/tokens", 1): 8.0, ("train/mean_loss", 1): 2.5, ("train/top_k_accuracy/0/0", 1): 0.25,
    ("train/top_k_accuracy/0/1", 1): 0.5, ("train/top_k_accuracy/1/0", 1): 0.0,
    ("train/top_k_accuracy/1/1", 1): 0.125, ("eval/tokens", 2): 16.0, ("eval/loss", 2): 1.5,
    ("eval/acceptance/acceptance_length", 2): 2.0,
}  # fmt: skip


def make_settings(name: str, folder: Path) -> TrainSettings:
    return TrainSettings(
        model_dir="base", data=Path("data.jsonl"), output_dir=folder / "head", tracker=name
    )


def read_events(folder: Path) -> dict[tuple[str, int], float]:
    """Read TensorBoard's own files with its own reader."""
    loading = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = loading.EventAccumulator(str(folder))
    events.Reload()
    return {
        (name, event.step): event.value
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    }


def test_tensorboard_has_the_numbers_once(tmp_path: Path) -> None:
    """A training that goes on after step 1 replaces what was tracked after it."""
    pytest.importorskip("tensorboard")
    settings = make_settings("tensorboard", tmp_path)
    for step, lines in ((0, [LINES[0], {"step": 2, "tokens": 99, "eval": {"loss": 7.0}}]),
                        (1, LINES[1:])):  # fmt: skip
        run = tracker.Tracker(settings, step)
        for line in lines:
            run.log(line)
        run.finish()
    assert read_events(tracker.get_event_folder(settings.output_dir)) == NUMBERS


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_runs_get_the_numbers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the calls that both libraries document."""
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.extend(
            ((key, step), value) for key, value in values.items()
        ),
    )

    def init(**options: Any) -> Any:
        calls.append((options["project"], options["name"], options["config"]["tracker"]))
        return run

    library = SimpleNamespace(init=init, finish=lambda: calls.append("finish"))
    monkeypatch.setitem(sys.modules, name, library)
    monkeypatch.setenv(f"{name.upper()}_PROJECT", "mine")
    tracked = tracker.Tracker(make_settings(name, tmp_path), 0)
    for line in LINES:
        tracked.log(line)
    tracked.finish()
    assert calls[0] == ("mine", "head", name)
    assert dict(calls[1:-1]) == NUMBERS
    assert calls[-1] == "finish"


def test_a_training_is_tracked(
    run_train: Any, target_dir: Path, data_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    run_train(
        "--model-dir", target_dir, "--data", data_file, "--method", "medusa", "--dtype", "float32",
        "--model-max-length", 32, "--max-steps", 2, "--eval-prompts", 0, "--eval-rows", 2,
        "--tracker", "tensorboard", "--output-dir", tmp_path / "heads",
    )  # fmt: skip
    events = read_events(tmp_path / "heads.tensorboard")
    lines = map(json.loads, (tmp_path / "heads" / "training_log.jsonl").read_text().splitlines())
    numbers = {
        (name, line["step"]): value for line in lines for name, value in tracker.list_numbers(line)
    }
    assert events == pytest.approx(numbers, rel=1e-6)
    assert ("eval/loss", 2) in events


def test_trackers_that_cannot_be(
    run_train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(
            SpecDecError, match=f"--tracker {name}: {name} is not installed"
        ) as caught:
            tracker.check_tracker(name)
        assert name in (caught.value.hint or "")

    def init(**_: Any) -> None:
        raise RuntimeError("no login")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(SpecDecError, match="--tracker wandb cannot begin: .*no login"):
        tracker.Tracker(make_settings("wandb", tmp_path), 0)
