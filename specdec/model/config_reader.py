"""Fields of a Hugging Face config.json, under the names of transformers 4.57 and of 5."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from specdec.errors import Problems, shorten
from specdec.files.tensor_file import MAX_NUMBER
from specdec.model.config import FULL, SLIDING
from specdec.model.rotary_scaling import get_kind, list_kinds, unify_scaling

# How many experts a layer has: transformers 5 writes the second for Qwen3-MoE, 4.57 the first.
EXPERT_COUNTS = ("num_experts", "num_local_experts")
# Values that mean false in a field of any type.
NO = ("false", "0", "no", "none", "")
T = TypeVar("T")


class ConfigReader:
    """Reads fields of a config.json with their types; `finish` reports all that were wrong."""

    def __init__(
        self, config: Mapping[str, Any], path: Path, problems: Problems | None = None
    ) -> None:
        self.config, self.path = config, path
        self.problems = Problems() if problems is None else problems

    def enter(self, config: Mapping[str, Any]) -> ConfigReader:
        """Return a reader of an object inside of this one; what is wrong is noted for both."""
        return ConfigReader(config, self.path, self.problems)

    def get_int(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return a whole number; without a default the field is required."""
        value = self._get(name, default)
        if type(value) is int and minimum <= value <= MAX_NUMBER:
            return value
        is_huge = type(value) is int and value > MAX_NUMBER
        expected = "a number below 2**63" if is_huge else f"a whole number of at least {minimum}"
        return self._reject(name, value, expected, minimum)

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
        self.problems.add(f"{self.path}: {fact}", remedy)

    def finish(self) -> None:
        """Raise SpecDecError if anything was wrong."""
        self.problems.raise_all()

    def _get(self, name: str, default: T | None) -> Any:
        value = self.config.get(name)
        return default if value is None else value

    def _reject(self, name: str, value: Any, expected: str, placeholder: T) -> T:
        if value is None:
            self.refuse(f"{name} is missing", f"give {name}, {expected}")
        else:
            self.refuse(f"{name} is {shorten(value)}, not {expected}", f"correct {name}")
        return placeholder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
    """The rotary embedding that a config.json describes; None for what it does not say.

    fraction: the rotated part of each head. by_layer_type: whether full and sliding layers have
    objects of their own. local_base, local_scaling: of sliding layers.
    """

    base: float | None = None
    scaling: dict[str, Any] | None = None
    fraction: float | None = None
    by_layer_type: bool = False
    local_base: float | None = None
    local_scaling: dict[str, Any] | None = None


FIRST_LENGTH = "original_max_position_embeddings"  # the length of the first training
BETA = "llama_4_scaling_beta"  # of queries at positions beyond those of the first training


