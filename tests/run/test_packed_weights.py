"""Engines that hold each matrix once: packed for this machine's kernels, or as it is."""

from __future__ import annotations

import ctypes
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.decode.engine import TorchEngine
from specdec.decode.ranks.part import choose_device, list_options
from specdec.engine.blocks import BlockMatrix
from specdec.engine.engine_kernels import prefer_cpu
from specdec.engine.integers import IntegerMatrix
from specdec.engine.layout import PACKED_FOLDER, read_engine_config
from specdec.engine.linear import Linear
from specdec.engine.native_border import TILE
from specdec.engine.native_matrices import MatrixKernels
from specdec.engine.packed import hash_packing, take_packed
from specdec.errors import SpecDecError
from specdec.files.reading import hash_file, read_json, write_json
from specdec.files.tensor_file import TensorFile, write_tensor_file
from specdec.model.tensors import EMBEDDING, HEAD
from specdec.system.cache import find_cache
from tests.conftest import ROOT, make_drafter, make_eagle_drafter, make_llama
from tests.engine.kernels import needs_compiler
from tests.engines import build_plain, call, list_requests, make_engine, renew_sums, run_cli_here
from tests.parity.models import make_model

pytestmark = needs_compiler
PACKED = Path(PACKED_FOLDER, "weights.safetensors")
PYCODE = ROOT / "examples" / "pycode" / "target"


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


@pytest.mark.thorough
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
    """Every matrix is the file's, and the text is what it is of weights that are not packed."""
    sizes = {"intermediate_size": 96} if "int4" in flags else {}  # whole groups
    target = make_model(tmp_path / "target", name, dtype=dtype, **sizes)
    folder = make_engine(tmp_path, target, build=flags)
    engine = TorchEngine(folder, device="cpu")
    mapped = list_mapped(folder / PACKED)
    linears = [linear.packed for linear in list_linears(engine)]
    assert len(linears) > 8
    for packed in linears:
        assert packed is not None
        assert any(packed.data_ptr() in addresses for addresses in mapped)
        assert packed.data_ptr() % 64 == 0
    engine.close()
    expected = generate(folder)
    assert generate(build_plain(folder)) == expected
    assert not (folder / PACKED_FOLDER).exists()


def make_tied(
    parent: Path, target: Path, convert: Sequence[object] = (), build: Sequence[object] = (), *,
    stores_head: bool = False, changed: float = 0,
) -> Path:  # fmt: skip
    """An engine of a checkpoint whose head is the embedding.

    stores_head: as a second tensor, as of Hugging Face folders; else as GGUF files have it.
    changed: added to the last weight of the head.
    """
    checkpoint, engine = parent / "tied-ckpt", parent / "tied"
    call("convert", "--model-dir", target, "--output-dir", checkpoint, *convert)
    for file in checkpoint.glob("rank*.safetensors") if changed or not stores_head else ():
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        head = tensors.pop(HEAD)
        head[-1, -1] += changed
        save_file(tensors | ({HEAD: head} if stores_head else {}), file)
    renew_sums(checkpoint)
    call("build", "--checkpoint-dir", checkpoint, "--output-dir", engine, *build)
    return engine


