"""Compiled kernels."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from specdec.engine import native
from tests.engine.kernels import EXTRA_FLAGS, FORMS


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest, lasting_dir: Path) -> Path:
    """The kernels' library, in the form for this machine or that of `in_every_form`."""
    folder = Path(tempfile.mkdtemp(dir=lasting_dir))
    form = FORMS[getattr(request, "param", "own")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "FLAGS", (*native.FLAGS, *form, *EXTRA_FLAGS))
        info = native.compile_kernels(folder)
    assert info["cpu"] == native.describe_cpu()
    return folder / native.LIBRARY_NAME
