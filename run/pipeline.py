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

from .draft_options import DraftOptions, read_draft_options
from .settings import RunSettings

if TYPE_CHECKING:
    from .backends.torch_engine import TorchEngine
    from .requests import ActiveRequest, Request, Result

logger = logs.get_logger(__name__)


def run_engine(settings: RunSettings, write: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Generate for every prompt; return the object that `--json` prints.

    `write` takes pieces of text as they become certain, with `--streaming`. After Ctrl-C, the
    object holds what was done, and the key `interrupted`.
    """
    check_flags(settings)
    draft_options = read_draft_options(settings)
    from .prompts import load_tokenizer, make_requests, read_prompts

    prompts = read_prompts(settings)
    tokenizer = load_tokenizer(settings.tokenizer_dir) if settings.tokenizer_dir else None
    requests = make_requests(prompts, settings, tokenizer)
    if settings.streaming and tokenizer is None:
        raise UsageError("--streaming needs --tokenizer-dir", "give the base model's folder")
    engine = load_engine(settings, draft_options, tokenizer)
    model = engine.config.checkpoint.model
    about = {
        "method": engine.method,
        "backend": engine.name,
        "device": str(engine.device),
        "dtype": model.dtype,
        "tp_size": model.tp_size,
    }
    if settings.dry_run:
        engine.check_requests(requests)
        longest = max(len(r.input_ids) for r in requests)
        return {"dry_run": True, **about, "num_prompts": len(requests), "longest": longest}
    logger.info("generating for %d prompts", len(requests))
    began = time.perf_counter()
    results, is_interrupted = generate(engine, requests, settings, tokenizer, write)
    seconds = time.perf_counter() - began
    report: dict[str, Any] = {
        "outputs": [describe_result(r, tokenizer) for r in results],
        "stats": {**about, **describe_stats(engine, results, seconds, settings)},
    }
    if settings.output_generation_logits:
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
    if settings.output_generation_logits and settings.output_file is None:
        raise UsageError(
            "--output-generation-logits needs a place to write them", "give --output-file"
        )


def load_engine(settings: RunSettings, options: DraftOptions | None, tokenizer: Any) -> TorchEngine:
    """Load the engine, and the one that drafts for it."""
    from .backends.torch_engine import TorchEngine

    assert settings.engine_dir is not None
    engine = TorchEngine(
        settings.engine_dir, device=settings.device, speculate=not settings.no_speculation
    )
    if settings.medusa_choices is not None:
        from .methods.medusa import MedusaProposer, parse_choices

        if not isinstance(engine.proposer, MedusaProposer):
            raise UsageError(
                f"--medusa-choices has no effect with an engine that runs {engine.method}",
                "leave it out",
            )
        engine.proposer.use_choices(parse_choices(settings.medusa_choices))
    if options is None:
        mode = engine.config.build.speculative_decoding_mode
        if mode == EXTERNAL_METHODS["draft_target"] and not settings.no_speculation:
            raise SpecDecError(
                f"{settings.engine_dir} was built for a draft model, and none is given",
                "give --draft-engine-dir, or --no-speculation to decode without",
            )
        return engine
    from .devices import check_devices
    from .vocabulary import check_vocabularies

    assert settings.draft_engine_dir is not None
    draft = TorchEngine(settings.draft_engine_dir, device=settings.device)
    check_devices(options, engine, draft)
    check_vocabularies(
        engine.config, draft.config, settings.engine_dir, settings.draft_engine_dir,
        tokenizer, settings.draft_tokenizer_dir,
    )  # fmt: skip
    engine.attach_draft(draft, draft_len=options.draft_len, use_logits=options.use_logits)
    return engine


def generate(
    engine: TorchEngine,
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
        keep_logits=settings.output_generation_logits,
    )
    try:
        if settings.streaming and write is not None:
            printer = StreamPrinter(write, requests)
            options = dataclasses.replace(options, follow_text=True, on_progress=printer.show)
            return engine.generate(requests, options), False
        with logs.track("prompts", total=len(requests)) as advance:

            def count_finished(active: Sequence[ActiveRequest]) -> None:
                advance(sum(r.finish_reason is not None for r in active))

            options = dataclasses.replace(options, on_progress=count_finished)
            return engine.generate(requests, options), False
    except Interrupted as interrupted:
        return interrupted.results, True


def describe_stats(
    engine: TorchEngine, results: Sequence[Result], seconds: float, settings: RunSettings
) -> dict[str, Any]:
    """The counts and times of `stats`."""
    from .requests import sum_stats

    totals = sum_stats(results)
    timing = engine.timing
    stats: dict[str, Any] = {
        **totals,
        "generate_seconds": round(seconds, 4),
        "tokens_per_second": round(totals["num_output_tokens"] / seconds, 2),
        "load_seconds": round(engine.load_seconds, 4),
    }
    if settings.kv_cache_enable_block_reuse:
        stats["num_reused_tokens"] = timing.num_reused_tokens
    if settings.run_profiling:
        stats["profile_seconds"] = {
            name: round(getattr(timing, name), 4)
            for name in ("prefill", "draft", "verify", "other")
        }
    return stats


def describe_result(result: Result, tokenizer: Any) -> dict[str, Any]:
    """One entry of `outputs`."""
    text = result.text
    if text is None:
        text = tokenizer.decode(result.output_ids, skip_special_tokens=True) if tokenizer else ""
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
