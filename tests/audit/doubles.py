"""Doubles of vLLM's and llama-server's HTTP side: their forms of tokens, counters and streams."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.loopback import LoopbackServer

MODEL = "double"
BLOCK = 3  # tokens that a step gives
PREFIX = {"vllm": "vllm", "llama": "llamacpp"}


class Double(LoopbackServer):
    """Server that writes words by the prompt and their index, three a step.

    style: "vllm", "llama" or "bare", which lists no tokens and counts nothing. accepted: of the two
    tokens that each step drafts; accepted_later: after `change_after` answers. block: tokens of an
    event. other_at: index from which on other words come. narrow_at: index at which another word
    comes where only the likeliest token may be drawn. margin: how much less likely another word is.
    fail_after: number of answers after which errors come. positions: counts that are reported in
    place of the true ones.
    """

    def __init__(
        self, style: str, *, accepted: int = 2, block: int = BLOCK, other_at: int | None = None,
        margin: float = 3.0, has_metrics: bool = True, positions: tuple[int, ...] | None = None,
        accepted_later: int | None = None, change_after: int = 10**9, key: str | None = None,
        fail_after: int = 10**9, narrow_at: int | None = None,
    ) -> None:  # fmt: skip
        self.style, self.accepted, self.block, self.other_at = style, accepted, block, other_at
        self.margin, self.has_metrics, self.positions = margin, has_metrics, positions
        self.accepted_later, self.change_after, self.key = accepted_later, change_after, key
        self.fail_after, self.narrow_at = fail_after, narrow_at
        self.num_answers = 0
        self.drafts = self.num_accepted = 0
        self.per_position = [0, 0]

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length)) if length else {}
        if self.key is not None and handler.headers.get("Authorization") != f"Bearer {self.key}":
            self._send(handler, {"error": {"message": "Unauthorized"}}, 401)
        elif handler.path == "/v1/models":
            owner = {"vllm": "vllm", "llama": "llamacpp"}.get(self.style, "somebody")
            self._send(handler, {"data": [{"id": MODEL, "owned_by": owner}]})
        elif handler.path == "/metrics" and self.has_metrics and self.style in PREFIX:
            self._write(handler, self._render().encode())
        elif self.num_answers >= self.fail_after and body:
            self._send(handler, {"error": {"message": "the engine is dead"}}, 500)
        elif handler.path in ("/v1/completions", "/v1/chat/completions"):
            self._complete(handler, body, is_chat="chat" in handler.path)
        else:
            self._send(handler, {"detail": "Not Found"}, 404)

    def _complete(self, handler: BaseHTTPRequestHandler, body: Any, *, is_chat: bool) -> None:
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        seed = body.get("seed", 0) if body["temperature"] and body.get("top_p", 1) > 0.01 else 0
        limit = body["max_tokens"]
        words = [self._choose(prompt, seed, position) for position in range(limit)]
        if body["temperature"] and not seed and self.narrow_at is not None:
            words[self.narrow_at] = f" w{int(words[self.narrow_at][2:]) + 1}"
        text, reason, count = "".join(words), "length", limit
        for stop in body.get("stop") or []:
            if (position := text.find(stop)) >= 0:
                while len("".join(words[: count - 1])) >= position + len(stop):
                    count -= 1
                text, reason = text[:position], "stop"
        self.num_answers += 1
        accepted = self.accepted
        if self.accepted_later is not None and self.num_answers > self.change_after:
            accepted = self.accepted_later
        steps = max(1, count // (1 + accepted))
        self.drafts += steps
        self.num_accepted += steps * accepted
        for index in range(accepted):
            self.per_position[index] += steps
        usage = {"prompt_tokens": len(str(prompt)), "completion_tokens": count,
                 "total_tokens": len(str(prompt)) + count}  # fmt: skip
        fields: dict[str, Any] = {"id": f"id-{self.num_answers}", "created": 7, "model": MODEL}
        kind = ("chat.completion" if is_chat else "text_completion")  # fmt: skip
        if not body.get("stream"):
            content: Any = {"message": {"role": "assistant", "content": text}}
            choice = {
                "index": 0, **(content if is_chat else {"text": text}), "finish_reason": reason,
                **self._tell(body, words[:count], 0, is_chat=is_chat),
            }  # fmt: skip
            answer: dict[str, Any] = {**fields, "object": kind, "choices": [choice], "usage": usage}
            if self.style == "llama":
                answer["timings"] = {"draft_n": 2 * steps, "draft_n_accepted": accepted * steps}
            self._send(handler, answer)
            return
        fields["object"] = "chat.completion.chunk" if is_chat else kind
        events: list[dict[str, Any]] = [
            {**fields, "choices": [c]}
            for c in self._split_chunks(text, words[:count], body, is_chat)
        ]
        events[-1]["choices"][0]["finish_reason"] = reason
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append({**fields, "choices": [], "usage": usage})
        sent = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self._write(handler, f": hello\n\n{sent}data: [DONE]\n\n".encode())

    def _split_chunks(self, text: str, words: list[str], body: Any, is_chat: bool) -> Iterator[Any]:
        if is_chat:
            yield {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        start = 0
        for index in range(0, len(words), self.block):
            end = min(len(text), len("".join(words[: index + self.block])))
            piece, start = text[start:end], end
            details = self._tell(body, words[index : index + self.block], index, is_chat=is_chat)
            yield {
                "index": 0, **({"delta": {"content": piece}} if is_chat else {"text": piece}),
                "finish_reason": None, **details,
            }  # fmt: skip

    def _choose(self, prompt: Any, seed: int, index: int) -> str:
        is_other = self.other_at is not None and index >= self.other_at and not seed
        # Of the text alone: whoever has no other words writes the same.
        number = random.Random(f"{str(prompt)[:4]}/{seed}/{index}").randrange(1000)
        return f" w{number + (1 if is_other else 0)}"

    def _tell(self, body: Any, words: list[str], start: int, *, is_chat: bool) -> dict[str, Any]:
        """The ids and log-probabilities of tokens, in the style's form."""
        fields: dict[str, Any] = {}
        ids = [int(word[2:]) for word in words]
        if self.style == "vllm" and body.get("return_token_ids"):
            fields["token_ids"] = ids
        if self.style == "bare" or not body.get("logprobs"):
            return fields
        alternatives = [f" w{number + 1}" for number in ids]
        if self.style == "vllm" and not is_chat:
            fields["logprobs"] = {
                "tokens": words, "token_logprobs": [-0.1 - 0.001 * i for i in range(len(words))],
                "top_logprobs": [
                    {word: -0.1, alternative: -0.1 - self.margin, " x": -2.35 - self.margin}
                    for word, alternative in zip(words, alternatives, strict=True)
                ],
            }  # fmt: skip
            return fields
        fields["logprobs"] = {"content": [
            {"id": number, "token": word, "logprob": -0.1 - 0.001 * (start + i), "top_logprobs": [
                {"id": number, "token": word, "logprob": -0.1},
                {"id": number + 1, "token": f" w{number + 1}", "logprob": -0.1 - self.margin},
            ]}
            for i, (number, word) in enumerate(zip(ids, words, strict=True))
        ]}  # fmt: skip
        return fields

    def _render(self) -> str:
        """The metrics page, in the style's names and labels."""
        name = f"{PREFIX[self.style]}:spec_decode_num"
        label = f'engine="0",model_name="{MODEL}"' if self.style == "vllm" else ""
        labels_text = f"{{{label}}}" if label else ""
        lines = [
            "# HELP of no interest", f"{name}_drafts_total{labels_text} {self.drafts:.1f}",
            f"{name}_draft_tokens_total{labels_text} {2 * self.drafts}",
            f"{name}_accepted_tokens_total{labels_text} {self.num_accepted}",
        ]  # fmt: skip
        for index, count in enumerate(self.positions or self.per_position):
            labels = ",".join(filter(None, (label, f'position="{index}"')))
            lines.append(f"{name}_accepted_tokens_per_pos_total{{{labels}}} {count}")
        if self.style == "vllm":
            lines.append(f'{name}_drafts_total{{model_name="another"}} 99999')
        return "\n".join(lines) + "\n"

    def _send(self, handler: BaseHTTPRequestHandler, document: Any, status: int = 200) -> None:
        self._write(handler, json.dumps(document).encode(), status)

    def _write(self, handler: BaseHTTPRequestHandler, data: bytes, status: int = 200) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


assert re.fullmatch(r" w\d+", Double("bare")._choose("x", 0, 0))
