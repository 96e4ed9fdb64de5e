"""Locks of files, on the file systems that have them."""

from __future__ import annotations

import errno
import fcntl
from typing import IO, Any

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # as Lustre is mounted by default


def lock_file(file: int | IO[Any], operation: int) -> None:
    """Lock an open file as `flock` does; without effect where its file system has no locks."""
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
