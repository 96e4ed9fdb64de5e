"""Servers of the same weights: ours, llama.cpp's and vLLM's, each in several settings."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.side_by_side import wire
from benchmarks.side_by_side.processes import GRACE_SECONDS, PeerError, read_last_line
from specdec.system.processes import make_environment

OURS, LLAMA_CPP, VLLM = "specdec", "llama.cpp", "vLLM"
SERVERS = (OURS, LLAMA_CPP, VLLM)
START_SECONDS = 600.0  # vLLM may compile
MAX_TOKENS = 512  # of a prompt and its output
# As vLLM's own pages have it for CPUs; threads are not bound, as none of the others' are.
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a server is started; the port is added as the last word."""

    server: str
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.server}: {self.name}"


@dataclasses.dataclass(frozen=True)
class Weights:
    """Two models as each server reads them: folders of engines, GGUF files, folders."""

    tokenizer: Path
    engines: Mapping[str, Path]
    gguf: Mapping[str, Path]
    folders: Mapping[str, Path]


def list_ours(
    weights: Weights, lengths: Sequence[int], rows: int, threads: int
) -> Iterator[Setting]:
    """Without drafts, with fixed lengths, and with lengths that adapt."""
    common = (
        sys.executable, "-m", "specdec", "serve", "--tokenizer-dir", str(weights.tokenizer),
        "--engine-dir", str(weights.engines["target"]), "--max-batch-size", str(rows),
        "--max-seq-len", str(MAX_TOKENS), "--device", "cpu", "--served-model-name", "target",
    )  # fmt: skip
    drafted = (*common, "--draft-engine-dir", str(weights.engines["draft"]), "--draft-len")
    environment = {"OMP_NUM_THREADS": str(threads)}
    yield Setting(OURS, "plain", (*common, "--no-speculation"), environment)
    for length in (*map(str, lengths), "auto"):
        yield Setting(OURS, f"draft {length}", (*drafted, length), environment)


def list_llama_cpp(
    program: Path, weights: Weights, lengths: Sequence[int], rows: int, threads: int
) -> Iterator[Setting]:
    common = (
        str(program), "--model", str(weights.gguf["target"]), "--threads", str(threads),
        "--threads-batch", str(threads), "--parallel", str(rows), "--fit", "off", "--ctx-size",
        str(rows * MAX_TOKENS), "--cache-ram", "0", "--host", "127.0.0.1",
    )  # fmt: skip
    drafted = (
        *common, "--spec-type", "draft-simple", "--spec-draft-model", str(weights.gguf["draft"]),
        "--spec-draft-threads", str(threads), "--spec-draft-threads-batch", str(threads),
        "--spec-draft-n-max",
    )  # fmt: skip
    yield Setting(LLAMA_CPP, "plain", common)
    for length in lengths:
        yield Setting(LLAMA_CPP, f"draft {length}", (*drafted, str(length)))


def list_vllm(
    python: Path, weights: Weights, lengths: Sequence[int], rows: int, threads: int
) -> Iterator[Setting]:
    common = (
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model",
        str(weights.folders["target"]), "--dtype", "bfloat16", "--max-model-len", str(MAX_TOKENS),
        "--max-num-seqs", str(rows), "--host", "127.0.0.1", "--disable-uvicorn-access-log",
    )  # fmt: skip
    environment = {**VLLM_ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    eager = environment | {"TORCHDYNAMO_DISABLE": "1"}
    yield Setting(VLLM, "plain, compiled", common, environment)
    yield Setting(VLLM, "plain, eager", (*common, "--enforce-eager"), eager)
    for length in lengths:
        drafting = {"method": "draft_model", "model": str(weights.folders["draft"]),
                    "num_speculative_tokens": length}  # fmt: skip
        words = (*common, "--enforce-eager", "--speculative-config", json.dumps(drafting))
        yield Setting(VLLM, f"draft {length}, eager", words, eager)


class Server(wire.Server):
    """A server in a process group of its own, which stands still while others are measured."""

    def __init__(self, setting: Setting, log: Path) -> None:
        """Start it and wait until it is ready; raise PeerError."""
        environment = os.environ if setting.server != OURS else make_environment()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            try:
                super().__init__(
                    setting.command, START_SECONDS, stdout=output, stderr=subprocess.STDOUT,
                    env={**environment, "HF_HUB_OFFLINE": "1", **setting.environment},
                    start_new_session=True,
                )  # fmt: skip
            except RuntimeError as error:
                raise PeerError(f"{error}: {read_last_line(log)}") from None

    @property
    def group(self) -> int:
        """The number of its process group."""
        return self.process.pid

    def stop(self) -> None:
        """Let it stand still."""
        os.killpg(self.group, signal.SIGSTOP)

    def go_on(self) -> None:
        os.killpg(self.group, signal.SIGCONT)

    def end(self) -> None:
        """End the process and all it has started."""
        for sent in (signal.SIGCONT, signal.SIGTERM):
            self._send(sent)
        try:
            self.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        self._send(signal.SIGKILL)
        self.process.wait()

    def _send(self, number: int) -> None:
        try:
            os.killpg(self.group, number)
        except ProcessLookupError:
            pass
