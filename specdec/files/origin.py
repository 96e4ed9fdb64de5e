"""Origin of a drafter: the model that it was trained for, and whether that is the target.

A drafter of another model of the same sizes converts, runs, and drafts badly; the text stays right.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError
from specdec.files.folders import WEIGHT_SUFFIXES
from specdec.files.reading import hash_file, read_json

MAX_HASHED_BYTES = 1 << 30  # that a dry run reads for a hash
# A line of the model card that specdec-train writes, and the entry of a Hub card that names a base.
_CARD_FILE = re.compile(r"^\* `([^`]+)` (\d+) bytes, sha256 `([0-9a-f]{64})`$", re.MULTILINE)
_CARD_BASE = re.compile(r"\A---\n(?:.*\n)*?base_model:\s*(?:\n- *)?[\"']?([^\s\"']+)")
# Keys under which configs name a drafter's target.
_KEY = re.compile(r"(base|target|verifier|teacher)(_model)?(_(name|path|id|name_or_path))*")
_SHARD = re.compile(r"rank\d+\.safetensors")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(b|m)")
# Words of a name that tell its form, not which model it is; and those of drafters' own names.
FORMS = frozenset(
    "hf meta fp8 fp16 bf16 fp32 float16 bfloat16 awq gptq int4 int8 4bit 8bit w4a16 w8a8 nvfp4 gguf"
    " quantized dynamic unsloth model models snapshot main local".split()
)
DRAFTERS = re.compile(r"eagle|medusa|draft|dflash|dspark|specul|redrafter|mtp|assistant")


ADVICE = "; drafts would be bad, the text stays the target's"  # at the end of a warning


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Facts of a drafter's folder and of its target's, for `find_other_base`.

    Of the drafter: recorded_files: (bytes, sha256) of the weight files that it was trained with;
    base_names: the models that it names. Of the target: target_names, weight_files, and
    known_files: (bytes, sha256) of those that need not be read.
    """

    drafter: Path
    recorded_files: Sequence[tuple[int, str]]
    base_names: Sequence[str]
    target_names: Sequence[str]
    weight_files: Sequence[Path]
    known_files: Sequence[tuple[int, str]]
    num_parameters: int


def read_origin(
    drafter: Path,
    config: Mapping[str, Any],
    sources: Sequence[Path],
    name: str | None,
    num_parameters: int,
) -> Origin:
    """Read what both folders say. config: the drafter's.

    sources: the target's files, of a Hugging Face folder or of a checkpoint; name: as it was given.
    """
    target = sources[0].parent
    recorded_files, base_names = read_training(drafter, config)
    is_checkpoint = (target / "rank0.safetensors").is_file()
    known_files, source_names = _read_sources(target) if is_checkpoint else ([], [])
    target_names = [*source_names, *filter(None, [name]), *list_folder_names(target)]
    weight_files = [path for path in sources if path.suffix in WEIGHT_SUFFIXES]
    return Origin(
        drafter=drafter, recorded_files=recorded_files, base_names=base_names,
        target_names=target_names, weight_files=[] if is_checkpoint else weight_files,
        known_files=known_files, num_parameters=num_parameters,
    )  # fmt: skip


def list_folder_names(folder: Path) -> list[str]:
    """Return the name of a folder, a repository's for one in the Hub's cache, and its model's."""
    cached_names = [
        part.split("--")[-1] for part in folder.resolve().parts if part.startswith("models--")
    ]
    return [*(cached_names or [folder.resolve().name]), *_list_own_names(folder)]


def read_training(
    drafter: Path, config: Mapping[str, Any]
) -> tuple[list[tuple[int, str]], list[str]]:
    """Return the weight files of a drafter's training, and the models that its folder names."""
    recorded_files, base_names = _read_sources(drafter)
    card = drafter / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    recorded_files = recorded_files or [
        (int(size), sha256)
        for file, size, sha256 in _CARD_FILE.findall(text.partition("## Data")[0])
        if file.endswith(WEIGHT_SUFFIXES)
    ]
    base_names = [*base_names, *_list_names(config), *_CARD_BASE.findall(text)]
    folder_name = str(config.get("_name_or_path") or "")
    if not base_names and folder_name and not DRAFTERS.search(folder_name.lower()):
        base_names = [folder_name]
    return recorded_files, base_names


def find_other_base(
    origin: Origin, hashes: Mapping[Path, str] | None = None, *, max_bytes: int = MAX_HASHED_BYTES
) -> str | None:
    """Return a warning where the drafter belongs to another model, as far as the folders tell.

    hashes: of the target's files, where they are known; else they are read up to max_bytes. Hashes
    decide where both sides have them, then sizes, then names.
    """
    if origin.recorded_files:
        target_files = [*origin.known_files, *_hash_files(origin, hashes or {}, max_bytes)]
        return _compare_files(origin, set(origin.recorded_files), set(target_files))
    if not origin.base_names or _shares_name(origin) or _agrees_in_size(origin):
        return None
    return (
        f"{origin.drafter} names {origin.base_names[0]} as its target, this one is called"
        f" {' or '.join(dict.fromkeys(origin.target_names))}: if it is another model{ADVICE}"
    )


