"""EAGLE: a drafter folder -> the `eagle_nets.*` tensors and EAGLE's keys of a checkpoint.

Published are SafeAILab's EAGLE-1, whose weights EAGLE-2 shares; EAGLE-3 as SafeAILab and
SpecForge save it, as ModelOpt exports it, and as speculators does, with EAGLE-3.1's norms or not;
P-EAGLE as vLLM reads it, and as speculators saves it. ModelOpt's trainer saves EAGLE-1 with its
target.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec.errors import SpecDecError, shorten
from specdec.methods.eagle import (
    EAGLE3_ARCHITECTURE,
    EAGLE3_FIXED,
    MASK_DEPTH,
    MASK_HIDDEN,
    METHOD,
    OWN_ARCHITECTURE,
    Eagle3Params,
    EagleConvert,
    EagleParams,
)
from specdec.model.config import FULL, ModelConfig
from specdec.model.config_reader import ConfigReader
from specdec.model.tensors import EAGLE_NET, HEAD, HEAD_BIAS, OFFSETS, find_first_copy
from specdec.options import as_options
from specdec.system import logs

from ..families import llama
from ..families.base import ROTARY_BUFFERS, read_decoder, refuse_layer_types
from ..hf import HfFolder
from ..plan import SourceRows
from ..settings import ConvertSettings
from .base import (
    Config,
    NetConverter,
    check_fixed,
    check_offsets,
    check_read_layers,
    exclude_modules,
    name_tensors,
    read_layers,
)

logger = logs.get_logger(__name__)

# As ModelOpt's trainer saves a target with its drafter, and where config.json describes the latter.
WITH_TARGET, DESCRIPTION = "eagle_module.", "eagle"
# Tensors that only EAGLE-3 has there, and norms that an EAGLE-1 may have and the paper's has not.
SAVED_EAGLE3 = frozenset(
    f"{name}.weight" for name in ("hidden_norm", "input_embeds_norm", "eagle_lm_head", "enorm")
)
EAGLE1_NORMS = frozenset(("layers.0.input_layernorm.weight", "norm.weight"))
EXPORT_REMEDY = "export it with ModelOpt's export_speculative_decoding and give that folder"

MAX_DRAFT_LEN = 256  # TensorRT-LLM's, of a tree

LAYER = "layers.0."
ONLY_LAYER = "midlayer."  # another name of a drafter's only layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Layout:
    """Layout of an EAGLE-3 drafter's config.json, by its writer.

    find_layers: returns the target's layers, from 0, whose outputs are read, for a target of so
    many. layers_key: config.json's key of them, for a message. fixed: fields that must hold a value
    if they are there, in the object of `section_key` or, if that is None, at the top level.
    """

    name: str
    find_layers: Callable[[ConfigReader, int], list[int]]
    layers_key: str
    section_key: str | None = None
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
ANGELSLIM_IDS = "aux_hidden_states_layer_ids"  # of the layers that are left
SPECFORGE_PEAGLE = ["PEagleDraftModel"]  # its architectures


def _find_outputs(reader: ConfigReader, num_layers: int) -> list[int]:
    """Return the layers whose outputs are read, as they are listed; SafeAILab's three by default.

    A list at the top alone is vLLM's and llama.cpp's, but AngelSlim's under its own name.
    """
    inner = reader.enter(reader.get_object("eagle_config"))
    layers = read_layers(inner, LAYER_IDS) or read_layers(reader, ANGELSLIM_IDS)
    return layers or _find_inputs(reader, num_layers)


def _find_inputs(reader: ConfigReader, num_layers: int) -> list[int]:
    """Return the layers whose outputs are read, one before each that is listed, as in vLLM."""
    layers = read_layers(reader, LAYER_IDS)
    return [layer - 1 for layer in layers or [2, num_layers // 2, num_layers - 3]]


def _find_either(reader: ConfigReader, num_layers: int) -> list[int]:
    """Return the layers whose outputs are read, of either list, as vLLM takes them."""
    inner = reader.enter(reader.get_object("eagle_config"))
    return _find_inputs(reader if reader.config.get(LAYER_IDS) else inner, num_layers)


# SafeAILab's and SpecForge's are ModelOpt's without most of the fields.
MODELOPT = Eagle3Layout(
    name="ModelOpt or SafeAILab",
    find_layers=_find_outputs,
    layers_key="eagle_config.eagle_aux_hidden_state_layer_ids",
    section_key="eagle_config",
    fixed=EAGLE3_FIXED,
)
SPECULATORS = Eagle3Layout(
    name="speculators",
    find_layers=_find_inputs,
    layers_key="eagle_aux_hidden_state_layer_ids",
)
VLLM_PEAGLE = dataclasses.replace(
    MODELOPT, name="vLLM", find_layers=_find_either, layers_key=LAYER_IDS
)
# Keys that vLLM looks for in P-EAGLE's config.json, the first of which counts.
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
# The drafter's layers, in the Llama config that each format has somewhere.
OF_LLAMA_KIND = ("mistral", "qwen2")  # whose layers without biases are a Llama's
# Classes by which vLLM, SGLang and SpecForge take a Llama's layers, whatever model_type says.
OF_LLAMA_CLASS = (
    "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", *SPECFORGE_PEAGLE,
)  # fmt: skip
FIXED_NET = {
    "model_type": "llama", "attention_bias": False, "mlp_bias": False, "qkv_bias": False,
    "use_sliding_window": False, "is_causal": True, "logit_scale": 1.0,
}  # fmt: skip


def separate(folder: HfFolder) -> HfFolder:
    """Return a drafter that ModelOpt's trainer saved with its target as a folder of its own.

    Other folders are returned as they are. The object `eagle` of config.json says how the drafter
    is built; without it, and for what it does not say, its layers are taken for the target's kind.
    """
    together = {name for name in folder.tensors if name.startswith(WITH_TARGET)}
    if not together:
        return _unify_config(folder)
    bare = {name: name.removeprefix(WITH_TARGET) for name in together}
    alone = folder.select(together)
    alone.rename(bare, left_out=())
    saved = f"{folder.path} holds an EAGLE drafter saved with its target ({min(together)})"
    if "fc.weight" in folder.tensors:
        raise SpecDecError(f"{saved}, and another one, fc.weight", "keep one of them")
    if newer := sorted(SAVED_EAGLE3 & alone.tensors.keys()):
        raise SpecDecError(
            f"{saved}, an EAGLE-3 ({newer[0]}), which its config.json does not describe",
            EXPORT_REMEDY,
        )
    if norms := sorted(EAGLE1_NORMS & alone.tensors.keys()):
        raise SpecDecError(
            f"{saved}, an EAGLE-1 with {' and '.join(norms)}: that of the paper, which is drafted"
            " with here, has no such norm",
            "train it with use_input_layernorm_in_first_layer and use_last_layernorm false",
        )
    alone.config = _describe_separate(folder, alone)
    return _unify_config(alone)


def _describe_separate(folder: HfFolder, alone: HfFolder) -> Config:
    """Return the config.json of a drafter that was saved with its target."""
    reader = ConfigReader(folder.config, folder.path)
    description = dict(reader.get_object(DESCRIPTION))
    reader.finish()
    not_its = (DESCRIPTION, "quantization_config")
    target = {key: value for key, value in folder.config.items() if key not in not_its}
    layers = {name.split(".")[1] for name in alone.tensors if name.startswith("layers.")}
    if not description:
        logger.warning(
            "%s: config.json has no %s, which describes the drafter in it; its layers are taken for"
            " the target's kind. If it drafts badly, %s", folder.path, DESCRIPTION, EXPORT_REMEDY,
        )  # fmt: skip
    elif "head_dim" not in description:  # ModelOpt's own layers then, which scale no rotation
        for name in ("rope_scaling", "rope_parameters", "head_dim", "layer_types"):
            target.pop(name, None)
        target["model_type"] = "llama"
    else:  # layers of the target's class, which its own tables turn
        description.pop("rope_theta", None)
    return {**target, "num_hidden_layers": len(layers), **description}


def _unify_config(folder: HfFolder) -> HfFolder:
    """Return the folder with the fields that its writer's class does not read as a Llama's.

    SafeAILab's and SpecForge's `midlayer` is one layer, whatever num_hidden_layers says: 40 in
    SafeAILab's EAGLE-3 for Vicuna 13B.
    """
    config = folder.config
    changed: dict[str, Any] = {}
    classes = config.get("architectures")
    is_of_class = isinstance(classes, list) and classes[:1] and classes[0] in OF_LLAMA_CLASS
    if is_of_class or config.get("model_type") in OF_LLAMA_KIND:
        changed["model_type"] = "llama"
    if any(name.startswith(ONLY_LAYER) for name in folder.tensors):
        changed["num_hidden_layers"] = 1
    unified = copy.copy(folder)
    unified.config = {**config, **changed}
    return unified


def _check_kind(folder: HfFolder) -> None:
    """Raise SpecDecError unless the folder holds an EAGLE drafter alone, under one naming."""
    if "fc.weight" not in folder.tensors:
        raise SpecDecError(
            f"{folder.path} holds no fc.weight, which every EAGLE drafter has; it holds"
            f" {name_tensors(folder)}",
            "give the folder of an EAGLE drafter",
        )
    prefixes = [p for p in (LAYER, ONLY_LAYER) if any(n.startswith(p) for n in folder.tensors)]
    if len(prefixes) > 1:
        raise SpecDecError(
            f"{folder.path} has two namings of one layer, {LAYER}* and {ONLY_LAYER}*",
            "keep one of them: which is the trained one cannot be known",
        )


def _read_eagle3(
    reader: ConfigReader, folder: HfFolder, layout: Eagle3Layout, net: ModelConfig,
    model: ModelConfig, *, is_parallel: bool,
) -> Eagle3Params | None:  # fmt: skip
    """Read EAGLE-3's parameters besides its layers; None where something is wrong."""
    section = reader.enter(
        reader.get_object(layout.section_key) if layout.section_key else reader.config
    )
    check_fixed(section, layout.fixed, f"the usual EAGLE-3 of {layout.name}")
    is_speculators, name = layout.section_key is None, "norm_before_residual"
    if is_speculators and reader.config.get(name) is None:
        logger.warning("%s: config.json has no %s; taken as true, as in vLLM", folder.path, name)
    norms = {name: reader.get_bool(name, is_speculators)}
    for name in Eagle3Params.NEWER:  # vLLM takes ModelOpt's object first
        norms[name] = (section if name in section.config else reader).get_bool(name, False)
    is_tied = reader.config.get("tie_word_embeddings") is True
    if is_tied and {HEAD, "embed_tokens.weight"} & folder.tensors.keys() == {"embed_tokens.weight"}:
        reader.refuse(
            "tie_word_embeddings is true and there is no lm_head.weight: SGLang drafts with the"
            " drafter's embed_tokens then, vLLM with the target's head",
            "set it to false for the target's head, or add the lm_head.weight of the training",
        )
    if norms["norm_before_fc"] and norms["fc_norm"]:
        reader.refuse(
            "norm_before_fc and fc_norm are both true",
            "set to true the one that the drafter was trained with",
        )
    layers = sorted(layout.find_layers(reader, model.num_hidden_layers))
    fact = f"the features would come from the outputs of layers {layers}"
    check_read_layers(reader, folder, layers, model, layout.layers_key, fact)
    draft_vocab_size = reader.get_int("draft_vocab_size", net.vocab_size)
    mask_token_id = _read_mask_token(reader, is_parallel=is_parallel)
    if not reader.problems:
        check_offsets(reader, folder, draft_vocab_size, model.vocab_size)
    if reader.problems:
        return None
    return Eagle3Params(
        aux_layers=tuple(layers), draft_vocab_size=draft_vocab_size, mask_token_id=mask_token_id,
        **norms,
    )  # fmt: skip


