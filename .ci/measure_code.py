"""Measures of how readable the product is; with --check, limits that `make check` holds.

    python .ci/measure_code.py          print every measure, and the places beyond a limit
    python .ci/measure_code.py serve    print those of a folder or file alone
    python .ci/measure_code.py --check  exit with 1 where a limit of LIMITS is passed

A function that has a reason to pass the limit of complexity says so beside its definition, in a
comment that begins with `# complex:`; at most ten functions may.
"""

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGES = "convert build run serve generate train verify doctor audit export match recipe".split()
PRODUCT = ("specdec", *STAGES, "measure")

# Words that need a noun: alone they do not say what a name holds.
WITHOUT_NOUN = frozenset(
    """
    absent added after all allowed any asked at because before began begun best both chosen
    counted cut described done drawn each ended entered extra finished first firsts fitting
    followed found free given held here how inside joined kept known lacking largest last later
    least left listed longest lost made mine missing more most named needed new none observed
    old one ones other others ours out own part parts place places planned present recorded rest
    right said same seen several shared shown single smallest such taken theirs there told
    turned unknown unread usable used usual waiting wanted what where which who whole whose
    written wrong
    """.split()
)
BANNED_BEGINNINGS = ("What", "The same", "Whether")

LIMITS = {
    "names without a noun, per cent of bindings": 1.0,
    "docstrings that begin with What, The same or Whether": 0,
    "functions of a complexity above 20": 0,
    "functions of a complexity above 12": 12,  # it may only fall
    "functions nested deeper than 4": 0,
    "exceptions to the limit of complexity": 10,
    "files above 600 lines": 0,
    "class names that stand for several classes": 0,
}
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.Assert)
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Match)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Measures:
    """Counts of the product's Python code, and the places that were counted."""

    num_bindings: int = 0
    names: Counter[str] = field(default_factory=Counter)
    beginnings: list[str] = field(default_factory=list)
    complexities: list[tuple[int, str]] = field(default_factory=list)
    exceptions: list[str] = field(default_factory=list)
    nested: list[tuple[int, str]] = field(default_factory=list)
    sizes: list[tuple[int, str]] = field(default_factory=list)
    classes: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def iterate_files(suffix: str = ".py", below: str = "") -> Iterator[Path]:
    """Yield the product's files with this suffix, in order; below: of this folder or file alone."""
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob(f"*{suffix}")):
            if path.is_relative_to(ROOT / below):
                yield path


def list_bindings(tree: ast.AST) -> Iterator[str]:
    """Yield each bound name: variables, parameters, attributes, functions, classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def count_branches(node: ast.AST) -> int:
    """Return one more than the branches of a function, as a reader counts them.

    Conditional expressions, comprehensions and each further operand of `and` and `or` count as
    branches; functions inside of it are counted by themselves.
    """
    total = 1
    stack = list(ast.iter_child_nodes(node))
    while stack:
        child = stack.pop()
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(child, BRANCHES):
            total += 1 + len(getattr(child, "ifs", ()))
        elif isinstance(child, ast.BoolOp):
            total += len(child.values) - 1
        elif isinstance(child, ast.Match):
            total += len(child.cases)
        stack.extend(ast.iter_child_nodes(child))
    return total


def measure_nesting(body: list[ast.stmt], level: int = 0) -> int:
    """Return how many blocks lie inside of each other at most; `elif` lies beside its `if`."""
    deepest = level
    for statement in body:
        if not isinstance(statement, BLOCKS):
            continue
        for name in ("body", "orelse", "finalbody"):
            lines = getattr(statement, name, [])
            is_elif = name == "orelse" and len(lines) == 1 and isinstance(lines[0], ast.If)
            deepest = max(deepest, measure_nesting(lines, level if is_elif else level + 1))
        for handler in getattr(statement, "handlers", []):
            deepest = max(deepest, measure_nesting(handler.body, level + 1))
    return deepest


def measure_file(path: Path, measures: Measures) -> None:
    """Add one file to the measures."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    where = path.relative_to(ROOT).as_posix()
    tree = ast.parse(text)
    for name in list_bindings(tree):
        measures.num_bindings += 1
        if name.strip("_").lower() in WITHOUT_NOUN:
            measures.names[name.strip("_").lower()] += 1
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            docstring = ast.get_docstring(node) or ""
            if re.match(rf"({'|'.join(BANNED_BEGINNINGS)})\b", docstring):
                measures.beginnings.append(f"{where}:{getattr(node, 'lineno', 1)}")
        if isinstance(node, ast.ClassDef):
            measures.classes[node.name].append(where)
        if isinstance(node, Function):
            label = f"{where}:{node.lineno} {node.name}"
            above = [*node.decorator_list, node][0].lineno - 2
            if "# complex:" in lines[node.lineno - 1] or "# complex:" in lines[max(above, 0)]:
                measures.exceptions.append(label)
                continue
            measures.complexities.append((count_branches(node), label))
            measures.nested.append((measure_nesting(node.body), label))


