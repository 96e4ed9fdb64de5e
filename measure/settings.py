"""Options of specdec-bench and specdec diagnose."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.command.settings import require
from specdec.decode.settings import DecodeSettings
from specdec.errors import UsageError
from specdec.methods import list_options, name_options
from specdec.options import add_options, like, option_group, setting

ENGINE_PROMPTS = option_group("Engine and prompts")
MEASUREMENT = option_group("Measurement")
OUTPUT = option_group("Output")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """Options of prompts and rounds, which both commands have."""

    tokenizer_dir: str | None = like(DecodeSettings, "tokenizer_dir")
    prompts: Path | None = ENGINE_PROMPTS(
        metavar="FILE",
        help="File of prompts: .jsonl, which may have categories, or .txt; or"
        " spec-bench:FOLDER, a clone of Spec-Bench; or humaneval:FILE, HumanEval.jsonl.gz. A few"
        " built-in ones if not given.",
    )  # fmt: skip
    prompts_per_category: int | None = ENGINE_PROMPTS(
        minimum=1, metavar="N", help="Take so many prompts of each category, spread evenly."
    )
    max_output_len: int = ENGINE_PROMPTS(
        128, minimum=2, metavar="N", help="New tokens for each prompt."
    )
    repeat: int = MEASUREMENT(
        5, minimum=1, metavar="N",
        help="Rounds to measure; in each, speculation and plain decoding take turns.",
    )  # fmt: skip
    batch_sizes: str = MEASUREMENT(
        "1", metavar="N[,N...]",
        help="Numbers of requests to decode at the same time; each is measured.",
    )  # fmt: skip
    device: str = like(DecodeSettings, "device")
    json: bool = setting(False, help="Print one JSON object on stdout.")


@add_options(*list_options("draft"))
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings(MeasureSettings):
    """Options of the measured engine and its drafts."""

    engine_dir: Path = like(DecodeSettings, "engine_dir")

    def to_decode(self) -> DecodeSettings:
        """Return specdec-run's settings of the same engine; --engine-dir is required."""
        from specdec.text.tokenizer import find_tokenizer

        require(self)
        draft_options = {name: getattr(self, name) for name in name_options("draft")}
        return DecodeSettings(
            engine_dir=self.engine_dir, device=self.device, max_output_len=self.max_output_len,
            tokenizer_dir=find_tokenizer(self.engine_dir, self.tokenizer_dir), **draft_options,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchSettings(EngineSettings):
    """Options of specdec-bench: each field is a flag."""

    output: Path | None = OUTPUT(
        metavar="DIR", help="Also write the report as JSON and text, with plots, into this folder."
    )
    force: bool = setting(False, help="Replace an existing --output folder.")
    sweep: list[str] = MEASUREMENT(
        [],
        metavar="OPTION=A,B,C",
        help="Measure with each of these values of an option of drafting, such as"
        " eagle_tree_tokens=8,16,32; with several, every combination.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagnoseSettings(EngineSettings):
    """Options of specdec diagnose: each field is a flag."""


def read_counts(flag: str, text: str) -> list[int]:
    """Read a flag that lists whole numbers above 0; raise UsageError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"{flag} is {text!r}", "give whole numbers above 0, as 1,4,16")
    counts = [int(word) for word in words]
    if len(set(counts)) < len(counts):
        raise UsageError(f"{flag} is {text!r}, with a number given twice", "give each once")
    return counts
