"""Commands of pages, run again, and what they print beside what the pages show: `make pages`.

A block whose lines begin with `$ ` is commands, each with its output below. There `...` stands for
anything, and white space is not compared, as a page wraps lines. All else is: texts, tokens per
step, and the steps in which nothing was drafted.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```\n(\$ .*?)^```", re.MULTILINE | re.DOTALL)
ASSIGNMENT = re.compile(r"[A-Z_]+=")


@dataclasses.dataclass(frozen=True)
class Shown:
    """A command of a page, in one line, and the output that is shown below it."""

    command: str
    output: str


def list_pages() -> list[Path]:
    """Return the pages that show commands with their output."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    return [page for page in sorted(pages) if read_blocks(page.read_text(encoding="utf-8"))]


def read_blocks(text: str) -> list[Shown]:
    """Return the commands of a page's blocks, in order."""
    found = []
    for block in FENCE.findall(text):
        for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append(Shown(re.sub(r"\s+", " ", command), output))
    return found


def is_shown(expected: str, printed: str) -> bool:
    """Return whether what a page shows is what was printed."""
    parts = ["".join(part.split()) for part in expected.split("...")]
    return re.search(".*".join(map(re.escape, parts)), "".join(printed.split())) is not None


def check_page(page: Path) -> list[str]:
    """Run a page's commands in a folder of its own; return what differs, as texts."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    prelude, faults = "set -e; ", []
    with tempfile.TemporaryDirectory(prefix="specdec-pages-") as folder:
        for name in ("benchmarks", "examples"):
            (Path(folder) / name).symlink_to(ROOT / name)
        for shown in read_blocks(page.read_text(encoding="utf-8")):
            print(f"$ {shown.command}", flush=True)
            done = subprocess.run(
                ["bash", "-c", prelude + shown.command], cwd=folder, env=environment, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
            if ASSIGNMENT.match(shown.command):
                prelude += f"{shown.command}; "
            if done.returncode or not is_shown(shown.output, done.stdout):
                told = "ended with an error" if done.returncode else "printed"
                faults.append(
                    f"{page.relative_to(ROOT)}: $ {shown.command}\nthe page shows\n{shown.output}"
                    f"\nthe command {told}\n{done.stdout}"
                )
    return faults


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "pages", nargs="*", type=Path, help="all that show output, if none is given"
    )
    pages = [page.resolve() for page in parser.parse_args(arguments).pages] or list_pages()
    faults = [fault for page in pages for fault in check_page(page)]
    if faults:
        sys.exit("\n\n".join(["", *faults, f"FAILED: {len(faults)} outputs are not as shown"]))
    print(
        f"the outputs of {shlex.join(str(page.relative_to(ROOT)) for page in pages)} are as shown"
    )


if __name__ == "__main__":
    main()
