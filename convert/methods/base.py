"""Converter of a method's drafters: its interface, and functions that converters share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from specdec.errors import SpecDecError, join_names, shorten
from specdec.files.reading import Array
from specdec.methods.base import USE_ITS_DRAFTER
from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader, list_layouts
from specdec.model.quantization import DEFAULT_EXCLUDED
from specdec.model.tensors import EMBEDDING, HEAD, HEAD_BIAS, OFFSETS
from specdec.trtllm.facts import DEFAULT_LABEL
from specdec.trtllm.lacks import Pair, find_pair

from ..families.base import ROTARY_BUFFERS
from ..plan import SourceRows, check_num_layers
from ..wrappers import drop_sections

if TYPE_CHECKING:
    from specdec.methods.base import Method
    from specdec.methods.net import NetParams

    from ..families.base import Family
    from ..hf import HfFolder
    from ..settings import ConvertSettings


Config = dict[str, Any]  # a checkpoint's config.json
IS_DRAFTED = "t2d"  # published drafters' map of the vocabulary, alongside `OFFSETS`


class DrafterConverter:
    """One method's drafter folders to tensors and keys of config.json; each module here has one.

    IN_TARGET: patterns of tensors that a target's folder may hold besides its own when the
    drafter is converted too.
    """

    METHOD: ClassVar[Method]
    IN_TARGET: ClassVar[tuple[str, ...]] = ()

    def __init__(self, folder: HfFolder, settings: ConvertSettings, model: ModelConfig) -> None:
        """Read the drafter's parameters; raise SpecDecError where they do not suit the target."""
        self.folder, self.settings, self.model = folder, settings, model
        self.params: Any = self.read_params()

    def read_params(self) -> Any:
        """Return the method's parameters; raise SpecDecError where they do not suit the target."""
        raise NotImplementedError

    def find_source_rows(self, canonical: Sequence[str]) -> dict[str, tuple[SourceRows, ...]]:
        """Map canonical tensor names to the folder's."""
        raise NotImplementedError

    def share_tensors(self, canonical: Sequence[str]) -> Mapping[str, str | None]:
        """Map tensors that the folder need not hold to the target's, or to None for zeros."""
        return {}

    def list_ignored(self) -> Sequence[str]:
        """List patterns of the folder's tensors that are knowingly left out."""
        return ()

    def add_to_config(self, config: Config, *, is_head_quantized: bool) -> Config:
        """Return a target's config.json with the drafter added."""
        raise NotImplementedError

    def choose_pair(self, target: str, title: str | None = None) -> Pair | None:
        """Return TensorRT-LLM's names for a target with a drafter, None where it has none.

        The checkpoint then gets the method's own architecture. Raises SpecDecError where a line
        without was asked for; the default one is not.
        """
        method, version = self.METHOD, self.settings.line
        pair = find_pair(version, method.name, target)
        if pair is None and version != DEFAULT_LABEL:
            raise SpecDecError(
                f"TensorRT-LLM {version} has no {title or method.title} for {target}",
                f"convert for {DEFAULT_LABEL}"
                if find_pair(DEFAULT_LABEL, method.name, target)
                else "leave --trtllm-version out: the checkpoint is then for the torch backend",
            )
        return pair


