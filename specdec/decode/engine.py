"""The torch backend: loads an engine folder, checks requests against its limits, runs the loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec import logs
from specdec.decode.drafters import Drafting, choose_method, make_proposer
from specdec.decode.drafters.base import Proposer
from specdec.decode.drafters.draft_target import DraftTargetProposer
from specdec.decode.drafters.pacing import DraftLength
from specdec.decode.loop import Options, Timing, generate
from specdec.decode.ranks.leader import lead_decoder
from specdec.decode.ranks.part import choose_device, is_packed, list_options
from specdec.decode.ranks.processes import open_ranks
from specdec.decode.requests import Request, Result, find_problems
from specdec.engine.decoder import Decoder
from specdec.engine.graphs import CudaRecorder, Graphs, Recorder, StepGraphs
from specdec.engine.layout import EngineConfig, find_engine_problems, read_engine_config
from specdec.engine.loading import load_embedding, load_weights
from specdec.errors import UsageError, raise_problems
from specdec.methods import METHODS
from specdec.model.tensors import EMBEDDING

logger = logs.get_logger(__name__)


class TorchEngine:
    """An engine folder in memory, on one device or on one of every rank."""

    name = "torch"
    tells_origins = True

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "auto",
        devices: Sequence[int] | None = None,
        speculate: bool = True,
        drafting: Drafting | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """speculate: False decodes one token a step. recorder: of graphs, for devices without any.

        drafting: None lets the checkpoint's own drafter draft, if it has one.
        """
        began = time.perf_counter()
        self.folder = folder
        self.config: EngineConfig = read_engine_config(folder)
        raise_problems(find_engine_problems(folder, self.config))
        model = self.config.checkpoint.model
        self.device = choose_device(device, model.tp_size, devices)
        self._draft: TorchEngine | None = None
        self.load_seconds = 0.0
        self._ranks = open_ranks(model.tp_size)  # they start while this one loads
        if self._ranks is not None:
            self._ranks.join()
        try:
            self._load(folder, recorder, drafting, speculate=speculate)
        except BaseException:
            self.close()
            raise
        self.load_seconds = time.perf_counter() - began
        self.timing = Timing()

    def _load(
        self, folder: Path, recorder: Recorder | None, drafting: Drafting | None, *, speculate: bool
    ) -> None:
        ranks, checkpoint = self._ranks, self.config.checkpoint
        model = checkpoint.model
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
        method = choose_method(self.config, drafting) if speculate else None
        self.method = method.name if method is not None else "plain"
        if method is not None and ranks is not None and model.use_parallel_embedding:
            # Drafters run on this rank alone.
            weights[EMBEDDING] = load_embedding(folder, self.config, self.device)
        self.proposer: Proposer = make_proposer(self, method, weights, drafting)

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Raise SpecDecError that lists every request beyond the engine's limits."""
        build, vocab_size = self.config.build, self.config.checkpoint.model.vocab_size
        max_seq_len, max_input_len = self.max_seq_len, build.max_input_len
        if self._draft is not None:
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

    def attach_draft(
        self, draft: TorchEngine, *, draft_len: int | None, use_logits: bool
    ) -> DraftTargetProposer:
        """Let another engine draft for this one; raise SpecDecError where they do not match.

        draft_len: tokens a step; None adapts it, up to what the engine was built for.
        """
        own, theirs = self.config, draft.config
        longest = own.build.max_draft_len
        problems = []
        if own.build.speculative_decoding_mode != METHODS["draft_target"].mode:
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
                "the draft engine's max_seq_len is %d, the target's %d: requests may use"
                " the smaller of the two",
                theirs.build.max_seq_len, own.build.max_seq_len,
            )  # fmt: skip
        raise_problems(problems)
        self.method = "draft_target"
        self._draft = draft
        self.load_seconds += draft.load_seconds
        proposer = DraftTargetProposer(
            draft.decoder,
            DraftLength(draft_len or longest, is_auto=draft_len is None),
            use_logits=use_logits,
            target_vocab_size=self.config.checkpoint.model.vocab_size,
            max_num_tokens=theirs.build.max_num_tokens,
        )
        self.proposer = proposer
        return proposer

    def use_method(self, name: str, proposer: Proposer) -> None:
        """Let a method that has no weights draft for this engine."""
        self.method, self.proposer = name, proposer

    def generate(self, requests: Sequence[Request], options: Options | None = None) -> list[Result]:
        """Decode all requests, at most the engine's max_batch_size at once.

        The engine's own limits take the place of those in `options`.
        """
        self.check_requests(requests)
        options = self.fill_options(options or Options())
        num_known = self.graphs.num_recorded if self.graphs is not None else 0
        results = generate(self.decoder, self.proposer, requests, options, self.timing)
        if self.graphs is not None and self.graphs.num_recorded > num_known:
            logger.info("graphs: %s", self.graphs.describe())
        return results

    def close(self) -> None:
        """End the other ranks, unless another engine uses them, and those of the draft engine."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.leave()
        if self._draft is not None:
            self._draft.close()

    def lower_limits(self, *, max_batch_size: int | None, max_seq_len: int | None) -> None:
        """Take fewer or shorter requests than the engine was built for; None leaves a limit."""
        given = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len}
        lower: dict[str, Any] = {name: n for name, n in given.items() if n is not None}
        build = self.config.build
        for name, value in lower.items():
            if not 1 <= value <= getattr(build, name):
                raise UsageError(
                    f"{name} is {value}, the engine was built for 1 to {getattr(build, name)}",
                    f"give a number up to {getattr(build, name)}, or build a larger engine",
                )
        self.config = dataclasses.replace(self.config, build=dataclasses.replace(build, **lower))

    def fill_options(self, options: Options) -> Options:
        """The options with the engine's own limits in place of theirs."""
        build = self.config.build
        return dataclasses.replace(
            options, max_num_tokens=build.max_num_tokens, max_batch_size=build.max_batch_size
        )

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
    def max_seq_len(self) -> int:
        """Tokens of a prompt and its output, by the shorter of the engine and its draft engine."""
        lengths = [self.config.build.max_seq_len]
        if self._draft is not None:
            lengths.append(self._draft.config.build.max_seq_len)
        return min(lengths)

    @property
    def num_reused_tokens(self) -> int:
        """Prompt tokens taken from the cache."""
        return self.timing.num_reused_tokens
