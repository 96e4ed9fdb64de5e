"""Settings of specdec doctor."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.options import option_group, setting

ENGINE = option_group("Engine")
CACHE = option_group("Cache")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """Settings of specdec doctor; each field is one flag."""

    engine_dir: Path | None = ENGINE(
        metavar="ENGINE",
        help="Also check this engine: whether it can run here, and every byte of it.",
    )
    clear_cache: bool = CACHE(
        False,
        help="Remove the engines, kernels, downloads and other files that specdec keeps in the"
        " user's cache and no process uses, say what was removed, and exit.",
    )  # fmt: skip
    verify_hashes: bool = setting(False, hidden=True, help="Files are always compared.")
    json: bool = setting(False, help="Print one JSON object on stdout.")
