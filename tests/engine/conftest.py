"""Compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.engine import native
from tests.engine.kernels import EXTRA_FLAGS, FORMS


@pytest.fixture(scope="session")
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels' library, in the form for this machine or that of `in_every_form`."""
    folder = tmp_path_factory.mktemp("kernels")
    form = FORMS[getattr(request, "param", "own")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "FLAGS", (*native.FLAGS, *form, *EXTRA_FLAGS))
        info = native.compile_kernels(folder)
    assert info["cpu"] == native.describe_cpu()
    return folder / native.LIBRARY_NAME
