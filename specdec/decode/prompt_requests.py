"""Requests made of prompts, the flags of a command and the defaults of a model."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.decode.requests import END_FLAG, NO_END, Request
from specdec.decode.sampling import SamplingParams
from specdec.decode.settings import DecodeSettings
from specdec.errors import (
    PromptError,
    SpecDecError,
    UsageError,
    shorten,
)
from specdec.files.reading import read_json
from specdec.gguf.folder import localize
from specdec.system.logs import get_logger
from specdec.text.encoding import encode_prompt, find_continued_text
from specdec.text.grammar import Grammar, GrammarCompiler
from specdec.text.prompts import CHECKS, SHAPING, Prompt, find_faults, name_prompt
from specdec.text.text_stream import TextForm
from specdec.text.tokenizer import fetch_tokenizer, lack_tokenizer

logger = get_logger(__name__)
# Fields of generation_config.json that change a text where transformers generates it.
DEFAULTS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
    "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "min_length",
    "min_new_tokens", "num_beams", "guidance_scale",
)  # fmt: skip
# Settings of a prompt that are the chat template's alone.
TEMPLATE_SETTINGS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
FLAGS = {"top_p": "--top-p", "seed": "--random-seed", "stop": "--stop-words"}


def find_end_ids(settings: DecodeSettings, tokenizer: Any) -> frozenset[int]:
    """Find the tokens that end a request: --end-id, else a configuration's, else the tokenizer's.

    The configuration is generation_config.json; without one, config.json's end tokens count beside
    the tokenizer's. Other fields of generation_config.json that would change texts are logged,
    since they are not applied.
    """
    if settings.end_id is not None:
        return frozenset() if settings.end_id == NO_END else frozenset([settings.end_id])
    eos = getattr(tokenizer, "eos_token_id", None)
    end_ids: frozenset[int] = frozenset() if eos is None else frozenset([eos])
    if settings.tokenizer_dir is not None:
        folder = Path(localize(settings.tokenizer_dir))
        if not folder.is_dir():  # of the Hub, whose tokenizer alone was fetched
            folder = fetch_tokenizer(settings.tokenizer_dir)
        path = folder / "generation_config.json"
        if path.is_file():
            document = read_json(path)
            _log_defaults(document, path)
            config_ids = _read_ids(document, path)
            return end_ids if config_ids is None else config_ids
        path = folder / "config.json"
        if path.is_file():
            end_ids |= _read_ids(read_json(path), path) or frozenset()
    return end_ids


def _read_ids(document: Mapping[str, Any], path: Path) -> frozenset[int] | None:
    """Return the end tokens that a configuration names; None where it names none."""
    value = document.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise SpecDecError(
            f"{path}: eos_token_id is {shorten(value)}, not a token's number or a list of them",
            f"correct it, or give {END_FLAG}",
        )
    return frozenset(ids)


def _log_defaults(document: Mapping[str, Any], path: Path) -> None:
    """Log the fields of a generation_config.json that change texts and are not applied."""
    ignored_fields = [
        f"{key} {shorten(document[key])}" for key in DEFAULTS
        if document.get(key) not in (None, False, 0, 1, [], {})
    ]  # fmt: skip
    if ignored_fields:
        logger.info(
            "%s: not applied, give it with each request: %s", path, ", ".join(ignored_fields)
        )


def read_flags(settings: DecodeSettings, num_prompts: int) -> list[Prompt]:
    """Return the settings that the flags give each prompt; UsageError for values of no use."""
    values: dict[str, Any] = {
        "top_p": settings.top_p, "seed": settings.random_seed, "stop": settings.stop_words,
    }  # fmt: skip
    for fact, remedy in find_faults(values, names=FLAGS):
        raise UsageError(fact, remedy)
    common_prompt = Prompt(max_output_len=settings.max_output_len, top_k=settings.top_k, **values)
    if settings.temperature is None:
        return [common_prompt] * num_prompts
    try:
        temperatures = [float(number) for number in settings.temperature.split(",")]
    except ValueError:
        temperatures = [math.nan]
    if not all(map(CHECKS["temperature"][0], temperatures)):
        raise UsageError(
            f"--temperature is {settings.temperature!r}", "give numbers of at least 0, as 0.7,1"
        )
    if len(temperatures) not in (1, num_prompts):
        raise UsageError(
            f"--temperature has {len(temperatures)} values for {num_prompts} prompts",
            "give one for all, or one each",
        )
    if len(temperatures) == 1:
        temperatures *= num_prompts
    return [dataclasses.replace(common_prompt, temperature=value) for value in temperatures]


def make_requests(
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    tokenizer: Any,
    end_ids: frozenset[int] | None = None,
    compile_grammar: Callable[[Mapping[str, Any]], Grammar] | None = None,
    first_index: int = 0,
    repeats: bool = False,
) -> list[Request]:
    """Tokenize prompts that are checked already; a prompt's own settings win over the flags.

    first_index: of the prompts' indices. end_ids: tokens that end a request, where they are known
    already. compile_grammar: compiler for prompts with a grammar; None makes one. repeats: whether
    a prompt may have several requests, of which `choose_best` takes one.
    """
    if end_ids is None:
        end_ids = find_end_ids(settings, tokenizer)
    make_compiler = functools.cache(lambda: GrammarCompiler(tokenizer, end_ids))
    compile_grammar = compile_grammar or (lambda grammar: make_compiler().compile(grammar))
    requests = []
    flag_prompts = read_flags(settings, len(prompts))
    for index, (prompt, flags) in enumerate(zip(prompts, flag_prompts, strict=True), first_index):
        text, ids = encode_prompt(prompt, settings, tokenizer)
        full_prompt = dataclasses.replace(flags, **prompt.list_given())
        if tokenizer is None and (full_prompt.stop or full_prompt.bad_words):
            raise lack_tokenizer("stop words need" if full_prompt.stop else "bad_words need")
        _check_combination(name_prompt(index), full_prompt, repeats=repeats)
        _check_encoding(name_prompt(index), prompt, settings)
        request = dataclasses.replace(
            _make_request(full_prompt, ids, end_ids, tokenizer),
            index=index, input_text=text, grammar=_make_grammar(full_prompt, compile_grammar),
            continued_text=find_continued_text(prompt),
            chosen_end_ids=_list_chosen_ends(prompt, settings),
        )  # fmt: skip
        sampling = request.sampling
        requests += [
            dataclasses.replace(
                request,
                sampling=dataclasses.replace(sampling, seed=(sampling.seed + repeat) % 2**64),
            )
            for repeat in range(full_prompt.best_of or 1)
        ]
    return requests


def _check_combination(name: str, prompt: Prompt, *, repeats: bool) -> None:
    """Raise PromptError for settings of a prompt that contradict each other."""
    if prompt.prompt_logprobs and prompt.logprobs is None:
        raise PromptError(
            f"{name} has prompt_logprobs and no logprobs",
            "say how many of the likeliest tokens to tell of: logprobs, 0 or more",
            field="prompt_logprobs",
        )
    for field in ("allowed_token_ids", "bad_words"):
        if prompt.grammar is not None and getattr(prompt, field):
            raise PromptError(
                f"{name} has both grammar and {field}, which could leave no token to choose",
                "leave one out",
                field=field,
            )
    if (prompt.best_of or 1) > 1 and not repeats:
        raise PromptError(
            f"{name} has best_of {prompt.best_of}, which chooses among complete outputs;"
            " here it has one, or its output is streamed",
            "leave best_of out",
            field="best_of",
        )


def _check_encoding(name: str, prompt: Prompt, settings: DecodeSettings) -> None:
    """Raise PromptError for settings of a chat template or a tokenizer that a prompt goes past."""
    given_settings = prompt.list_given()
    if prompt.token_ids is not None and prompt.add_special_tokens:
        raise PromptError(
            f"{name} is token ids and has add_special_tokens, though no tokenizer reads them",
            "leave it out, or give the prompt as a text",
            field="add_special_tokens",
        )
    if prompt.messages is not None or (prompt.text is not None and settings.apply_chat_template):
        return
    for field in TEMPLATE_SETTINGS:
        if given_settings.get(field):
            form = "a text" if prompt.text is not None else "token ids"
            raise PromptError(
                f"{name} is {form} and has {field}, though it is put into no chat template",
                "leave it out, or give messages",
                field=field,
            )


def _list_chosen_ends(
    prompt: Prompt, settings: DecodeSettings
) -> tuple[tuple[str, frozenset[int]], ...]:
    """Return the end tokens that a user chose, not the model, by what they are called."""
    chosen = {"end_ids": prompt.end_ids, "stop_token_ids": prompt.stop_token_ids}
    if settings.end_id not in (None, NO_END):
        chosen[END_FLAG] = [settings.end_id]
    return tuple((name, frozenset(ids)) for name, ids in chosen.items() if ids)


def _make_grammar(
    prompt: Prompt, compile_grammar: Callable[[Mapping[str, Any]], Grammar]
) -> Grammar | None:
    """Compile a prompt's grammar, if it has one; PromptError where it cannot be compiled."""
    if prompt.grammar is None:
        return None
    try:
        return compile_grammar(prompt.grammar)
    except SpecDecError as error:
        raise PromptError(error.message, error.hint, field="grammar") from None


