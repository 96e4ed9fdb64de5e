"""Request objects, as of a .jsonl line: read, checked, and tokenized into requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specdec.decode.requests import Request
from specdec.decode.sampling import SamplingParams
from specdec.decode.settings import DecodeSettings
from specdec.decode.typical import read_typical_rule
from specdec.errors import Problems, SpecDecError, UsageError, shorten, suggest, summarize
from specdec.files.reading import parse_json

SOURCE_KEYS = ("prompt", "input_ids", "messages")
REQUEST_KEYS = (*SOURCE_KEYS, "max_output_len", "temperature", "top_k", "top_p", "seed", "stop")
# What a caller of the Python API may also say of a prompt, beside `logit_bias` and `logprobs`.
SHAPING_KEYS = ("min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
MAX_LOGPROBS = 20
MAX_COUNT = 2**31 - 1  # of tokens, and the largest token id that any library takes


def read_lines(path: Path, flag: str) -> list[str]:
    """Return the lines of a text file that a flag names, without a byte order mark before them."""
    try:
        # Not splitlines(): U+2028 and its like may stand inside a JSON text.
        return path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError:
        raise SpecDecError(f"{path} does not exist", f"check the path of {flag}") from None
    except IsADirectoryError:
        raise SpecDecError(f"{path} is a folder", f"give {flag} a .txt or .jsonl file") from None
    except UnicodeDecodeError:
        raise SpecDecError(f"{path} is not UTF-8 text", "convert the file to UTF-8") from None


def read_entries(
    path: Path, lines: Sequence[str], suffix: str, read: Callable[[str, str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the request object of each line of a .txt or .jsonl file, {} for an empty line.

    read: makes it from where a line of .jsonl stands and the line, as `read_line` does.
    """
    if suffix == ".txt":
        entries: list[dict[str, Any]] = [{"prompt": line} if line.strip() else {} for line in lines]
    elif suffix == ".jsonl":
        entries, problems = [], Problems()
        for n, line in enumerate(lines, 1):
            try:
                entries.append(read(f"{path} line {n}", line) if line.strip() else {})
            except SpecDecError as error:
                problems += error.problems
        problems.raise_all()
    else:
        raise SpecDecError(f"{path} is neither .txt nor .jsonl", "name the file by what it holds")
    if not any(entries):
        raise SpecDecError(f"{path} holds no prompt", "write one prompt a line")
    return entries


def read_line(where: str, line: str, more_keys: Sequence[str] = ()) -> dict[str, Any]:
    """Return the request object of a line; `more_keys` may be there too, and are not checked.

    One of them, `turns`, may stand for the prompt.
    """
    try:
        entry = parse_json(line.encode())
    except ValueError as error:
        raise SpecDecError(
            f"{where} is not JSON: {error}", "write one JSON object a line"
        ) from None
    if not isinstance(entry, dict):
        raise SpecDecError(f"{where} is not a JSON object", 'write {"prompt": "..."}')
    known = (*REQUEST_KEYS, *more_keys)
    sources = (*SOURCE_KEYS, *({"turns"} & set(more_keys)))
    for key in entry:
        if key not in known:
            raise SpecDecError(
                f"{where}: unknown key {shorten(key)}{suggest(key[:100], known)}",
                f"this release knows {', '.join(known)}",
            )
    if sum(key in entry for key in sources) != 1:
        raise SpecDecError(
            f"{where} needs exactly one of {', '.join(sources)}", 'write {"prompt": "..."}'
        )
    check_values(where, entry)
    return entry


def check_values(where: str, entry: Mapping[str, Any]) -> None:
    """Raise SpecDecError that lists the keys of a request object whose values are of no use."""
    Problems(
        (f"{where}: {key} is {shorten(entry[key])}, not {expected}", f"give {key} {expected}")
        for key, (is_good, expected) in CHECKS.items()
        if key in entry and not is_good(entry[key])
    ).raise_all()


