"""Small modules of text: marks of learning, keys of tokenizers, comparisons, bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel

from specdec.errors import SpecDecError
from specdec.model.bounds import check_model_sizes
from specdec.text.comparison import find_difference, find_verdict, judge_margin, name_token
from specdec.text.learning_marks import MarkError, is_row_learned, read_mark, read_turn, split_words
from specdec.text.pretrained_tokenizer import (
    TokenizerFiles,
    apply_keys,
    find_files,
    open_tokenizer,
)
from specdec.text.samples import TEXTS

# ---- Marks.


@pytest.mark.parametrize(
    ("fields", "is_learned"),
    [
        # As the trainers' own pages have them: OpenAI, axolotl, ms-swift, torchtune, slime, Tinker.
        ({"weight": 0}, False), ({"weight": 1}, True), ({"train": False}, False),
        ({"training": True}, True), ({"loss": False}, False), ({"loss": "no"}, False),
        ({"masked": True}, False), ({"masked": False}, True), ({"step_loss_mask": 0}, False),
        ({"step_loss_mask": 1}, True), ({"trainable": False}, False),
        # Other words for the same; a mask of the answer has 1 for what is learned.
        ({"no_loss": True}, False), ({"dontTrain": 1}, False), ({"ignoreLoss": False}, True),
        ({"is_trained": "off"}, False), ({"assistant_mask": [0, 0]}, False),
        # Nothing of learning, or no yes and no.
        ({"content": "x", "name": "weight", "no": 1}, True), ({"weight_class": 0}, True),
        ({"label": 0}, True), ({"label": False}, False),
    ],
)  # fmt: skip
def test_marks(fields: dict[str, Any], is_learned: bool) -> None:
    assert read_mark(fields, "turn 1")[0] is is_learned


def test_marks_in_part_are_refused() -> None:
    with pytest.raises(MarkError, match=r"turn 1 has weight 0\.5: a turn is learned whole"):
        read_mark({"weight": 0.5}, "turn 1")
    halves = [{"text": "a", "train": True}, {"text": "b", "train": False}]
    with pytest.raises(MarkError, match="turn 1 has parts that are learned and others that are"):
        read_turn({"content": halves}, "turn 1")
    assert read_turn({"content": halves[1:], "weight": 1}, "turn 1") == (False, ["weight"])
    assert split_words("stepLoss_mask") == ["step", "loss", "mask"]


def test_rows_have_marks_of_their_own() -> None:
    roles = {"gpt": "assistant", "user": "user"}
    assert not is_row_learned({"mask": "GPT"}, roles)
    assert is_row_learned({"mask": "User"}, roles)
    assert not is_row_learned({"kto_tag": False}, roles)
    assert not is_row_learned({"train": 0}, roles)
    assert is_row_learned({"text": "a", "label": False}, roles)  # a class of texts


# ---- Keys of tokenizer_config.json.


def make_backend(**parts: Any) -> Tokenizer:
    words = {word: number for number, word in enumerate(["<s>", "</s>", "a", "A", "b", "?"])}
    backend = Tokenizer(WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, part in parts.items():
        setattr(backend, name, part)
    backend.enable_truncation(1)
    return backend


def apply(backend: Tokenizer, model: dict[str, Any] | None = None, **config: Any) -> Tokenizer:
    files = TokenizerFiles("m", None, config, model or {}, {})
    apply_keys(backend, files, "<s>", "</s>")
    return backend


@pytest.mark.parametrize(
    ("config", "model_type", "ids"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True}, None, [0, 2, 4, 1]),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, None, [2, 4]),
        ({"add_bos_token": True}, "mistral", [0, 2, 4]),
        ({"add_eos_token": True}, "stablelm", [2, 4, 1]),
        ({"tokenizer_class": "GPT2TokenizerFast", "add_bos_token": True}, None, [2, 4]),
        ({"tokenizer_class": "LlamaTokenizer"}, None, [2, 4]),
    ],
)  # fmt: skip
def test_ends_are_those_of_the_class(
    config: dict[str, Any], model_type: str | None, ids: list[int]
) -> None:
    """And a truncation that the file has is not applied."""
    backend = apply(make_backend(), {"model_type": model_type}, **config)
    assert backend.encode("a b").ids == ids
    if ids[0] == 0 and ids[-1] == 1:
        assert backend.encode("a", "b").ids == [0, 2, 1, 0, 4, 1]


def test_keys_that_cannot_be_applied_are_refused() -> None:
    backend = make_backend()
    files = TokenizerFiles(
        "m", None, {"tokenizer_class": "LlamaTokenizer", "add_eos_token": True}, {}, {}
    )
    with pytest.raises(SpecDecError, match="add_eos_token is true, and eos_token is no token"):
        apply_keys(backend, files, "<s>", "<none>")
    with pytest.raises(SpecDecError, match="add_prefix_space .* is true, and .* puts no space"):
        apply(make_backend(), tokenizer_class="LlamaTokenizer", add_prefix_space=True)
    spaced = make_backend(normalizer=normalizers.Prepend("\u2581"))
    apply(spaced, tokenizer_class="LlamaTokenizer", add_prefix_space=True)


def test_keys_of_bert_and_of_byte_levels() -> None:
    lower = normalizers.BertNormalizer(lowercase=True)
    assert apply(make_backend(normalizer=lower)).encode("A").ids == [2]
    backend = apply(make_backend(normalizer=lower), tokenizer_class="BertTokenizer",
                    do_lower_case=False)  # fmt: skip
    assert backend.encode("A").ids == [3]
    for adds_space in (True, False):
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=not adds_space)
        backend = apply(make_backend(pre_tokenizer=byte_level), add_prefix_space=adds_space)
        assert backend.pre_tokenizer.pre_tokenize_str("a")[0][0] == "\u0120" * adds_space + "a"


def test_a_folders_tokenizer_is_its_file(tmp_path: Path) -> None:
    """With the template that only a processor's file has; a broken file beside it is empty."""
    make_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"})
    )
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 1 }}"}))
    (tmp_path / "special_tokens_map.json").write_text("{")
    files = find_files(str(tmp_path))
    assert (files.class_name, files.special) == ("PreTrainedTokenizerFast", {})
    (tmp_path / "special_tokens_map.json").unlink()
    tokenizer = open_tokenizer(str(tmp_path))
    assert tokenizer("a b")["input_ids"] == [2, 4]
    assert (tokenizer.bos_token, tokenizer.chat_template) == ("<s>", "{{ 1 }}")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"9": {"content": "b"}}, "bos_token": "<s>"})
    )
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["added_tokens"] = [{
        "id": 4, "content": "b", "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True}]  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(SpecDecError, match="token 'b' is 9 in .* and 4 in tokenizer.json"):
        open_tokenizer(str(tmp_path))


# ---- Comparisons and bounds.


def test_texts_are_compared_by_the_first_difference() -> None:
    assert find_difference([1, 2, 3], [1, 2, 3]) is None
    assert (find_difference([1, 2], [1, 9]), find_difference([1], [1, 2])) == (1, 1)
    margins = {0.5: "near-tie", -0.5: "near-tie", 0.6: "differs", None: "unknown"}
    assert {margin: judge_margin(margin, 0.5) for margin in margins} == margins
    assert judge_margin(0.4, 0.5, is_least=True) == "unknown"
    assert judge_margin(0.6, 0.5, is_least=True) == "differs"
    graver = [[], ["near-tie"], ["near-tie", "unknown"], ["unknown", "length"], ["differs"]]
    assert [find_verdict(kinds) for kinds in graver] == [
        "exact", "near-ties", "unknown", "differs", "differs",
    ]  # fmt: skip
    assert (name_token(5, None), name_token(5, "\n")) == ("5", "5 '\\n'")
    assert len(set(TEXTS)) == len(TEXTS)


def test_sizes_that_no_model_has() -> None:
    check_model_sizes({"num_hidden_layers": 1000, "n_layer": 5, "head_dim": 256}, "config.json")
    with pytest.raises(SpecDecError) as caught:
        check_model_sizes(
            {"num_hidden_layers": 1001, "text_config": {"head_dim": 1 << 17, "n_embd": 1 << 31},
             "num_local_experts": 10_000, "layer_types": 10**9},
            "config.json",
        )  # fmt: skip
    assert [fact for fact, _ in caught.value.problems] == [
        "config.json: num_hidden_layers is 1001, more than 1000",
        "config.json: text_config.head_dim is 131072, more than 65536",
        "config.json: text_config.n_embd is 2147483648, more than 2147483647",
    ]
