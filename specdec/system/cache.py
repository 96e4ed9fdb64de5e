"""The user's folder of files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def find_cache() -> Path | None:
    """Return the user's cache folder: $SPECDEC_CACHE_DIR, or ~/.cache/specdec.

    None for a user without a home, as containers have them.
    """
    if folder := os.environ.get("SPECDEC_CACHE_DIR"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "specdec"
    try:
        return Path.home() / ".cache" / "specdec"
    except RuntimeError:
        return None


# Folders of the cache -> what they hold.
PARTS = {
    "generate": "engines",
    "kernels": "compiled kernels",
    "models": "downloads",
    "gguf": "tokenizers of GGUF files",
    "costs": "cost tables",
    "checked": "records of compared files",
}
