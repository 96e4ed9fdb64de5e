"""Tools and reasoning in chats: what the template gets, what answers have, and what is enforced."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import llguidance.hf
import pytest
from transformers import AutoTokenizer

from specdec import Event
from specdec.decode.requests import Request
from specdec.decode.settings import DecodeSettings
from specdec.serve.answers import Choice
from specdec.serve.protocol import BadRequest
from specdec.serve.schema import ChatBody
from specdec.serve.tools import Calling, GrammarWriter, make_parser, read_calling
from specdec.text import encoding, harmony
from specdec.text.answer_parser import Parser
from specdec.text.call_formats import REASONING_FORMATS, TOOL_FORMATS, ChatFormats, TemplateUse
from specdec.text.call_messages import write_messages
from specdec.text.encoding import encode_prompt
from specdec.text.grammar import write_choice
from specdec.text.prompts import Prompt
from specdec.text.text_stream import TextForm, TextStream
from tests.serve.servers import (
    CLIENT,
    ask_and_send_no_more,
    change_template,
    post,
    read_events,
    serve_here,
)

CHAT = [{"role": "user", "content": "hi"}]
PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% for t in tools or [] %}T:{{ t['function']['name'] }}{{ '\\n' }}{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}"
    "{% for c in m['tool_calls'] %}<tool_call>\n{{ c['function'] | tojson }}\n</tool_call>"
    "{% endfor %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}{# </think> #}"
)


def make_tool(name: str, properties: Any, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "parameters": schema | {"additionalProperties": False}, **more}
    return {"type": "function", "function": function}


ADD = make_tool("add", {"a": {"enum": [1, 22]}, "b": {"type": "boolean"}})
SAY = make_tool("say.it", {"word": {"enum": ["x", 'q"uote']}})
TOOLS = [ADD, SAY]


@pytest.fixture(scope="module")
def tokenizer_dir(folder: Path, lasting_dir: Path) -> Path:
    return change_template(folder, lasting_dir / "tools", TEMPLATE)


@pytest.fixture(scope="module")
def url(folder: Path, tokenizer_dir: Path) -> Iterator[str]:
    more: Any = {"draft_budget": "fixed", "reasoning_parser": "none"}
    with serve_here(folder, tokenizer_dir=str(tokenizer_dir), **more) as (_, url):
        yield url


def check_call(call: dict[str, Any]) -> None:
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "add":
        assert arguments.keys() == {"a", "b"}
        assert arguments["a"] in (1, 22)
        assert isinstance(arguments["b"], bool)
    else:
        assert call["function"]["name"] == "say.it"
        assert arguments in ({"word": "x"}, {"word": 'q"uote'})


def join(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """The message that the chunks of a choice add up to, and the names of its calls by id."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        (choice,) = event["choices"]
        if choice["index"] != index:
            continue
        for key in ("content", "reasoning_content"):
            message[key] += choice["delta"].get(key) or ""
        for part in choice["delta"].get("tool_calls", []):
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({k: v for k, v in part.items() if k != "index"})
            else:
                function = message["tool_calls"][part["index"]]["function"]
                function["arguments"] += part["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    texts = {key: message.get(key) or "" for key in ("content", "reasoning_content")}
    return texts | {"calls": calls}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"add", "say.it"}),
        ({"type": "function", "function": {"name": "say.it"}}, {"say.it"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]
                },
            },
            {"add"},
        ),
    ],
)  # fmt: skip
def test_calls_that_are_asked_for_come_and_are_valid(
    url: str, choice: Any, names: set[str]
) -> None:
    """In a stream as in a whole answer, with drafts as without."""
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    body: Any = {"messages": CHAT, "tools": TOOLS, "tool_choice": choice, "n": 3, "seed": 3}
    body |= {"max_tokens": 150, "parallel_tool_calls": False}
    whole = post(url, PATH, **body)
    events = read_events(url, PATH, **body)
    plain = post(url, PATH, **body, speculation=False)
    ChatCompletion.model_validate(whole)
    for event in events:
        ChatCompletionChunk.model_validate(event)
    for index, one in enumerate(whole["choices"]):
        assert one["finish_reason"] == "tool_calls", one
        (call,) = one["message"]["tool_calls"]
        check_call(call)
        assert call["function"]["name"] in names
        assert (one["finish_reason"], one["message"]["content"]) == ("tool_calls", None)
        streamed = join(events, index)
        assert streamed["finish_reason"] == "tool_calls"
        expected = without_ids(one["message"])
        assert without_ids(streamed) == expected
        assert without_ids(plain["choices"][index]["message"]) == expected


