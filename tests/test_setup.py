"""How `make` sets up: torch alone from PyTorch's index, asked once, and never for minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.loopback import LoopbackServer

INSTALLER = ROOT / ".ci" / "install_torch.py"
# What `python -m pip` is while it stands in for pip: writes down how it was called.
STUB_PIP = """
import os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if "config" in sys.argv:
    print(os.environ.get("CONFIG", ""))
sys.exit(int(os.environ.get("STATUS_" + sys.argv[2].upper(), 0)))
"""
# The interpreter that `make` is told to use, and the one of the environment that it makes.
STUB_PYTHON = """#!/bin/sh
echo "$(basename $(dirname $0))/python $*" >> "$CALLS"
case "$*" in
    *ensurepip*) exit ${STATUS_ENSUREPIP:-0};;
    *"-m venv"*) for folder; do :; done; mkdir -p $folder/bin; cp "$0" $folder/bin/python;;
esac
"""


class Index(LoopbackServer):
    """A package index that is down: it notes what it is asked for."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.paths.append(handler.path)
        handler.send_response(503)
        handler.send_header("Content-Length", "0")
        handler.end_headers()


def make_environment(**more: str) -> dict[str, str]:
    """Ours without what pip or make were told."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "MAKE", "MFLAGS"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "no_proxy": "*"} | more


def run_installer(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, INSTALLER, *words], env=make_environment(**environment),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture
def stub(tmp_path: Path) -> dict[str, str]:
    """The environment in which `python -m pip` is the stub, and no torch is installed."""
    package = tmp_path / "stub" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STUB_PIP)
    return {"PYTHONPATH": str(package.parent), "CALLS": str(tmp_path / "calls")}


def read_calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls"
    calls = path.read_text().splitlines() if path.exists() else []
    return [call.removeprefix("--disable-pip-version-check ") for call in calls]


@pytest.mark.thorough
def test_an_index_that_is_down_is_asked_twice_for_one_package() -> None:
    """By the real pip; what comes next then has no index to ask in vain."""
    with Index() as index:
        done = run_installer(index.url, "torch==1.2.3")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"{index.url} does not answer: torch 1.2.3 comes from the package index (on Linux the CUDA"
        " build, several GB)"
    ]
    assert 1 <= len(index.paths) <= 2
    assert set(index.paths) == {"/torch/"}


def test_torch_alone_comes_from_its_index(stub: dict[str, str], tmp_path: Path) -> None:
    done = run_installer("http://i/cpu", "torch==1.2.3", **stub)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    told, asked, installed = read_calls(tmp_path)
    assert told == "config list"
    assert asked == "index versions torch --index-url http://i/cpu --timeout 5 --retries 1"
    assert installed == (
        "install --quiet --no-compile --no-deps --index-url http://i/cpu torch==1.2.3"
    )


@pytest.mark.parametrize(
    ("index", "config", "num_calls"),
    [
        ("", "", 0),
        ("http://i", "global.index-url='http://other/simple'", 1),
        ("http://i", "global.find-links='/opt/wheels'", 1),
    ],
)
def test_what_pip_was_told_stays(
    stub: dict[str, str], tmp_path: Path, index: str, config: str, num_calls: int
) -> None:
    done = run_installer(index, "torch==1.2.3", CONFIG=config, **stub)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read_calls(tmp_path)) == num_calls


def test_a_torch_that_is_there_is_not_asked_for(stub: dict[str, str], tmp_path: Path) -> None:
    about = Path(stub["PYTHONPATH"]) / "torch-1.2.3+cpu.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3+cpu\n")
    done = run_installer("http://i", "torch==1.2.3", **stub)
    assert done.returncode == 0
    assert read_calls(tmp_path) == []


def test_an_installation_that_fails_is_no_success(stub: dict[str, str], tmp_path: Path) -> None:
    assert run_installer("http://i", "torch==1.2.3", STATUS_INSTALL="3", **stub).returncode == 3


def run_make(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    python = tmp_path / "given" / "python"
    python.parent.mkdir()
    python.write_text(STUB_PYTHON)
    python.chmod(0o755)
    words = ["make", "dev", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}", "TORCH_INDEX=http://i"]
    return subprocess.run(
        words, cwd=ROOT, env=make_environment(CALLS=str(tmp_path / "calls"), **environment),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_the_recipe(tmp_path: Path) -> None:
    """Torch first, then all the rest from pip's own index alone; the second time nothing."""
    done = run_make(tmp_path)
    assert done.returncode == 0, done.stderr
    version, ensurepip, venv, torch, rest, imports = read_calls(tmp_path)
    assert "version_info" in version
    assert "ensurepip" in ensurepip
    assert venv == f"given/python -m venv {tmp_path / 'venv'}"
    assert torch.startswith("bin/python .ci/install_torch.py http://i torch==2.")
    assert "pip install" in rest
    assert "index" not in rest
    assert "-c constraints.txt -e .[dev]" in rest
    assert "import" in imports
    assert (tmp_path / "venv" / ".ready").exists()


def test_a_python_without_venv(tmp_path: Path) -> None:
    """As Debian's is; an environment that another tool made with pip is taken."""
    done = run_make(tmp_path, STATUS_ENSUREPIP="1")
    assert done.returncode != 0
    error, hint = done.stderr.splitlines()[1:3]
    assert error.startswith("error: this Python has no venv and ensurepip modules")
    assert "apt install python3-venv" in hint
    assert "uv venv --seed" in hint
    assert not (tmp_path / "venv").exists()

    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB_PYTHON)
    python.chmod(0o755)
    (tmp_path / "given" / "python").unlink()
    (tmp_path / "given").rmdir()
    done = run_make(tmp_path, STATUS_ENSUREPIP="1")
    assert done.returncode == 0, done.stderr
    assert not [call for call in read_calls(tmp_path) if "-m venv" in call]


def test_a_wheel_needs_no_environment() -> None:
    """`make dist` on a fresh clone: 1.2 GB were installed for a wheel of 1 MB."""
    done = subprocess.run(
        ["make", "-n", "dist", "VENV=not-there"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pip wheel" in done.stdout
    assert "not-there" not in done.stdout
    assert "install_torch" not in done.stdout
