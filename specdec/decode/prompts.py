"""Prompts with their settings: from a file or the flags, checked by one table, and tokenized."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import math
import numbers
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from specdec.chat import OPTIONS
from specdec.decode.grammar import Grammar, GrammarCompiler
from specdec.decode.requests import Request, name_prompt
from specdec.decode.sampling import SamplingParams
from specdec.decode.settings import DecodeSettings
from specdec.decode.text import TextForm
from specdec.errors import (
    Problems,
    PromptError,
    SpecDecError,
    UsageError,
    shorten,
    suggest,
)
from specdec.files.reading import parse_json, read_json
from specdec.gguf.folder import localize
from specdec.logs import get_logger
from specdec.options import is_whole
from specdec.tokenizer import fetch_tokenizer, lack_tokenizer

logger = get_logger(__name__)

STDIN, GZIP = Path("-"), ".gz"
MAX_LOGPROBS = 20
MAX_WORDS = 1024
MAX_COUNT = 2**31 - 1  # of tokens, and the largest token id that any library takes
TOKEN_NAME = re.compile("0|[1-9][0-9]{0,9}")
SHAPING = (
    "min_p", "logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip
# Fields of generation_config.json that change a text where transformers generates it.
DEFAULTS = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
    "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "suppress_tokens",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "min_length",
    "min_new_tokens", "num_beams", "guidance_scale",
)  # fmt: skip
FLAGS = {"top_p": "--top-p", "seed": "--random-seed", "stop": "--stop-words"}
# Whether a value is of use, and what is expected in its place.
Check = tuple[Callable[[Any], bool], str]


def _is_count(value: Any, least: int = 0, most: int = MAX_COUNT) -> bool:
    return type(value) is int and least <= value <= most


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and is_whole(value)


def _is_list(value: Any, is_part: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_part, value))


def _is_message(value: Any) -> bool:
    if not (isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value):
        return False
    content = value["content"]
    return content is None or isinstance(content, str) or _is_list(content, _is_part)


def _is_part(value: Any) -> bool:
    return (
        isinstance(value, dict) and value.get("type") == "text"
        and isinstance(value.get("text"), str)
    )  # fmt: skip


def _is_number(value: Any, low: float, high: float) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value) and low <= value <= high
    except OverflowError:  # a whole number that no float can hold
        return False


def _count(least: int, most: int = MAX_COUNT) -> Check:
    return lambda v: _is_count(v, least, most), f"a whole number from {least} to {most}"


def _number(low: float, high: float) -> Check:
    return lambda v: _is_number(v, low, high), f"a number from {low} to {high}"


def _field(check: Check) -> Any:
    """A setting of a prompt, and what it may be."""
    return dataclasses.field(default=None, metadata={"check": check})


BOOL: Check = (lambda v: isinstance(v, bool), "true or false")
OBJECT: Check = (lambda v: isinstance(v, dict), "an object")
IDS: Check = (
    lambda v: _is_list(v, _is_count), f"a list of token ids, whole numbers from 0 to {MAX_COUNT}"
)  # fmt: skip
SOME_IDS: Check = (lambda v: IDS[0](v) and v != [], f"{IDS[1]}, not empty")
MESSAGES: Check = (
    lambda v: _is_list(v, _is_message) and v != [],
    'a list of {"role", "content"} with texts, or lists of {"type": "text", "text"}, as contents',
)  # fmt: skip
STOP: Check = (
    lambda v: _is_text(v) or _is_list(v, _is_text), "a text or a list of texts, none empty"
)  # fmt: skip
WORDS: Check = (
    lambda v: _is_list(v, _is_text) and len(v) <= MAX_WORDS,
    f"a list of at most {MAX_WORDS} texts, none empty",
)
BIAS: Check = (
    lambda v: isinstance(v, dict) and all(_is_count(k) and _is_number(v[k], -100, 100) for k in v),
    "numbers from -100 to 100 by token id",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt with its own settings; None leaves a setting to `generate` or `stream`.

    Exactly one of text, token_ids and messages is given. messages: a conversation of {"role",
    "content"}, put into the tokenizer's chat template. chat_template_kwargs: what else the template
    is given, as tools. add_generation_prompt: False leaves out what begins an answer.
    continue_final_message: the output goes on with the last message. add_special_tokens: whether
    the tokenizer puts its own around the prompt; as it does with a text, unless this is False, and
    not with messages. truncate_prompt_tokens: keep only so many tokens, the prompt's last.

    end_ids: tokens that end the output; empty for none. stop_token_ids: more of them, whose text is
    left out. include_stop_str_in_output: keep the text of what ended the output, a stop word or
    such a token. skip_special_tokens: False shows special tokens in the text, except one that ends
    it. spaces_between_special_tokens: what transformers' `decode` makes of it. min_tokens: no end
    before so many tokens, and no stop word in their text. bad_words: texts whose last token may not
    follow the others; as tokenized behind a space and at a beginning, of the output only.
    allowed_token_ids: the only tokens that may come. Both are refused beside a grammar, and a
    grammar that has come to its end ends a text before min_tokens.

    min_p: least share of the likeliest token's probability. logit_bias: what is added to the logits
    of tokens. The penalties: repetition_penalty of tokens in prompt or output, the two others of
    those in the output.
    logprobs: for how many of the likeliest tokens to return log-probabilities, besides each new
    one's; None returns none. prompt_logprobs: whether to return those of the prompt's tokens too,
    which takes reading it whole. best_of: so many outputs are made, with consecutive seeds, and the
    one with the highest sum of log-probabilities is returned; not of streams. speculation: False
    drafts nothing for this prompt. keep_trees: let the events of a stream have the tree of each
    step. grammar: what the text keeps to: {"json_schema": {...}}, {"json_object": True}, {"regex":
    "..."}, {"choice": ["...", "..."]} or {"lark": "..."}. Between the parts of a JSON text there is
    at most the white space that json.dumps writes; {"x-guidance": {"whitespace_flexible": True}} in
    its schema allows all.
    """

    text: str | None = _field(
        (lambda v: isinstance(v, str) and is_whole(v), "a text of whole characters")
    )
    token_ids: Sequence[int] | None = _field(IDS)
    messages: Sequence[Mapping[str, Any]] | None = _field(MESSAGES)
    chat_template_kwargs: Mapping[str, Any] | None = _field(OBJECT)
    add_generation_prompt: bool | None = _field(BOOL)
    continue_final_message: bool | None = _field(BOOL)
    add_special_tokens: bool | None = _field(BOOL)
    truncate_prompt_tokens: int | None = _field(_count(1))
    max_output_len: int | None = _field(_count(1))
    temperature: float | None = _field(
        (lambda v: _is_number(v, 0, math.inf), "a number of at least 0")
    )
    top_k: int | None = _field(_count(0))
    top_p: float | None = _field(
        (lambda v: _is_number(v, 0, 1) and v > 0, "a number above 0 and at most 1")
    )
    seed: int | None = _field((_count(0, 2**64 - 1)[0], "a whole number from 0 to 2**64 - 1"))
    stop: str | Sequence[str] | None = _field(STOP)
    end_ids: Collection[int] | None = _field(IDS)
    stop_token_ids: Collection[int] | None = _field(IDS)
    include_stop_str_in_output: bool | None = _field(BOOL)
    skip_special_tokens: bool | None = _field(BOOL)
    spaces_between_special_tokens: bool | None = _field(BOOL)
    min_tokens: int | None = _field(_count(0))
    bad_words: Sequence[str] | None = _field(WORDS)
    allowed_token_ids: Collection[int] | None = _field(SOME_IDS)
    min_p: float | None = _field(_number(0, 1))
    logit_bias: Mapping[int, float] | None = _field(BIAS)
    # Beyond this, logits can leave the range of float32.
    repetition_penalty: float | None = _field(_number(0.001, 1000))
    frequency_penalty: float | None = _field(_number(-2, 2))
    presence_penalty: float | None = _field(_number(-2, 2))
    logprobs: int | None = _field(_count(0, MAX_LOGPROBS))
    prompt_logprobs: bool | None = _field(BOOL)
    best_of: int | None = _field(_count(1, 128))
    speculation: bool | None = _field(BOOL)
    keep_trees: bool | None = _field(BOOL)
    grammar: Mapping[str, Any] | None = _field(OBJECT)

    def list_given(self) -> dict[str, Any]:
        """The settings that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


# What a prompt's settings may be: for files, flags, Python and HTTP.
CHECKS: dict[str, Check] = {
    field.name: field.metadata["check"] for field in dataclasses.fields(Prompt)
}
# The fields of a prompt by their keys in a .jsonl line; error messages name the keys.
SOURCES = {"prompt": "text", "input_ids": "token_ids", "messages": "messages"}
NOT_IN_LINES = {"end_ids", "keep_trees"}
LINE_FIELDS = SOURCES | {
    name: name for name in CHECKS if name not in {*NOT_IN_LINES, *SOURCES.values()}
}
FIELD_KEYS = {field: key for key, field in LINE_FIELDS.items()}
# What a row that `specdec-train data` wrote has besides its prompt, and what it says of the row.
ROW_MARK, ROW_FACTS = "index", ("index", "id", "truncated")


@dataclasses.dataclass(frozen=True)
class Line:
    """A prompt of a file. where: the file and the line. others: what else the line says."""

    where: str
    prompt: Prompt
    others: dict[str, Any] = dataclasses.field(default_factory=dict)


def list_prompts(texts: Sequence[str], input_file: Path | None, *, json: bool) -> list[Prompt]:
    """The prompts of a command line: texts, or those of --input-file.

    json: whether the command prints JSON; UsageError for what texts alone do not show.
    """
    if input_file is None:
        return [Prompt(text=text) for text in texts]
    lines = read_prompts(input_file, "--input-file")
    asking = [line.where for line in lines if line.prompt.logprobs is not None]
    if asking and not json:
        raise UsageError(f"{asking[0]} asks for logprobs, which texts do not show", "add --json")
    return [line.prompt for line in lines]


def read_prompts(path: Path, flag: str, more_keys: Sequence[str] = ()) -> list[Line]:
    """Read a file of prompts that a flag names: .txt or .jsonl, also gzipped; stdin for "-".

    more_keys: other keys that a line of .jsonl may have; `turns` stands for the prompt. Raises
    SpecDecError that lists what is wrong of all lines.
    """
    lines, name = _read_lines(path, flag), "stdin" if path == STDIN else path
    suffix = Path(path.stem).suffix if path.suffix == GZIP else path.suffix
    if path == STDIN:
        first = next((line for line in lines if line.strip()), "")
        suffix = ".jsonl" if first.lstrip().startswith("{") else ".txt"
    if suffix not in (".txt", ".jsonl"):
        raise SpecDecError(f"{path} is neither .txt nor .jsonl", "name the file by what it holds")
    found, problems = [], Problems()
    for number, line in enumerate(lines, 1):
        where = f"{name} line {number}"
        if not line.strip():
            continue
        if suffix == ".txt":
            found.append(Line(where, Prompt(text=line)))
            continue
        try:
            found.append(read_line(where, line, more_keys))
        except SpecDecError as error:
            problems += error.problems
    problems.raise_all()
    if not found:
        raise SpecDecError(f"{name} holds no prompt", "write one prompt per line")
    return found


def _read_lines(path: Path, flag: str) -> list[str]:
    """The lines of a file or of stdin, without a byte order mark before them."""
    name, remedy = path if path != STDIN else "stdin", "the file " if path != STDIN else "it "
    try:
        if path == STDIN:
            text = _read_once(sys.stdin).removeprefix("\ufeff")
            text.encode()  # in some locales Python lets other bytes through
        else:
            content = path.read_bytes()
            text = (gzip.decompress(content) if path.suffix == GZIP else content).decode(
                "utf-8-sig"
            )
    except FileNotFoundError:
        raise SpecDecError(f"{path} does not exist", f"check the path of {flag}") from None
    except IsADirectoryError:
        raise SpecDecError(f"{path} is a folder", f"give {flag} a .txt or .jsonl file") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise SpecDecError(f"{path} is not gzip: {error}", "fetch the file again") from None
    except UnicodeError:
        raise SpecDecError(f"{name} is not UTF-8 text", f"convert {remedy}to UTF-8") from None
    # not splitlines(): U+2028 and its like may stand inside a JSON text
    return text.replace("\r\n", "\n").split("\n")


@functools.lru_cache(maxsize=1)
def _read_once(stream: TextIO) -> str:
    """All that stdin holds, also for who asks again: specdec generate checks it, then runs it."""
    return stream.read()


def read_line(where: str, line: str, more_keys: Sequence[str] = ()) -> Line:
    """Read a line of .jsonl; see `read_prompts`."""
    try:
        entry = parse_json(line.encode())
    except ValueError as error:
        raise SpecDecError(
            f"{where} is not JSON: {error}", "write one JSON object per line"
        ) from None
    if not isinstance(entry, dict):
        raise SpecDecError(f"{where} is not a JSON object", 'write {"prompt": "..."}')
    entry = _read_data_row(entry)
    known = (*LINE_FIELDS, *more_keys)
    for key in entry:
        if key not in known:
            raise SpecDecError(
                f"{where}: unknown key {shorten(key)}{suggest(key[:100], known)}",
                f"this release knows {', '.join(known)}",
            )
    sources = (*SOURCES, *({"turns"} & set(more_keys)))
    if sum(key in entry for key in sources) != 1:
        raise SpecDecError(
            f"{where} needs exactly one of {', '.join(sources)}", 'write {"prompt": "..."}'
        )
    values = {LINE_FIELDS[key]: value for key, value in entry.items() if key in LINE_FIELDS}
    if isinstance(bias := values.get("logit_bias"), dict):
        values["logit_bias"] = read_bias(bias)
    find_faults(values, f"{where}: ").raise_all()
    others = {key: value for key, value in entry.items() if key not in LINE_FIELDS}
    return Line(where, Prompt(**values), others)


def _read_data_row(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a row that `specdec-train data` wrote as the prompt of its last answer.

    Other lines are returned as they are. A text whose prompt is not known is the prompt.
    """
    if ROW_MARK not in entry:
        return entry
    line = {name: value for name, value in entry.items() if name not in ROW_FACTS}
    if (text := line.pop("text", None)) is not None:
        line.setdefault("prompt", text)
    messages: Any = line.get("messages")
    if _is_list(messages, _is_message) and messages and messages[-1]["role"] == "assistant":
        line["messages"] = messages[:-1]
    options = {name: line.pop(name) for name in OPTIONS if name in line}
    more = line.get("chat_template_kwargs", {})
    if options and isinstance(more, dict):
        line["chat_template_kwargs"] = {**options, **more}
    return line


