"""DFlash: a drafter folder -> the `dflash.*` tensors and DFlash's keys of a checkpoint.

Published are z-lab's folders, which SpecForge and specdec-train write too, and speculators';
DSpark's, which have a Markov head, as DeepSpec and specdec-train write them, and speculators'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.errors import SpecDecError, join_names, shorten
from specdec.methods.base import USE_ITS_DRAFTER
from specdec.methods.dflash import METHOD, DFlashConvert, DFlashParams
from specdec.model.bounds import MAX_DRAFT_TOKENS
from specdec.model.config import ModelConfig
from specdec.model.config_reader import ConfigReader, list_layouts
from specdec.model.tensors import (
    DFLASH_NET,
    HEAD,
    HEAD_BIAS,
    MARKOV_EMBEDDING,
    MARKOV_HEAD,
    OFFSETS,
)
from specdec.options import as_options
from specdec.system import logs

from ..families import qwen
from ..families.base import read_decoder
from ..hf import HfFolder
from ..plan import SourceRows
from .base import (
    NetConverter,
    check_fixed,
    check_offsets,
    check_read_layers,
    name_tensors,
    read_layers,
)

logger = logs.get_logger(__name__)

# The defaults of the drafter's layers; z-lab's drafters for any target have a Qwen3's.
FIXED_NET = {"model_type": "qwen3", "hidden_act": "silu", "mlp_bias": False}
# The keys that `dflash_config` may have; the scales are of the rows of the target's embedding, the
# first one is z-lab's, the other one is of earlier versions of specdec-train.
SCALES = ("input_embedding_scale", "embedding_scale")
KNOWN_KEYS = ("target_layer_ids", "mask_token_id", "block_size", *SCALES)
MARKOV = {MARKOV_EMBEDDING: "markov_head.markov_w1.weight",
          MARKOV_HEAD: "markov_head.markov_w2.weight"}  # fmt: skip
# DSpark's head that guesses whether a draft will be accepted, which the text does not depend on.
CONFIDENCE = "confidence_head.*"


def _read_markov_rank(reader: ConfigReader) -> int:
    """Return the rank of DSpark's Markov head, 0 for none; note other heads than the plain one."""
    rank = reader.get_int("markov_rank", minimum=0)
    if rank:
        check_fixed(reader, {"markov_head_type": "vanilla"}, "a head of the token before alone")
    if reader.get_bool("enable_confidence_head", False):
        logger.info("the confidence head is left out: drafts are chosen by their probabilities")
    return rank


def _read_block_size(reader: ConfigReader, section: ConfigReader) -> int:
    """Return the tokens of a block, which newer folders of z-lab's have in `dflash_config`."""
    inner, outer = section.config.get("block_size"), reader.config.get("block_size")
    if inner is not None and outer is not None and inner != outer:
        reader.refuse(
            f"block_size is {outer!r} at the top and {inner!r} in dflash_config"[:120],
            "remove the wrong one",
        )
    return (reader if inner is None else section).get_int("block_size")


def _check_causal(reader: ConfigReader, key: str, is_causal: bool) -> None:
    """Note blocks whose tokens do not see those after them, which no engine of ours computes.

    Of layers with a window that is so wherever the key is absent.
    """
    if not is_causal:
        return
    remedy = "use a drafter whose blocks see all of themselves in every layer"
    if key in reader.config:
        value = str(reader.config[key]).lower()
    else:  # SpecForge, whose blocks do, writes what z-lab's folders have
        value, remedy = "absent", f"{remedy}; where this one's do, as SpecForge's, add {key}"
    reader.refuse(f"{key} is {value}: the tokens of a block would not see those after them", remedy)


def _check_speculators(reader: ConfigReader, model: ModelConfig, *, has_window: bool) -> None:
    """Note options of speculators' folders that no engine of ours computes."""
    key = "sliding_window_non_causal"
    _check_causal(reader, key, has_window and not reader.get_bool(key, False))
    size = reader.get_int("target_hidden_size", model.hidden_size)
    if size != model.hidden_size:
        reader.refuse(
            f"target_hidden_size is {size}, the target's hidden_size {model.hidden_size}",
            USE_ITS_DRAFTER,
        )


