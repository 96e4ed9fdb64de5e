"""The tokenizer of a model."""

from __future__ import annotations

from typing import Any

from specdec.errors import SpecDecError, summarize


def load_tokenizer(directory: str) -> Any:
    """Load a Hugging Face tokenizer; remote code is never run."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # noqa: BLE001 - a broken folder makes transformers raise anything
        raise SpecDecError(
            f"no tokenizer in {directory!r}: {summarize(error)}",
            "give the folder of the Hugging Face base model as --tokenizer-dir",
        ) from None
