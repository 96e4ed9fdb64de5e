"""Real engines of tiny models, and what a build refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from specdec.decode.engine import open_engine
from specdec.doctor.engine import check_engine
from specdec.doctor.machine import describe_machine
from specdec.errors import SpecDecError
from specdec.files.reading import read_json, write_json
from specdec.trt import library
from specdec.trt.engine import read_network_config
from tests.conftest import (
    make_dflash_drafter,
    make_drafter,
    make_eagle_drafter,
    make_llama,
    make_medusa_heads,
    make_mtp_head,
)
from tests.engines import call, run_cli_here, run_here
from tests.parity.models import make_model
from tests.trt.networks import NEEDS_TENSORRT, build_here, run_networks
from tests.trtllm.double import H100

pytestmark = NEEDS_TENSORRT


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    model = make_model(folder / "model", "LlamaForCausalLM-plain", dtype="float16")
    call("convert", "--model-dir", model, "--output-dir", folder / "checkpoint")
    return folder / "checkpoint"


def build(checkpoint: Path, folder: Path, *flags: object) -> Any:
    return run_cli_here(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", folder, "--backend", "tensorrt",
        *flags,
    )  # fmt: skip


def test_real_engines(checkpoint: Path, tmp_path: Path) -> None:
    done = build(
        checkpoint, tmp_path / "engine", "--compute-capability", "8.0,8.9", "--json",
        "--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 4,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["compute_capabilities"] == ["8.0", "8.9"]
    config, networks = read_network_config(tmp_path / "engine")
    assert config.build.max_draft_len == 4
    assert networks.compute_capabilities == ["8.0", "8.9"]
    for name in ("rank0.engine", "head0.engine"):
        assert (tmp_path / "engine" / name).stat().st_size > 10_000
    with pytest.raises(SpecDecError, match="runs on a GPU"):
        open_engine(tmp_path / "engine", device="cpu")


MAKERS: dict[str, Any] = {
    "redrafter": make_drafter, "medusa": make_medusa_heads, "eagle": make_eagle_drafter
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.thorough
@pytest.mark.parametrize("method", MAKERS)
def test_real_engines_of_drafters(method: str, tmp_path: Path) -> None:
    target = make_llama(tmp_path, layers=2, dtype="float16")
    more = {"version": 3} if method == "eagle" else {}
    drafter = MAKERS[method](tmp_path, dtype="float16", **more)
    call(
        "convert", "--model-dir", target, "--drafter-model-dir", drafter, "--output-dir",
        tmp_path / "checkpoint",
    )  # fmt: skip
    done = build(
        tmp_path / "checkpoint", tmp_path / "engine", "--compute-capability", "8.0,8.9", "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["method"] == method
    assert "drafter0.engine" in report["networks"]
    for name in report["networks"]:
        assert (tmp_path / "engine" / name).stat().st_size > 10_000


@pytest.mark.parametrize("flags", [("int8",), ("int4", "--group-size", 32)])
def test_real_engines_of_integers(flags: tuple[object, ...], tmp_path: Path) -> None:
    call(
        "convert", "--model-dir", make_llama(tmp_path, layers=1, dtype="float16", intermediate=96),
        "--output-dir", tmp_path / "checkpoint",
    )  # fmt: skip
    done = build(
        tmp_path / "checkpoint", tmp_path / "engine", "--compute-capability", "8.0,8.9",
        "--quantization", *flags,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


TURING, ADA = (("--compute-capability", each) for each in ("7.5", "8.9"))


def test_refusals(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is built, with the fact and the remedy."""
    from specdec.build.backends import tensorrt

    def refuse(folder: Path, *flags: object) -> str:
        done = build(folder, tmp_path / "engine", *flags)
        assert done.returncode in (1, 2)
        assert not (tmp_path / "engine").exists()
        return str(done.stderr)

    def convert(name: str, *flags: object, dtype: str = "float32") -> Path:
        folder = tmp_path / f"{name}{len(flags)}"
        model = make_model(tmp_path / f"{name}-hf{len(flags)}", name, dtype=dtype)
        call("convert", "--model-dir", model, "--output-dir", folder, *flags)
        return folder

    assert "no GPU is visible" in refuse(checkpoint)
    assert "not for 9.0" in refuse(checkpoint, "--compute-capability", "9.0")
    with monkeypatch.context() as patch:
        patch.setattr(tensorrt, "list_gpus", lambda: ((H100,), None))
        told = refuse(checkpoint)
        assert f"error: {H100.name} has compute capability 9.0, tensorrt_rtx" in told
        assert "builds for 7.5, 8.0" in told
        assert "hint: use tensorrt 10.15 or newer" in told
        assert "or --backend torch" in told
    with monkeypatch.context() as patch:
        full = library.Library("tensorrt 10.15", [])
        patch.setattr(tensorrt, "describe_library", lambda trt: full)
        assert "and none is visible" in refuse(checkpoint, *ADA)
    assert "--optimize has no meaning for the tensorrt" in refuse(checkpoint, "--optimize", "none")
    assert "is a mixture of experts" in refuse(convert("MixtralForCausalLM-plain"), *ADA)
    split = convert("LlamaForCausalLM-plain", "--tp-size", 2)
    assert "sums over ranks from compute capability 8.0" in refuse(split, *TURING)
    with mock.patch.object(tensorrt, "can_meet_ranks", return_value=False):
        assert "tp_size=2, and tensorrt_rtx" in refuse(split, *ADA)
    half = convert("LlamaForCausalLM-plain", dtype="bfloat16")
    assert "dtype=bfloat16" in refuse(half, "--compute-capability", "7.5,8.9")
    monkeypatch.setattr(tensorrt, "read_memory", lambda key: 1000)
    assert "are available" in refuse(checkpoint, *ADA)


