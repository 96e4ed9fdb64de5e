"""The engine that the tests of the server share, and each file's server of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.serve import requests
from specdec.serve.server import EngineServer
from tests.serve.servers import make_served_engine, serve_here


@pytest.fixture(scope="session")
def folder(lasting_dir: Path) -> Path:
    return make_served_engine(lasting_dir / "served")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[EngineServer, str]]:
    with serve_here(folder, draft_budget="fixed") as running:
        yield running


@pytest.fixture(scope="module")
def url(served: tuple[EngineServer, str]) -> str:
    return served[1]


@pytest.fixture(autouse=True)
def _seeds(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test asks for without a seed draws the same tokens in every run."""
    numbers = random.Random(request.node.nodeid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "secrets", SimpleNamespace(randbits=numbers.getrandbits))
        yield