def drop_query_scale(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Ministral 3's config.json without its scale of queries, as other families have it.

    The length of the model, which is beside the scale, is none of a rotary embedding's keys either.
    """
    names = ("rope_parameters", "rope_scaling")
    return {
        name: {k: v for k, v in value.items() if k not in (BETA, "max_position_embeddings")}
        if name in names and isinstance(value, dict) else value
        for name, value in config.items()
    }  # fmt: skip


def read_rotary(reader: ConfigReader) -> Rotary:
    """Read the rotary embedding, whichever version of transformers wrote it.

    Version 5 writes all of it into `rope_parameters`, or into an object there for each type of
    layer; earlier ones write rope_theta, rope_scaling, partial_rotary_factor and
    rope_local_base_freq at the top level.
    """
    parameters = reader.get_object("rope_parameters")
    if not {FULL, SLIDING} & parameters.keys():
        local_base = _get_number(reader, "rope_local_base_freq")
        return dataclasses.replace(_read_one(reader), local_base=local_base)
    parameters_reader = reader.enter(parameters)
    # transformers reads no length from outside of such objects.
    full_fields = {name: value for name, value in reader.config.items() if name != FIRST_LENGTH}
    full, sliding = (
        _read_one(
            reader.enter({**outer_fields, "rope_parameters": parameters_reader.get_object(kind)})
        )
        for kind, outer_fields in ((FULL, full_fields), (SLIDING, {}))
    )
    if (full.scaling or {}).get("truncate") is False:
        reader.refuse(
            f"rope_parameters says of {FULL} that truncate is false, which transformers 5 does not"
            " read in an object for a type of layer: it rounds the bounds of YaRN's ramp",
            "remove truncate, and the bounds are rounded here, too",
        )
    return dataclasses.replace(
        full, by_layer_type=True, local_base=sliding.base, local_scaling=sliding.scaling
    )


def _read_one(reader: ConfigReader) -> Rotary:
    parameters, earlier = reader.get_object("rope_parameters"), reader.get_object("rope_scaling")
    scaling = _read_scaling(reader, parameters, earlier)
    nested = parameters.get("rope_theta", earlier.get("rope_theta"))
    theta = reader.config.get("rope_theta")
    fractions = _list_fractions(reader, parameters)
    fraction_text = " and ".join(f"{fraction:g}" for fraction in fractions)
    for is_wrong, fact in (
        (None not in (theta, nested) and theta != nested,
         f"rope_theta is {theta} and in rope_parameters {nested}"),
        (len(fractions) > 1, f"partial_rotary_factor is given as {fraction_text}"),
    ):  # fmt: skip
        if is_wrong:
            reader.refuse(fact, "remove the wrong one")
    _refuse_beta(reader, (parameters, earlier))
    theta_reader = reader if nested is None else reader.enter({"rope_theta": nested})
    return Rotary(
        base=_get_number(theta_reader, "rope_theta"), scaling=scaling or None,
        fraction=max(fractions, default=None),
    )  # fmt: skip


def _read_scaling(
    reader: ConfigReader, parameters: Mapping[str, Any], earlier: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the scaling of rope_parameters or else of rope_scaling, which must agree."""
    scaling_4, scaling_5 = (
        _add_first_length(reader, _drop_default(scaling)) for scaling in (earlier, parameters)
    )
    if not scaling_5 and FIRST_LENGTH in scaling_4.keys() - earlier.keys():
        _refuse_outer_length(reader, scaling_4)
    are_both = scaling_4 and scaling_5 or list_kinds(earlier) and list_kinds(parameters)
    if unify_scaling(scaling_4) != unify_scaling(scaling_5) and are_both:
        reader.refuse(
            f"rope_scaling {scaling_4} and rope_parameters {scaling_5} disagree",
            "remove the wrong one",
        )
    return scaling_5 or scaling_4


def _add_first_length(reader: ConfigReader, scaling: dict[str, Any]) -> dict[str, Any]:
    """Return a scaling with the length of the first training, which may stand outside of it."""
    outer_length = reader.config.get(FIRST_LENGTH)
    if outer_length is None or get_kind(scaling) not in ("yarn", "llama3"):
        return scaling
    length = scaling.get(FIRST_LENGTH)
    if length is not None and length != outer_length:
        reader.refuse(
            f"{FIRST_LENGTH} is {shorten(outer_length)} and in the scaling {shorten(length)}",
            "remove the wrong one",
        )
    return scaling | {FIRST_LENGTH: outer_length}


def _refuse_outer_length(reader: ConfigReader, scaling: Mapping[str, Any]) -> None:
    """Note a length of the first training that versions of transformers see differently."""
    length, name = scaling[FIRST_LENGTH], "max_position_embeddings"
    if get_kind(scaling) == "yarn" and length != reader.config.get(name):
        whole_length = shorten(reader.config.get(name, "not told"))
        reader.refuse(
            f"{FIRST_LENGTH} is {shorten(length)}, outside of rope_scaling: transformers 5 reads it"
            f" there, 4.57 takes {name} ({whole_length})",
            f"write {FIRST_LENGTH} into rope_scaling, with the length that the model was trained"
            " with before it was scaled",
        )


def _list_fractions(reader: ConfigReader, parameters: Mapping[str, Any]) -> list[float]:
    """List the different fractions of rotated dimensions that a configuration names."""
    readers = (reader, reader.enter(parameters))
    factors = {_get_number(one_reader, "partial_rotary_factor") for one_reader in readers}
    return sorted(factor for factor in factors if factor is not None)


def _refuse_beta(reader: ConfigReader, objects: Iterable[Mapping[str, Any]]) -> None:
    """Note a scale of queries by their positions, which is not computed."""
    for values in objects:
        if values.get(BETA):
            limit = shorten(values.get("original_max_position_embeddings", "not told"))
            reader.refuse(
                f"{BETA} is {shorten(values[BETA])}: queries are scaled by their positions, which"
                " is not computed here",
                "up to position original_max_position_embeddings that scale is 1: for texts as"
                f" short, set max_position_embeddings to that ({limit}) and remove {BETA}",
            )


def _get_number(reader: ConfigReader, name: str) -> float | None:
    return None if reader.config.get(name) is None else reader.get_float(name)


def _drop_default(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scaling without base and fraction, which transformers 5 keeps beside it."""
    if list_kinds(scaling) == ["default"]:
        return {}
    layouts = [name for name, *_ in list_layouts({"rope": scaling})]
    dropped_keys = ("rope_theta", "partial_rotary_factor", BETA, *layouts)
    return {
        key: value for key, value in scaling.items() if not {key, f"rope.{key}"} & {*dropped_keys}
    }


def list_layouts(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Yield the fields about the layout of rotated pairs, inside of objects too.

    Each has its name with those of the objects around it, its value, and whether the value means
    interleaved pairs: dimensions 2i and 2i + 1 of a head, where half-split ones are i and i + n/2.
    """
    for name, value in config.items():
        words = set(re.split(r"[^a-z0-9]+", f"{prefix}{name}".lower()))
        rotates = not words.isdisjoint(("rope", "rotary", "neox"))
        rotates = rotates or name == "position_embedding_type"
        is_other = not words.isdisjoint(("mrope", "indexer"))  # kinds that no model here has
        if isinstance(value, dict):
            yield from list_layouts(value, f"{prefix}{name}.")
        elif value is None or not rotates or is_other:
            continue
        elif (interleaves := _find_interleaving(name, str(value).lower())) is not None:
            yield prefix + name, value, interleaves


def _find_interleaving(name: str, text: str) -> bool | None:
    """Return whether a field's value means interleaved pairs; None of fields about other things."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if "neox" in words:
        return text in NO
    if any(word.startswith("interleav") or word == "traditional" for word in words):
        return text not in NO
    if words & {"style", "layout"} or re.search(r"interleav|gpt_?j", text):
        return re.search("neox|half", text) is None
    return None


def count_experts(reader: ConfigReader, default: int | None = None) -> int:
    """Return how many experts a layer has, under either of transformers' names."""
    given_names = [name for name in EXPERT_COUNTS if reader.config.get(name) is not None]
    if len(given_names) > 1 and reader.config[given_names[0]] != reader.config[given_names[1]]:
        values = " and ".join(f"{name} {shorten(reader.config[name])}" for name in given_names)
        reader.refuse(f"{values} disagree", "remove the wrong one")
    return reader.get_int(given_names[0] if given_names else EXPERT_COUNTS[0], default)
