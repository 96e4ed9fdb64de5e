"""No module of the product needs itself, not even for its annotations.

Imports inside of functions are not looked at: they are there for the sake of time. Nor is what
`specdec/__init__.py` names: its API is imported when it is used first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.command.stages import STAGES
from tests.conftest import ROOT

PACKAGES = ["specdec", "generate", *(name.partition(" ")[0] for name in STAGES)]
ALLOWED: list[set[str]] = []


def list_modules(root: Path) -> dict[str, Path]:
    """The modules below a folder, by name."""
    modules = {}
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def list_imports(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports of a module that no function holds."""
    for statement in body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield statement
        elif isinstance(statement, (ast.If, ast.Try)):
            yield from list_imports([*statement.body, *statement.orelse])


def find_imported(name: str, path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of ours that a module imports."""
    found = set()
    for statement in list_imports(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
            continue
        source = statement.module or ""
        if statement.level:
            parents = name.split(".") + ([""] if path.stem == "__init__" else [])
            parents = parents[: len(parents) - statement.level]
            source = ".".join([*parents, *([source] if source else [])])
        for alias in statement.names:
            inner = f"{source}.{alias.name}"
            found.add(inner if inner in modules else source)
    return found & set(modules) - {name}


def find_cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules each of which reaches all others of its set."""
    reached = {}
    for start in graph:
        seen, left = set[str](), [start]
        while left:
            for name in graph[left.pop()] - seen:
                seen.add(name)
                left.append(name)
        reached[start] = seen
    cycles: list[set[str]] = []
    for name, seen in reached.items():
        cycle = {other for other in seen if name in reached[other]}
        if name in seen and cycle not in cycles:
            cycles.append(cycle)
    return cycles


def test_no_module_needs_itself() -> None:
    modules = list_modules(ROOT)
    assert {"specdec.engine.decoder", "train.target", "run.cli"} <= set(modules)
    graph = {name: find_imported(name, path, modules) for name, path in modules.items()}
    assert "specdec.decode.api" in graph.pop("specdec")
    graph = {name: imported - {"specdec"} for name, imported in graph.items()}
    assert [cycle for cycle in find_cycles(graph) if cycle not in ALLOWED] == []


@pytest.mark.parametrize(
    "text",
    ["from b import x", "import b", "if TYPE_CHECKING:\n    from b import x", "from .b import x"],
)
def test_a_cycle_is_found(text: str, tmp_path: Path) -> None:
    modules = {name: tmp_path / f"{name}.py" for name in ("specdec.a", "specdec.b", "b")}
    modules["specdec.a"].write_text(text)
    target = "specdec.b" if text.startswith("from .") else "b"
    assert find_imported("specdec.a", modules["specdec.a"], modules) == {target}
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [{"b", "c"}]
