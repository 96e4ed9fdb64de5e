"""A folder given in another's place is called what it is, and the message says where it belongs."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import SpecDecError
from specdec.files import folders
from specdec.files.folders import (
    ADAPTER,
    CHECKPOINT,
    EAGLE,
    EMPTY,
    ENGINE,
    GGUF,
    MEDUSA,
    MODEL,
    REDRAFTER,
    TOKENIZER,
    expect_folder,
    look_at,
)
from tests.conftest import make_drafter, make_llama, make_tokenizer
from tests.engines import call

Store = Callable[[str], Path]
PYCODE = Path(__file__).resolve().parents[2] / "examples" / "pycode"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Folders of every kind."""
    root = tmp_path_factory.mktemp("folders")
    make_llama(root, name=MODEL)
    make_drafter(root, name=REDRAFTER)
    make_tokenizer(root / TOKENIZER)
    for name in (MEDUSA, EAGLE):
        shutil.copytree(PYCODE / name, root / name)
    call("convert", "--model-dir", root / MODEL, "--output-dir", root / CHECKPOINT)
    call("build", "--checkpoint-dir", root / CHECKPOINT, "--output-dir", root / ENGINE)
    for name, file in ((ADAPTER, "adapter_config.json"), (GGUF, "model.Q4_0.gguf")):
        (root / name).mkdir()
        (root / name / file).write_text("{}")
    (root / EMPTY).mkdir()
    return lambda name: root / name


KINDS = (ENGINE, CHECKPOINT, MODEL, REDRAFTER, MEDUSA, EAGLE, TOKENIZER, ADAPTER, GGUF, EMPTY)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_known(store: Store, kind: str) -> None:
    assert look_at(store(kind)).kind == kind


@pytest.mark.parametrize("wanted", [ENGINE, CHECKPOINT, MODEL, REDRAFTER, MEDUSA, EAGLE, TOKENIZER])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_wanted_kind_passes(store: Store, kind: str, wanted: str) -> None:
    if kind == wanted or (kind == GGUF and wanted in (MODEL, TOKENIZER)):
        expect_folder(store(kind), wanted)
        return
    with pytest.raises(SpecDecError) as caught:
        expect_folder(store(kind), wanted, "--some-dir")
    assert caught.value.message.startswith(f"--some-dir {store(kind)} is ")
    assert "{" not in caught.value.hint


def test_folders_that_pass_for_more_than_one_kind(store: Store, tmp_path: Path) -> None:
    """A target saved with its tokenizer, and one saved with Medusa heads."""
    from safetensors.torch import load_file, save_file

    both = tmp_path / "both"
    shutil.copytree(store(MODEL), both)
    shutil.copy(store(TOKENIZER) / "tokenizer.json", both)
    expect_folder(both, MODEL)
    expect_folder(both, TOKENIZER)
    tensors = load_file(both / "model.safetensors")
    heads = load_file(store(MEDUSA) / "medusa_lm_head.safetensors")
    tensors |= {f"medusa_heads.{name}": tensor for name, tensor in heads.items()}
    save_file(tensors, both / "model.safetensors")
    expect_folder(both, MODEL)
    expect_folder(both, MEDUSA)


def test_a_drafters_tensors_are_listed_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[Path] = []
    found = folders._list_tensors

    def note(folder: Path, flag: str) -> Any:
        listed.append(folder)
        return found(folder, flag)

    monkeypatch.setattr(folders, "_list_tensors", note)
    assert folders.recognize_drafter(store(EAGLE), "--drafter-model-dir") == EAGLE
    assert listed == [store(EAGLE)]


