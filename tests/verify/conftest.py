"""What the tests of specdec-verify share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import make_drafter, make_llama, make_tokenizer


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its tokenizer in `target`."""
    folder = tmp_path_factory.mktemp("verify")
    make_tokenizer(make_llama(folder, seed=3))
    return folder


@pytest.fixture(scope="module")
def drafter(parent: Path) -> Path:
    """A ReDrafter drafter for it."""
    return make_drafter(parent, exit_dim=96, scale=3.0)
