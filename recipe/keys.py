"""Section `jobs` of a recipe: its keys are checked, and spread over the stages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from specdec.errors import UsageError, shorten, suggest
from specdec.options import check_value, get_flags

from .settings import KEYS_OF_SCHEDULERS, STAGE_RESOURCES, JobsSettings, Resources

T = TypeVar("T")
DEFAULT_WORKDIR = Path("/work")  # where nodes without a file system of their own see the storage
SECONDS = {"m": 60, "h": 3600, "d": 86400}
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Forms of texts that stand in lines of Slurm's options or are names in a cluster.
WORD = (re.compile(r"[\w.,:/@+=-]+", re.ASCII), "one word of letters, digits and .,:/@+=-")
FORMS = {
    "name": (re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"), "a-z, 0-9 and -, at most 40"),
    "time": (re.compile(r"[1-9][0-9]{0,5}[mhd]"), "30m, 12h or 2d"),
    "storage_size": (re.compile(r"[1-9][0-9]*[KMGTP]i?"), "a size such as 500Gi"),
    "namespace": (re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"), "a name of a-z, 0-9 and -"),
    **dict.fromkeys(("partition", "account", "gpu_type", "image", "infra", "storage"), WORD),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Jobs:
    """Checked keys of a section `jobs`.

    given: keys of the section or of any stage. named_stages: those with keys of their own.
    """

    name: str
    settings: JobsSettings
    env: Mapping[str, str]
    stages: Mapping[str, Resources]
    given: frozenset[str]
    named_stages: tuple[str, ...]

    def find_workdir(self, scheduler: str) -> Path:
        """Return the folder in which a scheduler's jobs run their commands."""
        workdir = self.settings.workdir
        if scheduler == "slurm":
            return Path.cwd() / (workdir or "")
        return DEFAULT_WORKDIR if workdir is None else workdir

    def list_unused(self, scheduler: str) -> list[str]:
        """List the keys that are given and that this scheduler has no use for."""
        return sorted(
            key for key, schedulers in KEYS_OF_SCHEDULERS.items()
            if key in self.given and scheduler not in schedulers
        )  # fmt: skip


def read_jobs(section: object, recipe: Path) -> Jobs:
    """Check a recipe's section `jobs`, of which nothing has to be there."""
    values = _expect_mapping({} if section is None else section, "jobs", recipe)
    general = {key: value for key, value in values.items() if key not in (*STAGE_RESOURCES, "env")}
    checked = _check_keys(general, JobsSettings, "jobs", recipe, (*STAGE_RESOURCES, "env"))
    settings = JobsSettings(**checked)
    own = {
        stage: _check_keys(
            _expect_mapping(values.get(stage) or {}, f"jobs.{stage}", recipe), kind,
            f"jobs.{stage}", recipe,
        )
        for stage, kind in STAGE_RESOURCES.items()
    }  # fmt: skip
    for name in settings.secrets:
        _check_variable(name, "jobs.secrets", recipe)
    if not str(settings.workdir or "").isprintable():
        raise UsageError(
            f"recipe {recipe}: jobs.workdir is {shorten(str(settings.workdir))}",
            "give a path of one line",
        )
    return Jobs(
        name=settings.name or _make_name(recipe), settings=settings,
        env=_read_env(values.get("env"), recipe), stages=_spread(checked, own),
        given=frozenset(checked).union(*own.values()),
        named_stages=tuple(stage for stage in own if own[stage]),
    )  # fmt: skip


def _spread(
    general: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]
) -> dict[str, Resources]:
    """Return each stage's resources: its own before those of all stages."""
    names = get_flags(Resources)
    shared = {key: value for key, value in general.items() if key in names}
    # The server that is audited needs what it is served with.
    lent = {"audit": {key: value for key, value in own["serve"].items() if key in names}}
    return {
        stage: kind(**(shared | lent.get(stage, {}) | dict(own[stage])))
        for stage, kind in STAGE_RESOURCES.items()
    }


def _expect_mapping(value: object, label: str, recipe: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(
            f"recipe {recipe}: {label} is not a mapping", "write `key: value` below it"
        )
    return {str(key).replace("-", "_"): entry for key, entry in value.items()}


def _check_keys(
    keys: Mapping[str, Any], kind: type, label: str, recipe: Path, others: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the given values of a settings class, or raise UsageError that names the key."""
    flags = get_flags(kind)
    checked = {}
    for key, value in keys.items():
        if key not in flags:
            homes = [
                f"jobs.{stage}"
                for stage, other in STAGE_RESOURCES.items()
                if key in get_flags(other)
            ]
            homes += ["jobs"] if key in get_flags(JobsSettings) else []
            raise UsageError(
                f"recipe {recipe}: unknown key {key!r} in {label}"
                f"{'' if homes else suggest(key, [*flags, *others])}",
                f"it is a key of {' and '.join(homes)}" if homes
                else f"the keys are {', '.join([*flags, *others])}",
            )  # fmt: skip
        if value is None:
            continue
        checked[key] = check_value(f"{label}.{key}", value, flags[key][0])
        form, wanted = FORMS.get(key, (None, ""))
        if form is not None and not form.fullmatch(checked[key]):
            raise UsageError(
                f"recipe {recipe}: {label}.{key} is {shorten(checked[key])}", f"give {wanted}"
            )
    return checked


def _read_env(value: object, recipe: Path) -> dict[str, str]:
    """Return the variables of `jobs.env`, whose values are texts or numbers."""
    env = {}
    for name, text in ({} if value is None else _expect_env(value, recipe)).items():
        _check_variable(str(name), "jobs.env", recipe)
        is_text = isinstance(text, (str, int, float)) and not isinstance(text, bool)
        if not is_text or "\0" in str(text):
            raise UsageError(
                f"recipe {recipe}: jobs.env.{name} is {shorten(text)}, not a text",
                "put it in quotes",
            )
        env[str(name)] = str(text)
    return env


def _expect_env(value: object, recipe: Path) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise UsageError(
            f"recipe {recipe}: jobs.env is not a mapping", "write `NAME: value` below it"
        )
    return value


def _check_variable(name: str, label: str, recipe: Path) -> None:
    if not VARIABLE.fullmatch(name):
        raise UsageError(
            f"recipe {recipe}: {label}: {shorten(name)} is no variable's name",
            "give one as HF_TOKEN",
        )


def _make_name(recipe: Path) -> str:
    """Return a name for the jobs out of a recipe's file name."""
    name = re.sub(r"[^a-z0-9]+", "-", recipe.stem.lower()).strip("-")[:40].strip("-")
    if not FORMS["name"][0].fullmatch(name):
        raise UsageError(
            f"recipe {recipe}: its file name makes no name for jobs", "give one with jobs.name"
        )
    return name


def count_seconds(time: str | None) -> int | None:
    """Return the seconds of a checked time; None for none."""
    return None if time is None else int(time[:-1]) * SECONDS[time[-1]]
