"""Live oracles: real runtimes, which `make oracles` runs by hand and `make test` does not.

SPECDEC_ORACLES names the folder of their environments; docs/export.md tells how they are made.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.oracles.models import PYCODE, add_mask, drop_bias, pad_heads, read_prompts
from tests.oracles.ours import make_engine

NUM_PROMPTS, MAX_TOKENS = 8, 48


@pytest.fixture(scope="session")
def environments() -> Path:
    """The folder of environments, or a skip."""
    named = os.environ.get("SPECDEC_ORACLES")
    if not named:
        pytest.skip("SPECDEC_ORACLES is not set: run `make oracles`")
    return Path(named).resolve()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    return read_prompts(NUM_PROMPTS)


@pytest.fixture(scope="session")
def work(environments: Path, lasting_dir: Path) -> Path:
    """A folder with pycode's models; the target has wider heads, as vLLM's attention needs them."""
    folder = lasting_dir
    for name in ("medusa", "redrafter", "dflash", "eagle3"):
        shutil.copytree(PYCODE / name, folder / name)
    drop_bias(PYCODE / "eagle", folder / "eagle1")
    add_mask(PYCODE / "eagle3", folder / "p-eagle")
    pad_heads(PYCODE / "target", folder / "target")
    return folder


@pytest.fixture(scope="session")
def draft_engine(work: Path) -> Path:
    """specdec's engine of pycode's draft model."""
    return make_engine(work / "ours-draft", PYCODE / "draft", [], [])
