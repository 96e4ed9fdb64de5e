"""Tokenizers and models out of Hugging Face folders: the one place that lets transformers load.

A folder may name Python of its own (`auto_map`). transformers asks on stdin whether to run it, and
asks on stdout, unless it is told: here it is told no, always. Nothing of specdec but this
module and pretrained_tokenizer.py may call `from_pretrained`; tests/core/test_pretrained.py looks
for it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, UsageError, join_names, shorten, summarize
from specdec.files.folders import (
    MODEL,
    TOKENIZER,
    TOKENIZER_FILES,
    WEIGHT_SUFFIXES,
    expect_folder,
    find_gguf,
    has_tokenizer,
    is_hub_id,
    list_parts,
    refuse_absent,
    refuse_adapter,
    refuse_unfinished,
)
from specdec.files.reading import open_file, read_json
from specdec.files.tensor_file import TensorFile
from specdec.files.text_reading import find_difference, list_texts
from specdec.gguf.folder import localize
from specdec.gguf.model import GgufModel
from specdec.model.bounds import check_model_sizes
from specdec.model.config_reader import Rotary
from specdec.model.wrappers import NAMES, WRAPPERS
from specdec.system.logs import get_logger
from specdec.text.pretrained_config import NEWER, adapt_config, check_rotary
from specdec.text.pretrained_tokenizer import (
    CONFIG_FILE,
    find_files,
    open_by_class,
    open_tokenizer,
)

# Files that may name Python to run, and the keys by which they do.
CODE_FILES = ("config.json", "tokenizer_config.json", "processor_config.json")
ATTENTION_KEYS = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
GRANITES = ("granitemoe", "granitemoeshared", "granitemoehybrid")  # with matrices in one tensor
PARTS = ("gate", "up", "down")  # of an expert
JOINT_EXPERTS = ("gpt_oss", "gemma4_text")  # whose classes have them so in their files
TIMEOUT = 10.0  # seconds for the Hub to answer

logger = get_logger(__name__)


def load_tokenizer(source: str | Path, flag: str = "--tokenizer-dir") -> Any:
    """Return the tokenizer of a folder or Hub id; the folder's own code is never run.

    flag: the option that named it, for messages. Raises SpecDecError where there is none.
    """
    tokenizer = _load(open_tokenizer, source, flag, TOKENIZER, "tokenizer")
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):  # 5 makes one up without a vocabulary
        raise SpecDecError(
            f"{flag} {source}: the tokenizer holds special tokens alone ({len(tokenizer)})",
            "copy or download the file with its vocabulary too: tokenizer.json, tokenizer.model, or"
            " vocab.json and merges.txt",
        )
    if not isinstance(tokenizer.model_max_length, (int, float)):  # compared with each text's
        raise SpecDecError(
            f"{flag} {source}: model_max_length in {CONFIG_FILE} is"
            f" {shorten(tokenizer.model_max_length)}, not a number",
            "correct it, or take it out",
        )
    return tokenizer


def warn_of_other_ids(folder: Path) -> None:
    """Warn of a text that AutoTokenizer of transformers reads otherwise than tokenizer.json."""
    files = find_files(str(folder))
    if files.path is None or files.needs_code or files.is_plain:
        return
    import transformers

    options = {"trust_remote_code": False, "local_files_only": True}
    tokenizer = load_tokenizer(folder, "--model-dir")
    try:
        class_tokenizer = open_by_class(files, **options)
        difference = find_difference(
            lambda text: tokenizer(text, verbose=False)["input_ids"],
            lambda text: class_tokenizer(text, verbose=False)["input_ids"],
            list_texts(tokenizer.all_special_tokens),
        )
    except Exception:  # noqa: BLE001 - what its classes cannot load, they cannot be asked for
        return
    if difference is not None:
        logger.warning(
            "%s: %s of transformers %s reads texts otherwise than tokenizer.json, which specdec"
            " follows: %s",
            folder, type(class_tokenizer).__name__, transformers.__version__,
            difference.describe("by tokenizer.json", f"by {type(class_tokenizer).__name__}"),
        )  # fmt: skip


# Patterns of a wrapper's tensor names, with the text model's in their place.
KEY_MAPPING = {f"^{re.escape(wrapper_name)}": text_name for wrapper_name, text_name in NAMES}


def load_config(source: str | Path) -> Any:
    """Return a model's configuration as transformers reads it, which says what config.json says."""
    return _read_config(source, "--model-dir")[0]


