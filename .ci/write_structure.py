"""Writes the list of modules in docs/structure.md: each module with its docstring's first sentence.

python .ci/write_structure.py          write the list anew
python .ci/write_structure.py --check  exit with 1 where the page is not up to date
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "structure.md"
BEGINNING, END = "<!-- modules -->\n", "<!-- /modules -->\n"
# From the top of the drawing to its bottom.
FOLDERS = (
    "generate", "convert", "build", "run", "serve", "train", "export", "verify", "audit", "measure",
    "doctor", "match", "recipe", "specdec/command", "specdec/trtllm", "specdec/trt",
    "specdec/decode", "specdec/text", "specdec/engine", "specdec/checkpoint", "specdec/methods",
    "specdec/gguf", "specdec/model", "specdec/files", "specdec/system",
)  # fmt: skip


def read_summary(path: Path) -> str:
    """Return the first line of a module's docstring; raise ValueError where it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{path} has no docstring")
    return docstring.splitlines()[0]


def list_lines() -> Iterator[str]:
    """Yield the list, a heading for each folder."""
    yield "### specdec\n"
    for path in sorted((ROOT / "specdec").glob("*.py")):
        yield f"* `{path.name}`: {read_summary(path)}"
    for name in FOLDERS:
        folder = ROOT / name
        yield f"\n### {name}\n"
        if (folder / "__init__.py").is_file():
            yield f"{read_summary(folder / '__init__.py')}\n"
        for path in sorted(folder.rglob("*.py")):
            if path != folder / "__init__.py" and path.stat().st_size:
                yield f"* `{path.relative_to(folder).as_posix()}`: {read_summary(path)}"


def main() -> int:
    """Write the list; with --check return 1 where the page has another one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    begin, end = text.index(BEGINNING) + len(BEGINNING), text.index(END)
    written = text[:begin] + "\n" + "\n".join(list_lines()) + "\n\n" + text[end:]
    if check and written != text:
        print("docs/structure.md is not up to date: run python .ci/write_structure.py")
        return 1
    if written != text:
        PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
