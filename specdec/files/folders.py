"""What a folder is: told by what it holds, so that a wrong one is refused by its own name."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from specdec.errors import SpecDecError, suggest
from specdec.files.reading import read_json
from specdec.files.tensor_file import TensorFile

# Kinds of folders -> what they are called.
ENGINE, CHECKPOINT, MODEL = "engine", "checkpoint", "model"
REDRAFTER, MEDUSA, EAGLE, DFLASH = "redrafter", "medusa", "eagle", "dflash"
TOKENIZER, ADAPTER, GGUF, EMPTY = "tokenizer", "adapter", "gguf", "empty"
NAMES = {
    ENGINE: "an engine folder",
    CHECKPOINT: "a checkpoint folder",
    MODEL: "a Hugging Face model folder",
    REDRAFTER: "the folder of a ReDrafter drafter",
    MEDUSA: "a folder of Medusa heads",
    EAGLE: "the folder of an EAGLE drafter",
    DFLASH: "the folder of a DFlash drafter",
    TOKENIZER: "the folder of a tokenizer without a model",
    ADAPTER: "the folder of a LoRA adapter",
    GGUF: "a folder of GGUF files",
    EMPTY: "an empty folder",
}
MAKERS = {
    ENGINE: "; specdec-build writes engine folders",
    CHECKPOINT: "; specdec-convert writes checkpoint folders",
}
# What to do with a folder of each kind.
USES = {
    ENGINE: "specdec-run takes it as --engine-dir",
    CHECKPOINT: "specdec-build makes an engine of it: specdec-build --checkpoint-dir {path}",
    MODEL: "specdec-convert makes a checkpoint of it: specdec-convert --model-dir {path}",
    REDRAFTER: "specdec-convert takes it as --drafter-model-dir, beside the target's --model-dir",
    MEDUSA: "specdec-convert takes it as --medusa-model-dir, beside the target's --model-dir",
    EAGLE: "specdec-convert takes it as --eagle-model-dir, beside the target's --model-dir",
    DFLASH: "specdec-convert takes it as --dflash-model-dir, beside the target's --model-dir",
    TOKENIZER: "specdec-run takes it as --tokenizer-dir",
    ADAPTER: "merge it into its base model (peft's merge_and_unload) and save that with"
    " save_pretrained",
    GGUF: "take the Hugging Face folder that they were made from",
    EMPTY: "check the path",
}
# Where the way from what was given to what is wanted has a name of its own.
WAYS = {
    (CHECKPOINT, ENGINE): "build an engine of it first: specdec-build --checkpoint-dir {path}",
    (MODEL, ENGINE): "convert it first (specdec-convert --model-dir {path}), then build the"
    " checkpoint",
    (MODEL, CHECKPOINT): "convert it first: specdec-convert --model-dir {path}",
    (ENGINE, CHECKPOINT): "it is built already, and specdec-run takes it as --engine-dir; else give"
    " the checkpoint that it was built from",
    (CHECKPOINT, MODEL): "give the Hugging Face folder that it was converted from; specdec-build"
    " takes a checkpoint as --checkpoint-dir, and specdec-convert as --base-model-checkpoint-dir",
    (ENGINE, MODEL): "give the Hugging Face folder that it was converted from",
    (CHECKPOINT, TOKENIZER): "give the Hugging Face folder that it was converted from",
    (MODEL, TOKENIZER): "save the tokenizer's files beside the model (tokenizer.json)",
    (ENGINE, TOKENIZER): "give the Hugging Face folder of the target",
}  # fmt: skip
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_TARGET = re.compile(r"(model|transformer|language_model)\.")
_BARE_TARGET = re.compile(r"(wte|decoder|h\.\d+)\.")
_MEDUSA = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Whether a name that is no local folder can be `name` or `owner/name` on the Hub."""
    return _HUB_ID.fullmatch(name) is not None


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a file of a Hugging Face tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def identify_folder(folder: Path) -> str | None:
    """Return the kind of a folder, or None where what it holds does not tell.

    A target that was saved together with a drafter is a model.
    """
    try:
        names = set(os.listdir(folder))
        config = read_json(folder / "config.json") if "config.json" in names else None
    except (OSError, SpecDecError):
        return None
    if config is None:
        return _identify_files(names)
    if "build_config" in config:
        return ENGINE
    if "mapping" in config or "rank0.safetensors" in names:
        return CHECKPOINT
    if "adapter_config.json" in names and not _list_tensors(folder, names):
        return ADAPTER
    return _identify_model(folder, names, config)


