"""Special tokens of a GGUF file: their numbers, their kinds, and which of them end a text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

PREFIX = "tokenizer.ggml."
MADE_FROM = "made_from"  # in tokenizer_config.json: what it was made from, here "gguf"
# A token's kind, as gguf.TokenType has it.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Types of the elements of these lists.
LISTS: dict[str, type] = {"tokens": str, "token_type": int, "scores": float, "merges": str}
NAMES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
# Of a SentencePiece tokenizer, where the file names none.
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}
# Tokens that end a text wherever a vocabulary has them, as in llama.cpp (src/llama-vocab.cpp).
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
# gpt-oss's (o200k_harmony) and Solar Open's.
ENDS_OF_ANSWERS = tuple(
    {end, call} for end in ("<|return|>", "<|flush|>") for call in ("<|call|>", "<|calls|>")
)


def list_words(tokens: Collection[str]) -> tuple[str, ...]:
    """List the tokens of ENDS that are words of a vocabulary: one in Gemma 4's."""
    return ("</s>",) if "<|tool_response>" in tokens else ()


def list_special(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of the special tokens in NAMES."""
    default_ids = SENTENCEPIECE_IDS if metadata.get(PREFIX + "model") == "llama" else {}
    size = len(metadata.get(PREFIX + "tokens", ()))
    special_ids: dict[str, int] = {}
    for name, key in NAMES.items():
        for number in (metadata.get(f"{PREFIX}{key}_token_id"), default_ids.get(name)):
            if type(number) is int and 0 <= number < size:
                special_ids.setdefault(name, number)
    return special_ids


def read_special(metadata: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the ids for config.json; None where the file names none, not a usual one."""
    numbers = list_special(metadata)
    return {f"{name}_token_id": numbers.get(name) for name in ("bos", "eos", "pad")}


def list_ends(metadata: Mapping[str, Any]) -> list[int]:
    """List the tokens that end a text, that of the whole text first.

    As in llama.cpp, `<|end|>` ends but a part of an answer where others of ENDS_OF_ANSWERS are.
    """
    tokens = metadata.get(PREFIX + "tokens", ())
    named_ends = [metadata.get(f"{PREFIX}{name}_token_id") for name in ("eot", "eom")]
    named_ends = [list_special(metadata).get("eos"), *named_ends]
    texts = set(ENDS) - set(list_words(tokens))
    words = set(tokens)
    parts = {"<|end|>"} if any(pair <= words for pair in ENDS_OF_ANSWERS) else set()
    ends = [end for end in named_ends if type(end) is int and 0 <= end < len(tokens)]
    ends += [number for number, text in enumerate(tokens) if text in texts]
    return list(dict.fromkeys(end for end in ends if tokens[end] not in parts))
