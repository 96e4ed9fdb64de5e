"""Tokenizers in GGUF files: SentencePiece ones split texts as transformers does, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from specdec.errors import SpecDecError
from specdec.export.pipeline import export_model
from specdec.export.settings import ExportSettings
from specdec.export.tokenizers import read_template, read_tokenizer
from specdec.text.tokenizer import copy_files
from tests.conftest import make_llama
from tests.export.gguf_reader import read_gguf
from tests.export.sentencepiece import SPACE, list_hostile, make_sentencepiece, split

METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": False}


def change(folder: Path, **fields: Any) -> dict[str, Any]:
    """Replace fields of tokenizer.json; `model` and the first added token are changed in place."""
    path = folder / "tokenizer.json"
    described: dict[str, Any] = json.loads(path.read_text())
    described["model"] |= fields.pop("model", {})
    described["added_tokens"][2] |= fields.pop("added", {})
    path.write_text(json.dumps(described | fields))
    return described


@pytest.mark.parametrize("kind", ["prefix", "bare", "metaspace"])
def test_sentencepiece_splits_as_transformers_does(kind: str, tmp_path: Path) -> None:
    """A hundred hostile texts, by llama.cpp's way and the file's scores, and by tokenizers."""
    folder = tmp_path / "model"
    folder.mkdir()
    size = make_sentencepiece(folder, adds_space=kind == "prefix")
    if kind == "metaspace":
        change(folder, normalizer=None, pre_tokenizer=METASPACE)
    model = make_llama(tmp_path, layers=1, vocab=size + 3, name="weights")
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(model / name)
    export_model(ExportSettings(output_dir=tmp_path / "out", model_dir=str(folder), to="gguf"))
    values, _ = read_gguf(tmp_path / "out" / "model.gguf")
    assert values["tokenizer.ggml.model"] == "llama"
    assert values["tokenizer.ggml.pre"] == "default"
    assert values["tokenizer.ggml.unknown_token_id"] == 0
    assert values["tokenizer.ggml.bos_token_id"] == 1
    assert values["tokenizer.ggml.add_bos_token"] is True
    assert values["tokenizer.ggml.add_eos_token"] is False
    assert values["tokenizer.ggml.add_space_prefix"] is (kind == "prefix")
    kinds = values["tokenizer.ggml.token_type"]
    assert kinds[:3] == [2, 3, 3]
    assert kinds[3:259] == [6] * 256
    assert set(kinds[259:-3]) == {1}
    assert kinds[-3:] == [5] * 3
    assert len(values["tokenizer.ggml.scores"]) == size + 3
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in list_hostile():
        assert split(text, values) == theirs.encode(text, add_special_tokens=False).ids, text


def merge_less(merges: list[Any]) -> list[Any]:
    """Leave out a merge that is not the only one of its token."""
    made = ["".join(pair) for pair in merges]
    return [pair for at, pair in enumerate(merges) if made.index(made[at]) == at]


def scatter(merges: list[Any]) -> list[Any]:
    """Put the last of a token's several merges to the end."""
    made = ["".join(pair) for pair in merges]
    at = next(at for at, token in enumerate(made) if made.index(token) != at)
    return [*merges[:at], *merges[at + 1 :], merges[at]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": {"merges": merge_less}}, "does not merge '.*' and '.*' to the token"),
        ({"model": {"merges": scatter}}, "has merges of '.*' in several places"),
        ({"model": {"ignore_merges": True}}, "has ignore_merges True"),
        ({"normalizer": {"type": "NFC"}}, "has the normalizer {'type': 'NFC'}"),
        ({"normalizer": None, "pre_tokenizer": METASPACE | {"prepend_scheme": "first"}},
         r"puts a space \(first\) only"),
        ({"normalizer": None, "pre_tokenizer": METASPACE | {"prepend_scheme": "always"}},
         r"puts a space \(always\) only"),
        ({"normalizer": None, "pre_tokenizer": METASPACE | {"split": True}}, "splits texts at sp"),
        ({"added": {"rstrip": True}}, "has the token '</s>' with rstrip"),
        ({"added": {"normalized": True}}, "looks for the token '</s>' in normalized text"),
        ({"post_processor": {"type": "BertProcessing"}}, "puts around a text"),
        ({"post_processor": None}, None),
    ],
)  # fmt: skip
def test_what_llama_cpp_would_split_otherwise(
    fields: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    size = make_sentencepiece(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 1]}))
    model = dict(fields.get("model", {}))
    if callable(make := model.get("merges")):
        described = json.loads((tmp_path / "tokenizer.json").read_text())
        fields = {"model": {"merges": make(described["model"]["merges"])}}
    change(tmp_path, **fields)
    if message is None:
        words = read_tokenizer(str(tmp_path), size)
        assert not words.adds_bos
        assert words.special == {"bos": 1, "eos": 2, "unk": 0}
        return
    with pytest.raises(SpecDecError, match=message) as caught:
        read_tokenizer(str(tmp_path), size)
    assert "convert_hf_to_gguf.py" in caught.value.hint


def test_a_token_of_a_byte_is_missing_and_another_beginning(tmp_path: Path) -> None:
    size = make_sentencepiece(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 2}))
    with pytest.raises(SpecDecError, match=r"begins a text with \[1\], .* bos_token_id is 2"):
        read_tokenizer(str(tmp_path), size)
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    del described["model"]["vocab"]["<0x0A>"]
    change(tmp_path, model={"vocab": described["model"]["vocab"]})
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(SpecDecError, match="has no token <0x0A>"):
        read_tokenizer(str(tmp_path), size)
    with pytest.raises(SpecDecError, match=f"has a token of number {size - 1}, the model has 300"):
        read_tokenizer(str(tmp_path), 300)


def test_the_templates_of_a_folder(tmp_path: Path) -> None:
    """Those of processors and by name, too; all of them go along, and config.json stays."""
    source, copy = tmp_path / "source", tmp_path / "copy"
    named = source / "additional_chat_templates"
    named.mkdir(parents=True)
    copy.mkdir()
    (source / "config.json").write_text("{}")
    (copy / "config.json").write_text('{"own": 1}')
    assert read_template(source) is None
    (source / "chat_template.json").write_text('{"chat_template": "A"}')
    assert read_template(source) == "A"
    (source / "tokenizer_config.json").write_text('{"chat_template": "B"}')
    assert read_template(source) == "B"
    (named / "tool_use.jinja").write_text("C")
    listed = [{"name": "default", "template": "B"}, {"name": "tool_use", "template": "C"}]
    assert read_template(source) == listed
    copy_files(source, copy)
    assert read_template(copy) == listed
    assert (copy / "chat_template.json").is_file()
    assert (copy / "config.json").read_text() == '{"own": 1}'
