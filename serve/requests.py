"""Requests of a body: its prompts with their settings, tokenized and checked."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from specdec import Engine, Prompt, PromptError, SpecDecError
from specdec.decode.requests import Request
from specdec.errors import ExcessLength, summarize
from specdec.text.call_formats import ChatFormats
from specdec.text.call_messages import write_messages
from specdec.text.prompts import ONLY, read_bias
from specdec.text.text_stream import read_stream

from .conversation import list_unread_fields, read_messages
from .grammars import find_grammar
from .protocol import BadRequest
from .schema import (
    PROMPT,
    CompletionBody,
    ConversationBody,
    GenerationBody,
    is_prompt,
    is_text,
)
from .tools import Calling, GrammarWriter

MAX_CHOICES = 128  # of one HTTP request, over all its prompts
EXCESS_CODE = "context_length_exceeded"  # OpenAI's, of a prompt that is too long
RANDOM_SEED = -1  # as vLLM, llama.cpp and Ollama take it


class BodyInputs(NamedTuple):
    """Prompts of a body, and the settings that each endpoint names in its own way.

    prompts: of each Prompt, the fields of its input. settings: fields that all prompts share.
    limit_param: the parameter that limits the output. ignored: paths of parameters without effect.
    """

    prompts: list[dict[str, Any]]
    settings: dict[str, Any]
    limit_param: str
    ignored: list[str]


def make_requests(
    engine: Engine, body: GenerationBody, formats: ChatFormats, calling: Calling | None = None
) -> tuple[list[Request], list[str]]:
    """Tokenize and check a body's prompts; return num_choices requests of each, and ignored paths.

    The seeds of all choices are consecutive. formats: how the model writes reasoning and calls.
    calling: a chat's tools. BadRequest where the engine cannot take the requests.
    """
    _check_choices(body)
    ignored = body.list_ignored()
    if calling is not None:
        body, unused_stops = _drop_stops(body, calling)
        ignored += unused_stops
    if body.return_origins and not engine.tells_origins:
        raise BadRequest("this engine does not tell how its tokens came", "return_origins")
    inputs = _read_inputs(body, engine, formats, calling)
    ignored += inputs.ignored
    _check_number(len(inputs.prompts), body.num_choices)
    has_spaces = body.spaces_between_special_tokens is not None
    if has_spaces and getattr(engine.tokenizer, "is_fast", False):
        ignored.append("spaces_between_special_tokens")
    param, grammar, ignored_keywords = find_grammar(body)
    ignored += ignored_keywords
    seed = secrets.randbits(63) if body.seed in (None, RANDOM_SEED) else body.seed
    settings = _read_settings(body, engine, inputs.settings)
    settings |= {"seed": seed % 2**64, "grammar": grammar}
    # The parameters by the fields of a Prompt, where their names differ.
    names = {
        "text": body.source, "token_ids": body.source, "keep_trees": "return_trees",
        "max_output_len": inputs.limit_param, "grammar": param or "grammar", **body.paths,
    }  # fmt: skip
    writer = GrammarWriter(engine.tokenizer)
    requests: list[Request] = []
    for i, prompt in enumerate(inputs.prompts):
        index = i if len(inputs.prompts) > 1 else ONLY
        with _name_parameters(body.source, names):
            request = _prepare(
                engine, index=index, cuts_output=body.clamps_output, **prompt, **settings
            )
            full_grammar = writer.write(
                calling, formats, grammar, request.input_text, request.continued_text
            )
            ignored += writer.left_out
            if full_grammar is not grammar:
                names["grammar"] = "tools" if calling is not None else names["grammar"]
                request = _add_grammar(engine, request, settings, full_grammar)
        requests += _repeat(request, body.num_choices, len(requests), seed)
    return requests, ignored


def _add_grammar(
    engine: Engine, request: Request, settings: Mapping[str, Any], grammar: Any
) -> Request:
    """Return a request with a grammar; its prompt is not tokenized again."""
    fields = dict(settings) | {
        "token_ids": request.input_ids, "add_special_tokens": None, "grammar": grammar,
        "max_output_len": request.max_output_len,
    }  # fmt: skip
    shaped = _prepare(engine, index=request.index, **fields)
    return dataclasses.replace(
        shaped, input_text=request.input_text, continued_text=request.continued_text
    )


def _repeat(request: Request, num_choices: int, first_index: int, seed: int) -> Iterator[Request]:
    """Yield the requests of a prompt's choices, whose seeds are consecutive."""
    for index in range(first_index, first_index + num_choices):
        sampling = dataclasses.replace(request.sampling, seed=(seed + index) % 2**64)
        yield dataclasses.replace(request, index=index, sampling=sampling)


