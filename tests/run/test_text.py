"""Text as it comes: whole characters, nothing of a stop word, and in the end the whole text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.text.text_stream import INCOMPLETE, TextStream, decode_output, decode_text
from tests.conftest import ROOT

SPACE = "\u2581"
TEXTS = [
    "def main():\n    return 'x'\n\n\nclass A:\n",
    "naïve café — 日本語のテキスト 🙂🙃 done",
    "a",
    "",
    "🙂",
    "  leading and trailing  ",
]


def load_byte_level() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "examples" / "pycode" / "target")


def make_word_pieces() -> Any:
    """A tokenizer of Llama 2's kind: words begin with U+2581, unknown characters are bytes."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "\u2581"]
    pieces += [chr(n) for n in range(97, 123)]
    backend = Tokenizer(
        BPE({p: n for n, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


TOKENIZERS = {"byte-level": load_byte_level(), "word pieces": make_word_pieces()}


@pytest.fixture(params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]


def stream(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], int]:
    """Pieces as they come, the rest as the last one; and how many tokens were taken."""
    text = TextStream(tokenizer, stop)
    pieces = []
    count = 0
    is_ended = False
    while count < len(ids) and not is_ended:
        is_ended = text.add(ids[count])
        pieces.append(text.take())
        count += 1
    whole = text.finish()
    pieces.append(text.take())
    assert "".join(pieces) == whole
    assert len(text.ends) == count
    assert text.ends[-1:] == [len(whole)][:count]
    return pieces, count


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_up_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces, _ = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert all(INCOMPLETE not in piece for piece in pieces), "half a character was shown"


def test_a_space_behind_a_special_token_stays() -> None:
    """As transformers decodes it: a tokenizer of Llama 2's kind strips that of a beginning."""
    tokenizer = TOKENIZERS["word pieces"]
    parts = (["a", "</s>", SPACE, "b"], ["<s>", SPACE, "a"], ["a", "<s>", "</s>", SPACE, "b", "c"])
    for tokens in parts:
        ids = tokenizer.convert_tokens_to_ids(tokens)
        pieces, _ = stream(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


@given(ids=st.lists(st.integers(0, 4000), max_size=40))
@settings(max_examples=150)
def test_any_tokens_give_the_whole_text_in_the_end(ids: list[int]) -> None:
    """Random tokens are mostly parts of characters; what is shown never has to be taken back."""
    tokenizer = TOKENIZERS["byte-level"]
    pieces, _ = stream(tokenizer, ids)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces).replace(INCOMPLETE, "") == whole.replace(INCOMPLETE, "")


@given(ids=st.lists(st.integers(0, 280), max_size=20))
@settings(max_examples=150)
def test_a_whole_output_is_that_of_a_stream(ids: list[int]) -> None:
    """With tokens of bytes too, of which transformers loses those that are characters."""
    tokenizer = TOKENIZERS["word pieces"]
    assert decode_output(tokenizer, ids) == "".join(stream(tokenizer, ids)[0])
    newline, first_byte = tokenizer.convert_tokens_to_ids(["<0x0A>", "<0xF0>"])
    assert decode_output(tokenizer, [newline, first_byte]) == "\n\ufffd"


@given(text=st.text(max_size=30))
@settings(max_examples=150)
def test_any_text_comes_out_whole(text: str) -> None:
    for tokenizer in TOKENIZERS.values():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces, _ = stream(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("word", ["\n\n", "class", "return 'x'", "'", "A:\n", "日本", "🙂"])
def test_a_stop_word_ends_the_text_before_itself(word: str) -> None:
    tokenizer = TOKENIZERS["byte-level"]
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces, count = stream(tokenizer, ids, (word, "never in it"))
        whole = tokenizer.decode(ids)
        assert "".join(pieces) == whole.split(word)[0]
        if word in whole:
            # The token that completes the word is the last one taken.
            assert word in tokenizer.decode(ids[:count])
            assert word not in tokenizer.decode(ids[: count - 1])
        else:
            assert count == len(ids)


def test_what_may_become_a_stop_word_is_held_back() -> None:
    tokenizer = TOKENIZERS["word pieces"]
    ids = tokenizer("ab stop stopping", add_special_tokens=False)["input_ids"]
    pieces, count = stream(tokenizer, ids, ("stopp",))
    assert "".join(pieces) == "ab stop "
    assert count == len(ids) - 3
    shown = ""
    for piece in pieces[:-1]:
        shown += piece
        assert not shown.endswith("s"), "the s may begin the stop word"
    pieces, _ = stream(tokenizer, ids, ("stopper",))
    assert "".join(pieces) == "ab stop stopping"


def test_a_stop_word_before_half_a_character_is_seen_at_once() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    end = tokenizer("x\n", add_special_tokens=False)["input_ids"]
    half = tokenizer("🙂", add_special_tokens=False)["input_ids"][:1]
    text = TextStream(tokenizer, ("\n",))
    assert [text.add(token) for token in [*end[:-1], *half]].count(True) == 0
    text = TextStream(tokenizer, ("\n",))
    assert [text.add(token) for token in [*end, *half]][len(end) - 1] is True
    assert text.finish() == "x"


def test_text_is_not_tidied_up() -> None:
    """Llama 3's tokenizer asks for it: then transformers 4 would change code, and lose words."""
    tokenizer = load_byte_level()
    tokenizer.clean_up_tokenization_spaces = True
    text = "if a != b : f(' .', x) , n't do not"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert "".join(stream(tokenizer, ids)[0]) == decode_text(tokenizer, ids) == text


def test_the_earliest_of_several_stop_words_counts() -> None:
    tokenizer = TOKENIZERS["word pieces"]
    ids = tokenizer("one two three", add_special_tokens=False)["input_ids"]
    pieces, count = stream(tokenizer, ids, ("three", "wo"))
    assert "".join(pieces) == "one t"
    pieces, count = stream(tokenizer, ids, ("three", "two", "wo"))
    assert "".join(pieces) == "one "
    assert tokenizer.decode(ids[:count]) == "one two"
