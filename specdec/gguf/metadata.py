"""Metadata of a GGUF file: values that are asked for one by one, so that none is passed over."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from specdec.errors import SpecDecError, join_names, shorten
from specdec.model.bounds import MAX_SIZE

from .file import StoredTensor, decode

# Keys that change nothing in the models that are read; None: whatever they say.
IGNORED_KEYS: dict[str, tuple[Any, ...] | None] = {
    "vocab_size": None, "tensor_data_layout": None, "rope.scaling.finetuned": None,
    "rope.scaling.original_context_length": None, "attention.causal": (True,),
    "expert_count": (0,), "expert_used_count": (0,), "rope.scaling.attn_factor": (1.0,),
    "pooling_type": (0,), "nextn_predict_layers": (0,), "expert_group_count": (0,),
    "rope.dimension_sections": None,  # of pictures: the three positions of a text are one
    "n_deepstack_layers": None,  # whose inputs have images added
    "attention.sliding_window": (0,),
    "expert_gating_func": (0, 1), "expert_weights_scale": (0.0, 1.0),
}  # fmt: skip


@dataclasses.dataclass
class Metadata:
    """A file's values; what was asked for is remembered.

    tensors: of the file, by llama.cpp's name.
    """

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    used_keys: set[str] = dataclasses.field(default_factory=set)

    @property
    def name(self) -> str:
        return str(self.values.get("general.architecture"))

    def get(self, key: str, default: Any = None, *, all_layers: bool = False) -> Any:
        """Return a value; of a list the one that all layers have, unless it is wanted whole."""
        self.used_keys.add(key)
        value = self.values.get(f"{self.name}.{key}", default)
        if all_layers or not isinstance(value, list):
            return value
        if not value or any(element != value[0] for element in value):
            self.refuse(f"{key} differs from layer to layer: {shorten(value)}")
        return value[0]

    def need(self, key: str) -> Any:
        """Return a value that must be there."""
        value = self.get(key)
        if value is None:
            self.refuse(f"the key {self.name}.{key} is missing")
        return value

    def count(self, key: str, default: int | None = None, *, maximum: int = MAX_SIZE) -> int:
        """Return a whole number from 1 to `most`; without a default it must be there."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) is not int or not 1 <= value <= maximum:
            self.refuse(
                f"{self.name}.{key} is {shorten(value)}, not a whole number from 1 to {maximum}"
            )
        return int(value)

    def positive(self, key: str, default: float) -> float:
        """Return a positive number."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            self.refuse(f"{self.name}.{key} is {shorten(value)}, not a positive number")
        return float(value)

    def refuse(self, fact: str) -> NoReturn:
        """Raise SpecDecError."""
        raise SpecDecError(
            f"{self.path}: {fact}", "take the Hugging Face folder that it was made from"
        )

    def check_rest(self) -> None:
        """Raise SpecDecError for keys that nobody has read."""
        known_keys = IGNORED_KEYS | dict.fromkeys(self.used_keys)
        unread_keys = [
            f"{key} {shorten(value)}" for key, value in self.values.items()
            if key.startswith(prefix := f"{self.name}.")
            and (allowed_values := known_keys.get(key.removeprefix(prefix), ())) is not None
            and value not in allowed_values
        ]  # fmt: skip
        if unread_keys:
            self.refuse(f"it may compute otherwise than is known here: {join_names(unread_keys)}")

    def read_factors(self, name: str) -> Any:
        """Return a tensor of factors of rotary frequencies, which must be there."""
        if (stored := self.tensors.get(name)) is None:
            self.refuse(f"the tensor {name} is missing")
        return decode(stored.read(0, stored.num_rows), stored.kind)[:, 0].astype(np.float64)
