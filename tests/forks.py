"""Copies of this process, in which a command need not import anything: 2 to 6 s of a processor.

They get signals, end and are waited for as processes that were started. What a start itself does,
and what a command imports, is for `run_cli` and a few other tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from specdec.command import entry
from specdec.decode.ranks import follower, processes

MAX_FILES = 1 << 12


def fork(
    work: Callable[[], object], env: Mapping[str, str] | None = None, **streams: Any
) -> subprocess.Popen[str]:
    """Call `work` in a copy of this process, whose status is that of a program with this main.

    env: more variables of its environment. streams: the three standard ones, pipes otherwise.
    """
    processes.end_ranks()
    # A program never starts: what would run before it does not come back. That leaves to Popen all
    # that it does for others.
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # Signals stay as Python sets them: it ignores SIGPIPE, which would end a copy otherwise.
    return subprocess.Popen(
        [sys.executable], text=True, preexec_fn=lambda: _work_alone(work, env or {}),
        restore_signals=False, **(pipes | streams),
    )  # fmt: skip


def run_main(*args: object) -> None:
    """`specdec ARGS...`, in a copy of this process."""
    sys.argv[1:] = map(str, args)
    entry.main()


def fork_command(
    words: Sequence[str], *, env: Mapping[str, str], **streams: Any
) -> subprocess.Popen[str]:
    """Stand in for `subprocess.Popen` of `python -m specdec ARGS...`, with this environment alone.

    Options by which all copies are text, or by which no test goes, are left out.
    """

    def work() -> None:
        for name in os.environ.keys() - env.keys():
            del os.environ[name]
        run_main(*words[words.index("specdec") + 1 :])

    kept = {name: value for name, value in streams.items() if name in ("stdout", "stderr", "cwd")}
    return fork(work, env, **kept)


def fork_follower(words: Sequence[str], *, env: Mapping[str, str], **more: Any) -> Any:
    """What starts an engine's other ranks, in tests."""

    def follow() -> None:
        sys.argv[1:] = words[3:]
        follower.main()

    return fork(follow, env, stderr=None, **more)


def _work_alone(work: Callable[[], object], env: Mapping[str, str]) -> NoReturn:
    """Forget what belongs to the first process, and end without what it does at its end."""
    status = 1
    try:
        os.closerange(3, MAX_FILES)
        os.environ.update(env)
        signal.set_wakeup_fd(-1)
        torch.set_num_threads(1)  # those of the first process are not here
        processes._ranks = processes._signal_pipe = None
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, closefd=False) for number, mode in enumerate(("r", "w", "w"))
        )
        work()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - nobody else tells it
        traceback.print_exc()
    finally:
        processes.end_ranks()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
