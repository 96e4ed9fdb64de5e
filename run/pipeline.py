"""Engine folder and prompts to outputs and statistics."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import logs
from specdec.errors import SpecDecError, UsageError
from specdec.methods import EXTERNAL_METHODS
from specdec.settings import require
from specdec.trtllm.engine_folder import BACKEND as TENSORRT_LLM
from specdec.trtllm.engine_folder import read_backend

from .draft_options import DraftOptions, adapts_drafts, read_draft_options
from .ngram_options import (
    check_lookup,
    choose_lookahead,
    read_lookahead_config,
    read_lookup_options,
)
from .settings import EAGLE_OPTIONS, RunSettings

if TYPE_CHECKING:
    from .backends.base import Engine
    from .backends.torch_engine import TorchEngine
    from .requests import ActiveRequest, Request, Result

logger = logs.get_logger(__name__)


def run_engine(
    settings: RunSettings, write: Callable[[str], None] | None = None
) -> dict[str, Any] | None:
    """Generate for every prompt; return the object that `--json` prints.

    `write` takes pieces of text as they become certain, with `--streaming`. After Ctrl-C, the
    object holds what was done, and the key `interrupted`. None where the ranks of a TensorRT-LLM
    engine are other processes, the first of which has written everything, or is doing so.
    """
    check_flags(settings)
    assert settings.engine_dir is not None
    is_typical = settings.acceptance == "typical"
    is_tensorrt = read_backend(settings.engine_dir) == TENSORRT_LLM
    if is_tensorrt and is_typical:
        raise UsageError(
            "--acceptance typical is for engines of torch; TensorRT-LLM's accept by its own rules",
            "leave it out",
        )
    if is_tensorrt and not settings.dry_run:
        from .backends.tensorrt_ranks import run_ranks

        if run_ranks(settings):
            return None
    draft_options = read_draft_options(settings)
    from .prompts import load_tokenizer, make_requests, read_prompts

    prompts = read_prompts(settings)
    tokenizer = load_tokenizer(settings.tokenizer_dir) if settings.tokenizer_dir else None
    requests = make_requests(prompts, settings, tokenizer)
    if settings.streaming and tokenizer is None:
        raise UsageError("--streaming needs --tokenizer-dir", "give the base model's folder")
    engine = load_engine(settings, draft_options, tokenizer)
    about = engine.describe()
    engine.check_requests(requests)
    if is_typical:
        from .typical import check_typical

        uses_logits = draft_options is not None and draft_options.use_logits
        check_typical(about, requests, use_logits=uses_logits)
    if settings.dry_run:
        longest = max(len(r.input_ids) for r in requests)
        return {"dry_run": True, **about, "num_prompts": len(requests), "longest": longest}
    engine.load()
    logger.info("generating for %d prompt%s", len(requests), "" if len(requests) == 1 else "s")
    began = time.perf_counter()
    results, is_interrupted = generate(engine, requests, settings, tokenizer, write)
    seconds = time.perf_counter() - began
    report: dict[str, Any] = {
        "outputs": [describe_result(r, tokenizer) for r in results],
        "stats": {**about, **describe_stats(engine, results, seconds, settings)},
    }
    if settings.writes_logits:
        write_logits(settings, results, report)
    if is_interrupted:
        report["interrupted"] = True
    return report


def check_flags(settings: RunSettings) -> None:
    """Raise UsageError for flags that are missing, contradict one another, or have no effect."""
    require(settings, "engine_dir")
    if settings.use_py_session:
        raise UsageError(
            "--use-py-session: TensorRT-LLM's Python session cannot run speculative engines",
            "leave it out; specdec-run uses the C++ session",
        )
    if settings.num_beams > 1:
        raise UsageError(
            f"--num-beams is {settings.num_beams}: speculative decoding has no beam search over"
            " the output",
            "leave it out; ReDrafter's own beams are chosen by specdec-convert",
        )
    if settings.streaming and settings.json:
        raise UsageError(
            "--streaming and --json: one JSON object cannot come in pieces", "leave one of them out"
        )
    read_lookup_options(settings)
    read_lookahead_config(settings)
    if settings.output_generation_logits and not settings.writes_logits:
        draft_options = read_draft_options(settings)
        if draft_options is None or not draft_options.use_logits:
            raise UsageError(
                "--output-generation-logits needs a place to write them", "give --output-file"
            )
        # So does TensorRT-LLM's page of draft-target ask for acceptance by logits.
        logger.info("logits decide what is accepted, and are not written: give --output-file")


def load_engine(settings: RunSettings, options: DraftOptions | None, tokenizer: Any) -> Engine:
    """Return what executes the engine folder, and the one that drafts for it."""
    assert settings.engine_dir is not None
    if read_backend(settings.engine_dir) == TENSORRT_LLM:
        from .backends.tensorrt_llm import TensorRTEngine

        if adapts_drafts(settings):
            raise UsageError(
                "--draft-len auto without --draft-engine-dir is for engines of torch; TensorRT-LLM"
                " drafts at every step",
                "leave it out",
            )
        return TensorRTEngine(settings, options, tokenizer)
    return load_torch_engine(settings, options, tokenizer)


def load_torch_engine(
    settings: RunSettings, options: DraftOptions | None, tokenizer: Any
) -> TorchEngine:
    """Load an engine of torch, and the one that drafts for it."""
    from .backends.torch_engine import TorchEngine

    assert settings.engine_dir is not None
    if settings.kv_cache_free_gpu_memory_fraction is not None:
        raise UsageError(
            "--kv-cache-free-gpu-memory-fraction has no effect with an engine of torch, whose"
            " cache is as large as the requests need",
            "leave it out",
        )
    lookup = read_lookup_options(settings)
    devices = options.target_devices if options else lookup.devices if lookup else None
    engine = TorchEngine(
        settings.engine_dir,
        device=settings.device,
        devices=devices,
        speculate=not settings.no_speculation,
    )
    if settings.medusa_choices is not None:
        from .methods.medusa import MedusaProposer, parse_choices

        if not isinstance(engine.proposer, MedusaProposer):
            raise UsageError(
                f"--medusa-choices has no effect with an engine that runs {engine.method}",
                "leave it out",
            )
        engine.proposer.use_choices(parse_choices(settings.medusa_choices))
    choose_eagle_tree(engine, settings)
    attach_ngrams(engine, settings)
    if options is None:
        mode = engine.config.build.speculative_decoding_mode
        is_plain = engine.method == "plain" and not settings.no_speculation
        if is_plain and mode == EXTERNAL_METHODS["draft_target"]:
            raise SpecDecError(
                f"{settings.engine_dir} was built for a draft model, and none is given",
                "give --draft-engine-dir, --prompt-lookup-num-tokens to draft from the text itself,"
                " or --no-speculation to decode without",
            )
        if adapts_drafts(settings):
            adapt_drafts(engine, settings)
        return engine
    from .devices import check_devices
    from .vocabulary import ModelTokens, check_vocabularies

    assert settings.draft_engine_dir is not None
    draft = TorchEngine(
        settings.draft_engine_dir, device=settings.device, devices=options.draft_devices
    )
    check_devices("draft", options.draft_devices, draft)
    check_devices("target", options.target_devices, engine)
    pairs = ((settings.engine_dir, engine.config), (settings.draft_engine_dir, draft.config))
    target_tokens, draft_tokens = (
        ModelTokens(folder, config.checkpoint.model.vocab_size, config.vocabulary)
        for folder, config in pairs
    )
    check_vocabularies(target_tokens, draft_tokens, tokenizer, settings.draft_tokenizer_dir)
    engine.attach_draft(draft, draft_len=options.draft_len, use_logits=options.use_logits)
    return engine


def choose_eagle_tree(engine: TorchEngine, settings: RunSettings) -> None:
    """Let an EAGLE engine propose the trees that are asked for."""
    given = [name for name in EAGLE_OPTIONS if getattr(settings, name) not in (None, False)]
    if not given:
        return
    from .methods.eagle import EagleProposer, parse_choices

    flags = ["--" + name.replace("_", "-") for name in given]
    proposer = engine.proposer
    if not isinstance(proposer, EagleProposer):
        raise UsageError(
            f"{flags[0]} has no effect with an engine that runs {engine.method}", "leave it out"
        )
    if settings.eagle_choices is None:
        proposer.use_dynamic_tree(settings.eagle_dynamic_tree_max_top_k, settings.eagle_tree_tokens)
    elif len(given) > 1:
        raise UsageError(
            f"{flags[0]} gives a static tree, {flags[1]} a dynamic one", "leave one of them out"
        )
    else:
        proposer.use_choices(parse_choices(settings.eagle_choices))


def adapt_drafts(engine: TorchEngine, settings: RunSettings) -> None:
    """Let an engine's method draft only while that pays."""
    from .adaptive import adapt

    if settings.no_speculation or engine.method in ("plain", "lookahead"):
        method = "--no-speculation" if settings.no_speculation else f"{engine.method} decoding"
        raise UsageError(
            f"--draft-len auto has no effect with {method}",
            "leave it out; it is for draft models, ReDrafter, Medusa, EAGLE and prompt lookup",
        )
    engine.proposer = adapt(engine.proposer)


