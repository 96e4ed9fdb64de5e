"""Rows of tokens with a mask of the labels, made from files of texts or conversations."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specdec.errors import SpecDecError, count, summarize
from specdec.system.logs import get_logger
from specdec.text.chat import (
    ROLES,
    ChatFormat,
    Conversation,
    SeamError,
    is_answer_cut,
    mask_tokens,
)
from specdec.text.documents import PromptedText, name_line, parse_object, read_document, read_lines
from specdec.text.learning_marks import is_row_learned

HELDOUT_SHARE = 0.02  # held-out rows without --eval-data
MIN_ROW_TOKENS = 3  # the first label of a row is its third token
TOKENIZER_BATCH = 64  # texts that are tokenized at a time

logger = get_logger(__name__)
Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Rows of different lengths, one after another in flat arrays."""

    tokens: Array  # [sum of lengths] uint16 or int32
    mask: Array  # [sum of lengths] bool, true for tokens that are labels
    bounds: Array  # [num_rows + 1] int64: row r is tokens[bounds[r]:bounds[r + 1]]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def count_tokens(self, vocab_size: int) -> Array:
        """Count the labels of each token, [V] int64."""
        return np.bincount(np.asarray(self.tokens)[np.asarray(self.mask)], minlength=vocab_size)

    def take(self, start: int, stop: int) -> TokenRows:
        """Return the rows `start` to `stop` - 1."""
        low, high = self.bounds[start], self.bounds[stop]
        bounds = self.bounds[start : stop + 1] - low
        return TokenRows(self.tokens[low:high], self.mask[low:high], bounds)

    def make_batch(self, indices: list[int]) -> tuple[Array, Array]:
        """Return rows padded at their ends: tokens int64, mask bool, both [B, longest row]."""
        lengths = [int(self.bounds[i + 1] - self.bounds[i]) for i in indices]
        tokens = np.zeros((len(indices), max(lengths)), np.int64)
        mask = np.zeros(tokens.shape, bool)
        for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            start = self.bounds[index]
            tokens[row, :length] = self.tokens[start : start + length]
            mask[row, :length] = self.mask[start : start + length]
        return tokens, mask

    def save(self, folder: Path, name: str) -> None:
        """Write the arrays into `folder`."""
        for field in dataclasses.fields(self):
            np.save(folder / f"{name}.{field.name}.npy", getattr(self, field.name))

    @staticmethod
    def load(folder: Path, name: str) -> TokenRows:
        """Map the arrays that `save` wrote; raise SpecDecError where they are damaged."""
        arrays = {}
        for field in dataclasses.fields(TokenRows):
            path = folder / f"{name}.{field.name}.npy"
            try:
                arrays[field.name] = np.load(path, mmap_mode="r", allow_pickle=False)
            except Exception as error:  # noqa: BLE001 - numpy raises many kinds of a damaged header
                raise _refuse_array(path, summarize(error)) from None
            dtypes = ROW_DTYPES[field.name]
            array = arrays[field.name]
            if array.ndim != 1 or array.dtype not in dtypes:
                raise _refuse_array(path, f"it is {array.dtype} {list(array.shape)}"[:200])
        rows = TokenRows(**arrays)
        bounds = rows.bounds
        if len(bounds) < 1 or bounds[0] != 0 or (np.diff(bounds) < 1).any():
            raise _refuse_array(folder / f"{name}.bounds.npy", "its bounds do not rise from 0")
        for array, field_name in ((rows.tokens, "tokens"), (rows.mask, "mask")):
            if len(array) != bounds[-1]:
                fact = f"it has {len(array)} entries, its rows {int(bounds[-1])}"
                raise _refuse_array(folder / f"{name}.{field_name}.npy", fact)
        return rows

    def check_tokens(self, vocab_size: int, folder: Path) -> None:
        """Raise SpecDecError where a token is beyond a vocabulary; folder: of the rows' files."""
        if not len(self.tokens):
            return
        lowest_token, highest_token = int(self.tokens.min()), int(self.tokens.max())
        if lowest_token < 0 or highest_token >= vocab_size:
            raise _refuse_array(
                folder, f"tokens {lowest_token} to {highest_token}, the target has {vocab_size}"
            )


# Types of the arrays that `save` writes.
ROW_DTYPES = {"tokens": (np.uint16, np.int32), "mask": (np.bool_,), "bounds": (np.int64,)}


def _refuse_array(path: Path, reason: str) -> SpecDecError:
    return SpecDecError(
        f"the tokenized rows {path} are damaged: {reason}", "start over with --force"
    )


