"""Bodies of HTTP requests: a frozen dataclass for each endpoint, read from JSON and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from specdec.errors import shorten
from specdec.text.prompts import BOOL, CHECKS, OBJECT, Check, read_bias

from .foreign import IGNORED
from .protocol import refuse

MAX_STOPS = 16
MAX_STOP_LETTERS = 1000
MAX_BIASES = MAX_CHOICE = MAX_TOOLS = 1024
PROMPT = "prompt"  # group of settings: fields of a Prompt
TEMPLATE = "template"  # group of settings: variables of the chat template
Message = dict[str, Any]
Turns = list[tuple[str, Message]]  # messages, each after its path in the body


def is_list(value: Any, is_item: Callable[[Any], bool]) -> bool:
    """Return whether a value is a list that is not empty and has only such items."""
    return isinstance(value, list) and bool(value) and all(map(is_item, value))


def is_text(value: Any) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def is_object(value: Any) -> bool:
    """Return whether a value is a JSON object."""
    return isinstance(value, dict)


def is_prompt(value: Any) -> bool:
    """Return whether a value is one prompt of a completion: a text, or token ids."""
    return is_text(value) or (bool(value) and CHECKS["token_ids"][0](value))


def _is_prompts(value: Any) -> bool:
    return is_prompt(value) or (is_list(value, is_prompt) and len(set(map(type, value))) == 1)


def _is_stop(value: Any) -> bool:
    words = [value] if is_text(value) else value
    return (
        isinstance(words, list)
        and len(words) <= MAX_STOPS
        and all(is_text(word) and len(word) <= MAX_STOP_LETTERS for word in words)
    )


def _is_bias(value: Any) -> bool:
    is_small = is_object(value) and len(value) <= MAX_BIASES
    return is_small and CHECKS["logit_bias"][0](read_bias(value))


def allow_number(number: int, check: Check) -> Check:
    """Return a check that also allows a number which its message does not mention."""
    return lambda v: (type(v) is int and v == number) or check[0](v), check[1]


TEXT = CHECKS["text"]
FULL_TEXT: Check = (lambda v: is_text(v) and v != "", "a text that is not empty")
LIMIT, TOP = CHECKS["max_output_len"], CHECKS["logprobs"]
SCHEMA: Check = (lambda v: isinstance(v, (dict, str)), "a JSON schema")
CHOICES: Check = (
    lambda v: is_list(v, FULL_TEXT[0]) and len(v) <= MAX_CHOICE,
    f"a list of at most {MAX_CHOICE} texts, none empty",
)
MESSAGES: Check = (lambda v: is_list(v, is_object), "a list of messages")
UNCHECKED: Check = (lambda v: True, "")  # checked elsewhere
FORMAT: Check = (
    lambda v: v in ("text", "json_object", "json_schema"), "text, json_object or json_schema"
)  # fmt: skip
PROMPTS: Check = (
    _is_prompts, "a text, a list of texts, the ids of tokens, or a list of lists of these"
)  # fmt: skip
BIAS: Check = (_is_bias, f"{CHECKS['logit_bias'][1]}, at most {MAX_BIASES}")
STOP: Check = (
    _is_stop,
    f"a text of at most {MAX_STOP_LETTERS} characters, or a list of at most {MAX_STOPS} of them",
)
THINKING = ("enabled", "disabled", "adaptive", "between_tools")
THINKING_TYPE: Check = (lambda v: v in THINKING, f"one of {', '.join(THINKING)}")
SEED: Check = (
    lambda v: type(v) is int and -(2**63) <= v < 2**64, "a whole number from -2**63 to 2**64 - 1"
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters:
    """JSON object with checked values; a missing parameter, or one that is null, is None.

    ignored: paths of the object's parameters without effect. paths: those of the parameters that
    have another name or place in the body than here.
    """

    ignored_names: ClassVar[Sequence[str]] = ()  # parameters without effect
    ignores_others: ClassVar[bool] = False  # unknown parameters have no effect
    not_offered: ClassVar[frozenset[str]] = frozenset()  # fields that clients cannot set

    ignored: tuple[str, ...] = ()
    paths: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def list_given(self, group: str | None = None) -> dict[str, Any]:
        """Return the parameters of the body by name; group: only the settings of this group."""
        names = (
            field.name for field in dataclasses.fields(self)
            if "rule" in field.metadata and group in (None, field.metadata["group"])
        )  # fmt: skip
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {
            name: value.list_given() if isinstance(value, Parameters) else value
            for name, value in values.items()
        }


Rule = Check | type[Parameters]


def _ends_in_text(turns: Turns) -> bool:
    """Return whether a text of the assistant's, and no call of a tool, ends a conversation."""
    _, last_message = turns[-1]
    is_text_of_assistant = last_message.get("role") == "assistant" and last_message.get("content")
    return bool(is_text_of_assistant and not last_message.get("tool_calls"))


