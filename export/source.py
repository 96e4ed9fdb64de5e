"""Source of an export: a checkpoint's tensors by Hugging Face's names, as rows of stored ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specdec.checkpoint.config import read_checkpoint_config
from specdec.errors import SpecDecError
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorFile, TensorInfo
from specdec.methods.dflash import DFlashParams
from specdec.methods.eagle import MASK_DEPTH, Eagle3Params, EagleParams
from specdec.methods.medusa import MedusaParams
from specdec.methods.mtp import FORMS, MtpParams
from specdec.methods.net import NetParams
from specdec.methods.redrafter import ReDrafterParams
from specdec.model.config import ModelConfig
from specdec.model.tensors import (
    DFLASH_NET,
    EAGLE_NET,
    EMBEDDING,
    HEAD,
    HEAD_BIAS,
    MARKOV_EMBEDDING,
    MARKOV_HEAD,
    MTP_NET,
    OFFSETS,
    find_first_copy,
    list_target_tensors,
)

from .settings import ExportSettings

DEFAULT_DRAFT_TOKENS = 3
# Module of a layer in checkpoints -> Hugging Face's; `attention.qkv` becomes three modules.
LAYER = {
    "input_layernorm": "input_layernorm", "hidden_norm": "hidden_norm",
    "post_layernorm": "post_attention_layernorm", "attention.dense": "self_attn.o_proj",
    "mlp.fc": "mlp.gate_proj", "mlp.gate": "mlp.up_proj", "mlp.proj": "mlp.down_proj",
    "attention.q_layernorm": "self_attn.q_norm", "attention.k_layernorm": "self_attn.k_norm",
}  # fmt: skip
NET_MODULES = {"vocab_embedding": "embed_tokens", "ln_f": "norm"}  # other modules of a net
# Tensor of a drafter without its net's prefix -> Hugging Face's name, where more than the prefix
# differs.
DRAFTER_NAMES = {
    **{f"drafter.{here}.weight": f"{there}.weight" for here, there in NET_MODULES.items()},
    MARKOV_EMBEDDING: "markov_head.markov_w1.weight",
    MARKOV_HEAD: "markov_head.markov_w2.weight",
}
TARGET_NAMES = {
    EMBEDDING: "model.embed_tokens.weight", HEAD: HEAD,
    "transformer.ln_f.weight": "model.norm.weight",
}  # fmt: skip
# Architecture of a model that can be exported -> its `model_type`.
MODEL_TYPES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TensorRows:
    """Rows of a checkpoint's tensor by their numbers, in the order to write; None for all."""

    name: str
    rows: Array | None = None


@dataclasses.dataclass
class Contents:
    """Contents of a folder to write: config.json, tensors, texts by file name, files to copy."""

    config: dict[str, Any]
    tensors: dict[str, TensorRows]
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    files: dict[str, Path] = dataclasses.field(default_factory=dict)
    weights_name: str = "model.safetensors"


