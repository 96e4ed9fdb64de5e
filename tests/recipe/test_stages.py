"""Stages of a recipe alone: their marks, shards and files, and an error in the middle."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from specdec.errors import SpecDecError, UsageError
from specdec.recipe import cli, pipeline
from specdec.recipe.settings import RecipeSettings
from specdec.recipe.stages import ORDER, Recipe, Stage, list_missing, list_stages
from specdec.train.data.shards import RowShard
from tests.recipe.test_recipe import STAGES, write_recipe

CHANGES: dict[str, dict[str, Any]] = {
    "data": {"temperature": 0.5}, "train": {"max_steps": 9}, "convert": {"dtype": "float16"},
    "build": {"max_seq_len": 99}, "verify": {"json": True}, "export": {"json": True},
    "serve": {"max_queue": 9}, "audit": {"json": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_marks(path: Path) -> dict[str, str]:
    """Return the mark of each section's command."""
    recipe = Recipe(path)
    return {name: recipe.make_mark(name) for name in ORDER if name in recipe.settings}


def make_stages(folder: Path, changes: Mapping[str, Any] = {}) -> dict[str, Stage]:
    return {s.name: s for s in list_stages(Recipe(write_recipe(folder, changes)))}


def test_a_mark_is_of_all_that_an_output_depends_on(here: Path) -> None:
    """A change of a section ends its own mark and the later ones; one of resources ends none."""
    before = read_marks(write_recipe(here))
    assert [mark.rpartition("-")[0] for mark in before.values()] == [*before]
    for changed, values in CHANGES.items():
        marks = read_marks(write_recipe(here, {changed: values}))
        ended = {name for name in marks if marks[name] != before[name]}
        sections = [*before]
        assert ended == {*sections[sections.index(changed) :]}, changed
    assert read_marks(write_recipe(here, {"jobs": {"cpus": 99, "time": "9h"}})) == before
    path = write_recipe(here)
    (here / "target recipe.yaml").write_text("convert: {model_dir: OTHER, output_dir: out/target}")
    assert not {*read_marks(path).values()} & {*before.values()}


@pytest.mark.parametrize("output", ["out/my data.jsonl", "data", "a.b/c.d.jsonl", "it's.jsonl"])
def test_shards_are_the_files_that_the_data_s_command_writes(output: str, here: Path) -> None:
    """Every task has a mark of its own, and the merge reads each task's file, whatever its name."""
    stages = {
        s.name: s for s in list_stages(Recipe(write_recipe(here, {"data": {"output": output}})))
    }
    assert [*stages] == STAGES
    data, (merge,) = stages["data"], stages["merge"].commands
    assert len({*data.marks}) == data.num_shards == 4
    script = f"index=2; printf '%s\\n' {merge.line} {data.commands[0].output}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    shards = [str(RowShard(number, 4).name_output(Path(output))) for number in range(4)]
    merge_words = ["specdec-train", "data", "--merge", *shards, "--output", output]
    assert done.stdout.splitlines() == [*merge_words, shards[2]]


def test_servers_and_launchers(here: Path) -> None:
    stages = make_stages(here)
    server = stages["data"].server
    assert server is not None
    assert (server.port, server.url) == (8000, "http://127.0.0.1:$port/v1")
    assert "torchrun --nnodes 2 --nproc-per-node 8" in stages["train"].commands[-1].line
    audited, served = stages["audit"].server, stages["serve"].server
    assert audited is not None
    assert served is not None
    assert dataclasses.replace(audited, url="") == served
    assert Recipe(write_recipe(here, {"jobs": {"workdir": "a"}})).jobs.find_workdir("slurm") == (
        here / "a"
    )
    one = {"jobs": {"train": {"nodes": 1, "processes": 1}}}
    train = make_stages(here, one)["train"]
    assert train.commands[-1].line == 'specdec-train --config "$jobs"/recipe.yaml --resume'
    with pytest.raises(UsageError, match=r"data.base_url is 'http://127.0.0.1:x/v1'"):
        list_stages(Recipe(write_recipe(here, {"data": {"base_url": "http://127.0.0.1:x/v1"}})))
    recipe = Recipe(write_recipe(here, {"jobs": {"storage": None}}))
    assert not list_missing("slurm", recipe, [])
    with pytest.raises(SpecDecError, match="jobs.storage is missing"):
        list_missing("k8s", recipe, list_stages(recipe)).raise_all()


def test_an_error_in_the_middle_leaves_the_old_jobs(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a template that asks for an unknown name, and of a disk that takes no more files."""
    path = write_recipe(here)
    settings = RecipeSettings(recipe=[str(path)], to="slurm", output_dir=here / "jobs", force=True)
    cli.command.work(settings)
    before = {file.name: file.read_bytes() for file in (here / "jobs").iterdir()}
    honest = pipeline.Pages.render

    def render(
        pages: pipeline.Pages, template: str, stage: Stage | None = None, **facts: Any
    ) -> str:
        if stage is not None and stage.name == "export":
            pages.environment.loader = jinja2.DictLoader({template: "{{ unknown }}"})
        return honest(pages, template, stage, **facts)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.Pages, "render", render)
        with pytest.raises(jinja2.UndefinedError):
            pipeline.write_jobs(settings)
    write_text, names = Path.write_text, list[str]()

    def fail(file: Path, *arguments: Any, **options: Any) -> int:
        names.append(file.name)
        if len(names) == 3:
            raise OSError(28, "No space left on device")
        return write_text(file, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fail)
        with pytest.raises((OSError, SpecDecError), match=r"(?i)space"):
            pipeline.write_jobs(settings)
    assert {file.name: file.read_bytes() for file in (here / "jobs").iterdir()} == before
    assert sorted(file.name for file in here.iterdir()) == [
        "jobs", "recipe one.yaml", "target recipe.yaml"
    ]  # fmt: skip


NEWLINE = "\n"
HOSTILE = 'a\'b "c" $(touch pwned) `touch pwned` \\ é\n#SBATCH --x'


@pytest.mark.parametrize("scheduler", ["slurm", "skypilot", "k8s"])
def test_no_text_of_a_recipe_is_a_command(scheduler: str, here: Path) -> None:
    """Paths and values with quotes, dollars and lines of their own stay what they are."""
    changes = {
        "jobs": {
            "workdir": f"/w/{HOSTILE.partition(NEWLINE)[0]}",
            "env": {"TEXT": HOSTILE},
            "setup": None,
        },
        "data": {"output": f"out/{HOSTILE}.jsonl"},
    }
    recipe = Recipe(write_recipe(here, changes))
    files = pipeline.make_files(recipe, list_stages(recipe), scheduler)
    for name, text in files.items():
        if name.endswith((".yaml", ".yml")):
            assert [*yaml.safe_load_all(text)]
    script = files["merge.sh"].split("mkdir -p", 1)[0] + '\nprintf %s "$TEXT"\n'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == HOSTILE
    for name in files:
        if name.endswith((".sh", ".sbatch")):
            subprocess.run(["bash", "-n"], input=files[name], text=True, check=True)
    assert not (here / "pwned").exists()
    headers = [
        line for line in files.get("merge.sbatch", "").splitlines() if line.startswith("#SB")
    ]
    assert "#SBATCH --x" not in headers
