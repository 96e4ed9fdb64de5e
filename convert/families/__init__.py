"""The model families: every `Family` that a file here names; nothing else has to be changed."""

from __future__ import annotations

import importlib
import pkgutil

from specdec.errors import SpecDecError, shorten
from specdec.model.wrappers import WRAPPERS

from ..hf import HfFolder
from ..kinds import describe_kind
from .base import Family


def list_families() -> list[Family]:
    """Every `Family` of the modules here, by name."""
    modules = [
        importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)
    ]
    found = [each for m in modules for each in vars(m).values() if isinstance(each, Family)]
    return sorted(found, key=lambda family: family.name)


FAMILIES: dict[str, Family] = {
    architecture: family for family in list_families() for architecture in family.architectures
}


def find_family(folder: HfFolder) -> Family:
    """Return the family of a model folder, or raise SpecDecError naming the nearest one."""
    listed = folder.config.get("architectures") or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise SpecDecError(
            f"{folder.path}: architectures is {shorten(listed)}, not a list of names",
            "correct architectures in its config.json",
        )
    if listed:  # ModelOpt names so the class of a model that it added heads to
        family = FAMILIES.get(listed[0].removeprefix("Medusa"))
        what = f"architecture {shorten(listed[0])}"
    else:
        model_type = folder.config.get("model_type")
        family = next(
            (f for f in FAMILIES.values() if model_type == (f.model_type or f.name)), None
        )
        what = f"model_type {shorten(model_type)}, with no architecture named beside it,"
    if family is None:
        raise refuse_unknown(folder, what)
    return family


def refuse_unknown(folder: HfFolder, what: str) -> SpecDecError:
    """Return the error for a model that is of no family: what it has, and which is nearest."""
    inner = folder.config.get("text_config")
    config, owner = folder.config, "it"
    if isinstance(inner, dict):
        config, owner = inner, f"its text model ({shorten(inner.get('model_type'))})"
    names = {family.name: family for family in FAMILIES.values()}
    name, lacking = describe_kind(config, folder.tensors, names)
    nearest = names[name].architectures[0]
    has = f"looks like {nearest}, as far as config.json and tensor names tell"
    if lacking:
        has = f"has {', '.join(lacking)}; the nearest supported one, {nearest}, has not"
    remedy = f"the supported architectures are {', '.join(FAMILIES)}"
    if isinstance(inner, dict) and not lacking:
        remedy = (
            f"save its text model alone; the wrappers that are opened here are"
            f" {', '.join(WRAPPERS)}; {remedy}"
        )
    return SpecDecError(f"{folder.path}: {what} is not supported: {owner} {has}", remedy)
