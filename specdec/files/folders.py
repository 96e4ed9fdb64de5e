"""What a folder is: told by what it holds, so that a wrong one is refused by its own name."""

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

TENSORRT_LLM = "tensorrt-llm"  # the backend of engine folders that name none
TORCH, TENSORRT = "torch", "tensorrt"
# Kinds of folders -> what they are called.
ENGINE, CHECKPOINT, MODEL = "engine", "checkpoint", "model"
REDRAFTER, MEDUSA, EAGLE, DFLASH, MTP = "redrafter", "medusa", "eagle", "dflash", "mtp"
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
    DFLASH: "dflash-model-dir", MTP: "mtp-model-dir",
}  # fmt: skip
DRAFTERS = tuple(FLAGS)
NEEDS = {
    REDRAFTER: "num_draft_layers in config.json",
    MEDUSA: "medusa_lm_head.safetensors or .pt, or tensors N.N.linear.weight alone",
    EAGLE: "fc.weight beside layers.N.* or midlayer.* (EAGLE-1 to 3, P-EAGLE)",
    DFLASH: "fc.weight and hidden_norm.weight (DFlash, DSpark)",
    MTP: "mtp.fc.weight, model.layers.N.eh_proj.weight or model.mtp_layers.0.input_proj.weight",
}
# What nothing here computes or reads, by a name of a tensor or file, or a key of config.json.
FOREIGN = {
    "an MLP or LSTM speculator": r"speculator\.",
    "Hydra heads": r"hydra_(num|lm|mlp)_",
    "Medusa heads with vLLM's names": r"blocks\.\d+\.layers\.",
    "an EAGLE-1 drafter with speculators' names": r"fusion_fc\.",
    "an EAGLE-3 drafter with NeMo's names": r"model\.fc\.",
    "an MTP head with speculators' names": r"mtp_layers\.",
}
# What to do with a folder of each kind.
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
# What clients of downloads put behind the name of a file that is not finished, or beside it.
UNFINISHED = (".aria2", ".part", ".incomplete", ".crdownload", ".partial", ".download")
MAX_PICKLE_BYTES = 64 << 20
MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_TARGET = re.compile(r"(model|transformer|language_model)\.")
_BARE_TARGET = re.compile(r"(wte|decoder|h\.\d+)\.")
_MEDUSA = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.")
# A name in a pickle: not those of storages and devices.
MTP_SIGN = re.compile(r"mtp\.fc|model\.layers\.\d+\.eh_proj|model\.mtp_layers\.0\.input_proj")
_TENSOR = re.compile(r"[A-Za-z_0-9]+(\.[A-Za-z_0-9]+)+|d2t|t2d|mask_hidden")
GGUF_MAGIC = b"GGUF"
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Whether a name that is no local folder can be `name` or `owner/name` on the Hub."""
    return _HUB_ID.fullmatch(name) is not None


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a file of a Hugging Face tokenizer."""
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
    gguf_files = sorted(p for p in path.iterdir() if p.suffix.lower() == ".gguf")
    splits = {p: _SPLIT.fullmatch(p.name) for p in gguf_files}
    first_files = [p for p, split in splits.items() if split is None or int(split.group(2)) == 1]
    models = [p for p in first_files if not p.name.lower().startswith("mmproj")]
    if len(models) > 1:
        raise SpecDecError(
            f"{path} holds {len(models)} GGUF models: {join_names([p.name for p in models])}",
            "give one of the files",
        )
    return models[0] if models else None


def _has_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def list_parts(path: Path) -> list[Path]:
    """The files of a model of which the first is given, by their names."""
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
    """What a folder shows: its kind or None, its files and config.json, and the tensors by name.

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
    """The kind of a folder without config.json."""
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
    """The kind of a folder with a config.json as Hugging Face's libraries write it."""
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
    """What a folder's files, config.json and tensors show of drafters: each kind with its sign."""
    signs = {}
    speculators = str(config.get("speculators_model_type", ""))
    key = next((key for key in ("num_draft_layers", "recurrent_drafting") if key in config), None)
    if key or config.get("model_type") == "recurrent_drafting_drafter":
        signs[REDRAFTER] = f"config.json's {key or 'model_type'}"
    elif states := [name for name in tensors if name.startswith(("rnn_u.", "rnn_w."))]:
        signs[REDRAFTER] = states[0]
    if files := [name for name in MEDUSA_FILES if name in names]:
        signs[MEDUSA] = files[0]
    elif heads := [name for name in tensors if name.startswith(("medusa_head.", "medusa_heads."))]:
        signs[MEDUSA] = heads[0]
    elif REDRAFTER not in signs and tensors and all(_MEDUSA.match(name) for name in tensors):
        signs[MEDUSA] = min(tensors)
    if heads := [name for name in tensors if MTP_SIGN.match(name)]:
        signs[MTP] = min(heads)
    if together := [name for name in tensors if name.startswith("eagle_module.")]:
        signs[EAGLE] = together[0]
    elif "fc.weight" in tensors and "hidden_norm.weight" in tensors:
        signs[DFLASH] = "fc.weight and hidden_norm.weight"
    elif "fc.weight" in tensors:
        signs[EAGLE] = "fc.weight"
    elif speculators in ("eagle", "eagle3", "peagle") or "eagle_config" in config:
        signs[EAGLE] = "config.json alone"
    elif speculators in ("dflash", "dspark") or "dflash_config" in config:
        signs[DFLASH] = "config.json alone"
    return signs


