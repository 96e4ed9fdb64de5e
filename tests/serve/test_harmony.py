"""gpt-oss's answers: channels become reasoning, content and calls, wherever new text begins."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.decode.requests import Request
from specdec.serve.tools import find_thinking
from specdec.text.call_formats import ChatFormats
from specdec.text.call_messages import write_messages
from specdec.text.call_probe import choose_formats
from specdec.text.harmony import MARKS, TOOLS, HarmonyParser, find_opening, open_answer
from specdec.text.text_stream import TextForm
from tests.serve.test_call_probe import TEMPLATES, Tokenizer

SCHEMAS: dict[str, Any] = {"find": {"type": "object"}, "get-time": {"type": "object"}}
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>"
Parts = tuple[str, str, list[tuple[str, str]]]


def parse(pieces: list[str], *, opening: str = "assistant", has_tools: bool = True) -> Parts:
    """The parts of an answer that comes in pieces, by its deltas and by what it holds at last."""
    parser = HarmonyParser(TOOLS if has_tools else None, opening, schemas=SCHEMAS)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    texts = {
        name: "".join(delta.get(name, "") for delta in deltas)
        for name in ("content", "reasoning_content")
    }
    assert texts == {"content": parser.content, "reasoning_content": parser.reasoning}
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in parser.calls]
    heard: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        heard.setdefault(call["index"], []).append(call["function"].get("arguments", ""))
    assert ["".join(texts) for texts in heard.values()] == [arguments for _, arguments in calls]
    assert not any(mark in text for mark in MARKS for text in texts.values())
    return parser.content, parser.reasoning, calls


ANSWERS: dict[str, tuple[str, Parts]] = {
    "a final text": (f"{FINAL}Hello, <b>you</b>!", ("Hello, <b>you</b>!", "", [])),
    "reasoning before it": (
        f"{ANALYSIS}They greet.\nI greet.{NEXT}{FINAL}Hello<|return|>",
        ("Hello", "They greet.\nI greet.", []),
    ),
    "a call": (
        f'{ANALYSIS}Look it up.{NEXT}{CALL}{{"a": "}} <|", "n": [1]}}<|call|>',
        ("", "Look it up.", [("find", '{"a": "} <|", "n": [1]}')]),
    ),
    "a call whose recipient comes first": (
        ' to=functions.get-time<|channel|>commentary json<|message|>{"a":1}',
        ("", "", [("get-time", '{"a":1}')]),
    ),
    "a call without the namespace, and one on the channel of reasoning": (
        f"<|channel|>commentary to=find<|message|>{{}}{NEXT}"
        '<|channel|>analysis to=functions.get-time code<|message|>{"b": 2}',
        ("", "", [("find", "{}"), ("get-time", '{"b": 2}')]),
    ),
    "a text before a call, and two reasonings": (
        f"{ANALYSIS}One.{NEXT}{ANALYSIS}Two.{NEXT}<|channel|>commentary<|message|>I look."
        f"{NEXT}{CALL}{{}}",
        ("I look.", "One.\n\nTwo.", [("find", "{}")]),
    ),
    "a tool of the model's own": (
        f"<|channel|>analysis to=python code<|message|>1 + 1{NEXT}{FINAL}Two",
        ("Two", "1 + 1", []),
    ),
    "no header": ("hello there, to all", ("hello there, to all", "", [])),
    "one word": ("hello", ("hello", "", [])),
    "a header that is cut off": (f"{ANALYSIS}Hm.{NEXT}<|channel|>comm", ("", "Hm.", [])),
    "a result that the model makes up": (
        f"{ANALYSIS}Hm.<|end|><|start|>functions.find to=assistant<|channel|>commentary<|message|>"
        f"[]{NEXT}{FINAL}Yes",
        ("Yes", "Hm.\n\n[]", []),
    ),
    "a header with a comma": (
        f"{ANALYSIS}Hm.{NEXT}<|channel|>final, then<|message|>Yes", ("Yes", "Hm.", [])
    ),
    "a channel with two words": (
        f"{NEXT}<|channel|>analysis of it, <|message|>Hm.{NEXT}{FINAL}Yes", ("Yes", "Hm.", [])
    ),
    "a second text without a header": (
        f"{FINAL}Yes.{NEXT} and no.{NEXT}{FINAL}So", ("Yes.\n\nand no.\n\nSo", "", [])
    ),
    "a header without an end": (f"{FINAL}Yes{NEXT} and, <|end|>", ("Yes\n\nand,", "", [])),
    "an empty message at last": (f"{FINAL}Yes{NEXT}{FINAL}<|return|>", ("Yes", "", [])),
    "nothing": ("", ("", "", [])),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_the_parts_of_an_answer(name: str) -> None:
    """In one piece, in each two, and letter by letter."""
    text, parts = ANSWERS[name]
    assert parse([text]) == parts
    assert parse(list(text)) == parts
    for at in range(len(text)):
        assert parse([text[:at], text[at:]]) == parts, at


@pytest.mark.parametrize("name", ANSWERS)
def test_no_part_of_a_header_is_content_where_a_limit_ends_it(name: str) -> None:
    """However much of an answer is there, it says nothing that the whole answer does not."""
    text, (content, reasoning, _) = ANSWERS[name]
    for end in range(len(text)):
        parser = HarmonyParser(TOOLS, "assistant", schemas=SCHEMAS)
        parser.feed(text[:end])
        parser.finish(is_cut=True)
        assert content.startswith(parser.content.rstrip()), text[:end]
        assert reasoning.startswith(parser.reasoning.rstrip()), text[:end]


def test_white_space_in_place_of_a_header_takes_no_time() -> None:
    """A model that repeats itself writes thousands."""
    space = "\n" * 3000
    assert parse([f"{space}no header, "])[0] == f"{space}no header, "
    assert parse([f"{ANALYSIS}Hm.{NEXT}{space}no, "])[0].strip() == "no,"
    assert parse([f"{NEXT}<|channel|>{space}final{space}a, <|message|>Yes"])[0] == "Yes"


def test_a_call_that_nobody_offered_is_content() -> None:
    text = f'{CALL}{{"a": 1}}'
    assert parse([text], has_tools=False) == ('{"a": 1}', "", [])


@pytest.mark.parametrize(
    ("opening", "text", "parts"),
    [
        (f"assistant{FINAL}It is", " late<|return|>", (" late", "", [])),
        (f"assistant{ANALYSIS}So", f" be it.{NEXT}{FINAL}Yes", ("Yes", " be it.", [])),
    ],
)
def test_an_answer_goes_on_with_the_prompt(opening: str, text: str, parts: Parts) -> None:
    prompt = f"<|start|>user<|message|>hi<|end|><|start|>{opening}"
    assert find_opening(prompt) == opening
    assert parse(list(text), opening=opening) == parts


def test_arguments_that_a_limit_cuts_off() -> None:
    parser = HarmonyParser(TOOLS, "assistant", schemas=SCHEMAS)
    parser.feed(f'{CALL}{{"a": "b')
    parser.finish(is_cut=True)
    assert parser.is_call_cut
    assert parser.calls[0]["function"]["arguments"] == '{"a": "b'


def test_where_the_reasoning_ends() -> None:
    """By which its tokens are counted: after the header of what follows, or at the end."""
    text = f"{ANALYSIS}So.{NEXT}{FINAL}"
    for rest, end in (("Yes", len(text)), ("", len(text))):
        parser = HarmonyParser(None, "assistant")
        parser.feed(text + rest)
        parser.finish()
        assert parser.reasoning_end == end
    parser = HarmonyParser(None, "assistant")
    parser.feed(f"{ANALYSIS}So")
    parser.finish()
    assert parser.reasoning_end == len(f"{ANALYSIS}So")


def load() -> tuple[Tokenizer, ChatFormats]:
    tokenizer = Tokenizer((TEMPLATES / "gpt_oss.jinja").read_text(), (*MARKS, "<|return|>"))
    return tokenizer, choose_formats("auto", "auto", tokenizer)


def test_formats_are_found_by_the_template() -> None:
    tokenizer, formats = load()
    assert formats.is_harmony
    assert formats.can_call
    assert sorted(formats.marks.values()) == sorted(MARKS), "what ends an answer is no mark"
    assert find_thinking(formats.reasoning, "<|start|>assistant") is None
    assert not choose_formats("hermes", "qwen3", tokenizer).is_harmony


def test_a_conversation_is_written_as_the_template_takes_it() -> None:
    """Reasoning by its name there, one call a message, each before its result."""
    tokenizer, formats = load()
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": {"i": i}}}
        for i, name in enumerate(SCHEMAS)
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Both.",
         "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": "first"},
        {"role": "tool", "tool_call_id": "c1", "content": "second"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": n, "description": "It."}} for n in SCHEMAS]
    written = write_messages(messages, tokenizer.chat_template, tools, formats)
    text = tokenizer.apply_chat_template(
        written, tokenize=False, add_generation_prompt=True, tools=tools
    )
    turns = text.partition("<|start|>user<|message|>hi<|end|>")[2]
    assert turns == (
        f"<|start|>assistant{FINAL}I look.<|end|><|start|>assistant{ANALYSIS}Both.<|end|>"
        '<|start|>assistant to=functions.find<|channel|>commentary json<|message|>{"i": 0}<|call|>'
        '<|start|>functions.find to=assistant<|channel|>commentary<|message|>"first"<|end|>'
        "<|start|>assistant to=functions.get-time<|channel|>commentary json<|message|>"
        '{"i": 1}<|call|><|start|>functions.get-time to=assistant<|channel|>commentary<|message|>'
        '"second"<|end|><|start|>assistant'
    )
    assert find_opening(text) == "assistant"
    answer = turns.removeprefix("<|start|>assistant").partition("<|start|>functions.")[0]
    assert parse([answer]) == ("I look.", "Both.", [("find", json.dumps({"i": 0}))])


def test_a_run_shows_the_content() -> None:
    """And names the other parts; what is no chat, or has stop words, stays as it is."""
    decode = SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids)))
    tokenizer = SimpleNamespace(decode=decode.decode, chat_template=load()[0].chat_template)

    def ask(prompt: str, **fields: Any) -> Request:
        return Request(
            index=0, input_text=prompt, input_ids=[1], max_output_len=9, end_ids=frozenset(),
            **fields,
        )  # fmt: skip

    answer = open_answer(tokenizer, ask("<|start|>user<|message|>hi<|end|><|start|>assistant"))
    assert answer is not None
    ids = [*map(ord, ANSWERS["reasoning before it"][0])]
    texts = [answer.take(ids[:end], is_over=end == len(ids)) for end in range(len(ids) + 1)]
    assert "".join(texts) == "Hello"
    assert answer.parser.reasoning == "They greet.\nI greet."
    assert open_answer(tokenizer, ask("no chat")) is None
    assert open_answer(tokenizer, ask("<|start|>assistant", stop=("so",))) is None
    shown = TextForm(skips_special=False)
    assert open_answer(tokenizer, ask("<|start|>assistant", form=shown)) is None
    assert open_answer(SimpleNamespace(chat_template=None), ask("<|start|>assistant")) is None
