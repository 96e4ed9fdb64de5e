"""What the fuzz tests share: how many examples, how long one may take, what may be raised."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, settings

from specdec.errors import SpecDecError
from tests.covering import TAKES_ALL

T = TypeVar("T")
MAX_SECONDS = 2.0  # of one example, on a busy machine


def fuzz(max_examples: int) -> settings:
    """Settings of a fuzz test, a third of whose examples are tried unless SPECDEC_TEST_ALL is set.

    Which ones they are is fixed in tests/conftest.py.
    """
    return settings(
        max_examples=max_examples if TAKES_ALL else max_examples // 3,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def attempt(work: Callable[[], T]) -> tuple[T | None, SpecDecError | None]:
    """Return the result or the error for the user; fail for any other error, or for slow work."""
    began = time.process_time()
    result = error = None
    try:
        result = work()
    except SpecDecError as caught:
        error = caught
    assert time.process_time() - began < MAX_SECONDS
    assert error is None or (error.message and error.hint)
    assert error is None or len(error.message) < 20_000
    return result, error
