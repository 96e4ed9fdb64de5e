"""The library neither prints nor ends the process; its imports are a contract in pyproject.toml."""

from __future__ import annotations

import ast

import pytest

from tests.conftest import ROOT

LIBRARY = ("decode", "text", "engine", "checkpoint", "methods", "gguf", "model", "files")
PROGRAMS = ("ranks/follower.py",)  # a rank of its own process
ENDINGS = ("print", "exit", "quit", "sys.exit", "os._exit", "click.echo", "print_error")


def find_endings(text: str) -> list[str]:
    """Return the calls by which a module prints or ends the process."""
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    last_names = {name.rpartition(".")[2] for name in ENDINGS}
    return [
        name for call in calls
        if getattr(call, "id", getattr(call, "attr", None)) in last_names  # unparsing takes seconds
        and (name := ast.unparse(call)) in ENDINGS
    ]  # fmt: skip


def test_the_library_neither_prints_nor_ends() -> None:
    paths = [path for name in LIBRARY for path in (ROOT / "specdec" / name).rglob("*.py")]
    assert len(paths) > 120
    endings = {
        path.relative_to(ROOT).as_posix(): calls
        for path in paths
        if not path.as_posix().endswith(PROGRAMS)
        and (calls := find_endings(path.read_text(encoding="utf-8")))
    }
    assert endings == {}


@pytest.mark.parametrize(
    ("text", "calls"),
    [("def f():\n    os._exit(print(1))", ["os._exit", "print"]), ("import sys", [])],
)
def test_an_ending_is_found(text: str, calls: list[str]) -> None:
    assert find_endings(text) == calls
