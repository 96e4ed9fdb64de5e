"""The tokens of a prompt: of a text, or of messages in a chat template.

The name of a special token, such as <|im_end|>, is that token where a chat template writes it, and
text where it stands in a message, unless --allow-special-tokens is given.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import PromptError, SpecDecError, UsageError, join_names, shorten, summarize
from specdec.files.reading import read_json
from specdec.options import is_whole
from specdec.system.logs import get_logger
from specdec.text.chat import join_parts
from specdec.text.tokenizer import lack_tokenizer
from specdec.text.tool_calls import render_calls

if TYPE_CHECKING:
    from specdec.decode.settings import DecodeSettings
    from specdec.text.prompts import Prompt

logger = get_logger(__name__)

# Chat templates by name, for models that have none. raw: the contents only, one after the other.
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "plain": "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}",
    "raw": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}
# Keys of a config.json for the tokens in whose places images, videos and sounds are put.
IMAGE_KEYS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")
# Texts, comments and regular expressions of a Lark grammar; or, in the group, a token's name.
_LARK_PIECE = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(<[^<>\s\[\]]+>)')
# Arguments of apply_chat_template besides the template's own variables.
RESERVED = frozenset((
    "conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs",
))  # fmt: skip


def use_template(tokenizer: Any, template_name: str | None) -> Any:
    """Return the tokenizer with the chat template that --chat-template names: FILE or NAME.

    NAME: one of TEMPLATES, or of the tokenizer's own templates where it has several.
    """
    if template_name is None:
        return tokenizer
    if tokenizer is None:
        raise lack_tokenizer("--chat-template needs")
    tokenizer_templates = tokenizer.chat_template
    templates = TEMPLATES | (tokenizer_templates if isinstance(tokenizer_templates, dict) else {})
    if template_name in templates:
        text = templates[template_name]
    elif _is_file(template_name):
        try:
            text = Path(template_name).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise SpecDecError(
                f"--chat-template {template_name} cannot be read: {summarize(error)}",
                "check the file",
            ) from None
    else:
        raise SpecDecError(
            f"--chat-template {shorten(template_name)} is neither a file nor a template's name",
            f"give a file of Jinja, or one of {', '.join(templates)}",
        )
    tokenizer.chat_template = text
    import jinja2

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise SpecDecError(
            f"--chat-template {template_name} line {error.lineno}: {summarize(error)}", "correct it"
        ) from None
    except Exception:  # noqa: BLE001 - a template refuses what it likes; messages are told of that
        return tokenizer
    return tokenizer


def _is_file(name: str) -> bool:
    """Return whether a file has this name; of a template's own text the system may not ask."""
    try:
        return Path(name).is_file()
    except OSError:
        return False


def applies_template(settings: DecodeSettings, tokenizer: Any, *, by_default: bool) -> bool:
    """Return whether texts are put into the chat template.

    by_default: whether they are where the tokenizer has one and the settings say neither.
    """
    choice = settings.apply_chat_template
    return (by_default and _has_template(tokenizer)) if choice is None else choice


def check_template_use(
    settings: DecodeSettings, prompts: Sequence[Prompt], tokenizer: Any, *, by_default: bool
) -> None:
    """Log what texts are taken as, and what of prompts the chat template leaves unread.

    Raises UsageError for a --chat-template that no prompt is put into. by_default: as in
    `applies_template`.
    """
    has_template = _has_template(tokenizer)
    applies = applies_template(settings, tokenizer, by_default=by_default)
    texts = [prompt.text for prompt in prompts if prompt.text is not None]
    if not applies and len(texts) == len(prompts):
        _refuse_template(settings)
    # An error of `encode_prompt` tells of a template that is missing.
    if texts and not (applies and not has_template):
        is_chosen = settings.apply_chat_template is not None
        _log_form(texts, tokenizer, applies=applies, by_default=by_default, is_chosen=is_chosen)
    if not by_default:  # else a run follows, which says it
        _log_unread(prompts, str(getattr(tokenizer, "chat_template", None)))


def _has_template(tokenizer: Any) -> bool:
    return tokenizer is not None and bool(tokenizer.chat_template)


