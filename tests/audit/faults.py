"""Faults planted into a server of ours. Each is a context: the server is broken inside of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import secrets
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from specdec.decode import accept as rules
from specdec.serve import app, requests
from specdec.serve.answers import EndpointAnswer

Fault = Callable[[], contextlib.AbstractContextManager[Any]]
# What spoils a drafter's config.json and tensors.
Spoil = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def mix_columns(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Another base has its features in other places."""
    name = next(key for key in tensors if key in ("input_proj.weight", "fc.weight"))
    generator = torch.Generator().manual_seed(1)
    columns = torch.randperm(tensors[name].shape[1], generator=generator)
    tensors[name] = tensors[name][:, columns].contiguous()


@contextlib.contextmanager
def alter_answers(alter: Callable[[Any, dict[str, Any]], None]) -> Iterator[None]:
    """Alter each whole answer before it is sent: alter(body, document)."""
    original = EndpointAnswer.to_json

    def write(answer: EndpointAnswer) -> dict[str, Any]:
        document = copy.deepcopy(original(answer))
        alter(answer.body, document)
        return document

    with mock.patch.object(EndpointAnswer, "to_json", write):
        yield


@contextlib.contextmanager
def alter_streams(alter: Callable[[Any, list[Any]], list[Any]]) -> Iterator[None]:
    """Alter the events of each stream, which then come all at once."""
    original = app._format_events

    async def write(events: Any, answer: EndpointAnswer) -> Any:
        sent = [event async for event in original(events, answer)]
        for event in alter(answer.body, sent):
            yield event

    with mock.patch.object(app, "_format_events", write):
        yield


def write_past_stops(body: Any, document: dict[str, Any]) -> None:
    choice = document["choices"][0]
    if body.stop and choice["finish_reason"] == "stop":
        choice["text"] += body.stop[0] + " and"


def tell_ids_past_stops(body: Any, document: dict[str, Any]) -> None:
    if body.stop and (ids := document["choices"][0].get("token_ids")) is not None:
        ids += ids[-1:] * 4


def tell_logprobs_past_stops(body: Any, document: dict[str, Any]) -> None:
    logprobs = document["choices"][0].get("logprobs")
    if body.stop and logprobs:
        for values in logprobs.values():
            values += values[-1:] * 4


def count_past_stops(body: Any, document: dict[str, Any]) -> None:
    if body.stop:
        document["usage"]["completion_tokens"] += 4
        document["usage"]["total_tokens"] += 4


def drop_text(body: Any, document: dict[str, Any]) -> None:
    choice = document["choices"][0]
    if "text" in choice:
        choice["text"] = choice["text"][:4] + choice["text"][6:]


def count_one_more(body: Any, document: dict[str, Any]) -> None:
    document["usage"]["completion_tokens"] += 1
    document["usage"]["total_tokens"] += 1


def count_prompt_less(body: Any, document: dict[str, Any]) -> None:
    document["usage"]["prompt_tokens"] -= 1
    document["usage"]["total_tokens"] -= 1


def add_wrongly(body: Any, document: dict[str, Any]) -> None:
    document["usage"]["total_tokens"] += 2


def lower_logprobs(body: Any, document: dict[str, Any]) -> None:
    logprobs = document["choices"][0].get("logprobs")
    if logprobs and "token_logprobs" in logprobs and len(logprobs["token_logprobs"]) > 9:
        logprobs["token_logprobs"][9] -= 4
        logprobs["top_logprobs"][9].pop(logprobs["tokens"][9], None)


def change_now_and_then() -> contextlib.AbstractContextManager[Any]:
    """Now and then an answer has another text."""
    numbers = itertools.count(1)

    def alter(body: Any, document: dict[str, Any]) -> None:
        choice = document["choices"][0]
        if next(numbers) % 3 == 0 and len(choice.get("text", "")) > 8:
            choice["text"] = choice["text"][:7] + "#" + choice["text"][8:]

    return alter_answers(alter)


def replace(text: bytes, replacement: bytes) -> Callable[[Any, list[Any]], list[Any]]:
    return lambda _, sent: [event.replace(text, replacement) for event in sent]


