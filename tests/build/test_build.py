"""specdec-build: the engine folder, the limits checked together, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.build.backends import embedded
from specdec.errors import SpecDecError
from specdec.files.reading import hash_file, read_json, write_json
from specdec.files.tensor_file import TensorFile, write_tensor_file
from tests.conftest import make_drafter, make_llama, read_error_lines
from tests.engines import call, run_cli_here


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("build")
    target, drafter = make_llama(parent), make_drafter(parent, exit_dim=96)
    call(
        "convert", "--model-dir", target, "--drafter-model-dir", drafter,
        "--output-dir", parent / "ckpt", "--redrafter-num-beams", 3,
        "--redrafter-draft-len-per-beam", 4,
    )  # fmt: skip
    return parent / "ckpt"


@pytest.fixture(scope="module")
def plain_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("plain")
    call("convert", "--model-dir", make_llama(parent), "--output-dir", parent / "ckpt")
    return parent / "ckpt"


def copy_checkpoint(source: Path, folder: Path, **config: Any) -> Path:
    folder.mkdir()
    for name in ("config.json", "rank0.safetensors"):
        (folder / name).write_bytes((source / name).read_bytes())
    write_json(folder / "config.json", {**read_json(folder / "config.json"), **config})
    return folder


def expect_refusal(match: str, *args: object) -> None:
    with pytest.raises(SpecDecError, match=match):
        call("build", *args)


def test_engine_folder(checkpoint: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    flags = "--packed-weights", "disable"
    call("build", "--checkpoint-dir", checkpoint, "--output-dir", engine, *flags)
    config = read_json(engine / "config.json")
    assert set(config) >= {"version", "backend", "pretrained_config", "build_config"}
    assert config["backend"] == "torch"
    assert config["pretrained_config"] == read_json(checkpoint / "config.json")
    build = config["build_config"]
    assert build["max_draft_len"] == 12
    assert build["max_seq_len"] == 512
    assert build["max_input_len"] == 511
    assert build["speculative_decoding_mode"] == "explicit_draft_tokens"
    source, weights = (
        TensorFile(checkpoint / "rank0.safetensors"),
        TensorFile(engine / "weights.safetensors"),
    )
    stacked = weights.read("transformer.layers.1.mlp.gate_up.weight")
    parts = [source.read(f"transformer.layers.1.mlp.{n}.weight") for n in ("fc", "gate")]
    np.testing.assert_array_equal(stacked, np.concatenate(parts))
    for name in set(weights.tensors) & set(source.tensors):
        np.testing.assert_array_equal(weights.read(name), source.read(name))
    manifest = read_json(engine / "manifest.json")
    outputs = {entry["path"]: entry["sha256"] for entry in manifest["outputs"]}
    assert outputs == {
        path.relative_to(engine).as_posix(): hash_file(path)
        for path in engine.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    assert {Path(entry["path"]).name for entry in manifest["sources"]} == {
        "config.json",
        "rank0.safetensors",
    }
    assert not list(tmp_path.glob(".*")), "nothing half-written is left"


def test_dry_run_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    done = run_cli_here(
        "build", "--checkpoint_dir", checkpoint, "--output_dir", tmp_path / "engine", "--dry-run",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["dry_run"] is True
    assert plan["method"] == "redrafter"
    assert not (tmp_path / "engine").exists()


def test_limits_are_reported_together(checkpoint: Path, tmp_path: Path) -> None:
    done = run_cli_here(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", tmp_path / "engine",
        "--max-seq-len", 600, "--max-draft-len", 7, "--max-beam-width", 2, "--max-num-tokens", 20,
        "--speculative-decoding-mode", "medusa",
    )  # fmt: skip
    assert done.returncode == 1
    error, hint = read_error_lines(done.stderr)
    assert error.startswith("5 problems")
    for number in ("max_seq_len=600", "max_position_embeddings=512", "num_beams=3", "= 12",
                   "max_beam_width=2", "max_num_tokens=20", "104", "redrafter"):  # fmt: skip
        assert number in error, number
    assert "--max-seq-len 512" in hint
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--max-input-len", 512], "leaves no room for output in max_seq_len=512"),
        (
            ["--backend", "torch", "--gemm-plugin", "float16"],
            "--gemm-plugin has no meaning for the torch backend",
        ),
        (
            ["--gemm-plugin", "float16", "--trtllm-version", "1.2"],
            "--trtllm-version has no meaning",
        ),
        (["--kv-cache-type", "paged"], "continuous KV cache only"),
        (["--backend", "tensorrt-llm"], "TensorRT-LLM is not installed here"),
        (["--backend", "tensorrt-llm", "--optimize", "native"], "--optimize has no meaning"),
        (["--max-batch-size", 2, "--max-num-tokens", 25], r"3 x|= 26"),
    ],
)
def test_refused_flags(checkpoint: Path, tmp_path: Path, flags: list[object], match: str) -> None:
    expect_refusal(
        match, "--checkpoint-dir", checkpoint, "--output-dir", tmp_path / "engine", *flags
    )


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (["--max-input-len", 512], "lower --max-input-len to 511 or less: the model takes 512"),
        (["--max-input-len", 99, "--max-seq-len", 90], "raise --max-seq-len to 100 or more, or"),
    ],
)
def test_hints_about_lengths_can_be_followed(
    checkpoint: Path, tmp_path: Path, flags: list[object], hint: str
) -> None:
    folders = ["--checkpoint-dir", checkpoint, "--output-dir", tmp_path / "engine"]
    with pytest.raises(SpecDecError) as caught:
        call("build", *folders, *flags)
    assert hint in caught.value.hint


@pytest.mark.parametrize("way", ["flags", "recipe"])
def test_a_pasted_command_line_is_no_error(checkpoint: Path, tmp_path: Path, way: str) -> None:
    """What only says how TensorRT-LLM computes is named; text and engine are the same."""
    names = ["gemm_plugin", "use_paged_context_fmha", "use_fp8_context_fmha", "workers"]
    values = ["float16", "enable", "disable", "2"]
    pairs = list(zip(names, values, strict=True))
    words: list[object] = [f"--{name}={value}" for name, value in pairs]
    if way == "recipe":
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text("build:\n" + "".join(f"  {name}: {value}\n" for name, value in pairs))
        words = ["--config", recipe]
    common = ["--checkpoint_dir", checkpoint, "--output_dir"]
    done = run_cli_here("build", *common, tmp_path / "pasted", *words)
    assert done.returncode == 0, done.stderr
    flags = "--gemm-plugin, --use-paged-context-fmha, --use-fp8-context-fmha, --workers"
    line = f"no effect on the torch backend, which was chosen here: {flags}"
    assert [text for text in done.stderr.splitlines() if "no effect" in text] == [line]
    assert run_cli_here("build", *common, tmp_path / "plain").returncode == 0
    plain = tmp_path / "plain"
    for path in (path for path in plain.rglob("*") if path.is_file()):
        if path.name != "manifest.json":
            other = tmp_path / "pasted" / path.relative_to(plain)
            assert path.read_bytes() == other.read_bytes(), path
    refused = run_cli_here("build", *common, tmp_path / "asked", *words, "--backend", "torch")
    assert refused.returncode == 2
    assert not (tmp_path / "asked").exists()


def test_mode_without_a_drafter(plain_checkpoint: Path, tmp_path: Path) -> None:
    expect_refusal(
        "does not fit a plain checkpoint",
        "--checkpoint-dir", plain_checkpoint, "--output-dir", tmp_path / "engine",
        "--speculative-decoding-mode", "explicit_draft_tokens",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization": {"quant_algo": "W8A16"}}, "quantized \\(W8A16\\)"),
        ({"quantization": {"quant_algo": "FP8"}}, "qkv is float32, config.json says FP8"),
        ({"rotary_scaling": {"rope_type": "ntk", "factor": 4.0}}, "'ntk' is not supported"),
        ({"rotary_scaling": {"rope_type": "linear", "factor": 0}}, "'linear' has factor 0"),
        ({"max_position_embeddings": 1}, "max_seq_len=1 has no room for a prompt and a token"),
        ({"max_position_embeddings": 10**9}, "max_seq_len=1000000000 makes rotary tables"),
        ({"redrafter_draft_len_per_beam": 10**5}, "is 100000, not a whole number from 1 to 4096"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is more than 1000"),
        ({"num_hidden_layers": 3}, r"7 missing: transformer.layers.2"),
        ({"num_hidden_layers": 1}, r"7 unknown: transformer.layers.1"),
        ({"intermediate_size": 96}, r"misshapen: .*expected \[96, 64\]"),
        ({"dtype": "float16"}, "says dtype=float16, the tensors are float32"),
        ({"architecture": "LlamaForCausalLn"}, "did you mean LlamaForCausalLM"),
        ({"redrafter_num_beams": 0}, "redrafter_num_beams is 0"),
        ({"redrafter_num_beams": 200}, "num_beams=200 exceeds vocab_size=128"),
        ({"redrafter_beams": 4}, "unknown keys redrafter_beams"),
        ({"mapping": {"tp_size": 2}}, "tp_size=2"),
    ],
)
def test_refused_checkpoints(
    checkpoint: Path, tmp_path: Path, config: dict[str, Any], match: str
) -> None:
    folder = copy_checkpoint(checkpoint, tmp_path / "ckpt", **config)
    expect_refusal(match, "--checkpoint-dir", folder, "--output-dir", tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_missing_tensor_is_named(checkpoint: Path, tmp_path: Path) -> None:
    folder = copy_checkpoint(checkpoint, tmp_path / "ckpt")
    file = TensorFile(checkpoint / "rank0.safetensors")
    kept = {n: t for n, t in file.tensors.items() if n != "drafter.rnn_u.bias"}
    write_tensor_file(folder / "rank0.safetensors", kept, file.read)
    expect_refusal(
        "1 missing: drafter.rnn_u.bias",
        "--checkpoint-dir", folder, "--output-dir", tmp_path / "engine",
    )  # fmt: skip


def test_weights_that_their_manifest_does_not_describe(
    plain_checkpoint: Path, tmp_path: Path
) -> None:
    """Those of a checkpoint; config.json may be corrected, and others' manifests say nothing."""
    folder = copy_checkpoint(plain_checkpoint, tmp_path / "ckpt", producer={"name": "me"})
    manifest = read_json(plain_checkpoint / "manifest.json")
    write_json(folder / "manifest.json", manifest)
    args: list[object] = ["--checkpoint-dir", folder, "--optimize", "none", "--output-dir"]
    call("build", *args, tmp_path / "engine")
    data = bytearray((folder / "rank0.safetensors").read_bytes())
    data[-100] ^= 1
    (folder / "rank0.safetensors").write_bytes(data)
    for stage, *words in (
        ("build", *args, tmp_path / "no"),
        ("convert", "--base-model-checkpoint-dir", folder, "--output-dir", tmp_path / "no",
         "--drafter-model-dir", make_drafter(tmp_path, exit_dim=96)),
    ):  # fmt: skip
        with pytest.raises(SpecDecError, match="rank0.safetensors has sha256 .*beside it says"):
            call(str(stage), *words)
        assert not (tmp_path / "no").exists()
    write_json(folder / "manifest.json", {"tool": "another"})
    call("build", *args, tmp_path / "other")


