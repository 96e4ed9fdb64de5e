"""The C++ compiler of this machine, and the CPU that it compiles for; needs no torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from specdec.errors import SpecDecError
from specdec.system.machine import read_cpu_flags

SOURCE = Path(__file__).with_name("kernels.cpp")  # with its headers in the folder `kernels`
# Contraction is off because kernels.cpp itself says which products are fused with a sum. On x86
# -march=native chooses the tuning too; on ARM it takes the features of a CPU that GCC does not
# know, as -mcpu=native would not (Macs under Linux).
FLAGS = (
    "-std=c++17", "-O3", "-march=native",
    *(("-mtune=native",) if platform.machine() in ("aarch64", "arm64") else ()),
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp-simd",
    "-pthread",
)  # fmt: skip
COMPILE_SECONDS = 600.0  # for one call; the kernels take a minute on a slow machine
ANSWER_SECONDS = 60.0  # for a call that asks for a version, which takes one second
MAX_MESSAGE = 600  # characters of a compiler's last lines in an error


def find_compiler() -> str | None:
    """Find a C++ compiler: $CXX, or the first of g++, c++, clang++ that is installed.

    It is a line as a shell takes it: $CXX may hold arguments besides (`ccache g++`, `g++ -m64`).
    """
    if cxx_variable := os.environ.get("CXX", "").strip():
        if path := shutil.which(cxx_variable):  # also one with spaces in its path
            return shlex.quote(path)
        try:
            program, *arguments = shlex.split(cxx_variable)
        except ValueError:  # quotes that do not close
            return None
        path = shutil.which(program)
        return shlex.join([path, *arguments]) if path else None
    for name in ("g++", "c++", "clang++"):
        if path := shutil.which(name):
            return shlex.quote(path)
    return None


def call_compiler(command: Sequence[str], *, output: Path | None = None) -> str:
    """Run a compiler and return what it printed; raise SpecDecError with its last lines.

    output: a file that the call must have written. A call without one is a question, and the answer
    is not waited for as long.
    """
    seconds = ANSWER_SECONDS if output is None else COMPILE_SECONDS
    hint = "set CXX to another C++ compiler, or build with --optimize none"
    try:
        # In a group of its own, so that what the compiler starts ends with it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise SpecDecError(f"{command[0]} does not start: {error.strerror}", hint) from None
    try:
        printed, messages = process.communicate(timeout=seconds)
    except BaseException as error:  # Ctrl-C too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise SpecDecError(
                f"{shlex.join(command[:2])} took more than {seconds:g} s and was ended", hint
            ) from None
        raise
    if process.returncode != 0:
        lines = messages.decode("utf-8", "replace").strip().splitlines()[-3:]
        message = " | ".join(lines)[-MAX_MESSAGE:] or "it printed no message"
        status = process.returncode
        ending = f"failed with status {status}" if status > 0 else f"was ended by signal {-status}"
        raise SpecDecError(f"{command[0]} {ending}: {message}", hint)
    if output is not None and not (output.is_file() and output.stat().st_size):
        raise SpecDecError(f"{command[0]} ended with status 0 and wrote no {output.name}", hint)
    return printed.decode("utf-8", "replace")


def hash_source(source: Path) -> str:
    """Return the sum of a source and of the headers in the folder beside it that has its name."""
    files = [source, *sorted(source.with_suffix("").glob("*.h"))]
    sums = [f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
    return hashlib.sha256("\n".join(sums).encode()).hexdigest()


def describe_cpu() -> str:
    """Identify the instruction set that `-march=native` compiles for."""
    features = " ".join(read_cpu_flags()) or platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:16]}"


def describe_arithmetic(compiler: str) -> dict[str, str]:
    """Describe the arithmetic of the kernels here, in the terms of docs/kernels.md, by weight type.

    Read from what the compiler makes of the source before it compiles it.
    """
    text = call_compiler([*shlex.split(compiler), *FLAGS, "-E", "-dD", str(SOURCE)])
    is_fused = re.search(r"^#define SPECDEC_FUSED 1$", text, re.MULTILINE)
    kinds = re.search(r"kMultipliesPairs = (true|false), kSumsBands = (true|false);", text)
    if kinds is None:
        raise SpecDecError(
            f"{compiler} leaves out of the kernels' source how they multiply bfloat16 weights",
            "set CXX to another C++ compiler",
        )
    default_arithmetic = "fused" if is_fused else "product and sum"
    pairs, bands = (word == "true" for word in kinds.groups())
    return {
        "others": default_arithmetic,
        "bfloat16": "pairs" if pairs else "bands" if bands else default_arithmetic,
    }
