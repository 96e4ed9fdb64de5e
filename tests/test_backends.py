"""The records of the backends: each is whole, and a backend is added by its record alone."""

from __future__ import annotations

import dataclasses
import json
import os
import re
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
from tests.blocks import write_gguf
from tests.conftest import ROOT, make_llama, make_tokenizer
from tests.engines import run_cli_here
from tests.families import make_family_model
from tests.trtllm.double import install_double

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


def test_a_folder_of_no_engine_is_of_no_backend(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"architectures": ["FooForCausalLM"]})
    with pytest.raises(SpecDecError, match="is not an engine: its config.json has no build_config"):
        find_backend(tmp_path)


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


KINDS = {"token_embd": 8, "attn_q": 8, "attn_k": 8, "attn_v": 12, "attn_output": 2,
         "ffn_gate": 12, "ffn_up": 2, "ffn_down": 14}  # fmt: skip
WORDS = re.compile(r"tensorrt.?llm|trtllm", re.IGNORECASE)


def write_model(kind: str, parent: Path) -> Path:
    """A model that a separate backend has, and others that it lacks in several ways."""
    if kind == "llama":
        return make_llama(parent)
    if kind == "blocks":
        parent.mkdir(exist_ok=True)
        return write_gguf(parent / "model.gguf", KINDS)
    family, _, field = kind.partition(" ")
    folder = make_family_model(parent, family, vocab=128)
    if field:
        config = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", config | {field: "gelu" if "act" in field else True})
    return folder


@pytest.mark.parametrize("kind", ["llama", "blocks", "smollm3", "opt activation_function"])
def test_nobody_reads_of_a_backend_that_is_not_here(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default options, nothing is said of it: by convert, by build, by run, by generate."""
    monkeypatch.setenv("CXX", "none")
    model = write_model(kind, tmp_path / "model")
    tokenizer = make_tokenizer(make_llama(tmp_path / "tokenizer"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input_ids": [1, 2, 3], "max_output_len": 2}\n')
    checkpoint, engine = tmp_path / "checkpoint", tmp_path / "engine"
    made = ("convert", "--model-dir", model, "--output-dir", checkpoint)
    built = ("build", "--checkpoint-dir", checkpoint, "--output-dir", engine)
    run = ("run", "--engine-dir", engine, "--input-file", prompts, "--json")
    generated = ("generate", "--model-dir", model, "--tokenizer-dir", tokenizer, "--no-cache",
                 "--input-file", prompts, "--json")  # fmt: skip
    for words in ((*made, "--dry-run"), made, (*built, "--dry-run"), built, run, generated):
        done = run_cli_here(*words)
        assert done.returncode == 0, done.stderr
        lines = (done.stdout + done.stderr).replace(str(tmp_path), "").splitlines()
        assert [line for line in lines if WORDS.search(line)] == []


@pytest.mark.parametrize("flags", [("--trtllm-version", "1.2"), ()])
def test_a_backend_is_told_of_where_it_is_asked_for_or_installed(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not flags:
        site = install_double(tmp_path / "double", "1.2")["PYTHONPATH"].split(os.pathsep)[0]
        monkeypatch.syspath_prepend(site)
    model = write_model("blocks", tmp_path / "model")
    words = ("convert", "--model-dir", model, "--output-dir", tmp_path / "checkpoint", *flags)
    fact = "TensorRT-LLM 1.2 cannot load GGUF checkpoints"
    assert f"backends that take it: torch ({fact}" in run_cli_here(*words, "--dry-run").stdout
    assert f"{fact}: that format is not its own: this checkpoint is" in run_cli_here(*words).stderr


# Stages' modules that may name TensorRT-LLM: its own, the format of checkpoints, which is its, the
# options that are its alone, an export's runtime, and hints of the torch build for its checkpoints.
NAMING = (
    "build/backends/tensorrt_llm/", "build/triton.py", "build/settings.py",
    "build/backends/torch_checks.py", "run/backends/", "run/settings.py", "convert/families/",
    "convert/methods/", "convert/quantize/", "convert/checkpoint.py", "convert/config.py",
    "convert/flags.py", "convert/report.py", "convert/settings.py", "convert/target.py", "export/",
)  # fmt: skip


def test_stages_name_no_separate_backend() -> None:
    stages = ("build", "convert", "doctor", "generate", "run", "serve", "train", "verify", "audit")
    paths = (path for stage in stages for path in (ROOT / stage).rglob("*.py"))
    naming = [str(path.relative_to(ROOT)) for path in paths if WORDS.search(path.read_text())]
    assert [path for path in naming if not path.startswith(NAMING)] == []
