"""Loader of Hugging Face tokenizers, for which tokenizer.json is the truth.

Classes of transformers 5 build normalizer, pre-tokenizer and decoder anew from the vocabulary,
those of 4.57 build the post-processor anew. Here package tokenizers reads the file, and the keys
of tokenizer_config.json that transformers 4.57 applies to the file are applied to it. Without a
tokenizer.json, AutoTokenizer chooses a class and makes the tokenizer of the other files.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import json
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, summarize
from specdec.files.reading import read_json, read_members
from specdec.text.pretrained_config import NEWER

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.json"  # as processors are saved; tokenizers' classes never read it
# Keys of a config.json by which AutoTokenizer chooses a class.
CHOOSING = ("model_type", "model_name", "tokenizer_class")
# Names of the class that takes tokenizer.json as it is.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
END_KEYS = ("add_bos_token", "add_eos_token")
# Classes of transformers 4.57 that follow END_KEYS, with the values of keys that are absent ...
END_DEFAULTS = {
    "LlamaTokenizer": (True, False), "CodeLlamaTokenizer": (True, False),
    "GemmaTokenizer": (True, False), "CohereTokenizer": (True, False),
    "GPTNeoXTokenizer": (False, False),
}  # fmt: skip
# ... and the types of models whose tokenizers have these classes where no file names one.
MODEL_TYPES = {
    "CodeLlamaTokenizer": ("code_llama",),
    "CohereTokenizer": ("aya_vision", "cohere", "cohere2"),
    "GPTNeoXTokenizer": (
        "falcon_mamba", "gpt_neox", "mamba", "mamba2", "mpt", "olmo", "olmo2", "olmoe", "rwkv",
        "stablelm", "xlstm",
    ),
    "GemmaTokenizer": (
        "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "recurrent_gemma",
        "shieldgemma2", "t5gemma",
    ),
    "LlamaTokenizer": (
        "arcee", "aria", "chameleon", "deepseek_v2", "deepseek_v3", "diffllama", "ernie4_5",
        "ernie4_5_moe", "idefics3", "jamba", "jetmoe", "llama", "llama4", "llama4_text", "llava",
        "llava_next", "ministral", "mistral", "mistral3", "mixtral", "mllama", "paligemma",
        "persimmon", "phi3", "phimoe", "zamba", "zamba2",
    ),
}  # fmt: skip
# Classes of transformers 4.57 that make a tokenizer anew, of tokenizer.model, for add_prefix_space.
REBUILDING = ("LlamaTokenizer", "T5Tokenizer")
# Classes that set it in a sequence of pre-tokenizers, too.
DEEP_CLASSES = ("BloomTokenizer", "CohereTokenizer")
# Keys of BERT's classes, and the attributes of the normalizer that they set.
BERT_KEYS = {
    "do_lower_case": "lowercase", "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}  # fmt: skip
SETTLED_SECONDS = 1.0  # without a change, after which each change of a file has a time of its own
SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token")


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """Files of a tokenizer: tokenizer.json, and the documents of those that configure it.

    path: tokenizer.json, None where there is none. config: tokenizer_config.json; model:
    config.json; special: special_tokens_map.json. Each is empty where it cannot be read: what
    loads it says what is wrong.
    """

    name: str
    path: Path | None
    config: Mapping[str, Any]
    model: Mapping[str, Any]
    special: Mapping[str, Any]

    @functools.cached_property
    def class_name(self) -> str:
        """The class that transformers 4.57 chooses, without "Fast"; empty where it knows none."""
        class_key = self.config.get("tokenizer_class") or self.model.get("tokenizer_class")
        if isinstance(class_key, str):
            return class_key if class_key in PLAIN_CLASSES else class_key.removesuffix("Fast")
        model_type = self.model.get("model_type")
        return next((name for name, types in MODEL_TYPES.items() if model_type in types), "")

    @functools.cached_property
    def document(self) -> Mapping[str, Any]:
        """Keys of tokenizer.json that are read here, without its vocabulary."""
        assert self.path is not None
        return read_members(self.path, ("added_tokens", "pre_tokenizer"))

    @property
    def is_plain(self) -> bool:
        """Return whether all versions of transformers take tokenizer.json as it is."""
        return self.class_name in PLAIN_CLASSES and self.model.get("model_type") == "llama"

    @property
    def needs_code(self) -> bool:
        """Return whether the folder names Python of its own for its tokenizer."""
        auto_map = self.model.get("auto_map")
        is_asked = isinstance(auto_map, Mapping) and "AutoTokenizer" in auto_map
        return "auto_map" in self.config or is_asked


def find_file(name: str, file: str, *, local_files_only: bool = False, **_: Any) -> Path | None:
    """Find a file of a folder, or of a Hub id in the Hub or its cache; None where there is none."""
    if Path(name).is_dir():
        return path if (path := Path(name) / file).is_file() else None
    from transformers.utils import cached_file

    cached = cached_file(
        name, file, local_files_only=local_files_only, _raise_exceptions_for_missing_entries=False
    )
    return None if cached is None else Path(cached)


def find_files(name: str, **options: Any) -> TokenizerFiles:
    """Find the files of a tokenizer in a folder, or of a Hub id."""

    def read(file: str) -> Mapping[str, Any]:
        try:
            path = find_file(name, file, **options)
            return {} if path is None else read_json(path)
        except (OSError, SpecDecError):
            return {}

    return TokenizerFiles(
        name=name, path=find_file(name, TOKENIZER_FILE, **options), config=read(CONFIG_FILE),
        model=read("config.json"), special=read("special_tokens_map.json"),
    )  # fmt: skip


@contextlib.contextmanager
def keep_tokenizers() -> Iterator[None]:
    """Load a folder's tokenizer once meanwhile, where stages load one after another.

    Each gets a tokenizer whose template and special tokens it may change; the backend, which it may
    not, is one for all.
    """
    token = _kept_tokenizers.set({})
    try:
        yield
    finally:
        _kept_tokenizers.reset(token)


# Of `keep_tokenizers`: tokenizers by folder, with the options and files that they were loaded with.
_kept_tokenizers: ContextVar[dict[str, tuple[Any, Any]] | None] = ContextVar("kept", default=None)


def open_tokenizer(name: str, **options: Any) -> Any:
    """Load the tokenizer of a folder or Hub id; `options` are for transformers."""
    kept_tokenizers = _kept_tokenizers.get()
    if kept_tokenizers is None or not (states := _list_states(Path(name))):
        return _load_tokenizer(name, **options)
    kept_key, tokenizer = kept_tokenizers.get(name, (None, None))
    if kept_key != (key := (options, states)):
        tokenizer = _load_tokenizer(name, **options)
        if not hasattr(tokenizer, "backend_tokenizer"):
            return tokenizer
        kept_tokenizers[name] = key, tokenizer
    return _copy_tokenizer(tokenizer)


def _list_states(folder: Path) -> list[tuple[Any, ...]]:
    """List the files of a folder with their sizes and times, by which a change is noticed.

    None of what is no folder, and of one that was just written: two changes may have one time.
    """
    if not folder.is_dir():
        return []
    paths = sorted([*folder.iterdir(), *folder.glob("*/*.jinja")])
    stats = [(path.name, path.stat()) for path in paths if path.is_file()]
    if any(stat.st_mtime > time.time() - SETTLED_SECONDS for _, stat in stats):
        return []
    return [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _copy_tokenizer(tokenizer: Any) -> Any:
    """Copy a tokenizer with its lists and dictionaries, but for its backend."""
    twin = copy.copy(tokenizer)
    for name, value in vars(twin).items():
        if isinstance(value, (dict, list)):
            vars(twin)[name] = copy.copy(value)
    return twin


def _load_tokenizer(name: str, **options: Any) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()  # of another class's name, or another format
    files = find_files(name, **options)
    if files.path is None or files.needs_code:  # which this refuses, where it would have to run
        tokenizer = open_by_class(files, **options)
    if files.path is not None:
        tokenizer = _open_by_file(files, **options)
    templates = tokenizer.chat_template
    if not isinstance(templates, str) and "default" not in (templates or {}):
        tokenizer.chat_template = _add_processor_template(templates, name, **options)
    return tokenizer


def open_by_class(files: TokenizerFiles, **options: Any) -> Any:
    """Load a tokenizer by AutoTokenizer, which chooses a class."""
    import transformers

    if not transformers.__version__.startswith("4."):
        if files.config.get("tokenizer_class") and "auto_map" not in files.config and files.model:
            # To import the model's configuration, which it would read for its choice, takes 60 MB
            # and longer than to load an engine.
            class_keys = {key: files.model[key] for key in CHOOSING if key in files.model}
            options["config"] = transformers.PreTrainedConfig(name_or_path=files.name, **class_keys)
    return transformers.AutoTokenizer.from_pretrained(files.name, **options)


def _open_by_file(files: TokenizerFiles, **options: Any) -> Any:
    """Load tokenizer.json, and apply the keys of tokenizer_config.json."""
    import transformers

    if "fast_tokenizer_files" in files.config:
        raise SpecDecError(
            f"{files.name}: fast_tokenizer_files in {CONFIG_FILE} names other files by versions of"
            " transformers",
            f"keep the file for yours as {TOKENIZER_FILE}, and take the key out",
        )
    is_old = transformers.__version__.startswith("4.")
    special = files.config.get("extra_special_tokens")
    if is_old:  # transformers 5 writes a list where 4.57 takes a dict
        options["from_slow"] = False
        if isinstance(special, list):
            options["additional_special_tokens"] = special
        if not isinstance(special, dict):
            special = files.config.get("model_specific_special_tokens")
        options["extra_special_tokens"] = special or {}
    if "added_tokens_decoder" in files.config:
        options["added_tokens_decoder"] = _list_new_tokens(files)
    try:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
            files.name, tokenizer_file=str(files.path), **options
        )
    except Exception as error:  # noqa: BLE001 - a broken folder makes transformers raise anything
        if not is_old or not _is_newer(files):
            raise
        raise SpecDecError(
            f"{files.name}: transformers {transformers.__version__} cannot load its tokenizer,"
            f" which transformers 5 has saved: {summarize(error)}",
            NEWER,
        ) from None
    _add_class_tokens(tokenizer, files)
    if is_old:
        _restore_prefix_space(tokenizer.backend_tokenizer, files)
    apply_keys(tokenizer.backend_tokenizer, files, tokenizer.bos_token, tokenizer.eos_token)
    return tokenizer


def _list_new_tokens(files: TokenizerFiles) -> dict[str, Any]:
    """List what added_tokens_decoder adds to tokenizer.json, whose own tokens stay as they are."""
    file_ids = {token["content"]: token["id"] for token in files.document["added_tokens"] or ()}
    config_tokens = files.config["added_tokens_decoder"]
    for number, token in config_tokens.items():
        if (known_number := file_ids.get(token["content"], int(number))) != int(number):
            raise SpecDecError(
                f"{files.name}: token {token['content']!r} is {number} in {CONFIG_FILE}'s"
                f" added_tokens_decoder and {known_number} in {TOKENIZER_FILE}",
                "copy or download both files again, from one model",
            )
    return {
        number: token for number, token in config_tokens.items() if token["content"] not in file_ids
    }


def _is_newer(files: TokenizerFiles) -> bool:
    """Return whether transformers 5 has saved a tokenizer."""
    config = files.config
    return (
        "backend" in config
        or config.get("tokenizer_class") == "TokenizersBackend"
        or isinstance(config.get("extra_special_tokens"), list)
    )


def _add_class_tokens(tokenizer: Any, files: TokenizerFiles) -> None:
    """Name the special tokens that no file names and the class has, where they are tokens."""
    absent_keys = [
        key for key in SPECIAL_KEYS if key not in files.config.keys() | files.special.keys()
    ]
    tokenizer_class = _find_class(files) if absent_keys else None
    parameters = (
        {} if tokenizer_class is None else inspect.signature(tokenizer_class.__init__).parameters
    )
    for key in absent_keys:
        default = parameters[key].default if key in parameters else None
        if isinstance(default, str) and default in tokenizer.get_vocab():
            setattr(tokenizer, key, default)


def _find_class(files: TokenizerFiles) -> Any:
    """Return the class of a tokenizer in transformers, None where it knows none."""
    import transformers

    names = [files.class_name]
    if not files.class_name and files.model:
        from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

        mapped = TOKENIZER_MAPPING_NAMES.get(files.model.get("model_type"))
        names = [mapped] if isinstance(mapped, str) else [str(name) for name in mapped or ()]
    if files.class_name not in PLAIN_CLASSES:  # 4.57's others need sentencepiece
        names = [name.removesuffix("Fast") + "Fast" for name in names[-1:]] + names
    candidates = [getattr(transformers, name, None) for name in names if name]
    return next((kind for kind in candidates if isinstance(kind, type)), None)


def _restore_prefix_space(backend: Any, files: TokenizerFiles) -> None:
    """Undo that transformers 4.57 takes an absent add_prefix_space for false."""
    from tokenizers.pre_tokenizers import ByteLevel

    if isinstance(backend.pre_tokenizer, ByteLevel):
        description = files.document["pre_tokenizer"]
        backend.pre_tokenizer.add_prefix_space = bool(description.get("add_prefix_space", True))


def apply_keys(backend: Any, files: TokenizerFiles, bos: str | None, eos: str | None) -> None:
    """Apply the keys of tokenizer_config.json that transformers 4.57 applies to tokenizer.json.

    backend: what package tokenizers made of tokenizer.json. bos, eos: tokens that begin and end a
    text. Raises SpecDecError for a key that cannot be applied.
    """
    _apply_prefix_space(backend, files)
    _apply_bert_keys(backend, files)
    _apply_end_keys(backend, files, bos, eos)
    backend.encode_special_tokens = bool(files.config.get("split_special_tokens", False))
    backend.no_truncation()
    backend.no_padding()


def _apply_prefix_space(backend: Any, files: TokenizerFiles) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    adds_space = files.config.get("add_prefix_space")
    if adds_space is None:
        return
    if isinstance(backend.pre_tokenizer, ByteLevel):
        backend.pre_tokenizer.add_prefix_space = bool(adds_space)
    elif files.class_name in DEEP_CLASSES:
        for step in backend.pre_tokenizer or () if adds_space else ():
            if isinstance(step, ByteLevel):
                step.add_prefix_space = True
    elif files.class_name in REBUILDING and bool(adds_space) != _puts_space_first(backend):
        puts = "puts a" if _puts_space_first(backend) else "puts no"
        raise SpecDecError(
            f"{files.name}: add_prefix_space in {CONFIG_FILE} is {json.dumps(adds_space)}, and"
            f" {TOKENIZER_FILE} {puts} space before a text",
            f"take add_prefix_space out of {CONFIG_FILE}, to read texts as {TOKENIZER_FILE} does;"
            f" or make {TOKENIZER_FILE} again of tokenizer.model, by from_slow=True of"
            " transformers 4.57",
        )


def _puts_space_first(backend: Any) -> bool:
    text = "a" if backend.normalizer is None else backend.normalizer.normalize_str("a")
    if backend.pre_tokenizer is not None:
        text = "".join(piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    return not text.startswith("a")


def _apply_bert_keys(backend: Any, files: TokenizerFiles) -> None:
    from tokenizers.normalizers import BertNormalizer

    if isinstance(backend.normalizer, BertNormalizer) and files.class_name not in PLAIN_CLASSES:
        for key, attribute in BERT_KEYS.items():
            if key in files.config:
                setattr(backend.normalizer, attribute, files.config[key])


def _apply_end_keys(backend: Any, files: TokenizerFiles, bos: str | None, eos: str | None) -> None:
    """Put the tokens that add_bos_token and add_eos_token ask for at the ends of texts."""
    defaults = END_DEFAULTS.get(files.class_name)
    if defaults is None or not files.config.keys() & set(END_KEYS):
        return
    ends: list[str | None] = []
    for key, default, token in zip(END_KEYS, defaults, (bos, eos), strict=True):
        is_added = files.config.get(key, default)
        ends.append(_check_end_token(backend, files, key, token) if is_added else None)
    numbers = [None if token is None else backend.token_to_id(token) for token in ends]
    if not _puts_ends(backend, numbers):
        backend.post_processor = _make_end_template(ends, numbers)


def _puts_ends(backend: Any, numbers: list[int | None]) -> bool:
    """Return whether a tokenizer puts these tokens, None for no token, at the ends of a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    expected = [n for n in (numbers[0], *plain, numbers[1]) if n is not None]
    return bool(backend.encode("a").ids == expected)


