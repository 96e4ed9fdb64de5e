"""A draft model alongside its target: each request's text in its tokens, and the cache of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from specdec.decode.drafters.base import Drafter, list_rows
from specdec.decode.prefill import fill_cache
from specdec.decode.requests import ActiveRequest
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.text.token_map import TokenMap

# Room for a text in the tokens of a draft model with others than the target's, as a multiple.
MORE_TOKENS = 2


@dataclasses.dataclass
class FollowedText:
    """A request's text in the draft model's tokens.

    num_read: tokens of the request's output that are in it. num_newest: the draft model's tokens
    for the last of them. is_known: whether the draft model has tokens for all of it, and room.
    """

    ids: list[int]
    num_read: int = 0
    num_newest: int = 0
    is_known: bool = True


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """Draft model of an engine.

    tokens: the tokens that it shares with the target. The other numbers are its engine's limits.
    """

    decoder: Decoder
    tokens: TokenMap
    max_num_tokens: int
    max_seq_len: int


class ModelDrafter(Drafter):
    """Reads texts as they grow; what drafts writes after them, and keeps what was right.

    The draft model reads a text in its own tokens. Those only grow at the end: a token that is
    emitted adds its own, whatever follows, so what the cache holds stays true.
    """

    _cache: KVCache
    num_run = 0  # tokens of a draft that the cache has room for alongside those that are verified
    num_again = 1  # of what a step accepted, tokens alongside the newest that the next draft runs

    def __init__(self, model: LoadedModel, max_draft_tokens: int) -> None:
        self.model, self.decoder, self.tokens = model, model.decoder, model.tokens
        self.max_draft_tokens = max_draft_tokens
        self._room = 0  # for a text, in the draft model's tokens
        self._texts: dict[int, FollowedText] = {}  # by row

    def allocate(self, num_rows: int, num_positions: int) -> None:
        """Make a cache of the target's shape, or a longer one where tokens are not the same."""
        vars(self).pop("_cache", None)  # what it has is free for the next
        # Longer requests are those without drafts.
        num_positions = min(num_positions, self.model.max_seq_len + self.max_draft_tokens + 1)
        if not self.tokens.is_same:
            num_positions = min(MORE_TOKENS * num_positions, self.model.max_seq_len)
        self._room = num_positions - self.max_draft_tokens
        self._cache = self.decoder.make_cache(num_rows, num_positions + self.num_run)
        self._texts = {}

    def start(self, requests: Sequence[ActiveRequest]) -> None:
        """Empty the rows; their prompts are run when the first draft is asked for."""
        for request in requests:
            self._cache.copy_prefix(request.row, request.row, 0)
            self._texts.pop(request.row, None)

    def count_unread(self, requests: Sequence[ActiveRequest]) -> int:
        """Count the tokens of the texts that the draft model has not read."""
        return sum(self._list_unread(requests, [self._read(request) for request in requests]))

    def _read(self, request: ActiveRequest) -> FollowedText:
        """Return the text of a request, with what has been emitted since it was last asked for."""
        text = self._texts.get(request.row)
        if text is None:
            ids = self.tokens.say_prompt(request.request.input_ids)
            text = self._texts[request.row] = FollowedText(ids or [], is_known=bool(ids))
        for token in request.output_ids[text.num_read :] if text.is_known else ():
            draft_ids = self.tokens.say(token)
            text.is_known = draft_ids is not None
            text.num_newest = len(draft_ids or ())
            text.ids += draft_ids or ()
        text.num_read = len(request.output_ids)
        if not self.tokens.is_same:
            text.is_known = text.is_known and len(text.ids) <= self._room
        if text.is_known and self._cache.past_lens[request.row] == len(text.ids):
            # The newest token has none of its own: the one before it is run again.
            self._cache.copy_prefix(request.row, request.row, len(text.ids) - 1)
        return text

    def _list_unread(
        self, requests: Sequence[ActiveRequest], read: Sequence[FollowedText]
    ) -> list[int]:
        """Count the tokens of each text that the draft model lacks, but those every draft runs."""
        return [
            max(0, len(text.ids) - int(past) - text.num_newest - self.num_again)
            for past, text in zip(self._cache.past_lens[list_rows(requests)], read, strict=True)
        ]

    def _catch_up(
        self, requests: Sequence[ActiveRequest], read: Sequence[FollowedText]
    ) -> list[int]:
        """Read texts within `max_prefill`; return the indices of requests to draft for."""
        unread_counts = self._list_unread(requests, read)
        request_indices = [
            index
            for index, (text, request) in enumerate(zip(read, requests, strict=True))
            if text.is_known and request.remaining > 1
        ]
        ready_indices, chunk_sizes = self._plan_prefill(
            [unread_counts[index] for index in request_indices]
        )
        for index, count in chunk_sizes.items():
            request_index = request_indices[index]
            self._prefill(requests[request_index].row, read[request_index].ids, count)
        return [request_indices[index] for index in ready_indices]

    def _prefill(self, row: int, text: Sequence[int], count: int) -> None:
        """Run the next tokens of a text that the cache does not hold, and wait for the end."""
        end = int(self._cache.past_lens[row]) + count
        self._fill([row], [text[:end]]).cpu()

    def _fill(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Run what the cache lacks of texts; return the states [B, D] of their last tokens."""
        return fill_cache(self.decoder, self._cache, rows, texts, self.model.max_num_tokens)