def _refuse_template(settings: DecodeSettings) -> None:
    """Raise UsageError for a chat template that no prompt is put into."""
    if settings.chat_template is None:
        return
    fact, remedy = "--chat-template has no effect on texts", "add --apply-chat-template"
    if settings.apply_chat_template is False:
        raise UsageError(f"{fact} with --no-apply-chat-template", "leave one of them out")
    raise UsageError(fact, remedy)


def _log_unread(prompts: Sequence[Prompt], template: str) -> None:
    """Log the variables of prompts that stand nowhere in the chat template."""
    names = dict.fromkeys(name for p in prompts for name in p.chat_template_kwargs or ())
    if unread_names := [name for name in names if name not in template]:
        logger.warning(
            "chat_template_kwargs without effect: the chat template does not read %s",
            join_names(unread_names),
        )


def _log_form(
    texts: Sequence[str], tokenizer: Any, *, applies: bool, by_default: bool, is_chosen: bool
) -> None:
    """Log whether prompts are put into the chat template, and how to ask for the opposite."""
    has_template = _has_template(tokenizer)
    if applies and by_default:
        logger.info(
            "prompts: each is a user's turn in the model's chat template"
            " (--no-apply-chat-template: text to continue)"
        )
        if names := find_names(tokenizer).list_in("".join(texts)):
            logger.warning(
                "%s in a prompt is taken as text, not as a special token: give prompts that are"
                " formatted already with --no-apply-chat-template", join_names(names),
            )  # fmt: skip
    elif by_default or (has_template and not is_chosen):
        alternative = "the model has no chat template"
        if has_template:
            alternative = "--apply-chat-template: a user's turn in the model's chat template"
        logger.info("prompts: text to continue (%s)", alternative)


def encode_prompt(
    prompt: Prompt, settings: DecodeSettings, tokenizer: Any
) -> tuple[str, list[int]]:
    """Return a prompt as text, empty without a tokenizer, and as token ids."""
    text, ids = _encode(prompt, settings, tokenizer)
    if prompt.token_ids is None:
        refuse_images(text, ids, tokenizer)
    if (max_tokens := prompt.truncate_prompt_tokens) is None or len(ids) <= max_tokens:
        return text, ids
    return "" if tokenizer is None else str(tokenizer.decode(ids[-max_tokens:])), ids[-max_tokens:]


@functools.lru_cache(maxsize=4)
def find_image_tokens(tokenizer: Any) -> dict[int, str]:
    """Find the tokens that stand for images and videos, by the config.json beside a tokenizer."""
    folder = getattr(tokenizer, "name_or_path", None)
    path = Path(str(folder)) / "config.json"
    config = read_json(path) if folder and path.is_file() else {}
    ids = [config[key] for key in IMAGE_KEYS if type(config.get(key)) is int]
    return {number: str(tokenizer.convert_ids_to_tokens(number)) for number in ids}


def refuse_images(text: str, ids: Sequence[int], tokenizer: Any) -> None:
    """Raise PromptError for a prompt that has the token of an image or a video."""
    names = [name for number, name in find_image_tokens(tokenizer).items() if number in ids]
    if names:
        raise PromptError(
            f"the prompt {shorten(text)} has {join_names(names)}, which stands for an image or a"
            " video: this model's text part is run, without its vision tower",
            "leave it out: prompts are texts",
        )


def _encode(prompt: Prompt, settings: DecodeSettings, tokenizer: Any) -> tuple[str, list[int]]:
    if prompt.token_ids is not None:
        ids = list(prompt.token_ids)
        return _decode(ids, tokenizer), ids
    if tokenizer is None:
        raise lack_tokenizer("text prompts need")
    text, messages = prompt.text or "", prompt.messages
    if messages is None and settings.apply_chat_template:
        messages = [{"role": "user", "content": text}]
    if messages is None:
        adds = prompt.add_special_tokens is not False
        return text, tokenizer(text, add_special_tokens=adds, verbose=False)["input_ids"]
    return _encode_messages(prompt, messages, settings, tokenizer)


