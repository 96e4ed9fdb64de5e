"""MTP assistant: a small drafter that reads the target's own keys and values, as Gemma 4's does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from specdec.errors import Problems
from specdec.model.architectures import Architecture
from specdec.model.bounds import MAX_DRAFT_TOKENS, MAX_HEAD_SIZE, MAX_SIZE
from specdec.model.config import FULL, SLIDING, ModelConfig
from specdec.model.layer_sizes import LayerSizes
from specdec.model.tensors import (
    ASSISTANT_NET,
    CENTROIDS,
    HEAD,
    TOKEN_ORDER,
    TOKEN_ROWS,
    Shard,
    TensorSpec,
    list_layer_tensors,
    list_norm,
)
from specdec.options import as_options, list_given, setting

from .base import (
    POSITIVE,
    USE_ITS_DRAFTER,
    Method,
    Rule,
    bounds,
    check,
    check_unknown,
    count,
    number,
    read_fields,
    whole_number,
)
from .net import NET_RULES, NetParams

ARCHITECTURE = "SpecDecMtpAssistantForCausalLM"
ACTIVATION = "gelu_pytorch_tanh"
# A Gemma 4's layers, whose embedding is the target's.
ARITHMETIC = Architecture(
    activations=(ACTIVATION,), inner_norms=True, qk_norm=True, qkv_bias=False, dense_bias=False,
    mlp_bias=False, norms_values=True, scales_layers=True,
)  # fmt: skip
SIZES = ("full_head_size", "full_num_kv_heads")
TYPES = Rule(
    f"a list of {SLIDING} and {FULL}",
    lambda value: isinstance(value, list) and {SLIDING, FULL} >= {*map(str, value)},
)
RULES = NET_RULES | {
    "hidden_act": Rule(repr(ACTIVATION), lambda value: value == ACTIVATION),
    "layer_types": TYPES,
    "sliding_window": whole_number(1, MAX_SIZE),
    "rope_local_base_freq": POSITIVE,
    "full_head_size": whole_number(1, MAX_HEAD_SIZE),
    "full_num_kv_heads": whole_number(1, MAX_SIZE),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpAssistantParams(NetParams):
    """Gemma 4's assistant: layers with queries alone, which read the target's keys and values.

    https://huggingface.co/docs/transformers/model_doc/gemma4_assistant describes it.

    net: the layers, with the target's vocabulary. target_hidden_size: numbers of the states and
    embeddings that are read. num_centroids: of the output head, each of which stands for as many
    tokens; 0 where the head has all tokens. num_best_centroids: whose tokens get logits.
    max_draft_len: most draft tokens of a tree.
    """

    net: ModelConfig
    target_hidden_size: int = count(1, MAX_SIZE)
    num_centroids: int = count(0, MAX_SIZE, default=0)
    num_best_centroids: int = count(0, MAX_SIZE, default=0)
    max_draft_len: int = count(1, MAX_DRAFT_TOKENS)

    TITLE: ClassVar[str] = "MTP assistant"
    KEY: ClassVar[str] = "mtp_assistant"
    NET: ClassVar[str] = "mtp_assistant_net_config"
    NET_ARCHITECTURE: ClassVar[str] = "Gemma4ForCausalLM"
    RULES: ClassVar[Mapping[str, Rule]] = RULES

    @property
    def draft_vocab_size(self) -> int:
        return self.net.vocab_size

    @property
    def num_scored_tokens(self) -> int:
        """Tokens that get a logit in a pass."""
        if not self.num_centroids:
            return self.net.vocab_size
        return self.num_best_centroids * (self.net.vocab_size // self.num_centroids)

    @property
    def max_draft_depth(self) -> int:
        return self.max_draft_len

    @classmethod
    def make_net(cls, values: Mapping[str, Any], dtype: str) -> ModelConfig:
        fields = {name: values[name] for name in cls.RULES if name not in SIZES}
        fields["layer_types"] = tuple(fields["layer_types"])
        return ModelConfig(
            architecture=cls.NET_ARCHITECTURE, dtype=dtype, own_arithmetic=ARITHMETIC,
            query_pre_attn_scalar=1.0, share_embedding_table=True,
            layer_sizes=LayerSizes(**{name: values[name] for name in SIZES}), **fields,
        )  # fmt: skip

    def describe_net(self) -> dict[str, Any]:
        assert self.net.layer_sizes is not None
        sizes = {name: getattr(self.net.layer_sizes, name) for name in SIZES}
        values = {name: getattr(self.net, name) for name in self.RULES if name not in SIZES}
        return values | sizes | {"layer_types": list(self.net.layer_types or ())}

    def find_problems(self, *, hidden_size: int, vocab_size: int, tp_size: int) -> Problems:
        problems = self.compare_sizes(vocab_size=vocab_size)
        per_centroid = max(1, self.num_centroids)
        problems += Problems.from_table(
            (self.target_hidden_size != hidden_size,
             f"the {self.TITLE} reads states of {self.target_hidden_size} numbers, the target's"
             f" hidden_size is {hidden_size}", USE_ITS_DRAFTER),
            (tp_size > 1,
             f"an {self.TITLE} reads the target's keys and values, of which each of tp_size="
             f"{tp_size} ranks holds a part", "use --tp-size 1, or another method"),
            (self.net.vocab_size % per_centroid != 0,
             f"the {self.TITLE}'s {self.net.vocab_size} tokens do not divide among"
             f" {self.num_centroids} centroids", USE_ITS_DRAFTER),
            (bool(self.num_centroids) != bool(self.num_best_centroids)
             or self.num_best_centroids > self.num_centroids,
             f"the {self.TITLE} has {self.num_centroids} centroids, of which"
             f" {self.num_best_centroids} are the best ones", USE_ITS_DRAFTER),
        )  # fmt: skip
        return problems

    def find_reading_problems(self, model: ModelConfig) -> Problems:
        """List why the layers cannot read the keys and values of a target's."""
        problems = Problems()
        try:
            sources = self.list_sources(model)
        except ValueError:
            kinds = sorted(set(self.net.layer_types or ()))
            return problems.add(
                f"the {self.TITLE} reads the keys and values of a target's layers of"
                f" {' and '.join(kinds)}, and {model.architecture} has none of one of them",
                USE_ITS_DRAFTER,
            )
        for index, source in enumerate(sources):
            own, read = self.net.resize(index), model.resize(source)
            for name in ("head_size", "num_key_value_heads"):
                size, target_size = getattr(own, name), getattr(read, name)
                if size != target_size:
                    problems.add(
                        f"the {self.TITLE}'s layer {index} reads keys with {name}={size}, those of"
                        f" the target's layer {source} have {target_size}",
                        USE_ITS_DRAFTER,
                    )
        return problems

    def list_sources(self, model: ModelConfig) -> list[int]:
        """List the target's layer whose keys and values each layer reads: the last of its type.

        Only layers with keys of their own count. Raises ValueError where there is none.
        """
        types = model.layer_types or ()
        return [
            max(index for index in model.attending_layers if types and types[index] == kind)
            for kind in self.net.layer_types or ()
        ]

    def list_tensors(self, model: ModelConfig) -> dict[str, TensorSpec]:
        net = self.make_net_model(model)
        shapes: dict[str, tuple[int, ...]] = {
            "drafter.pre_projection.weight": (net.hidden_size, 2 * self.target_hidden_size),
            "drafter.post_projection.weight": (self.target_hidden_size, net.hidden_size),
        }
        for layer in range(net.num_hidden_layers):
            for name, spec in list_layer_tensors(net, layer).items():
                shape = spec.shape
                if name == "attention.k_layernorm.weight":
                    continue
                if name == "attention.qkv.weight":
                    sizes = net.resize(layer)
                    shape = (sizes.num_attention_heads * sizes.head_size, net.hidden_size)
                    name = "attention.q.weight"
                shapes[f"drafter.layers.{layer}.{name}"] = shape
        shapes |= {name: spec.shape for name, spec in list_norm(net, "drafter.ln_f").items()}
        table = (net.vocab_size, net.hidden_size)
        if self.num_centroids:
            shapes |= {
                TOKEN_ROWS: table, CENTROIDS: (self.num_centroids, net.hidden_size),
                TOKEN_ORDER: (net.vocab_size,),
            }  # fmt: skip
        else:
            shapes[HEAD] = table
        return {
            f"{ASSISTANT_NET}{name}": TensorSpec(shape, Shard.REPLICATED)
            for name, shape in shapes.items()
        }

    def to_checkpoint(self) -> dict[str, Any]:
        names = ("target_hidden_size", "num_centroids", "num_best_centroids")
        return {
            self.KEY: {name: getattr(self, name) for name in names},
            self.NET: self.describe_net(), "max_draft_len": self.max_draft_len,
        }  # fmt: skip

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> MtpAssistantParams:
        key = cls.KEY
        check_unknown((k for k in config if key in k), {key, cls.NET})
        check("max_draft_len", config.get("max_draft_len"), whole_number(1, MAX_DRAFT_TOKENS))
        section = config.get(key)
        if isinstance(section, dict):
            fields = {field.name for field in dataclasses.fields(cls)}
            check_unknown(section, fields - {"net", "max_draft_len"})
            section = section | {"max_draft_len": config["max_draft_len"]}
        values = read_fields(cls, section, key=key)
        net = cls.read_net(config)
        Problems((f"{cls.NET}: {fact}", hint) for fact, hint in net.find_problems()).raise_all()
        return cls(net=net, **values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpAssistantConvert:
    """Options of specdec-convert."""

    mtp_assistant_model_dir: str | None = setting(
        metavar="DRAFTER", help="A Gemma 4's assistant, which drafts for it: a folder or Hub id."
    )
    mtp_assistant_max_draft_len: int | None = setting(
        **bounds(MtpAssistantParams, "max_draft_len"), metavar="N",
        help="Most draft tokens in a step of an engine with an MTP assistant; 8 if not given.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpAssistantDraft:
    """Options of every command that decodes: how trees grow; None lets the engine choose."""

    mtp_assistant_tokens: int | None = number(
        help="Draft tokens in a step of an engine with an MTP assistant, at most."
    )
    mtp_assistant_top_k: int | None = setting(
        minimum=1, metavar="K",
        help="How many tokens an MTP assistant goes on from at each depth; 1: a chain.  [default:"
        " 1]",
    )  # fmt: skip


def read_options(settings: Any) -> MtpAssistantDraft | None:
    """Return how trees are to grow, None where nothing is asked for."""
    is_asked = list_given(settings, MtpAssistantDraft)
    return as_options(settings, MtpAssistantDraft) if is_asked else None


METHOD = Method(
    name="mtp_assistant",
    title="MTP assistant",
    paper="https://huggingface.co/docs/transformers/model_doc/gemma4_assistant",
    mode="mtp_assistant",
    source="checkpoint",
    params=MtpAssistantParams,
    architectures=(ARCHITECTURE,),
    own_architectures={ARCHITECTURE: "MTP assistant"},
    folder="mtp_assistant_model_dir",
    read=read_options,
    options={"convert": MtpAssistantConvert, "draft": MtpAssistantDraft},
)
