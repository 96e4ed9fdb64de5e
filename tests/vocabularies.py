"""Small tokenizers of two kinds and any order of ids, and models that speak in their tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPACE = "\u2581"
SPECIAL = ("<unk>", "<s>", "</s>")
TARGET_WORDS = (
    "def", " return", " self", "import", " the", "print", "(x)", "    ", "\u00e9", "\u65e5\u672c",
    " \u20ac", "user", " 12", "345",
)  # fmt: skip
OTHER_WORDS = (
    "def", " returned", " selfish", "impl", " then", "prince", "(y)", "  ", "\u65e5", " a", "user",
    " 1",
)  # fmt: skip


def list_tokens(kind: str, words: Sequence[str], seed: int = 0) -> list[tuple[str, bytes | None]]:
    """The tokens of a vocabulary by id: how it writes each, and its bytes; special ones have none.

    kind: "bytes" as GPT-2's, "pieces" as Llama 2's. Every beginning of a word is a token. seed: 0
    leaves the usual order.
    """
    tokens: list[tuple[str, bytes | None]] = [(token, None) for token in SPECIAL]
    if kind == "bytes":
        letters = write_bytes()
        tokens += [(letters[n], bytes([n])) for n in range(256)]
        written = {"".join(letters[n] for n in text.encode()): text.encode() for text in words}
    else:
        tokens += [(f"<0x{n:02X}>", bytes([n])) for n in range(256)]
        singles = sorted({*map(chr, range(32, 127)), *"".join(words)})
        tokens += [(c.replace(" ", SPACE), c.encode()) for c in singles]
        written = {text.replace(" ", SPACE): text.encode() for text in words}
    for name, text in written.items():
        for end in range(2, len(name) + 1):
            piece = (name[:end], text[:end] if kind == "bytes" else None)
            if kind == "pieces":
                piece = name[:end], name[:end].replace(SPACE, " ").encode()
            if piece not in tokens:
                tokens.append(piece)
    if seed:
        random.Random(seed).shuffle(tokens)
    return tokens


def write_bytes() -> list[str]:
    """The letter of each byte, as GPT-2 writes it."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(0x100, 0x200))
    return [chr(n) if n in kept else chr(next(rest)) for n in range(256)]


def save_tokenizer(
    folder: Path, kind: str, tokens: Sequence[tuple[str, bytes | None]], *, add_bos: bool = False
) -> Path:
    """Write a tokenizer of these tokens into a folder."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    vocab = {name: number for number, (name, _) in enumerate(tokens)}
    merges = [
        (name[:-1], name[-1])
        for name, _ in sorted(tokens, key=lambda token: (len(token[0]), token[0]))
        if len(name) > 1 and name[:-1] in vocab and name[-1] in vocab and name not in SPECIAL
    ]
    unk, bos, eos = SPECIAL
    if kind == "bytes":
        backend = Tokenizer(BPE(vocab, merges, unk_token=unk))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        backend = Tokenizer(BPE(vocab, merges, unk_token=unk, byte_fallback=True))
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )  # fmt: skip
    if add_bos:
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocab[bos])]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=unk, bos_token=bos, eos_token=eos
    ).save_pretrained(folder)
    return folder


def translate_model(
    source: Path,
    folder: Path,
    ours: Sequence[tuple[str, bytes | None]],
    theirs: Sequence[tuple[str, bytes | None]],
    **changes: Any,
) -> Path:
    """Write a Llama that says in its tokens what `source` says in others.

    A token that the source lacks has the rows of one that it has, and is drafted nearly as often,
    were it allowed to be. changes: of the model's config.
    """
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    known = {text or name: number for number, (name, text) in reversed(list(enumerate(ours)))}
    rows, shares = [3 + at % 200 for at in range(len(theirs))], torch.full((len(theirs), 1), 0.98)
    for at in sorted(range(len(theirs)), key=lambda at: theirs[at][0].startswith("<0x")):
        name, text = theirs[at]
        if (row := known.pop(text or name, None)) is not None:
            rows[at], shares[at] = row, 1.0
    model = LlamaForCausalLM.from_pretrained(source)
    config = AutoConfig.from_pretrained(source)
    config.vocab_size = len(theirs)
    for key, value in changes.items():
        setattr(config, key, value)
    made = LlamaForCausalLM(config)
    weights = dict(model.state_dict())
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[key] = weights[key][torch.tensor(rows)]
    weights["lm_head.weight"] *= shares
    made.load_state_dict(weights)
    made.save_pretrained(folder)
    return folder
