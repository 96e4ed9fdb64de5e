"""Intact checkpoints are found intact, every kind of damage is found and named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.convert.pipeline import convert_model
from specdec.convert.settings import ConvertSettings
from specdec.errors import SpecDecError
from specdec.files.manifest import ManifestEntry, find_differences
from specdec.files.reading import read_json, write_json
from specdec.files.tensor_file import TensorFile, write_tensor_file
from specdec.system import logs
from specdec.verify.pipeline import verify_checkpoint
from specdec.verify.sampling import EDGE, read_contexts
from specdec.verify.settings import VerifySettings
from tests.conftest import read_error_lines, run_cli
from tests.convert.golden_models import make_source
from tests.engines import run_cli_here

MODELOPT = Path(__file__).parent.parent / "golden" / "modelopt" / "trtllm"
LN_F = "transformer.ln_f.weight"
QKV = "transformer.layers.0.attention.qkv"


def test_interrupted_hashing_ends_amid_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "endless"
    path.touch()
    os.truncate(path, 1 << 40)

    def interrupt(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(logs, "show_progress", interrupt)
    with pytest.raises(KeyboardInterrupt):
        find_differences(
            [(path, ManifestEntry("endless", 1 << 40, "0"))] * 3, workers=2, label="hashing"
        )


def verify(folder: Path, **flags: Any) -> dict[str, Any]:
    report: dict[str, Any] = verify_checkpoint(VerifySettings(checkpoint_dir=folder, **flags))
    assert report["verdict"] == ("damaged" if report["problems"] else "intact")
    return report


def convert(parent: Path, source: str, name: str = "ckpt", **flags: Any) -> Path:
    for key in ("model_dir", "drafter_model_dir"):
        folder = source if key == "model_dir" else flags.get(key)
        if folder is not None:
            path = parent / folder
            flags[key] = str(path if path.exists() else make_source(folder, path))
    convert_model(ConvertSettings(output_dir=parent / name, **flags))
    return parent / name


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verify")


@pytest.fixture(scope="module")
def intact(parent: Path) -> Path:
    """A checkpoint of two ranks with a drafter; tests must not change it."""
    return convert(parent, "llama_gqa", tp_size=2, drafter_model_dir="drafter_A_rnn_e96")


@pytest.fixture
def copy(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "copy"))


# ---- What is intact.


def test_an_intact_checkpoint(intact: Path) -> None:
    report = verify(intact)
    assert report["problems"] == []
    assert report["files"] == 3
    assert report["manifest"]["tool"] == "specdec"
    assert report["manifest"]["unhashed"] == []
    contents = report["contents"]
    assert (contents["method"], contents["tp_size"]) == ("redrafter", 2)
    per_rank = [len(TensorFile(intact / f"rank{rank}.safetensors").tensors) for rank in (0, 1)]
    assert contents["num_tensors"] == sum(per_rank)
    assert len(report["sources"]["same"]) == 7
    assert report["sources"]["changed"] == report["sources"]["absent"] == []


@pytest.mark.parametrize(
    ("source", "flags"),
    [
        ("llama_layers4", {"pp_size": 2, "tp_size": 2}),
        ("gemma_mha", {"tp_size": 2}),
        ("gemma_mha", {"trtllm_version": "0.14"}),
        ("gpt2_tiny", {"use_parallel_embedding": True, "tp_size": 2}),
        ("phi2", {}),
        ("phi3", {}),
        ("opt_tiny", {}),
        ("mistral_swa", {"dtype": "float32"}),
        ("qwen2_gqa_tied", {"drafter_model_dir": "drafter_A_rnn_e96", "trtllm_version": "1.2"}),
        ("llama_gqa", {"medusa_model_dir": "medusa_4x1"}),
    ],
)
def test_every_kind_of_checkpoint_is_found_intact(
    source: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    if "medusa_model_dir" in flags:
        heads = make_source(flags["medusa_model_dir"], tmp_path / "heads")
        flags = {**flags, "medusa_model_dir": str(heads), "num_medusa_layers": 1}
    report = verify(convert(tmp_path, source, **flags))
    assert report["problems"] == []


@pytest.mark.parametrize("folder", sorted(MODELOPT.iterdir()), ids=lambda path: path.name)
def test_foreign_checkpoints_without_manifest(folder: Path) -> None:
    report = verify(folder)
    assert report["problems"] == []
    assert report["manifest"] is None
    assert report["files"] == 1 + len(list(folder.glob("rank*.safetensors")))


def test_a_drafter_of_another_type_than_its_target(parent: Path, intact: Path) -> None:
    base = convert(parent, "llama_gqa", "base")
    drafter = str(parent / "drafter_A_rnn_e96")
    convert_model(
        ConvertSettings(
            base_model_checkpoint_dir=base, drafter_model_dir=drafter, dtype="float16",
            output_dir=parent / "mixed",
        )
    )  # fmt: skip
    assert verify(parent / "mixed")["problems"] == []


# ---- What is damaged.


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_single_flipped_bit_in_every_file(intact: Path, tmp_path: Path) -> None:
    for path in sorted(intact.iterdir()):
        if path.name == "manifest.json":
            continue
        folder = Path(shutil.copytree(intact, tmp_path / path.name))
        flip_byte(folder / path.name, path.stat().st_size - 2)
        problems = verify(folder)["problems"]
        assert any(f"{folder / path.name} has sha256 " in problem for problem in problems)


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: (d / "rank1.safetensors").unlink(), "{d}/rank1.safetensors is missing"),
        (lambda d: (d / "rank1.safetensors").unlink(), "tp_size 2 but lacks rank1.safetensors"),
        (lambda d: (d / "stray.txt").write_text(""), "{d}/stray.txt is not in manifest.json"),
        (lambda d: (d / "a").mkdir() or (d / "a/b").write_text(""), "{d}/a/b is not in manifest"),
        (lambda d: os.mkfifo(d / "pipe"), "{d}/pipe is not in manifest.json"),
        (lambda d: (d / "link").symlink_to("nowhere"), "{d}/link is not in manifest.json"),
        (lambda d: cut(d / "rank0.safetensors"), "bytes of tensors but holds"),
        (lambda d: cut(d / "rank0.safetensors"), " bytes, not "),
        (lambda d: cut(d / "config.json"), " bytes, not "),
        (lambda d: (d / "config.json").write_text("{"), "{d}/config.json is not JSON"),
        (lambda d: (d / "config.json").unlink(), "{d}/config.json does not exist"),
        (lambda d: put_pipe(d / "config.json"), "{d}/config.json is a folder, pipe or device"),
        (lambda d: shutil.copy(d / "rank0.safetensors", d / "rank2.safetensors"),
         "tp_size 2 but also holds rank2.safetensors"),
        (lambda d: (d / "manifest.json").write_text("[]"), "{d}/manifest.json holds no JSON"),
    ],
)  # fmt: skip
def test_damaged_folders(change: Callable[[Path], Any], problem: str, copy: Path) -> None:
    change(copy)
    problems = verify(copy)["problems"]
    assert any(problem.format(d=copy) in found for found in problems), problems


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format_version": 99}, "has format_version 99, this specdec reads 1"),
        ({"kind": "engine"}, "describes a folder of kind 'engine', not 'checkpoint'"),
        ({"outputs": None}, "outputs is not a list of files"),
        (
            {"outputs": [{"path": "a", "bytes": "1", "sha256": "x"}]},
            "outputs is not a list of files",
        ),
        ({"outputs": [{"path": "a", "bytes": 1}]}, "outputs is not a list of files"),
        ({"sources": [3]}, "sources is not a list of files"),
        ({"outputs": [{"path": "../a", "bytes": 1, "sha256": None}]}, "names files outside the"),
        ({"outputs": [{"path": "a" * 300, "bytes": 1, "sha256": None}]}, "cannot be read"),
        ({"outputs": []}, "rank0.safetensors is not in manifest.json"),
    ],
)
def test_damaged_manifests(change: dict[str, Any], problem: str, copy: Path) -> None:
    write_json(copy / "manifest.json", read_json(copy / "manifest.json") | change)
    problems = verify(copy)["problems"]
    assert any(problem in found for found in problems), problems


def change_rank(folder: Path, change: Callable[[dict[str, Any]], Any], rank: int = 0) -> None:
    """Write a rank's file anew after a change to its (dtype, array) by name."""
    path = folder / f"rank{rank}.safetensors"
    file = TensorFile(path)
    tensors = {name: (info, file.read(name).copy()) for name, info in file.tensors.items()}
    change(tensors)
    infos = {name: info for name, (info, _) in tensors.items()}
    write_tensor_file(path, infos, lambda name: tensors[name][1])