def _read_config(source: str | Path, flag: str) -> tuple[Any, Rotary]:
    from transformers import AutoConfig

    source = localize(source)
    config = _load(AutoConfig.from_pretrained, source, flag, MODEL, "model")
    document, _ = config.get_config_dict(str(source), local_files_only=True)
    return config, adapt_config(config, document, Path(source) / "config.json")


def load_model(
    source: str | Path, kind: str = "AutoModelForCausalLM", flag: str = "--model-dir",
    **options: Any,
) -> Any:  # fmt: skip
    """Return a model, made by a class of transformers; `options` are for its from_pretrained.

    Of a model with a vision tower it is the text model. Raise SpecDecError where it would compute
    anything else than our own reader finds.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    _refuse_other_weights(source, flag)
    config, rotary = _read_config(source, flag)
    text = config.get_text_config()
    if _is_wrapper(config, text):
        config, kind, more = _take_text(config, text, kind)
        options |= more
    _refuse_stale_copies(Path(source))
    if getattr(text, "attn_logit_softcapping", None) is not None:
        # transformers' other ways leave the cap out without a word.
        options.setdefault("attn_implementation", "eager")
    is_old = transformers.__version__.startswith("4.")
    ties = is_old and (config.tie_word_embeddings or text.tie_word_embeddings)
    if ties:
        config.tie_word_embeddings = text.tie_word_embeddings = False  # see `_tie`
    # AutoModel of transformers 4.57 finds no weights of Gemma 3's text model.
    takes_base = kind == "AutoModel" and text.model_type == "gemma3_text"
    auto = getattr(transformers, "AutoModelForCausalLM" if takes_base else kind)
    loader = auto.from_pretrained
    if (file := find_gguf(source)) is not None:  # then there are no weights in the folder
        loader = functools.partial(_load_gguf, auto._model_mapping[type(config)], GgufModel(file))
    model, info = _load(
        loader, source, flag, MODEL, "model", config=config, output_loading_info=True, **options
    )
    missing_tensors = set(info["missing_keys"])
    if ties:
        _tie(model, text, missing_tensors)
    _refuse_missing(source, missing_tensors, is_old=is_old)
    _refuse_unread_scales(source, set(info["unexpected_keys"]))
    check_rotary(model, config, rotary, f"{flag} {source}")
    return find_base(model) if takes_base else model


def _refuse_other_weights(source: str | Path, flag: str) -> None:
    """Raise SpecDecError for a folder of an adapter alone, or of an unfinished download."""
    merge = "merge it with PEFT's merge_and_unload, and give what its save_pretrained writes"
    refuse_adapter(Path(source), f"{flag} {source}", merge)
    files = list_parts(file) if (file := find_gguf(source)) else Path(source).glob("*")
    refuse_unfinished(file for file in files if file.suffix in WEIGHT_SUFFIXES)


def _take_text(config: Any, text: Any, kind: str) -> tuple[Any, str, dict[str, Any]]:
    """Return configuration, class and options of a wrapper's text model, or of a whole wrapper.

    That is taken where transformers has no class of the text model alone.
    """
    from transformers import AutoModelForCausalLM

    if type(text) not in AutoModelForCausalLM._model_mapping:
        text.tie_word_embeddings = config.tie_word_embeddings
        return config, kind.replace("CausalLM", "ImageTextToText"), {}
    # Classes of wrappers leave out what a text model does to its logits.
    text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
    return text, kind, {"key_mapping": KEY_MAPPING}


def _is_wrapper(config: Any, text: Any) -> bool:
    """Return whether a model is a wrapper whose text model is taken out, as convert does."""
    return text is not config and (config.architectures or [None])[0] in WRAPPERS


def _refuse_missing(source: str | Path, tensors: set[str], *, is_old: bool) -> None:
    """Raise SpecDecError for tensors of a model that transformers finds no weights for."""
    import transformers

    if not tensors:
        return
    again = "copy or download the folder again"
    raise SpecDecError(
        f"transformers {transformers.__version__} finds no weights in {source} for"
        f" {join_names(sorted(tensors))}",
        f"{NEWER}; if it finds none either, {again}" if is_old else again,
    )


def _refuse_unread_scales(source: str | Path, unread: set[str]) -> None:
    """Raise SpecDecError for quantized weights that transformers loads without their scales.

    unread: tensors of the folder that its model has not, of left out modules among them.
    """
    import transformers

    scales = [
        name for name in sorted(unread)
        if name.endswith(".weight_scale") and name.removesuffix("_scale") not in unread
    ]  # fmt: skip
    if scales:
        raise SpecDecError(
            f"transformers {transformers.__version__} loads the quantized weights of {source}"
            f" without their scales: {join_names(scales)}",
            "give the model that it was quantized from; specdec-convert reads such a folder",
        )


def _load_gguf(kind: Any, model: GgufModel, _: str, **options: Any) -> Any:
    """Make a model of a class of transformers with a file's tensors, of their types or of one."""
    from specdec.files.torch_tensors import view_tensor

    del options["trust_remote_code"]
    dtype = options.get("dtype")
    tensors = {
        name: view_tensor(model.read(name), info.dtype).to(dtype)
        for name, info in model.tensors.items()
    }
    model_type = model.config["model_type"]
    if model_type in JOINT_EXPERTS:
        tensors = _join_experts(tensors, is_turned=model_type == "gpt_oss")
    elif model_type in GRANITES:
        tensors = _join_granite(tensors)
    return kind.from_pretrained(None, state_dict=tensors, **options)