def read_bias(value: Mapping[str, Any]) -> dict[Any, Any]:
    """A logit_bias of JSON by token ids; a key that is no id stays a text."""
    return {int(k) if TOKEN_NAME.fullmatch(k) else k: value[k] for k in value}


def find_faults(
    values: Mapping[str, Any], where: str = "", names: Mapping[str, str] = FIELD_KEYS
) -> Problems:
    """List which of a prompt's settings have values of no use; names: what they are called."""
    problems = Problems()
    for field, (is_good, expected) in CHECKS.items():
        if field in values and not is_good(values[field]):
            name, reason = names.get(field, field), f"is {shorten(values[field])}, not {expected}"
            problems.add(f"{where}{name} {reason}", f"give {name} {expected}", field, reason)
    return problems


def check_prompt(index: int, prompt: Prompt) -> Prompt:
    """Return a prompt with plain values; PromptError for one that is of no use."""
    given = {name: _make_plain(value) for name, value in prompt.list_given().items()}
    if sum(source in given for source in SOURCES.values()) != 1:
        raise PromptError(
            f"{name_prompt(index)} has not exactly one of text, token_ids and messages",
            "give one of them",
        )
    find_faults(given, f"{name_prompt(index)}: ").raise_all()
    return Prompt(**given)


def _make_plain(value: Any) -> Any:
    """A list, dict or int for what is like one, as an array of token ids is; else the value."""
    if isinstance(value, (str, bytes, bool, int, float)):
        return value
    if hasattr(value, "tolist"):  # an array or a tensor
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return [_make_plain(one) for one in value] if isinstance(value, Iterable) else value


