"""Kinds of models: as transformers saves them, tied, biased, scaled, quantized, in torch files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.files.reading import hash_file
from tests.conftest import ROOT, make_drafter, make_llama, run_cli
from tests.convert.checkpoints import (
    join_checkpoint,
    read_config,
    set_config,
)
from tests.convert.conftest import Converter, Source
from tests.convert.golden_models import GOLDEN, summarize_rank
from tests.engines import run_cli_here

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "base", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 500000}, 500000.0, None),
        ({"rope_theta": "ABSENT"}, 10000.0, None),
        ({"rope_scaling": LLAMA3}, 10000.0, LLAMA3),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0,
         {"type": "linear", "factor": 2.0}),
        ({"rope_theta": "ABSENT", "rope_scaling": "ABSENT",
          "rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, 5e5, LLAMA3),
        ({"rope_theta": "ABSENT", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
         5e5, None),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 10000.0, **LLAMA3}}, 10000.0,
         LLAMA3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("version", ["1.2", "0.14"])
def test_rotary_base_and_scaling_are_never_lost(
    values: dict[str, Any],
    base: float,
    scaling: dict[str, Any] | None,
    version: str,
    source: Source,
    tmp_path: Path,
    convert: Converter,
) -> None:
    """In both places where transformers writes them, and with a drafter, where 0.14's own lost
    the scaling."""
    folder = tmp_path / "model"
    shutil.copytree(source("llama_mha"), folder)
    set_config(folder, **values)
    convert(model_dir=folder, drafter_model_dir=source("drafter_A_rnn_e96"), trtllm_version=version)
    config = read_config(convert.output)
    assert config["rotary_base"] == base
    assert config["rotary_scaling"] == scaling


def test_biases_are_told_to_0_14_with_a_drafter(tmp_path: Path, convert: Converter) -> None:
    """Its config goes without these keys as long as they hold the default."""
    folder = make_llama(tmp_path, attention_bias=True)
    convert(model_dir=folder, drafter_model_dir=make_drafter(tmp_path), trtllm_version="0.14")
    config = read_config(convert.output)
    assert config["attn_bias"] is True
    assert "mlp_bias" not in config


def test_tied_model_stored_under_the_heads_name(
    source: Source, tmp_path: Path, convert: Converter
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(source("llama_tied"), folder)
    expected = summarize_rank(convert(model_dir=folder) / "rank0.safetensors")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    convert(model_dir=folder, force=True)
    assert summarize_rank(convert.output / "rank0.safetensors") == expected


@pytest.mark.parametrize(
    ("model", "config", "dtype"),
    [
        ("llama_gqa_f16", {}, "float16"),
        ("llama_mha_f32", {}, "float32"),
        ("llama_gqa_notorchdtype", {}, "float16"),  # the weights'
        ("llama_mha_f32", {"torch_dtype": "ABSENT", "dtype": "bfloat16"}, "bfloat16"),
        ("llama_mha_f32", {"torch_dtype": "ABSENT", "dtype": "torch.float16"}, "float16"),
    ],
)
def test_dtype_auto(
    model: str, config: dict[str, Any], dtype: str, source: Source, tmp_path: Path,
    convert: Converter,
) -> None:  # fmt: skip
    folder = tmp_path / "model"
    shutil.copytree(source(model), folder)
    set_config(folder, **config)
    drafter = source("drafter_A_rnn_e96")  # float32: follows the target
    convert(model_dir=folder, drafter_model_dir=drafter)
    ranks = summarize_rank(convert.output / "rank0.safetensors")
    assert {dtype for dtype, _, _ in ranks.values()} == {dtype}
    assert read_config(convert.output)["dtype"] == convert.report["dtype"] == dtype


# ---- Drafters.


def test_apples_own_drafter(convert: Converter, tmp_path: Path) -> None:
    """The layout that Apple's trainer saves, with its config.json as it is."""
    target = make_llama(tmp_path, vocab=512)
    drafter = make_drafter(tmp_path, vocab=512)
    config = json.loads((GOLDEN / "sources" / "apple_redrafter.config.json").read_text())
    (drafter / "config.json").write_text(json.dumps(config))
    joined = join_checkpoint(convert(model_dir=target, drafter_model_dir=drafter, tp_size=2))
    stored = load_file(drafter / "model.safetensors")
    pairs = {
        "drafter.layers.0.linear.weight": "lm_head.0.linear.weight",
        "drafter.layers.1.linear.bias": "lm_head.1.linear.bias",
        "drafter.lm_head.weight": "lm_head.2.weight",
        "drafter.rnn_u.bias": "rnn_u.bias",
        "drafter.rnn_w.weight": "rnn_w.weight",
    }
    for ours, theirs in pairs.items():
        assert np.array_equal(joined[ours], stored[theirs].numpy())
    assert read_config(convert.output)["redrafter_exit_dim"] == 128


