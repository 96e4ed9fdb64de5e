"""Requests that TensorRT-LLM's runtime runs to their end by itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.decode.loop import Options
from specdec.decode.requests import ActiveRequest, Request
from specdec.decode.sampling import SamplingParams
from specdec.errors import SpecDecError
from specdec.trtllm.engine_folder import EngineFolder
from specdec.trtllm.followed import Followed
from specdec.trtllm.runner import RowOutput, TensorRTRunner


def group_requests(
    requests: Sequence[Request], is_external: bool, max_batch_size: int
) -> Iterator[list[int]]:
    """Yield the indices of requests that one call can take.

    A call has one setting of sampling for all of its requests; one that runs them to their end
    has one length as well, and holds at most a batch.
    """

    def get_key(index: int) -> tuple[Any, ...]:
        request = requests[index]
        params = request.sampling
        sampling = () if params.is_greedy else dataclasses.astuple(params)
        return (sampling, sorted(request.end_ids), 0 if is_external else request.max_output_len)

    for _, indices in itertools.groupby(sorted(range(len(requests)), key=get_key), key=get_key):
        group = list(indices)
        if is_external:
            yield group
            continue
        for start in range(0, len(group), max_batch_size):
            yield group[start : start + max_batch_size]


def fill_results(
    requests: Sequence[Request], results: Mapping[int, ActiveRequest]
) -> list[ActiveRequest]:
    """Return results in the order of the requests; those that never ran have no tokens."""
    return [
        results[index]
        if index in results
        else ActiveRequest(request, 0, max_depth=0, text_stream=None)
        for index, request in enumerate(requests)
    ]


class Call:
    """Batch of requests of one setting, which the runtime runs to their end by itself."""

    def __init__(
        self,
        runner: TensorRTRunner,
        folder: EngineFolder,
        requests: Sequence[Request],
        options: Options,
    ) -> None:
        self._runner, self._options = runner, options
        self._followers = [
            Followed(request, row, folder, options.tokenizer, follows_text=options.follow_text)
            for row, request in enumerate(requests)
        ]
        self._arguments: dict[str, Any] = {
            "max_new_tokens": requests[0].max_output_len,
            "sampling": requests[0].sampling,
            "seed": requests[0].sampling.seed,
            "end_id": self._followers[0].end_id,
            "stop_ids": [follower.stop_ids for follower in self._followers],
        }
        self._texts = [request.input_ids for request in requests]

    def run(self) -> list[ActiveRequest]:
        """Run to the end and return the results."""
        outputs = self._runner.generate(
            self._texts, keep_logits=self._options.keep_logits, **self._arguments
        )
        for follower, output in zip(self._followers, outputs, strict=True):
            follower.take(output.tokens)
        return self._end(outputs)

    def stream(self) -> list[ActiveRequest]:
        """Report tokens as they come, then return the results."""
        tokens: list[list[int]] = [[] for _ in self._followers]
        for tokens in self._runner.stream(self._texts, **self._arguments):
            moved = [
                follower.active
                for follower, row in zip(self._followers, tokens, strict=True)
                if follower.take(row)
            ]
            if moved and self._options.on_progress is not None:
                self._options.on_progress(moved)
        iterations = self._runner.list_iterations(len(tokens))
        outputs = [
            RowOutput(row, None, count) for row, count in zip(tokens, iterations, strict=True)
        ]
        return self._end(outputs)

    def _end(self, outputs: Sequence[RowOutput]) -> list[ActiveRequest]:
        """Settle how each request ended, and what is known of its steps."""
        ended_requests = []
        for follower, output in zip(self._followers, outputs, strict=True):
            if follower.end(output.tokens, output.num_iterations):
                ended_requests.append(follower.active)
            if output.logits is not None:
                self._keep_logits(follower.active, output)
        active = [follower.active for follower in self._followers]
        reported = ended_requests if self._options.follow_text else active
        if reported and self._options.on_progress is not None:
            self._options.on_progress(reported)
        return active

    def _keep_logits(self, active: ActiveRequest, output: RowOutput) -> None:
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
        active.kept_logits.append(logits)
