"""A request that TensorRT-LLM's runtime runs to its end by itself, followed as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.decode.requests import PLAIN, ActiveRequest, Origin, Request
from specdec.errors import SpecDecError
from specdec.text.text_stream import decode_text
from specdec.trtllm.engine_folder import EngineFolder
from specdec.trtllm.runner import NO_END

# Facts of its steps that the runtime's own drafting does not tell.
UNTOLD = frozenset({
    "num_drafted_steps", "num_draft_tokens", "num_accepted", "acceptance_rate",
    "accepted_histogram",
})  # fmt: skip
UNTOLD_STEPS = frozenset({"num_verify_steps", "acceptance_length"})


class Followed:
    """One request, and what it has brought so far."""

    def __init__(
        self, request: Request, row: int, folder: EngineFolder, tokenizer: Any, *,
        follows_text: bool,
    ) -> None:  # fmt: skip
        text = request.make_text(tokenizer, is_followed=follows_text)
        self.active = ActiveRequest(request, row, max_depth=0, text_stream=text)
        self.end_id = min(request.end_ids, default=NO_END)
        self.stop_ids = self._list_stops(request, tokenizer)
        self._folder = folder
        self._num_seen = 0

    def take(self, tokens: Sequence[int]) -> bool:
        """Emit the tokens beyond those already seen; tell whether there were any."""
        new_tokens = tokens[self._num_seen :]
        self._num_seen = len(tokens)
        if self.active.finish_reason is not None or not new_tokens:
            return False
        self.active.emit(new_tokens, self._name_origins(len(new_tokens)))
        return True

    def end(self, tokens: Sequence[int], num_iterations: int | None) -> bool:
        """Settle how the request ended; tell whether that was before its limit.

        tokens: all that the runtime returned. num_iterations: its decoding steps, the prompt's
        included; None where it does not tell.
        """
        is_early = self.active.finish_reason is None
        if is_early:
            self._end_early(tokens)
        self._count_steps(tokens, num_iterations)
        return is_early

    def _list_stops(self, request: Request, tokenizer: Any) -> list[list[int]]:
        """List token sequences at which the runtime may end early; what the text holds decides."""
        stops = [[token] for token in sorted(request.end_ids) if token != self.end_id]
        for word in request.stop:
            ids = tokenizer(word, add_special_tokens=False)["input_ids"]
            if ids and word in decode_text(tokenizer, ids):
                stops.append(ids)
        return stops

    def _name_origins(self, count: int) -> list[Origin]:
        """Return the origins of a plain engine's tokens, the only ones that are known."""
        return [PLAIN] * count if self._folder.mode is None else []

    def _end_early(self, tokens: Sequence[int]) -> None:
        """Return the runtime stopped before the limit: at the end id, which it does not return."""
        active = self.active
        if any(ids == list(tokens[len(tokens) - len(ids) :]) for ids in self.stop_ids if ids):
            active.finish_reason = "stop"
        elif self.end_id != NO_END:
            active.emit([self.end_id], self._name_origins(1))
        else:
            raise SpecDecError(
                f"TensorRT-LLM ended {active.request.name} after {len(tokens)} of"
                f" {active.request.max_output_len} tokens, without an end token or a stop word",
                "the engine may be too small for it: build with a larger --max-seq-len",
            )

    def _count_steps(self, tokens: Sequence[int], num_iterations: int | None) -> None:
        """Record verify steps: one per token of a plain engine, else as the runtime counts them."""
        stats, num_tokens = self.active.stats, len(self.active.output_ids)
        if self._folder.mode is None:
            for _ in range(num_tokens - 1):
                stats.count_step(num_draft_tokens=0, depth=0, num_accepted=0)
            return
        stats.unknown_keys = UNTOLD
        steps = None if num_iterations is None else num_iterations - 1
        max_step_tokens = self._folder.max_draft_len + 1
        # Steps that emitted what was cut after a stop word are counted too: then it is not known.
        is_cut = len(tokens) > num_tokens
        if steps is None or is_cut or not steps <= num_tokens - 1 <= steps * max_step_tokens:
            stats.unknown_keys |= UNTOLD_STEPS
        else:
            stats.num_verify_steps = steps
