"""Locks of files: real ones, and file systems without any."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path

import pytest

from specdec.system.locks import NO_LOCKS, lock_file


def test_a_file_is_locked_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as first, path.open("w") as second:
        lock_file(first, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            lock_file(second, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("number", [*NO_LOCKS, errno.EIO])
def test_only_file_systems_without_locks_are_passed_over(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, "from the file system")

    monkeypatch.setattr(fcntl, "flock", fail)
    with (tmp_path / "lock").open("w") as file:
        if number in NO_LOCKS:
            lock_file(file, fcntl.LOCK_EX)
        else:
            with pytest.raises(OSError, match="from the file system"):
                lock_file(file, fcntl.LOCK_EX)
