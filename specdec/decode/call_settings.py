"""Arguments of the public API: prompts and settings of a call, and options of `Engine.load`."""

from __future__ import annotations

import contextlib
import errno
import numbers
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from specdec.decode.settings import DecodeSettings
from specdec.errors import PromptError, UsageError, shorten, suggest
from specdec.options import check_value, get_flags
from specdec.text.prompts import CHECKS, Prompt, check_prompt, name_prompt

# Settings of specdec-run that are no option of `Engine.load`: it has parameters of its own for
# some of them, and `generate` has settings for the others.
NON_LOAD_OPTIONS = (
    "engine_dir", "tokenizer_dir", "draft_engine_dir", "device", "no_speculation",
    "apply_chat_template", "max_output_len", "temperature", "top_k", "top_p", "random_seed",
    "stop_words", "end_id",
)  # fmt: skip

AnyPrompt = str | Sequence[int] | Prompt


class Settings(TypedDict, total=False):
    """Settings for the prompts of a call that have none of their own.

    max_output_len: most new tokens, 100 if not given. temperature: 0 decodes greedily; if not given
    it is 1 with top_k or top_p, else 0. top_k: 0 keeps all tokens. top_p: 1 keeps all. seed: equal
    seeds give equal texts, in any batch. stop: texts that end an output. end_ids: tokens that end
    it; None is those of the model, empty is none.
    """

    max_output_len: int
    temperature: float | None
    top_k: int
    top_p: float
    seed: int
    stop: str | Sequence[str]
    end_ids: Collection[int] | None


def read_options(options: Mapping[str, Any], fixed: Mapping[str, Any]) -> DecodeSettings:
    """Make settings of the options of `Engine.load`, checked as those of a recipe are.

    fixed: settings that parameters of `load` give, by name.
    """
    flags = {name: flag for name, (flag, _) in get_flags(DecodeSettings).items()}
    option_names = [name for name in flags if name not in NON_LOAD_OPTIONS]
    for name in options:
        if name not in option_names:
            raise UsageError(
                f"Engine.load has no option {name!r}{suggest(name, option_names)}",
                f"its options are {', '.join(option_names)}",
            )
    values = {name: value for name, value in {**fixed, **options}.items() if value is not None}
    for name, value in values.items():
        if not (isinstance(value, (list, tuple)) and flags[name].takes_list):
            values[name] = check_value(name, value, flags[name])
    return DecodeSettings(**values)


@contextlib.contextmanager
def refuse_long_names() -> Iterator[None]:
    """Raise UsageError where a name in the body is longer than the system lets a path be."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise UsageError(
            f"{shorten(str(error.filename))} cannot be read: {error.strerror}", "check the path"
        ) from None


def list_prompts(prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[AnyPrompt]:
    """Return the prompts of a call as a list, whether it gives one or several."""
    if hasattr(prompts, "tolist"):  # an array or a tensor
        prompts = prompts.tolist()
    if isinstance(prompts, (str, bytes, Prompt, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]  # which are refused but for texts and prompts
    items: list[Any] = list(prompts)
    if items and isinstance(items[0], numbers.Integral):
        return [items]
    return items


def make_defaults(settings: Settings) -> Prompt:
    """Make a prompt of a call's settings; UsageError for those that no prompt has."""
    setting_names = list(Settings.__annotations__)
    for name in settings:
        if name not in CHECKS:
            raise UsageError(
                f"there is no setting {name!r}{suggest(name, setting_names)}",
                f"a call's are {', '.join(setting_names)}; a Prompt has more",
            )
    return Prompt(**settings)


def make_prompt(prompt: AnyPrompt) -> Prompt:
    """Return a text or token ids as a prompt without settings; a Prompt as it is."""
    if isinstance(prompt, Prompt):
        return prompt
    return Prompt(text=prompt) if isinstance(prompt, str) else Prompt(token_ids=prompt)


def fill_prompt(index: int, user_prompt: AnyPrompt, defaults: Prompt) -> Prompt:
    """Check a prompt of a call, and fill in the call's settings; PromptError for faulty ones."""
    if user_prompt is None or isinstance(user_prompt, (Mapping, numbers.Number)):
        type_name = type(user_prompt).__name__
        raise PromptError(
            f"{name_prompt(index)} is {shorten(user_prompt)}, of the type {type_name}",
            "give a text, a list of token ids, or a Prompt, which has messages too",
        )
    prompt_settings = make_prompt(user_prompt).list_given()
    if "grammar" in prompt_settings and "end_ids" in prompt_settings:
        raise PromptError(
            f"{name_prompt(index)} has both grammar and end_ids",
            "leave one out: a text that keeps to a grammar ends as the model's do",
            field="grammar",
        )
    all_settings = defaults.list_given() | prompt_settings
    if "grammar" in prompt_settings:
        all_settings.pop("end_ids", None)
    return check_prompt(index, Prompt(**all_settings))
