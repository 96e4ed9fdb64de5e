"""Reasoning and tool calls found in text: the same, wherever the pieces of a stream begin."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from specdec.text.answer_parser import Parser
from specdec.text.call_formats import MAX_NAME, REASONING_FORMATS, TOOL_FORMATS

SCHEMAS = {
    "f": {"properties": {"a": {"type": "integer"}, "t": {"type": "string"}}},
    "get.time": {},
}
A, B = '{"a": 1}', '{"t": "}</tool_call>\\\\\\"{[TOOL_CALLS] é"}'
F, G = ("f", A), ("get.time", B)
JSON_F, JSON_G = f'{{"name": "f", "arguments": {A}}}', f'{{"name":"get.time","arguments":{B} }}'
# A format, what is written, and the content and the calls that it means.
WRITTEN: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text <tool", "Just text <tool", []),
    ("hermes", " \n", " \n", []),
    ("hermes", f"<tool_call>\n{JSON_F}\n</tool_call>", "", [F]),
    ("hermes", f"Well.\n\n<tool_call>{JSON_F}</tool_call>\n", "Well.", [F]),
    ("hermes", f"<tool_call>{JSON_F}</tool_call>\n<tool_call>\n{JSON_G}\n</tool_call>x y\n",
     "x y", [F, G]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "7"}</tool_call>', "", [F]),
    ("hermes", f"<tool_call>{JSON_F[:-1]}</tool_call>", "", [F]),  # a bracket is missing
    ("hermes", f"<tool_call>{JSON_F}}}\n</tool_call> so", "so", [F]),  # a bracket too many
    ("hermes", f"<tool_call>{JSON_F}}}\n so", "so", [F]),
    ("hermes", f"<tool_call>{JSON_F[:-1]}\nIt's so", "It's so", [F]),
    ("hermes", f"<tool_call>{JSON_F}, {JSON_G}</tool_call>", "", [F, G]),
    # As Python writes it, and with what JSON cannot have in a text.
    ("hermes", "<tool_call>\n{'name': 'f', 'arguments': {'a': 1}}\n</tool_call>", "", [F]),
    ("hermes", "<tool_call>\n{\"name\": \"f\", \"arguments\": {'a': [True, None, 'True'], }}\n"
     "</tool_call>", "", [("f", '{"a": [true, null, "True"] }')]),
    ("hermes", "<tool_call>{\"name\": \"f\", \"arguments\": {'t': 'a \"b\" it\\'s\\n'}}"
     "</tool_call>", "", [("f", r'{"t": "a \"b\" it' + r"""'s\n"}""")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"t": "a\n\tb\\d\\u00e9\\user it\\\'s"}}'
     "</tool_call>", "", [("f", r'{"t": "a\n\tb\\d\u00e9\\user it' + """'s"}""")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\'a\': 1}"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>', "",
     [("f", '{"a": [1')]),  # brackets that do not match
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {"b": 1]}}</tool_call>', "",
     [("f", '{"a": {"b": 1')]),
    ("hermes", f"<tool_call>{JSON_F}", "", [F]),  # cut off, from here on
    ("hermes", f"<tool_call>{JSON_F}\n</tool", "", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"t": "x\\', "", [("f", '{"t": "x')]),
    ("hermes", '<tool_call>\n{"name": "f", ', '<tool_call>\n{"name": "f", ', []),
    ("hermes", "a\n<tool_call>", "a\n<tool_call>", []),
    ("hermes", f"a\n<tool_call>no</tool_call> <tool_call>{JSON_F}</tool_call>",
     "a\n<tool_call>no</tool_call>", [F]),
    ("hermes", '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=t>\n1"
     "\n2\n</parameter>\n</function>\n</tool_call>", "", [("f", '{"a": 1, "t": "1\\n2"}')]),
    ("qwen3_coder", "Now: <tool_call><function=f></function></tool_call>", "Now:", [("f", "{}")]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>x</parameter>", "", [("f", '{"a": "x"}')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1", "", [("f", "{")]),
    ("qwen3_coder", "<tool_call><function=a b></function>", "<tool_call><function=a b></function>",
     []),
    # Without </parameter>, from here on.
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=t>\n2\n\n "
     "</parameter>\n</function>\n</tool_call>", "", [("f", '{"a": 1, "t": "2\\n\\n "}')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n  </function>\n</tool_call>so",
     "so", [F]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</tool_call>\n", "", [F]),
    # In one line, where the argument is no text; a text may have such tags.
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1 <parameter=t>x</parameter></function>"
     "</tool_call>so", "so", [("f", '{"a": 1, "t": "x"}')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>so", "so", [F]),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>[1, <parameter=b>]</parameter>"
     "<parameter=t>x <parameter=a></parameter></function></tool_call>", "",
     [("f", '{"a": "[1, <parameter=b>]", "t": "x <parameter=a>"}')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=t>x <parameter=a> y</function></tool_call> z"
     "</parameter></function></tool_call>", "",
     [("f", '{"t": "x <parameter=a> y</function></tool_call> z"}')]),
    ("qwen3_coder", "<tool_call><function=f>\n<parameter=t>\nx\n<parameter=b>\n<parameter=t>\n"
     "</function>\ny <parameter=a>\n</parameter></function></tool_call>", "",
     [("f", '{"t": "x\\n<parameter=b>\\n<parameter=t>\\n</function>\\ny <parameter=a>"}')]),
    ("qwen3_coder", f"<tool_call>\n{JSON_F}\n</tool_call>", "", [F]),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{A}[TOOL_CALLS]get.time{B}", "", [F, G]),
    ("mistral", f"Yes. [TOOL_CALLS] f [CALL_ID]123456789[ARGS] {A}", "Yes. [TOOL_CALLS] f "
     f"[CALL_ID]123456789[ARGS] {A}", []),
    ("mistral", f"Yes. [TOOL_CALLS]f[CALL_ID]123456789[ARGS] {A}", "Yes.", [F]),
    ("mistral", f"[TOOL_CALLS] [{JSON_F}, {JSON_G}]", "", [F, G]),
    ("mistral_list", f"[TOOL_CALLS][{JSON_F}, {JSON_G}] and", "and", [F, G]),
    ("mistral_list", "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    ("mistral_list", f"[TOOL_CALLS][{JSON_F}}}, {JSON_G}}}}}] and", "and", [F, G]),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{A}}}[TOOL_CALLS]get.time{B}]", "", [F, G]),
    ("gemma4", '<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:get.time{t:<|"|>a "b"\n\\<|"|>,'
     'l:[None,{<|"|>x<|"|>:true}]}<tool_call|>', "",
     [("f", '{"a":1}'), ("get.time", r'{"t":"a \"b\"\n\\","l":[null,{"x":true}]}')]),
    ("gemma4", f"Well. <|tool_call>call:f{A}<tool_call|> so", "Well.so", [F]),
    ("gemma4", 'call:f{t:<|"|>it <|', "", [("f", '{"t":"it ')]),
    ("lfm2", "<|tool_call_start|>[f(a=1), get.time( t = 'a \"b\" it\\'s\n', l=[None, (1, 2,)])]"
     "<|tool_call_end|>so", "so",
     [("f", '{"a":1}'), ("get.time", r'{ "t" : "a \"b\" it' + r"""'s\n", "l":[null, [1, 2]]}""")]),
    ("lfm2", "Well. <|tool_call_start|>f()<|tool_call_end|>", "Well.", [("f", "{}")]),
    # As LFM2.5's template writes texts, with apostrophes as they are.
    ("lfm2", "<|tool_call_start|>[f(t='it's \"a\" 'b', no?', a=1), f(t='say('x')' , ), f(t='o'' )]"
     "<|tool_call_end|>so", "so", [("f", '{"t":"it\'s \\"a\\" \'b\', no?", "a":1}'),
                                 ("f", '{"t":"say(\'x\')"  }'), ("f", '{"t":"o\'" }')]),
    ("lfm2", "<|tool_call_start|>f(t='it's')", "", [("f", '{"t":"it\'s"}')]),
    ("lfm2", f"<|tool_call_start|>[{JSON_F}, {JSON_G}]<|tool_call_end|>", "", [F, G]),
    ("lfm2", "<|tool_call_start|>f, g<|tool_call_end|>",
     "<|tool_call_start|>f, g<|tool_call_end|>", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [F]),
    ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}', "",
     [F]),
    ("llama3_json", f"{JSON_F}; {JSON_G}", "", [F, G]),
    ("llama3_json", f"{JSON_F}\n{JSON_G}}}\n", "", [F, G]),
    ("llama3_json", f'{JSON_F} {{"x": 1}}', '{"x": 1}', [F]),
    ("llama3_json", '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}',
     []),
    ("llama3_json", '{"answer": 1}', '{"answer": 1}', []),
    ("llama3_json", f"It is {JSON_F}", f"It is {JSON_F}", []),
    ("llama3_json", '{"name": "f"}', '{"name": "f"}', []),
    ("json", f"```json\n[{JSON_F}, {JSON_G}]\n```\n", "", [F, G]),
    ("json", "```json\n[1, 2]\n```", "```json\n[1, 2]\n```", []),
    ("json", "\n [", "\n [", []),
    ("json", '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', "", [F]),
]  # fmt: skip


