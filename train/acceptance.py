"""Acceptance of a drafter in an engine, which is converted, built and run on held-out prompts.

The three commands run as users run them, each in a process of its own. So the acceptance is the one
that `specdec-run --json` reports for the finished drafter, and the training's process, with its
launcher, memory and random numbers, is left alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.errors import SpecDecError
from specdec.files.acceptance import NAME
from specdec.system.processes import call_stage

from .output import write_weights
from .rows import TokenRows
from .target import get_max_length

if TYPE_CHECKING:
    from torch import Tensor

    from .job import TrainingJob
    from .methods.base import TrainableDrafter

MAX_TEXT_PROMPT = 128  # tokens; a conversation's prompt is everything before its first answer


def choose_prompts(rows: TokenRows, count: int, max_length: int) -> list[list[int]]:
    """Choose prompts of at most `max_length` tokens from rows evenly spaced.

    A text gives at most its first half, a conversation everything before its first answer. A row
    whose prompt is empty or too long is replaced by the next row.
    """
    prompts: list[list[int]] = []
    for row in np.linspace(0, len(rows), min(count, len(rows)), endpoint=False).astype(int):
        for later_row in range(row, len(rows)):
            low, high = int(rows.bounds[later_row]), int(rows.bounds[later_row + 1])
            mask = rows.mask[low:high]
            size = min((high - low) // 2, MAX_TEXT_PROMPT, max_length)
            if not mask[0]:
                size = int(mask.argmax())
            prompt = [int(token) for token in rows.tokens[low : low + size]]
            if 0 < size <= max_length and prompt not in prompts:
                prompts.append(prompt)
                break
    return prompts


class AcceptanceMeter:
    """Meter of a drafter in training; its folder is emptied after every measurement."""

    def __init__(self, job: TrainingJob, drafter: TrainableDrafter) -> None:
        self.job, self.drafter = job, drafter
        self.settings = settings = job.settings
        self.folder = job.state.folder / "acceptance"
        max_positions = get_max_length(job.target.config) or job.max_length
        max_length = max_positions - settings.eval_output_len
        self.prompts = choose_prompts(job.heldout_rows, settings.eval_prompts, max_length)
        if not self.prompts:
            raise SpecDecError(
                f"--eval-prompts: no held-out row leaves a prompt beside the"
                f" {settings.eval_output_len} tokens of --eval-output-len, in {max_positions}"
                " positions",
                "lower --eval-output-len, or train with --eval-prompts 0",
            )

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise SpecDecError where no engine can be made of this target and drafter."""
        try:
            self._convert(weights, "--dry-run")
        except SpecDecError as error:
            raise SpecDecError(
                f"--eval-prompts {self.settings.eval_prompts}: the acceptance could not be"
                f" measured: {error.message}",
                f"{error.hint}; or train with --eval-prompts 0",
            ) from None
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def measure(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the counts of `specdec-run` on the prompts with these weights of the drafter."""
        checkpoint, engine = self.folder / "checkpoint", self.folder / "engine"
        try:
            self._convert(weights, "--output-dir", str(checkpoint))
            call_stage(
                "build",
                [
                    "--checkpoint-dir", str(checkpoint), "--output-dir", str(engine), "--backend",
                    "torch", "--optimize", "none",
                ],
            )  # fmt: skip
            shutil.rmtree(checkpoint)
            requests = self.folder / "prompts.jsonl"
            lines = [json.dumps({"input_ids": prompt}) + "\n" for prompt in self.prompts]
            requests.write_text("".join(lines), encoding="utf-8")
            stats = call_stage(
                "run",
                [
                    "--engine-dir", str(engine), "--tokenizer-dir", str(self.settings.model_dir),
                    "--input-file", str(requests), "--max-output-len",
                    str(self.settings.eval_output_len),
                    "--draft-budget", "fixed",  # measures the drafter, however slow it is here
                    "--acceptance-output", str(self.job.state.folder / NAME), "--force",
                ],
            )["stats"]  # fmt: skip
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        names = ("num_output_tokens", "num_verify_steps", "acceptance_length", "acceptance_rate")
        return {
            "prompts": len(self.prompts),
            "max_output_len": self.settings.eval_output_len,
            "dtype": self.job.dtype,
            **{name: stats[name] for name in names},
        }

    def _convert(self, weights: Mapping[str, Tensor], *arguments: str) -> None:
        """Write the drafter and run `specdec-convert` on it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        drafter_folder = self.folder / "drafter"
        drafter_folder.mkdir(parents=True)
        write_weights(drafter_folder, self.job, self.drafter, weights)
        if "--output-dir" not in arguments:
            arguments = (*arguments, "--output-dir", str(self.folder / "checkpoint"))
        method = self.job.method
        call_stage(
            "convert",
            [
                "--model-dir", str(self.settings.model_dir), method.convert_folder,
                str(drafter_folder),
                "--dtype", self.job.dtype, *method.convert_flags(self.settings), *arguments,
            ],
        )  # fmt: skip