def test_a_client_that_sends_no_more_gets_its_calls(url: str) -> None:
    """In a chat and as a response, streamed and whole, however long they wait for each other."""
    body: Any = {"messages": CHAT, "tools": [ADD], "tool_choice": "required", "temperature": 0}
    whole = post(url, PATH, **body)
    texts = ask_and_send_no_more(url, PATH, {**body, "stream": True}, body)
    streamed = [line for line in texts[0].splitlines() if line.startswith("data: {")]
    message = join([json.loads(line.removeprefix("data: ")) for line in streamed], 0)
    expected = without_ids(whole["choices"][0]["message"])
    assert without_ids(message) == expected
    assert texts[0].endswith("data: [DONE]\n\n")
    assert without_ids(json.loads(texts[1])["choices"][0]["message"]) == expected
    body = {"input": "hi", "tools": [{"type": "function", **ADD["function"]}], "temperature": 0}
    body |= {"tool_choice": "required"}
    events, text = ask_and_send_no_more(url, "/v1/responses", {**body, "stream": True}, body)
    last = json.loads(events.rpartition("data: ")[2])
    for response in (last["response"], json.loads(text)):
        (item,) = response["output"]
        assert {"name": item["name"], "arguments": item["arguments"]} == expected["calls"][0]


def test_a_block_may_hold_text_and_several_calls(url: str) -> None:
    call = r'<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'.replace("{", r"\{")
    text = rf"so\n\n{call}\n{call}"
    # The grammar has calls of its own as well, and several tokens may spell the text: one draw.
    body: Any = {"messages": CHAT, "tools": TOOLS, "guided_regex": text, "max_tokens": 200}
    body |= {"seed": 1}
    whole = post(url, PATH, **body, return_token_ids=True)
    (choice,) = whole["choices"]
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert without_ids(choice["message"])["calls"] == [function, function]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("so", "tool_calls")
    events = read_events(url, PATH, **body, logprobs=True, return_origins=True)
    assert without_ids(join(events, 0)) == without_ids(choice["message"])
    told = [
        one
        for event in events
        for one in (event["choices"][0]["logprobs"] or {}).get("content", [])
    ]
    assert len(told) == len(choice["token_ids"]) > 99, "each token is told of once"
    # Without the tools the same answer is text.
    (choice,) = post(url, PATH, messages=CHAT, guided_regex=text, max_tokens=200)["choices"]
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"].count("<tool_call>") == 2


def flatten(body: dict[str, Any]) -> dict[str, Any]:
    """A chat's body as a response's."""
    tools = [{"type": "function", **tool["function"]} for tool in body["tools"]]
    renamed = {"messages": "input", "max_tokens": "max_output_tokens"}
    return {renamed.get(key, key): value for key, value in body.items()} | {"tools": tools}


def test_a_limit_in_a_forced_call_leaves_no_marker(url: str) -> None:
    body: Any = {"messages": CHAT, "tools": [ADD], "tool_choice": "required", "temperature": 0}
    for limit in (1, 4, 9, 17, 26, 34):
        (whole,) = post(url, PATH, **body, max_tokens=limit)["choices"]
        streamed = join(read_events(url, PATH, **body, max_tokens=limit), 0)
        assert whole["finish_reason"] == streamed["finish_reason"] == "length"
        assert without_ids(streamed) == without_ids(whole["message"])
        assert not whole["message"]["content"]
        given = post(url, "/v1/responses", **flatten({**body, "max_tokens": limit}))
        assert given["status"] == "incomplete"
        assert given["incomplete_details"] == {"reason": "max_output_tokens"}
        assert given["output"][-1]["status"] == "incomplete"
        texts = [item["content"][0]["text"] for item in given["output"] if "content" in item]
        assert texts in ([], [""])


