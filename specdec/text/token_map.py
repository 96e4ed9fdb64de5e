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
    """Tokens of a model, with the bytes that they stand for.

    texts: by token, its bytes. by_bytes: by bytes, the token that writes them; a token for a single
    byte only where there is no other. special: tokens without a text, by their role and by name.
    max_bytes: bytes of the longest token.
    """

    texts: dict[int, bytes]
    by_bytes: dict[bytes, int]
    special: dict[str, int]
    max_bytes: int

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
    letters = _find_letters(backend)
    added_tokens = tokenizer.added_tokens_decoder
    texts: dict[int, bytes] = {}
    special: dict[str, int] = {}
    singles: set[int] = set()  # that stand for a byte by name
    for token, number in tokenizer.get_vocab().items():
        if number >= num_tokens:
            continue
        if number in added_tokens and added_tokens[number].special:
            special[token] = number
            continue
        is_spelled = letters is not None and number in added_tokens  # as it is
        name_bytes = token.encode("utf-8", "surrogatepass")
        texts[number] = name_bytes if is_spelled else read_piece(token, letters)
        if letters is None and BYTE_TOKEN.fullmatch(token):
            singles.add(number)
    roles = _list_roles(tokenizer, num_tokens)
    special |= roles
    for number in roles.values():
        texts.pop(number, None)
    by_bytes = _choose_tokens(texts, singles)
    return Words(texts, by_bytes, special, max(map(len, by_bytes), default=0))


def _list_roles(tokenizer: Any, num_tokens: int) -> dict[str, int]:
    """Return the tokens that a tokenizer has for `ROLES`, by role."""
    numbers = {role: getattr(tokenizer, role) for role in ROLES}
    return {role: n for role, n in numbers.items() if n is not None and n < num_tokens}


def _find_letters(backend: Any) -> dict[str, int] | None:
    """Return the letters that stand for bytes in a tokenizer's tokens; None where none do."""
    kinds = set(_list_kinds(backend.decoder)) | set(_list_kinds(backend.pre_tokenizer))
    return list_byte_letters() if "ByteLevel" in kinds else None


def _choose_tokens(texts: dict[int, bytes], singles: set[int]) -> dict[bytes, int]:
    """Choose for each text the lowest token that writes it, of `singles` only as a last resort."""
    by_bytes: dict[bytes, int] = {}
    for number in sorted(texts, key=lambda number: (number in singles, number)):
        by_bytes.setdefault(texts[number], number)
    by_bytes.pop(b"", None)
    return by_bytes


