"""OpenAI's answers: what a request's events become, whole or as a stream's chunks."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from specdec import Event
from specdec.decode.requests import PLAIN, DraftTree, Origin, Request, TokenLogprob

from .metrics import FINISHED, describe_jobs
from .parsing import Delta, Parser
from .scheduler import Job
from .schema import Asked, count_choices
from .tokens import TokenTable


class Told(NamedTuple):
    """A token in an answer. start, end: where its text begins and ends in the choice's text."""

    id: int
    logprob: TokenLogprob | None
    start: int
    end: int = 0
    origin: Origin = PLAIN


class Choice(Job):
    """A request on its way to one output: its text, and the tokens whose text is certain.

    A token is sent when its own text is certain; what a stop word cuts off is never sent.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        on_change: Callable[[], None] = lambda: None,
        *,
        has_output: bool = True,
        is_echoed: bool = False,
        starts: Sequence[int] = (),
        parser: Parser | None = None,
    ) -> None:
        """is_echoed: whether the text begins with the prompt's. starts: where the prompt's tokens
        begin, if their log-probabilities are asked for. parser: finds the parts of the text.
        """
        super().__init__(request, on_change, has_output=has_output)
        self.index, self.starts = index, starts
        self.prompt: list[Told] = []
        self.text = request.input_text if is_echoed else ""
        self.tokens: list[Told] = []
        self.finish_reason: str | None = None
        self.num_seen, self.total_logprob = 0, 0.0  # of its tokens
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self._prefix = self._ended = len(self.text)  # and where the last token seen ends
        self._pending: list[Told] = []
        self.parser, self.num_reasoning_tokens = parser, 0
        self._deltas: list[Delta] = []
        self._marks: deque[tuple[int, str]] = deque()  # markers that are no text, by their places
        self._parsed = self._num_marked = 0  # characters: of the text, of markers before reasoning

    def add(self, event: Event) -> str:
        """Take an event; return the new text."""
        if self.starts and event.prompt_logprobs:
            triples = zip(self.request.input_ids, event.prompt_logprobs, self.starts, strict=True)
            self.prompt = [Told(*triple) for triple in triples]
        self.num_seen += len(event.token_ids)
        self.total_logprob += sum(one.logprob for one in event.logprobs)
        self.prompt_logprobs += event.prompt_logprobs
        if event.finish_reason is not None:
            self.finish_reason = FINISHED[event.finish_reason]
        if not self.has_output:
            self.finish_reason = self.finish_reason and "length"
            return ""
        self.text += event.text
        number, certain = len(event.token_ids), len(self.text)
        logprobs: Sequence[TokenLogprob | None] = event.logprobs or [None] * number
        # Empty where the engine does not report how tokens came; such a request is refused.
        origins = event.origins or [PLAIN] * number
        for token, logprob, end, origin in zip(
            event.token_ids, logprobs, event.ends, origins, strict=True
        ):
            end += self._prefix
            self._pending.append(Told(token, logprob, self._ended, end, origin))
            self._ended = end
            if self.parser is not None and token in self.parser.marks:
                self._marks.append((end, self.parser.marks[token]))
        is_over = event.finish_reason is not None
        while self._pending:
            first = self._pending[0]
            if first.end > certain and not (is_over and first.start < certain):
                break
            if event.finish_reason == "stop" and first.start >= certain:
                break  # behind a stop word; an end token has no text, and is told of
            self.tokens.append(self._pending.pop(0))
        if self.parser is not None:
            self._parse(self.parser, is_over)
        return event.text

    def take_deltas(self) -> list[Delta]:
        """What the parser has found since the last call, as a stream tells it."""
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def message(self) -> dict[str, Any]:
        """The whole answer as a message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if (parser := self.parser) is not None:
            message["content"] = parser.content or (None if parser.calls else "")
            message |= {"reasoning_content": parser.reasoning} if parser.reasoning else {}
            message |= {"tool_calls": parser.calls} if parser.calls else {}
        return message

    def _parse(self, parser: Parser, is_over: bool) -> None:
        """Find the parts of the text that is certain."""
        while self._marks and self._marks[0][0] <= len(self.text):
            at, mark = self._marks.popleft()
            self._num_marked += 0 if parser.reasoning_end else len(mark)
            self._deltas += parser.feed(self.text[self._parsed : at] + mark)
            self._parsed = at
        self._deltas += parser.feed(self.text[self._parsed :])
        self._parsed = len(self.text)
        if is_over:
            self._deltas += parser.finish(is_cut=self.finish_reason == "length")
            end = parser.reasoning_end - self._num_marked
            self.num_reasoning_tokens = sum(token.start < end for token in self.tokens)
            if parser.calls and not parser.is_call_cut and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"