@pytest.mark.parametrize("input_name", ["input_proj", "input_projs"])
def test_naming_c_with_an_input_projection(
    input_name: str, convert: Converter, tmp_path: Path
) -> None:
    target = make_llama(tmp_path)
    drafter = make_drafter(tmp_path, exit_dim=96)
    expected = convert(model_dir=target, drafter_model_dir=drafter) / "rank0.safetensors"
    summary = summarize_rank(expected)
    tensors = {
        name.replace("lm_head", "0").replace("input_proj", input_name): value
        for name, value in load_file(drafter / "model.safetensors").items()
    }
    save_file(tensors, drafter / "model.safetensors")
    convert(model_dir=target, drafter_model_dir=drafter, force=True)
    assert summarize_rank(expected) == summary


# ---- Quantized targets.


def test_config_of_a_1_x_target_is_cut_down_for_0_14(convert: Converter, tmp_path: Path) -> None:
    """0.14's loader fails on a key it does not know in `mapping` or `quantization`."""
    target, drafter = make_llama(tmp_path), make_drafter(tmp_path)
    base = convert(model_dir=target, output_dir=tmp_path / "base")
    config = read_config(base)
    config["mapping"] |= {"moe_cluster_size": 1, "attn_tp_size": -1, "cp_config": {},
                          "enable_attention_dp": False}  # fmt: skip
    config["quantization"] |= {"use_meta_recipe": False, "mamba_ssm_cache_dtype": "auto"}
    set_config(base, **config)
    flags: dict[str, Any] = {"base_model_checkpoint_dir": base, "drafter_model_dir": drafter}
    convert(**flags, trtllm_version="0.14")
    old = read_config(convert.output)
    assert len(old["mapping"]) == 7
    assert len(old["quantization"]) == 8
    assert old["architecture"] == "ReDrafterForCausalLM"
    convert(**flags, force=True)
    assert read_config(convert.output)["mapping"] == config["mapping"]
    config["mapping"]["enable_attention_dp"] = True
    set_config(base, **config)
    error = convert.fail(**flags, trtllm_version="0.14", output_dir=tmp_path / "other")
    assert "'enable_attention_dp': True" in error.message


def test_rotary_buffers_of_a_target_are_left_out(
    source: Source, convert: Converter, tmp_path: Path
) -> None:
    base = convert(model_dir=source("llama_mha"), output_dir=tmp_path / "base")
    flags = {"base_model_checkpoint_dir": base, "drafter_model_dir": source("drafter_A_rnn_e96")}
    expected = summarize_rank(convert(**flags) / "rank0.safetensors")
    tensors = load_file(base / "rank0.safetensors")
    for name in ("embed_positions", "rotary_inv_freq", "embed_positions_for_gpt_attention"):
        tensors[f"transformer.{name}"] = torch.ones(4)
    save_file(tensors, base / "rank0.safetensors")
    (base / "manifest.json").unlink()  # which has the sum of what specdec wrote
    convert(**flags, force=True)
    assert summarize_rank(convert.output / "rank0.safetensors") == expected


# ---- The command's product.


def test_manifest_and_report(source: Source, convert: Converter) -> None:
    target, drafter = source("llama_gqa"), source("drafter_A_rnn_e96")
    convert(model_dir=target, drafter_model_dir=drafter, tp_size=2, redrafter_num_beams=3)
    manifest = json.loads((convert.output / "manifest.json").read_text())
    for entry in manifest["sources"]:
        assert entry["sha256"] == hash_file(Path(entry["path"]))
    assert {entry["path"] for entry in manifest["sources"]} == {
        str(path) for folder in (target, drafter) for path in folder.iterdir()
    }
    outputs = {entry["path"]: entry["sha256"] for entry in manifest["outputs"]}
    assert outputs == {
        name: hash_file(convert.output / name)
        for name in ("config.json", "rank0.safetensors", "rank1.safetensors")
    }
    assert manifest["settings"]["redrafter_num_beams"] == 3
    assert convert.report["config"]["redrafter_num_beams"] == 3
    assert convert.report["method"] == "redrafter"


def test_dry_run_tells_the_sizes_and_writes_nothing(
    source: Source, convert: Converter, tmp_path: Path
) -> None:
    target = source("llama_gqa")
    words = ("convert", "--model-dir", target, "--tp-size", 2, "--output-dir", tmp_path / "out")
    done = run_cli(*words, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(run_cli_here(*words, "--dry-run", "--json").stdout)
    assert report["dry_run"] is True
    assert not (tmp_path / "out").exists()
    convert(model_dir=target, tp_size=2)
    for rank in range(2):
        size = (convert.output / f"rank{rank}.safetensors").stat().st_size
        assert f"write rank{rank}.safetensors" in done.stdout
        assert f"{size:,} bytes" in done.stdout
    assert "LlamaForCausalLM (plain) -> " in done.stdout
    done = run_cli_here(*words, "--dry-run", "--force", "--trtllm-version", "1.2")
    assert "LlamaForCausalLM (plain) for TensorRT-LLM 1.2 -> " in done.stdout
    assert report["total_bytes"] == 2 * size


def test_conversion_imports_no_torch(source: Source, tmp_path: Path) -> None:
    program = (
        "import sys; from specdec.convert.cli import command\n"
        f"command.main(['--model-dir', {str(source('llama_gqa'))!r}, '--drafter-model-dir',"
        f" {str(source('drafter_A_rnn_e96'))!r}, '--output-dir', {str(tmp_path / 'out')!r}],"
        " standalone_mode=False)\n"
        "print([name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
