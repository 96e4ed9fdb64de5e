"""Settings of specdec-run."""

from __future__ import annotations

from specdec.decode.settings import EAGLE_OPTIONS, RunSettings

__all__ = ["EAGLE_OPTIONS", "RunSettings"]
