"""trtllm-build as a child process: shown, kept in a log, ended with us, its failure explained."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from specdec.errors import SpecDecError

NUM_LAST_LINES = 15
END_SECONDS = 10  # that a child has to end after it was told to

# Messages of a failing trtllm-build, their meaning, and the remedy. The first that is found counts.
CAUSES: tuple[tuple[str, str, str], ...] = (
    (r"unrecognized arguments: (?P<what>.*)|invalid choice: (?P<choice>\S+)",
     "this trtllm-build does not know a flag or value: {what}{choice}",
     "it is of another line than --trtllm-version says; `specdec doctor` shows yours"),
    (r"Unsupported model architecture: (?P<what>\S+)",
     "this TensorRT-LLM has no architecture {what}",
     "convert the checkpoint with the --trtllm-version that is installed"),
    (r"(Mapping|QuantConfig|MoeConfig)\S* got an unexpected keyword argument '(?P<what>\w+)'",
     "the checkpoint's config.json has the key {what}, which this TensorRT-LLM does not know",
     "it was written for another line: convert it with the --trtllm-version that is installed"),
    (r"KeyError: '(?P<what>[^']*fc\.bias|[^']*\.(weight|bias))'",
     "the checkpoint lacks the tensor {what}",
     "check it with `specdec verify --checkpoint-dir`, and convert it again"),
    (r"(CUDA|cuda|GPU|cudaMalloc)[^\n]*out of memory|OutOfMemory|Requested amount of GPU memory",
     "the GPU's memory is full",
     "free the GPU, lower --max-batch-size or --max-num-tokens, or convert with a larger"
     " --tp-size"),
    (r"Cannot allocate memory|MemoryError|Unable to allocate|std::bad_alloc",
     "this machine's memory is full", "use fewer --workers, or a machine with more memory"),
    (r"No space left on device", "the disk is full",
     "free some space, or choose another output folder"),
    (r"(no CUDA-capable device|CUDA driver version is insufficient|"
     r"Found no NVIDIA driver|max_workers must be greater than 0)",
     "trtllm-build found no usable GPU or driver",
     "`specdec doctor` shows what is visible; in a container start it with --gpus all;"
     " --dry-run and --emit-script FILE need none"),
    (r"Could not find any implementation for node (?P<what>\S+)",
     "TensorRT has no kernel for {what} on this GPU",
     "try --gemm-plugin auto; GPUs newer than the release need a newer TensorRT-LLM"),
    (r"error while loading shared libraries: (?P<what>\S+?):|"
     r"(?P<lib>lib\S+\.so\S*): cannot open shared object file",
     "a library is missing: {what}{lib}",
     "install the TensorRT and MPI that belong to this TensorRT-LLM; `specdec doctor` lists the"
     " pins"),
    (r"ModuleNotFoundError: No module named '(?P<what>[\w.]+)'",
     "TensorRT-LLM's installation lacks the module {what}",
     "install tensorrt-llm again, or use NVIDIA's container"),
    (r"(?P<what>(RuntimeError|AssertionError|ValueError|TypeError|AttributeError): [^\n]+)",
     "trtllm-build raised {what}", "the log has the traceback"),
)  # fmt: skip


def run_child(
    argv: Sequence[str], environment: Mapping[str, str], folder: Path, log_path: Path
) -> None:
    """Run a command in a folder, its output on stderr and in a log; raise SpecDecError if it fails.

    The child has a process group of its own, which ends with us: Ctrl-C leaves no worker behind.
    """
    last_lines: deque[str] = deque(maxlen=400)
    with log_path.open("w", encoding="utf-8") as log:
        log.write(f"$ {' '.join(argv)}\n")
        try:
            child = subprocess.Popen(
                list(argv), cwd=folder, env={**os.environ, **environment},
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, encoding="utf-8", errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SpecDecError(
                f"{argv[0]} cannot be started: {error.strerror}",
                "check the installation of TensorRT-LLM with `specdec doctor`",
            ) from None
        try:
            assert child.stdout is not None
            for line in child.stdout:
                log.write(line)
                log.flush()
                last_lines.append(line.rstrip("\n"))
                sys.stderr.write(line)
            status = child.wait()
        except BaseException:
            _end(child)
            raise
    if status != 0:
        raise _explain(status, list(last_lines), log_path)


def _end(child: subprocess.Popen[str]) -> None:
    """End the child and all that it started, politely first."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(END_SECONDS)
                break
    finally:  # a second Ctrl-C too; and workers may have outlived it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _explain(status: int, lines: list[str], log_path: Path) -> SpecDecError:
    last_lines = " | ".join(line.strip() for line in lines[-NUM_LAST_LINES:] if line.strip())
    quotation = f"; its last lines: {last_lines}" if last_lines else ""
    if status == -signal.SIGKILL:
        return SpecDecError(
            f"trtllm-build was killed, as the system does when memory is full{quotation}",
            f"use fewer --workers, or a machine with more memory; the log is {log_path}",
        )
    for pattern, fact, remedy in CAUSES:
        if match := re.search(pattern, "\n".join(lines)):
            groups = {name: value or "" for name, value in match.groupdict().items()}
            return SpecDecError(
                f"trtllm-build failed (status {status}): {fact.format(**groups)}{quotation}",
                f"{remedy}; the log is {log_path}",
            )
    return SpecDecError(
        f"trtllm-build failed with status {status}{quotation}",
        f"read {log_path}; its first line with an error says more than its last",
    )
