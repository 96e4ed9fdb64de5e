"""Texts under load compared with what each request has without others."""

from __future__ import annotations

import asyncio
import operator
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.models import MAX_BATCH_SIZE, PYCODE, ROOT, build_engine, read_lines
from specdec import Engine, Prompt

from .client import Body, Reply, ask, ask_documents
from .servers import OURS, Server, Setting

CONCURRENCY = 32  # twice as many as there are rows: half of them wait
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
     "required": ["name"]},
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
)  # fmt: skip
FINISHED = {"eos": "stop", "stop": "stop", "length": "length"}
Text = tuple[str, str, int]  # with why it ended, and of how many tokens
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FUNCTION: dict[str, Any] = {"name": "paint", "parameters": {
    "type": "object", "properties": {"colours": SCHEMAS[1]}, "required": ["colours"],
    "additionalProperties": False,
}}  # fmt: skip


def make_engine(folder: Path, dtype: str) -> Path:
    """Pycode with its ReDrafter drafter and its tokenizer."""
    target = PYCODE / "target"
    convert = ["--drafter-model-dir", str(PYCODE / "redrafter"), "--redrafter-num-beams", "1",
               "--redrafter-draft-len-per-beam", "3"]  # fmt: skip
    build = ["--tokenizer-dir", str(target), "--max-batch-size", str(MAX_BATCH_SIZE)]
    return build_engine(target, folder / "engine", convert, build, dtype)


def mix_chats(number: int) -> list[tuple[str, Body]]:
    """Return chats and responses with paths: plain, several choices, tools, structured output."""
    prompts, dice = read_lines(PYCODE / "prompts.jsonl"), random.Random(4)
    mixed = []
    for index in range(number):
        path = RESPONSES if index % 3 == 2 else CHAT
        text, limit = dice.choice(prompts)[: dice.randint(4, 400)], dice.randint(8, 64)
        body: Body = {
            "temperature": dice.choice([0.0, 0.7, 1.0]), "seed": dice.randrange(2**60),
            "stream": bool(index % 4),
        }  # fmt: skip
        if path == CHAT:
            body |= {"messages": [{"role": "user", "content": text}], "max_tokens": limit}
            body |= {"n": dice.choice([1, 1, 2, 3])}
        else:
            body |= {"input": text, "max_output_tokens": limit}
        if index % 5 in (1, 2):
            tool = {"function": FUNCTION} if path == CHAT else FUNCTION
            body |= {"tools": [{"type": "function", **tool}]}
            body |= {"tool_choice": "required" if index % 5 == 1 else "auto"}
        elif index % 5 == 3:
            body |= {"guided_json": dice.choice(SCHEMAS)}
        mixed.append((path, body))
    return mixed


async def ask_chat(address: str, path: str, body: Body) -> Any:
    """Read a chat or a response, whole or streamed: texts, calls and why each ended."""
    documents = [document for _, document in await ask_documents(address, path, body)]
    last = documents[-1]
    if path == RESPONSES:
        whole = last.get("response", last)
        for item in whole["output"]:
            for name in ("id", "call_id"):
                item.pop(name, None)
        return whole["output"], whole["status"]
    answers: dict[int, list[Any]] = {}  # by choice: its text, its calls and why it ended
    for choice in (choice for document in documents for choice in document["choices"]):
        answer = answers.setdefault(choice["index"], ["", [], None])
        delta = choice.get("delta", choice.get("message"))
        answer[0] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                answer[1].append([call["function"]["name"], ""])
            answer[1][-1][1] += call["function"]["arguments"]
        answer[2] = choice["finish_reason"]
    return answers


def mix_bodies(number: int) -> list[Body]:
    """Return short and long prompts and outputs: greedy, sampled, shaped, stopped, to a schema."""
    prompts, dice = read_lines(PYCODE / "prompts.jsonl"), random.Random(3)
    bodies = []
    for index in range(number):
        text = dice.choice(prompts)
        if index % 11 == 0:
            text = "\n\n".join(dice.sample(prompts, 4))  # several chunks of a prompt
        body: Body = {
            "prompt": text[: dice.randint(4, 900)], "max_tokens": dice.randint(1, 48),
            "seed": dice.randrange(2**64), "temperature": 0.0, "stream": index % 4 != 3,
        }  # fmt: skip
        if index % 2:
            body |= {"temperature": dice.choice([0.6, 1.0, 1.4]), "top_p": dice.choice([0.8, 1.0])}
            body |= {"top_k": dice.choice([0, 20])}
        if index % 3 == 0:
            body["stop"] = dice.choice(["\n\n", "self", ":", ["return", "def"]])
        if index % 7 == 0:
            body |= {"frequency_penalty": 0.5, "min_p": 0.02}
        if index % 13 == 0:
            body |= {"guided_json": dice.choice(SCHEMAS)}
        if index % 17 == 0:
            body |= {"guided_regex": "[a-z_]{3,9}\\([a-z]*\\)"}
            body.pop("guided_json", None)
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        bodies.append(body)
    return bodies


