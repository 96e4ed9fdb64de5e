"""Engines of several ranks: a file each, the drafter put together again, and what is refused."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.errors import SpecDecError
from specdec.files.reading import read_json, write_json
from specdec.files.tensor_file import TensorFile, TensorInfo, write_tensor_file
from specdec.model.quantization import FLOAT8, SCALES
from tests.conftest import ROOT, make_drafter, make_llama, make_medusa_heads
from tests.engines import call

GOLDEN = ROOT / "tests/golden/modelopt/trtllm/llama-fp8-tp2"
Convert = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """Checkpoints of a target of 131 tokens, which no number of ranks here divides."""
    parent = tmp_path_factory.mktemp("ranks")
    target = make_llama(parent, vocab=131)
    flags: dict[str, tuple[object, ...]] = {
        "plain": (),
        "redrafter": ("--drafter-model-dir", make_drafter(parent, vocab=131, exit_dim=96)),
        "medusa": ("--medusa-model-dir", make_medusa_heads(parent, vocab=131)),
    }

    @functools.cache
    def make(method: str, tp_size: int) -> Path:
        folder = parent / f"{method}-{tp_size}"
        call(
            "convert", "--model-dir", target, *flags[method], "--output-dir", folder,
            "--tp-size", tp_size,
        )  # fmt: skip
        return folder

    return make


def build(checkpoint: Path, engine: Path, *flags: object) -> Path:
    call(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", engine, "--optimize", "none",
        *flags,
    )  # fmt: skip
    return engine


def read_all(path: Path) -> dict[str, Any]:
    file = TensorFile(path)
    return {name: file.read(name) for name in file.tensors}


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("method", ["redrafter", "medusa"])
def test_files_of_an_engine(method: str, tp_size: int, convert: Convert, tmp_path: Path) -> None:
    checkpoint = convert(method, tp_size)
    engine = build(checkpoint, tmp_path / "engine")
    ranks = [f"rank{rank}.safetensors" for rank in range(tp_size)]
    files = {"config.json", "manifest.json", "drafter.safetensors", *ranks}
    assert {path.name for path in engine.iterdir()} == files
    manifest = read_json(engine / "manifest.json")
    sources = [Path(entry["path"]).name for entry in manifest["sources"]]
    assert sources == ["config.json", *ranks]
    for name in ranks:
        part, source = read_all(engine / name), read_all(checkpoint / name)
        stacked = [source[f"transformer.layers.1.mlp.{n}.weight"] for n in ("fc", "gate")]
        np.testing.assert_array_equal(
            part["transformer.layers.1.mlp.gate_up.weight"], np.concatenate(stacked)
        )
        assert part["lm_head.weight"].shape == (-(-131 // tp_size), 64)
        assert not any("drafter" in key or "medusa" in key for key in part)
        for key in set(part) & set(source):
            np.testing.assert_array_equal(part[key], source[key])
    whole = read_all(build(convert(method, 1), tmp_path / "one") / "weights.safetensors")
    drafter = read_all(engine / "drafter.safetensors")
    assert set(drafter) == {key for key in whole if not key.startswith(("transformer", "lm_head"))}
    for key, array in drafter.items():
        np.testing.assert_array_equal(array, whole[key])


def test_the_plan_names_the_files(convert: Convert, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    checkpoint = convert("plain", 2)
    engine = checkpoint.parent / "unwritten"
    build(checkpoint, engine, "--dry-run", "--json")
    plan = json.loads(capsys.readouterr().out)
    assert plan["weight_files"] == ["rank0.safetensors", "rank1.safetensors"]
    assert not engine.exists()


def test_damaged_sets_of_files_are_refused(convert: Convert, tmp_path: Path) -> None:
    source = convert("plain", 2)

    def expect(match: str, change: Callable[[Path], object]) -> None:
        folder = tmp_path / "checkpoint"
        shutil.copytree(source, folder)
        change(folder)
        with pytest.raises(SpecDecError, match=match):
            build(folder, tmp_path / "engine")
        assert not (tmp_path / "engine").exists()
        shutil.rmtree(folder)

    def drop_bias(folder: Path) -> None:
        file = TensorFile(source / "rank1.safetensors")
        kept = {n: t for n, t in file.tensors.items() if n != "transformer.ln_f.weight"}
        write_tensor_file(folder / "rank1.safetensors", kept, file.read)

    expect("tp_size=2 but lacks rank1", lambda f: (f / "rank1.safetensors").unlink())
    expect("tp_size=2 but also holds rank2", lambda f: (f / "rank2.safetensors").touch())
    expect(r"rank1\.safetensors does not hold .* missing: transformer\.ln_f\.weight", drop_bias)
    expect(
        r"rank1\.safetensors does not hold .* misshapen",
        lambda f: shutil.copy(convert("plain", 4) / "rank1.safetensors", f),
    )


def test_ranks_must_agree_on_what_is_fp8(tmp_path: Path) -> None:
    """An empty list of excluded modules leaves open whether the head is FP8."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN, folder)
    config = read_json(folder / "config.json")
    config["quantization"]["exclude_modules"] = []
    write_json(folder / "config.json", config)
    engine = build(folder, tmp_path / "engine")
    assert {path.name for path in engine.glob("*.safetensors")} == {
        "rank0.safetensors", "rank1.safetensors",
    }  # fmt: skip

    file = TensorFile(GOLDEN / "rank1.safetensors")
    shape = file.tensors["lm_head.weight"].shape
    changed = {
        "lm_head.weight": (TensorInfo(FLOAT8, shape), np.zeros(shape, np.uint8)),
        **{f"lm_head.{kind}": (TensorInfo("float32", (1,)), np.ones(1, "f4")) for kind in SCALES},
    }
    infos = dict(file.tensors) | {name: info for name, (info, _) in changed.items()}
    write_tensor_file(
        folder / "rank1.safetensors", infos,
        lambda name: changed[name][1] if name in changed else file.read(name),
    )  # fmt: skip
    with pytest.raises(SpecDecError, match=r"which linears are quantized: lm_head\.weight"):
        build(folder, tmp_path / "other")
