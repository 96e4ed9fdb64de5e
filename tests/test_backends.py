"""The records of the backends: each is whole, and a backend is added by its record alone."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specdec import Engine
from specdec.build.pipeline import build_engine, check_before_checkpoint, choose_backend
from specdec.build.settings import BuildSettings
from specdec.decode.settings import DecodeSettings
from specdec.doctor.abilities import list_abilities, list_pins
from specdec.doctor.machine import describe_machine
from specdec.errors import Problems, SpecDecError, UsageError
from specdec.files.backends import BACKENDS, ENTRIES, Backend, choose_default, find_backend
from specdec.files.reading import write_json
from specdec.run.pipeline import run_engine
from specdec.run.settings import RunSettings

FOREIGN = "toy"


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_record_is_whole(backend: Backend) -> None:
    assert set(backend.modules) == set(ENTRIES)
    for kind, names in ENTRIES.items():
        if kind != "engine" or backend.is_loadable:
            module = backend.load(kind)
            assert [name for name in names if not hasattr(module, name)] == []
    assert backend.is_loadable == (backend.runners is None)
    fields = {field.name for field in dataclasses.fields(BuildSettings)}
    assert {*backend.build_fields, *backend.ineffective_fields} <= fields


def test_names_and_fields_are_of_one_backend_each() -> None:
    assert all(backend.name == name for name, backend in BACKENDS.items())
    fields = [
        field for backend in BACKENDS.values()
        for field in (*backend.build_fields, *backend.ineffective_fields)
    ]  # fmt: skip
    assert len(fields) == len(set(fields))
    assert [backend.leaves_name_out for backend in BACKENDS.values()].count(True) == 1


def make_folder(parent: Path, **document: Any) -> Path:
    write_json(parent / "config.json", {"build_config": {}, **document})
    return parent


@pytest.mark.parametrize("name", BACKENDS)
def test_the_sign_of_an_engines_folder(name: str, tmp_path: Path) -> None:
    assert find_backend(make_folder(tmp_path, backend=name)) is BACKENDS[name]


def test_the_sign_of_a_folder_that_names_no_backend(tmp_path: Path) -> None:
    assert find_backend(make_folder(tmp_path)).leaves_name_out


def test_an_unknown_backend_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpecDecError, match="'abacus', which this specdec does not have"):
        find_backend(make_folder(tmp_path, backend="abacus"))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """A backend whose modules are one, registered by its record."""
    module = ModuleType("toy_backend")
    functions: dict[str, Any] = {
        "build_engine": lambda settings: {"engine_dir": str(settings.output_dir)},
        "foresee_limits": lambda settings, checkpoint: None,
        "follow_ranks": lambda settings: True,
        "open_engine": None,
        "PACKAGES": {FOREIGN: (FOREIGN,)},
        "describe_machine": lambda: {"toy_command": None},
        "list_abilities": lambda machine: {"build toys": [f"no {machine['toy_command']}"]},
        "check_engine": lambda *_: (Problems(), []),
        "describe_pins": lambda machine: {"rows": [], "problems": ["old"]},
        "is_installed": lambda: True,
        "suits_machine": lambda: True,
        "find_checkpoint_problems": lambda checkpoint, label=None: Problems([("too big", "cut")]),
        "takes_flag": lambda name: name == "wheels",
    }
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    modules = {kind: None if kind == "engine" else module.__name__ for kind in ENTRIES}
    backend = Backend(
        name=FOREIGN, title="Toy", modules=modules, builder="toy-build", is_separate=True,
        build_fields=("launcher",), runners="run it with toy-run",
    )  # fmt: skip
    monkeypatch.setitem(BACKENDS, FOREIGN, backend)
    return backend


def test_a_backend_is_added_by_its_record_alone(toy: Backend, tmp_path: Path) -> None:
    checkpoint, engine = tmp_path / "checkpoint", tmp_path / "engine"
    settings = BuildSettings(checkpoint_dir=checkpoint, output_dir=engine)
    assert choose_default() is toy is choose_backend(settings)
    assert build_engine(settings) == {"engine_dir": str(engine)}
    unread: Any = None
    assert check_before_checkpoint(settings, unread) is None
    machine = describe_machine()
    assert machine["packages"][FOREIGN] is None
    assert list_abilities(machine)["build toys"] == ["no None"]
    assert {"rows": [], "problems": ["old"]} in list_pins(machine)
    engine.mkdir()
    make_folder(engine, backend=FOREIGN)
    assert run_engine(RunSettings(engine_dir=engine, input_text=["a"])) is None
    with pytest.raises(SpecDecError, match="an engine of Toy, which Engine cannot load") as error:
        Engine.open(DecodeSettings(engine_dir=engine))
    assert "toy-run" in error.value.hint


def test_what_one_backend_takes_is_refused_by_another(toy: Backend, tmp_path: Path) -> None:
    folders: dict[str, Any] = {"checkpoint_dir": tmp_path, "output_dir": tmp_path}
    with pytest.raises(UsageError, match="--launcher has no meaning for the torch") as error:
        choose_backend(BuildSettings(backend="torch", launcher="srun", **folders))
    assert "--backend" in error.value.hint
    wheels: Any = {"wheels": None}
    with pytest.raises(UsageError, match="--wheels is a flag of toy-build"):
        choose_backend(BuildSettings(backend="torch", unknown_options=wheels, **folders))
    choose_backend(BuildSettings(unknown_options=wheels, **folders))
