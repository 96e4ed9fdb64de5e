"""Folders of MTP assistants: all of one is read, and one that is not the target's is refused."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.build.backends.tensorrt import find_problems
from specdec.checkpoint.config import parse_checkpoint_config, read_checkpoint_config
from specdec.convert.hf import HfFolder
from specdec.convert.methods.mtp_assistant import EMBEDDED, MtpAssistantConverter
from specdec.convert.pipeline import convert_model
from specdec.convert.settings import ConvertSettings
from specdec.convert.target import plan_alone
from specdec.errors import SpecDecError
from specdec.files.folders import MTP_ASSISTANT, recognize_drafter
from specdec.trtllm.lacks import find_lack
from tests.assistants import make_mtp_assistant, make_target
from tests.conftest import change_tensors, make_llama
from tests.engines import run_cli_here

HEAD, ORDER = "lm_head.weight", "masked_embedding.token_ordering"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("models")
    target = make_target(parent / "target")
    make_mtp_assistant(parent, target)
    make_mtp_assistant(parent, target, centroids=16, name="centroids")
    make_llama(parent, vocab=128, name="llama")
    return parent


def convert(
    target: Path, drafter: Path, flag: str = "mtp_assistant_model_dir", **options: Any
) -> None:
    given = {"output_dir": drafter.parent / "out", "dry_run": True} | options
    convert_model(ConvertSettings(model_dir=str(target), **{flag: str(drafter)}, **given))


def copy(models: Path, name: str, folder: Path) -> Path:
    shutil.copytree(models / name, folder / name)
    return folder / name


def test_all_of_a_folder_is_in_the_checkpoint(models: Path, tmp_path: Path) -> None:
    """By its contents, whatever its name; the tensors are the folder's own, bit for bit."""
    drafter = models / "centroids"
    assert recognize_drafter(drafter, "--drafter-model-dir") == MTP_ASSISTANT
    out = tmp_path / "checkpoint"
    convert(models / "target", drafter, "drafter_model_dir", output_dir=out, dry_run=False)
    written, own = load_file(out / "rank0.safetensors"), load_file(drafter / "model.safetensors")
    net = {name: weight for name, weight in written.items() if name.startswith("mtp_assistant.")}
    assert sum(w.numel() for w in net.values()) == sum(w.numel() for w in own.values())
    for name, source in {
        "token_order": ORDER, "centroids.weight": "masked_embedding.centroids.weight",
        "vocab_embedding.weight": "model.embed_tokens.weight",
        "layers.1.scalar.weight": "model.layers.1.layer_scalar",
        "layers.2.attention.q.weight": "model.layers.2.self_attn.q_proj.weight",
    }.items():  # fmt: skip
        assert torch.equal(net[f"mtp_assistant.drafter.{name}"], own[source])
    checkpoint = read_checkpoint_config(out)
    params: Any = checkpoint.drafter
    assert (params.num_centroids, params.num_best_centroids) == (16, 3)
    assert params.list_sources(checkpoint.model) == [4, 4, 5]
    again = parse_checkpoint_config(checkpoint.raw)
    assert again.drafter == params
    unknown = checkpoint.raw | {"mtp_assistant": checkpoint.raw["mtp_assistant"] | {"more": 1}}
    with pytest.raises(SpecDecError, match="more"):
        parse_checkpoint_config(unknown)
    library: Any = ModuleType("tensorrt_rtx")
    library.__version__ = "1.7.1"
    problems = find_problems(checkpoint, ["8.9"], library)
    assert any("no network of MTP assistant drafters" in fact for fact, _ in problems)
    lack = find_lack("1.2", checkpoint.raw, checkpoint.model.architecture)
    assert lack is not None
    assert lack[0] == "TensorRT-LLM 1.2 has no MTP assistant"
    done = run_cli_here("export", "--checkpoint-dir", out, "--to", "hf", "--output-dir", out / "x")
    assert "of a kind that is not exported: MTP assistant" in done.stderr


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "target's size": ({"backbone_hidden_size": 96}, "reads states of 96 numbers, the target's"),
    "head size": ({"text_config": {"head_dim": 8}}, "layer 0 reads keys with head_size=8"),
    "full head size": (
        {"text_config": {"per_layer_config": {"2": {"head_dim": 16, "num_key_value_heads": 1}}}},
        "layer 2 reads keys with head_size=16, those of the target's layer 5 have 32",
    ),
    "K/V heads": (
        {"text_config": {"num_key_value_heads": 4}}, "layer 0 reads keys with num_key_value_heads=4"
    ),
    "vocabulary": ({"text_config": {"vocab_size": 64}}, "vocab_size is 64, the target's 128"),
    "centroids": ({"num_centroids": 7}, "128 tokens do not divide among 7 centroids"),
    "best centroids": (
        {"centroid_intermediate_top_k": 99}, "16 centroids, of which 99 are the best ones"
    ),
    "experts": ({"text_config": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                                 "moe_intermediate_size": 8}}, "enable_moe_block is true"),
    "wide": ({"text_config": {"use_double_wide_mlp": True}}, "use_double_wide_mlp is true"),
    "tables": (
        {"text_config": {"hidden_size_per_layer_input": 4}}, "hidden_size_per_layer_input is 4"
    ),
    "own keys": (
        {"text_config": {"num_kv_shared_layers": 1}}, "num_kv_shared_layers is 1 of 3 layers"
    ),
    "layers": ({"text_config": {"model_type": "qwen3"}}, "text_config has model_type 'qwen3'"),
    "activation": ({"text_config": {"hidden_activation": "relu"}}, "hidden_activation is 'relu'"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_another_config_is_refused(name: str, models: Path, tmp_path: Path) -> None:
    changes, words = CONFIGS[name]
    drafter = copy(models, "centroids", tmp_path)
    config = json.loads((drafter / "config.json").read_text())
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecDecError) as caught:
        convert(models / "target", drafter)
    assert any(words in fact for fact, _ in caught.value.problems), caught.value.problems


