"""What looks on changes nothing: properties, and methods by which objects are shown or compared."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "specdec", "serve", "run", "audit", "bench", "verify", "generate", "convert", "build", "train",
    "export", "doctor", "match", "recipe",
)  # fmt: skip
SHOWN = {"__repr__", "__str__", "__len__", "__bool__", "__eq__", "__hash__", "__contains__"}
READING = ("describe", "is_", "has_")  # how names of methods that look on begin
CHANGING = {
    "append", "appendleft", "pop", "popleft", "popitem", "clear", "update", "remove", "extend",
    "setdefault", "add", "discard", "insert", "sort", "reverse",
}  # fmt: skip
BUILTIN = {name for kind in (dict, list, set, str, bytes) for name in dir(kind)}


def list_methods() -> Iterator[tuple[str, str, ast.FunctionDef]]:
    """File, class and definition of every method."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    for method in node.body:
                        if isinstance(method, ast.FunctionDef):
                            yield str(path.relative_to(ROOT)), node.name, method


def is_of_self(node: ast.expr) -> bool:
    """Whether it is an attribute of self, or what is in one."""
    is_inner = isinstance(node, (ast.Attribute, ast.Subscript))
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return is_inner and isinstance(node, ast.Name) and node.id == "self"


def changes_self(method: ast.FunctionDef) -> bool:
    """Whether a method sets an attribute of self, or changes a list, set or dict that is one."""
    for node in ast.walk(method):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        parts = [part for target in targets for part in ast.walk(target)]
        if any(isinstance(part, ast.expr) and is_of_self(part) for part in parts):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGING and is_of_self(node.func.value):
                return True
    return False


def list_calls(method: ast.FunctionDef) -> Iterator[tuple[str, bool]]:
    """The methods that are called on self, or on an attribute of it; whether it is the former."""
    for node in ast.walk(method):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if (is_own := isinstance(owner, ast.Name) and owner.id == "self") or is_of_self(owner):
                yield node.func.attr, is_own


def test_what_looks_on_changes_nothing() -> None:
    """`stream.output` ended the text that it was to show."""
    methods = list(list_methods())
    calls = [list(list_calls(method)) for *_, method in methods]
    changing = {
        (path, owner, m.name) for path, owner, m in methods
        if m.name != "__init__" and changes_self(m)
    }  # fmt: skip
    size = 0
    while size < len(changing):  # methods that call such methods of their own class
        size = len(changing)
        changing |= {
            (path, owner, m.name) for (path, owner, m), called in zip(methods, calls, strict=True)
            if any(own and (path, owner, name) in changing for name, own in called)
        }  # fmt: skip
    names = {name for _, _, name in changing} - BUILTIN
    wrong = []
    for (path, owner, method), called in zip(methods, calls, strict=True):
        decorators = [ast.unparse(one) for one in method.decorator_list]
        is_getter = any("property" in one for one in decorators) or method.name in SHOWN
        if not is_getter and not method.name.startswith(READING):
            continue
        if (
            changes_self(method)
            or any(own and (path, owner, name) in changing for name, own in called)
            or (is_getter and any(not own and name in names for name, own in called))
        ):
            wrong.append(f"{path}: {owner}.{method.name}")
    assert not wrong, "\n".join(wrong)