def list_mapped(path: Path) -> list[range]:
    """Where a file is in this process's memory."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = [line[0].split("-") for line in lines if line[-1] == str(path)]
    return [range(int(start, 16), int(stop, 16)) for start, stop in ends]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("LlamaForCausalLM-biases", []),
        ("LlamaForCausalLM-tied_head_dim", []),
        ("LlamaForCausalLM-tied_head_dim stored", []),
        ("LlamaForCausalLM-tied_head_dim stored", ["--quantization", "int8"]),
        ("LlamaForCausalLM-plain", ["--quantization", "int8"]),
        ("LlamaForCausalLM-plain", ["--quantization", "int4", "--group-size", 32]),
        ("Qwen2MoeForCausalLM-plain", []),
        ("Qwen2MoeForCausalLM-plain", ["--quantization", "int8"]),
    ],
)
def test_every_matrix_stands_once(name: str, flags: list[object], tmp_path: Path) -> None:
    """By name, and by the bytes of an engine with matrices whose tiles are full."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
    name, _, stored = name.partition(" ")
    target = make_model(tmp_path / "target", name, dtype="bfloat16", **sizes)
    make = make_tied if "tied" in name and not stored else make_engine
    folder = make(tmp_path, target, build=flags)
    plain, packed = TensorFile(folder / "weights.safetensors"), TensorFile(folder / PACKED)
    assert not plain.tensors.keys() & packed.tensors.keys()
    kept = {name for name, info in plain.tensors.items() if len(info.shape) > 1}
    assert all("embedding" in name or "router" in name or "gate" in name for name in kept)
    if "tied" in name:
        assert not kept, "the embedding is packed, and its rows are looked up there"
    num_bytes = sum(i.num_bytes for file in (plain, packed) for i in file.tensors.values())
    build_plain(folder)
    whole = dict(TensorFile(folder / "weights.safetensors").tensors)
    assert (whole.pop(HEAD, None) is None) == ("tied" in name and not stored)
    assert {*plain.tensors, *packed.tensors} - {HEAD} <= whole.keys()
    whole |= {} if "tied" in name else {HEAD: whole[EMBEDDING]}
    expected = sum(info.num_bytes for info in whole.values())
    # Packed integers have a header each; experts and shared ones are filled up to whole tiles.
    assert expected <= num_bytes < (1.3 if flags else 1.15) * expected


def test_every_rank_has_its_own(tmp_path: Path) -> None:
    target = make_llama(tmp_path, hidden=56, intermediate=50, dtype="bfloat16")
    drafter = make_drafter(tmp_path, hidden=56, exit_dim=34, dtype="bfloat16")
    folder = make_engine(tmp_path, target, drafter, convert=["--tp-size", 2])
    packed = folder / PACKED_FOLDER
    names = {"rank0.safetensors", "rank1.safetensors", "drafter.safetensors"}
    assert {path.name for path in packed.iterdir()} == names
    expected = generate(folder)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert generate(build_plain(copy)) == expected
    shutil.copyfile(packed / "rank0.safetensors", packed / "rank1.safetensors")
    with pytest.raises(SpecDecError, match=r"rank1\.safetensors was written as 'packed/rank0"):
        generate(folder)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flags", "stores_head"),
    [([], False), (["--use-parallel-embedding"], False), (["--use-parallel-embedding"], True)],
)
def test_a_tied_embedding_of_ranks(flags: list[object], stores_head: bool, tmp_path: Path) -> None:
    """Packed where each rank's head is its part of the embedding; a drafter reads the whole."""
    target = make_llama(tmp_path, hidden=56, intermediate=50, tied=True)
    drafter = make_drafter(tmp_path, hidden=56, exit_dim=34)
    convert = ["--drafter-model-dir", drafter, "--tp-size", 2, *flags]
    folder = make_tied(tmp_path, target, convert, stores_head=stores_head)
    packed = TensorFile(folder / PACKED_FOLDER / "rank0.safetensors").tensors
    assert (EMBEDDING in packed, HEAD in packed) == (bool(flags), False)
    expected = generate(folder)
    assert generate(folder, speculate=False) == expected == generate(build_plain(folder))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["redrafter", "eagle"])
@pytest.mark.parametrize("stores_head", [False, True])
def test_a_drafter_reads_a_tied_embedding(
    stores_head: bool, kind: str, dtype: str, tmp_path: Path
) -> None:
    target = make_llama(tmp_path, tied=True, dtype=dtype)
    make = make_drafter if kind == "redrafter" else make_eagle_drafter
    flag = "--drafter-model-dir" if kind == "redrafter" else "--eagle-model-dir"
    drafter = make(tmp_path, dtype=dtype)
    folder = make_tied(tmp_path, target, [flag, drafter], stores_head=stores_head)
    assert {EMBEDDING, HEAD} & TensorFile(folder / PACKED).tensors.keys() == {EMBEDDING}
    texts, accepted = generate_counting(folder)
    assert (texts, accepted) == generate_counting(build_plain(folder))