def parse(pieces: Any, **given: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """The parts that a stream's deltas add up to; they are those that the parser keeps."""
    is_cut = given.pop("is_cut", False)
    given = {"schemas": SCHEMAS, **given}
    parser = Parser(given.pop("tools"), given.pop("reasoning", None), **given)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    deltas += parser.finish(is_cut=is_cut)
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for (part,) in (delta["tool_calls"] for delta in deltas if "tool_calls" in delta):
        if part["index"] == len(calls):
            assert part["id"]
            assert part["type"] == "function"
            assert part["function"]["arguments"] == ""
            calls.append({**part, "function": dict(part["function"])})
        else:
            assert part["index"] == len(calls) - 1
            assert part.keys() == {"index", "function"}
            assert part["function"].keys() == {"arguments"}
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    kept = [{"index": index, **call} for index, call in enumerate(parser.calls)]
    assert (parser.content, parser.reasoning, kept) == (content, reasoning, calls)
    functions = [call["function"] for call in calls]
    return content, reasoning, [(one["name"], one["arguments"]) for one in functions]


def split_everywhere(text: str) -> Any:
    """Each way of cutting a text in two, letter by letter, and some hundred in pieces of blocks."""
    yield [text]
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    rng = random.Random(text)
    for _ in range(100):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(2, 9))))
        yield [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


@pytest.mark.parametrize(("name", "text", "content", "calls"), WRITTEN)
def test_calls_are_found_in_any_pieces(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in split_everywhere(text):
        assert parse(pieces, tools=TOOL_FORMATS[name]) == (content, "", calls), pieces


# Answers whose calls lack their opening; with a grammar, which writes it, they are text.
UNOPENED: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", "",
     [F]),
    ("qwen3_coder", "Well.\n<function=f><parameter=a>1</parameter></function></tool_call>\n"
     f"<tool_call>{JSON_G}</tool_call> so <function=x></function>",
     "Well.so <function=x></function>", [F, G]),
    ("qwen3_coder", JSON_F, "", [F]),
    ("hermes", f"{JSON_F}\n</tool_call>\n<tool_call>{JSON_G}</tool_call>", "", [F, G]),
    ("mistral", f"f[ARGS]{A}[TOOL_CALLS]get.time{B}", "", [F, G]),
    ("mistral", f"f{A}", "", [F]),
    ("mistral_list", f"[{JSON_F}, {JSON_G}]", "", [F, G]),
    # As blocks of code, as Qwen2.5-Coder writes them.
    ("hermes", f"```json\n{JSON_F}\n```", "", [F]),
    ("hermes", f"```json\n{JSON_F}\n```\n\n```\n{JSON_G}}}\n```\nSo ```x```", "So ```x```", [F, G]),
    ("hermes", f"```json\n{JSON_F}\n{JSON_G}\n```\n", "", [F, G]),
    ("hermes", f'```json\n{JSON_F}\n``` ```json\n{{"x": 1}}```', '```json\n{"x": 1}```', [F]),
    ("qwen3_coder", f"```json\n[{JSON_F}]\n```", "", [F]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), UNOPENED)