def _read_mask_token(reader: ConfigReader, *, is_parallel: bool) -> int | None:
    """Return P-EAGLE's mask token; note fields that need one without the tensor of its state."""
    names = [name for name in MASK_TOKENS if reader.config.get(name) is not None]
    if not is_parallel:
        for name in (*names, "parallel_drafting"):
            if value := reader.config.get(name):
                reader.refuse(
                    f"{name} is {value!r}"[:120] + ", and there is no mask_hidden",
                    "take a P-EAGLE drafter with all its tensors, or remove the field",
                )
        return None
    values = {reader.get_int(name, minimum=0) for name in names}
    if len(values) > 1:
        reader.refuse(
            f"{' and '.join(names)} name different mask tokens, {sorted(values)}",
            "remove the wrong ones",
        )
    if not values:
        reader.refuse(
            f"mask_hidden is there, and none of {', '.join(MASK_TOKENS)} is",
            "give the token that stands for those that are not known, as the drafter was trained",
        )
    return min(values, default=None)


class EagleConverter(NetConverter):
    """Converter of an EAGLE drafter's folder."""

    METHOD, NET, IN_TARGET = METHOD, EAGLE_NET, (f"{WITH_TARGET}*",)
    params: EagleParams

    def __init__(self, folder: HfFolder, settings: ConvertSettings, model: ModelConfig) -> None:
        """Take the drafter alone where it was saved with its target."""
        super().__init__(separate(folder), settings, model)

    def name_bare(self, canonical: Sequence[str]) -> dict[str, str]:
        """Map the names of each net's tensors to bare names: all nets have the same sources."""
        return {name: find_first_copy(name).removeprefix(EAGLE_NET) for name in canonical}

    def read_params(self) -> EagleParams:
        """Return the drafter's parameters; raise SpecDecError where they do not suit the target."""
        folder, model = self.folder, self.model
        _check_kind(folder)
        choice = self._choose_layout()
        net_description = "a Llama's decoder layers without biases"
        reader, net_reader = self.open_net(FIXED_NET, net_description)
        refuse_layer_types(net_reader, FULL)
        values = read_decoder(net_reader, norm_epsilon=("rms_norm_eps", 1e-6), max_positions=2048)
        net = EagleParams.make_net(values, model.dtype)
        if net.hidden_act != "silu":
            net_reader.refuse(
                f"hidden_act is {net.hidden_act!r}", "EAGLE drafters are supported with silu"
            )
        self.check_net(reader, net)
        eagle3 = None
        if choice is not None:
            layout, is_masked = choice
            eagle3 = _read_eagle3(reader, folder, layout, net, model, is_parallel=is_masked)
            reader.finish()
        options = as_options(self.settings, EagleConvert)
        max_draft_len = options.max_draft_len or 63
        if max_draft_len > MAX_DRAFT_LEN:
            raise SpecDecError(
                f"--max-draft-len is {max_draft_len}, EAGLE trees have at most {MAX_DRAFT_LEN}"
                " tokens",
                f"give {MAX_DRAFT_LEN} or less",
            )
        is_parallel = eagle3 is not None and eagle3.mask_token_id is not None
        return EagleParams(
            net=net,
            num_eagle_layers=options.num_eagle_layers or (MASK_DEPTH if is_parallel else 4),
            max_non_leaves_per_layer=options.max_non_leaves_per_layer or 10,
            max_draft_len=max_draft_len,
            eagle3=eagle3,
        )

    def _choose_layout(self) -> tuple[Eagle3Layout, bool] | None:
        """Return the layout of an EAGLE-3 and whether it is a P-EAGLE; None of an EAGLE-1."""
        config, tensors = self.folder.config, self.folder.tensors
        if self.is_speculators:
            kind = config["speculators_model_type"]
            if kind not in ("eagle3", "peagle"):
                raise SpecDecError(
                    f"{self.folder.path}: speculators_model_type is {shorten(kind)}",
                    "of speculators' EAGLE drafters eagle3 and peagle are read",
                )
            return SPECULATORS, kind == "peagle"
        if not any(name.endswith("hidden_norm.weight") for name in tensors):
            return None
        is_masked = MASK_HIDDEN.removeprefix("drafter.") in tensors
        is_vllms = is_masked and config.get("architectures") != SPECFORGE_PEAGLE
        return VLLM_PEAGLE if is_vllms else MODELOPT, is_masked

    def find_source_rows(self, canonical: Sequence[str]) -> dict[str, tuple[SourceRows, ...]]:
        """Map canonical tensor names to the folder's, under the name that its layer has."""
        bare, params = self.name_bare(canonical), self.params
        names = ["fc.weight", "fc.bias", "layers.0.hidden_norm.weight"]
        if params.eagle3 is not None:
            names += params.eagle3.list_read_norms()
        names = [f"drafter.{name}" for name in names] + [HEAD, HEAD_BIAS, OFFSETS, MASK_HIDDEN]
        extras = {name: name.removeprefix("drafter.") for name in names}
        sources = self.find_net_source_rows(llama.LLAMA, canonical, extras)
        is_only = any(name.startswith(ONLY_LAYER) for name in self.folder.tensors)
        layer = ONLY_LAYER if is_only else LAYER
        return {
            name: tuple(
                dataclasses.replace(
                    rows, name=rows.name.replace(LAYER, layer, 1), is_row=bare[name] == MASK_HIDDEN
                )
                for rows in tensor_rows
            )
            for name, tensor_rows in sources.items()
        }

    def list_ignored(self) -> Sequence[str]:
        """Return patterns of rotary tables, and of EAGLE-3's maps that were checked."""
        return ROTARY_BUFFERS if self.params.eagle3 is None else super().list_ignored()

    def add_to_config(self, config: Config, *, is_head_quantized: bool) -> Config:
        """Return a target's config.json with the drafter's nets and architecture."""
        params, target, combined = self.params, config["architecture"], dict(config)
        own_name = EAGLE3_ARCHITECTURE if params.eagle3 else OWN_ARCHITECTURE
        title = METHOD.own_architectures[own_name]
        pair = self.choose_pair(target, title)
        if params.eagle3 is None and is_head_quantized:
            raise SpecDecError(
                "the target's lm_head is quantized, and EAGLE-1 drafts with it",
                "quantize the target without its head",
            )
        drafter_config = params.to_checkpoint()
        shared_keys = ("dtype", "logits_dtype", "mapping")
        drafter_config[EagleParams.NET] = {
            "architecture": "LlamaForCausalLM",
            **{key: config[key] for key in shared_keys if key in config},
            "position_embedding_type": "rope_gpt_neox",
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
            "use_parallel_embedding": config.get("use_parallel_embedding", False),
            "embedding_sharding_dim": config.get("embedding_sharding_dim", 0),
            **drafter_config[EagleParams.NET],
        }
        combined |= drafter_config
        combined["architecture"] = own_name if params.eagle3 or pair is None else pair[1]
        combined["base_architecture"] = target
        return exclude_modules(combined, ["eagle_nets.*"], is_head_quantized=is_head_quantized)


CONVERTER = EagleConverter
