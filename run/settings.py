"""Settings of specdec-run."""

from __future__ import annotations

from specdec.decode.settings import RunSettings

__all__ = ["RunSettings"]
