"""What clients may ask for: OpenAI's parameters, checked, and the requests that they mean."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from specdec import Engine, Prompt, PromptError, SpecDecError
from specdec.decode.requests import Request
from specdec.errors import shorten, suggest, summarize
from specdec.files.reading import parse_json
from specdec.text.chat import ChatError, join_parts, wrap_calls
from specdec.text.encoding import render_chat
from specdec.text.grammar import SPACING, space_schema, write_choice
from specdec.text.prompts import BOOL, CHECKS, OBJECT, ONLY, Check, read_bias
from specdec.text.schemas import fit_schema
from specdec.text.text_stream import read_stream

from .formats import ChatFormats
from .protocol import BadRequest, refuse
from .tools import Calling, GrammarWriter, write_messages

MAX_CHOICES = 128  # of one HTTP request, over all its prompts
MAX_STOPS = 16
MAX_BIASES = MAX_CHOICE = 1024
MAX_FIELDS = 64  # of messages and for the template; it is rendered once for each
# What cannot change the text, and does nothing here. OpenAI's, vLLM's, and llama.cpp's.
IDLE = (
    "store", "metadata", "service_tier", "user", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "verbosity", "prediction", "request_id",
    "cache_salt", "priority", "cache_prompt", "id_slot", "n_keep", "timings_per_token",
    "return_progress",
)  # fmt: skip
# Parameters of theirs that are not offered, with the values that ask for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "web_search_options", "chat_template"), ()),
    **dict.fromkeys(("mm_processor_kwargs", "kv_transfer_params", "vllm_xargs"), ({},)),
    **dict.fromkeys(("tools", "functions", "documents", "logits_processors"), ([],)),
    **dict.fromkeys(("length_penalty", "typical_p"), (1, 1.0)),
    **dict.fromkeys(("mirostat", "xtc_probability", "dry_multiplier"), (0, 0.0)),
    **dict.fromkeys(("use_beam_search", "early_stopping"), (False,)),
    **dict.fromkeys(("echo", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none",)),
    "suffix": ("",), "parallel_tool_calls": (True, False), "modalities": (["text"],),
}  # fmt: skip
# Kinds of grammars by the parameters that ask for them, vLLM's and llama.cpp's; and by the keys of
# vLLM's `structured_outputs`.
GUIDED = {
    "guided_json": "json_schema", "json_schema": "json_schema", "guided_regex": "regex",
    "guided_choice": "choice", "guided_grammar": "lark", "grammar": "lark",
}  # fmt: skip
STRUCTURED = {
    "json": "json_schema", "json_object": "json_object", "regex": "regex", "choice": "choice",
    "grammar": "lark",
}  # fmt: skip
STOPS = ("stop", "stop_token_ids")
PART = ("type", "text")  # of a message
# Settings of a prompt under their own names.
SETTINGS = {
    name: CHECKS[name] for name in (
        "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "speculation",
        "repetition_penalty", "add_special_tokens", "stop_token_ids", "include_stop_str_in_output",
        "skip_special_tokens", "spaces_between_special_tokens", "min_tokens", "bad_words",
        "allowed_token_ids",
    )
}  # fmt: skip
TEMPLATE_SETTINGS = {
    name: CHECKS[name]
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
}


# What a body's parameter may be: an object of parameters, a check and what it expects, or None,
# which is without effect; "*" stands for all others of an object.
Parameters = dict[str, Any]
# A body that was checked; a parameter that is null is left out. "ignored" has the names of those
# that were without effect.
Asked = dict[str, Any]


def _is_list(value: Any, is_part: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_part, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_prompt(value: Any) -> bool:
    return _is_text(value) or (bool(value) and CHECKS["token_ids"][0](value))


def _or(special: int, check: Check) -> Check:
    """A check that takes one more number; what is expected does not tell of it."""
    return lambda v: (type(v) is int and v == special) or check[0](v), check[1]


def _is_stop(value: Any) -> bool:
    words = [value] if _is_text(value) else value
    return (
        isinstance(words, list)
        and len(words) <= MAX_STOPS
        and all(_is_text(word) and len(word) <= 1000 for word in words)
    )


TEXT = CHECKS["text"]
FULL_TEXT = (lambda v: _is_text(v) and v != "", "a text that is not empty")
LIMIT, TOP = CHECKS["max_output_len"], CHECKS["logprobs"]
SCHEMA = (lambda v: isinstance(v, (dict, str)), "a JSON schema")
CHOICES = (lambda v: _is_list(v, FULL_TEXT[0]) and len(v) <= MAX_CHOICE,
           f"a list of at most {MAX_CHOICE} texts, none empty")  # fmt: skip
MESSAGES = (lambda v: _is_list(v, lambda m: isinstance(m, dict)), "a list of messages")
ANY = (lambda v: True, "")  # checked elsewhere
FORMAT = (
    lambda v: v in ("text", "json_object", "json_schema"), "text, json_object or json_schema"
)  # fmt: skip
NAMED_SCHEMA: Parameters = {
    "name": TEXT, "description": TEXT, "schema": OBJECT, "strict": BOOL, "*": None
}  # fmt: skip
ASKED: Parameters = {
    "model": TEXT,
    **SETTINGS,
    "max_tokens": LIMIT,
    **{name: _or(-1, CHECKS[name]) for name in ("top_k", "truncate_prompt_tokens")},  # all
    "logit_bias": (
        lambda v: OBJECT[0](v) and len(v) <= MAX_BIASES and CHECKS["logit_bias"][0](read_bias(v)),
        f"{CHECKS['logit_bias'][1]}, at most {MAX_BIASES}",
    ),
    "stop": (
        _is_stop, f"a text of at most 1000 characters, or a list of at most {MAX_STOPS} of them"
    ),
    **dict.fromkeys(("n", "best_of"), CHECKS["best_of"]),
    "prompt_logprobs": TOP,
    "seed": (
        lambda v: type(v) is int and -(2**63) <= v < 2**64,
        "a whole number from -2**63 to 2**64 - 1",
    ),
    "stream": BOOL,
    "stream_options": {"include_usage": BOOL, "continuous_usage_stats": BOOL, "*": None},
    "ignore_eos": BOOL,
    "response_format": {"type": FORMAT, "json_schema": NAMED_SCHEMA, "schema": OBJECT},
    **dict.fromkeys(("guided_json", "json_schema"), SCHEMA),
    **dict.fromkeys(("guided_regex", "guided_grammar", "grammar"), FULL_TEXT),
    "guided_choice": CHOICES,
    "guided_whitespace_pattern": FULL_TEXT,
    "structured_outputs": {
        "json": SCHEMA, "regex": FULL_TEXT, "choice": CHOICES, "grammar": FULL_TEXT,
        "json_object": BOOL, "disable_any_whitespace": BOOL, "whitespace_pattern": FULL_TEXT,
        "disable_fallback": None,
    },
    **dict.fromkeys(IDLE),
    "return_token_ids": BOOL,  # vLLM's: the ids of the prompt and of the output
    # Ours, for the page: how each token came, and what each step verified.
    "return_origins": BOOL,
    "return_trees": BOOL,
}  # fmt: skip
COMPLETION: Parameters = ASKED | {
    "prompt": (
        lambda v: _is_prompt(v) or (_is_list(v, _is_prompt) and len(set(map(type, v))) == 1),
        "a text, a list of texts, the ids of tokens, or a list of lists of these",
    ),
    "max_tokens": _or(0, LIMIT),
    "echo": BOOL,
    "logprobs": TOP,
}
CHAT: Parameters = ASKED | {
    "messages": MESSAGES, "max_completion_tokens": LIMIT, "logprobs": BOOL, "top_logprobs": TOP,
    "reasoning_effort": TEXT, **TEMPLATE_SETTINGS, "tools": ANY, "tool_choice": ANY,
    "parallel_tool_calls": BOOL,
}  # fmt: skip
TOKENIZE: Parameters = {
    "model": TEXT, "prompt": TEXT, "messages": MESSAGES, "add_special_tokens": BOOL,
    "tools": ANY, **TEMPLATE_SETTINGS, **dict.fromkeys(IDLE),
}  # fmt: skip
DETOKENIZE: Parameters = {"model": TEXT, "tokens": CHECKS["token_ids"]}


def read_asked(
    parameters: Parameters, body: Any, needed: str | None = None, path: str = ""
) -> Asked:
    """Check a body; BadRequest names the parameter that is wrong, unknown or not offered.

    needed: the parameter that must be there. path: of an object inside of a body.
    """
    if not isinstance(body, dict):
        if path:
            raise refuse(path, f"is {shorten(body)}, not an object")
        raise BadRequest("the body is not a JSON object")
    asked: Asked = {"ignored": []}
    for name, value in body.items():
        where = f"{path}.{name[:100]}" if path else name[:100]
        param = path.partition(".")[0] or where
        is_known, is_neutral = name in parameters or "*" in parameters, not path and name in NEUTRAL
        if value is None and (is_known or name in NEUTRAL):
            continue
        if not is_known and is_neutral:
            if not any(type(value) is type(one) and value == one for one in NEUTRAL[name]):
                raise refuse(name, "is not supported", code="unsupported_parameter")
        elif not is_known:
            hint = suggest(name[:100], list(parameters))
            raise BadRequest(f"unknown parameter {shorten(where)}{hint}", param)
        elif (rule := parameters.get(name)) is None:
            asked["ignored"].append(where)
        elif isinstance(rule, dict):
            asked[name] = read_asked(rule, value, path=where)
            asked["ignored"] += asked[name].pop("ignored")
        elif not rule[0](value):
            raise BadRequest(f"{where} is {shorten(value)}, not {rule[1]}", param)
        else:
            asked[name] = value
    if needed is not None and needed not in asked:
        raise refuse(needed, "is missing")
    return asked


def find_grammar(asked: Asked) -> dict[str, dict[str, Any]]:
    """What the output is to keep to, as a Prompt has it, by the parameter that says so."""
    found = {name: (kind, asked[name]) for name, kind in GUIDED.items() if name in asked}
    for name, form in (
        ("response_format", asked.get("response_format")),
        ("text.format", asked.get("text", {}).get("format")),
    ):
        if form is not None and (read := _read_format(name, form)) is not None:
            found[name] = read
    structured = asked.get("structured_outputs", {})
    found |= {
        f"structured_outputs.{name}": (kind, structured[name])
        for name, kind in STRUCTURED.items() if structured.get(name, False) is not False
    }  # fmt: skip
    params = {name: name.partition(".")[0] for name in found}
    if len(found) > 1:
        raise BadRequest(f"{' and '.join(found)} are both given", next(iter(params.values())))
    if found and asked.get("ignore_eos"):
        raise BadRequest("ignore_eos has no place beside a grammar", "ignore_eos")
    pattern = structured.get("whitespace_pattern", asked.get("guided_whitespace_pattern"))
    spacing: Mapping[str, Any] = SPACING
    if pattern is not None:
        spacing = {"whitespace_flexible": True, "whitespace_pattern": pattern}
    elif structured.get("disable_any_whitespace"):
        spacing = {"whitespace_flexible": False}
    return {param: _complete(name, *found[name], spacing) for name, param in params.items()}


def _read_format(name: str, form: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The kind of grammar that a format asks for, and what it is."""
    kind, is_flat = form.get("type"), name == "text.format"  # as responses have it
    if kind is None:
        raise refuse(f"{name}.type", "is missing")
    places = ({} if is_flat else {"json_schema": "json_schema"}) | {
        "schema": "json_schema" if is_flat else "json_object"  # where llama.cpp takes one
    }
    for key, place in places.items():
        if kind != place and key in form:
            reason = f"{key} has no place beside {name}.type {kind!r}"
            raise BadRequest(reason, name.partition(".")[0])
    if kind == "text":
        return None
    given = form if is_flat or kind == "json_object" else form.get("json_schema", {})
    if "schema" in given:
        return "json_schema", given["schema"]
    if kind == "json_object":
        return "json_object", True
    raise refuse(name, f"has no {'' if is_flat else 'json_schema.'}schema")


