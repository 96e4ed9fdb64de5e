"""Engine folders of the tensorrt backend whose networks the interpreter runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from specdec.decode import engine as loop_engine
from specdec.decode.engine import TorchEngine
from specdec.decode.ranks.follower import Follower
from specdec.decode.ranks.processes import Ranks
from specdec.decode.requests import Request
from specdec.decode.sampling import SamplingParams
from specdec.engine.group import Group
from specdec.trt import drafters, engine
from specdec.trt.engine import TensorRTEngine
from specdec.trt.library import find_package
from tests.engines import call
from tests.trt.interpreter import Interpreter

NEEDS_TENSORRT = pytest.mark.skipif(
    find_package() is None, reason="no TensorRT is installed: pip install '.[dev]'"
)


def build_here(checkpoint: Path, folder: Path, *flags: object) -> dict[str, Interpreter]:
    """Build, the engines' files left empty; return their networks by file name."""
    from specdec.build.backends import tensorrt

    found: dict[str, Interpreter] = {}

    def keep(trt: Any, plan: Any, checkpoint: Any, networks: Any, folder: Path) -> int:
        builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
        written = tensorrt.write_networks(trt, builder, plan, checkpoint, networks, folder)
        for name, writer in written:
            found[name] = Interpreter(trt, writer.network, writer.ranges)
            (folder / name).write_bytes(b"")
        return 0

    with mock.patch.object(tensorrt, "write_engines", keep):
        call(
            "build", "--checkpoint-dir", checkpoint, "--output-dir", folder, "--backend",
            "tensorrt", "--compute-capability", "8.9", *flags,
        )  # fmt: skip
    return found


def load_here(checkpoint: Path, folder: Path, *flags: object, **options: Any) -> TensorRTEngine:
    """`build_here`, and the engine that runs it; other ranks are threads."""
    with run_networks(build_here(checkpoint, folder, *flags)):
        return TensorRTEngine(folder, device="cpu", **options)


@contextlib.contextmanager
def run_networks(networks: Mapping[str, Interpreter]) -> Iterator[None]:
    """Let engines that are loaded meanwhile run these networks, by file name."""

    def open_network(path: Path, device: Any, group: Any = None) -> Interpreter:
        network = networks[path.name]
        network.meet = group and group.meet
        return network

    with (
        mock.patch.object(engine, "EngineRunner", open_network),
        mock.patch.object(drafters, "EngineRunner", open_network),
        mock.patch.object(engine, "check_machine"),
        mock.patch.object(loop_engine, "open_ranks", lambda n: ThreadRanks(n) if n > 1 else None),
    ):
        yield


class ThreadGroup(Group):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, parts: list[Tensor], barrier: threading.Barrier) -> None:
        super().__init__(rank, barrier.parties)
        self._parts, self._barrier = parts, barrier

    def meet(self, x: Tensor) -> list[Tensor]:
        """What all ranks have, in their order."""
        self._parts[self.rank] = x.clone()
        self._barrier.wait(60)
        parts = list(self._parts)
        self._barrier.wait(60)
        return parts

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat(self.meet(part), dim=-1)

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self.meet(x)[0])


class ThreadRanks(Ranks):
    """The product's own ranks 1 and up, each in a thread."""

    def _start(self) -> None:
        barrier, parts = threading.Barrier(self.size), [torch.empty(0)] * self.size
        groups = [ThreadGroup(rank, parts, barrier) for rank in range(self.size)]
        self.group = groups[0]

        def follow(group: Group) -> None:
            try:
                Follower(group).serve()
            except BaseException:
                barrier.abort()  # nobody waits for it
                raise

        for group in groups[1:]:
            threading.Thread(target=follow, args=(group,), daemon=True).start()

    def meet(self) -> None:
        """They are there."""

    def end(self, *, is_done: bool = False) -> None:
        if not self.is_ended:
            self.tell("end", {})
            self.is_ended = True


def make_requests(
    prompts: list[list[int]], limit: int, sampling: SamplingParams | None = None
) -> list[Request]:
    """Greedy requests, or others, without an end token."""
    return [
        Request(
            index=i,
            input_ids=prompt,
            max_output_len=limit,
            end_ids=frozenset(),
            sampling=sampling or SamplingParams(),
        )
        for i, prompt in enumerate(prompts)
    ]


def list_texts(engine: TorchEngine, requests: list[Request]) -> list[list[int]]:
    return [result.output_ids for result in engine.generate(requests)]