def attach_ngrams(engine: TorchEngine, settings: RunSettings) -> None:
    """Let n-grams draft for an engine that was built for them, or for any external draft."""
    if settings.no_speculation:
        return
    build = engine.config.build
    mode, max_draft_len = build.speculative_decoding_mode, build.max_draft_len
    lookup = read_lookup_options(settings)
    if lookup is not None:
        from .devices import check_devices
        from .methods.prompt_lookup import PromptLookupProposer

        check_lookup(lookup, mode, max_draft_len)
        check_devices("target", lookup.devices, engine)
        engine.use_method("prompt_lookup", PromptLookupProposer(lookup))
    window = choose_lookahead(read_lookahead_config(settings), mode, max_draft_len)
    if window is not None:
        from .methods.lookahead import LookaheadProposer

        engine.use_method("lookahead", LookaheadProposer(window, engine.decoder))


def generate(
    engine: Engine,
    requests: Sequence[Request],
    settings: RunSettings,
    tokenizer: Any,
    write: Callable[[str], None] | None,
) -> tuple[list[Result], bool]:
    """Return the results, and whether Ctrl-C came before they were complete."""
    from .loop import Interrupted, Options
    from .streaming import StreamPrinter

    options = Options(
        tokenizer=tokenizer,
        reuse_blocks=settings.kv_cache_enable_block_reuse,
        keep_logits=settings.writes_logits,
    )
    try:
        if settings.streaming and write is not None:
            printer = StreamPrinter(write, requests)
            options = dataclasses.replace(options, follow_text=True, on_progress=printer.show)
            try:
                return engine.generate(requests, options), False
            except Interrupted:
                printer.close()
                raise
        with logs.track("prompts", total=len(requests)) as advance:

            def count_finished(active: Sequence[ActiveRequest]) -> None:
                advance(sum(r.finish_reason is not None for r in active))

            options = dataclasses.replace(options, on_progress=count_finished)
            return engine.generate(requests, options), False
    except Interrupted as interrupted:
        return interrupted.results, True


