"""OpenAI's answers: what a request's events become, whole or as a stream's chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from specdec import Event
from specdec.decode.requests import PLAIN, DraftTree, Origin, TokenLogprob

from .metrics import FINISHED, describe_jobs
from .scheduler import Job
from .schema import Asked, ChatAsked, CompletionAsked, count_prompt_tokens
from .tokens import TokenTable


class Choice:
    """One output on its way: its text, and the tokens whose text is certain.

    A token is told of when its own text is; what a stop word cuts off never is.
    """

    def __init__(
        self, index: int, job: Job, prefix: str, *, starts: Sequence[int] = ()
    ) -> None:  # fmt: skip
        """prefix: the prompt, where it is to be echoed. starts: where its tokens begin, if they are
        to be told of.
        """
        self.index, self.job, self.starts = index, job, starts
        self.prompt: list[tuple[int, TokenLogprob | None, int]] = []  # with offset
        self.text = prefix
        self.tokens: list[tuple[int, TokenLogprob | None, int, Origin]] = []  # with offset, origin
        self.finish_reason: str | None = None
        self._prefix_len = len(prefix)
        self._length = 0  # of the output's text that is certain
        self._ended = 0  # where the text of the last token seen ends
        self._pending: list[tuple[int, TokenLogprob | None, int, int, Origin]] = []

    def add(self, event: Event) -> tuple[str, int]:
        """Take an event; return the new text, and how many tokens were told of before it."""
        known = len(self.tokens)
        if self.starts and event.prompt_logprobs:
            ids = self.job.request.input_ids
            self.prompt = list(zip(ids, event.prompt_logprobs, self.starts, strict=True))
        if event.finish_reason is not None:
            self.finish_reason = FINISHED[event.finish_reason]
        if not self.job.has_output:
            self.finish_reason = self.finish_reason and "length"
            return "", known
        self.text += event.text
        self._length += len(event.text)
        told: Sequence[TokenLogprob | None] = event.logprobs or [None] * len(event.token_ids)
        # Where the engine does not tell how tokens came, nobody may ask for it.
        origins = event.origins or [PLAIN] * len(event.token_ids)
        for token, logprob, end, origin in zip(
            event.token_ids, told, event.ends, origins, strict=True
        ):
            self._pending.append((token, logprob, self._ended, end, origin))
            self._ended = end
        is_over = event.finish_reason is not None
        while self._pending:
            token, own, start, end, how = self._pending[0]
            if end > self._length and not (is_over and start < self._length):
                break
            if self.finish_reason == "stop" and start >= self._length:
                break
            self._pending.pop(0)
            self.tokens.append((token, own, self._prefix_len + start, how))
        return event.text, known


class Answer:
    """The answer to one HTTP request: its id, its choices, and their forms."""

    def __init__(
        self, asked: Asked, model: str, jobs: Sequence[Job], table: TokenTable,
        starts: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        """starts: see Choice, for each job, or for none."""
        self.asked, self.model, self.table = asked, model, table
        self.is_chat = isinstance(asked, ChatAsked)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        echoes = isinstance(asked, CompletionAsked) and asked.echo
        self.choices = [
            Choice(
                at, job, job.request.input_text if echoes else "",
                starts=starts[at] if starts else (),
            )
            for at, job in enumerate(jobs)
        ]  # fmt: skip

    @property
    def is_over(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def to_json(self) -> dict[str, Any]:
        """The whole answer, when all choices are over."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        choices = []
        for choice in self.choices:
            document: dict[str, Any] = {"index": choice.index}
            if self.is_chat:
                document["message"] = {
                    "role": "assistant", "content": choice.text, "refusal": None
                }  # fmt: skip
            else:
                document["text"] = choice.text
            document["logprobs"] = self._describe_tokens(choice, 0, choice.prompt)
            document["finish_reason"] = choice.finish_reason
            document |= self._describe_origins(choice, 0) | self._describe_ids(choice, 0)
            if self.asked.return_token_ids:
                document["prompt_token_ids"] = choice.job.request.input_ids
            choices.append(document)
        return self._wrap(kind, choices) | {"usage": self.usage, "metrics": self.metrics}

    def open(self) -> Iterator[dict[str, Any]]:
        """The chunks that a stream begins with."""
        for choice in self.choices:
            if self.is_chat:
                yield self._make_chunk(choice, {"role": "assistant", "content": ""})
            elif choice.text and not choice.starts:  # else it comes with its log-probabilities
                yield self._make_chunk(choice, choice.text)

    def add(self, choice: Choice, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """The chunks of what a choice has gained; its last one has the finish_reason."""
        text, known = "", len(choice.tokens)
        wants_prompt_logprobs = bool(choice.starts) and not choice.prompt
        for event in events:
            text += choice.add(event)[0]
        if wants_prompt_logprobs and choice.prompt:
            text = choice.job.request.input_text + text
        if text or len(choice.tokens) > known:
            chunk = self._make_chunk(choice, {"content": text} if self.is_chat else text)
            prompt = choice.prompt if wants_prompt_logprobs else []
            chunk["choices"][0]["logprobs"] = self._describe_tokens(choice, known, prompt)
            chunk["choices"][0] |= self._describe_origins(choice, known)
            chunk["choices"][0] |= self._describe_ids(choice, known)
            if self.asked.return_trees:
                chunk["choices"][0]["trees"] = [
                    self._describe_tree(tree) for event in events for tree in event.trees
                ]
            yield chunk
        if choice.finish_reason is not None:
            chunk = self._make_chunk(choice, {} if self.is_chat else "")
            chunk["choices"][0]["finish_reason"] = choice.finish_reason
            if self.is_over:
                chunk["metrics"] = self.metrics
            yield chunk

    def close(self) -> Iterator[dict[str, Any]]:
        """The chunk of the usage, where it was asked for."""
        if self._tells_usage:
            chunk = self._wrap(self._chunk_kind, [])
            yield chunk | {"usage": self.usage, "metrics": self.metrics}

    @property
    def usage(self) -> dict[str, Any]:
        jobs = [choice.job for choice in self.choices]
        requests = [job.request for job in jobs]
        prompt = count_prompt_tokens(requests, self.asked.n or 1)
        stats = [job.stats for job in jobs if job.stats is not None]
        output = sum(job.num_output_tokens for job in jobs)
        accepted = sum(s.num_accepted for s in stats)
        drafted = sum(s.num_draft_tokens for s in stats)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }
        if any("num_draft_tokens" in s.unknown for s in stats):
            return usage
        details = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        }
        return usage | {"completion_tokens_details": details}

    @property
    def metrics(self) -> dict[str, Any]:
        return describe_jobs([choice.job for choice in self.choices])

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    @property
    def _tells_usage(self) -> bool:
        options = self.asked.stream_options
        return options is not None and options.include_usage

    def _wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "choices": choices,
        }  # fmt: skip

    def _make_chunk(self, choice: Choice, content: Any) -> dict[str, Any]:
        content = {"delta" if self.is_chat else "text": content}
        whole = {"index": choice.index, **content, "logprobs": None, "finish_reason": None}
        chunk = self._wrap(self._chunk_kind, [whole])
        return chunk | {"usage": None} if self._tells_usage else chunk

    def _describe_origins(self, choice: Choice, start: int) -> dict[str, Any]:
        """Ours: each token as text, and how it came."""
        if not self.asked.return_origins:
            return {}
        tokens = choice.tokens[start:]
        return {"tokens": [[self.table.get_text(t), origin] for t, _, _, origin in tokens]}

    def _describe_ids(self, choice: Choice, start: int) -> dict[str, Any]:
        """Token ids, in vLLM's form."""
        if not self.asked.return_token_ids:
            return {}
        return {"token_ids": [token for token, *_ in choice.tokens[start:]]}

    def _describe_tree(self, tree: DraftTree) -> dict[str, Any]:
        tokens = [self.table.get_text(token) for token in tree.tokens]
        return {"tokens": tokens, "parents": tree.parents, "accepted": tree.accepted}

    def _describe_tokens(
        self, choice: Choice, start: int,
        prompt: Sequence[tuple[int, TokenLogprob | None, int]] = (),
    ) -> dict[str, Any] | None:  # fmt: skip
        """The log-probabilities of tokens, in the form of either endpoint."""
        if self.asked.num_top is None:
            return None
        told = [(token, own, at) for token, own, at, _ in choice.tokens[start:] if own is not None]
        if self.is_chat:
            return {
                "content": [
                    self._describe_token(token, own.logprob)
                    | {"top_logprobs": [self._describe_token(*pair) for pair in own.top]}
                    for token, own, _ in told
                ],
                "refusal": None,
            }
        text = self.table.get_text
        listed = [*prompt, *told]
        return {
            "tokens": [text(token) for token, _, _ in listed],
            "token_logprobs": [own and own.logprob for _, own, _ in listed],
            "top_logprobs": [
                own and {text(t): own.logprob} | {text(top): value for top, value in own.top}
                for t, own, _ in listed
            ],
            "text_offset": [at for _, _, at in listed],
        }

    def _describe_token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.table.get_bytes(token)
        return {"token": self.table.get_text(token), "logprob": logprob, "bytes": list(data)}
