"""Candidates: folders and files on this machine that may hold a drafter."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from specdec.errors import SpecDecError
from specdec.files.folders import (
    WEIGHT_SUFFIXES,
    find_gguf,
    is_hub_id,
    list_gguf,
    refuse_absent,
)
from specdec.files.hub import list_cached

FOLDER, HUB_CACHE, TARGET = "folder", "hub cache", "target"
HUB_FOLDER = "models--"  # beginning of a repository's folder in a cache of the Hub


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Folder or GGUF file that may hold a drafter.

    name: what a command takes, a Hub id or the path. source: FOLDER, HUB_CACHE, or TARGET for a
    drafter in the target's own folder. option: of specdec-convert that names the drafter's method,
    None where its contents tell.
    """

    name: str
    path: Path
    source: str
    option: str | None = None


def find_target(name: str) -> Path:
    """Return the path of a target: its own, or that of a Hub id's files in the cache."""
    path = Path(name)
    if path.exists() or not is_hub_id(name):
        return path
    folders = dict(list_cached()[0])
    if name not in folders:
        raise SpecDecError(
            f"--model-dir {name} is no local folder, and the Hub's cache does not hold it",
            f"fetch it first: specdec-convert --model-dir {name} --output-dir out/{path.name}"
            " --dry-run; or give its folder",
        )
    return folders[name]


def find_candidates(folders: Sequence[str], target: Path) -> tuple[list[Candidate], list[str]]:
    """List what may hold a drafter, each once and without the target, and warn of what holds none.

    folders: those of --among; the Hub's cache comes after them.
    """
    folder_candidates: list[Candidate] = []
    warnings = []
    for folder in folders:
        path = Path(folder)
        if not path.exists():
            raise refuse_absent(path, f"--among {folder}")
        inner_candidates = list(_list_folder(path))
        if not inner_candidates:
            warnings.append(f"--among {folder} holds no model and no drafter")
        folder_candidates += inner_candidates
    cached_candidates, faults = _list_cache(None)
    known_paths = {_resolve(target)}
    candidates = []
    for candidate in [*folder_candidates, *cached_candidates]:
        if (key := _resolve(candidate.path)) not in known_paths:
            known_paths.add(key)
            candidates.append(candidate)
    return candidates, [*warnings, *faults]


def _resolve(path: Path) -> Path:
    """Return the path that a model is known by: of a folder of one GGUF file the file's."""
    with contextlib.suppress(SpecDecError, OSError):  # several models, or a folder that is closed
        path = find_gguf(path) or path
    return path.resolve()


def _list_folder(path: Path) -> Iterator[Candidate]:
    """Yield the candidates that a folder is and has directly in it; a file is one by itself."""
    if not path.is_dir():
        yield Candidate(str(path), path, FOLDER)
        return
    try:
        inner_folders = [inner for inner in sorted(path.iterdir()) if inner.is_dir()]
    except OSError:
        inner_folders = []  # looking at the folder itself will tell why
    if any(inner.name.startswith(HUB_FOLDER) for inner in inner_folders):
        yield from _list_cache(path)[0]
    for folder in (path, *inner_folders):
        for model in _list_models(folder):
            yield Candidate(str(model), model, FOLDER)


def _list_cache(cache_dir: Path | None) -> tuple[list[Candidate], list[str]]:
    """Return the models in a cache of the Hub, and what is wrong with other entries in it."""
    cached_models, faults = list_cached(cache_dir)
    candidates = []
    for hub_id, folder in cached_models:
        for model in _list_models(folder):
            is_usual = cache_dir is None and model == folder  # a command finds it by its id
            candidates.append(Candidate(hub_id if is_usual else str(model), model, HUB_CACHE))
    return candidates, [f"the Hub's cache: {fault}" for fault in faults]


def _list_models(folder: Path) -> list[Path]:
    """List a folder if it is one of weights or a config.json, else the GGUF models in it."""
    try:
        names = [entry.name for entry in os.scandir(folder) if not entry.is_dir()]
    except OSError:
        return [folder]  # reading it will tell why
    if any(name == "config.json" or name.endswith(WEIGHT_SUFFIXES) for name in names):
        return list_gguf(folder) or [folder]
    return []