def _read_scale(reader: ConfigReader, section: ConfigReader, model: ModelConfig) -> float:
    """Return the factor of the target's embedding; note unknown fields of `dflash_config`."""
    if projector := section.config.get("projector_type"):
        reader.refuse(
            f"dflash_config.projector_type is {shorten(projector)}: only plain DFlash drafters of"
            " SpecForge's are read, not its DSpark and Domino",
            "DSpark drafters are read as DeepSpec, speculators and specdec-train write them",
        )
        return 1.0
    _check_keys(reader, section)
    scale_keys = [(section, name) for name in SCALES] + [(reader, SCALES[0])]
    scales = {
        object_reader.get_float(name)
        for object_reader, name in scale_keys
        if name in object_reader.config
    }
    if len(scales) > 1:
        reader.refuse(
            f"{SCALES[0]} is given as {' and '.join(map(str, sorted(scales)))}",
            "remove the wrong one",
        )
    if model.arithmetic.scales_embedding and not scales:
        reader.refuse(
            "the target multiplies its embedding, and dflash_config does not say whether the"
            " drafter was trained on multiplied rows",
            f"add {SCALES[0]} to dflash_config: {model.hidden_size**0.5:g} if it was, else 1",
        )
    return min(scales, default=1.0)


def _check_keys(reader: ConfigReader, section: ConfigReader) -> None:
    """Note keys of `dflash_config` that are unknown and have a value."""
    layouts = [name for name, *_ in list_layouts(section.config)]
    known_keys = reader.config if section is reader else (*KNOWN_KEYS, *layouts)
    unknown_keys = [key for key, value in section.config.items() if key not in known_keys and value]
    if unknown_keys:
        reader.refuse(
            f"dflash_config has {join_names(sorted(unknown_keys))}, which is not known here",
            f"only {', '.join(KNOWN_KEYS)} are; if it changes nothing, remove it",
        )


def _find_entered(reader: ConfigReader) -> list[int]:
    """Return the layers whose outputs speculators' drafters read: before each listed one."""
    layers = read_layers(reader, "aux_hidden_state_layer_ids")
    if layers is None:
        reader.refuse(
            "aux_hidden_state_layer_ids is missing", "give the list that it was trained with"
        )
    return [layer - 1 for layer in layers or ()]


