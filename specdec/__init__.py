"""Speculative decoding, from Hugging Face folders to a running engine.

The public API is the names in `__all__` (docs/api.md); all else may change with a release.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.decode.api import Engine, Stream
    from specdec.decode.outputs import Event, Output
    from specdec.decode.requests import RequestStats
    from specdec.errors import (
        EngineBusyError,
        EngineLostError,
        PromptError,
        SpecDecError,
        StepError,
        UsageError,
    )
    from specdec.text.prompts import Prompt

__version__ = "0.1.0"
__all__ = [
    "Engine", "EngineBusyError", "EngineLostError", "Event", "Output", "Prompt", "PromptError",
    "RequestStats", "SpecDecError", "StepError", "Stream", "UsageError", "__version__",
]  # fmt: skip

# A wheel holds the stages inside this package; in a checkout they lie next to it.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and str(_checkout) not in __path__:
    __path__.append(str(_checkout))

_MODULES = {
    "Prompt": "specdec.text.prompts",
    "RequestStats": "specdec.decode.requests",
    **{name: "specdec.errors" for name in __all__ if name.endswith("Error")},
    **dict.fromkeys(("Engine", "Stream"), "specdec.decode.api"),
    **dict.fromkeys(("Event", "Output"), "specdec.decode.outputs"),
}

if not TYPE_CHECKING:  # else a checker would believe that every name is here

    def __getattr__(name: str) -> Any:
        """Import a public name when it is used first: torch takes a while."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