def _complete(name: str, kind: str, value: Any, spacing: Mapping[str, Any]) -> dict[str, Any]:
    """A grammar as a Prompt has it: its schema read, its white space said, choices as patterns."""
    if kind == "choice":
        return {"regex": write_choice(value)}
    if kind not in ("json_schema", "json_object"):
        return {kind: value}
    if isinstance(value, str):
        try:
            value = parse_json(value.encode())
        except ValueError as error:
            raise refuse(name, f"is not JSON: {summarize(error)}") from None
    schema = value if kind == "json_schema" else {"type": "object"}
    return {"json_schema": space_schema(schema, spacing)}


def _fit_grammar(
    grammar: Mapping[str, dict[str, Any]], ignored: list[str]
) -> dict[str, Any] | None:
    """Return the only one of the grammars, without what of a JSON schema only describes.

    That is added to what is ignored. What else no grammar keeps to is refused where it is compiled.
    """
    for param, given in grammar.items():
        if "json_schema" not in given:
            return given
        fitted = fit_schema(given["json_schema"])
        if fitted.faults:
            return given
        ignored += [f"{param}.{path}" for path in fitted.left_out]
        return {"json_schema": fitted.schema}
    return None


def read_messages(asked: Asked) -> list[dict[str, Any]]:
    """A conversation with contents that are texts; BadRequest for what is no turn."""
    source, read = find_source(asked), []
    places = asked.get("places") or [f"messages.{at}" for at in range(len(asked["messages"]))]
    for where, message in zip(places, asked["messages"], strict=True):
        content, role = message.get("content"), message.get("role")
        others = {
            name: value for name, value in message.items()
            if name not in ("role", "content") and value is not None and value != []
        }  # fmt: skip
        if not FULL_TEXT[0](role):
            reason = f"is {shorten(role)}, not a text" if "role" in message else "is missing"
            raise refuse(f"{where}.role", reason)
        if content is None and not others:
            raise refuse(f"{where}.content", "is missing")
        if content is not None:
            content = _join_parts(content, f"{where}.content", asked["ignored"])
        if "tool_calls" in others:
            try:
                others["tool_calls"] = wrap_calls(others["tool_calls"], f"{where}.tool_calls")
            except ChatError as error:
                raise BadRequest(str(error), source) from None
        read.append({"role": role, "content": content, **others})
    return read


