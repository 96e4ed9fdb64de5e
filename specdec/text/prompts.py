"""Prompts with their settings: from a file or the flags, checked by one table, and tokenized."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import math
import numbers
import re
import stat
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from specdec.errors import (
    Problems,
    PromptError,
    SpecDecError,
    UsageError,
    shorten,
    suggest,
)
from specdec.files.reading import parse_json
from specdec.options import is_whole
from specdec.system.logs import get_logger
from specdec.text.chat import OPTIONS

logger = get_logger(__name__)

STDIN, GZIP = Path("-"), ".gz"
MAX_BYTES, BLOCK_BYTES = 1_000_000_000, 1 << 20  # of a file of prompts, and of what is read at once
MAX_LOGPROBS = 20
MAX_WORDS = 1024
MAX_COUNT = 2**31 - 1  # of tokens, and the largest token id that any library takes
TOKEN_NAME = re.compile("0|[1-9][0-9]{0,9}")
SHAPING = (
    "min_p", "logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip
ONLY = -1  # the index of a prompt that was given alone
# Check of a setting: a function that accepts good values, and the words for these.
Check = tuple[Callable[[Any], bool], str]


def name_prompt(index: int) -> str:
    """Return the name of a prompt in messages, by its index."""
    return "the prompt" if index == ONLY else f"prompt {index}"


def _is_count(value: Any, minimum: int = 0, maximum: int = MAX_COUNT) -> bool:
    return type(value) is int and minimum <= value <= maximum


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


def _count(minimum: int, maximum: int = MAX_COUNT) -> Check:
    return lambda v: _is_count(v, minimum, maximum), f"a whole number from {minimum} to {maximum}"


def _number(low: float, high: float) -> Check:
    return lambda v: _is_number(v, low, high), f"a number from {low} to {high}"


def _is_speculation(value: Any) -> bool:
    if not isinstance(value, dict):
        return isinstance(value, bool)
    method, max_tokens = value.get("method"), value.get("max_tokens")
    is_known = set(value) <= {"method", "max_tokens"} and (method is None or _is_text(method))
    return is_known and (max_tokens is None or _is_count(max_tokens, 1))


def _field(check: Check) -> Any:
    """Make the field of a prompt's setting, with the check of its values."""
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
SPECULATION: Check = (
    _is_speculation, 'true, false or {"method": a text, "max_tokens": a whole number of at least 1}'
)  # fmt: skip


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
    follow the others; as tokenized after a space and at a beginning, of the output only.
    allowed_token_ids: the only tokens that may come. Both are refused beside a grammar, and a
    grammar that has come to its end ends a text before min_tokens.

    min_p: least share of the likeliest token's probability. logit_bias: what is added to the logits
    of tokens. The penalties: repetition_penalty of tokens in prompt or output, the two others of
    those in the output.
    logprobs: for how many of the likeliest tokens to return log-probabilities, besides each new
    one's; None returns none. prompt_logprobs: whether to return those of the prompt's tokens too,
    which takes reading it whole. best_of: so many outputs are made, with consecutive seeds, and the
    one with the highest sum of log-probabilities is returned; not of streams. speculation: False
    drafts nothing for this prompt; {"method": ..., "max_tokens": N} lets one of the engine's own
    methods draft, or at most N tokens a step. keep_trees: let the events of a stream have the tree
    of each step. grammar: what the text keeps to: {"json_schema": {...}}, {"json_object": True},
    {"regex": "..."}, {"choice": ["...", "..."]} or {"lark": "..."}. Between the parts of a JSON
    text there is at most the white space that json.dumps writes; {"x-guidance":
    {"whitespace_flexible": True}} in its schema allows all.
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
    speculation: bool | Mapping[str, Any] | None = _field(SPECULATION)
    keep_trees: bool | None = _field(BOOL)
    grammar: Mapping[str, Any] | None = _field(OBJECT)

    def list_given(self) -> dict[str, Any]:
        """Return the settings that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


# Checks of all settings of a prompt, by name: for files, flags, Python and HTTP.
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
# Keys of a row that `specdec-train data` wrote: the one by which it is known, and those about it.
ROW_MARK, ROW_FACTS = "index", ("index", "id", "truncated")


@dataclasses.dataclass(frozen=True)
class Line:
    """Prompt of one line of a file.

    location: the file and the line's number. other_fields: fields of the line that are no setting
    of a prompt.
    """

    location: str
    prompt: Prompt
    other_fields: dict[str, Any] = dataclasses.field(default_factory=dict)


def list_prompts(texts: Sequence[str], input_file: Path | None, *, json: bool) -> list[Prompt]:
    """Return the prompts of a command line: texts, or those of --input-file.

    json: whether the command prints JSON; UsageError for prompts whose output needs it.
    """
    if input_file is None:
        return [Prompt(text=text) for text in texts]
    lines = read_prompts(input_file, "--input-file")
    asking = [line.location for line in lines if line.prompt.logprobs is not None]
    if asking and not json:
        raise UsageError(f"{asking[0]} asks for logprobs, which texts do not show", "add --json")
    return [line.prompt for line in lines]


def read_prompts(path: Path, flag: str, more_keys: Sequence[str] = ()) -> list[Line]:
    """Read a file of prompts that a flag names: .txt or .jsonl, also gzipped; stdin for "-".

    more_keys: other keys that a line of .jsonl may have; `turns` stands for the prompt. Raises
    SpecDecError that lists what is wrong of all lines.
    """
    lines, name = _read_lines(path, flag), "stdin" if path == STDIN else path
    suffix = _find_suffix(path, lines)
    prompt_lines, problems = [], Problems()
    for number, line in enumerate(lines, 1):
        location = f"{name} line {number}"
        if not line.strip():
            continue
        if suffix == ".txt":
            prompt_lines.append(Line(location, Prompt(text=line)))
            continue
        try:
            prompt_lines.append(read_line(location, line, more_keys))
        except SpecDecError as error:
            problems += error.problems
    problems.raise_all()
    if not prompt_lines:
        raise SpecDecError(f"{name} holds no prompt", "write one prompt per line")
    return prompt_lines


def _find_suffix(path: Path, lines: Sequence[str]) -> str:
    """Return .txt or .jsonl: a file's by its name, that of stdin by its first line."""
    if path == STDIN:
        first_line = next((line for line in lines if line.strip()), "")
        return ".jsonl" if first_line.lstrip().startswith("{") else ".txt"
    suffix = Path(path.stem).suffix if path.suffix == GZIP else path.suffix
    if suffix not in (".txt", ".jsonl"):
        raise SpecDecError(f"{path} is neither .txt nor .jsonl", "name the file by what it holds")
    return suffix


