"""The torch backend: loads an engine folder, checks requests against its limits, runs the loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from specdec import logs
from specdec.engine.decoder import Decoder
from specdec.engine.layout import (
    WEIGHTS_NAME,
    EngineConfig,
    check_inventory,
    list_engine_tensors,
    load_tensors,
    read_engine_config,
)
from specdec.engine.native import LIBRARY_NAME, NativeKernels, describe_cpu
from specdec.errors import SpecDecError, raise_problems
from specdec.storage import TensorFile
from specdec.torch_tensors import TORCH_DTYPES

from ..loop import Timing, generate
from ..methods import make_proposer
from ..methods.base import PlainProposer, Proposer
from ..requests import Request, Result

logger = logs.get_logger(__name__)


class TorchEngine:
    """An engine folder in memory, on one device."""

    name = "torch"

    def __init__(self, folder: Path, *, device: str = "auto", speculate: bool = True) -> None:
        began = time.perf_counter()
        self.config: EngineConfig = read_engine_config(folder)
        self.device = _choose_device(device)
        checkpoint, build = self.config.checkpoint, self.config.build
        model, drafter = checkpoint.model, checkpoint.drafter
        file = TensorFile(folder / WEIGHTS_NAME)
        shapes = list_engine_tensors(model, drafter)
        check_inventory(file, shapes, "engine")
        names = [n for n in shapes if speculate or not n.startswith("drafter.")]
        weights = load_tensors(file, names, self.device)
        depth = drafter.max_draft_depth if drafter else 0
        self.decoder = Decoder(
            model,
            weights,
            num_positions=build.max_seq_len + depth + 1,
            device=self.device,
            prepack=self.config.prepack,
            kernels=_load_kernels(self.config, folder, self.device),
        )
        self.method = "plain"
        self.proposer: Proposer = PlainProposer()
        if checkpoint.method is not None and speculate:
            self.method = checkpoint.method.name
            self.proposer = make_proposer(checkpoint, weights, self.decoder)
        self.load_seconds = time.perf_counter() - began
        self.timing = Timing()

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Raise SpecDecError that lists every request beyond the engine's limits."""
        build, vocab_size = self.config.build, self.config.checkpoint.model.vocab_size
        problems = []
        for request in requests:
            length, where = len(request.input_ids), f"prompt {request.index}"
            if length == 0:
                problems.append((f"{where} is empty", "give at least one token"))
            if length > build.max_input_len:
                problems.append(
                    (
                        f"{where} has {length} tokens, the engine's max_input_len is"
                        f" {build.max_input_len}",
                        "shorten it, or build with a larger --max-input-len",
                    )
                )
            elif length + request.max_output_len > build.max_seq_len:
                problems.append(
                    (
                        f"{where} has {length} tokens and asks for {request.max_output_len} more,"
                        f" the engine's max_seq_len is {build.max_seq_len}",
                        f"lower --max-output-len to {build.max_seq_len - length}, or build with a"
                        " larger --max-seq-len",
                    )
                )
            bad = [t for t in request.input_ids if not 0 <= t < vocab_size]
            if bad:
                problems.append(
                    (
                        f"{where} holds token {bad[0]}, the model's vocabulary has {vocab_size}",
                        "use the tokenizer that belongs to the model",
                    )
                )
        raise_problems(problems)

    def generate(self, requests: Sequence[Request]) -> list[Result]:
        """Decode all requests, in batches of at most the engine's max_batch_size."""
        self.check_requests(requests)
        build = self.config.build
        size = build.max_batch_size
        results: list[Result] = []
        starts = range(0, len(requests), size)
        for start in logs.show_progress(starts, label="batches", total=len(starts)):
            results += generate(
                self.decoder,
                self.proposer,
                requests[start : start + size],
                max_num_tokens=build.max_num_tokens,
                timing=self.timing,
            )
        return results


def _choose_device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise SpecDecError("--device cuda: torch sees no CUDA device", "use --device cpu or auto")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def _load_kernels(config: EngineConfig, folder: Path, device: torch.device) -> NativeKernels | None:
    if device.type != "cpu" or config.kernels is None:
        return None
    if config.kernels.get("cpu") != describe_cpu():
        logger.warning(
            "the engine's kernels were compiled for another CPU and are not used:"
            " build the engine again on this machine for full speed"
        )
        return None
    library = folder / LIBRARY_NAME
    if not library.is_file():
        raise SpecDecError(f"{library} is missing", "build the engine again")
    return NativeKernels(library, TORCH_DTYPES[config.checkpoint.model.dtype])