def _decode(ids: list[int], tokenizer: Any) -> str:
    """Return the text of a prompt's token ids, empty without a tokenizer."""
    if tokenizer is None:
        return ""
    try:
        return str(tokenizer.decode(ids))
    except Exception as error:  # noqa: BLE001 - of ids beyond its vocabulary some raise anything
        raise PromptError(
            f"the tokenizer cannot decode input_ids {shorten(ids)}: {summarize(error)}",
            "use the tokenizer that belongs to the model",
            field="token_ids",
        ) from None


def _encode_messages(
    prompt: Prompt, messages: Sequence[Mapping[str, Any]], settings: DecodeSettings, tokenizer: Any
) -> tuple[str, list[int]]:
    """Put messages into the chat template, and return its text and token ids."""
    messages = [  # a template for texts would show a list of parts as Python does
        message
        if message["content"] is None
        else {**message, "content": join_parts(message["content"])}
        for message in messages
    ]
    names = None if settings.allow_special_tokens else find_names(tokenizer)
    marked_messages = messages if names is None else names.hide(messages)
    if names is not None and prompt.chat_template_kwargs:  # tools among them
        variables = names.hide(prompt.chat_template_kwargs)
        prompt = dataclasses.replace(prompt, chat_template_kwargs=variables)
    text = render_chat(prompt, marked_messages, tokenizer)
    if not is_whole(text):
        raise PromptError(
            "messages, in the chat template, hold half a character (a lone surrogate)",
            "give texts of whole characters",
            field="messages",
        )
    adds = bool(prompt.add_special_tokens)  # a template writes them itself
    if names is not None and names.is_hidden(text):
        return names.show(text), names.encode(text, adds)
    return text, tokenizer(text, add_special_tokens=adds, verbose=False)["input_ids"]


