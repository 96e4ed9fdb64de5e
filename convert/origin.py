"""Whose drafter it is: what its folder says of the model that it was trained for, and whether that
is the target it is converted with.

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
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(b|m)")
# Words of a name that tell its form, not which model it is; and those of drafters' own names.
FORMS = frozenset(
    "hf meta fp8 fp16 bf16 fp32 float16 bfloat16 awq gptq int4 int8 4bit 8bit w4a16 w8a8 nvfp4 gguf"
    " quantized dynamic unsloth model models snapshot main local".split()
)
DRAFTERS = re.compile(r"eagle|medusa|draft|dflash|dspark|specul|redrafter|mtp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """A drafter's folder alongside its target's: what each says, for `find_other_base`.

    recorded: (bytes, sha256) of the weight files that it was trained with; named: the models that
    it names; names: of the target; files: its weight files; hashes: those known without reading.
    """

    drafter: Path
    recorded: Sequence[tuple[int, str]]
    named: Sequence[str]
    names: Sequence[str]
    files: Sequence[Path]
    hashes: Sequence[tuple[int, str]]
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
    recorded, named = _read_sources(drafter)
    card = drafter / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    recorded = recorded or [
        (int(size), sha256)
        for file, size, sha256 in _CARD_FILE.findall(text.partition("## Data")[0])
        if file.endswith(WEIGHT_SUFFIXES)
    ]
    named = [*named, *_list_names(config), *_CARD_BASE.findall(text)]
    own = str(config.get("_name_or_path") or "")
    if not named and own and not DRAFTERS.search(own.lower()):
        named = [own]
    is_checkpoint = (target / "rank0.safetensors").is_file()
    hashes, made = _read_sources(target) if is_checkpoint else ([], [])
    path = target.resolve()
    cached = [part.split("--")[-1] for part in path.parts if part.startswith("models--")]
    names = [*made, *([name] if name else []), *(cached or [path.name])]
    names += _list_own_names(target)
    files = [] if is_checkpoint else [p for p in sources if p.suffix in WEIGHT_SUFFIXES]
    return Origin(
        drafter=drafter, recorded=recorded, named=named, names=names, files=files,
        hashes=hashes, num_parameters=num_parameters,
    )  # fmt: skip


def find_other_base(origin: Origin, hashes: Mapping[Path, str] | None = None) -> str | None:
    """Return a warning where the drafter belongs to another model, as far as can be told.

    hashes: of the target's files, where they are known; small files are read. Hashes decide where
    both sides have them, then sizes, then names.
    """
    sizes = sum(path.stat().st_size for path in origin.files)
    known = list(origin.hashes)
    for path in origin.files:
        sha256 = (hashes or {}).get(path)
        if sha256 is None and origin.recorded and sizes <= MAX_HASHED_BYTES:
            sha256 = hash_file(path)
        if sha256 is not None:
            known.append((path.stat().st_size, sha256))
    recorded = set(origin.recorded)
    if recorded and recorded <= set(known):
        return None
    own = sorted(size for size, _ in known) or sorted(p.stat().st_size for p in origin.files)
    said = f"{origin.drafter} was trained for another target"
    advice = "; drafts would be bad, the text stays the target's"
    if recorded and known and own == sorted(size for size, _ in recorded):
        return f"{said}: sha256 {min(recorded)[1][:16]}..., not {min(known)[1][:16]}...{advice}"
    if any(is_same(named, name) for named in origin.named for name in origin.names):
        return None
    if recorded and own != sorted(size for size, _ in recorded):
        return (
            f"{said}: its weights had {sum(size for size, _ in recorded):,} bytes, this target's"
            f" have {sum(own):,}{advice}, unless it is the same model in another form"
        )
    if recorded or not origin.named or _agrees_in_size(origin):
        return None
    return (
        f"{origin.drafter} names {origin.named[0]} as its target, this one is called"
        f" {' or '.join(dict.fromkeys(origin.names))}: if it is another model{advice}"
    )


def is_same(named: str, name: str) -> bool:
    """Whether two names are of one model, under any publisher and in any form."""
    mine, other = _split(name), _split(named)
    if not mine or not other:
        return False
    if mine == other:
        return True
    # A folder's short name, such as llama31.
    has_size = any(_SIZE.fullmatch(word) for word in mine)
    squashed = re.sub(r"[^a-z0-9]", "", _cut(name))
    return not has_size and len(squashed) > 4 and squashed in re.sub(r"[^a-z0-9]", "", _cut(named))


def _cut(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower()


def _split(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9.]+", _cut(name))) - FORMS - {""}


def _agrees_in_size(origin: Origin) -> bool:
    """Whether a name tells as many parameters as the target has, which has no telling name."""
    for named in origin.named:
        for number, unit in _SIZE.findall(_cut(named)):
            ratio = float(number) * {"b": 1e9, "m": 1e6}[unit] / max(1, origin.num_parameters)
            if 0.75 < ratio < 1.33:
                return not any(_SIZE.search(_cut(name)) for name in origin.names)
    return False


def _list_names(config: Mapping[str, Any], place: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _list_names(value, key)
        elif isinstance(value, str) and value:
            name = f"{place}_{key}" if key.startswith("name") else key
            if _KEY.fullmatch(name.lower()):
                yield value


def _list_own_names(target: Path) -> list[str]:
    try:
        name = read_json(target / "config.json").get("_name_or_path")
    except SpecDecError:
        return []
    return [name] if isinstance(name, str) and name else []


def _read_sources(folder: Path) -> tuple[list[tuple[int, str]], list[str]]:
    """The weight files that a manifest's folder was made from, and the name of their model."""
    if not (folder / "manifest.json").is_file():
        return [], []
    try:
        document = read_json(folder / "manifest.json")
        sources = document["sources"]
        parents = [Path(entry["path"]).parent for entry in sources]  # the model's files come first
        entries = [
            (int(entry["bytes"]), str(entry["sha256"]))
            for entry, parent in zip(sources, parents, strict=True)
            if entry["path"].endswith(WEIGHT_SUFFIXES) and parent == parents[0]
        ]
        name = document["settings"].get("model_dir")
    except (SpecDecError, KeyError, TypeError, ValueError, AttributeError):
        return [], []
    return entries, [str(name)] if name else []
