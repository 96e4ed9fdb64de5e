"""Settings of specdec doctor."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.command.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """One field is one flag."""

    engine_dir: Path | None = setting(
        metavar="ENGINE", help="Also check whether this engine can run here."
    )
    verify_hashes: bool = setting(
        False, help="Also compare every byte of the engine with its manifest."
    )
    json: bool = setting(False, help="Print one JSON object on stdout.")
