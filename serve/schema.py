"""What clients may ask for: OpenAI's parameters, checked, and the prompts that they mean."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from specdec import Engine, Prompt, SpecDecError
from specdec.decode.prompts import MAX_COUNT, MAX_LOGPROBS
from specdec.decode.requests import Request
from specdec.decode.text import TextStream
from specdec.errors import shorten, suggest, summarize

MAX_CHOICES = 128  # of one HTTP request, over all its prompts
MAX_STOPS = 16
# Parameters of OpenAI's and vLLM's that are not offered, with the values that ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
}
GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "grammar": "lark"}
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenName = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Token = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class BadRequest(Exception):
    """The request cannot be served as it is; status is 4xx."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _is_list(value: Any, is_part: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_part, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def check_prompt(value: Any) -> Any:
    """Let pass what a prompt of /v1/completions may be."""
    if _is_text(value) or _is_list(value, _is_token):
        return value
    if _is_list(value, _is_text) or _is_list(value, lambda one: _is_list(one, _is_token)):
        return value
    raise PydanticCustomError(
        "prompt", "give a text, a list of texts, the ids of tokens, or a list of lists of these"
    )


def check_stop(value: Any) -> Any:
    """Let pass what `stop` may be."""
    words = [value] if _is_text(value) else value
    is_good = isinstance(words, list) and all(_is_text(w) and 0 < len(w) <= 1000 for w in words)
    if value is None or (is_good and len(words) <= MAX_STOPS):
        return value
    raise PydanticCustomError(
        "stop", f"give a text of 1 to 1000 characters, or a list of at most {MAX_STOPS} of them"
    )


def check_content(value: Any) -> Any:
    """Let pass what a message may say: a text, or parts of text, which are returned as one."""
    if value is None or _is_text(value):
        return value
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise PydanticCustomError("content", "give a text, or a list of parts of text")
    for part in value:
        if part.get("type") != "text" or not _is_text(part.get("text")) or len(part) != 2:
            raise PydanticCustomError(
                "content", 'of parts only {"type": "text", "text": "..."} is supported'
            )
    return "".join(part["text"] for part in value)


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Model):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(Model):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Asked(Model):
    """What both kinds of completions have."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[Any, PlainValidator(check_stop)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.001, le=1000)] | None = None
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    # Of no effect here: they say who asks.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    return_token_ids: bool | None = None  # vLLM's: the ids of the prompt and of the output
    # Ours, for the page: how each token came, what each step verified, and nothing drafted.
    return_origins: bool = False
    return_trees: bool = False
    speculation: bool = True

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens to tell of at each place; None tells no log-probabilities."""
        raise NotImplementedError

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether to tell the log-probabilities of the prompt, too."""
        return False

    def find_sources(self) -> list[dict[str, Any]]:
        """The prompts, each as the one argument of a Prompt."""
        raise NotImplementedError

    def find_grammar(self) -> dict[str, Any] | None:
        """What the output is to keep to, as a Prompt has it."""
        form = self.response_format
        found: dict[str, dict[str, Any]] = {}
        if form is not None and form.type == "json_object":
            found["response_format"] = {"json_object": True}
        if form is not None and form.type != "json_schema" and form.json_schema is not None:
            raise BadRequest(
                f"json_schema has no place beside response_format.type {form.type!r}",
                "response_format",
            )
        if form is not None and form.type == "json_schema":
            if form.json_schema is None or form.json_schema.schema_ is None:
                raise BadRequest("response_format has no json_schema.schema", "response_format")
            found["response_format"] = {"json_schema": form.json_schema.schema_}
        for name, kind in GUIDED.items():
            if (value := getattr(self, name)) is not None:
                found[name] = {kind: value}
        if len(found) > 1:
            raise BadRequest(f"{' and '.join(found)} are both given", next(iter(found)))
        if found and self.ignore_eos:
            raise BadRequest("ignore_eos has no place beside a grammar", "ignore_eos")
        return next(iter(found.values()), None)

    def find_bias(self) -> dict[int, float] | None:
        return None if self.logit_bias is None else {int(k): v for k, v in self.logit_bias.items()}

    def make_prompt(self, source: Mapping[str, Any], seed: int) -> Prompt:
        """A prompt with these settings; what is not given is OpenAI's default."""
        stop = self.stop
        return Prompt(
            **source,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p,
            seed=seed % 2**64,
            stop=stop if stop is None or isinstance(stop, str) else list(stop),
            end_ids=() if self.ignore_eos else None,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.find_bias(),
            logprobs=self.num_top,
            prompt_logprobs=self.wants_prompt_logprobs,
            speculation=self.speculation,
            keep_trees=self.return_trees,
            grammar=self.find_grammar(),
        )


class CompletionAsked(Asked):
    """The body of /v1/completions."""

    prompt: Annotated[Any, PlainValidator(check_prompt)]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    @property
    def wants_prompt_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    def find_sources(self) -> list[dict[str, Any]]:
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        return [{"text" if isinstance(p, str) else "token_ids": p} for p in prompt]


class Message(BaseModel):
    """A turn; what else it has is the chat template's to read."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, Field(min_length=1)]
    content: Annotated[str | None, PlainValidator(check_content)] = None

    @property
    def others(self) -> dict[str, Any]:
        """What it has beside role and content."""
        return {k: v for k, v in (self.model_extra or {}).items() if v is not None and v != []}


class ChatAsked(Asked):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def find_sources(self) -> list[dict[str, Any]]:
        return [{"messages": [message.model_dump() for message in self.messages]}]

    def check_messages(self, template: str) -> None:
        """Raise BadRequest for a turn that says nothing, or what the template would not read."""
        for at, message in enumerate(self.messages):
            if message.content is None and not message.others:
                raise BadRequest(f"messages.{at}.content is missing", "messages")
            for name in message.others:
                if name not in template:
                    raise BadRequest(
                        f"the chat template does not read messages.{at}.{name[:100]}", "messages"
                    )


class TokenizeAsked(Model):
    """The body of /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None


