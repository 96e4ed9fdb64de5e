"""What is exported: a checkpoint, its tensors under Hugging Face's names, each a part of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from specdec.errors import SpecDecError
from specdec.files.reading import Array
from specdec.files.tensor_file import TensorFile, TensorInfo
from specdec.methods.dflash import DFlashParams
from specdec.methods.eagle import MASK_DEPTH, Eagle3Params, EagleParams
from specdec.methods.medusa import MedusaParams
from specdec.methods.mtp import FORMS, MtpParams
from specdec.methods.net import NetParams
from specdec.methods.redrafter import ReDrafterParams
from specdec.model.checkpoint import read_checkpoint_config
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
# Module of a layer here -> Hugging Face's; `attention.qkv` is three of them.
LAYER = {
    "input_layernorm": "input_layernorm", "hidden_norm": "hidden_norm",
    "post_layernorm": "post_attention_layernorm", "attention.dense": "self_attn.o_proj",
    "mlp.fc": "mlp.gate_proj", "mlp.gate": "mlp.up_proj", "mlp.proj": "mlp.down_proj",
    "attention.q_layernorm": "self_attn.q_norm", "attention.k_layernorm": "self_attn.k_norm",
}  # fmt: skip
OURS = {"vocab_embedding": "embed_tokens", "ln_f": "norm"}  # the same of other modules of a net
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
class Part:
    """Rows of a checkpoint's tensor by their numbers, None for all, in the order of the folder."""

    name: str
    rows: Array | None = None


@dataclasses.dataclass
class Contents:
    """A folder to write: config.json, tensors, texts by file name, and what is copied."""

    config: dict[str, Any]
    tensors: dict[str, Part]
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    files: dict[str, Path] = dataclasses.field(default_factory=dict)
    weights_name: str = "model.safetensors"


