"""Search for the first part of a layer that an engine computes otherwise than its model.

Both sides read one text. Each layer of the engine gets what the model's layer got, so that a
difference belongs to the part that shows it, and is not handed on.

Legend: T tokens of a text, D hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.decode.engine import TorchEngine
from specdec.engine.decoder import Decoder
from specdec.engine.recording import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER_PARTS,
    MLP,
    OUTPUT,
    name_part,
    record_parts,
    run_text,
)

from .greedy import Divergence, Text, compare_logits
from .reference import load_reference
from .reference_parts import ReferenceLayers, ReferencePart, compute_parts

# Part of the largest number of a token by which two programs' numbers may differ, from equal input.
TOLERANCES = {"bfloat16": 0.06, "float16": 0.01, "float32": 1e-4}

TIED_SHARE = 4  # in half precision up to one of so many tokens may go to another expert


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartDifference:
    """Largest difference of a part, as a multiple of its tolerance.

    layer: None outside of the layers. module: name in the model. tokens: number of tokens that
    differ by more than the tolerance.
    """

    part: str
    name: str
    layer: int | None
    module: str
    token: int
    difference: float
    tolerance: float
    tokens: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def compare_rows(values: Tensor, expected: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Return each token's largest difference and its tolerance, [T], of numbers [T, D].

    A token whose numbers nearly cancel is rounded as the text's usual tokens are.
    """
    values, expected = values.float().cpu(), expected.float().cpu()
    sizes = expected.abs().amax(-1)
    differences = (values - expected).abs().amax(-1).nan_to_num(nan=torch.inf)
    return differences, TOLERANCES[dtype] * torch.maximum(sizes, sizes.median())


class Comparison:
    """Differences of an engine's parts from a model's, gathered chunk by chunk of a text."""

    def __init__(self, decoder: Decoder, reference: ReferenceLayers, dtype: str) -> None:
        self.decoder, self.reference, self.dtype = decoder, reference, dtype
        self._rows: dict[tuple[int | None, str], list[tuple[Tensor, Tensor]]] = {}

    def record(self, part: str, layer: int | None, start: int, values: Tensor) -> None:
        """Compare a chunk's numbers of a part with the model's; see `specdec.engine.recording`."""
        expected = self._find_expected(part, layer)
        if expected is not None:
            rows = expected.values[start : start + len(values)]
            pair = compare_rows(values, rows, self.dtype)
            self._rows.setdefault((layer, part), []).append(pair)

    def _find_expected(self, part: str, layer: int | None) -> ReferencePart | None:
        reference = self.reference
        if layer is not None:
            return reference.parts[layer].get(part)
        if part == EMBEDDING:
            return ReferencePart(module="the first layer's input", values=reference.inputs[0])
        if part == FINAL_NORM:
            return ReferencePart(module="the output head's input", values=reference.hidden)
        return ReferencePart(module=reference.head, values=reference.logits)

    def _count_allowed(self, part: str, layer: int | None, num_tokens: int) -> int:
        """Return how many tokens may differ: those for which two experts nearly tie."""
        if layer is None or part not in (MLP, OUTPUT) or self.dtype == "float32":
            return 0
        has_experts = self.decoder.stack.layers[layer].experts is not None
        return num_tokens // TIED_SHARE if has_experts else 0

    def find_first(self) -> PartDifference | None:
        """Return the first part, in the order of computation, that exceeds its tolerance."""
        order: list[tuple[int | None, str]] = [(None, EMBEDDING)]
        order += [(i, part) for i in range(len(self.reference.parts)) for part in LAYER_PARTS]
        order += [(None, FINAL_NORM), (None, HEAD)]
        for layer, part in order:
            if (pairs := self._rows.get((layer, part))) is None:
                continue
            differences, tolerances = (torch.cat(rows) for rows in zip(*pairs, strict=True))
            count = int((differences > tolerances).sum())
            if count <= self._count_allowed(part, layer, len(differences)):
                continue
            token = int((differences / tolerances.clamp(min=1e-30)).argmax())
            expected = self._find_expected(part, layer)
            assert expected is not None
            return PartDifference(
                part=part, name=name_part(self.decoder, part, layer), layer=layer,
                module=expected.module, token=token, difference=float(differences[token]),
                tolerance=float(tolerances[token]), tokens=count,
            )  # fmt: skip
        return None


def find_first_difference(
    decoder: Decoder, reference: ReferenceLayers, tokens: Sequence[int], dtype: str
) -> PartDifference | None:
    """Return the first part that differs for a text; None where all are the model's."""
    comparison = Comparison(decoder, reference, dtype)
    record_parts(decoder, tokens, reference.list_inputs(), comparison.record)
    with torch.inference_mode():
        hidden = reference.hidden.to(decoder.device, decoder.dtype)
        comparison.record(HEAD, None, 0, decoder.compute_logits(hidden[None])[0])
    return comparison.find_first()


def choose_text(divergences: Sequence[Divergence], texts: Sequence[Text], worst: int) -> list[int]:
    """Return the tokens of the text that shows most: up to the first token that is no near-tie.

    worst: number of the text whose logits differ most, taken where all tokens are right.
    """
    for divergence in divergences:
        if divergence.cause == "logits":
            found = (divergence.run, divergence.prompt)
            text = next(text for text in texts if (text.run, text.prompt) == found)
            return [*text.input_ids, *text.output_ids[: divergence.position]]
    text = texts[worst]
    return [*text.input_ids, *text.output_ids[:-1]]


def compare_layers(
    engine_dir: Path, model_dir: str, tokens: Sequence[int], dtype: str, device: str
) -> dict[str, Any]:
    """Compare an engine with its model layer by layer; return the section of the report.

    The model runs first, so that the two never share the memory.
    """
    section: dict[str, Any] = {"num_tokens": len(tokens), "first": None, "plain_is_right": None}
    reference = compute_parts(load_reference(model_dir, dtype, device), tokens)
    if reference is None:
        return section | {"num_tokens": 0}
    engine = TorchEngine(engine_dir, device=device, speculate=False)
    try:
        first = find_first_difference(engine.decoder, reference, tokens, dtype)
        if first is not None:
            return section | {"first": first.to_json()}
        with torch.inference_mode():
            hidden = torch.cat(run_text(engine.decoder, tokens))
            logits = engine.decoder.compute_logits(hidden[None])[0].float().cpu()
        difference, bound = compare_logits(logits, reference.logits.float().cpu(), dtype)
        return section | {"plain_is_right": difference <= bound}
    finally:
        engine.close()
