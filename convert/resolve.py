"""A model by its name: a local folder, a GGUF file, or a Hub id whose files are fetched."""

from __future__ import annotations

from pathlib import Path

from specdec.errors import SpecDecError, UsageError
from specdec.files.folders import (
    MEDUSA,
    MEDUSA_FILES,
    MODEL,
    MTP,
    expect_folder,
    find_gguf,
    is_hub_id,
    refuse_absent,
)
from specdec.system.cache import use_download

from .hf import GgufFolder, HfFolder
from .hub import fetch_model


def open_model(name: str, flag: str, kind: str | None = MODEL) -> HfFolder:
    """Open a local folder, a GGUF file, or a Hub id whose files are fetched or already cached.

    kind: the kind of folder that is required, of specdec/files/folders.py; None: any drafter's.
    """
    if not name:
        raise UsageError(f"{flag} is empty", "give a folder or Hub id")
    path = Path(name)
    use_download(path)
    if kind in (MODEL, MTP) and (file := find_gguf(path)) is not None:
        return GgufFolder(file)
    if kind not in (MODEL, MTP) and path.is_file() and find_gguf(path) is not None:
        raise SpecDecError(
            f"{flag} {name} is a GGUF file, and of drafters only heads in a model's own are read",
            "give the Hugging Face folder that the drafter was published as",
        )
    weight_files = MEDUSA_FILES if kind in (MEDUSA, None) else ()
    if path.is_dir():
        if kind is not None:
            expect_folder(path, kind, flag)
        return HfFolder(path, weight_files=weight_files)
    if path.exists() or not is_hub_id(name):
        raise refuse_absent(path, f"{flag} {name}")
    return HfFolder(fetch_model(name, flag, weight_files), weight_files=weight_files)