def test_calls_without_their_opening(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in split_everywhere(text):
        assert parse(pieces, tools=TOOL_FORMATS[name]) == (content, "", calls), pieces
    has_opening = "<tool_call>" in text or "]get.time" in text
    marked = parse([text], tools=TOOL_FORMATS[name], needs_marker=True)
    assert marked[2] == [G] * has_opening


OPENED_JSON = '[{"name": "f", "arguments": {"a": 1}}]'
OPENED_LLAMA = '{"name": "f", "parameters": {"a": 1}}'
# Answers beside a grammar: calls as it writes them, and structured output that looks like a call.
STRICT_SCHEMAS = {"f": {**SCHEMAS["f"], "required": ["a"], "additionalProperties": False}, "g": {}}
STRUCTURED: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("json", OPENED_JSON, [F]),
    ("json", OPENED_JSON[:-1] + f", {OPENED_JSON[1:]}", [F, F]),
    ("json", OPENED_JSON[1:-1], []),
    ("json", OPENED_JSON.replace(", ", ","), []),
    ("json", "```json\n" + OPENED_JSON + "```", []),
    ("json", '{"name": "f", "arguments": {"a": 1}}', []),
    ("json", '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', []),
    ("json", '[{"name": "h", "arguments": {}}]', []),
    ("llama3_json", OPENED_LLAMA, [F]),
    ("llama3_json", f"{OPENED_LLAMA}; {OPENED_LLAMA}", [F, F]),
    ("llama3_json", OPENED_LLAMA.replace("parameters", "arguments"), []),
    ("llama3_json", '{"name": "f", "parameters": {}}', []),
    ("llama3_json", '{"name": "f", "parameters": {"width": 3}}', []),
    ("llama3_json", '{"name": "f", "parameters": "a"}', []),
    ("llama3_json", '{"name": "g", "parameters": {}}', [("g", "{}")]),
    ("llama3_json", '{"name": "ff", "parameters": {"a": 1}}', []),
]


