"""The tokenizer of a model: loaded, or copied into an engine that then needs no other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, UsageError
from specdec.files.folders import is_hub_id, refuse_absent
from specdec.gguf.folder import localize
from specdec.hub import fetch_files
from specdec.logs import get_logger
from specdec.pretrained import load_tokenizer
from specdec.vocabulary import read_vocabulary

FOLDER = "tokenizer"  # of an engine
# What transformers reads a tokenizer from; config.json names the model, and generation_config.json
# the tokens that end a text. No code: it would not be run.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja", "chat_template.json",
    "config.json", "generation_config.json",
)  # fmt: skip

logger = get_logger(__name__)


def find_tokenizer(engine_dir: Path, given: str | None = None) -> str | None:
    """Return the tokenizer that is given, or else the one that the engine folder holds."""
    folder = engine_dir / FOLDER
    if given is None:
        return str(folder) if folder.is_dir() else None
    return localize(given)


def check_tokenizer(directory: str, recorded: dict[str, Any] | None) -> Path:
    """Return the folder of a tokenizer; raise SpecDecError for one that is not the model's.

    directory: a folder, a GGUF file, or a hub id, of which the tokenizer's files are downloaded.
    recorded: the vocabulary that the checkpoint was made with, None where that is not known.
    """
    folder = Path(localize(directory))
    if not folder.is_dir():
        folder = fetch_tokenizer(directory)
    load_tokenizer(str(folder))
    found = read_vocabulary(folder)
    if recorded is not None and found is not None and found != recorded:
        raise SpecDecError(
            f"the tokenizer in {directory} ({found['num_tokens']} tokens) is not the one that the"
            f" checkpoint was made with ({recorded['num_tokens']} tokens)",
            "give the folder of the Hugging Face base model, or leave --tokenizer-dir out",
        )
    return folder


def fetch_tokenizer(hub_id: str) -> Path:
    """Fetch a tokenizer's files from the Hub, or find them cached; return their folder."""
    if not is_hub_id(hub_id):
        raise refuse_absent(Path(hub_id), f"--tokenizer-dir {hub_id}")
    folder = fetch_files(hub_id, "--tokenizer-dir", FILES)
    if not (folder / "generation_config.json").is_file():
        logger.warning(
            "--tokenizer-dir %s: no generation_config.json was found, so only the end tokens of"
            " its tokenizer and config.json end a text; download the whole model, or give --end-id",
            hub_id,
        )
    return folder


def copy_tokenizer(folder: Path, engine_dir: Path) -> None:
    """Copy a tokenizer's files into an engine folder."""
    copied = engine_dir / FOLDER
    copied.mkdir()
    for name in FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, copied / name)
    load_tokenizer(str(copied))  # that nothing it needs is missing


def lack_tokenizer(whose: str) -> UsageError:
    """The error for an engine without a tokenizer; whose: who needs one, as "stop words need"."""
    return UsageError(
        f"{whose} a tokenizer, and the engine holds none",
        "give the base model's folder as --tokenizer-dir, here or to specdec-build",
    )