def _join_granite(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return Granite's tensors by its published names, gate and up of a layer in one."""
    import torch

    joint, experts = dict[str, Any](), dict[str, list[Any]]()
    for name, tensor in tensors.items():
        stem, separator, rest = name.partition(".experts.")
        if name.endswith(".shared_mlp.gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            joint[name.replace("gate_proj", "input_linear")] = torch.cat((tensor, up))
        elif name.endswith(".shared_mlp.down_proj.weight"):
            joint[name.replace("down_proj", "output_linear")] = tensor
        elif name.endswith(".router.weight"):
            joint[name.replace(".router.", ".router.layer.")] = tensor
        elif rest.endswith("gate_proj.weight"):  # by their numbers, as in the file
            up = tensors[name.replace("gate_proj", "up_proj")]
            experts.setdefault(f"{stem}.input_linear.weight", []).append(torch.cat((tensor, up)))
        elif rest.endswith("down_proj.weight"):
            experts.setdefault(f"{stem}.output_linear.weight", []).append(tensor)
        elif not separator and ".up_proj." not in name:
            joint[name] = tensor
    return joint | {name: torch.stack(matrices) for name, matrices in experts.items()}


def _stack(tensors: Mapping[str, Any], stem: str, name: str) -> Any:
    """Return the tensors of a name of all experts in one, [E, ...]."""
    import torch

    experts: list[Any] = []
    while (expert := tensors.get(f"{stem}.{len(experts)}.{name}")) is not None:
        experts.append(expert)
    return torch.stack(experts)


def _join_experts(tensors: Mapping[str, Any], *, is_turned: bool) -> dict[str, Any]:
    """Return tensors with the experts of a layer in one, and their gates with their up.

    is_turned: rows of gate and up by turns, and matrices [E, in, out], as gpt-oss has them.
    """
    import torch

    def turn(matrix: Any) -> Any:
        return matrix.transpose(1, 2).contiguous() if is_turned and matrix.dim() > 2 else matrix

    joint: dict[str, Any] = {n: tensor for n, tensor in tensors.items() if ".experts." not in n}
    for first in [name for name in tensors if name.endswith(".experts.0.down_proj.weight")]:
        stem = first.removesuffix(".0.down_proj.weight")
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            if f"{stem}.0.down_proj.{kind}" in tensors:
                gate, up, down = (_stack(tensors, stem, f"{p}_proj.{kind}") for p in PARTS)
                gate_up = torch.stack((gate, up), dim=2 if is_turned else 1).flatten(1, 2)
                joint[f"{stem}.gate_up_proj{suffix}"] = turn(gate_up)
                joint[f"{stem}.down_proj{suffix}"] = turn(down)
    return joint


def _tie(model: Any, text: Any, missing_names: set[str]) -> None:
    """Tie head and embedding as transformers 5 does: not where both are stored and differ.

    Versions before drop a head that is stored.
    """
    import torch

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:
        return
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    embedding_name, head_name = names[id(embedding.weight)], names[id(head.weight)]
    if embedding_name in missing_names and head_name not in missing_names:
        embedding.weight = head.weight
    elif head_name in missing_names or torch.equal(embedding.weight, head.weight):
        head.weight = embedding.weight
    else:
        return
    text.tie_word_embeddings = True
    missing_names -= (
        {embedding_name, head_name} if not {embedding_name, head_name} <= missing_names else set()
    )


def _refuse_stale_copies(folder: Path) -> None:
    """Raise SpecDecError where transformers would not read what the index of a folder says.

    It reads every shard whole, in the order of their names, so that the last copy of a tensor wins.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file() or (folder / "model.safetensors").exists():
        return
    last_shards: dict[str, str] = {}
    try:
        shard_names = read_json(index).get("weight_map", {})
        for name in sorted(set(shard_names.values())):
            last_shards |= dict.fromkeys(TensorFile(folder / name).tensors, name)
    except (OSError, SpecDecError, AttributeError, TypeError):
        return  # whoever loads it says what is wrong
    stale_tensors = [
        tensor for tensor, name in shard_names.items() if last_shards.get(tensor, name) != name
    ]
    if stale_tensors:
        raise SpecDecError(
            f"{folder}: the index places {join_names(stale_tensors)} in"
            f" {shard_names[stale_tensors[0]]}, but transformers would read the copies in"
            f" {last_shards[stale_tensors[0]]}",
            "delete the copies that the index does not name: load the tensors and save them again"
            " without these",
        )


def find_base(model: Any) -> Any:
    """Return a model without its output layer, or a model that has none itself.

    Gemma 3's text model names in transformers another attribute as its base than it has.
    """
    base = model.base_model
    return getattr(model, "model", model) if base is model else base


def load_generation_config(source: str | Path) -> Any:
    """Return what a folder's generation_config.json says."""
    from transformers import GenerationConfig

    load = GenerationConfig.from_pretrained
    return _load(load, source, "--model-dir", MODEL, "generation_config.json")


def _load(
    load: Callable[..., Any],
    source: str | Path,
    flag: str,
    folder_kind: str,
    content_noun: str,
    **options: Any,
) -> Any:
    """Load from a folder or Hub id by `load`, a method of transformers, with errors that explain.

    folder_kind: MODEL or TOKENIZER. content_noun: the loaded thing, as messages name it.
    """
    if not str(source):
        raise UsageError(f"{flag} is empty", "give a folder or Hub id")
    is_tokenizer = folder_kind == TOKENIZER and has_tokenizer(Path(source))
    name = str(source) if is_tokenizer else localize(source)
    if Path(name).is_dir():
        _check_folder(Path(name), flag, folder_kind)
    else:
        options["local_files_only"] = not _is_on_hub(name, flag)
    try:
        return load(name, trust_remote_code=False, **options)
    except (MemoryError, SpecDecError):
        raise
    except Exception as error:  # noqa: BLE001 - a broken folder makes transformers raise anything
        raise _explain_failure(error, name, flag, folder_kind, content_noun) from None


def _check_folder(folder: Path, flag: str, folder_kind: str) -> None:
    """Raise SpecDecError for a folder that transformers would load wrong, or not at all."""
    expect_folder(str(folder), folder_kind, flag)
    config_file = folder / "config.json"
    if folder_kind == MODEL and not os.path.lexists(config_file):
        raise SpecDecError(f"{flag} {folder} has no config.json", _hint(folder_kind))
    _refuse_foreign_attention(folder, flag)
    _refuse_pointers(folder)
    if folder_kind == MODEL:
        check_model_sizes(read_json(config_file), config_file)


def _explain_failure(
    error: Exception, name: str, flag: str, folder_kind: str, content_noun: str
) -> SpecDecError:
    """Return the error for a folder or Hub id that transformers could not load."""
    folder = Path(name)
    is_local = folder.is_dir()
    code = _list_code(folder) if is_local else []
    if code or "trust_remote_code" in str(error):
        return _refuse_code(name, flag, folder_kind, code)
    if folder_kind == TOKENIZER and is_local and not has_tokenizer(folder):
        return SpecDecError(f"{flag} {name} has no tokenizer", _hint(folder_kind))
    if folder_kind == MODEL and (method := _find_quantization(folder)) is not None:
        return SpecDecError(
            f"{flag} {name} is quantized ({shorten(method)}), and transformers cannot load it:"
            f" {summarize(error)}",
            "give the model that it was quantized from, or install what transformers asks for",
        )
    if folder_kind == TOKENIZER:
        _check_json(folder)
    return SpecDecError(
        f"{flag} {name}: transformers cannot load its {content_noun}: {summarize(error)}",
        _hint(folder_kind),
    )


def _check_json(folder: Path) -> None:
    """Raise SpecDecError for a file of a tokenizer that is not JSON."""
    for file in (folder / name for name in TOKENIZER_FILES if name.endswith(".json")):
        if file.is_file():
            read_json(file)


def _find_quantization(folder: Path) -> object:
    """Return the method by which a folder's weights are quantized; None where they are plain."""
    with contextlib.suppress(SpecDecError):
        section = read_json(folder / "config.json").get("quantization_config")
        return section.get("quant_method") if isinstance(section, dict) else None
    return None


def _refuse_pointers(folder: Path) -> None:
    """Raise SpecDecError for a file that is a pointer of Git LFS."""
    for file in ("config.json", "merges.txt", *TOKENIZER_FILES):
        if (folder / file).is_file():
            open_file(folder / file).close()


def _hint(folder_kind: str) -> str:
    if folder_kind == TOKENIZER:
        return (
            "give the Hugging Face folder of the model, with its tokenizer's files; to read a"
            " tokenizer.model without a tokenizer.json, transformers needs the packages"
            " sentencepiece and protobuf"
        )
    return (
        "give a folder made by save_pretrained, or a Hub id, of an architecture that the installed"
        " transformers has"
    )


def _refuse_code(name: str, flag: str, folder_kind: str, code: list[str]) -> SpecDecError:
    """Return the error for a folder whose own Python would have to run."""
    code_note = f" ({shorten(', '.join(code), 200)[1:-1]})" if code else ""
    remedy = "use a model of an architecture that transformers has itself"
    if folder_kind == TOKENIZER:
        remedy = (
            "use a tokenizer that transformers has itself: where its code is trusted, load it"
            " elsewhere and save it with save_pretrained, which writes tokenizer.json"
        )
    return SpecDecError(
        f"{flag} {name} asks to run its own Python code{code_note}, which specdec never does",
        remedy,
    )


def _list_code(folder: Path) -> list[str]:
    """List the Python classes that a folder's files ask to run, as `module.Class`."""
    code_names: list[str] = []
    for file in CODE_FILES:
        try:
            auto_map = read_json(folder / file).get("auto_map")
        except (OSError, SpecDecError):
            continue
        values = auto_map.values() if isinstance(auto_map, dict) else [auto_map] if auto_map else []
        for value in values:
            code_names += [str(v) for v in (value if isinstance(value, list) else [value]) if v]
    return list(dict.fromkeys(code_names))


def _refuse_foreign_attention(folder: Path, flag: str) -> None:
    """Raise SpecDecError where config.json names attention code of the Hub, `owner/name`."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, SpecDecError):
        return  # whoever loads it says what is wrong
    for key in ATTENTION_KEYS:
        value = config.get(key)
        for name in value.values() if isinstance(value, dict) else [value]:
            if isinstance(name, str) and "/" in name:
                raise SpecDecError(
                    f"{flag} {folder}: {key} in config.json is {shorten(name)}, code of the Hub,"
                    " which specdec never runs",
                    f"remove {key} from config.json",
                )


def _is_on_hub(name: str, flag: str) -> bool:
    """Ask the Hub once for a model that is no local folder; False where only a copy is there.

    transformers would ask again and again, for minutes, and log each time.
    """
    from specdec.files.hub import describe_answer, explain, find_cached

    path = Path(name)
    if path.exists() or not is_hub_id(name):
        raise refuse_absent(path, f"{flag} {name}")
    import huggingface_hub

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    for library in ("huggingface_hub.utils._http", "urllib3", "httpx"):
        logging.getLogger(library).setLevel(logging.ERROR)
    token = os.environ.get("HF_TOKEN") or None
    try:
        huggingface_hub.HfApi(token=token).model_info(name, timeout=TIMEOUT)
    except Exception as error:  # noqa: BLE001 - the library raises many kinds
        if not find_cached(name):
            raise explain(name, flag, error) from None
        logger.warning(
            "%s %s: using the cached copy: the Hub %s", flag, name, describe_answer(error)
        )
        return False
    return True
