"""Engine folder and prompts to outputs and statistics."""

from __future__ import annotations

import time
from typing import Any

from specdec import logs
from specdec.settings import require

from .requests import Result, sum_stats
from .settings import RunSettings

logger = logs.get_logger(__name__)


def run_engine(settings: RunSettings) -> dict[str, Any]:
    """Generate for every prompt; return the object that `--json` prints."""
    from .prompts import load_tokenizer, make_requests, read_prompts

    require(settings, "engine_dir")
    assert settings.engine_dir is not None
    prompts = read_prompts(settings)
    from .backends.torch_engine import TorchEngine

    engine = TorchEngine(
        settings.engine_dir, device=settings.device, speculate=not settings.no_speculation
    )
    tokenizer = load_tokenizer(settings.tokenizer_dir) if settings.tokenizer_dir else None
    requests = make_requests(prompts, settings, tokenizer)
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
    began = time.perf_counter()
    results = engine.generate(requests)
    seconds = time.perf_counter() - began
    totals = sum_stats(results)
    stats: dict[str, Any] = {
        **about,
        **totals,
        "generate_seconds": round(seconds, 4),
        "tokens_per_second": round(totals["num_output_tokens"] / seconds, 2),
        "load_seconds": round(engine.load_seconds, 4),
    }
    if settings.run_profiling:
        timing = engine.timing
        stats["profile_seconds"] = {
            name: round(getattr(timing, name), 4)
            for name in ("prefill", "draft", "verify", "other")
        }
    return {"outputs": [describe_result(r, tokenizer) for r in results], "stats": stats}


def describe_result(result: Result, tokenizer: Any) -> dict[str, Any]:
    """One entry of `outputs`."""
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
