"""The tokens that a drafter may draft: a file's list, or the most frequent ones of its texts.

FR-Spec, https://arxiv.org/abs/2502.14856: a drafter that knows only frequent tokens reads a small
part of its head, and is seldom wrong for it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specdec.errors import SpecDecError, UsageError
from specdec.files.reading import Array, open_file, parse_json
from specdec.methods import DrafterParams
from specdec.model.config import ModelConfig
from specdec.text.chat import ChatFormat
from specdec.text.documents import name_line, parse_object, read_document, read_lines
from specdec.text.pretrained import load_tokenizer

from .settings import BuildSettings

KEYS = "text, messages, conversations or input_ids"
LEAST = 64  # a drafter with fewer tokens drafts nothing


def choose_tokens(
    settings: BuildSettings, model: ModelConfig, drafter: DrafterParams | None
) -> Array | None:
    """Return the tokens [n], rising; None where all may be drafted."""
    path, size = settings.draft_vocab_file, settings.draft_vocab_size
    if path is None:
        if size is not None:
            raise UsageError(
                f"--draft-vocab-size {size} without --draft-vocab-file",
                "give texts like those to be decoded, or a list of tokens",
            )
        return None
    if drafter is None:
        raise SpecDecError("--draft-vocab-file: the checkpoint has no drafter", "leave it out")
    if path.suffix == ".json":
        tokens = read_list(path, model.vocab_size)[:size]
    elif size is None:
        raise UsageError(
            f"--draft-vocab-file {path} holds texts", "add --draft-vocab-size, such as 8192"
        )
    else:
        counts = count_tokens(path, settings.tokenizer_dir, model.vocab_size)
        order = np.argsort(-counts, kind="stable")[:size]
        tokens = order[counts[order] > 0].tolist()
    least = max(LEAST, drafter.max_draft_tokens)
    if not least <= len(tokens) < model.vocab_size:
        raise SpecDecError(
            f"--draft-vocab-file {path} makes {len(tokens)} tokens of {model.vocab_size}; the"
            f" drafter needs {least} at least, and fewer than all",
            "give more texts or another --draft-vocab-size; for all tokens leave both out",
        )
    return np.sort(np.array(tokens, np.int64))


def read_list(path: Path, vocab_size: int) -> list[int]:
    """Return the tokens of a JSON list."""
    with open_file(path) as file:
        listed = parse_json(file.read())
    if not isinstance(listed, list) or not all(type(token) is int for token in listed):
        raise SpecDecError(f"{path} is not a JSON list of tokens", "write it as [11, 198, 257]")
    if outside := [token for token in listed if not 0 <= token < vocab_size]:
        raise SpecDecError(
            f"{path}: {len(outside)} tokens are outside the vocabulary of {vocab_size}, the first"
            f" is {outside[0]}",
            "list tokens of the target's tokenizer",
        )
    if len(set(listed)) != len(listed):
        raise SpecDecError(
            f"{path} lists {len(listed)} tokens, {len(set(listed))} of them different",
            "list each once",
        )
    return listed


def count_tokens(path: Path, tokenizer_dir: str | None, vocab_size: int) -> Array:
    """Count how often each token occurs in a file's rows of tokens or texts, [V]."""
    counts = np.zeros(vocab_size, np.int64)
    format_: ChatFormat | None = None
    is_plain = path.suffix == ".txt"
    for number, line in read_lines(path):
        with name_line(path, number, KEYS):
            row = {} if is_plain else parse_object(line)
            tokens = row.get("input_ids")
            if tokens is None:
                document = line.decode("utf-8") if is_plain else read_document(row, KEYS)
                if tokenizer_dir is None:
                    raise SpecDecError(
                        f"--draft-vocab-file {path} holds text, and a tokenizer is needed",
                        "add --tokenizer-dir, or give rows of input_ids",
                    )
                format_ = format_ or ChatFormat(load_tokenizer(tokenizer_dir))
                text = document if isinstance(document, str) else format_.render(document)
                encoded = format_.tokenizer(text, add_special_tokens=False, verbose=False)
                tokens = encoded["input_ids"]
            if not isinstance(tokens, list):
                raise ValueError(f"input_ids is a {type(tokens).__name__}, not a list")
            if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
                raise ValueError(f"input_ids holds what is no token below {vocab_size}")
            np.add.at(counts, np.array(tokens, np.int64), 1)
    return counts
