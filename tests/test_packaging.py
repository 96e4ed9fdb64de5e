"""What an installed specdec holds: every package folder, the type marker, no stray top level."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specdec import errors
from tests.conftest import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None

SOURCES = (
    "specdec", "convert", "build", "run", "serve", "generate", "train", "verify", "doctor",
    "audit", "export", "measure", "match", "recipe", "configs",
)  # fmt: skip


def list_package_folders() -> dict[str, str]:
    """Map each folder that holds modules to the package name it is installed under."""
    packages = {}
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            folder = path.parent.relative_to(ROOT).as_posix()
            name = folder.replace("/", ".")
            packages[folder] = name if source == "specdec" else f"specdec.{name}"
    return packages


@pytest.mark.skipif(tomllib is None, reason="reading pyproject.toml needs Python 3.11")
def test_every_package_folder_is_listed() -> None:
    tool: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    listed = tool["setuptools"]["packages"]
    pages = ["specdec.docs", "specdec.docs.methods"]  # no modules
    assert sorted(listed) == sorted({*list_package_folders().values(), *pages})
    for folder in list_package_folders():
        assert (ROOT / folder / "__init__.py").is_file(), f"{folder} lacks __init__.py"


def test_wheel_holds_what_it_should(tmp_path: Path) -> None:
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip("pyproject.toml asks for setuptools 77 or newer")
    # From a copy: building leaves a folder of its own alongside the sources.
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns("__pycache__", ".*", "*.safetensors", "work", "out", "dist")
    for name in (*SOURCES, "docs", "pyproject.toml", "setup.cfg", "LICENSE", "README.md"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy / name)
    command = [
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--no-index", "--wheel-dir", str(tmp_path), str(copy),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("specdec_toolchain-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    top_level = {name.split("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"specdec"}
    expected = {"specdec/py.typed", "specdec/convert/cli.py"}
    for folder, package in list_package_folders().items():
        expected |= {
            f"{package.replace('.', '/')}/{path.name}" for path in (ROOT / folder).glob("*.py")
        }
    expected |= {f"specdec/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    expected |= {f"specdec/{path.relative_to(ROOT)}" for path in (ROOT / "docs").rglob("*.md")}
    # Whatever else the sources carry alongside the modules is needed at run time too.
    for source in SOURCES:
        for path in [
            p for kind in ("cpp", "h", "json", "j2") for p in (ROOT / source).rglob(f"*.{kind}")
        ]:
            relative = path.relative_to(ROOT).as_posix()
            expected.add(relative if source == "specdec" else f"specdec/{relative}")
    assert expected - names == set()


@pytest.mark.skipif(tomllib is None, reason="reading pyproject.toml needs Python 3.11")
def test_what_is_to_be_installed_is_on_the_index() -> None:
    """`pip install specdec` would bring another project's package, and ours is on no index.

    So hints name the packages of an extra, and pages install it from the checkout.
    """
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == errors.DISTRIBUTION == "specdec-toolchain"
    foreign = re.compile(r"pip install[^`\n]*['\" ]specdec(?![-_\w])|['\"]specdec(-toolchain)?\[")
    local = re.compile(r"pip install\s'\.\[.*(\n.*){0,2}")
    hint = re.compile(r"name_extra\(['\"]([\w-]+)['\"]\)")
    named = set()
    files = [
        path
        for source in (*SOURCES, "docs", "examples", "benchmarks")
        for path in (ROOT / source).rglob("*")
        if path.suffix in (".py", ".md", ".yaml")
    ]
    for path in [*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]:
        text = path.read_text()
        assert not foreign.search(text), f"{path}: {foreign.search(text)}"
        named |= set(hint.findall(text))
        assert all("checkout" in found[0] for found in local.finditer(text)), path
    extras = project["optional-dependencies"]
    assert {"train", "plot", "tensorrt-llm"} <= named <= set(extras)
    for name in sorted(named):
        words = shlex.split(errors.name_extra(name))
        assert words[:2] == ["pip", "install"]
        assert {re.split("[<>=]", word)[0] for word in words[2:]} == {
            re.split("[<>=;]", each)[0] for each in extras[name]
        }


def test_a_checkout_that_is_not_installed_installs_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "DISTRIBUTION", "specdec-is-not-installed")
    assert errors.name_extra("gguf") == "pip install '.[gguf]' in the checkout"


def test_commands_of_the_wheel_start_without_a_checkout(tmp_path: Path) -> None:
    """The stages are found inside the package when no pyproject.toml lies alongside it."""
    site = tmp_path / "site"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "specdec", site / "specdec", ignore=ignored)
    for stage in SOURCES[1:]:
        shutil.copytree(ROOT / stage, site / "specdec" / stage, ignore=ignored)
    shutil.copytree(ROOT / "docs", site / "specdec" / "docs")
    code = (
        "import specdec.convert.cli as c, specdec; print(c.__file__, list(specdec.__path__));"
        "from specdec.command.help import find_pages; print(find_pages()['methods/eagle'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout
    assert done.stdout.startswith(str(site / "specdec" / "convert" / "cli.py"))
