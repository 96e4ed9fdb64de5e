"""Tokenizers in llama.cpp's form: a byte-level BPE, or a SentencePiece BPE.

llama.cpp merges a SentencePiece BPE by scores (src/llama-vocab.cpp at 0c1e57098): of all neighbours
that make a token, it merges those of the highest score first. Hugging Face has a list of merges
instead. A list is written as scores only where both ways must give the same tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, shorten
from specdec.files.reading import read_json
from specdec.files.vocabulary import SPACE
from specdec.gguf.special import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from specdec.gguf.tokenizer import BYTE_LEVEL_SPLIT
from specdec.gguf.tokenizer import SPLITS as SPLITS_BY_NAME
from specdec.text.tokenizer import list_templates

NO_BYTE_LEVEL = (
    "llama.cpp's convert_hf_to_gguf.py reads others: convert the target with it, and the drafter"
    " with its --target-model-dir; see whether it then splits texts as transformers does"
)
# Patterns by which a byte-level tokenizer splits a text into words -> llama.cpp's name.
SPLITS = {patterns: name for name, patterns in reversed(SPLITS_BY_NAME.items())}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens by id, and their kinds. split: llama.cpp's name of the split into words.

    merges: of a byte-level BPE. scores: by id, of a SentencePiece BPE, else None. adds_space:
    whether a text gets a space in front.
    """

    tokens: list[str]
    kinds: list[int]
    split: str
    special: dict[str, int]
    adds_bos: bool
    merges: list[str] = dataclasses.field(default_factory=list)
    scores: list[float] | None = None
    adds_space: bool = False


def read_tokenizer(model_dir: str | None, size: int) -> Vocabulary:
    """Read a folder's tokenizer of `size` tokens; raise SpecDecError for one that differs."""
    folder = Path(model_dir or "")
    if model_dir is None or not (folder / "tokenizer.json").is_file():
        raise SpecDecError(
            f"a GGUF file holds the tokenizer, and --model-dir ({model_dir}) has no tokenizer.json",
            "give the target's own folder as --model-dir; of a tokenizer.model, transformers writes"
            " one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    document = read_json(folder / "tokenizer.json")
    model = document.get("model") or {}
    if model.get("type") != "BPE":
        raise SpecDecError(f"{folder} has no BPE tokenizer", NO_BYTE_LEVEL)
    tokens, kinds = list_tokens(folder, document, size)
    special = find_special(read_json(folder / "config.json"))
    if model.get("byte_fallback"):
        return read_sentencepiece(folder, document, tokens, kinds, special)
    pattern = find_split(document.get("pre_tokenizer") or {})
    if pattern not in SPLITS:
        raise SpecDecError(
            f"{folder} splits texts in a way without a known name: {shorten(pattern)}",
            "convert it with llama.cpp's convert_hf_to_gguf.py",
        )
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.is_file() else {}
    return Vocabulary(
        tokens=tokens, kinds=kinds, split=SPLITS[pattern], special=special,
        adds_bos=bool(settings.get("add_bos_token", SPLITS[pattern] == "llama-bpe")),
        merges=[pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]],
    )  # fmt: skip


