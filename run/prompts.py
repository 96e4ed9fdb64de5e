"""Prompts from flags and files, tokenized into requests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, UsageError, suggest, summarize

from .requests import Request
from .settings import RunSettings

REQUEST_KEYS = ("prompt", "input_ids", "max_output_len")


def read_prompts(settings: RunSettings) -> list[dict[str, Any]]:
    """Return one object a prompt with the keys of a .jsonl line."""
    if bool(settings.input_text) == (settings.input_file is not None):
        raise UsageError(
            "give exactly one of --input-text and --input-file",
            'for example --input-text "def main():"',
        )
    if settings.input_file is None:
        return [{"prompt": text} for text in settings.input_text]
    path = settings.input_file
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise SpecDecError(f"{path} does not exist", "check the path of --input-file") from None
    except UnicodeDecodeError:
        raise SpecDecError(f"{path} is not UTF-8 text", "convert the file to UTF-8") from None
    if path.suffix == ".jsonl":
        prompts = [_read_line(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    elif path.suffix == ".txt":
        prompts = [{"prompt": line} for line in lines if line.strip()]
    else:
        raise SpecDecError(f"{path} is neither .txt nor .jsonl", "name the file by what it holds")
    if not prompts:
        raise SpecDecError(f"{path} holds no prompt", "write one prompt a line")
    return prompts


def _read_line(path: Path, number: int, line: str) -> dict[str, Any]:
    where = f"{path} line {number}"
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise SpecDecError(
            f"{where} is not JSON: {error}", "write one JSON object a line"
        ) from None
    if not isinstance(entry, dict):
        raise SpecDecError(f"{where} is not a JSON object", 'write {"prompt": "..."}')
    for key in entry:
        if key not in REQUEST_KEYS:
            raise SpecDecError(
                f"{where}: unknown key {key!r}{suggest(key, REQUEST_KEYS)}",
                f"this release knows {', '.join(REQUEST_KEYS)}",
            )
    ids, limit = entry.get("input_ids"), entry.get("max_output_len")
    if ("prompt" in entry) == ("input_ids" in entry):
        raise SpecDecError(
            f"{where} needs exactly one of prompt and input_ids", 'write {"prompt": "..."}'
        )
    if ids is None and not isinstance(entry["prompt"], str):
        raise SpecDecError(f"{where}: prompt is no text", 'write {"prompt": "..."}')
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise SpecDecError(f"{where}: input_ids is no list of whole numbers", "give token ids")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise SpecDecError(f"{where}: max_output_len is {limit!r}", "give a positive whole number")
    return entry


def load_tokenizer(directory: str) -> Any:
    """Load a Hugging Face tokenizer; remote code is never run."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # noqa: BLE001 - a broken folder makes transformers raise anything
        raise SpecDecError(
            f"no tokenizer in {directory!r}: {summarize(error)}",
            "give the folder of the Hugging Face base model as --tokenizer-dir",
        ) from None


def find_end_ids(settings: RunSettings, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a request: --end-id, else generation_config.json's, else the tokenizer's."""
    if settings.end_id is not None:
        return frozenset([settings.end_id])
    if settings.tokenizer_dir is not None:
        path = Path(settings.tokenizer_dir) / "generation_config.json"
        if path.is_file():
            from specdec.storage import read_json

            ids = read_json(path).get("eos_token_id")
            ids = ids if isinstance(ids, list) else [ids]
            if all(type(i) is int for i in ids):
                return frozenset(ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return frozenset([tokenizer.eos_token_id])
    return frozenset()


def make_requests(
    prompts: Iterable[dict[str, Any]], settings: RunSettings, tokenizer: Any
) -> list[Request]:
    """Tokenize prompts; a prompt's own settings win over the flags."""
    end_ids = find_end_ids(settings, tokenizer)
    requests = []
    for index, prompt in enumerate(prompts):
        text, ids = prompt.get("prompt", ""), prompt.get("input_ids")
        if ids is None:
            if tokenizer is None:
                raise UsageError(
                    "text prompts need --tokenizer-dir", "give the base model's folder"
                )
            ids = tokenizer(text)["input_ids"]
        elif tokenizer is not None:
            text = tokenizer.decode(ids)
        requests.append(
            Request(
                index=index,
                input_text=text,
                input_ids=ids,
                max_output_len=prompt.get("max_output_len") or settings.max_output_len,
                end_ids=end_ids,
            )
        )
    return requests