def _identify_files(names: Collection[str]) -> str | None:
    """The kind of a folder without config.json."""
    if not names:
        return EMPTY
    if "adapter_config.json" in names:
        return ADAPTER
    if any(name in names for name in MEDUSA_FILES):
        return MEDUSA
    if any(name.endswith(".gguf") for name in names):
        return GGUF
    return TOKENIZER if any(name in names for name in TOKENIZER_FILES) else None


def _identify_model(folder: Path, names: Collection[str], config: dict[str, Any]) -> str | None:
    """The kind of a folder with a config.json as Hugging Face's libraries write it."""
    tensors = _list_tensors(folder, names)
    if any(_TARGET.match(name) for name in tensors):
        return MODEL
    if any(name in names for name in MEDUSA_FILES):
        return MEDUSA
    if "num_draft_layers" in config or config.get("model_type") == "recurrent_drafting_drafter":
        return REDRAFTER
    if "fc.weight" in tensors and "hidden_norm.weight" in tensors:
        return DFLASH
    if "fc.weight" in tensors or str(config.get("speculators_model_type", "")).startswith("eagle"):
        return EAGLE
    if tensors and all(_MEDUSA.match(name) for name in tensors):
        return MEDUSA
    # A base model's own save_pretrained leaves the prefix out, and so do EAGLE's drafters, whose
    # first layer has no such norm, or one more.
    is_decoder = "layers.0.input_layernorm.weight" in tensors and not any(
        name.endswith("hidden_norm.weight") for name in tensors
    )
    return MODEL if is_decoder or any(_BARE_TARGET.match(name) for name in tensors) else None


def _list_tensors(folder: Path, names: Collection[str]) -> Collection[str]:
    """Names of the tensors of a folder's safetensors, empty where there are none to be read."""
    try:
        if "model.safetensors" in names:
            return TensorFile(folder / "model.safetensors").tensors
        if "model.safetensors.index.json" in names:
            listed = read_json(folder / "model.safetensors.index.json").get("weight_map")
            return listed if isinstance(listed, dict) else ()
        if "pytorch_model.bin.index.json" in names:
            listed = read_json(folder / "pytorch_model.bin.index.json").get("weight_map")
            return listed if isinstance(listed, dict) else ()
    except (OSError, SpecDecError):
        pass
    return ()


def expect_folder(path: Path | str, wanted: str, flag: str | None = None) -> None:
    """Raise SpecDecError where a folder is absent, or certainly of another kind than is wanted.

    flag: the option that named it, for the message. What cannot be told passes: whoever reads the
    folder knows better what is missing.
    """
    folder = Path(path)
    shown = f"{flag} {path}" if flag else str(path)
    if not folder.is_dir():
        raise refuse_absent(folder, shown, MAKERS.get(wanted, ""))
    found = identify_folder(folder)
    if found is None or found == wanted:
        return
    if wanted == TOKENIZER and has_tokenizer(folder):
        return
    if wanted in (REDRAFTER, MEDUSA, EAGLE, DFLASH) and found == MODEL and _holds_drafter(folder):
        return
    remedy = WAYS.get((found, wanted), USES[found]).format(path=path)
    lack = "and has no tokenizer" if wanted == TOKENIZER else f"not {NAMES[wanted]}"
    raise SpecDecError(f"{shown} is {NAMES[found]}, {lack}", remedy)


def _holds_drafter(folder: Path) -> bool:
    """Whether a model's folder may hold a drafter beside it, as ModelOpt and Medusa save both."""
    tensors = _list_tensors(folder, set(os.listdir(folder)))
    return any(name.startswith(("medusa_head", "eagle_module.")) for name in tensors)


def refuse_absent(folder: Path, shown: str, advice: str = "") -> SpecDecError:
    """The error for a path that is no folder; `shown` is how the message names it."""
    if folder.exists():
        return SpecDecError(f"{shown} is a file", "give the folder that holds it")
    missing = folder  # the first of its folders that is not there
    while not missing.parent.is_dir():
        missing = missing.parent
    others = sorted(path.name for path in missing.parent.iterdir() if path.is_dir())
    fact = f"{shown} does not exist" + (f", nor does {missing}" if missing != folder else "")
    return SpecDecError(fact + suggest(missing.name, others), f"check the path{advice}")