class Answer:
    """The answer to one HTTP request: its id, its choices, and their forms."""

    ending = b"data: [DONE]\n\n"  # of a stream

    def __init__(
        self, asked: Asked, model: str, choices: Sequence[Choice], table: TokenTable
    ) -> None:
        self.asked, self.model, self.choices, self.table = asked, model, choices, table
        self.is_chat = "messages" in asked
        # How many likeliest tokens to tell of; None tells no log-probabilities.
        self._num_top: int | None = asked.get("logprobs")
        if self.is_chat:
            self._num_top = asked.get("top_logprobs", 0) if self._num_top else None
        options = asked.get("stream_options", {})
        self.tells_usage = options.get("include_usage", False)
        self._counts_on = options.get("continuous_usage_stats", False)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    @property
    def is_over(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def to_json(self) -> dict[str, Any]:
        """The whole answer, when all choices are over."""
        choices = []
        for index, choice in enumerate(self._choose()):
            content: dict[str, Any] = {"text": choice.text}
            if self.is_chat:
                content = {"message": choice.message}
            document = {
                "index": index, **content, "logprobs": None,
                "finish_reason": choice.finish_reason, **self._describe(choice, 0, choice.prompt),
            }  # fmt: skip
            if self.asked.get("return_token_ids"):
                document["prompt_token_ids"] = choice.request.input_ids
            if "prompt_logprobs" in self.asked and not self.is_chat:
                document["prompt_logprobs"] = self._describe_prompt(choice)
            choices.append(document)
        kind = "chat.completion" if self.is_chat else "text_completion"
        whole = self._wrap(kind, choices) | {"usage": self.usage, **self._told_last}
        if "prompt_logprobs" in self.asked and self.is_chat:
            whole["prompt_logprobs"] = self._describe_prompt(self.choices[0])
        return whole

    def _choose(self) -> Iterator[Choice]:
        """The choices that are told: of each prompt's the n of the highest total log-probability.

        Only best_of makes more than n.
        """
        made, wanted = count_choices(self.asked), self.asked.get("n", 1)
        for at in range(0, len(self.choices), made):
            own = self.choices[at : at + made]
            if made > wanted:
                own = sorted(own, key=lambda choice: -choice.total_logprob)[:wanted]
            yield from own

    def _describe_prompt(self, choice: Choice) -> list[dict[str, Any] | None]:
        """The log-probabilities of a prompt's tokens in vLLM's form, with ranks among the told."""
        told: list[dict[str, Any] | None] = []
        for token, own in zip(choice.request.input_ids, choice.prompt_logprobs, strict=True):
            if own is None:
                told.append(None)
                continue
            top = own.top[: self.asked["prompt_logprobs"]]
            ranked = [(token, own.logprob, None), *((*one, at) for at, one in enumerate(top, 1))]
            text = self.table.get_text
            told.append({
                str(one): {"logprob": value, "rank": rank, "decoded_token": text(one)}
                for one, value, rank in ranked
            })  # fmt: skip
        return told

    def open(self) -> Iterator[dict[str, Any]]:
        """The chunks that a stream begins with."""
        for choice in self.choices:
            if self.is_chat:
                yield self._make_chunk(choice, {"role": "assistant", "content": ""})
            elif choice.text and not choice.starts:  # else it comes with its log-probabilities
                yield self._make_chunk(choice, choice.text)

    def add(self, choice: Choice, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """The chunks of what a choice has gained; its last one has the finish_reason."""
        known, knew_prompt = len(choice.tokens), bool(choice.prompt)
        text = "".join([choice.add(event) for event in events])
        prompt = [] if knew_prompt else choice.prompt
        if prompt:
            text = choice.request.input_text + text
        has_gained = bool(text) or len(choice.tokens) > known
        told = self._describe(choice, known, prompt) if has_gained else {}
        if has_gained and self.asked.get("return_trees"):
            trees = [tree for event in events for tree in event.trees]
            told["trees"] = [self._describe_tree(tree) for tree in trees]
        contents: list[Any] = [text] if has_gained else []
        if choice.parser is not None:
            contents = choice.take_deltas() or ([{}] if told else [])
        elif self.is_chat:
            contents = [{"content": text}] if has_gained else []
        for content in contents:
            yield self._make_chunk(choice, content, **told)
            told = {}
        if choice.finish_reason is not None:
            nothing: Any = {} if self.is_chat else ""
            chunk = self._make_chunk(choice, nothing, finish_reason=choice.finish_reason)
            yield chunk | (self._told_last if self.is_over else {})

    def close(self) -> Iterator[dict[str, Any]]:
        """The chunk of the usage, where it was asked for."""
        if self.tells_usage:
            chunk = self._wrap(self._chunk_kind, [])
            yield chunk | {"usage": self.usage, **self._told_last}

    def fail(self, error: dict[str, Any]) -> dict[str, Any]:
        """The chunk of an error that ends a stream."""
        return {"error": error}

    @property
    def usage(self) -> dict[str, Any]:
        # The tokens of a prompt count once, however many choices it has.
        first_choices = self.choices[:: count_choices(self.asked)]
        prompt = sum(len(choice.request.input_ids) for choice in first_choices)
        output = sum(choice.num_seen for choice in self.choices if choice.has_output)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }
        stats = [choice.stats for choice in self.choices if choice.stats is not None]
        if not any("num_draft_tokens" in one.unknown for one in stats):
            accepted = sum(one.num_accepted for one in stats)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(s.num_draft_tokens for s in stats) - accepted,
            }
        if any(choice.parser is not None for choice in self.choices):
            reasoning = sum(choice.num_reasoning_tokens for choice in self.choices)
            usage.setdefault("completion_tokens_details", {})["reasoning_tokens"] = reasoning
        return usage

    @property
    def _told_last(self) -> dict[str, Any]:
        ignored = list(dict.fromkeys(self.asked.get("ignored", ())))
        return {"metrics": describe_jobs(self.choices), "specdec": {"ignored": ignored}}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "choices": choices,
        }  # fmt: skip

    def _make_chunk(self, choice: Choice, content: Any, **told: Any) -> dict[str, Any]:
        content = {"delta" if self.is_chat else "text": content}
        whole = {"index": choice.index, **content, "logprobs": None, "finish_reason": None, **told}
        chunk = self._wrap(self._chunk_kind, [whole])
        if not self.tells_usage:
            return chunk
        return chunk | {"usage": self.usage if self._counts_on else None}

    def _describe(self, choice: Choice, start: int, prompt: Sequence[Told]) -> dict[str, Any]:
        """What an answer says of a choice's tokens from `start` on, and of the prompt's tokens."""
        tokens, told = choice.tokens[start:], dict[str, Any]()
        if self._num_top is not None:
            told["logprobs"] = self._describe_logprobs(tokens, prompt)
        if self.asked.get("return_origins"):  # ours: each token as text, and how it came
            told["tokens"] = [[self.table.get_text(one.id), one.origin] for one in tokens]
        if self.asked.get("return_token_ids"):  # vLLM's
            told["token_ids"] = [one.id for one in tokens]
        return told

    def _describe_tree(self, tree: DraftTree) -> dict[str, Any]:
        tokens = [self.table.get_text(token) for token in tree.tokens]
        return {"tokens": tokens, "parents": tree.parents, "accepted": tree.accepted}

    def _describe_logprobs(self, tokens: Sequence[Told], prompt: Sequence[Told]) -> dict[str, Any]:
        """The log-probabilities of tokens, in the form of either endpoint."""
        told = [(one, one.logprob) for one in tokens if one.logprob is not None]
        if self.is_chat:
            content = [
                self._describe_token(one.id, own.logprob)
                | {"top_logprobs": [self._describe_token(*one) for one in own.top[: self._num_top]]}
                for one, own in told
            ]
            return {"content": content, "refusal": None}
        text, listed = self.table.get_text, [*((one, one.logprob) for one in prompt), *told]
        return {
            "tokens": [text(one.id) for one, _ in listed],
            "token_logprobs": [own and own.logprob for _, own in listed],
            "top_logprobs": [
                own
                and {text(one.id): own.logprob}
                | {text(top): value for top, value in own.top[: self._num_top]}
                for one, own in listed
            ],
            "text_offset": [one.start for one, _ in listed],
        }

    def _describe_token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.table.get_bytes(token)
        return {"token": self.table.get_text(token), "logprob": logprob, "bytes": list(data)}
