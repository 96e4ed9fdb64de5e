"""Model families: every `Family` that a file here names; nothing else has to be changed."""

from __future__ import annotations

import fnmatch
import importlib
import itertools
import pkgutil
import re
from collections.abc import Collection

from specdec.errors import SpecDecError, join_names, shorten
from specdec.model.wrappers import WRAPPERS

from ..hf import HfFolder
from ..kinds import describe_kind
from .base import Family


def list_families() -> list[Family]:
    """Return every `Family` of the modules here, by name."""
    modules = [
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    ]
    families = [value for m in modules for value in vars(m).values() if isinstance(value, Family)]
    return sorted(families, key=lambda family: family.name)


FAMILIES: dict[str, Family] = {
    architecture: family for family in list_families() for architecture in family.architectures
}


def find_family(folder: HfFolder) -> Family:
    """Return the family of a model folder, or raise SpecDecError naming the nearest one."""
    architectures = folder.config.get("architectures") or []
    if not isinstance(architectures, list) or not all(
        isinstance(name, str) for name in architectures
    ):
        raise SpecDecError(
            f"{folder.path}: architectures is {shorten(architectures)}, not a list of names",
            "correct architectures in its config.json",
        )
    if architectures:  # ModelOpt names so the class of a model that it added heads to
        family = _find_named(architectures[0].removeprefix("Medusa"))
        description = f"architecture {shorten(architectures[0])}"
    else:
        model_type = folder.config.get("model_type")
        family = next(
            (f for f in FAMILIES.values() if model_type == (f.model_type or f.name)), None
        )
        description = f"model_type {shorten(model_type)}, with no architecture named beside it,"
    if family is None:
        raise refuse_unknown(folder, description)
    other = _find_other(family, folder.config.get("model_type"))
    if architectures and other is not None:
        raise SpecDecError(
            f"{folder.path}: architectures names {architectures[0]}, and model_type is"
            f" {shorten(folder.config['model_type'])}, which is {other.architectures[0]}'s",
            "correct the wrong one in its config.json: transformers goes by model_type",
        )
    return family


def _find_named(name: str) -> Family | None:
    """Return the family of a class, or of the class of its models without a head.

    Such a model is saved without its head: where that is tied nothing is missing.
    """
    stem = name.removesuffix("Model").removesuffix("Text")
    return FAMILIES.get(name) or FAMILIES.get(f"{stem}ForCausalLM" if stem != name else name)


def _find_other(family: Family, model_type: object) -> Family | None:
    """Return the family of a model_type that computes otherwise than this one; None if none does.

    A type that is no family's contradicts none.
    """
    families = [f for f in FAMILIES.values() if model_type in (f.name, f.model_type)]
    if not model_type or any(f.read_config is family.read_config for f in families):
        return None
    return families[0] if families else None


def compare_modules(family: Family, tensors: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the modules of some tensors that a family has not, and those of its that are missing.

    Numbers of layers are written as N; a head may be missing, as it may be tied.
    """
    source_modules = itertools.chain(*family.modules.values())
    names = (rows if isinstance(rows, str) else rows.name for rows in source_modules)
    family_modules = {name.replace("{layer}", "N").replace("{expert}", "N") for name in names}
    folder_modules = set()
    for name in tensors:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in family.ignored):
            continue
        module = re.sub(r"\b\d+\b", "N", re.sub(r"\.(weight|bias)$", "", name))
        renamed = (
            family.prefixes[0] + module.removeprefix(prefix)
            for prefix in family.prefixes if module.startswith(prefix)
        )  # fmt: skip
        folder_modules.add(next((name for name in renamed if name in family_modules), module))
    missing_modules = family_modules - folder_modules - {"lm_head"}
    return sorted(folder_modules - family_modules), sorted(missing_modules)


def refuse_unknown(folder: HfFolder, description: str) -> SpecDecError:
    """Return the error for a model that is of no family: what it has, and which is nearest."""
    inner = folder.config.get("text_config")
    config, owner = folder.config, "it"
    if isinstance(inner, dict):
        config, owner = inner, f"its text model ({shorten(inner.get('model_type'))})"
    names = {family.name: family for family in FAMILIES.values()}
    name, differences = describe_kind(config, folder.tensors, names)
    nearest = names[name].architectures[0]
    is_inner = isinstance(inner, dict)  # whose tensors have a wrapper's names
    other_modules, missing_modules = (
        ([], []) if is_inner else compare_modules(names[name], folder.tensors)
    )
    if other_modules:
        differences.append(f"modules of other names ({join_names(other_modules)})")
    lacks = f" and lacks {join_names(missing_modules)}" if missing_modules else ""
    has = (
        f"has {'' if is_inner else f'the modules of {nearest}, and '}nothing that is known here to"
        f" be computed otherwise than in {nearest}; whether it computes the same is not known"
    )
    if differences:
        differs = "differs" if missing_modules else "has not"
        has = (
            f"has {', '.join(differences)}{lacks}; the nearest supported one, {nearest}, {differs}"
        )
    elif missing_modules:
        has = (
            f"lacks {join_names(missing_modules)}, which the nearest supported one, {nearest}, has"
        )
    remedy = f"the supported architectures are {', '.join(FAMILIES)}"
    if isinstance(inner, dict) and not differences:
        remedy = (
            f"save its text model alone; the wrappers that are opened here are"
            f" {', '.join(WRAPPERS)}; {remedy}"
        )
    return SpecDecError(f"{folder.path}: {description} is not supported: {owner} {has}", remedy)
