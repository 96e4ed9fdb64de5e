"""Settings of `specdec-train ngrams`: a field here is a flag, a recipe key and its help text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.files.ngram_limits import MAX_CONTINUATIONS, MAX_ORDER
from specdec.options import option_group, setting

FILES = option_group("Files")
COUNTS = option_group("Counts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramTableSettings:
    """Settings of `specdec-train ngrams`."""

    data: list[str] = FILES(
        required=True, metavar="FILE...",
        help="Texts or conversations, as of specdec-train: .jsonl, .json, .txt. Of conversations"
        " and completions the answers count.",
    )  # fmt: skip
    tokenizer_dir: str = FILES(
        required=True, metavar="DIR",
        help="Folder, Hub id or GGUF file of the tokenizer whose models the table is for.",
    )  # fmt: skip
    output: Path = FILES(
        required=True, metavar="FILE.safetensors", help="The table, for --ngram-table."
    )
    max_order: int = COUNTS(
        3, minimum=1, maximum=MAX_ORDER, metavar="N", help="Tokens of a context, at most."
    )
    min_count: int = COUNTS(
        3, minimum=1, metavar="N",
        help="Leave out contexts of two tokens or more that occur fewer times.",
    )  # fmt: skip
    max_continuations: int = COUNTS(
        6, minimum=1, maximum=MAX_CONTINUATIONS, metavar="N",
        help="Next tokens that are kept for a context, at most.",
    )  # fmt: skip
    min_difference: float = COUNTS(
        0.15, minimum=0, maximum=1, metavar="P",
        help="Leave out contexts whose next tokens are as likely as after their last tokens alone,"
        " to within this.",
    )  # fmt: skip
    force: bool = setting(False, help="Replace the output.")
    json: bool = setting(False, help="Print one JSON object on stdout.")
