"""Prompt lookup: what followed the newest tokens where they last occurred is the draft.

https://github.com/apoorvumang/prompt-lookup-decoding; TensorRT-LLM and vLLM call it n-gram. There
are no weights: the index is the request's own text, prompt and output.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import DraftContext, Drafter
from specdec.decode.drafters.devices import check_devices
from specdec.decode.requests import ActiveRequest
from specdec.engine.tree import make_root, pack_beams
from specdec.methods.prompt_lookup import METHOD, LookupOptions


def make_drafter(context: DraftContext) -> PromptLookupDrafter:
    """Draft from the text, as much as the engine has room for."""
    engine, options = context.engine, context.options
    assert engine is not None
    assert isinstance(options, LookupOptions)
    context.check_room(METHOD, options.num_tokens)
    check_devices("target", options.target_devices, engine)
    return PromptLookupDrafter(options)


FIRST_MISS = 0.6  # of ends of one token that are found again, twice those that go on differently


class NgramIndex:
    """A growing text, and where in it each n-gram of up to `max_size` tokens last occurred.

    A token costs as much in a long text as in a short one.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._text: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}  # place of what last followed it
        self.num_found = 0  # tokens of the end that the newest draft found again

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. The n-grams that end the text join the index when something follows."""
        for token in tokens:
            end = len(self._text)
            for size in range(1, min(self.max_size, end) + 1):
                self._following[tuple(self._text[end - size :])] = end
            self._text.append(token)

    def draft(self, num_tokens: int) -> list[int]:
        """Copy what followed the longest end of the text that occurred before; [] if none did.

        The last of several occurrences counts. A copy that reaches the end of the text goes on
        with what it has copied, so a text that repeats itself is continued for any length.
        """
        end = len(self._text)
        for size in range(min(self.max_size, end), 0, -1):
            start = self._following.get(tuple(self._text[end - size :]))
            if start is not None:
                self.num_found, period = size, end - start
                return [self._text[start + offset % period] for offset in range(num_tokens)]
        return []


class PromptLookupDrafter(Drafter):
    """Proposes one chain, or nothing where the newest tokens occur for the first time."""

    def __init__(self, options: LookupOptions) -> None:
        self.options = options
        self.max_draft_tokens = self.max_draft_depth = options.num_tokens
        self._indexes: dict[int, NgramIndex] = {}  # by row

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Forget the texts."""
        self._indexes = {}

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        """Index each request's prompt."""
        for request in requests:
            index = self._indexes[request.row] = NgramIndex(self.options.max_ngram_size)
            index.extend(request.request.input_ids)

    def propose(self, requests: Sequence[ActiveRequest]) -> list[Candidates]:
        """Add the newest tokens to each text, then look up its end."""
        candidates = []
        for request in requests:
            index, output = self._indexes[request.row], request.output_ids
            index.extend(output[len(index) - len(request.request.input_ids) :])
            # The last token that may be emitted is the bonus token's.
            draft = index.draft(min(self.options.num_tokens, request.remaining - 1))
            root = output[-1]
            if not draft:
                candidates.append(Candidates(make_root(root)))
                continue
            # A longer end is found again by chance more seldom; how seldom is counted.
            confidence = np.full(len(draft) + 1, 1 - FIRST_MISS / (1 + index.num_found))
            candidates.append(Candidates(pack_beams(root, np.array([draft])), None, confidence))
        return candidates