class NetConverter(DrafterConverter):
    """A drafter with layers of its own.

    NET: the beginning of its tensors' canonical names; PREFIX: of their names in the folder.
    """

    NET: ClassVar[str]
    PREFIX: ClassVar[str] = ""

    def open_net(
        self, fixed: Mapping[str, Any], net_description: str
    ) -> tuple[ConfigReader, ConfigReader]:
        """Return readers of config.json, and of the object in it that describes the layers.

        fixed: fields of the latter that must hold a value if they are there; net_description: the
        layers that have these values, for a message.
        """
        reader = ConfigReader(self.folder.config, self.folder.path)
        check_layouts(reader)
        net_reader = reader
        if self.is_speculators:
            net_reader = reader.enter(reader.get_object("transformer_layer_config"))
        rotary = ("rope_parameters", "rope_scaling")
        sections = {key: drop_sections(net_reader.config.get(key)) for key in rotary}
        net_reader = net_reader.enter({**net_reader.config, **sections})
        check_fixed(net_reader, fixed, net_description)
        return reader, net_reader

    def check_net(self, reader: ConfigReader, net: ModelConfig, prefix: str = "") -> None:
        """Raise SpecDecError for problems that were noted before, then for those of the layers.

        prefix: the beginning of the latter's messages, such as the object that describes them.
        """
        reader.finish()
        check_num_layers(net.num_hidden_layers, self.folder)
        for fact, remedy in net.find_problems():
            reader.refuse(prefix + fact, remedy)
        reader.finish()

    @property
    def is_speculators(self) -> bool:
        """Return whether the folder is of speculators' layout."""
        return self.folder.config.get("speculators_model_type") is not None

    def name_bare(self, canonical: Sequence[str]) -> dict[str, str]:
        """Map each tensor's name to the name without its net's beginning."""
        return {name: name.removeprefix(self.NET) for name in canonical}

    def share_tensors(self, canonical: Sequence[str]) -> Mapping[str, str | None]:
        """Map an absent embedding and head to the target's, and an absent bias to zeros."""
        names = self.name_bare(canonical)
        shareable: dict[str, tuple[str, str | None]] = {
            "drafter.vocab_embedding.weight": ("embed_tokens.weight", EMBEDDING),
            "drafter.fc.bias": ("fc.bias", None),
        }
        if OFFSETS not in names.values():  # all of the vocabulary is drafted
            shareable |= {name: (name, name) for name in (HEAD, HEAD_BIAS)}
        return {
            name: shareable[bare][1] for name, bare in names.items()
            if bare in shareable and self.PREFIX + shareable[bare][0] not in self.folder.tensors
        }  # fmt: skip

    def list_ignored(self) -> Sequence[str]:
        """Return patterns of rotary tables, and of maps of the vocabulary that were checked."""
        params: NetParams = self.params
        is_reduced = params.draft_vocab_size < params.net.vocab_size
        return (*ROTARY_BUFFERS, IS_DRAFTED, *(() if is_reduced else (OFFSETS,)))

    def find_net_source_rows(
        self, decoder: Family, canonical: Sequence[str], extras: Mapping[str, str], *in_folder: Any
    ) -> dict[str, tuple[SourceRows, ...]]:
        """Map the tensors of a folder that names a drafter's layers as a decoder's.

        extras: names of tensors that no decoder has; in_folder: further arguments of
        `Family.find_source_rows`.
        """
        names = self.name_bare(canonical)
        inner = {
            name: f"transformer.{bare.removeprefix('drafter.')}"
            for name, bare in names.items() if bare not in extras
        }  # fmt: skip
        decoder_rows = decoder.find_source_rows(inner.values(), *in_folder)
        sources: dict[str, tuple[SourceRows, ...]] = {
            name: (SourceRows(extras[bare]),) for name, bare in names.items() if bare in extras
        }
        for name, inner_name in inner.items():
            sources[name] = tuple(
                replace(rows, name=rows.name.removeprefix("model."))
                for rows in decoder_rows[inner_name]
            )
        return sources

    def add_to_config(self, config: Config, *, is_head_quantized: bool) -> Config:
        """Return a target's config.json with a drafter for which TensorRT-LLM has no class."""
        target, (architecture,) = config["architecture"], self.METHOD.architectures
        self.choose_pair(target)
        combined = dict(config) | self.params.to_checkpoint()
        combined |= {"architecture": architecture, "base_architecture": target}
        return exclude_modules(combined, [f"{self.NET}*"], is_head_quantized=is_head_quantized)


def name_tensors(folder: HfFolder) -> str:
    """Return the names of a folder's tensors, for a message."""
    return join_names(sorted(folder.tensors)) if folder.tensors else "no tensors"


def take_naming(
    folder: HfFolder,
    present_namings: Collection[str],
    namings: Mapping[str, str],
    description: str,
    kind: str,
) -> str:
    """Return the one of several namings that a folder has; SpecDecError for none and for more.

    namings: each with the text that shows it; description: of the tensors that they name; kind: of
    folder that is looked for.
    """
    matches = [naming for naming in namings if naming in present_namings]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise SpecDecError(
            f"{folder.path} holds {description} under {len(matches)} names:"
            f" {', '.join(namings[naming] for naming in matches)}",
            "keep one of them: which is the trained one cannot be known",
        )
    raise SpecDecError(
        f"{folder.path} holds no tensor of {description}, {' or '.join(namings.values())}; it holds"
        f" {name_tensors(folder)}",
        f"give the folder of {kind}",
    )


