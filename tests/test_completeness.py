"""Nothing is forgotten: every method has its files and recipe; stages meet only on disk."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.command import STAGES
from specdec.methods import EXTERNAL_METHODS, METHODS
from specdec.settings import SECTIONS, get_flags, resolve_settings
from specdec.train.methods import TRAINABLE
from tests.conftest import ROOT

# A recipe's sections that are no stage of their own, with the package that reads them.
SUBCOMMANDS = {"data": "train.generation"}
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("method", [*METHODS, *EXTERNAL_METHODS])
def test_every_method_has_its_files(method: str) -> None:
    stages = ["run"]
    if method in METHODS:
        stages += ["convert", "train"] if method in TRAINABLE else ["convert"]
    wanted = [f"{stage}/methods/{method}.py" for stage in stages]
    wanted.append(f"docs/methods/{method}.md")
    missing = [path for path in wanted if not (ROOT / path).is_file()]
    if not list((ROOT / "configs").glob(f"{method}-*.yaml")):
        missing.append(f"configs/{method}-*.yaml")
    assert missing == []


def test_trainable_methods_are_methods() -> None:
    assert set(TRAINABLE) <= set(METHODS)


@pytest.mark.parametrize("stage", ["convert", "run", "train"])
def test_no_stage_has_a_method_of_its_own(stage: str) -> None:
    """What lies in methods/ is a method of the list, or the common base."""
    files = {path.stem for path in (ROOT / stage / "methods").glob("*.py")}
    external = set(EXTERNAL_METHODS) if stage == "run" else set()
    assert files - {"__init__", "base"} <= set(METHODS) | external


def list_imports(path: Path) -> list[tuple[int, str]]:
    """List (line, absolute module) of every import in a file, nested ones too."""
    package = path.relative_to(ROOT).parent.as_posix().split("/")
    imports = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            imports += [(node.lineno, f"{module}.{alias.name}".strip(".")) for alias in node.names]
    return imports


def find_stage(module: str) -> str | None:
    parts = module.removeprefix("specdec.").split(".")
    return parts[0] if parts[0] in STAGES else None


def test_stages_meet_only_on_disk() -> None:
    allowed = {("bench", "run")}  # it times the steps of the other, in one process
    wrong = []
    for folder in ("specdec", *STAGES):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, module in list_imports(path):
                stage = find_stage(module)
                if stage not in (None, folder) and (folder, stage) not in allowed:
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert wrong == []


def test_imports_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk above would pass with nothing to see; here is what it must see."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "run" / "methods" / "toy.py"
    path.parent.mkdir(parents=True)
    path.write_text("from .. import loop\nfrom ...build import cli\ndef f():\n import convert.hf\n")
    assert [m for _, m in list_imports(path)] == ["run.loop", "build.cli", "convert.hf"]
    assert [find_stage(m) for m in ("specdec.build.cli", "run.x", "specdec.schema", "runner")] == [
        "build", "run", None, None,
    ]  # fmt: skip


def find_settings_class(section: str) -> type:
    """The settings that a recipe's section is read into, which have its name."""
    module = importlib.import_module(f"specdec.{SUBCOMMANDS.get(section, section)}.settings")
    settings: type = getattr(module, f"{section.capitalize()}Settings")
    assert get_flags(settings)
    return settings


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_recipe_resolves(recipe: Path) -> None:
    sections: dict[str, dict[str, Any]] = yaml.safe_load(recipe.read_text())
    assert {"convert", "build", "run"} <= set(sections) <= set(SECTIONS)
    for section, values in sections.items():
        settings: Any = resolve_settings(find_settings_class(section), section, {}, recipe)
        for key in values:
            assert getattr(settings, key) is not None
    # Each stage reads what the one before it wrote.
    assert sections["build"]["checkpoint_dir"] == sections["convert"]["output_dir"]
    for stage in {"verify", "bench", "run"} & set(sections):
        assert sections[stage]["engine_dir"] == sections["build"]["output_dir"]
    for stage in {"train", "verify"} & set(sections):
        assert sections[stage]["model_dir"] == sections["convert"]["model_dir"]
    if "train" in sections:
        assert sections["train"]["output_dir"] in sections["convert"].values()
    if "data" in sections:
        assert sections["data"]["output"] == sections["train"]["data"]


def test_there_are_recipes_and_stages() -> None:
    assert len(RECIPES) >= len(METHODS)
    stages = set(STAGES) - {"generate", "tune", "diagnose", "doctor"}  # no steps on the way
    assert set(SECTIONS) == stages | set(SUBCOMMANDS)
