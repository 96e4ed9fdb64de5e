"""The stream of bytes: the same in chunks of any size, checked for flaws, bounded in memory."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.convert import pipeline, stream
from specdec.convert import plan as plan_module
from specdec.convert.finite import FlawCounter, Flaws, find_limit
from specdec.errors import SpecDecError
from specdec.files import tensor_file
from specdec.files.casts import FLOATS
from specdec.files.reading import hash_file
from specdec.files.tensor_file import DTYPES, TensorInfo, encode_header
from tests.conftest import ROOT, read_error_lines
from tests.convert.conftest import Converter, Source
from tests.convert.golden_models import read_tensors, rewrite

MODEL = "llama_mha_f32"  # one file, float32: numpy can rewrite it
HEAD = "lm_head.weight"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def read_all(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"
    }


def change(source: Path, folder: Path, edit: Any) -> Path:
    """A copy of a golden input with changed tensors."""
    shutil.copytree(source, folder)
    tensors = read_tensors(folder / "model.safetensors")
    edit(tensors)
    rewrite(folder / "model.safetensors", tensors)
    return folder


def shrink(monkeypatch: pytest.MonkeyPatch, chunk: int, block: int) -> None:
    """Let every loop of the stream go round many times for a tiny model."""
    for module in (plan_module, stream):
        monkeypatch.setattr(module, "OUTPUT_BLOCK_BYTES", chunk)
    for module in (tensor_file, stream):
        monkeypatch.setattr(module, "BLOCK_BYTES", block)
    monkeypatch.setattr(stream, "SYNC_BYTES", 3 * chunk)
    monkeypatch.setattr(stream, "WRITES_AHEAD", 3)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"tp_size": 2, "use_parallel_embedding": True, "embedding_sharding_dim": 1},
        {"tp_size": 2, "dtype": "float16"},
        {"drafter_model_dir": "drafter_A_rnn_e96", "tp_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(("chunk", "block"), [(1000, 64), (8192, 1 << 20)])
def test_bytes_do_not_depend_on_the_chunks(
    flags: dict[str, Any], chunk: int, block: int, source: Source, convert: Converter,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if "drafter_model_dir" in flags:
        flags = flags | {"drafter_model_dir": source(flags["drafter_model_dir"])}
    flags = flags | {"model_dir": source("llama_gqa")}
    expected = read_all(convert(**flags, output_dir=tmp_path / "expected", workers=1))
    shrink(monkeypatch, chunk, block)
    monkeypatch.setattr(tensor_file, "SPARSE_READ_BYTES", 16)
    found = convert(**flags, workers=3)
    assert read_all(found) == expected
    manifest = json.loads((found / "manifest.json").read_text())
    for entry in manifest["outputs"]:
        assert entry["sha256"] == hash_file(found / entry["path"])
    for entry in manifest["sources"]:
        assert entry["sha256"] == hash_file(Path(entry["path"]))
    assert set(manifest["libraries"]) >= {"python", "numpy", "safetensors"}


def test_base_checkpoint_is_copied_by_the_kernel(
    source: Source, convert: Converter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte of it is made into an array."""
    base = convert(model_dir=source("llama_gqa"), output_dir=tmp_path / "base", tp_size=2)
    flags: dict[str, Any] = {
        "base_model_checkpoint_dir": base, "drafter_model_dir": source("drafter_A_rnn_e96"),
    }  # fmt: skip
    expected = read_all(convert(**flags, output_dir=tmp_path / "expected"))

    read_paths = []
    real = tensor_file.TensorFile.read_block

    def note(self: tensor_file.TensorFile, *args: Any) -> Any:
        read_paths.append(self.path)
        return real(self, *args)

    monkeypatch.setattr(tensor_file.TensorFile, "read_block", note)
    monkeypatch.setattr(tensor_file.TensorFile, "read", None)
    assert read_all(convert(**flags)) == expected
    assert not [path for path in read_paths if path.is_relative_to(base)]
    assert read_paths, "the drafter is cast"


# ---- Copying.


