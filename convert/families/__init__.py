"""The model families; a file here with a `FAMILY` is one, nothing else has to be changed."""

from __future__ import annotations

import importlib
import pkgutil

from specdec.errors import SpecDecError, suggest

from ..hf import HfFolder
from .base import Family


def _list_families() -> list[Family]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [
        importlib.import_module(f"{__name__}.{name}").FAMILY for name in names if name != "base"
    ]


FAMILIES: dict[str, Family] = {
    architecture: family for family in _list_families() for architecture in family.architectures
}


def find_family(folder: HfFolder) -> Family:
    """Return the family of a model folder, or raise SpecDecError naming the nearest one."""
    listed = folder.config.get("architectures")
    architecture = str(listed[0]) if isinstance(listed, list) and listed else None
    if architecture is None:
        model_type = folder.config.get("model_type")
        for family in FAMILIES.values():
            if model_type == family.model_type:
                return family
        raise SpecDecError(
            f"{folder.path}: config.json names no architecture, and model_type {model_type!r}",
            f"the supported architectures are {', '.join(FAMILIES)}",
        )
    if architecture not in FAMILIES:
        raise SpecDecError(
            f"{folder.path}: architecture {architecture!r} is not supported"
            f"{suggest(architecture, list(FAMILIES))}",
            f"the supported architectures are {', '.join(FAMILIES)}",
        )
    return FAMILIES[architecture]
