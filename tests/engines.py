"""Engines made through the commands themselves, in process."""

from __future__ import annotations

import contextlib
import io
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.engine.tree import Tree, pack_beams
from specdec.run.requests import ActiveRequest
from specdec.run.verify import Candidates


def call(stage: str, *args: object) -> None:
    """Run a command in this process; errors come out as exceptions."""
    import importlib

    command = importlib.import_module(f"specdec.{stage}.cli").command
    command.main([str(a) for a in args], standalone_mode=False)


def run_cli_here(*args: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """What `run_cli` does, in this process: a command's status, stdout and stderr."""
    from specdec.command import group, run_command

    words = [str(arg) for arg in args]
    out, err, before, status = io.StringIO(), io.StringIO(), sys.stdin, 0
    sys.stdin = io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run_command(group, words)
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        sys.stdin = before
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def run_here(arguments: Sequence[str]) -> dict[str, Any]:
    """`specdec run --json` in this process, which spares its start."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        call("run", "--json", *arguments)
    report: dict[str, Any] = json.loads(out.getvalue())
    return report


def make_engine(
    parent: Path,
    target: Path,
    drafter: Path | None = None,
    *,
    beams: int = 4,
    length: int = 5,
    optimize: str = "auto",
    dtype: str = "auto",
    convert: Sequence[object] = (),
    build: Sequence[object] = (),
) -> Path:
    """Convert and build; return the engine folder."""
    name = "".join(
        map(str, (f"b{beams}l{length}", optimize, dtype, "dp"[drafter is None], *convert))
    )
    checkpoint, engine = parent / f"ckpt-{name}", parent / f"engine-{name}"
    extra = list(convert)
    if drafter is not None:
        extra += [
            "--drafter-model-dir", drafter, "--redrafter-num-beams", beams,
            "--redrafter-draft-len-per-beam", length,
        ]  # fmt: skip
    call("convert", "--model-dir", target, "--output-dir", checkpoint, "--dtype", dtype, *extra)
    call(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", engine, "--optimize", optimize,
        *build,
    )  # fmt: skip
    return engine


def make_tree_engine(
    method: str,
    parent: Path,
    target: Path,
    drafter: Path,
    *,
    optimize: str = "auto",
    flags: Sequence[object] = (),
) -> Path:
    """Convert and build with Medusa heads or an EAGLE drafter; return the engine folder."""
    checkpoint, engine = parent / "checkpoint", parent / "engine"
    call(
        "convert", "--model-dir", target, f"--{method}-model-dir", drafter,
        "--output-dir", checkpoint, *flags,
    )  # fmt: skip
    call(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", engine, "--optimize", optimize,
        "--speculative-decoding-mode", method, "--max-batch-size", 3,
    )  # fmt: skip
    return engine


def continue_greedily(model: Any, prompts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
    """What transformers' `generate` continues each prompt with, alone and without an end token."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def make_noisy_copy(source: Path, copy: Path) -> None:
    """A model that mostly agrees with another: some of its drafts are right, some wrong."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(source)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight += 0.06 * weight.std() * noise if weight.dim() > 1 else 0
    model.save_pretrained(copy)


class OracleProposer:
    """Proposes from known continuations: `quality` of its tokens are right, the others wrong.

    Stands where a drafter stands, so that acceptance of any depth, beam and batch row occurs.
    """

    def __init__(
        self, continuations: list[list[int]], *, beams: int, length: int, quality: float, seed: int
    ) -> None:
        self.continuations = continuations
        self.beams, self.length, self.quality = beams, length, quality
        self.max_draft_tokens, self.max_draft_depth = beams * length, length
        self.random = random.Random(seed)
        self.observed_rows = 0

    def allocate(self, num_rows: int, num_positions: int) -> None:
        assert num_rows <= len(self.continuations)

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        pass

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        candidates = []
        for request in requests:
            known, output = self.continuations[request.request.index], request.output_ids
            beams = np.zeros((self.beams, self.length), np.int64)
            for beam in range(self.beams):
                for depth in range(self.length):
                    at = len(output) + depth
                    right = known[at] if at < len(known) else 3
                    good = self.random.random() < self.quality
                    beams[beam, depth] = right if good else (right + 1 + beam) % 100 + 3
            candidates.append(Candidates(pack_beams(output[-1], beams)))
        return candidates

    def observe(
        self,
        requests: Sequence[ActiveRequest],
        states: torch.Tensor,
        paths: Sequence[Sequence[int]],
    ) -> None:
        assert states.shape[0] == len(requests) == len(paths)
        self.observed_rows += len(requests)


def list_paths(tree: Tree) -> list[list[int]]:
    """Every root-to-leaf path as node numbers, root included."""
    inner = set(tree.parents.tolist())
    paths = []
    for leaf in range(tree.num_nodes):
        if leaf not in inner:
            path, node = [], leaf
            while node >= 0:
                path.append(node)
                node = int(tree.parents[node])
            paths.append(path[::-1])
    return paths
