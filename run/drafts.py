"""--show-drafts: how each token came, in colour on a terminal and by marks elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from specdec.decode.requests import ActiveRequest
from specdec.text.text_stream import decode_text, read_stream

CONTEXT = 8  # tokens that rejected ones are decoded behind
REJECTED = "rejected"
# What stands before and behind the text of each kind: marks as wdiff's, or colours of a terminal.
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
    "bonus": "the target's own behind a draft",
    "plain": "nothing drafted",
}

Piece = tuple[str, list[str]]  # a kind, and the texts of its tokens


def split_pieces(result: ActiveRequest, text: str, tokenizer: Any) -> list[Piece]:
    """Cut an output's text into accepted drafts, bonus and plain tokens, with rejected drafts.

    Their texts without the rejected ones make up `text`. A character of several tokens stands with
    the last of them.
    """
    ids, pieces, left = result.output_ids, list[Piece](), len(text)
    for at, (origin, token_text) in enumerate(
        zip(result.origins, split_text(tokenizer, ids), strict=True)
    ):
        if at in result.rejected:
            before = ids[max(0, at - CONTEXT) : at]
            whole = decode_text(tokenizer, [*before, *result.rejected[at]])
            rejected = whole[len(decode_text(tokenizer, before)) :]
            # The text is to be read with its own line ends alone.
            pieces.append((REJECTED, [rejected.replace("\n", "\\n")]))
        shown, left = token_text[:left], left - len(token_text[:left])
        if origin == "draft" and pieces and pieces[-1][0] == "draft":
            pieces[-1][1].append(shown)
        else:
            pieces.append((origin, [shown]))
    return [(kind, texts) for kind, texts in pieces if any(texts)]


def split_text(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to a text."""
    stream = read_stream(tokenizer, ids)
    text = stream.finish()
    return [text[start:end] for start, end in itertools.pairwise([0, *stream.ends])]


def format_pieces(pieces: Sequence[Piece], *, in_colour: bool) -> str:
    """The text with its marks; the accepted tokens of a step are told apart by bars."""
    styles = COLOURS if in_colour else MARKS
    parts = []
    for kind, texts in pieces:
        before, behind = styles[kind]
        parts.append(before + ("" if in_colour else "|").join(texts) + behind)
    return "".join(parts)


def format_legend(*, in_colour: bool) -> str:
    """A line that says what the marks mean."""
    styles = COLOURS if in_colour else MARKS
    return "Drafts: " + ", ".join(name.join(styles[kind]) for kind, name in NAMES.items())
