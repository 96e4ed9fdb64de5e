"""Gate of the server and the forms of its errors and foreign bodies, without a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from specdec import SpecDecError
from specdec.serve import messages, ollama
from specdec.serve.access import MAX_HEADER_BYTES, AccessControl
from specdec.serve.body_reading import read_body
from specdec.serve.cors import Cors
from specdec.serve.errors import FailedRequest, explain, make_error
from specdec.serve.protocol import BadRequest

KEY = b"the key"
NAMES = frozenset(("localhost", "[::1]"))
Headers = dict[bytes, bytes]


def ask(
    path: str, headers: Headers, key: str | None = None, names: frozenset[str] | None = None
) -> tuple[int, Headers, bytes]:
    """Return the status, the headers and the body that a client gets; 204 is after the gate."""
    sent: list[Any] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def keep(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [*headers.items()]}
    asyncio.run(AccessControl(answer, key, names, Cors(()))(scope, None, keep))
    start, *rest = sent
    body = b"".join(message.get("body", b"") for message in rest)
    return start["status"], dict(start["headers"]), body


@pytest.mark.parametrize(
    ("path", "headers", "status", "words"),
    [
        ("/v1/models", {}, 401, "a key is needed: Authorization: Bearer KEY, or x-api-key: KEY"),
        ("/v1/models", {b"x-api-key": b"other"}, 401, "the key is not this server's: "),
        ("/v1/models", {b"authorization": b"Basic " + KEY}, 401, "the key is not this server's: "),
        ("/v1/models", {b"authorization": b"Bearer " + KEY}, 204, ""),
        ("/v1/models", {b"authorization": b"bearer  the key "}, 204, ""),
        ("/v1/models", {b"x-api-key": KEY, b"authorization": b"Bearer x"}, 204, ""),
        ("/health", {}, 204, ""),
        ("/", {}, 204, ""),
        ("/health/more", {}, 401, "a key is needed: "),
        ("/health", {b"x": b"y" * MAX_HEADER_BYTES}, 431, f"more than {MAX_HEADER_BYTES} bytes"),
        ("/health", {b"x": b"y" * (MAX_HEADER_BYTES - 1)}, 204, ""),
    ],
)
def test_the_key(path: str, headers: Headers, status: int, words: str) -> None:
    given_status, given_headers, body = ask(path, headers, KEY.decode())
    assert given_status == status
    assert words in (json.loads(body)["error"]["message"] if body else "")
    assert (given_headers.get(b"www-authenticate") == b"Bearer") == (status == 401)


@pytest.mark.parametrize(
    ("host", "names", "status"),
    [
        (b"localhost", NAMES, 204), (b"LocalHost:8000", NAMES, 204), (b"[::1]:80", NAMES, 204),
        (None, NAMES, 204), (b"a.example:80", NAMES, 403), (b"[::2]", NAMES, 403),
        (b"localhost.a.example", NAMES, 403), (b"a.example", None, 204),
    ],
)  # fmt: skip
def test_names_of_the_server(
    host: bytes | None, names: frozenset[str] | None, status: int
) -> None:  # fmt: skip
    """A page of another site, whose name resolves to this machine, sends that name."""
    given_status, _, body = ask("/health", {} if host is None else {b"host": host}, None, names)
    assert given_status == status
    if status == 403:
        assert host is not None
        words = f"this server is not called {host.decode()!r}"
        assert json.loads(body)["error"]["message"] == words


def test_ids_of_requests() -> None:
    """A client's own comes back, refused or not; another one is made of what is no id."""
    for path, status in (("/v1/models", 401), ("/health", 204)):
        given_status, headers, _ = ask(path, {b"x-request-id": b"mine-1"}, "key")
        assert (given_status, headers[b"x-request-id"]) == (status, b"mine-1")
        assert headers[b"request-id"] == b"mine-1"
    bad_ids = (b"", b"a b", b"a\r\nset-cookie: b", b"x" * 201)
    made = [ask("/health", {b"x-request-id": name})[1][b"x-request-id"] for name in bad_ids]
    assert all(name.startswith(b"req_") and len(name) == 36 for name in made)
    assert len(set(made)) == len(made)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (404, "not_found_error"), (429, "rate_limit_error"),
     (500, "api_error"), (503, "overloaded_error")],
)  # fmt: skip
def test_forms_of_errors(status: int, kind: str) -> None:
    """The path's beginning chooses the protocol; where there is no place for it, the text has the
    parameter's name."""
    error = BadRequest("is wrong", "top_p", status=status)
    kinds = {429: "rate_limit_error"}
    expected: dict[str, Any] = {
        "/v1/messages/count_tokens":
            {"type": "error", "error": {"type": kind, "message": "top_p: is wrong"}},
        "/api/chat": {"error": "top_p: is wrong"},
        "/v1/completions": {"error": {
            "message": "is wrong", "param": "top_p", "code": None,
            "type": kinds.get(
                status, "invalid_request_error" if status < 500 else "server_error"
            ),
        }},
    }  # fmt: skip
    for path, document in expected.items():
        answer = make_error(path, error)
        assert (answer.status_code, json.loads(bytes(answer.body))) == (status, document)
    named = BadRequest("top_p is wrong", "top_p", status=status)
    assert json.loads(bytes(make_error("/api/chat", named).body)) == {"error": "top_p is wrong"}


