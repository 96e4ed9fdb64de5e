"""EAGLE: decoder layers of the drafter's own, which draft from the target's hidden states.

EAGLE-1, -2 and -3 are parameters of one method. EAGLE-2 is a way of growing EAGLE-1's trees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from specdec.errors import Problems, UsageError
from specdec.model.bounds import MAX_DRAFT_TOKENS, MAX_MODULES, MAX_SIZE
from specdec.model.config import ModelConfig
from specdec.model.tensors import HEAD_BIAS, Shard, TensorSpec, list_norm
from specdec.options import as_options, list_given, name_flag, setting

from .base import (
    USE_ITS_DRAFTER,
    Choices,
    Method,
    Rule,
    bounds,
    check,
    check_product,
    check_unknown,
    count,
    number,
    parse_paths,
    read_fields,
    share,
)
from .net import NetParams

# Ours: TensorRT-LLM's engine path has EAGLE-1 for Llamas alone and no EAGLE-3, and is to know that
# these are none of its own.
OWN_ARCHITECTURE, EAGLE3_ARCHITECTURE = "SpecDecEagleForCausalLM", "Eagle3ForCausalLM"
# Of P-EAGLE: what stands for the outputs of the target's layers where a token is not known yet.
MASK_HIDDEN = "drafter.mask_hidden"
MASK_DEPTH = 8  # tokens that speculators trains a pass to draft
# Facts of `eagle_config` in a published folder, for every EAGLE-3 drafter that is known here.
EAGLE3_FIXED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Params:
    """Parameters that EAGLE-3 (https://arxiv.org/abs/2503.01840) has and EAGLE-1 has not.

    aux_layers: the target's layers, from 0, whose outputs are read, rising. draft_vocab_size:
    tokens that can be drafted. norm_before_residual: whether the first layer's attention is added
    to the normed state. The others are EAGLE-3.1's: norm_before_fc norms what is read of the target
    as a whole, fc_norm each layer's part, and norm_output makes the normed state the next feature.
    mask_token_id: P-EAGLE's (https://arxiv.org/abs/2602.01469), which stands, with a feature that
    was learned, where a token is not known yet, so that one pass drafts all; None for EAGLE-3.
    """

    aux_layers: tuple[int, ...]
    draft_vocab_size: int = count(1, MAX_SIZE)
    norm_before_residual: bool
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token_id: int | None = count(0, MAX_SIZE, default=None)

    NEWER: ClassVar[tuple[str, ...]] = ("norm_before_fc", "fc_norm", "norm_output")

    def list_read_norms(self) -> list[str]:
        """List the norms of what `fc` reads: none, one of all, or one of each layer's part."""
        if self.norm_before_fc:
            return ["input_norm.weight"]
        num_parts = len(self.aux_layers) if self.fc_norm else 0
        return [f"fc_norm.{layer}.weight" for layer in range(num_parts)]

    def to_checkpoint(self) -> dict[str, Any]:
        """Return the keys of the object in a checkpoint's config.json."""
        config = dataclasses.asdict(self) | {"aux_layers": list(self.aux_layers)}
        if self.mask_token_id is None:
            del config["mask_token_id"]
        return {key: value for key, value in config.items() if value or key not in self.NEWER}

    @classmethod
    def from_checkpoint(cls, key: str, config: object) -> Eagle3Params:
        """Read the object `key`; raise SpecDecError for what is wrong."""
        params = cls(**read_fields(cls, config, key=key))
        check(
            f"{key}.fc_norm", True,
            Rule(
                "false where norm_before_fc is true",
                lambda _: not (params.fc_norm and params.norm_before_fc),
            ),
        )  # fmt: skip
        assert isinstance(config, dict)
        check_unknown(config, {field.name for field in dataclasses.fields(cls)})
        return params


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleParams(NetParams):
    """EAGLE (https://arxiv.org/abs/2401.15077): decoder layers that draft from features.

    net: the layers, with the target's vocabulary. num_eagle_layers: the depth of a draft tree.
    max_non_leaves_per_layer: most nodes of a level that have children. max_draft_len: most draft
    tokens of a tree. eagle3: None for EAGLE-1, whose weights EAGLE-2
    (https://arxiv.org/abs/2406.16858) shares.
    """

    net: ModelConfig
    num_eagle_layers: int = count(1, MAX_MODULES)
    max_non_leaves_per_layer: int = count(1, MAX_DRAFT_TOKENS)
    max_draft_len: int = count(1, MAX_DRAFT_TOKENS)
    eagle3: Eagle3Params | None = None

    NUMBERS: ClassVar[tuple[str, ...]] = (
        "num_eagle_layers", "max_non_leaves_per_layer", "max_draft_len",
    )  # fmt: skip
    TITLE: ClassVar[str] = "EAGLE"
    NET: ClassVar[str] = "eagle_net_config"
    EAGLE3: ClassVar[str] = "eagle3"

    @property
    def num_nets(self) -> int:
        """Copies of the net in a checkpoint: TensorRT-LLM reads one for each level of the tree."""
        return 1 if self.eagle3 else self.num_eagle_layers

    @property
    def draft_vocab_size(self) -> int:
        return self.eagle3.draft_vocab_size if self.eagle3 else self.net.vocab_size

    @property
    def mask_token_id(self) -> int | None:
        """Return the token that stands for those not drafted yet; None with a pass a level."""
        return self.eagle3.mask_token_id if self.eagle3 else None

    def shorten(self, size: int) -> EagleParams:
        """Return the parameters with a draft vocabulary of `size` tokens."""
        if self.eagle3 is not None:
            eagle3 = dataclasses.replace(self.eagle3, draft_vocab_size=size)
            return dataclasses.replace(self, eagle3=eagle3)
        return dataclasses.replace(self, net=dataclasses.replace(self.net, vocab_size=size))

    @property
    def max_draft_depth(self) -> int:
        return min(self.num_eagle_layers, self.max_draft_len)

    def find_problems(self, *, hidden_size: int, vocab_size: int, tp_size: int) -> Problems:
        sizes = {"vocab_size": vocab_size}
        if self.eagle3 is None:
            sizes["hidden_size"] = hidden_size
        problems = self.compare_sizes(**sizes)
        if self.draft_vocab_size > vocab_size == self.net.vocab_size:
            problems.add(
                f"the EAGLE drafter's draft_vocab_size={self.draft_vocab_size} exceeds the"
                f" target's vocab_size={vocab_size}",
                USE_ITS_DRAFTER,
            )
        if (self.mask_token_id or 0) >= vocab_size:
            problems.add(
                f"the EAGLE drafter's mask_token_id is {self.mask_token_id}, the target's"
                f" vocab_size {vocab_size}",
                USE_ITS_DRAFTER,
            )
        return self.add_uneven(problems, tp_size)

    def list_tensors(self, model: ModelConfig) -> dict[str, TensorSpec]:
        """Map canonical names to every tensor; all nets are alike.

        The first layer of EAGLE-1 has no input norm: it reads what `fc` makes of embedding and
        feature. That of EAGLE-3 reads both side by side, each normed.
        """
        eagle3, hidden = self.eagle3, self.net.hidden_size
        first_layer = "drafter.layers.0."
        if eagle3 is None:
            tensors = self.list_net_tensors(model, 2 * hidden)
            tensors["drafter.fc.bias"] = TensorSpec((hidden,), Shard.ROWS)
            left_out = (f"{first_layer}input_layernorm.", "drafter.ln_f.")
            tensors = {n: spec for n, spec in tensors.items() if not n.startswith(left_out)}
            if model.arithmetic.head_bias:  # its head is the target's
                tensors[HEAD_BIAS] = TensorSpec((self.draft_vocab_size,), Shard.VOCAB)
        else:
            width = len(eagle3.aux_layers) * model.hidden_size
            tensors = self.list_net_tensors(model, width)
            for name in (norms := eagle3.list_read_norms()):
                tensors[f"drafter.{name}"] = TensorSpec((width // len(norms),), Shard.REPLICATED)
            if eagle3.mask_token_id is not None:
                tensors[MASK_HIDDEN] = TensorSpec((1, 1, width), Shard.REPLICATED)
            for name, spec in tensors.items():
                if spec.shard is Shard.QKV and name.startswith(first_layer):
                    tensors[name] = dataclasses.replace(spec, shape=(spec.shape[0], 2 * hidden))
            tensors |= list_norm(self.make_net_model(model), f"{first_layer}hidden_norm")
        return {
            f"eagle_nets.{index}.{name}": spec
            for index in range(self.num_nets)
            for name, spec in tensors.items()
        }

    def to_checkpoint(self) -> dict[str, Any]:
        config: dict[str, Any] = {name: getattr(self, name) for name in self.NUMBERS}
        config[self.NET] = self.describe_net()
        if self.eagle3 is not None:
            config[self.EAGLE3] = self.eagle3.to_checkpoint()
        return config

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> EagleParams:
        numbers = read_fields(cls, config)
        depth, num_inner = numbers["num_eagle_layers"], numbers["max_non_leaves_per_layer"]
        check_product(
            f"{depth} EAGLE layers of {num_inner} non-leaves", depth * num_inner, MAX_DRAFT_TOKENS
        )
        check_unknown((k for k in config if "eagle" in k), {*cls.NUMBERS, cls.NET, cls.EAGLE3})
        is_third = config.get("architecture") == EAGLE3_ARCHITECTURE
        words = f"what {config.get('architecture')} has"
        rule = Rule(words, lambda value: is_third == (value is not None))
        check(cls.EAGLE3, config.get(cls.EAGLE3), rule)
        net = cls.read_net(config)
        if not is_third:
            description = f"{depth} EAGLE nets of {net.num_hidden_layers} layers"
            check_product(description, depth * net.num_hidden_layers, MAX_MODULES)
        eagle3 = Eagle3Params.from_checkpoint(cls.EAGLE3, config[cls.EAGLE3]) if is_third else None
        return cls(net=net, eagle3=eagle3, **numbers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConvert:
    """Options of specdec-convert."""

    eagle_model_dir: str | None = setting(
        metavar="DRAFTER", help="A drafter of EAGLE-1, 2 or 3: a folder or Hub id."
    )
    max_draft_len: int | None = setting(
        **bounds(EagleParams, "max_draft_len"), metavar="N",
        help="Most draft tokens in a step of an EAGLE engine; 63 if not given.",
    )  # fmt: skip
    num_eagle_layers: int | None = setting(
        **bounds(EagleParams, "num_eagle_layers"), metavar="N",
        help="Depth of an EAGLE engine's draft trees; 4 if not given.",
    )  # fmt: skip
    max_non_leaves_per_layer: int | None = setting(
        **bounds(EagleParams, "max_non_leaves_per_layer"), metavar="N",
        help="Most nodes with children in a level of an EAGLE engine's draft trees; 10 if not"
        " given.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleDraft:
    """Options of every command that decodes."""

    eagle_choices: str | None = setting(
        takes_list=True,
        metavar="JSON",
        help="A static tree of drafts, as a list of paths of ranks: [[0],[0,0],[1]].",
    )
    eagle_use_dynamic_tree: bool = setting(
        False, help="Grow each tree where the drafter is sure, as EAGLE-2 does."
    )
    eagle_dynamic_tree_max_top_k: int | None = setting(
        minimum=1, metavar="K",
        help="How many nodes of each level a dynamic tree continues, and with how many tokens"
        " each.",
    )  # fmt: skip
    eagle_tree_tokens: int | None = number(help="Draft tokens in a dynamic tree.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleTrain:
    """Options of specdec-train."""

    eagle_version: str = setting(
        "1", help="1: EAGLE-1 and EAGLE-2, for any engine; 3: EAGLE-3, for the torch engine.",
        choices=("1", "3"),
    )  # fmt: skip
    eagle_num_layers: int = setting(
        1, help="Decoder layers of the EAGLE drafter.", minimum=1, maximum=MAX_MODULES
    )
    eagle_intermediate_size: int | None = number(
        maximum=MAX_SIZE,
        help="Channels inside the MLP of the EAGLE drafter's layers; if not given, those of"
        " --start-from's, or the target's.",
    )
    eagle_num_steps: int = setting(
        3, help="Draft steps in a row that are trained; EAGLE-1 has 1.", minimum=1,
        maximum=MAX_DRAFT_TOKENS,
    )  # fmt: skip
    eagle_start: str = setting(
        "least-squares",
        help="First weights: a least-squares fit to the target's states of some rows, which saves"
        " hundreds of thousands of tokens of training, or random.",
        choices=("least-squares", "random"),
    )  # fmt: skip
    eagle_loss_decay: float = share(
        0.9, help="Weight of each EAGLE draft step relative to the one before."
    )
    eagle_token_weight: float = setting(
        0.1, help="EAGLE-1: weight of the token loss, relative to the feature loss.", minimum=0,
        maximum=1000,
    )  # fmt: skip
    eagle_noise: float = setting(
        0.2, help="EAGLE-1: width of the uniform noise added to the features.", minimum=0,
        maximum=1000,
    )  # fmt: skip
    eagle_bias: bool = setting(True, help="EAGLE-1: give `fc` a bias, which vLLM has no room for.")
    eagle_draft_vocab_size: str = setting(
        "auto",
        help="EAGLE-3: draft the N most frequent tokens of the data alone; full: all; auto: those"
        " that cover 99% of the data, or all where it is too small to say or --self-distillation is"
        " not 1.", metavar="N|auto|full",
    )  # fmt: skip
    eagle_norm_before_fc: bool = setting(
        False, help="EAGLE-3: norm what is read of the target, all layers as one."
    )
    eagle_fc_norm: bool = setting(
        False, help="EAGLE-3: norm what is read of the target, each layer by itself."
    )
    eagle_norm_output: bool = setting(
        False, help="EAGLE-3: a step reads the normed state of the one before."
    )
    eagle_parallel: bool = setting(
        False,
        help="P-EAGLE: an EAGLE-3 drafter that drafts all its steps in one pass, from mask tokens.",
    )  # fmt: skip
    eagle_mask_token_id: int | None = setting(
        minimum=0, metavar="N",
        help="P-EAGLE: the token that stands where one is not known yet; if not given, the target's"
        " padding token, or its end token where that has no embedding.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleOptions:
    """A static tree, or how a dynamic one grows; None where the engine is to choose."""

    choices: Choices | None = None
    top_k: int | None = None
    num_tokens: int | None = None


def read_options(settings: Any) -> EagleOptions | None:
    """Return the trees that are asked for, None where none are; raise UsageError."""
    tree, given_options = as_options(settings, EagleDraft), list_given(settings, EagleDraft)
    if not given_options:
        return None
    if tree.eagle_choices is None:
        return EagleOptions(
            top_k=tree.eagle_dynamic_tree_max_top_k, num_tokens=tree.eagle_tree_tokens
        )
    if len(given_options) > 1:
        raise UsageError(
            f"{name_flag(given_options[0])} gives a static tree,"
            f" {name_flag(given_options[1])} a dynamic one",
            "leave one of them out",
        )
    return EagleOptions(choices=parse_paths(tree.eagle_choices, "--eagle-choices"))


METHOD = Method(
    name="eagle",
    title="EAGLE",
    paper="https://arxiv.org/abs/2401.15077",
    mode="eagle",
    source="checkpoint",
    params=EagleParams,
    architectures=("EagleForCausalLM", OWN_ARCHITECTURE, EAGLE3_ARCHITECTURE),
    own_architectures={OWN_ARCHITECTURE: "EAGLE-1", EAGLE3_ARCHITECTURE: "EAGLE-3"},
    folder="eagle_model_dir",
    read=read_options,
    options={"convert": EagleConvert, "draft": EagleDraft, "train": EagleTrain},
    training={"learning_rate": 1e-4, "self_distillation": 1.0},
)
