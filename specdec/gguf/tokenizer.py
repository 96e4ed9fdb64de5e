"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

It gives the tokens that llama.cpp gives (src/llama-vocab.cpp at 0c1e57098), special tokens in the
text included. Where Hugging Face's own tokenizer first normalizes a text to NFC, as Qwen's does,
neither does llama.cpp nor this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from specdec.errors import SpecDecError, join_names, shorten, summarize
from specdec.files.folders import GGUF
from specdec.files.vocabulary import SPACE
from specdec.system import logs

from .special import (
    BYTE,
    CONTROL,
    ENDS,
    MADE_FROM,
    NORMAL,
    PREFIX,
    UNKNOWN,
    USER_DEFINED,
    list_special,
    list_words,
)

logger = logs.get_logger(__name__)

GEMMA4 = "gemma4"
KINDS = ["gpt2", "llama", GEMMA4]  # of tokenizers, by llama.cpp's names
SPECIAL_KINDS = (CONTROL, USER_DEFINED, UNKNOWN)  # of tokens that are found in a text first
# Stands for the split that the ByteLevel of the package `tokenizers` makes by itself. All others
# are patterns by which a byte-level tokenizer splits a text: each match is a word by itself.
BYTE_LEVEL_SPLIT = ""
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_NON_LETTERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
)
_O200K = "|".join(word + r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for word in _TEKKEN.split("|"))
LLAMA3 = _LETTERS + r"\p{N}{1,3}" + _NON_LETTERS
QWEN2 = _LETTERS + r"\p{N}" + _NON_LETTERS
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")
O200K = _O200K + r"|\p{N}{1,3}" + _SLASHES
LINES = r"[^\n]+|\n+"
DIGITS = (r"\p{N}", BYTE_LEVEL_SPLIT)
# llama.cpp's name -> patterns. The first of equal ones is what is written.
SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (BYTE_LEVEL_SPLIT,), "phi-2": (BYTE_LEVEL_SPLIT,), "mpt": (BYTE_LEVEL_SPLIT,),
    "olmo": (BYTE_LEVEL_SPLIT,), "jais": (BYTE_LEVEL_SPLIT,), "trillion": (BYTE_LEVEL_SPLIT,),
    "exaone4": (BYTE_LEVEL_SPLIT,), "gigachat": (BYTE_LEVEL_SPLIT,), "mellum": (BYTE_LEVEL_SPLIT,),
    "a.x-4.0": (BYTE_LEVEL_SPLIT,),
    "llama-bpe": (LLAMA3,), "llama3": (LLAMA3,), "llama-v3": (LLAMA3,), "falcon3": (LLAMA3,),
    "falcon-h1": (LLAMA3,), "midm-2.0": (LLAMA3,), "pixtral": (LLAMA3,), "lfm2": (LLAMA3,),
    "dbrx": (LLAMA3,), "smaug-bpe": (LLAMA3,),
    "qwen2": (QWEN2,), "deepseek-r1-qwen": (QWEN2,), "stablelm2": (QWEN2,), "hunyuan": (QWEN2,),
    "kormo": (QWEN2,), "megrez": (QWEN2,), "qwen35": (QWEN35,),
    "smollm": DIGITS, "starcoder": DIGITS, "refact": DIGITS, "command-r": DIGITS,
    "exaone": DIGITS, "minerva-7b": DIGITS, "mellum2": DIGITS,
    "gpt-4o": (O200K,), "llama4": (O200K,), "kanana2": (O200K,),
    "tekken": (_TEKKEN + r"|\p{N}" + _SLASHES,),
    "seed-coder": (_LETTERS + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
}  # fmt: skip
# Splits whose words are not divided where they are tokens, and those that begin a text with one.
WHOLE_WORD_SPLITS = (
    "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "midm-2.0", "pixtral", "lfm2",
    "tekken",
)  # fmt: skip
BOS_SPLITS = WHOLE_WORD_SPLITS
TEMPLATE = "tokenizer.chat_template"  # the usual one; others have a name after it
TEMPLATE_NAMES = "tokenizer.chat_templates"  # a list of these names
MAX_PIECE = 1024  # characters of a SentencePiece token, each of whose divisions is looked up
# Keys by which a tokenizer would do what it does not do here -> the value of each that says so.
PLAIN: dict[str, Any] = {
    "remove_extra_whitespaces": False, "escape_whitespaces": True, "add_sep_token": False,
    "normalizer.lowercase": False, "normalizer.strip_accents": False,
}  # fmt: skip
# Keys that are read elsewhere, or that llama.cpp does not read for these kinds.
READ_KEYS = (
    "model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token",
    "add_space_prefix", "suppress_tokens", "token_type_count", "precompiled_charsmap",
)  # fmt: skip


