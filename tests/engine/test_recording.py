"""Record of a decoder's parts: all of a text, each part from what was given to it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.engine.decoder import Decoder
from specdec.engine.recording import (
    EMBEDDING,
    FINAL_NORM,
    INPUT_NORM,
    LAYER_PARTS,
    MIXER,
    MLP,
    MLP_NORM,
    OUTPUT,
    PartInputs,
    name_part,
    record_parts,
    run_text,
)
from specdec.model.tensors import list_target_tensors
from tests.engine.models import make_model

MODEL = make_model(
    vocab_size=17, hidden_size=8, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, head_size=4, intermediate_size=6, max_position_embeddings=64,
)  # fmt: skip
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
Parts = dict[tuple[int | None, str], Tensor]


class SmallChunks(Decoder):
    """Decoder that reads texts by four tokens."""

    max_chunk_tokens = 4


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    generator, weights = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name, spec in list_target_tensors(MODEL).items():
        weights[name] = torch.randn(spec.shape, generator=generator) / 3
    for layer in range(3):
        prefix = f"transformer.layers.{layer}.mlp."
        gated = [weights.pop(f"{prefix}{name}.weight") for name in ("fc", "gate")]
        weights[f"{prefix}gate_up.weight"] = torch.cat(gated)
    cpu = torch.device("cpu")
    return SmallChunks(MODEL, weights, num_positions=64, device=cpu, prepack=False)


def gather_parts(decoder: Decoder, inputs: list[PartInputs]) -> Parts:
    """Record a text; each part's chunks follow one another without a gap."""
    chunks: dict[tuple[int | None, str], list[Tensor]] = {}

    def record(part: str, layer: int | None, start: int, values: Tensor) -> None:
        rows = chunks.setdefault((layer, part), [])
        assert start == sum(map(len, rows)), (layer, part)
        rows.append(values.clone())

    record_parts(decoder, TOKENS, inputs, record)
    return {key: torch.cat(rows) for key, rows in chunks.items()}


def make_inputs(seed: int, *, is_whole: bool) -> list[PartInputs]:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(len(TOKENS), 8, generator=generator)

    return [
        PartInputs(draw(), draw() if is_whole else None, draw() if is_whole else None)
        for _ in range(3)
    ]


def test_with_its_own_inputs_a_decoder_repeats_itself(decoder: Decoder) -> None:
    """All parts are recorded; layer by layer the outputs become those of the usual way."""
    expected = torch.cat(run_text(decoder, TOKENS))
    inputs = make_inputs(1, is_whole=False)
    for number in range(3):
        parts = gather_parts(decoder, inputs)
        first = parts[None, EMBEDDING] if number == 0 else parts[number - 1, OUTPUT]
        inputs[number] = PartInputs(first, None, None)
    parts = gather_parts(decoder, inputs)
    names = {(number, part) for number in range(3) for part in LAYER_PARTS}
    assert parts.keys() == names | {(None, EMBEDDING), (None, FINAL_NORM)}
    assert all(values.shape == (len(TOKENS), 8) for values in parts.values())
    torch.testing.assert_close(parts[None, FINAL_NORM], expected)
    stack = decoder.stack
    for index, layer in enumerate(stack.layers):
        assert torch.equal(parts[index, INPUT_NORM], layer.input_norm(inputs[index].layer))
        summed = inputs[index].layer + parts[index, MIXER]
        assert layer.post_norm is not None
        torch.testing.assert_close(parts[index, MLP_NORM], layer.post_norm(summed))
        torch.testing.assert_close(parts[index, OUTPUT], summed + parts[index, MLP])


@pytest.mark.parametrize(
    ("changed", "followers"),
    [
        ("layer", {(1, INPUT_NORM), (1, MLP_NORM), (1, OUTPUT)}),
        ("mixer", {(1, MIXER), (1, MLP_NORM), (1, OUTPUT)}),
        ("mlp", {(1, MLP), (1, OUTPUT)}),
    ],
)  # fmt: skip
def test_a_wrong_number_stays_in_its_part(
    changed: str, followers: set[tuple[int, str]], decoder: Decoder
) -> None:
    """Of a change of the last token's input, no other layer, part or token sees anything."""
    inputs = make_inputs(2, is_whole=True)
    right = gather_parts(decoder, inputs)
    wrong_input = getattr(inputs[1], changed).clone()
    wrong_input[-1, 0] += 1
    inputs[1] = PartInputs(**(vars(inputs[1]) | {changed: wrong_input}))
    parts = gather_parts(decoder, inputs)
    different = {key for key, values in parts.items() if not torch.equal(values, right[key])}
    assert different == followers
    for key in followers:
        assert torch.equal(parts[key][:-1], right[key][:-1])


def test_an_error_leaves_the_decoder_as_it_was(decoder: Decoder) -> None:
    before = torch.cat(run_text(decoder, TOKENS))

    def fail(part: str, *_: Any) -> None:
        if part == MLP:
            raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        record_parts(decoder, TOKENS, make_inputs(3, is_whole=True), fail)
    assert torch.equal(torch.cat(run_text(decoder, TOKENS)), before)


def test_parts_have_a_reader_s_names(decoder: Decoder) -> None:
    assert [name_part(decoder, part, 2) for part in LAYER_PARTS] == [
        "layer 2's input norm", "layer 2's attention", "layer 2's norm before the MLP",
        "layer 2's MLP", "layer 2's output after MLP",
    ]  # fmt: skip
    assert name_part(decoder, FINAL_NORM, None) == "the final norm"