def end_twice(body: Any, sent: list[Any]) -> list[Any]:
    final_event = next(event for event in sent if b'"finish_reason":"' in event)
    return [*sent[:-1], final_event, sent[-1]]


def drop_an_event(body: Any, sent: list[Any]) -> list[Any]:
    return sent[:3] + sent[4:] if len(sent) > 6 else sent


def number_events(body: Any, sent: list[Any]) -> list[Any]:
    return [event.replace(b"mpl-", b"mpl-%d" % index, 1) for index, event in enumerate(sent)]


@contextlib.contextmanager
def take_wrong_drafts() -> Iterator[None]:
    """A lossy accept rule: the first drafted token is always taken."""
    original = rules.accept

    def accept(tree: Any, choices: Any) -> tuple[list[int], int]:
        path, token = original(tree, choices)
        if len(path) == 1 and tree.num_nodes > 1:
            return [0, 1], int(choices[1])
        return path, token

    with mock.patch.object(rules, "accept", accept):
        yield


@contextlib.contextmanager
def change_requests(change: Callable[[Any], Any]) -> Iterator[None]:
    """Decode other requests than those that were asked for."""
    original = requests.make_requests

    def make(*args: Any) -> tuple[list[Any], list[str]]:
        http_requests, ignored = original(*args)
        return [change(request) for request in http_requests], ignored

    with mock.patch.object(app, "make_requests", make):
        yield


def forget_seed(request: Any) -> Any:
    sampling = dataclasses.replace(request.sampling, seed=secrets.randbits(60))
    return dataclasses.replace(request, sampling=sampling)


def forget_top_p(request: Any) -> Any:
    sampling = dataclasses.replace(request.sampling, top_p=1.0)
    return dataclasses.replace(request, sampling=sampling)


def give_one_more(request: Any) -> Any:
    return dataclasses.replace(request, max_output_len=request.max_output_len + 1)


def forget_stops(request: Any) -> Any:
    return dataclasses.replace(request, stop=())


@contextlib.contextmanager
def fail_streams() -> Iterator[None]:
    async def write(events: Any, answer: EndpointAnswer) -> Any:
        raise RuntimeError("planted")
        yield b""

    with mock.patch.object(app, "_format_events", write):
        yield


# name -> how it is planted, the checks that must see it
FAULTS: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "lossy accept rule": (take_wrong_drafts, ("greedy",)),
    "text past a stop": (lambda: alter_answers(write_past_stops), ("stops",)),
    "ids past a stop": (lambda: alter_answers(tell_ids_past_stops), ("stops",)),
    "log-probabilities past a stop": (lambda: alter_answers(tell_logprobs_past_stops), ("stops",)),
    "usage past a stop": (lambda: alter_answers(count_past_stops), ("stops",)),
    "stops ignored": (lambda: change_requests(forget_stops), ("stops",)),
    "dropped text": (lambda: alter_answers(drop_text), ("greedy", "stream")),
    "completion_tokens off by one": (lambda: alter_answers(count_one_more), ("limits", "usage")),
    "prompt_tokens off by one": (lambda: alter_answers(count_prompt_less), ("usage",)),
    "total_tokens wrong": (lambda: alter_answers(add_wrongly), ("usage",)),
    "a token too many": (lambda: change_requests(give_one_more), ("limits",)),
    "other logits": (lambda: alter_answers(lower_logprobs), ("own_choice",)),
    "greedy text that changes": (change_now_and_then, ("repeat",)),
    "unseeded sampling": (lambda: change_requests(forget_seed), ("seeds",)),
    "top_p ignored": (lambda: change_requests(forget_top_p), ("narrow_sampling",)),
    "two finish_reasons": (lambda: alter_streams(end_twice), ("stream",)),
    "no [DONE]": (lambda: alter_streams(replace(b"data: [DONE]\n\n", b"")), ("stream",)),
    "a lost event": (lambda: alter_streams(drop_an_event), ("stream",)),
    "ids that change": (lambda: alter_streams(number_events), ("stream",)),
    "bytes that are no UTF-8": (
        lambda: alter_streams(replace(b'"finish_reason":"', b'"x":"\xc3","finish_reason":"')),
        ("stream",),
    ),
    "streams that fail": (fail_streams, ("stream",)),
}  # fmt: skip
