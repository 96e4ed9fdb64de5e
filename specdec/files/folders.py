"""Kinds of folders, told by their files, so that a wrong one is refused by its own name."""

from __future__ import annotations

import os
import pickletools
import re
import struct
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from specdec.errors import SpecDecError, join_names, suggest
from specdec.files.reading import read_json
from specdec.files.tensor_file import TensorFile

# Kinds of folders -> what they are called.
ENGINE, CHECKPOINT, MODEL = "engine", "checkpoint", "model"
REDRAFTER, MEDUSA, EAGLE, DFLASH, MTP = "redrafter", "medusa", "eagle", "dflash", "mtp"
MTP_ASSISTANT = "mtp_assistant"
TOKENIZER, ADAPTER, GGUF, EMPTY = "tokenizer", "adapter", "gguf", "empty"
NAMES = {
    ENGINE: "an engine folder",
    CHECKPOINT: "a checkpoint folder",
    MODEL: "a Hugging Face model folder",
    REDRAFTER: "the folder of a ReDrafter drafter",
    MEDUSA: "a folder of Medusa heads",
    EAGLE: "the folder of an EAGLE drafter",
    DFLASH: "the folder of a DFlash drafter",
    MTP: "the folder of a head for multi-token prediction",
    MTP_ASSISTANT: "the folder of an MTP assistant",
    TOKENIZER: "the folder of a tokenizer without a model",
    ADAPTER: "the folder of a LoRA adapter",
    GGUF: "a folder of GGUF files",
    EMPTY: "an empty folder",
}
MAKERS = {
    ENGINE: "; specdec-build writes engine folders",
    CHECKPOINT: "; specdec-convert writes checkpoint folders",
}
# The option of specdec-convert for each kind of drafter, and what a folder of it holds.
FLAGS = {
    REDRAFTER: "drafter-model-dir", MEDUSA: "medusa-model-dir", EAGLE: "eagle-model-dir",
    DFLASH: "dflash-model-dir", MTP: "mtp-model-dir", MTP_ASSISTANT: "mtp-assistant-model-dir",
}  # fmt: skip
DRAFTERS = tuple(FLAGS)
NEEDS = {
    REDRAFTER: "num_draft_layers in config.json",
    MEDUSA: "medusa_lm_head.safetensors or .pt, or tensors N.N.linear.weight alone",
    EAGLE: "fc.weight beside layers.N.* or midlayer.* (EAGLE-1 to 3, P-EAGLE)",
    DFLASH: "fc.weight and hidden_norm.weight (DFlash, DSpark)",
    MTP: "mtp.fc.weight, model.layers.N.eh_proj.weight or model.mtp_layers.0.input_proj.weight",
    MTP_ASSISTANT: "pre_projection.weight and post_projection.weight (Gemma 4's assistants)",
}
# Contents that nothing here reads, by a name of a tensor or file, or a key of config.json.
FOREIGN = {
    "an MLP or LSTM speculator": r"speculator\.",
    "Hydra heads": r"hydra_(num|lm|mlp)_",
    "Medusa heads with vLLM's names": r"blocks\.\d+\.layers\.",
    "an EAGLE-1 drafter with speculators' names": r"fusion_fc\.",
    "an EAGLE-3 drafter with NeMo's names": r"model\.fc\.",
    "an MTP head with speculators' names": r"mtp_layers\.",
}
# The remedy for a folder of each kind.
USES = {
    ENGINE: "specdec-run takes it as --engine-dir",
    CHECKPOINT: "specdec-build makes an engine of it: specdec-build --checkpoint-dir {path}",
    MODEL: "specdec-convert makes a checkpoint of it: specdec-convert --model-dir {path}",
    TOKENIZER: "specdec-run takes it as --tokenizer-dir",
    ADAPTER: "specdec-convert and specdec generate take it as --lora-dir, and its base model as"
    " --model-dir",
    GGUF: "specdec-convert takes a GGUF model as --model-dir, and one is there at most",
    EMPTY: "check the path",
    **{
        kind: f"specdec-convert takes it as --{flag}, beside the target's --model-dir"
        for kind, flag in FLAGS.items()
    },
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
# The first of these that a folder has is read, as transformers chooses; model.pt is what trainers
# of drafters write.
INDEX_SUFFIX = ".index.json"
WEIGHT_NAMES = (
    "model.safetensors", "model.safetensors" + INDEX_SUFFIX,
    "pytorch_model.bin", "pytorch_model.bin" + INDEX_SUFFIX, "model.pt",
)  # fmt: skip
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
ADAPTER_CONFIG = "adapter_config.json"
# Endings that clients of downloads put after the name of a file that is not finished, or beside it.
UNFINISHED = (".aria2", ".part", ".incomplete", ".crdownload", ".partial", ".download")
MAX_PICKLE_BYTES = 64 << 20
MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_TARGET = re.compile(r"(model|transformer|language_model)\.")
_BARE_TARGET = re.compile(r"(wte|decoder|h\.\d+)\.")
_MEDUSA = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.")
# A name in a pickle: not those of storages and devices.
MTP_SIGN = re.compile(r"mtp\.fc|model\.layers\.\d+\.eh_proj|model\.mtp_layers\.0\.input_proj")
ASSISTANT_SIGNS = {"pre_projection.weight", "post_projection.weight"}
_TENSOR = re.compile(r"[A-Za-z_0-9]+(\.[A-Za-z_0-9]+)+|d2t|t2d|mask_hidden")
GGUF_MAGIC = b"GGUF"
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
# The Hub's library refuses what is none by an error of its own, see its validate_repo_id.
_HUB_NAME = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_HUB_ID = re.compile(rf"(?!.*(?:--|\.\.))(?:{_HUB_NAME}/)?{_HUB_NAME}(?<!\.git)", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Return whether a name that is no local folder can be `name` or `owner/name` on the Hub."""
    return _HUB_ID.fullmatch(name) is not None


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a file of a Hugging Face tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def find_gguf(name: str | Path) -> Path | None:
    """Return the GGUF file that a path is, or that a folder without other weights holds.

    The first of split files stands for all. Raises SpecDecError where a folder holds several
    models.
    """
    path = Path(name)
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" or _has_magic(path) else None
    if not path.is_dir() or any((path / weights).exists() for weights in WEIGHT_NAMES):
        return None
    models = list_gguf(path)
    if len(models) > 1:
        raise SpecDecError(
            f"{path} holds {len(models)} GGUF models: {join_names([p.name for p in models])}",
            "give one of the files",
        )
    return models[0] if models else None


def list_gguf(folder: Path) -> list[Path]:
    """List the GGUF models in a folder, of split ones the first files."""
    return [file for file in sorted(folder.iterdir()) if _begins_model(file)]


def _begins_model(path: Path) -> bool:
    """Return whether a GGUF model begins in a file, by its name; image encoders are no models."""
    split = _SPLIT.fullmatch(path.name)
    is_first = split is None or int(split.group(2)) == 1
    is_encoder = path.name.lower().startswith("mmproj")
    return path.suffix.lower() == ".gguf" and is_first and not is_encoder


def _has_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def list_parts(path: Path) -> list[Path]:
    """List the files of a split GGUF model by the name of its first."""
    split = _SPLIT.fullmatch(path.name)
    if split is None or int(split.group(3)) < 2:
        return [path]
    stem, number, total = split.groups()
    if int(number) != 1:
        raise SpecDecError(
            f"{path} is part {int(number)} of {int(total)}",
            f"give the first: {stem}-00001-of-{total}.gguf",
        )
    suffix = path.suffix
    return [
        path.with_name(f"{stem}-{index:05d}-of-{total}{suffix}")
        for index in range(1, int(total) + 1)
    ]


class Look(NamedTuple):
    """A folder's kind or None, its files and config.json, and its tensors by name.

    The tensors are those of folders that Hugging Face's libraries write. error: why files or
    config.json cannot be read.
    """

    kind: str | None
    names: set[str]
    config: dict[str, Any]
    tensors: Collection[str]
    error: OSError | SpecDecError | None = None

    def find_signs(self) -> dict[str, str]:
        return find_signs(self.names, self.config, self.tensors)


def look_at(folder: Path) -> Look:
    """Look at a folder; each file is read once.

    A target that was saved together with a drafter is a model.
    """
    names: set[str] = set()
    try:
        names = set(os.listdir(folder))
        config = read_json(folder / "config.json") if "config.json" in names else None
    except (OSError, SpecDecError) as error:
        return Look(None, names, {}, (), error)
    if config is None:
        return Look(_identify_files(names), names, {}, _list_tensors(folder, names))
    if "build_config" in config:
        return Look(ENGINE, names, config, ())
    if "mapping" in config or "rank0.safetensors" in names:
        return Look(CHECKPOINT, names, config, ())
    tensors = _list_tensors(folder, names)
    if ADAPTER_CONFIG in names and not tensors:
        return Look(ADAPTER, names, config, tensors)
    return Look(_identify_model(names, config, tensors), names, config, tensors)


def _identify_files(names: Collection[str]) -> str | None:
    """Return the kind of a folder without config.json."""
    if not names:
        return EMPTY
    if ADAPTER_CONFIG in names:
        return ADAPTER
    if any(name in names for name in MEDUSA_FILES):
        return MEDUSA
    if any(name.endswith(".gguf") for name in names):
        return GGUF
    return TOKENIZER if any(name in names for name in TOKENIZER_FILES) else None


def _identify_model(
    names: Collection[str], config: dict[str, Any], tensors: Collection[str]
) -> str | None:
    """Return the kind of a folder with a config.json as Hugging Face's libraries write it."""
    if ASSISTANT_SIGNS <= set(tensors):  # whose other tensors have a target's names
        return MTP_ASSISTANT
    if any(_TARGET.match(name) for name in tensors):
        return MODEL
    if signs := find_signs(names, config, tensors):
        return next(iter(signs)) if len(signs) == 1 else None
    # A base model's own save_pretrained leaves the prefix out. EAGLE-3's first layer has one norm
    # more.
    is_decoder = "layers.0.input_layernorm.weight" in tensors and not any(
        name.endswith("hidden_norm.weight") for name in tensors
    )
    return MODEL if is_decoder or any(_BARE_TARGET.match(name) for name in tensors) else None


def find_signs(
    names: Collection[str], config: Mapping[str, Any], tensors: Collection[str]
) -> dict[str, str]:
    """Find the kinds of drafters that a folder shows signs of, each with its sign."""
    signs = {}
    if sign := _find_redrafter_sign(config, tensors):
        signs[REDRAFTER] = sign
    if sign := _find_medusa_sign(names, tensors, may_be_bare=not signs):
        signs[MEDUSA] = sign
    if heads := [name for name in tensors if MTP_SIGN.match(name)]:
        signs[MTP] = min(heads)
    if ASSISTANT_SIGNS <= set(tensors):
        signs[MTP_ASSISTANT] = " and ".join(sorted(ASSISTANT_SIGNS))
    return signs | _find_net_sign(config, tensors)


def _find_redrafter_sign(config: Mapping[str, Any], tensors: Collection[str]) -> str | None:
    for key in ("num_draft_layers", "recurrent_drafting"):
        if key in config:
            return f"config.json's {key}"
    if config.get("model_type") == "recurrent_drafting_drafter":
        return "config.json's model_type"
    return next((name for name in tensors if name.startswith(("rnn_u.", "rnn_w."))), None)


def _find_medusa_sign(
    names: Collection[str], tensors: Collection[str], *, may_be_bare: bool
) -> str | None:
    """Return a sign of Medusa heads. may_be_bare: numbers alone may be the names of theirs."""
    if files := [name for name in MEDUSA_FILES if name in names]:
        return files[0]
    prefixes = ("medusa_head.", "medusa_heads.")
    if heads := [name for name in tensors if name.startswith(prefixes)]:
        return heads[0]
    is_bare = may_be_bare and bool(tensors) and all(_MEDUSA.match(name) for name in tensors)
    return min(tensors) if is_bare else None


def _find_net_sign(config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, str]:
    """Return the sign of a drafter with decoder layers: EAGLE's or DFlash's, if any."""
    if modules := [name for name in tensors if name.startswith("eagle_module.")]:
        return {EAGLE: modules[0]}
    if "fc.weight" in tensors:
        if "hidden_norm.weight" in tensors:
            return {DFLASH: "fc.weight and hidden_norm.weight"}
        return {EAGLE: "fc.weight"}
    speculators = str(config.get("speculators_model_type", ""))
    if speculators in ("eagle", "eagle3", "peagle") or "eagle_config" in config:
        return {EAGLE: "config.json alone"}
    if speculators in ("dflash", "dspark") or "dflash_config" in config:
        return {DFLASH: "config.json alone"}
    return {}


def recognize_drafter(folder: Path, flag: str) -> str:
    """Return the kind of a drafter's folder, or MODEL of one that holds a whole model alone.

    Raises SpecDecError for any other, and where more than one kind shows.
    """
    look = look_at(folder)
    if look.error is not None:
        raise look.error
    refuse_cache(look.names, folder, f"{flag} {folder}")
    refuse_foreign(look, f"{flag} {folder}")
    folder_kind, signs = look.kind, look.find_signs()
    if folder_kind == MODEL:  # a model's own head drafts for itself alone
        signs.pop(MTP, None)
    if len(signs) == 1 and folder_kind in (None, MODEL, *signs):
        return next(iter(signs))
    if folder_kind == MODEL and not signs:
        return MODEL
    raise _explain_no_drafter(folder, flag, look, signs)


def _explain_no_drafter(
    folder: Path, flag: str, look: Look, signs: Mapping[str, str]
) -> SpecDecError:
    """Return the error for a folder that is no drafter's, or shows signs of several drafters."""
    if len(signs) > 1:
        sign_list = " and ".join(f"{NAMES[kind]} ({sign})" for kind, sign in signs.items())
        return SpecDecError(
            f"{flag} {folder} shows {len(signs)} kinds of drafters: {sign_list}",
            "keep one of them, or give it by the flag of its method:"
            f" {' or '.join(f'--{FLAGS[kind]}' for kind in signs)}",
        )
    if look.kind is not None:
        return SpecDecError(
            f"{flag} {folder} is {NAMES[look.kind]}, not a drafter's",
            USES[look.kind].format(path=folder),
        )
    patterns = sorted({re.sub(r"\d+", "N", name) for name in look.tensors})
    tensors = (
        f"its tensors are {join_names(patterns)}" if patterns else "no tensors in it can be listed"
    )
    keys = f"the keys of its config.json {join_names(sorted(look.config))}"
    return SpecDecError(
        f"{flag} {folder} holds no drafter that is known: {tensors};"
        f" {keys if look.config else 'its config.json is missing or has no keys'}; its files"
        f" {join_names(sorted(look.names))}",
        f"a drafter of each method has: {'; '.join(f'{NAMES[k]}, {v}' for k, v in NEEDS.items())}",
    )


def refuse_foreign(look: Look, folder_label: str) -> None:
    """Raise SpecDecError for a drafter of a kind that is known, and not supported.

    folder_label: the folder's name in the message.
    """
    names = sorted({*look.tensors, *look.names, *look.config})
    for description, pattern in FOREIGN.items():
        sign = next((name for name in names if re.match(pattern, name)), None)
        if sign is not None:
            raise SpecDecError(
                f"{folder_label} holds {description} ({sign}), which specdec does not read",
                f"give a drafter that has {'; or '.join(NEEDS.values())}",
            )


def _list_tensors(folder: Path, names: Collection[str]) -> Collection[str]:
    """List the tensors' names in a folder's weights; none where they cannot be read."""
    weights_name = next((name for name in WEIGHT_NAMES if name in names), None)
    try:
        if weights_name is None:
            return ()
        if weights_name.endswith(INDEX_SUFFIX):
            weight_map = read_json(folder / weights_name).get("weight_map")
            return weight_map if isinstance(weight_map, dict) else ()
        if weights_name.endswith(".safetensors"):
            return TensorFile(folder / weights_name).tensors
        return _list_pickled(folder / weights_name)
    except (OSError, SpecDecError):
        return ()


def _list_pickled(path: Path) -> Collection[str]:
    """List the tensors' names in a file of torch.save, without torch: nothing in it is executed."""
    texts = []
    try:
        with path.open("rb") as file:
            number = 4  # before torch 1.6: a magic number, a version and a system come first
            stream: IO[bytes] = file
            if zipfile.is_zipfile(file):
                archive = zipfile.ZipFile(file)
                (inner,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
                if archive.getinfo(inner).file_size > MAX_PICKLE_BYTES:
                    return ()
                stream, number = archive.open(inner), 1
            file.seek(0)
            for _ in range(number):
                texts = [a for _, a, _ in pickletools.genops(stream) if isinstance(a, str)]
    except (OSError, ValueError, EOFError, KeyError, struct.error, zipfile.BadZipFile):
        return ()
    return [name for name in texts if _TENSOR.fullmatch(name)]


def refuse_unfinished(paths: Iterable[Path]) -> None:
    """Raise SpecDecError where a download's mark lies beside a file, which may hold zeros yet."""
    for path in paths:
        for mark in (path.with_name(path.name + suffix) for suffix in UNFINISHED):
            if mark.exists():
                raise SpecDecError(
                    f"{path} may be an unfinished download: {mark} is beside it",
                    f"finish the download (aria2c --continue), or remove {mark} if the file is"
                    " whole",
                )


def refuse_adapter(folder: Path, folder_label: str, remedy: str) -> None:
    """Raise SpecDecError where a LoRA adapter lies beside a whole model.

    transformers loads it, other readers do not. folder_label: its name in the message.
    """
    if (folder / ADAPTER_CONFIG).exists():
        raise SpecDecError(
            f"{folder_label} holds a LoRA adapter beside its weights ({ADAPTER_CONFIG}), which"
            " transformers would add to them",
            f"{remedy}; for the weights alone move {ADAPTER_CONFIG} elsewhere",
        )


def expect_folder(path: Path | str, expected_kind: str, flag: str | None = None) -> None:
    """Raise SpecDecError where a folder is absent, or certainly of another kind than expected.

    flag: the option that named it, for the message. What cannot be told passes: whoever reads the
    folder knows better what is missing.
    """
    folder = Path(path)
    folder_label = f"{flag} {path}" if flag else str(path)
    if expected_kind in (MODEL, TOKENIZER) and find_gguf(folder) is not None:
        return
    if not folder.is_dir():
        raise refuse_absent(folder, folder_label, MAKERS.get(expected_kind, ""))
    look = look_at(folder)
    refuse_cache(look.names, folder, folder_label)
    if expected_kind in DRAFTERS:
        refuse_foreign(look, folder_label)
    if look.kind is None or _serves_as(folder, look, expected_kind):
        return
    remedy = WAYS.get((look.kind, expected_kind), USES[look.kind]).format(path=path)
    is_tokenizer = expected_kind == TOKENIZER
    lack = "and has no tokenizer" if is_tokenizer else f"not {NAMES[expected_kind]}"
    raise SpecDecError(f"{folder_label} is {NAMES[look.kind]}, {lack}", remedy)


def _serves_as(folder: Path, look: Look, expected_kind: str) -> bool:
    """Return whether a folder of a known kind can be taken for one of the expected kind."""
    if look.kind == expected_kind:
        return True
    if expected_kind == TOKENIZER:
        return has_tokenizer(folder)
    return expected_kind in DRAFTERS and look.kind == MODEL and bool(look.find_signs())


def refuse_cache(names: Collection[str], folder: Path, folder_label: str) -> None:
    """Raise SpecDecError for a folder of the Hub's cache that has a model's snapshots in it.

    names: of its files.
    """
    if {"blobs", "refs", "snapshots"} <= set(names):
        snapshots = sorted(str(path) for path in folder.glob("snapshots/*"))
        raise SpecDecError(
            f"{folder_label} is a model's folder in the Hub's cache, with snapshots of its files",
            f"give one of them: {join_names(snapshots)}",
        )


def refuse_absent(folder: Path, folder_label: str, advice: str = "") -> SpecDecError:
    """Return the error for a path that is no folder; `folder_label` names it in the message."""
    if folder.exists():
        return SpecDecError(f"{folder_label} is a file", "give the folder that holds it")
    missing_folder = _find_missing(folder)
    fact = f"{folder_label} does not exist" + (
        f", nor does {missing_folder}" if missing_folder != folder else ""
    )
    return SpecDecError(fact + suggest_folder(folder), f"check the path{advice}")


def _find_missing(folder: Path) -> Path:
    """Return the first folder of a path that is not there."""
    while not folder.parent.is_dir():
        folder = folder.parent
    return folder


def suggest_folder(folder: Path) -> str:
    """Return ` (did you mean X?)` for a path that is no folder, or an empty string."""
    missing_folder = _find_missing(folder)
    try:
        siblings = sorted(path.name for path in missing_folder.parent.iterdir() if path.is_dir())
    except OSError:
        return ""
    inner_path = folder.relative_to(missing_folder)
    matching_siblings = [
        name for name in siblings if (missing_folder.parent / name / inner_path).is_dir()
    ]
    suggestion = suggest(missing_folder.name, matching_siblings or siblings)
    return (
        suggestion.replace("?)", f"/{inner_path}?)")
        if matching_siblings and inner_path.parts
        else suggestion
    )
