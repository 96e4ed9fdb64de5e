"""Settings of specdec match."""

from __future__ import annotations

import dataclasses

from specdec.options import option_group, setting

MODELS = option_group("Models")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatchSettings:
    """Settings of specdec match; each field is one flag."""

    model_dir: str = MODELS(
        required=True, folder="model", metavar="MODEL",
        help="The target: a Hugging Face folder, a GGUF file, or a Hub id in the Hub's cache.",
    )  # fmt: skip
    among: list[str] = MODELS(
        [], metavar="FOLDER...",
        help="Folders with drafters: each itself, and the folders and GGUF files directly in it."
        " The models in the Hub's cache are always looked at.",
    )  # fmt: skip
    json: bool = setting(False, help="Print one JSON object on stdout.")