def test_a_head_that_differs_in_one_weight_is_held_beside_the_embedding(tmp_path: Path) -> None:
    target = make_llama(tmp_path, tied=True, dtype="bfloat16")
    folder = make_tied(tmp_path, target, stores_head=True, changed=0.5)
    assert {EMBEDDING, HEAD} & TensorFile(folder / PACKED).tensors.keys() == {HEAD}
    expected = generate(folder)
    assert generate(build_plain(folder)) == expected


def generate_counting(folder: Path) -> tuple[list[list[int]], int]:
    with_drafts = TorchEngine(folder, device="cpu")
    results = with_drafts.generate(list_requests([[5, 9, 17, 3], [8]], 20))
    with_drafts.close()
    return [r.output_ids for r in results], sum(r.stats.num_accepted for r in results)


def test_it_is_left_out_on_request(tmp_path: Path) -> None:
    target = make_llama(tmp_path)
    folder = make_engine(tmp_path, target, build=["--packed-weights", "disable"])
    assert not (folder / PACKED_FOLDER).exists()
    expected = generate(folder)
    assert generate(make_engine(tmp_path, target, convert=["--workers", 1])) == expected
    plain = make_engine(tmp_path, target, optimize="none")
    assert not (plain / PACKED_FOLDER).exists()


def test_where_a_gpu_runs_the_engine_nothing_is_packed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    checkpoint, engine = next(folder.parent.glob("ckpt-*")), tmp_path / "engine"
    build = ["build", "--checkpoint-dir", checkpoint, "--output-dir", engine]
    assert "torch sees a GPU" in run_cli_here(*build).stderr
    assert not (engine / PACKED_FOLDER).exists()
    assert run_cli_here(*build, "--packed-weights", "enable", "--force").returncode == 0
    assert (engine / PACKED).exists()
    assert choose_device(prefer_cpu("auto", engine, read_engine_config(engine)), 1).type == "cpu"


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


def change_config(engine: Path, **options: Any) -> None:
    config = read_json(engine / "config.json")
    config["torch_config"].update(options)
    write_json(engine / "config.json", config)


def set_packing(engine: Path) -> tuple[str, str]:
    """Let an engine be packed for kernels that pack otherwise; return both packings."""
    packing = TensorFile(engine / PACKED).metadata["packing"]
    other = packing[::-1]
    data = (engine / PACKED).read_bytes()
    assert data.count(packing.encode()) == 1
    (engine / PACKED).write_bytes(data.replace(packing.encode(), other.encode()))
    change_config(engine, packing=other)
    renew_sums(engine)
    return packing, other


def run(engine: Path, *flags: object) -> Any:
    words = ["--engine-dir", engine, "--input-file", "-", "--max-output-len", 4]
    return run_cli_here("run", *words, *flags, stdin='{"input_ids": [5]}')


def follow(hint: str, engine: Path) -> list[str]:
    """The command that a hint ends with, without its program."""
    words = shlex.split(hint[hint.index("specdec build") :])
    assert words[-2:] == [f"--output-dir={engine}", "--force"]
    return words[1:]


def test_an_engine_for_other_kernels_is_refused(folder: Path, engine: Path) -> None:
    """With both packings named; the command of the hint makes it right."""
    packing, other = set_packing(engine)
    done, doctor = run(engine), run_cli_here("doctor", "--engine-dir", engine)
    assert (done.returncode, done.stdout, doctor.returncode) == (1, "", 1)
    error, hint = done.stderr.splitlines()[-2:]
    assert f"packed as {other} (for " in error
    assert f"the kernels here pack as {packing} (for " in error
    assert f"packed as {other}" in doctor.stdout + doctor.stderr
    assert run_cli_here(*follow(hint, engine)).returncode == 0
    assert generate(engine) == generate(folder)


