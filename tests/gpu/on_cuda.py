"""A plugin of pytest: engines that tests put on the CPU are put on the CUDA device instead.

    python -m pytest -p tests.gpu.on_cuda tests/run/test_exactness.py tests/run/test_hybrids.py

What these tests say of texts holds on a GPU, too. What they say of bits, kernels and seconds is
about CPUs, and fails there.
"""

from __future__ import annotations

import functools
from typing import Any

from specdec.decode.engine import TorchEngine


def _move(engine: TorchEngine, *args: Any, device: str = "auto", **options: Any) -> None:
    _make(engine, *args, device="cuda" if device == "cpu" else device, **options)


_make = TorchEngine.__init__
setattr(TorchEngine, "__init__", functools.wraps(_make)(_move))  # noqa: B010