def test_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_package", lambda: None)
    with pytest.raises(SpecDecError, match="neither tensorrt_rtx nor tensorrt is installed"):
        library.load_tensorrt.__wrapped__()


def test_compute_capability_is_for_this_backend(checkpoint: Path, tmp_path: Path) -> None:
    done = run_cli_here(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", tmp_path / "engine",
        "--compute-capability", "8.9",
    )  # fmt: skip
    assert "has no meaning for the torch backend" in done.stderr


def test_drafters_without_a_network_are_refused(tmp_path: Path) -> None:
    target = make_llama(tmp_path, layers=3)
    for name, drafter in {
        "DFlash": make_dflash_drafter(tmp_path),
        "MTP": make_mtp_head(tmp_path, target),
        "P-EAGLE": make_eagle_drafter(tmp_path, version=3, mask_token_id=9),
    }.items():
        call(
            "convert", "--model-dir", target, "--drafter-model-dir", drafter, "--output-dir",
            tmp_path / name,
        )  # fmt: skip
        done = build(tmp_path / name, tmp_path / "engine", "--compute-capability", "8.9")
        assert f"has no network of {name} drafters" in done.stderr


def test_doctor_tells_why_it_cannot_run(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    build_here(checkpoint, folder)
    done = run_cli_here("doctor", "--engine-dir", folder)
    assert done.returncode == 1
    assert "it runs on a GPU, and none is visible" in done.stderr
    on_hopper = check_engine(folder, describe_machine() | {"gpus": [dataclasses.asdict(H100)]})
    (problem,) = on_hopper["problems"]
    assert f"was built for compute capability 8.9, and {H100.name} has 9.0" in problem["fact"]
    assert "use tensorrt 10.15 or newer" in problem["remedy"]
    (folder / "head0.engine").unlink()
    done = run_cli_here("doctor", "--engine-dir", folder, "--json")
    assert any("lacks head0.engine" in each["fact"] for each in
               json.loads(done.stdout)["engine"]["problems"])  # fmt: skip


@pytest.mark.parametrize("change", [{"library": None}, {"sizes": {"rows": 2}}])
def test_damaged_configs_are_refused(
    change: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "engine"
    build_here(checkpoint, folder)
    document = read_json(folder / "config.json")
    document["tensorrt_config"] |= change
    write_json(folder / "config.json", document)
    with pytest.raises(SpecDecError, match="is not what this version of specdec writes"):
        read_network_config(folder)


def test_commands_take_an_engine_folder(checkpoint: Path, tmp_path: Path) -> None:
    """specdec-run and verify go through the same doors as with the torch backend."""
    folder, model = tmp_path / "engine", tmp_path / "model"
    make_model(model, "LlamaForCausalLM-plain")
    call("convert", "--model-dir", model, "--output-dir", tmp_path / "checkpoint")
    networks = build_here(tmp_path / "checkpoint", folder)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input_ids": [5, 9, 77]}\n')
    with run_networks(networks):
        report = run_here([
            "--engine-dir", str(folder), "--max-output-len", "7", "--input-file", str(prompts),
        ])  # fmt: skip
        verdict = run_cli_here(
            "verify", "--engine-dir", folder, "--model-dir", model, "--prompts", prompts,
            "--max-output-len", 7, "--json",
        )  # fmt: skip
    assert report["stats"]["backend"] == "tensorrt"
    assert len(report["outputs"][0]["output_ids"]) == 7
    assert json.loads(verdict.stdout)["verdict"] == "exact", verdict.stderr