def _make_request(
    prompt: Prompt, ids: list[int], end_ids: frozenset[int], tokenizer: Any
) -> Request:
    """Make a request of a prompt whose flags are filled in, without its index, text and grammar."""
    stop, stop_ids = prompt.stop or (), frozenset(prompt.stop_token_ids or ())
    all_end_ids = stop_ids | (end_ids if prompt.end_ids is None else frozenset(prompt.end_ids))
    skips_special = prompt.skip_special_tokens is not False
    includes_stop = bool(prompt.include_stop_str_in_output)
    hidden_ids = stop_ids if skips_special else all_end_ids
    assert prompt.max_output_len is not None
    return Request(
        index=0,
        input_ids=ids,
        max_output_len=prompt.max_output_len,
        end_ids=all_end_ids,
        sampling=_make_sampling(prompt, tokenizer),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        form=TextForm(
            hidden=frozenset() if includes_stop else hidden_ids,
            includes_stop=includes_stop,
            skips_special=skips_special,
            spaces_special=prompt.spaces_between_special_tokens is not False,
            min_tokens=prompt.min_tokens or 0,
        ),
        # To choose the best of several outputs takes the log-probabilities of their tokens.
        num_logprobs=prompt.logprobs or 0 if (prompt.best_of or 1) > 1 else prompt.logprobs,
        wants_prompt_logprobs=bool(prompt.prompt_logprobs),
        **_read_speculation(prompt.speculation),
        keep_trees=bool(prompt.keep_trees),
    )


