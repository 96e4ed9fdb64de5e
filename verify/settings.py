"""Settings of specdec-verify."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifySettings:
    """One field is one flag."""

    checkpoint_dir: Path | None = setting(
        kind="path", metavar="CKPT", help="Checkpoint folder to check, file by file."
    )
    workers: int | None = setting(
        kind="int", minimum=1, metavar="N",
        help="Files hashed at a time; one per processor core if not given.",
    )  # fmt: skip
    json: bool = setting(False, kind="flag", help="Print one JSON object on stdout.")
