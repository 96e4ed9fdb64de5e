"""The limits of an engine, checked together before anything is built."""

from __future__ import annotations

from specdec.checkpoint.config import CheckpointConfig
from specdec.engine.layout import BuildConfig, count_positions
from specdec.errors import Problems
from specdec.methods import METHODS
from specdec.model.bounds import MAX_DRAFT_TOKENS, MAX_ROTARY_ELEMENTS
from specdec.model.config import ModelConfig

from .settings import BuildSettings

DEFAULT_MAX_NUM_TOKENS = 8192
# The modes of methods without weights in the checkpoint.
EXTERNAL_MODES = frozenset(m.mode for m in METHODS.values() if m.params is None)


def resolve_limits(settings: BuildSettings, checkpoint: CheckpointConfig) -> BuildConfig:
    """Fill in what follows from the checkpoint; raise SpecDecError that lists every conflict."""
    max_seq_len = settings.max_seq_len or checkpoint.model.max_position_embeddings
    mode, max_draft_len = checkpoint.mode, count_draft_tokens(checkpoint)
    if drafts_without_weights(settings, checkpoint):
        mode, max_draft_len = settings.speculative_decoding_mode, settings.max_draft_len or 0
    step_tokens = settings.max_batch_size * (max_draft_len + 1)
    limits = BuildConfig(
        max_batch_size=settings.max_batch_size,
        max_input_len=settings.max_input_len or max_seq_len - 1,
        max_seq_len=max_seq_len,
        max_num_tokens=settings.max_num_tokens or max(DEFAULT_MAX_NUM_TOKENS, step_tokens),
        max_draft_len=max_draft_len,
        max_beam_width=settings.max_beam_width,
        speculative_decoding_mode=mode,
    )
    problems = find_length_problems(limits, checkpoint.model)
    problems += find_draft_problems(settings, checkpoint)
    problems += Problems.from_table(
        (limits.max_beam_width != 1,
         f"max_beam_width={limits.max_beam_width}: beam search over the output is not supported",
         "use --max-beam-width 1"),
        (limits.max_num_tokens < step_tokens,
         f"max_num_tokens={limits.max_num_tokens} is less than max_batch_size="
         f"{limits.max_batch_size} x (max_draft_len={max_draft_len} + 1) = {step_tokens}",
         f"use --max-num-tokens {step_tokens} or more, or a smaller batch"),
    )  # fmt: skip
    problems.raise_all()
    return limits


def drafts_without_weights(settings: BuildSettings, checkpoint: CheckpointConfig) -> bool:
    """Return whether the engine is built for drafts by no weights in its checkpoint."""
    return checkpoint.method is None and settings.speculative_decoding_mode in EXTERNAL_MODES


def count_draft_tokens(checkpoint: CheckpointConfig) -> int:
    """Count the tokens that the checkpoint's drafter drafts in a step at most; 0 without one."""
    return checkpoint.drafter.max_draft_tokens if checkpoint.drafter else 0


def find_length_problems(limits: BuildConfig, model: ModelConfig) -> Problems:
    """List why an engine of this model has no room for texts of such lengths."""
    max_seq_len, max_input_len = limits.max_seq_len, limits.max_input_len
    embedded, positions = model.max_position_embeddings, count_positions(model)
    scaling = f" times the factor of its rotary scaling, {positions}"
    rotary_size = model.rotary_size if model.arithmetic.positions == "rotary" else 0
    return Problems.from_table(
        (max_seq_len > positions,
         f"max_seq_len={max_seq_len} exceeds the model's max_position_embeddings={embedded}"
         f"{'' if positions == embedded else scaling}",
         f"use --max-seq-len {positions} or less"),
        # With room for the tokens of a step beyond the longest sequence; see Decoder.
        ((max_seq_len + MAX_DRAFT_TOKENS) * rotary_size > MAX_ROTARY_ELEMENTS,
         f"max_seq_len={max_seq_len} makes rotary tables of more than {MAX_ROTARY_ELEMENTS}"
         " elements",
         f"use --max-seq-len {MAX_ROTARY_ELEMENTS // max(1, rotary_size) - MAX_DRAFT_TOKENS} or"
         " less"),
        (max_seq_len < 2,
         f"max_seq_len={max_seq_len} has no room for a prompt and a token after it"
         f" (max_position_embeddings={embedded})",
         "raise --max-seq-len, or convert again with max_position_embeddings corrected"),
        (max_input_len >= max_seq_len > 1,
         f"max_input_len={max_input_len} leaves no room for output in max_seq_len={max_seq_len}",
         f"raise --max-seq-len to {max_input_len + 1} or more, or lower --max-input-len"
         if max_input_len < positions else
         f"lower --max-input-len to {positions - 1} or less: the model takes {positions} tokens,"
         " prompt and output together"),
    )  # fmt: skip


def find_draft_problems(settings: BuildSettings, checkpoint: CheckpointConfig) -> Problems:
    """List what of the mode and the draft length contradicts the checkpoint, or is missing."""
    method, drafter = checkpoint.method, checkpoint.drafter
    mode, draft_len = settings.speculative_decoding_mode, settings.max_draft_len
    is_external = drafts_without_weights(settings, checkpoint)
    description = f"a {method.name} checkpoint ({method.mode})" if method else "a plain checkpoint"
    source, remedy = "a plain engine drafts nothing", "leave the flag out, or add"
    remedy += f" --speculative-decoding-mode {METHODS['draft_target'].mode}"
    if drafter is not None:
        source, remedy = drafter.draft_len_source, "leave the flag out"
    return Problems.from_table(
        (mode not in (None, checkpoint.mode) and not is_external,
         f"--speculative-decoding-mode {mode} does not fit {description}",
         "leave the flag out, or convert the checkpoint with the drafter of that mode"),
        (is_external and not draft_len,
         f"--speculative-decoding-mode {mode} needs the most tokens that may be drafted at once",
         "give --max-draft-len, for example 10; for lookahead's [W,N,G] it is (W + G) (N - 1) - 1"),
        (not is_external and draft_len not in (None, count_draft_tokens(checkpoint)),
         f"--max-draft-len {draft_len} contradicts the checkpoint: {source}", remedy),
    )  # fmt: skip
