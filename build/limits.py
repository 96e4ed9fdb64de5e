"""The limits of an engine, checked together before anything is built."""

from __future__ import annotations

from specdec.engine.layout import BuildConfig, count_positions
from specdec.errors import Problems
from specdec.methods import METHODS
from specdec.model.bounds import MAX_DRAFT_TOKENS, MAX_ROTARY_ELEMENTS
from specdec.model.checkpoint import CheckpointConfig

from .settings import BuildSettings

DEFAULT_MAX_NUM_TOKENS = 8192
# Of methods without weights in the checkpoint.
EXTERNAL_MODES = frozenset(m.mode for m in METHODS.values() if m.params is None)


def resolve_limits(settings: BuildSettings, checkpoint: CheckpointConfig) -> BuildConfig:
    """Fill in what follows from the checkpoint; raise SpecDecError that lists every conflict."""
    problems = Problems()
    model, method, drafter = checkpoint.model, checkpoint.method, checkpoint.drafter
    mode = settings.speculative_decoding_mode
    is_external = mode in EXTERNAL_MODES and method is None
    if mode is not None and mode != checkpoint.mode and not is_external:
        holds = f"a {method.name} checkpoint ({method.mode})" if method else "a plain checkpoint"
        problems.add(
            f"--speculative-decoding-mode {mode} does not fit {holds}",
            "leave the flag out, or convert the checkpoint with the drafter of that mode",
        )
    positions = count_positions(model)
    max_seq_len = settings.max_seq_len or model.max_position_embeddings
    if max_seq_len > positions:
        scaled = "" if positions == model.max_position_embeddings else (
            f" times the factor of its rotary scaling, {positions}"
        )  # fmt: skip
        problems.add(
            f"max_seq_len={max_seq_len} exceeds the model's"
            f" max_position_embeddings={model.max_position_embeddings}{scaled}",
            f"use --max-seq-len {positions} or less",
        )
    rotary_size = model.rotary_size if model.arithmetic.positions == "rotary" else 0
    # Room for the tokens of a step beyond the longest sequence; see Decoder.
    if (max_seq_len + MAX_DRAFT_TOKENS) * rotary_size > MAX_ROTARY_ELEMENTS:
        problems.add(
            f"max_seq_len={max_seq_len} makes rotary tables of more than"
            f" {MAX_ROTARY_ELEMENTS} elements",
            f"use --max-seq-len {MAX_ROTARY_ELEMENTS // rotary_size - MAX_DRAFT_TOKENS} or less",
        )
    max_input_len = settings.max_input_len or max_seq_len - 1
    if max_input_len >= max_seq_len:
        problems.add(
            f"max_input_len={max_input_len} leaves no room for output in max_seq_len={max_seq_len}",
            "raise --max-seq-len or lower --max-input-len",
        )
    max_draft_len = drafter.max_draft_tokens if drafter else 0
    if is_external:
        max_draft_len = settings.max_draft_len or 0
        if max_draft_len == 0:
            problems.add(
                f"--speculative-decoding-mode {mode} needs the most tokens that may be drafted"
                " at once",
                "give --max-draft-len, for example 10; for lookahead's [W,N,G] it is"
                " (W + G) (N - 1) - 1",
            )
    elif settings.max_draft_len not in (None, max_draft_len):
        why = drafter.draft_len_source if drafter else "a plain engine drafts nothing"
        problems.add(
            f"--max-draft-len {settings.max_draft_len} contradicts the checkpoint: {why}",
            "leave the flag out"
            if drafter
            else "leave the flag out, or add --speculative-decoding-mode"
            f" {METHODS['draft_target'].mode}",
        )
    if settings.max_beam_width != 1:
        problems.add(
            f"max_beam_width={settings.max_beam_width}: beam search over the output is not"
            " supported",
            "use --max-beam-width 1",
        )
    step_tokens = settings.max_batch_size * (max_draft_len + 1)
    max_num_tokens = settings.max_num_tokens or max(DEFAULT_MAX_NUM_TOKENS, step_tokens)
    if max_num_tokens < step_tokens:
        problems.add(
            f"max_num_tokens={max_num_tokens} is less than max_batch_size="
            f"{settings.max_batch_size} x (max_draft_len={max_draft_len} + 1) = {step_tokens}",
            f"use --max-num-tokens {step_tokens} or more, or a smaller batch",
        )
    problems.raise_all()
    return BuildConfig(
        max_batch_size=settings.max_batch_size,
        max_input_len=max_input_len,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        max_draft_len=max_draft_len,
        max_beam_width=settings.max_beam_width,
        speculative_decoding_mode=mode if is_external else checkpoint.mode,
    )
