"""An engine that was built with --tokenizer-dir holds its tokenizer, and needs no other."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from specdec import Engine, SpecDecError
from specdec.decode.prompt_requests import find_end_ids
from specdec.decode.settings import DecodeSettings
from specdec.files.reading import hash_file
from specdec.text.tokenizer import FOLDER, check_tokenizer, copy_tokenizer, find_tokenizer
from tests.conftest import make_llama, make_tokenizer
from tests.engines import call, run_cli_here, run_here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("remembered")
    target = make_llama(parent, seed=5)
    make_tokenizer(target)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [117, 5]}))
    call("convert", "--model-dir", target, "--output-dir", parent / "ckpt")
    build(parent, "engine", "--tokenizer-dir", target)
    build(parent, "bare")
    return parent


def build(parent: Path, name: str, *flags: object) -> None:
    call(
        "build", "--checkpoint-dir", parent / "ckpt", "--output-dir", parent / name,
        "--optimize", "none", *flags,
    )  # fmt: skip


def run(folder: Path, name: str, *flags: str) -> list[dict[str, Any]]:
    report = run_here(
        ["--engine-dir", str(folder / name), "--max-output-len", "20", "--device", "cpu", *flags]
    )
    outputs: list[dict[str, Any]] = report["outputs"]
    return outputs


def test_the_engine_runs_without_another(folder: Path) -> None:
    """The same text, the same end tokens, the same stop words."""
    flags = ("--input-text", "def a", "return", "--stop-words", "zq")
    given = run(folder, "bare", *flags, "--tokenizer-dir", str(folder / "target"))
    assert run(folder, "engine", *flags) == given
    assert any(output["output_text"] for output in given)
    with Engine.load(folder / "engine", device="cpu") as engine:
        outputs = engine.generate(["def a", "return"], max_output_len=20, stop="zq")
        assert [output.text for output in outputs] == [o["output_text"] for o in given]
        assert engine._end_ids == {117, 5}
        tokenizer = engine.tokenizer
    with Engine.load(folder / "engine", tokenizer=tokenizer, device="cpu") as engine:
        assert engine._end_ids == {117, 5}, "the model's, whose generation_config.json is there"
    with Engine.load(folder / "bare", device="cpu") as engine:
        assert engine.tokenizer is None


def test_the_ends_of_a_tokenizer_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are those of its generation_config.json, which the tokenizer alone does not need."""
    asked = []

    def download(name: str, allow_patterns: list[str], **_: Any) -> str:
        asked.append((name, "generation_config.json" in allow_patterns))
        return str(folder / "target")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    settings = DecodeSettings(tokenizer_dir="someone/model")
    assert find_end_ids(settings, None) == {117, 5}
    assert asked == [("someone/model", True)]


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("value", ["2", [2, "3"], 2.0, True, {"id": 2}])
def test_an_end_token_that_is_no_number_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    """A text that goes on beyond its end would be the other choice."""
    (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(SpecDecError, match=f"{name}: eos_token_id is .*, not a token's number"):
        find_end_ids(DecodeSettings(tokenizer_dir=str(tmp_path)), None)
    settings = DecodeSettings(tokenizer_dir=str(tmp_path), end_id=7)
    assert find_end_ids(settings, None) == {7}


def test_a_hub_model_without_the_file_of_its_ends_is_told_of(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where only the tokenizer is in the Hub's cache and there is no network."""
    shutil.copyfile(folder / "target" / "tokenizer.json", tmp_path / "tokenizer.json")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    monkeypatch.setattr(logging.getLogger("specdec"), "propagate", True)
    assert find_end_ids(DecodeSettings(tokenizer_dir="someone/model"), None) == set()
    assert "someone/model: no generation_config.json was found" in caplog.text


def test_an_absent_folder_is_not_asked_for_at_the_hub(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecDecError, match="--tokenizer-dir .*/nothere does not exist"):
        check_tokenizer(str(tmp_path / "nothere"), None)


def test_the_manifest_lists_the_copied_files(folder: Path) -> None:
    manifest = json.loads((folder / "engine" / "manifest.json").read_text())
    listed = {entry["path"]: entry["sha256"] for entry in manifest["outputs"]}
    copied = sorted((folder / "engine" / FOLDER).iterdir())
    assert {"tokenizer.json", "generation_config.json"} <= {path.name for path in copied}
    for path in copied:
        assert (
            listed[f"{FOLDER}/{path.name}"]
            == hash_file(path)
            == hash_file(folder / "target" / path.name)
        )


def test_a_given_tokenizer_wins(folder: Path) -> None:
    assert find_tokenizer(folder / "engine", "other") == "other"
    assert find_tokenizer(folder / "engine") == str(folder / "engine" / FOLDER)
    assert find_tokenizer(folder / "bare") is None


def swap_tokens(folder: Path) -> Path:
    """Write the tokenizer of another model: as many tokens, two of which have changed places."""
    make_tokenizer(folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    vocab = document["model"]["vocab"]
    first, second = list(vocab)[10:12]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


def test_another_models_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    other = swap_tokens(tmp_path / "other")
    with pytest.raises(SpecDecError, match="is not the one that the checkpoint was made with"):
        build(folder, "refused", "--tokenizer-dir", other)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecDecError, match="has no tokenizer"):
        build(folder, "refused", "--tokenizer-dir", tmp_path / "empty")
    with pytest.raises(SpecDecError, match="absent does not exist"):
        build(folder, "refused", "--tokenizer-dir", tmp_path / "absent")
    assert not (folder / "refused").exists()


def test_a_copy_that_lacks_something_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "own_format.bin").write_text("x")
    with pytest.raises(SpecDecError, match="has no tokenizer"):
        copy_tokenizer(tmp_path / "source", tmp_path / "engine")


def test_verify_lets_no_remembered_tokenizer_end_a_text(folder: Path, tmp_path: Path) -> None:
    """Of a model that has no tokenizer, prompts are token ids, and texts go on to their limit."""
    from specdec.verify.engine import open_engine
    from specdec.verify.settings import VerifySettings

    settings = VerifySettings(
        engine_dir=folder / "engine", model_dir=str(tmp_path), device="cpu", max_output_len=60
    )
    with open_engine(settings, None) as (_, write):
        (output,) = write("a prompt", [[5, 9, 77]], is_greedy=True)
    assert output.finish_reason == "length"
    assert 117 in output.token_ids


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("engine", "is not the tokenizer of .*engine: 2 of its .* tokens differ: 1[0-9] is '"),
        ("bare", "is not the one that .*bare was made with"),
    ],
)
def test_another_models_tokenizer_is_refused_at_each_use(
    folder: Path, tmp_path: Path, name: str, fact: str
) -> None:
    """It wrote garbage, with status 0."""
    other = swap_tokens(tmp_path / "other")
    with pytest.raises(SpecDecError, match=fact) as caught:
        Engine.load(folder / name, tokenizer=str(other), device="cpu")
    assert "leave --tokenizer-dir out" in caught.value.hint
    done = run_cli_here(
        "run", "--engine-dir", folder / name, "--tokenizer-dir", other, "--input-text", "def a"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "was made with" in done.stderr or "is not the tokenizer of" in done.stderr


@pytest.mark.parametrize("name", ["engine", "bare"])
def test_a_tokenizer_that_splits_otherwise_is_refused(
    folder: Path, tmp_path: Path, name: str
) -> None:
    other = make_tokenizer(tmp_path / "other")
    document = json.loads((other / "tokenizer.json").read_text())
    document["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}
    (other / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(SpecDecError, match="reads texts otherwise than|to the engine's own"):
        Engine.load(folder / name, tokenizer=str(other), device="cpu")


def test_tokens_that_a_tokenizer_adds_are_no_other_model(folder: Path, tmp_path: Path) -> None:
    other = make_tokenizer(tmp_path / "other")
    path = other / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "[PAD]"}))
    for name in ("engine", "bare"):
        with Engine.load(folder / name, tokenizer=str(other), device="cpu") as engine:
            assert engine.tokenizer.pad_token == "[PAD]"