def reshape(tensors: dict[str, Any], name: str) -> None:
    info, array = tensors[name]
    tensors[name] = (type(info)(info.dtype, (1, *info.shape)), array[None])


def retype(tensors: dict[str, Any], name: str, dtype: str, storage: Any) -> None:
    info, array = tensors[name]
    tensors[name] = (type(info)(dtype, info.shape), array.astype(storage))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda t: t.pop(LN_F), f"rank0.safetensors lacks {LN_F}"),
        (lambda t: t.pop("drafter.rnn_u.bias"), "rank0.safetensors lacks drafter.rnn_u.bias"),
        (lambda t: t.update(stray=t[LN_F]), "what config.json does not describe: stray"),
        (lambda t: reshape(t, LN_F), f"{LN_F} has shape [1, 64], not [64]"),
        (lambda t: retype(t, LN_F, "float32", np.float32), f"{LN_F} is float32, config.json says"),
        (lambda t: retype(t, "drafter.rnn_u.bias", "float32", np.float32), "rnn_u.bias is float32"),
    ],
)
def test_tensors_at_odds_with_the_config(
    change: Callable[[dict[str, Any]], Any], problem: str, copy: Path
) -> None:
    change_rank(copy, change)
    (copy / "manifest.json").unlink()
    problems = verify(copy)["problems"]
    assert any(problem in found for found in problems), problems
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("change", "config", "problem"),
    [
        (lambda t: t.pop(f"{QKV}.weights_scaling_factor"), {}, f"lacks {QKV}.weights_scaling"),
        (lambda t: t.pop(f"{QKV}.activation_scaling_factor"), {}, f"lacks {QKV}.activation_sc"),
        (lambda t: retype(t, f"{QKV}.weights_scaling_factor", "float16", np.float16), {},
         "is float16 [1], not one float32"),
        (lambda t: t.pop("transformer.layers.0.attention.kv_cache_scaling_factor"), {},
         "lacks transformer.layers.0.attention.kv_cache_scaling_factor"),
        (lambda t: None, {"exclude_modules": ["lm_head", QKV]}, "its module is excluded"),
        (lambda t: None, {"exclude_modules": ["nothing"]}, "its module is not excluded"),
        (lambda t: None, {"quant_algo": None, "kv_cache_quant_algo": None}, "does not describe"),
    ],
)  # fmt: skip
def test_quantized_checkpoints(
    change: Callable[[dict[str, Any]], Any], config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(MODELOPT / "llama-fp8-fp8kv-tp1", tmp_path / "fp8"))
    for path in folder.iterdir():
        path.chmod(0o644)
    change_rank(folder, change)
    document = read_json(folder / "config.json")
    document["quantization"] |= config
    write_json(folder / "config.json", document)
    problems = verify(folder)["problems"]
    assert any(problem in found for found in problems), problems


