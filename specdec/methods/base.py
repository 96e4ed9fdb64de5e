"""What every drafting method's record holds, and the checks that the methods' parameters share."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_type_hints

from specdec.errors import Problems, SpecDecError, UsageError, shorten
from specdec.model.bounds import MAX_MODULES
from specdec.options import get_flags

if TYPE_CHECKING:
    from specdec.model.config import ModelConfig
    from specdec.model.tensors import TensorSpec

Choices = tuple[tuple[int, ...], ...]  # a static tree: paths of ranks, as in trees.py


class DrafterParams(Protocol):
    """A method's parameters in a checkpoint's config.json, for methods that have weights there."""

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens proposed in a verify step."""

    @property
    def max_draft_depth(self) -> int:
        """Most draft tokens that one verify step can accept."""

    @property
    def draft_len_source(self) -> str:
        """Where `max_draft_tokens` comes from, in the words of an error message."""

    def find_problems(self, *, hidden_size: int, vocab_size: int, tp_size: int) -> Problems:
        """List what does not suit a target of these sizes, each with a remedy."""

    def list_tensors(self, model: ModelConfig) -> dict[str, TensorSpec]:
        """Every tensor of the drafter for the target `model`, whole, by canonical name."""

    def to_checkpoint(self) -> dict[str, Any]:
        """Return the method's keys of a checkpoint's config.json."""

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> DrafterParams:
        """Read those keys; raise SpecDecError for an absent, unknown or absurd one."""


def read_nothing(settings: Any) -> None:
    """`Method.read` of a method without options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One drafting method: what the stages need to know of it, in one place.

    A stage's own work on a method lies in a module of the method's name: `convert/methods/`,
    `train/methods/`, `specdec/decode/drafters/`, `bench/methods/`.

    title: its name in help and pages. paper: where it is described. mode: the engine's
    `--speculative-decoding-mode`. source: what drafts are made by: weights in the target's
    `checkpoint`, another `engine`, or no weights but the `target`'s. params, architectures: of
    methods with weights in the target's checkpoint. own_architectures: those among them that no
    TensorRT-LLM knows, for targets that it has no such drafter for, and what each is called.
    folder: the option of specdec-convert that names the drafter's folder. options: by use, the
    settings that belong to the method: "convert"; "draft", of every command that decodes; "train";
    "tune". read: from the settings of a command that decodes to what the drafter is made by, None
    where no option of the method is given; raises UsageError. joins_chains: whether it can be
    in a `--draft-chain`. training: the values that its training takes for settings without a common
    default; None where there is nothing to train.
    """

    name: str
    title: str
    paper: str
    mode: str
    source: Literal["checkpoint", "engine", "target"]
    params: type[DrafterParams] | None = None
    architectures: tuple[str, ...] = ()
    own_architectures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    folder: str | None = None
    options: Mapping[str, type] = dataclasses.field(default_factory=dict)
    read: Callable[[Any], Any | None] = read_nothing
    joins_chains: bool = True
    training: Mapping[str, Any] | None = None

    @property
    def starter(self) -> str | None:
        """The option that makes it draft: the first of its own; None if its weights do."""
        if self.source == "checkpoint":
            return None
        return next(iter(get_flags(self.options["draft"])))


class SizedTree:
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


def fit_net(net: ModelConfig, model: ModelConfig, vocab_size: int) -> ModelConfig:
    """A drafter's net for the target `model`: its type and ranks, and so many drafted tokens."""
    return dataclasses.replace(
        net,
        vocab_size=vocab_size,
        dtype=model.dtype,
        use_parallel_embedding=model.use_parallel_embedding,
        embedding_sharding_dim=model.embedding_sharding_dim,
        tp_size=model.tp_size,
    )


def check(key: str, value: object, expected: str, *, is_good: bool) -> None:
    """Raise SpecDecError that says what a key of a checkpoint's config.json should be."""
    if not is_good:
        raise SpecDecError(
            f"checkpoint config: {key} is {shorten(value)}, not {expected}",
            "convert the checkpoint again, or correct the key",
        )


