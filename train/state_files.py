"""Hidden states in files of the form that vLLM's connectors and speculators write.

    token_ids              [T] int64
    hidden_states          [T, L, D] outputs after L numbers of layers; in FP8 with
    hidden_states_scales   [T, 1, 1] float32, of the package hs-connectors

vLLM numbers states by the layers that were run before: 0 is the embedding, n is the output of the
last of n layers, before the target's last norm. Legend: T tokens, D hidden.
"""

from __future__ import annotations

import bisect
import dataclasses
import fcntl
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdec.errors import SpecDecError, shorten
from specdec.files.tensor_file import TensorFile
from specdec.files.torch_tensors import TORCH_DTYPES, to_tensor

from . import fp8
from .rows import Array, TokenRows

TOKENS, STATES, SCALES = "token_ids", "hidden_states", "hidden_states_scales"
LOCK_SECONDS = 60.0  # longest wait for a file that vLLM still writes


@dataclasses.dataclass(frozen=True)
class StatesForm:
    """Form in which files must hold states. layer_ids: vLLM's, rising."""

    layer_ids: tuple[int, ...]
    hidden_size: int

    def check(self, file: TensorFile) -> None:
        """Raise SpecDecError where a file's tensors have another form."""
        missing_tensors = [name for name in (TOKENS, STATES) if name not in file.tensors]
        if missing_tensors:
            raise SpecDecError(
                f"{file.path} has no {' and no '.join(missing_tensors)}, but"
                f" {shorten(', '.join(sorted(file.tensors)))}",
                "give a folder of files that vLLM's extract_hidden_states or speculators wrote",
            )
        tokens, states = file.tensors[TOKENS], file.tensors[STATES]
        if tokens.dtype not in ("int64", "int32") or len(tokens.shape) != 1:
            raise _refuse(file, f"{TOKENS} is {tokens.dtype} {list(tokens.shape)}, not int64 [T]")
        num_layers, width = len(self.layer_ids), self.hidden_size
        expected = (tokens.shape[0], num_layers, width)
        if states.shape != expected:
            raise _refuse(
                file,
                f"{STATES} is {list(states.shape)}, not {list(expected)}: {expected[0]} tokens, the"
                f" {num_layers} layers {self.describe()}, {width} channels",
                f"start the server with the layer ids {self.describe()}, or say which ids the file"
                " has: --hidden-states-layers",
            )
        scales = file.tensors.get(SCALES)
        is_scaled = scales is not None and (scales.dtype, scales.shape[:1]) == (
            "float32", states.shape[:1],
        )  # fmt: skip
        if states.dtype not in TORCH_DTYPES and not (states.dtype == fp8.DTYPE and is_scaled):
            raise _refuse(
                file,
                f"{STATES} is {states.dtype}{'' if is_scaled else f' without {SCALES}'}, not one of"
                f" {', '.join(TORCH_DTYPES)}, nor {fp8.DTYPE} with a scale for each token",
            )

    def describe(self) -> str:
        """Return the layer ids as --hidden-states-layers takes them."""
        return ",".join(map(str, self.layer_ids))


def _refuse(file: TensorFile, fact: str, hint: str | None = None) -> SpecDecError:
    return SpecDecError(
        f"{file.path}: {fact}", hint or "remove the file, and let its states be written again"
    )


def read_states(file: TensorFile, num_tokens: int, layers: list[int], dtype: str) -> list[Tensor]:
    """Return the states [num_tokens, D] of some places along a file's layers, checked for NaN."""
    info = file.tensors[STATES]
    states = to_tensor(file.read(STATES)[:num_tokens, layers], info.dtype)
    if info.dtype == fp8.DTYPE:
        scales = to_tensor(file.read(SCALES)[:num_tokens], "float32")
        states = states.float() * scales.reshape(-1, 1, 1)
    if not torch.isfinite(states).all():
        bad_tokens = (~torch.isfinite(states)).any(2).any(1).nonzero()
        raise _refuse(
            file,
            f"{len(bad_tokens)} of {num_tokens} tokens have states that are no numbers, the first"
            f" at {int(bad_tokens[0])}",
        )
    return list(states.to(TORCH_DTYPES[dtype]).unbind(1))


