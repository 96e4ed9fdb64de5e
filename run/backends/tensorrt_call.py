"""Requests that TensorRT-LLM's runtime runs to their end by itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from specdec.decode.loop import Options
from specdec.decode.requests import PLAIN, ActiveRequest, Origin, Request, Result
from specdec.decode.sampling import SamplingParams
from specdec.decode.text import TextStream, decode_text
from specdec.errors import SpecDecError
from specdec.trtllm.engine_folder import EngineFolder

from .tensorrt_runner import NO_END, Output, TensorRTRunner

# What the runtime's own drafting does not tell of its steps.
UNTOLD = frozenset({"num_draft_tokens", "num_accepted", "acceptance_rate", "accepted_histogram"})
UNTOLD_STEPS = frozenset({"num_verify_steps", "acceptance_length"})


def group_requests(
    requests: Sequence[Request], is_external: bool, max_batch_size: int
) -> Iterator[list[int]]:
    """Yield the places of requests that one call can take.

    A call has one setting of sampling for all of its requests; one that runs them to their end
    has one length as well, and holds at most a batch.
    """

    def get_key(place: int) -> tuple[Any, ...]:
        request = requests[place]
        params = request.sampling
        sampling = () if params.is_greedy else dataclasses.astuple(params)
        return (sampling, sorted(request.end_ids), 0 if is_external else request.max_output_len)

    for _, places in itertools.groupby(sorted(range(len(requests)), key=get_key), key=get_key):
        group = list(places)
        if is_external:
            yield group
            continue
        for start in range(0, len(group), max_batch_size):
            yield group[start : start + max_batch_size]


class Call:
    """Requests of one setting, which the runtime runs to their end by itself."""

    def __init__(
        self,
        runner: TensorRTRunner,
        folder: EngineFolder,
        requests: Sequence[Request],
        options: Options,
    ) -> None:
        self._runner, self._folder, self._options = runner, folder, options
        self.active = []
        for row, request in enumerate(requests):
            follows_text = bool(request.stop) or options.follow_text
            text = TextStream(options.tokenizer, request.stop) if follows_text else None
            self.active.append(ActiveRequest(request, row, max_depth=0, text=text))
        self._end_id = min(requests[0].end_ids, default=NO_END)
        self._seen = [0] * len(requests)
        self._arguments: dict[str, Any] = {
            "max_new_tokens": requests[0].max_output_len,
            "sampling": requests[0].sampling,
            "seed": requests[0].sampling.seed,
            "end_id": self._end_id,
            "stop_ids": [self._list_stops(request) for request in requests],
        }
        self._texts = [request.input_ids for request in requests]

    def run(self) -> list[Result]:
        """Run to the end and return the results."""
        outputs = self._runner.generate(
            self._texts, keep_logits=self._options.keep_logits, **self._arguments
        )
        for row, output in enumerate(outputs):
            self._take(row, output.tokens)
        self._end(outputs)
        return [active.make_result() for active in self.active]

    def stream(self) -> list[Result]:
        """Report tokens as they come, then return the results."""
        tokens: list[list[int]] = [[] for _ in self.active]
        for tokens in self._runner.stream(self._texts, **self._arguments):
            moved = [
                active for row, active in enumerate(self.active) if self._take(row, tokens[row])
            ]
            if moved and self._options.on_progress is not None:
                self._options.on_progress(moved)
        iterations = self._runner.list_iterations(len(tokens))
        outputs = [Output(row, None, count) for row, count in zip(tokens, iterations, strict=True)]
        self._end(outputs)
        return [active.make_result() for active in self.active]

    def _list_stops(self, request: Request) -> list[list[int]]:
        """Token sequences at which the runtime may end early; what the text holds decides."""
        stops = [[token] for token in sorted(request.end_ids) if token != self._end_id]
        for word in request.stop:
            ids = self._options.tokenizer(word, add_special_tokens=False)["input_ids"]
            if ids and word in decode_text(self._options.tokenizer, ids):
                stops.append(ids)
        return stops

    def _take(self, row: int, tokens: Sequence[int]) -> bool:
        """Emit a row's tokens beyond those already seen; tell whether there were any."""
        active = self.active[row]
        new = tokens[self._seen[row] :]
        self._seen[row] = len(tokens)
        if active.finish_reason is not None or not new:
            return False
        active.emit(new, self._name_origins(len(new)))
        return True

    def _name_origins(self, count: int) -> list[Origin]:
        """Of a plain engine's tokens; the runtime does not tell which of others' were drafted."""
        return [PLAIN] * count if self._folder.mode is None else []

    def _end(self, outputs: Sequence[Output]) -> None:
        """Settle how each request ended, and what is known of its steps."""
        ended = []
        for active, output in zip(self.active, outputs, strict=True):
            if active.finish_reason is None:
                self._end_early(active, output)
                ended.append(active)
            if output.logits is not None:
                self._keep_logits(active, output)
            self._count_steps(active, output)
        reported = ended if self._options.follow_text else self.active
        if reported and self._options.on_progress is not None:
            self._options.on_progress(reported)

    def _end_early(self, active: ActiveRequest, output: Output) -> None:
        """The runtime stopped before the limit: at the end id, which it does not return."""
        stops = self._arguments["stop_ids"][active.row]
        if any(ids == output.tokens[len(output.tokens) - len(ids) :] for ids in stops if ids):
            active.finish_reason = "stop"
        elif self._end_id != NO_END:
            active.emit([self._end_id], self._name_origins(1))
        else:
            raise SpecDecError(
                f"TensorRT-LLM ended prompt {active.request.index} after {len(output.tokens)} of"
                f" {active.request.max_output_len} tokens, without an end token or a stop word",
                "the engine may be too small for it: build with a larger --max-seq-len",
            )

    def _keep_logits(self, active: ActiveRequest, output: Output) -> None:
        """Keep a row of logits for every token; where decoding is greedy, the token is the best."""
        assert output.logits is not None
        count = len(active.output_ids)
        logits = self._runner.widen(output.logits[:count])
        params: SamplingParams = active.request.sampling
        tops = logits.argmax(-1).tolist()
        is_right = len(logits) == count and (not params.is_greedy or tops == active.output_ids)
        if not is_right:
            raise SpecDecError(
                f"TensorRT-LLM's generation logits of prompt {active.request.index} do not belong"
                f" to its {count} tokens",
                "leave --output-generation-logits out for this engine",
            )
        active.logits.append(logits)

    def _count_steps(self, active: ActiveRequest, output: Output) -> None:
        """Record verify steps: of a plain engine one a token, else as the runtime counts them."""
        stats, num_tokens = active.stats, len(active.output_ids)
        if self._folder.mode is None:
            for _ in range(num_tokens - 1):
                stats.count_step(num_draft_tokens=0, depth=0, num_accepted=0)
            return
        stats.unknown = UNTOLD
        steps = None if output.num_iterations is None else output.num_iterations - 1
        longest = self._folder.max_draft_len + 1
        # Steps that emitted what was cut behind a stop word are counted too: then it is not known.
        is_cut = len(output.tokens) > num_tokens
        if steps is None or is_cut or not steps <= num_tokens - 1 <= steps * longest:
            stats.unknown |= UNTOLD_STEPS
        else:
            stats.num_verify_steps = steps