def check_count(key: str, value: object, least: int, most: int) -> None:
    """Raise SpecDecError for anything but a whole number from `least` to `most`."""
    is_good = type(value) is int and least <= value <= most
    check(key, value, f"a whole number from {least} to {most}", is_good=is_good)


def count(least: int, most: int, **more: Any) -> Any:
    """A field of a drafter's parameters: a whole number within these bounds."""
    return dataclasses.field(metadata={"bounds": (least, most)}, **more)


def read_fields(
    kind: type, config: object, *, key: str = "", names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Read what a dataclass declares from an object of a checkpoint's config.json.

    Fields made by `count`, booleans and rising lists of layers are read; other fields are left to
    the caller. A field with a default may be absent. key: the object's own name, "" for the whole
    file. names: the key of each field where it differs from the field's name. Raises SpecDecError
    that names the first wrong key.
    """
    if key:
        check(key, config, "an object", is_good=isinstance(config, dict))
    assert isinstance(config, Mapping)
    hints, found = get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        name = (names or {}).get(field.name, field.name)
        shown, value = f"{key}.{name}" if key else name, config.get(name)
        bounds, hint = field.metadata.get("bounds"), hints[field.name]
        if bounds is None and hint not in (bool, tuple[int, ...]):
            continue
        if name not in config and field.default is not dataclasses.MISSING:
            continue
        if bounds is not None:
            check_count(shown, value, *bounds)
        elif hint is bool:
            check(shown, value, "true or false", is_good=isinstance(value, bool))
        else:
            value = read_layers(shown, value)
        found[field.name] = value
    return found


def read_layers(key: str, found: object) -> tuple[int, ...]:
    """Read a list of a target's layers, from 0, in rising order; raise SpecDecError."""
    layers = found if isinstance(found, list) else []
    is_good = 0 < len(layers) <= MAX_MODULES
    is_good = is_good and all(type(layer) is int and layer >= 0 for layer in layers)
    is_good = is_good and layers == sorted(set(layers))
    check(key, found, "a rising list of layers", is_good=is_good)
    return tuple(layers)


def check_product(what: str, number: int, most: int) -> None:
    """Raise SpecDecError for so many modules or tokens that listing them exhausts the machine."""
    if number > most:
        raise SpecDecError(
            f"checkpoint config: {what} are {number}, more than {most}",
            "convert the checkpoint again, or correct the keys",
        )


def check_unknown(keys: Iterable[str], known: set[str]) -> None:
    """Raise SpecDecError for keys that the method does not know."""
    unknown = sorted(set(keys) - known)
    if unknown:
        raise SpecDecError(
            f"checkpoint config: unknown keys {', '.join(unknown)}",
            f"the known ones are {', '.join(sorted(known))}",
        )


def read_literal(flag: str, text: str | Sequence[Any], form: str, *, length: int) -> list[Any]:
    """Read an option of `length` entries, as text or list; raise UsageError that shows its form."""
    try:
        # Literals only; nothing is executed.
        value = ast.literal_eval(text) if isinstance(text, str) else text
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, (list, tuple)) or len(value) != length:
        raise UsageError(f"{flag} is {text!r}", f"write it as {form}")
    return list(value)


def is_device_list(value: object) -> bool:
    """Tell whether an entry is a list of one or more device numbers."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(type(device) is int and device >= 0 for device in value)


def parse_paths(text: str | Sequence[Any], flag: str) -> Choices:
    """Read an option, a list of paths or its JSON; raise UsageError for anything else."""
    hint = "give a JSON list of paths of ranks, such as '[[0], [0, 0], [1]]'"
    try:
        listed = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} is not JSON: {error}", hint) from None
    if not isinstance(listed, (list, tuple)) or not listed:
        raise UsageError(f"{flag} is {str(text)[:80]}, not a list of paths", hint)
    for path in listed:
        is_path = isinstance(path, (list, tuple)) and bool(path)
        if not is_path or not all(type(rank) is int and rank >= 0 for rank in path):
            shown = json.dumps(path) if isinstance(text, str) else repr(path)
            raise UsageError(f"{flag}: {shown[:80]} is not a path", hint)
    return tuple(tuple(path) for path in listed)