class Source:
    """Whole, unquantized checkpoint. `kind`: a key of TITLES.

    tensors: of the drafter, or of a plain checkpoint's model, by Hugging Face's name. left_out:
    needless tensors of a drafter, with the reason. head_form: key of `FORMS`, the layout of an MTP
    head's names.
    """

    head_form = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        checkpoint = read_checkpoint_config(folder)
        self.model, self.drafter = checkpoint.model, checkpoint.drafter
        world = self.model.tp_size * self.model.pp_size
        if world > 1:
            raise SpecDecError(
                f"{folder} is split over {world} ranks", "convert it again for one rank"
            )
        if checkpoint.quantization.quant_algo is not None:
            raise SpecDecError(
                f"{folder} is quantized with {checkpoint.quantization.quant_algo}",
                "export the unquantized checkpoint",
            )
        self.file = TensorFile(folder / "rank0.safetensors")
        self.left_out: dict[str, str] = {}
        self.computed_tensors: dict[str, Array] = {}  # bool tensors of no file, by name
        self.kind, self.tensors = self._list_tensors()

    def get_info(self, rows: TensorRows) -> TensorInfo:
        """Return the type and shape of a tensor."""
        if rows.name in self.computed_tensors:
            return TensorInfo("bool", self.computed_tensors[rows.name].shape)
        info = self.file.tensors[rows.name]
        num_rows = info.shape[0] if rows.rows is None else len(rows.rows)
        return TensorInfo(info.dtype, (num_rows, *info.shape[1:]))

    def read(self, rows: TensorRows) -> Array:
        """Read a tensor in its storage type."""
        if rows.name in self.computed_tensors:
            return self.computed_tensors[rows.name]
        array: Array = self.file.read(rows.name)
        return array if rows.rows is None else array[rows.rows]

    def is_same(self, name: str, other_name: str) -> bool:
        """Return whether two tensors of the checkpoint are equal, byte for byte."""
        return self.file.are_equal(name, other_name)

    def _list_tensors(self) -> tuple[str, dict[str, TensorRows]]:
        params = self.drafter
        if isinstance(params, MedusaParams):
            kind, tensors = "medusa", self._list_medusa(params)
        elif isinstance(params, ReDrafterParams):
            kind, tensors = "redrafter", self._list_redrafter(params)
        elif isinstance(params, DFlashParams):
            kind = "dflash"
            tensors = self._list_net(params, params.net, DFLASH_NET, shares_head=True)
        elif isinstance(params, MtpParams):
            kind, tensors = "mtp", self._list_mtp(params)
        elif isinstance(params, EagleParams):
            kind = "eagle1" if params.eagle3 is None else "eagle3"
            shares_head = params.eagle3 is None
            tensors = self._list_net(params, params.net, EAGLE_NET, shares_head=shares_head)
        elif params is not None:
            raise SpecDecError(
                f"{self.folder} has a drafter of a kind that is not exported:"
                f" {getattr(params, 'TITLE', type(params).__name__)}",
                "give its runtime the folder that it was converted from",
            )
        else:
            kind, tensors = "plain", self._list_model()
        return kind, tensors

    def _list_model(self) -> dict[str, TensorRows]:
        model = self.model
        kind = model.architecture
        if kind == "MistralForCausalLM" and model.layer_types is not None:
            kind = "MinistralForCausalLM"
        if kind not in MODEL_TYPES or model.own_arithmetic is not None:
            raise SpecDecError(
                f"a {kind} is not exported",
                f"the models that are: {', '.join(MODEL_TYPES)}; any other is given to its runtime"
                " as the Hugging Face folder that it was converted from",
            )
        tensors = {}
        for name in list_target_tensors(model):
            if name in TARGET_NAMES:
                tensors[TARGET_NAMES[name]] = TensorRows(name)
            else:
                local_name = name.removeprefix("transformer.")
                tensors |= {
                    f"model.{hf_name}": rows
                    for hf_name, rows in name_layer(name, local_name, model)
                }
        return tensors

    def _list_medusa(self, params: MedusaParams) -> dict[str, TensorRows]:
        tensors = {}
        for name in params.list_tensors(self.model):
            head, _, inner_name = name.removeprefix("medusa_heads.").partition(".")
            inner_name = inner_name.removeprefix("medusa_layers.")
            inner_name = (
                f"{params.num_layers}.weight" if inner_name == "lm_head.weight" else inner_name
            )
            tensors[f"{head}.{inner_name}"] = TensorRows(name)
        return tensors

    def _list_redrafter(self, params: ReDrafterParams) -> dict[str, TensorRows]:
        tensors = {}
        for name in params.list_tensors(self.model):
            hf_name = name.removeprefix("drafter.")
            if hf_name == "lm_head.weight":
                hf_name = f"lm_head.{params.num_layers}.weight"
            elif hf_name.startswith("layers."):
                hf_name = f"lm_head.{hf_name.removeprefix('layers.')}"
            tensors[hf_name] = TensorRows(name)
        return tensors

    def _list_mtp(self, params: MtpParams) -> dict[str, TensorRows]:
        """List an MTP head by the names of `head_form`; only GLM's has both tables."""
        net = params.make_net_model(self.model)
        net_tensors = self._list_net(params, net, MTP_NET, shares_head=True)
        has_own = not net_tensors.keys().isdisjoint(("embed_tokens.weight", HEAD, HEAD_BIAS))
        assert not (has_own and params.is_reversed), "MiMo's layout has no room for them"
        self.head_form = "mimo" if params.is_reversed else "glm" if has_own else "qwen"
        form = FORMS[self.head_form]
        prefix = form.prefix.format(layer=self.model.num_hidden_layers)
        starts = {"layers.0.": prefix + form.layer}
        starts |= {
            f"{NET_MODULES.get(net_name, net_name)}.": f"{prefix}{to}."
            for net_name, to in form.names.items()
        }
        return {
            starts[net_name] + name.removeprefix(net_name): rows
            for name, rows in net_tensors.items() for net_name in starts
            if name.startswith(net_name)
        }  # fmt: skip

    def _list_net(
        self, params: NetParams, net: ModelConfig, prefix: str, *, shares_head: bool
    ) -> dict[str, TensorRows]:
        """List the tensors of a drafter with layers, without those equal to the target's."""
        tensors: dict[str, TensorRows] = {}
        for name in params.list_tensors(self.model):
            if (first_copy := find_first_copy(name)) != name:
                if not self.is_same(name, first_copy):
                    raise SpecDecError(
                        f"{self.folder}: {name} differs from {first_copy}",
                        "one drafter is exported: convert it again",
                    )
                continue
            local_name = name.removeprefix(prefix)
            if local_name.startswith("drafter.layers."):
                tensors |= name_layer(name, local_name.removeprefix("drafter."), net)
            else:
                hf_name = DRAFTER_NAMES.get(local_name, local_name.removeprefix("drafter."))
                tensors[hf_name] = TensorRows(name)
        self.left_out |= self._find_needless(tensors, shares_head=shares_head)
        return {name: rows for name, rows in tensors.items() if name not in self.left_out}

    def _find_needless(
        self, tensors: Mapping[str, TensorRows], *, shares_head: bool
    ) -> dict[str, str]:
        """Return the tensors of a drafter that runtimes take from the target or do without.

        shares_head: whether a runtime gives the drafter the target's output layer.
        """
        head = HEAD if HEAD in self.file.tensors else EMBEDDING
        target_names = {"embed_tokens.weight": EMBEDDING}
        if shares_head:
            target_names |= {"lm_head.weight": head, HEAD_BIAS: HEAD_BIAS}
        needless_tensors = {
            name: "equals the target's, which is taken"
            for name, target_name in target_names.items()
            if name in tensors and self.is_same(tensors[name].name, target_name)
        }
        if "fc.bias" in tensors and not self.read(tensors["fc.bias"]).any():
            needless_tensors["fc.bias"] = "is zero"
        return needless_tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """Export with its settings.

    target: name of the target in commands. output_path: the folder to write.
    """

    settings: ExportSettings
    source: Source
    target: str
    output_path: str

    @property
    def eagle(self) -> EagleParams:
        """Parameters of an EAGLE drafter."""
        assert isinstance(self.source.drafter, EagleParams)
        return self.source.drafter

    @property
    def eagle3(self) -> Eagle3Params:
        """Parameters that only an EAGLE-3 drafter has."""
        assert self.eagle.eagle3 is not None
        return self.eagle.eagle3

    @property
    def dflash(self) -> DFlashParams:
        """Parameters of a DFlash drafter."""
        assert isinstance(self.source.drafter, DFlashParams)
        return self.source.drafter

    @property
    def is_dspark(self) -> bool:
        """Return whether it is a DFlash drafter of DSpark's form."""
        drafter = self.source.drafter
        return isinstance(drafter, DFlashParams) and bool(
            drafter.markov_rank or drafter.sample_from_anchor
        )

    @property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens per step."""
        if self.settings.num_draft_tokens is not None:
            return self.settings.num_draft_tokens
        drafter = self.source.drafter
        if isinstance(drafter, MedusaParams):
            return drafter.num_heads
        if isinstance(drafter, ReDrafterParams):
            return drafter.draft_len_per_beam
        if isinstance(drafter, DFlashParams):
            return drafter.num_positions
        if isinstance(drafter, EagleParams) and drafter.mask_token_id is not None:
            # The temporary checkpoint has one copy; config.json does not name the trained number.
            return drafter.num_eagle_layers if drafter.num_eagle_layers > 1 else MASK_DEPTH
        return DEFAULT_DRAFT_TOKENS

    def list_tensors(self) -> dict[str, TensorRows]:
        """Return the tensors; for a reduced vocabulary, also `t2d` [V], a mask of its tokens."""
        tensors = dict(self.source.tensors)
        if OFFSETS in self.source.tensors:
            offsets = self.source.read(self.source.tensors[OFFSETS])
            drafted = np.zeros(self.source.model.vocab_size, np.uint8)
            drafted[offsets + np.arange(len(offsets))] = 1
            self.source.computed_tensors["t2d"], tensors["t2d"] = drafted, TensorRows("t2d")
        return tensors


def list_entered(params: Eagle3Params | DFlashParams) -> list[int]:
    """Return the layers whose inputs the drafter reads: outputs of the layers before them."""
    return [layer + 1 for layer in params.aux_layers]


TITLES = {
    "plain": "a model", "medusa": "Medusa heads", "redrafter": "a ReDrafter drafter",
    "mtp": "a head for multi-token prediction",
    "eagle1": "an EAGLE-1 drafter", "eagle3": "an EAGLE-3 drafter", "dflash": "a DFlash drafter",
}  # fmt: skip


def name_layer(name: str, local_name: str, model: ModelConfig) -> Iterable[tuple[str, TensorRows]]:
    """Return Hugging Face's names of a layer's tensor, each with its rows of the tensor.

    name: the tensor in the checkpoint. local_name: `layers.N.MODULE.weight`.

    Raises SpecDecError for a module without a name there: no tensor is dropped silently.
    """
    prefix, layer, module_path = local_name.split(".", 2)
    module, _, kind = module_path.rpartition(".")
    if module == "attention.qkv":
        queries, keys = model.num_attention_heads, model.num_key_value_heads
        # Numbers of heads; gates are last.
        counts = [queries, keys, keys, queries][: 2 + model.query_parts]
        heads = np.arange(sum(counts) * model.head_size).reshape(-1, model.head_size)
        q, k, v, *gates = np.split(heads, np.cumsum(counts)[:-1])
        head_rows = {"q": np.stack((q, *gates), axis=1), "k": k, "v": v}  # a head's gates follow it
        return [
            (f"{prefix}.{layer}.self_attn.{key}_proj.{kind}", TensorRows(name, rows.reshape(-1)))
            for key, rows in head_rows.items()
        ]
    if module not in LAYER:
        raise SpecDecError(f"{name} has no name in Hugging Face's layers", "convert it again")
    return [(f"{prefix}.{layer}.{LAYER[module]}.{kind}", TensorRows(name))]
