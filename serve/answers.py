"""Answers in OpenAI's forms: the events of requests as a whole document or as a stream's chunks."""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from specdec import Event
from specdec.decode.requests import PLAIN, DraftTree, Origin, Request, TokenLogprob
from specdec.text.answer_parser import Parser
from specdec.text.answer_reader import Delta

from .metrics import FINISH_REASONS, describe_jobs
from .protocol import EVENT_STREAM, BadRequest, describe_error
from .scheduler import Job
from .schema import GenerationBody
from .tokens import TokenTable


class AnswerToken(NamedTuple):
    """Token of an answer. start, end: where its text begins and ends in the choice's text."""

    id: int
    logprob: TokenLogprob | None
    start: int
    end: int = 0
    origin: Origin = PLAIN


class Choice(Job):
    """Request on its way to one output: its text, and the tokens whose text is certain.

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
        hides_reasoning: bool = False,
    ) -> None:
        """Begin a choice.

        is_echoed: whether the text begins with the prompt's. starts: where the prompt's tokens
        begin, if their log-probabilities are asked for. parser: finds the parts of the text.
        hides_reasoning: leave out the part that is reasoning.
        """
        super().__init__(request, on_change, has_output=has_output)
        self.index, self.starts = index, starts
        self.prompt: list[AnswerToken] = []
        self.text = request.input_text if is_echoed else ""
        self.tokens: list[AnswerToken] = []
        self.finish_reason: str | None = None
        self.stop_word: str | None = None  # the one that ended the text
        # Number of the output's tokens, and the sum of their log-probabilities.
        self.num_seen, self.total_logprob = 0, 0.0
        self.prompt_logprobs: list[TokenLogprob | None] = []
        # End of the prompt's text, and end of the newest token's text.
        self._prefix_length = self._last_end = len(self.text)
        self._pending: list[AnswerToken] = []
        self.parser, self.num_reasoning_tokens = parser, 0
        self._hides_reasoning = hides_reasoning
        self._deltas: list[Delta] = []
        self._marks: deque[tuple[int, str]] = deque()  # positions and markers
        self._parsed_length = 0  # characters that the parser has read
        self._fed_marks: list[tuple[int, str]] = []  # in what the parser has read

    def add(self, event: Event) -> str:
        """Take an event; return the new text."""
        if self.starts and event.prompt_logprobs:
            triples = zip(self.request.input_ids, event.prompt_logprobs, self.starts, strict=True)
            self.prompt = [AnswerToken(*triple) for triple in triples]
        self.num_seen += len(event.token_ids)
        self.total_logprob += sum(logprob.logprob for logprob in event.logprobs)
        self.prompt_logprobs += event.prompt_logprobs
        if event.finish_reason is not None:
            self.finish_reason = FINISH_REASONS[event.finish_reason]
            self.stop_word = event.stop_word
        if not self.has_output:
            self.finish_reason = self.finish_reason and "length"
            return ""
        self.text += event.text
        self._append_tokens(event)
        self._settle_tokens(event)
        if self.parser is not None:
            self._parse(self.parser, is_over=event.finish_reason is not None)
        return event.text

    def _append_tokens(self, event: Event) -> None:
        """Let an event's tokens wait until their text is certain."""
        number = len(event.token_ids)
        logprobs: Sequence[TokenLogprob | None] = event.logprobs or [None] * number
        # Empty where the engine does not report how tokens came; such a request is refused.
        origins = event.origins or [PLAIN] * number
        for token, logprob, text_end, origin in zip(
            event.token_ids, logprobs, event.ends, origins, strict=True
        ):
            end = text_end + self._prefix_length
            self._pending.append(AnswerToken(token, logprob, self._last_end, end, origin))
            self._last_end = end
            if self.parser is not None and token in self.parser.marks:
                self._marks.append((end, self.parser.marks[token]))

    def _settle_tokens(self, event: Event) -> None:
        """Move the tokens whose text is certain from those that wait to the answer's."""
        length = len(self.text)
        for token in list(self._pending):
            is_begun = event.finish_reason is not None and token.start < length
            if token.end > length and not is_begun:
                break
            if event.finish_reason == "stop" and token.start >= length:
                break  # after a stop word; an end token has no text, and belongs to the answer
            is_textless = token.start == token.end  # as the first bytes of a character are
            if event.finish_reason is None and is_textless and token.end >= length:
                break  # a stop word may begin with that character
            self.tokens.append(self._pending.pop(0))

    def take_deltas(self) -> list[Delta]:
        """Return the deltas of a stream that the parser has found since the last call."""
        deltas, self._deltas = self._deltas, []
        if self._hides_reasoning:
            return [delta for delta in deltas if "reasoning_content" not in delta]
        return deltas

    @property
    def message(self) -> dict[str, Any]:
        """Message of OpenAI's API that holds the whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if (parser := self.parser) is not None:
            message["content"] = parser.content or (None if parser.calls else "")
            is_told = bool(parser.reasoning) and not self._hides_reasoning
            message |= {"reasoning_content": parser.reasoning} if is_told else {}
            message |= {"tool_calls": parser.calls} if parser.calls else {}
        return message

    def _parse(self, parser: Parser, is_over: bool) -> None:
        """Find the parts of the text that is certain."""
        while self._marks and self._marks[0][0] <= len(self.text):
            end, mark = self._marks.popleft()
            num_marked = sum(len(fed_mark) for _, fed_mark in self._fed_marks)
            self._fed_marks.append((end + num_marked, mark))
            self._deltas += parser.feed(self.text[self._parsed_length : end] + mark)
            self._parsed_length = end
        self._deltas += parser.feed(self.text[self._parsed_length :])
        self._parsed_length = len(self.text)
        if is_over:
            self._deltas += parser.finish(is_cut=self.finish_reason == "length")
            reasoning_end = parser.reasoning_end
            marks = (mark for start, mark in self._fed_marks if start < reasoning_end)
            reasoning_end -= sum(map(len, marks))
            self.num_reasoning_tokens = sum(token.start < reasoning_end for token in self.tokens)
            if parser.calls and not parser.is_call_cut and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"


class EndpointAnswer:
    """Answer to one HTTP request: its id, its choices, and their forms."""

    stream_type: ClassVar[str] = EVENT_STREAM
    ending = b"data: [DONE]\n\n"  # the last event of a stream
    id_prefix: ClassVar[str]
    object_name: ClassVar[str]  # OpenAI's `object` of a whole answer
    chunk_name: ClassVar[str]  # OpenAI's `object` of a stream's chunk
    content_key: ClassVar[str]  # key that holds a chunk's content
    empty_content: ClassVar[Any]

    def __init__(
        self, body: GenerationBody, model: str, choices: Sequence[Choice], table: TokenTable,
        ignored: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """ignored: paths of the body's parameters that have no effect."""
        self.body, self.model, self.choices, self.table = body, model, choices, table
        self._ignored = list(dict.fromkeys(ignored))
        self._num_top = body.num_top_logprobs
        options = body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        self._has_running_usage = options is not None and bool(options.continuous_usage_stats)
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    @property
    def is_over(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def to_json(self) -> dict[str, Any]:
        """Return the whole answer, when all choices are over."""
        documents = []
        for index, choice in enumerate(self._list_returned()):
            document = {
                "index": index, **self._describe_whole(choice), "logprobs": None,
                "finish_reason": choice.finish_reason,
                **self._describe_tokens(choice.tokens, choice.prompt),
            }  # fmt: skip
            if self.body.return_token_ids:
                document["prompt_token_ids"] = choice.request.input_ids
            documents.append(document)
        return self._wrap(self.object_name, documents) | {"usage": self.usage, **self._last_fields}

    def _list_returned(self) -> Iterator[Choice]:
        """Yield, of each prompt's choices, the `n` of the highest total log-probability.

        Only best_of makes more than `n`.
        """
        num_choices, num_returned = self.body.num_choices, self.body.num_returned
        for start in range(0, len(self.choices), num_choices):
            choices = self.choices[start : start + num_choices]
            if num_choices > num_returned:
                choices = sorted(choices, key=lambda choice: -choice.total_logprob)[:num_returned]
            yield from choices

    def _describe_prompt(self, choice: Choice) -> list[dict[str, Any] | None]:
        """Return a prompt's log-probabilities in vLLM's form, ranked among the listed tokens."""
        entries: list[dict[str, Any] | None] = []
        for token, logprob in zip(choice.request.input_ids, choice.prompt_logprobs, strict=True):
            if logprob is None:
                entries.append(None)
                continue
            top = logprob.top[: self.body.prompt_logprobs]
            rows = [(token, logprob.logprob, None)]
            rows += [(*pair, rank) for rank, pair in enumerate(top, 1)]  # type: ignore[misc]
            text = self.table.get_text
            entries.append({
                str(row_token): {"logprob": value, "rank": rank, "decoded_token": text(row_token)}
                for row_token, value, rank in rows
            })  # fmt: skip
        return entries

    def open(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks that a stream begins with."""
        raise NotImplementedError

    def add(self, choice: Choice, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a choice's new events; its last one has the finish_reason."""
        num_tokens, had_prompt = len(choice.tokens), bool(choice.prompt)
        text = "".join([choice.add(event) for event in events])
        prompt = [] if had_prompt else choice.prompt
        if prompt:
            text = choice.request.input_text + text
        details: dict[str, Any] = {}
        has_gained = bool(text) or len(choice.tokens) > num_tokens
        if has_gained:
            details = self._describe_tokens(choice.tokens[num_tokens:], prompt)
            details |= self._describe_trees(events)
        for content in self._list_contents(choice, text if has_gained else None, bool(details)):
            yield self._make_chunk(choice, content, **details)
            details = {}
        if choice.finish_reason is not None:
            reason = choice.finish_reason
            chunk = self._make_chunk(choice, self.empty_content, finish_reason=reason)
            yield chunk | (self._last_fields if self.is_over else {})

    def close(self) -> Iterator[dict[str, Any]]:
        """Yield the chunk of the usage, where it was asked for."""
        if self._has_usage:
            chunk = self._wrap(self.chunk_name, [])
            yield chunk | {"usage": self.usage, **self._last_fields}

    def fail(self, error: BadRequest) -> dict[str, Any]:
        """Return the chunk of an error that ends a stream."""
        return describe_error(error)

    def encode(self, chunk: dict[str, Any]) -> bytes:
        """Return a chunk as a server-sent event."""
        name = f"event: {chunk['type']}\n" if "type" in chunk else ""
        return f"{name}data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode()

    @property
    def usage(self) -> dict[str, Any]:
        """Usage of tokens; a prompt counts once, however many choices it has."""
        first_choices = self.choices[:: self.body.num_choices]
        num_prompt = sum(len(choice.request.input_ids) for choice in first_choices)
        num_output = sum(choice.num_seen for choice in self.choices if choice.has_output)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }
        if details := self._count_details():
            usage["completion_tokens_details"] = details
        return usage

    def _count_details(self) -> dict[str, int]:
        """Count the output's tokens that were drafted and those of reasoning, where known."""
        details: dict[str, int] = {}
        all_stats = [choice.stats for choice in self.choices if choice.stats is not None]
        if not any("num_draft_tokens" in stats.unknown_keys for stats in all_stats):
            num_accepted = sum(stats.num_accepted for stats in all_stats)
            num_drafted = sum(stats.num_draft_tokens for stats in all_stats)
            details["accepted_prediction_tokens"] = num_accepted
            details["rejected_prediction_tokens"] = num_drafted - num_accepted
        if any(choice.parser is not None for choice in self.choices):
            num_reasoning = sum(choice.num_reasoning_tokens for choice in self.choices)
            details["reasoning_tokens"] = num_reasoning
        return details

    @property
    def _last_fields(self) -> dict[str, Any]:
        """The fields that end an answer: metrics, and the parameters without effect."""
        metrics = describe_jobs(self.choices, self.body.num_choices)
        return {"metrics": metrics, "specdec": {"ignored": self._ignored}}

    def _wrap(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": object_name, "created": self.created, "model": self.model,
            "choices": choices,
        }  # fmt: skip

    def _make_chunk(self, choice: Choice, content: Any, **details: Any) -> dict[str, Any]:
        document = {
            "index": choice.index, self.content_key: content, "logprobs": None,
            "finish_reason": None, **details,
        }  # fmt: skip
        chunk = self._wrap(self.chunk_name, [document])
        if not self._has_usage:
            return chunk
        return chunk | {"usage": self.usage if self._has_running_usage else None}

    def _describe_whole(self, choice: Choice) -> dict[str, Any]:
        """Return the content of a choice that is over."""
        raise NotImplementedError

    def _list_contents(self, choice: Choice, text: str | None, has_details: bool) -> list[Any]:
        """List the contents of a choice's next chunks.

        text: the new text, None where nothing is new. has_details: whether a chunk has to carry
        details of the new tokens.
        """
        raise NotImplementedError

    def _describe_tokens(
        self, tokens: Sequence[AnswerToken], prompt: Sequence[AnswerToken]
    ) -> dict[str, Any]:
        """Return the details of a choice's tokens, and of the prompt's, that a body asks for."""
        details: dict[str, Any] = {}
        if self._num_top is not None:
            details["logprobs"] = self._describe_logprobs(tokens, prompt, self._num_top)
        if self.body.return_origins:  # our extension: text and origin of each token
            details["tokens"] = [[self.table.get_text(t.id), t.origin] for t in tokens]
        if self.body.return_token_ids:  # vLLM's extension
            details["token_ids"] = [token.id for token in tokens]
        return details

    def _describe_trees(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return the draft trees of events, where the body asks for them."""
        if not self.body.return_trees:
            return {}
        return {"trees": [self._describe_tree(tree) for event in events for tree in event.trees]}

    def _describe_tree(self, tree: DraftTree) -> dict[str, Any]:
        tokens = [self.table.get_text(token) for token in tree.tokens]
        return {"tokens": tokens, "parents": tree.parents, "accepted": tree.accepted}

    def _describe_logprobs(
        self, tokens: Sequence[AnswerToken], prompt: Sequence[AnswerToken], num_top: int
    ) -> dict[str, Any]:
        """Return the log-probabilities of tokens, in the endpoint's form."""
        raise NotImplementedError


class CompletionAnswer(EndpointAnswer):
    """Answer to a completion's body: texts."""

    id_prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"
    content_key, empty_content = "text", ""

    def open(self) -> Iterator[dict[str, Any]]:
        for choice in self.choices:
            # An echoed prompt with log-probabilities comes with the first tokens.
            if choice.text and not choice.starts:
                yield self._make_chunk(choice, choice.text)

    def _describe_whole(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text}

    def to_json(self) -> dict[str, Any]:
        document = super().to_json()
        if self.body.prompt_logprobs is not None:
            choices = zip(document["choices"], self._list_returned(), strict=True)
            for choice_document, choice in choices:
                choice_document["prompt_logprobs"] = self._describe_prompt(choice)
        return document

    def _list_contents(self, choice: Choice, text: str | None, has_details: bool) -> list[Any]:
        return [] if text is None else [text]

    def _describe_logprobs(
        self, tokens: Sequence[AnswerToken], prompt: Sequence[AnswerToken], num_top: int
    ) -> dict[str, Any]:
        text = self.table.get_text
        rows = [*prompt, *(token for token in tokens if token.logprob is not None)]
        return {
            "tokens": [text(token.id) for token in rows],
            "token_logprobs": [token.logprob and token.logprob.logprob for token in rows],
            "top_logprobs": [self._describe_top(token, num_top) for token in rows],
            "text_offset": [token.start for token in rows],
        }

    def _describe_top(self, token: AnswerToken, num_top: int) -> dict[str, float] | None:
        """Return a token's log-probability and the likeliest ones there, by the tokens' texts."""
        if token.logprob is None:
            return None
        text, top = self.table.get_text, token.logprob.top[:num_top]
        return {text(token.id): token.logprob.logprob} | {
            text(top_token): value for top_token, value in top
        }


class ChatAnswer(EndpointAnswer):
    """Answer to a chat's body: messages, perhaps with reasoning and tool calls."""

    id_prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"
    content_key = "delta"
    empty_content: ClassVar[Any] = {}

    def open(self) -> Iterator[dict[str, Any]]:
        for choice in self.choices:
            yield self._make_chunk(choice, {"role": "assistant", "content": ""})

    def to_json(self) -> dict[str, Any]:
        document = super().to_json()
        if self.body.prompt_logprobs is not None:
            document["prompt_logprobs"] = self._describe_prompt(self.choices[0])
        return document

    def _describe_whole(self, choice: Choice) -> dict[str, Any]:
        return {"message": choice.message}

    def _list_contents(self, choice: Choice, text: str | None, has_details: bool) -> list[Any]:
        if choice.parser is not None:
            return choice.take_deltas() or ([{}] if has_details else [])
        return [] if text is None else [{"content": text}]

    def _describe_logprobs(
        self, tokens: Sequence[AnswerToken], prompt: Sequence[AnswerToken], num_top: int
    ) -> dict[str, Any]:
        content = []
        for token in tokens:
            if token.logprob is not None:
                top = [self._describe_token(*pair) for pair in token.logprob.top[:num_top]]
                document = self._describe_token(token.id, token.logprob.logprob)
                content.append(document | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _describe_token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.table.get_bytes(token)
        return {"token": self.table.get_text(token), "logprob": logprob, "bytes": list(data)}
