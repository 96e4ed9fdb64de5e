"""What a method's converter offers, and what converters share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from specdec.errors import SpecDecError, join_names, shorten
from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader, list_layouts
from specdec.model.quantization import DEFAULT_EXCLUDED
from specdec.model.tensors import EMBEDDING, HEAD, HEAD_BIAS, OFFSETS
from specdec.trtllm.facts import DEFAULT_LABEL
from specdec.trtllm.lacks import Pair, find_pair

from ..families.base import ROTARY_BUFFERS
from ..plan import Part

if TYPE_CHECKING:
    from specdec.methods.base import DrafterParams, Method
    from specdec.methods.net import NetParams

    from ..families.base import Family
    from ..hf import HfFolder
    from ..settings import ConvertSettings


IS_DRAFTED = "t2d"  # published drafters' map of the vocabulary, alongside `OFFSETS`


class DrafterConverter(Protocol):
    """A module of this package: one method's drafter folders to tensors and keys of config.json.

    IN_TARGET: patterns of tensors that a target's folder may hold besides its own when the
    drafter is converted too.
    """

    IN_TARGET: tuple[str, ...]

    def read_params(self, folder: HfFolder, settings: ConvertSettings, model: ModelConfig) -> Any:
        """Return the method's parameters; raise SpecDecError where they do not suit the target."""

    def find_sources(
        self, folder: HfFolder, params: Any, canonical: Sequence[str]
    ) -> dict[str, tuple[Part, ...]]:
        """Map canonical tensor names to the folder's."""

    def share_tensors(
        self, folder: HfFolder, params: Any, canonical: Sequence[str]
    ) -> Mapping[str, str | None]:
        """The canonical tensors that the folder need not hold: the target's, or None for zeros."""

    def list_ignored(self, folder: HfFolder, params: Any) -> Sequence[str]:
        """Patterns of the folder's tensors that are knowingly left out."""

    def add_to_config(
        self, config: Mapping[str, Any], params: Any, version: str, *, is_head_quantized: bool
    ) -> dict[str, Any]:
        """Return a target's config.json with the drafter added."""


def share_nothing(folder: HfFolder, params: Any, canonical: Sequence[str]) -> dict[str, str | None]:
    """`share_tensors` of a method whose drafters hold all that they need."""
    return {}


def share_net(
    folder: HfFolder, canonical: Mapping[str, str], prefix: str = ""
) -> dict[str, str | None]:
    """What a drafter with layers of its own need not hold: embedding and head, zeros for a bias.

    canonical: each tensor's name, and the name without what stands for its net. prefix: of the
    names in the folder.
    """
    absent: dict[str, tuple[str, str | None]] = {
        "drafter.vocab_embedding.weight": ("embed_tokens.weight", EMBEDDING),
        "drafter.fc.bias": ("fc.bias", None),
    }
    if OFFSETS not in canonical.values():  # all of the vocabulary is drafted
        absent |= {name: (name, name) for name in (HEAD, HEAD_BIAS)}
    return {
        name: absent[bare][1] for name, bare in canonical.items()
        if bare in absent and prefix + absent[bare][0] not in folder.tensors
    }  # fmt: skip


def ignore_net(params: NetParams) -> tuple[str, ...]:
    """What follows from the rest of such a drafter: rotary tables, and maps that were checked."""
    is_reduced = params.draft_vocab_size < params.net.vocab_size
    return (*ROTARY_BUFFERS, IS_DRAFTED, *(() if is_reduced else (OFFSETS,)))


def find_net_sources(
    decoder: Family, names: Mapping[str, str], extras: Mapping[str, str], *in_folder: Any
) -> dict[str, tuple[Part, ...]]:
    """Map canonical names to a folder's that names a drafter's layers as a decoder's.

    names: each tensor's, and the same without what stands for its net; extras: what no decoder has;
    in_folder: what else `Family.find_sources` takes.
    """
    inner = {
        name: f"transformer.{bare.removeprefix('drafter.')}"
        for name, bare in names.items() if bare not in extras
    }  # fmt: skip
    found = decoder.find_sources(inner.values(), *in_folder)
    sources: dict[str, tuple[Part, ...]] = {
        name: (Part(extras[bare]),) for name, bare in names.items() if bare in extras
    }
    for name, own in inner.items():
        parts = found[own]
        sources[name] = tuple(replace(p, name=p.name.removeprefix("model.")) for p in parts)
    return sources


