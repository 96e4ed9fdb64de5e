"""Fixtures for folders whose tests build many engines: their kernels are all the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the kernels lie once a test has compiled them."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module", autouse=True)
def compiled_once(kernel_folder: Path) -> Iterator[None]:
    """Compile at the first build, copy at the others; commands in a process compile their own."""
    from specdec.engine import native

    compile_kernels = native.compile_kernels
    done: list[dict[str, str]] = []

    def copy_kernels(target: Path) -> dict[str, str]:
        if not done:
            done.append(compile_kernels(kernel_folder))
        shutil.copy(kernel_folder / native.LIBRARY_NAME, target)
        return done[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "compile_kernels", copy_kernels)
        yield