def _find_outputs(
    reader: ConfigReader, section: ConfigReader, num_layers: int, model: ModelConfig
) -> list[int]:
    """Return the layers whose outputs z-lab's drafters read; by default as many as their own."""
    depth = model.num_hidden_layers
    number = reader.get_int("num_target_layers", depth)
    if number != depth:
        reader.refuse(
            f"num_target_layers is {number}, the target has {depth} layers",
            USE_ITS_DRAFTER,
        )
    layers = read_layers(section, "target_layer_ids")
    if layers is not None:
        if layers[-1] == depth - 1:
            reader.refuse(
                f"target_layer_ids names the last layer, {depth - 1}, whose output z-lab's code"
                " takes after the final norm",
                "use a drafter that reads inner layers",
            )
        return layers
    if section is reader:
        reader.refuse("target_layer_ids is missing", "give the list that it was trained with")
        return []
    if num_layers == 1:
        return [depth // 2]
    span = (depth - 4) / (num_layers - 1)
    return [round(1 + span * index) for index in range(num_layers)]


def _read_net(net_reader: ConfigReader) -> dict[str, Any]:
    """Read the fields of the drafter's layers, those of a Qwen3."""
    values = read_decoder(
        net_reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=32768, num_kv_heads=32,
        head_dim=None if "head_dim" in net_reader.config else 128,
    )  # fmt: skip
    values |= {"sliding_window": None, "layer_types": None, "embedding_multiplier": 1.0}
    values |= qwen.read_window(net_reader, None, values)
    values["attn_bias"] = net_reader.get_bool("attention_bias", False)
    return values


def _check_kind(folder: HfFolder) -> None:
    """Raise SpecDecError unless the folder holds a DFlash drafter."""
    if not {"fc.weight", "hidden_norm.weight"} <= folder.tensors.keys():
        raise SpecDecError(
            f"{folder.path} lacks fc.weight or hidden_norm.weight, which every DFlash drafter"
            f" has; it holds {name_tensors(folder)}",
            "give the folder of a DFlash drafter",
        )


class DFlashConverter(NetConverter):
    """Converter of a DFlash or DSpark drafter's folder."""

    METHOD, NET = METHOD, DFLASH_NET
    params: DFlashParams

    def read_params(self) -> DFlashParams:
        """Return the drafter's parameters; raise SpecDecError where they do not suit the target."""
        folder, model = self.folder, self.model
        _check_kind(folder)
        is_spark = self.is_spark
        reader, net_reader = self.open_net(FIXED_NET, "layers of a Qwen3")
        self._check_type(reader)
        values = _read_net(net_reader)
        section, layers = self._read_inputs(reader, values)
        block_size = _read_block_size(reader, section)
        mask_token_id = section.get_int("mask_token_id", minimum=0)
        markov_rank = _read_markov_rank(reader) if is_spark else 0
        samples = self._read_anchor(reader)
        if not 2 - samples <= block_size <= MAX_DRAFT_TOKENS:
            reader.refuse(f"block_size is {block_size}", f"give 2 to {MAX_DRAFT_TOKENS}")
        key = "aux_hidden_state_layer_ids" if self.is_speculators else "target_layer_ids"
        fact = f"the outputs of layers {layers} would be read"
        check_read_layers(reader, folder, layers, model, key, fact)
        draft_vocab_size = reader.get_int("draft_vocab_size", values["vocab_size"])
        if not reader.problems:
            check_offsets(reader, folder, draft_vocab_size, model.vocab_size)
        net = DFlashParams.make_net(values, model.dtype)
        self.check_net(reader, net)
        return DFlashParams(
            net=net,
            aux_layers=tuple(layers),
            block_size=block_size,
            mask_token_id=mask_token_id,
            draft_vocab_size=draft_vocab_size,
            max_draft_len=as_options(self.settings, DFlashConvert).dflash_max_draft_len or 63,
            sample_from_anchor=samples,
            markov_rank=markov_rank,
        )

    def _check_type(self, reader: ConfigReader) -> None:
        """Note a drafter of speculators' of another kind."""
        if self.is_speculators and not self.is_spark:
            speculators_type = {"speculators_model_type": "dflash"}
            check_fixed(reader, speculators_type, "speculators' DFlash and DSpark")

    def _read_inputs(
        self, reader: ConfigReader, values: dict[str, Any]
    ) -> tuple[ConfigReader, list[int]]:
        """Return the object that describes blocks, and the layers whose outputs are read.

        Adds the factor of the embedding to the layers' fields.
        """
        has_window = values["sliding_window"] is not None
        if self.is_speculators:
            _check_speculators(reader, self.model, has_window=has_window)
            return reader, _find_entered(reader)
        section = reader if self.is_spark else reader.enter(reader.get_object("dflash_config"))
        _check_causal(reader, "is_causal", reader.get_bool("is_causal", has_window))
        values["embedding_multiplier"] = _read_scale(reader, section, self.model)
        return section, _find_outputs(reader, section, values["num_hidden_layers"], self.model)

    def _read_anchor(self, reader: ConfigReader) -> bool:
        """Return whether each place of a block drafts the token after it, the first one too.

        For speculators' DSpark, vLLM takes another default than speculators does: none is taken.
        """
        if not self.is_speculators and not self.is_spark:
            return False
        default = None if self.is_speculators and self.is_spark else self.is_spark
        return reader.get_bool("sample_from_anchor", default)

    @property
    def is_spark(self) -> bool:
        """Return whether the drafter is DSpark's; DeepSpec gives the rank of DFlash's too, as 0."""
        if self.is_speculators:
            return self.folder.config.get("speculators_model_type") == "dspark"
        return "markov_rank" in self.folder.config

    def find_source_rows(self, canonical: Sequence[str]) -> dict[str, tuple[SourceRows, ...]]:
        extra_names = ("drafter.fc.weight", "drafter.hidden_norm.weight", HEAD, HEAD_BIAS, OFFSETS)
        extras = {name: name.removeprefix("drafter.") for name in extra_names} | MARKOV
        return self.find_net_source_rows(qwen.QWEN3, canonical, extras)

    def list_ignored(self) -> Sequence[str]:
        """Return patterns of tensors that follow from others, and of DSpark's confidence head."""
        confidence = (CONFIDENCE,) if self.folder.config.get("enable_confidence_head") else ()
        return (*super().list_ignored(), *confidence)


CONVERTER = DFlashConverter