async def ask_under_load(
    address: str, pid: int, bodies: Sequence[Body], chats: Sequence[tuple[str, Body]]
) -> tuple[list[Text], list[Any], list[float]]:
    """All of them in one mix, CONCURRENCY at a time; also the server's memory, MB, ten times.

    Every fifth client of a completion leaves first, and asks again.
    """
    order = [*range(len(bodies) + len(chats))]
    random.Random(6).shuffle(order)
    left, found, memory = iter(order), dict[int, Any](), list[float]()
    dice = random.Random(5)

    async def work() -> None:
        for at in left:
            if at >= len(bodies):
                found[at] = await ask_chat(address, *chats[at - len(bodies)])
            else:
                if at % 5 == 0:
                    leaving = bodies[at] | {"stream": True}
                    await ask(address, leaving, leave_after=dice.randint(0, 6))
                found[at] = describe(await ask(address, bodies[at]))
            if 10 * len(found) // len(order) > len(memory):
                memory.append(measure_memory(pid))

    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    texts = [found[at] for at in range(len(order))]
    return texts[: len(bodies)], texts[len(bodies) :], memory


async def ask_alone(address: str, chats: Sequence[tuple[str, Body]]) -> list[Any]:
    """Return the answers to them one after another, nothing drafted."""
    return [await ask_chat(address, path, body | {"speculation": False}) for path, body in chats]


def measure_memory(pid: int) -> float:
    """Return a process's memory in MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def describe(reply: Reply) -> Text:
    return reply.text, str(reply.finish_reason), reply.num_tokens


def generate_alone(engine_dir: Path, bodies: Sequence[Body]) -> list[Text]:
    """Return the Python API's answers one after another, nothing drafted."""
    found = []
    with Engine.load(engine_dir, speculation=False, device="cpu") as engine:
        for body in bodies:
            given = {key: body[key] for key in body if key not in ("stream", "stream_options")}
            given["text"], given["max_output_len"] = given.pop("prompt"), given.pop("max_tokens")
            for key, kind in (("guided_json", "json_schema"), ("guided_regex", "regex")):
                if key in given:
                    given["grammar"] = {kind: given.pop(key)}
            (output,) = engine.generate(Prompt(**given))
            reason = FINISHED[str(output.finish_reason)]
            found.append((output.text, reason, len(output.token_ids)))
    return found


def measure(number: int, dtype: str) -> dict[str, Any]:
    """How many of the texts under load are others than those alone."""
    bodies, chats = mix_bodies(number - number // 3), mix_chats(number // 3)
    seconds: dict[str, float] = {}

    def note(name: str, began: float) -> None:
        seconds[name] = round(time.perf_counter() - began, 1)
        print(f"{dtype}: {name}, {seconds[name]} s", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = make_engine(folder, dtype)
        template = str(ROOT / "tests" / "clients" / "template.jinja")
        command = [sys.executable, "-m", "specdec", "serve", "--engine-dir", str(engine)]
        command += ["--chat-template", template]
        server = Server(Setting(OURS, dtype, tuple(command)), folder / "server.log")
        try:
            began = time.perf_counter()
            loaded, told, memory = asyncio.run(
                ask_under_load(server.address, server.group, bodies, chats)
            )
            note("under load", began)
            began = time.perf_counter()
            told_alone = asyncio.run(ask_alone(server.address, chats))
            note("chats and responses alone", began)
        finally:
            server.end()
        began = time.perf_counter()
        alone = generate_alone(engine, bodies)
        note("alone, by the API without drafts", began)
    different = [at for at, text in enumerate(loaded) if text != alone[at]]
    for at in different[:5]:
        print(f"{dtype}, request {at}: {bodies[at]}\n  {loaded[at]}\n  {alone[at]}", flush=True)
    for (path, body), one, other in zip(chats, told, told_alone, strict=True):
        if one != other:
            print(f"{dtype}, {path}: {body}\n  {one}\n  {other}", flush=True)
    return {
        "requests": number, "dtype": dtype, "concurrency": CONCURRENCY,
        "schemas": sum("guided_json" in b or "guided_regex" in b for b in bodies),
        "left_and_asked_again": len(range(0, len(bodies), 5)),
        "chats_and_responses": len(chats), "memory_mb": memory,
        "different_from_the_same_alone": sum(map(operator.ne, told, told_alone)),
        "tokens": sum(count for *_, count in alone),
        "different_from_the_api": len(different),
        "seconds": seconds,
    }  # fmt: skip
