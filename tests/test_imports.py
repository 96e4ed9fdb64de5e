"""`--help` stays quick: no heavy library is imported before it is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from specdec.command.stages import STAGES
from tests.conftest import ROOT

HEAVY = (
    "torch", "transformers", "tokenizers", "safetensors", "accelerate", "tensorrt_llm",
    "huggingface_hub", "datasets", "sympy", "numpy", "yaml", "starlette", "uvicorn", "pydantic",
)  # fmt: skip
SCRIPTS = re.findall(
    r'^(specdec-[a-z]+) = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
)
assert len(SCRIPTS) == 8


def list_heavy_imports(code: str) -> list[str]:
    """Run `code` in a new process until it exits and list what it imported of HEAVY."""
    report = f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]), file=sys.stderr)"
    program = f"import atexit, json, sys\natexit.register(lambda: {report})\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: " in done.stdout
    found: list[str] = json.loads(done.stderr.splitlines()[-1])
    return found


def test_the_check_sees_an_import() -> None:
    assert list_heavy_imports("import yaml; print('Usage: ')") == ["yaml"]


def test_the_package_imports_nothing_heavy() -> None:
    """What it offers is imported when it is used."""
    assert list_heavy_imports("import specdec; assert specdec.__all__; print('Usage: ')") == []
    used = list_heavy_imports("from specdec import SpecDecError; print('Usage: ')")
    assert used == []


def test_help_of_specdec_imports_nothing_heavy() -> None:
    code = "sys.argv = ['specdec', '--help']; from specdec.command.entry import main; main()"
    assert list_heavy_imports(code) == []


@pytest.mark.thorough
@pytest.mark.parametrize("stage", STAGES)
def test_help_of_a_stage_imports_nothing_heavy(stage: str) -> None:
    start = "from specdec.command.entry import main; main()"
    code = f"sys.argv = ['specdec', {stage!r}, '--help']; {start}"
    assert list_heavy_imports(code) == []


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "module", "function"), SCRIPTS)
def test_help_of_a_script_imports_nothing_heavy(name: str, module: str, function: str) -> None:
    code = f"sys.argv = [{name!r}, '--help']; from {module} import {function}; {function}()"
    assert list_heavy_imports(code) == []
