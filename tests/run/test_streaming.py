"""Output of specdec-run while texts grow, and how it opens engines, alone."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specdec.decode.requests import ActiveRequest, Request
from specdec.run.backends import embedded
from specdec.run.backends.base import OpenedEngine
from specdec.run.settings import RunSettings
from specdec.run.streaming import JsonPrinter, StreamPrinter
from specdec.text import harmony
from specdec.text.text_stream import TextStream

LETTERS = SimpleNamespace(decode=lambda ids, **_: "".join(chr(token) for token in ids))


class Growing:
    """Requests whose tokens are the codes of characters; `stop` holds back what begins it."""

    def __init__(self, *inputs: str, stop: str = "STOP") -> None:
        self.requests = [
            Request(index=n, input_ids=[1], max_output_len=9, end_ids=frozenset(), input_text=text)
            for n, text in enumerate(inputs)
        ]
        self.active = [
            SimpleNamespace(
                request=request, output_ids=[], origins=[], finish_reason=None,
                text_stream=TextStream(LETTERS, [stop]),
            )
            for request in self.requests
        ]  # fmt: skip

    def add(self, index: int, text: str, *, is_last: bool = False) -> list[ActiveRequest]:
        active = self.active[index]
        for character in text:
            active.output_ids.append(ord(character))
            active.origins.append("target")
            active.text_stream.add(ord(character))
        active.finish_reason = "length" if is_last else None
        return [cast(ActiveRequest, active)]


def test_texts_come_in_the_order_of_the_requests() -> None:
    """The second runs ahead, and waits; what may become a stop word is held back."""
    written: list[str] = []
    growing = Growing("first", "second")
    printer = StreamPrinter(written.append, growing.requests)
    printer.show(growing.add(1, "xyz"))
    assert written == []
    printer.show(growing.add(0, "abS"))
    assert written == ['Input [Text 0]: "first"\nOutput [Text 0 Beam 0]: "', "ab"]
    printer.show(growing.add(0, "c"))
    assert written[2:] == ["Sc"]
    printer.show(growing.add(1, "", is_last=True))
    assert written[3:] == []
    printer.show(growing.add(0, "S", is_last=True))
    assert written[3:] == [
        "S", '"\n', 'Input [Text 1]: "second"\nOutput [Text 1 Beam 0]: "', "xyz", '"\n',
    ]  # fmt: skip


def test_of_harmony_the_content_is_written() -> None:
    """As it comes, after the prompt's open turn; of the other request all is text."""
    written: list[str] = []
    growing = Growing("<|start|>assistant", "other")
    tokenizer = SimpleNamespace(
        decode=LETTERS.decode, chat_template=f"<|start|>assistant{harmony.FINAL}"
    )
    printer = StreamPrinter(written.append, growing.requests, tokenizer)
    text = f"{harmony.ANALYSIS}So.<|end|><|start|>assistant{harmony.FINAL}It is"
    printer.show(growing.add(0, text))
    printer.show(growing.add(0, " so.<|return|>", is_last=True))
    printer.show(growing.add(1, "<|x|>", is_last=True))
    assert "".join(written) == (
        'Input [Text 0]: "<|start|>assistant"\nOutput [Text 0 Beam 0]: "It is so."\n'
        'Input [Text 1]: "other"\nOutput [Text 1 Beam 0]: "<|x|>"\n'
    )
    assert written[1] == "It is", "what has come is written at once"


def test_what_is_incomplete_is_written_at_the_end() -> None:
    written: list[str] = []
    growing = Growing("a", "b", "c")
    printer = StreamPrinter(written.append, growing.requests)
    printer.show(growing.add(1, "yST"))
    printer.close()
    assert "".join(written) == (
        'Input [Text 0]: "a"\nOutput [Text 0 Beam 0]: ""\n'
        'Input [Text 1]: "b"\nOutput [Text 1 Beam 0]: "yST"\n'
        'Input [Text 2]: "c"\nOutput [Text 2 Beam 0]: ""\n'
    )


def test_a_line_of_json_for_each_step() -> None:
    lines: list[str] = []
    growing = Growing("a", "b")
    printer = JsonPrinter(lines.append)
    printer.show(growing.add(1, "xS"))
    for text in ("y", "zw", "q"):
        printer.show(growing.add(0, text))
    growing.active[1].origins.pop()  # of a runtime that does not tell
    printer.show(growing.add(1, "", is_last=True))
    printer.show(growing.add(1, "", is_last=True))
    printer.close()
    assert all(line.endswith("\n") for line in lines)
    events = [json.loads(line) for line in lines]
    assert events[0] == {
        "index": 1, "text": "x", "token_ids": [120, 83], "origins": ["target", "target"],
        "finish_reason": None,
    }  # fmt: skip
    assert [(e["index"], e["text"], e["token_ids"]) for e in events[1:]] == [
        (0, "y", [121]), (0, "zw", [122, 119]), (0, "q", [113]), (1, "S", []),
    ]  # fmt: skip
    assert events[-1]["finish_reason"] == "length"


def test_an_engine_that_runs_in_this_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import specdec

    opened: list[Any] = []
    engine = SimpleNamespace(core=SimpleNamespace(begin_drafts=lambda: None))

    def load(*arguments: Any, **options: Any) -> Any:
        opened.append((*arguments, options))
        return engine

    monkeypatch.setattr(specdec, "Engine", SimpleNamespace(open=load))
    settings = RunSettings(kv_cache_free_gpu_memory_fraction=0.5)
    with caplog.at_level(logging.WARNING):
        result = embedded.open_engine(settings, None, LETTERS)
    assert isinstance(result, OpenedEngine)
    assert (result.runner, result.core) == (engine, engine.core)
    assert result.load is engine.core.begin_drafts
    assert opened == [(settings, LETTERS, {"measuring": "late"})]
    assert "--kv-cache-free-gpu-memory-fraction has no effect on a torch engine" in caplog.text
    assert embedded.follow_ranks(settings) is False
