"""Engines made through the commands themselves, in process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from specdec.decode import loop
from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import Drafter
from specdec.decode.ranks import processes
from specdec.decode.requests import ActiveRequest, Request
from specdec.engine.step import States
from specdec.engine.tree import Tree, pack_beams
from specdec.engine.weight_files import make_metadata
from specdec.files.manifest import describe_file, list_block_sums
from specdec.files.reading import read_json, write_json
from specdec.files.tensor_file import TensorFile, TensorInfo, write_tensor_file
from specdec.files.torch_tensors import to_array
from tests.conftest import (
    change_tensors,
    make_dflash_drafter,
    make_eagle_drafter,
    make_llama,
    make_mtp_head,
)
from tests.forks import fork, run_main


def call(stage: str, *args: object) -> None:
    """Run a command in this process; errors come out as exceptions."""
    from specdec.command.stages import load_command

    load_command(stage).main([str(a) for a in args], standalone_mode=False)


def reset_accelerator() -> None:
    """Let a training in this process begin as in a new one, whatever trained here before.

    At its end no garbage is searched for in all that was imported: 0.1 s each, more in a copy of a
    process, whose memory is copied by that.
    """
    from accelerate.state import AcceleratorState
    from accelerate.utils import memory

    from specdec.train import hidden_states

    AcceleratorState._reset_state(reset_partial_state=True)
    for module in (memory, hidden_states):
        vars(module)["gc"] = SimpleNamespace(collect=lambda: 0)


def run_cli_here(
    *args: object, stdin: str = "", env: Mapping[str, str] | None = None, command: Any = None
) -> subprocess.CompletedProcess[str]:
    """What `run_cli` does, in this process: a command's status, stdout and stderr."""
    from specdec.command.stages import group, run_command

    words = [str(arg) for arg in args]
    if words[0] == "train":
        reset_accelerator()
    out, err, before, status = io.StringIO(), io.StringIO(), sys.stdin, 0
    sys.stdin = io.StringIO(stdin)
    try:
        with (
            mock.patch.dict(os.environ, env or {}), contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):  # fmt: skip
            run_command(command or group, words)
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        sys.stdin = before
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def call_here(stage: str, arguments: Sequence[object]) -> dict[str, Any]:
    """`specdec STAGE --json` in this process, which spares its start; `train data` is `data`."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        call(stage, *arguments, "--json")
    report: dict[str, Any] = json.loads(out.getvalue())
    return report


def run_here(arguments: Sequence[object]) -> dict[str, Any]:
    """`specdec run --json` in this process."""
    return call_here("run", arguments)


def start_cli(*args: object, pauses: bool = False) -> subprocess.Popen[str]:
    """Begin `specdec ARGS...` in a copy of this process; return it when it has taken twenty steps.

    pauses: it then waits for a line.
    """

    def work() -> None:
        processes.INTERRUPT_SECONDS = 0.5
        take_step, num_steps = loop.Batch.step, 0

        def count_steps(self: loop.Batch) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 20:
                print("at work", file=sys.stderr, flush=True)
                if pauses:
                    sys.stdin.readline()
            return take_step(self)

        loop.Batch.step = count_steps  # type: ignore[method-assign]
        run_main(*args)

    process = fork(work)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if line == "at work\n":
            return process
    raise AssertionError(f"ended before it was at work: {lines}")


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
        "convert", "--model-dir", target, f"--{method.replace('_', '-')}-model-dir", drafter,
        "--output-dir", checkpoint, *flags,
    )  # fmt: skip
    call(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", engine, "--optimize", optimize,
        "--speculative-decoding-mode", method, "--max-batch-size", 3,
    )  # fmt: skip
    return engine


def build_plain(engine: Path) -> Path:
    """Build an engine again whose weights are as the checkpoint has them; return its folder."""
    arguments = read_json(engine / "manifest.json")["build_arguments"]
    call("build", *arguments, "--packed-weights=disable", "--output-dir", engine, "--force")
    return engine


def save_weights(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Give a weight file of an engine other tensors, with all that a build writes about them."""
    build_id = TensorFile(path).metadata["build_id"]
    arrays = {name: to_array(tensor) for name, tensor in tensors.items()}
    infos = {
        name: TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    metadata = make_metadata(path.name, build_id, infos)
    # Not in its place: the tensors may be views of it.
    write_tensor_file(path.with_suffix(".new"), infos, lambda name: arrays[name], metadata)
    path.with_suffix(".new").replace(path)
    renew_sums(path.parent)


def renew_sums(folder: Path) -> None:
    """Write the sums of an engine's files anew, where a test has changed them on purpose."""
    document = read_json(folder / "manifest.json")
    document["outputs"] = [
        describe_file(folder / name) | {"path": name, "crc32": list(list_block_sums(folder / name))}
        for name in (entry["path"] for entry in document["outputs"])
        if (folder / name).exists()
    ]
    write_json(folder / "manifest.json", document)


def continue_by_transformers(
    target: Path, prompts: Sequence[Sequence[int]], limit: int, dtype: torch.dtype = torch.float32
) -> list[list[int]]:
    """The same by the model in a folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
    return continue_greedily(model, prompts, limit)


def list_requests(prompts: Iterable[Sequence[int]], limit: int) -> list[Request]:
    """Greedy requests of prompts, which no token ends."""
    return [
        Request(index=at, input_ids=list(prompt), max_output_len=limit, end_ids=frozenset())
        for at, prompt in enumerate(prompts)
    ]


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


def make_noisy_copy(source: Path, copy: Path, noise: float = 0.06) -> None:
    """A model that mostly agrees with another: some of its drafts are right, some wrong."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            weight += noise * weight.std() * drawn if weight.dim() > 1 else 0
    model.save_pretrained(copy)


def make_counter(parent: Path, size: int = 32) -> int:
    """Write a target that counts upwards into `parent`/counter; return its vocabulary's size.

    Its layers add nothing, its embedding of token n is a unit vector, of as many dimensions as
    there are tokens, and its head maps that to token n + 1.
    """
    folder = make_llama(parent, hidden=size, vocab=size, heads=2, kv_heads=2, name="counter")
    with change_tensors(folder) as tensors:
        silence(tensors)
        tensors["model.embed_tokens.weight"] = torch.eye(size)
        tensors["lm_head.weight"] = torch.eye(size).roll(1, 0).contiguous()
    return size


def silence(tensors: Mapping[str, torch.Tensor]) -> None:
    """Let layers add nothing to what they read, and norms have weights of one."""
    for name, weight in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif name.endswith("norm.weight") or ".pre_fc_norm_" in name:
            weight.fill_(1.0)


def make_knowing_drafter(
    parent: Path, kind: str, step: int = 1, noise: float = 0.0, size: int = 32
) -> Path:
    """A target that counts upwards, and an EAGLE drafter that knows it if `step` is 1.

    The drafter's next feature is that of its token (`embedding`), or follows
    from the feature before it (`feature`, and EAGLE-3's `layers` by its MLP): one place off in
    the pairing, and nothing would be accepted. noise: added to what it knows. A head for MTP
    knows it by `mtp-embedding` or `mtp-feature`.
    """
    from safetensors.torch import load_file, save_file

    make_counter(parent, size)
    if kind.startswith("mtp"):
        drafter = make_mtp_head(parent, parent / "counter")
        with change_tensors(drafter) as own:
            silence(own)
            known = own["mtp.fc.weight"] = torch.zeros(size, 2 * size)
            if kind == "mtp-feature":
                known[:, size:] = torch.eye(size).roll(step, 0)
            else:
                known[:, :size] = torch.eye(size)
        return drafter
    unit = torch.eye(size)
    following = unit.roll(1, 0).contiguous()  # maps n to n + 1
    sizes: dict[str, Any] = {
        "hidden": size, "vocab": size, "heads": 2, "kv_heads": 2, "own_embedding": False,
        "intermediate": size,
    }  # fmt: skip
    drafter = make_eagle_drafter(
        parent, version=3 if kind == "layers" else 1, aux_layers=(0, 1), **sizes
    )
    own = load_file(drafter / "model.safetensors")
    own["layers.0.self_attn.o_proj.weight"].zero_()
    own["layers.0.mlp.down_proj.weight"].zero_()
    next_one = unit.roll(step, 0).contiguous()
    nothing = torch.zeros(size, size)
    if kind == "layers":
        for name, weight in own.items():
            if name.endswith("norm.weight"):
                weight.fill_(1.0)
        own["fc.weight"] = torch.cat((unit, nothing), dim=1)
        own["layers.0.mlp.gate_proj.weight"] = own["layers.0.mlp.up_proj.weight"] = unit.clone()
        own["layers.0.mlp.gate_proj.weight"] = unit.clone()
        # The normed state of token n is sqrt(size) at n; what the MLP makes of it is taken back.
        root = torch.tensor(float(size)).sqrt()
        made = torch.nn.functional.silu(root) * root
        own["layers.0.mlp.down_proj.weight"] = (next_one - unit) / made
        own["lm_head.weight"] = following.clone()
    else:
        own["fc.bias"].zero_()
        parts = (unit * float(size) ** 0.5, nothing) if kind == "embedding" else (nothing, next_one)
        own["fc.weight"] = torch.cat(parts, dim=1)
    generator = torch.Generator().manual_seed(4)
    fc = own["fc.weight"]
    fc += noise * fc.std() * torch.randn(fc.shape, generator=generator)
    save_file(own, drafter / "model.safetensors")
    return drafter


def make_constant_pair(parent: Path, token: int | None = 7) -> Path:
    """A target that writes one token for ever, and a DFlash drafter that drafts what it would.

    token: None for a target that counts upwards, of which the same drafter knows nothing: its
    layers add nothing, so that the target's head reads the mask token's embedding.
    """
    size = make_counter(parent)
    folder = (parent / "counter").rename(parent / "target")
    if token is not None:
        with change_tensors(folder) as tensors:
            tensors["lm_head.weight"] = torch.zeros(size, size)
            tensors["lm_head.weight"][token] = 1.0
    drafter = make_dflash_drafter(
        parent, hidden=size, vocab=size, heads=2, target_layers=2, aux_layers=(0,)
    )
    with change_tensors(drafter) as own:
        for name, weight in own.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
    return drafter


class OracleDrafter(Drafter):
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
        states: States,
        paths: Sequence[Sequence[int]],
    ) -> None:
        assert len(states.hidden) == len(requests) == len(paths)
        self.observed_rows += len(requests)


def list_path_tokens(tree: Tree) -> set[tuple[int, ...]]:
    """The tokens of every path from the root to a leaf."""
    return {tuple(tree.tokens[path].tolist()) for path in list_paths(tree)}


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


def round_inputs(x: torch.Tensor, group: int) -> torch.Tensor:
    """What the kernels' products of integers read instead of x [..., depth], by groups of inputs.

    A group with an input that is not finite becomes NaN.
    """
    depth = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -depth % group))
    groups = padded.reshape(*x.shape[:-1], -1, group)
    largest = groups.abs().amax(-1, keepdim=True)
    is_small = largest < 1e-30
    factor = torch.full_like(largest, 127) / largest  # `127 / largest` multiplies by the inverse
    rounded = (groups * factor.masked_fill(is_small, 0)).round()
    scales = (largest / 127).masked_fill(is_small, 0)
    return (rounded * scales).reshape(padded.shape)[..., :depth]
