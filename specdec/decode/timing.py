"""Seconds of a run by phase: prefill, draft, verify, accept, other."""

from __future__ import annotations

import dataclasses
import time

import torch


@dataclasses.dataclass
class Timing:
    """Seconds of each phase, and numbers of steps, of prompt tokens sought in a cache and found.

    is_exact: wait for the device at the end of each phase, so that no phase is charged for the work
    that an earlier one began.
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
        """Return the seconds of each phase, by its name."""
        fields = dataclasses.fields(self)
        return {field.name: getattr(self, field.name) for field in fields if field.type == "float"}


class Stopwatch:
    """Context that adds its seconds to a phase; none if it is left by an exception.

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
