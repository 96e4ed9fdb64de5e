"""The speculative methods: the one list, and each method's parameters in a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from specdec.errors import SpecDecError

# Of a drafter's layers or heads. None has nearly as many; a list of far more fills the memory.
MAX_MODULES = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReDrafterParams:
    """Recurrent Drafter (https://arxiv.org/abs/2403.09919).

    `draft_len_per_beam` counts drafted tokens only, as TensorRT-LLM does; Apple's beam length is
    one more, since it counts the guaranteed first token.
    """

    num_layers: int
    hidden_size: int
    exit_dim: int
    is_rnn: bool
    num_beams: int
    draft_len_per_beam: int
    greedy_search: bool

    PREFIX: ClassVar[str] = "redrafter_"

    @property
    def has_input_proj(self) -> bool:
        """Whether [hidden, state] is projected to exit_dim first."""
        return 2 * self.hidden_size != self.exit_dim

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens proposed in a verify step (all beams distinct from the first token on)."""
        return self.num_beams * self.draft_len_per_beam

    @property
    def max_draft_depth(self) -> int:
        """Most draft tokens that one verify step can accept."""
        return self.draft_len_per_beam

    @property
    def draft_len_source(self) -> str:
        """Where `max_draft_tokens` comes from, in the words of an error message."""
        return (
            f"num_beams={self.num_beams} x draft_len_per_beam={self.draft_len_per_beam}"
            f" = {self.max_draft_tokens}"
        )

    def find_problems(
        self, *, hidden_size: int, vocab_size: int, tp_size: int
    ) -> list[tuple[str, str]]:
        """List what does not suit a target of these sizes, each with a remedy."""
        if self.hidden_size != hidden_size:
            return [
                (
                    f"the drafter's hidden_size={self.hidden_size} differs from the target's"
                    f" {hidden_size}",
                    "use the drafter that was trained for this target",
                )
            ]
        problems = []
        sizes = {"hidden_size": hidden_size if self.is_rnn else 0, "exit_dim": self.exit_dim}
        uneven = [f"{name}={size}" for name, size in sizes.items() if size % tp_size]
        if uneven:
            problems.append(
                (
                    f"the drafter's {', '.join(uneven)} do not split over tp_size={tp_size}",
                    "use a tp_size that divides them",
                )
            )
        if self.num_beams > vocab_size:
            problems.append(
                (
                    f"num_beams={self.num_beams} exceeds vocab_size={vocab_size}",
                    "convert again with fewer beams",
                )
            )
        return problems

    def to_checkpoint(self) -> dict[str, Any]:
        """Return the `redrafter_*` keys of a checkpoint's config.json."""
        return {self.PREFIX + f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> ReDrafterParams:
        """Read the `redrafter_*` keys; raise SpecDecError for an absent, unknown or absurd one."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            key = cls.PREFIX + field.name
            value = config.get(key)
            if field.name in ("is_rnn", "greedy_search"):
                _check(key, value, "true or false", is_good=isinstance(value, bool))
            elif field.name == "num_layers":
                _check_num_modules(key, value, lowest=0)
            else:
                _check_count(key, value, lowest=1)
            values[field.name] = value
        known = {cls.PREFIX + f.name for f in dataclasses.fields(cls)}
        _check_unknown((k for k in config if k.startswith(cls.PREFIX)), known)
        return cls(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaParams:
    """Medusa heads (https://arxiv.org/abs/2401.10774): head i drafts the token i + 2 ahead.

    num_layers: residual layers of each head. max_draft_len: most draft tokens of a verify step's
    tree, which an engine leaves room for.
    """

    num_heads: int
    num_layers: int
    max_draft_len: int

    KEYS: ClassVar[dict[str, str]] = {
        "num_heads": "num_medusa_heads",
        "num_layers": "num_medusa_layers",
        "max_draft_len": "max_draft_len",
    }

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens proposed in a verify step."""
        return self.max_draft_len

    @property
    def max_draft_depth(self) -> int:
        """Most draft tokens that one verify step can accept."""
        return min(self.num_heads, self.max_draft_len)

    @property
    def draft_len_source(self) -> str:
        """Where `max_draft_tokens` comes from, in the words of an error message."""
        return f"its max_draft_len is {self.max_draft_len}"

    def find_problems(
        self, *, hidden_size: int, vocab_size: int, tp_size: int
    ) -> list[tuple[str, str]]:
        """List what does not suit a target of these sizes, each with a remedy."""
        if hidden_size % tp_size and self.num_layers:
            return [
                (
                    f"the Medusa heads' hidden_size={hidden_size} does not split over"
                    f" tp_size={tp_size}",
                    "use a tp_size that divides it",
                )
            ]
        return []

    def to_checkpoint(self) -> dict[str, Any]:
        """Return the keys of a checkpoint's config.json."""
        return {key: getattr(self, name) for name, key in self.KEYS.items()}

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> MedusaParams:
        """Read the keys; raise SpecDecError for an absent, unknown or absurd one."""
        values = {name: config.get(key) for name, key in cls.KEYS.items()}
        _check_num_modules(cls.KEYS["num_heads"], values["num_heads"], lowest=1)
        _check_num_modules(cls.KEYS["num_layers"], values["num_layers"], lowest=0)
        _check_count(cls.KEYS["max_draft_len"], values["max_draft_len"], lowest=1)
        _check_unknown((k for k in config if "medusa" in k), set(cls.KEYS.values()))
        return cls(**{name: config[key] for name, key in cls.KEYS.items()})


DrafterParams = ReDrafterParams | MedusaParams


def _check(key: str, value: object, expected: str, *, is_good: bool) -> None:
    if not is_good:
        raise SpecDecError(
            f"checkpoint config: {key} is {value!r}, not {expected}",
            "convert the checkpoint again, or mend the key",
        )


def _check_count(key: str, value: object, *, lowest: int) -> None:
    is_good = type(value) is int and value >= lowest
    _check(key, value, f"a whole number of at least {lowest}", is_good=is_good)


def _check_num_modules(key: str, value: object, *, lowest: int) -> None:
    is_good = type(value) is int and lowest <= value <= MAX_MODULES
    _check(key, value, f"a whole number from {lowest} to {MAX_MODULES}", is_good=is_good)


def _check_unknown(keys: Iterable[str], known: set[str]) -> None:
    unknown = sorted(set(keys) - known)
    if unknown:
        raise SpecDecError(
            f"checkpoint config: unknown keys {', '.join(unknown)}",
            f"the known ones are {', '.join(sorted(known))}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One speculative method; `mode` is its name for `--speculative-decoding-mode`."""

    name: str
    mode: str
    params: type[ReDrafterParams] | type[MedusaParams]
    architectures: tuple[str, ...]


METHODS: dict[str, Method] = {
    "redrafter": Method(
        name="redrafter",
        mode="explicit_draft_tokens",
        params=ReDrafterParams,
        architectures=("ReDrafterForLLaMALM", "ReDrafterForQWenLM", "ReDrafterForCausalLM"),
    ),
    "medusa": Method(
        name="medusa",
        mode="medusa",
        params=MedusaParams,
        architectures=("MedusaForCausalLM", "MedusaLlamaForCausalLM"),
    ),
}

# Methods whose drafts come from an engine of their own, with the mode of the target's engine:
# they have no weights in the target's checkpoint, and nothing to convert or to train.
EXTERNAL_METHODS = {"draft_target": "draft_tokens_external"}


def find_method(config: Mapping[str, Any]) -> Method | None:
    """Return the method that a checkpoint's config.json carries, or None for a plain model."""
    architecture = config.get("architecture")
    for method in METHODS.values():
        if architecture in method.architectures:
            return method
    return None