def test_no_stop_ends_a_forced_call(url: str) -> None:
    body: Any = {"messages": CHAT, "tools": [ADD], "tool_choice": "required", "temperature": 0}
    plain = post(url, PATH, **body)["choices"][0]["message"]
    ids = post(url, "/tokenize", prompt='{"a', add_special_tokens=False)["tokens"]
    body |= {"stop": ['"a"', "}"], "stop_token_ids": ids}
    whole, events = post(url, PATH, **body), read_events(url, PATH, **body)
    assert without_ids(whole["choices"][0]["message"]) == without_ids(plain)
    assert without_ids(join(events, 0)) == without_ids(plain)
    assert whole["choices"][0]["finish_reason"] == join(events, 0)["finish_reason"] == "tool_calls"
    assert whole["specdec"]["ignored"] == ["stop", "stop_token_ids"]
    given = post(url, "/v1/responses", **flatten(body))
    assert given["status"] == given["output"][-1]["status"] == "completed"
    check_call({"id": "call_", "type": "function", "function": given["output"][-1]})


def test_a_call_that_a_stop_cuts_is_told_as_cut(url: str) -> None:
    from openai.types.responses import Response

    call = r'<tool_call>\n\{"name": "add", "arguments": \{"a": 1, "b": true\}\}\n</tool_call>'
    body: Any = {"messages": CHAT, "tools": [ADD], "guided_regex": call}
    assert post(url, PATH, **body)["choices"][0]["finish_reason"] == "tool_calls"
    body["stop"] = '"b"'
    (choice,) = post(url, PATH, **body)["choices"]
    assert choice["finish_reason"] == join(read_events(url, PATH, **body), 0)["finish_reason"]
    assert choice["finish_reason"] == "stop"
    (called,) = choice["message"]["tool_calls"]
    assert called["function"]["arguments"] == '{"a": 1'
    given = post(url, "/v1/responses", **flatten(body))
    Response.model_validate(given)
    assert given["status"] == given["output"][-1]["status"] == "incomplete"
    assert given["incomplete_details"] is None


def test_a_prompt_beside_a_grammar_of_calls_is_tokenized_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize, prompts = encoding._encode_messages, list[Any]()

    def encode(prompt: Any, *arguments: Any) -> Any:
        prompts.append(prompt)
        return tokenize(prompt, *arguments)

    monkeypatch.setattr(encoding, "_encode_messages", encode)
    body: Any = {"messages": CHAT, "tools": [ADD], "add_special_tokens": False, "max_tokens": 2}
    usages = [post(url, PATH, **body, tool_choice=one)["usage"] for one in ("auto", "required")]
    assert usages[0]["prompt_tokens"] == usages[1]["prompt_tokens"]
    assert len(prompts) == 2


def test_a_call_that_a_model_writes_as_python(url: str) -> None:
    """Its arguments are JSON in every API: an object, or a text of it."""
    call = r"<tool_call>\n\{'name': 'add', 'arguments': \{'a': 1, 'b': True\}\}\n</tool_call>"
    body: Any = {"messages": CHAT, "tools": [ADD], "guided_regex": call}
    arguments = {"a": 1, "b": True}
    (choice,) = post(url, PATH, **body)["choices"]
    streamed = join(read_events(url, PATH, **body), 0)
    assert choice["finish_reason"] == streamed["finish_reason"] == "tool_calls"
    assert without_ids(choice["message"]) == without_ids(streamed)
    (called,) = choice["message"]["tool_calls"]
    assert json.loads(called["function"]["arguments"]) == arguments
    assert not choice["message"]["content"]
    given = post(url, "/v1/responses", **flatten(body))
    assert json.loads(given["output"][-1]["arguments"]) == arguments
    tool = {"name": "add", "input_schema": ADD["function"]["parameters"]}
    told = post(url, "/v1/messages", **{**body, "tools": [tool], "max_tokens": 99})
    assert (told["content"][-1]["input"], told["stop_reason"]) == (arguments, "tool_use")
    told = post(url, "/api/chat", **body, model="toy", stream=False)
    assert told["message"]["tool_calls"][0]["function"]["arguments"] == arguments


PATHS = {"type": "array", "items": {"type": "string", "format": "path"}, "maxItems": 1}