def list_held(folder: HfFolder) -> str:
    """What a folder holds, for a message."""
    return join_names(sorted(folder.tensors)) if folder.tensors else "no tensors"


def choose_pair(method: str, title: str, target: str, version: str) -> Pair | None:
    """Return what TensorRT-LLM has for a target with a drafter, None where it has nothing.

    The checkpoint then gets the method's own architecture. Raises SpecDecError where a line without
    was asked for; the default one is not.
    """
    pair = find_pair(version, method, target)
    if pair is None and version != DEFAULT_LABEL:
        raise SpecDecError(
            f"TensorRT-LLM {version} has no {title} for {target}",
            f"convert for {DEFAULT_LABEL}"
            if find_pair(DEFAULT_LABEL, method, target)
            else "leave --trtllm-version out: the checkpoint is then for the torch backend",
        )
    return pair


def take_naming(
    folder: HfFolder, present: Collection[str], known: Mapping[str, str], what: str, kind: str
) -> str:
    """Return the one of several namings that a folder has; SpecDecError for none and for more.

    known: how each is shown; what: is named by them; kind: of folder that is looked for.
    """
    found = [naming for naming in known if naming in present]
    if len(found) == 1:
        return found[0]
    if found:
        raise SpecDecError(
            f"{folder.path} holds {what} under {len(found)} names:"
            f" {', '.join(known[naming] for naming in found)}",
            "keep one of them: which is the trained one cannot be known",
        )
    raise SpecDecError(
        f"{folder.path} holds no tensor of {what}, {' or '.join(known.values())}; it holds"
        f" {list_held(folder)}",
        f"give the folder of {kind}",
    )


def check_sizes(reader: ConfigReader, whose: str, sizes: Mapping[str, int], model: Any) -> None:
    """Note each of a drafter's sizes that is not its target's."""
    for name, own in sizes.items():
        if own != getattr(model, name):
            reader.refuse(
                f"{whose} {name} is {own}, the target's {getattr(model, name)}",
                "use the drafter that was trained for this target",
            )


def check_layouts(reader: ConfigReader) -> None:
    """Note every field that says that the drafter rotates interleaved pairs."""
    for name, value, is_interleaved in list_layouts(reader.config):
        if is_interleaved:
            reader.refuse(
                f"{name} is {shorten(value)}: rotary embeddings of interleaved pairs, and only"
                " half-split pairs are computed",
                "use a drafter with half-split pairs (is_neox_style true); correct the field only"
                " if it is wrong",
            )


def exclude_modules(
    config: dict[str, Any], modules: Sequence[str], *, is_head_quantized: bool
) -> dict[str, Any]:
    """Return a config.json that says of a drafter's modules that they are not quantized.

    A quantized target needs every drafter module in the list, and where its own list is null or
    empty, the defaults that the list then replaces.
    """
    quantization = config.get("quantization") or {}
    listed = quantization.get("exclude_modules")
    if listed is None and quantization.get("quant_algo") is None:
        return config
    excluded = list(listed or ())
    if quantization.get("quant_algo") is not None and not excluded:
        skipped = "*lm_head" if is_head_quantized else None
        excluded = [name for name in DEFAULT_EXCLUDED if name != skipped]
    excluded += [name for name in modules if name not in excluded]
    return config | {"quantization": {**quantization, "exclude_modules": excluded}}


def name_own_architecture(
    method: Method, net: str, config: Mapping[str, Any], params: DrafterParams, version: str, *,
    is_head_quantized: bool,
) -> dict[str, Any]:  # fmt: skip
    """`add_to_config` of a method that TensorRT-LLM has for no target.

    net: what the names of the drafter's tensors begin with.
    """
    target, (architecture,) = config["architecture"], method.architectures
    choose_pair(method.name, method.title, target, version)
    combined = dict(config) | params.to_checkpoint()
    combined |= {"architecture": architecture, "base_architecture": target}
    return exclude_modules(combined, [f"{net}*"], is_head_quantized=is_head_quantized)
