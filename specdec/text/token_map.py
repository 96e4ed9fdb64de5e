"""Two models' tokens side by side: those that both have, and how one says what only the other has.

Timor et al., "Accelerating LLM inference with lossless speculative decoding algorithms for
heterogeneous vocabularies", 2025, https://arxiv.org/abs/2502.05202, section 4 (TLI): a drafter
whose distribution is restricted to the tokens that both models have drafts for the other.

Legend: B rows, V the target's vocabulary, U the draft model's, N tokens that both have.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.engine.transfers import Array, to_device
from specdec.engine.tree import IntArray
from specdec.errors import SpecDecError
from specdec.files.vocabulary import BYTE_TOKEN, list_byte_letters, read_piece
from specdec.system import logs
from specdec.text.text_stream import INCOMPLETE, decode_text

logger = logs.get_logger(__name__)
LEAST_SHARE = 0.1  # of the smaller vocabulary, that both must have
ROLES = ("eos_token_id", "bos_token_id", "unk_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class Words:
    """What a model's tokens stand for.

    texts: by token, its bytes. best: by bytes, the token that is meant by them; a token for a
    single byte only where no other is. special: tokens without a text, by their role and by name.
    longest: bytes of a token at most.
    """

    texts: dict[int, bytes]
    best: dict[bytes, int]
    special: dict[str, int]
    longest: int

    @property
    def num_tokens(self) -> int:
        return len(self.texts) + len(set(self.special.values()))


def read_words(tokenizer: Any, num_tokens: int) -> Words:
    """Read a transformers tokenizer, as far as the model has rows for its tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SpecDecError(
            f"the tokenizer in {tokenizer.name_or_path} is {type(tokenizer).__name__}, of which"
            " the bytes of its tokens are not known",
            "use one that has a tokenizer.json, as save_pretrained writes it for fast tokenizers",
        )
    kinds = set(_list_kinds(backend.decoder)) | set(_list_kinds(backend.pre_tokenizer))
    letters = list_byte_letters() if "ByteLevel" in kinds else None
    added = tokenizer.added_tokens_decoder
    texts: dict[int, bytes] = {}
    special: dict[str, int] = {}
    singles: set[int] = set()  # that stand for a byte by name
    for token, number in tokenizer.get_vocab().items():
        if number >= num_tokens:
            continue
        if number in added and added[number].special:
            special[token] = number
            continue
        is_spelled = letters is not None and number in added  # as it is
        own = token.encode("utf-8", "surrogatepass")
        texts[number] = own if is_spelled else read_piece(token, letters)
        if letters is None and BYTE_TOKEN.fullmatch(token):
            singles.add(number)
    for role in ROLES:
        number = getattr(tokenizer, role)
        if number is not None and number < num_tokens:
            special[role] = number
            texts.pop(number, None)
    best: dict[bytes, int] = {}
    for number in sorted(texts, key=lambda number: (number in singles, number)):
        best.setdefault(texts[number], number)
    best.pop(b"", None)
    return Words(texts, best, special, max(map(len, best), default=0))


def _list_kinds(component: Any) -> Iterable[str]:
    """The types of a part of a tokenizer, and of the parts that it is made of."""
    if component is None:
        return
    waiting = [json.loads(component.__getstate__())]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield str(value.get("type"))
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def split_bytes(text: bytes, words: Words) -> list[int]:
    """Say a text in a model's tokens, the longest first; bytes that it has none for are left out.

    A tokenizer would need whole characters, and some begin every text with a space.
    """
    tokens, start = [], 0
    while start < len(text):
        for end in range(min(len(text), start + words.longest), start, -1):
            if (token := words.best.get(text[start:end])) is not None:
                tokens.append(token)
                start = end
                break
        else:
            start += 1
    return tokens


class SameTokens:
    """Two models of one vocabulary; their tables may have padding."""

    is_same = True

    def __init__(self, target_size: int, draft_size: int) -> None:
        self._sizes = target_size, draft_size
        self.drafts_all = draft_size <= target_size  # whether any token may be drafted

    def restrict(self, logits: Tensor) -> Tensor:
        """The draft model's logits [..., U] of tokens that may be drafted, [..., N]."""
        return logits[..., : self._sizes[0]]

    def spread(self, probs: Tensor) -> Tensor:
        """Give probabilities [..., N] their places among the target's tokens, [..., V]."""
        missing = self._sizes[0] - probs.shape[-1]
        return torch.nn.functional.pad(probs, (0, missing)) if missing else probs

    def to_draft(self, places: Tensor) -> Tensor:
        """The draft model's tokens at places among the N."""
        return places

    def name(self, places: IntArray) -> tuple[IntArray, IntArray]:
        """The target's tokens and the draft model's at places among the N."""
        return places, places

    def say_prompt(self, tokens: Sequence[int]) -> list[int] | None:
        """A prompt of the target in the draft model's tokens; None where it has none for it."""
        # A token beyond the draft model's vocabulary can only be padding, which it cannot follow.
        return list(tokens) if max(tokens) < self._sizes[1] else None

    def say(self, token: int) -> Sequence[int] | None:
        """A token of the target in the draft model's; None where it has none for it."""
        return (token,) if token < self._sizes[1] else None


