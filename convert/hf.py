"""Hugging Face folders: config.json and the index of tensors; a tensor is read when it is used."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from specdec import logs
from specdec.errors import SpecDecError, raise_problems, summarize
from specdec.schema import FLOAT_DTYPES
from specdec.storage import Array, TensorFile, TensorInfo, read_json

from .plan import count_elements, join_names

if TYPE_CHECKING:
    import torch

logger = logs.get_logger(__name__)

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
TORCH_NAMES = ("model.pt", "pytorch_model.bin")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
T = TypeVar("T")


class HfFolder:
    """A model folder: `config`, the tensors by name, and the files that hold them."""

    def __init__(self, path: Path, *, allow_torch: bool = False) -> None:
        self.path = path
        self.config = read_json(path / "config.json")
        self.files: list[Path] = [path / "config.json"]
        self.tensors: dict[str, TensorInfo] = {}
        self._holders: dict[str, TensorFile | TorchFile] = {}
        self._open_files: list[TensorFile | TorchFile] = []
        if (path / SINGLE_NAME).is_file():
            if (path / INDEX_NAME).is_file():  # as transformers chooses
                logger.warning("%s: reading %s, not %s", path, SINGLE_NAME, INDEX_NAME)
            self._add_file(TensorFile(path / SINGLE_NAME))
        elif (path / INDEX_NAME).is_file():
            self._add_shards(read_json(path / INDEX_NAME))
        else:
            self._add_torch_file(allow_torch)

    def read(self, name: str) -> Array:
        """Return a tensor in its storage type (bfloat16 as uint16)."""
        return self._holders[name].read(name)

    def release(self) -> None:
        """Let go of the memory of what was read."""
        for holder in self._open_files:
            holder.release()

    def find_dtype(self) -> str:
        """Return the dtype that config.json names, or else the one that most weights have."""
        for key in ("dtype", "torch_dtype"):
            value = self.config.get(key)
            if value is not None:
                dtype = str(value).removeprefix("torch.")
                if dtype not in FLOAT_DTYPES:
                    raise SpecDecError(
                        f"{self.path}: config.json gives {key} {value!r}",
                        f"choose one of {', '.join(FLOAT_DTYPES)} with --dtype",
                    )
                return dtype
        sizes: dict[str, int] = {}
        for info in self.tensors.values():
            sizes[info.dtype] = sizes.get(info.dtype, 0) + count_elements(info)
        usual = max(sizes, key=lambda dtype: sizes[dtype], default="no tensors")
        if usual not in FLOAT_DTYPES:
            raise SpecDecError(
                f"{self.path}: config.json names no dtype, and its weights are {usual}",
                f"choose one of {', '.join(FLOAT_DTYPES)} with --dtype",
            )
        return usual

    def _add_file(self, file: TensorFile | TorchFile) -> None:
        self.files.append(file.path)
        self._open_files.append(file)
        for name, info in file.tensors.items():
            self.tensors[name] = info
            self._holders[name] = file

    def _add_shards(self, index: Mapping[str, Any]) -> None:
        path = self.path / INDEX_NAME
        self.files.append(path)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(filename, str) for filename in weight_map.values()
        ):
            raise SpecDecError(
                f"{path} has no weight_map of tensor names to file names",
                "copy or download the folder again",
            )
        filenames = sorted(set(weight_map.values()))
        outside = [name for name in filenames if not _is_inside(name)]
        if outside:
            raise SpecDecError(
                f"{path} names files outside the folder: {join_names(outside)}",
                "do not trust this folder; get it from its origin",
            )
        absent = [name for name in filenames if not (self.path / name).is_file()]
        if absent:
            raise SpecDecError(
                f"{path} names {len(absent)} of {len(filenames)} files that are not there:"
                f" {join_names(absent)}",
                "finish the download of the folder",
            )
        problems = []
        for filename in filenames:
            file = TensorFile(self.path / filename)
            indexed = {name for name, holder in weight_map.items() if holder == filename}
            lacking = sorted(indexed - file.tensors.keys())
            if lacking:
                problems.append(
                    (
                        f"{file.path} lacks tensors that the index places there:"
                        f" {join_names(lacking)}",
                        "download the file and the index again",
                    )
                )
            unlisted = sorted(file.tensors.keys() - indexed)
            if unlisted:
                problems.append(
                    (
                        f"{file.path} holds tensors that the index does not place there:"
                        f" {join_names(unlisted)}",
                        "download the file and the index again",
                    )
                )
            self._add_file(file)
        raise_problems(problems)

    def _add_torch_file(self, allow_torch: bool) -> None:
        found = [name for name in TORCH_NAMES if (self.path / name).is_file()]
        if allow_torch and found:
            self._add_file(TorchFile(self.path / found[0]))
            return
        bins = sorted(path.name for path in self.path.glob("*.bin"))
        if bins:
            raise SpecDecError(
                f"{self.path} holds {join_names(bins)} but no safetensors file",
                "load it with transformers and save it with save_pretrained, which writes"
                f" {SINGLE_NAME}",
            )
        if (self.path / "rank0.safetensors").is_file():
            raise SpecDecError(
                f"{self.path} is a checkpoint, not a Hugging Face folder",
                "give it as --base-model-checkpoint-dir",
            )
        raise SpecDecError(
            f"{self.path} holds neither {SINGLE_NAME} nor {INDEX_NAME}",
            "give the folder that holds the model's weights",
        )


def _is_inside(filename: str) -> bool:
    path = PurePosixPath(filename)
    return (
        bool(filename) and not path.is_absolute() and ".." not in path.parts
        and "\\" not in filename and "\0" not in filename
    )  # fmt: skip


class TorchFile:
    """A drafter that a trainer saved with torch.save: a flat dictionary of tensors."""

    def __init__(self, path: Path) -> None:
        import torch

        self.path = path
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - damaged files make torch raise any kind
            raise SpecDecError(
                f"{path} cannot be read as weights alone: {summarize(error)}",
                "save it again as model.safetensors",
            ) from None
        if not isinstance(state, dict) or not all(
            isinstance(name, str) and isinstance(value, torch.Tensor)
            for name, value in state.items()
        ):
            raise SpecDecError(
                f"{path} is not a flat dictionary of tensors", "save the model's state_dict()"
            )
        self._state: dict[str, torch.Tensor] = state
        self.tensors = {
            name: TensorInfo(str(value.dtype).removeprefix("torch."), tuple(value.shape))
            for name, value in state.items()
        }

    def read(self, name: str) -> Array:
        from specdec.torch_tensors import to_array

        return to_array(self._state[name])

    def release(self) -> None:
        """Do nothing: torch has read the whole file, which for a drafter is small."""


def open_model(name: str, flag: str, *, allow_torch: bool = False) -> HfFolder:
    """Open a local folder, or a Hub id whose files are fetched or already cached."""
    path = Path(name)
    if path.is_dir():
        return HfFolder(path, allow_torch=allow_torch)
    if path.exists():
        raise SpecDecError(f"{flag} {name} is a file", "give the folder that holds config.json")
    if not HUB_ID.fullmatch(name):
        raise SpecDecError(f"{flag} {name} does not exist", "check the path")
    patterns = ["config.json", "model*.safetensors", INDEX_NAME]
    return HfFolder(
        _fetch(name, flag, patterns + list(TORCH_NAMES if allow_torch else ())),
        allow_torch=allow_torch,
    )


def _fetch(hub_id: str, flag: str, patterns: Sequence[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise SpecDecError(
            f"{flag} {hub_id} is not a local folder, and huggingface_hub is not installed",
            "give a local folder, or pip install huggingface_hub",
        ) from None
    logger.info("fetching %s from the Hugging Face Hub", hub_id)
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns), etag_timeout=10))
    except Exception as error:  # noqa: BLE001 - the library raises many kinds, its HTTP client more
        reason = " ".join(str(error).split())[:200]
        raise SpecDecError(
            f"{flag} {hub_id} is no local folder, and the Hub gave"
            f" {type(error).__name__}: {reason}",
            "check the spelling and the network, or download the model and give its folder",
        ) from None


class ConfigReader:
    """Reads fields of a config.json with their types; `finish` reports all that were wrong."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self.config = config
        self.path = path
        self.problems: list[tuple[str, str]] = []

    def get_int(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return a whole number; without a default the field is required."""
        value = self._get(name, default)
        if type(value) is int and value >= minimum:
            return value
        return self._reject(name, value, f"a whole number of at least {minimum}", minimum)

    def get_float(self, name: str, default: float | None = None) -> float:
        """Return a positive number; without a default the field is required."""
        value = self._get(name, default)
        if type(value) in (int, float) and 0 < value < math.inf:
            return float(value)
        return self._reject(name, value, "a positive number", 1.0)

    def get_bool(self, name: str, default: bool | None = None) -> bool:
        """Return true or false; without a default the field is required."""
        value = self._get(name, default)
        return value if isinstance(value, bool) else self._reject(name, value, "a boolean", False)

    def get_text(self, name: str, default: str | None = None) -> str:
        """Return a text; without a default the field is required."""
        value = self._get(name, default)
        return value if isinstance(value, str) else self._reject(name, value, "a text", "")

    def get_object(self, name: str) -> dict[str, Any]:
        """Return a nested object, empty where the field is absent or null."""
        value = self.config.get(name)
        value = {} if value is None else value
        return value if isinstance(value, dict) else self._reject(name, value, "an object", {})

    def refuse(self, fact: str, remedy: str) -> None:
        """Note a problem."""
        self.problems.append((f"{self.path}: {fact}", remedy))

    def finish(self) -> None:
        """Raise SpecDecError if anything was wrong."""
        raise_problems(self.problems)

    def _get(self, name: str, default: T | None) -> Any:
        value = self.config.get(name)
        return default if value is None else value

    def _reject(self, name: str, value: Any, expected: str, placeholder: T) -> T:
        if value is None:
            self.refuse(f"{name} is missing", f"give {name}, {expected}")
        else:
            self.refuse(f"{name} is {value!r}, not {expected}", f"mend {name}")
        return placeholder