def _check_choices(body: GenerationBody) -> None:
    """Raise BadRequest for contradicting numbers of choices, or parameters that need a stream."""
    if body.best_of is not None and body.best_of < body.num_returned:
        raise BadRequest(f"best_of is {body.best_of}, and n {body.num_returned}", "best_of")
    for name, is_given, is_for_streams in (
        ("stream_options", body.stream_options is not None, True),
        ("return_trees", body.return_trees, True),
        ("prompt_logprobs", body.prompt_logprobs is not None, False),
        ("best_of", body.num_choices > body.num_returned, False),
    ):
        if is_given and bool(body.stream) != is_for_streams:
            streams = "stream" if is_for_streams else "what is no stream"
            raise BadRequest(f"{name} is only for {streams}", name)


def _check_number(num_prompts: int, num_choices: int) -> None:
    """Raise BadRequest for more choices than one HTTP request may ask for."""
    if num_prompts * num_choices > MAX_CHOICES:
        raise BadRequest(
            f"{num_prompts} prompts with n {num_choices} are {num_prompts * num_choices} choices,"
            f" at most {MAX_CHOICES} are allowed",
            "n",
        )


def _drop_stops(body: GenerationBody, calling: Calling) -> tuple[GenerationBody, list[str]]:
    """Return a body without stops that would end a required call early, and their parameters.

    Raises BadRequest for a grammar of calls that no token may end.
    """
    if body.ignore_eos and (calling.is_forced or calling.is_strict):
        reason = "ignore_eos has no place beside calls that are required, strict or not parallel"
        raise BadRequest(reason, "ignore_eos")
    if not calling.is_forced:
        return body, []
    unused_stops = [name for name in body.stop_names if getattr(body, name)]
    no_stops: dict[str, Any] = dict.fromkeys(body.stop_names)
    return dataclasses.replace(body, **no_stops), unused_stops


def _read_inputs(
    body: GenerationBody, engine: Engine, formats: ChatFormats, calling: Calling | None
) -> BodyInputs:
    """Return a body's prompts, and the settings that its endpoint names in its own way."""
    if isinstance(body, ConversationBody):
        return _read_conversation(body, engine, formats, calling)
    assert isinstance(body, CompletionBody)
    limit = body.default_limit if body.max_tokens is None else body.max_tokens
    num_top = body.num_top_logprobs
    limit_param = body.paths.get("max_tokens", "max_tokens")
    if limit == 0 and not body.echo:
        raise BadRequest("max_tokens 0 asks for nothing without echo", "max_tokens")
    prompts = [body.prompt] if is_prompt(body.prompt) else body.prompt
    settings = {
        # The prompt's own pass makes a token.
        "max_output_len": None if limit < 0 else limit or 1,
        "logprobs": num_top, "prompt_logprobs": body.is_echoed and num_top is not None,
    }  # fmt: skip
    inputs = [{"text" if is_text(prompt) else "token_ids": prompt} for prompt in prompts]
    return BodyInputs(inputs, settings, limit_param, [])


def _read_conversation(
    body: ConversationBody, engine: Engine, formats: ChatFormats, calling: Calling | None
) -> BodyInputs:
    """Return the prompt of a conversation, and the settings that its endpoint names."""
    limit, limit_param = _read_limit(body)
    if body.num_top_logprobs is None and body.top_logprobs:
        raise BadRequest("top_logprobs needs logprobs", "top_logprobs")
    messages, ignored = read_messages(body)
    template = str(engine.tokenizer.chat_template or "")
    variables = {name: value for name, (_, value) in body.list_variables().items()}
    tools = calling.tools if calling is not None else ()
    prompt: dict[str, Any] = {
        "messages": write_messages(messages, template, tools, formats),
        **body.list_template_settings(),
        "chat_template_kwargs": variables,
    }
    paths = {name: path for name, (path, _) in body.list_variables().items()}
    ignored += list_unread_fields(prompt, engine.tokenizer, body.source, paths)
    if tools and formats.reads_tools and not formats.use.is_field:
        variables[formats.use.tools_variable] = list(tools)
    settings = {"max_output_len": limit, "logprobs": body.num_top_logprobs}
    return BodyInputs([prompt], settings, limit_param, ignored)


