"""The calibration pass: texts through the Hugging Face model, the largest magnitudes kept.

Every linear that will be quantized reports the largest magnitude of its input, the K and V linears
also that of their outputs. One number each is kept; no activations are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec.errors import SpecDecError, count, join_names
from specdec.files.reading import Array
from specdec.system import logs
from specdec.system.processes import read_memory
from specdec.text.chat import ChatFormat, Conversation
from specdec.text.documents import name_line, parse_object, read_document, read_lines

if TYPE_CHECKING:
    import torch

DEFAULT_SIZE = 512
DEFAULT_MAX_LENGTH = 512
KEYS = "text, messages, conversations or input_ids"
# Beside the weights: activations of a batch, the libraries, the process itself.
SPARE_BYTES = 1 << 30

logger = logs.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class Watch:
    """A linear to watch. outputs: what to call a part of its output's last dimension.

    group_size: see `Inputs.moments`; None where only the largest magnitude of all inputs is wanted.
    """

    module: str
    name: str
    outputs: tuple[tuple[str, slice], ...] = ()
    group_size: int | None = None


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Statistics of a linear's inputs over all tokens.

    mean, largest: their magnitudes, float32 [in]; moments: the mean product of two inputs of a
    group, float32 [groups, size, size].
    """

    mean: Array
    largest: Array
    moments: Array


@dataclasses.dataclass(frozen=True)
class Observations:
    """Observations of a calibration, by the watches' names: largest magnitudes, and inputs."""

    largest: dict[str, np.float32]
    inputs: dict[str, Inputs] = dataclasses.field(default_factory=dict)


def read_rows(
    path: Path,
    load_tokenizer: Callable[[], Any],
    *,
    size: int | None,
    max_length: int,
    vocab_size: int,
    usual_size: int = DEFAULT_SIZE,
    spare: int = 0,
) -> list[list[int]]:
    """Read the first `size` rows of a calibration file as tokens, each cut to `max_length`.

    A .txt file holds a text a line. The tokenizer is loaded when the first text is met.
    usual_size: the size, if not told otherwise; spare: how many more rows to return, if there are
    any.
    """
    rows: list[list[int]] = []
    load_format = functools.cache(lambda: ChatFormat(load_tokenizer()))
    for number, line in read_lines(path):
        if len(rows) == (size or usual_size) + spare:
            break
        with name_line(path, number, KEYS):
            tokens = _read_row(line, load_format, vocab_size, is_text=path.suffix == ".txt")
            if tokens:
                rows.append(tokens[:max_length])
    if not rows:
        raise SpecDecError(
            f"--calibration-data {path} holds no text", "give texts like those to be decoded"
        )
    if size is not None and len(rows) < size:
        raise SpecDecError(
            f"--calibration-data {path} holds {count(len(rows), 'row')}, --calib-size is {size}",
            f"give more texts, or --calib-size {len(rows)}",
        )
    if len(rows) < (size or usual_size):
        logger.warning(
            "%s holds %s: the scales fit what they show; %d are usual",
            path, count(len(rows), "row"), usual_size,
        )  # fmt: skip
    return rows


def _read_row(
    line: bytes, load_format: Callable[[], ChatFormat], vocab_size: int, *, is_text: bool
) -> list[int]:
    """Return the tokens of a line of a calibration file, none of a text without any."""
    document: str | Conversation
    if is_text:
        document = line.decode("utf-8").rstrip("\r\n")
    else:
        row = parse_object(line)
        if "input_ids" in row:
            return _check_tokens(row["input_ids"], vocab_size)
        document = read_document(row, KEYS)
    tokens = _tokenize(load_format(), document)
    return _check_tokens(tokens, vocab_size) if tokens else []


