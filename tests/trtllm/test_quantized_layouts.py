"""Which quantized matrices a line of TensorRT-LLM loads: our plan and the double agree."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.build.backends.tensorrt_llm.pipeline import make_plan
from specdec.build.settings import BuildSettings
from specdec.checkpoint.config import read_checkpoint_config
from specdec.convert.config import adapt_config
from specdec.errors import SpecDecError
from specdec.files.reading import read_json, write_json
from specdec.trtllm.facts import load_facts
from tests.conftest import make_llama
from tests.engines import call
from tests.trtllm.double import H100, Refusal, build_engine, install_double


@pytest.fixture(autouse=True)
def one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = install_double(tmp_path / "double", "1.2", gpus=[H100])
    monkeypatch.setenv("PATH", environment["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)


def attempt(checkpoint: Path, *words: str, label: str = "1.2") -> None:
    build_engine(
        load_facts(label), f"{label}.0",
        ["--checkpoint_dir", str(checkpoint), "--output_dir", "engine", *words],
    )  # fmt: skip


# Flags of convert, line, what our plan and the double say: None where they take it.
LAYOUTS: list[tuple[list[Any], str, str | None, str | None]] = [
    (["nvfp4"], "1.2", None, None),
    (["int8_sq"], "0.14", None, None),
    (["int4_awq", "--group-size", 64], "1.2", None, None),
    (["int4_awq", "--group-size", 64], "0.14", None, None),
    (["int4_awq"], "1.2", None, None),
    (["w4a8_awq"], "1.2", None, None),
    (["int4_awq", "--group-size", 32], "1.2", "groups of 64 and 128, not of 32", "group size 32"),
    (
        ["w4a8_awq", "--group-size", 64, "--tp-size", 2], "1.2", "multiples of 256, tp_size 2",
        "not of whole tiles",
    ),
    (["nvfp4"], "0.14", "0.14 cannot load NVFP4", "not a valid QuantAlgo"),
    (["fp8_pc_pt"], "0.14", "only the MLPs of the inner layers", "not a valid QuantAlgo"),
]  # fmt: skip


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[Any]], Path]:
    """Checkpoints by their flags, of a model in whole tiles of 128; for 1.2, each made once."""
    parent = tmp_path_factory.mktemp("quantized")
    target = make_llama(parent, hidden=128, intermediate=384, heads=8, kv_heads=4, layers=1)
    rows = parent / "rows.jsonl"
    rows.write_text("".join(f'{{"input_ids": [5, {i}, 9, 30, 2]}}\n' for i in range(4)))

    def get(flags: list[Any]) -> Path:
        folder = parent / "-".join(map(str, flags))
        if not folder.exists():
            data = [] if flags[0] == "fp8_pc_pt" else ["--calibration-data", rows]
            call("convert", "--model-dir", target, "--output-dir", folder, "--quantization",
                 *flags, *data)  # fmt: skip
        return folder

    return get


@pytest.mark.thorough
@pytest.mark.parametrize(("flags", "label", "refusal", "match"), LAYOUTS)
def test_what_the_line_loads_of_quantized_matrices(
    quantized: Callable[[list[Any]], Path],
    tmp_path: Path,
    flags: list[Any],
    label: str,
    refusal: str | None,
    match: str | None,
) -> None:
    checkpoint = quantized(flags)
    if label == "0.14":  # as convert writes it, or would
        config = adapt_config(read_json(checkpoint / "config.json"), label)
        checkpoint = tmp_path / "copy"
        shutil.copytree(quantized(flags), checkpoint)
        write_json(checkpoint / "config.json", config)
    settings = BuildSettings(
        checkpoint_dir=checkpoint, output_dir=tmp_path / "engine", trtllm_version=label
    )
    parsed = read_checkpoint_config(checkpoint)
    if refusal is None:
        make_plan(settings, load_facts(label), parsed, None)
        attempt(checkpoint, "--kv_cache_type", "paged", label=label)
        return
    with pytest.raises(SpecDecError, match=refusal):
        make_plan(settings, load_facts(label), parsed, None)
    with pytest.raises(Refusal, match=str(match)):
        attempt(checkpoint, label=label)


@pytest.mark.parametrize("flags", [["nvfp4"], ["fp8_pc_pt"], ["int8_sq"], ["w4a8_awq"]])
def test_the_torch_backend_says_what_it_does_not_execute(
    quantized: Callable[[list[Any]], Path], tmp_path: Path, flags: list[Any]
) -> None:
    with pytest.raises(SpecDecError, match="which the torch backend does not execute"):
        call("build", "--checkpoint-dir", quantized(flags), "--output-dir", tmp_path / "e",
             "--backend", "torch")  # fmt: skip
