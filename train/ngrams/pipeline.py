"""Making of a table: read the data, tokenize it, count, write."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import SpecDecError
from specdec.files.ngrams import hash_tokens
from specdec.files.staging import check_output_file
from specdec.text.chat import Conversation, get_speaker, join_parts
from specdec.text.documents import (
    PromptedText,
    check_data_file,
    name_line,
    parse_object,
    read_document,
    read_lines,
)
from specdec.text.pretrained import load_tokenizer

from .counts import count_ngrams, join_texts, make_table
from .settings import NgramTableSettings

BATCH_TEXTS = 256  # that are tokenized in one call


def make_ngram_table(settings: NgramTableSettings) -> dict[str, Any]:
    """Count the n-grams of texts, write the table, and return a report.

    Raises SpecDecError for data that cannot be read or holds too little, and for a path that cannot
    be written.
    """
    paths = [Path(name) for name in settings.data]
    for path in paths:
        check_data_file(path, "--data")
    check_output_file(settings.output, force=settings.force, inputs=paths)
    tokenizer = load_tokenizer(settings.tokenizer_dir)
    corpus = join_texts(_encode(read_texts(paths), tokenizer))
    num_texts = int((corpus < 0).sum())
    if len(corpus) - num_texts < 2:
        raise SpecDecError(
            f"--data holds {len(corpus) - num_texts} tokens in {num_texts} texts: no n-gram",
            "give files with answers or texts",
        )
    num_tokens = int(corpus.max()) + 1
    orders = count_ngrams(
        corpus, max_order=settings.max_order, min_count=settings.min_count,
        num_continuations=settings.max_continuations, least_news=settings.min_difference,
    )  # fmt: skip
    table = make_table(orders, num_tokens=num_tokens, sha256=hash_tokens(tokenizer, num_tokens))
    table.write(settings.output, force=settings.force)
    return {
        "output": str(settings.output), "texts": num_texts, "tokens": len(corpus) - num_texts,
        "contexts": [len(order.keys) for order in orders],
        "bytes": settings.output.stat().st_size,
    }  # fmt: skip


def read_texts(paths: list[Path]) -> Iterator[str]:
    """Yield what may be drafted: answers, and texts as they are."""
    for path in paths:
        if path.suffix == ".txt":
            with name_line(path, 1):
                text = path.read_bytes().decode("utf-8-sig")
            yield text
            continue
        for number, line in read_lines(path):
            with name_line(path, number):
                document = read_document(parse_object(line))
            yield from _list_answers(document)


def _list_answers(document: str | Conversation) -> list[str]:
    if isinstance(document, PromptedText):
        return [document[document.num_prompt_characters :]]
    if isinstance(document, str):
        return [document]
    return [
        join_parts(message["content"])
        for index, message in enumerate(document.messages)
        if get_speaker(message) == "assistant" and index not in document.unlearned
    ]


def _encode(texts: Iterator[str], tokenizer: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the tokens of each text that holds any."""
    while batch := list(itertools.islice(texts, BATCH_TEXTS)):
        for ids in tokenizer(batch, add_special_tokens=False)["input_ids"]:
            if ids:
                yield np.array(ids, np.int64)