def check_tokens(file: TensorFile, tokens: Array) -> None:
    """Raise SpecDecError where a file is of other tokens than a row's, or of fewer."""
    file_tokens = file.read(TOKENS)
    count = min(len(tokens), len(file_tokens))
    different_places = np.flatnonzero(file_tokens[:count] != tokens[:count])
    if len(different_places):
        position = int(different_places[0])
        fact = f"is {int(file_tokens[position])}, of the row {int(tokens[position])}"
        raise _refuse(file, f"token {position} of {len(file_tokens)} {fact}")
    if count < len(tokens):
        raise _refuse(file, f"it has {count} tokens, the row {len(tokens)}")


def open_when_written(path: Path, seconds: float = LOCK_SECONDS) -> TensorFile:
    """Open a file that vLLM wrote, once it lets go of the lock beside it."""
    lock = path.with_name(f"{path.name}.lock")
    deadline = time.monotonic() + seconds
    while lock.exists():
        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SpecDecError(
                        f"{path} is still locked by its writer after {seconds:g} s",
                        f"look at the server's log; remove {lock} if nobody writes any more",
                    ) from None
        time.sleep(0.01)
    return TensorFile(path)


class StatesFolder:
    """Folder of files, in which rows are found by their tokens.

    States depend on earlier tokens alone, so that a file serves every row which it begins with.
    """

    def __init__(self, folder: Path, form: StatesForm) -> None:
        self.folder, self.form = folder, form
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise SpecDecError(
                f"--hidden-states-from {folder} has no *.safetensors",
                "give the folder that vLLM's extract_hidden_states or speculators wrote, or the URL"
                " of a server",
            )
        # Bytes of big-endian numbers sort as the numbers do, so a row lies right before the files
        # that begin with it. They take 4 bytes a token.
        entries = []
        for path in paths:
            file = open_when_written(path)
            form.check(file)
            entries.append((_to_key(file.read(TOKENS)), path))
        entries.sort()
        self._keys, self._paths = [key for key, _ in entries], [path for _, path in entries]

    def find(self, tokens: Array) -> Path | None:
        """Return the file whose tokens begin with a row's, or None."""
        key = _to_key(tokens)
        index = bisect.bisect_left(self._keys, key)
        is_match = index < len(self._keys) and self._keys[index].startswith(key)
        return self._paths[index] if is_match else None

    def fetch(self, tokens: Array) -> tuple[TensorFile, int | None]:
        """Return the file of a row's states, and no next token."""
        path = self.find(tokens)
        if path is None:
            raise SpecDecError(
                f"{self.folder}: none of {len(self._paths)} files begins with the {len(tokens)}"
                " tokens of a row",
                "give the data and tokenizer that the states were made from",
            )
        return TensorFile(path), None

    def release(self, file: TensorFile) -> None:
        """Leave the file where it is."""

    def check_rows(self, split: str, rows: TokenRows) -> None:
        """Raise SpecDecError where some of the rows have no file."""
        bounds = rows.bounds
        all_rows = [rows.tokens[bounds[r] : bounds[r + 1]] for r in range(len(rows))]
        missing_rows = [r for r, tokens in enumerate(all_rows) if self.find(tokens) is None]
        if not missing_rows:
            return
        first_tokens = all_rows[missing_rows[0]]
        num_shared = max(_count_shared(first_tokens, key) for key in self._keys)
        raise SpecDecError(
            f"{self.folder}: {len(missing_rows)} of {len(rows)} {split} rows have no states in its"
            f" {len(self._paths)} files; row {missing_rows[0]} has {len(first_tokens)} tokens, of"
            f" which the nearest file has the first {num_shared}",
            "give the data, tokenizer and chat template that the states were made from, and a"
            " --model-max-length of at most the files' tokens",
        )


def _to_key(tokens: Array) -> bytes:
    return np.ascontiguousarray(tokens, ">u4").tobytes()


def _count_shared(tokens: Array, key: bytes) -> int:
    """Return how many tokens a row and a file's key have in common at their beginnings."""
    file_tokens = np.frombuffer(key, ">u4")
    count = min(len(tokens), len(file_tokens))
    is_different = file_tokens[:count] != tokens[:count]
    return int(is_different.argmax()) if is_different.any() else count