def hold_out(
    rows: list[list[int]], size: int | None, usual_size: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Divide rows into those that calibrate and those to measure on.

    An eighth of few rows is left to measure on, unless all are asked for.
    """
    if size is None:
        size = usual_size if len(rows) > usual_size else len(rows) - len(rows) // 8
    return rows[:size], rows[size:]


def _check_tokens(tokens: Any, vocab_size: int) -> list[int]:
    if not isinstance(tokens, list) or not tokens or not all(type(t) is int for t in tokens):
        raise ValueError("input_ids is not a list of whole numbers, or empty")
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"token {outside[0]} is outside the vocabulary of {vocab_size}")
    return tokens


def _tokenize(format_: ChatFormat, document: str | Conversation) -> list[int]:
    tokenizer = format_.tokenizer
    if isinstance(document, str):
        return list(tokenizer(document, verbose=False)["input_ids"])
    text = format_.render(document)  # the template writes the special tokens
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def load_model_tokenizer(model_dir: str) -> Any:
    """Load the model's tokenizer for data that holds text."""
    from specdec.text.pretrained import load_tokenizer

    try:
        return load_tokenizer(model_dir, "--model-dir")
    except SpecDecError as error:
        raise SpecDecError(
            f"--calibration-data holds text, and a tokenizer is needed: {error.message}",
            f"{error.hint}; or give rows of input_ids",
        ) from None


def make_batches(rows: Sequence[list[int]], batch_size: int) -> Iterator[list[list[int]]]:
    """Group rows of equal length, so that no padding takes part in the maxima."""
    for _, same_length_rows in itertools.groupby(sorted(rows, key=len), key=len):
        while batch := list(itertools.islice(same_length_rows, batch_size)):
            yield batch


def choose_device(name: str) -> str:
    """Return `cpu` or `cuda`."""
    import torch

    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise SpecDecError(
            "--calib-device cuda: torch sees no CUDA device", "use --calib-device cpu"
        )
    return "cuda" if has_cuda and name != "cpu" else "cpu"


def check_memory(num_bytes: int, device: str, model_dir: Path) -> None:
    """Raise SpecDecError when a device's memory cannot hold a model of that many bytes."""
    available = _measure_cuda() if device == "cuda" else _measure_host()
    if available is None or num_bytes + SPARE_BYTES <= available:
        return
    device_name = "the GPU" if device == "cuda" else "this machine"
    other_device = "" if device == "cpu" else ", or --calib-device cpu"
    raise SpecDecError(
        f"calibration loads {model_dir}, {num_bytes / 1e9:.1f} GB ({num_bytes:,} bytes), and"
        f" {device_name} has {available / 1e9:.1f} GB ({available:,} bytes) of memory free;"
        f" {SPARE_BYTES / 1e9:.1f} GB more are needed for activations",
        f"use a machine with more memory{other_device}, or give an FP8 model that is quantized"
        " already",
    )


def _measure_cuda() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0])


def _measure_host() -> int | None:
    """Return the bytes that this process may still take; None where the system does not tell."""
    lines = [read_memory("MemAvailable")]
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        lines.append(limit - int((group / "memory.current").read_text(encoding="ascii")))
    return min((number for number in lines if number is not None), default=None)


def observe(
    model_dir: Path,
    rows: Sequence[list[int]],
    watches: Sequence[Watch],
    *,
    dtype: str,
    device: str,
    batch_size: int,
) -> Observations:
    """Run the rows through the model; return what was seen under each watched name."""
    import torch

    model = load_float_model(model_dir, "AutoModel", dtype).to(device)
    magnitudes: dict[str, torch.Tensor] = {}
    inputs: dict[str, _InputSums] = {}

    def note(name: str, values: torch.Tensor) -> None:
        amax = values.detach().abs().amax().float()
        magnitudes[name] = torch.maximum(magnitudes[name], amax) if name in magnitudes else amax

    batches = list(make_batches(rows, batch_size))
    with contextlib.ExitStack() as hooks, torch.inference_mode():
        for watch in watches:
            module = find_module(model, watch.module, model_dir)
            for handle in _watch(module, watch, note):
                hooks.callback(handle.remove)
            if watch.group_size is not None:
                inputs[watch.name] = sums = _InputSums(watch.group_size)
                hooks.callback(module.register_forward_pre_hook(sums.add).remove)
        for batch in logs.show_progress(batches, label="calibrating", total=len(batches)):
            try:
                model(input_ids=torch.tensor(batch, device=device), use_cache=False)
            except torch.OutOfMemoryError:
                raise SpecDecError(
                    f"the GPU's memory does not hold {model_dir} and {count(len(batch), 'row')} of"
                    f" {len(batch[0])} tokens",
                    "lower --calib-batch-size or --calib-max-seq-length, or use --calib-device cpu",
                ) from None
            _refuse_nonfinite(magnitudes, model_dir)
    silent = [watch.module for watch in watches if watch.name not in magnitudes]
    if silent:
        raise SpecDecError(
            f"the calibration pass never used {count(len(silent), 'linear')} of {model_dir}:"
            f" {join_names(silent)}",
            "this model does not compute as its config.json says; it cannot be calibrated",
        )
    return Observations(
        {name: np.float32(amax.item()) for name, amax in magnitudes.items()},
        {name: sums.finish() for name, sums in inputs.items()},
    )


