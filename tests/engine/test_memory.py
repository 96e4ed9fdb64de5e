"""Zeros for caches: what the system clears when it is used, not before."""

from __future__ import annotations

import errno
import mmap
from typing import Any

import pytest
import torch

from specdec.engine.transfers import LEAST_MAPPED, make_zeros

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("num_bytes", [64, LEAST_MAPPED, LEAST_MAPPED + 4])
def test_zeros_of_any_size_are_zeros_that_can_be_written(
    dtype: torch.dtype, num_bytes: int
) -> None:
    numbers = make_zeros((2, num_bytes // dtype.itemsize // 2), dtype, CPU)
    assert numbers.shape == (2, num_bytes // dtype.itemsize // 2)
    assert (numbers.dtype, numbers.device) == (dtype, CPU)
    assert not numbers.any()
    assert numbers.data_ptr() % 64 == 0, "kernels read whole lines"
    numbers[1, -1] = 1
    assert int(numbers.count_nonzero()) == 1


def test_large_zeros_take_memory_only_where_they_are_written() -> None:
    def count_resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    before, numbers = count_resident(), make_zeros((1 << 28,), torch.float32, CPU)
    assert count_resident() - before < 1 << 26, "of 1 GiB"
    numbers[: 1 << 25] = 1
    assert count_resident() - before > 1 << 26


def test_memory_that_the_system_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match=r"no 4,194,304 bytes of memory for \(1024, 1024\)"):
        make_zeros((1024, 1024), torch.float32, CPU)
