"""What a model family is: a table of names and a config reader."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from specdec.schema import ModelConfig

from ..hf import ConfigReader, HfFolder

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What the user decides about a checkpoint; `ModelConfig` has fields of the same names."""

    dtype: str
    tp_size: int
    use_parallel_embedding: bool
    embedding_sharding_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A Hugging Face model family.

    modules: canonical module -> the family's modules that make it, one below the other;
    `{layer}` stands for a layer's number, and weight and bias follow their module.
    ignored: patterns of tensors that carry no weights.
    describe: the keys of a checkpoint's config.json that only this family has.
    """

    name: str
    model_type: str
    architectures: tuple[str, ...]
    modules: Mapping[str, tuple[str, ...]]
    ignored: tuple[str, ...] = ()
    is_tied_by_default: bool = False
    read_config: Callable[[ConfigReader, Layout], ModelConfig]
    describe: Callable[[ModelConfig], dict[str, Any]]

    def read_model(self, folder: HfFolder, layout: Layout) -> tuple[ModelConfig, bool]:
        """Return the model's configuration and whether its head is tied to the embedding."""
        reader = ConfigReader(folder.config, folder.path / "config.json")
        is_tied = reader.get_bool("tie_word_embeddings", self.is_tied_by_default)
        return self.read_config(reader, layout), is_tied

    def find_sources(self, canonical: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Map canonical tensor names to the family's own."""
        sources = {}
        for name in canonical:
            module, _, kind = name.rpartition(".")
            match = _LAYER.search(module)
            layer = match.group(1) if match else ""
            generic = _LAYER.sub(".layers.{layer}.", module)
            sources[name] = tuple(
                f"{part.format(layer=layer)}.{kind}" for part in self.modules[generic]
            )
        return sources


def read_rotary(reader: ConfigReader, default_base: float) -> tuple[float, dict[str, Any] | None]:
    """Return rotary base and scaling from rope_theta and rope_scaling, or rope_parameters.

    transformers 5 writes both into `rope_parameters`, earlier versions at the top level.
    """
    parameters = reader.get_object("rope_parameters")
    old = _drop_default(reader.get_object("rope_scaling"))
    new = _drop_default(parameters)
    if old and new and old != new:
        reader.refuse(
            f"rope_scaling {old} and rope_parameters {new} disagree", "remove the wrong one"
        )
    nested = parameters.get("rope_theta", reader.get_object("rope_scaling").get("rope_theta"))
    theta = reader.config.get("rope_theta")
    if theta is not None and nested is not None and theta != nested:
        reader.refuse(
            f"rope_theta is {theta} and in rope_parameters {nested}", "remove the wrong one"
        )
    if nested is not None:
        inner = ConfigReader({"rope_theta": nested}, reader.path)
        base = inner.get_float("rope_theta")
        reader.problems += inner.problems
    else:
        base = reader.get_float("rope_theta", default_base)
    return base, new or old or None


def _drop_default(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling alone: transformers 5 keeps the base in the same object."""
    if scaling.get("rope_type", scaling.get("type")) == "default":
        return {}
    return {key: value for key, value in scaling.items() if key != "rope_theta"}
