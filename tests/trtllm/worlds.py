"""A machine that TensorRT-LLM seems to be installed on, with engines made by the commands."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.run.pipeline import run_engine
from specdec.run.settings import RunSettings
from tests.conftest import (
    ROOT,
    make_drafter,
    make_eagle_drafter,
    make_llama,
    make_medusa_heads,
    make_tokenizer,
)
from tests.engines import call, make_noisy_copy
from tests.trtllm.double import H100, install_double, write_script
from tests.trtllm.runtime_double import free_memory, install_runtime

MAX_INPUT, MAX_TOTAL, MAX_DRAFT, MAX_BATCH = 160, 200, 5, 3
BUILD = (
    "--max-batch-size", MAX_BATCH, "--max-input-len", MAX_INPUT, "--max-seq-len", MAX_TOTAL,
    "--max-num-tokens", 512,
)  # fmt: skip
PAGED = ("--use-paged-context-fmha", "enable")
EXTERNAL = (
    "--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", MAX_DRAFT, *PAGED,
)  # fmt: skip
EAGLE = ("--num-eagle-layers", 3, "--max-draft-len", 10, "--max-non-leaves-per-layer", 4)
LOOKAHEAD = ("--speculative-decoding-mode", "lookahead_decoding", "--max-draft-len", 11)
REDRAFTER = ("--redrafter-num-beams", 3, "--redrafter-draft-len-per-beam", 4)


class World:
    """Models, checkpoints and engines of one line, each made when it is first asked for."""

    def __init__(self, folder: Path, label: str, *, num_gpus: int = 4) -> None:
        self.make_models(folder, label)
        self.environment = install_double(folder / "double", label, gpus=[H100] * num_gpus)
        install_runtime(folder / "double", label)
        self.log = folder / "calls.jsonl"
        self.environment["SPECDEC_DOUBLE_LOG"] = str(self.log)

    def make_models(self, folder: Path, label: str) -> None:
        """Make what does not depend on the double."""
        self.folder, self.label = folder, label
        self.target = make_llama(folder, seed=3, name="target-hf")
        make_tokenizer(self.target)

    def checkpoint(self, name: str, *flags: object, source: Path | None = None) -> Path:
        """Convert the target, or another model, unless that is done."""
        folder = self.folder / f"{name}-ckpt"
        if not folder.exists():
            call(
                "convert", "--model-dir", source or self.target, "--output-dir", folder,
                "--trtllm-version", self.label, *flags,
            )  # fmt: skip
        return folder

    def redrafter(self, name: str = "redrafter", *flags: object) -> Path:
        drafter = self.folder / "drafter"
        if not drafter.exists():
            make_drafter(self.folder, exit_dim=96, scale=3.0)
        return self.checkpoint(name, "--drafter-model-dir", drafter, *REDRAFTER, *flags)

    def draft(self) -> Path:
        source = self.folder / "draft-hf"
        if not source.exists():
            make_noisy_copy(self.target, source)
            make_tokenizer(source)
        return self.checkpoint("draft", source=source)

    def medusa(self, name: str = "medusa", *flags: object) -> Path:
        heads = self.folder / "heads"
        if not heads.exists():
            make_medusa_heads(self.folder)
        return self.checkpoint(
            name, "--medusa-model-dir", heads, "--max-medusa-token-len", 6, *flags
        )

    def eagle(self, name: str = "eagle", *flags: object) -> Path:
        drafter = self.folder / "eagle"
        if not drafter.exists():
            make_eagle_drafter(self.folder)
        return self.checkpoint(name, "--eagle-model-dir", drafter, *EAGLE, *flags)

    def split(self, make: Callable[..., Path], name: str, tp_size: int) -> Path:
        """Make a checkpoint of several ranks, and alongside it the one whose tokens are its own."""
        whole = make(name)
        if tp_size == 1:
            return whole
        folder = make(f"{name}{tp_size}", "--tp-size", tp_size)
        beside = folder.with_name(f"{folder.name}-whole")
        if not beside.exists():
            beside.symlink_to(whole)
        return folder

    def build(self, name: str, checkpoint: Path, *flags: object, backend: str) -> Path:
        """Build an engine, unless that is done."""
        folder = self.folder / f"{name}-{backend}"
        if not folder.exists():
            call(
                "build", "--backend", backend, "--checkpoint-dir", checkpoint, "--output-dir",
                folder, *BUILD, *flags,
            )  # fmt: skip
        return folder

    def engine(self, name: str, checkpoint: Path, *flags: object) -> Path:
        return self.build(name, checkpoint, *flags, backend="tensorrt-llm")

    def torch_engine(self, name: str, checkpoint: Path, *flags: object) -> Path:
        return self.build(name, checkpoint, *flags, backend="torch")

    def run(
        self,
        engine: Path,
        requests: Sequence[dict[str, Any]],
        write: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> Any:
        """Run request lines with the engine; return the object that --json prints."""
        path = self.folder / "requests.jsonl"
        path.write_text("".join(json.dumps(request) + "\n" for request in requests))
        self.log.unlink(missing_ok=True)
        free_memory()
        options = {"tokenizer_dir": str(self.target), "end_id": 127} | settings
        return run_engine(RunSettings(engine_dir=engine, input_file=path, **options), write)

    def calls(self, name: str) -> list[dict[str, Any]]:
        """The calls of the runtime that the last run made."""
        if not self.log.exists():
            return []
        entries = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [entry for entry in entries if entry["call"] == name]


@dataclasses.dataclass(frozen=True)
class Way:
    """How an engine of a method is made: its checkpoint, and the flags of its build."""

    make: Callable[[World], Callable[..., Path]]
    flags: tuple[object, ...] = ()


WAYS = {
    "plain": Way(lambda world: world.checkpoint, PAGED),
    "redrafter": Way(lambda world: world.redrafter),
    "medusa": Way(lambda world: world.medusa),
    "eagle": Way(lambda world: world.eagle),
    "lookahead": Way(lambda world: world.checkpoint, LOOKAHEAD),
    "draft_target": Way(lambda world: world.checkpoint, EXTERNAL),
}


def make_checkpoint(world: World, method: str, tp_size: int = 1) -> Path:
    """Make what an engine of a method is built from."""
    name = method if method in ("redrafter", "medusa", "eagle") else "plain"
    return world.split(WAYS[method].make(world), name, tp_size)


def make_world(folder: Path, label: str) -> Iterator[World]:
    """Yield a world that this process sees; afterwards it is gone."""
    world = World(folder, label)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in world.environment.items():
            patch.setenv(name, value)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.syspath_prepend(str(folder / "double" / "site"))
        forget_runtime()
        yield world
        forget_runtime()


def forget_runtime() -> None:
    """Let the next import of TensorRT-LLM find another line's double."""
    for name in [n for n in sys.modules if n.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def make_prompts(*lengths: int, **keys: Any) -> list[dict[str, Any]]:
    """Request lines of random tokens that are no end tokens."""
    return [
        {"input_ids": [3 + (7 * at * at + 5 * n + at) % 120 for at in range(n)], **keys}
        for n in lengths
    ]


MPIRUN = """#!{python}
import os, sys
assert sys.argv[1] == "-n", sys.argv
assert sys.argv[4:6] == ["-m", "specdec"], sys.argv
sys.path.insert(0, {root!r})
from specdec.command import entry
size, ranks = int(sys.argv[2]), []
for rank in range(size):
    ranks.append(os.fork())
    if ranks[-1]:
        continue
    if rank:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE=str(size))
    sys.argv[1:] = sys.argv[6:]
    sys.exit(entry.main())
codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
if any(codes):
    print("mpirun detected that one or more processes exited with non-zero status", file=sys.stderr)
sys.exit(max(codes))
"""


def install_mpirun(world: World) -> None:
    """Write an mpirun that starts processes as Open MPI's does, and grumbles like it."""
    path = world.folder / "double" / "bin" / "mpirun"
    write_script(path, MPIRUN.format(python=sys.executable, root=str(ROOT)))


def list_texts(report: Any) -> list[Any]:
    """List each output's tokens in specdec-run's JSON, and why it ended."""
    return [(output["output_ids"], output["finish_reason"]) for output in report["outputs"]]