class DetokenizeAsked(Model):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[Token]


def read_asked(kind: type[Any], body: Any) -> Any:
    """Check a body; BadRequest names the parameter that is wrong, unknown or not offered."""
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")
    known = list(kind.model_fields)
    for name, value in list(body.items()):
        if name in known:
            continue
        if name not in NEUTRAL:
            raise BadRequest(
                f"unknown parameter {shorten(name)}{suggest(name[:100], known)}", name[:100]
            )
        neutral = any(type(value) is type(one) and value == one for one in NEUTRAL[name])
        if value is not None and not neutral:
            raise BadRequest(f"{name} is not supported", name, code="unsupported_parameter")
        body = {key: kept for key, kept in body.items() if key != name}
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explain(error, body) from None


def _explain(error: ValidationError, body: Mapping[str, Any]) -> BadRequest:
    """The first of what is wrong, as one sentence."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [part[:100] if isinstance(part, str) else str(part) for part in found["loc"]]
    where, name = ".".join(path), path[0] if path else None
    if found["type"] == "missing":
        return BadRequest(f"{where} is missing", name)
    if found["type"] == "extra_forbidden":
        return BadRequest(f"unknown parameter {where}", name)
    value: Any = body
    for part in found["loc"]:
        inside = isinstance(value, dict) and part in value
        if part == "[key]":
            where, value = f"a key of {name}", path[-2]
        elif inside or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
    return BadRequest(f"{where} is {shorten(value)}: {found['msg']}", name)


def make_requests(engine: Engine, asked: Asked) -> list[Request]:
    """Tokenize and check; n requests of each prompt. The seeds of all choices are consecutive.

    BadRequest where the engine cannot take them.
    """
    for name in ("stream_options", "return_trees"):
        if getattr(asked, name) and not asked.stream:
            raise BadRequest(f"{name} is only for stream", name)
    if asked.return_origins and not engine.tells_origins:
        raise BadRequest("this engine does not tell how its tokens came", "return_origins")
    where, limit = "prompt", asked.max_tokens
    if isinstance(asked, ChatAsked):
        where = "messages"
        if limit is not None and asked.max_completion_tokens is not None:
            raise BadRequest(
                "max_tokens and max_completion_tokens are both given", "max_completion_tokens"
            )
        limit = asked.max_completion_tokens or limit
        if asked.top_logprobs is not None and not asked.logprobs:
            raise BadRequest("top_logprobs needs logprobs", "top_logprobs")
        asked.check_messages(str(engine.tokenizer.chat_template or ""))
    elif isinstance(asked, CompletionAsked):
        if limit == 0 and not asked.echo:
            raise BadRequest("max_tokens 0 asks for nothing without echo", "max_tokens")
        limit = 16 if limit is None else max(1, limit)  # the prompt's own pass makes a token
    sources, count = asked.find_sources(), asked.n or 1
    if len(sources) * count > MAX_CHOICES:
        raise BadRequest(
            f"{len(sources)} prompts with n {count} are {len(sources) * count} choices, at most"
            f" {MAX_CHOICES} are allowed",
            "n",
        )
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    requests: list[Request] = []
    for source in sources:
        prompt = asked.make_prompt(source, seed)
        try:
            request = engine.prepare(prompt, max_output_len=limit)
        except SpecDecError as error:
            param = find_culprit(engine, asked, error) or where
            raise BadRequest(summarize(error), param) from None
        for _ in range(count):
            own_seed = (seed + len(requests)) % 2**64
            sampling = dataclasses.replace(request.sampling, seed=own_seed)
            requests.append(dataclasses.replace(request, index=len(requests), sampling=sampling))
    return requests


def find_starts(engine: Engine, request: Request) -> list[int]:
    """Where in a prompt's text each of its tokens begins."""
    stream = TextStream(engine.tokenizer)
    for token in request.input_ids:
        stream.add(token)
    # Of ids, the text has special tokens as well.
    before = max(0, request.input_text.find(stream.finish()))
    return [0, *(before + end for end in stream.ends[:-1])]


def find_culprit(engine: Engine, asked: Asked, error: SpecDecError) -> str | None:
    """Name the parameter beside the prompt that the engine refuses, where it is one."""
    names = ["response_format", *GUIDED]
    alone = Prompt(token_ids=[0])
    grammar = dataclasses.replace(alone, grammar=asked.find_grammar())
    for name, prompt in (
        ("logit_bias", dataclasses.replace(alone, logit_bias=asked.find_bias())),
        *((name, grammar) for name in names if getattr(asked, name) is not None),
    ):
        try:
            engine.prepare(prompt, max_output_len=1)
        except SpecDecError:
            return name
    if re.search(r"asks for \d+ more", error.message):
        return (
            "max_completion_tokens" if getattr(asked, "max_completion_tokens", 0) else "max_tokens"
        )
    return None


def check_model(given: str | None, name: str) -> None:
    """Raise BadRequest for another model than the one that is served."""
    if given is not None and given != name:
        raise BadRequest(
            f"the model {shorten(given)} does not exist; this server has {name!r}", "model", 404,
            "model_not_found",
        )  # fmt: skip


def count_prompt_tokens(requests: Sequence[Request], num_choices: int) -> int:
    """Tokens of the prompts, each counted once however many choices it has."""
    return sum(len(request.input_ids) for request in requests[::num_choices])
