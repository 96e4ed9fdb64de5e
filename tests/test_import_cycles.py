"""No module of the product needs itself, and the library needs neither commands nor stages.

Circles: imports inside of functions are not looked at, which are there for the sake of time; nor is
what `specdec/__init__.py` names, whose API is imported when it is used first. The library: all
imports count, and it neither prints nor ends the process.
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


LIBRARY = ("decode", "engine", "methods", "model", "files")
FORBIDDEN = {"command", "trtllm", *(package for package in PACKAGES if package != "specdec")}
PROGRAMS = ("ranks/follower.py",)  # a rank of its own process
ENDINGS = ("print", "exit", "quit", "sys.exit", "os._exit", "click.echo", "print_error")


def find_arrows(text: str) -> list[str]:
    """What a module of the library imports from above, prints with, or ends the process with."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            if isinstance(node, ast.Call) and (call := ast.unparse(node.func)) in ENDINGS:
                found.append(call)
            continue
        tops = {name.removeprefix("specdec.").partition(".")[0] for name in names}
        found += sorted(tops & FORBIDDEN)
    return found


def test_the_library_knows_neither_commands_nor_stages() -> None:
    paths = [path for name in LIBRARY for path in (ROOT / "specdec" / name).rglob("*.py")]
    assert len(paths) > 80
    found = {
        path.relative_to(ROOT).as_posix(): arrows
        for path in [*paths, ROOT / "specdec" / "options.py", ROOT / "specdec" / "chat.py"]
        if not path.as_posix().endswith(PROGRAMS)
        and (arrows := find_arrows(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f():\n    from specdec.command.stages import x", ["command"]),
        ("from specdec import command", ["command"]),
        ("import run.pipeline", ["run"]),
        ("from specdec.serve import app", ["serve"]),
        ("from specdec.trtllm.facts import x", ["trtllm"]),
        ("def f():\n    os._exit(print(1))", ["os._exit", "print"]),
        ("from specdec.options import x\nfrom .run import y", []),
    ],
)
def test_an_arrow_is_found(text: str, found: list[str]) -> None:
    assert find_arrows(text) == found
