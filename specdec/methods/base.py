"""Record of a drafting method, and the checks that the methods' parameters share."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar, get_type_hints

from specdec.errors import Problems, SpecDecError, UsageError, shorten
from specdec.model.bounds import MAX_MODULES
from specdec.options import get_flags, setting

if TYPE_CHECKING:
    from specdec.model.config import ModelConfig
    from specdec.model.tensors import TensorSpec

# Options with usual bounds.
number = functools.partial(setting, minimum=1, metavar="N")
share = functools.partial(setting, minimum=0, maximum=1)

# Remedy for a drafter whose sizes are not its target's.
USE_ITS_DRAFTER = (
    "use the drafter that was trained for this target: `specdec match` tells which of several fits"
)
Choices = tuple[tuple[int, ...], ...]  # a static tree: paths of ranks, as in trees.py


class Rule(NamedTuple):
    """Rule for a value of a checkpoint's config.json, in words and as a test.

    bounds: of a whole number.
    """

    words: str
    holds: Callable[[Any], bool]
    bounds: tuple[int, int] | None = None


def whole_number(minimum: int, maximum: int) -> Rule:
    """Return the rule for a whole number within bounds."""
    return Rule(
        f"a whole number from {minimum} to {maximum}",
        lambda value: type(value) is int and minimum <= value <= maximum,
        (minimum, maximum),
    )


def or_null(rule: Rule, words: str) -> Rule:
    """Return a rule that null follows, too."""
    return Rule(words, lambda value: value is None or rule.holds(value))


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < float(str(value)) < math.inf


def _are_layers(value: Any) -> bool:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MODULES:
        return False
    return all(type(n) is int and n >= 0 for n in value) and value == sorted(set(value))


FLAG = Rule("true or false", lambda value: isinstance(value, bool))
POSITIVE = Rule("a positive number", _is_positive)
OBJECT = Rule("an object", lambda value: isinstance(value, dict))
LAYERS = Rule("a rising list of layers", _are_layers)


def count(minimum: int, maximum: int, **field_options: Any) -> Any:
    """Declare a field of a drafter's parameters that is a whole number within bounds."""
    return dataclasses.field(metadata={"rule": whole_number(minimum, maximum)}, **field_options)


def bounds(kind: type, name: str) -> dict[str, int]:
    """Return the bounds of a field made by `count`, as an option declares them."""
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    minimum, maximum = field.metadata["rule"].bounds
    return {"minimum": minimum, "maximum": maximum}


def read_length(flag: str, text: str | None) -> int | None:
    """Read a number of draft tokens; None for `auto`, and where none is given."""
    if text is None or text == "auto":
        return None
    if not str(text).isdecimal() or int(text) < 1:
        raise UsageError(f"{flag} is {text!r}", "give a whole number above 0, or auto")
    return int(text)


def check(key: str, value: object, rule: Rule) -> None:
    """Raise SpecDecError that says what a key of a checkpoint's config.json should be."""
    if not rule.holds(value):
        raise SpecDecError(
            f"checkpoint config: {key} is {shorten(value)}, not {rule.words}",
            "convert the checkpoint again, or correct the key",
        )


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
        check(key, config, OBJECT)
    assert isinstance(config, Mapping)
    hints, values = get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        name = (names or {}).get(field.name, field.name)
        by_type = {bool: FLAG, tuple[int, ...]: LAYERS}.get(hints[field.name])
        rule = field.metadata.get("rule", by_type)
        if rule is None or (name not in config and field.default is not dataclasses.MISSING):
            continue
        value: Any = config.get(name)
        check(f"{key}.{name}" if key else name, value, rule)
        values[field.name] = tuple(value) if rule is LAYERS else value
    return values


P = TypeVar("P", bound="DrafterParams")


