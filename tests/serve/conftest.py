"""The engine that the tests of the server share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.servers import make_served_engine


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_served_engine(tmp_path_factory.mktemp("served"))
