"""Jobs of a recipe: every file is made of a template and checked settings, then all are placed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.command.settings import to_plain
from specdec.files.manifest import describe_file, write_manifest
from specdec.files.staging import stage_folder
from specdec.system.logs import get_logger

from .keys import count_seconds
from .settings import RecipeSettings
from .stages import Recipe, Stage, list_missing, list_stages, name_copy

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"
STATE_DIR = ".specdec-jobs"  # in the workdir: which commands were begun and done
RECIPE_NAME = "recipe.yaml"
SUBMIT_NAME = "submit.sh"

logger = get_logger(__name__)


def write_jobs(settings: RecipeSettings) -> dict[str, Any]:
    """Write the files of a recipe's jobs; return a report of them."""
    recipe = Recipe(Path(settings.recipe[0]))
    stages = list_stages(recipe)
    list_missing(settings.to, recipe, stages).raise_all()
    for label, names in (
        ("keys without a use there", recipe.jobs.list_unused(settings.to)),
        ("sections without a job", recipe.unused_sections),
    ):
        if names:
            logger.info("--to %s: %s: %s", settings.to, label, ", ".join(names))
    files = make_files(recipe, stages, settings.to)
    inputs = [recipe.path, *recipe.before]
    with stage_folder(settings.output_dir, force=settings.force, inputs=inputs) as folder:
        for name, text in files.items():
            path = folder / name
            path.write_text(text, encoding="utf-8")
            if path.suffix == ".sh":
                path.chmod(0o755)
        sources = [describe_file(path) for path in inputs]
        write_manifest(folder, kind="jobs", settings=to_plain(settings), sources=sources)
    return {
        "output_dir": str(settings.output_dir), "to": settings.to, "name": recipe.jobs.name,
        "stages": [stage.name for stage in stages], "files": sorted(files),
        "command": shlex.join(["bash", str(settings.output_dir / SUBMIT_NAME)]),
    }  # fmt: skip


def make_files(recipe: Recipe, stages: Sequence[Stage], scheduler: str) -> dict[str, str]:
    """Return the texts of all files by their names."""
    files = {RECIPE_NAME: recipe.text}
    for number, path in enumerate(recipe.before):
        files[name_copy(number)] = path.read_text(encoding="utf-8")
    pages = Pages(recipe, scheduler)
    for stage in stages:
        files[f"{stage.name}.sh"] = pages.render("stage.sh.j2", stage)
    makers = {"slurm": make_slurm, "skypilot": make_skypilot, "k8s": make_kubernetes}
    return files | makers[scheduler](pages, stages, sorted(files))


class Pages:
    """Templates of one scheduler's files, and the facts of the recipe that all of them may name."""

    def __init__(self, recipe: Recipe, scheduler: str) -> None:
        jobs = recipe.jobs
        self.environment = _open_templates()
        self.settings = jobs.settings
        self.facts: Mapping[str, Any] = {
            "name": jobs.name, "env": jobs.env, "workdir": str(jobs.find_workdir(scheduler)),
            "state": f"{STATE_DIR}/{jobs.name}",
            **{
                key: getattr(jobs.settings, key)
                for key in ("setup", "secrets", "account", "infra", "spot", "namespace", "storage",
                            "storage_size")
            },
        }  # fmt: skip

    def render(self, template: str, stage: Stage | None = None, **facts: Any) -> str:
        """Return a template's text; of a stage, if one is given."""
        if stage is not None:
            facts |= {
                "stage": stage, "resources": stage.resources,
                "seconds": count_seconds(stage.resources.time),
            }  # fmt: skip
        return self.environment.get_template(template).render(**self.facts, **facts)


def _open_templates() -> jinja2.Environment:
    """Return the templates' environment, in which a name without a value is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        comment_start_string="<#--", comment_end_string="--#>",  # bash has ${#names[@]}
    )  # fmt: skip
    environment.filters["sh"] = lambda text: shlex.quote(str(text))
    environment.filters["json"] = json.dumps
    return environment


def make_slurm(pages: Pages, stages: Sequence[Stage], _: Sequence[str]) -> dict[str, str]:
    """Return Slurm's batch files, one for each stage, and the script that queues them."""
    files = {
        f"{stage.name}.sbatch": pages.render(
            "stage.sbatch.j2", stage, is_array=stage.num_shards > 1,
            time=_format_time(stage.resources.time),
        )
        for stage in stages
    }  # fmt: skip
    return files | {SUBMIT_NAME: pages.render("slurm-submit.sh.j2", stages=stages)}


def _format_time(time: str | None) -> str | None:
    """Return a time in Slurm's form, days-hours:minutes:seconds."""
    seconds = count_seconds(time)
    if seconds is None:
        return None
    minutes = seconds // 60
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def make_skypilot(pages: Pages, stages: Sequence[Stage], names: Sequence[str]) -> dict[str, str]:
    """Return SkyPilot's pipeline of managed jobs, its service, and the script that starts them."""
    common = [name for name in names if name.endswith(".yaml")]
    texts = {
        stage.name: pages.render(
            "task.yaml.j2", stage, files=[*common, f"{stage.name}.sh"],
            is_bucket="://" in pages.facts["storage"],
        )
        for stage in stages
    }  # fmt: skip
    service = {"serve.yaml": texts.pop("serve")} if "serve" in texts else {}
    header = f"name: {json.dumps(pages.facts['name'])}\n"
    tasks = {"pipeline.yaml": "---\n".join([header, *texts.values()])} if texts else {}
    submit = pages.render("skypilot-submit.sh.j2", has_tasks=bool(tasks), has_service=bool(service))
    return tasks | service | {SUBMIT_NAME: submit}


def make_kubernetes(pages: Pages, stages: Sequence[Stage], names: Sequence[str]) -> dict[str, str]:
    """Return Kubernetes' manifests, one for each stage, and the script that applies them."""
    files = {}
    if pages.settings.storage_size is not None:
        files["storage.yaml"] = pages.render("storage.yaml.j2")
    marks: Sequence[str] = ()
    for stage in stages:
        template = "job.yaml.j2" if stage.commands else "deployment.yaml.j2"
        files[f"{stage.name}.yaml"] = pages.render(template, stage, marks=marks)
        marks = stage.marks
    submit = pages.render("k8s-submit.sh.j2", files=names, manifests=list(files))
    return files | {SUBMIT_NAME: submit}