class Source:
    """A whole, unquantized checkpoint. `kind`: a key of TITLES.

    parts: of the drafter, or of a plain checkpoint's model, by Hugging Face's name. left_out: what
    of a drafter need not be written, with the reason. head_form: the names, of `FORMS`, that a head
    for multi-token prediction is written by.
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
        self.made: dict[str, Array] = {}  # truth values that stand in no file, by a part's name
        self.kind, self.parts = self._list_parts()

    def get_info(self, part: Part) -> TensorInfo:
        """The type and size of a part."""
        if part.name in self.made:
            return TensorInfo("bool", self.made[part.name].shape)
        whole = self.file.tensors[part.name]
        num_rows = whole.shape[0] if part.rows is None else len(part.rows)
        return TensorInfo(whole.dtype, (num_rows, *whole.shape[1:]))

    def read(self, part: Part) -> Array:
        """A part in its storage type."""
        if part.name in self.made:
            return self.made[part.name]
        whole: Array = self.file.read(part.name)
        return whole if part.rows is None else whole[part.rows]

    def is_same(self, name: str, other: str) -> bool:
        """Whether two tensors of the checkpoint are equal, byte for byte."""
        if self.file.tensors[name] != self.file.tensors.get(other):
            return False
        mine, theirs = (self.file.read(n).view(np.uint8) for n in (name, other))
        return bool(np.array_equal(mine, theirs))

    def _list_parts(self) -> tuple[str, dict[str, Part]]:
        params = self.drafter
        if isinstance(params, MedusaParams):
            return "medusa", self._list_medusa(params)
        if isinstance(params, ReDrafterParams):
            return "redrafter", self._list_redrafter(params)
        if isinstance(params, DFlashParams):
            return "dflash", self._list_net(params, params.net, DFLASH_NET, shares_head=True)
        if isinstance(params, MtpParams):
            return "mtp", self._list_mtp(params)
        if not isinstance(params, EagleParams):
            return "plain", self._list_model()
        if params.eagle3 is not None:
            return "eagle3", self._list_net(params, params.net, EAGLE_NET, shares_head=False)
        return "eagle1", self._list_net(params, params.net, EAGLE_NET, shares_head=True)

    def _list_model(self) -> dict[str, Part]:
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
        parts = {}
        for name in list_target_tensors(model):
            if name in TARGET_NAMES:
                parts[TARGET_NAMES[name]] = Part(name)
            else:
                own = name.removeprefix("transformer.")
                parts |= {f"model.{theirs}": part for theirs, part in name_layer(name, own, model)}
        return parts

    def _list_medusa(self, params: MedusaParams) -> dict[str, Part]:
        parts = {}
        for name in params.list_tensors(self.model):
            head, _, rest = name.removeprefix("medusa_heads.").partition(".")
            rest = rest.removeprefix("medusa_layers.")
            rest = f"{params.num_layers}.weight" if rest == "lm_head.weight" else rest
            parts[f"{head}.{rest}"] = Part(name)
        return parts

    def _list_redrafter(self, params: ReDrafterParams) -> dict[str, Part]:
        parts = {}
        for name in params.list_tensors(self.model):
            own = name.removeprefix("drafter.")
            if own == "lm_head.weight":
                own = f"lm_head.{params.num_layers}.weight"
            elif own.startswith("layers."):
                own = f"lm_head.{own.removeprefix('layers.')}"
            parts[own] = Part(name)
        return parts

    def _list_mtp(self, params: MtpParams) -> dict[str, Part]:
        """By the names of `head_form`: only GLM's tell an embedding and a head of its own."""
        net = params.make_net_model(self.model)
        found = self._list_net(params, net, MTP_NET, shares_head=True)
        has_own = not found.keys().isdisjoint(("embed_tokens.weight", HEAD, HEAD_BIAS))
        assert not (has_own and params.is_reversed), "MiMo's layout has no room for them"
        self.head_form = "mimo" if params.is_reversed else "glm" if has_own else "qwen"
        form = FORMS[self.head_form]
        prefix = form.prefix.format(layer=self.model.num_hidden_layers)
        starts = {"layers.0.": prefix + form.layer}
        starts |= {f"{OURS.get(own, own)}.": f"{prefix}{to}." for own, to in form.names.items()}
        return {
            starts[own] + name.removeprefix(own): part
            for name, part in found.items() for own in starts if name.startswith(own)
        }  # fmt: skip

    def _list_net(
        self, params: NetParams, net: ModelConfig, prefix: str, *, shares_head: bool
    ) -> dict[str, Part]:
        """The parts of a drafter with layers; what equals the target's is noted and left out."""
        names = {
            **{f"drafter.{own}.weight": f"{theirs}.weight" for own, theirs in OURS.items()},
            MARKOV_EMBEDDING: "markov_head.markov_w1.weight",
            MARKOV_HEAD: "markov_head.markov_w2.weight",
        }
        parts: dict[str, Part] = {}
        for name in params.list_tensors(self.model):
            if (first := find_first_copy(name)) != name:
                if not self.is_same(name, first):
                    raise SpecDecError(
                        f"{self.folder}: {name} differs from {first}",
                        "one drafter is exported: convert it again",
                    )
                continue
            own = name.removeprefix(prefix)
            if own.startswith("drafter.layers."):
                parts |= name_layer(name, own.removeprefix("drafter."), net)
            else:
                parts[names.get(own, own.removeprefix("drafter."))] = Part(name)
        head = HEAD if HEAD in self.file.tensors else EMBEDDING
        shared = {"embed_tokens.weight": EMBEDDING}
        if shares_head:
            shared |= {"lm_head.weight": head, HEAD_BIAS: HEAD_BIAS}
        for name, targets in shared.items():
            if name in parts and self.is_same(parts[name].name, targets):
                self.left_out[name] = "equals the target's, which is taken"
        if "fc.bias" in parts and not self.read(parts["fc.bias"]).any():
            self.left_out["fc.bias"] = "is zero"
        return {name: part for name, part in parts.items() if name not in self.left_out}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What is asked for. target: the name of the target in commands; place: of this folder."""

    settings: ExportSettings
    source: Source
    target: str
    place: str

    @property
    def eagle(self) -> EagleParams:
        """The parameters of an EAGLE drafter."""
        assert isinstance(self.source.drafter, EagleParams)
        return self.source.drafter

    @property
    def eagle3(self) -> Eagle3Params:
        """What an EAGLE-3 drafter has of its own."""
        assert self.eagle.eagle3 is not None
        return self.eagle.eagle3

    @property
    def dflash(self) -> DFlashParams:
        """The parameters of a DFlash drafter."""
        assert isinstance(self.source.drafter, DFlashParams)
        return self.source.drafter

    @property
    def is_dspark(self) -> bool:
        """Whether it is a DFlash drafter of DSpark's form."""
        drafter = self.source.drafter
        return isinstance(drafter, DFlashParams) and bool(
            drafter.markov_rank or drafter.sample_from_anchor
        )

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens per step."""
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
            # A folder is converted here for one; its config does not say how many were trained.
            return drafter.num_eagle_layers if drafter.num_eagle_layers > 1 else MASK_DEPTH
        return DEFAULT_DRAFT_TOKENS

    def list_tensors(self) -> dict[str, Part]:
        """The tensors; of a reduced vocabulary also `t2d` [V], which tells the drafted tokens."""
        tensors = dict(self.source.parts)
        if OFFSETS in self.source.parts:
            offsets = self.source.read(self.source.parts[OFFSETS])
            drafted = np.zeros(self.source.model.vocab_size, np.uint8)
            drafted[offsets + np.arange(len(offsets))] = 1
            self.source.made["t2d"], tensors["t2d"] = drafted, Part("t2d")
        return tensors


def list_entered(params: Eagle3Params | DFlashParams) -> list[int]:
    """The layers that are entered by what is read; it comes out of the ones before them."""
    return [layer + 1 for layer in params.aux_layers]


TITLES = {
    "plain": "a model", "medusa": "Medusa heads", "redrafter": "a ReDrafter drafter",
    "mtp": "a head for multi-token prediction",
    "eagle1": "an EAGLE-1 drafter", "eagle3": "an EAGLE-3 drafter", "dflash": "a DFlash drafter",
}  # fmt: skip


def name_layer(name: str, own: str, model: ModelConfig) -> Iterable[tuple[str, Part]]:
    """Hugging Face's names and parts of `layers.N.MODULE.weight`, the checkpoint's tensor `name`.

    Raises SpecDecError for a module without a name there: nothing is left behind silently.
    """
    prefix, layer, rest = own.split(".", 2)
    module, _, kind = rest.rpartition(".")
    if module == "attention.qkv":
        queries, keys = model.num_attention_heads, model.num_key_value_heads
        counts = [queries, keys, keys, queries][: 2 + model.query_parts]  # of heads; gates are last
        heads = np.arange(sum(counts) * model.head_size).reshape(-1, model.head_size)
        q, k, v, *gates = np.split(heads, np.cumsum(counts)[:-1])
        parts = {"q": np.stack((q, *gates), axis=1), "k": k, "v": v}  # a head's gates follow it
        return [
            (f"{prefix}.{layer}.self_attn.{key}_proj.{kind}", Part(name, rows.reshape(-1)))
            for key, rows in parts.items()
        ]
    if module not in LAYER:
        raise SpecDecError(f"{name} has no name in Hugging Face's layers", "convert it again")
    return [(f"{prefix}.{layer}.{LAYER[module]}.{kind}", Part(name))]
