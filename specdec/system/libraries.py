"""Optional libraries: imported where they are used, with an error that names the extra."""

from __future__ import annotations

from typing import Any

from specdec.errors import SpecDecError, name_extra


def import_gguf(purpose: str) -> Any:
    """Import the package gguf, or raise SpecDecError with its remedy. purpose: the work's name."""
    try:
        import gguf
    except ImportError as error:
        raise SpecDecError(
            f"{purpose} needs the package gguf: {error}", name_extra("gguf")
        ) from None
    return gguf
