"""Engines whose weights lie packed for this machine's kernels alongside the portable ones."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.decode.engine import TorchEngine
from specdec.engine.layout import PACKED_FOLDER
from specdec.engine.linear import Linear
from specdec.engine.packed import identify_packing
from specdec.errors import SpecDecError
from specdec.files.reading import hash_file
from specdec.files.tensor_file import TensorFile
from tests.conftest import make_drafter, make_eagle_drafter, make_llama
from tests.engine.kernels import needs_compiler
from tests.engines import list_requests, make_engine, renew_sums, run_cli_here
from tests.parity.models import make_model

pytestmark = needs_compiler
PACKED = Path(PACKED_FOLDER, "weights.safetensors")
OTHER = "packed for another kind of processor"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with a drafter, in bfloat16, whose matrices fill no tile."""
    parent = tmp_path_factory.mktemp("engine")
    target = make_llama(parent, hidden=56, intermediate=50, vocab=101, dtype="bfloat16")
    drafter = make_drafter(parent, hidden=56, vocab=101, exit_dim=33, dtype="bfloat16", scale=3.0)
    return make_engine(parent, target, drafter, beams=3, length=3)


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(folder, tmp_path / "engine"))


def generate(folder: Path, *, speculate: bool = True) -> list[list[int]]:
    engine = TorchEngine(folder, device="cpu", speculate=speculate)
    try:
        requests = list_requests([[5, 9, 17, 3], [8]], 20)
        return [result.output_ids for result in engine.generate(requests)]
    finally:
        engine.close()