def describe_stats(
    engine: Engine, results: Sequence[Result], seconds: float, settings: RunSettings
) -> dict[str, Any]:
    """The counts and times of `stats`."""
    from .requests import sum_stats

    totals = sum_stats(results)
    num_tokens = sum(result.stats.num_output_tokens for result in results)
    if untold := sorted(key for key, value in totals.items() if value is None):
        logger.info("the runtime does not tell %s: null in the statistics", ", ".join(untold))
    stats: dict[str, Any] = {
        **totals,
        "generate_seconds": round(seconds, 4),
        "tokens_per_second": round(num_tokens / seconds, 2),
        "load_seconds": round(engine.load_seconds, 4),
        "acceptance": settings.acceptance,
        "lossy": settings.acceptance != "exact",
    }
    if settings.kv_cache_enable_block_reuse:
        stats["num_reused_tokens"] = engine.num_reused_tokens
    if settings.run_profiling:
        stats["profile_seconds"] = {
            name: None if value is None else round(value, 4)
            for name, value in engine.describe_profile().items()
        }
    return stats


def describe_result(result: Result, tokenizer: Any) -> dict[str, Any]:
    """One entry of `outputs`."""
    from .text import decode_text

    text = result.text
    if text is None:
        text = decode_text(tokenizer, result.output_ids) if tokenizer else ""
    return {
        "index": result.request.index,
        "input_text": result.request.input_text,
        "input_ids": result.request.input_ids,
        "output_ids": result.output_ids,
        "output_text": text,
        "finish_reason": result.finish_reason,
        "stats": result.stats.to_json(),
    }


def write_logits(settings: RunSettings, results: Sequence[Result], report: dict[str, Any]) -> None:
    """Write each output's logits [tokens, V] in float32, and name the file in the report."""
    from specdec.storage import TensorInfo, write_tensor_file
    from specdec.torch_tensors import to_array

    assert settings.output_file is not None
    path = settings.output_file.with_suffix(".logits.safetensors")
    tensors = {
        f"output.{r.request.index}": to_array(r.logits) for r in results if r.logits is not None
    }
    infos = {name: TensorInfo("float32", array.shape) for name, array in tensors.items()}
    partial = Path(f"{path}.partial")
    try:
        write_tensor_file(partial, infos, lambda name: tensors[name])
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    report["generation_logits"] = str(path)
    logger.info("logits are in %s", path)