def _read_speculation(speculation: bool | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return who drafts for a prompt and how much, by the fields of a request."""
    if not isinstance(speculation, Mapping):
        return {"allows_drafts": speculation is not False}
    method, max_tokens = speculation.get("method"), speculation.get("max_tokens")
    return {"draft_method": method, "max_draft_tokens": max_tokens}


def _make_sampling(prompt: Prompt, tokenizer: Any) -> SamplingParams:
    """Return the sampling settings of a prompt whose flags are filled in."""
    top_k, top_p, temperature = prompt.top_k or 0, prompt.top_p, prompt.temperature
    assert prompt.seed is not None
    assert top_p is not None
    if temperature is None:
        temperature = float(top_k > 0 or top_p < 1)
    shaping_values = {name: value for name, value in prompt.list_given().items() if name in SHAPING}
    bias = tuple(shaping_values.pop("logit_bias", {}).items())
    allowed_ids = prompt.allowed_token_ids
    return SamplingParams(
        temperature=float(temperature),
        top_k=top_k,
        top_p=float(top_p),
        seed=prompt.seed,
        logit_bias=bias,
        allowed_ids=None if allowed_ids is None else frozenset(allowed_ids),
        bad_words=frozenset(_list_bad_words(prompt.bad_words or (), tokenizer)),
        min_tokens=prompt.min_tokens or 0,
        **{name: float(value) for name, value in shaping_values.items()},
    )


def _list_bad_words(words: Sequence[str], tokenizer: Any) -> Iterator[tuple[int, ...]]:
    """Yield the tokens that words are written with, after a space and without one."""
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            yield tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