def parameter(rule: Rule, group: str | None = None) -> Any:
    """Declare a parameter, its check or the class of its object, and its group of settings."""
    return dataclasses.field(default=None, metadata={"rule": rule, "group": group})


def _prompt_setting(name: str) -> Any:
    return parameter(CHECKS[name], PROMPT)


def _template_setting(name: str) -> Any:
    return parameter(CHECKS[name], TEMPLATE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamOptions(Parameters):
    """Options of a stream."""

    ignores_others = True

    include_usage: bool | None = parameter(BOOL)
    continuous_usage_stats: bool | None = parameter(BOOL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thinking(Parameters):
    """Switch of the model's reasoning, as Anthropic's and DeepSeek's clients write it."""

    ignored_names = ("budget_tokens", "display")

    type: str | None = parameter(THINKING_TYPE)

    @property
    def is_on(self) -> bool | None:
        return None if self.type is None else self.type != "disabled"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reasoning(Parameters):
    """Options of a chat's reasoning, as OpenRouter's clients write them."""

    ignored_names = ("summary",)

    effort: str | None = parameter(TEXT)
    enabled: bool | None = parameter(BOOL)
    exclude: bool | None = parameter(BOOL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedSchema(Parameters):
    """JSON schema of an answer, with its name."""

    ignores_others = True

    name: str | None = parameter(TEXT)
    description: str | None = parameter(TEXT)
    schema: Mapping[str, Any] | None = parameter(OBJECT)
    strict: bool | None = parameter(BOOL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseFormat(Parameters):
    """Format of an answer, as chats and completions ask for it."""

    type: str | None = parameter(FORMAT)
    json_schema: NamedSchema | None = parameter(NamedSchema)
    schema: Mapping[str, Any] | None = parameter(OBJECT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFormat(NamedSchema):
    """Format of an answer, as responses ask for it: the schema stands beside the type."""

    type: str | None = parameter(FORMAT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputs(Parameters):
    """Grammar of an answer, as vLLM's clients ask for it."""

    ignored_names = ("disable_fallback",)

    json: Mapping[str, Any] | str | None = parameter(SCHEMA)
    regex: str | None = parameter(FULL_TEXT)
    choice: list[str] | None = parameter(CHOICES)
    grammar: str | None = parameter(FULL_TEXT)
    json_object: bool | None = parameter(BOOL)
    disable_any_whitespace: bool | None = parameter(BOOL)
    whitespace_pattern: str | None = parameter(FULL_TEXT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Body(Parameters):
    """Body of a request."""

    source: ClassVar[str] = ""  # the required parameter that holds the input
    has_options: ClassVar[bool] = False  # parameters may also stand in an object, `options`

    model: str | None = parameter(TEXT)

    @property
    def asks_for_load(self) -> bool:
        """True where a body asks for no text, only that the model is ready."""
        return False

    @classmethod
    def choose(cls, document: Mapping[str, Any]) -> type[Body]:
        """Return the class of a body, which may depend on what it holds."""
        return cls

    def list_ignored(self) -> list[str]:
        """Return the paths of the body's parameters and values without effect."""
        return list(self.ignored)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationBody(Body):
    """Body that asks for new tokens: the parameters that all such endpoints share."""

    ignored_names: ClassVar[Sequence[str]] = IGNORED
    has_options = True
    clamps_output: ClassVar[bool] = False  # to the room after the prompt; else a 400
    stop_names: ClassVar[Sequence[str]] = ("stop", "stop_token_ids")

    temperature: float | None = _prompt_setting("temperature")
    top_p: float | None = _prompt_setting("top_p")
    min_p: float | None = _prompt_setting("min_p")
    presence_penalty: float | None = _prompt_setting("presence_penalty")
    frequency_penalty: float | None = _prompt_setting("frequency_penalty")
    speculation: bool | Mapping[str, Any] | None = _prompt_setting("speculation")
    repetition_penalty: float | None = _prompt_setting("repetition_penalty")
    add_special_tokens: bool | None = _prompt_setting("add_special_tokens")
    stop_token_ids: list[int] | None = _prompt_setting("stop_token_ids")
    include_stop_str_in_output: bool | None = _prompt_setting("include_stop_str_in_output")
    skip_special_tokens: bool | None = _prompt_setting("skip_special_tokens")
    spaces_between_special_tokens: bool | None = _prompt_setting("spaces_between_special_tokens")
    min_tokens: int | None = _prompt_setting("min_tokens")
    bad_words: list[str] | None = _prompt_setting("bad_words")
    allowed_token_ids: list[int] | None = _prompt_setting("allowed_token_ids")
    max_tokens: int | None = parameter(allow_number(-1, LIMIT))  # -1: all that there is room for
    top_k: int | None = parameter(allow_number(-1, CHECKS["top_k"]))  # -1 is vLLM's: all tokens
    truncate_prompt_tokens: int | None = parameter(
        allow_number(-1, CHECKS["truncate_prompt_tokens"])  # -1 is vLLM's: all that fit
    )
    logit_bias: Mapping[str, float] | None = parameter(BIAS)
    stop: str | list[str] | None = parameter(STOP)
    n: int | None = parameter(CHECKS["best_of"])
    best_of: int | None = parameter(CHECKS["best_of"])
    prompt_logprobs: int | None = parameter(TOP)
    seed: int | None = parameter(SEED)
    stream: bool | None = parameter(BOOL)
    stream_options: StreamOptions | None = parameter(StreamOptions)
    ignore_eos: bool | None = parameter(BOOL)
    response_format: ResponseFormat | None = parameter(ResponseFormat)
    guided_json: Mapping[str, Any] | str | None = parameter(SCHEMA)
    json_schema: Mapping[str, Any] | str | None = parameter(SCHEMA)
    guided_regex: str | None = parameter(FULL_TEXT)
    guided_grammar: str | None = parameter(FULL_TEXT)
    grammar: str | None = parameter(FULL_TEXT)
    guided_choice: list[str] | None = parameter(CHOICES)
    guided_whitespace_pattern: str | None = parameter(FULL_TEXT)
    structured_outputs: StructuredOutputs | None = parameter(StructuredOutputs)
    return_token_ids: bool | None = parameter(BOOL)  # vLLM's extension: ids of prompt and output
    return_origins: bool | None = parameter(BOOL)  # for our page: origin of each token
    return_trees: bool | None = parameter(BOOL)  # for our page: draft tree of each step

    def list_ignored(self) -> list[str]:
        options = self.stream_options or StreamOptions()
        if not options.continuous_usage_stats or options.include_usage:
            return super().list_ignored()
        return [*super().list_ignored(), "stream_options.continuous_usage_stats"]

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of likeliest tokens that an answer lists; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def is_echoed(self) -> bool:
        """True where an answer's text begins with the prompt."""
        return False

    @property
    def hides_reasoning(self) -> bool:
        """True where an answer leaves out the model's reasoning."""
        return False

    @property
    def output_format(self) -> tuple[str, ResponseFormat | TextFormat | None]:
        """Path of the parameter with the answer's format, and that format."""
        return "response_format", self.response_format

    @property
    def stop_words(self) -> list[str]:
        """Texts that end an output."""
        words = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [word for word in words if word]

    @property
    def num_returned(self) -> int:
        """Number of outputs of each prompt that an answer returns."""
        return self.n or 1

    @property
    def num_choices(self) -> int:
        """Number of outputs of each prompt that are generated."""
        return max(self.num_returned, self.best_of or 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionBody(GenerationBody):
    """Body of /v1/completions. default_limit: tokens of an output, -1 for all the room."""

    source = "prompt"
    default_limit: ClassVar[int] = 16

    prompt: Any = parameter(PROMPTS)
    max_tokens: int | None = parameter(allow_number(-1, allow_number(0, LIMIT)))
    echo: bool | None = parameter(BOOL)
    logprobs: int | None = parameter(TOP)

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def is_echoed(self) -> bool:
        return bool(self.echo)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversationBody(GenerationBody):
    """Body with a conversation, and perhaps tools.

    has_flat_tools: whether a tool's function stands in the tool itself. schema_key: the key of a
    function's schema. limit_name: the parameter that limits the answer's tokens besides max_tokens.
    continues_last_text: whether an answer goes on with a text of the assistant's that ends the
    conversation, where the body does not say.
    """

    continues_last_text: ClassVar[bool] = False
    has_flat_tools: ClassVar[bool] = False
    schema_key: ClassVar[str] = "parameters"
    limit_name: ClassVar[str]

    top_logprobs: int | None = parameter(TOP)
    add_generation_prompt: bool | None = _template_setting("add_generation_prompt")
    continue_final_message: bool | None = _template_setting("continue_final_message")
    chat_template_kwargs: Mapping[str, Any] | None = _template_setting("chat_template_kwargs")
    enable_thinking: bool | None = parameter(BOOL)
    tools: Any = parameter(UNCHECKED)
    tool_choice: Any = parameter(UNCHECKED)
    parallel_tool_calls: bool | None = parameter(BOOL)

    @property
    def effort(self) -> tuple[str, str | None]:
        """Path of the reasoning effort, a variable of the chat template, and that effort."""
        raise NotImplementedError

    @property
    def thinking_switch(self) -> tuple[str, bool | None]:
        """Path of the parameter that turns reasoning on or off, and what it says."""
        return self.paths.get("enable_thinking", "enable_thinking"), self.enable_thinking

    def list_variables(self) -> dict[str, tuple[str, Any]]:
        """Return the chat template's variables by name, each with its path in the body."""
        variables: dict[str, tuple[str, Any]] = {
            name: (f"chat_template_kwargs.{name[:100]}", value)
            for name, value in (self.chat_template_kwargs or {}).items()
        }
        for name, path, value in self.list_switches():
            other_path, other_value = variables.setdefault(name, (path, value))
            if other_value != value:
                raise refuse(
                    path, f"sets the template's {name} to {shorten(value)}, and {other_path} to"
                    f" {shorten(other_value)}: leave one out",
                )  # fmt: skip
        return variables

    def list_switches(self) -> list[tuple[str, str, Any]]:
        """Return parameters that are variables of the template: variable, path and value."""
        named = {"reasoning_effort": self.effort, "enable_thinking": self.thinking_switch}
        return [(name, *pair) for name, pair in named.items() if pair[1] is not None]

    def list_template_settings(self) -> dict[str, Any]:
        """Return the settings of the chat template, by the field of a Prompt."""
        settings = self.list_given(TEMPLATE)
        if self.continues_last_text and _ends_in_text(self.list_turns()):
            return {"continue_final_message": True, **settings}
        return settings

    def list_tools(self) -> list[tuple[str, Any]]:
        """Return the tools that the model may call, each after its path in the body."""
        if self.tools is None:
            return []
        if not isinstance(self.tools, list) or len(self.tools) > MAX_TOOLS:
            reason = f"is {shorten(self.tools)}, not a list of at most {MAX_TOOLS}"
            raise refuse("tools", reason)
        return [(f"tools.{i}", tool) for i, tool in enumerate(self.tools)]

    def choose_tools(self) -> Any:
        """Return the tool_choice, as chats or responses write it."""
        return self.tool_choice

    @property
    def is_single_call(self) -> bool:
        """True where an answer may have one call at most."""
        return self.parallel_tool_calls is False

    def list_turns(self) -> Turns:
        """Return the messages with their paths; BadRequest for anything but messages."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatBody(ConversationBody):
    """Body of /v1/chat/completions."""

    source = "messages"
    limit_name = "max_completion_tokens"

    messages: list[Message] | None = parameter(MESSAGES)
    max_completion_tokens: int | None = parameter(LIMIT)
    logprobs: bool | None = parameter(BOOL)
    reasoning_effort: str | None = parameter(TEXT)
    reasoning: Reasoning | None = parameter(Reasoning)
    include_reasoning: bool | None = parameter(BOOL)
    thinking: Thinking | None = parameter(Thinking)

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def effort(self) -> tuple[str, str | None]:
        return "reasoning_effort", self.reasoning_effort

    def list_switches(self) -> list[tuple[str, str, Any]]:
        reasoning, thinking = self.reasoning or Reasoning(), self.thinking or Thinking()
        foreign = [
            ("reasoning_effort", "reasoning.effort", reasoning.effort),
            ("enable_thinking", "reasoning.enabled", reasoning.enabled),
            ("enable_thinking", "thinking.type", thinking.is_on),
        ]
        return super().list_switches() + [row for row in foreign if row[2] is not None]

    @property
    def hides_reasoning(self) -> bool:
        is_excluded = None if self.reasoning is None else self.reasoning.exclude
        if is_excluded is not None and is_excluded is self.include_reasoning:
            raise refuse("include_reasoning", f"is {is_excluded}, and reasoning.exclude too")
        return bool(is_excluded) or self.include_reasoning is False

    def list_turns(self) -> Turns:
        return [(f"messages.{i}", message) for i, message in enumerate(self.messages or ())]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizeBody(Body):
    """Body of /tokenize: a text or a conversation."""

    ignored_names: ClassVar[Sequence[str]] = IGNORED

    prompt: str | None = parameter(TEXT)
    messages: list[Message] | None = parameter(MESSAGES)
    add_special_tokens: bool | None = _prompt_setting("add_special_tokens")
    add_generation_prompt: bool | None = _template_setting("add_generation_prompt")
    continue_final_message: bool | None = _template_setting("continue_final_message")
    chat_template_kwargs: Mapping[str, Any] | None = _template_setting("chat_template_kwargs")
    tools: Any = parameter(UNCHECKED)

    def make_chat(self) -> ChatBody:
        """Return the body of a chat with this conversation."""
        settings = self.list_given(PROMPT) | self.list_given(TEMPLATE)
        return ChatBody(messages=self.messages, tools=self.tools, max_tokens=1, **settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetokenizeBody(Body):
    """Body of /detokenize: token ids."""

    source = "tokens"

    tokens: list[int] | None = parameter(CHECKS["token_ids"])