def render_chat(prompt: Prompt, messages: Any, tokenizer: Any) -> str:
    """Put messages into the tokenizer's chat template, as a prompt says; PromptError if it fails.

    messages: those of the prompt, or what takes their place.
    """
    if not tokenizer.chat_template:
        raise PromptError(
            "the tokenizer has no chat template",
            f"give --chat-template FILE or one of {', '.join(TEMPLATES)}, or the instruction-tuned"
            " model's tokenizer",
            field="messages",
        )
    options = dict(prompt.chat_template_kwargs or {})
    if reserved := sorted(RESERVED & options.keys()):
        raise PromptError(
            f"chat_template_kwargs has {reserved[0]}, which is no variable of a template",
            "leave it out", field="chat_template_kwargs",
        )  # fmt: skip
    continues = bool(prompt.continue_final_message)
    if continues and prompt.add_generation_prompt:
        raise PromptError(
            "continue_final_message and add_generation_prompt are both given", "leave one out",
            field="continue_final_message",
        )  # fmt: skip
    begins = not continues and prompt.add_generation_prompt is not False
    try:
        text, _ = render_calls(
            lambda given: tokenizer.apply_chat_template(
                given, tokenize=False, add_generation_prompt=begins,
                continue_final_message=continues, **options,
            ),
            [dict(message) for message in messages], wants_text=False,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - a template raises whatever it likes
        raise PromptError(
            f"the chat template refuses the messages: {summarize(error)}",
            "check the roles and their order",
            field="messages",
        ) from None
    return text


def find_continued_text(prompt: Prompt) -> str:
    """Return the text of the assistant's message that an output goes on with; empty for none."""
    last = (prompt.messages or [{}])[-1]
    is_continued = prompt.continue_final_message and last.get("role") == "assistant"
    return join_parts(last.get("content") or "") if is_continued else ""


class SpecialNames:
    """Names of a tokenizer's special tokens, which it keeps apart from equal text in messages.

    Before a template is rendered, names in messages and in its variables are replaced by marks,
    which nobody can write who does not know the process's own number. What is rendered then has a
    name only where the template wrote it. A copy of the tokenizer knows its special tokens by other
    marks, so that all names are text to it.
    """

    def __init__(self, tokenizer: Any) -> None:
        added_tokens = getattr(tokenizer, "added_tokens_decoder", {})
        ids = {
            str(token.content): number for number, token in added_tokens.items() if token.special
        }
        ids |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        process_number = str(secrets.randbelow(10**18))
        self._ids = {name: ids[name] for name in sorted(ids, key=len, reverse=True) if name}
        self._texts = {f"{process_number}.{n}": name for name, n in self._ids.items()}
        self._tokens = {name: f"\ue002{process_number}.{n}\ue003" for name, n in self._ids.items()}
        self._marks = {name: f"\ue000{mark}\ue001" for mark, name in self._texts.items()}
        self._name = re.compile("|".join(map(re.escape, self._ids)) or "(?!)")
        # Python, and JSON of ASCII, write its first and last letter as escapes.
        self._mark = re.compile(rf"(?:\ue000|\\ue000)({process_number}[.][0-9]+)(?:\ue001|\\ue001)")
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)

    def list_in(self, text: str) -> list[str]:
        """Return the names that a text holds, each once."""
        return list(dict.fromkeys(self._name.findall(text)))

    def hide(self, value: Any) -> Any:
        """Return a document with marks in place of names."""
        if isinstance(value, str):
            return self._name.sub(lambda match: self._marks[match[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, (list, tuple)) else value

    def is_hidden(self, text: str) -> bool:
        """Return whether a rendered text has a name that a message wrote."""
        return self._mark.search(text) is not None

    def show(self, text: str) -> str:
        """Return a text with the names in place of their marks."""
        return self._mark.sub(lambda match: self._texts[match[1]], text)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Tokenize a rendered text, in which only names that the template wrote are special."""
        if self._backend is None:
            match = self._mark.search(text)
            assert match is not None
            raise PromptError(
                f"the messages have {self._texts[match[1]]}, the name of a special token, which"
                " this tokenizer cannot take as text",
                "leave it out, or give --allow-special-tokens", field="messages",
            )  # fmt: skip
        marked_text = self.show(self._name.sub(lambda match: self._tokens[match[0]], text))
        copy, numbers = self._renamed
        found_ids = copy.encode(marked_text, add_special_tokens=add_special_tokens).ids
        return [numbers.get(token, token) for token in found_ids]

    def rename(self) -> str | None:
        """Return the JSON of the tokenizer to which names are text; None where ids would differ.

        Its special tokens have marks as names, and their own ids.
        """
        if self._backend is None:
            return None
        copy, numbers = self._renamed
        return None if numbers else str(copy.to_str())

    def write_ids(self, lark: str) -> str:
        """Return a Lark grammar with ids in place of the names that stand there for tokens."""

        def write(match: re.Match[str]) -> str:
            is_token = match[1] in self._ids
            return f"<[{self._ids[match[1]]}]>" if is_token else match[0]

        return _LARK_PIECE.sub(write, lark)

    @functools.cached_property
    def _renamed(self) -> tuple[Any, dict[int, int]]:
        """Tokenizer with marks as names of special tokens, and the original ids that differ."""
        from tokenizers import Tokenizer

        document = json.loads(self._backend.to_str())
        model = document["model"]
        document["truncation"] = document["padding"] = None
        names = {token["content"]: token["id"] for token in document["added_tokens"]}
        for token in document["added_tokens"]:
            token["content"] = self._tokens.get(token["content"], token["content"])
        self._rename_pieces(model)
        copy = Tokenizer.from_str(json.dumps(document))
        original_ids = {
            copy.token_to_id(self._tokens.get(name, name)): n for name, n in names.items()
        }
        return copy, {
            token: n for token, n in original_ids.items() if token is not None and token != n
        }

    def _rename_pieces(self, model: dict[str, Any]) -> None:
        """Give the special tokens in the model of a tokenizer.json their marks as names."""
        if "merges" in model:  # none makes a special token, nor a longer one, of a text
            model["merges"] = [
                merge for merge in model["merges"]
                if self._tokens.keys().isdisjoint([*merge, "".join(merge)])
            ]  # fmt: skip
        if isinstance(vocab := model["vocab"], dict):
            model["vocab"] = {self._tokens.get(name, name): n for name, n in vocab.items()}
        else:
            model["vocab"] = [[self._tokens.get(piece, piece), *score] for piece, *score in vocab]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._tokens.get(model["unk_token"], model["unk_token"])


@functools.lru_cache(maxsize=4)
def find_names(tokenizer: Any) -> SpecialNames:
    """Return the names of a tokenizer's special tokens."""
    return SpecialNames(tokenizer)