@pytest.mark.parametrize("is_flat", [False, True])
def test_what_no_grammar_keeps_to_is_told_by_tool_path_and_keyword(url: str, is_flat: bool) -> None:
    """And refused where it is promised; what only describes is left out."""

    def ask(tool: dict[str, Any], choice: Any, *others: dict[str, Any]) -> Any:
        body: Any = {"messages": CHAT, "tools": [*others, tool], "tool_choice": choice, "seed": 1}
        body["max_tokens"] = 60
        path = "/v1/responses" if is_flat else PATH
        return CLIENT.post(url + path, json=flatten(body) if is_flat else body)

    place = "tools.0.parameters" if is_flat else "tools.0.function.parameters"
    answer = ask(make_tool("save", {"paths": PATHS}), "required")
    assert answer.status_code == 200, answer.text
    assert answer.json()["specdec"]["ignored"] == [f"{place}.properties.paths.items.format"]
    names = {"propertyNames": {"maxLength": 5}}
    schema = {"type": "object", "properties": {"paths": PATHS | {"uniqueItems": True}}, **names}
    unique = make_tool("save", {}, parameters=schema)
    strict = make_tool("save", {}, parameters=schema, strict=True)
    for tool, choice in ((unique, "required"), (strict, "auto")):
        error = ask(tool, choice).json()["error"]
        assert error["param"] == "tools"
        for part in (place, "'save'", "at properties.paths.uniqueItems", "at propertyNames"):
            assert part in error["message"]
        assert '"strict": false' in error["message"]
    answer = ask(make_tool("save", {}, parameters=schema, strict=False), "required")
    assert answer.status_code == 200, answer.text
    left_out = {"propertyNames", "properties.paths.uniqueItems", "properties.paths.items.format"}
    assert set(answer.json()["specdec"]["ignored"]) == {f"{place}.{name}" for name in left_out}
    kept = {"type": "function", "function": {**SAY["function"], "strict": True}}
    assert ask(unique, "auto", kept).status_code == 200, "of this one nothing is promised"
    form = {"type": "json_schema", "json_schema": {"schema": {"items": PATHS, "maxItems": 0}}}
    answer = post(url, "/v1/completions", prompt="x", response_format=form)
    assert answer["specdec"]["ignored"] == ["response_format.items.items.format"]


def test_structured_output_leaves_room_for_calls(url: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes"]}}}
    body: Any = {"messages": CHAT, "tools": TOOLS, "response_format": form, "max_tokens": 150}
    choices = post(url, PATH, **body, n=16, seed=1)["choices"]
    answered = [c for c in choices if c["message"]["content"] == '"yes"']
    called = [c for c in choices if "tool_calls" in c["message"]]
    assert len(answered) + len(called) == 16
    assert answered
    assert called
    for choice in called:
        for call in choice["message"]["tool_calls"]:
            check_call(call)


def read_prompt(url: str, tokenizer_dir: Path, **body: Any) -> str:
    (choice,) = post(url, PATH, max_tokens=1, return_token_ids=True, **body)["choices"]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    return str(tokenizer.decode(choice["prompt_token_ids"]))


def test_the_template_gets_tools_and_calls(url: str, tokenizer_dir: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [
        {"role": "developer", "content": "d"}, *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "22"}]},
    ]  # fmt: skip
    text = read_prompt(url, tokenizer_dir, messages=history, tools=[ADD])
    expected = (
        'T:add\nsystem:d\nuser:hi\nassistant:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
    )
    assert text == f"{expected}</tool_call>\ntool:22\na:"
    told = post(url, "/tokenize", messages=history, tools=[ADD])
    assert post(url, "/detokenize", tokens=told["tokens"])["prompt"] == text
    assert read_prompt(url, tokenizer_dir, messages=CHAT, tools=[ADD], tool_choice="none") == (
        "user:hi\na:"
    )


def test_arguments_are_texts_where_the_template_wants_texts(tokenizer_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m['tool_calls'] %}"
        "{{ 'x' + c['function']['arguments'] }}{% endfor %}{% endfor %}{{ word }}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    prompt = Prompt(
        messages=[{"role": "assistant", "content": "", "tool_calls": [call]}],
        chat_template_kwargs={"word": "!"},
    )
    settings = DecodeSettings(engine_dir=Path())
    assert encode_prompt(prompt, settings, tokenizer)[0] == 'x{"a": 1}!'


