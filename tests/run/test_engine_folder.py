"""An engine folder that was moved, damaged, mixed up or made by somebody else."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import Engine, SpecDecError
from specdec.engine import kernel_cache, verification
from specdec.engine.compiler import call_compiler, find_compiler
from specdec.engine.verification import Verification
from specdec.engine.weight_files import make_metadata
from specdec.files import manifest
from specdec.files.reading import read_json, write_json
from specdec.files.tensor_file import TensorFile
from tests.conftest import make_drafter, make_llama
from tests.engine.kernels import needs_compiler
from tests.engines import (
    build_plain,
    make_engine,
    run_cli_here,
    save_weights,
)

PROMPT = '{"input_ids": [5, 9, 17, 3]}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with a drafter."""
    parent = tmp_path_factory.mktemp("engine")
    drafter = make_drafter(parent, exit_dim=96, scale=3.0)
    made = make_engine(parent, make_llama(parent), drafter, beams=3, length=3)
    (made / "t.json").write_text(" " * 200)
    document = read_json(made / "manifest.json")
    document["outputs"].append(
        manifest.describe_file(made / "t.json")
        | {"path": "t.json", "crc32": list(manifest.list_block_sums(made / "t.json"))}
    )
    write_json(made / "manifest.json", document)
    return made


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
    monkeypatch.setattr(kernel_cache, "_logged_warnings", set())


@needs_compiler
def test_kernels_are_made_anew_for_another_cpu(
    folder: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that was built elsewhere runs at full speed; without a compiler, slower."""
    build_plain(engine)
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
    build_plain(engine)
    compiler = find_compiler()
    assert compiler is not None
    call_compiler([*shlex.split(compiler), "-shared", "-fPIC", str(source), "-o", str(hostile)])
    kernels = read_json(engine / "config.json")["torch_config"]["kernels"]
    (own,) = (engine / "kernels").iterdir()
    own.unlink()
    kernel_cache.write_entry(hostile.read_bytes(), kernels, engine, mode=0o644)
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


Damage = Callable[[Path], None]
WEIGHTS = "weights.safetensors"
NORM = "transformer.ln_f.weight"


def cut_file(engine: Path) -> None:
    data = (engine / WEIGHTS).read_bytes()
    (engine / WEIGHTS).write_bytes(data[:-1000])


def change(*names: str, by: Callable[[torch.Tensor], torch.Tensor | None]) -> Damage:
    """Make something else of tensors, of all where none is named, or leave them out."""

    def damage(engine: Path) -> None:
        tensors = load_file(build_plain(engine) / WEIGHTS)
        for name in names or list(tensors):
            if (changed := by(tensors.pop(name))) is not None:
                tensors[name] = changed
        save_weights(tensors, engine / WEIGHTS)

    return damage


def swap_names(engine: Path) -> None:
    """Two tensors of one shape under each other's name."""
    data = (engine / WEIGHTS).read_bytes()
    first, second = b"layers.0.input_layernorm.weight", b"layers.1.input_layernorm.weight"
    assert data.count(first) == data.count(second) == 1
    data = data.replace(first, b"a third name").replace(second, first)
    data = data.replace(b"a third name", second)
    (engine / WEIGHTS).write_bytes(data)


def take_other_engine(engine: Path) -> None:
    """The weights of a model of the same sizes."""
    tensors = {name: tensor.clone() for name, tensor in load_file(engine / WEIGHTS).items()}
    metadata = make_metadata(WEIGHTS, "another", TensorFile(engine / WEIGHTS).tensors)
    save_file(tensors, engine / WEIGHTS, metadata=metadata)


def lose_metadata(engine: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(engine / WEIGHTS).items()}
    save_file(tensors, engine / WEIGHTS)


def add_layers(engine: Path) -> None:
    config = read_json(engine / "config.json")
    config["pretrained_config"]["num_hidden_layers"] = 900
    write_json(engine / "config.json", config)


def find_fault(engine: Path) -> str:
    """What the command says of an engine; specdec-run and doctor say the same."""
    found = [
        done.stderr.splitlines()[-2]
        for done in (run(engine), run_cli_here("doctor", "--engine-dir", engine))
        if done.returncode == 1
    ]
    assert len(found) == 2
    fact = found[0].removeprefix("error: ")
    assert fact in found[1].replace(", and 1 more reason", "")
    return fact


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (cut_file, "describes "),
        (change(by=torch.Tensor.half), "25 of another type: drafter.input_proj.bias is float16"),
        (change(NORM, by=torch.Tensor.half), f"1 of another type: {NORM} is float16, expected fl"),
        (change(NORM, by=torch.Tensor.long), f"1 of another type: {NORM} is int64, expected fl"),
        (change(NORM, by=lambda t: t[:-1]), f"1 misshapen: {NORM} is [63], expected [64]"),
        (change(NORM, by=lambda t: None), f"1 missing: {NORM}"),
        (swap_names, "has a header that is not the one that was written"),
        (take_other_engine, "belongs to another engine than config.json"),
        (lose_metadata, "belongs to another engine than config.json"),
        (add_layers, "tensors, config.json says 900 layers"),
    ],
)
def test_run_and_doctor_refuse_the_same_engines(engine: Path, damage: Any, fact: str) -> None:
    damage(engine)
    assert fact in find_fault(engine)


