"""What an engine is asked: the user's prompts, or a small set of our own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec.decode.prompts import read_entries, read_lines
from specdec.engine.layout import BuildConfig
from specdec.errors import SpecDecError
from specdec.files.folders import has_tokenizer
from specdec.files.reading import parse_json
from specdec.pretrained import load_tokenizer
from specdec.texts import TEXTS

from .settings import VerifySettings

LENGTHS = (1, 4, 11, 24, 8, 47)  # of prompts in token ids, where there is no tokenizer
# How a request is decoded is what is under test here, not the file's to say.
IGNORED_KEYS = ("max_output_len", "temperature", "top_k", "top_p", "seed", "stop")


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Lines of a .jsonl file, empty ones kept so that their numbers stay the user's.

    expected: each prompt's token ids, None where only specdec-run knows them.
    """

    lines: list[str]
    expected: list[list[int] | None]

    @property
    def requests(self) -> list[str]:
        """The lines that are requests."""
        return [line for line in self.lines if line]


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
        if tokenizer is None and any(e and "input_ids" not in e for e in entries):
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
    lines = [json.dumps(entry) if entry else "" for entry in entries]
    return Prompts(lines, [_encode(entry, tokenizer) for entry in entries if entry])


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
    """Read a file as specdec-run does, without what it says of decoding; empty lines are {}."""
    return read_entries(path, read_lines(path, "--prompts"), path.suffix, _read_line)


def _read_line(where: str, line: str) -> dict[str, Any]:
    try:
        entry = parse_json(line.encode())
    except ValueError as error:
        raise SpecDecError(f"{where} is not JSON: {error}", "write one object a line") from None
    if not isinstance(entry, dict) or not (set(entry) - set(IGNORED_KEYS)):
        raise SpecDecError(f"{where} holds no prompt", 'write {"prompt": "..."}')
    return {key: value for key, value in entry.items() if key not in IGNORED_KEYS}