def list_untested_modules() -> list[tuple[int, str]]:
    """Return the modules that no test imports, with their lines, longest first."""
    imported = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module)
                imported.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
    untested = []
    for path in iterate_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts if parts[0] == "specdec" else ("specdec", *parts))
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if path.name != "__init__.py" and name not in imported:
            untested.append((lines, name))
    return sorted(untested, reverse=True)


def collect_measures(below: str = "") -> Measures:
    """Measure every file of the product, or those of one folder."""
    measures = Measures()
    for path in iterate_files(below=below):
        measure_file(path, measures)
    for suffix in (".py", ".h", ".cpp", ".html"):
        for path in iterate_files(suffix, below):
            size = len(path.read_text(encoding="utf-8").splitlines())
            measures.sizes.append((size, path.relative_to(ROOT).as_posix()))
    return measures


def summarize(measures: Measures) -> dict[str, float]:
    """Return each measure of LIMITS by its words."""
    share = 100 * measures.names.total() / max(1, measures.num_bindings)
    return {
        "names without a noun, per cent of bindings": round(share, 2),
        "docstrings that begin with What, The same or Whether": len(measures.beginnings),
        "functions of a complexity above 20": sum(n > 20 for n, _ in measures.complexities),
        "functions of a complexity above 12": sum(n > 12 for n, _ in measures.complexities),
        "functions nested deeper than 4": sum(n > 4 for n, _ in measures.nested),
        "exceptions to the limit of complexity": len(measures.exceptions),
        "files above 600 lines": sum(n > 600 for n, _ in measures.sizes),
        "class names that stand for several classes": sum(
            len(places) > 1 for places in measures.classes.values()
        ),
    }


def print_places(measures: Measures) -> None:
    """Print the places after the measures, the worst first."""
    print(f"bindings: {measures.num_bindings}; names without a noun:")
    print(" ", ", ".join(f"{name} {count}" for name, count in measures.names.most_common()))
    print("docstrings:", *measures.beginnings, sep="\n  ")
    print("complexity above 12:")
    for number, label in sorted(measures.complexities, reverse=True):
        if number > 12:
            print(f"  {number} {label}")
    print("nesting above 4:", *(label for n, label in measures.nested if n > 4), sep="\n  ")
    print("exceptions:", *measures.exceptions, sep="\n  ")
    print("files above 600 lines:")
    for number, label in sorted(measures.sizes, reverse=True):
        if number > 600:
            print(f"  {number} {label}")
    print("class names of several classes:")
    for name, places in sorted(measures.classes.items()):
        if len(places) > 1:
            print(f"  {name}: {', '.join(places)}")


def main() -> int:
    """Print the measures; with --check return 1 where one passes its limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="hold the limits")
    parser.add_argument("folder", nargs="?", default="", help="measure this folder or file alone")
    check, folder = (args := parser.parse_args()).check, args.folder
    measures = collect_measures(folder)
    summary = summarize(measures)
    passed = {name: value for name, value in summary.items() if value > LIMITS[name]}
    if check and not passed:
        return 0
    print_places(measures)
    untested = [] if folder else list_untested_modules()
    print("modules that no test imports:")
    for lines, name in untested:
        print(f"  {lines} {name}")
    print()
    for name, value in summary.items():
        print(f"{name}: {value:g} (limit {LIMITS[name]:g})")
    print(f"modules that no test imports: {len(untested)} with {sum(n for n, _ in untested)} lines")
    words = len((ROOT / "README.md").read_text(encoding="utf-8").split())
    print(f"words of README.md: {words}")
    return int(check and bool(passed))


if __name__ == "__main__":
    sys.exit(main())
