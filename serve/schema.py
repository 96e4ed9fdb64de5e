"""What clients may ask for: OpenAI's parameters, checked, and the prompts that they mean."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdec import Engine, Prompt, SpecDecError
from specdec.decode.prompts import MAX_COUNT, MAX_LOGPROBS
from specdec.decode.requests import Request
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
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
TokenName = Annotated[str, Field(pattern=r"^\d{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Token = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class BadRequest(Exception):
    """The request cannot be served as it is; status is 4xx."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


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
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    logit_bias: Annotated[dict[TokenName, Bias], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: Annotated[str, Field(min_length=1)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None
    user: str | None = None  # of no effect, as with OpenAI
    # Ours, for the page: how each token came, what each step verified, and nothing drafted.
    return_origins: bool = False
    return_trees: bool = False
    speculation: bool = True

    @property
    def num_top(self) -> int | None:
        """Likeliest tokens to tell of at each place; None tells no log-probabilities."""
        raise NotImplementedError

    def find_sources(self) -> list[dict[str, Any]]:
        """The prompts, each as the one argument of a Prompt."""
        raise NotImplementedError

    def find_grammar(self) -> dict[str, Any] | None:
        """What the output is to keep to, as a Prompt has it."""
        form = self.response_format
        found: dict[str, dict[str, Any]] = {}
        if form is not None and form.type == "json_object":
            found["response_format"] = {"json_object": True}
        elif form is not None and form.type == "json_schema":
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
            logit_bias=(
                None if self.logit_bias is None else {int(k): v for k, v in self.logit_bias.items()}
            ),
            logprobs=self.num_top,
            speculation=self.speculation,
            keep_trees=self.return_trees,
            grammar=self.find_grammar(),
        )


class CompletionAsked(Asked):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[
            list[Annotated[list[Token], Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_CHOICES),
        ]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    def find_sources(self) -> list[dict[str, Any]]:
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            prompt = [prompt]
        return [{"text" if isinstance(p, str) else "token_ids": p} for p in prompt]


class TextPart(Model):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A turn; what else it has is the chat template's to read."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart] | None = None

    def to_turn(self) -> dict[str, Any]:
        turn = self.model_dump()
        if isinstance(self.content, list):
            turn["content"] = "".join(part.text for part in self.content)
        return turn


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
        return [{"messages": [message.to_turn() for message in self.messages]}]


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
        if value is not None and value not in NEUTRAL[name]:
            raise BadRequest(f"{name} is not supported", name, code="unsupported_parameter")
        body = {key: kept for key, kept in body.items() if key != name}
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explain(error, body) from None


def _explain(error: ValidationError, body: Mapping[str, Any]) -> BadRequest:
    """The first of what is wrong, as one sentence."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    names = [str(one["loc"][0]) for one in found if one["loc"]]
    if not names:
        return BadRequest(f"the body is wrong: {found[0]['msg']}")
    name = names[0]
    if name not in body:
        return BadRequest(f"{name} is missing", name)
    reasons = dict.fromkeys(one["msg"] for one in found if one["loc"] and one["loc"][0] == name)
    where = next(one["loc"] for one in found if one["loc"])
    inner = ".".join(str(part) for part in where if isinstance(part, int) or str(part) in str(body))
    return BadRequest(
        f"{inner[:100] or name} is {shorten(body[name])}: {'; '.join(reasons)}"[:500], name
    )


def make_requests(engine: Engine, asked: Asked) -> list[Request]:
    """Tokenize and check; n requests of each prompt, whose seeds follow one another.

    BadRequest where the engine cannot take them.
    """
    if asked.stream_options is not None and not asked.stream:
        raise BadRequest("stream_options is only for stream", "stream_options")
    where, limit = "prompt", asked.max_tokens
    if isinstance(asked, ChatAsked):
        where = "messages"
        limit = asked.max_completion_tokens or asked.max_tokens
        if asked.top_logprobs is not None and not asked.logprobs:
            raise BadRequest("top_logprobs needs logprobs", "top_logprobs")
    elif isinstance(asked, CompletionAsked):
        limit = limit or 16
        if asked.echo and asked.logprobs is not None:
            raise BadRequest("echo with logprobs is not supported", "echo")
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
        try:
            prompt = asked.make_prompt(source, seed)
            request = engine.prepare(prompt, max_output_len=limit or 1)
            if limit is None:  # all that there is room for
                ids = request.input_ids
                room = max(1, engine.max_seq_len - len(ids))
                own = dataclasses.replace(prompt, messages=None, token_ids=ids)
                request = engine.prepare(own, max_output_len=room)
        except SpecDecError as error:
            raise BadRequest(summarize(error), where) from None
        for turn in range(count):
            own_seed = (seed + turn) % 2**64
            sampling = dataclasses.replace(request.sampling, seed=own_seed)
            requests.append(dataclasses.replace(request, index=len(requests), sampling=sampling))
    return requests


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
