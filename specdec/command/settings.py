"""Settings of a command, from defaults, a recipe and the typed flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from specdec.errors import UsageError, find_nearest, suggest
from specdec.options import check_value, get_flags, name_flag

T = TypeVar("T")
OPTION_HINT = (
    "--help and --all list the options, `specdec docs flags` has what replaces TensorRT-LLM's and"
    " ModelOpt's"
)
SECTIONS = (
    "convert", "build", "run", "serve", "train", "data", "ngrams", "verify", "bench", "export",
    "audit", "jobs",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnknownOption:
    """Option that no settings field has: its words, and the recipe that has it."""

    words: tuple[str, ...]
    recipe: Path | None = None  # None for an option of the command line


def suggest_option(name: str, known_options: Iterable[str]) -> str:
    """Return ` (did you mean --X?)` for an unknown option, or an empty string.

    name, known_options: with or without their dashes.
    """
    names = [option.lstrip("-").replace("-", "_") for option in known_options]
    nearest = find_nearest(name.lstrip("-").replace("-", "_"), names)
    return f" (did you mean {name_flag(nearest)}?)" if nearest else ""


def takes_unknown_options(settings_class: type) -> bool:
    """Return whether a settings class has a field for options that only a backend may know."""
    return any(field.name == "unknown_options" for field in dataclasses.fields(settings_class))


def make_unknown_error(
    settings_class: type, section: str, name: str, option: UnknownOption
) -> UsageError:
    """Return the error for an option that neither specdec nor a backend has."""
    known_names = list(get_flags(settings_class))
    if option.recipe is not None:
        fact = f"recipe {option.recipe}: unknown key {name!r} in section {section}"
        hint = f"`specdec {section} --help` lists the keys"
        return UsageError(fact + suggest(name, known_names), hint)
    fact = f"no such option {name_flag(name)}{suggest_option(name, known_names)}"
    return UsageError(fact, OPTION_HINT)


def _refuse_twins(mapping: Any) -> None:
    """Raise ValueError for a repeated section or key, of which YAML would take the last."""
    import yaml

    if not isinstance(mapping, yaml.MappingNode):
        return
    seen_keys: set[str] = set()
    for key, value in mapping.value:
        if str(key.value) in seen_keys:
            raise ValueError(f"{key.value} is there twice, again on line {key.start_mark.line + 1}")
        seen_keys.add(str(key.value))
        _refuse_twins(value)


def read_recipe(path: Path, section: str) -> dict[str, Any]:
    """Read one section of a YAML recipe; its form is checked, its keys are not."""
    values = read_sections(path).get(section)
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise UsageError(f"recipe {path}: section {section} is not a mapping", "write `key: value`")
    return values


def read_sections(path: Path) -> dict[str, Any]:
    """Read the sections of a YAML recipe; their names are checked, and what they hold is not."""
    import yaml

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        _refuse_twins(node)
        document = None if node is None else loader.construct_document(node)
    except FileNotFoundError:
        remedy = "check its path, which counts from the current folder"
        raise UsageError(f"recipe {path} does not exist", remedy) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"recipe {path} is not readable: {reason}", "correct the file") from None
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise UsageError(
            f"recipe {path} holds a {type(document).__name__}, not sections",
            f"write the keys under {', '.join(s + ':' for s in SECTIONS)}",
        )
    for name in document:
        if name not in SECTIONS:
            raise UsageError(
                f"recipe {path}: unknown section {name!r}{suggest(str(name), SECTIONS)}",
                f"the sections are {', '.join(SECTIONS)}",
            )
    return document


def resolve_settings(
    settings_class: type[T],
    section: str,
    typed: Mapping[str, Any],
    recipe: Path | None,
    unknown_words: Mapping[str, Sequence[str]] | None = None,
) -> T:
    """Combine defaults, a recipe's section and the flags actually typed, in rising precedence.

    Relative paths in a recipe are relative to the current folder, as on the command line.
    unknown_words: the words of typed options without a field of the class, which must take such
    options.
    """
    flags = get_flags(settings_class)
    values: dict[str, Any] = {}
    unknown_options: dict[str, UnknownOption] = {}
    if recipe is not None:
        for key, value in read_recipe(recipe, section).items():
            name = str(key).replace("-", "_")
            if name not in flags:
                option = UnknownOption(words=_list_words(name, value), recipe=recipe)
                if not takes_unknown_options(settings_class):
                    raise make_unknown_error(settings_class, section, str(key), option)
                unknown_options[name] = option
            elif name in values:
                fact = f"recipe {recipe}: {name} is given twice in section {section}"
                raise UsageError(fact, "keep one")
            elif value is not None:  # an empty key leaves the default
                values[name] = check_value(name, value, flags[name][0])
    for name, value in typed.items():
        values[name] = check_value(name_flag(name), value, flags[name][0])
    unknown_options |= {
        name: UnknownOption(words=tuple(words)) for name, words in (unknown_words or {}).items()
    }
    if takes_unknown_options(settings_class):
        values["unknown_options"] = unknown_options
    return settings_class(**values)


def _list_words(name: str, value: Any) -> tuple[str, ...]:
    """Return the words of a recipe's value, as a command line would have them."""
    if value is True:
        return ()
    if value is None or value is False or isinstance(value, dict):
        raise UsageError(f"{name}: expected a text or true, got {value!r}", f"give {name} or not")
    return tuple(str(item) for item in (value if isinstance(value, list) else [value]))


def require(settings: Any, *names: str) -> None:
    """Raise UsageError for an absent setting that is declared as required or is in `names`.

    Functions that take settings from a caller call this first: their types rely on it. Tables of
    options that exclude one another are for `refuse_contradictions` in specdec/options.py.
    """
    required = [name for name, (flag, _) in get_flags(type(settings)).items() if flag.required]
    required_names = dict.fromkeys((*names, *required))
    if missing_names := [
        name for name in required_names if getattr(settings, name) in (None, [], "")
    ]:
        flags = ", ".join(map(name_flag, missing_names))
        context = click.get_current_context(silent=True)
        takes_recipe = context is None or "config" in context.params
        recipe = " or in a --config recipe" if takes_recipe else ""
        raise UsageError(f"missing {flags}", f"give it on the command line{recipe}")


def need(value: T | None) -> T:
    """Return a setting that is not None, as an earlier check has made sure."""
    assert value is not None
    return value


def to_plain(settings: Any) -> dict[str, Any]:
    """Return a settings object as JSON-ready values."""
    plain: dict[str, Any] = {}
    for name in get_flags(type(settings)):
        value = getattr(settings, name)
        plain[name] = str(value) if isinstance(value, Path) else value
    if takes_unknown_options(type(settings)):
        plain |= {name: list(option.words) for name, option in settings.unknown_options.items()}
    return plain


def to_arguments(settings: Any) -> list[str]:
    """Return the command line of settings, without options at their defaults."""
    arguments = []
    for name, (flag, default) in get_flags(type(settings)).items():
        value = getattr(settings, name)
        option = name_flag(name)
        if value == default or value is None:
            continue
        if flag.kind == "flag":
            arguments.append(option if value else f"--no-{option[2:]}")
        elif flag.kind == "enable":
            arguments.append(f"{option}={'enable' if value else 'disable'}")
        else:
            values = value if flag.kind == "list" else [value]
            arguments += [f"{option}={entry}" for entry in values]
    return arguments
