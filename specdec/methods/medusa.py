"""Medusa: heads on the target's last hidden state, each of which drafts one position ahead."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from specdec.errors import Problems, UsageError
from specdec.model.bounds import MAX_DRAFT_TOKENS, MAX_MODULES
from specdec.model.config import ModelConfig
from specdec.model.tensors import Shard, TensorSpec
from specdec.options import as_options, setting

from .base import (
    Choices,
    DrafterParams,
    Method,
    bounds,
    check_product,
    count,
    number,
    parse_paths,
    share,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaParams(DrafterParams):
    """Medusa heads (https://arxiv.org/abs/2401.10774): head i drafts the token i + 2 ahead.

    num_layers: residual layers of each head. max_draft_len: most draft tokens of a verify step's
    tree, which an engine leaves room for.
    """

    num_heads: int = count(1, MAX_MODULES)
    num_layers: int = count(0, MAX_MODULES)
    max_draft_len: int = count(1, MAX_DRAFT_TOKENS)

    WORD: ClassVar[str] = "medusa"
    KEYS: ClassVar[dict[str, str]] = {
        "num_heads": "num_medusa_heads", "num_layers": "num_medusa_layers",
    }  # fmt: skip

    @property
    def max_draft_depth(self) -> int:
        return min(self.num_heads, self.max_draft_len)

    def find_problems(self, *, hidden_size: int, vocab_size: int, tp_size: int) -> Problems:
        if hidden_size % tp_size and self.num_layers:
            return Problems().add(
                f"the Medusa heads' hidden_size={hidden_size} does not split over"
                f" tp_size={tp_size}",
                "use a tp_size that divides it",
            )
        return Problems()

    def list_tensors(self, model: ModelConfig) -> dict[str, TensorSpec]:
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

    def check_product(self) -> None:
        description = f"{self.num_heads} Medusa heads of {self.num_layers} layers"
        check_product(description, self.num_heads * self.num_layers, MAX_MODULES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConvert:
    """Options of specdec-convert."""

    medusa_model_dir: str | None = setting(
        metavar="HEADS", help="Medusa heads, alone or saved with their target: a folder or Hub id."
    )
    num_medusa_heads: int | None = setting(
        **bounds(MedusaParams, "num_heads"), metavar="N",
        help="Number of Medusa heads to use; if not given, as many as their config.json says.",
    )  # fmt: skip
    num_medusa_layers: int | None = setting(
        **bounds(MedusaParams, "num_layers"), metavar="N",
        help="Residual layers of each Medusa head, if their config.json does not say.",
    )  # fmt: skip
    max_medusa_token_len: int | None = setting(
        **bounds(MedusaParams, "max_draft_len"), metavar="N",
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
    medusa_tree_tokens: int | None = number(
        help="Draft tokens in a dynamic tree: the likeliest by the heads in each step.  [default:"
        " 20 on a CPU, 7 with --draft-budget fixed]"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaTrain:
    """Options of specdec-train."""

    medusa_num_heads: int = setting(
        4, help="Number of heads, each for one draft token.", **bounds(MedusaParams, "num_heads")
    )
    medusa_num_layers: int = setting(
        1, help="Residual blocks of each Medusa head.", **bounds(MedusaParams, "num_layers")
    )
    medusa_loss_decay: float = share(
        0.8, help="Weight of each Medusa head's loss relative to the one before."
    )


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
