"""The speculative methods: the one list, and each method's parameters in a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from specdec.bounds import MAX_DRAFT_TOKENS, MAX_HEAD_SIZE, MAX_MODULES, MAX_SIZE
from specdec.errors import SpecDecError, raise_problems, shorten
from specdec.rotary_scaling import find_scaling_problems

EAGLE_ARCHITECTURE = "EagleForCausalLM"
# Ours: TensorRT-LLM's engine path has no EAGLE-3, and is to know that it is none of its own.
# TensorRT-LLM makes Llamas of EAGLE-1's targets.
EAGLE1_TARGETS = ("LlamaForCausalLM", "MistralForCausalLM")
EAGLE3_ARCHITECTURE = "Eagle3ForCausalLM"


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
    BOUNDS: ClassVar[dict[str, tuple[int, int]]] = {
        "num_layers": (0, MAX_MODULES),
        "hidden_size": (1, MAX_SIZE),
        "exit_dim": (1, MAX_SIZE),
        "num_beams": (1, MAX_DRAFT_TOKENS),
        "draft_len_per_beam": (1, MAX_DRAFT_TOKENS),
    }

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
            else:
                _check_count(key, value, *cls.BOUNDS[field.name])
            values[field.name] = value
        num_beams, length = values["num_beams"], values["draft_len_per_beam"]
        _check_product(
            f"{num_beams} beams of {length} draft tokens", num_beams * length, MAX_DRAFT_TOKENS
        )
        known = {cls.PREFIX + f.name for f in dataclasses.fields(cls)}
        _check_unknown((k for k in config if k.startswith(cls.PREFIX)), known)
        return cls(**values)


class _SizedTree:
    """Of drafters whose checkpoint says how many draft tokens a step's tree has at most."""

    max_draft_len: int

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens proposed in a verify step."""
        return self.max_draft_len

    @property
    def draft_len_source(self) -> str:
        """Where `max_draft_tokens` comes from, in the words of an error message."""
        return f"its max_draft_len is {self.max_draft_len}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaParams(_SizedTree):
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
    def max_draft_depth(self) -> int:
        """Most draft tokens that one verify step can accept."""
        return min(self.num_heads, self.max_draft_len)

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
        _check_count(cls.KEYS["num_heads"], values["num_heads"], 1, MAX_MODULES)
        _check_count(cls.KEYS["num_layers"], values["num_layers"], 0, MAX_MODULES)
        _check_count(cls.KEYS["max_draft_len"], values["max_draft_len"], 1, MAX_DRAFT_TOKENS)
        num_heads, num_layers = config[cls.KEYS["num_heads"]], config[cls.KEYS["num_layers"]]
        what = f"{num_heads} Medusa heads of {num_layers} layers"
        _check_product(what, num_heads * num_layers, MAX_MODULES)
        _check_unknown((k for k in config if "medusa" in k), set(cls.KEYS.values()))
        return cls(**{name: config[key] for name, key in cls.KEYS.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleNet:
    """The decoder layers that draft, in a Llama's field names; the vocabulary is the target's."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    norm_epsilon: float
    max_position_embeddings: int
    rotary_base: float
    rotary_scaling: dict[str, Any] | None
    hidden_act: str

    def find_uneven(self, tp_size: int) -> list[str]:
        """List the sizes that do not split over so many ranks."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        sizes = {
            "num_attention_heads": heads,
            "intermediate_size": self.intermediate_size,
            "hidden_size": self.hidden_size,
        }
        uneven = [f"{name}={size}" for name, size in sizes.items() if size % tp_size]
        if kv_heads % tp_size and tp_size % kv_heads:
            uneven.append(f"num_key_value_heads={kv_heads}")
        return uneven

    @classmethod
    def from_checkpoint(cls, key: str, config: object) -> EagleNet:
        """Read the object `key`, a whole Llama's config; raise SpecDecError for what is wrong."""
        _check(key, config, "an object", is_good=isinstance(config, dict))
        assert isinstance(config, dict)
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            name, value = f"{key}.{field.name}", config.get(field.name)
            if field.name in ("norm_epsilon", "rotary_base"):
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                is_good = is_number and 0 < float(str(value)) < math.inf
                _check(name, value, "a positive number", is_good=is_good)
            elif field.name == "rotary_scaling":
                is_good = value is None or isinstance(value, dict)
                _check(name, value, "an object or null", is_good=is_good)
            elif field.name == "hidden_act":
                _check(name, value, "'silu'", is_good=value == "silu")
            else:
                most = {"num_hidden_layers": MAX_MODULES, "head_size": MAX_HEAD_SIZE}
                _check_count(name, value, 1, most.get(field.name, MAX_SIZE))
            values[field.name] = value
        heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
        expected = f"a divisor of {key}.num_attention_heads={heads}"
        _check(f"{key}.num_key_value_heads", kv_heads, expected, is_good=heads % kv_heads == 0)
        raise_problems(
            [
                (f"{key}: {fact}", remedy)
                for fact, remedy in find_scaling_problems(
                    values["rotary_scaling"],
                    rotary_size=values["head_size"],
                    rotary_base=values["rotary_base"],
                    max_positions=values["max_position_embeddings"],
                )
            ]
        )
        return cls(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Params:
    """What EAGLE-3 (https://arxiv.org/abs/2503.01840) has and EAGLE-1 has not.

    aux_layers: the target's layers, from 0, whose outputs are read, rising. draft_vocab_size:
    tokens that can be drafted. norm_before_residual: whether the first layer's attention is added
    to the normed state.
    """

    aux_layers: tuple[int, ...]
    draft_vocab_size: int
    norm_before_residual: bool

    def to_checkpoint(self) -> dict[str, Any]:
        """Return the keys of the object in a checkpoint's config.json."""
        return dataclasses.asdict(self) | {"aux_layers": list(self.aux_layers)}

    @classmethod
    def from_checkpoint(cls, key: str, config: object) -> Eagle3Params:
        """Read the object `key`; raise SpecDecError for what is wrong."""
        _check(key, config, "an object", is_good=isinstance(config, dict))
        assert isinstance(config, dict)
        found = config.get("aux_layers")
        layers = found if isinstance(found, list) else []
        is_good = 0 < len(layers) <= MAX_MODULES
        is_good = is_good and all(type(layer) is int and layer >= 0 for layer in layers)
        is_good = is_good and layers == sorted(set(layers))
        _check(f"{key}.aux_layers", found, "a rising list of layers", is_good=is_good)
        _check_count(f"{key}.draft_vocab_size", config.get("draft_vocab_size"), 1, MAX_SIZE)
        normed = config.get("norm_before_residual")
        name = f"{key}.norm_before_residual"
        _check(name, normed, "true or false", is_good=isinstance(normed, bool))
        assert isinstance(normed, bool)
        _check_unknown(config, {field.name for field in dataclasses.fields(cls)})
        return cls(
            aux_layers=tuple(layers),
            draft_vocab_size=config["draft_vocab_size"],
            norm_before_residual=normed,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleParams(_SizedTree):
    """EAGLE (https://arxiv.org/abs/2401.15077): decoder layers that draft from features.

    num_eagle_layers: the depth of a draft tree. max_non_leaves_per_layer: most nodes of a level
    that have children. max_draft_len: most draft tokens of a tree. eagle3: None for EAGLE-1, whose
    weights EAGLE-2 (https://arxiv.org/abs/2406.16858) shares.
    """

    net: EagleNet
    num_eagle_layers: int
    max_non_leaves_per_layer: int
    max_draft_len: int
    eagle3: Eagle3Params | None = None

    NUMBERS: ClassVar[tuple[str, ...]] = (
        "num_eagle_layers", "max_non_leaves_per_layer", "max_draft_len",
    )  # fmt: skip
    NET: ClassVar[str] = "eagle_net_config"
    EAGLE3: ClassVar[str] = "eagle3"

    @property
    def num_nets(self) -> int:
        """Copies of the net in a checkpoint: TensorRT-LLM reads one for each level of the tree."""
        return 1 if self.eagle3 else self.num_eagle_layers

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that can be drafted."""
        return self.eagle3.draft_vocab_size if self.eagle3 else self.net.vocab_size

    @property
    def max_draft_depth(self) -> int:
        """Most draft tokens that one verify step can accept."""
        return min(self.num_eagle_layers, self.max_draft_len)

    def find_problems(
        self, *, hidden_size: int, vocab_size: int, tp_size: int
    ) -> list[tuple[str, str]]:
        """List what does not suit a target of these sizes, each with a remedy."""
        problems = []
        remedy = "use the EAGLE drafter that was trained for this target"
        sizes = [("vocab_size", self.net.vocab_size, vocab_size)]
        if self.eagle3 is None:
            sizes.append(("hidden_size", self.net.hidden_size, hidden_size))
        for name, ours, targets in sizes:
            if ours != targets:
                problems.append(
                    (f"the EAGLE drafter's {name} is {ours}, the target's {targets}", remedy)
                )
        if self.draft_vocab_size > vocab_size == self.net.vocab_size:
            problems.append(
                (
                    f"the EAGLE drafter's draft_vocab_size={self.draft_vocab_size} exceeds the"
                    f" target's vocab_size={vocab_size}",
                    remedy,
                )
            )
        if uneven := self.net.find_uneven(tp_size):
            problems.append(
                (
                    f"the EAGLE drafter's {', '.join(uneven)} do not split over tp_size={tp_size}",
                    "use a tp_size that divides them",
                )
            )
        return problems

    def to_checkpoint(self) -> dict[str, Any]:
        """Return the keys of a checkpoint's config.json."""
        config: dict[str, Any] = {name: getattr(self, name) for name in self.NUMBERS}
        config[self.NET] = dataclasses.asdict(self.net)
        if self.eagle3 is not None:
            config[self.EAGLE3] = self.eagle3.to_checkpoint()
        return config

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> EagleParams:
        """Read the keys; raise SpecDecError for an absent, unknown or absurd one."""
        for name in cls.NUMBERS:
            most = MAX_MODULES if name == "num_eagle_layers" else MAX_DRAFT_TOKENS
            _check_count(name, config.get(name), 1, most)
        depth, num_inner = config["num_eagle_layers"], config["max_non_leaves_per_layer"]
        _check_product(
            f"{depth} EAGLE layers of {num_inner} non-leaves", depth * num_inner, MAX_DRAFT_TOKENS
        )
        _check_unknown((k for k in config if "eagle" in k), {*cls.NUMBERS, cls.NET, cls.EAGLE3})
        is_third = config.get("architecture") == EAGLE3_ARCHITECTURE
        _check(
            cls.EAGLE3, config.get(cls.EAGLE3), f"what {config.get('architecture')} has",
            is_good=is_third == (config.get(cls.EAGLE3) is not None),
        )  # fmt: skip
        net = EagleNet.from_checkpoint(cls.NET, config.get(cls.NET))
        if not is_third:
            what = f"{depth} EAGLE nets of {net.num_hidden_layers} layers"
            _check_product(what, depth * net.num_hidden_layers, MAX_MODULES)
        return cls(
            net=net,
            eagle3=Eagle3Params.from_checkpoint(cls.EAGLE3, config[cls.EAGLE3])
            if is_third
            else None,
            **{name: config[name] for name in cls.NUMBERS},
        )


DrafterParams = ReDrafterParams | MedusaParams | EagleParams


def _check(key: str, value: object, expected: str, *, is_good: bool) -> None:
    if not is_good:
        raise SpecDecError(
            f"checkpoint config: {key} is {shorten(value)}, not {expected}",
            "convert the checkpoint again, or mend the key",
        )


def _check_count(key: str, value: object, least: int, most: int) -> None:
    is_good = type(value) is int and least <= value <= most
    _check(key, value, f"a whole number from {least} to {most}", is_good=is_good)


def _check_product(what: str, number: int, most: int) -> None:
    if number > most:
        raise SpecDecError(
            f"checkpoint config: {what} are {number}, more than {most}",
            "convert the checkpoint again, or mend the keys",
        )


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
    params: type[ReDrafterParams] | type[MedusaParams] | type[EagleParams]
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
    "eagle": Method(
        name="eagle",
        mode="eagle",
        params=EagleParams,
        architectures=(EAGLE_ARCHITECTURE, EAGLE3_ARCHITECTURE),
    ),
}

# Methods without weights in the target's checkpoint, so with nothing to convert or to train: their
# drafts come from an engine of their own, the text, or the target itself. The mode is that of the
# target's engine.
EXTERNAL_METHODS = {
    "draft_target": "draft_tokens_external",
    "prompt_lookup": "draft_tokens_external",
    "lookahead": "lookahead_decoding",
}


def count_lookahead_tokens(window_size: int, ngram_size: int, verification_set_size: int) -> int:
    """Draft tokens that lookahead's [W,N,G] makes a step."""
    return (window_size + verification_set_size) * (ngram_size - 1) - 1


def find_method(config: Mapping[str, Any]) -> Method | None:
    """Return the method that a checkpoint's config.json carries, or None for a plain model."""
    architecture = config.get("architecture")
    for method in METHODS.values():
        if architecture in method.architectures:
            return method
    return None