class DrafterParams:
    """A method's parameters in a checkpoint's config.json, for methods that have weights there.

    A dataclass whose fields are made by `count`. WORD: what its keys have in common; KEYS: those of
    fields that go by another name there. max_draft_len: most draft tokens of a step's tree.
    """

    WORD: ClassVar[str]
    KEYS: ClassVar[Mapping[str, str]] = {}
    max_draft_len: int

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens proposed in a verify step."""
        return self.max_draft_len

    @property
    def max_draft_depth(self) -> int:
        """Most draft tokens that one verify step can accept."""
        raise NotImplementedError

    @property
    def draft_len_source(self) -> str:
        """Where `max_draft_tokens` comes from, in the words of an error message."""
        return f"its max_draft_len is {self.max_draft_len}"

    def find_problems(self, *, hidden_size: int, vocab_size: int, tp_size: int) -> Problems:
        """List what does not suit a target of these sizes, each with a remedy."""
        raise NotImplementedError

    def list_tensors(self, model: ModelConfig) -> dict[str, TensorSpec]:
        """Map canonical names to every tensor of the drafter for the target `model`, whole."""
        raise NotImplementedError

    def to_checkpoint(self) -> dict[str, Any]:
        """Return the method's keys of a checkpoint's config.json."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return {self.KEYS.get(name, name): getattr(self, name) for name in names}

    @classmethod
    def from_checkpoint(cls: type[P], config: Mapping[str, Any]) -> P:
        """Read those keys; raise SpecDecError for an absent, unknown or absurd one."""
        params = cls(**read_fields(cls, config, names=cls.KEYS))
        check_unknown((key for key in config if cls.WORD in key), set(params.to_checkpoint()))
        params.check_product()
        return params

    def check_product(self) -> None:
        """Raise SpecDecError where fields are too many modules or tokens only as a product."""


def read_nothing(settings: Any) -> None:
    """Return nothing, as `Method.read` of a method without options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """One drafting method: what the stages need to know of it, in one place.

    A stage's own work on a method lies in a module of the method's name: `convert/methods/`,
    `train/methods/`, `specdec/decode/drafters/`.

    title: its name in help and pages. paper: where it is described. mode: the engine's
    `--speculative-decoding-mode`. source: what drafts are made by: weights in the target's
    `checkpoint`, another `engine`, or no weights but the `target`'s. params, architectures: of
    methods with weights in the target's checkpoint. own_architectures: those among them that no
    TensorRT-LLM knows, for targets that it has no such drafter for, and what each is called.
    folder: the option of specdec-convert that names the drafter's folder. options: by use, the
    settings that belong to the method: "convert"; "draft", of every command that decodes; "train".
    read: from the settings of a command that decodes to what the drafter is made by, None
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


def check_product(description: str, number: int, limit: int) -> None:
    """Raise SpecDecError for so many modules or tokens that listing them exhausts the machine."""
    if number > limit:
        raise SpecDecError(
            f"checkpoint config: {description} are {number}, more than {limit}",
            "convert the checkpoint again, or correct the keys",
        )


def check_unknown(keys: Iterable[str], known_keys: set[str]) -> None:
    """Raise SpecDecError for keys that the method does not know."""
    unknown_keys = sorted(set(keys) - known_keys)
    if unknown_keys:
        raise SpecDecError(
            f"checkpoint config: unknown keys {', '.join(unknown_keys)}",
            f"the known ones are {', '.join(sorted(known_keys))}",
        )


def add_uneven(problems: Problems, owner: str, sizes: Mapping[str, int], tp_size: int) -> None:
    """Add those of a drafter's sizes that do not split over so many ranks."""
    uneven = [f"{name}={size}" for name, size in sizes.items() if size % tp_size]
    if uneven:
        problems.add(
            f"{owner} {', '.join(uneven)} do not split over tp_size={tp_size}",
            "use a tp_size that divides them",
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


def is_number_list(value: object) -> bool:
    """Tell whether an entry is a list of one or more ranks or numbers, counted from 0."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(type(number) is int and number >= 0 for number in value)


def parse_paths(text: str | Sequence[Any], flag: str) -> Choices:
    """Read an option, a list of paths or its JSON; raise UsageError for anything else."""
    hint = "give a JSON list of paths of ranks, such as '[[0], [0, 0], [1]]'"
    try:
        paths = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{flag} is not JSON: {error}", hint) from None
    if not isinstance(paths, (list, tuple)) or not paths:
        raise UsageError(f"{flag} is {str(text)[:80]}, not a list of paths", hint)
    for path in paths:
        if not is_number_list(path):
            path_text = json.dumps(path) if isinstance(text, str) else repr(path)
            raise UsageError(f"{flag}: {path_text[:80]} is not a path", hint)
    return tuple(tuple(path) for path in paths)