@pytest.mark.parametrize("kind", ["whole", "in bits", "never", "not here", "no such call"])
def test_copy_range(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(os, "copy_file_range", None)

    def copy(source: int, target: int, count: int, *offsets: int) -> int:
        if kind == "not here":
            raise OSError(errno.EXDEV, "no")
        if kind == "never":
            return 0
        assert real is not None
        return int(real(source, target, min(count, 7 if kind == "in bits" else count), *offsets))

    if kind == "no such call" or real is None:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    else:
        monkeypatch.setattr(os, "copy_file_range", copy)
    monkeypatch.setattr(stream, "BLOCK_BYTES", 16)
    data = bytes(range(100))
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(b"x" * 120)
    with (tmp_path / "a").open("rb") as a, (tmp_path / "b").open("r+b") as b:
        stream.copy_range(tmp_path / "a", a.fileno(), 10, b.fileno(), 30, 60)
        assert (tmp_path / "b").read_bytes() == b"x" * 30 + data[10:70] + b"x" * 30
        with pytest.raises(SpecDecError, match="a ends at byte 100: it was shortened"):
            stream.copy_range(tmp_path / "a", a.fileno(), 90, b.fileno(), 0, 20)


@pytest.mark.parametrize("flags", [{}, {"dtype": "float16"}, {"tp_size": 2}], ids=str)
def test_source_that_is_shortened_meanwhile(
    flags: dict[str, Any], source: Source, convert: Converter, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A mapping of it would end the process."""
    folder = shutil.copytree(source(MODEL), tmp_path / "copy")
    real = stream.run_ahead

    def cut_first(*args: Any) -> Any:
        os.truncate(folder / "model.safetensors", 50_000)
        return real(*args)

    monkeypatch.setattr(stream, "run_ahead", cut_first)
    error = convert.fail(model_dir=folder, **flags)
    assert f"{folder / 'model.safetensors'} ends at byte 50000" in error.message


@pytest.mark.parametrize(
    "moment",
    [(pipeline, "parse_checkpoint_config"), (pipeline, "check_free_space"), (stream, "run_ahead")],
)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_source_that_is_changed_meanwhile(
    name: str,
    moment: tuple[Any, str],
    source: Source,
    convert: Converter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the moment on in which its header was read."""
    folder = shutil.copytree(source(MODEL), tmp_path / "copy")
    module, function = moment
    real = getattr(module, function)

    def touch_first(*args: Any) -> Any:
        os.utime(folder / name, ns=(1, 1))
        return real(*args)

    monkeypatch.setattr(module, function, touch_first)
    error = convert.fail(model_dir=folder)
    assert error.message == f"{folder / name} was changed while it was read"


def test_full_disk(source: Source, tmp_path: Path) -> None:
    """A limit on a file's size fails a write as a full disk does, at any byte."""
    output = tmp_path / "out"
    words = ["convert", "--model-dir", str(source(MODEL)), "--output-dir", str(output)]

    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 200; exec "$@"', "sh", sys.executable, "-m", "specdec", *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    error, hint = read_error_lines(done.stderr)
    assert error == f"{output} cannot be written: {os.strerror(errno.EFBIG)}"
    assert "nothing half-written was left" in hint
    assert list(tmp_path.iterdir()) == []


# ---- Memory.

PEAK = """
import json, sys
from pathlib import Path
from specdec.convert.pipeline import convert_model
from specdec.convert.settings import ConvertSettings
model, output, dtype = sys.argv[1:]
convert_model(ConvertSettings(model_dir=model, output_dir=Path(output), tp_size=2,
              dtype=dtype, workers=2, allow_zeros=True))
with open("/proc/self/status") as status:
    print(next(line for line in status if line.startswith("VmHWM")).split()[1])
"""


def make_hollow(source: Path, folder: Path, *, num_layers: int) -> Path:
    """A model with a hole in place of weights, 20 MB a layer."""
    hidden, inner = 1024, 2048
    config = json.loads((source / "config.json").read_text())
    config |= {
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 8,
        "num_key_value_heads": 8, "num_hidden_layers": num_layers, "torch_dtype": "bfloat16",
    }  # fmt: skip
    config.pop("head_dim", None)
    shapes = {
        "model.embed_tokens": (128, hidden),
        "lm_head": (128, hidden),
        "model.norm": (hidden,),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{x}_proj": (hidden, hidden) for x in "qkvo"}
        shapes |= {f"{prefix}.mlp.{x}_proj": (inner, hidden) for x in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj"] = (hidden, inner)
        shapes |= {f"{prefix}.{x}_layernorm": (hidden,) for x in ("input", "post_attention")}
    infos = {f"{name}.weight": TensorInfo("bfloat16", shape) for name, shape in shapes.items()}
    header = encode_header(infos, {"format": "pt"})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(header)
    num_bytes = sum(info.num_bytes for info in infos.values())
    os.truncate(folder / "model.safetensors", len(header) + num_bytes)
    return folder


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="tells the peak on Linux alone")
@pytest.mark.parametrize("dtype", ["float16", "auto"])
def test_memory_does_not_grow_with_the_model(dtype: str, source: Source, tmp_path: Path) -> None:
    """Whether rows are cast or copied; mapped pages of the source would count too."""
    peaks = {}
    for num_layers in (1, 5):
        model = make_hollow(source(MODEL), tmp_path / f"model{num_layers}", num_layers=num_layers)
        done = subprocess.run(
            [sys.executable, "-c", PEAK, model, tmp_path / f"out{num_layers}", dtype],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        peaks[num_layers] = int(done.stdout) / 1024
        shutil.rmtree(tmp_path / f"out{num_layers}")
    assert peaks[5] < 200
    assert peaks[5] - peaks[1] < 25, "80 MB more of model"


@pytest.mark.parametrize(
    ("dtype", "buffers"), [("float32", 0), ("bfloat16", 4 * 2 * 24576), ("float16", 4 * 2 * 24576)]
)
def test_dry_run_tells_the_buffers(
    dtype: str, buffers: int, source: Source, convert: Converter
) -> None:
    """The largest tensor, qkv, has 192 x 64 x 2 bytes in 16 bits, and comes from 32."""
    assert not convert(model_dir=source(MODEL), dtype=dtype, dry_run=True, workers=3).exists()
    assert convert.report["buffer_bytes"] == 3 * (buffers + 2 * stream.BLOCK_BYTES)
    assert convert.report["hash_seconds"] >= 0


# ---- Weights that are no numbers.


def list_patterns(dtype: str) -> np.ndarray[Any, Any]:
    """Every pattern of a narrow type; special and random ones of a wide type."""
    width = np.dtype(DTYPES[dtype][1]).itemsize
    if width <= 2:
        return np.arange(1 << (8 * width), dtype=f"u{width}")
    generator = np.random.default_rng(0)
    patterns = generator.integers(0, 1 << (8 * width), 20_000, f"u{width}", endpoint=False)
    edges = [np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, -65520, 3.3895e38, 3.39e38, 3.4e38]
    with np.errstate(over="ignore"):
        special = np.array(edges, DTYPES[dtype][1]).view(patterns.dtype)
    near = [special + patterns.dtype.type(step) for step in range(4)]
    near += [special - patterns.dtype.type(step) for step in range(1, 4)]
    return np.concatenate([patterns, *near])


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_flaws_are_what_torch_would_write(
    dtype: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec.convert import finite

    monkeypatch.setattr(finite, "SEARCH_ITEMS", 1000)
    patterns = list_patterns(dtype)
    values = torch.from_numpy(patterns.view(np.uint8)).view(getattr(torch, dtype))
    written = values.to(getattr(torch, target))
    expected = Flaws(
        nan=int(values.isnan().sum()),
        inf=int(values.isinf().sum()),
        overflow=int((written.isinf() & values.isfinite()).sum()),
    )
    counter = FlawCounter(dtype, [target])
    counter.add(patterns.view(DTYPES[dtype][1]))
    assert counter.flaws == expected
    assert expected.nan > 0
    fewest = min(FLOATS.index(dtype), 1) if target == "float16" and dtype != "float16" else 0
    assert expected.overflow >= fewest
    clean = FlawCounter(dtype, [target])
    clean.add(patterns[np.isfinite(written.float().numpy())])
    assert clean.flaws == Flaws()


def test_limit_of_a_cast_to_float16_is_65520() -> None:
    limit = np.array([find_limit("float32", "float16")], np.uint32).view(np.float32)
    assert limit == 65520


def test_nan_of_float8_and_whole_numbers() -> None:
    counter = FlawCounter("float8_e4m3fn", ["float8_e4m3fn"])
    counter.add(list_patterns("float8_e4m3fn"))
    assert counter.flaws == Flaws(nan=2)
    whole = FlawCounter("int8", ["int8"])
    whole.add(list_patterns("int8"))
    assert whole.flaws == Flaws()


def spoil(tensors: dict[str, Any]) -> None:
    tensors[Q_PROJ][3, 1:4] = np.nan
    tensors[Q_PROJ][5, 0] = -np.inf
    tensors[NORM][7] = np.inf


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nonfinite_weights_are_refused_or_counted(
    tp_size: int, dtype: str, source: Source, convert: Converter, tmp_path: Path,
    log: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    flags = {
        "model_dir": change(source(MODEL), tmp_path / "spoilt", spoil),
        "tp_size": tp_size, "dtype": dtype,
    }  # fmt: skip
    error = convert.fail(**flags)
    assert error.message == (
        "2 tensors with weights that are no finite numbers:"
        f" {Q_PROJ} (3 NaN, 1 infinite), {NORM} (1 infinite)"
    )
    assert "--allow-nonfinite" in error.hint
    with log.at_level(logging.WARNING, "specdec"):
        found = convert(**flags, allow_nonfinite=True)
    assert error.message in log.text
    manifest = json.loads((found / "manifest.json").read_text())
    assert manifest["nonfinite"] == {
        Q_PROJ: {"nan": 3, "inf": 1, "overflow": 0}, NORM: {"nan": 0, "inf": 1, "overflow": 0},
    }  # fmt: skip
    rank = read_tensors(found / "rank0.safetensors")["transformer.ln_f.weight"]
    assert rank.view(np.uint8).size == 64 * np.dtype(DTYPES[dtype][1]).itemsize


def test_flaws_of_a_base_checkpoint_are_summed_over_its_ranks(
    source: Source, convert: Converter, tmp_path: Path
) -> None:
    base = convert(
        model_dir=change(source(MODEL), tmp_path / "spoilt", spoil), tp_size=2,
        output_dir=tmp_path / "base", allow_nonfinite=True,
    )  # fmt: skip
    error = convert.fail(
        base_model_checkpoint_dir=base, drafter_model_dir=source("drafter_A_rnn_e96")
    )
    assert "transformer.ln_f.weight (2 infinite)" in error.message


def test_numbers_too_large_for_the_type_are_refused(
    source: Source, convert: Converter, tmp_path: Path
) -> None:
    def enlarge(tensors: dict[str, Any]) -> None:
        tensors[HEAD][0, :2] = 65520, -1e30
        tensors[HEAD][1, 0] = 65519.99

    folder = change(source(MODEL), tmp_path / "large", enlarge)
    convert(model_dir=folder, dtype="bfloat16", output_dir=tmp_path / "fits")
    error = convert.fail(model_dir=folder, dtype="float16")
    assert f"{HEAD} (2 too large); too large means: for float16" in error.message
    assert "--dtype of wider range" in error.hint
    convert(model_dir=folder, dtype="float16", allow_nonfinite=True)
    written = read_tensors(convert.output / "rank0.safetensors")[HEAD].view(np.float16)
    assert np.isinf(written).sum() == 2


def test_weights_that_are_not_written_may_be_anything(
    source: Source, convert: Converter, tmp_path: Path
) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.full(8, np.nan, np.float32)

    convert(model_dir=change(source(MODEL), tmp_path / "extra", add))


def test_flaws_of_a_torch_file_are_found(
    source: Source, convert: Converter, tmp_path: Path
) -> None:
    name = "drafter_A_rnn_e96"
    folder = change(source(name), tmp_path / "drafter", lambda t: None)
    tensors = read_tensors(folder / "model.safetensors")
    tensors["rnn_u.weight"][0, 0] = np.nan
    torch.save({k: torch.from_numpy(v) for k, v in tensors.items()}, folder / "model.pt")
    (folder / "model.safetensors").unlink()
    error = convert.fail(model_dir=source(MODEL), drafter_model_dir=folder)
    assert "1 tensor with weights that are no finite numbers: rnn_u.weight (1 NaN)" in error.message