def _join_parts(content: Any, where: str, ignored: list[str]) -> str:
    """The text of a message, which may come in parts."""
    if _is_text(content):
        return str(content)
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise refuse(where, f"is {shorten(content)}: give a text, or a list of parts of text")
    for part in content:
        ignored += [f"messages.content.{key[:100]}" for key in part if key not in PART]
        if part.get("type") != "text" or not _is_text(part.get("text")):
            only = 'of parts only {"type": "text", "text": "..."} is supported'
            raise refuse(where, f"is {shorten(content)}: {only}")
    return join_parts(content)


def find_source(asked: Asked) -> str:
    """The parameter that has the prompt."""
    return next(name for name in ("input", "messages", "prompt") if name in asked)


def _read_completion(asked: Asked) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The prompts of a completion, and what it says in its own way."""
    limit, num_top = asked.get("max_tokens", 16), asked.get("logprobs")
    if limit == 0 and not asked.get("echo"):
        raise BadRequest("max_tokens 0 asks for nothing without echo", "max_tokens")
    prompts = [asked["prompt"]] if _is_prompt(asked["prompt"]) else asked["prompt"]
    return [{"text" if _is_text(p) else "token_ids": p} for p in prompts], {
        "max_output_len": limit or 1,  # the prompt's own pass makes a token
        "logprobs": num_top, "prompt_logprobs": bool(asked.get("echo")) and num_top is not None,
    }  # fmt: skip


def _read_chat(
    asked: Asked, engine: Engine, names: dict[str, str], formats: ChatFormats,
    calling: Calling | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:  # fmt: skip
    """The conversation of a chat, and what it says in its own way.

    names: by the field of a Prompt, the parameter that says it; gains those of a chat.
    """
    limit, num_top = asked.get("max_tokens"), None
    for name in ("max_completion_tokens", "max_output_tokens"):
        if name in asked:
            names["max_output_len"] = name
            if limit not in (None, asked[name]):
                raise BadRequest(f"max_tokens and {name} are both given, and differ", name)
            limit = asked[name]
    if asked.get("logprobs"):
        num_top = asked.get("top_logprobs", 0)
    elif asked.get("top_logprobs"):
        raise BadRequest("top_logprobs needs logprobs", "top_logprobs")
    template = str(engine.tokenizer.chat_template or "")
    variables = dict(asked.get("chat_template_kwargs", {}))
    if "reasoning_effort" in asked:
        variables["reasoning_effort"] = asked["reasoning_effort"]
    source: dict[str, Any] = {
        "messages": write_messages(read_messages(asked), template, calling, formats),
        **{name: asked[name] for name in TEMPLATE_SETTINGS if name in asked},
        "chat_template_kwargs": variables,
    }
    asked["ignored"] += _find_idle(source, engine.tokenizer, find_source(asked))
    if calling is not None and formats.reads_tools:
        variables["tools"] = list(calling.tools)
    return [source], {"max_output_len": limit, "logprobs": num_top}


def _find_idle(source: Mapping[str, Any], tokenizer: Any, place: str) -> list[str]:
    """Names of what changes nothing of how a conversation is rendered.

    place: the parameter that has the conversation. BadRequest for calls that do not show.
    """

    def render(**changed: Any) -> str:
        prompt = Prompt(**{**source, **changed})
        return render_chat(prompt, prompt.messages, tokenizer)

    messages, variables = source["messages"], source["chat_template_kwargs"]
    less: dict[str, dict[str, Any]] = {
        name if name == "reasoning_effort" else f"chat_template_kwargs.{name[:100]}": {
            "chat_template_kwargs": {key: variables[key] for key in variables if key != name}
        }
        for name in variables
    }
    for name in dict.fromkeys(name for message in messages for name in message):
        if name not in ("role", "content"):
            others = [{k: m[k] for k in m if k != name} for m in messages]
            less[f"{place}.{name[:100]}"] = {"messages": others}
    if len(less) > MAX_FIELDS:
        raise refuse(place, f"and the template's variables have {len(less)} names beside role and"
                     f" content, at most {MAX_FIELDS} are read")  # fmt: skip
    try:
        whole = render() if less else ""
        idle = [name for name, changed in less.items() if render(**changed) == whole]
    except SpecDecError:  # told of where the prompt is prepared, or a part that is needed
        return []
    for at, message in enumerate(messages):
        for name in ("tools", "tool_calls", "function_call"):
            if name in message and f"{place}.{name}" in idle:
                raise BadRequest(f"the chat template does not read {place}.{at}.{name}", place)
    return idle


def _read_settings(
    asked: Asked, engine: Engine, own: Mapping[str, Any], count: int
) -> dict[str, Any]:
    """What all choices share, by the field of a Prompt. own: what an endpoint says in its way."""
    top_k, stop, most = asked.get("top_k"), asked.get("stop"), asked.get("truncate_prompt_tokens")
    if most == -1:  # vLLM's for all that there is room for
        room = engine.max_seq_len - (own["max_output_len"] or 1)
        most = max(1, min(engine.max_input_len, room))
    shared = {"temperature": 1.0} | {name: asked[name] for name in SETTINGS if name in asked} | {
        "logit_bias": read_bias(asked.get("logit_bias", {})) or None,
        "stop": [word for word in ([stop] if _is_text(stop) else stop or ()) if word],
        "top_k": 0 if top_k == -1 else top_k,  # vLLM's for all
        "truncate_prompt_tokens": most,
        "end_ids": () if asked.get("ignore_eos") else None,
        "keep_trees": asked.get("return_trees"),
        **own,
    }  # fmt: skip
    if "prompt_logprobs" in asked:
        shared["prompt_logprobs"] = True
        shared["logprobs"] = max(shared["logprobs"] or 0, asked["prompt_logprobs"])
    elif count > asked.get("n", 1) and shared["logprobs"] is None:
        shared["logprobs"] = 0  # by which the best are chosen
    return shared


def make_requests(
    engine: Engine, asked: Asked, formats: ChatFormats, calling: Calling | None = None
) -> list[Request]:
    """Tokenize and check; n requests of each prompt. The seeds of all choices are consecutive.

    formats: how the model writes what is no content. calling: what a chat says of tools. Adds
    to what is ignored in `asked`. BadRequest where the engine cannot take the requests.
    """
    _check_choices(asked)
    if calling is not None:
        asked = _read_ends(asked, calling)
    if asked.get("return_origins") and not engine.tells_origins:
        raise BadRequest("this engine does not tell how its tokens came", "return_origins")
    source = find_source(asked)
    # By the field of a Prompt, the parameter that says it.
    names = {"text": source, "token_ids": source, "keep_trees": "return_trees"}
    names["max_output_len"] = "max_tokens"
    if "messages" in asked:
        sources, own = _read_chat(asked, engine, names, formats, calling)
    else:
        sources, own = _read_completion(asked)
    count = count_choices(asked)
    if len(sources) * count > MAX_CHOICES:
        raise BadRequest(
            f"{len(sources)} prompts with n {count} are {len(sources) * count} choices, at most"
            f" {MAX_CHOICES} are allowed",
            "n",
        )
    if "spaces_between_special_tokens" in asked and getattr(engine.tokenizer, "is_fast", False):
        asked["ignored"].append("spaces_between_special_tokens")
    grammar = find_grammar(asked)
    given, writer = _fit_grammar(grammar, asked["ignored"]), GrammarWriter(engine.tokenizer)
    seed = secrets.randbits(63) if "seed" not in asked else asked["seed"]
    shared = _read_settings(asked, engine, own, count) | {"seed": seed % 2**64, "grammar": given}
    requests: list[Request] = []
    for at, one in enumerate(sources):
        index = at if len(sources) > 1 else ONLY
        names["grammar"] = next(iter(grammar), "grammar")
        try:
            request = engine.prepare(Prompt(**one, **shared), max_output_len=None, index=index)
            full = writer.write(calling, formats, given, request.input_text)
            asked["ignored"] += writer.left_out
            if full is not given:
                names["grammar"] = "tools" if calling is not None else names["grammar"]
                prompt = Prompt(**one, **{**shared, "grammar": full})
                request = engine.prepare(prompt, max_output_len=None, index=index)
        except SpecDecError as error:
            raise _explain(error, source, names) from None
        for _ in range(count):
            own_seed = (seed + len(requests)) % 2**64
            sampling = dataclasses.replace(request.sampling, seed=own_seed)
            requests.append(dataclasses.replace(request, index=len(requests), sampling=sampling))
    return requests


def _read_ends(asked: Asked, calling: Calling) -> Asked:
    """Return a body without what would end a required call before it is whole.

    Raises BadRequest for a grammar of calls that no token may end.
    """
    if asked.get("ignore_eos") and (calling.is_forced or calling.is_strict):
        reason = "ignore_eos has no place beside calls that are required, strict or not parallel"
        raise BadRequest(reason, "ignore_eos")
    if not calling.is_forced:
        return asked
    asked["ignored"] += [name for name in STOPS if asked.get(name)]
    return {name: value for name, value in asked.items() if name not in STOPS}


def count_choices(asked: Asked) -> int:
    """How many outputs are made of each prompt."""
    return int(max(asked.get("n", 1), asked.get("best_of", 1)))


def _check_choices(asked: Asked) -> None:
    """Raise BadRequest for numbers of choices that contradict, and what is only for streams."""
    num_asked, best_of = asked.get("n", 1), asked.get("best_of")
    if best_of is not None and best_of < num_asked:
        raise BadRequest(f"best_of is {best_of}, and n {num_asked}", "best_of")
    chooses = best_of is not None and best_of > num_asked
    for name, is_asked, is_stream in (
        ("stream_options", "stream_options" in asked, True),
        ("return_trees", asked.get("return_trees"), True),
        ("prompt_logprobs", "prompt_logprobs" in asked, False),
        ("best_of", chooses, False),
    ):
        if is_asked and bool(asked.get("stream")) != is_stream:
            raise BadRequest(f"{name} is only for {'' if is_stream else 'what is no '}stream", name)


def _explain(error: SpecDecError, source: str, names: Mapping[str, str]) -> BadRequest:
    """The error of a prompt, by the names of the parameters."""
    field = error.field if isinstance(error, PromptError) else None
    param = source if field is None else names.get(field, field)
    if isinstance(error, PromptError) and error.reason is not None:
        return BadRequest(f"{param} {error.reason}", param)
    return BadRequest(summarize(error), param)


def find_starts(engine: Engine, request: Request) -> list[int]:
    """Where in a prompt's text each of its tokens begins."""
    stream = read_stream(engine.tokenizer, request.input_ids)
    # The text of a prompt of ids has special tokens as well.
    before = max(0, request.input_text.find(stream.finish()))
    return [0, *(before + end for end in stream.ends[:-1])]


def check_model(given: str | None, name: str) -> None:
    """Raise BadRequest for another model than the one that is served."""
    if given is not None and given != name:
        raise BadRequest(
            f"the model {shorten(given)} does not exist; this server has {name!r}", "model", 404,
            "model_not_found",
        )  # fmt: skip