READS = TemplateUse("tools")
NO_FORMAT = ChatFormats(None, None, use=READS)
HERMES = ChatFormats(TOOL_FORMATS["hermes"], None, use=READS)
REFUSED: list[tuple[dict[str, Any], ChatFormats, str, str]] = [
    ({"tools": {"a": 1}}, HERMES, "tools", "not a list"),
    ({"tools": [{"type": "web_search"}]}, HERMES, "tools", "tools.0.type is 'web_search'"),
    ({"tools": [{"type": "function"}]}, HERMES, "tools", "tools.0.function is None"),
    ({"tools": [make_tool("a b", {})]}, HERMES, "tools", "tools.0.function.name is 'a b'"),
    ({"tools": [make_tool("f", {}, strict="no")]}, HERMES, "tools",
     "tools.0.function.strict is 'no', not true or false"),
    ({"tools": {}}, HERMES, "tools", "tools is {}, not a list"),
    ({"tools": [make_tool("a", {}, parameters=[])]}, HERMES, "tools", "parameters is []"),
    ({"tools": [make_tool("a", {}, parameters={"type": "array"})]}, HERMES, "tools",
     "parameters.type is 'array', not 'object'"),
    ({"tools": [ADD, ADD]}, HERMES, "tools", "two tools are called 'add'"),
    ({"tools": TOOLS, "tool_choice": "any"}, HERMES, "tool_choice", "is 'any', not none"),
    ({"tool_choice": "required"}, HERMES, "tool_choice", "there are no tools"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        HERMES, "tool_choice", "'x', which is no tool",
    ),
    ({"tools": TOOLS}, NO_FORMAT, "tools", "how its model writes tool calls"),
    ({"tools": TOOLS}, ChatFormats(TOOL_FORMATS["hermes"]), "tools", "does not read tools"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "formats", "param", "message"), REFUSED)
