"""Which layouts of quantized matrices each line of TensorRT-LLM loads, and of which sizes."""

from __future__ import annotations

from specdec.errors import Problems
from specdec.model.config import ModelConfig
from specdec.model.quantization import Quantization
from specdec.model.tensors import list_linears, list_target_tensors

from .facts import LABELS, load_facts

INT4 = ("W4A16_AWQ", "W4A8_AWQ")


def find_layout_problems(label: str, quantization: Quantization, model: ModelConfig) -> Problems:
    """List why a line cannot load a checkpoint's quantized matrices."""
    algorithm, problems = quantization.quant_algo, Problems()
    if algorithm is None:
        return problems
    line, unknown = f"TensorRT-LLM {label}", "it does not know it"
    facts = load_facts(label)
    reason = facts.quant_algos.get(algorithm, unknown)
    if reason is not None:
        others = [
            other for other in LABELS
            if load_facts(other).quant_algos.get(algorithm, unknown) is None
        ]  # fmt: skip
        return problems.add(
            f"{line} cannot load {algorithm} checkpoints: {reason}",
            f"convert it for {others[0]}"
            if others
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
