"""Where the time of a run goes."""

from __future__ import annotations

import dataclasses
import time

import torch


@dataclasses.dataclass
class Timing:
    """Seconds spent, by part, verify steps, and prompt tokens looked for in and taken from a cache.

    is_exact: wait for the device at the end of each part, so that no part is charged for what an
    earlier one began.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    other: float = 0.0
    num_steps: int = 0
    num_sought_tokens: int = 0
    num_reused_tokens: int = 0
    is_exact: bool = False

    def list_seconds(self) -> dict[str, float]:
        """The seconds of each part, by its name."""
        fields = dataclasses.fields(self)
        return {field.name: getattr(self, field.name) for field in fields if field.type == "float"}


class Stopwatch:
    """Counts the seconds between its beginning and its end as a part's; none if it is left early.

    device: a CUDA device that is waited for at the end where the timing is exact, or None.
    """

    def __init__(self, timing: Timing, phase: str, device: torch.device) -> None:
        self._timing, self._phase, self._device = timing, phase, device
        self._start_seconds = 0.0

    def __enter__(self) -> None:
        self._start_seconds = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            timing, phase = self._timing, self._phase
            if timing.is_exact and self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds = time.perf_counter() - self._start_seconds
            setattr(timing, phase, getattr(timing, phase) + seconds)
