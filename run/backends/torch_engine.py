"""The torch backend: loads an engine folder, checks requests against its limits, runs the loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from specdec import logs
from specdec.engine.decoder import Decoder
from specdec.engine.layout import (
    WEIGHTS_NAME,
    EngineConfig,
    add_scales,
    check_inventory,
    list_engine_tensors,
    load_tensors,
    read_engine_config,
)
from specdec.engine.native import LIBRARY_NAME, NativeKernels, describe_cpu
from specdec.errors import SpecDecError, raise_problems
from specdec.methods import EXTERNAL_METHODS
from specdec.storage import TensorFile
from specdec.torch_tensors import TORCH_DTYPES

from ..draft_length import DraftLength
from ..loop import Options, Timing, generate
from ..methods import make_proposer
from ..methods.base import PlainProposer, Proposer
from ..methods.draft_target import DraftTargetProposer
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
        check_inventory(file, add_scales(shapes, file.tensors), "engine")
        names = shapes if speculate else list_engine_tensors(model, None)
        weights = load_tensors(file, list(names), self.device, TORCH_DTYPES[model.dtype])
        depth = drafter.max_draft_depth if drafter else build.max_draft_len
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
        self._draft: TorchEngine | None = None
        if checkpoint.method is not None and speculate:
            self.method = checkpoint.method.name
            self.proposer = make_proposer(checkpoint, weights, self.decoder)
        self.load_seconds = time.perf_counter() - began
        self.timing = Timing()

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Raise SpecDecError that lists every request beyond the engine's limits."""
        build, vocab_size = self.config.build, self.config.checkpoint.model.vocab_size
        max_seq_len, max_input_len = build.max_seq_len, build.max_input_len
        if self._draft is not None:
            max_seq_len = min(max_seq_len, self._draft.config.build.max_seq_len)
            max_input_len = min(max_input_len, self._draft.config.build.max_input_len)
        problems = []
        for request in requests:
            length, where = len(request.input_ids), f"prompt {request.index}"
            if length == 0:
                problems.append((f"{where} is empty", "give at least one token"))
            if length > max_input_len:
                problems.append(
                    (
                        f"{where} has {length} tokens, the engine's max_input_len is"
                        f" {max_input_len}",
                        "shorten it, or build with a larger --max-input-len",
                    )
                )
            elif length + request.max_output_len > max_seq_len:
                problems.append(
                    (
                        f"{where} has {length} tokens and asks for {request.max_output_len} more,"
                        f" the engine's max_seq_len is {max_seq_len}",
                        f"lower --max-output-len to {max_seq_len - length}, or build with a"
                        " larger --max-seq-len",
                    )
                )
            table, total = self.decoder.rotary, length + request.max_output_len
            if table is not None and (found := table.check_request(length, total)):
                problems.append((f"{where}: {found[0]}", found[1]))
            bad = [t for t in request.input_ids if not 0 <= t < vocab_size]
            if bad:
                problems.append(
                    (
                        f"{where} holds token {bad[0]}, the model's vocabulary has {vocab_size}",
                        "use the tokenizer that belongs to the model",
                    )
                )
        raise_problems(problems)

    def attach_draft(self, draft: TorchEngine, *, draft_len: int | None, use_logits: bool) -> None:
        """Let another engine draft for this one; raise SpecDecError where they do not match.

        draft_len: tokens a step; None adapts it, up to what the engine was built for.
        """
        own, theirs = self.config, draft.config
        longest = own.build.max_draft_len
        problems = []
        if own.build.speculative_decoding_mode != EXTERNAL_METHODS["draft_target"]:
            problems.append(
                (
                    f"the target's engine was built with speculative_decoding_mode"
                    f" {own.build.speculative_decoding_mode}",
                    "build it from a plain checkpoint with --speculative-decoding-mode"
                    " draft_tokens_external --max-draft-len N",
                )
            )
        elif draft_len is not None and draft_len > longest:
            problems.append(
                (
                    f"the draft length is {draft_len}, the target's engine was built with"
                    f" max_draft_len {longest}",
                    f"draft {longest} or fewer, or build with --max-draft-len {draft_len}",
                )
            )
        if theirs.build.speculative_decoding_mode is not None:
            problems.append(
                (
                    f"the draft engine was built with speculative_decoding_mode"
                    f" {theirs.build.speculative_decoding_mode}",
                    "give a plain engine as --draft-engine-dir",
                )
            )
        if theirs.build.max_seq_len < own.build.max_seq_len:
            logger.warning(
                "the draft engine's max_seq_len is %d, the target's %d: requests may use the less",
                theirs.build.max_seq_len, own.build.max_seq_len,
            )  # fmt: skip
        raise_problems(problems)
        self.method = "draft_target"
        self._draft = draft
        self.load_seconds += draft.load_seconds
        self.proposer = DraftTargetProposer(
            draft.decoder,
            DraftLength(draft_len or longest, is_auto=draft_len is None),
            use_logits=use_logits,
            target_vocab_size=self.config.checkpoint.model.vocab_size,
            max_num_tokens=theirs.build.max_num_tokens,
        )

    def generate(self, requests: Sequence[Request], options: Options | None = None) -> list[Result]:
        """Decode all requests, at most the engine's max_batch_size at once.

        The engine's own limits take the place of those in `options`.
        """
        self.check_requests(requests)
        build = self.config.build
        options = dataclasses.replace(
            options or Options(),
            max_num_tokens=build.max_num_tokens,
            max_batch_size=build.max_batch_size,
        )
        return generate(self.decoder, self.proposer, requests, options, self.timing)


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