def find_end_ids(settings: DecodeSettings, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a request: --end-id, else generation_config.json's, else the tokenizer's.

    Without a generation_config.json, config.json's also end one. What else the former would do to
    a text is logged, for it is not done.
    """
    if settings.end_id is not None:
        return frozenset([settings.end_id])
    eos = getattr(tokenizer, "eos_token_id", None)
    own: frozenset[int] = frozenset() if eos is None else frozenset([eos])
    if settings.tokenizer_dir is not None:
        folder = Path(localize(settings.tokenizer_dir))
        if not folder.is_dir():  # of the Hub, whose tokenizer alone was fetched
            folder = fetch_tokenizer(settings.tokenizer_dir)
        path = folder / "generation_config.json"
        if path.is_file():
            document = read_json(path)
            _log_defaults(document, path)
            told = _read_ids(document)
            return own if told is None else told
        if (folder / "config.json").is_file():
            own |= _read_ids(read_json(folder / "config.json")) or frozenset()
    return own


def _read_ids(document: Mapping[str, Any]) -> frozenset[int] | None:
    """The end tokens that a configuration names; None where it names none."""
    ids = document.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    return frozenset(ids) if all(type(i) is int for i in ids) else None


def _log_defaults(document: Mapping[str, Any], path: Path) -> None:
    """Say which fields of a generation_config.json change texts and are not applied."""
    told = [
        f"{key} {shorten(document[key])}" for key in DEFAULTS
        if document.get(key) not in (None, False, 0, 1, [], {})
    ]  # fmt: skip
    if told:
        logger.info("%s: not applied, give it with each request: %s", path, ", ".join(told))


def read_flags(settings: DecodeSettings, num_prompts: int) -> list[Prompt]:
    """What the flags say of each prompt; UsageError for values of no use."""
    values: dict[str, Any] = {
        "top_p": settings.top_p, "seed": settings.random_seed, "stop": settings.stop_words,
    }  # fmt: skip
    for fact, remedy in find_faults(values, names=FLAGS):
        raise UsageError(fact, remedy)
    shared = Prompt(max_output_len=settings.max_output_len, top_k=settings.top_k, **values)
    if settings.temperature is None:
        return [shared] * num_prompts
    try:
        temperatures = [float(part) for part in settings.temperature.split(",")]
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
    return [dataclasses.replace(shared, temperature=value) for value in temperatures]


def make_requests(
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    tokenizer: Any,
    end_ids: frozenset[int] | None = None,
    compile_grammar: Callable[[Mapping[str, Any]], Grammar] | None = None,
    first: int = 0,
    repeats: bool = False,
) -> list[Request]:
    """Tokenize prompts that are checked already; a prompt's own settings win over the flags.

    first: the index of the first one. end_ids: tokens that end a request, where they are known
    already. compile_grammar: for prompts that have a grammar, where there is one already. repeats:
    whether a prompt may have several requests, of which `choose_best` takes one.
    """
    from specdec.decode.encoding import encode_prompt  # which knows prompts

    if end_ids is None:
        end_ids = find_end_ids(settings, tokenizer)
    requests = []
    for index, (own, flags) in enumerate(
        zip(prompts, read_flags(settings, len(prompts)), strict=True), first
    ):
        text, ids = encode_prompt(own, settings, tokenizer)
        prompt = dataclasses.replace(flags, **own.list_given())
        if tokenizer is None and (prompt.stop or prompt.bad_words):
            raise lack_tokenizer("stop words need" if prompt.stop else "bad_words need")
        _check_combination(name_prompt(index), prompt)
        best_of = prompt.best_of or 1
        if best_of > 1 and not repeats:
            raise PromptError(
                f"{name_prompt(index)} has best_of {best_of}, which chooses among complete outputs;"
                " here it has one, or its output is streamed",
                "leave best_of out",
                field="best_of",
            )
        grammar = None
        if prompt.grammar is not None:
            compile_grammar = compile_grammar or GrammarCompiler(tokenizer, end_ids).compile
            try:
                grammar = compile_grammar(prompt.grammar)
            except SpecDecError as error:
                raise PromptError(error.message, error.hint, field="grammar") from None
        stop, stop_ids = prompt.stop or (), frozenset(prompt.stop_token_ids or ())
        ends = stop_ids | (end_ids if prompt.end_ids is None else frozenset(prompt.end_ids))
        hidden = stop_ids if prompt.skip_special_tokens is not False else ends
        assert prompt.max_output_len is not None
        sampling = _make_sampling(prompt, tokenizer)
        requests += [
            Request(
                index=index,
                input_text=text,
                input_ids=ids,
                max_output_len=prompt.max_output_len,
                end_ids=ends,
                sampling=dataclasses.replace(sampling, seed=(sampling.seed + at) % 2**64),
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                form=TextForm(
                    hidden=frozenset() if prompt.include_stop_str_in_output else hidden,
                    includes_stop=bool(prompt.include_stop_str_in_output),
                    skips_special=prompt.skip_special_tokens is not False,
                    spaces_special=prompt.spaces_between_special_tokens is not False,
                    min_tokens=prompt.min_tokens or 0,
                ),
                num_logprobs=prompt.logprobs if best_of == 1 else prompt.logprobs or 0,
                wants_prompt_logprobs=bool(prompt.prompt_logprobs),
                drafts=prompt.speculation is not False,
                keep_trees=bool(prompt.keep_trees),
                grammar=grammar,
            )
            for at in range(best_of)
        ]
    return requests


def _check_combination(name: str, prompt: Prompt) -> None:
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


def _make_sampling(prompt: Prompt, tokenizer: Any) -> SamplingParams:
    """How a prompt's tokens are chosen, its flags filled in."""
    top_k, top_p, temperature = prompt.top_k or 0, prompt.top_p, prompt.temperature
    assert prompt.seed is not None
    assert top_p is not None
    if temperature is None:
        temperature = float(top_k > 0 or top_p < 1)
    given = {name: value for name, value in prompt.list_given().items() if name in SHAPING}
    bias = tuple(given.pop("logit_bias", {}).items())
    allowed = prompt.allowed_token_ids
    return SamplingParams(
        temperature=float(temperature),
        top_k=top_k,
        top_p=float(top_p),
        seed=prompt.seed,
        logit_bias=bias,
        allowed_ids=None if allowed is None else frozenset(allowed),
        bad_words=frozenset(_list_bad_words(prompt.bad_words or (), tokenizer)),
        min_tokens=prompt.min_tokens or 0,
        **{name: float(value) for name, value in given.items()},
    )


def _list_bad_words(words: Sequence[str], tokenizer: Any) -> Iterator[tuple[int, ...]]:
    """The tokens that words are written with, behind a space and not."""
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            yield tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
