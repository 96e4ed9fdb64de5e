"""TensorRT-LLM backend: refuse requests that its runtime would change or ignore; run the others.

Everything is checked before the engine is loaded, which may take minutes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.command.settings import need
from specdec.decode.drafters.base import Drafter, check_room
from specdec.decode.drafters.pace import Pace
from specdec.decode.drafters.prompt_lookup import PromptLookupDrafter
from specdec.decode.loop import Interrupted, Options
from specdec.decode.requests import ActiveRequest, Request
from specdec.decode.timing import Timing
from specdec.errors import SpecDecError, UsageError
from specdec.methods.budget import read_budget
from specdec.methods.draft_target import DraftOptions, adapts_drafts
from specdec.methods.prompt_lookup import METHOD as PROMPT_LOOKUP
from specdec.methods.prompt_lookup import read_options as read_lookup_options
from specdec.system import logs
from specdec.text.vocabulary_check import ModelTokens, check_vocabularies
from specdec.trtllm.engine_folder import EXTERNAL, EngineFolder, read_engine_folder
from specdec.trtllm.run_checks import (
    check_devices,
    check_machine,
    check_requests,
    check_settings,
    find_engine_problems,
)
from specdec.trtllm.run_options import (
    choose_logits,
    make_method_options,
    make_shared_options,
    place_pair,
)
from specdec.trtllm.runner import TensorRTRunner, find_rank, import_runtime

from ..settings import RunSettings
from .base import OpenedEngine
from .tensorrt_call import Call, fill_results, group_requests
from .tensorrt_external import EngineDrafter, ExternalLoop, measure_costs

logger = logs.get_logger(__name__)


def follow_ranks(settings: RunSettings) -> bool:
    """Return whether other processes, the engine's ranks, have run it instead of this one."""
    from .tensorrt_ranks import run_ranks

    return run_ranks(settings, lambda: TensorRTLLMEngine(settings, None).load())


def open_engine(
    settings: RunSettings, options: DraftOptions | None, tokenizer: Any
) -> OpenedEngine:
    """Check an engine against the settings; it is loaded when the requests are known."""
    budget = read_budget(settings)
    if adapts_drafts(settings) or budget.flag.startswith("--draft-budget"):
        raise UsageError(
            f"{budget.flag} without --draft-engine-dir is for engines of torch; TensorRT-LLM"
            " drafts at every step",
            "leave it out",
        )
    engine = TensorRTLLMEngine(settings, options, tokenizer)
    return OpenedEngine(engine, engine, lambda _: engine.load())


