"""Mixtures of experts: how many there are, which of them a token takes, how ranks share them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from specdec.errors import Problems, SpecDecError, shorten
from specdec.model.bounds import MAX_EXPERTS, MAX_MODULES, MAX_SIZE, find_out_of_bounds

# TensorRT-LLM's normalization_mode: what is done to the weights of a token's experts.
KEEPS, RENORMALIZES = 0, 1
# Keys of `moe` that only 0.14 has: each line makes an object of them, and takes no others.
KEYS_014 = ("moe_intermediate_size", "num_shared_experts")
# Keys of `moe` that only checkpoints of our own architectures have, by the field of `Experts`.
OWN_KEYS = {
    "scores": "scores", "has_score_bias": "score_bias", "weight_scale": "weight_scale",
    "sum_epsilon": "sum_epsilon", "num_dense_layers": "num_dense_layers",
    "gates_shared": "gates_shared_expert",
}  # fmt: skip
# A layer's shared expert, which 1.x moved.
NAME_014, NAME_1X = "shared_expert", "mlp.shared_expert"


def name_shared(version: str) -> str:
    """Return the name of the shared expert's module in checkpoints of a TensorRT-LLM version."""
    return NAME_014 if version == "0.14" else NAME_1X


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The MLPs of each layer, of which a token takes some (https://arxiv.org/abs/2401.04088).

    num: experts in a layer; top_k: experts that a token takes. inner: an expert's intermediate
    size. shared_inner: the same of the expert that every token takes as well, times the sigmoid of
    a gate if gates_shared; 0 where there is none. scores: the function of the router's outputs that
    an expert is chosen and weighted by. has_score_bias: a bias of each expert is added to its score
    for the choice, not to its weight. renormalizes: the weights of the chosen ones are divided by
    their sum and sum_epsilon. weight_scale: factor of all weights. num_dense_layers: the first
    layers, which have an MLP of the model's intermediate size instead. ep_size: groups of ranks
    that the experts are divided among; tp_size: ranks in a group, each with a part of the group's
    experts. Rank r belongs to group r % ep_size and has part r // ep_size. shared_name: the shared
    expert's module, which 1.x moved.
    """

    num: int
    top_k: int
    inner: int
    shared_inner: int = 0
    gates_shared: bool = True
    renormalizes: bool = True
    scores: Literal["softmax", "sigmoid"] = "softmax"
    has_score_bias: bool = False
    weight_scale: float = 1.0
    sum_epsilon: float = 0.0
    num_dense_layers: int = 0
    tp_size: int = 1
    ep_size: int = 1
    shared_name: str = NAME_1X

    def list_rank_experts(self, rank: int) -> range:
        """Return the numbers of a rank's experts."""
        count = self.num // self.ep_size
        start = rank % self.ep_size * count
        return range(start, start + count)

    def get_part(self, rank: int) -> int:
        """Return which part of its experts a rank has, of `tp_size`."""
        return rank // self.ep_size

    def find_problems(self, tp_size: int) -> Problems:
        """List what is inconsistent for so many ranks, each with a remedy."""
        rows = (
            ("num_experts", self.num, 1, MAX_EXPERTS),
            ("top_k", self.top_k, 1, self.num),
            ("the experts' intermediate size", self.inner, 1, MAX_SIZE),
            ("the shared expert's intermediate size", self.shared_inner, 0, MAX_SIZE),
            ("num_dense_layers", self.num_dense_layers, 0, MAX_MODULES),
            ("moe_tp_size", self.tp_size, 1, tp_size),
            ("moe_ep_size", self.ep_size, 1, tp_size),
        )
        return find_out_of_bounds(
            rows, "check the source model's config.json, and the flags of the ranks"
        ) or Problems.from_table(
            (self.tp_size * self.ep_size != tp_size,
             f"moe_tp_size={self.tp_size} times moe_ep_size={self.ep_size} is not"
             f" tp_size={tp_size}",
             "give one of the two; the other follows from it and --tp-size"),
            (self.num % max(1, self.ep_size),
             f"num_experts={self.num} do not split over moe_ep_size={self.ep_size}",
             "use a --moe-ep-size that divides them"),
            (self.inner % max(1, self.tp_size),
             f"experts of size {self.inner} do not split over moe_tp_size={self.tp_size}",
             "use a --moe-tp-size that divides it; --moe-ep-size gives ranks whole experts"),
        )  # fmt: skip


def parse_experts(config: Mapping[str, Any], tp_size: int) -> Experts:
    """Read `moe` and what belongs to it of a checkpoint's config.json; raise SpecDecError."""
    moe = config.get("moe")
    if not isinstance(moe, dict):
        raise SpecDecError(
            f"checkpoint config: moe is {shorten(moe)}, and the architecture a mixture of experts",
            "convert it again",
        )
    mapping = config.get("mapping")
    mapping = mapping if isinstance(mapping, dict) else {}
    mode = moe.get("normalization_mode")
    numbers = {
        "moe.num_experts": moe.get("num_experts"),
        "moe.top_k": moe.get("top_k"),
        "moe.normalization_mode": mode,
        "moe_intermediate_size": config.get("moe_intermediate_size") or 0,
        "moe_shared_expert_intermediate_size": (
            config.get("moe_shared_expert_intermediate_size")
            or moe.get("shared_expert_intermediate_size") or 0
        ),
        "mapping.moe_tp_size": mapping.get("moe_tp_size", tp_size),
        "mapping.moe_ep_size": mapping.get("moe_ep_size", 1),
    }  # fmt: skip
    _check_numbers(numbers, mode)
    return Experts(
        **_read_own_keys(moe),
        num=numbers["moe.num_experts"], top_k=numbers["moe.top_k"],
        inner=numbers["moe_intermediate_size"] or config["intermediate_size"],
        shared_inner=numbers["moe_shared_expert_intermediate_size"],
        renormalizes=mode == RENORMALIZES, tp_size=numbers["mapping.moe_tp_size"],
        ep_size=numbers["mapping.moe_ep_size"],
        shared_name=NAME_014 if any(key in moe for key in KEYS_014) else NAME_1X,
    )  # fmt: skip


def _read_own_keys(moe: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of `Experts` that OWN_KEYS names; raise SpecDecError for wrong ones."""
    problems, values = Problems(), {}
    for field, key in OWN_KEYS.items():
        if (value := moe.get(key)) is None:
            continue
        default = getattr(Experts, field)
        is_number = type(value) in (int, float) and 0 <= value < math.inf
        is_right = is_number if type(default) is float else type(value) is type(default)
        if field == "scores":
            is_right = value in ("softmax", "sigmoid")
        if is_right:
            values[field] = value
        else:
            problems.add(f"checkpoint config: moe.{key} is {shorten(value)}", "convert it again")
    problems.raise_all()
    return values


def _check_numbers(numbers: Mapping[str, Any], mode: Any) -> None:
    """Raise SpecDecError for keys, by their places in config.json, that are no whole numbers.

    mode: that of moe.normalization_mode.
    """
    problems = Problems()
    for name, value in numbers.items():
        if type(value) is not int:
            problems.add(f"checkpoint config: {name} is {shorten(value)}", "give a whole number")
    if type(mode) is int and mode not in (KEEPS, RENORMALIZES):
        problems.add(
            f"checkpoint config: moe.normalization_mode is {shorten(mode)}",
            f"known are {KEEPS} (softmax over all experts) and {RENORMALIZES} (over the chosen)",
        )
    problems.raise_all()


def describe_experts(experts: Experts, version: str) -> dict[str, Any]:
    """Return `moe` of a checkpoint's config.json, in the keys that a line of TensorRT-LLM takes."""
    own_keys = {
        key: getattr(experts, field) for field, key in OWN_KEYS.items()
        if getattr(experts, field) != getattr(Experts, field)
    }  # fmt: skip
    version_keys = dict.fromkeys(KEYS_014, 0) if version == "0.14" else {}
    return {
        "num_experts": experts.num, **version_keys, "top_k": experts.top_k,
        "normalization_mode": RENORMALIZES if experts.renormalizes else KEEPS,
        "sparse_mixer_epsilon": 0.01, "tp_mode": 0, **own_keys,
    }  # fmt: skip
