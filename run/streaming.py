"""Streaming: the outputs as text or as JSON, written piece by piece as text becomes certain."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from specdec.decode.requests import ActiveRequest, Request
from specdec.text.harmony import open_answer
from specdec.text.text_stream import TextStream


class StreamPrinter:
    """Printer of outputs as text, in the order of the requests: the first that runs is live.

    Of an answer in harmony it is the content.
    """

    def __init__(
        self, write: Callable[[str], None], requests: Sequence[Request], tokenizer: Any = None
    ) -> None:
        self._write, self._requests = write, requests
        answers = {request.index: open_answer(tokenizer, request) for request in requests}
        self._answers = {index: answer for index, answer in answers.items() if answer is not None}
        self._ids: dict[int, Sequence[int]] = {}  # of the outputs so far, by index
        self._turn = 0
        self._has_header = False
        self._texts: dict[int, TextStream] = {}  # streams of the requests that have begun, by index
        self._finished_indices: set[int] = set()

    def show(self, requests: Sequence[ActiveRequest]) -> None:
        """Take the tokens that a step has added to these requests."""
        for request in requests:
            assert request.text_stream is not None
            self._texts[request.request.index] = request.text_stream
            self._ids[request.request.index] = request.output_ids
            if request.finish_reason is not None:
                request.text_stream.finish()
                self._finished_indices.add(request.request.index)
        self._write_turns()

    def close(self) -> None:
        """Write the incomplete texts of every request: no more tokens will come."""
        for text in self._texts.values():
            text.finish()
        self._finished_indices = {request.index for request in self._requests}
        self._write_turns()

    def _write_turns(self) -> None:
        while self._turn < len(self._requests):
            request = self._requests[self._turn]
            index, text = request.index, self._texts.get(request.index)
            if text is None and index not in self._finished_indices:
                return
            if not self._has_header:
                self._write(
                    f'Input [Text {index}]: "{request.input_text}"\nOutput [Text {index} Beam 0]: "'
                )
                self._has_header = True
            if text is not None and (piece := self._take(index, text)):
                self._write(piece)
            if index not in self._finished_indices:
                return
            self._write('"\n')
            self._turn += 1
            self._has_header = False

    def _take(self, index: int, text: TextStream) -> str:
        answer = self._answers.get(index)
        if answer is None:
            return text.take()
        return answer.take(self._ids[index], is_over=index in self._finished_indices)


class JsonPrinter:
    """Printer of one object per line: the tokens that a step has added to a request."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._num_shown: dict[int, int] = {}  # number of tokens written, by index
        self._ended_indices: set[int] = set()

    def show(self, requests: Sequence[ActiveRequest]) -> None:
        """Take the tokens that a step has added to these requests."""
        for request in requests:
            assert request.text_stream is not None
            index = request.request.index
            if index in self._ended_indices:
                continue
            if request.finish_reason is not None:
                request.text_stream.finish()
                self._ended_indices.add(index)
            num_shown = self._num_shown.get(index, 0)
            tokens, origins = request.output_ids[num_shown:], request.origins[num_shown:]
            self._num_shown[index] = num_shown + len(tokens)
            event = {
                "index": index,
                "text": request.text_stream.take(),
                "token_ids": tokens,
                "origins": origins if len(origins) == len(tokens) else None,
                "finish_reason": request.finish_reason,
            }
            self._write(json.dumps(event) + "\n")

    def close(self) -> None:
        """Do nothing: incomplete texts are written with the outputs."""
