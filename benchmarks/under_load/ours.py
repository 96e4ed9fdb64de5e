"""Our own server in a process of its own, and engines of the pycode model for it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from specdec.processes import call_stage, make_environment

ROOT = Path(__file__).resolve().parent.parent.parent
PYCODE = ROOT / "examples" / "pycode"
MAX_BATCH_SIZE = 16


def make_engine(folder: Path, dtype: str, max_batch_size: int = MAX_BATCH_SIZE) -> Path:
    """Convert and build pycode with its ReDrafter, through the commands."""
    checkpoint, engine = folder / f"checkpoint-{dtype}", folder / f"engine-{dtype}-{max_batch_size}"
    target = str(PYCODE / "target")
    if not checkpoint.exists():
        call_stage("convert", [
            "--model-dir", target, "--drafter-model-dir", str(PYCODE / "redrafter"),
            "--output-dir", str(checkpoint), "--dtype", dtype, "--redrafter-num-beams", "1",
            "--redrafter-draft-len-per-beam", "3",
        ])  # fmt: skip
    call_stage("build", [
        "--checkpoint-dir", str(checkpoint), "--output-dir", str(engine), "--tokenizer-dir", target,
        "--max-batch-size", str(max_batch_size),
    ])  # fmt: skip
    return engine


@contextlib.contextmanager
def serve(engine: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """A server of an engine: its address and its process."""
    command = [sys.executable, "-m", "specdec", "serve", "--engine-dir", str(engine)]
    process = subprocess.Popen(
        [*command, "--port", "0", *flags], env=make_environment(), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if found := re.search(r"at (http://\S+)", line):
                # What it logs is read, or a full pipe would stop it.
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield found[1], process.pid
                return
        raise SystemExit(f"the server ended with status {process.wait()}: {''.join(said)}")
    finally:
        process.terminate()
        process.wait(60)
