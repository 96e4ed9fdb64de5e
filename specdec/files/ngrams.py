"""A table of n-grams: the tokens that are likely to follow the last few, as a corpus has them.

For each context of 1 to `max_order` tokens that the table holds, it has the likeliest next tokens
and their shares, interpolated with those of the shorter contexts (Witten and Bell, "The
zero-frequency problem", https://doi.org/10.1109/18.87000). A context is a key of 64 bits; that two
share one is as rare as it is harmless, since drafts are verified.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import SpecDecError
from specdec.files.ngram_limits import MAX_ORDER
from specdec.files.reading import Array
from specdec.files.staging import place_file
from specdec.files.tensor_file import TensorFile, TensorInfo, write_tensor_file

FORMAT, VERSION = "specdec ngrams", "1"
FACTOR = 0x9E3779B97F4A7C15  # odd, so that no digit of a key is lost
KEY_MASK = (1 << 64) - 1
SHARE_STEPS = 255  # of a share, which takes one byte
STRIDE = 16  # of the ids by which vocabularies are compared
MAX_REMEMBERED = 1 << 15  # contexts whose continuations are kept as lists
TYPES = {"keys": "int64", "counts": "uint8", "tokens": "int32", "shares": "uint8"}
HINT = "make it again with specdec-train ngrams"


@dataclasses.dataclass(frozen=True)
class NgramTable:
    """Next tokens by context.

    keys: [contexts], rising. counts: [contexts], of a context's continuations. tokens, shares:
    [continuations], each context's likeliest first. num_tokens, sha256: of the vocabulary, as
    `hash_tokens` tells them.
    """

    keys: Array
    counts: Array
    tokens: Array
    shares: Array
    max_order: int
    num_tokens: int
    sha256: str
    starts: Array = dataclasses.field(init=False, repr=False, compare=False)  # and the last end
    _remembered: dict[tuple[int, ...], list[tuple[int, float]]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        starts = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])
        object.__setattr__(self, "starts", starts)

    def find(self, context: Sequence[int]) -> list[tuple[int, float]]:
        """Return likely next tokens with their shares, by the longest end that the table holds."""
        end = tuple(context[-self.max_order :])
        continuations = self._remembered.get(end)
        if continuations is None:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            continuations = self._remembered[end] = self._look_up(end)
        return continuations

    def _look_up(self, end: tuple[int, ...]) -> list[tuple[int, float]]:
        key, keys = 0, list[int]()
        for token in reversed(end):
            key = (key * FACTOR + token + 1) & KEY_MASK
            keys.append(key)
        wanted_keys = np.array(keys, np.uint64).view(np.int64)
        places = np.minimum(np.searchsorted(self.keys, wanted_keys), len(self.keys) - 1)
        (matches,) = np.nonzero(self.keys[places] == wanted_keys)
        if not len(matches):
            return []
        place = places[matches[-1]]
        span = slice(self.starts[place], self.starts[place + 1])
        shares = (self.shares[span] / SHARE_STEPS).tolist()
        return list(zip(self.tokens[span].tolist(), shares, strict=True))

    def write(self, path: Path, *, force: bool = True) -> None:
        """Write the file aside, and put it in its place; SpecDecError where that fails.

        Without `force`, also where there is a file of that name by then.
        """
        arrays: dict[str, Array] = {name: getattr(self, name) for name in TYPES}
        infos = {name: TensorInfo(TYPES[name], array.shape) for name, array in arrays.items()}
        metadata = {
            "format": FORMAT, "version": VERSION, "max_order": str(self.max_order),
            "num_tokens": str(self.num_tokens), "vocabulary_sha256": self.sha256,
        }  # fmt: skip
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
                aside = Path(folder) / path.name
                write_tensor_file(aside, infos, arrays.__getitem__, metadata)
                place_file(aside, path, force=force)
        except OSError as error:
            raise SpecDecError(
                f"{path} cannot be written: {error.strerror}",
                "check the folder and its permissions",
            ) from None


def read_vocabulary(path: Path) -> tuple[int, str]:
    """Return the number of tokens of a table's vocabulary, and their sha256, by its header alone.

    Raises SpecDecError as `read_ngrams` does.
    """
    metadata = _open(path).metadata
    try:
        return int(metadata["num_tokens"]), metadata["vocabulary_sha256"]
    except (KeyError, ValueError) as error:
        raise SpecDecError(f"{path} is damaged: {error}", HINT) from None


def read_ngrams(path: Path) -> NgramTable:
    """Read a table; SpecDecError for a file of another kind, or one that is damaged."""
    file = _open(path)
    try:
        table = NgramTable(
            **{name: file.read(name) for name in TYPES},
            max_order=int(file.metadata["max_order"]),
            num_tokens=int(file.metadata["num_tokens"]),
            sha256=file.metadata["vocabulary_sha256"],
        )  # fmt: skip
        _check(table)
    except (KeyError, ValueError) as error:
        raise SpecDecError(f"{path} is damaged: {error}", HINT) from None
    return table


def _open(path: Path) -> TensorFile:
    """Open a table's file and check of which kind it is."""
    file = TensorFile(path)
    if file.metadata.get("format") != FORMAT:
        raise SpecDecError(f"{path} is no table of n-grams that specdec wrote", HINT)
    if file.metadata.get("version") != VERSION:
        version = file.metadata.get("version")
        raise SpecDecError(f"{path} is of version {version}, this is for {VERSION}", HINT)
    types = {name: info.dtype for name, info in file.tensors.items()}
    if types != TYPES:
        raise SpecDecError(f"{path} holds {types}, a table of n-grams has {TYPES}", HINT)
    return file


def _check(table: NgramTable) -> None:
    """Raise ValueError where arrays do not belong together."""
    keys, counts, tokens = table.keys, table.counts, table.tokens
    if any(array.ndim != 1 for array in (keys, counts, tokens, table.shares)):
        raise ValueError("its arrays are no lists")
    if not len(keys):
        raise ValueError("it has no contexts")
    if not 1 <= table.max_order <= MAX_ORDER:
        raise ValueError(f"max_order is {table.max_order}, not 1 to {MAX_ORDER}")
    num_counted = int(table.starts[-1])
    if not len(keys) == len(counts) or not num_counted == len(tokens) == len(table.shares):
        raise ValueError(
            f"{len(keys)} contexts with {len(counts)} counts, {len(tokens)} tokens of"
            f" {num_counted} with {len(table.shares)} shares"
        )
    if not (keys[1:] > keys[:-1]).all():
        raise ValueError("contexts are not in order")
    if len(tokens) and not (0 <= tokens.min() and tokens.max() < table.num_tokens):
        raise ValueError(f"tokens beyond the {table.num_tokens} of its vocabulary")


def hash_tokens(tokenizer: Any, num_tokens: int) -> str:
    """Return the sha256 of what ids below `num_tokens` stand for, of one in `STRIDE` of them.

    So a vocabulary that has more, such as special tokens after them, is of the table's kind too.
    tokenizer: of transformers.
    """
    ids = range(0, min(num_tokens, len(tokenizer)), STRIDE)
    text = json.dumps([len(ids), *tokenizer.convert_ids_to_tokens([*ids])], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