class _InputSums:
    """Sums over the inputs of a linear, as a hook before it sees them."""

    def __init__(self, group_size: int) -> None:
        self.group_size, self.count = group_size, 0
        self.sums: Any = None

    def add(self, _module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        import torch

        values = inputs[0].detach().flatten(0, -2).float()
        magnitudes = values.abs()
        grouped = values.view(len(values), -1, self.group_size).transpose(0, 1)
        batch_sums = (
            magnitudes.sum(0, dtype=torch.float64), magnitudes.amax(0),
            (grouped.transpose(1, 2) @ grouped).double(),
        )  # fmt: skip
        self.count += len(values)
        if self.sums is None:
            self.sums = batch_sums
        else:
            self.sums = (
                self.sums[0] + batch_sums[0], torch.maximum(self.sums[1], batch_sums[1]),
                self.sums[2] + batch_sums[2],
            )  # fmt: skip

    def finish(self) -> Inputs:
        mean, magnitudes, moments = self.sums
        return Inputs(
            *((x / n).float().cpu().numpy()
              for x, n in ((mean, self.count), (magnitudes, 1), (moments, self.count)))
        )  # fmt: skip


def _watch(module: Any, watch: Watch, note: Callable[[str, torch.Tensor], None]) -> Iterator[Any]:
    def before(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        note(watch.name, inputs[0])

    def after(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        for name, columns in watch.outputs:
            note(name, output[..., columns])

    yield module.register_forward_pre_hook(before)
    if watch.outputs:
        yield module.register_forward_hook(after)


def _refuse_nonfinite(magnitudes: Mapping[str, torch.Tensor], model_dir: Path) -> None:
    import torch

    finite = torch.stack(list(magnitudes.values())).isfinite().tolist()
    broken = [name for name, is_finite in zip(magnitudes, finite, strict=True) if not is_finite]
    if broken:
        raise SpecDecError(
            f"calibrating {model_dir}: the activations are NaN or infinite at {broken[0]}"
            f" ({count(len(broken), 'place')} in all)",
            "use --dtype bfloat16 or float32 if the model overflows float16; else its weights"
            " are damaged",
        )


def load_float_model(model_dir: Path, kind: str, dtype: str) -> Any:
    """Load a folder's model, which is not quantized, by a class of transformers."""
    from specdec.files.torch_tensors import TORCH_DTYPES
    from specdec.text.pretrained import load_model

    return load_model(model_dir, kind, dtype=TORCH_DTYPES[dtype]).eval()


def find_module(model: Any, name: str, model_dir: Path) -> Any:
    """Find a linear by its tensors' name; files have the base model's prefix or lack it."""
    bare = name.removeprefix(model.base_model_prefix + ".")
    for candidate in (bare, name, name.partition(".")[2]):
        with contextlib.suppress(AttributeError):
            return model.get_submodule(candidate)
    raise SpecDecError(
        f"transformers' model of {model_dir} has no module {name}",
        "use the transformers version that the model was made for",
    )