def _is_number(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _is_penalty(value: Any) -> bool:
    return _is_number(value) and -2 <= value <= 2


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= MAX_COUNT


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("role")) and "content" in value


CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (_is_text, "a text"),
    "input_ids": (
        lambda v: isinstance(v, list) and all(_is_count(i, 0) for i in v),
        f"a list of token ids, whole numbers from 0 to {MAX_COUNT}",
    ),
    "messages": (
        lambda v: isinstance(v, list) and bool(v) and all(map(_is_message, v)),
        'a list of {"role", "content"}',
    ),
    "max_output_len": (lambda v: _is_count(v, 1), f"a whole number from 1 to {MAX_COUNT}"),
    "temperature": (lambda v: _is_number(v) and v >= 0, "a number of at least 0"),
    "top_k": (lambda v: _is_count(v, 0), f"a whole number from 0 to {MAX_COUNT}"),
    "top_p": (lambda v: _is_number(v) and 0 < v <= 1, "a number above 0 and at most 1"),
    "seed": (lambda v: type(v) is int and 0 <= v < 2**64, "a whole number from 0 to 2**64 - 1"),
    "stop": (
        lambda v: (
            (_is_text(v) and v != "")
            or (isinstance(v, list) and all(_is_text(w) and w != "" for w in v))
        ),
        "a text or a list of texts, none empty",
    ),
    "min_p": (lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    # Beyond these, logits can leave the range of float32.
    "repetition_penalty": (
        lambda v: _is_number(v) and 0.001 <= v <= 1000,
        "a number from 0.001 to 1000",
    ),
    "frequency_penalty": (_is_penalty, "a number from -2 to 2"),
    "presence_penalty": (_is_penalty, "a number from -2 to 2"),
    "logit_bias": (
        lambda v: (
            isinstance(v, dict)
            and all(_is_count(k, 0) and _is_number(b) and abs(b) <= 100 for k, b in v.items())
        ),
        "numbers from -100 to 100 by token id",
    ),
    **{
        name: (lambda v: isinstance(v, bool), "true or false")
        for name in ("speculation", "keep_trees", "prompt_logprobs")
    },
    "logprobs": (
        lambda v: _is_count(v, 0) and v <= MAX_LOGPROBS,
        f"a whole number from 0 to {MAX_LOGPROBS}",
    ),
}


