"""Shared core of the convert, build, run and train stages."""

from pathlib import Path

__version__ = "0.1.0"

# A wheel holds the stages inside this package; a checkout keeps them beside it.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and str(_checkout) not in __path__:
    __path__.append(str(_checkout))
