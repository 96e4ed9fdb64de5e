"""A small SentencePiece tokenizer as Hugging Face writes it, and hostile texts.

`split` is llama.cpp's way to compute it, told anew from the scores of a GGUF file alone.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

SPACE = "\u2581"
CORPUS = (
    "def main(argument):\n    for number in range(10):\n        print(number, argument)\n"
    "The quick brown fox jumps over the lazy dog. The naïve café, the über-straße; 中文 中文。\n"
    "    return [value for value in values if value is not None]  # aaaa aaa aa    \t\t\n"
) * 2
PREFIX = [
    {"type": "Prepend", "prepend": SPACE},
    {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
]


def make_sentencepiece(
    folder: Path, *, num_pieces: int = 150, adds_space: bool = True, size: int | None = None
) -> int:
    """Write tokenizer.json, and return how many tokens it has.

    size: as many by further pieces that no text has. merges are as transformers makes them of a
    tokenizer.model: for each piece by its score all pairs of pieces that make it.
    """
    characters = sorted({*CORPUS.replace(" ", SPACE), *map(chr, range(33, 127)), SPACE})
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters]
    pieces: list[str] = []
    text = list(CORPUS.replace(" ", SPACE))
    while len(pieces) < num_pieces:
        (best, _), *_ = Counter("".join(pair) for pair in pairwise(text)).most_common(1)
        pieces += [best] if best not in pieces else []
        joined: list[str] = []
        for part in text:
            if joined and joined[-1] + part == best:
                joined[-1] = best
            else:
                joined.append(part)
        text = joined
    places = {piece: place for place, piece in enumerate([*vocab, *pieces])}
    merges = [
        pair
        for piece in pieces
        for pair in sorted(
            ([piece[:at], piece[at:]] for at in range(1, len(piece))),
            key=lambda pair: [places.get(part, 0) for part in pair],
        )
        if all(part in places for part in pair)
    ]
    vocab += pieces
    if size is not None:
        vocab += [f"<extra_{number}>" for number in range(size - len(vocab))]
    document: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": vocab[number], "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True}
            for number in range(3)
        ],
        "normalizer": {"type": "Sequence", "normalizers": PREFIX[0 if adds_space else 1 :]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": None,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": "<unk>", "fuse_unk": True,
            "byte_fallback": True, "ignore_merges": False, "merges": merges,
            "vocab": {piece: number for number, piece in enumerate(vocab)},
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return len(vocab)


def list_hostile(count: int = 100) -> list[str]:
    """Texts that tokenizers like to disagree on: the first by hand, the others drawn."""
    texts = [
        "", " ", "  ", "   a", "a   ", "\n", "\n\n \n", "\t\ta", "\r\n", "a\u00a0b", "\u3000",
        "▁", "▁▁a ▁",
        "<s>", "<s>a", "a</s> b", "<s></s><s>", "<unk>", "<0x0A>", "<0x41>a", "[PAD7]", "</ s>",
        "é", "e\u0301", "ﬁ", "中文字", "😀", "👩\u200d👩\u200d👧", "\u202eabc",
        "\ufeffabc", "\U0010ffff", "\x00", "\x7f\x01",
        "aaaa", "aaaaaaaaaaa", "a" * 200, " " * 33, "def main():\n    return 0\n", "naïve café",
        "THE the The",
    ]  # fmt: skip
    draw = random.Random(7)
    letters = [
        *"ab c  \n\t<>/s0x[]▁",
        "é",
        "中",
        "😀",
        "\u0301",
        "the",
        " the",
        "for number",
        "<s>",
        "    ",
    ]
    while len(texts) < count:
        texts.append("".join(draw.choices(letters, k=draw.randint(1, 40))))
    return texts


def split(text: str, values: dict[str, Any]) -> list[int]:
    """llama.cpp's tokens of a text, its special tokens found first, without that of the beginning.

    values: of the GGUF file.
    """
    tokens = values["tokenizer.ggml.tokens"]
    places = {token: number for number, token in reversed(list(enumerate(tokens)))}
    kinds = values["tokenizer.ggml.token_type"]
    special = sorted(
        (token for token, kind in zip(tokens, kinds, strict=True) if kind in (2, 3, 4)),
        key=len, reverse=True,
    )  # fmt: skip
    pieces: list[str | int] = [text]
    for token in special:
        parted: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, int):
                parted.append(piece)
                continue
            for number, part in enumerate(piece.split(token)):
                parted += [places[token]] if number else []
                parted += [part] if part else []
        pieces = parted
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(piece)
        else:
            prefix = " " if values["tokenizer.ggml.add_space_prefix"] else ""
            ids += _merge(
                list((prefix + piece).replace(" ", SPACE)), values["tokenizer.ggml.scores"], places
            )
    return ids


def _merge(symbols: list[str], scores: list[float], places: dict[str, int]) -> list[int]:
    while True:
        pairs = [
            (-scores[places[left + right]], at)
            for at, (left, right) in enumerate(pairwise(symbols))
            if left + right in places
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        if symbol in places:
            ids.append(places[symbol])
        else:
            ids += [places[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids
