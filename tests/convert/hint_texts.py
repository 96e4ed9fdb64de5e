"""Texts of hints in the code, found where they are handed to an error; values are written {}."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

# Callables that take a hint, and the argument that is it: (its number, its name).
SINKS = {
    "SpecDecError": (1, "hint"),
    "UsageError": (1, "hint"),
    "add": (1, "remedy"),
    "refuse": (1, "remedy"),
}
# Parameters that pass a hint on to one of the callables, which makes their function one of them.
HINT_NAMES = frozenset({"hint", "remedy", "advice", "merge"})
# Tables of (condition, fact, hint), of (fact, hint), and of hints by a name.
ROW_TABLES = frozenset({"CONTRADICTIONS"})
Sinks = dict[str, tuple[int, str]]


def list_hints(paths: Iterable[Path], constants_file: Path) -> dict[str, list[str]]:
    """Map each hint of some files to the places that give it, as `file:line`.

    constants_file: whose constants they use, too.
    """
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    constant_trees = [*trees.values(), ast.parse(constants_file.read_text(encoding="utf-8"))]
    constants = {
        target.id: node.value
        for tree in constant_trees for node in tree.body if isinstance(node, ast.Assign)
        for target in node.targets if isinstance(target, ast.Name)
    }  # fmt: skip
    sinks = find_sinks(trees.values())
    hints: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for function in walk_functions(tree):
            for node in list_hint_nodes(function, sinks):
                for text in spell(node, function, constants):
                    text = re.sub(r"\{[^}]*\}", "{}", text)  # of those that are formatted later
                    hints.setdefault(text, []).append(f"{path}:{node.lineno}")
    return hints


def walk_functions(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the module and each function of it that lies in no other function."""
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node


def walk_inside(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or module, without those of functions inside of it."""
    stack = list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, ast.FunctionDef):
            stack.extend(ast.iter_child_nodes(node))


def find_sinks(trees: Iterable[ast.Module]) -> Sinks:
    """Return the callables that take a hint: those of `SINKS`, and functions that hand one on."""
    sinks = dict(SINKS)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names = [argument.arg for argument in node.args.args]
                names = names[1:] if names[:1] in (["self"], ["cls"]) else names
                names += [argument.arg for argument in node.args.kwonlyargs]
                for number, name in enumerate(names):
                    if name in HINT_NAMES and node.name != "__init__":
                        sinks.setdefault(node.name, (number, name))
    return sinks


def list_hint_nodes(function: ast.AST, sinks: Sinks) -> Iterator[ast.expr]:
    """Yield the expressions of a function or module that are handed over as hints."""
    for node in walk_inside(function):
        if isinstance(node, ast.Call):
            called = node.func
            name = getattr(called, "id", getattr(called, "attr", ""))
            if name == "from_table":
                rows = [inner for argument in node.args for inner in ast.walk(argument)]
                tuples = [row for row in rows if isinstance(row, ast.Tuple)]
                yield from (row.elts[2] for row in tuples if len(row.elts) in (3, 4))
            elif name in sinks:
                number, keyword = sinks[name]
                named = [word.value for word in node.keywords if word.arg == keyword]
                yield from named or node.args[number : number + 1]
        elif isinstance(node, ast.AnnAssign | ast.Assign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id in ROW_TABLES:
                table = node.value.elts if isinstance(node.value, ast.Tuple) else []
                yield from (row.elts[2] for row in table if isinstance(row, ast.Tuple))
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            if "find_problem" in getattr(function, "name", "") or "014" in ast.unparse(node):
                yield from node.value.elts[1:2]


def spell(node: ast.expr, function: ast.AST, constants: dict[str, ast.expr]) -> list[str]:
    """Return the texts that an expression can be; none where it is a parameter or computed."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        parts = (v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
        return ["".join(map(str, parts))]
    if isinstance(node, ast.IfExp):
        return spell(node.body, function, constants) + spell(node.orelse, function, constants)
    if isinstance(node, ast.BinOp):
        ends = spell(node.right, function, constants)
        starts = spell(node.left, function, constants) or ["{}"]
        return [start + end for start in starts for end in ends]
    if isinstance(node, ast.Name):
        if node.id in constants:
            return spell(constants[node.id], function, constants)
        return [
            text for value in find_values(node.id, function)
            for text in spell(value, function, constants)
        ]  # fmt: skip
    return []


def find_values(name: str, function: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that a local name of a function is bound to."""
    for node in walk_inside(function):
        if not isinstance(node, ast.Assign | ast.For):
            continue
        target = node.target if isinstance(node, ast.For) else node.targets[0]
        rows = [node.iter, *getattr(node.iter, "elts", [])] if isinstance(node, ast.For) else []
        for value in rows or [getattr(node, "value", None)]:
            if isinstance(target, ast.Name) and target.id == name and value is not None:
                yield value
            elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = zip(target.elts, value.elts, strict=False)
                yield from (v for t, v in pairs if getattr(t, "id", "") == name)


def fits(hint: str, text: str) -> bool:
    """Return whether a hint's text, with values in the places of {}, is or is in another text."""
    pattern = ".*".join(map(re.escape, hint.split("{}")))
    return re.search(pattern, text, re.DOTALL) is not None
