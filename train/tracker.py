"""Trackers of a training: TensorBoard, Weights & Biases or Trackio, by their own libraries.

Numbers of a log line are tracked under `train/` or `eval/`, those in lists with their places.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec.command.settings import to_plain
from specdec.errors import SpecDecError, name_extra, summarize
from specdec.system.processes import keep_stdout_clean

from .settings import TRACKERS, TrainSettings

PROJECT = "specdec"  # if the library's own variable names no other


def get_event_folder(output_dir: Path) -> Path:
    """Return the folder of TensorBoard's events, next to the output folder."""
    output_dir = output_dir.resolve()
    return output_dir.parent / f"{output_dir.name}.tensorboard"


def check_tracker(name: str | None) -> None:
    """Raise SpecDecError where a tracker's library is not installed."""
    if name is not None and importlib.util.find_spec(name) is None:
        raise SpecDecError(f"--tracker {name}: {name} is not installed", name_extra(name))


class Tracker:
    """A run of a tracker, which only the main process has."""

    def __init__(self, settings: TrainSettings, step: int) -> None:
        """Begin a run, or go on with one after a step; raise SpecDecError where it cannot."""
        assert settings.tracker in TRACKERS
        self.name = name = settings.tracker
        try:
            with keep_stdout_clean(), contextlib.redirect_stdout(sys.stderr):
                self._run = self._start(settings, step)
        except Exception as error:  # noqa: BLE001 - each library raises errors of its own
            raise SpecDecError(
                f"--tracker {name} cannot begin: {summarize(error)}",
                "log in as its documentation says, or leave --tracker out",
            ) from None

    def _start(self, settings: TrainSettings, step: int) -> Any:
        """Begin the library's run."""
        if self.name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            folder = get_event_folder(settings.output_dir)
            return SummaryWriter(str(folder), purge_step=step + 1 if step else None)
        library = importlib.import_module(self.name)
        variable = f"{self.name.upper()}_PROJECT"
        return library.init(
            project=os.environ.get(variable) or PROJECT, name=settings.output_dir.name,
            config=to_plain(settings), resume="allow",
        )  # fmt: skip

    def log(self, line: Mapping[str, Any]) -> None:
        """Track the numbers of a log line."""
        values = dict(list_numbers(line))
        if self.name == "tensorboard":
            for name, value in values.items():
                self._run.add_scalar(name, value, line["step"])
            self._run.flush()
        else:
            self._run.log(values, step=line["step"])

    def finish(self) -> None:
        """End the run."""
        with keep_stdout_clean(), contextlib.redirect_stdout(sys.stderr):
            if self.name == "tensorboard":
                self._run.close()
            else:  # of a run that is ended by itself, Trackio prints its end once more at exit
                importlib.import_module(self.name).finish()


def list_numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the names and numbers of a log line, but for its step."""
    items = {key: value for key, value in line.items() if key not in ("step", "eval")}
    yield from _list_numbers("eval" if "eval" in line else "train", items | line.get("eval", {}))


def _list_numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, float(value)
    items = dict(enumerate(value)) if isinstance(value, list) else value
    for key, item in items.items() if isinstance(items, Mapping) else ():
        yield from _list_numbers(f"{name}/{key}", item)
