"""The tokenizer of a model: loaded, or copied into an engine that then needs no other."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, UsageError
from specdec.files.folders import is_hub_id, refuse_absent
from specdec.files.hub import fetch_files
from specdec.files.text_reading import TEXTS, find_difference, read_plainly
from specdec.files.vocabulary import (
    READING_KEY,
    has_recorded_file,
    list_differences,
    read_recorded,
    read_vocabulary,
)
from specdec.gguf.folder import localize
from specdec.system.logs import get_logger
from specdec.text.pretrained import load_tokenizer

FOLDER = "tokenizer"  # of an engine
# Files that transformers reads a tokenizer from; config.json names the model, and
# generation_config.json the tokens that end a text. No code: it would not be run.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja", "chat_template.json",
    "config.json", "generation_config.json",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # a folder with a template in each file, NAME.jinja
MAX_SHOWN = 3

logger = get_logger(__name__)


def find_tokenizer(engine_dir: Path, tokenizer_dir: str | None = None) -> str | None:
    """Return the tokenizer that is given, or else the one that the engine folder holds."""
    folder = engine_dir / FOLDER
    if tokenizer_dir is None:
        return str(folder) if folder.is_dir() else None
    return localize(tokenizer_dir)


def check_tokenizer(directory: str, manifest_vocabulary: dict[str, Any] | None) -> Path:
    """Return the folder of a tokenizer; raise SpecDecError for one that is not the model's.

    directory: a folder, a GGUF file, or a hub id, of which the tokenizer's files are downloaded.
    recorded: the vocabulary that the checkpoint was made with, None where that is not known.
    """
    folder = _find_folder(directory)
    load_tokenizer(str(folder))
    if manifest_vocabulary is not None:
        _compare_recorded(
            folder, manifest_vocabulary, f"the tokenizer in {directory}", "the checkpoint"
        )
    return folder


def load_engine_tokenizer(
    engine_dir: Path, tokenizer_dir: str | None = None, flag: str = "--tokenizer-dir"
) -> tuple[str | None, Any]:
    """Load the tokenizer that is given, or else the engine's; return its folder, too.

    flag: the option that gives it. Raises SpecDecError for the tokenizer of another model.
    """
    folder = find_tokenizer(engine_dir, tokenizer_dir)
    if folder is None:
        return None, None
    tokenizer = load_tokenizer(folder, flag)
    stored_tokenizer, subject = engine_dir / FOLDER, f"{flag} {tokenizer_dir}"
    if tokenizer_dir is None or stored_tokenizer.resolve() == Path(folder).resolve():
        return folder, tokenizer
    if stored_tokenizer.is_dir():
        _compare(load_tokenizer(stored_tokenizer), tokenizer, engine_dir, subject)
    elif manifest_vocabulary := read_recorded(engine_dir):
        _compare_recorded(
            _find_folder(tokenizer_dir), manifest_vocabulary, subject, str(engine_dir)
        )
    return folder, tokenizer


def _find_folder(directory: str) -> Path:
    folder = Path(localize(directory))
    return folder if folder.is_dir() else fetch_tokenizer(directory)


def _compare_recorded(
    folder: Path, manifest_vocabulary: dict[str, Any], subject: str, maker: str
) -> None:
    """Raise SpecDecError for a tokenizer other than the one whose vocabulary a manifest records."""
    if has_recorded_file(folder, manifest_vocabulary):
        return
    vocabulary = read_vocabulary(folder)
    keys = [] if vocabulary is None else list_differences(vocabulary, manifest_vocabulary)
    if vocabulary is None or not keys:
        return
    fact = (
        f"{subject} ({vocabulary['num_tokens']} tokens) is not the one that {maker} was made with"
        f" ({manifest_vocabulary['num_tokens']} tokens)"
    )
    if keys == [READING_KEY]:
        fact = (
            f"{subject} reads texts otherwise than the one that {maker} was made with, though"
            f" both have the same {vocabulary['num_tokens']} tokens: its tokenizer.json splits"
            " texts or decodes tokens in another way"
        )
    raise SpecDecError(
        fact, "give the folder of the Hugging Face base model, or leave --tokenizer-dir out"
    )


def _compare(stored_tokenizer: Any, tokenizer: Any, engine_dir: Path, subject: str) -> None:
    """Raise SpecDecError for a tokenizer other than an engine's own. known: the engine's own.

    Tokens that are added to either are no difference.
    """
    engine_tokens, other_tokens = (
        {n: t for t, n in each_tokenizer.get_vocab().items()}
        for each_tokenizer in (stored_tokenizer, tokenizer)
    )
    added_ids = stored_tokenizer.added_tokens_decoder.keys()
    different_ids = [
        number for number, token in sorted(engine_tokens.items())
        if other_tokens.get(number, token if number in added_ids else None) != token
    ]  # fmt: skip
    remedy = f"leave {subject.split()[0]} out: the engine holds its own tokenizer"
    if different_ids:
        examples = ", ".join(
            f"{number} is {engine_tokens[number]!r} and {other_tokens.get(number, 'absent')!r}"
            for number in different_ids[:MAX_SHOWN]
        )
        raise SpecDecError(
            f"{subject} is not the tokenizer of {engine_dir}: {len(different_ids)} of its"
            f" {len(engine_tokens)} tokens differ: {examples}",
            remedy,
        )
    backends = [
        getattr(each_tokenizer, "backend_tokenizer", None)
        for each_tokenizer in (stored_tokenizer, tokenizer)
    ]
    if None in backends:
        return
    difference = find_difference(
        functools.partial(read_plainly, backends[0]), functools.partial(read_plainly, backends[1]),
        TEXTS,
    )  # fmt: skip
    if difference is not None:
        examples = difference.describe("to the engine's own", "to that one")
        raise SpecDecError(f"{subject} is not the tokenizer of {engine_dir}: {examples}", remedy)


def fetch_tokenizer(hub_id: str) -> Path:
    """Fetch a tokenizer's files from the Hub, or find them cached; return their folder."""
    if not is_hub_id(hub_id):
        raise refuse_absent(Path(hub_id), f"--tokenizer-dir {hub_id}")
    folder = fetch_files(hub_id, "--tokenizer-dir", (*FILES, f"{TEMPLATES}/*.jinja"))
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
    copy_files(folder, copied)
    load_tokenizer(str(copied))  # that nothing it needs is missing


def copy_files(folder: Path, destination: Path) -> None:
    """Copy a tokenizer's files into a folder, which keeps a config.json of its own."""
    for name in FILES:
        if (folder / name).is_file() and not (destination / name).exists():
            shutil.copyfile(folder / name, destination / name)
    for path in list_templates(folder):
        (destination / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(path, destination / TEMPLATES / path.name)


def list_templates(folder: Path) -> list[Path]:
    """List the files of a folder's named chat templates."""
    return sorted((folder / TEMPLATES).glob("*.jinja"))


def lack_tokenizer(subject: str) -> UsageError:
    """Return the error for an engine without a tokenizer.

    subject: the feature that needs one, with its verb, as "stop words need".
    """
    return UsageError(
        f"{subject} a tokenizer, and the engine holds none",
        "give the base model's folder as --tokenizer-dir, here or to specdec-build",
    )