@pytest.mark.parametrize(("name", "text", "calls"), STRUCTURED)
def test_structured_output_is_no_call(name: str, text: str, calls: list[tuple[str, str]]) -> None:
    content = "" if calls else text
    for pieces in split_everywhere(text):
        parts = parse(
            pieces, tools=TOOL_FORMATS[name], needs_marker=True, schemas=STRICT_SCHEMAS
        )  # fmt: skip
        assert parts == (content, "", calls), pieces


@pytest.mark.parametrize(("name", "text", "content", "calls"), [*WRITTEN, *UNOPENED])
def test_no_part_of_a_call_is_content_where_a_limit_ends_it(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    """However much of an answer is there, it says nothing that the whole answer does not."""
    form = TOOL_FORMATS[name]
    for size in range(len(text) + 1):
        parts = parse([text[:size]], tools=form, is_cut=True)
        assert parse(text[:size], tools=form, is_cut=True) == parts, size
        said, _, told = parts
        is_word = name == "mistral" and text.startswith(said) and said in SCHEMAS
        assert content.startswith(said.rstrip()) or is_word, (text[:size], parts)
        assert len(told) <= len(calls)
        for one, whole in zip(told, calls, strict=False):
            assert one[0] == whole[0]
            assert whole[1].startswith(one[1]), (text[:size], parts)


@pytest.mark.parametrize(
    ("name", "text", "is_call_cut"),
    [
        ("hermes", f"<tool_call>{JSON_F}", False), ("hermes", f"<tool_call>{JSON_F[:-2]}", True),
        ("hermes", f"<tool_call>{JSON_F[:-2]}<\n<tool_call>{JSON_G}</tool_call>", True),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>', True),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": one}}</tool_call>', True),
        ("hermes", '<tool_call>{"name": "f", "arguments": "one"}</tool_call>', True),
        ("qwen3_coder", "<tool_call><function=f></function>", False),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter></func", True),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>", True),
        ("mistral", f"[TOOL_CALLS]f{A[:-1]}", True), ("json", f"[{JSON_F}, {JSON_F[:-3]}", True),
    ],
)  # fmt: skip
def test_a_call_is_cut_where_its_arguments_are_not_whole(
    name: str, text: str, is_call_cut: bool
) -> None:
    """By a limit, a stop word, or a model that ends in the middle of them."""
    for is_cut in (False, True):
        parser = Parser(TOOL_FORMATS[name], None, schemas=SCHEMAS)
        parser.feed(text)
        parser.finish(is_cut=is_cut)
        assert parser.calls
        assert parser.is_call_cut is is_call_cut


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize(
    "text",
    ['{"name": "Bob", "age": 5}', '{"id": 7, "price": 5}', '[{"name": "Bob"}]', "get it, f {a}",
     "f(a=1) is 1", "[f(a=1)]", "```json\n{\"x\": 1}\n``` so", "```\nf\n```",
     '{"type": "circle", "r": 1}', '{"parameters": 5}', "See <function> and [TOOLS], a < b or"],
)  # fmt: skip
def test_a_limit_leaves_other_answers_whole(name: str, text: str) -> None:
    form = TOOL_FORMATS[name]
    for pieces in ([text], list(text)):
        for is_cut in (False, True):
            assert parse(pieces, tools=form, is_cut=is_cut) == (text, "", [])


