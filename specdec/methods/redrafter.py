"""ReDrafter: a recurrent drafter whose beams a search fills, read from the target's last state."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from specdec.errors import Problems
from specdec.model.bounds import MAX_DRAFT_TOKENS, MAX_MODULES, MAX_SIZE
from specdec.model.config import ModelConfig
from specdec.model.tensors import Shard, TensorSpec
from specdec.options import as_options, setting

from .base import (
    USE_ITS_DRAFTER,
    DrafterParams,
    Method,
    add_uneven,
    bounds,
    check_product,
    count,
    number,
    share,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReDrafterParams(DrafterParams):
    """Recurrent Drafter (https://arxiv.org/abs/2403.09919).

    `draft_len_per_beam` counts drafted tokens only, as TensorRT-LLM does; Apple's beam length is
    one more, since it counts the guaranteed first token.
    """

    num_layers: int = count(0, MAX_MODULES)
    hidden_size: int = count(1, MAX_SIZE)
    exit_dim: int = count(1, MAX_SIZE)
    is_rnn: bool
    num_beams: int = count(1, MAX_DRAFT_TOKENS)
    draft_len_per_beam: int = count(1, MAX_DRAFT_TOKENS)
    greedy_search: bool

    WORD: ClassVar[str] = "redrafter_"
    KEYS: ClassVar[dict[str, str]] = {
        name: f"redrafter_{name}"
        for name in (
            "num_layers", "hidden_size", "exit_dim", "is_rnn", "num_beams", "draft_len_per_beam",
            "greedy_search",
        )
    }  # fmt: skip

    @property
    def has_input_proj(self) -> bool:
        """Return whether [hidden, state] is projected to exit_dim first."""
        return 2 * self.hidden_size != self.exit_dim

    @property
    def max_draft_tokens(self) -> int:
        """All beams are distinct from the first token on."""
        return self.num_beams * self.draft_len_per_beam

    @property
    def max_draft_depth(self) -> int:
        return self.draft_len_per_beam

    @property
    def draft_len_source(self) -> str:
        return (
            f"num_beams={self.num_beams} x draft_len_per_beam={self.draft_len_per_beam}"
            f" = {self.max_draft_tokens}"
        )

    def find_problems(self, *, hidden_size: int, vocab_size: int, tp_size: int) -> Problems:
        if self.hidden_size != hidden_size:
            return Problems().add(
                f"the drafter's hidden_size={self.hidden_size} differs from the target's"
                f" {hidden_size}",
                USE_ITS_DRAFTER,
            )
        problems = Problems()
        sizes = {"hidden_size": hidden_size if self.is_rnn else 0, "exit_dim": self.exit_dim}
        add_uneven(problems, "the drafter's", sizes, tp_size)
        if self.num_beams > vocab_size:
            problems.add(
                f"num_beams={self.num_beams} exceeds vocab_size={vocab_size}",
                "convert again with fewer beams",
            )
        return problems

    def list_tensors(self, model: ModelConfig) -> dict[str, TensorSpec]:
        hidden, exit_dim = self.hidden_size, self.exit_dim
        tensors: dict[str, TensorSpec] = {}
        if self.has_input_proj:
            tensors |= {
                "drafter.input_proj.weight": TensorSpec((exit_dim, 2 * hidden), Shard.ROWS),
                "drafter.input_proj.bias": TensorSpec((exit_dim,), Shard.ROWS),
            }
        for layer in range(self.num_layers):
            tensors |= {
                f"drafter.layers.{layer}.linear.weight": TensorSpec(
                    (exit_dim, exit_dim), Shard.ROWS
                ),
                f"drafter.layers.{layer}.linear.bias": TensorSpec((exit_dim,), Shard.ROWS),
            }
        tensors["drafter.lm_head.weight"] = TensorSpec((model.vocab_size, exit_dim), Shard.VOCAB)
        if self.is_rnn:
            tensors |= {
                "drafter.rnn_u.weight": TensorSpec((hidden, hidden), Shard.ROWS),
                "drafter.rnn_u.bias": TensorSpec((hidden,), Shard.ROWS),
                "drafter.rnn_w.weight": TensorSpec((hidden, hidden), Shard.ROWS),
            }
        return tensors

    def check_product(self) -> None:
        description = f"{self.num_beams} beams of {self.draft_len_per_beam} draft tokens"
        check_product(description, self.max_draft_tokens, MAX_DRAFT_TOKENS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReDrafterConvert:
    """Options of specdec-convert."""

    drafter_model_dir: str | None = setting(
        metavar="DRAFTER",
        help="A drafter of any method, told by what it holds: a folder or Hub id.",
        group="Models",
    )
    redrafter_num_beams: int | None = setting(
        **bounds(ReDrafterParams, "num_beams"), metavar="N",
        help="Beams of the drafter's search; 5 if not given.",
    )  # fmt: skip
    redrafter_draft_len_per_beam: int | None = setting(
        **bounds(ReDrafterParams, "draft_len_per_beam"), metavar="N",
        help="Draft tokens of each beam, at most as many as the drafter was trained for; 5 if"
        " not given.",
    )  # fmt: skip
    redrafter_no_greedy_search: bool = setting(
        False, help="For a TensorRT-LLM engine: sample instead of searching greedily."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReDrafterDraft:
    """Options of every command that decodes."""

    redrafter_tree_tokens: int | None = number(
        help="Draft tokens in a dynamic tree: the likeliest of all that the search saw."
        "  [default on a CPU: up to 20; with --draft-budget fixed: all tokens of the last beams]"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReDrafterTrain:
    """Options of specdec-train."""

    redrafter_num_layers: int = setting(
        2, help="Residual blocks in the drafter's head.", **bounds(ReDrafterParams, "num_layers")
    )
    redrafter_predict_n_tokens: int = setting(
        5, help="Draft tokens that the loss covers.", minimum=1, maximum=MAX_MODULES
    )
    redrafter_exit_dim: int | None = setting(
        help="Width of the residual blocks; if not given, twice the target's hidden size.",
        **bounds(ReDrafterParams, "exit_dim"),
    )  # fmt: skip
    redrafter_rnn: bool = setting(
        True, help="Learn the recurrence; otherwise it is the sum of the token embeddings."
    )
    redrafter_loss_decay: float = share(
        1.0, help="Weight of each draft position relative to the one before."
    )


def read_options(settings: Any) -> int | None:
    """Return the tokens of a dynamic tree, None where none is asked for."""
    return as_options(settings, ReDrafterDraft).redrafter_tree_tokens


METHOD = Method(
    name="redrafter",
    title="ReDrafter",
    paper="https://arxiv.org/abs/2403.09919",
    mode="explicit_draft_tokens",
    source="checkpoint",
    params=ReDrafterParams,
    architectures=(
        "ReDrafterForLLaMALM", "ReDrafterForQWenLM", "ReDrafterForCausalLM",
        "SpecDecReDrafterForCausalLM",
    ),
    own_architectures={"SpecDecReDrafterForCausalLM": "ReDrafter"},
    folder="drafter_model_dir",
    read=read_options,
    options={
        "convert": ReDrafterConvert, "draft": ReDrafterDraft, "train": ReDrafterTrain,
    },
    training={"learning_rate": 1e-3, "self_distillation": 0.0},
)  # fmt: skip