class RowBuilder:
    """Builder of rows of at most `max_length` tokens from documents and conversations."""

    def __init__(self, format_: ChatFormat, max_length: int) -> None:
        self.format = format_
        self.tokenizer = tokenizer = format_.tokenizer
        self.max_length = max_length
        self.dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.int32
        self.num_unusable = 0
        self.seam_errors: list[SeamError] = []
        self.num_unlearned_turns = 0
        self.num_unlearned_rows = 0
        self._texts: list[tuple[str, bool]] = []  # texts, and whether a text was cut
        end = tokenizer.eos_token_id
        # The stream of documents begins with an end token, as every later document follows one.
        self._stream: list[Array] = [np.asarray([] if end is None else [end], self.dtype)]
        self._is_learned = [np.ones(len(self._stream[0]), bool)]
        self._chats: list[tuple[Array, Array]] = []

    def add_text(self, text: str, *, is_cut: bool = False) -> None:
        """Add a document; its tokens are labels, and so is the end token unless the text is cut."""
        self._texts.append((text, is_cut))
        if len(self._texts) >= TOKENIZER_BATCH:
            self._tokenize_texts()

    def _tokenize_texts(self) -> None:
        if not self._texts:
            return
        end = self.tokenizer.eos_token_id
        texts, are_cut = zip(*self._texts, strict=True)
        tokenized = self.tokenizer(list(texts), verbose=False)["input_ids"]
        for ids, is_cut in zip(tokenized, are_cut, strict=True):
            end_tokens = [] if end is None or ids[-1:] == [end] else [end]
            self._stream.append(np.asarray([*ids, *end_tokens], self.dtype))
            self._is_learned.append(np.ones(len(self._stream[-1]), bool))
            if end_tokens:
                self._is_learned[-1][-1] = not is_cut
        self._texts.clear()

    def add_prompted(self, text: PromptedText, *, is_cut: bool = False) -> None:
        """Add a prompt and its completion, whose tokens are labels, with its end unless cut."""
        encoded = self.tokenizer(text, return_offsets_mapping=True, verbose=False)
        ids, end = encoded["input_ids"], self.tokenizer.eos_token_id
        mask = mask_tokens(encoded["offset_mapping"], [(text.num_prompt_characters, len(text))])
        if end is not None and ids[-1:] != [end] and not is_cut:
            ids, mask = [*ids, end], np.append(mask, True)
        self.num_unusable += not self._add_row(ids, mask)

    def _add_row(self, ids: list[int], mask: Array) -> bool:
        """Add a row, cut at the most tokens; return whether it has a label."""
        mask = mask[: self.max_length]
        if has_label := bool(mask[MIN_ROW_TOKENS - 1 :].any()):
            self._chats.append((np.asarray(ids[: self.max_length], self.dtype), mask))
        return has_label

    def add_conversation(self, conversation: Conversation) -> None:
        """Add a conversation, cut at the most tokens; its labels are the assistant's tokens."""
        try:
            rendered = self.format.render_turns(conversation)
        except SeamError as error:
            self.seam_errors.append(error)
            return
        self.num_unlearned_turns += sum(
            conversation.messages[number]["role"] == "assistant"
            for number in conversation.unlearned
        )
        has_label = False
        for text, spans in ((r.text, r.spans) for r in rendered):
            encoded = self.tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            has_label |= self._add_row(
                encoded["input_ids"], mask_tokens(encoded["offset_mapping"], spans)
            )
        self.num_unusable += not has_label

    def finish(self) -> TokenRows:
        """Cut the stream of documents into full rows and a last shorter one; add conversations."""
        self._tokenize_texts()
        stream = np.concatenate(self._stream)
        lengths = [self.max_length] * (len(stream) // self.max_length)
        if len(stream) % self.max_length >= MIN_ROW_TOKENS:
            lengths.append(len(stream) % self.max_length)
        stream = stream[: sum(lengths)]
        lengths += [len(ids) for ids, _ in self._chats]
        return TokenRows(
            tokens=np.concatenate([stream, *(ids for ids, _ in self._chats)]),
            mask=np.concatenate(
                [
                    np.concatenate(self._is_learned)[: len(stream)],
                    *(mask for _, mask in self._chats),
                ]
            ),
            bounds=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        )


def read_entries(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a data file that are not empty, numbered; a .txt file is one line."""
    if path.suffix == ".txt":
        yield 1, path.read_bytes()
    else:
        yield from read_lines(path)


def read_rows(
    path: Path, tokenizer: Any, max_length: int, heldout_lines: frozenset[int] = frozenset()
) -> tuple[TokenRows, TokenRows]:
    """Tokenize a data file; return its rows and the rows of the lines in `heldout_lines`."""
    format_ = ChatFormat(tokenizer)
    builders = RowBuilder(format_, max_length), RowBuilder(format_, max_length)
    for number, line in read_entries(path):
        with name_line(path, number):
            _add_line(builders[number in heldout_lines], line, is_text=path.suffix == ".txt")
    num_unusable = sum(b.num_unusable for b in builders)
    if num_unusable:
        logger.warning(
            "%s: %d conversations have no answer to learn within %d tokens; they are left"
            " out", path, num_unusable, max_length,
        )  # fmt: skip
    seam_errors = [error for b in builders for error in b.seam_errors]
    if seam_errors:
        logger.warning(
            "%s: %s left out, as %s; %s", path, count(len(seam_errors), "conversation"),
            seam_errors[0], seam_errors[0].hint,
        )  # fmt: skip
    turns = sum(b.num_unlearned_turns for b in builders)
    rows = sum(b.num_unlearned_rows for b in builders)
    if turns or rows:
        logger.info(
            "%s: %s of the assistant and %s are marked as not to be learned, by weight 0 or the"
            " like: such turns are context only, such rows are left out",
            path, count(turns, "turn"), count(rows, "row"),
        )  # fmt: skip
    return builders[0].finish(), builders[1].finish()


def _add_line(builder: RowBuilder, line: bytes, *, is_text: bool) -> None:
    row = {"text": line.decode("utf-8-sig")} if is_text else parse_object(line)
    document = read_document(row)
    if not is_row_learned(row, ROLES):
        builder.num_unlearned_rows += 1
        return
    is_cut = is_answer_cut(row)
    if isinstance(document, PromptedText):
        builder.add_prompted(document, is_cut=is_cut)
    elif isinstance(document, str):
        builder.add_text(document, is_cut=is_cut)
    else:
        builder.add_conversation(document)


def choose_heldout_lines(path: Path) -> frozenset[int]:
    """Choose about 2% of the lines by their hashes; at least one, unless there is but one."""
    hashes = {
        number: int.from_bytes(hashlib.sha256(line).digest()[:8], "big")
        for number, line in read_entries(path)
    }
    heldout_lines = {number for number, value in hashes.items() if value < HELDOUT_SHARE * 2**64}
    if len(hashes) < 2 or len(heldout_lines) == len(hashes):
        return frozenset()
    return frozenset(heldout_lines or {min(hashes, key=lambda number: hashes[number])})


def prepare_rows(
    data: Path, eval_data: Path | None, tokenizer: Any, max_length: int
) -> tuple[TokenRows, TokenRows]:
    """Tokenize the data; return the training rows and the held-out rows."""
    if eval_data is not None:
        train, _ = read_rows(data, tokenizer, max_length)
        heldout, _ = read_rows(eval_data, tokenizer, max_length)
        _require_rows(heldout, eval_data)
    else:
        train, heldout = read_rows(data, tokenizer, max_length, choose_heldout_lines(data))
        if len(heldout):
            logger.info("no --eval-data: %d rows of %s are held out", len(heldout), data)
        elif len(train) > 1:
            num_train = len(train) - max(1, round(HELDOUT_SHARE * len(train)))
            train, heldout = train.take(0, num_train), train.take(num_train, len(train))
            logger.info("no --eval-data: the last %d rows of %s are held out", len(heldout), data)
        else:
            heldout = train
            logger.warning("%s makes one row only: the evaluation is on the training data", data)
    _require_rows(train, data)
    return train, heldout


def _require_rows(rows: TokenRows, path: Path) -> None:
    if not len(rows):
        raise SpecDecError(
            f"{path} has no row to learn from",
            f"give at least {MIN_ROW_TOKENS} tokens of text, or conversations with an assistant",
        )


@functools.lru_cache(maxsize=2)
def _shuffle(num_rows: int, seed: int, epoch: int) -> Array:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def choose_rows(num_rows: int, seed: int, start: int, count: int) -> list[int]:
    """Return indices `start` to `start + count` of an endless order, shuffled anew every epoch."""
    row_indices: list[int] = []
    while count > 0:
        epoch, offset = divmod(start, num_rows)
        epoch_rows = _shuffle(num_rows, seed, epoch)[offset : offset + count]
        row_indices += [int(i) for i in epoch_rows]
        start, count = start + len(epoch_rows), count - len(epoch_rows)
    return row_indices