def _read_limit(body: ConversationBody) -> tuple[int | None, str]:
    """Return the limit of an answer's tokens, None for none, and the parameter that says it."""
    limit, max_tokens = getattr(body, body.limit_name), body.max_tokens
    if limit is None or body.limit_name == "max_tokens":
        limit_param = body.paths.get("max_tokens", "max_tokens")
        is_unlimited = max_tokens is None or max_tokens < 0
        return None if is_unlimited else max_tokens, limit_param
    if max_tokens not in (None, limit):
        reason = f"max_tokens and {body.limit_name} are both given, and differ"
        raise BadRequest(reason, body.limit_name)
    return limit, body.limit_name


def _read_settings(
    body: GenerationBody, engine: Engine, endpoint_settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that all choices share, by the field of a Prompt."""
    settings = {"temperature": 1.0} | body.list_given(PROMPT) | {
        "logit_bias": read_bias(body.logit_bias or {}) or None,
        "stop": body.stop_words,
        "top_k": 0 if body.top_k == -1 else body.top_k,  # vLLM writes -1 for all tokens
        "truncate_prompt_tokens": _limit_prompt(body, engine, endpoint_settings["max_output_len"]),
        "end_ids": () if body.ignore_eos else None,
        "keep_trees": body.return_trees,
        **endpoint_settings,
    }  # fmt: skip
    if body.prompt_logprobs is not None:
        settings["prompt_logprobs"] = True
        settings["logprobs"] = max(settings["logprobs"] or 0, body.prompt_logprobs)
    elif body.num_choices > body.num_returned and settings["logprobs"] is None:
        settings["logprobs"] = 0  # best_of ranks by them
    return settings


def _limit_prompt(body: GenerationBody, engine: Engine, output_limit: int | None) -> int | None:
    """Return how many of a prompt's last tokens are kept, None for all."""
    if body.truncate_prompt_tokens != -1:
        return body.truncate_prompt_tokens
    room = engine.max_seq_len - (output_limit or 1)  # -1 is vLLM's: as many as fit
    if body.clamps_output and room < 1:
        room = engine.max_seq_len - 1
    return max(1, min(engine.max_input_len, room))


def _prepare(engine: Engine, *, index: int, cuts_output: bool = False, **fields: Any) -> Request:
    """Return the request of a Prompt's fields. cuts_output: as `Engine.prepare` takes it."""
    prompt = Prompt(**fields)
    return engine.prepare(prompt, max_output_len=None, index=index, cuts_output=cuts_output)


@contextlib.contextmanager
def _name_parameters(source: str, names: Mapping[str, str]) -> Iterator[None]:
    """Raise BadRequest by the names of the parameters for the error of a prompt.

    source: the parameter of the input. names: parameters by the fields of a Prompt.
    """
    try:
        yield
    except SpecDecError as error:
        raise _explain(error, source, names) from None


def _explain(error: SpecDecError, source: str, names: Mapping[str, str]) -> BadRequest:
    """Return the error of a prompt, by the names of the parameters."""
    field = error.field if isinstance(error, PromptError) else None
    param = source if field is None else names.get(field, field)
    if isinstance(error, PromptError) and error.reason is not None:
        return BadRequest(f"{param} {error.reason}", param)
    if isinstance(error, PromptError) and error.excess is not None:
        message = f"{_describe_excess(error.excess)}: {summarize(error)}"
        return BadRequest(message, param, code=EXCESS_CODE, excess=error.excess)
    return BadRequest(summarize(error), param)


def _describe_excess(excess: ExcessLength) -> str:
    """Return OpenAI's words for a prompt that is too long, by which clients recognize the error."""
    total = excess.num_prompt_tokens + excess.num_output_tokens
    return (
        f"This model's maximum context length is {excess.max_tokens} tokens. However, you"
        f" requested {total} tokens ({excess.num_prompt_tokens} in the prompt,"
        f" {excess.num_output_tokens} in the completion)"
    )


def find_tokens(
    engine: Engine, body: ConversationBody, formats: ChatFormats, calling: Calling | None
) -> list[int]:
    """Return the tokens of a conversation, which may be more than the engine takes."""
    inputs = _read_conversation(body, engine, formats, calling)
    names = {"messages": body.source, "text": body.source, **body.paths}
    with _name_parameters(body.source, names):
        fields = {
            **inputs.prompts[0], "add_special_tokens": body.add_special_tokens,
            "truncate_prompt_tokens": _limit_prompt(body, engine, None),
        }  # fmt: skip
        return engine.encode(Prompt(**fields))


def find_starts(engine: Engine, request: Request) -> list[int]:
    """Return the positions in a prompt's text at which its tokens begin."""
    stream = read_stream(engine.tokenizer, request.input_ids)
    # The text of a prompt of ids has special tokens as well.
    prefix_length = max(0, request.input_text.find(stream.finish()))
    return [0, *(prefix_length + end for end in stream.ends[:-1])]