def test_files_of_ranks_are_not_mixed_up(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, make_llama(tmp_path), convert=["--tp-size", 2], optimize="none")
    shutil.copyfile(engine / "rank0.safetensors", engine / "rank1.safetensors")
    assert "rank1.safetensors was written as 'rank0.safetensors'" in find_fault(engine)
    (engine / "rank1.safetensors").unlink()
    assert "has tp_size=2 but lacks rank1.safetensors" in find_fault(engine)


def flip_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)[0]
        file.seek(-100, 2)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("name", [WEIGHTS, f"packed/{WEIGHTS}", "t.json"])
def test_one_bit_is_found(engine: Path, name: str) -> None:
    """In whatever a build writes; t.json stands for the files of a tokenizer."""
    if not (engine / name).exists():
        pytest.skip("without native kernels nothing is packed")
    flip_bit(engine / name)
    done = run(engine)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"{name} is damaged: its bytes 0 to {(engine / name).stat().st_size} ha" in done.stderr
    for done in (
        run(engine, "--verify-hashes"),
        run_cli_here("doctor", "--engine-dir", engine),
        run_cli_here(
            "verify", "--engine-dir", engine, "--model-dir", engine.parent, "--verify-hashes"
        ),
    ):
        assert done.returncode == 1
        assert f"{name} has sha256 " in done.stderr


def test_a_large_engine_is_compared_while_it_runs(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text is complete only after that, for the command and for streams."""
    flip_bit(engine / WEIGHTS)
    monkeypatch.setattr(verification, "LARGE_BYTES", 0)
    done = run(engine)
    assert "waiting" in done.stderr or "damaged" in done.stderr
    assert (done.returncode, done.stdout) == (1, "")
    with Engine.load(engine, device="cpu") as loaded:
        with pytest.raises(SpecDecError, match="is damaged"):
            loaded.stream([5, 9], max_output_len=2)


def test_a_file_that_was_found_whole_is_read_again_when_it_changes(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    real = manifest.list_block_sums

    def note(path: Path) -> Any:
        read.append(path.name)
        return real(path)

    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(verification, "list_block_sums", note)
    Verification(engine).finish()
    num_files = len(read)
    assert {WEIGHTS, "t.json"} <= set(read)
    monkeypatch.setattr(verification, "REMEMBERED_BYTES", 0)
    Verification(engine).finish()  # just written: they are not remembered yet
    Verification(engine).finish()
    assert len(read) == 3 * num_files
    monkeypatch.setattr(verification, "SETTLED_SECONDS", -100.0)
    Verification(engine).finish()
    Verification(engine).finish()
    assert len(read) == 4 * num_files
    status = (engine / WEIGHTS).stat()
    flip_bit(engine / WEIGHTS)
    os.utime(engine / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(SpecDecError, match="is damaged"):
        Verification(engine).finish()


def test_blocks_have_checksums_of_their_own(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 3000)
    data = (engine / WEIGHTS).read_bytes()
    sums = [zlib.crc32(data[at : at + 3000]) for at in range(0, len(data), 3000)]
    assert list(manifest.list_block_sums(engine / WEIGHTS)) == sums


def test_engines_without_checksums_run_and_are_told_of(engine: Path) -> None:
    document = read_json(engine / "manifest.json")
    for entry in document["outputs"]:
        del entry["crc32"]
    write_json(engine / "manifest.json", document)
    flip_bit(engine / WEIGHTS)
    done = run(engine)
    assert done.returncode == 0
    assert "has no checksums of blocks: damage in its files goes unnoticed" in done.stderr
    (engine / "manifest.json").unlink()
    assert "has no checksums of blocks" in run(engine).stderr
    assert "manifest.json does not exist" in run(engine, "--verify-hashes").stderr
    done = run_cli_here("doctor", "--engine-dir", engine)
    assert done.returncode == 0
    assert "note: it has no manifest.json" in done.stdout


def test_a_file_that_the_manifest_does_not_know(engine: Path) -> None:
    manifest = read_json(engine / "manifest.json")
    manifest["outputs"] = [e for e in manifest["outputs"] if e["path"] != WEIGHTS]
    write_json(engine / "manifest.json", manifest)
    assert "weights.safetensors has no sha256 in manifest.json" in run(
        engine, "--verify-hashes").stderr  # fmt: skip


def test_a_whole_engine_passes(engine: Path) -> None:
    assert run(engine, "--verify-hashes").returncode == 0
    done = run_cli_here("doctor", "--engine-dir", engine, "--verify-hashes")
    assert done.returncode == 0
    assert "can run here" in done.stdout