def test_what_cannot_be_called_is_refused(
    body: dict[str, Any], formats: ChatFormats, param: str, message: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        read_calling(ChatBody(**body), formats)
    assert caught.value.param == param
    assert message in caught.value.message


def test_refusals_of_a_server(url: str) -> None:
    bad = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    for body, param, message in (
        ({"messages": [*CHAT, bad]}, "messages", "messages.1.tool_calls holds"),
        ({"tools": [make_tool("f", {"a": {"type": "thing"}})], "tool_choice": "required"}, "tools",
         "refused"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos",
         "no place beside calls that are required"),
        ({"tools": TOOLS, "tool_choice": "required", "grammar": "start: /a/"}, "tool_choice",
         "no place beside required calls"),
    ):  # fmt: skip
        answer = CLIENT.post(url + PATH, json={"messages": CHAT, **body})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param, answer.text
        assert message in answer.json()["error"]["message"]


def test_tools_as_text() -> None:
    """For a chat template that reads none."""
    formats = ChatFormats(TOOL_FORMATS["json"])
    calling = read_calling(ChatBody(tools=[SAY]), formats)
    call = {"id": "1", "type": "function", "function": {"name": "say.it", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."}, *CHAT,
        {"role": "assistant", "content": "Look:", "tool_calls": [call, {**call, "id": "2"}]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "tool", "tool_call_id": "2", "content": "y"},
    ]  # fmt: skip
    assert calling is not None
    first, *rest = write_messages(messages, "", calling.tools, formats)
    assert first["content"].startswith("Be kind.\n\nYou can call functions.")
    assert json.loads(first["content"].splitlines()[-1]) == SAY["function"]
    told = '{"name": "say.it", "arguments": {}}'
    assert rest == [
        *CHAT, {"role": "assistant", "content": f"Look:\n[{told}, {told}]"},
        {"role": "user", "content": "Result of say.it: x\nResult of say.it: y"},
    ]  # fmt: skip


# --- grammars ---

CALL = '{"name": "say.it", "arguments": {"word": "x"}}'
BAD = '{"name": "say.it", "arguments": {"word": "z"}}'


def tag(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


LLAMA, PARAMETERS = "llama3_json", CALL.replace("arguments", "parameters")
FORCED: Any = {"is_forced": True, "is_strict": True}
# A format, what a chat says of calls, and answers that are allowed and forbidden.
KEPT: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("hermes", FORCED, [tag(CALL), f"{tag(CALL)}\n{tag(CALL)}"], ["hi", tag(BAD), CALL]),
    ("hermes", FORCED | {"is_single": True}, [tag(CALL)], [f"{tag(CALL)}\n{tag(CALL)}"]),
    ("hermes", {"is_strict": True}, ["hi", f"hi {tag(CALL)}", f"{tag(CALL)}\n{tag(CALL)} so"],
     [tag(BAD), f"{tag(CALL)}{tag(BAD)}"]),
    ("hermes", {"is_strict": True, "is_single": True}, ["hi", tag(CALL)], [tag(CALL) * 2]),
    ("mistral", FORCED, ['[TOOL_CALLS]say.it[ARGS]{"word": "x"}' * 2], ["[TOOL_CALLS]say.it{}"]),
    ("mistral", {"is_strict": True}, ["so", 'so [TOOL_CALLS]say.it[ARGS]{"word": "x"}'],
     ['[TOOL_CALLS]say.it[ARGS]{"word": "z"}']),
    ("mistral_list", FORCED, [f"[TOOL_CALLS][{CALL}, {CALL}]"], [f"[TOOL_CALLS][{CALL}, {BAD}]"]),
    ("mistral_list", {"is_strict": True}, ["so", f"so [TOOL_CALLS][{CALL}]"],
     [f"[TOOL_CALLS][{BAD}]"]),
    (LLAMA, FORCED, [PARAMETERS, f"{PARAMETERS}; {PARAMETERS}"], ["hi", CALL]),
    (LLAMA, {"is_strict": True}, ["hi {}", PARAMETERS], [CALL, "{}"]),
    ("json", FORCED, [f"[{CALL}, {CALL}]"], [CALL, "[]"]),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("has_tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize(("name", "given", "allowed", "forbidden"), KEPT)
def test_grammars(
    tokenizer_dir: Path, has_tokens: bool, name: str, given: dict[str, Any],
    allowed: list[str], forbidden: list[str],
) -> None:  # fmt: skip
    """What a grammar allows, the parser finds; markers are tokens of their own or are not."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    if has_tokens:
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
        tokenizer.add_tokens(["[TOOL_CALLS]", "[ARGS]"], special_tokens=True)
    formats = ChatFormats(TOOL_FORMATS[name], None, READS)
    schemas = {"say.it": SAY["function"]["parameters"]}
    calling = Calling([SAY], schemas, **given)
    written = GrammarWriter(tokenizer).write(calling, formats, None, "")
    assert written is not None
    for text in (*allowed, *forbidden):
        assert follows(tokenizer, written["lark"], text) is (text in allowed), text
        parser = Parser(formats.tools, None, schemas=schemas)
        parser.feed(text)
        parser.finish()
        if text in allowed:
            assert len(parser.calls) == text.count("say.it")


def follows(tokenizer: Any, lark: str, text: str) -> bool:
    """Whether a text is one of a grammar's, token by token."""
    made = llguidance.hf.from_tokenizer(tokenizer, eos_token=[tokenizer.eos_token_id])
    matcher = llguidance.LLMatcher(made, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if not matcher.validate_tokens([token]):
            return False
        matcher.consume_token(token)
    return bool(matcher.is_accepting())


@pytest.mark.parametrize("has_tokens", [False, True], ids=["spelled", "tokens"])
def test_structured_output_comes_behind_the_reasoning(
    tokenizer_dir: Path, has_tokens: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    if has_tokens:
        tokenizer.add_tokens(["<think>", "</think>"])
    formats = ChatFormats(None, REASONING_FORMATS["qwen3"])
    writer = GrammarWriter(tokenizer)
    schema = {"json_schema": {"enum": ["yes"]}}
    for prompt, allowed, forbidden in (
        ("a:<think>\n", ['hm "no"</think>\n\n"yes"', '</think>"yes"'], ['"yes"', "</think>hm"]),
        ("a:", ['<think>hm</think>\n"yes"', '"yes"'], ['hm</think>"yes"', "hm"]),
    ):
        for given in (schema, {"regex": '"y[e/]s"'}, {"regex": write_choice(['"yes"', "/"])}):
            written = writer.write(None, formats, given, prompt)
            assert written is not None
            for text in (*allowed, *forbidden):
                assert follows(tokenizer, written["lark"], text) is (text in allowed), text
    assert writer.write(None, formats, schema, "a:<think>\n\n</think>\n\n") == schema
    begun = "<think>\nhm </think>so"
    assert writer.write(None, formats, schema, f"a:{begun}", begun) == schema
    assert writer.write(None, formats, schema, f"a:{begun[:9]}", begun[:9]) != schema
    assert writer.write(None, formats, {"lark": "start: /a/"}, "a:<think>") == {
        "lark": "start: /a/"
    }


HARMONY = ChatFormats(harmony.TOOLS, harmony.REASONING, READS, is_harmony=True)
THOUGHT = f"{harmony.ANALYSIS}hm {{<|end|><|start|>assistant"
COMMENT = THOUGHT.replace("analysis", "commentary")
SAID = f'{harmony.TOOLS.prefix}{harmony.TOOLS.open("say.it")}{{"word": "x"}}'


@pytest.mark.parametrize(
    ("given", "body", "allowed", "forbidden", "parts"),
    [
        (FORCED, None, [SAID, THOUGHT + SAID], [f"{harmony.FINAL}hi", THOUGHT, SAID[:-1]], ("", 1)),
        (
            {"is_strict": True}, None, [SAID, COMMENT + SAID, f"{THOUGHT}{harmony.FINAL}hi"],
            [SAID.replace("word", "text"), "hi"], ("hi", 0),
        ),
        (
            None, {"json_schema": {"enum": ["yes"]}},
            [f'{THOUGHT}{THOUGHT}{harmony.FINAL}"yes"', f'{harmony.FINAL}"yes"'],
            [f"{harmony.FINAL}yes", '"yes"', THOUGHT, f'{COMMENT}{harmony.FINAL}"yes"'],
            ('"yes"', 0),
        ),
    ],
)  # fmt: skip
def test_grammars_of_channels(
    tokenizer_dir: Path, given: dict[str, Any] | None, body: dict[str, Any] | None,
    allowed: list[str], forbidden: list[str], parts: tuple[str, int],
) -> None:  # fmt: skip
    """Reasoning may come before; the marks are tokens of their own."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.add_tokens(list(harmony.MARKS), special_tokens=True)
    schemas = {"say.it": SAY["function"]["parameters"]}
    calling = None if given is None else Calling([SAY], schemas, **given)
    prompt = "<|start|>assistant"
    written = GrammarWriter(tokenizer).write(calling, HARMONY, body, prompt)
    assert written is not None
    for text in (*allowed, *forbidden):
        assert follows(tokenizer, written["lark"], text) is (text in allowed), text
    request = Request(
        index=0, input_text=prompt, input_ids=[1], max_output_len=9, end_ids=frozenset()
    )
    parser = make_parser(calling, HARMONY, request)
    assert isinstance(parser, harmony.HarmonyParser)
    parser.feed(allowed[-1])
    parser.finish()
    assert (parser.content, len(parser.calls)) == parts
    assert GrammarWriter(tokenizer).write(None, HARMONY, None, prompt) is None
    prompt = f"{prompt}{harmony.FINAL}so"
    assert GrammarWriter(tokenizer).write(None, HARMONY, body, prompt, "so") == body


@pytest.mark.parametrize("given", [FORCED, {"is_strict": True}], ids=["forced", "strict"])
def test_calls_after_a_final_message_that_goes_on(
    tokenizer_dir: Path, given: dict[str, Any]
) -> None:
    """The message ends first; without its end the parser takes a call for its text."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokenizer.add_tokens(list(harmony.MARKS), special_tokens=True)
    calling = Calling([SAY], {"say.it": SAY["function"]["parameters"]}, **given)
    prompt, ending = f"<|start|>assistant{harmony.FINAL}so", "<|end|><|start|>assistant"
    written = GrammarWriter(tokenizer).write(calling, HARMONY, None, prompt, "so")
    assert written is not None
    for text, is_allowed in (
        (f" it is{ending}{SAID}", True), (f"{ending}{THOUGHT}{SAID}", True), (SAID, False),
        (f" it is{SAID}", False), (" it is", given is not FORCED),
    ):  # fmt: skip
        assert follows(tokenizer, written["lark"], text) is is_allowed, text
    request = Request(
        index=0, input_text=prompt, continued_text="so", input_ids=[1], max_output_len=9,
        end_ids=frozenset(),
    )  # fmt: skip
    parser = make_parser(calling, HARMONY, request)
    assert parser is not None
    parser.feed(f" it is{ending}{SAID}")
    parser.finish()
    assert (parser.content, len(parser.calls)) == (" it is", 1)
    writer = GrammarWriter(tokenizer)
    written = writer.write(calling, HARMONY, None, f"<|start|>assistant{harmony.ANALYSIS}")
    assert written is not None
    assert follows(tokenizer, written["lark"], f"hm{ending}{SAID}")
    assert not follows(tokenizer, written["lark"], SAID)


def test_reasoning_of_a_server(folder: Path, tokenizer_dir: Path) -> None:
    body: Any = {"messages": CHAT, "grammar": r"start: /<think>\nhm so\n<\/think>\n\nyes/"}
    with serve_here(folder, tokenizer_dir=str(tokenizer_dir)) as (_, url):
        whole = post(url, PATH, **body)
        events = read_events(url, PATH, **body)
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm so", "yes")
    assert without_ids(join(events, 0)) == without_ids(message)
    details = whole["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < whole["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("begun", "grammar", "reasoning", "content"),
    [
        ("<think>\nI was", r"/ so\n<\/think>\n\nyes/", " so", "yes"),
        ("<think>\nI was\n</think>\nI say", r"/ <think> no/", "", " <think> no"),
        ("I say", r"/ yes/", "", " yes"),
    ],
)
def test_an_answer_that_goes_on_with_reasoning(
    folder: Path, tokenizer_dir: Path, begun: str, grammar: str, reasoning: str, content: str
) -> None:
    """The last message tells where it stands, and no other one that has its marks."""
    history = [{"role": "user", "content": "say <think>"}, {"role": "assistant", "content": begun}]
    settings: Any = {"tokenizer_dir": str(tokenizer_dir), "reasoning_parser": "deepseek_r1"}
    with serve_here(folder, **settings) as (_, url):
        body: Any = {
            "messages": history,
            "continue_final_message": True,
            "grammar": f"start: {grammar}",
        }
        message = post(url, PATH, **body)["choices"][0]["message"]
        events = read_events(url, PATH, **body)
    assert (message.get("reasoning_content") or "", message["content"]) == (reasoning, content)
    assert without_ids(join(events, 0)) == without_ids(message)


def test_markers_are_put_in_where_no_text_has_them() -> None:
    formats = ChatFormats(TOOL_FORMATS["mistral"], None, READS, {1: "[TOOL_CALLS]"})
    calling = read_calling(ChatBody(tools=[ADD]), formats)
    request = Request(index=0, input_text="", input_ids=[1], max_output_len=9, end_ids=frozenset())
    shown = dataclasses.replace(request, form=TextForm(skips_special=False))
    for one, marks in ((request, {1: "[TOOL_CALLS]"}), (shown, {})):
        parser = make_parser(calling, formats, one)
        assert parser is not None
        assert parser.marks == marks


def test_markers_that_are_special_tokens(tokenizer_dir: Path) -> None:
    """No text has them; they are found where their tokens are, wherever a block ends."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    texts = tokenizer(["so ", 'add{"a": 1}', 'say.it{"word": "x"}'], add_special_tokens=False)
    so, add, say = texts["input_ids"]
    ids = [*so, 1, *add, 1, *say]
    for size in range(1, len(ids)):
        for start in range(size):
            parser = Parser(TOOL_FORMATS["mistral"], None, marks={1: "[TOOL_CALLS]"})
            choice = Choice(
                0,
                Request(
                    index=0, input_text="", input_ids=[1], max_output_len=99, end_ids=frozenset()
                ),
                parser=parser,
            )
            stream = TextStream(tokenizer)
            cuts = [0, *range(start or size, len(ids), size), len(ids)]
            for a, b in zip(cuts, cuts[1:], strict=False):
                for token in ids[a:b]:
                    stream.add(token)
                is_over = b == len(ids)
                text = (stream.finish() and stream.take()) if is_over else stream.take()
                choice.add(
                    Event(
                        text=text, token_ids=ids[a:b], origins=[], ends=stream.ends[a:b],
                        logprobs=[], finish_reason="eos" if is_over else None,
                    )
                )  # fmt: skip
            functions = [call["function"] for call in choice.message["tool_calls"]]
            assert functions == [
                {"name": "add", "arguments": '{"a": 1}'},
                {"name": "say.it", "arguments": '{"word": "x"}'},
            ]
            assert (choice.message["content"], choice.finish_reason) == ("so", "tool_calls")