def find_end_ids(settings: DecodeSettings, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a request: --end-id, else generation_config.json's, else the tokenizer's."""
    if settings.end_id is not None:
        return frozenset([settings.end_id])
    if settings.tokenizer_dir is not None:
        path = Path(settings.tokenizer_dir) / "generation_config.json"
        if path.is_file():
            from specdec.files.reading import read_json

            ids = read_json(path).get("eos_token_id")
            ids = ids if isinstance(ids, list) else [ids]
            if all(type(i) is int for i in ids):
                return frozenset(ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return frozenset([tokenizer.eos_token_id])
    return frozenset()


def make_requests(
    prompts: Sequence[dict[str, Any]],
    settings: DecodeSettings,
    tokenizer: Any,
    end_ids: frozenset[int] | None = None,
) -> list[Request]:
    """Tokenize prompts; a prompt's own settings win over the flags.

    end_ids: tokens that end a request, where they are known already.
    """
    if end_ids is None:
        end_ids = find_end_ids(settings, tokenizer)
    temperatures = read_temperatures(settings, len(prompts))
    typical = read_typical_rule(settings)
    if not 0 < settings.top_p <= 1:
        raise UsageError(f"--top-p is {settings.top_p}", "give a number above 0 and at most 1")
    if settings.random_seed >= 2**64:
        raise UsageError(f"--random-seed is {settings.random_seed}", "give one below 2**64")
    if "" in settings.stop_words:
        raise UsageError("--stop-words holds an empty text", "leave it out")
    requests = []
    for index, prompt in enumerate(prompts):
        text, ids = encode_prompt(prompt, settings, tokenizer)
        stop = prompt.get("stop", settings.stop_words)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if stop and tokenizer is None:
            raise UsageError(
                "stop words need a tokenizer, and the engine holds none",
                "give the base model's folder as --tokenizer-dir, here or to specdec-build",
            )
        if prompt.get("prompt_logprobs") and "logprobs" not in prompt:
            raise SpecDecError(
                f"prompt {index} has prompt_logprobs and no logprobs",
                "say how many of the likeliest tokens to tell of: logprobs, 0 or more",
            )
        top_k, top_p = prompt.get("top_k", settings.top_k), prompt.get("top_p", settings.top_p)
        default = temperatures[index] if temperatures else float(top_k > 0 or top_p < 1)
        requests.append(
            Request(
                index=index,
                input_text=text,
                input_ids=ids,
                max_output_len=prompt.get("max_output_len", settings.max_output_len),
                end_ids=end_ids,
                sampling=SamplingParams(
                    temperature=float(prompt.get("temperature", default)),
                    top_k=top_k,
                    top_p=float(top_p),
                    seed=prompt.get("seed", settings.random_seed),
                    typical=typical,
                    logit_bias=tuple(prompt.get("logit_bias", {}).items()),
                    **{name: float(prompt[name]) for name in SHAPING_KEYS if name in prompt},
                ),
                stop=stop,
                num_logprobs=prompt.get("logprobs"),
                wants_prompt_logprobs=prompt.get("prompt_logprobs", False),
                drafts=prompt.get("speculation", True),
                keep_trees=prompt.get("keep_trees", False),
                grammar=prompt.get("grammar"),
            )
        )
    return requests


def read_temperatures(settings: DecodeSettings, num_prompts: int) -> list[float] | None:
    """Return --temperature for each prompt, or None where it was not given."""
    if settings.temperature is None:
        return None
    parts = settings.temperature.split(",")
    try:
        values = [float(part) for part in parts]
        if not all(0 <= value < math.inf for value in values):
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--temperature is {settings.temperature!r}", "give numbers of at least 0, as 0.7,1"
        ) from None
    if len(values) not in (1, num_prompts):
        raise UsageError(
            f"--temperature has {len(values)} values for {num_prompts} prompts",
            "give one for all, or one each",
        )
    return values * num_prompts if len(values) == 1 else values


def _decode(tokenizer: Any, ids: list[int]) -> str:
    """The text of a prompt that was given as token ids, empty without a tokenizer."""
    if tokenizer is None:
        return ""
    try:
        return str(tokenizer.decode(ids))
    except Exception as error:  # noqa: BLE001 - of ids beyond its vocabulary some raise anything
        raise SpecDecError(
            f"the tokenizer cannot decode input_ids {shorten(ids)}: {summarize(error)}",
            "use the tokenizer that belongs to the model",
        ) from None


def encode_prompt(
    prompt: dict[str, Any], settings: DecodeSettings, tokenizer: Any
) -> tuple[str, list[int]]:
    """Return a prompt as text and as token ids."""
    ids = prompt.get("input_ids")
    if ids is not None:
        return _decode(tokenizer, ids), ids
    if tokenizer is None:
        raise UsageError(
            "text prompts need a tokenizer, and the engine holds none",
            "give the base model's folder as --tokenizer-dir, here or to specdec-build",
        )
    text = prompt.get("prompt", "")
    messages = prompt.get("messages")
    if messages is None and settings.apply_chat_template:
        messages = [{"role": "user", "content": text}]
    if messages is None:
        return text, tokenizer(text, verbose=False)["input_ids"]
    if not tokenizer.chat_template:
        raise SpecDecError(
            f"the tokenizer in {settings.tokenizer_dir} has no chat template",
            "leave --apply-chat-template out, or give the instruction-tuned model's tokenizer",
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # noqa: BLE001 - a template raises whatever it likes
        raise SpecDecError(
            f"the chat template refuses the messages: {summarize(error)}",
            "check the roles and their order",
        ) from None
    # The template writes the special tokens itself.
    return text, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
