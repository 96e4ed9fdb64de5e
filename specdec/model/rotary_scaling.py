"""Rotary scaling as config.json has it: its kinds, and what each one's object must hold.

The names are transformers'. 4.57 writes the object as `rope_scaling`, 5.x as `rope_parameters`,
with the rotary base in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import Problems, shorten, suggest

# Kind -> keys that it must have, keys that it may have.
SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    # The first share of a head's pairs is rotated, by the frequencies of a whole head.
    "proportional": (("partial_rotary_factor",), ("factor",)),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
}  # fmt: skip
# Those with which a position's angles depend on the position alone, not on the text's length.
STEADY_SCALINGS = ("linear", "llama3", "yarn")
TYPE_KEYS = ("rope_type", "type")
# Keys of any scaling: transformers writes them too, and they change nothing.
COMMON_KEYS = (
    *TYPE_KEYS, "rope_theta", "partial_rotary_factor", "original_max_position_embeddings",
    "finetuned",
)  # fmt: skip
# Beyond these a number is a mistake, and the tables would have infinities.
MIN_VALUE, MAX_VALUE = 1e-6, 1e9


def list_kinds(scaling: Mapping[str, Any]) -> list[Any]:
    """List the kinds that an object names, under either key; `su` is longrope's first name."""
    named_kinds = [scaling[key] for key in TYPE_KEYS if scaling.get(key) is not None]
    kinds = ["longrope" if kind == "su" else kind for kind in named_kinds]
    return kinds[:1] if kinds[:1] == kinds[1:] else kinds


def get_kind(scaling: Mapping[str, Any]) -> Any:
    """Return the kind of a scaling, `default` where the object names none."""
    return (list_kinds(scaling) or ["default"])[0]


def unify_scaling(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scaling in the form in which those that are alike are equal."""
    keys = {key: value for key, value in scaling.items() if value is not None}
    kinds = list_kinds(scaling)
    if len(kinds) == 1:
        keys = {"rope_type": kinds[0]} | {k: v for k, v in keys.items() if k not in TYPE_KEYS}
    return keys


def find_scaling_problems(
    scaling: Mapping[str, Any] | None,
    *,
    rotary_size: int,
    rotary_base: float,
    max_positions: int,
    original_positions: int | None = None,
) -> Problems:
    """Find what is wrong with a scaling, each problem with a remedy.

    rotary_size: rotated dimensions of a head. original_positions: the length at which longrope
    switches, where config.json has it outside of the scaling.
    """
    if not scaling:
        return Problems()
    kinds = list_kinds(scaling)
    if len(kinds) > 1:
        entries = " and ".join(f"{key} {shorten(scaling[key])}" for key in TYPE_KEYS)
        return Problems().add(
            f"rotary scaling has {entries}, which disagree", "remove the wrong one"
        )
    kind = get_kind(scaling)
    if not isinstance(kind, str) or kind not in SCALINGS:
        return Problems().add(
            f"rotary scaling {shorten(kind)} is not supported{suggest(str(kind), [*SCALINGS])}",
            f"the supported kinds are {', '.join(SCALINGS)}",
        )
    required, optional = SCALINGS[kind]
    facts = _find_key_faults(kind, scaling, rotary_size // 2)
    if not facts:
        positions = (max_positions, original_positions)
        facts = _find_contradictions(kind, scaling, rotary_size, rotary_base, positions)
    if not facts:
        return Problems()
    keys = ", ".join((*required, *optional)) or "none"
    return Problems().add(
        f"rotary scaling {kind!r} has {'; '.join(facts)}",
        f"its keys are {keys}; copy the model's config.json again, or correct it",
    )


def _find_key_faults(kind: str, scaling: Mapping[str, Any], num_pairs: int) -> list[str]:
    """Find keys that are missing, unknown or of a wrong value by themselves."""
    required, optional = SCALINGS[kind]
    given_keys = {key for key, value in scaling.items() if value is not None}
    missing_keys = [key for key in required if key not in given_keys]
    unknown_keys = sorted(given_keys - {*required, *optional, *COMMON_KEYS})
    facts = [
        f"{label} {shorten(', '.join(keys), 200)[1:-1]}"
        for label, keys in (("no", missing_keys), ("unknown", unknown_keys))
        if keys
    ]
    for key in (*required, *optional, "original_max_position_embeddings"):
        if key in given_keys and (fact := _find_fault(key, scaling[key], num_pairs)):
            facts.append(fact)
    return facts


def _find_fault(key: str, value: Any, num_pairs: int) -> str | None:
    """Find what is wrong with a key's value by itself."""
    if key in ("short_factor", "long_factor"):
        return _find_factor_fault(key, value, num_pairs)
    if key == "truncate":
        is_good = isinstance(value, bool)
    elif key == "original_max_position_embeddings":
        is_good = type(value) is int and 2 <= value <= MAX_VALUE
    else:
        # 0 of these two is what their absence is.
        is_good = _is_number(value) or (key in ("mscale", "mscale_all_dim") and value == 0)
    return None if is_good else f"{key} {shorten(value)}"


def _find_factor_fault(key: str, value: Any, num_pairs: int) -> str | None:
    """Find what is wrong with a list of factors, one for each rotated pair."""
    numbers = value if isinstance(value, list) else []
    if len(numbers) == num_pairs and all(_is_number(number) for number in numbers):
        return None
    description = f"of {len(value)} values" if isinstance(value, list) else shorten(value)
    return f"{key} {description}, not {num_pairs} positive numbers"


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and MIN_VALUE <= value <= MAX_VALUE


def _find_contradictions(
    kind: str,
    scaling: Mapping[str, Any],
    rotary_size: int,
    rotary_base: float,
    positions: tuple[int, int | None],
) -> list[str]:
    """Find what is wrong with values alongside one another."""
    if kind == "dynamic" and rotary_size <= 2:
        return [f"{rotary_size} rotated dimensions, and needs more than 2"]
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        return [f"high_freq_factor {high}, not more than low_freq_factor {low}"]
    if kind == "yarn":
        fast, slow = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
        if fast < slow:
            return [f"beta_fast {fast}, less than beta_slow {slow}"]
        if rotary_base <= 1:
            return [f"the rotary base {rotary_base:g}, and needs more than 1"]
    if kind == "longrope" and scaling.get("attention_factor") is None:
        return _compare_lengths(scaling, *positions)
    return []


def _compare_lengths(
    scaling: Mapping[str, Any], max_positions: int, original: int | None
) -> list[str]:
    """Find a longrope's factor that is not the ratio of its two lengths."""
    switch = original or scaling.get("original_max_position_embeddings") or max_positions
    ratio, factor = max_positions / switch, scaling.get("factor")
    if factor is not None and ratio not in (1, factor):
        # transformers 4 takes the ratio, 5 the factor.
        return [
            f"factor {factor}, but max_position_embeddings {max_positions} is {ratio:g} times"
            f" the original {switch}"
        ]
    return []
