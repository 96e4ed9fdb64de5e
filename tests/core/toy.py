"""A toy command, run by the tests as a process of its own: `python -m tests.core.toy ARGS`.

It imports nothing of the tests, so that it starts quickly.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys

from specdec.command.settings import to_plain
from specdec.command.stages import run_command, stage_command
from specdec.errors import SpecDecError, UsageError
from specdec.options import setting
from specdec.system.logs import get_logger, show_progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToySettings:
    input_text: list[str] = setting([], help="prompts")
    max_output_len: int = setting(100, help="length", minimum=1)
    random_seed: int = setting(0, help="seed")
    speculative_decoding_mode: str | None = setting(
        help="mode", choices=("explicit_draft_tokens", "draft_tokens_external")
    )
    context_fmha: bool | None = setting(help="plugin")
    greedy: bool = setting(True, help="greedy")
    use_logits: bool = setting(False, help="logits")
    action: str = setting("print", help="what the toy does")


def do_action(settings: ToySettings) -> None:
    """Do what --action says."""
    get_logger("toy").info("working")
    list(show_progress(range(3), label="steps", total=3))
    errors: dict[str, BaseException] = {
        "fail": SpecDecError("3 heads\ndo not split", "use 4"),
        "usage": UsageError("wrong", "right"),
        "eof": EOFError("Ran out of input"),
        "interrupt": KeyboardInterrupt(),
        "interrupt-with-remedy": KeyboardInterrupt("--resume goes on"),
        "bug": ZeroDivisionError("oh no"),
        "memory": MemoryError(),
        "torch-memory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
    }
    if settings.action in errors:
        raise errors[settings.action]
    if settings.action == "missing-file":
        open("/nonexistent/file")
    elif settings.action == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        print("not reached")
    elif settings.action == "long":
        sys.stdout.writelines(f"line {i}\n" for i in range(100_000))
    else:
        print(json.dumps(to_plain(settings)))


if __name__ == "__main__":
    run_command(stage_command("run", ToySettings)(do_action))
