"""Settings of specdec recipe, and the keys of a recipe's section `jobs`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from specdec.command.settings import require
from specdec.errors import UsageError
from specdec.options import option_group, setting

JOBS = option_group("Jobs")
SCHEDULERS = ("slurm", "skypilot", "k8s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeSettings:
    """Settings of specdec recipe; each field is one flag."""

    recipe: list[str] = setting(
        [], metavar="RECIPE.yaml", is_argument=True, help="The recipe, with a section jobs."
    )
    to: str = JOBS(required=True, choices=SCHEDULERS, help="The scheduler that runs the jobs.")
    output_dir: Path = JOBS(required=True, metavar="DIR", help="Folder for the jobs' files.")
    force: bool = setting(False, help="Replace the output folder.")
    json: bool = setting(False, help="Print what was written as one JSON object.")


def check_settings(settings: RecipeSettings) -> None:
    """Raise UsageError for missing settings, and for any number of recipes but one."""
    require(settings)
    if len(settings.recipe) != 1:
        raise UsageError(
            f"{len(settings.recipe)} recipes are given, not one",
            "as in: specdec recipe RECIPE.yaml --to slurm --output-dir jobs",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """Keys of `jobs` that each of its stages may have a value of its own for."""

    cpus: int | None = setting(minimum=1, help="Processor cores of a node.")
    memory: int | None = setting(minimum=1, help="GiB of a node's memory.")
    gpus: int = setting(0, minimum=0, help="GPUs of a node.")
    gpu_type: str | None = setting(help="Their type, as the scheduler calls it.")
    time: str | None = setting(help="Longest time of one start: 30m, 12h or 2d.")
    retries: int = setting(3, minimum=0, help="How often a failed stage is started again.")
    partition: str | None = setting(help="Partition, of Slurm.")
    image: str | None = setting(help="Container image, of SkyPilot and Kubernetes.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerResources(Resources):
    """Keys of a stage that a server of the target may run beside."""

    server: str | None = setting(help="Command of a server that runs beside the stage.")
    server_wait: int = setting(1800, minimum=1, help="Seconds until it must answer.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataResources(ServerResources):
    """Keys of `jobs.data`."""

    shards: int = setting(1, minimum=1, maximum=999_999, help="Parts of the rows, a node each.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainResources(ServerResources):
    """Keys of `jobs.train`."""

    nodes: int = setting(1, minimum=1, help="Nodes, over which torchrun spreads.")
    processes: int | None = setting(minimum=1, help="Processes of a node; its GPUs if not given.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeResources(ServerResources):
    """Keys of `jobs.serve`."""

    replicas: int = setting(1, minimum=1, help="Servers.")


# Stages in the order of their jobs, and what their keys are read into.
STAGE_RESOURCES: dict[str, type[Resources]] = {
    "prepare": Resources, "data": DataResources, "merge": Resources, "train": TrainResources,
    "engine": Resources, "export": Resources, "audit": Resources, "serve": ServeResources,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobsSettings(Resources):
    """Keys of a recipe's section `jobs` without its stages, environment and secrets."""

    name: str | None = setting(help="Name of the jobs; the recipe's if not given.")
    workdir: Path | None = setting(
        help="Folder that all nodes share, in which the commands run; for Slurm the current one if"
        " not given, else /work."
    )
    before: list[str] = setting(
        [], help="Recipes whose convert and build sections come first, as of the target's engine."
    )
    setup: str | None = setting(help="Lines of bash before each stage's commands.")
    secrets: list[str] = setting(
        [], help="Variables with keys, whose values submit.sh takes from its environment."
    )
    account: str | None = setting(help="Account, of Slurm.")
    infra: str | None = setting(help="Cloud, region or cluster, of SkyPilot.")
    spot: bool = setting(False, help="Take machines that may be preempted, of SkyPilot.")
    namespace: str | None = setting(help="Namespace, of Kubernetes.")
    storage: str | None = setting(
        help="Where the workdir lies: bucket s3://... or volume of SkyPilot, claim of Kubernetes."
    )
    storage_size: str | None = setting(
        help="Size of a claim that is made, as 500Gi; the claim exists if not given."
    )


# Keys that only some schedulers have a use for.
KEYS_OF_SCHEDULERS = {
    "partition": ("slurm",), "account": ("slurm",), "image": ("skypilot", "k8s"),
    "infra": ("skypilot",), "spot": ("skypilot",), "namespace": ("k8s",),
    "storage": ("skypilot", "k8s"), "storage_size": ("k8s",),
}  # fmt: skip
