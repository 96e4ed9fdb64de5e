"""Runs of the engine to be verified, by specdec-run in a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec.command.settings import need, to_arguments
from specdec.errors import SpecDecError
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorFile
from specdec.methods import list_options
from specdec.methods.draft_target import DraftTargetDraft
from specdec.options import as_options
from specdec.processes import call_run
from specdec.tokenizer import find_tokenizer

from .settings import VerifySettings

NO_TOKEN = str(2**31 - 1)  # beyond any vocabulary


def run_engine(
    settings: VerifySettings,
    lines: Sequence[str],
    *flags: str,
    tokenizer_dir: str | None = None,
    speculate: bool = True,
    keep_logits: bool = False,
) -> tuple[dict[str, Any], list[Array]]:
    """Run request lines, as of a .jsonl file; return the report and each output's logits.

    logits: [output tokens, V] in float32; an empty list unless they are to be kept.
    """
    arguments = ["--engine-dir", str(settings.engine_dir), "--device", settings.device, *flags]
    pair = as_options(settings, DraftTargetDraft)
    compares_tokenizers = speculate and (
        pair.draft_tokenizer_dir is not None or pair.draft_vocabulary != "same"
    )
    if tokenizer_dir is not None:
        arguments += ["--tokenizer-dir", tokenizer_dir]
    elif compares_tokenizers:
        arguments += ["--tokenizer-dir", str(settings.model_dir)]
    if tokenizer_dir is None:
        if compares_tokenizers or find_tokenizer(need(settings.engine_dir)) is not None:
            arguments += ["--end-id", NO_TOKEN]  # such a tokenizer must not end texts
    if not speculate:
        arguments += ["--no-speculation"]
    else:  # what they mean is specdec-run's to check
        for kind in list_options("draft"):
            arguments += to_arguments(settings, kind)
    with tempfile.TemporaryDirectory(prefix="specdec-verify-") as folder:
        requests = Path(folder) / "requests.jsonl"
        requests.write_text("\n".join(lines) + "\n", encoding="utf-8")
        arguments += ["--input-file", str(requests)]
        if keep_logits:
            output = Path(folder) / "output.json"
            arguments += ["--output-generation-logits", "--output-file", str(output)]
        try:
            report = call_run(arguments)
        except SpecDecError as error:
            shown = str(settings.prompts or "the built-in prompts")
            message = error.message.replace(str(requests), shown)
            raise SpecDecError(message, error.hint) from None
        logits = _read_logits(Path(report["generation_logits"])) if keep_logits else []
    return report, logits


def _read_logits(path: Path) -> list[Array]:
    file = TensorFile(path)
    return [np.array(file.read(f"output.{index}")) for index in range(len(file.tensors))]
