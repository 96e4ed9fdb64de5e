"""Medusa: heads on the target's last hidden state, each of which drafts one position ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from specdec.errors import Problems, UsageError
from specdec.model.bounds import MAX_DRAFT_TOKENS, MAX_MODULES
from specdec.model.config import ModelConfig
from specdec.model.tensors import Shard, TensorSpec
from specdec.options import as_options, setting

from .base import (
    Choices,
    Method,
    SizedTree,
    check_product,
    check_unknown,
    count,
    parse_paths,
    read_fields,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaParams(SizedTree):
    """Medusa heads (https://arxiv.org/abs/2401.10774): head i drafts the token i + 2 ahead.

    num_layers: residual layers of each head. max_draft_len: most draft tokens of a verify step's
    tree, which an engine leaves room for.
    """

    num_heads: int = count(1, MAX_MODULES)
    num_layers: int = count(0, MAX_MODULES)
    max_draft_len: int = count(1, MAX_DRAFT_TOKENS)

    KEYS: ClassVar[dict[str, str]] = {
        "num_heads": "num_medusa_heads",
        "num_layers": "num_medusa_layers",
        "max_draft_len": "max_draft_len",
    }

    @property
    def max_draft_depth(self) -> int:
        """Most draft tokens that one verify step can accept."""
        return min(self.num_heads, self.max_draft_len)

    def find_problems(self, *, hidden_size: int, vocab_size: int, tp_size: int) -> Problems:
        """List what does not suit a target of these sizes, each with a remedy."""
        if hidden_size % tp_size and self.num_layers:
            return Problems().add(
                f"the Medusa heads' hidden_size={hidden_size} does not split over"
                f" tp_size={tp_size}",
                "use a tp_size that divides it",
            )
        return Problems()

    def list_tensors(self, model: ModelConfig) -> dict[str, TensorSpec]:
        """Every tensor of the heads, whole, by canonical name; all split on dimension 0."""
        hidden_size = model.hidden_size
        tensors: dict[str, TensorSpec] = {}
        for head in range(self.num_heads):
            prefix = f"medusa_heads.{head}."
            for layer in range(self.num_layers):
                linear = f"{prefix}medusa_layers.{layer}.linear."
                tensors |= {
                    linear + "weight": TensorSpec((hidden_size, hidden_size), Shard.ROWS),
                    linear + "bias": TensorSpec((hidden_size,), Shard.ROWS),
                }
            tensors[prefix + "lm_head.weight"] = TensorSpec(
                (model.vocab_size, hidden_size), Shard.VOCAB
            )
        return tensors

    def to_checkpoint(self) -> dict[str, Any]:
        """Return the keys of a checkpoint's config.json."""
        return {key: getattr(self, name) for name, key in self.KEYS.items()}

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> MedusaParams:
        """Read the keys; raise SpecDecError for an absent, unknown or absurd one."""
        params = cls(**read_fields(cls, config, names=cls.KEYS))
        check_unknown((k for k in config if "medusa" in k), set(cls.KEYS.values()))
        what = f"{params.num_heads} Medusa heads of {params.num_layers} layers"
        check_product(what, params.num_heads * params.num_layers, MAX_MODULES)
        return params


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConvert:
    """Options of specdec-convert."""

    medusa_model_dir: str | None = setting(
        metavar="HEADS", help="Medusa heads, alone or saved with their target: a folder or Hub id."
    )
    num_medusa_heads: int | None = setting(
        minimum=1, maximum=MAX_MODULES, metavar="N",
        help="Number of Medusa heads to use; if not given, as many as their config.json says.",
    )  # fmt: skip
    num_medusa_layers: int | None = setting(
        minimum=0, maximum=MAX_MODULES, metavar="N",
        help="Residual layers of each Medusa head, if their config.json does not say.",
    )  # fmt: skip
    max_medusa_token_len: int | None = setting(
        minimum=1, maximum=MAX_DRAFT_TOKENS, metavar="N",
        help="Most draft tokens in a step of a Medusa engine; 63 if not given.",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaDraft:
    """Options of every command that decodes."""

    medusa_choices: str | None = setting(
        takes_list=True,
        metavar="JSON",
        help="A static tree of drafts, as a list of paths of ranks: [[0],[0,0],[1]].",
    )
    medusa_tree_tokens: int | None = setting(
        minimum=1, metavar="N",
        help="Draft tokens in a dynamic tree: the likeliest by the heads in each step.  [default:"
        " 20 on a CPU, 7 with --draft-budget fixed]",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaTrain:
    """Options of specdec-train."""

    medusa_num_heads: int = setting(
        4, help="Number of heads, each for one draft token.", minimum=1, maximum=MAX_MODULES
    )
    medusa_num_layers: int = setting(
        1, help="Residual blocks of each Medusa head.", minimum=0, maximum=MAX_MODULES
    )
    medusa_loss_decay: float = setting(
        0.8, help="Weight of each Medusa head's loss relative to the one before.", minimum=0,
        maximum=1,
    )  # fmt: skip


def read_options(settings: Any) -> Choices | int | None:
    """Return the tree that is asked for, of a dynamic one its tokens; raise UsageError for none."""
    options = as_options(settings, MedusaDraft)
    text, num_tokens = options.medusa_choices, options.medusa_tree_tokens
    if text is None:
        return num_tokens
    if num_tokens is not None:
        raise UsageError(
            "--medusa-choices with --medusa-tree-tokens: a tree is static or dynamic",
            "leave one of them out",
        )
    return parse_paths(text, "--medusa-choices")


METHOD = Method(
    name="medusa",
    title="Medusa",
    paper="https://arxiv.org/abs/2401.10774",
    mode="medusa",
    source="checkpoint",
    params=MedusaParams,
    architectures=("MedusaForCausalLM", "MedusaLlamaForCausalLM", "SpecDecMedusaForCausalLM"),
    own_architectures={"SpecDecMedusaForCausalLM": "Medusa"},
    folder="medusa_model_dir",
    read=read_options,
    options={"convert": MedusaConvert, "draft": MedusaDraft, "train": MedusaTrain},
    training={"learning_rate": 1e-3, "self_distillation": 0.0},
)
