"""Errors for users: a fact with its numbers, and a remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class SpecDecError(Exception):
    """Error of work that could not be done: `error:` and `hint:` lines, exit status 1.

    problems: the (fact, remedy) pairs that the message lists.
    """

    def __init__(
        self, message: str, hint: str, *, problems: Sequence[tuple[str, str]] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.problems = list(problems) or [(message, hint)]

    def __reduce__(self) -> tuple[Any, ...]:  # lets process pools pass the error on
        return type(self), (self.message, self.hint), vars(self)


DISTRIBUTION = "specdec-toolchain"  # `specdec` on the package index is another project


def name_extra(extra_name: str) -> str:
    """Return the command that installs the packages of an optional feature, for a hint.

    It names the packages: specdec itself is on no package index.
    """
    import re
    from importlib import metadata

    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        requirements = []
    entries = [re.split(r"\s*;\s*(?=.*extra *==)", line) for line in requirements]
    marker = re.compile(rf"extra *== *['\"]{re.escape(extra_name)}['\"]")
    packages = [entry[0] for entry in entries if len(entry) > 1 and marker.search(entry[1])]
    package_words = " ".join(f"'{package}'" for package in packages)
    return (
        f"pip install {package_words}"
        if package_words
        else f"pip install '.[{extra_name}]' in the checkout"
    )


class UsageError(SpecDecError):
    """Error of a command line or recipe; exit status 2."""


class ExcessLength(NamedTuple):
    """Numbers of tokens of a prompt that is too long, alone or with its output.

    max_prompt_tokens: of the longest prompt that leaves room for a token of output.
    max_tokens: of prompt and output together.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    max_prompt_tokens: int
    max_tokens: int


class PromptError(SpecDecError):
    """Error of one prompt or its settings; other prompts are not affected.

    field: the field of `Prompt` with the fault, None for no single field. reason: the fault of its
    value, a sentence without its subject. excess: the numbers of a prompt that is too long, None
    for another fault.
    """

    def __init__(
        self, message: str, hint: str, *, problems: Sequence[tuple[str, str]] = (),
        field: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message, hint, problems=problems)
        fault = next((p for p in self.problems if isinstance(p, FieldProblem)), None)
        self.field = field if fault is None else fault.field
        self.reason = None if fault is None else fault.reason
        self.excess = None if fault is None else fault.excess


class FieldProblem(tuple[str, str]):
    """Pair of `Problems` about a field of a prompt; see `PromptError`."""

    field: str
    reason: str | None
    excess: ExcessLength | None

    def __new__(
        cls, fact: str, remedy: str, field: str, reason: str | None = None,
        excess: ExcessLength | None = None,
    ) -> FieldProblem:  # fmt: skip
        fault = super().__new__(cls, (fact, remedy))
        fault.field, fault.reason, fault.excess = field, reason, excess
        return fault

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (*self, self.field, self.reason, self.excess)


class EngineBusyError(SpecDecError):
    """Error of an engine that another thread is using; a later call may succeed."""


class EngineLostError(SpecDecError):
    """Error of an engine that was closed, or lost a rank; it must be loaded again."""


# Handler of a call that hangs until the process ends. Arguments: the error, an exit status, and a
# function that cleans up. A command prints the error and exits.
on_hang: Callable[[SpecDecError, int, Callable[[], None]], None] | None = None


class StepError(SpecDecError):
    """Error of a stream whose step failed; a new request for its prompt may succeed."""


MAX_PROBLEMS = 20  # most problems in one message


class Problems(list[tuple[str, str]]):
    """List of (fact, remedy) pairs that one error reports together."""

    def add(
        self, fact: str, remedy: str, field: str | None = None, reason: str | None = None
    ) -> Problems:
        """Add a problem; return all. field, reason: see `PromptError`."""
        self.append((fact, remedy) if field is None else FieldProblem(fact, remedy, field, reason))
        return self

    @classmethod
    def from_table(cls, *rows: tuple[object, str, str] | tuple[object, str, str, str]) -> Problems:
        """Return the problems of a table's rows: (is_wrong, fact, remedy), perhaps with a field."""
        problems = cls()
        for is_wrong, *row in rows:
            if is_wrong:
                problems.add(*row)
        return problems

    def raise_all(self) -> None:
        """Raise one error that lists every pair once; do nothing for an empty list.

        A remedy that several pairs share is printed once. A FieldProblem makes it a PromptError.
        """
        different = list(dict.fromkeys(self))
        if not different:
            return
        is_prompt = any(isinstance(problem, FieldProblem) for problem in different)
        kind = PromptError if is_prompt else SpecDecError
        if len(different) == 1:
            raise kind(*different[0], problems=different)
        listed_problems = different[:MAX_PROBLEMS]
        facts = [f"({i}) {fact}" for i, (fact, _) in enumerate(listed_problems, 1)]
        if len(different) > len(listed_problems):
            facts.append(f"and {len(different) - len(listed_problems)} more")
        numbers: dict[str, list[str]] = {}
        for i, (_, remedy) in enumerate(listed_problems, 1):
            numbers.setdefault(remedy, []).append(str(i))
        remedies = [f"({', '.join(indices)}) {remedy}" for remedy, indices in numbers.items()]
        if len(remedies) == 1:
            remedies = list(numbers)
        raise kind(
            f"{len(different)} problems: {'; '.join(facts)}",
            "; ".join(remedies),
            problems=different,
        )


