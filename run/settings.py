"""Settings of specdec-run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.decode.settings import DecodeSettings
from specdec.options import option_group, setting

ENGINE_PROMPTS = option_group("Engine and prompts")
OUTPUT = option_group("Output")
MACHINE = option_group("Machine", rare=True)
MEASUREMENT = option_group("Measurement", rare=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """Where the prompts come from."""

    input_text: list[str] = ENGINE_PROMPTS([], help="One or several prompts.")
    input_file: Path | None = ENGINE_PROMPTS(
        help="File of prompts: .txt has one per line, .jsonl one object per line; - is stdin."
    )


# Fields come in the order of --help, those of the last base first.
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(DecodeSettings, PromptSettings):
    """One field is one flag and one recipe key."""

    streaming: bool = OUTPUT(
        False, help="Print the text while it is generated; with --json, one object per line."
    )
    show_drafts: bool = OUTPUT(
        False,
        help="Show which tokens were accepted drafts, which drafts were rejected, and what the"
        " target added; with --json, as `origins` of each output.",
    )  # fmt: skip
    kv_cache_free_gpu_memory_fraction: float | None = MACHINE(
        metavar="F",
        help="TensorRT-LLM only: share of the free GPU memory for each KV cache; 0.9 if not given.",
    )  # fmt: skip
    output_generation_logits: bool = MEASUREMENT(
        False, help="Also write the logits of every new token, into a file beside --output-file."
    )
    use_py_session: bool = setting(False, hidden=True, help="Refused.")
    num_beams: int = setting(1, minimum=1, hidden=True, help="Refused above 1.")
    output_file: Path | None = OUTPUT(help="Also write the results into this file.")
    run_profiling: bool = MEASUREMENT(
        False, help="Say how long drafting, verification and the rest took."
    )
    verify_hashes: bool = MEASUREMENT(
        False, help="Compare every byte of the engine with its manifest first."
    )
    dry_run: bool = setting(False, help="Check the engine and the prompts; generate nothing.")
    force: bool = setting(False, help="Replace an existing --output-file.")
    json: bool = setting(False, help="Print one JSON object on stdout.")

    @property
    def writes_logits(self) -> bool:
        """Whether tokens' logits go into a file; a draft-target run may merely compare them."""
        return self.output_generation_logits and self.output_file is not None
