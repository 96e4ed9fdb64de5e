"""Settings of specdec-build."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.settings import setting

MODES = (
    "explicit_draft_tokens", "draft_tokens_external", "medusa", "eagle", "lookahead_decoding",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """One field is one flag and one recipe key."""

    checkpoint_dir: Path | None = setting(kind="path", help="Folder written by specdec-convert.")
    output_dir: Path | None = setting(kind="path", help="Engine folder to write.")
    backend: str = setting(
        "auto", choices=("auto", "torch", "tensorrt-llm"), help="What executes the engine."
    )
    speculative_decoding_mode: str | None = setting(
        choices=MODES, help="Speculation mode; inferred from the checkpoint where it is not given."
    )
    max_batch_size: int = setting(8, kind="int", minimum=1, help="Most requests in one batch.")
    max_input_len: int | None = setting(
        kind="int", minimum=1, help="Longest prompt in tokens; max-seq-len - 1 if not given."
    )
    max_seq_len: int | None = setting(
        kind="int", minimum=2,
        help="Longest prompt plus output in tokens; the model's positions if not given.",
    )  # fmt: skip
    max_num_tokens: int | None = setting(
        kind="int", minimum=1, help="Most tokens in one forward pass."
    )
    max_draft_len: int | None = setting(
        kind="int", minimum=0,
        help="Most draft tokens a step; for ReDrafter it follows from beams and length.",
    )  # fmt: skip
    max_beam_width: int = setting(
        1, kind="int", minimum=1, help="Beams of the output; must be 1 with speculation."
    )
    optimize: str = setting(
        "auto", choices=("auto", "native", "none"),
        help="native: compile kernels for this CPU; auto: where a C++ compiler is there.",
    )  # fmt: skip
    gemm_plugin: str | None = setting(help="TensorRT-LLM only.")
    use_paged_context_fmha: bool | None = setting(kind="enable", help="TensorRT-LLM only.")
    use_fp8_context_fmha: bool | None = setting(kind="enable", help="TensorRT-LLM only.")
    kv_cache_type: str | None = setting(
        choices=("paged", "continuous"), help="The torch backend has continuous."
    )
    dry_run: bool = setting(False, kind="flag", help="Check and print the plan; write nothing.")
    force: bool = setting(False, kind="flag", help="Replace an existing engine folder.")
    json: bool = setting(False, kind="flag", help="Print one JSON object on stdout.")
