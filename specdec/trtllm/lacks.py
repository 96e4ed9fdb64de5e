"""Lacks of a line of TensorRT-LLM: targets with a drafter, quantized layouts; known defects.

PAIRS was read from the lines' MODEL_MAP and their converters. Every other pair runs on the torch
backend: its checkpoint has an architecture of the method's own, which no line knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import Problems
from specdec.methods import METHODS, find_method
from specdec.model.architectures import ARCHITECTURES
from specdec.model.config import ModelConfig
from specdec.model.quantization import Quantization
from specdec.model.tensors import list_linears, list_target_tensors
from specdec.system.machine import order_release

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
NOWHERE = ("EAGLE-3", "DFlash", "MTP", "MTP assistant")


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
    """Return the remedy for an architecture that a line lacks."""
    other_labels = [
        label_with_class
        for label_with_class in LABELS
        if architecture in load_facts(label_with_class).architectures
    ]
    if not other_labels:
        return "use --backend torch"
    if architecture in ARCHITECTURES:  # a target, which has one name wherever it is
        return f"build it for {other_labels[0]}, or use --backend torch"
    return f"convert it with --trtllm-version {label}, or build it for {other_labels[0]}"


def describe_targets(method: str, title: str, target: str) -> str:
    """Return the remedy for a drafter that a line lacks for a target."""
    lines = [label for label in LABELS if find_pair(label, method, target)]
    if lines and title not in NOWHERE:
        return f"convert it for {lines[0]}, or use --backend torch"
    architectures = PAIRS[DEFAULT_LABEL].get(method)
    if architectures is None:
        return "use --backend torch, which runs every method on every target"
    heads = "EAGLE-1" if method == "eagle" else title
    return (
        "use --backend torch, which runs every method on every target; TensorRT-LLM"
        f" {DEFAULT_LABEL} has {heads} for {', '.join(architectures)}"
    )


INT4 = ("W4A16_AWQ", "W4A8_AWQ")


def find_layout_problems(label: str, quantization: Quantization, model: ModelConfig) -> Problems:
    """List why a line cannot load a checkpoint's quantized matrices."""
    algorithm, problems = quantization.quant_algo, Problems()
    if algorithm is None:
        return problems
    line, unknown = f"TensorRT-LLM {label}", "that format is not its own"
    facts = load_facts(label)
    reason = facts.quant_algos.get(algorithm, unknown)
    if reason is not None:
        other_labels = [
            other_label for other_label in LABELS
            if load_facts(other_label).quant_algos.get(algorithm, unknown) is None
        ]  # fmt: skip
        return problems.add(
            f"{line} cannot load {algorithm} checkpoints: {reason}",
            f"convert it for {other_labels[0]}"
            if other_labels
            else "use --backend torch, or convert the published model with --dequantize",
        )
    if algorithm not in INT4:
        return problems
    if quantization.group_size not in facts.quant_group_sizes:
        sizes = " and ".join(map(str, facts.quant_group_sizes))
        return problems.add(
            f"{line} has int4 kernels for groups of {sizes}, not of {quantization.group_size}",
            f"convert it with --group-size {facts.quant_group_sizes[-1]}, or use --backend torch",
        )
    # Its layers have sizes that are such multiples, and a checkpoint's tensors must have them.
    multiple = max(128 if algorithm == "W4A8_AWQ" else 64, quantization.group_size) * model.tp_size
    specs = list_target_tensors(model)
    for module in list_linears(model):
        shape = specs[f"{module}.weight"].shape
        if any(size % multiple for size in shape[-2:]):
            return problems.add(
                f"{module}.weight is {list(shape)}, and {line} loads {algorithm} of sizes that are"
                f" multiples of {multiple}, tp_size {model.tp_size} included",
                "use a smaller --tp-size or another --quantization, or --backend torch",
            )
    return problems


CHECK = "compare the text with that of a plain engine of the target"


def list_defects(version: str, mode: str | None, config: Mapping[str, Any]) -> list[str]:
    """List a release's defects by which an engine of this mode writes other text than the target's.

    config: the checkpoint's. Nothing in an engine or a log shows them.
    """
    release = order_release(version)
    defects = []
    if mode == METHODS["redrafter"].mode and release < (0, 19):
        beams = config.get("redrafter_num_beams")
        if isinstance(beams, int) and beams > 1:
            defects.append(
                f"TensorRT-LLM before 0.19 (here {version}) accepts ReDrafter's drafts by"
                f" probabilities that are not normalized; with {beams} beams the text was reported"
                " to be clearly worse than the target's (issue 3125, fixed in April 2025 by pull"
                f" request 3278): use a later release or one beam, and {CHECK}"
            )
    if mode == METHODS["lookahead"].mode and release < (1, 0):
        defects.append(
            f"lookahead of TensorRT-LLM {version}: from the second call on, a loaded engine was"
            " reported to write text that is wrong and differs from run to run (issue 2263, of"
            f" September 2024): {CHECK}"
        )
    return defects
