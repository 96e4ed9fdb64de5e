"""Record of the parts of a decoder's layers, each computed from an input that is given to it.

A part's numbers then hold no trace of what was computed before it: a part that is wrong is wrong by
itself.

Legend: T tokens of a text, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from specdec.engine.decoder import Decoder
from specdec.engine.delta_net import DeltaNet
from specdec.engine.kv_cache import KVCache
from specdec.engine.layers import Norm
from specdec.engine.mamba2 import Mamba2
from specdec.engine.native_layers import KernelLayers
from specdec.engine.short_conv import ShortConv
from specdec.engine.step import Step
from specdec.engine.torch_layers import Layer, Outcome, TorchLayers

# Parts in the order in which they are computed: of the model, of each layer, of the model.
EMBEDDING = "embedding"
INPUT_NORM, MIXER, MLP_NORM, MLP, OUTPUT = "input norm", "mixer", "MLP norm", "MLP", "output"
FINAL_NORM, HEAD = "final norm", "output head"
LAYER_PARTS = (INPUT_NORM, MIXER, MLP_NORM, MLP, OUTPUT)

# Takes a part's name, its layer (None outside of the layers), its first token, its [T', D] numbers.
Record = Callable[[str, int | None, int, Tensor], None]


@dataclasses.dataclass(frozen=True)
class PartInputs:
    """Numbers [T, D] that a layer reads: its input, and those of its mixer and of its MLP.

    None for a mixer's or an MLP's means those that the engine's norm yields.
    """

    layer: Tensor
    mixer: Tensor | None
    mlp: Tensor | None


class RecordingLayers(TorchLayers):
    """Execution of layers from given inputs, beside the class whose arithmetic computes them."""

    inputs: Sequence[PartInputs]
    record: Record
    _start: int
    _index: int
    _normed: Tensor

    def run(
        self, x: Tensor, step: Step, cache: KVCache, *arguments: Any, **options: Any
    ) -> Outcome:
        """Run the layers as `TorchLayers.run` does; all tokens of the step are one row's."""
        self._start, self._index = int(step.positions[0, 0]), -1
        self._tell(EMBEDDING, x)
        normed, observed_outputs = super().run(x, step, cache, *arguments, **options)
        if self.stack.final_norm is not None:
            self._tell(FINAL_NORM, normed)
        return normed, observed_outputs

    def _tell(self, part: str, values: Tensor) -> None:
        layer = None if part in (EMBEDDING, FINAL_NORM) else self._index
        self.record(part, layer, self._start, values[0])

    def _cut(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return a copy of a text's rows for the step's tokens, [1, T, D]."""
        chunk = rows[self._start : self._start + like.shape[1]]
        return chunk.to(like, copy=True).unsqueeze(0).contiguous()

    def _project(self, layer: Layer, h: Tensor, source_product: Tensor | None) -> Tensor:
        self._index += 1
        layer_inputs = self.inputs[self._index]
        self._normed = self._cut(layer_inputs.layer, h)
        if self.stack.final_norm is not None:
            self._normed = self._norm(self._normed, layer.input_norm)
        self._tell(INPUT_NORM, self._normed)
        if layer_inputs.mixer is not None:
            self._normed = self._cut(layer_inputs.mixer, h)
        return super()._project(layer, self._normed, source_product)

    def _mix(self, layer: Layer, h: Tensor, *arguments: Any) -> Tensor:
        mixed = super()._mix(layer, self._normed, *arguments)
        self._tell(MIXER, mixed)
        return mixed

    def _finish_layer(
        self, layer: Layer, x: Tensor, h: Tensor, added: tuple[Tensor, Tensor | None],
        next_norm: Norm | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = self._cut(self.inputs[self._index].layer, h)
        outputs = super()._finish_layer(layer, x, self._normed, added, next_norm)
        self._tell(OUTPUT, outputs[0])
        return outputs

    def _run_mlp(self, layer: Layer, h: Tensor) -> Tensor:
        self._tell(MLP_NORM, h)
        mlp_input = self.inputs[self._index].mlp
        output = super()._run_mlp(layer, h if mlp_input is None else self._cut(mlp_input, h))
        self._tell(MLP, output)
        return output


def record_parts(
    decoder: Decoder, tokens: Sequence[int], inputs: Sequence[PartInputs], record: Record
) -> None:
    """Compute a text's tokens, each layer from its inputs, and record all parts.

    All is recorded but the output head. A recorded tensor may be overwritten afterwards.
    """
    base = decoder.separate_layers
    recording_class = cast(
        "Callable[..., RecordingLayers]",
        type(f"Recording{type(base).__name__}", (RecordingLayers, type(base)), {}),
    )
    kernels = (base.kernels,) if isinstance(base, KernelLayers) else ()
    layers = recording_class(base.stack, *kernels)
    layers.inputs, layers.record = inputs, record
    decoder.recording_layers = layers
    try:
        run_text(decoder, tokens)
    finally:
        decoder.recording_layers = None


@torch.inference_mode()
def run_text(decoder: Decoder, tokens: Sequence[int]) -> list[Tensor]:
    """Read a text by chunks as prompts are read; return each chunk's normed hidden states."""
    cache = decoder.make_cache(1, len(tokens))
    decoder.start_row(cache, 0, len(tokens))
    hidden, size = [], decoder.max_chunk_tokens
    for start in range(0, len(tokens), size):
        chunk = np.array(tokens[start : start + size])
        count = len(chunk)
        step = Step(
            rows=np.array([0]), tokens=chunk[None], positions=start + np.arange(count)[None],
            tree_mask=np.tril(np.ones((1, count, count), np.bool_)),
        )  # fmt: skip
        hidden.append(decoder.forward(step, cache)[0].clone())
        cache.commit(0, list(range(count)))
    return hidden


def name_part(decoder: Decoder, part: str, layer_index: int | None) -> str:
    """Return the name of a part as a report has it, with the layer that it belongs to."""
    if layer_index is None:
        return f"the {part}"
    layer = decoder.stack.layers[layer_index]
    mixers = {DeltaNet: "linear attention", Mamba2: "Mamba-2", ShortConv: "convolution"}
    has_experts = layer.experts is not None and layer.mixture is None
    mlp = "experts" if has_experts else "MLP"
    names = {
        MIXER: mixers.get(type(layer.recurrence), "attention"), MLP: mlp,
        MLP_NORM: f"norm before the {mlp}",
        OUTPUT: "output after " + ("MLP and experts" if layer.mixture is not None else mlp),
    }  # fmt: skip
    return f"layer {layer_index}'s {names.get(part, part)}"
