"""A layer of experts: by torch, by the kernels, in parts; which experts are chosen, and read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.engine.experts import ExpertLayer, Router
from specdec.engine.layers import CutGate
from specdec.engine.linear import Linear
from specdec.engine.native import NativeKernels
from specdec.engine.native_models import ExpertBiases, ExpertSizes, PackedExperts
from specdec.model.experts import Experts
from tests.engine.kernels import needs_compiler

pytestmark = needs_compiler
HIDDEN = 72


def make_layer(
    sizes: Experts, kernels: NativeKernels | None, rank: int = 0, *, broken: int | None = None,
    router: torch.Tensor | None = None, gate: CutGate | None = None, is_gemma: bool = False,
) -> ExpertLayer:  # fmt: skip
    """A rank's part of random experts. broken: the expert whose matrices are NaN.

    gate: that of gpt-oss, whose router and experts have biases. is_gemma: as Gemma 4 has them, with
    gelu and scales.
    """
    generator = torch.Generator().manual_seed(sizes.num)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def cut(up: torch.Tensor, down: torch.Tensor, part: int, parts: int) -> list[Linear]:
        halves = [half.chunk(parts)[part] for half in up.chunk(2)]
        matrices = torch.cat(halves), down.chunk(parts, 1)[part].contiguous()
        biases: list[torch.Tensor | None] = [None, None]
        if gate is not None:  # every number of a matrix tells its row's
            sums = (matrix.sum(1) for matrix in (up, down))
            up_bias, down_bias = (0.5 * bias.double().cos().float() for bias in sums)
            own_rows = [half.chunk(parts)[part] for half in up_bias.chunk(2)]
            biases = [torch.cat(own_rows), None if part else down_bias]
        return [
            Linear(matrix, bias, prepack=False, kernels=kernels)
            for matrix, bias in zip(matrices, biases, strict=True)
        ]

    whole = [(make(2 * sizes.inner, HIDDEN), make(HIDDEN, sizes.inner)) for _ in range(sizes.num)]
    if broken is not None:
        whole[broken] = tuple(torch.full_like(w, torch.nan) for w in whole[broken])  # type: ignore[assignment]
    own = [
        cut(*whole[e], sizes.get_part(rank), sizes.tp_size) for e in sizes.list_rank_experts(rank)
    ]
    shared = None
    if inner := sizes.shared_inner:
        ranks = sizes.tp_size * sizes.ep_size
        parts = cut(make(2 * inner, HIDDEN), make(HIDDEN, inner), rank, ranks)
        shared = parts[0], parts[1], make(1, HIDDEN)
    drawn = make(sizes.num, HIDDEN)
    bias = None if gate is None else 3 * drawn[:, 0].clone()
    scales = 1 + drawn[:, 1] if is_gemma else None
    return ExpertLayer(
        sizes, rank, gate or ("gelu_tanh" if is_gemma else "swiglu"),
        Router(drawn if router is None else router, bias, scales=scales),
        [up for up, _ in own], [down for _, down in own], shared, kernels,
    )  # fmt: skip


def run(
    layer: ExpertLayer, kernels: NativeKernels | None, x: torch.Tensor,
    routed: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    if kernels is None:
        return layer(x, routed)
    assert layer.packed is not None
    return kernels.mix_experts(x, layer.packed, routed)


@pytest.fixture(params=[False, True], ids=["torch", "native"])
def kernels(request: pytest.FixtureRequest, library: Path) -> NativeKernels | None:
    return NativeKernels(library, torch.float32) if request.param else None


X = torch.randn(2, 7, HIDDEN, generator=torch.Generator().manual_seed(1))
ALL = Experts(num=6, top_k=3, inner=40, shared_inner=48, renormalizes=False)


@pytest.mark.parametrize("renormalizes", [False, True])
def test_the_sum_by_its_definition(kernels: NativeKernels | None, renormalizes: bool) -> None:
    sizes = Experts(num=5, top_k=2, inner=40, renormalizes=renormalizes)
    plain, expected = make_layer(sizes, None), torch.zeros_like(X)
    for place in np.ndindex(2, 7):
        scores = (plain.router.weight @ X[place]).exp()
        order = sorted(range(5), key=lambda e: -float(scores[e]))[:2]
        total = scores[order].sum() if renormalizes else scores.sum()
        for e in order:
            multiplied, activated = plain.up[e](X[place]).chunk(2)
            y = plain.down[e](torch.nn.functional.silu(activated) * multiplied)
            expected[place] += scores[e] / total * y
    torch.testing.assert_close(run(make_layer(sizes, kernels), kernels, X), expected)


@pytest.mark.parametrize("x", [X, 4 * X], ids=["within the limit", "beyond it"])
def test_a_cut_gate_and_biases_by_their_definition(
    kernels: NativeKernels | None, x: torch.Tensor
) -> None:
    sizes, gate = Experts(num=5, top_k=2, inner=40), CutGate(1.25, 1.7)
    plain, expected = make_layer(sizes, None, gate=gate), torch.zeros_like(x)
    assert plain.router.bias is not None
    for place in np.ndindex(2, 7):
        scores = plain.router.weight @ x[place] + plain.router.bias
        top = scores.topk(2)
        for e, weight in zip(top.indices.tolist(), top.values.softmax(0), strict=True):
            up, activated = plain.up[e](x[place]).chunk(2)
            activated = activated.clamp(max=1.25)
            inner = (up.clamp(-1.25, 1.25) + 1) * activated * torch.sigmoid(1.7 * activated)
            expected[place] += weight * plain.down[e](inner)
    torch.testing.assert_close(run(make_layer(sizes, kernels, gate=gate), kernels, x), expected)


def test_scales_and_a_router_with_an_input_of_its_own(kernels: NativeKernels | None) -> None:
    """As Gemma 4 has them, whose weights are made to add up to 1 before they are scaled."""
    sizes, routed = Experts(num=5, top_k=2, inner=40), X.flip(-1)
    plain, expected = make_layer(sizes, None, is_gemma=True), torch.zeros_like(X)
    assert plain.router.scales is not None
    for place in np.ndindex(2, 7):
        top = (plain.router.weight @ routed[place]).topk(2)
        for e, weight in zip(top.indices.tolist(), top.values.softmax(0), strict=True):
            multiplied, activated = plain.up[e](X[place]).chunk(2)
            gelu = torch.nn.functional.gelu(activated, approximate="tanh")
            expected[place] += weight * plain.router.scales[e] * plain.down[e](gelu * multiplied)
    layer = make_layer(sizes, kernels, is_gemma=True)
    torch.testing.assert_close(run(layer, kernels, X, routed), expected)


@pytest.mark.parametrize("gate", [None, CutGate(1.25, 1.7)], ids=["silu", "cut"])
@pytest.mark.parametrize(("tp_size", "ep_size"), [(2, 1), (1, 2), (2, 2), (1, 3)])
def test_ranks_add_up_to_the_whole(
    kernels: NativeKernels | None, tp_size: int, ep_size: int, gate: CutGate | None
) -> None:
    shared_inner = 0 if gate else ALL.shared_inner
    whole = make_layer(dataclasses.replace(ALL, shared_inner=shared_inner), None, gate=gate)(X)
    sizes = dataclasses.replace(ALL, shared_inner=shared_inner, tp_size=tp_size, ep_size=ep_size)
    layers = [make_layer(sizes, kernels, rank, gate=gate) for rank in range(tp_size * ep_size)]
    torch.testing.assert_close(sum(run(layer, kernels, X) for layer in layers), whole)
    assert all(layer.counters.tolist() == layers[0].counters.tolist() for layer in layers)


def test_only_chosen_experts_are_read(kernels: NativeKernels | None) -> None:
    """One that no token takes may be anything; it counts as soon as a token takes it."""
    sizes = Experts(num=6, top_k=2, inner=40)
    _, chosen = make_layer(sizes, None).choose(X.view(-1, HIDDEN)[:2])
    broken = next(e for e in range(6) if e not in chosen)
    layer = make_layer(sizes, kernels, broken=broken)
    assert run(layer, kernels, X[:1, :2]).isfinite().all()
    assert layer.counters.tolist() == [1, 2, len(set(chosen.flatten().tolist()))]
    assert not run(layer, kernels, X).isfinite().all()


def test_a_token_has_the_same_bits_alone(library: Path) -> None:
    """In float32, where no rounding of the sum hides another order."""
    kernels = NativeKernels(library, torch.float32)
    layer = make_layer(ALL, kernels)
    together = run(layer, kernels, X)
    for place in np.ndindex(2, 7):
        assert torch.equal(run(layer, kernels, X[place][None])[0], together[place])


@pytest.mark.parametrize(("num", "top_k"), [(5, 1), (8, 2), (60, 4), (128, 8), (128, 2), (200, 3)])
def test_ties_are_broken_as_torch_does(library: Path, num: int, top_k: int) -> None:
    """Experts whose output tells them apart; groups of them, and all, have one score."""
    kernels = NativeKernels(library, torch.float32)
    sizes = Experts(num=num, top_k=top_k, inner=8, renormalizes=False)
    for groups in (1, 3, num // 2):
        values = torch.arange(num) % groups / groups
        router = torch.zeros(num, HIDDEN)
        router[:, 0] = values
        x = torch.ones(1, 1, HIDDEN)
        torch.testing.assert_close(
            run(make_layer(sizes, kernels, router=router), kernels, x),
            run(make_layer(sizes, None, router=router), None, x),
        )


def test_what_is_no_layer_of_experts_is_refused(library: Path) -> None:
    """Before the kernels would reach beyond it."""
    kernels = NativeKernels(library, torch.float32)
    packed = (
        kernels.pack_matrix(torch.zeros(16, HIDDEN)),
        kernels.pack_matrix(torch.zeros(HIDDEN, 8)),
    )
    sizes = ExpertSizes(
        hidden=HIDDEN, top_k=2, first_expert=1, inner=8, shared_inner=0, renormalizes=True
    )
    good = {
        "router": torch.zeros(3, HIDDEN), "up": [packed[0]] * 2, "down": [packed[1]] * 2,
        "shared_expert": None, "sizes": sizes, "counters": np.zeros(3, np.int64),
    }  # fmt: skip
    experts = PackedExperts(kernels, **good)  # type: ignore[arg-type]
    for wrong, message in (
        ({"router": torch.zeros(3, HIDDEN, dtype=torch.bfloat16)}, "a router is"),
        ({"sizes": dataclasses.replace(sizes, top_k=4)}, "4 experts of 3"),
        ({"sizes": dataclasses.replace(sizes, top_k=0)}, "0 experts of 3"),
        ({"sizes": dataclasses.replace(sizes, first_expert=2)}, "2 and 2 from 2 on"),
        ({"down": [packed[1]]}, "2 and 1 from 1 on"),
        ({"sizes": dataclasses.replace(sizes, inner=40)}, "an expert's matrix is"),
        ({"up": [packed[0], None]}, "is not packed"),
        ({"counters": np.zeros(2, np.int64)}, "counters are"),
        ({"shared_expert": (*packed, torch.zeros(1, HIDDEN))}, "an expert's matrix is"),
    ):
        with pytest.raises(ValueError, match=message):
            PackedExperts(kernels, **(good | wrong))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="biases or scales of a router"):
        PackedExperts(kernels, **good, biases=ExpertBiases(scales=torch.zeros(2)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="what a router reads is"):
        kernels.mix_experts(torch.zeros(2, HIDDEN), experts, torch.zeros(3, HIDDEN))
    for x in (torch.zeros(2, HIDDEN - 1), torch.zeros(2, HIDDEN, dtype=torch.float16)):
        with pytest.raises(ValueError, match="x is"):
            kernels.mix_experts(x, experts)
