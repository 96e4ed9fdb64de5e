"""The model families; a file here with a `FAMILY` is one, nothing else has to be changed."""

from __future__ import annotations

import importlib
import pkgutil

from specdec.errors import SpecDecError, shorten, suggest

from ..hf import HfFolder
from .base import Family


def list_families() -> list[Family]:
    """The `FAMILY` of every module here but `base`."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [
        importlib.import_module(f"{__name__}.{name}").FAMILY for name in names if name != "base"
    ]


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
    architecture = listed[0] if listed else None
    remedy = f"the supported architectures are {', '.join(FAMILIES)}"
    if isinstance(folder.config.get("text_config"), dict):
        remedy = f"save its language model, the part of text_config, alone; {remedy}"
    if architecture is not None:  # ModelOpt names so the class of a model that it added heads to
        architecture = architecture.removeprefix("Medusa")
    if architecture is None:
        model_type = folder.config.get("model_type")
        for family in FAMILIES.values():
            if model_type == family.model_type:
                return family
        known = [family.model_type for family in FAMILIES.values()]
        raise SpecDecError(
            f"{folder.path}: config.json names no architecture, and model_type"
            f" {shorten(model_type)}{suggest(str(model_type), known)}",
            remedy,
        )
    if architecture not in FAMILIES:
        raise SpecDecError(
            f"{folder.path}: architecture {shorten(architecture)} is not supported"
            f"{suggest(architecture, list(FAMILIES))}",
            remedy,
        )
    return FAMILIES[architecture]