def _compare_files(
    origin: Origin, recorded_files: set[tuple[int, str]], target_files: set[tuple[int, str]]
) -> str | None:
    """Return the warning for a drafter of which the training's weight files are recorded.

    Both kinds of files have a size and a hash; target_files: empty where no hash is known.
    """
    if recorded_files <= target_files:
        return None
    target_sizes = sorted(size for size, _ in target_files) or sorted(
        path.stat().st_size for path in origin.weight_files
    )
    recorded_sizes = sorted(size for size, _ in recorded_files)
    claim = f"{origin.drafter} was trained for another target"
    if target_files and target_sizes == recorded_sizes:
        recorded_hash, target_hash = min(recorded_files)[1][:16], min(target_files)[1][:16]
        return f"{claim}: sha256 {recorded_hash}..., not {target_hash}...{ADVICE}"
    if _shares_name(origin) or target_sizes == recorded_sizes:
        return None
    return (
        f"{claim}: its weights had {sum(recorded_sizes):,} bytes, this target's"
        f" have {sum(target_sizes):,}{ADVICE}, unless it is the same model in another form"
    )


def _shares_name(origin: Origin) -> bool:
    """Return whether a name of the drafter's target is one of the target's."""
    return any(is_same(base, name) for base in origin.base_names for name in origin.target_names)


def _hash_files(
    origin: Origin, hashes: Mapping[Path, str], max_bytes: int
) -> Iterator[tuple[int, str]]:
    """Yield the size and hash of the target's weight files; small ones are read where they help."""
    total_bytes = sum(path.stat().st_size for path in origin.weight_files)
    for path in origin.weight_files:
        sha256 = hashes.get(path)
        if sha256 is None and origin.recorded_files and total_bytes <= max_bytes:
            sha256 = hash_file(path)
        if sha256 is not None:
            yield path.stat().st_size, sha256


def is_same(base: str, name: str) -> bool:
    """Return whether two names are of one model, under any publisher and in any form."""
    words, base_words = _split(name), _split(base)
    if not words or not base_words:
        return False
    if words == base_words:
        return True
    # A folder's short name, such as llama31.
    has_size = any(_SIZE.fullmatch(word) for word in words)
    letters, base_letters = (re.sub(r"[^a-z0-9]", "", _cut_name(text)) for text in (name, base))
    return not has_size and len(letters) > 4 and letters in base_letters


def _cut_name(name: str) -> str:
    """Return a name without its publisher and in lower case."""
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


def _split(name: str) -> set[str]:
    """Return the words of a name that tell which model it is."""
    return set(re.split(r"[^a-z0-9.]+", _cut_name(name))) - FORMS - {""}


def _agrees_in_size(origin: Origin) -> bool:
    """Return whether a base's name has the target's size, and no name of the target has a size."""
    for base in origin.base_names:
        for number, unit in _SIZE.findall(_cut_name(base)):
            ratio = float(number) * {"b": 1e9, "m": 1e6}[unit] / max(1, origin.num_parameters)
            if 0.75 < ratio < 1.33:
                return not any(_SIZE.search(_cut_name(name)) for name in origin.target_names)
    return False


def _list_names(config: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Yield the names that a config gives of a drafter's target, in nested objects, too."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _list_names(value, key)
        elif isinstance(value, str) and value:
            name = f"{section}_{key}" if key.startswith("name") else key
            if _KEY.fullmatch(name.lower()):
                yield value


def _list_own_names(target: Path) -> list[str]:
    """Return the name that a folder's config.json gives of itself, if there is one."""
    try:
        name = read_json(target / "config.json").get("_name_or_path")
    except SpecDecError:
        return []
    return [name] if isinstance(name, str) and name else []


def _is_of_model(path: Path) -> bool:
    """Return whether a file has weights of a model: a checkpoint's has the drafter's, too."""
    return path.name.endswith(WEIGHT_SUFFIXES) and not _SHARD.fullmatch(path.name)


def _read_sources(folder: Path) -> tuple[list[tuple[int, str]], list[str]]:
    """Return the weight files that a manifest's folder was made from, and their model's name."""
    if not (folder / "manifest.json").is_file():
        return [], []
    try:
        document = read_json(folder / "manifest.json")
        sources = document["sources"]
        parents = [Path(entry["path"]).parent for entry in sources]  # the model's files come first
        entries = [
            (int(entry["bytes"]), str(entry["sha256"]))
            for entry, parent in zip(sources, parents, strict=True)
            if parent == parents[0] and _is_of_model(Path(entry["path"]))
        ]
        name = document["settings"].get("model_dir")
    except (SpecDecError, KeyError, TypeError, ValueError, AttributeError):
        return [], []
    return entries, [str(name)] if name else []
