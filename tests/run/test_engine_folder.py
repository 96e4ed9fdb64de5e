"""An engine folder that was moved, damaged, mixed up or made by somebody else."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec.engine import kernel_cache
from specdec.engine.compiler import call_compiler, find_compiler
from specdec.storage import read_json, write_json
from tests.conftest import make_drafter, make_llama
from tests.engine.kernels import needs_compiler
from tests.engines import make_engine, run_cli_here

PROMPT = '{"input_ids": [5, 9, 17, 3]}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with a drafter."""
    parent = tmp_path_factory.mktemp("engine")
    drafter = make_drafter(parent, exit_dim=96, scale=3.0)
    return make_engine(parent, make_llama(parent), drafter, beams=3, length=3)


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(folder, tmp_path / "engine"))


def run(engine: Path, *flags: object) -> Any:
    """The command's result; its outputs under `stdout` where it ended well."""
    done = run_cli_here(
        "run", "--engine-dir", engine, "--input-file", "-", "--max-output-len", 12, "--json",
        "--device", "cpu", *flags, stdin=PROMPT,
    )  # fmt: skip
    if done.returncode == 0:
        done.stdout = json.loads(done.stdout)["outputs"][0]["output_ids"]
    return done


@pytest.fixture(autouse=True)
def tell_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "_told", set())


@needs_compiler
def test_kernels_are_made_anew_for_another_cpu(
    folder: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that was built elsewhere runs at full speed; without a compiler, slower."""
    config = read_json(engine / "config.json")
    config["torch_config"]["kernels"]["cpu"] = "another"
    write_json(engine / "config.json", config)
    expected = run(folder).stdout
    done = run(engine)
    assert "slower" not in done.stderr
    assert done.stdout == expected
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = run(engine)
    assert "native kernels: no C++ compiler" in done.stderr
    assert "torch's own operators run in their place, slower" in done.stderr
    assert "SPECDEC_CACHE_DIR" not in done.stderr  # the engine's copy is of no use here
    assert done.stdout == expected


@needs_compiler
def test_an_engines_own_kernels_are_loaded_only_if_the_user_says_so(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library in an engine folder is code of whoever built it."""
    source, mark, hostile = (tmp_path / name for name in ("hostile.cpp", "mark", "hostile.so"))
    source.write_text(
        "#include <stdio.h>\n__attribute__((constructor)) static void run()"
        f' {{ fclose(fopen("{mark}", "w")); }}\n'
    )
    compiler = find_compiler()
    assert compiler is not None
    call_compiler([*shlex.split(compiler), "-shared", "-fPIC", str(source), "-o", str(hostile)])
    kernels = read_json(engine / "config.json")["torch_config"]["kernels"]
    (own,) = (engine / "kernels").iterdir()
    own.unlink()
    kernel_cache.place(hostile, kernels, engine, mode=0o644)
    shutil.copyfile(hostile, engine / "kernels.so")  # where older versions had it
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    done = run(engine)
    assert done.returncode == 0
    assert not mark.exists()
    assert f"set SPECDEC_CACHE_DIR={engine} to take the engine's own copy" in done.stderr
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(engine))
    assert "has kernel interface 0" in run(engine).stderr
    assert mark.exists()


@needs_compiler
def test_an_engine_brings_its_kernels_to_a_machine_without_compiler(
    folder: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder that cannot be written, too."""
    expected = run(folder).stdout
    places = [engine, *engine.rglob("*")]
    for path in places:
        path.chmod(0o555 if path.is_dir() else 0o444)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(engine))
    done = run(engine)
    for path in places:
        path.chmod(0o755)
    assert "native kernels:" not in done.stderr
    assert done.stdout == expected
