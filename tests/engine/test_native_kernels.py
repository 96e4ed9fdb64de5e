"""The compiled kernels compute what the torch operators compute."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.engine import layers, native, native_library
from specdec.engine.compiler import call_compiler
from specdec.engine.rotary import RotaryTable, rotate
from specdec.engine.torch_layers import build_full_mask
from specdec.engine.tree import BoolArray, IntArray
from tests.covering import cover
from tests.engine.kernels import FORMS, in_every_form, needs_compiler
from tests.engine.models import make_model
from tests.engine.test_mamba2 import SHAPES, check_outputs
from tests.engines import round_inputs

# Relative to the largest value: a few roundings of the type.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
DTYPES = list(TOLERANCE)
Array = np.ndarray[Any, np.dtype[Any]]
# The forms that may have the sums of AMX.
PLAIN_AND_OWN = [form for form in ("own", "bands") if form in FORMS]


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.float() - expected.float()).abs().max()
    assert error <= TOLERANCE[expected.dtype] * expected.float().abs().max().clamp(min=1)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 40, 320])
def test_pointwise_kernels(library: Path, dtype: torch.dtype, size: int) -> None:
    kernels = native.NativeKernels(library, dtype)
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(3, 5, size, generator=generator).to(dtype)
    delta = torch.randn(3, 5, size, generator=generator).to(dtype)
    weight = (1 + 0.1 * torch.randn(size, generator=generator)).to(dtype)
    bias = torch.randn(size, generator=generator).to(dtype)
    scores = torch.tensor([-1e4, -90.0, -31.0, -18.7, -1e-3, 0.0, 1e-6, 18.8, 3e4]).to(dtype)
    exact = 30 * torch.tanh(scores.double() * 0.5 / 30)
    capped = kernels.cap_logits(scores.clone(), 0.5, 30.0)
    assert ((capped - exact).abs() <= TOLERANCE[dtype] * exact.abs() + 1e-7).all()
    for norm in (layers.Norm(weight, None, 1e-5), layers.Norm(weight, bias, 1e-5)):
        total = x.clone()
        normed = kernels.add_norm(total, delta, norm, layers.Norm(bias, norm.bias, 1e-5), 0.25)
        assert_near(total, x + 0.25 * layers.Norm(bias, norm.bias, 1e-5)(delta))
        assert_near(normed, norm(total))
        assert_near(kernels.norm(x, norm), norm(x))
        total = x.clone()
        normed = kernels.add_norm(total, delta, norm)
        assert torch.equal(total, x + delta)
        assert_near(normed, norm(x + delta))
    gate_up = 20 * torch.randn(3, 5, 2 * size, generator=generator).to(dtype)
    gate_up[0, 0, :4] = torch.tensor([0.0, 100.0, -100.0, 1e-3]).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    for activation in layers.GATES:
        expected = layers.ACTIVATIONS[activation](gate) * up
        assert_near(kernels.gate_mul(gate_up, activation), expected)


def check_attention(
    library: Path, cache: torch.Tensor, qkv: torch.Tensor, num_heads: int, rows: IntArray,
    past: IntArray, positions: IntArray, mask: BoolArray, how: layers.Attention,
    shift: IntArray | int = 0,
) -> None:  # fmt: skip
    """A step of the kernels against torch's: what it yields, and what it writes into the cache.

    cache: [2, R, K, S, H]; qkv: [B, T, heads of all parts * H]; positions: [B, N], of the mask's
    columns; shift: of the rotary table's lines.
    """
    kernels = native.NativeKernels(library, cache.dtype)
    (batch, num_tokens, _), (_, _, num_kv, num_positions, size) = qkv.shape, cache.shape
    view = qkv.clone().view(batch, num_tokens, -1, size)
    turned, values = view[:, :, : num_heads + num_kv], view[:, :, num_heads + num_kv :]
    if how.q_norm is not None and how.k_norm is not None:
        q, k = how.q_norm(turned[:, :, :num_heads]), how.k_norm(turned[:, :, num_heads:])
        turned = torch.cat((q, k), dim=2)
    if how.rotary is not None:
        at = torch.from_numpy(positions[:, -num_tokens:] + shift)
        turned = rotate(turned, how.rotary.cos[at].unsqueeze(2), how.rotary.sin[at].unsqueeze(2))
    expected_cache, index = cache.clone(), torch.from_numpy(rows)
    newest = np.arange(mask.shape[2] - num_tokens, mask.shape[2])
    slots = torch.from_numpy(past[:, None] + newest)
    expected_cache[0][index[:, None], :, slots] = turned[:, :, num_heads:]
    expected_cache[1][index[:, None], :, slots] = values
    full = build_full_mask(past, mask, positions, num_positions, how.window)
    keys, values = expected_cache[:, index]
    queries, seen = turned[:, :, :num_heads], torch.from_numpy(full)
    expected = layers.attend(queries, keys, values, seen, how.scale, how.cap, how.sinks)
    lines = positions[:, -num_tokens:] + shift
    plan = kernels.plan_step(rows, positions, lines, past, mask)
    actual = kernels.attend(qkv.clone(), cache, how, plan, num_heads, num_kv, size)
    assert_near(actual, expected)
    assert_near(cache, expected_cache)
    others = [row for row in range(cache.shape[1]) if row not in rows]
    assert torch.equal(cache[:, others], expected_cache[:, others]), "a row outside the step"


ATTENTION = itertools.product(
    FORMS, [None, 1, 2, 4, 30], [0, 4, None], DTYPES, [(4, 4, 8), (8, 2, 40), (6, 1, 64)]
)


@needs_compiler
@pytest.mark.parametrize(
    ("library", "window", "rotated", "dtype", "sizes"), cover(ATTENTION, 3), indirect=["library"]
)
def test_attention(
    library: Path,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    rotated: int | None,
    window: int | None,
) -> None:
    """Two of three cache rows, of different lengths, over a small tree.

    With and without norms of queries and keys, sinks, and a cap on the scores, which are of its
    size.
    """
    heads, kv_heads, size = sizes
    generator = torch.Generator().manual_seed(heads)
    cache = torch.randn(2, 3, kv_heads, 200, size, generator=generator).to(dtype)
    qkv = torch.randn(2, 5, (heads + 2 * kv_heads) * size, generator=generator).to(dtype)
    past = np.array([7, 150])
    mask = np.tril(np.ones((2, 5, 5), bool))
    mask[:, 2, 1] = mask[:, 3, 2] = mask[:, 4, 1] = False
    model = make_model(head_size=size, rotary_pct=1.0 if rotated is None else rotated / size)
    norms: list[Any] = [None, None]
    if window in (2, 4):
        weights = 1 + 0.1 * torch.randn(2, size, generator=generator).to(dtype)
        norms = [layers.Norm(weight, None, 1e-3) for weight in weights]
    how = layers.Attention(
        scale=0.3, cap=None if window == 4 else 2.0, window=window, q_norm=norms[0],
        k_norm=norms[1],
        sinks=torch.linspace(-9, 9, heads).to(dtype) if window in (1, 4, 30) else None,
        rotary=RotaryTable(model, 200, dtype, torch.device("cpu")) if rotated != 0 else None,
    )  # fmt: skip
    check_attention(
        library, cache, qkv, heads, np.array([0, 2]), past,
        past[:, None] + np.array([[0, 1, 1, 2, 2]]), mask, how,
        shift=np.array([[0], [3]]),  # the second row has another table
    )  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_by_blocks(library: Path, dtype: torch.dtype, window: int | None) -> None:
    """A chunk across the end of the third block of positions; more queries than go together."""
    generator, past = torch.Generator().manual_seed(0), np.array([1500, 3])
    cache = torch.randn(2, 2, 1, 1600, 24, generator=generator).to(dtype)
    qkv = torch.randn(2, 70, 6 * 24, generator=generator).to(dtype)
    mask = np.tile(np.tri(70, dtype=bool), (2, 1, 1))
    how = layers.Attention(scale=0.5, cap=None, window=window, rotary=None)
    positions = past[:, None] + np.arange(70)
    check_attention(library, cache, qkv, 4, np.arange(2), past, positions, mask, how)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 2, 3, 6])
@pytest.mark.parametrize(("num_tokens", "group"), [(1, 1), (2, 1), (9, 2)])
def test_attention_over_uncommitted_levels(
    library: Path, dtype: torch.dtype, num_tokens: int, group: int, window: int | None
) -> None:
    """A level of a tree sees some of the levels before it, which lie after the committed."""
    generator, past = torch.Generator().manual_seed(num_tokens), np.array([5, 0])
    cache = torch.randn(2, 2, 2, 64, 8, generator=generator).to(dtype)
    qkv = torch.randn(2, num_tokens, (2 * group + 4) * 8, generator=generator).to(dtype)
    before = torch.rand(2, num_tokens, 3, generator=generator).numpy() < 0.5
    own = np.tile(np.eye(num_tokens, dtype=bool), (2, 1, 1))
    mask = np.concatenate((before, own), axis=2)
    positions = past[:, None] + np.array([0, 1, 1, *[2] * num_tokens])
    how = layers.Attention(scale=8**-0.5, cap=None, window=window, rotary=None)
    check_attention(library, cache, qkv, 2 * group, np.arange(2), past, positions, mask, how)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 50])
def test_ranking(library: Path, dtype: torch.dtype, width: int) -> None:
    kernels = native.NativeKernels(library, dtype)
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(50, 24, generator=generator).to(dtype)
    bias = torch.randn(50, generator=generator).to(dtype)
    x = 3 * torch.randn(2, 5, 24, generator=generator).to(dtype)
    tokens, scores = kernels.rank_outputs(x, kernels.pack_matrix(weight), bias, 50, width)
    assert tokens.shape == scores.shape == (2, 5, width)
    logits = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    expected = logits.log_softmax(-1).topk(width, dim=-1)
    assert (scores - expected.values).abs().max() <= 2e-4
    assert torch.equal(tokens, expected.indices)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranking_by_integers(library: Path, dtype: torch.dtype) -> None:
    kernels = native.NativeKernels(library, dtype)
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(-127, 128, (50, 64), generator=generator, dtype=torch.int8)
    packed = kernels.pack_integers(codes, torch.full((50, 1), 1e-2), bits=8, group=64)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    tokens, scores = kernels.rank_outputs(x, packed, None, 50, 5)
    logits = round_inputs(x, 64) @ (codes.float() * 1e-2).T
    expected = logits.log_softmax(-1).topk(5, dim=-1)
    assert (scores - expected.values).abs().max() <= 2e-4
    assert torch.equal(tokens, expected.indices)


@in_every_form
@pytest.mark.parametrize("dtype", DTYPES)
def test_ranking_of_what_is_no_number(library: Path, dtype: torch.dtype) -> None:
    """NaN comes last, as minus infinity does: sorting needs an order of all there is."""
    kernels = native.NativeKernels(library, dtype)
    packed = kernels.pack_matrix(torch.eye(7, dtype=dtype))
    nan, inf = float("nan"), float("inf")
    bias = torch.tensor([nan, 2, nan, 3, -inf, 1, nan], dtype=dtype)
    x = torch.zeros(1, 7, dtype=dtype)
    for width in range(1, 8):
        tokens, scores = kernels.rank_outputs(x, packed, bias, 7, width)
        assert tokens[0].tolist() == [3, 1, 5, 0, 2, 4, 6][:width]
        assert scores.isnan().all()  # as torch's log_softmax has it
    tokens, _ = kernels.rank_outputs(x, packed, torch.full((7,), nan, dtype=dtype), 7, 7)
    assert tokens[0].tolist() == list(range(7))


def test_window_mask_counts_positions_not_slots() -> None:
    """Brute force over a tree whose nodes share positions."""
    past, window = np.array([6, 2]), 3
    tree_mask = np.zeros((2, 4, 4), bool)
    tree_mask[0] = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    tree_mask[1] = np.tril(np.ones((4, 4), bool))
    positions = np.array([[6, 7, 7, 8], [2, 3, 4, 5]])
    mask = build_full_mask(past, tree_mask, positions, 12, window)
    assert mask.shape == (2, 1, 4, 12)
    for row in range(2):
        for token in range(4):
            lowest = positions[row, token] - window
            for slot in range(12):
                node = slot - past[row]
                if node < 0:
                    seen = slot > lowest
                else:
                    seen = (
                        node < 4 and tree_mask[row, token, node] and positions[row, node] > lowest
                    )
                assert mask[row, 0, token, slot] == seen, (row, token, slot)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_outputs", "depth"), [(1, 1), (33, 7), (96, 40), (320, 321)])
@in_every_form
def test_products(library: Path, dtype: torch.dtype, num_outputs: int, depth: int) -> None:
    """Any number of rows; and a row's result is the same among others, to the last bit."""
    kernels = native.NativeKernels(library, dtype)
    generator = torch.Generator().manual_seed(depth)
    weight = torch.randn(num_outputs, depth, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype)
    x = torch.randn(41, depth, generator=generator).to(dtype)
    packed = kernels.pack_matrix(weight)
    whole = kernels.multiply(x, packed, bias, num_outputs)
    assert whole.dtype is dtype
    assert_near(whole, (x.double() @ weight.double().T + bias.double()).to(dtype))
    for count in range(1, 41):
        part = kernels.multiply(x[41 - count :], packed, bias, num_outputs)
        assert torch.equal(part, whole[41 - count :]), count
    assert kernels.multiply(x[:0], packed, bias, num_outputs).shape == (0, num_outputs)
    unbiased = kernels.multiply(x[None], packed, None, num_outputs)
    assert unbiased.shape == (1, 41, num_outputs)
    assert_near(unbiased[0], (x.double() @ weight.double().T).to(dtype))


