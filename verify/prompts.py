"""What an engine is asked: the user's prompts, or a small set of our own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec.decode.prompts import SOURCES
from specdec.decode.prompts import read_prompts as read_file
from specdec.engine.layout import BuildConfig
from specdec.errors import SpecDecError
from specdec.files.folders import has_tokenizer
from specdec.pretrained import load_tokenizer
from specdec.texts import TEXTS

from .settings import VerifySettings

LENGTHS = (1, 4, 11, 24, 8, 47)  # of prompts in token ids, where there is no tokenizer


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Lines of a .jsonl file.

    expected: each prompt's token ids, None where only specdec-run knows them.
    """

    requests: list[str]
    expected: list[list[int] | None]


def load_model_tokenizer(model_dir: str) -> Any:
    """Load the model's tokenizer; None where its folder has none."""
    folder = Path(model_dir)
    if folder.is_dir() and not has_tokenizer(folder):
        return None
    return load_tokenizer(model_dir, "--model-dir")


def make_prompts(
    settings: VerifySettings, build: BuildConfig, vocab_size: int, tokenizer: Any
) -> Prompts:
    """Read --prompts, or choose those of our own that the engine has room for."""
    if settings.prompts is not None:
        entries = read_prompts(settings.prompts)
        if tokenizer is None and any("input_ids" not in e for e in entries):
            raise SpecDecError(
                f"{settings.prompts} holds texts, and {settings.model_dir} has no tokenizer",
                'give token ids, {"input_ids": [...]} a line of a .jsonl file',
            )
    else:
        longest = min(build.max_input_len, build.max_seq_len - settings.max_output_len)
        entries = list(choose_prompts(longest, vocab_size, tokenizer))
        if not entries:
            raise SpecDecError(
                f"max_seq_len {build.max_seq_len} and max_input_len {build.max_input_len} of the"
                f" engine leave {max(0, longest)} tokens for a prompt beside"
                f" {settings.max_output_len} of output: none of the built-in prompts is so short",
                "lower --max-output-len, or give --prompts",
            )
    lines = [json.dumps(entry) for entry in entries]
    return Prompts(lines, [_encode(entry, tokenizer) for entry in entries])


def _encode(entry: dict[str, Any], tokenizer: Any) -> list[int] | None:
    if isinstance(entry.get("prompt"), str):
        ids: list[int] = tokenizer(entry["prompt"], verbose=False)["input_ids"]
        return ids
    return entry.get("input_ids")


def choose_prompts(longest: int, vocab_size: int, tokenizer: Any) -> Sequence[dict[str, Any]]:
    """Those of the built-in prompts that have at most `longest` tokens."""
    if tokenizer is None:
        drawn = np.random.Generator(np.random.Philox(key=0)).integers(
            0, vocab_size, (len(LENGTHS), max(LENGTHS))
        )
        ids = [row[:length].tolist() for row, length in zip(drawn, LENGTHS, strict=True)]
        return [{"input_ids": row} for row in ids if len(row) <= longest]
    return [{"prompt": text} for text in TEXTS if 0 < len(tokenizer(text)["input_ids"]) <= longest]


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Read a file as specdec-run does, without what it says of decoding, which is tested here."""
    given = [line.prompt.list_given() for line in read_file(path, "--prompts")]
    return [{key: one[field] for key, field in SOURCES.items() if field in one} for one in given]
