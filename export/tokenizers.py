"""A target's tokenizer as llama.cpp needs it: a byte-level BPE, or a SentencePiece BPE.

llama.cpp computes the second only from scores (src/llama-vocab.cpp at 0c1e57098): it merges any
two neighbours that make a token, that of the highest score first. Hugging Face has a list of merges
instead. A list is written as scores only where both ways must give the same tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, shorten
from specdec.files.reading import read_json
from specdec.gguf.special import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from specdec.gguf.tokenizer import OWN
from specdec.gguf.tokenizer import SPLITS as SPLITS_BY_NAME
from specdec.vocabulary import SPACE

NO_BYTE_LEVEL = (
    "llama.cpp's convert_hf_to_gguf.py reads others: convert the target with it, and the drafter"
    " with its --target-model-dir; see whether it then splits texts as transformers does"
)
# How a byte-level tokenizer splits a text into words -> llama.cpp's name for it.
SPLITS = {patterns: name for name, patterns in reversed(SPLITS_BY_NAME.items())}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens by id, and their kinds. split: the name of the way that texts are split into words.

    merges: of a byte-level BPE. scores: by id, of a SentencePiece BPE, else None. adds_space: it
    puts a space before a text.
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
    """The tokenizer of a folder for so many tokens; raises SpecDecError for one that differs."""
    folder = Path(model_dir or "")
    if model_dir is None or not (folder / "tokenizer.json").is_file():
        raise SpecDecError(
            "a GGUF file holds the tokenizer, and --model-dir has no tokenizer.json",
            "give the target's own folder as --model-dir; of a tokenizer.model, transformers writes"
            " one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )
    described = read_json(folder / "tokenizer.json")
    model = described.get("model") or {}
    if model.get("type") != "BPE":
        raise SpecDecError(f"{folder} has no BPE tokenizer", NO_BYTE_LEVEL)
    added_tokens = described.get("added_tokens") or ()
    last = max([*model["vocab"].values(), *(added["id"] for added in added_tokens)], default=0)
    if last >= size:
        raise SpecDecError(
            f"{folder} has a token of number {last}, the model has {size} tokens",
            "give the folder whose tokenizer and config.json belong together",
        )
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [UNUSED] * size
    for text, number in model["vocab"].items():
        tokens[number], kinds[number] = text, NORMAL
    for added in added_tokens:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added.get("special") else USER_DEFINED
    config = read_json(folder / "config.json")
    special = {}
    for name in ("bos", "eos", "pad"):
        value = config.get(f"{name}_token_id")
        value = value[0] if isinstance(value, list) else value
        if isinstance(value, int):
            special[name] = value
    if model.get("byte_fallback"):
        return read_sentencepiece(folder, described, tokens, kinds, special)
    pattern = find_split(described.get("pre_tokenizer") or {})
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


def read_template(folder: Path) -> Any:
    """A folder's chat template: a text, or a list of them with names; None where it has none."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            template = read_json(folder / name).get("chat_template")
            if template is not None:
                return template
    return None


def find_split(described: Mapping[str, Any]) -> tuple[str, ...] | str:
    """The patterns of a byte-level pre-tokenizer, as `SPLITS` has them; JSON of any other."""
    steps = described.get("pretokenizers") or [described]
    *splits, own = steps
    patterns = []
    for step in splits:
        if step == {"type": "Digits", "individual_digits": True}:
            patterns.append(r"\p{N}")
        elif step.get("type") == "Split" and step.get("behavior") == "Isolated":
            patterns.append(step["pattern"].get("Regex", "?"))
        else:
            return json.dumps(described)
    if own.get("type") != "ByteLevel" or own.get("add_prefix_space"):
        return json.dumps(described)
    return (*patterns, OWN) if own.get("use_regex", True) else tuple(patterns)


# ---- SentencePiece.