def test_absurd_layers_take_no_time(copy: Path) -> None:
    document = read_json(copy / "config.json") | {"num_hidden_layers": 10**9}
    write_json(copy / "config.json", document)
    assert any(
        "num_hidden_layers=1000000000 is more than 1000" in problem
        for problem in verify(copy)["problems"]
    )


# ---- Sources, and files without a hash.


def test_sources_are_reported_and_do_not_decide(parent: Path, tmp_path: Path) -> None:
    folder = convert(tmp_path, "llama_mqa")
    source = tmp_path / "llama_mqa"
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").unlink()
    report = verify(folder)
    assert report["problems"] == []
    assert report["sources"] == {
        "same": [],
        "changed": [str(source / "config.json")],
        "absent": [str(source / "model.safetensors")],
    }


def test_files_without_a_hash_are_told(copy: Path) -> None:
    manifest = read_json(copy / "manifest.json")
    for entry in manifest["outputs"]:
        entry["sha256"] = None
    write_json(copy / "manifest.json", manifest)
    report = verify(copy)
    assert report["problems"] == []
    assert len(report["manifest"]["unhashed"]) == 3


# ---- The command.


def test_the_command(copy: Path, tmp_path: Path) -> None:
    done = run_cli("verify", "--checkpoint-dir", copy)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"PASS: {copy}: intact\n")
    assert "3 files" in done.stdout
    (copy / "manifest.json").unlink()
    done = run_cli_here("verify", "--checkpoint_dir", copy)
    assert done.returncode == 0
    assert "no manifest.json: names, shapes and types were checked" in done.stdout
    cut(copy / "rank1.safetensors")
    done = run_cli_here("verify", "--checkpoint-dir", copy, "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert (report["verdict"], report["files"], len(report["problems"])) == ("damaged", 3, 1)
    fact, hint = read_error_lines(done.stderr)
    assert fact == f"{copy} is damaged: {report['problems'][0]}"
    assert "copy it again" in hint
    shown = run_cli_here("verify", "--checkpoint-dir", copy).stdout
    assert shown.startswith("FAIL: ")
    assert "  problem: " in shown


def test_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(SpecDecError, match="nowhere does not exist"):
        verify(tmp_path / "nowhere")
    done = run_cli_here("verify", "--checkpoint-dir", tmp_path, "--convert-dir", "x")
    assert done.returncode == 2
    assert "no such option --convert-dir" in read_error_lines(done.stderr)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, more than 1000"),
        ({"text_config": {"n_layer": 10**6}}, "text_config.n_layer is 1000000, more than 1000"),
        ({"num_local_experts": 10**6}, "num_local_experts is 1000000, more than 10000"),
        ({"head_dim": 10**9}, "head_dim is 1000000000, more than 65536"),
        ({"hidden_size": 2**62}, "hidden_size is 4611686018427387904, more than 2147483647"),
    ],
)
def test_sizes_that_transformers_would_make_are_refused_first(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Of a model that transformers loads, by verify and by train: its classes list every layer."""
    from specdec.text.pretrained import load_config as read_config
    from specdec.train.target import load_config

    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "eos_token_id": 2**40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(str(tmp_path)).model_type == read_config(str(tmp_path)).model_type
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    for load in (load_config, read_config):
        with pytest.raises(SpecDecError) as caught:
            load(str(tmp_path))
        assert message in caught.value.message


def test_sampling_cuts_equal_logits_as_engines_do() -> None:
    """At the k-th place one of three equal tokens is left; which one is not judged."""
    settings = VerifySettings(model_dir="x", engine_dir="x", temperature=0.5, top_k=2)
    logits = torch.tensor([[1.0, 2, 1, 1, 0], [3.0, 3, 1, 1, 1]])
    tied, clear = read_contexts(logits, settings, "float32")
    first = 1 / (1 + np.exp(-2))
    assert tied.edge == {0, 2, 3}
    assert tied.probs == pytest.approx({1: first, EDGE: 1 - first})
    assert (clear.edge, clear.probs) == (frozenset(), pytest.approx({0: 0.5, 1: 0.5}))
