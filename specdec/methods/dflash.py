"""DFlash: layers of the drafter's own that draft a whole block of tokens in one pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from specdec.errors import Problems
from specdec.model.bounds import MAX_DRAFT_TOKENS, MAX_MODULES, MAX_SIZE
from specdec.model.config import ModelConfig
from specdec.model.tensors import (
    DFLASH_NET,
    HEAD_BIAS,
    MARKOV_EMBEDDING,
    MARKOV_HEAD,
    Shard,
    TensorSpec,
    list_norm,
)
from specdec.options import as_options, list_given, setting

from .base import (
    FLAG,
    OBJECT,
    POSITIVE,
    USE_ITS_DRAFTER,
    Method,
    Rule,
    bounds,
    check,
    check_unknown,
    count,
    number,
    or_null,
    read_fields,
    share,
    whole_number,
)
from .net import NET_RULES, NetParams

ARCHITECTURE = "SpecDecDFlashForCausalLM"
RULES = NET_RULES | {
    "attn_bias": FLAG,
    "sliding_window": or_null(whole_number(1, MAX_SIZE), whole_number(1, MAX_SIZE).words),
    "layer_types": Rule("a list or null", lambda value: value is None or isinstance(value, list)),
    "embedding_multiplier": POSITIVE,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashParams(NetParams):
    """DFlash (https://arxiv.org/abs/2602.06036): a block of mask tokens, filled in one pass.

    net: the layers, with the target's vocabulary; its embedding_multiplier is of the rows of the
    embedding. aux_layers: the target's layers, from 0, whose outputs are read, rising. block_size:
    tokens of a pass, the last emitted one first. mask_token_id: the others. sample_from_anchor:
    each place of a block drafts the token after it; if false, all but the first their own.
    draft_vocab_size: tokens that can be drafted. max_draft_len: most draft tokens of a tree.
    markov_rank: DSpark's (https://github.com/deepseek-ai/DeepSpec), whose head adds what a place's
    logits owe to the token in the place before; 0 for DFlash, whose places know none.
    """

    net: ModelConfig
    aux_layers: tuple[int, ...]
    block_size: int = count(1, MAX_DRAFT_TOKENS)
    mask_token_id: int = count(0, MAX_SIZE)
    draft_vocab_size: int = count(1, MAX_SIZE)
    max_draft_len: int = count(1, MAX_DRAFT_TOKENS)
    sample_from_anchor: bool
    markov_rank: int = count(0, MAX_SIZE, default=0)

    TITLE: ClassVar[str] = "DFlash"
    KEY: ClassVar[str] = "dflash"
    NET: ClassVar[str] = "dflash_net_config"
    NET_ARCHITECTURE: ClassVar[str] = "Qwen3ForCausalLM"
    RULES: ClassVar[Mapping[str, Rule]] = RULES

    @property
    def num_positions(self) -> int:
        """Tokens that a pass drafts, one after another."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def max_draft_depth(self) -> int:
        return min(self.num_positions, self.max_draft_len)

    def find_problems(self, *, hidden_size: int, vocab_size: int, tp_size: int) -> Problems:
        problems = self.compare_sizes(vocab_size=vocab_size, hidden_size=hidden_size)
        for name, value, limit in (
            ("mask_token_id", self.mask_token_id, vocab_size - 1),
            ("draft_vocab_size", self.draft_vocab_size, vocab_size),
        ):
            if value > limit and self.net.vocab_size == vocab_size:
                problems.add(
                    f"the DFlash drafter's {name} is {value}, the target's vocab_size {vocab_size}",
                    USE_ITS_DRAFTER,
                )
        return self.add_uneven(problems, tp_size)

    def list_tensors(self, model: ModelConfig) -> dict[str, TensorSpec]:
        tensors = self.list_net_tensors(model, len(self.aux_layers) * model.hidden_size)
        tensors |= list_norm(self.make_net_model(model), "drafter.hidden_norm")
        if model.arithmetic.head_bias and self.draft_vocab_size >= model.vocab_size:
            tensors[HEAD_BIAS] = TensorSpec((self.draft_vocab_size,), Shard.VOCAB)
        if rank := self.markov_rank:
            tensors[MARKOV_EMBEDDING] = TensorSpec((model.vocab_size, rank), Shard.REPLICATED)
            tensors[MARKOV_HEAD] = TensorSpec((self.draft_vocab_size, rank), Shard.VOCAB)
        return {f"{DFLASH_NET}{name}": spec for name, spec in tensors.items()}

    def to_checkpoint(self) -> dict[str, Any]:
        section = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del section["net"]
        max_draft_len = section.pop("max_draft_len")
        section["aux_layers"] = list(self.aux_layers)
        if not self.markov_rank:
            del section["markov_rank"]
        return {self.KEY: section, self.NET: self.describe_net(), "max_draft_len": max_draft_len}

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> DFlashParams:
        key, section = cls.KEY, config.get(cls.KEY)
        check(key, section, OBJECT)
        assert isinstance(section, dict)
        check_unknown((k for k in config if "dflash" in k), {cls.KEY, cls.NET})
        check_unknown(section, {f.name for f in dataclasses.fields(cls)} - {"net", "max_draft_len"})
        check("max_draft_len", config.get("max_draft_len"), whole_number(1, MAX_DRAFT_TOKENS))
        values = read_fields(cls, section | {"max_draft_len": config["max_draft_len"]}, key=key)
        net = cls.read_net(config)
        Problems((f"{cls.NET}: {fact}", hint) for fact, hint in net.find_problems()).raise_all()
        params = cls(net=net, **values)
        minimum = 1 + (params.num_positions < params.block_size)
        check(f"{key}.block_size", params.block_size, whole_number(minimum, MAX_DRAFT_TOKENS))
        return params


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConvert:
    """Options of specdec-convert."""

    dflash_model_dir: str | None = setting(
        metavar="DRAFTER", help="A DFlash drafter: a folder or Hub id."
    )
    dflash_max_draft_len: int | None = setting(
        **bounds(DFlashParams, "max_draft_len"), metavar="N",
        help="Most draft tokens in a step of a DFlash engine; 63 if not given.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashDraft:
    """Options of every command that decodes: how trees grow; None lets the engine choose."""

    dflash_tokens: int | None = number(
        help="Draft tokens in a step of a DFlash engine.  [default on a CPU: 20, with"
        " --draft-budget fixed 7, or a block if that is more; elsewhere the engine's most]"
    )
    dflash_top_k: int | None = setting(
        minimum=1, metavar="K",
        help="How many tokens a DFlash engine considers for each place of a block; 1: a chain."
        "  [default: 4]",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashTrain:
    """Options of specdec-train."""

    dflash_num_layers: int = setting(
        1, help="Decoder layers of the DFlash drafter.", minimum=1, maximum=MAX_MODULES
    )
    dflash_intermediate_size: int | None = number(
        maximum=MAX_SIZE,
        help="Channels inside the MLP of the DFlash drafter's layers; if not given, those of"
        " --start-from's, or the target's.",
    )
    dflash_block_size: int = setting(
        8, help="Tokens of a DFlash block: the last one emitted and those drafted after it.",
        minimum=2, maximum=MAX_DRAFT_TOKENS,
    )  # fmt: skip
    dflash_num_target_layers: int = setting(
        5, help="How many of the target's layers a DFlash drafter reads, evenly spread.", minimum=1,
        maximum=MAX_MODULES,
    )  # fmt: skip
    dflash_num_anchors: int = setting(
        64, help="Blocks of each row that are trained on, begun at places drawn at random.",
        minimum=1,
    )  # fmt: skip
    dflash_loss_decay: float = share(
        0.8, help="Weight of each place of a DFlash block relative to the one before."
    )
    dflash_markov_rank: int = setting(
        0,
        help="DSpark: the rank of the head that tells a place of a DFlash block of the token"
        " before it; 0: none.", minimum=0, maximum=MAX_SIZE,
    )  # fmt: skip
    dflash_mask_token_id: int | None = setting(
        minimum=0, metavar="N",
        help="The token that stands where a DFlash block is to be filled; if not given, the"
        " target's padding token, or its end token where that has no embedding.",
    )  # fmt: skip


def read_options(settings: Any) -> DFlashDraft | None:
    """Return how trees are to grow, None where nothing is asked for."""
    return as_options(settings, DFlashDraft) if list_given(settings, DFlashDraft) else None


METHOD = Method(
    name="dflash",
    title="DFlash",
    paper="https://arxiv.org/abs/2602.06036",
    mode="dflash",
    source="checkpoint",
    params=DFlashParams,
    architectures=(ARCHITECTURE,),
    own_architectures={ARCHITECTURE: "DFlash"},
    folder="dflash_model_dir",
    read=read_options,
    options={"convert": DFlashConvert, "draft": DFlashDraft, "train": DFlashTrain},
    training={"learning_rate": 1e-3, "self_distillation": 1.0},
)