def _list_kinds(component: Any) -> Iterable[str]:
    """Yield the types of a component of a tokenizer, and of the components inside it."""
    if component is None:
        return
    pending = [json.loads(component.__getstate__())]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield str(value.get("type"))
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def split_bytes(text: bytes, words: Words) -> list[int]:
    """Say a text in a model's tokens, the longest first; bytes that it has none for are left out.

    A tokenizer would need whole characters, and some begin every text with a space.
    """
    tokens, start = [], 0
    while start < len(text):
        for end in range(min(len(text), start + words.max_bytes), start, -1):
            if (token := words.by_bytes.get(text[start:end])) is not None:
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
        """Keep of the draft model's logits [..., U] those of shared tokens, [..., N]."""
        return logits[..., : self._sizes[0]]

    def spread(self, probs: Tensor) -> Tensor:
        """Spread probabilities of shared tokens, [..., N], over the target's tokens, [..., V]."""
        num_missing = self._sizes[0] - probs.shape[-1]
        return torch.nn.functional.pad(probs, (0, num_missing)) if num_missing else probs

    def to_draft(self, indices: Tensor) -> Tensor:
        """Return the draft model's tokens for indices among the N shared ones."""
        return indices

    def name(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        """Return the target's tokens and the draft model's for indices among the N shared ones."""
        return indices, indices

    def say_prompt(self, tokens: Sequence[int]) -> list[int] | None:
        """Translate a prompt of the target into the draft model's tokens; None if it cannot be."""
        # A token beyond the draft model's vocabulary can only be padding, which it cannot follow.
        return list(tokens) if max(tokens) < self._sizes[1] else None

    def say(self, token: int) -> Sequence[int] | None:
        """Translate a token of the target into the draft model's; None if it cannot be."""
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
        """Find the shared tokens of two tokenizers.

        target_size, draft_size: rows of the models' embedding tables.
        """
        target_words, draft_words = read_words(target, target_size), read_words(draft, draft_size)
        pairs = {
            number: draft_words.by_bytes[text]
            for text, number in target_words.by_bytes.items()
            if text in draft_words.by_bytes
        }
        special = _pair_special(target_words, draft_words)
        pairs |= special
        self.counts = len(pairs), target_words.num_tokens, draft_words.num_tokens
        self._check_share(target, draft)
        target_ids = sorted(pairs)
        self._pairs: Array = np.array([[n, pairs[n]] for n in target_ids], np.int64).T  # [2, N]
        self._target_ids = to_device(self._pairs[0], device)
        self._draft_ids = to_device(self._pairs[1], device)
        self._target_size = target_size
        self._target, self._draft = target, draft
        self._special = special, frozenset(target_words.special.values())
        self._bos = target_words.special.get("bos_token_id")
        # The draft model's tokens for each of the target's: [offsets[n], offsets[n + 1]).
        translations = [
            [pairs[n]] if n in pairs else split_bytes(target_words.texts.get(n, b""), draft_words)
            for n in range(target_size)
        ]
        self._offsets = np.cumsum([0, *map(len, translations)]).astype(np.int32)
        self._translations = np.array(
            [token for tokens in translations for token in tokens], np.int32
        )
        self._draft_size = draft_size
        first_ids = list(draft("a")["input_ids"])[:1]
        has_start = draft.bos_token_id is not None and first_ids == [draft.bos_token_id]
        self._start = first_ids if has_start and first_ids[0] < draft_size else []

    def _check_share(self, target: Any, draft: Any) -> None:
        num_shared, num_target, num_draft = self.counts
        min_shared = int(LEAST_SHARE * min(num_target, num_draft))
        fact = (
            f"{num_shared} tokens are in both vocabularies, of {num_target} of the target and"
            f" {num_draft} of the draft model"
        )
        if num_shared < min_shared:
            raise SpecDecError(
                f"{fact}: fewer than {min_shared}, a tenth of the smaller",
                f"use another draft model, or check that {target.name_or_path} and"
                f" {draft.name_or_path} are the models' own tokenizers",
            )
        logger.info("%s: these are drafted", fact)

    def restrict(self, logits: Tensor) -> Tensor:
        """Keep of the draft model's logits those of shared tokens, as `SameTokens` does."""
        return logits.index_select(-1, self._draft_ids)

    def spread(self, probs: Tensor) -> Tensor:
        spread = probs.new_zeros((*probs.shape[:-1], self._target_size))
        return spread.index_copy_(-1, self._target_ids, probs)

    def to_draft(self, indices: Tensor) -> Tensor:
        return self._draft_ids[indices]

    def name(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        target, draft = self._pairs[:, indices]
        return target, draft

    def say_prompt(self, tokens: Sequence[int]) -> list[int] | None:
        """Translate a prompt as the draft model's tokenizer would read it.

        Special tokens without a twin are left out, and the first token is the one that the draft
        model's texts begin with.
        """
        twins, special = self._special
        draft_ids, run = [*self._start], []
        for index, token in enumerate([*tokens, None]):
            if token is not None and token not in special:
                run.append(token)
                continue
            draft_ids += self._say_text(run)
            run = []
            if token in twins and not (index == 0 and token == self._bos):
                draft_ids.append(twins[token])
        return draft_ids or None

    def _say_text(self, run: list[int]) -> list[int]:
        """Translate tokens of the target that are no special ones into the draft model's."""
        text = decode_text(self._target, run) if run else ""
        if INCOMPLETE in text:  # a character is cut off: its bytes are said one by one
            return [token for target_id in run for token in self.say(target_id)]
        draft_ids = self._draft(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [token for token in draft_ids if token < self._draft_size]

    def say(self, token: int) -> Sequence[int]:
        draft_ids: list[int] = self._translations[
            self._offsets[token] : self._offsets[token + 1]
        ].tolist()
        return draft_ids


TokenMap = SameTokens | SharedTokens


def _pair_special(target_words: Words, draft_words: Words) -> dict[int, int]:
    """Pair the special tokens of two models that have one role or name, each at most once."""
    pairs: dict[int, int] = {}
    used_twins: set[int] = set()
    for name, number in sorted(target_words.special.items(), key=lambda item: _rank(item[0])):
        twin = draft_words.special.get(name)
        if twin is not None and number not in pairs and twin not in used_twins:
            pairs[number] = twin
            used_twins.add(twin)
    return pairs


def _rank(name: str) -> tuple[bool, str]:
    """Return the key by which roles come first, in their order, then other names."""
    return (False, str(ROLES.index(name))) if name in ROLES else (True, name)
