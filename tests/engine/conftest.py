"""Compiled kernels."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from specdec.engine import compiler, native_library
from tests.engine.kernels import EXTRA_FLAGS, FORMS


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest, lasting_dir: Path) -> Path:
    """The kernels' library, in the form for this machine or that of `in_every_form`."""
    folder = Path(tempfile.mkdtemp(dir=lasting_dir))
    form = FORMS[getattr(request, "param", "own")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "FLAGS", (*compiler.FLAGS, *form, *EXTRA_FLAGS))
        if EXTRA_FLAGS:  # the sanitizers', which are preloaded here and would slow the compiler
            patch.delenv("LD_PRELOAD", raising=False)
            patch.setattr(compiler, "COMPILE_SECONDS", 3600)
        info = native_library.compile_kernels(folder)
    assert info["cpu"] == compiler.describe_cpu()
    return folder / native_library.LIBRARY_NAME