def check_sizes(reader: ConfigReader, owner: str, sizes: Mapping[str, int], model: Any) -> None:
    """Note each of a drafter's sizes that is not its target's."""
    for name, size in sizes.items():
        if size != getattr(model, name):
            reader.refuse(
                f"{owner} {name} is {size}, the target's {getattr(model, name)}",
                USE_ITS_DRAFTER,
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


def read_layers(reader: ConfigReader, name: str) -> list[int] | None:
    """Return a list of layers, or None where it is absent."""
    layers = reader.config.get(name)
    if layers is None:
        return None
    if isinstance(layers, list) and layers and all(type(layer) is int for layer in layers):
        return layers
    reader.refuse(f"{name} is {layers!r}"[:120], "give the list of the target's layers")
    return None


def check_fixed(reader: ConfigReader, fixed: Mapping[str, Any], description: str) -> None:
    """Note every field that has another value than the only one which is supported."""
    for name, expected in fixed.items():
        value = reader.config.get(name)
        if value is not None and value != expected:
            reader.refuse(
                f"{name} is {value!r}"[:120],
                f"only {description} can be converted: {name} {expected!r}",
            )


def check_read_layers(
    reader: ConfigReader, folder: HfFolder, layers: list[int], model: ModelConfig, key: str,
    fact: str,
) -> None:  # fmt: skip
    """Note layers of which outputs are read that the target has not, and an `fc` of others.

    key: where config.json may tell them; fact: that these are read, both for messages.
    """
    depth, remedy = model.num_hidden_layers, USE_ITS_DRAFTER
    if layers != sorted(set(layers)) or (layers and not 0 <= layers[0] <= layers[-1] < depth):
        reader.refuse(
            f"{fact}, the target has {depth} layers",
            f"{remedy}; {key} of its config.json tells its layers, rising",
        )
    shape, width = folder.tensors["fc.weight"].shape, len(layers) * model.hidden_size
    if layers and shape[-1:] != (width,):
        reader.refuse(
            f"fc.weight has shape {list(shape)}, for the outputs of {len(layers)} layers of"
            f" {model.hidden_size} it would have {width} columns",
            f"{remedy}, and correct {key}",
        )


def check_offsets(
    reader: ConfigReader, folder: HfFolder, draft_vocab_size: int, vocab_size: int
) -> None:
    """Note whether drafted tokens are told apart and lie in the vocabulary, and both maps agree."""
    offsets = folder.tensors.get(OFFSETS)
    if offsets is None:
        return  # planning the tensors names it where it is needed
    fact = f"{OFFSETS} is {offsets.dtype} {list(offsets.shape)}, not int64 [{draft_vocab_size}]"
    if offsets.dtype != "int64":
        reader.refuse(fact, f"store {OFFSETS} as int64")
        return
    if offsets.shape != (draft_vocab_size,):
        reader.refuse(
            f"{fact}, for draft_vocab_size {draft_vocab_size}",
            "its config.json and tensors disagree: take both from the same drafter, or correct"
            " draft_vocab_size, which is vocab_size where it is absent",
        )
        return
    tokens = folder.read(OFFSETS) + np.arange(draft_vocab_size)
    if draft_vocab_size == vocab_size and (tokens != np.arange(vocab_size)).any():
        reader.refuse(
            f"{OFFSETS} renames tokens of a vocabulary that is not reduced", "set it to zeros"
        )
    elif len(np.unique(tokens)) < len(tokens) or tokens.min() < 0 or tokens.max() >= vocab_size:
        reader.refuse(
            f"{OFFSETS} maps {draft_vocab_size} drafted tokens to {len(np.unique(tokens))} from"
            f" {tokens.min()} to {tokens.max()}; the target has {vocab_size}",
            f"{USE_ITS_DRAFTER}; its offsets are added to the number",
        )
    elif draft_vocab_size != vocab_size:  # else some writers leave t2d all zeros
        _check_drafted(reader, folder, tokens, vocab_size)


def _check_drafted(reader: ConfigReader, folder: HfFolder, tokens: Array, vocab_size: int) -> None:
    """Note a map `t2d`, if there is one, that marks other tokens than those which `d2t` names."""
    if IS_DRAFTED not in folder.tensors:
        return
    is_drafted = np.zeros(vocab_size, np.bool_)
    is_drafted[tokens] = True
    shape = folder.tensors[IS_DRAFTED].shape
    if shape != (vocab_size,):
        reader.refuse(
            f"{IS_DRAFTED} has shape {list(shape)}, and the target's vocab_size is {vocab_size}",
            USE_ITS_DRAFTER,
        )
    elif (folder.read(IS_DRAFTED) != is_drafted).any():
        reader.refuse(
            f"{IS_DRAFTED} and {OFFSETS} disagree on which tokens are drafted",
            "copy or download the folder again",
        )


def exclude_modules(
    config: dict[str, Any], modules: Sequence[str], *, is_head_quantized: bool
) -> dict[str, Any]:
    """Return a config.json that lists a drafter's modules as not quantized.

    A quantized target needs every drafter module in the list, and where its own list is null or
    empty, the defaults that the list then replaces.
    """
    quantization = config.get("quantization") or {}
    listed_modules = quantization.get("exclude_modules")
    if listed_modules is None and quantization.get("quant_algo") is None:
        return config
    excluded = list(listed_modules or ())
    if quantization.get("quant_algo") is not None and not excluded:
        skipped = "*lm_head" if is_head_quantized else None
        excluded = [name for name in DEFAULT_EXCLUDED if name != skipped]
    excluded += [name for name in modules if name not in excluded]
    return config | {"quantization": {**quantization, "exclude_modules": excluded}}
