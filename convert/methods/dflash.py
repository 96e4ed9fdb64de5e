"""DFlash: a drafter folder -> the `dflash.*` tensors and DFlash's keys of a checkpoint.

What is published: z-lab's folders, which SpecForge and specdec-train write too, and speculators';
DSpark's, which have a Markov head, as DeepSpec and specdec-train write them, and speculators'.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.errors import SpecDecError, join_names, shorten
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
from ..plan import SourceRows
from .base import (
    NetConverter,
    check_fixed,
    check_offsets,
    check_read_layers,
    list_held,
    read_layers,
)

logger = logs.get_logger(__name__)

# The defaults of the drafter's layers; z-lab's drafters for any target have a Qwen3's.
FIXED_NET = {"model_type": "qwen3", "hidden_act": "silu", "mlp_bias": False}
# What `dflash_config` may tell; the scales are of the rows of the target's embedding, the first one
# z-lab's, the other what specdec-train wrote before.
SCALES = ("input_embedding_scale", "embedding_scale")
KNOWN = ("target_layer_ids", "mask_token_id", "block_size", *SCALES)
MARKOV = {MARKOV_EMBEDDING: "markov_head.markov_w1.weight",
          MARKOV_HEAD: "markov_head.markov_w2.weight"}  # fmt: skip
# DSpark's head that guesses whether a draft will be accepted, which the text does not depend on.
CONFIDENCE = "confidence_head.*"


def _read_markov_rank(reader: ConfigReader) -> int:
    """The rank of DSpark's Markov head, 0 for none; note other heads than the plain one."""
    rank = reader.get_int("markov_rank", minimum=0)
    if rank:
        check_fixed(reader, {"markov_head_type": "vanilla"}, "a head of the token before alone")
    if reader.get_bool("enable_confidence_head", False):
        logger.info("the confidence head is left out: drafts are chosen by their probabilities")
    return rank


def _read_block_size(reader: ConfigReader, place: ConfigReader) -> int:
    """The tokens of a block, which newer folders of z-lab's tell in `dflash_config`."""
    inner, outer = place.config.get("block_size"), reader.config.get("block_size")
    if inner is not None and outer is not None and inner != outer:
        reader.refuse(
            f"block_size is {outer!r} at the top and {inner!r} in dflash_config"[:120],
            "remove the wrong one",
        )
    return (reader if inner is None else place).get_int("block_size")


def _check_causal(reader: ConfigReader, key: str, is_causal: bool) -> None:
    """Note blocks whose tokens do not see those after them, which no engine of ours computes.

    Of layers with a window that is so wherever the key is absent.
    """
    if is_causal:
        told = str(reader.config[key]).lower() if key in reader.config else "absent"
        reader.refuse(
            f"{key} is {told}: the tokens of a block would not see those after them",
            "use a drafter whose blocks see all of themselves in every layer",
        )


def _check_speculators(reader: ConfigReader, model: ModelConfig, *, has_window: bool) -> None:
    """Note what speculators' folders may ask for and no engine of ours computes."""
    key = "sliding_window_non_causal"
    _check_causal(reader, key, has_window and not reader.get_bool(key, False))
    size = reader.get_int("target_hidden_size", model.hidden_size)
    if size != model.hidden_size:
        reader.refuse(
            f"target_hidden_size is {size}, the target's hidden_size {model.hidden_size}",
            "use the drafter that was trained for this target",
        )


def _read_scale(reader: ConfigReader, place: ConfigReader, model: ModelConfig) -> float:
    """What the rows of the target's embedding are multiplied by; note fields that are unknown."""
    if projector := place.config.get("projector_type"):
        reader.refuse(
            f"dflash_config.projector_type is {shorten(projector)}: only plain DFlash drafters of"
            " SpecForge's are read, not its DSpark and Domino",
            "DSpark drafters are read as DeepSpec, speculators and specdec-train write them",
        )
        return 1.0
    layouts = [name for name, *_ in list_layouts(place.config)]
    known = reader.config if place is reader else (*KNOWN, *layouts)
    if unknown := [key for key, value in place.config.items() if key not in known and value]:
        reader.refuse(
            f"dflash_config has {join_names(sorted(unknown))}, which is not known here",
            f"only {', '.join(KNOWN)} are; if it changes nothing, remove it",
        )
    places = [(place, name) for name in SCALES] + [(reader, SCALES[0])]
    told = {p.get_float(name) for p, name in places if name in p.config}
    if len(told) > 1:
        reader.refuse(
            f"{SCALES[0]} is given as {' and '.join(map(str, sorted(told)))}",
            "remove the wrong one",
        )
    if model.arithmetic.scales_embedding and not told:
        reader.refuse(
            "the target multiplies its embedding, and dflash_config does not say whether the"
            " drafter was trained on multiplied rows",
            f"add {SCALES[0]} to dflash_config: {model.hidden_size**0.5:g} if it was, else 1",
        )
    return min(told, default=1.0)


