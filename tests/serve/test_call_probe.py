"""Formats of tool calls, found by what chat templates of published models write."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.decode.chats import read_answer
from specdec.serve.tools import Calling, make_parser
from specdec.text.answer_parser import Parser
from specdec.text.call_formats import REASONING_FORMATS, TOOL_FORMATS, ChatFormats
from specdec.text.call_messages import write_messages
from specdec.text.call_probe import choose_formats
from specdec.text.call_search import CALLS, split_calls
from specdec.text.tool_calls import render_calls

TEMPLATES = Path(__file__).parent / "templates"
FOLDER = os.environ.get("SPECDEC_TEMPLATES")
# By template: how an answer begins and ends that calls tools. A template that reads no tools, and
# one that shows no calls, has neither: what the format itself writes is read back.
WRITTEN = {
    "qwen2.5": ("<tool_call>", "<|im_end|>"), "qwen3": ("<tool_call>", "<|im_end|>"),
    "mimo": ("<tool_call>", "<|im_end|>"), "qwen3_coder": ("<tool_call>", "<|im_end|>"),
    "qwen3.5": ("<tool_call>", "<|im_end|>"), "mistral_nemo": ("[TOOL_CALLS]", "</s>"),
    "mistral_small_3.2": ("[TOOL_CALLS]", "</s>"), "ministral3": ("[TOOL_CALLS]", "</s>"),
    "granite4": ("<tool_call>", "<|end_of_text|>"), "llama3": ('{"name', "<|eot_id|>"),
    "seed_oss": ("<seed:tool_call>", "<seed:eos>"),
    "granite3.3": None, "smollm3": None, "phi4_mini": None,
    "smollm2": None, "phi3.5": None, "gemma": None,
}  # fmt: skip
TOKENS = {"phi4_mini": ["<|tool_call|>", "<|/tool_call|>"], "llama3": ["<|python_tag|>"]}
PROPERTIES = {
    "text": {"type": "string"}, "count": {"type": "integer"}, "share": {"type": "number"},
    "is_new": {"type": "boolean"}, "note": {"type": ["string", "null"]},
    "words": {"type": "array", "items": {"type": "string"}}, "place": {"type": "object"},
}  # fmt: skip
ARGUMENTS = [
    {"text": 'A "quoted" <b>word</b>,\nits 2nd line\'s é\\n', "count": -3, "is_new": True},
    {"share": 0.5, "words": ["a", "b } c"], "place": {"city": "Köln", "at": [1, {}]}, "text": "7"},
    {"count": 0, "note": "none"},
]
NAMES = ["find_line", "get-time", "space.name_2"]
SCHEMA = {"type": "object", "properties": PROPERTIES}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": n, "description": "It.", "parameters": SCHEMA}}
    for n in NAMES
]
Calls = list[tuple[str, dict[str, Any]]]


class Tokenizer:
    """Tokenizer that is a chat template only, rendered as transformers does it."""

    eos_token, eos_token_id, bos_token = "</s>", 2, "<s>"

    def __init__(self, template: str, tokens: Any = ()) -> None:
        self.chat_template = template
        self.added_tokens_decoder = {7 + i: Token(name) for i, name in enumerate(tokens)}

    def apply_chat_template(self, messages: Any, **given: Any) -> str:
        given.pop("tokenize")
        (text,), _ = render_jinja_template(
            [messages], chat_template=self.chat_template, bos_token=self.bos_token,
            eos_token=self.eos_token, **given,
        )  # fmt: skip
        return str(text)


class Token(str):
    special = True


def make(name: str) -> Tokenizer:
    return Tokenizer((TEMPLATES / f"{name}.jinja").read_text(), TOKENS.get(name, ()))


def write_calls(calls: Calls) -> list[dict[str, Any]]:
    return [
        {
            "id": f"callid{100 + i}", "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(calls)
    ]  # fmt: skip


def render(tokenizer: Tokenizer, formats: ChatFormats, calls: Calls) -> tuple[str, str]:
    """Text that the template writes for a conversation with calls and their results."""
    written = write_calls(calls)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "ASKED"},
        {"role": "assistant", "content": "", "tool_calls": written},
        *(
            {"role": "tool", "tool_call_id": call["id"], "content": f"RESULT {i}"}
            for i, call in enumerate(written)
        ),
    ]
    more: dict[str, Any] = {}
    if formats.reads_tools and not formats.use.is_field:
        more[formats.use.tools_variable] = TOOLS
    texts = []
    for shown in (messages, messages[:2]):
        given = write_messages(shown, tokenizer.chat_template, TOOLS, formats)
        texts.append(
            render_calls(
                lambda m: tokenizer.apply_chat_template(m, tokenize=False, **more), given, False
            )[0]
        )
    return texts[0], texts[1]


def read(text: str, formats: ChatFormats, seed: int = 0) -> Calls:
    """The calls that a parser finds in a text, in one piece and in pieces."""
    rng = random.Random(seed)
    found = []
    for count in (0, 3, len(text)):
        cuts = sorted(rng.sample(range(len(text) + 1), min(count, len(text))))
        parser = Parser(formats.tools, formats.reasoning, schemas=dict.fromkeys(NAMES, SCHEMA))
        for start, end in itertools.pairwise([0, *cuts, len(text)]):
            parser.feed(text[start:end])
        parser.finish()
        assert not parser.is_call_cut
        functions = [call["function"] for call in parser.calls]
        found.append([(f["name"], json.loads(f["arguments"])) for f in functions])
        assert parser.content.strip() == "", parser.content
    assert found[0] == found[1] == found[2]
    return found[0]


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_that_a_families_template_writes_are_read_back(name: str) -> None:
    tokenizer = make(name)
    formats = choose_formats("auto", "auto", tokenizer)
    assert formats.can_call
    assert formats.tools is not None
    for count in (1,) if name == "llama3" else (1, 2, 3):
        calls = list(zip(NAMES, ARGUMENTS, strict=True))[:count]
        whole, answer = render(tokenizer, formats, calls)
        for i in range(count):
            assert f"RESULT {i}" in whole
        if (ends := WRITTEN[name]) is None:
            text = formats.tools.prefix + formats.tools.separator.join(
                formats.tools.open(n) + json.dumps(arguments) for n, arguments in calls
            ) + formats.tools.suffix  # fmt: skip
            assert text in answer, "the history has calls as answers have them"
        else:
            text = ends[0] + answer.partition("ASKED")[2].partition(ends[0])[2]
            text = text[: text.rindex(ends[1])]
        assert read(text, formats) == calls, text
    forced = formats.tools.separator.join(
        formats.tools.open(n) + json.dumps(arguments)
        for n, arguments in zip(NAMES, ARGUMENTS, strict=True)
    )
    forced = formats.tools.prefix + forced + formats.tools.suffix
    assert read(forced, formats) == list(zip(NAMES, ARGUMENTS, strict=True))


def test_formats_are_those_that_have_names() -> None:
    for name, known in (("qwen2.5", "hermes"), ("qwen3_coder", "qwen3_coder"), ("gemma", "json"),
                        ("llama3", "llama3_json"), ("mistral_nemo", "mistral_list"),
                        ("ministral3", "mistral"), ("qwen3.5", "qwen3_coder")):  # fmt: skip
        assert choose_formats("auto", "none", make(name)).tools == TOOL_FORMATS[known], name
    given = choose_formats("json", "none", make("qwen2.5"))
    assert (given.tools, given.reads_tools, given.as_text) == (TOOL_FORMATS["json"], True, False)
    assert choose_formats("none", "auto", make("qwen3")).tools is None
    assert choose_formats("auto", "auto", make("qwen3")).reasoning is not None
    seed = choose_formats("auto", "auto", make("seed_oss")).reasoning
    assert seed == REASONING_FORMATS["seed_oss"]
    granite = choose_formats("auto", "auto", make("granite3.3")).reasoning
    assert granite == REASONING_FORMATS["granite"]
    assert choose_formats("auto", "auto", SimpleNamespace(chat_template=None)).tools is None


FORMS = {
    # Others that models of supported architectures write.
    "<TOOLCALL>[{% for c in cs %}{{ c.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]"
    "</TOOLCALL>": "<TOOLCALL>",
    "<function={{ 'x' }}{% for c in cs %}{% endfor %}": "",
    "{% for c in cs %}<function={{ c.function.name }}>{{ c.function.arguments | tojson }}"
    "</function>{% endfor %}": "<function=",
    "{% for c in cs %}<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items()"
    " %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n"
    "{% endfor %}</tool_call>{% endfor %}": "<tool_call>",
    "<calls>\n{% for c in cs %}<invoke name=\"{{ c.function.name }}\">\n{% for k, v in"
    " c.function.arguments.items() %}<parameter name=\"{{ k }}\">{{ v if v is string else v |"
    " tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}</calls>": "<calls>",
    "<|calls|>{% for c in cs %}<|call|>functions.{{ c.function.name }}:{{ loop.index0 }}<|args|>"
    "{{ c.function.arguments | tojson }}<|end_call|>{% endfor %}<|end_calls|>": "<|calls|>",
    "<|prefix|>[{% for c in cs %}{ {{- '\"' + c.function.name }}\": "
    "{{ c.function.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]"
    "<|suffix|>": "<|prefix|>[",
    "{% for c in cs %}{{ c.function.name }}({{ c.function.arguments }}){% endfor %}": "",
    # As LFM2.5: a list of Python's calls.
    "<|tool_call_start|>[{% for c in cs %}{{ c.function.name }}({% for k, v in"
    " c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
    "{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>": "<|tool_call_start|>",
    # As Gemma 4: bare keys, and a quotation mark of its own.
    "{% macro w(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is boolean %}{{ v | tojson }}"
    "{% elif v is mapping %}{ {%- for k, x in v.items() %}{{ k }}:{{ w(x) }}{{ ',' if not"
    " loop.last }}{% endfor -%} }{% elif v is iterable %}[{% for x in v %}{{ w(x) }}{{ ',' if not"
    " loop.last }}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}{% for c in cs %}"
    "<|tool_call>call:{{ c.function.name }}{{ w(c.function.arguments) }}<tool_call|>{% endfor %}":
    "<|tool_call>",
}  # fmt: skip


@pytest.mark.parametrize("written", FORMS)
def test_a_form_is_read_or_told_as_unknown(written: str, caplog: pytest.LogCaptureFixture) -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% set cs = m.tool_calls %}{% if cs %}" + written + "{% endif %}<|end|>{% endfor %}"
    )
    begin = FORMS[written]
    tokenizer = Tokenizer(template)
    with caplog.at_level(logging.INFO, "specdec"):
        formats = choose_formats("auto", "none", tokenizer)
    if not begin:
        assert formats.tools is None
        assert not formats.can_call
        assert "it is not known how the model writes calls" in caplog.text
        assert "--tool-call-parser" in caplog.text
        return
    assert formats.tools is not None
    assert formats.tools.begin == begin
    assert f"tool calls: {begin}" in caplog.text or formats.tools.is_bare
    calls = list(zip(NAMES, ARGUMENTS, strict=True))
    _, answer = render(tokenizer, formats, calls)
    text = answer.partition("<|assistant|>")[2].removesuffix("<|end|>")
    assert read(text, formats) == calls
    for size in range(len(text)):  # a limit that ends it leaves no marker, and calls that are cut
        parser = Parser(formats.tools, None, schemas=dict.fromkeys(NAMES, SCHEMA))
        parser.feed(text[:size])
        parser.finish(is_cut=True)
        assert parser.content == "", (size, parser.content)
        names = [call["function"]["name"] for call in parser.calls]
        assert names == NAMES[: len(names)]


def test_special_tokens_of_markers_reach_the_parser() -> None:
    """Texts lack them: the parser is given those that stand in a marker, by their ids."""
    tokenizer = make("phi4_mini")
    formats = choose_formats("auto", "auto", tokenizer)
    assert formats.marks == {7: "<|tool_call|>", 8: "<|/tool_call|>"}
    request: Any = SimpleNamespace(
        input_text="", continued_text="", grammar=None, form=SimpleNamespace(skips_special=True)
    )
    parser = make_parser(Calling(TOOLS, {}), formats, request)
    assert parser is not None
    assert parser.marks == formats.marks


@pytest.mark.parametrize(
    ("name", "opening", "text"),
    [
        ("gemma4", "<|turn>model\n", "<|channel>thought\nhm<channel|>Yes"),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "Yes"),
        ("cohere", "<|CHATBOT_TOKEN|><|START_THINKING|>",
         "hm<|END_THINKING|><|START_TEXT|>Yes<|END_TEXT|>"),
        ("cohere", "<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>",
         "<|START_RESPONSE|>Yes<|END_RESPONSE|>"),
        ("apertus", "<|assistant_start|>", "<|inner_prefix|>hm<|inner_suffix|>Yes"),
        ("apriel", "<|begin_assistant|>\nHere are my reasoning steps:\n",
         "hm\n[BEGIN FINAL RESPONSE]\nYes\n[END FINAL RESPONSE]\n"),
    ],
)  # fmt: skip
def test_reasoning_is_known_by_a_template(name: str, opening: str, text: str) -> None:
    """And the text has none of the marks around it, also where the prompt leaves no reasoning."""
    form = REASONING_FORMATS[name]
    turn = f"{form.begin}{{{{ m.reasoning }}}}{form.end}{{{{ m.content }}}}"
    tokenizer = Tokenizer("{% for m in messages %}" + turn + "{% endfor %}" + opening)
    formats = choose_formats("auto", "auto", tokenizer)
    assert formats.reasoning == form
    request: Any = SimpleNamespace(
        input_text=opening, continued_text="", grammar=None,
        form=SimpleNamespace(skips_special=True),
    )  # fmt: skip
    parser = make_parser(None, formats, request)
    content = text
    if parser is not None:
        parser.feed(text)
        parser.finish()
        content = parser.content
    assert content == "Yes"
    assert "hm" not in text or (parser is not None and parser.reasoning == "hm")


@pytest.mark.skipif(not FOLDER, reason="SPECDEC_TEMPLATES names no folder of templates")
def test_templates_of_a_folder() -> None:
    """Each template's own calls are read back, or the format is told as unknown."""
    unknown = []
    for path in sorted(Path(str(FOLDER)).glob("*.jinja")):
        tokenizer = Tokenizer(path.read_text())
        formats = choose_formats("auto", "auto", tokenizer)
        if formats.tools is None or formats.is_harmony:
            unknown += [path.stem] if formats.tools is None else []
            continue
        calls = list(zip(NAMES, ARGUMENTS, strict=True))[:1]
        try:
            _, answer = render(tokenizer, formats, calls)
        except Exception as error:  # noqa: BLE001 - what transformers cannot render
            unknown.append(f"{path.stem} ({error})")
            continue
        parser = Parser(formats.tools, None, schemas=dict.fromkeys(NAMES, SCHEMA))
        answer = answer.partition("ASKED")[2]
        parser.feed(answer[answer.index(formats.tools.begin or '{"name') :])
        parser.finish()
        functions = [call["function"] for call in parser.calls]
        found = [(f["name"], json.loads(f["arguments"])) for f in functions]
        assert found[:1] == calls, path.name
    print("unknown:", ", ".join(unknown))