@pytest.mark.parametrize(
    ("tensor", "key", "what"),
    [
        ("speculator.emb.0.weight", "n_predict", "an MLP or LSTM speculator"),
        ("0.0.linear.weight", "hydra_num_heads", "Hydra heads"),
        ("blocks.0.layers.0.weight", "num_heads", "Medusa heads with vLLM's names"),
        ("fusion_fc.weight", "layernorms", "an EAGLE-1 drafter with speculators' names"),
        ("model.fc.weight", "draft_vocab_size", "an EAGLE-3 drafter with NeMo's names"),
    ],
)
def test_drafters_that_are_not_read_are_called_what_they_are(
    tensor: str, key: str, what: str, tmp_path: Path
) -> None:
    """By the general option and by one method's own."""
    import torch
    from safetensors.torch import save_file

    save_file({tensor: torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({key: 1}))
    for refuse in (
        lambda: folders.recognize_drafter(tmp_path, "--drafter-model-dir"),
        lambda: expect_folder(tmp_path, MEDUSA, "--medusa-model-dir"),
    ):
        with pytest.raises(SpecDecError, match=f"holds {what} ") as caught:
            refuse()
        assert "medusa_lm_head" in caught.value.hint


def test_what_cannot_be_told_passes(tmp_path: Path) -> None:
    """Whoever reads the folder then says what is missing, or wrong."""
    (tmp_path / "config.json").write_text("no JSON")
    for wanted in KINDS:
        expect_folder(tmp_path, wanted)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert look_at(tmp_path).kind is None


def test_a_mistyped_path_is_told_its_neighbour(store: Store, tmp_path: Path) -> None:
    for path, match, hint in (
        (store("engin"), r"does not exist \(did you mean engine\?\)", "check the path"),
        (tmp_path / "no" / "engine", "no/engine does not exist, nor does .*no", "check the path"),
        (store(MODEL) / "config.json", "is a file", "give the folder that holds it"),
    ):
        with pytest.raises(SpecDecError, match=match) as caught:
            expect_folder(path, ENGINE, "--engine-dir")
        assert caught.value.hint.startswith(hint)


def test_commands_refuse_by_name(store: Store, tmp_path: Path) -> None:
    """One wrong folder for every flag that takes one."""
    from specdec.text.pretrained import load_model, load_tokenizer

    out, target = ["--output-dir", tmp_path / "out"], ["--model-dir", store(MODEL)]
    base = ["--base-model-checkpoint-dir", store(MODEL), "--drafter-model-dir", store(REDRAFTER)]
    commands: list[tuple[list[object], str, str]] = [
        (["build", "--checkpoint-dir", store(MODEL), *out],
         "is a Hugging Face model folder, not a checkpoint", "specdec-convert --model-dir"),
        (["build", "--checkpoint-dir", store(ENGINE), *out],
         "is an engine folder, not a checkpoint", "specdec-run takes it as --engine-dir"),
        (["run", "--engine-dir", store(CHECKPOINT), "--input-text", "a"],
         "is a checkpoint folder, not an engine", "specdec-build --checkpoint-dir"),
        (["convert", "--model-dir", store(REDRAFTER), *out],
         "is the folder of a ReDrafter drafter, not a Hugging Face model", "--drafter-model-dir"),
        (["convert", "--model-dir", store(ENGINE), *out],
         "is an engine folder, not", "converted from"),
        (["convert", *target, "--drafter-model-dir", store(ENGINE), *out],
         "is an engine folder, not a drafter's", "specdec-run takes it as --engine-dir"),
        (["convert", *target, "--medusa-model-dir", store(EAGLE), *out],
         "is the folder of an EAGLE drafter, not a folder of Medusa heads", "--eagle-model-dir"),
        (["convert", *target, "--eagle-model-dir", store(MODEL), *out],
         "is a Hugging Face model folder, not", "specdec-convert --model-dir"),
        (["convert", *base, *out], "--base-model-checkpoint-dir", "convert it first"),
        (["verify", "--checkpoint-dir", store(ENGINE)], "--checkpoint-dir", "built already"),
        (["doctor", "--engine-dir", store(MODEL)], "--engine-dir", "convert it first"),
    ]  # fmt: skip
    calls: list[tuple[Callable[[], object], str, str]] = [
        (functools.partial(call, *map(str, words)), fact, remedy)
        for words, fact, remedy in commands
    ]
    calls += [
        (lambda: load_tokenizer(store(ENGINE)), "is an engine folder, and has no tokenizer",
         "the target"),
        (lambda: load_model(store(CHECKPOINT)), "is a checkpoint folder, not", "converted from"),
    ]  # fmt: skip
    for attempt, fact, remedy in calls:
        with pytest.raises(SpecDecError) as caught:
            attempt()
        assert fact in caught.value.message
        assert remedy in caught.value.hint
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["o/a--b", "o/a..b", "o/a-", "o./a", "o/a.git", f"o/{'x' * 97}"])
def test_names_that_the_hub_refuses_are_paths(name: str) -> None:
    """Its library raises an error of its own for them."""
    assert not folders.is_hub_id(name)
    for other_name in ("gpt2", "o/a", f"o/{'x' * 96}", "Qwen/Qwen2.5-Coder-1.5B-Instruct", "o_/a_"):
        assert folders.is_hub_id(other_name)
