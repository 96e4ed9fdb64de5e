"""Parts of a model's layers as transformers computes them, seen by hooks on its modules.

Names of modules differ from family to family. So the layers are the list of as many modules as the
model has layers, which a text goes through; of a layer's own modules with matrices the first one
that is called is its mixer (attention, linear attention, a convolution), and those after it are
its MLP or its experts.

Legend: T tokens of a text, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.engine.recording import INPUT_NORM, MIXER, MLP, MLP_NORM, OUTPUT, PartInputs

from .reference import Reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferencePart:
    """Numbers [T, D] of a part, and the name of the module that computes or reads them."""

    module: str
    values: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceLayers:
    """Layers of a model for one text: each one's input [T, D] and its parts.

    hidden: [T, D], which the output head reads. logits: [T, V]. head: name of the head's module.
    """

    inputs: list[Tensor]
    parts: list[dict[str, ReferencePart]]
    hidden: Tensor
    logits: Tensor
    head: str

    def list_inputs(self) -> list[PartInputs]:
        """List what each layer, its mixer and its MLP read."""

        def find_values(parts: Mapping[str, ReferencePart], part: str) -> Tensor | None:
            return parts[part].values if part in parts else None

        return [
            PartInputs(rows, find_values(parts, INPUT_NORM), find_values(parts, MLP_NORM))
            for rows, parts in zip(self.inputs, self.parts, strict=True)
        ]


@dataclasses.dataclass
class _Call:
    """Call of a module: its name, and the first tensors that went in and came out, [T, D]."""

    module: str
    entered: Tensor | None
    left: Tensor | None = None


class _Recorder:
    """Hooks on modules, which keep what each of them reads and returns for a text of T tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.calls: dict[str, _Call] = {}  # by the module's name, in the order of the calls
        self._handles: list[Any] = []

    def watch(self, name: str, module: torch.nn.Module) -> None:
        def enter(_: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
            entered = self._find_rows([*arguments, *options.values()])
            self.calls.setdefault(name, _Call(name, entered))

        def leave(_: Any, __: Any, output: Any) -> None:
            outputs = output if isinstance(output, (tuple, list)) else [output]
            if name in self.calls and self.calls[name].left is None:
                self.calls[name].left = self._find_rows(outputs)

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave))

    def _find_rows(self, values: Sequence[Any]) -> Tensor | None:
        """Return a copy of the first tensor of numbers that has a row for each token."""
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1:
                is_by_token = self.num_tokens in value.shape[:2]
                return value.detach().reshape(self.num_tokens, -1).clone() if is_by_token else None
        return None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def compute_parts(reference: Reference, tokens: Sequence[int]) -> ReferenceLayers | None:
    """Run a model over a text; return the parts of its layers, None where it has no such layers."""
    count = reference.model.config.get_text_config().num_hidden_layers
    stacks = _list_stacks(reference.model, count)
    if (head := _find_name(reference.model, reference.model.get_output_embeddings())) is None:
        return None
    watched = [*_list_watched(stacks), (head, reference.model.get_output_embeddings())]
    calls, logits = _run_watched(reference, tokens, watched)
    name = next((name for name in stacks if f"{name}.0" in calls), None)
    hidden = calls[head].entered
    if name is None or hidden is None:
        return None
    entered = [calls[f"{name}.{index}"].entered for index in range(count)]
    inputs = [rows for rows in entered if rows is not None]
    if [rows.shape for rows in inputs] != [hidden.shape] * count:
        return None
    parts = [
        _name_parts(f"{name}.{index}", layer, calls) for index, layer in enumerate(stacks[name])
    ]
    return ReferenceLayers(inputs=inputs, parts=parts, hidden=hidden, logits=logits, head=head)


def _list_stacks(model: torch.nn.Module, count: int) -> dict[str, torch.nn.ModuleList]:
    """List a model's lists of so many modules, by their names."""
    return {
        name: modules for name, modules in model.named_modules()
        if isinstance(modules, torch.nn.ModuleList) and len(modules) == count
    }  # fmt: skip


def _find_name(model: torch.nn.Module, module: torch.nn.Module | None) -> str | None:
    """Return the name of a module of a model; None where it is not one."""
    return next((name for name, own in model.named_modules() if own is module), None)


@torch.inference_mode()
def _run_watched(
    reference: Reference, tokens: Sequence[int], modules: Sequence[tuple[str, torch.nn.Module]]
) -> tuple[dict[str, _Call], Tensor]:
    """Run a model over a text; return the calls of modules by their names, and the logits."""
    recorder = _Recorder(len(tokens))
    for name, module in modules:
        recorder.watch(name, module)
    try:
        ids = torch.tensor([list(tokens)], device=reference.device)
        logits: Tensor = reference.model(input_ids=ids, use_cache=False).logits[0]
    finally:
        recorder.close()
    return recorder.calls, logits


def _list_watched(
    stacks: Mapping[str, torch.nn.ModuleList],
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the layers of module lists, and the modules that each layer itself has, with names."""
    for stack_name, modules in stacks.items():
        for index, layer in enumerate(modules):
            yield f"{stack_name}.{index}", layer
            for name, child in layer.named_children():
                yield f"{stack_name}.{index}.{name}", child


def _name_parts(
    layer_name: str, layer: torch.nn.Module, calls: Mapping[str, _Call]
) -> dict[str, ReferencePart]:
    """Return the parts of a layer, of those that its calls show, by their names."""
    modules = _list_matrix_calls(layer_name, layer, calls)
    whole = calls[layer_name]
    assert whole.entered is not None
    width = whole.entered.shape
    values: dict[str, tuple[str, Tensor | None]] = {OUTPUT: (layer_name, whole.left)}
    for call in modules[:1]:
        values |= {INPUT_NORM: (call.module, call.entered), MIXER: (call.module, call.left)}
    for call in modules[1:2]:
        values[MLP_NORM] = (call.module, call.entered)
    if mlps := _find_mlps(modules[1:], width):
        outputs = [call.left for call in mlps if call.left is not None]
        values[MLP] = (" and ".join(call.module for call in mlps), sum(outputs[1:], outputs[0]))
    return {
        part: ReferencePart(module=name, values=numbers)
        for part, (name, numbers) in values.items()
        if numbers is not None and numbers.shape == width
    }


def _find_mlps(modules: Sequence[_Call], width: torch.Size) -> list[_Call]:
    """Find the first module that returns hidden states, and those beside it, whose sum is taken.

    Such modules, as experts and an MLP that every token takes, read equal numbers.
    """
    found = [call for call in modules if call.left is not None and call.left.shape == width]
    return [
        call for call in found
        if call is found[0]
        or (call.entered is not None and found[0].entered is not None
            and torch.equal(call.entered, found[0].entered))
    ]  # fmt: skip


def _list_matrix_calls(
    layer_name: str, layer: torch.nn.Module, calls: Mapping[str, _Call]
) -> list[_Call]:
    """List the calls of a layer's modules that have matrices, in their order."""
    names = {
        f"{layer_name}.{name}" for name, child in layer.named_children()
        if any(parameter.dim() > 1 for parameter in child.parameters())
    }  # fmt: skip
    return [call for call in calls.values() if call.module in names]
