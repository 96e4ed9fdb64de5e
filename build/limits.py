"""The limits of an engine, checked together before anything is built."""

from __future__ import annotations

from specdec.engine.layout import BuildConfig
from specdec.errors import raise_problems
from specdec.schema import CheckpointConfig

from .settings import BuildSettings

DEFAULT_MAX_NUM_TOKENS = 8192


def resolve_limits(settings: BuildSettings, checkpoint: CheckpointConfig) -> BuildConfig:
    """Fill in what follows from the checkpoint; raise SpecDecError that lists every conflict."""
    problems: list[tuple[str, str]] = []
    model, method, drafter = checkpoint.model, checkpoint.method, checkpoint.drafter
    mode = settings.speculative_decoding_mode
    if mode is not None and mode != checkpoint.mode:
        holds = f"a {method.name} checkpoint ({method.mode})" if method else "a plain checkpoint"
        problems.append(
            (
                f"--speculative-decoding-mode {mode} does not fit {holds}",
                "leave the flag out, or convert the checkpoint with the drafter of that mode",
            )
        )
    positions = model.max_position_embeddings
    max_seq_len = settings.max_seq_len or positions
    if max_seq_len > positions:
        problems.append(
            (
                f"max_seq_len={max_seq_len} exceeds the model's"
                f" max_position_embeddings={positions}",
                f"use --max-seq-len {positions} or less",
            )
        )
    max_input_len = settings.max_input_len or max_seq_len - 1
    if max_input_len >= max_seq_len:
        problems.append(
            (
                f"max_input_len={max_input_len} leaves no room for output in"
                f" max_seq_len={max_seq_len}",
                "raise --max-seq-len or lower --max-input-len",
            )
        )
    max_draft_len = drafter.max_draft_tokens if drafter else 0
    if settings.max_draft_len not in (None, max_draft_len):
        why = (
            f"num_beams={drafter.num_beams} x draft_len_per_beam={drafter.draft_len_per_beam}"
            f" = {max_draft_len}" if drafter else "a plain checkpoint drafts nothing"
        )  # fmt: skip
        problems.append(
            (
                f"--max-draft-len {settings.max_draft_len} contradicts the checkpoint: {why}",
                "leave the flag out",
            )
        )
    if drafter and drafter.num_beams > model.vocab_size:
        problems.append(
            (
                f"num_beams={drafter.num_beams} exceeds vocab_size={model.vocab_size}",
                "convert again with fewer beams",
            )
        )
    if settings.max_beam_width != 1:
        problems.append(
            (
                f"max_beam_width={settings.max_beam_width}: beam search over the output is not"
                " supported",
                "use --max-beam-width 1",
            )
        )
    step_tokens = settings.max_batch_size * (max_draft_len + 1)
    max_num_tokens = settings.max_num_tokens or max(DEFAULT_MAX_NUM_TOKENS, step_tokens)
    if max_num_tokens < step_tokens:
        problems.append(
            (
                f"max_num_tokens={max_num_tokens} is less than max_batch_size="
                f"{settings.max_batch_size} x (max_draft_len={max_draft_len} + 1) = {step_tokens}",
                f"use --max-num-tokens {step_tokens} or more, or a smaller batch",
            )
        )
    raise_problems(problems)
    return BuildConfig(
        max_batch_size=settings.max_batch_size,
        max_input_len=max_input_len,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        max_draft_len=max_draft_len,
        max_beam_width=settings.max_beam_width,
        speculative_decoding_mode=checkpoint.mode,
    )
