"""tokenizer.json is the truth: what package tokenizers makes of it, whatever class is named."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as splits

from specdec.errors import SpecDecError
from specdec.files.text_reading import TEXTS
from specdec.files.vocabulary import has_recorded_file, list_differences, read_vocabulary
from specdec.text import pretrained_tokenizer
from specdec.text.pretrained import load_tokenizer, warn_of_other_ids
from specdec.text.pretrained_tokenizer import keep_tokenizers
from tests.conftest import ROOT
from tests.covering import cover

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<unk>", "<s>", "</s>", "<|endoftext|>")
PROBES = (*TEXTS, "<s>[INST] Hi [/INST]</s> x", "<|endoftext|> hi", "")
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CLASSES = (
    "GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer",
    "CohereTokenizerFast", "GPTNeoXTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend",
    None,
)  # fmt: skip
MODEL_TYPES = ("llama", "qwen2", "gpt2", "phi3", "gemma", "gpt_neox", "unheard")
KINDS = ("digits", "split", "bytes", "spaced", "prepended", "metaspace")


def make_bytes(kind: str) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    own = splits.ByteLevel(add_prefix_space=kind == "spaced", use_regex=kind != "split")
    first: dict[str, Any] = {
        "digits": splits.Digits(individual_digits=True),
        "split": splits.Split(Regex(LLAMA3), "isolated"),
    }
    backend.pre_tokenizer = splits.Sequence([first[kind], own]) if kind in first else own
    backend.decoder = decoders.ByteLevel()
    return backend


def make_pieces(kind: str) -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if kind == "metaspace":
        backend.pre_tokenizer = splits.Metaspace("\u2581", prepend_scheme="first", split=False)
    else:
        steps: list[Any] = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return backend


@pytest.fixture(scope="module")
def backends() -> dict[str, str]:
    """Trained tokenizers by kind, as JSON."""
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    found = {}
    for kind in KINDS:
        is_bytes = kind not in ("prepended", "metaspace")
        backend = make_bytes(kind) if is_bytes else make_pieces(kind)
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=list(SPECIAL), show_progress=False, max_token_length=12,
            initial_alphabet=splits.ByteLevel.alphabet() if is_bytes else [],
        )  # fmt: skip
        backend.train_from_iterator(text.splitlines(keepends=True), trainer)
        found[kind] = backend.to_str()
    return found


def write(
    folder: Path, backend: str, config: dict[str, Any], *, model_type: str = "llama", ends: str = ""
) -> Path:
    """Write a tokenizer. ends: which of bos and eos tokenizer.json puts at the ends of a text."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Tokenizer.from_str(backend)
    if ends:
        single = f"{'<s> ' if 'b' in ends else ''}$A{' </s>' if 'e' in ends else ''}"
        numbers = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(single=single, special_tokens=numbers)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def read(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "named", "model_type", "ends"),
    cover(itertools.product(KINDS, CLASSES, MODEL_TYPES, ("", "b", "be"))),
)
def test_ids_and_texts_are_those_of_package_tokenizers(
    kind: str, named: str | None, model_type: str, ends: str,
    backends: dict[str, str], tmp_path: Path,
) -> None:  # fmt: skip
    """SmolLM's class split runs of spaces otherwise, Llama's lost the space after <s>."""
    config = NAMES | ({"tokenizer_class": named} if named else {})
    folder = write(tmp_path, backends[kind], config, model_type=model_type, ends=ends)
    expected, loaded = Tokenizer.from_file(str(folder / "tokenizer.json")), load_tokenizer(folder)
    for text in PROBES:
        ids = expected.encode(text).ids
        assert read(loaded, text) == ids
        assert loaded.decode(ids) == expected.decode(ids, skip_special_tokens=False)
    assert (loaded.bos_token, loaded.eos_token) == ("<s>", "</s>")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("named", "follows"),
    [
        ("LlamaTokenizer", True), ("LlamaTokenizerFast", True), ("GemmaTokenizerFast", True),
        ("CohereTokenizer", True), ("GPTNeoXTokenizerFast", True), ("CodeLlamaTokenizer", True),
        ("PreTrainedTokenizerFast", False), ("Qwen2Tokenizer", False), ("GPT2Tokenizer", False),
        (None, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["split", "prepended"])
@pytest.mark.parametrize("ends", ["", "b", "be"])
def test_the_keys_of_a_texts_ends_are_followed_where_transformers_4_follows_them(
    named: str | None, follows: bool, kind: str, ends: str,
    backends: dict[str, str], tmp_path: Path,
) -> None:  # fmt: skip
    for adds_bos, adds_eos in ((True, False), (False, True), (False, False), (True, True)):
        config = NAMES | {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
        config |= {"tokenizer_class": named} if named else {}
        folder = write(tmp_path, backends[kind], config, ends=ends)
        expected = Tokenizer.from_file(str(folder / "tokenizer.json"))
        plain, numbers = expected.encode("a b", add_special_tokens=False).ids, (1, 2)
        ids = [*numbers[: int(adds_bos)], *plain, *numbers[2 - int(adds_eos) :]]
        assert read(load_tokenizer(folder), "a b") == (
            ids if follows else expected.encode("a b").ids
        )


def test_the_space_before_a_text(backends: dict[str, str], tmp_path: Path) -> None:
    """transformers 4.57 takes an absent key for false, and 5 takes no notice of any."""
    for key, kind, adds in (
        (None, "spaced", True), (False, "spaced", False), (True, "bytes", True),
        (None, "bytes", False),
    ):  # fmt: skip
        config: dict[str, Any] = NAMES | {"tokenizer_class": "GPT2Tokenizer"}
        config["add_prefix_space"] = key
        if key is None:
            del config["add_prefix_space"]
        loaded = load_tokenizer(write(tmp_path, backends[kind], config))
        assert loaded.tokenize("ab")[0].startswith("\u0120") == adds
    config = NAMES | {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": True}
    load_tokenizer(write(tmp_path, backends["prepended"], config))
    config["add_prefix_space"] = False
    folder = write(tmp_path, backends["prepended"], config)
    with pytest.raises(
        SpecDecError, match="add_prefix_space in tokenizer_config.json is false, and"
    ):
        load_tokenizer(folder)


def test_keys_that_contradict_tokenizer_json(backends: dict[str, str], tmp_path: Path) -> None:
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": None}
    folder = write(tmp_path, backends["split"], config)
    with pytest.raises(SpecDecError, match="add_bos_token is true, and bos_token is no token"):
        load_tokenizer(folder)
    token = {"content": "<s>", "lstrip": True, "normalized": True, "special": True}
    config = NAMES | {"added_tokens_decoder": {"1": token}}
    loaded = load_tokenizer(write(tmp_path, backends["prepended"], config))
    assert read(loaded, "x <s>") == Tokenizer.from_str(backends["prepended"]).encode("x <s>").ids
    config["added_tokens_decoder"] = {"7": token}
    folder = write(tmp_path, backends["prepended"], config)
    with pytest.raises(SpecDecError, match="token '<s>' is 7 in .*added_tokens_decoder and 1 in"):
        load_tokenizer(folder)


def test_truncation_and_padding_are_not_done(backends: dict[str, str], tmp_path: Path) -> None:
    folder = write(tmp_path, backends["split"], NAMES)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = made.encode("one two three four").ids
    made.enable_truncation(2)
    made.enable_padding(length=40)
    made.save(str(folder / "tokenizer.json"))
    loaded = load_tokenizer(folder)
    assert read(loaded, "one two three four") == ids
    assert loaded.backend_tokenizer.encode("one two three four").ids == ids


def test_tokens_that_only_a_class_names(backends: dict[str, str], tmp_path: Path) -> None:
    """GPT-2's own tokenizer_config.json holds nothing but a length."""
    for model_type, config, eos in (
        ("gpt2", {"model_max_length": 1024}, "<|endoftext|>"),
        ("llama", {"tokenizer_class": "LlamaTokenizerFast"}, "</s>"),
        ("qwen2", {"tokenizer_class": "PreTrainedTokenizerFast"}, None),
    ):  # fmt: skip
        folder = write(tmp_path, backends["bytes"], config, model_type=model_type)
        loaded = load_tokenizer(folder)
        assert loaded.eos_token == eos
        assert len(loaded) == Tokenizer.from_str(backends["bytes"]).get_vocab_size()


def test_the_vocabulary_sees_how_text_is_read(backends: dict[str, str], tmp_path: Path) -> None:
    """And not how the file is spelled."""
    document = json.loads(backends["split"])

    def describe(name: str, **changes: Any) -> dict[str, Any]:
        folder = write(tmp_path / name, json.dumps(document | changes), NAMES)
        found = read_vocabulary(folder)
        assert found is not None
        return found

    first = describe("first")
    spaced = json.loads(make_bytes("spaced").to_str())["pre_tokenizer"]
    for changes in (
        {"pre_tokenizer": json.loads(make_bytes("digits").to_str())["pre_tokenizer"]},
        {"pre_tokenizer": spaced}, {"normalizer": {"type": "Lowercase"}}, {"decoder": None},
    ):  # fmt: skip
        assert list_differences(first, describe("other", **changes)) == ["reading_sha256"]
    merges = [" ".join(pair) for pair in document["model"]["merges"]]
    respelled = describe("respelled", model=document["model"] | {"merges": merges})
    assert list_differences(first, respelled) == []
    assert list_differences(first, {key: first[key] for key in ("num_tokens", "sha256")}) == []
    assert has_recorded_file(tmp_path / "first", first)
    assert not has_recorded_file(tmp_path / "other", first)


def test_a_folder_that_stays_as_it_is_is_read_once(
    backends: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who changes the template or a special token changes nobody else's."""
    loads: list[str] = []

    def load(name: str, **options: Any) -> Any:
        loads.append(name)
        return load_again(name, **options)

    load_again = pretrained_tokenizer._load_tokenizer
    monkeypatch.setattr(pretrained_tokenizer, "_load_tokenizer", load)
    folder = write(tmp_path / "model", backends["split"], NAMES)

    def age(seconds: int) -> None:
        for path in folder.iterdir():
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - seconds))

    with keep_tokenizers():
        load_tokenizer(folder)
        load_tokenizer(folder)
        assert len(loads) == 2  # what was just written may be written again in one clock tick
        age(60)
        first, second = load_tokenizer(folder), load_tokenizer(folder)
        assert len(loads) == 3
        second.eos_token, second.chat_template = "<|endoftext|>", "another"
        for tokenizer in (first, load_tokenizer(folder)):
            assert (tokenizer.eos_token, tokenizer.chat_template) == ("</s>", None)
            assert tokenizer.all_special_tokens == ["<s>", "</s>", "<unk>"]
        assert len(loads) == 3
        write(folder, backends["split"], NAMES | {"eos_token": "<s>"})
        age(30)
        assert load_tokenizer(folder).eos_token == "<s>"
    load_tokenizer(folder).backend_tokenizer.normalizer = normalizers.Lowercase()
    assert load_tokenizer(folder).backend_tokenizer.normalizer is None, "nothing is kept outside"


def test_a_class_that_reads_otherwise_is_told(
    backends: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(logging.getLogger("specdec"), "propagate", True)
    for named in ("PreTrainedTokenizerFast", "LlamaTokenizerFast"):
        config = NAMES | {"tokenizer_class": named, "add_bos_token": False}
        warn_of_other_ids(write(tmp_path, backends["split"], config))
        assert caplog.text == ""
    config |= {"add_bos_token": True}  # transformers 5 takes no notice of it
    folder = write(tmp_path, backends["digits"], config | {"tokenizer_class": "GPT2Tokenizer"})
    import transformers

    warn_of_other_ids(folder)
    if not transformers.__version__.startswith("4."):
        assert "GPT2Tokenizer of transformers" in caplog.text
        assert "reads texts otherwise than tokenizer.json" in caplog.text
        assert "] by tokenizer.json, [" in caplog.text


TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"


def test_templates_of_processors_and_by_name(backends: dict[str, str], tmp_path: Path) -> None:
    from specdec.text.tokenizer import copy_tokenizer

    source = write(tmp_path / "source", backends["split"], NAMES)
    (source / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert load_tokenizer(source).chat_template == TEMPLATE
    named = source / "additional_chat_templates"
    named.mkdir()
    (named / "tool_use.jinja").write_text("TOOLS" + TEMPLATE)
    engine = tmp_path / "engine"
    engine.mkdir()
    copy_tokenizer(source, engine)
    expected = {"default": TEMPLATE, "tool_use": "TOOLS" + TEMPLATE}
    assert load_tokenizer(engine / "tokenizer").chat_template == expected
    (source / "chat_template.jinja").write_text("{{ 1 }}")
    assert load_tokenizer(source).chat_template == expected | {"default": "{{ 1 }}"}
    shutil.rmtree(named)
    listed = [{"name": name, "template": text} for name, text in expected.items()]
    (source / "chat_template.jinja").unlink()
    (source / "chat_template.json").write_text(json.dumps({"chat_template": listed}))
    assert load_tokenizer(source).chat_template == expected