@pytest.mark.parametrize("name", ["config.json", "rank0.safetensors"])
@pytest.mark.parametrize("moment", ["resolve_limits", "read_recorded", "describe_sources"])
def test_a_checkpoint_that_is_changed_meanwhile(
    name: str, moment: str, plain_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced by another of the same sizes: the engine had tensors of both, or of one and the
    other's hashes."""
    folder = copy_checkpoint(plain_checkpoint, tmp_path / "ckpt")
    real = getattr(embedded, moment)

    def change_first(*args: Any, **options: Any) -> Any:
        (folder / "new").write_bytes((folder / name).read_bytes())
        (folder / "new").replace(folder / name)
        return real(*args, **options)

    args = ["--checkpoint-dir", folder, "--output-dir", tmp_path / "engine", "--optimize", "none"]
    monkeypatch.setattr(embedded, moment, change_first)
    expect_refusal(f"{folder / name} was changed while it was read", *args)
    assert not (tmp_path / "engine").exists()


def test_full_disk_is_told_before_the_build(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = (checkpoint / "rank0.safetensors").stat().st_size
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=weights // 2))
    with pytest.raises(SpecDecError, match=r"the engine takes at least 0.5 MB, .* 0.[23] MB free"):
        call("build", "--checkpoint-dir", checkpoint, "--output-dir", tmp_path / "engine")
    assert not list(tmp_path.iterdir())


def test_existing_output_needs_force(checkpoint: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.mkdir()
    (engine / "precious").write_text("mine")
    args = ["--checkpoint-dir", checkpoint, "--output-dir", engine]
    expect_refusal("exists and is not empty", *args)
    call("build", *args, "--force", "--optimize", "none")
    assert sorted(p.name for p in engine.iterdir()) == [
        "config.json", "manifest.json", "weights.safetensors",
    ]  # fmt: skip


def test_no_compiler_is_said_and_survived(checkpoint: Path, tmp_path: Path) -> None:
    args = ["build", "--checkpoint-dir", checkpoint, "--output-dir", tmp_path / "engine"]
    done = run_cli_here(*args, env={"CXX": "no-such-compiler"})
    assert done.returncode == 0
    assert "no C++ compiler found" in done.stderr
    options = read_json(tmp_path / "engine" / "config.json")["torch_config"]
    assert len(options.pop("build_id")) == 32
    assert options == {
        "format": 2, "prepack": True, "kernels": None, "packing": None, "quantization": None,
        "drafter_weights": None, "draft_vocab_size": None,
    }  # fmt: skip
    demanded = run_cli_here(
        *args, "--force", "--optimize", "native", env={"CXX": "no-such-compiler"}
    )
    assert demanded.returncode == 1
    assert "no C++ compiler" in read_error_lines(demanded.stderr)[0]
    assert (tmp_path / "engine" / "config.json").is_file(), "the earlier engine is still there"