THOUGHT: list[tuple[str, bool, str, str, str]] = [
    ("qwen3", False, "<think>\nhm </th\n</think>\n\nYes.\n", "hm </th", "Yes.\n"),
    ("qwen3", False, " <thin", "", " <thin"),
    ("qwen3", False, "No </think> here", "", "No </think> here"),
    ("qwen3", True, "hm\n</think>Yes", "hm", "Yes"),
    ("qwen3", True, "<think>hm</think>", "hm", ""),
    ("qwen3", True, "hm, cut", "hm, cut", ""),
    ("deepseek_r1", False, "hm</think>\n\nYes", "hm", "Yes"),
    ("mistral", False, "[THINK]hm[/THINK]Yes", "hm", "Yes"),
    ("granite", False, "<think>hm</think> <response>\nYes\n</response>\n", "hm", "Yes"),
    (
        "granite",
        False,
        "<think>hm</think>Yes <response>x</response>",
        "hm",
        "Yes <response>x</response>",
    ),
    (
        "granite",
        False,
        "<think>hm</think><response>a </response>\n</respons",
        "hm",
        "a </response>\n</respons",
    ),
    ("granite", False, "<response>x</response>", "", "<response>x</response>"),
    ("seed_oss", False, "<seed:think>hm</seed:think>\nYes", "hm", "Yes"),
    ("gemma4", False, "<|channel>thought\nhm\n<channel|>Yes", "hm", "Yes"),
    ("cohere", True, "hm<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>", "hm", "Yes"),
    ("cohere", False, "<|START_RESPONSE|>Yes, <|END<|END_RESPONSE|>", "", "Yes, <|END"),
    ("apertus", False, "<|inner_prefix|>hm<|inner_suffix|>Yes", "hm", "Yes"),
    ("apriel", True, "hm\n[BEGIN FINAL RESPONSE]\nYes\n[END FINAL RESPONSE]\n", "hm", "Yes"),
    ("apriel", False, "Here are my reasoning steps:\nhm\n[BEGIN FINAL RESPONSE]\nYes", "hm", "Yes"),
]


@pytest.mark.parametrize(("name", "is_thinking", "text", "reasoning", "content"), THOUGHT)
def test_reasoning_is_found_in_any_pieces(
    name: str, is_thinking: bool, text: str, reasoning: str, content: str
) -> None:
    given: Any = {"reasoning": REASONING_FORMATS[name], "thinking": is_thinking or None}
    for pieces in split_everywhere(text):
        assert parse(pieces, tools=None, **given) == (content, reasoning, []), pieces
    if content.startswith("Yes"):  # calls that are thought of are not made
        call = f"<tool_call>{JSON_F}</tool_call>"
        thought = text.replace("hm", f"hm {call} hm") + f" {call}"
        expected = content.rstrip(), reasoning.replace("hm", f"hm {call} hm"), [F]
        for pieces in split_everywhere(thought):
            assert parse(pieces, tools=TOOL_FORMATS["hermes"], **given) == expected, pieces


CALLED_F, CALLED_G = f"<tool_call>\n{JSON_F}\n</tool_call>", f"<tool_call>{JSON_G}</tool_call>"
# Answers whose reasoning has no end: the reasoning, and the calls with which they end.
UNENDED: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", f"hm\n{CALLED_F}\n{CALLED_G}\n", "hm", [F, G]),
    ("hermes", f"hm {CALLED_F} so {CALLED_F}{CALLED_G}", f"hm {CALLED_F} so", [F, G]),
    ("hermes", f"{CALLED_F}\nso {CALLED_F} so\n", f"{CALLED_F}\nso {CALLED_F} so\n", []),
    ("hermes", '<tool_call>{"name": "h"}</tool_call>', '<tool_call>{"name": "h"}</tool_call>', []),
    ("hermes", "hm <tool_call> is a tag <tool", "hm <tool_call> is a tag <tool", []),
    ("qwen3_coder", "hm <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
     "</tool_call>", "hm", [F]),
    ("mistral", f"hm[TOOL_CALLS]f[ARGS]{A}", "hm", [F]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "reasoning", "calls"), UNENDED)