def list_tokens(
    folder: Path, document: Mapping[str, Any], size: int
) -> tuple[list[str], list[int]]:
    """Return the text and the kind of each of `size` tokens; raise SpecDecError for more."""
    vocab, added_tokens = document["model"]["vocab"], document.get("added_tokens") or ()
    last_id = max([*vocab.values(), *(token["id"] for token in added_tokens)], default=0)
    if last_id >= size:
        raise SpecDecError(
            f"{folder} has a token of number {last_id}, the model has {size} tokens",
            "give the folder whose tokenizer and config.json belong together",
        )
    tokens, kinds = [f"[PAD{number}]" for number in range(size)], [UNUSED] * size
    for text, number in vocab.items():
        tokens[number], kinds[number] = text, NORMAL
    for token in added_tokens:
        tokens[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token.get("special") else USER_DEFINED
    return tokens, kinds


def find_special(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of the BOS, EOS and padding tokens that a config.json names."""
    special = {}
    for name in ("bos", "eos", "pad"):
        value = config.get(f"{name}_token_id")
        value = value[0] if isinstance(value, list) else value
        if isinstance(value, int):
            special[name] = value
    return special


def read_template(folder: Path) -> Any:
    """Return a folder's chat template: a text, or a list of them with names; None without one."""
    default = None
    if (folder / "chat_template.jinja").is_file():
        default = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        if default is None and (folder / name).is_file():
            default = read_json(folder / name).get("chat_template")
    named_templates = [
        {"name": path.stem, "template": path.read_text(encoding="utf-8")}
        for path in list_templates(folder)
    ]
    if not named_templates or default is None:
        return named_templates or default
    is_list = isinstance(default, list)
    return [*(default if is_list else [{"name": "default", "template": default}]), *named_templates]


def find_split(document: Mapping[str, Any]) -> tuple[str, ...] | str:
    """Return a byte-level pre-tokenizer's patterns, a key of `SPLITS`; JSON of any other one."""
    steps = document.get("pretokenizers") or [document]
    *splits, byte_level = steps
    patterns = []
    for step in splits:
        if step == {"type": "Digits", "individual_digits": True}:
            patterns.append(r"\p{N}")
        elif step.get("type") == "Split" and step.get("behavior") == "Isolated":
            patterns.append(step["pattern"].get("Regex", "?"))
        else:
            return json.dumps(document)
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        return json.dumps(document)
    return (*patterns, BYTE_LEVEL_SPLIT) if byte_level.get("use_regex", True) else tuple(patterns)


# ---- SentencePiece.


def read_sentencepiece(
    folder: Path, document: Mapping[str, Any], tokens: list[str], kinds: list[int],
    special: dict[str, int],
) -> Vocabulary:  # fmt: skip
    """Read a BPE that writes unknown characters as bytes; its merges become scores."""
    model = document["model"]
    special, vocab = dict(special), model["vocab"]
    unknown_token, byte_tokens = model.get("unk_token"), [f"<0x{byte:02X}>" for byte in range(256)]
    for name in byte_tokens if unknown_token is None else [unknown_token, *byte_tokens]:
        if name not in vocab:
            refuse(folder, f"has no token {name}")
        kinds[vocab[name]] = UNKNOWN if name == unknown_token else BYTE
    if unknown_token is not None:
        special["unk"] = vocab[unknown_token]
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
        if model.get(key):
            refuse(folder, f"has {key} {shorten(model[key])}")
    adds_space = adds_space_in_front(folder, document)
    check_added(folder, document, adds_space=adds_space)
    return Vocabulary(
        tokens=tokens, kinds=kinds, split="default", special=special,
        adds_bos=find_bos(folder, document, special), adds_space=adds_space,
        scores=score_tokens(folder, model, tokens, kinds),
    )  # fmt: skip


def refuse(folder: Path, fact: str) -> None:
    """Raise SpecDecError for a tokenizer that llama.cpp would compute differently."""
    raise SpecDecError(
        f"{folder}: its SentencePiece tokenizer {fact}, which llama.cpp does otherwise",
        NO_BYTE_LEVEL,
    )


def adds_space_in_front(folder: Path, document: Mapping[str, Any]) -> bool:
    """Return whether texts, and pieces after special tokens, get a space in front.

    llama.cpp has one flag for both. Raises SpecDecError for other changes of texts than this and
    spaces written as SPACE.
    """
    normalizer, splitter = document.get("normalizer"), document.get("pre_tokenizer")
    steps = (normalizer.get("normalizers") or [normalizer]) if normalizer else []
    prefix = {"type": "Prepend", "prepend": SPACE}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if splitter is None and steps in ([prefix, replace], [replace]):
        return len(steps) > 1
    if steps or not splitter or splitter.get("type") != "Metaspace":
        refuse(folder, f"has the normalizer {shorten(normalizer)} and the pre-tokenizer"
               f" {shorten(splitter)}")  # fmt: skip
    assert splitter is not None
    scheme = splitter.get("prepend_scheme", "always")
    if splitter.get("replacement") != SPACE or splitter.get("split", True):
        refuse(folder, "splits texts at spaces")
    if scheme != "never":
        refuse(folder, f"puts a space ({scheme}) only before a text that begins with none")
    return False


def check_added(folder: Path, document: Mapping[str, Any], *, adds_space: bool) -> None:
    """Refuse added tokens that include spaces around them, or match normalized text."""
    for added_token in document.get("added_tokens") or ():
        name = shorten(added_token["content"])
        for key in ("lstrip", "rstrip", "single_word"):
            if added_token.get(key):
                refuse(folder, f"has the token {name} with {key}")
        if added_token.get("normalized") and document.get("normalizer"):
            if adds_space or " " in added_token["content"]:
                refuse(folder, f"looks for the token {name} in normalized text")


def find_bos(folder: Path, document: Mapping[str, Any], special: Mapping[str, int]) -> bool:
    """Return whether texts get the BOS token in front; refuse any other token around them."""
    processor = document.get("post_processor")
    if processor is None:
        return False
    template = processor.get("single") or []
    ids = [
        (processor.get("special_tokens") or {}).get(item["SpecialToken"]["id"], {}).get("ids")
        for item in template
        if "SpecialToken" in item
    ]
    is_first = len(template) > 1 and "SpecialToken" in template[0]
    if processor.get("type") != "TemplateProcessing" or len(ids) != is_first:
        refuse(folder, f"puts around a text {shorten(template or processor)}")
    if is_first and ids[0] != [special.get("bos")]:
        refuse(folder, f"begins a text with {ids[0]}, and config.json's bos_token_id is"
               f" {special.get('bos')}")  # fmt: skip
    return is_first


def score_tokens(
    folder: Path, model: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> list[float]:
    """Return each token's score: minus the rank of its merges in the list.

    Raises SpecDecError where scores would merge other tokens than the list does: a token's merges
    must be all ways to make it of two others, and stand together.
    """
    vocab = {text: number for number, text in enumerate(tokens) if kinds[number] == NORMAL}
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair)
              for pair in model["merges"]]  # fmt: skip
    scores = rank_merges(folder, merges, vocab, len(tokens))
    # Other tokens are found in a text before anything is merged.
    merged_tokens = [
        token for token, kind in zip(tokens, kinds, strict=True)
        if kind not in (CONTROL, USER_DEFINED, UNKNOWN)
    ]  # fmt: skip
    check_merges(folder, set(merges), vocab, merged_tokens)
    return scores


def rank_merges(
    folder: Path, merges: Sequence[tuple[str, ...]], vocab: Mapping[str, int], num_tokens: int
) -> list[float]:
    """Return minus the rank of each token's merges, 0 for none; refuse scattered merges."""
    scores, num_merged = [0.0] * num_tokens, 0
    previous_token = None
    for left_side, right_side in merges:
        token = left_side + right_side
        if left_side not in vocab or right_side not in vocab or token not in vocab:
            refuse(folder, f"merges {left_side!r} and {right_side!r}, which are no plain tokens")
        if token != previous_token:
            if scores[vocab[token]]:
                refuse(folder, f"has merges of {token!r} in several places of its list")
            num_merged += 1
            scores[vocab[token]] = -float(num_merged)
            previous_token = token
    return scores


def check_merges(
    folder: Path, merges: Set[tuple[str, ...]], vocab: Mapping[str, int], tokens: Iterable[str]
) -> None:
    """Refuse a list of merges that lacks a way to make a token of two others."""
    for token in tokens:
        for index in range(1, len(token)):
            left_side, right_side = token[:index], token[index:]
            are_tokens = [side in vocab or len(side) == 1 for side in (left_side, right_side)]
            if all(are_tokens) and (left_side, right_side) not in merges:
                refuse(
                    folder,
                    f"does not merge {left_side!r} and {right_side!r} to the token {token!r}",
                )
