"""Options of settings: one field declares a flag, a recipe key, a default and a help text."""

from __future__ import annotations

import dataclasses
import errno
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from specdec.errors import UsageError, shorten, suggest

T = TypeVar("T")
# Kind of an option's value by its field's type without `| None`; a bool that may be None is given
# as enable or disable.
KINDS = {
    "str": "str", "int": "int", "float": "float", "Path": "path", "bool": "flag",
    "bool | None": "enable", "list[str]": "list",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """Option of a settings field, on the command line and in a recipe."""

    help: str
    kind: str = ""  # one of KINDS, by the field's type
    choices: tuple[str, ...] = ()
    # Value of another command -> that command.
    elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)
    minimum: float | None = None
    maximum: float | None = None
    metavar: str | None = None
    hidden: bool = False
    group: str = ""  # title in --help; empty for general options and options of methods
    rare: bool = False  # explained by --all only
    is_switch: bool = False  # a `bool | None` given as --NAME or --no-NAME
    takes_list: bool = False  # `Engine.load` takes a list of texts, too
    is_argument: bool = False  # list of the words that belong to no option
    required: bool = False  # `require` refuses settings without it, so that its type is never None
    folder: str | None = None  # kind of the folder that it names, of files/folders.py


def setting(default: Any = None, *, help: str, **flag: Any) -> Any:
    """Declare a settings field; see `Flag` for the keywords."""
    return _declare(default, {"flag": Flag(help=help, **flag)})


def option_group(title: str, *, rare: bool = False) -> Callable[..., Any]:
    """Return `setting` for the options of a group; see `Flag`."""
    return functools.partial(setting, group=title, rare=rare)


def like(
    kind: type, name: str, help: str | None = None, *, group: str | None = None,
    rare: bool = False, **metadata: Any,
) -> Any:  # fmt: skip
    """Declare a field like another class's. metadata: further facts of dataclasses.field.

    help, group: replace the other field's; rare belongs to a group.
    """
    flag, default = get_flags(kind)[name]
    if help is not None:
        flag = dataclasses.replace(flag, help=help)
    if group is not None:
        flag = dataclasses.replace(flag, group=group, rare=rare)
    return _declare(default, {"flag": flag, **metadata})


def _declare(default: Any, metadata: dict[str, Any]) -> Any:
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def get_flags(settings_class: type) -> Mapping[str, tuple[Flag, Any]]:
    """Map each field of a settings class to (flag, default); its module postpones annotations."""
    return _read_flags(settings_class)


@functools.cache
def _read_flags(settings_class: type) -> Mapping[str, tuple[Flag, Any]]:
    flags = {}
    for field in dataclasses.fields(settings_class):
        if "flag" in field.metadata:
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            type_name = str(field.type)
            kind = KINDS.get(type_name) or KINDS[type_name.removesuffix(" | None")]
            flag = dataclasses.replace(field.metadata["flag"], kind=kind)
            flags[field.name] = (flag, default)
    return flags


def add_options(*kinds: type) -> Callable[[type[T]], type[T]]:
    """Decorate a settings class with the fields of other classes, such as the methods' options.

    A type checker sees only the class's own fields; `as_options` gives the others their types.
    """

    def decorate(settings_class: type[T]) -> type[T]:
        namespace = {
            name: getattr(settings_class, name)
            for name in ("__module__", "__qualname__", "__doc__")
        }
        return dataclasses.make_dataclass(
            settings_class.__name__, [], bases=(*reversed(kinds), settings_class),
            namespace=namespace, frozen=True, kw_only=True,
        )  # fmt: skip

    return decorate


def as_options(settings: object, kind: type[T]) -> T:
    """Return settings as one of the classes that `add_options` added to them."""
    assert isinstance(settings, kind)
    return settings


def list_given(settings: Any, kind: type) -> list[str]:
    """Return the names of the options of `kind` that are not at their default."""
    flags = get_flags(kind).items()
    return [name for name, (_, default) in flags if getattr(settings, name) != default]


def name_flag(name: str) -> str:
    """Return a settings field's name on the command line."""
    return "--" + name.replace("_", "-")


# Function of a command's settings that returns a false value where they are right, and the error's
# fact and hint, in which {found} is the returned value and {name} a setting's value. Each command
# has one table of these.
Contradiction = tuple[Callable[[Any], object], str, str]


def refuse_contradictions(settings: object, rules: Iterable[Contradiction]) -> None:
    """Raise UsageError for the first of the rules that settings break."""
    for find, fact, hint in rules:
        if offender := find(settings):
            values = {**vars(settings), "found": offender}
            raise UsageError(fact.format_map(values), hint.format_map(values))


