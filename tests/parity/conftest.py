"""Kernels are compiled once for all engines of a module."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.engine import native


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    compile_kernels, folder = native.compile_kernels, tmp_path_factory.mktemp("kernels")
    done: list[dict[str, str]] = []

    def copy_kernels(target: Path) -> dict[str, str]:
        if not done:
            done.append(compile_kernels(folder))
        shutil.copy(folder / native.LIBRARY_NAME, target)
        return done[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "compile_kernels", copy_kernels)
        yield
