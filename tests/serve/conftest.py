"""The engine that the tests of the server share, and each file's server of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.serve import requests
from specdec.serve.server import EngineServer
from tests.serve.servers import (
    CALLING_TEMPLATE,
    change_template,
    make_served_engine,
    serve_here,
)


@pytest.fixture(scope="session")
def folder(lasting_dir: Path) -> Path:
    return make_served_engine(lasting_dir / "served")


@pytest.fixture(scope="session")
def calling_tokenizer_dir(folder: Path, lasting_dir: Path) -> str:
    """Folder of a tokenizer whose chat template thinks and calls tools."""
    template = CALLING_TEMPLATE + "{# <tool_call> #}"
    return str(change_template(folder, lasting_dir / "calling", template))


@pytest.fixture(scope="module")
def calling_url(folder: Path, calling_tokenizer_dir: str) -> Iterator[str]:
    """Address of a server whose model calls tools."""
    with serve_here(folder, tokenizer_dir=calling_tokenizer_dir, draft_budget="fixed") as (_, url):
        yield url


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