class SharedTokens:
    """Two models of different vocabularies: the tokens that both have are drafted.

    A token is in both where its bytes are: byte-level letters, SentencePiece's spaces and its
    tokens for bytes are read as what they stand for. Special tokens are in both by what they are
    for, or by name. The N shared tokens are in the order of the target's.
    """

    is_same = False
    drafts_all = False

    def __init__(
        self, target: Any, draft: Any, target_size: int, draft_size: int, device: torch.device
    ) -> None:
        """target, draft: tokenizers. target_size, draft_size: of the models' tables."""
        ours, theirs = read_words(target, target_size), read_words(draft, draft_size)
        pairs = {
            number: theirs.best[text] for text, number in ours.best.items() if text in theirs.best
        }
        taken: set[int] = set()
        special: dict[int, int] = {}
        for name, number in sorted(ours.special.items(), key=lambda item: _rank(item[0])):
            twin = theirs.special.get(name)
            if twin is not None and number not in special and twin not in taken:
                special[number] = twin
                taken.add(twin)
        pairs |= special
        self.counts = len(pairs), ours.num_tokens, theirs.num_tokens
        self._check_share(target, draft)
        places = sorted(pairs)
        self._pairs: Array = np.array([[n, pairs[n]] for n in places], np.int64).T  # [2, N]
        self._target_ids = to_device(self._pairs[0], device)
        self._draft_ids = to_device(self._pairs[1], device)
        self._target_size = target_size
        self._target, self._draft = target, draft
        self._special = special, frozenset(ours.special.values())
        self._bos = ours.special.get("bos_token_id")
        # The draft model's tokens for each of the target's: [firsts[n], firsts[n + 1]).
        said = [
            [pairs[n]] if n in pairs else split_bytes(ours.texts.get(n, b""), theirs)
            for n in range(target_size)
        ]
        self._firsts = np.cumsum([0, *map(len, said)]).astype(np.int32)
        self._said = np.array([token for tokens in said for token in tokens], np.int32)
        self._draft_size = draft_size
        first = list(draft("a")["input_ids"])[:1]
        has_start = draft.bos_token_id is not None and first == [draft.bos_token_id]
        self._start = first if has_start and first[0] < draft_size else []

    def _check_share(self, target: Any, draft: Any) -> None:
        shared, ours, theirs = self.counts
        least = int(LEAST_SHARE * min(ours, theirs))
        told = (
            f"{shared} tokens are in both vocabularies, of {ours} of the target and {theirs} of the"
            " draft model"
        )
        if shared < least:
            raise SpecDecError(
                f"{told}: fewer than {least}, a tenth of the smaller",
                f"use another draft model, or check that {target.name_or_path} and"
                f" {draft.name_or_path} are the models' own tokenizers",
            )
        logger.info("%s: these are drafted", told)

    def restrict(self, logits: Tensor) -> Tensor:
        """See SameTokens, as for the other methods."""
        return logits.index_select(-1, self._draft_ids)

    def spread(self, probs: Tensor) -> Tensor:
        spread = probs.new_zeros((*probs.shape[:-1], self._target_size))
        return spread.index_copy_(-1, self._target_ids, probs)

    def to_draft(self, places: Tensor) -> Tensor:
        return self._draft_ids[places]

    def name(self, places: IntArray) -> tuple[IntArray, IntArray]:
        target, draft = self._pairs[:, places]
        return target, draft

    def say_prompt(self, tokens: Sequence[int]) -> list[int] | None:
        """As the draft model's tokenizer would have it; special tokens without a twin are left out.

        Begun with the token that the draft model's texts begin with.
        """
        twins, special = self._special
        said, run = [*self._start], []
        for at, token in enumerate([*tokens, None]):
            if token is not None and token not in special:
                run.append(token)
                continue
            said += self._say_text(run)
            run = []
            if token in twins and not (at == 0 and token == self._bos):
                said.append(twins[token])
        return said or None

    def _say_text(self, run: list[int]) -> list[int]:
        """Tokens of the target that are no special ones, in the draft model's."""
        text = decode_text(self._target, run) if run else ""
        if INCOMPLETE in text:  # a character is cut off: its bytes are said one by one
            return [token for each in run for token in self.say(each)]
        found = self._draft(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [token for token in found if token < self._draft_size]

    def say(self, token: int) -> Sequence[int]:
        said: list[int] = self._said[self._firsts[token] : self._firsts[token + 1]].tolist()
        return said


TokenMap = SameTokens | SharedTokens


def _rank(name: str) -> tuple[bool, str]:
    """Roles first, in their order."""
    return (False, str(ROLES.index(name))) if name in ROLES else (True, name)
