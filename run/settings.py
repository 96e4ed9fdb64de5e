"""Settings of specdec-run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One field is one flag and one recipe key."""

    engine_dir: Path | None = setting(kind="path", help="Folder written by specdec-build.")
    tokenizer_dir: str | None = setting(
        help="Folder or hub id of the tokenizer; usually the Hugging Face base model's.",
        metavar="DIR",
    )
    input_text: list[str] = setting([], kind="list", help="One or several prompts.")
    input_file: Path | None = setting(
        kind="path", help="Prompts: .txt, one a line, or .jsonl, one request object a line."
    )
    max_output_len: int = setting(100, kind="int", minimum=1, help="Most new tokens a request.")
    end_id: int | None = setting(
        kind="int", minimum=0,
        help="Token that ends a request; the tokenizer's or generation config's if not given.",
    )  # fmt: skip
    no_speculation: bool = setting(
        False, kind="flag", help="Same target and engine, one token a step."
    )
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), help="Where to run.")
    output_file: Path | None = setting(
        kind="path", help="Also write what stdout shows into this file."
    )
    run_profiling: bool = setting(
        False, kind="flag", help="Log the time of draft, verify and the rest of a step."
    )
    dry_run: bool = setting(False, kind="flag", help="Check engine and prompts; generate nothing.")
    json: bool = setting(False, kind="flag", help="Print one JSON object on stdout.")
