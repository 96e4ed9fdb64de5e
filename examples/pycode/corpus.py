#!/usr/bin/env python3
"""Collect the pycode corpus: the standard library's source of the interpreter that runs this.

    python corpus.py --output-dir work/corpus

Nothing is downloaded. Files are split by a hash of their relative path, so that a file is either
training or held-out data on every machine and Python version. Writes `train.jsonl`,
`heldout.jsonl` (one `{"path", "text"}` a line) and `corpus.json` (counts, bytes, sha256).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

HELDOUT_PERCENT = 4
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
MIN_CHARS, MAX_CHARS = 400, 200_000


def iterate_sources(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (relative path, text) of every usable source file under `root`, in path order."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # test data that is broken on purpose
        if MIN_CHARS <= len(text) <= MAX_CHARS and "\0" not in text:
            yield relative.as_posix(), text


def is_heldout(relative_path: str) -> bool:
    """Decide the split from the path alone."""
    return int(hashlib.sha256(relative_path.encode()).hexdigest(), 16) % 100 < HELDOUT_PERCENT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    output_dir: Path = parser.parse_args().output_dir
    output_dir.mkdir(parents=True, exist_ok=True)
    root = Path(sysconfig.get_paths()["stdlib"])
    report: dict[str, object] = {"python": platform.python_version()}
    splits: dict[str, list[tuple[str, str]]] = {"train": [], "heldout": []}
    for relative, text in iterate_sources(root):
        splits["heldout" if is_heldout(relative) else "train"].append((relative, text))
    for split, files in splits.items():
        lines = "".join(json.dumps({"path": p, "text": t}) + "\n" for p, t in files)
        (output_dir / f"{split}.jsonl").write_text(lines, encoding="utf-8")
        report[split] = {
            "files": len(files),
            "bytes": sum(len(t.encode()) for _, t in files),
            "sha256": hashlib.sha256(lines.encode()).hexdigest(),
        }
    (output_dir / "corpus.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
