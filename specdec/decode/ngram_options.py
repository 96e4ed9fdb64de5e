"""The options of the methods that draft n-grams: prompt lookup and lookahead."""

from __future__ import annotations

import dataclasses

from specdec.decode.draft_options import is_device_list, read_literal
from specdec.decode.settings import DecodeSettings
from specdec.errors import SpecDecError, UsageError
from specdec.methods import EXTERNAL_METHODS, count_lookahead_tokens

DEFAULT_NGRAM_SIZE = 4
LOOKUP_OPTIONS = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
LOOKUP_FORM = "[10,2,[0]]: tokens drafted a step, longest n-gram looked up, devices of the engine"
LOOKAHEAD_FORM = "[7,7,7]: columns of the window, tokens of an n-gram (2 or more), n-grams verified"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupOptions:
    """num_tokens: most tokens drafted a step. max_ngram_size: longest end of the text looked up."""

    num_tokens: int
    max_ngram_size: int
    devices: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class LookaheadConfig:
    """W, N and G: columns of the window, tokens of an n-gram, n-grams verified at once."""

    window_size: int
    ngram_size: int
    verification_set_size: int

    @property
    def max_draft_tokens(self) -> int:
        """Most nodes of the tree beside its root; TensorRT-LLM's max_draft_len for [W,N,G]."""
        return count_lookahead_tokens(*dataclasses.astuple(self))

    @property
    def max_draft_depth(self) -> int:
        """Most draft tokens that one verify step can accept."""
        return max(self.ngram_size - 1, self.window_size + self.ngram_size - 3)

    def __str__(self) -> str:
        return f"[{self.window_size},{self.ngram_size},{self.verification_set_size}]"


def read_lookup_options(settings: DecodeSettings) -> LookupOptions | None:
    """Return the options of a prompt-lookup run, None of any other; raise UsageError."""
    joined, num_tokens = settings.prompt_lookup_config, settings.prompt_lookup_num_tokens
    given = ["--" + n.replace("_", "-") for n in LOOKUP_OPTIONS if getattr(settings, n) is not None]
    if joined is None and not given:
        return None
    name = given[0] if given else "--prompt-lookup-config"
    if settings.no_speculation:
        raise UsageError(f"{name} has no effect with --no-speculation", "leave one of them out")
    if settings.draft_engine_dir is not None:
        raise UsageError(
            f"{name} and --draft-engine-dir are both given", "let one or the other draft"
        )
    if joined is not None:
        if given:
            raise UsageError(
                f"--prompt-lookup-config and {name} are both given", "use one way or the other"
            )
        return _read_joined(joined)
    if num_tokens is None:
        raise UsageError(
            f"{name} without --prompt-lookup-num-tokens", "say how many tokens to draft a step"
        )
    size = settings.max_matching_ngram_size or DEFAULT_NGRAM_SIZE
    return LookupOptions(num_tokens=num_tokens, max_ngram_size=size)


def _read_joined(text: str) -> LookupOptions:
    value = read_literal("--prompt-lookup-config", text, LOOKUP_FORM, length=3)
    *sizes, devices = value
    if any(type(size) is not int or size < 1 for size in sizes) or not is_device_list(devices):
        raise UsageError(f"--prompt-lookup-config is {text!r}", f"write it as {LOOKUP_FORM}")
    return LookupOptions(num_tokens=sizes[0], max_ngram_size=sizes[1], devices=tuple(devices))


def read_lookahead_config(settings: DecodeSettings) -> LookaheadConfig | None:
    """Return what --lookahead-config says, None where it is absent; raise UsageError."""
    text = settings.lookahead_config
    if text is None:
        return None
    if settings.no_speculation:
        raise UsageError(
            "--lookahead-config has no effect with --no-speculation", "leave one of them out"
        )
    sizes = read_literal("--lookahead-config", text, LOOKAHEAD_FORM, length=3)
    if any(type(size) is not int or size < 1 for size in sizes) or sizes[1] < 2:
        raise UsageError(f"--lookahead-config is {text!r}", f"write it as {LOOKAHEAD_FORM}")
    return LookaheadConfig(*sizes)


def check_lookup(options: LookupOptions, mode: str | None, max_draft_len: int) -> None:
    """Raise SpecDecError where an engine was not built for as many draft tokens."""
    wanted = EXTERNAL_METHODS["prompt_lookup"]
    if mode != wanted:
        raise SpecDecError(
            f"prompt lookup drafts {options.num_tokens} tokens a step, and the engine was built"
            f" with speculative_decoding_mode {mode}",
            f"build it from a plain checkpoint with --speculative-decoding-mode {wanted}"
            f" --max-draft-len {options.num_tokens}",
        )
    if options.num_tokens > max_draft_len:
        raise SpecDecError(
            f"prompt lookup drafts {options.num_tokens} tokens a step, the engine was built with"
            f" max_draft_len {max_draft_len}",
            f"draft {max_draft_len} or fewer, or build with --max-draft-len {options.num_tokens}",
        )


def choose_lookahead(
    config: LookaheadConfig | None, mode: str | None, max_draft_len: int
) -> LookaheadConfig | None:
    """Return the window of a lookahead engine, None for an engine of another mode.

    What is not given is the largest [n,n,n] that the engine has room for. SpecDecError where it
    has no room, and UsageError for a window that an engine has no use for.
    """
    wanted = EXTERNAL_METHODS["lookahead"]
    if mode != wanted:
        if config is not None:
            raise UsageError(
                f"--lookahead-config has no effect with an engine that was built with"
                f" speculative_decoding_mode {mode}",
                f"build it from a plain checkpoint with --speculative-decoding-mode {wanted}"
                f" --max-draft-len {config.max_draft_tokens}",
            )
        return None
    config = config or _find_largest(max_draft_len)
    if config.max_draft_tokens > max_draft_len:
        raise SpecDecError(
            f"lookahead {config} drafts {config.max_draft_tokens} tokens a step, the engine was"
            f" built with max_draft_len {max_draft_len}",
            "give a smaller --lookahead-config, or build with --max-draft-len"
            f" {config.max_draft_tokens}",
        )
    return config


def _find_largest(max_draft_len: int) -> LookaheadConfig:
    size = 2
    while LookaheadConfig(size + 1, size + 1, size + 1).max_draft_tokens <= max_draft_len:
        size += 1
    return LookaheadConfig(size, size, size)


def fit_lookahead(max_draft_len: int) -> LookaheadConfig:
    """The window of exactly so many draft tokens whose three sizes are the most alike."""
    total = max_draft_len + 1  # (W + G) (N - 1)
    sizes = [n for n in range(2, total + 1) if total % (n - 1) == 0 and total // (n - 1) > 1]
    size = min(sizes, key=lambda n: abs(total // (n - 1) - 2 * n))
    columns = total // (size - 1)
    return LookaheadConfig(columns - columns // 2, size, columns // 2)
