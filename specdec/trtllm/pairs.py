"""Which targets each line of TensorRT-LLM has with a drafter, and what a checkpoint lacks there.

Read from the lines' MODEL_MAP and their converters. Every other pair runs on the torch backend: its
checkpoint has an architecture of the method's own, which no line knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.methods import find_method
from specdec.model.architectures import ARCHITECTURES

from .facts import DEFAULT_LABEL, LABELS, load_facts

Pair = tuple[str, str]  # what the target is to TensorRT-LLM, and that one's class with the drafter

_LLAMA, _MISTRAL, _QWEN2 = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"
# Line -> method -> target. A Mistral is a Llama whose window the runtime sets.
PAIRS: dict[str, dict[str, dict[str, Pair]]] = {
    "1.2": {
        "redrafter": {
            _LLAMA: (_LLAMA, "ReDrafterForLLaMALM"),
            _MISTRAL: (_LLAMA, "ReDrafterForLLaMALM"),
            _QWEN2: (_QWEN2, "ReDrafterForQWenLM"),
        },
        "medusa": {name: (name, "MedusaForCausalLM") for name in (_LLAMA, _MISTRAL, _QWEN2)},
        "eagle": {name: (name, "EagleForCausalLM") for name in (_LLAMA, _MISTRAL)},
    },
    "0.14": {
        "redrafter": {name: (_LLAMA, "ReDrafterForCausalLM") for name in (_LLAMA, _MISTRAL)},
        "medusa": {name: (name, "MedusaForCausalLM") for name in (_LLAMA, _MISTRAL)},
    },
}
# Drafters that no line has for any target.
NOWHERE = ("EAGLE-3", "DFlash")


def find_pair(label: str, method: str, target: str) -> Pair | None:
    """Return a line's class for a target with a method's drafter, None where it has none."""
    return PAIRS[label].get(method, {}).get(target)


def find_lack(label: str, config: Mapping[str, Any], target: str) -> tuple[str, str] | None:
    """Return what a line lacks for a checkpoint's config.json and what to do, or None.

    target: the architecture of the checkpoint's target.
    """
    name, method = config["architecture"], find_method(config)
    facts = load_facts(label)
    if name in facts.architectures:
        num_heads, num_kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
        if name not in facts.without_kv_heads or num_kv_heads in (None, num_heads):
            return None
        return (
            f"TensorRT-LLM {label}'s {name} has as many K/V heads as heads, and the checkpoint has"
            f" {num_kv_heads} for {num_heads} heads",
            "use --backend torch",
        )
    title = method.own_architectures.get(name) if method is not None else None
    if method is None or title is None:
        return f"TensorRT-LLM {label} has no {name}", describe_lines(name, label)
    fact = f"TensorRT-LLM {label} has no {title} for {target}"
    if title in NOWHERE:
        fact = f"TensorRT-LLM {label} has no {title}"
    return fact, describe_targets(method.name, title, target)


def describe_lines(architecture: str, label: str) -> str:
    """What to do about an architecture that a line lacks."""
    others = [other for other in LABELS if architecture in load_facts(other).architectures]
    if not others:
        return "use --backend torch"
    if architecture in ARCHITECTURES:  # a target, which has one name wherever it is
        return f"build it for {others[0]}, or use --backend torch"
    return f"convert it with --trtllm-version {label}, or build it for {others[0]}"


def describe_targets(method: str, title: str, target: str) -> str:
    """What to do about a drafter that a line lacks for a target."""
    lines = [label for label in LABELS if find_pair(label, method, target)]
    if lines and title not in NOWHERE:
        return f"convert it for {lines[0]}, or use --backend torch"
    known = PAIRS[DEFAULT_LABEL].get(method)
    if known is None:
        return "use --backend torch, which runs every method on every target"
    heads = "EAGLE-1" if method == "eagle" else title
    return (
        "use --backend torch, which runs every method on every target; TensorRT-LLM"
        f" {DEFAULT_LABEL} has {heads} for {', '.join(known)}"
    )