def test_calls_that_end_an_answer_end_its_reasoning(
    name: str, text: str, reasoning: str, calls: list[tuple[str, str]]
) -> None:
    form, thought = TOOL_FORMATS[name], REASONING_FORMATS["qwen3"]
    for pieces in split_everywhere(text):
        parts = parse(pieces, tools=form, reasoning=thought, thinking=True)
        assert parts == ("", reasoning, calls), pieces
    ended = parse([f"{text}</think>"], tools=form, reasoning=thought, thinking=True)
    assert ended == ("", text.rstrip(), []), "calls that are thought of are not made"
    for size in range(len(text)):
        parts = parse([text[:size]], tools=form, reasoning=thought, thinking=True, is_cut=True)
        assert (
            parse(text[:size], tools=form, reasoning=thought, thinking=True, is_cut=True) == parts
        )
        assert parts[0] == ""
        assert text.startswith(parts[1])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "json"])
def test_calls_that_end_an_answer_may_be_blocks_of_code(name: str) -> None:
    """As Qwen2.5-Coder writes them after a text; other blocks, and what text follows, are text."""
    form, block = TOOL_FORMATS[name], f"```json\n{JSON_F}\n```"
    code = "See:\n```python\nf(a=1)\n```\n\n"
    for text, content, calls in (
        (f"{code}So:\n\n{block}\n", f"{code}So:", [F]),
        (f"So:\n{block}\n\n```\n{JSON_G}\n```", "So:", [F, G]),
        (f"So:\n{block} as told", f"So:\n{block} as told", []),
        (
            f"So:\n{block.replace('name', 'title')}\n",
            f"So:\n{block.replace('name', 'title')}\n",
            [],
        ),
        ("So: ``", "So: ``", []),
        (code, code, []),
    ):
        for pieces in split_everywhere(text):
            assert parse(pieces, tools=form) == (content, "", calls), pieces
        assert parse([text], tools=form, needs_marker=True) == (text, "", [])
    for text in ("So `f`", "So:\n```", "So:\n```json", code.rstrip()):
        assert parse([text], tools=form, is_cut=True) == (text, "", [])


def test_the_end_of_reasoning_ends_it_also_within_a_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"t": "</think>"}}</tool_call> so'
    expected = '"}}</tool_call> so', text.partition("</think>")[0], list[tuple[str, str]]()
    form, thought = TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"]
    for pieces in split_everywhere(text):
        assert parse(pieces, tools=form, reasoning=thought, thinking=True) == expected, pieces


def test_a_word_that_is_too_long_for_a_name_is_content_at_once() -> None:
    """Else each new letter of it would be compared with a name from its beginning on."""
    names = "f" * MAX_NAME, "f" * (MAX_NAME + 1)
    parsers = [Parser(TOOL_FORMATS["mistral"], None) for _ in names]
    texts = [f"[TOOL_CALLS]{name}" for name in names]
    deltas = [parser.feed(text) for parser, text in zip(parsers, texts, strict=True)]
    assert ["".join(d["content"] for d in found) for found in deltas] == ["", texts[1]]
    parsers[0].feed(A)
    assert parsers[0].calls[0]["function"] == {"name": names[0], "arguments": A}


def test_arguments_are_told_before_they_end() -> None:
    parser = Parser(TOOL_FORMATS["hermes"], None, schemas=SCHEMAS)
    told = parser.feed('<tool_call>\n{"name": "f", "arguments": {"t": "a long')
    assert told[0]["tool_calls"][0]["function"]["name"] == "f"
    assert told[1]["tool_calls"][0]["function"]["arguments"] == '{"t": "a long'
    parser.feed(' text"}}\n</tool_call>')
    assert json.loads(parser.calls[0]["function"]["arguments"]) == {"t": "a long text"}