def list_linears(engine: TorchEngine) -> list[Linear]:
    """Those of the target's layers and its head."""
    found = [engine.decoder.lm_head]
    for layer in engine.decoder.stack.layers:
        found += [layer.qkv, layer.dense, *(x for x in (layer.up, layer.down) if x is not None)]
        if layer.experts is not None:
            found += [
                *layer.experts.up,
                *layer.experts.down,
                *(layer.experts.shared_expert or ())[:2],
            ]
    return found


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("LlamaForCausalLM-biases", []),
        ("LlamaForCausalLM-plain", ["--quantization", "int8"]),
        ("LlamaForCausalLM-plain", ["--quantization", "int4", "--group-size", 32]),
        ("GPT2LMHeadModel-gelu_new", []),
        ("Gemma2ForCausalLM-caps", []),
        ("Qwen2MoeForCausalLM-plain", []),
        ("Qwen2MoeForCausalLM-plain", ["--quantization", "int8"]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_of_a_target_is_packed_at_load(
    name: str, flags: list[object], dtype: str, tmp_path: Path
) -> None:
    """Every matrix is the file's, and the text is what it is without the file."""
    sizes = {"intermediate_size": 96} if "int4" in flags else {}  # whole groups
    target = make_model(tmp_path / "target", name, dtype=dtype, **sizes)
    folder = make_engine(tmp_path, target, build=flags)
    engine = TorchEngine(folder, device="cpu")
    kernels = engine.decoder.kernels
    assert kernels is not None
    mapped = {packed.data_ptr() for _, packed in kernels._packed_by_address.values()}
    own = [linear.packed for linear in list_linears(engine)]
    assert len(own) > 8
    for packed in own:
        assert packed is not None
        assert packed.data_ptr() in mapped
        assert packed.data_ptr() % 64 == 0
    engine.close()
    expected = generate(folder)
    shutil.rmtree(folder / PACKED_FOLDER)
    assert generate(folder) == expected


def test_every_rank_has_its_own(tmp_path: Path) -> None:
    target = make_llama(tmp_path, hidden=56, intermediate=50, dtype="bfloat16")
    drafter = make_drafter(tmp_path, hidden=56, exit_dim=34, dtype="bfloat16")
    folder = make_engine(tmp_path, target, drafter, convert=["--tp-size", 2])
    packed = folder / PACKED_FOLDER
    names = {"rank0.safetensors", "rank1.safetensors", "drafter.safetensors"}
    assert {path.name for path in packed.iterdir()} == names
    expected = generate(folder)
    shutil.move(packed, tmp_path / "packed")
    assert generate(folder) == expected
    shutil.move(tmp_path / "packed", packed)
    shutil.copyfile(packed / "rank0.safetensors", packed / "rank1.safetensors")
    with pytest.raises(SpecDecError, match=r"rank1\.safetensors was written as 'packed/rank0"):
        generate(folder)


def test_it_is_left_out_on_request(tmp_path: Path) -> None:
    """As in engines of earlier versions."""
    target = make_llama(tmp_path)
    folder = make_engine(tmp_path, target, build=["--packed-weights", "disable"])
    assert not (folder / PACKED_FOLDER).exists()
    expected = generate(folder)
    assert generate(make_engine(tmp_path, target, convert=["--workers", 1])) == expected
    plain = make_engine(tmp_path, target, optimize="none")
    assert not (plain / PACKED_FOLDER).exists()


def test_asked_for_without_kernels_it_is_refused(folder: Path, tmp_path: Path) -> None:
    checkpoint = next(folder.parent.glob("ckpt-*"))
    build = ["build", "--checkpoint-dir", checkpoint, "--output-dir", tmp_path / "engine"]
    for words, hint in (
        (["--optimize", "none"], "leave out one of the two"),
        (["--optimize", "none", "--packed-weights", "disable"], ""),
    ):
        done = run_cli_here(*build, "--packed-weights", "enable", *words, "--dry-run")
        assert (done.returncode, hint in done.stderr) == (1 if hint else 0, True), done.stderr


def test_asked_for_without_a_compiler_it_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = next(folder.parent.glob("ckpt-*"))
    build = ["build", "--checkpoint-dir", checkpoint, "--output-dir", tmp_path / "e", "--dry-run"]
    monkeypatch.setattr("specdec.engine.compiler.find_compiler", lambda: None)
    done = run_cli_here(*build, "--packed-weights", "enable")
    assert done.returncode == 1
    assert "install g++" in done.stderr
    assert run_cli_here(*build).returncode == 0


def test_plain_decoding_takes_it_too(folder: Path) -> None:
    assert generate(folder, speculate=False) == generate(folder)


def test_a_build_writes_the_same_bytes_again(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    checkpoint = next(folder.parent.glob("ckpt-*"))
    done = run_cli_here("build", "--checkpoint-dir", checkpoint, "--output-dir", again)
    assert done.returncode == 0
    assert hash_file(again / PACKED) == hash_file(folder / PACKED)


def set_packing(engine: Path) -> None:
    """Let the packed weights be those of kernels that pack otherwise."""
    own = TensorFile(engine / PACKED).metadata["packing"].encode()
    data = (engine / PACKED).read_bytes()
    assert data.count(own) == 1
    # What is in the file would show in the text if it were taken.
    start = TensorFile(engine / PACKED).get_offset(next(iter(TensorFile(engine / PACKED).tensors)))
    data = data.replace(own, own[::-1])
    (engine / PACKED).write_bytes(data[:start] + bytes(len(data) - start))
    renew_sums(engine)


def test_weights_that_were_packed_for_other_kernels_are_not_taken(
    folder: Path, engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(folder)
    assert OTHER not in caplog.text
    set_packing(engine)
    assert generate(engine) == expected
    assert caplog.text.count(OTHER) == 1
    assert "build the engine again on this machine" in caplog.text


def test_the_packing_is_told_by_what_kernels_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine(folder, device="cpu")
    kernels = engine.decoder.kernels
    assert kernels is not None
    own = identify_packing(kernels)
    assert identify_packing(kernels) == own == TensorFile(folder / PACKED).metadata["packing"]
    for name in ("pack_matrix", "pack_integers"):
        lay_out = kernels._functions[name]

        def lay_out_otherwise(*arguments: Any, lay_out: Any = lay_out) -> None:
            """Something lies elsewhere in what was packed, behind what integers begin with."""
            lay_out(*arguments)
            ctypes.c_uint16.from_address(arguments[-1] + 80).value ^= 1

        monkeypatch.setitem(kernels._functions, name, lay_out_otherwise)
        assert identify_packing(kernels) != own
        monkeypatch.undo()
    monkeypatch.setattr("specdec.engine.packed.PACKING_VERSION", -1)  # another meaning
    assert identify_packing(kernels) != own
    engine.close()


def cut(data: bytes) -> bytes:
    return data[:-1000]


def of_another_engine(data: bytes) -> bytes:
    return re.sub(rb'("build_id":")........', rb"\g<1>00000000", data, count=1)


def swap_names(data: bytes) -> bytes:
    first, second = b"layers.0.attention.qkv", b"layers.1.attention.qkv"
    return data.replace(first, b"third").replace(second, first).replace(b"third", second)


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (cut, "describes "),
        (lambda data: data[:4], "has 4 bytes"),
        (of_another_engine, "belongs to another engine"),
        (swap_names, "has a header that is not the one that was written"),
    ],
)
def test_what_is_damaged_is_refused(
    engine: Path, damage: Callable[[bytes], bytes], fact: str
) -> None:
    (engine / PACKED).write_bytes(damage((engine / PACKED).read_bytes()))
    commands = (
        ["run", "--engine-dir", engine, "--input-file", "-", "--device", "cpu"],
        ["doctor", "--engine-dir", engine],
    )
    for command in commands:
        done = run_cli_here(*command, stdin='{"input_ids": [5]}')
        assert done.returncode == 1
        assert f"packed/weights.safetensors {fact}" in done.stderr
        assert "or remove" in done.stderr


def test_a_packed_matrix_that_cannot_be_one(engine: Path) -> None:
    """Kernels would read beyond what they take for larger than it is."""
    loaded = TorchEngine(engine, device="cpu")
    kernels = loaded.decoder.kernels
    assert kernels is not None
    weight = torch.zeros(5, 70, dtype=kernels.dtype)
    codes = torch.zeros(6, 64, dtype=torch.int8)
    packed = kernels.pack_integers(codes, torch.ones(6, 1), bits=8, group=64)
    damaged = packed.clone()
    damaged[8 * 6] ^= 1  # has input scales
    for wrong in (kernels.pack_matrix(weight)[:, :-1], packed):
        kernels.add_packed(weight, wrong)
        with pytest.raises(SpecDecError, match="of another matrix"):
            kernels.pack_matrix(weight)
    for wrong in (damaged, packed[:-64]):
        kernels.add_packed(codes, wrong)
        with pytest.raises(SpecDecError, match="of another matrix"):
            kernels.pack_integers(codes, torch.ones(6, 1), bits=8, group=64)
    kernels.add_packed(codes, packed)
    assert kernels.pack_integers(codes, torch.ones(6, 1), bits=8, group=64) is packed
    loaded.close()


def test_a_drafters_matrices_are_mapped(tmp_path: Path) -> None:
    """EAGLE's, but those which are stacked at load."""
    target = make_llama(tmp_path, dtype="bfloat16")
    drafter = make_eagle_drafter(tmp_path, version=3, dtype="bfloat16")
    folder = make_engine(tmp_path, target, convert=["--eagle-model-dir", drafter])
    names = TensorFile(folder / PACKED).tensors
    assert "eagle_nets.0.drafter.fc.weight" in names
    assert not any("eagle" in name and ".mlp.fc." in name for name in names)
    expected = generate(folder)
    shutil.rmtree(folder / PACKED_FOLDER)
    assert generate(folder) == expected
