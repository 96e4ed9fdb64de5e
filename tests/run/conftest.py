"""Fixtures that several of these tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdec.trtllm.facts import LABELS
from tests.trtllm.worlds import World, make_world


@pytest.fixture(scope="module", params=LABELS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    yield from make_world(tmp_path_factory.mktemp("world"), request.param)