class TensorRTLLMEngine:
    """Engine folder, perhaps with the folder of a draft model; loaded at first use."""

    name = "tensorrt-llm"
    counts_drafts = False

    def __init__(
        self, settings: RunSettings, options: DraftOptions | None, tokenizer: Any = None
    ) -> None:
        self.folder = read_engine_folder(settings.engine_dir)
        self.draft: EngineFolder | None = None
        if options is not None:
            self.draft = read_engine_folder(options.engine_dir)
            if options.has_own_tokens:
                raise UsageError(
                    "--draft-vocabulary shared is for engines of torch",
                    "leave it out: TensorRT-LLM's draft models have the target's tokens",
                )
            if options.tree_tokens is not None:
                raise UsageError(
                    "--draft-tree-tokens is for engines of torch",
                    "leave it out: TensorRT-LLM's draft models draft a chain",
                )
            check_vocabularies(
                _describe_tokens(self.folder), _describe_tokens(self.draft),
                tokenizer, options.tokenizer_dir,
            )  # fmt: skip
        self._settings, self._options, self._tokenizer = settings, options, tokenizer
        self._lookup = None if settings.no_speculation else read_lookup_options(settings)
        self._runner: TensorRTRunner | None = None
        self._drafter: Drafter | None = None
        self.timing = Timing()
        self.load_seconds = 0.0
        self.num_reused_tokens = None  # the runtime does not report them
        check_settings(settings, settings.kv_cache_free_gpu_memory_fraction)
        check_devices(self.folder, self.draft, options, self._lookup)
        problems = find_engine_problems(
            settings, options, self.folder, self.draft, has_lookup=self._lookup is not None
        )
        if settings.writes_logits and settings.streaming:
            problems.add(
                "--output-generation-logits with --streaming: TensorRT-LLM's stream has no whole"
                " rows of logits",
                "leave one of them out",
            )
        problems.raise_all()
        self._method_options = make_method_options(settings, self.folder)
        if self._lookup is not None:
            check_room(
                PROMPT_LOOKUP, self._lookup.num_tokens, self.folder.mode, self.folder.max_draft_len
            )
        check_machine(self.folder, self.draft, must_run=not settings.dry_run)

    @property
    def method(self) -> str:
        if self.draft is not None:
            return "draft_target"
        return "prompt_lookup" if self._lookup is not None else self.folder.method

    @property
    def tells_origins(self) -> bool:
        """Return whether each token's origin is known: where the runtime does not draft."""
        return self.folder.mode in (None, EXTERNAL)

    def describe(self) -> dict[str, Any]:
        """Return method, backend, device, dtype and tp_size, as statistics name them."""
        return {
            "method": self.method,
            "backend": self.name,
            "device": "cuda",
            "dtype": self.folder.dtype,
            "tp_size": self.folder.tp_size,
        }

    def describe_profile(self) -> dict[str, float | None]:
        """Return the seconds of each part of a step, None where the runtime has its own loop."""
        is_told = self.folder.mode == EXTERNAL
        seconds = self.timing.list_seconds()
        return {name: value if is_told else None for name, value in seconds.items()}

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Raise SpecDecError that lists every request which the engine cannot serve."""
        check_requests(requests, self.folder, self.draft)

    def load(self) -> None:
        """Load the engine, and the draft model's."""
        if self._runner is not None:
            return
        start = time.perf_counter()
        runtime = import_runtime()
        folder, draft, settings = self.folder, self.draft, self._settings
        shared_options = make_shared_options(settings.kv_cache_free_gpu_memory_fraction)
        rank, size = find_rank()
        placement: list[dict[str, Any]] = [{"rank": rank}, {"rank": rank}]
        if draft is None:
            if size != folder.world_size:
                raise SpecDecError(
                    f"MPI has {size} processes, the engine has {folder.world_size} ranks",
                    f"start it with mpirun -n {folder.world_size}, or without mpirun",
                )
            if self._lookup is not None and self._lookup.target_devices is not None:
                placement[0]["device_ids"] = list(self._lookup.target_devices)
        else:
            placement = place_pair(
                need(self._options), folder, draft, runtime,
                num_processes=size, fraction=settings.kv_cache_free_gpu_memory_fraction,
            )  # fmt: skip
        reuses = settings.kv_cache_enable_block_reuse or folder.mode == EXTERNAL
        uses_logits = self._options is not None and self._options.use_logits
        gathers = choose_logits(settings.writes_logits or uses_logits, runtime)
        self._runner = TensorRTRunner(
            folder,
            {
                **shared_options, **placement[0], **self._method_options, **gathers,
                "kv_cache_enable_block_reuse": reuses,
            },
        )  # fmt: skip
        if folder.mode == EXTERNAL:
            self._drafter = self._make_drafter(shared_options | placement[1] | gathers)
        self.load_seconds = time.perf_counter() - start

    def run(self, requests: Sequence[Request], **loop_options: Any) -> list[ActiveRequest]:
        """Decode all requests, requests of equal settings in one call.

        kept: fields of the loop's `Options`.
        """
        self.check_requests(requests)
        self.load()
        assert self._runner is not None
        limits = [self.folder.max_batch_size] + ([self.draft.max_batch_size] if self.draft else [])
        options = Options(max_batch_size=min(limits), tokenizer=self._tokenizer, **loop_options)
        results: dict[int, ActiveRequest] = {}
        groups = list(group_requests(requests, self.folder.mode == EXTERNAL, min(limits)))
        if len(groups) > 1:
            logger.info(
                "%d prompts in %d calls: one has room for %d, and takes one setting of sampling%s",
                len(requests), len(groups), min(limits),
                "" if self.folder.mode == EXTERNAL else " and length",
            )  # fmt: skip
        try:
            for indices in groups:
                group_results = self._run([requests[index] for index in indices], options)
                results |= zip(indices, group_results, strict=True)
        except Interrupted as interrupted:
            results |= zip(indices, interrupted.results, strict=True)
            raise Interrupted(fill_results(requests, results)) from None
        except KeyboardInterrupt as error:
            raise Interrupted(fill_results(requests, results)) from error
        return fill_results(requests, results)

    def _run(self, requests: Sequence[Request], options: Options) -> list[ActiveRequest]:
        assert self._runner is not None
        if self._drafter is not None:
            return ExternalLoop(self._runner, self._drafter, requests, options, self.timing).run()
        call = Call(self._runner, self.folder, requests, options)
        return call.stream() if options.follow_text else call.run()

    def _make_drafter(self, options: Mapping[str, Any]) -> Drafter:
        if self._lookup is not None:
            return PromptLookupDrafter(self._lookup)
        if self.draft is None:
            return Drafter()
        pair, max_draft_len = need(self._options), self.folder.max_draft_len
        runner = TensorRTRunner(self.draft, {**options, "kv_cache_enable_block_reuse": True})
        pace = None
        if pair.draft_len is None:
            assert self._runner is not None
            num_rows = min(self.folder.max_batch_size, self.draft.max_batch_size)
            costs = measure_costs(self._runner, runner, max_draft_len, num_rows)
            pace = Pace(max_draft_len, costs, is_planned=True)
        return EngineDrafter(
            runner,
            pair.draft_len or max_draft_len,
            pace,
            use_logits=pair.use_logits,
            target_vocab_size=self.folder.vocab_size,
        )


def _describe_tokens(engine: EngineFolder) -> ModelTokens:
    return ModelTokens(engine.folder, engine.vocab_size, engine.vocabulary)