def test_without_a_compiler_a_packed_engine_is_refused(
    folder: Path, engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    done, doctor = run(engine), run_cli_here("doctor", "--engine-dir", engine)
    assert (done.returncode, done.stdout, doctor.returncode) == (1, "", 1)
    error, hint = done.stderr.splitlines()[-2:]
    packing = read_json(engine / "config.json")["torch_config"]["packing"]
    assert f"packed as {packing} (for " in error
    assert "no C++ compiler" in error
    assert "take the engine's own copy" in hint
    assert run_cli_here(*follow(hint, engine)).returncode == 0
    assert run(engine).returncode == 0
    assert not (engine / PACKED_FOLDER).exists()


def test_on_a_gpu_a_packed_engine_is_refused(engine: Path) -> None:
    config = read_engine_config(engine)
    with pytest.raises(SpecDecError, match=f"packed as {config.packing} .*cuda reads none") as info:
        list_options(config, engine, torch.device("cuda"))
    assert info.value.hint.startswith("use --device cpu, or build it again for both: specdec build")
    assert run_cli_here(*follow(info.value.hint, engine)).returncode == 0
    options = list_options(read_engine_config(engine), engine, torch.device("cuda"))
    assert options["kernels"] is None


@pytest.mark.parametrize("version", [None, 1, 3, "two"])
def test_an_engine_of_another_format_is_refused(engine: Path, version: Any) -> None:
    """As those that held each matrix twice."""
    config = read_json(engine / "config.json")
    del config["torch_config"]["format"]
    write_json(engine / "config.json", config)
    if version is not None:
        change_config(engine, format=version)
    for done in (run(engine), run_cli_here("doctor", "--engine-dir", engine)):
        assert done.returncode == 1
        error, hint = done.stderr.splitlines()[-2:]
        assert (
            f"is an engine of format {version or 1!r}, this version of specdec reads format 2"
            in error
        )
    assert run_cli_here(*follow(hint, engine)).returncode == 0
    assert run(engine).returncode == 0
    (engine / "manifest.json").unlink()
    change_config(engine, format=1)
    assert "--checkpoint-dir=CHECKPOINT" in run(engine).stderr


def test_a_cached_engine_for_other_kernels_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = find_cache()
    assert kept is not None
    shutil.copytree(kept / "kernels", tmp_path / "cache" / "kernels")
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    words = ["generate", "--model-dir", PYCODE, "def add(", "--max-output-len", 4]
    first = run_cli_here(*words)
    assert first.returncode == 0, first.stderr
    (engine,) = (tmp_path / "cache" / "generate").glob("*/engine")
    set_packing(engine)
    done = run_cli_here(*words)
    assert (done.returncode, done.stdout) == (0, first.stdout), done.stderr
    assert "it is built again" in done.stderr
    assert "built again" not in run_cli_here(*words).stderr
    # The packing of a cached engine is looked at before it is taken and when it is loaded: the
    # kernels, which are loaded twice, pack their samples once.
    shapes, pack_matrix = [], MatrixKernels.pack_matrix

    def pack_and_count(kernels: MatrixKernels, weight: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(weight.shape))
        return pack_matrix(kernels, weight)

    monkeypatch.setattr(MatrixKernels, "pack_matrix", pack_and_count)
    monkeypatch.setattr("specdec.engine.packed.PACKINGS", {})
    assert run_cli_here(*words).returncode == 0
    assert shapes.count((2 * TILE + 6, 71)) == 1


def test_the_packing_is_told_by_what_kernels_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine(folder, device="cpu")
    kernels = engine.decoder.kernels
    assert kernels is not None
    own = hash_packing(kernels)
    assert hash_packing(kernels) == own == TensorFile(folder / PACKED).metadata["packing"]
    for name in ("pack_matrix", "pack_integers"):
        lay_out = kernels._functions[name]

        def lay_out_otherwise(*arguments: Any, lay_out: Any = lay_out) -> None:
            """Something lies elsewhere in what was packed, after what integers begin with."""
            lay_out(*arguments)
            ctypes.c_uint16.from_address(arguments[-1] + 80).value ^= 1

        monkeypatch.setitem(kernels._functions, name, lay_out_otherwise)
        assert hash_packing(kernels) != own
        monkeypatch.undo()
    monkeypatch.setattr("specdec.engine.packed.PACKING_VERSION", -1)  # another meaning
    assert hash_packing(kernels) != own
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


def test_files_of_two_builds_are_not_mixed(engine: Path) -> None:
    """Nor is a matrix that is there twice taken, or one that stands for nothing known."""
    change_config(engine, packing="another")
    assert "config.json says another" in run(engine).stderr
    change_config(engine, packing=None)
    assert "missing: " in run(engine).stderr
    change_config(engine, packing=TensorFile(engine / PACKED).metadata["packing"])
    portable = build_plain(Path(shutil.copytree(engine, engine.parent / "portable")))
    shutil.copyfile(portable / "weights.safetensors", engine / "weights.safetensors")
    assert f"which packed/{PACKED.name} has too" in run(engine).stderr


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"a.weight": ["float32", 0]}', '{"a.weight": ["float32", 2]}']
)
def test_a_file_says_what_its_matrices_stand_for(engine: Path, text: str) -> None:
    file = TensorFile(engine / PACKED)
    metadata = file.metadata | {"replaced": text}
    path = (engine / PACKED).with_suffix(".new")
    write_tensor_file(path, file.tensors, file.read, metadata, 64)
    path.replace(engine / PACKED)
    renew_sums(engine)
    assert "does not say which tensors its matrices stand for" in run(engine).stderr