def find_given(settings: object, *names: str) -> str | None:
    """Return the first of these options that is neither None nor False, as a flag."""
    values = {name: getattr(settings, name) for name in names}
    return next((name_flag(n) for n, v in values.items() if v is not None and v is not False), None)


def no_speculation(*names: str) -> Contradiction:
    """Return the rule that options have no effect with --no-speculation."""
    return (
        lambda settings: settings.no_speculation and find_given(settings, *names),
        "{found} has no effect with --no-speculation", "leave one of them out",
    )  # fmt: skip


def check_value(name: str, value: Any, flag: Flag) -> Any:
    """Return a recipe or command-line value as the flag's type, or raise UsageError."""
    readers: dict[str, Callable[[Any, Flag], Any]] = {
        "flag": _read_switch, "enable": _read_switch, "list": _read_list, "int": _read_number,
        "float": _read_number,
    }  # fmt: skip
    read: Callable[[Any, Flag], Any] = readers.get(flag.kind, _read_text)
    if str(value).startswith("~/") and (flag.kind == "path" or name.endswith("dir")):
        value = os.path.expanduser(value)  # no shell does so in recipes and in --model-dir=~/m
    try:
        parsed = None if value is None else read(value, flag)
    except _Unexpected as error:
        fact = f"{name}: expected {error}, got {shorten(value, 200)}"
        raise UsageError(fact, f"give {name} {error}") from None
    if not isinstance(parsed, str):
        return parsed
    if not parsed and name.endswith("dir"):  # Path("") would be the current folder
        raise UsageError(f"{name} is empty", "give a folder or Hub id")
    choices = ", ".join(flag.choices)
    if parsed in flag.elsewhere:
        fact = f"{name}: {parsed} is not one of {choices}: another command makes it"
        raise UsageError(fact, f"{parsed}: {flag.elsewhere[parsed]}")
    if flag.choices and parsed not in flag.choices:
        fact = f"{name}: {parsed!r} is not one of {choices}{suggest(parsed, flag.choices)}"
        raise UsageError(fact, f"choose one of {choices}")
    return parsed


class _Unexpected(ValueError):
    """Error of a value, whose text describes the expected value."""


def _read_switch(value: Any, flag: Flag) -> bool:
    if isinstance(value, bool):
        return value
    if flag.kind == "flag":
        raise _Unexpected("true or false")
    if value not in ("enable", "disable"):
        raise _Unexpected("enable or disable")
    return bool(value == "enable")


def _read_list(value: Any, flag: Flag) -> list[str]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(v, (str, int, float)) and not isinstance(v, bool) for v in values):
        raise _Unexpected("a text or a list of texts")
    if not all(is_whole(str(v)) for v in values):
        raise _Unexpected("text of whole characters, in UTF-8")
    return [str(v) for v in values]


def _read_number(value: Any, flag: Flag) -> Any:
    is_whole = flag.kind == "int"
    try:
        if isinstance(value, bool) or (is_whole and isinstance(value, float)):
            raise ValueError
        value = int(value) if is_whole else float(value)
    except (TypeError, ValueError, OverflowError):
        raise _Unexpected("a whole number" if is_whole else "a number") from None
    _check_bounds(value, flag)
    return value


def _check_bounds(value: float, flag: Flag) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise _Unexpected("a finite number")
    if flag.minimum is not None and not value >= flag.minimum:
        raise _Unexpected(f"at least {flag.minimum}")
    if flag.maximum is not None and not value <= flag.maximum:
        raise _Unexpected(f"at most {flag.maximum}")


def _read_text(value: Any, flag: Flag) -> str | Path:
    if isinstance(value, bool) or not isinstance(value, (str, int, float, Path)):
        raise _Unexpected("a text")
    text, is_path = str(value), flag.kind == "path"
    if not is_whole(text):
        raise _Unexpected("text of whole characters, in UTF-8")
    if is_path and (not text or "\0" in text):
        raise _Unexpected("a path")  # Path("") would be the current folder
    if is_path and _leads_in_circles(text):
        raise _Unexpected("a path without a circle of links")
    choices = {choice.replace("_", "-"): choice for choice in flag.choices}
    return Path(text) if is_path else choices.get(text.replace("_", "-"), text)


def is_whole(text: str) -> bool:
    """Return whether a text has no bytes that the locale cannot decode, and no half characters."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _leads_in_circles(path: str) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False