def _read_lines(path: Path, flag: str) -> list[str]:
    """Return the lines of a file or of stdin, without a byte order mark before them."""
    name, remedy = path if path != STDIN else "stdin", "the file " if path != STDIN else "it "
    try:
        if path == STDIN:
            text = _read_once(sys.stdin).removeprefix("\ufeff")
            text.encode()  # in some locales Python lets other bytes through
        else:
            text = _read_file(path).decode("utf-8-sig")
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


def _read_file(path: Path) -> bytes:
    """Return the content of a file or a named pipe, unpacked."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISDIR(mode)):
        raise SpecDecError(f"{path} is a device, not a file", "give a file, a pipe, or - for stdin")
    return _read_pipe(path) if stat.S_ISFIFO(mode) else _unpack(path)


def _unpack(path: Path) -> bytes:
    with path.open("rb") as file:
        _find_suffix(path, ())
        stream = gzip.GzipFile(fileobj=file) if path.suffix == GZIP else file
        return b"".join(_read_blocks(stream, path))


@functools.lru_cache(maxsize=1)
def _read_pipe(path: Path) -> bytes:
    """Return all of a named pipe, also to a second caller, as `_read_once` does of stdin."""
    return _unpack(path)


@functools.lru_cache(maxsize=1)
def _read_once(stream: TextIO) -> str:
    """Return all of stdin, also to a second caller: specdec generate checks it, then runs it."""
    return "".join(_read_blocks(stream, "stdin"))


def _read_blocks(stream: Any, name: object) -> Iterator[Any]:
    """Yield the blocks of a stream; SpecDecError where it has more than a file of prompts may."""
    size = 0
    while block := stream.read(BLOCK_BYTES):
        size += len(block)
        if size > MAX_BYTES:
            raise SpecDecError(
                f"{name} holds more than {MAX_BYTES} bytes, as unpacked text",
                "give its prompts in several files",
            )
        yield block


def read_line(location: str, line: str, more_keys: Sequence[str] = ()) -> Line:
    """Read a line of .jsonl; see `read_prompts`."""
    try:
        entry = parse_json(line.encode())
    except ValueError as error:
        raise SpecDecError(
            f"{location} is not JSON: {error}", "write one JSON object per line"
        ) from None
    if not isinstance(entry, dict):
        raise SpecDecError(f"{location} is not a JSON object", 'write {"prompt": "..."}')
    entry = _read_data_row(entry)
    known_keys = (*LINE_FIELDS, *more_keys)
    for key in entry:
        if key not in known_keys:
            raise SpecDecError(
                f"{location}: unknown key {shorten(key)}{suggest(key[:100], known_keys)}",
                f"this release knows {', '.join(known_keys)}",
            )
    sources = (*SOURCES, *({"turns"} & set(more_keys)))
    if sum(key in entry for key in sources) != 1:
        raise SpecDecError(
            f"{location} needs exactly one of {', '.join(sources)}", 'write {"prompt": "..."}'
        )
    values = {LINE_FIELDS[key]: value for key, value in entry.items() if key in LINE_FIELDS}
    if isinstance(bias := values.get("logit_bias"), dict):
        values["logit_bias"] = read_bias(bias)
    find_faults(values, f"{location}: ").raise_all()
    other_fields = {key: value for key, value in entry.items() if key not in LINE_FIELDS}
    return Line(location, Prompt(**values), other_fields)


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
    template_options = line.get("chat_template_kwargs", {})
    if options and isinstance(template_options, dict):
        line["chat_template_kwargs"] = {**options, **template_options}
    return line


def read_bias(value: Mapping[str, Any]) -> dict[Any, Any]:
    """Return a logit_bias of JSON by token ids; a key that is no id stays a text."""
    return {int(k) if TOKEN_NAME.fullmatch(k) else k: value[k] for k in value}


def find_faults(
    values: Mapping[str, Any], location: str = "", names: Mapping[str, str] = FIELD_KEYS
) -> Problems:
    """List which of a prompt's settings have values of no use; names: what they are called."""
    problems = Problems()
    for field, (is_good, expected) in CHECKS.items():
        if field in values and not is_good(values[field]):
            name, reason = names.get(field, field), f"is {shorten(values[field])}, not {expected}"
            problems.add(f"{location}{name} {reason}", f"give {name} {expected}", field, reason)
    return problems


def check_prompt(index: int, prompt: Prompt) -> Prompt:
    """Return a prompt with plain values; PromptError for one that is of no use."""
    settings = {name: _make_plain(value) for name, value in prompt.list_given().items()}
    if sum(source in settings for source in SOURCES.values()) != 1:
        raise PromptError(
            f"{name_prompt(index)} has not exactly one of text, token_ids and messages",
            "give one of them",
        )
    find_faults(settings, f"{name_prompt(index)}: ", names={}).raise_all()
    return Prompt(**settings)


def _make_plain(value: Any) -> Any:
    """Return a list, dict or int for a value that is like one, such as an array; else the value."""
    if isinstance(value, (str, bytes, bool, int, float)):
        return value
    if hasattr(value, "tolist"):  # an array or a tensor
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    return [_make_plain(item) for item in value] if isinstance(value, Iterable) else value
