"""The torch backend: loads an engine folder, checks requests against its limits, runs the loop."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from specdec.decode.cost_keeping import describe_key, find_costs, find_kept_costs
from specdec.decode.cost_table import CostTable
from specdec.decode.drafters import (
    Drafting,
    Methods,
    choose_methods,
    make_drafter,
    name_methods,
    read_drafting,
    refuse_others,
    uses_drafter,
)
from specdec.decode.drafters.base import Drafter, EngineHandle
from specdec.decode.drafters.defaults import add_suffixes
from specdec.decode.loop import Options, generate
from specdec.decode.ranks.leader import LeadingDecoder, open_decoder
from specdec.decode.ranks.part import choose_device, is_packed, list_options
from specdec.decode.ranks.processes import open_ranks
from specdec.decode.requests import ActiveRequest, Request, find_problems
from specdec.decode.settings import DecodeSettings
from specdec.decode.timing import Timing
from specdec.engine.compiler import SOURCE, hash_source
from specdec.engine.decoder import Decoder
from specdec.engine.engine_kernels import prefer_cpu
from specdec.engine.graphs import CudaRecorder, Graphs, StepGraphs
from specdec.engine.layout import EngineConfig, count_positions, read_engine_config
from specdec.engine.loading import load_embedding, load_weights
from specdec.engine.native_matrices import Weight
from specdec.engine.verification import Verification
from specdec.engine.weight_files import find_engine_problems
from specdec.errors import Problems, SpecDecError, UsageError, join_names, shorten
from specdec.files.backends import BACKENDS, TENSORRT, read_backend
from specdec.files.engine_cache import EngineUse
from specdec.model.tensors import EMBEDDING
from specdec.system import logs
from specdec.system.memory import leave_out_objects

logger = logs.get_logger(__name__)
# New tokens, of all texts of a call together, for which a plain engine measures nothing by itself.
SHORT_TEXT = 64
MeasuringTime = Literal["first", "late", "never"]  # of what drafts cost


class TorchEngine:
    """An engine folder in memory, on one device or on one of every rank."""

    name = "torch"
    tells_origins = True
    counts_drafts = True
    drafter_network: Any = None  # that stands for a drafter's layers

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "auto",
        devices: Sequence[int] | None = None,
        speculate: bool = True,
        drafting: Drafting | None = None,
        measuring: MeasuringTime = "first",
        recorder: CudaRecorder | None = None,
    ) -> None:
        """Load an engine folder, start its other ranks, and make its drafter.

        speculate: False decodes one token per step. recorder: of graphs on devices without one.
        drafting: None lets the checkpoint's own drafter draft, if it has one. measuring: when the
        costs of drafts are measured: "first"; "late", which puts them off where only suffixes
        draft, and without being asked for, until the first texts of more than `SHORT_TEXT` tokens;
        "never", for a dry run. Nothing drafts until then.
        """
        start_seconds = time.perf_counter()
        self.folder = folder
        self._read_config()
        tp_size = self.config.checkpoint.model.tp_size
        self.device = choose_device(prefer_cpu(device, self.folder, self.config), tp_size, devices)
        self._use, self._verification = EngineUse(folder), Verification(folder)
        self._draft: EngineHandle | None = None
        self.graphs: Graphs | None = None
        self._make_later: Callable[..., Drafter] | None = None  # if measuring is put off
        self.load_seconds = 0.0
        self._ranks = open_ranks(tp_size)  # they start while this one loads
        if self._ranks is not None:
            self._ranks.join()
        try:
            if drafting is not None and speculate:
                drafting = add_suffixes(self.config, drafting, self.device.type)
            methods = choose_methods(self.config, drafting) if speculate else ()
            weights = self._load(folder, recorder, methods)
            self._make_drafts(methods, weights, drafting, measuring)
            self.method = name_methods(methods)
            if not self._verification.is_long:
                self.check_whole()
        except BaseException:
            self.close()
            raise
        leave_out_objects()
        self.load_seconds = time.perf_counter() - start_seconds
        self.timing = Timing()

    def _read_config(self) -> None:
        self.config: EngineConfig = read_engine_config(self.folder)
        find_engine_problems(self.folder, self.config).raise_all()

    def _load(
        self, folder: Path, recorder: CudaRecorder | None, methods: Methods
    ) -> dict[str, Weight]:
        """Load the target; return the weights that these methods draft with."""
        checkpoint = self.config.checkpoint
        model = checkpoint.model
        options = list_options(self.config, folder, self.device)
        weights = load_weights(
            folder, self.config, self.device, with_drafter=uses_drafter(methods),
            is_packed=is_packed(self.config, options), kernels=options["kernels"],
        )  # fmt: skip
        self.decoder = open_decoder(
            self._ranks, folder, self.device, (Decoder, LeadingDecoder),
            lambda decoder_class, **rank_options: decoder_class(
                model, weights, **options, **rank_options
            ),
        )  # fmt: skip
        if recorder is None and self.device.type == "cuda" and self.config.prepack:
            recorder = CudaRecorder(self.device)
        # Exchanges of ranks are not recorded, nor which experts a step chooses, nor what a step
        # does to the states of a hybrid; and a recorded cache has the same heads in all layers.
        kinds = (model.experts, model.recurrence, model.layer_sizes)
        is_recorded = all(kind is None for kind in kinds)
        if recorder is not None and self._ranks is None and is_recorded:
            self.graphs = Graphs(recorder)
            self.decoder.graphs = StepGraphs(self.graphs)
        if methods and self._ranks is not None and model.use_parallel_embedding:
            # Drafters run on this rank only.
            weights[EMBEDDING] = load_embedding(
                folder, self.config, self.device, options["kernels"]
            )
        return weights

    def _make_drafts(
        self, methods: Methods, weights: dict[str, Weight], drafting: Drafting | None,
        measuring: MeasuringTime,
    ) -> None:  # fmt: skip
        """Make the drafter, or one that drafts nothing until `begin_drafts`."""
        has_weights = uses_drafter(methods)
        is_default = drafting is not None and drafting.is_default and not has_weights
        if measuring == "first" or (measuring == "late" and not is_default):
            self.drafter: Drafter = make_drafter(self, methods, weights, drafting, self._find_costs)
            return
        drafter_weights = weights if has_weights else {}
        make = functools.partial(make_drafter, self, methods, drafter_weights, drafting)
        self.drafter = make(self._find_kept_costs)
        if self.drafter.pace is None:
            self._make_later = make

    def begin_drafts(self, requests: Sequence[Request]) -> bool:
        """Measure what drafts cost, if that was put off, for long texts and named methods.

        Returns whether the engine has a new drafter.
        """
        num_tokens = sum(request.max_output_len for request in requests if request.allows_drafts)
        is_asked = any(request.draft_method is not None for request in requests)
        if self._make_later is None or (num_tokens <= SHORT_TEXT and not is_asked):
            return False
        make, self._make_later = self._make_later, None
        logger.info("what drafts cost here is measured, once for this engine and this machine")
        start_seconds = time.perf_counter()
        self.drafter = make(self._find_costs)
        self.load_seconds += time.perf_counter() - start_seconds
        return True

    def _find_kept_costs(
        self, groups: Sequence[Sequence[Drafter]], drafting: Mapping[str, str]
    ) -> CostTable | None:
        return find_kept_costs(self.folder, self.config, self.decoder, groups, drafting)

    def _find_costs(
        self, groups: Sequence[Sequence[Drafter]], drafting: Mapping[str, str]
    ) -> CostTable:
        return find_costs(self.folder, self.config, self.decoder, groups, drafting)

    def check_whole(self) -> None:
        """Wait until the engine's files are compared; SpecDecError where one is damaged.

        A text is complete only after that.
        """
        self._verification.finish()

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Raise SpecDecError that lists every request beyond the engine's limits."""
        vocab_size = self.config.checkpoint.model.vocab_size
        problems = Problems()
        for request in requests:
            max_input_len, max_seq_len = self.find_limits(with_drafts=request.allows_drafts)
            engines = self._list_limiting(with_drafts=request.allows_drafts)
            problems += find_problems(
                request,
                max_input_len=max_input_len,
                max_seq_len=max_seq_len,
                vocab_size=vocab_size,
                max_positions=min(count_positions(e.config.checkpoint.model) for e in engines),
            )
            length = len(request.input_ids)
            rotary, total = self.decoder.rotary, length + request.max_output_len
            if rotary is not None and (fault := rotary.check_request(length, total)):
                problems.add(f"{request.name}: {fault[0]}", fault[1], "text")
            self._check_drafting(request, problems)
        problems.raise_all()

    def _check_drafting(self, request: Request, problems: Problems) -> None:
        """Note where a request asks for drafts that this engine does not make."""
        is_drafting = self.drafter.max_draft_tokens or self._make_later is not None
        names = self.method.split(",") if is_drafting else []
        if request.draft_method is not None and request.draft_method not in names:
            problems.add(
                f"{request.name} asks for drafts by {shorten(request.draft_method)}, and this"
                f" engine drafts by {join_names(names) if names else 'nothing'}",
                f"give one of {join_names(names)}" if names else "leave the method out",
                "speculation",
            )
        if request.max_draft_tokens is not None and self.drafter.is_indivisible:
            problems.add(
                f"{request.name} limits its drafts to {request.max_draft_tokens} tokens, and"
                f" {self.method} verifies a draft whole or not at all",
                "leave max_tokens of speculation out", "speculation",
            )  # fmt: skip

    def open_draft_engine(self, folder: Path, devices: Sequence[int] | None) -> EngineHandle:
        """Load the engine folder of a draft model, on the kind of device that this engine uses."""
        return open_engine(folder, device=self.device.type, devices=devices)

    def use_method(self, name: str, drafter: Drafter, draft: EngineHandle | None = None) -> None:
        """Let a method that has no weights in the checkpoint draft for this engine.

        draft: the engine that it drafts with, which is then this one's own: closed with it.
        """
        self.method, self.drafter, self._draft = name, drafter, draft
        if draft is not None:
            self.load_seconds += draft.load_seconds

    def generate(
        self, requests: Sequence[Request], options: Options | None = None
    ) -> list[ActiveRequest]:
        """Decode all requests, at most the engine's max_batch_size at once.

        The engine's own limits take the place of those in `options`.
        """
        self.check_requests(requests)
        if not self.begin_drafts(requests) and self._make_later is not None:
            logger.info(
                "nothing drafts for these short texts: what drafts cost here is measured before the"
                " first of more than %d tokens", SHORT_TEXT,
            )  # fmt: skip
        options = self.fill_options(options or Options())
        num_graphs = self.graphs.num_recorded if self.graphs is not None else 0
        try:
            results = generate(self.decoder, self.drafter, requests, options, self.timing)
        finally:
            self._keep()
        self.check_whole()
        if self.graphs is not None and self.graphs.num_recorded > num_graphs:
            logger.info("graphs: %s", self.graphs.describe())
        return results

    def close(self) -> None:
        """End the other ranks, unless another engine uses them, and those of the draft engine."""
        self._keep()
        self._use.close()
        self._verification.cancel()
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.leave()
        if self._draft is not None:
            self._draft.close()

    def _keep(self) -> None:
        if hasattr(self, "drafter"):  # else loading failed
            self.drafter.keep()

    def lower_limits(self, *, max_batch_size: int | None, max_seq_len: int | None) -> None:
        """Take fewer or shorter requests than the engine was built for; None leaves a limit."""
        limits = {"max_batch_size": max_batch_size, "max_seq_len": max_seq_len}
        new_limits: dict[str, Any] = {name: n for name, n in limits.items() if n is not None}
        build = self.config.build
        for name, value in new_limits.items():
            if type(value) is not int or not 1 <= value <= getattr(build, name):
                raise UsageError(
                    f"{name} is {value!r}, the engine was built for 1 to {getattr(build, name)}",
                    f"give a whole number up to {getattr(build, name)}, or build a larger engine",
                )
        self.config = dataclasses.replace(
            self.config, build=dataclasses.replace(build, **new_limits)
        )

    def fill_options(self, options: Options) -> Options:
        """Return the options with the engine's own limits instead of theirs."""
        build = self.config.build
        costs = self.drafter.pace.costs if self.drafter.pace is not None else None
        if costs is None and options.prompt_chunk == "auto":
            costs = self._find_costs((), {})
        return dataclasses.replace(
            options, max_num_tokens=build.max_num_tokens, max_batch_size=build.max_batch_size,
            costs=costs,
        )  # fmt: skip

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
        """Return the seconds of each phase of a step."""
        return {**self.timing.list_seconds()}

    @property
    def max_seq_len(self) -> int:
        """Tokens of a prompt and its output, by the shorter of the engine and its draft engine."""
        return self.find_limits(with_drafts=True)[1]

    def find_limits(self, *, with_drafts: bool) -> tuple[int, int]:
        """Return the most tokens of a prompt, and of prompt and output, with drafts or without."""
        builds = [engine.config.build for engine in self._list_limiting(with_drafts=with_drafts)]
        return min(b.max_input_len for b in builds), min(b.max_seq_len for b in builds)

    def _list_limiting(self, *, with_drafts: bool) -> list[EngineHandle]:
        """Return the engines that a request's tokens go through."""
        return [self, self._draft] if with_drafts and self._draft is not None else [self]

    @property
    def is_lost(self) -> bool:
        """Return whether another rank of this engine has ended."""
        return self._ranks is not None and self._ranks.is_ended

    def check_ranks(self) -> None:
        """Raise SpecDecError where another rank of this engine has ended."""
        if self._ranks is not None:
            with self._ranks.together():
                pass

    def describe_identity(self) -> dict[str, Any]:
        """Return all that keys and values depend on besides the text, as JSON has it.

        Raises SpecDecError where they are not all in this process.
        """
        if self.name != "torch" or self.config.checkpoint.model.tp_size != 1:
            raise SpecDecError(
                f"--session-dir: {self.folder} is an engine of backend {self.name} with"
                f" {self.config.checkpoint.model.tp_size} ranks; sessions are kept of the torch"
                " backend's engines of one rank",
                "leave --session-dir out, or build with --backend torch from a checkpoint of one"
                " rank",
            )
        key = describe_key(self.config, self.decoder, (), {})
        del key["max_batch_size"], key["format_version"]
        if self.decoder.kernels is not None:  # which give the same bits with any threads
            del key["threads"]
        forms = {"prepack": self.config.prepack, "fused": self.decoder.is_fused}
        return {**key, **forms, "source": hash_source(SOURCE), "num": self.config.num_positions}

    @property
    def num_sought_tokens(self) -> int:
        """Prompt tokens looked for in the cache."""
        return self.timing.num_sought_tokens

    @property
    def num_reused_tokens(self) -> int:
        """Prompt tokens taken from the cache."""
        return self.timing.num_reused_tokens


def load_engine(
    settings: DecodeSettings, tokenizer: Any, *, measuring: MeasuringTime = "first"
) -> TorchEngine:
    """Load an engine of torch, and the one that drafts for it.

    tokenizer: to compare with that of --draft-tokenizer-dir; None where there is none.
    measuring: as in `TorchEngine`.
    """
    drafting = read_drafting(settings, tokenizer)
    if settings.no_speculation:
        refuse_others(drafting, ())
    engine = open_engine(
        settings.engine_dir,
        device=settings.device,
        devices=drafting.target_devices,
        speculate=not settings.no_speculation,
        drafting=drafting,
        measuring=measuring,
    )
    # Memory that reading a tokenizer took and has freed is given back: 40 MB for 150,000 tokens.
    with contextlib.suppress(OSError, AttributeError, TypeError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)
    return engine


def open_engine(folder: Path, **options: Any) -> TorchEngine:
    """Load an engine of torch or of TensorRT; the options are those that both have."""
    backend = BACKENDS.get(read_backend(folder))
    if backend is None or backend.name != TENSORRT:  # which TorchEngine refuses by name
        return TorchEngine(folder, **options)
    engine: TorchEngine = backend.load("engine").open_engine(folder, **options)
    return engine