def test_a_chats_message_of_a_model_with_channels() -> None:
    """Of gpt-oss, whose answers are messages on channels, as of any other."""
    formats = choose_formats("auto", "auto", make("gpt_oss"))
    assert formats.use.marks_turns
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.add"
        '<|channel|>commentary json<|message|>{"a": 1}'
    )
    output: Any = SimpleNamespace(prompt="<|start|>assistant", text=text, finish_reason="eos")
    message = read_answer(output, [{"name": "add", "parameters": {}}], formats)
    assert (message["reasoning_content"], message["content"]) == ("hm", "")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_a_chats_message_that_goes_on_with_thoughts() -> None:
    formats = choose_formats("auto", "auto", make("qwen3"))
    begun = "<think>\nI was"
    output: Any = SimpleNamespace(
        prompt=f"a\n{begun}", text=" so</think>\nYes", finish_reason="eos"
    )
    message = read_answer(output, [], formats, begun)
    assert (message["reasoning_content"], message["content"]) == (" so", "Yes")


def test_calls_of_a_model_whose_template_shows_none() -> None:
    """LFM2: its token tells the format, and calls are written into messages as it writes them."""
    template = (
        "{{ tools | tojson }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    )
    tokens = ["<|tool_call_start|>", "<|tool_call_end|>"]
    tokenizer = Tokenizer(template, tokens)
    formats = choose_formats("auto", "none", tokenizer)
    assert formats.tools == TOOL_FORMATS["lfm2"]
    calls = list(zip(NAMES, ARGUMENTS, strict=True))
    _, answer = render(tokenizer, formats, calls)
    text = answer.partition("<|assistant|>")[2]
    assert text.startswith('<|tool_call_start|>[find_line(text=\'A "quoted"')
    assert read(text, formats) == calls


def test_the_quotation_mark_of_arguments_reaches_the_parser() -> None:
    """Gemma's is a special token, as its markers are, which texts lack."""
    written = next(text for text in FORMS if "<|tool_call>call:" in text)
    template = "{{ tools | tojson }}{% for m in messages %}{% set cs = m.tool_calls %}{% if cs %}"
    tokens = ["<|tool_call>", '<|"|>', "<tool_call|>", "<|image|>"]
    tokenizer = Tokenizer(template + written + "{% endif %}{% endfor %}", tokens)
    formats = choose_formats("auto", "none", tokenizer)
    assert formats.tools == TOOL_FORMATS["gemma4"]
    assert list(formats.marks.values()) == tokens[:3]


def test_calls_in_sections_that_lack_their_opening() -> None:
    """Also where the text after a name begins with letters of names, in any pieces."""
    written = next(text for text in FORMS if text.startswith("<|calls|>"))
    template = "{{ tools | tojson }}{% for m in messages %}{% set cs = m.tool_calls %}{% if cs %}"
    template += written + "{% endif %}{% endfor %}"
    formats = choose_formats("auto", "none", Tokenizer(template))
    text = f"<|call|>functions.{NAMES[0]}:0<|args|>{json.dumps(ARGUMENTS[0])}<|end_call|>"
    assert read(text, formats) == [(NAMES[0], ARGUMENTS[0])]
    other = text.replace(NAMES[0], f"{NAMES[0]}s")
    parser = Parser(formats.tools, None, schemas=dict.fromkeys(NAMES, SCHEMA))
    for letter in other:
        parser.feed(letter)
    parser.finish()
    assert (parser.content, parser.calls) == (other, [])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(
            [form % (call.name, json.dumps(call.arguments)) for call in CALLS]
            for form in ('{"name": "%s", "parameters": %s}', "[%s]%s", "%s(%s)")
        ),
        [
            f"<f={call.name}><a>{'</a><a>'.join(f'{k}:{v}' for k, v in call.arguments.items())}"
            for call in CALLS
        ],
    ],
    ids=["object", "name and object", "python", "tags"],
)
def test_calls_are_searched_in_the_forms_of_templates(first: str, second: str) -> None:
    """What stands around the calls is told, and nothing where one of them is missing."""
    found = split_calls(f"<begin>{first}<next>{second}<end>", CALLS)
    assert found is not None
    start = first.index(found.first[:9])  # brackets around a name belong to what is written before
    assert found.before == f"<begin>{first[:start]}"
    assert found.first == first[start : start + len(found.first)]
    assert found.between is not None
    assert "<next>" in found.between
    assert found.after.endswith("<end>")
    alone = split_calls(f"<begin>{first}<end>", CALLS[:1])
    assert alone is not None
    assert alone.between is None
    assert split_calls(f"<begin>{first}<end>", CALLS) is None
