"""Measured cases: ways of decoding, the settings each may choose from, and who runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

Setting = dict[str, Any]
PEERS = ("specdec", "transformers", "llama.cpp", "openvino")
# Peers at other types of weights: a name, the peer, and what it calls the type.
OURS, LLAMA_CPP = "specdec", "llama.cpp"
QUANTIZED = {
    "specdec-int8": (OURS, "int8"), "specdec-int4": (OURS, "int4"),
    "llama.cpp-Q8_0": (LLAMA_CPP, "Q8_0"), "llama.cpp-Q4_0": (LLAMA_CPP, "Q4_0"),
    "llama.cpp-Q4_K_M": (LLAMA_CPP, "Q4_K_M"),
}  # fmt: skip
PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of decoding. worker: the process that runs it, one of its peer's."""

    peer: str
    worker: str
    name: str
    settings: tuple[Setting, ...] = ({},)

    @property
    def key(self) -> str:
        return f"{self.peer}: {self.name}"


@dataclasses.dataclass(frozen=True)
class SearchShape:
    """Beams and length of ReDrafter's search. size: of a dynamic tree, None for all of its last."""

    beams: int
    length: int
    size: int | None = None

    def __str__(self) -> str:
        return f"{self.beams} x {self.length}" + (f", best {self.size}" if self.size else "")


def list_ways(
    peers: Sequence[str], trees: Sequence[SearchShape], lengths: Sequence[int],
    sizes: Sequence[int] = (),
) -> list[Way]:  # fmt: skip
    """Every way of the chosen peers; those with several settings are tuned first.

    trees: of ReDrafter. lengths: of drafts. sizes: of a draft model's trees, which we alone have.
    """
    drafts = tuple({"length": length} for length in lengths)
    beams = tuple({"tree": str(shape)} for shape in trees)
    own: tuple[Setting, ...] = (
        *drafts,
        {"length": "auto"},
        *({"length": name_tree(size)} for size in sizes),
    )
    chains = tuple({"chain": name_chain(f"{length} tokens")} for length in lengths)
    chains += tuple({"chain": name_chain(name_tree(size))} for size in sizes)
    ways = [
        Way("specdec", "specdec", PLAIN),
        Way("specdec", "specdec", "redrafter", beams),
        Way("specdec", "specdec-draft", "draft-target", own),
        Way("specdec", "specdec-draft", "chain", chains),
        Way("transformers", "transformers", PLAIN),
        Way("transformers", "transformers", "assisted", ({}, *drafts)),
        Way("transformers", "transformers", "prompt lookup", drafts),
        Way("llama.cpp", "llama.cpp", PLAIN),
        Way("llama.cpp", "llama.cpp", "draft model", ({}, *drafts)),
        Way("openvino", "openvino", PLAIN),
        Way("openvino", "openvino", "draft model", drafts),
    ]
    for name, (peer, _) in QUANTIZED.items():
        ways.append(Way(name, name, PLAIN))
        if peer == OURS:
            ways.append(Way(name, name, "draft-target", own))
        else:
            ways.append(Way(name, name, "draft model", ({}, *drafts)))
    return [way for way in ways if way.peer in peers]


def name_tree(size: int) -> str:
    """A draft model's tree of so many tokens."""
    return f"tree of {size}"


def name_chain(other: str) -> str:
    """Suffix decoding where that promises more, else a draft model's tokens or tree."""
    return f"suffix, else {other}"


def describe_setting(setting: Setting) -> str:
    """A setting as a table has it."""
    if not setting:
        return "defaults"
    (value,) = setting.values()
    return f"{value} tokens" if isinstance(value, int) else str(value)