def test_a_packed_matrix_that_cannot_be_one(engine: Path) -> None:
    """Kernels would read beyond what they take for larger than it is."""
    loaded = TorchEngine(engine, device="cpu")
    kernels = loaded.decoder.kernels
    assert kernels is not None
    weight = torch.zeros(5, 70, dtype=kernels.dtype)
    integers = IntegerMatrix(8, torch.zeros(6, 64, dtype=torch.int8), torch.ones(6, 1))
    packed, packed_integers = kernels.pack_matrix(weight), integers.pack(kernels)
    damaged = packed_integers.clone()
    damaged[8 * 6] ^= 1  # has input scales
    blocks = BlockMatrix(torch.zeros(40, 68, dtype=torch.uint8), torch.tensor([8] * 40).byte())
    packed_blocks = blocks.pack(kernels)
    for numbers, matrix in (
        (packed[:, :-1], weight), (packed_integers, weight), (packed.float(), weight),
        (packed, integers), (damaged, integers), (packed_integers[:-64], integers),
        (packed_blocks, integers), (packed_integers, blocks), (packed_blocks[:-64], blocks),
    ):  # fmt: skip
        with pytest.raises(SpecDecError, match="which is not a matrix"):
            take_packed(numbers, matrix, "a file", kernels)
    for numbers, matrix, shape in (
        (packed, weight, (5, 70)), (packed_integers, integers, (6, 64)),
        (packed_blocks, blocks, (40, 64)),
    ):  # fmt: skip
        taken = take_packed(numbers, matrix, "a file", kernels)
        assert (taken.numbers.data_ptr(), taken.shape) == (numbers.data_ptr(), shape)
    with pytest.raises(ValueError, match="of integers"):
        take_packed(packed_integers, integers, "a file", kernels).unpack()
    loaded.close()


@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize("number", [-1, 72, 2**31 - 1, -(2**31)])
def test_a_packed_order_beyond_its_inputs(engine: Path, number: int, has_scales: bool) -> None:
    """Kernels would fetch an input from anywhere in memory; lists fill lines of 64 bytes."""
    loaded = TorchEngine(engine, device="cpu")
    kernels = loaded.decoder.kernels
    assert kernels is not None
    order = torch.arange(71, -1, -1, dtype=torch.int32)
    scales = torch.full((72,), 0.5) if has_scales else None
    codes = torch.zeros(6, 72, dtype=torch.int8)
    matrix = IntegerMatrix(4, codes, torch.ones(12, 1), None, scales, order)
    packed = matrix.pack(kernels)
    take_packed(packed, matrix, "a file", kernels)
    start = 64 + (320 if has_scales else 0)
    assert torch.equal(packed[start : start + 288].view(torch.int32), order)
    for place in (0, 71):
        damaged = packed.clone()
        damaged[start : start + 288].view(torch.int32)[place] = number
        with pytest.raises(SpecDecError, match="which is not a matrix"):
            take_packed(damaged, matrix, "a file", kernels)
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
    assert generate(build_plain(folder)) == expected