class TokenizerMaker:
    """Makes both files out of a file's metadata; raises SpecDecError for what is not known."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self.path, self.metadata = path, metadata
        self.kind = metadata.get(PREFIX + "model")
        self.pre = str(metadata.get(PREFIX + "pre", "default"))
        self.tokens: list[str] = metadata.get(PREFIX + "tokens") or []
        kinds = metadata.get(PREFIX + "token_type") or [NORMAL] * len(self.tokens)
        words = list_words(self.tokens)
        self.kinds = [
            NORMAL if text in words else CONTROL if text in ENDS else kind
            for text, kind in zip(self.tokens, kinds, strict=False)
        ]  # fmt: skip
        self.special = list_special(metadata)
        self.vocab = {text: number for number, text in enumerate(self.tokens)}
        self._check()

    def _check(self) -> None:
        if self.kind not in KINDS:
            self.refuse(f"a tokenizer of kind {shorten(self.kind)}; these are: {join_names(KINDS)}")
        if self.kind == "gpt2" and self.pre not in SPLITS:
            self.refuse(
                f"the pre-tokenizer {shorten(self.pre)}; these are: {join_names(list(SPLITS))}"
            )
        self._check_keys()
        if len(self.vocab) != len(self.tokens):
            twin = next(t for n, t in enumerate(self.tokens) if self.tokens.index(t) != n)
            self.refuse(f"the token {shorten(twin)} under two numbers")
        num_kinds = len(self.metadata.get(PREFIX + "token_type") or self.tokens)
        if num_kinds != len(self.tokens) or not self.tokens:
            self.refuse(f"{len(self.tokens)} tokens with {num_kinds} kinds")
        self._check_values()

    def _check_keys(self) -> None:
        """Raise SpecDecError for keys by which a tokenizer would do what it does not do here."""
        for key, value in self.metadata.items():
            name = key.removeprefix(PREFIX)
            if name == key or name in READ_KEYS or name.endswith(("_token_id", "_token_ids")):
                continue
            if name not in PLAIN or value != PLAIN[name]:
                self.refuse(f"the key {key} {shorten(value)}")

    def _check_values(self) -> None:
        """Raise SpecDecError for values that no tokenizer has; tell of ids that are left out."""
        for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
            value = self.metadata.get(PREFIX + key, False)
            if type(value) is not bool:
                self.refuse(f"{PREFIX}{key} {shorten(value)}, which is neither true nor false")
        self._check_templates()
        for key, value in self.metadata.items():
            is_beyond = type(value) is not int or not 0 <= value < len(self.tokens)
            if key.startswith(PREFIX) and key.endswith("_token_id") and is_beyond:
                logger.warning(
                    "%s: %s is %s, and there are %d tokens: it is passed over",
                    self.path, key, shorten(value), len(self.tokens),
                )  # fmt: skip
        scores = self.metadata.get(PREFIX + "scores") or []
        if not all(map(math.isfinite, scores)):
            self.refuse("scores that are no finite numbers")

    def _check_templates(self) -> None:
        """Raise SpecDecError for a chat template that is no text."""
        for key, value in self.metadata.items():
            is_template = key.startswith(TEMPLATE) and key != TEMPLATE_NAMES
            if is_template and not isinstance(value, str):
                self.refuse(f"{key} {shorten(value)}, which is no text")

    def refuse(self, fact: str) -> NoReturn:
        """Raise SpecDecError."""
        raise SpecDecError(
            f"{self.path} has what is not read: {fact}",
            "take the Hugging Face folder of the model, here or as --tokenizer-dir",
        )

    def make(self) -> Tokenizer:
        """Return the tokenizer that tokenizer.json holds."""
        try:
            make = {"gpt2": self._make_bytes, "llama": self._make_sentencepiece}
            tokenizer = make.get(str(self.kind), self._make_gemma4)()
            tokenizer.add_tokens(self._list_added())
            self._surround(tokenizer)
        except SpecDecError:
            raise
        except Exception as error:  # noqa: BLE001 - the package raises no other kind
            self.refuse(f"a tokenizer of which the package tokenizers says: {summarize(error)}")
        return tokenizer

    def describe(self, max_length: int) -> dict[str, Any]:
        """Return tokenizer_config.json, which holds the chat template too."""
        # transformers makes each of these special in texts, which a word must not become.
        config: dict[str, Any] = {
            f"{name}_token": self.tokens[number]
            for name, number in self.special.items()
            if self.kinds[number] in SPECIAL_KINDS or self._adds(name)
        }
        config |= {
            "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
            "model_max_length": max_length, MADE_FROM: GGUF,
            # transformers would look for them in tokenizer.json, by Python's reader.
            "added_tokens_decoder": {
                str(self.vocab[token.content]): token.__getstate__()
                for token in self._list_added()
            },
        }  # fmt: skip
        template = self.metadata.get(TEMPLATE)
        templates = {} if template is None else {"default": template}
        templates |= {
            key.removeprefix(f"{TEMPLATE}."): text
            for key, text in self.metadata.items()
            if key.startswith(f"{TEMPLATE}.")
        }  # fmt: skip
        if templates:
            config["chat_template"] = template if list(templates) == ["default"] else [
                {"name": name, "template": text} for name, text in templates.items()
            ]  # fmt: skip
        return config

    def _list_added(self) -> list[AddedToken]:
        name = str(self.metadata.get("general.name", "")).lower()
        strips = "phi-3" in name or "phi3" in name  # as llama.cpp finds it out
        return [
            AddedToken(
                text, rstrip=strips and text not in ("<unk>", "<s>", "<|endoftext|>"),
                normalized=False, special=kind != USER_DEFINED,
            )
            for text, kind in zip(self.tokens, self.kinds, strict=True)
            if kind in SPECIAL_KINDS and text
        ]  # fmt: skip

    def _surround(self, tokenizer: Tokenizer) -> None:
        """Let it put tokens around a text."""
        pieces, special_tokens = ["$A:0"], []
        for name, index in (("bos", 0), ("eos", 2)):
            if name in self.special and self._adds(name):
                number = self.special[name]
                pieces.insert(index, self.tokens[number])
                special_tokens.append((self.tokens[number], number))
        if special_tokens:
            tokenizer.post_processor = TemplateProcessing(pieces, [*pieces, "$B:1"], special_tokens)

    def _adds(self, name: str) -> bool:
        """Return whether a special token is put around each text."""
        if name == "bos" and self.kind == GEMMA4:  # as llama.cpp does whatever the file says
            return True
        begins = name == "bos" and (self.kind != "gpt2" or self.pre in BOS_SPLITS)
        return bool(self.metadata.get(f"{PREFIX}add_{name}_token", begins))

    def _make_bytes(self) -> Tokenizer:
        """Make a byte-level BPE."""
        patterns = SPLITS[self.pre]
        merges = self._read_merges()
        tokenizer = Tokenizer(BPE(self.vocab, merges, ignore_merges=self.pre in WHOLE_WORD_SPLITS))
        splits = [
            pre_tokenizers.Split(Regex(p), "isolated") for p in patterns if p != BYTE_LEVEL_SPLIT
        ]
        level = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=BYTE_LEVEL_SPLIT in patterns
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _read_merges(self) -> list[tuple[str, str]]:
        if (merges := self.metadata.get(PREFIX + "merges")) is None:
            self.refuse(f"{len(self.tokens)} tokens without the merges that texts are read by")
        return [self._split_merge(merge) for merge in merges]

    def _split_merge(self, merge: str) -> tuple[str, str]:
        """Return the two tokens that a merge makes a third of."""
        left_token, _, right_token = merge.partition(" ")
        missing_tokens = [
            text
            for text in (left_token, right_token, left_token + right_token)
            if text not in self.vocab
        ]
        if missing_tokens:
            self.refuse(f"the merge {shorten(merge)}, and {shorten(missing_tokens[0])} is no token")
        return left_token, right_token

    def _make_gemma4(self) -> Tokenizer:
        """Make Gemma 4's BPE: of characters, with merges of its own, lines and their ends apart."""
        tokenizer = self._make_characters(self._read_merges())
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(LINES), "isolated")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        return tokenizer

    def _make_characters(self, merges: list[tuple[str, str]]) -> Tokenizer:
        """Make a BPE of characters, which has tokens for the bytes of those that it lacks."""
        unknown_id = self.special.get("unk")
        return Tokenizer(BPE(
            self.vocab, merges, fuse_unk=True, byte_fallback=True,
            unk_token=None if unknown_id is None else self.tokens[unknown_id],
        ))  # fmt: skip

    def _make_sentencepiece(self) -> Tokenizer:
        """Make a SentencePiece BPE, whose merges llama.cpp computes from scores."""
        prefixes = self.metadata.get(PREFIX + "add_space_prefix", True)
        tokenizer = self._make_characters(self._list_merges())
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE)] * prefixes + [normalizers.Replace(" ", SPACE)]
        )
        tokenizer.decoder = decoders.Sequence([
            decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
            *[decoders.Strip(" ", 1, 0)] * prefixes,
        ])  # fmt: skip
        return tokenizer

    def _list_merges(self) -> list[tuple[str, str]]:
        """List every way to make a token of two others, that of the highest score first."""
        scores = self.metadata.get(PREFIX + "scores") or []
        if len(scores) != len(self.tokens):
            self.refuse(f"{len(self.tokens)} tokens with {len(scores)} scores")
        longest_token = max(self.tokens, key=len, default="")
        if len(longest_token) > MAX_PIECE:
            self.refuse(
                f"the token {shorten(longest_token)} of {len(longest_token)} characters, more than"
                f" {MAX_PIECE}"
            )
        vocab = {t for t, kind in zip(self.tokens, self.kinds, strict=True) if kind != BYTE}
        # Of equal scores the longer left half first, then the longer right one, as Hugging Face's
        # converter has it; llama.cpp takes what is leftmost in a text, which no order can say.
        merges = [
            (-score, -length, length - len(token), token[:length], token[length:])
            for token, score in zip(self.tokens, scores, strict=True) if token in vocab
            for length in range(1, len(token))
            if token[:length] in vocab and token[length:] in vocab
        ]  # fmt: skip
        merges.sort(key=lambda merge: merge[:3])
        return [(left_token, right_token) for *_, left_token, right_token in merges]