Tensors = dict[str, torch.Tensor]
TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop("model.norm.weight"), "lacks 1 tensor: model.norm.weight"),
    "unread": (lambda t: t.update(more=torch.ones(2)), "more"),
    "shape": (lambda t: t.update({"pre_projection.weight": torch.ones(48, 64)}), "[48, 64]"),
    "order": (lambda t: t[ORDER].fill_(3), f"{ORDER} names 1 tokens from 3 to 3"),
    "order's type": (lambda t: t.update({ORDER: t[ORDER].float()}), f"{ORDER} is float32"),
    "second head": (
        lambda t: t.update({"lm_head.weight": torch.ones(128, 48)}),
        "lm_head.weight and model.embed_tokens.weight differ",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_other_tensors_are_refused(name: str, models: Path, tmp_path: Path) -> None:
    change, words = TENSORS[name]
    drafter = copy(models, "centroids", tmp_path)
    with change_tensors(drafter) as tensors:
        change(tensors)
    with pytest.raises(SpecDecError) as caught:
        convert(models / "target", drafter)
    assert any(words in fact for fact, _ in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("is_tied", "tables", "read_table"),
    [
        (True, (EMBEDDED,), EMBEDDED), (True, (HEAD,), HEAD), (True, (EMBEDDED, HEAD), EMBEDDED),
        (False, (HEAD,), HEAD), (False, (EMBEDDED, HEAD), HEAD),
        (False, (EMBEDDED,), HEAD),  # which is then missing: never the embedding in its place
    ],
)  # fmt: skip
def test_one_table_is_the_head_and_every_tensor_has_one_reader(
    is_tied: bool, tables: tuple[str, ...], read_table: str, models: Path, tmp_path: Path
) -> None:
    """Whatever a folder holds is read once, or is left out by its name."""
    drafter = copy(models, "assistant", tmp_path)
    with change_tensors(drafter) as tensors:
        table = tensors.pop(EMBEDDED)
        tensors |= {name: table.clone() for name in tables}
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.ones(1, 1)
    folder = HfFolder(drafter)
    folder.config["tie_word_embeddings"] = is_tied
    settings = ConvertSettings(model_dir=str(models / "target"), output_dir=tmp_path / "out")
    converter = MtpAssistantConverter(folder, settings, plan_alone(settings).model)
    names = [*converter.params.list_tensors(converter.model)]
    rows = converter.find_source_rows(names)
    read_names = [source.name for sources in rows.values() for source in sources]
    assert sorted(rows) == sorted(names)
    assert len(set(read_names)) == len(read_names) == len(names)
    assert [rows_of for rows_of in read_names if rows_of in (EMBEDDED, HEAD)] == [read_table]
    assert {*read_names} - folder.tensors.keys() == {read_table} - {*tables}
    patterns = converter.list_ignored()
    assert [
        name for name in folder.tensors.keys() - {*read_names}
        if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ] == []  # fmt: skip
    assert not any(fnmatch.fnmatch(read_table, pattern) for pattern in patterns)


def test_targets_without_such_keys_are_refused(models: Path) -> None:
    with pytest.raises(SpecDecError, match="full_attention and sliding_attention"):
        convert(models / "llama", models / "assistant")
    with pytest.raises(SpecDecError, match="each of tp_size=2 ranks holds a part"):
        convert(models / "target", models / "assistant", tp_size=2)


def test_an_assistant_is_no_model_and_no_other_drafter(models: Path) -> None:
    drafter = models / "assistant"
    with pytest.raises(SpecDecError, match="is the folder of an MTP assistant, not a Hugging Face"):
        convert(drafter, drafter)
    with pytest.raises(SpecDecError, match="is the folder of an MTP assistant, not a folder of"):
        convert(models / "target", drafter, "medusa_model_dir")


def test_match_tells_who_fits(models: Path) -> None:
    among = ("--among", models / "assistant", "--json")
    done = run_cli_here("match", "--model-dir", models / "target", *among)
    (entry,) = json.loads(done.stdout)["candidates"]
    assert (entry["title"], entry["method"]) == ("MTP assistant", MTP_ASSISTANT)
    assert entry["fits"]
    assert "--drafter-model-dir" in entry["command"]
    done = run_cli_here("match", "--model-dir", models / "llama", *among)
    (entry,) = json.loads(done.stdout)["candidates"]
    assert not entry["fits"]