def recognize_drafter(folder: Path, flag: str) -> str:
    """Return the kind of a drafter's folder, or MODEL of one that holds a whole model alone.

    Raises SpecDecError for any other, and where more than one kind shows.
    """
    look = look_at(folder)
    if look.error is not None:
        raise look.error
    refuse_foreign(look, f"{flag} {folder}")
    found, signs = look.kind, look.find_signs()
    if found == MODEL:  # a model's own head drafts for itself alone
        signs.pop(MTP, None)
    if len(signs) == 1 and found in (None, MODEL, *signs):
        return next(iter(signs))
    if found == MODEL and not signs:
        return MODEL
    if len(signs) > 1:
        shown = " and ".join(f"{NAMES[kind]} ({sign})" for kind, sign in signs.items())
        raise SpecDecError(
            f"{flag} {folder} shows {len(signs)} kinds of drafters: {shown}",
            "keep one of them, or give it by the flag of its method:"
            f" {' or '.join(f'--{FLAGS[kind]}' for kind in signs)}",
        )
    if found is not None:
        raise SpecDecError(
            f"{flag} {folder} is {NAMES[found]}, not a drafter's", USES[found].format(path=folder)
        )
    patterns = sorted({re.sub(r"\d+", "N", name) for name in look.tensors})
    raise SpecDecError(
        f"{flag} {folder} holds no drafter that is known: its tensors are"
        f" {join_names(patterns) if patterns else 'none that can be listed'}; the keys of its"
        f" config.json {join_names(sorted(look.config)) if look.config else 'none'}; its files"
        f" {join_names(sorted(look.names))}",
        f"a drafter of each method has: {'; '.join(f'{NAMES[k]}, {v}' for k, v in NEEDS.items())}",
    )


def refuse_foreign(look: Look, folder_label: str) -> None:
    """Raise SpecDecError for a drafter of a kind that is known, and not supported.

    shown: how the message names the folder.
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
    """Names of the tensors of a folder's weights, empty where there are none to be read."""
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
    """Names of the tensors in a file of torch.save, without torch: nothing in it is executed."""
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

    transformers loads it, other readers do not. shown: how the message names the folder.
    """
    if (folder / ADAPTER_CONFIG).exists():
        raise SpecDecError(
            f"{folder_label} holds a LoRA adapter beside its weights ({ADAPTER_CONFIG}), which"
            " transformers would add to them",
            f"{remedy}; for the weights alone move {ADAPTER_CONFIG} elsewhere",
        )


def expect_folder(path: Path | str, wanted: str, flag: str | None = None) -> None:
    """Raise SpecDecError where a folder is absent, or certainly of another kind than is wanted.

    flag: the option that named it, for the message. What cannot be told passes: whoever reads the
    folder knows better what is missing.
    """
    folder = Path(path)
    shown = f"{flag} {path}" if flag else str(path)
    if wanted in (MODEL, TOKENIZER) and find_gguf(folder) is not None:
        return
    if not folder.is_dir():
        raise refuse_absent(folder, shown, MAKERS.get(wanted, ""))
    look = look_at(folder)
    found = look.kind
    if wanted in DRAFTERS:
        refuse_foreign(look, shown)
    if found is None or found == wanted:
        return
    if wanted == TOKENIZER and has_tokenizer(folder):
        return
    if wanted in DRAFTERS and found == MODEL and look.find_signs():
        return
    remedy = WAYS.get((found, wanted), USES[found]).format(path=path)
    lack = "and has no tokenizer" if wanted == TOKENIZER else f"not {NAMES[wanted]}"
    raise SpecDecError(f"{shown} is {NAMES[found]}, {lack}", remedy)


def read_backend(folder: Path) -> str:
    """Return the backend that an engine folder was built for."""
    expect_folder(folder, ENGINE)
    return str(read_json(folder / "config.json").get("backend", TENSORRT_LLM))


def refuse_absent(folder: Path, folder_label: str, advice: str = "") -> SpecDecError:
    """The error for a path that is no folder; `shown` is how the message names it."""
    if folder.exists():
        return SpecDecError(f"{folder_label} is a file", "give the folder that holds it")
    missing_folder = _find_missing(folder)
    fact = f"{folder_label} does not exist" + (
        f", nor does {missing_folder}" if missing_folder != folder else ""
    )
    return SpecDecError(fact + suggest_folder(folder), f"check the path{advice}")


def _find_missing(folder: Path) -> Path:
    """The first folder of a path that is not there."""
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
