"""specdec-run, called as its users call it: a process of its own, prompts in, JSON out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import specdec
from specdec.errors import SpecDecError
from specdec.storage import Array, TensorFile

from .settings import VerifySettings


def call_run(arguments: Sequence[str]) -> dict[str, Any]:
    """Run `specdec run --json ARGUMENTS`; return its object, or raise its error as our own."""
    done = subprocess.run(
        [sys.executable, "-m", "specdec", "run", "--json", *arguments],
        env=_make_environment(), capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip
    if done.returncode == 0:
        report: dict[str, Any] = json.loads(done.stdout)
        return report
    lines = done.stderr.rstrip("\n").split("\n")
    found = {
        label: line.removeprefix(label + ": ")
        for line in lines[-2:]
        for label in ("error", "hint")
        if line.startswith(label + ": ")
    }
    if len(found) == 2:
        raise SpecDecError(found["error"], found["hint"])
    raise SpecDecError(
        f"specdec run ended with status {done.returncode}: {lines[-1] or 'it said nothing'}",
        f"call it by itself: specdec run {' '.join(arguments)}",
    )


def _make_environment() -> dict[str, str]:
    """The child imports the very package that we are, and nothing out of the current folder."""
    environment = dict(os.environ, PYTHONSAFEPATH="1")
    root = Path(specdec.__file__).resolve().parent.parent
    if (root / "pyproject.toml").is_file():  # a checkout, which may not be installed
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else str(root)
    return environment


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
    if tokenizer_dir is not None:
        arguments += ["--tokenizer-dir", tokenizer_dir]
    if not speculate:
        arguments += ["--no-speculation"]
    elif settings.draft_engine_dir is not None:
        arguments += ["--draft-engine-dir", str(settings.draft_engine_dir)]
        arguments += ["--draft-len", settings.draft_len] if settings.draft_len else []
        arguments += ["--use-logits"] if settings.use_logits else []
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