def test_causes_of_errors() -> None:
    """A fault inside is not told to clients; what is wrong with an input is."""
    refusal = BadRequest("is wrong")
    assert explain(refusal) is explain(FailedRequest(refusal)) is refusal
    foreseen = explain(FailedRequest(SpecDecError("a rank has ended", "start it again")))
    assert (foreseen.status, foreseen.message) == (500, "a rank has ended")
    other = explain(FailedRequest(KeyError("/secret/path")))
    assert (other.status, "secret" in other.message) == (500, False)


def use(body: Any) -> None:
    """Ask a body for what its answer needs."""
    body.list_turns()
    if isinstance(body, messages.MessagesBody):
        body.choose_tools()


SAID = {"role": "user", "content": "a"}


def test_a_body_of_anthropics_as_turns() -> None:
    """Results of tools are turns of their own, thoughts and calls fields of the assistant's."""
    body = read_body(
        messages.MessagesBody,
        {
            "max_tokens": 3, "system": "be brief", "tool_choice": {"type": "any"},
            "messages": [
                SAID,
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 2}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "4", "is_error": True},
                    {"type": "text", "text": "c"},
                ]},
            ],
        },
    )  # fmt: skip
    assert body.choose_tools() == "required"
    turns = body.list_turns()
    assert [path for path, _ in turns] == [
        "system", "messages.0", "messages.1", "messages.2.content.0", "messages.2.content.1",
    ]  # fmt: skip
    assistant, result, text = (turn for _, turn in turns[2:])
    assert (assistant["reasoning_content"], assistant["content"]) == (
        "hm", [{"type": "text", "text": "b"}],
    )  # fmt: skip
    (call,) = assistant["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("1", "f")
    assert json.loads(call["function"]["arguments"]) == {"x": 2}
    assert result == {"role": "tool", "tool_call_id": "1", "content": "4", "is_error": True}
    assert text == {"role": "user", "content": [{"type": "text", "text": "c"}]}


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"messages": None}, "messages is missing"),
        ({"tool_choice": {"type": "some"}}, "tool_choice is {'type': 'some'}, not"),
        ({"messages": [{"role": "tool", "content": "a"}]},
         "messages.0.role is 'tool', not user, assistant or system"),
        ({"messages": [{"role": "user", "content": 5}]},
         "messages.0.content is 5, not a text or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages.0.content.0.type is 'image', which is not supported here"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages.0.content.0.tool_use_id is None, not a text"),
    ],
)  # fmt: skip
def test_bodies_of_anthropics_that_are_refused(change: dict[str, Any], fact: str) -> None:
    document = {"max_tokens": 3, "messages": [SAID]} | change
    with pytest.raises(BadRequest) as caught:
        use(read_body(messages.MessagesBody, document))
    assert fact in caught.value.message
    assert caught.value.param == next(iter(change))


def test_bodies_of_ollamas() -> None:
    """A raw prompt is no conversation; a body without one asks for the model alone."""
    body = read_body(ollama.GenerateBody, {"prompt": "a", "system": "b", "think": "high"})
    assert body.effort == ("think", "high")
    assert body.thinking_switch == ("think", None)
    assert [turn["role"] for _, turn in body.list_turns()] == ["system", "user"]
    raw = read_body(ollama.GenerateBody, {"prompt": "a", "raw": True, "format": "json"})
    assert isinstance(raw, ollama.RawBody)
    path, form = raw.output_format
    assert (path, form and form.type) == ("format", "json_object")
    assert read_body(ollama.GenerateBody, {}).asks_for_load
    assert read_body(ollama.OllamaChatBody, {"messages": []}).asks_for_load
    call = {"function": {"name": "f", "arguments": {}}}
    message = {"role": "tool", "thinking": "t", "tool_name": "f", "tool_calls": [call]}
    ((path, turn),) = read_body(ollama.OllamaChatBody, {"messages": [message]}).list_turns()
    assert (path, turn) == ("messages.0", {
        "role": "tool", "reasoning_content": "t", "name": "f",
        "tool_calls": [{"type": "function", **call}],
    })  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "document", "fact"),
    [
        (ollama.OllamaChatBody, {"messages": [SAID | {"images": ["x"]}]},
         "messages.0.images is not supported: this server reads texts"),
        (ollama.GenerateBody, {"prompt": "a", "suffix": "b"}, "empty: it is not supported here"),
        (ollama.GenerateBody, {"prompt": "a", "raw": True, "think": True}, "false beside raw"),
        (ollama.GenerateBody, {"prompt": "a", "format": "yaml"}, "json or a JSON schema"),
    ],
)  # fmt: skip
def test_bodies_of_ollamas_that_are_refused(
    kind: Any, document: dict[str, Any], fact: str
) -> None:  # fmt: skip
    with pytest.raises(BadRequest) as caught:
        use(read_body(kind, document))
    assert fact in caught.value.message