def multiply_in_bands(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T in the order of AMX, with its roundings and without denormal numbers."""
    tiny = 2.0**-126

    def add(a: Array, b: Array) -> Array:
        """a + b, rounded once to float32: first to the odd neighbour in float64, if inexact."""
        total = a + b
        seen = total - a
        error = (a - (total - seen)) + (b - seen)
        is_even = total.view(np.int64) % 2 == 0
        other = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        total = np.where((error != 0) & is_even & np.isfinite(total), other, total)
        is_tiny = np.abs((total * 2.0**64).astype(np.float32)) < tiny * 2.0**64
        return np.where(is_tiny, 0.0, total.astype(np.float32).astype(np.float64))

    def read(numbers: torch.Tensor) -> Array:
        wide = numbers.double().numpy()
        wide = np.where(np.abs(wide) < tiny, 0.0, wide)
        return np.pad(wide, ((0, 0), (0, -wide.shape[1] % 32)))

    rows, columns = read(x), read(weight)
    sums = np.zeros((len(rows), len(columns)))
    with np.errstate(all="ignore"):
        for band in range(0, rows.shape[1], 32):
            parts = [np.zeros_like(sums), np.zeros_like(sums)]
            for at in range(band, band + 32):
                product = rows[:, None, at] * columns[None, :, at]
                parts[at % 2] = add(parts[at % 2], product)
            sums = add(sums, add(*parts))
        return torch.from_numpy(sums.astype(np.float32)).bfloat16()


@needs_compiler
@pytest.mark.parametrize("library", PLAIN_AND_OWN, indirect=True)
@pytest.mark.parametrize(
    "exponents", [(120, 130), (40, 90), (60, 68), (0, 4), (170, 200), (0, 256)]
)
def test_products_in_the_order_of_amx(
    request: pytest.FixtureRequest, library: Path, exponents: tuple[int, int]
) -> None:
    """Sums that cancel out but for roundings, and numbers at the ends of what there is."""
    kernels = native.NativeKernels(library, torch.bfloat16)
    if request.node.callspec.params["library"] == "own" and not kernels.uses_amx:
        pytest.skip("this processor has no AMX")
    generator = torch.Generator().manual_seed(exponents[0])

    def make(*shape: int) -> torch.Tensor:
        sign, exponent, fraction = (
            torch.randint(*ends, shape, generator=generator)
            for ends in ((0, 2), exponents, (0, 128))
        )
        bits = sign << 15 | exponent << 7 | fraction
        return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)

    # Up to two, three, four and more blocks of rows are multiplied in different orders.
    for num_outputs, depth in [(1, 1), (70, 39), (600, 70), (33, 320), (100, 2112)]:
        half = depth // 2
        x, weight = make(144 if depth == 70 else 64, depth), make(num_outputs, depth)
        for start in (0, 20):  # every other row cancels
            x[start::2, half : 2 * half] = -x[start::2, :half]
        weight[:, half : 2 * half] = weight[:, :half]
        packed, expected = kernels.pack_matrix(weight), multiply_in_bands(x, weight)
        for count in (144, 72, 64, 57, 40, 33, 17, 5, 1):
            actual = kernels.multiply(x[:count], packed, None, num_outputs)
            torch.testing.assert_close(actual, expected[:count], rtol=0, atol=0, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("library", PLAIN_AND_OWN, indirect=True)
def test_a_row_of_a_large_matrix_has_the_same_bits(library: Path) -> None:
    """One row goes another way there than several do."""
    kernels = native.NativeKernels(library, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 1100, generator=generator).bfloat16()
    weight = torch.randn(1000, 1100, generator=generator).bfloat16()
    x[:, 550:], weight[:, 550:] = -x[:, :550], weight[:, :550]  # all but roundings cancels out
    packed = kernels.pack_matrix(weight)
    whole = kernels.multiply(x, packed, None, 1000)
    assert whole.count_nonzero() > 100
    for row in range(3):
        assert torch.equal(kernels.multiply(x[row : row + 1], packed, None, 1000)[0], whole[row])


@needs_compiler
def test_a_system_that_refuses_amx_is_told(
    library: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.NativeKernels, "_ask_for_amx", lambda self: 0)
    kernels = native.NativeKernels(library, torch.bfloat16)
    assert "lets no process use the processor's AMX" in caplog.text
    assert not kernels.uses_amx
    caplog.clear()
    native.NativeKernels(library, torch.float16)  # whose products have no use for it
    assert not caplog.text
    monkeypatch.setattr(native.NativeKernels, "_ask_for_amx", lambda self: 1)
    assert native.NativeKernels(library, torch.bfloat16).uses_amx
    assert not native.NativeKernels(library, torch.float32).uses_amx
    assert not caplog.text


@needs_compiler
@in_every_form
def test_every_float16_number(library: Path) -> None:
    """Widened one by one and by vectors, and rounded to nearest, ties to even, as torch does."""
    kernels = native.NativeKernels(library, torch.float16)
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = numbers[numbers.isfinite()]
    column = kernels.pack_matrix(finite[:, None])
    one = torch.ones(1, 1, dtype=torch.float16)
    assert torch.equal(kernels.multiply(one, column, None, len(finite))[0], finite)
    norm = layers.Norm(torch.ones(1 << 16, dtype=torch.float16), None, 1e-5)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(1 << 16, generator=generator)
    # Sums far below the others' last bit, ties, overflow, infinities and no numbers among them.
    others = [torch.zeros(1 << 16), numbers.float(), numbers[order].float(), -numbers.float() / 2]
    for other in others:
        total = numbers.clone()[None]
        kernels.add_norm(total, other.half()[None], norm)
        expected = numbers.float() + other.half().float()
        torch.testing.assert_close(total[0], expected.half(), rtol=0, atol=0, equal_nan=True)


@needs_compiler
def test_kernels_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small source in the kernels' place, until it, its header or what is kept changes."""
    source, header = tmp_path / "kernels.cpp", tmp_path / "kernels" / "answer.h"
    source.write_text('#include "kernels/answer.h"\n')
    header.parent.mkdir()
    header.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(native_library, "SOURCE", source)
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    calls: list[Path] = []

    def call(command: list[str], *, output: Path | None = None) -> str:
        calls.extend([output] if output is not None else [])
        return call_compiler(command, output=output)

    monkeypatch.setattr(native_library, "call_compiler", call)
    infos, contents = [], []
    for name, count in (("first", 2), ("second", 2), ("third", 4), ("fourth", 6)):
        (tmp_path / name).mkdir()
        infos.append(native_library.compile_kernels(tmp_path / name))
        library = tmp_path / name / native_library.LIBRARY_NAME
        assert [path.name for path in (tmp_path / name).iterdir()] == [library.name]
        contents.append(library.read_bytes())
        assert len(calls) == count  # compiled and linked
        if name == "second":
            (kept,) = (tmp_path / "cache" / "kernels").iterdir()
            kept.write_bytes(contents[0][:-1])
        if name == "third":
            header.write_text('extern "C" int answer() { return 43; }\n')
    assert infos[0] == infos[1] == infos[2] != infos[3]
    assert contents[0] == contents[1]


@needs_compiler
@in_every_form
@SHAPES
def test_mamba2(library: Path, groups: int, heads: int, num_taps: int) -> None:
    check_outputs(groups, heads, num_taps, native.NativeKernels(library, torch.float32))
