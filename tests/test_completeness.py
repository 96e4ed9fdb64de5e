"""Nothing is forgotten: every method has its files and recipe; stages meet only on disk.

Nor is a test: `make test` and `make test-rest` run all of them together, each one once.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from specdec.command.settings import SECTIONS, resolve_settings
from specdec.command.stages import STAGES
from specdec.convert.quantize.sections import METHODS as METHODS_READ
from specdec.convert.quantize.sections import SOURCE_FORMATS
from specdec.methods import METHODS, Method
from specdec.options import get_flags
from specdec.recipe.keys import read_jobs
from tests.conftest import ROOT, choose_part
from tests.mutants import BREAKS

# A recipe's sections that are no stage of their own, with the package that reads them.
SUBCOMMANDS = {"data": "train.data", "ngrams": "train.ngrams"}
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))


# A new method is at most so many product files; CONTRIBUTING.md names them.
MAX_METHOD_FILES = 7


def list_method_files(method: Method) -> list[str]:
    """What a method needs by its kind: a pattern each, of a file that must be there."""
    name = method.name
    files = [
        f"specdec/methods/{name}.py",
        f"specdec/decode/drafters/{name}.py",
        f"docs/methods/{name}.md",
        f"configs/{name}-*.yaml",
    ]
    if method.params is not None:
        files += [f"convert/methods/{name}.py", f"specdec/engine/{name}.py"]
    if method.training is not None:
        files.append(f"train/methods/{name}.py")
    return files


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_files(name: str) -> None:
    wanted = list_method_files(METHODS[name])
    assert len(wanted) <= MAX_METHOD_FILES
    assert [pattern for pattern in wanted if not list(ROOT.glob(pattern))] == []


def test_contributing_names_the_files_of_a_method() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    wanted = {
        pattern.replace(name, "NAME").replace("*", "TARGET")
        for name, method in METHODS.items()
        for pattern in list_method_files(method)
    }
    assert len(wanted) == MAX_METHOD_FILES
    assert sorted(pattern for pattern in wanted if f"`{pattern}`" not in text) == []


@pytest.mark.parametrize("name", METHODS)
def test_a_method_owns_its_name_and_options(name: str) -> None:
    """No option of a method is declared twice, and the record's parts fit one another."""
    method = METHODS[name]
    assert method.name == name
    assert (method.params is None) == (method.folder is None) == (not method.architectures)
    assert (method.source == "checkpoint") == (method.params is not None)
    assert set(method.options) <= {"convert", "draft", "run", "train"}
    if method.folder is not None:
        assert method.folder in get_flags(method.options["convert"])
    own = {(use, flag) for use, kind in method.options.items() for flag in get_flags(kind)}
    for other in set(METHODS) - {name}:
        theirs = METHODS[other].options.items()
        assert own.isdisjoint((use, flag) for use, kind in theirs for flag in get_flags(kind))


@pytest.mark.parametrize("name", SOURCE_FORMATS)
def test_every_format_of_quantized_models_is_on_its_page(name: str) -> None:
    """With its bits and what becomes of it; tests/convert/test_quantized_sources.py has it, too."""
    format = SOURCE_FORMATS[name]
    page = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(f"| {format.title}")]
    assert len(rows) == 1
    _, _, methods, bits, kept, _ = (cell.strip() for cell in rows[0].split("|"))
    assert bits == format.bits
    assert kept.split(";")[0] == (format.stored_as or "with `--dequantize` only")
    assert {method.strip("` ") for method in methods.split(",")} <= set(METHODS_READ)


@pytest.mark.parametrize("folder", ["convert/methods", "specdec/decode/drafters", "train/methods"])
def test_no_folder_has_a_method_of_its_own(folder: str) -> None:
    """What lies alongside the methods is the common base, or what drafters share."""
    files = {path.stem for path in (ROOT / folder).glob("*.py")}
    drafters = {
        "account",
        "calibration",
        "defaults",
        "devices",
        "drift",
        "forecast",
        "joined",
        "merging",
        "pace",
        "paced",
        "prices",
        "promise",
        "trees",
        "levels",
        "draft_model",
        "draft_tree",
        "hidden_state",
    }
    shared = drafters if folder.startswith("specdec") else set()
    assert files - {"__init__", "base"} - shared <= set(METHODS)


def find_settings_class(section: str) -> type:
    """The settings that a recipe's section is read into, which have its name."""
    package = {"bench": "measure", **SUBCOMMANDS}.get(section, section)
    module = importlib.import_module(f"specdec.{package}.settings")
    settings: type = getattr(module, f"{section.capitalize()}Settings")
    assert get_flags(settings)
    return settings


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_recipe_resolves(recipe: Path) -> None:
    sections: dict[str, dict[str, Any]] = yaml.safe_load(recipe.read_text())
    assert {"convert", "build", "run"} <= set(sections) <= set(SECTIONS)
    if "jobs" in sections:
        assert read_jobs(sections.pop("jobs"), recipe).named_stages
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
    stages = set(STAGES) - {
        "generate",
        "diagnose",
        "doctor",
        "match",
        "recipe",
    }  # none of a recipe
    assert set(SECTIONS) == stages | set(SUBCOMMANDS) | {"jobs"}


def test_every_break_finds_its_place() -> None:
    """What `make mutants` changes is there, once each, and so are the tests that are to notice."""
    for found in BREAKS.values():
        found.apply((ROOT / found.file).read_text())
        assert all((ROOT / "tests" / name).is_file() for name in found.tests), found
    assert len(BREAKS) == 40


def test_how_it_works_names_what_is_there() -> None:
    """The page that walks a request through the code: each name is defined in the linked file."""
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    found = re.findall(r"\[`(?:\w+\.)?(\w+)`\]\(\.\./([\w/.]+)\)", page)
    assert len(found) > 20
    assert len(page.splitlines()) < 200
    for name, path in found:
        code = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^ *(?:def|class) {name}\b", code, re.MULTILINE), f"{path}: {name}"


@pytest.mark.parametrize(("marker", "num_brief"), [(None, 41), ("thorough", 10)])
def test_the_two_parts_of_the_tests_are_all_of_them(marker: str | None, num_brief: int) -> None:
    def make_test(name: str, **case: Any) -> Any:
        return SimpleNamespace(
            path=Path("test_a.py"), originalname=name, get_closest_marker=lambda _: marker, **case
        )

    single, table = make_test("test_one"), [make_test("test_all", callspec=i) for i in range(40)]
    brief, rest = (choose_part([single, *table], part) for part in ("brief", "rest"))
    assert sorted(map(id, brief + rest)) == sorted(map(id, [single, *table]))
    assert len(brief) == num_brief
    assert (single in rest) == (marker is not None)
    assert table[0] in brief
