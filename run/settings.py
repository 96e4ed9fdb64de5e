"""Options of specdec-run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.decode.settings import DecodeSettings
from specdec.options import Contradiction, option_group, refuse_contradictions, setting

ENGINE_PROMPTS = option_group("Engine and prompts")
OUTPUT = option_group("Output")
MACHINE = option_group("Machine", rare=True)
MEASUREMENT = option_group("Measurement", rare=True)

CONTRADICTIONS: tuple[Contradiction, ...] = (
    (lambda s: s.use_py_session,
     "--use-py-session: TensorRT-LLM's Python session cannot run speculative engines",
     "leave it out; specdec-run uses the C++ session"),
    (lambda s: s.num_beams > 1,
     "--num-beams is {num_beams}: speculative decoding has no beam search over the output",
     "leave it out; ReDrafter's own beams are chosen by specdec-convert"),
    (lambda s: s.show_drafts and s.no_speculation,
     "--show-drafts has no effect with --no-speculation", "leave one of them out"),
    (lambda s: s.acceptance_output is not None and s.no_speculation,
     "--acceptance-output has no effect with --no-speculation", "leave one of them out"),
    (lambda s: s.show_drafts and s.streaming and not s.json,
     "--show-drafts and --streaming: what is rejected is known when a text is complete",
     "leave --streaming out, or add --json, whose lines say how each token came about"),
    (lambda s: s.input_text and s.chat_template is not None and not s.apply_chat_template,
     "--chat-template has no effect on --input-text without --apply-chat-template",
     "add --apply-chat-template"),
    (lambda s: bool(s.input_text) == (s.input_file is not None),
     "give exactly one of --input-text and --input-file",
     'for example --input-text "def main():"'),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """Options that name the prompts."""

    input_text: list[str] = ENGINE_PROMPTS([], help="One or several prompts.")
    input_file: Path | None = ENGINE_PROMPTS(
        help="File of prompts: .txt has one per line, .jsonl one object per line; - is stdin."
    )


# Fields come in the order of --help, those of the last base first.
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(DecodeSettings, PromptSettings):
    """Options of specdec-run: each field is a flag and a recipe key."""

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
    acceptance_output: Path | None = MEASUREMENT(
        help="Write what was accepted of the drafts, by depth and by the drafter's confidence, into"
        " this file: acceptance.json in the drafter's folder goes along with it.",
        metavar="FILE",
    )  # fmt: skip
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
        """Return whether logits go into a file; a draft-target run may merely compare them."""
        return self.output_generation_logits and self.output_file is not None

    def refuse_contradictions(self) -> None:
        """Raise UsageError for flags that exclude one another, as specdec generate does early."""
        refuse_contradictions(self, CONTRADICTIONS)
