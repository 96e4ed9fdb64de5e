"""Our own engine: plain, with ReDrafter, with a draft model, or that and suffix decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import specdec
from benchmarks.drafters import list_lengths, list_searches, list_trees, put_suffix_before
from specdec.decode.drafters.base import Drafter
from specdec.decode.requests import Request, sum_stats
from specdec.decode.timing import Timing
from specdec.measure.engine import PHASES, open_bench
from specdec.run.settings import RunSettings

from ..ways import SearchShape, name_chain
from ..wire import Calls, describe_texts, serve


class Engine:
    """An engine folder, every setting of its drafter, and plain decoding on the same weights."""

    def __init__(
        self, engine_dir: str, draft_engine_dir: str | None, tokenizer_dir: str,
        beams: list[int], sizes: Sequence[int], max_length: int,
    ) -> None:  # fmt: skip
        is_draft_target = draft_engine_dir is not None
        settings = RunSettings(
            engine_dir=Path(engine_dir), tokenizer_dir=tokenizer_dir,
            draft_engine_dir=Path(draft_engine_dir) if draft_engine_dir else None,
            draft_len="auto" if is_draft_target else None, device="cpu",
            draft_budget=None if is_draft_target else "fixed",
        )  # fmt: skip
        self.bench = open_bench(settings)
        self._drafters: dict[tuple[str, ...], Drafter] = {("plain",): self.bench.plain}
        if is_draft_target:
            self._drafters["draft-target", "auto"] = self.bench.engine.drafter
            lengths, trees = list_lengths(self.bench, max_length), list_trees(self.bench, sizes)
            for candidate in (*lengths, *trees):
                name = str(candidate.numbers[0]) if candidate.numbers else candidate.name
                self._drafters["draft-target", name] = candidate.drafter
                chain = put_suffix_before(self.bench, candidate.drafter, max_length)
                self._drafters["chain", name_chain(candidate.name)] = chain
        else:
            for candidate in list_searches(self.bench, beams, max_length, sizes):
                shape = SearchShape(*candidate.numbers)
                self._drafters["redrafter", str(shape)] = candidate.drafter

    def get(self, way: str, setting: dict[str, Any]) -> Drafter:
        return self._drafters[(way, *(str(value) for value in setting.values()))]

    def run(
        self, way: str, setting: dict[str, Any], prompts: list[list[int]], max_output_len: int,
        end_id: int, batch_size: int = 1,
    ) -> dict[str, Any]:  # fmt: skip
        """Decode prompts, `batch_size` at once, with empty caches at the start."""
        drafter = self.get(way, setting)
        requests = [
            Request(
                index=index, input_ids=ids, max_output_len=max_output_len,
                end_ids=frozenset([end_id]),
            )
            for index, ids in enumerate(prompts)
        ]  # fmt: skip
        self.bench.engine.check_requests(requests)
        timing = Timing()
        began = time.perf_counter()
        results = self.bench.decode(requests, drafter, batch_size, timing)
        seconds = time.perf_counter() - began
        return describe_texts([result.output_ids for result in results], 0, seconds, end_id) | {
            "acceptance_length": sum_stats(results)["acceptance_length"],
            "step_ms": {
                part: 1000 * getattr(timing, part) / max(1, timing.num_steps) for part in PHASES
            },
        }


def start(
    engine_dir: str, draft_engine_dir: str | None, tokenizer_dir: str, beams: list[int],
    max_length: int, threads: int, sizes: Sequence[int] = (),
) -> tuple[dict[str, Any], Calls]:  # fmt: skip
    torch.set_num_threads(threads)
    engine = Engine(engine_dir, draft_engine_dir, tokenizer_dir, beams, sizes, max_length)
    about = {
        "load_seconds": engine.bench.engine.load_seconds,
        "versions": {"specdec": specdec.__version__, "torch": torch.__version__},
        "computes_in": " ".join(
            filter(None, (engine.bench.dtype, engine.bench.engine.describe()["quantization"]))
        ),
        "compiled_kernels": engine.bench.engine.decoder.kernels is not None,
    }
    return about, {"run": engine.run}


if __name__ == "__main__":
    serve(start)
