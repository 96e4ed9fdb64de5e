"""Engine in this process, run with and without speculation on the same weights."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.decode.api import Engine
from specdec.decode.drafters.base import Drafter
from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Options, generate
from specdec.decode.requests import ActiveRequest, Request
from specdec.decode.settings import DecodeSettings
from specdec.decode.timing import Timing
from specdec.errors import SpecDecError

from .machine import LoadMeter, describe_load, describe_machine
from .prompts import BenchPrompt, group_requests

PHASES = ("draft", "verify", "accept", "other")  # phases of a step
Groups = Mapping[str, Sequence[Request]]  # requests by category


@dataclasses.dataclass
class BenchRun:
    """Result of decoding all requests once, category after category.

    seconds, results: by category.
    """

    seconds: dict[str, float]
    results: dict[str, list[ActiveRequest]]
    timing: Timing

    @property
    def texts(self) -> list[list[int]]:
        return [result.output_ids for results in self.results.values() for result in results]

    @property
    def rate(self) -> float:
        """Tokens per second, prompts included."""
        return sum(map(len, self.texts)) / sum(self.seconds.values())

    def take(self, category: str) -> BenchRun:
        """Return the results of one category, with the timing of all categories."""
        seconds = {category: self.seconds[category]}
        return BenchRun(seconds, {category: self.results[category]}, self.timing)


class Bench:
    """Engine with its tokenizer, and the prompts as requests."""

    def __init__(self, engine: TorchEngine, tokenizer: Any) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.plain = Drafter()
        self.groups: Groups = {}

    @property
    def dtype(self) -> str:
        return str(self.engine.config.checkpoint.model.dtype)

    @property
    def requests(self) -> list[Request]:
        """Requests of all categories."""
        return [request for group in self.groups.values() for request in group]

    def take_prompts(self, prompts: Sequence[BenchPrompt], settings: DecodeSettings) -> None:
        """Turn prompts into requests; raise SpecDecError where the engine has no room for them."""

        def answer(requests: Sequence[Request]) -> list[list[int]]:
            self.engine.check_requests(requests)
            results = self.decode(requests, self.plain, self.max_batch_size, Timing())
            return [result.output_ids for result in results]

        self.groups = group_requests(prompts, settings, self.tokenizer, answer)
        self.engine.check_requests(self.requests)

    @property
    def max_batch_size(self) -> int:
        return int(self.engine.config.build.max_batch_size)

    def check_batch_sizes(self, sizes: Sequence[int]) -> None:
        """Raise SpecDecError for a batch that the engine cannot hold or the prompts cannot fill."""
        min_prompts = min(len(group) for group in self.groups.values())
        for size in sizes:
            if size > self.max_batch_size:
                raise SpecDecError(
                    f"batch size {size}: the engine's max_batch_size is {self.max_batch_size}",
                    f"build it with --max-batch-size {size}, or measure smaller batches",
                )
            if size > min_prompts:
                raise SpecDecError(
                    f"batch size {size}: a category has {min_prompts} prompts, so that the batch"
                    " would never be full",
                    "give more prompts, or measure smaller batches",
                )

    def decode(
        self, requests: Sequence[Request], drafter: Drafter, batch_size: int, timing: Timing
    ) -> list[ActiveRequest]:
        """Decode requests with an empty cache: no earlier call helps."""
        options = Options(
            max_num_tokens=self.engine.config.build.max_num_tokens,
            max_batch_size=batch_size,
            tokenizer=self.tokenizer,
        )
        return generate(self.engine.decoder, drafter, requests, options, timing)

    def run(self, drafter: Drafter, batch_size: int, max_tokens: int | None = None) -> BenchRun:
        """Decode the requests of every category. max_tokens: the limit of each output."""
        run = BenchRun({}, {}, Timing(is_exact=True))
        for category, requests in self.groups.items():
            if max_tokens is not None:
                requests = [
                    dataclasses.replace(r, max_output_len=min(max_tokens, r.max_output_len))
                    for r in requests
                ]
            start = time.perf_counter()
            run.results[category] = self.decode(requests, drafter, batch_size, run.timing)
            run.seconds[category] = time.perf_counter() - start
        return run


@contextlib.contextmanager
def measure_engine(
    run_settings: DecodeSettings, prompts: Sequence[BenchPrompt], batch_sizes: Sequence[int]
) -> Iterator[tuple[Bench, dict[str, Any]]]:
    """Open an engine with its prompts and a report; at the end, add the report's head."""
    meter = LoadMeter()
    bench = open_bench(run_settings)
    bench.take_prompts(prompts, run_settings)
    bench.check_batch_sizes(batch_sizes)
    report: dict[str, Any] = {}
    yield bench, report
    used_processors = meter.measure()
    report |= {
        **describe_machine(),
        "processors_used_by_others": used_processors,
        "method": bench.engine.method,
        "device": str(bench.engine.device),
        "dtype": bench.dtype,
        "quantization": bench.engine.describe()["quantization"],
        "num_prompts": len(bench.requests),
        "max_output_len": run_settings.max_output_len,
        "warnings": describe_load(used_processors),
    }


def open_bench(settings: DecodeSettings) -> Bench:
    """Load an engine by specdec-run's settings; raise SpecDecError for one without drafts."""
    engine = Engine.open(settings)
    core, tokenizer = engine.core, engine.tokenizer
    if core.method == "plain":
        core.close()
        raise SpecDecError(
            f"{settings.engine_dir} is a plain engine, and nothing drafts for it here by itself:"
            " there is no speculation to measure",
            "give an engine with a drafter, --draft-engine-dir, or --suffix-max-tokens 15",
        )
    return Bench(core, tokenizer)
