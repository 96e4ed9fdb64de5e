"""The torch backend: loads an engine folder, checks requests against its limits, runs the loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec import logs
from specdec.engine.decoder import Decoder
from specdec.engine.graphs import CudaRecorder, Graphs, Recorder, StepGraphs
from specdec.engine.layout import EngineConfig, find_engine_problems, read_engine_config
from specdec.engine.loading import load_embedding, load_weights
from specdec.errors import raise_problems
from specdec.methods import EXTERNAL_METHODS
from specdec.tensors import EMBEDDING

from ..draft_length import DraftLength
from ..leading import lead_decoder
from ..loop import Options, Timing, generate
from ..methods import make_proposer
from ..methods.base import PlainProposer, Proposer
from ..methods.draft_target import DraftTargetProposer
from ..ranks import open_ranks
from ..requests import Request, Result, find_problems
from .torch_rank import choose_device, is_packed, list_options

logger = logs.get_logger(__name__)


class TorchEngine:
    """An engine folder in memory, on one device or on one of every rank."""

    name = "torch"

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "auto",
        devices: Sequence[int] | None = None,
        speculate: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        """recorder: of graphs, for devices that have none of their own."""
        began = time.perf_counter()
        self.config: EngineConfig = read_engine_config(folder)
        raise_problems(find_engine_problems(folder, self.config))
        checkpoint = self.config.checkpoint
        model = checkpoint.model
        self.device = choose_device(device, model.tp_size, devices)
        ranks = open_ranks(model.tp_size)  # they start while this one loads
        options = list_options(self.config, folder, self.device)
        weights = load_weights(
            folder, self.config, self.device, drafts=speculate,
            is_packed=is_packed(self.config, options),
        )  # fmt: skip
        self.decoder = (
            Decoder(model, weights, **options)
            if ranks is None
            else lead_decoder(ranks, folder, model, weights, **options)
        )
        if recorder is None and self.device.type == "cuda" and self.config.prepack:
            recorder = CudaRecorder(self.device)
        self.graphs: Graphs | None = None
        if recorder is not None and ranks is None:  # what ranks exchange is not recorded
            self.graphs = Graphs(recorder)
            self.decoder.graphs = StepGraphs(self.graphs)
        self.method = "plain"
        self.proposer: Proposer = PlainProposer()
        self._draft: TorchEngine | None = None
        if checkpoint.method is not None and speculate:
            self.method = checkpoint.method.name
            if ranks is not None and model.use_parallel_embedding:
                # Drafters run on this rank alone.
                weights[EMBEDDING] = load_embedding(folder, self.config, self.device)
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
            problems += find_problems(
                request,
                max_input_len=max_input_len,
                max_seq_len=max_seq_len,
                vocab_size=vocab_size,
            )
            length = len(request.input_ids)
            table, total = self.decoder.rotary, length + request.max_output_len
            if table is not None and (found := table.check_request(length, total)):
                problems.append((f"prompt {request.index}: {found[0]}", found[1]))
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

    def use_method(self, name: str, proposer: Proposer) -> None:
        """Let a method that has no weights draft for this engine."""
        self.method, self.proposer = name, proposer

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
        num_known = self.graphs.num_recorded if self.graphs is not None else 0
        results = generate(self.decoder, self.proposer, requests, options, self.timing)
        if self.graphs is not None and self.graphs.num_recorded > num_known:
            logger.info("graphs: %s", self.graphs.describe())
        return results

    def describe(self) -> dict[str, Any]:
        """Return method, backend, device, dtype and tp_size, as statistics name them."""
        checkpoint = self.config.checkpoint
        model = checkpoint.model
        return {
            "method": self.method,
            "backend": self.name,
            "device": str(self.device),
            "dtype": model.dtype,
            "quantization": self.config.quantization or checkpoint.quantization.quant_algo,
            "tp_size": model.tp_size,
        }

    def describe_profile(self) -> dict[str, float | None]:
        """Return the seconds of each part of a step."""
        return {**self.timing.list_seconds()}

    def load(self) -> None:
        """Nothing: an engine of torch is loaded when it is made."""

    @property
    def num_reused_tokens(self) -> int:
        """Prompt tokens taken from the cache."""
        return self.timing.num_reused_tokens
