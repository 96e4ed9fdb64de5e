"""Display of --show-drafts: each token's origin, by colours on a terminal or by marks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from specdec.decode.requests import ActiveRequest
from specdec.text.text_stream import decode_text, read_stream

CONTEXT = 8  # tokens of context with which rejected tokens are decoded
REJECTED = "rejected"
# Texts before and after each kind of piece: marks like wdiff's, or a terminal's colours.
MARKS = {"draft": ("{+", "+}"), REJECTED: ("[-", "-]"), "bonus": ("<", ">"), "plain": ("", "")}
RESET = "\x1b[0m"
COLOURS = {
    "draft": ("\x1b[32m", RESET),
    REJECTED: ("\x1b[9;31m", RESET),
    "bonus": ("\x1b[1;36m", RESET),
    "plain": ("", ""),
}
NAMES = {
    "draft": "accepted draft",
    REJECTED: "rejected draft",
    "bonus": "the target's own after a draft",
    "plain": "nothing drafted",
}

Piece = tuple[str, list[str]]  # a kind, and the texts of its tokens


def split_pieces(result: ActiveRequest, text: str, tokenizer: Any) -> list[Piece]:
    """Cut an output's text into accepted drafts, bonus and plain tokens, with rejected drafts.

    The pieces without rejected drafts make up `text`. A character of several tokens belongs to the
    last of them.
    """
    ids, pieces, num_left = result.output_ids, list[Piece](), len(text)
    for index, (origin, token_text) in enumerate(
        zip(result.origins, split_text(tokenizer, ids), strict=True)
    ):
        if index in result.rejected:
            context = ids[max(0, index - CONTEXT) : index]
            context_and_rejected = decode_text(tokenizer, [*context, *result.rejected[index]])
            rejected = context_and_rejected[len(decode_text(tokenizer, context)) :]
            # No other line ends than the text's own.
            pieces.append((REJECTED, [rejected.replace("\n", "\\n")]))
        visible_text, num_left = token_text[:num_left], num_left - len(token_text[:num_left])
        if origin == "draft" and pieces and pieces[-1][0] == "draft":
            pieces[-1][1].append(visible_text)
        else:
            pieces.append((origin, [visible_text]))
    return [(kind, texts) for kind, texts in pieces if any(texts)]


def split_text(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds."""
    stream = read_stream(tokenizer, ids)
    text = stream.finish()
    return [text[start:end] for start, end in itertools.pairwise([0, *stream.ends])]


def format_pieces(pieces: Sequence[Piece], *, in_colour: bool) -> str:
    """Return the text with its marks; bars divide the accepted tokens of a step."""
    styles = COLOURS if in_colour else MARKS
    texts_with_marks = []
    for kind, texts in pieces:
        opening, closing = styles[kind]
        texts_with_marks.append(opening + ("" if in_colour else "|").join(texts) + closing)
    return "".join(texts_with_marks)


def format_legend(*, in_colour: bool) -> str:
    """Return the line that explains the marks."""
    styles = COLOURS if in_colour else MARKS
    return "Drafts: " + ", ".join(name.join(styles[kind]) for kind, name in NAMES.items())
