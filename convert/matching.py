"""Drafters held against a target by a conversion's own checks and headers alone: specdec match."""

from __future__ import annotations

import dataclasses
import fnmatch
from pathlib import Path
from typing import Any

from specdec.checkpoint.config import CheckpointConfig
from specdec.errors import SpecDecError
from specdec.files.folders import look_at
from specdec.files.origin import find_other_base

from .methods import FOLDERS, load_converter
from .methods.mtp import list_head
from .pipeline import complete_settings, make_plan
from .plan import ConversionPlan
from .resolve import open_model
from .settings import ConvertSettings
from .target import MTP_FOLDER, PlannedTarget, plan_alone
from .wrappers import unwrap

ANY_DRAFTER = "drafter_model_dir"  # the option that takes a drafter of any method


@dataclasses.dataclass(frozen=True)
class ForeseenDrafter:
    """Checkpoint of a target with its drafter, and the warning that its base is another model."""

    checkpoint: CheckpointConfig
    warning: str | None


class DrafterMatcher:
    """Target of a conversion, planned once, against which drafters are held."""

    def __init__(self, model_dir: str) -> None:
        """Plan the target; raise SpecDecError where it cannot be converted."""
        self.model_dir = model_dir
        self.own_options = list_own_drafters(model_dir)
        self._target: PlannedTarget | None = None
        try:
            settings = complete_settings(self._make_settings({}))
            self._target = plan_alone(settings)
            plan = make_plan(settings, self._target)
        except SpecDecError:
            # One that was saved together with its drafter is converted with that.
            own_plans = [p for option in self.own_options if (p := self._try_own(option))]
            if not own_plans:
                raise
            plan = own_plans[0]
        self.checkpoint, self.vocabulary = plan.checkpoint, plan.vocabulary

    def _make_settings(self, drafter: dict[str, Any]) -> ConvertSettings:
        return ConvertSettings(model_dir=self.model_dir, output_dir=Path("checkpoint"), **drafter)

    def _try_own(self, option: str) -> ConversionPlan | None:
        try:
            return make_plan(complete_settings(self._make_settings({option: self.model_dir})))
        except SpecDecError:
            return None

    def hold(self, drafter: str, option: str = ANY_DRAFTER) -> ForeseenDrafter:
        """Foresee the target's conversion with a drafter; raise the SpecDecError that ends it."""
        settings = complete_settings(self._make_settings({option: drafter}))
        plan = make_plan(settings, None if drafter == self.model_dir else self._target)
        origin = plan.origin
        warning = find_other_base(origin, max_bytes=0) if origin is not None else None
        return ForeseenDrafter(plan.checkpoint, warning)


def list_own_drafters(model_dir: str) -> list[str]:
    """List the options of the drafters that a target's folder or file holds itself."""
    folder = open_model(model_dir, "--model-dir")
    signs = look_at(folder.path).find_signs() if folder.path.is_dir() else {}
    options = [option for option, method in FOLDERS.items() if method.name in signs]
    for option, method in FOLDERS.items():
        patterns = load_converter(method).IN_TARGET
        if any(fnmatch.fnmatchcase(name, p) for name in folder.tensors for p in patterns):
            options.append(option)
    unwrap(folder)
    if list_head(folder):
        options.append(MTP_FOLDER)
    return list(dict.fromkeys(options))