def _make_end_template(ends: list[str | None], numbers: list[int | None]) -> Any:
    """Make the post-processor that puts tokens at the ends of texts, and of each of a pair."""
    from tokenizers.processors import TemplateProcessing

    begin, end = ("" if token is None else token for token in ends)
    text, second_text = (
        [f"{token}:{number}" for token in (begin, f"${name}", end) if token]
        for number, name in enumerate("AB")
    )
    return TemplateProcessing(
        single=text,
        pair=text + second_text,
        special_tokens=[(token, n) for token, n in zip(ends, numbers, strict=True) if token],
    )


def _check_end_token(backend: Any, files: TokenizerFiles, key: str, token: str | None) -> str:
    """Return the token that a key puts at an end of texts; SpecDecError where it is no token."""
    if token is None or backend.token_to_id(token) is None:
        token_key = key.removeprefix("add_")
        raise SpecDecError(
            f"{files.name}: {key} is true, and {token_key} is no token of {TOKENIZER_FILE}",
            f"name {token_key} in {CONFIG_FILE}, or set {key} to false there",
        )
    return token


def _add_processor_template(templates: Any, name: str, **options: Any) -> Any:
    """Return templates with those of chat_template.json, where a tokenizer has no default one."""
    path = find_file(name, TEMPLATE_FILE, **options)
    file_templates = None if path is None else read_json(path).get("chat_template")
    if isinstance(file_templates, list):
        file_templates = {entry["name"]: entry["template"] for entry in file_templates}
    if not file_templates or (isinstance(file_templates, str) and not templates):
        return file_templates or templates
    return ({"default": file_templates} if isinstance(file_templates, str) else file_templates) | (
        templates or {}
    )