def read_sentencepiece(
    folder: Path, described: Mapping[str, Any], tokens: list[str], kinds: list[int],
    special: dict[str, int],
) -> Vocabulary:  # fmt: skip
    """A BPE that writes bytes for what it does not know, as scores."""
    model = described["model"]
    special, vocab = dict(special), model["vocab"]
    unknown, own = model.get("unk_token"), [f"<0x{byte:02X}>" for byte in range(256)]
    for name in own if unknown is None else [unknown, *own]:
        if name not in vocab:
            refuse(folder, f"has no token {name}")
        kinds[vocab[name]] = UNKNOWN if name == unknown else BYTE
    if unknown is not None:
        special["unk"] = vocab[unknown]
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
        if model.get(key):
            refuse(folder, f"has {key} {shorten(model[key])}")
    adds_space = find_prefix(folder, described)
    check_added(folder, described, adds_space=adds_space)
    return Vocabulary(
        tokens=tokens, kinds=kinds, split="default", special=special,
        adds_bos=find_bos(folder, described, special), adds_space=adds_space,
        scores=score_tokens(folder, model, tokens, kinds),
    )  # fmt: skip


def refuse(folder: Path, fact: str) -> None:
    """Raise SpecDecError: llama.cpp would split texts otherwise."""
    raise SpecDecError(
        f"{folder}: its SentencePiece tokenizer {fact}, which llama.cpp does otherwise",
        NO_BYTE_LEVEL,
    )


def find_prefix(folder: Path, described: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text, and before each piece behind a special token.

    Both are one in llama.cpp. Raises SpecDecError for anything but that and spaces written as
    SPACE.
    """
    normalizer, splitter = described.get("normalizer"), described.get("pre_tokenizer")
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


def check_added(folder: Path, described: Mapping[str, Any], *, adds_space: bool) -> None:
    """Refuse added tokens that take spaces along, or are looked for behind the normalizer."""
    for added in described.get("added_tokens") or ():
        name = shorten(added["content"])
        for key in ("lstrip", "rstrip", "single_word"):
            if added.get(key):
                refuse(folder, f"has the token {name} with {key}")
        if added.get("normalized") and described.get("normalizer"):
            if adds_space or " " in added["content"]:
                refuse(folder, f"looks for the token {name} in normalized text")


def find_bos(folder: Path, described: Mapping[str, Any], special: Mapping[str, int]) -> bool:
    """Whether a text begins with the token of its beginning; nothing else may be put around it."""
    processor = described.get("post_processor")
    if processor is None:
        return False
    single = processor.get("single") or []
    ids = [
        (processor.get("special_tokens") or {}).get(item["SpecialToken"]["id"], {}).get("ids")
        for item in single
        if "SpecialToken" in item
    ]
    is_first = len(single) > 1 and "SpecialToken" in single[0]
    if processor.get("type") != "TemplateProcessing" or len(ids) != is_first:
        refuse(folder, f"puts around a text {shorten(single or processor)}")
    if is_first and ids[0] != [special.get("bos")]:
        refuse(folder, f"begins a text with {ids[0]}, and config.json's bos_token_id is"
               f" {special.get('bos')}")  # fmt: skip
    return is_first


def score_tokens(
    folder: Path, model: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> list[float]:
    """The negative place of a token's merges in the list.

    Raises SpecDecError where scores do not tell what the list does: a token's merges must be all
    ways to make it of two others, and stand together.
    """
    vocab = {text: number for number, text in enumerate(tokens) if kinds[number] == NORMAL}
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair)
             for pair in model["merges"]]  # fmt: skip
    scores, made, places = [0.0] * len(tokens), set(pairs), 0
    last = None
    for left, right in pairs:
        token = left + right
        if left not in vocab or right not in vocab or token not in vocab:
            refuse(folder, f"merges {left!r} and {right!r}, which are no plain tokens")
        if token != last:
            if scores[vocab[token]]:
                refuse(folder, f"has merges of {token!r} in several places of its list")
            places += 1
            scores[vocab[token]] = -float(places)
            last = token
    for number, token in enumerate(tokens):
        if kinds[number] in (CONTROL, USER_DEFINED, UNKNOWN):
            continue  # found before anything is merged
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            known = [part in vocab or len(part) == 1 for part in (left, right)]
            if all(known) and (left, right) not in made:
                refuse(folder, f"does not merge {left!r} and {right!r} to the token {token!r}")
    return scores
