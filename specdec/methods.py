"""The speculative methods: the one list, and each method's parameters in a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from specdec.errors import SpecDecError


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
                expected, good = "true or false", isinstance(value, bool)
            else:
                lowest = 0 if field.name == "num_layers" else 1
                expected = f"a whole number of at least {lowest}"
                good = type(value) is int and value >= lowest
            if not good:
                raise SpecDecError(
                    f"checkpoint config: {key} is {value!r}, not {expected}",
                    "convert the checkpoint again, or mend the key",
                )
            values[field.name] = value
        known = {cls.PREFIX + f.name for f in dataclasses.fields(cls)}
        unknown = sorted(k for k in config if k.startswith(cls.PREFIX) and k not in known)
        if unknown:
            raise SpecDecError(
                f"checkpoint config: unknown keys {', '.join(unknown)}",
                f"the known ones are {', '.join(sorted(known))}",
            )
        return cls(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One speculative method; `mode` is its name for `--speculative-decoding-mode`."""

    name: str
    mode: str
    params: type[ReDrafterParams]
    architectures: tuple[str, ...]


METHODS: dict[str, Method] = {
    "redrafter": Method(
        name="redrafter",
        mode="explicit_draft_tokens",
        params=ReDrafterParams,
        architectures=("ReDrafterForLLaMALM", "ReDrafterForCausalLM"),
    ),
}


def find_method(config: Mapping[str, Any]) -> Method | None:
    """Return the method that a checkpoint's config.json carries, or None for a plain model."""
    architecture = config.get("architecture")
    for method in METHODS.values():
        if architecture in method.architectures:
            return method
    return None