def _find_entered(reader: ConfigReader) -> list[int]:
    """The layers whose outputs speculators' drafters read: the numbers are of those entered."""
    layers = read_layers(reader, "aux_hidden_state_layer_ids")
    if layers is None:
        reader.refuse(
            "aux_hidden_state_layer_ids is missing", "give the list that it was trained with"
        )
    return [layer - 1 for layer in layers or ()]


def _find_outputs(
    reader: ConfigReader, place: ConfigReader, num_layers: int, model: ModelConfig
) -> list[int]:
    """The layers whose outputs z-lab's drafters read; by default as many as they have layers."""
    depth = model.num_hidden_layers
    number = reader.get_int("num_target_layers", depth)
    if number != depth:
        reader.refuse(
            f"num_target_layers is {number}, the target has {depth} layers",
            "use the drafter that was trained for this target",
        )
    layers = read_layers(place, "target_layer_ids")
    if layers is not None:
        if layers[-1] == depth - 1:
            reader.refuse(
                f"target_layer_ids names the last layer, {depth - 1}, whose output z-lab's code"
                " takes behind the final norm",
                "use a drafter that reads inner layers",
            )
        return layers
    if place is reader:
        reader.refuse("target_layer_ids is missing", "give the list that it was trained with")
        return []
    if num_layers == 1:
        return [depth // 2]
    span = (depth - 4) / (num_layers - 1)
    return [round(1 + span * index) for index in range(num_layers)]


class Converter(NetConverter):
    """A drafter's folder."""

    METHOD, NET = METHOD, DFLASH_NET
    params: DFlashParams

    def read_params(self) -> DFlashParams:
        folder, model = self.folder, self.model
        if "fc.weight" not in folder.tensors or "hidden_norm.weight" not in folder.tensors:
            raise SpecDecError(
                f"{folder.path} lacks fc.weight or hidden_norm.weight, which every DFlash drafter"
                f" has; it holds {list_held(folder)}",
                "give the folder of a DFlash drafter",
            )
        kind = folder.config.get("speculators_model_type")
        is_speculators = self.is_speculators
        # DeepSpec tells the rank of DFlash's drafters as well, 0.
        is_spark = kind == "dspark" if is_speculators else "markov_rank" in folder.config
        reader, net_reader = self.open_net(FIXED_NET, "layers of a Qwen3")
        if is_speculators and not is_spark:
            known = {"speculators_model_type": "dflash"}
            check_fixed(reader, known, "speculators' DFlash and DSpark")
        values = read_decoder(
            net_reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=32768, num_kv_heads=32,
            head_dim=None if "head_dim" in net_reader.config else 128,
        )  # fmt: skip
        values |= {"sliding_window": None, "layer_types": None, "embedding_multiplier": 1.0}
        values |= qwen.read_window(net_reader, None, values)
        values["attn_bias"] = net_reader.get_bool("attention_bias", False)
        has_window = values["sliding_window"] is not None
        if is_speculators:
            _check_speculators(reader, model, has_window=has_window)
            place, layers = reader, _find_entered(reader)
        else:
            place = reader if is_spark else reader.enter(reader.get_object("dflash_config"))
            _check_causal(reader, "is_causal", reader.get_bool("is_causal", has_window))
            values["embedding_multiplier"] = _read_scale(reader, place, model)
            layers = _find_outputs(reader, place, values["num_hidden_layers"], model)
        block_size = _read_block_size(reader, place)
        mask_token_id = place.get_int("mask_token_id", minimum=0)
        markov_rank = _read_markov_rank(reader) if is_spark else 0
        # For speculators' DSpark, vLLM takes another default than speculators does.
        default = None if is_speculators and is_spark else is_spark
        samples = (is_speculators or is_spark) and reader.get_bool("sample_from_anchor", default)
        if not 2 - samples <= block_size <= MAX_DRAFT_TOKENS:
            reader.refuse(f"block_size is {block_size}", f"give 2 to {MAX_DRAFT_TOKENS}")
        key = "aux_hidden_state_layer_ids" if is_speculators else "target_layer_ids"
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

    def find_source_rows(self, canonical: Sequence[str]) -> dict[str, tuple[SourceRows, ...]]:
        own = ("drafter.fc.weight", "drafter.hidden_norm.weight", HEAD, HEAD_BIAS, OFFSETS)
        extras = {name: name.removeprefix("drafter.") for name in own} | MARKOV
        return self.find_net_source_rows(qwen.QWEN3, canonical, extras)

    def list_ignored(self) -> Sequence[str]:
        """What follows from the rest, and DSpark's other head."""
        confidence = (CONFIDENCE,) if self.folder.config.get("enable_confidence_head") else ()
        return (*super().list_ignored(), *confidence)