# Other tools' name of an option or a setting -> names here, of which the first that exists counts.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_output_len",), "max_new_tokens": ("max_output_len", "max_tokens"),
    "n_predict": ("max_output_len", "max_tokens"), "n": ("max_output_len",),
    "max_length": ("max_output_len", "model_max_length", "max_seq_len"),
    "max_model_len": ("max_seq_len",), "ctx_size": ("max_seq_len",), "c": ("max_seq_len",),
    "prompt": ("input_text", "prompts", "messages"), "p": ("input_text", "input_file"),
    "prompts": ("input_file",), "qformat": ("quantization",), "f": ("input_file",),
    "calib_dataset": ("calibration_data",), "seed": ("random_seed",), "stop": ("stop_words",),
    "eos_token_id": ("end_id",), "model": ("model_dir", "engine_dir"),
    "m": ("model_dir", "engine_dir"), "engine": ("engine_dir",), "tokenizer": ("tokenizer_dir",),
    "draft_model": ("draft_model_dir", "draft_engine_dir", "drafter_model_dir"),
    "md": ("draft_model_dir", "draft_engine_dir"), "model_draft": ("draft_model_dir",),
    "batch_size": ("max_batch_size", "batch_sizes"), "tp": ("tp_size",),
    "tensor_parallel_size": ("tp_size",), "output": ("output_dir", "output_file"),
    "o": ("output_dir", "output_file"), "outfile": ("output_dir",),
    "text": ("prompt",), "conversations": ("messages",),
    "num_speculative_tokens": ("draft_len", "max_draft_len"),
    "lr": ("learning_rate",), "mode": ("method", "speculative_decoding_mode"),
    "max_token": ("max_tokens", "max_output_len"), "data_path": ("input", "data"),
    "output_path": ("output", "output_dir", "output_file"), "train_bs": ("batch_size",),
    "training_seq_len": ("model_max_length",), "num_gpu": ("tp_size",),
    "bf16": ("bfloat16",), "fp16": ("float16",), "half": ("float16",), "fp32": ("float32",),
}  # fmt: skip


def find_nearest(name: str, known_names: Sequence[str]) -> str | None:
    """Return the known name that `name` may mean: its alias, or a near miss; None for neither.

    A near miss differs in one letter of four at most, or one of a short name; or one name is the
    beginning of the other; or one name has all of the several words of the other.
    """
    if meant := [alias for alias in ALIASES.get(name, ()) if alias in known_names]:
        return meant[0]
    misses = [(_count_edits(name, candidate), candidate) for candidate in known_names]
    near = [
        (edits, candidate) for edits, candidate in misses
        if edits <= max(1, max(len(name), len(candidate)) // 4) or _shares_words(name, candidate)
    ]  # fmt: skip
    return min(near)[1] if near and name else None


def _count_edits(name: str, candidate: str) -> int:
    """Count the letters to insert, remove, change or swap from name to candidate."""
    two_above: list[int] = []
    row = list(range(len(candidate) + 1))
    for i, letter in enumerate(name, 1):
        above, row = row, [i]
        for j, candidate_letter in enumerate(candidate, 1):
            edits = [above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != candidate_letter)]
            if i > 1 and j > 1 and (letter, name[i - 2]) == (candidate[j - 2], candidate_letter):
                edits.append(two_above[j - 2] + 1)
            row.append(min(edits))
        two_above = above
    return row[-1]


def _shares_words(name: str, candidate: str) -> bool:
    short, long = sorted((name.replace("-", "_"), candidate.replace("-", "_")), key=len)
    words = short.split("_")
    is_within = len(words) > 1 and set(words) <= set(long.split("_"))
    return len(short) > 2 and (long.startswith(short) or is_within)


def suggest(name: str, known_names: Sequence[str]) -> str:
    """Return ` (did you mean X?)` for the known name nearest to `name`, or an empty string."""
    nearest = find_nearest(name, known_names)
    return f" (did you mean {nearest}?)" if nearest else ""


def summarize(error: BaseException) -> str:
    """Return the first line of a foreign exception's text, or its type where it has none."""
    lines = str(error).strip().splitlines()
    return cut_middle(lines[0], 400) if lines else type(error).__name__


def cut_middle(text: str, limit: int) -> str:
    """Return a text of at most about `limit` characters: its start and its end."""
    if len(text) <= limit:
        return text
    head_length = 2 * limit // 3
    tail_length = limit - head_length
    return f"{text[:head_length]} ... [{len(text) - limit} characters] ... {text[-tail_length:]}"


def make_printable(text: str) -> str:
    """Spell the control sequences for a terminal that names out of a hostile file may hold."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


MAX_NAMES = 10  # most names in one message


def join_names(names: Sequence[str]) -> str:
    """Return the first names as one text, with the number of further ones."""
    text = ", ".join(names[:MAX_NAMES])
    return f"{text} and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else text


def count(number: int, noun: str) -> str:
    """Return `1 tensor`, `2 tensors`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def shorten(value: object, limit: int = 60) -> str:
    """Return the repr of a value out of a foreign file, cut to a message's length."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."
