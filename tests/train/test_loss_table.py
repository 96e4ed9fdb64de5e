"""Losses by name and weights by depth, against slow ones in numpy and by their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.methods.eagle import Eagle3Params
from specdec.train import features as features_module
from specdec.train import settings as settings_module
from specdec.train.depth_weights import MEASURED_WEIGHTINGS, SMOOTHING, weigh_depths
from specdec.train.features import OutputHead
from specdec.train.loss import Measures, Teacher, compute_loss, measure_acceptances
from specdec.train.loss_table import LOSSES, compute_acceptance
from specdec.train.methods.base import TrainableDrafter
from specdec.train.methods.eagle_parts.nets import Eagle3
from tests.train import test_drafter_losses as drafters

NUM_LABELS, VOCAB = 6, 9
DRAFT_TOKENS = torch.tensor([0, 2, 3, 7])


def compute_twin(name: str, logits: Any, p: Any) -> float:
    """One label's loss, token by token in float64."""
    q = [np.exp(x) / sum(np.exp(y) for y in logits) for x in logits]
    accepted = sum(min(a, b) for a, b in zip(p, q, strict=True))
    inside = sum(p)
    kl = sum(a / inside * np.log(a / inside / b) for a, b in zip(p, q, strict=True) if a > 0)
    ce = -np.log(q[max(range(len(p)), key=lambda token: p[token])])
    distance = sum(abs(a - b) for a, b in zip(p, q, strict=True)) + (1 - inside)
    weight = np.exp(-3 * accepted)
    return float({
        "kl": kl, "ce": ce, "tv": 1 - accepted, "lk": -np.log(accepted),
        "lk_hybrid": weight * kl + (1 - weight) * (1 - accepted),
        "ce_l1": 0.1 * ce + 0.9 * distance,
    }[name])  # fmt: skip


def draw(is_short: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits of a drafter and probabilities of its target; is_short: for DRAFT_TOKENS alone."""
    generator = torch.Generator().manual_seed(3)
    probabilities = torch.randn(NUM_LABELS, VOCAB, generator=generator, dtype=dtype).softmax(1)
    if is_short:
        probabilities = probabilities[:, DRAFT_TOKENS]
    logits = torch.randn(probabilities.shape, generator=generator, dtype=dtype)
    return logits, probabilities


def test_every_loss_of_the_settings_is_in_the_table() -> None:
    assert settings_module.LOSSES == tuple(LOSSES)
    assert settings_module.DEPTH_WEIGHTINGS == ("decay", "uniform", *MEASURED_WEIGHTINGS)


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_twin_in_numpy(name: str, is_short: bool) -> None:
    logits, probabilities = draw(is_short)
    losses = LOSSES[name](logits, probabilities)
    expected = [
        compute_twin(name, row, p)
        for row, p in zip(logits.numpy(), probabilities.numpy(), strict=True)
    ]
    np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_its_gradient(name: str, is_short: bool) -> None:
    """By small steps; lk_hybrid's weight is a constant, so that of the frozen formula is its."""
    logits, probabilities = draw(is_short)
    logits.requires_grad_()
    if name != "lk_hybrid":
        assert torch.autograd.gradcheck(LOSSES[name], (logits, probabilities))
        return
    weight = (-3 * compute_acceptance(logits, probabilities)).exp().detach()
    expected = weight * LOSSES["kl"](logits, probabilities)
    expected = expected + (1 - weight) * LOSSES["tv"](logits, probabilities)
    gradients = [
        torch.autograd.grad(losses.sum(), logits)[0]
        for losses in (LOSSES[name](logits, probabilities), expected)
    ]
    torch.testing.assert_close(*gradients)


def test_a_perfect_drafter_has_the_least_loss() -> None:
    probabilities = draw(False)[1]
    for name in ("kl", "tv", "lk", "lk_hybrid"):
        losses = LOSSES[name](probabilities.log(), probabilities)
        assert losses.abs().max() < 1e-12, name


def test_mass_outside_of_the_draft_vocabulary_is_never_accepted() -> None:
    """The best that a short vocabulary can do; and a target that chooses outside of it alone."""
    probabilities = draw(True)[1]
    inside = probabilities.sum(1)
    best = (probabilities / inside[:, None]).log()
    torch.testing.assert_close(LOSSES["tv"](best, probabilities), 1 - inside)
    torch.testing.assert_close(LOSSES["lk"](best, probabilities), -inside.log())
    for name, loss in LOSSES.items():
        logits = best.float().requires_grad_()
        losses = loss(logits, torch.zeros_like(logits))
        assert losses.isfinite().all(), name
        assert torch.autograd.grad(losses.sum(), logits)[0].isfinite().all(), name


@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("name", LOSSES)
def test_the_chunked_loss_and_its_gradients(
    name: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of one label, beside a second matrix and under a capped target."""
    monkeypatch.setitem(features_module.CHUNK_ELEMENTS, "cpu", VOCAB)
    torch.manual_seed(0)
    x = torch.randn(NUM_LABELS, 5 + 2, requires_grad=True)
    matrices = [torch.randn(VOCAB, size, requires_grad=True) for size in (5, 2)]
    labels, weights = torch.randint(0, VOCAB, (NUM_LABELS,)), torch.rand(NUM_LABELS)
    head = OutputHead(torch.randn(VOCAB, 4), torch.randn(VOCAB), scale=0.5, cap=2.0)
    teacher = Teacher(torch.randn(NUM_LABELS, 4), head, share, name)
    loss, losses, ranks = compute_loss(
        x, matrices[0], labels, weights, measure=True, teacher=teacher, second_weight=matrices[1]
    )
    loss.backward()
    leaves = [x, *matrices]
    found = [leaf.grad for leaf in leaves]
    logits = x @ torch.cat(matrices, 1).T
    probabilities = head.compute_logits(teacher.hidden).softmax(1)
    hard = -logits.log_softmax(1).gather(1, labels[:, None])[:, 0]
    expected = share * LOSSES[name](logits, probabilities) + (1 - share) * hard
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-4, atol=1e-5)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    torch.testing.assert_close(found, list(wanted), rtol=1e-4, atol=1e-5)
    tokens = probabilities.argmax(1) if share == 1 else labels
    order = logits.argsort(1, descending=True)
    assert ranks.tolist() == [(o == t).nonzero().item() for o, t in zip(order, tokens, strict=True)]


def measure_slowly(drafter: TrainableDrafter, head: OutputHead, guess: Any) -> Tensor:
    """Return how probably the tokens of one depth are accepted; for D-PACE, are drafted."""
    x, labels, input_ = guess
    matrices = [m for m in (input_.weight, input_.second_weight) if m is not None]
    logits = input_.x @ torch.cat(matrices, 1).T
    probabilities = head.compute_logits(labels.hidden).softmax(1)
    if drafter.depth_weighting == "dpace" or not drafter.teacher_share:
        tokens = probabilities.argmax(1) if drafter.teacher_share == 1 else labels.tokens
        drafted = (
            list(range(logits.shape[1]))
            if input_.draft_tokens is None
            else input_.draft_tokens.tolist()
        )
        shares = logits.softmax(1)
        return torch.stack([
            shares[i, drafted.index(token)] if token in drafted else torch.zeros(())
            for i, token in enumerate(tokens.tolist())
        ])  # fmt: skip
    if input_.draft_tokens is not None:
        probabilities = probabilities[:, input_.draft_tokens]
    return torch.minimum(logits.softmax(1), probabilities).sum(1)


@pytest.mark.parametrize("weighting", ["uniform", *MEASURED_WEIGHTINGS])
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "p-eagle", "dflash", "dspark"])
def test_depths_are_weighted_by_what_was_accepted(kind: str, weighting: str) -> None:
    drafter = drafters.make_drafter(kind)
    drafter.eval()
    drafter.depth_weighting, drafter.loss_decay = weighting, 1.0
    features, mask = drafters.make_batch()
    num_labels = drafter.count_labels(mask)
    with torch.no_grad():
        guesses = [
            (x, labels, drafter.use_head(features, depth, x, lambda head_input: head_input))
            for depth, (x, labels) in enumerate(drafter.iterate_guesses(features, mask, num_labels))
        ]
        accepted = [measure_slowly(drafter, drafters.make_head(), guess) for guess in guesses]
        weighted = drafter.list_guesses(features, mask, num_labels)
    masks = [labels.mask for _, labels, _ in guesses]
    for row in range(len(mask)):
        for place in range(masks[0].shape[1]):
            chain: dict[int, float] = {}  # acceptance by depth, where there is a label
            factors: dict[int, float] = {}
            for depth, (m, a) in enumerate(zip(masks, accepted, strict=True)):
                if place < m.shape[1] and m[row, place]:
                    index = int(m[:row].sum() + m[row, :place].sum())
                    base, item = guesses[depth][1].weights, weighted[depth][1].weights
                    chain[depth], factors[depth] = float(a[index]), float(item[index] / base[index])
            for depth, factor in factors.items():
                expected = 1.0
                if weighting == "reach":
                    expected = math.prod(chain[d] for d in chain if d < depth)
                elif weighting == "dpace":
                    smooth = {d: (1 - SMOOTHING) * a + SMOOTHING for d, a in chain.items()}
                    products = [math.prod(smooth[d] for d in chain if d <= last) for last in chain]
                    expected = sum(p for last, p in zip(chain, products, strict=True)
                                   if last >= depth)  # fmt: skip
                assert factor == pytest.approx(expected, rel=1e-5)


def test_the_weight_of_a_chain_by_hand() -> None:
    """Two places, the second without its middle token."""
    masks = [torch.tensor([[True, True]]), torch.tensor([[True, False]]), torch.tensor([[True]])]
    accepted = [torch.tensor([0.5, 0.2]), torch.tensor([0.25]), torch.tensor([0.1])]
    reach = weigh_depths("reach", accepted, masks)
    assert [w.tolist() for w in reach] == [[1, 1], [0.5], [0.125]]
    dpace = weigh_depths("dpace", accepted, masks)
    first, second, third = 0.75, 0.75 * 0.625, 0.75 * 0.625 * 0.55
    expected = [[first + second + third, 0.6], [second + third], [third]]
    for weights, values in zip(dpace, expected, strict=True):
        assert weights.tolist() == pytest.approx(values)


@pytest.mark.parametrize("weighting", MEASURED_WEIGHTINGS)
@pytest.mark.parametrize("name", ["kl", "lk_hybrid"])
def test_a_step_is_one_for_any_division_into_batches(name: str, weighting: str) -> None:
    for kind in ("eagle3", "redrafter", "dspark"):
        drafter = drafters.make_drafter(kind)
        drafter.eval()  # DFlash's anchors are drawn in training
        drafter.depth_weighting, drafter.loss_decay, drafter.loss_name = weighting, 1.0, name
        features, mask = drafters.make_batch()
        num_labels = drafter.count_labels(mask)
        whole = drafter(features, mask, num_labels, False)[0]
        parts = [
            drafter(
                type(features)(
                    tokens=features.tokens[i : i + 1], hidden=features.hidden[i : i + 1],
                    embedded=features.embedded[i : i + 1], head=features.head,
                    auxiliary=features.auxiliary[i : i + 1],
                ),
                mask[i : i + 1], num_labels, False,
            )[0]
            for i in range(len(mask))
        ]  # fmt: skip
        assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-5)
        assert whole.requires_grad


@pytest.mark.parametrize("name", ["tv", "lk", "lk_hybrid", "ce_l1"])
def test_a_drafter_of_a_short_vocabulary_learns_what_is_accepted(name: str) -> None:
    """The target's probabilities are of its whole vocabulary, also where `reach` measures."""
    drafter = make_short_drafter(loss=name, depth_weighting="uniform")
    features, mask = drafters.make_batch()
    num_labels = drafter.count_labels(mask)
    loss, _ = drafter(features, mask, num_labels, True)
    expected = torch.zeros(())
    for step, (x, labels) in enumerate(drafter.iterate_guesses(features, mask, num_labels)):
        logits = drafter.norm(x) @ drafter.lm_head.weight.T
        target = (labels.hidden @ drafters.make_head().weight.T).softmax(1)[:, DRAFT_TOKENS]
        expected = expected + LOSSES[name](logits, target).sum() / num_labels[step]
        found = drafter.measure_position(features, step, x, labels)
        torch.testing.assert_close(found, compute_acceptance(logits, target).detach())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def make_short_drafter(**options: Any) -> Eagle3:
    params = Eagle3Params(
        aux_layers=tuple(range(drafters.NUM_AUXILIARY)), draft_vocab_size=len(DRAFT_TOKENS),
        norm_before_residual=False,
    )  # fmt: skip
    recipe = drafters.make_recipe(self_distillation=1.0, **options)
    return Eagle3(recipe, drafters.MODEL, drafters.make_head(), params, DRAFT_TOKENS)


@pytest.mark.parametrize("name", ["kl", "tv"])
def test_choices_outside_of_a_short_vocabulary_are_missed(name: str) -> None:
    drafter = make_short_drafter(loss=name, depth_weighting="uniform")
    features, mask = drafters.make_batch()
    _, packed = drafter(features, mask, drafter.count_labels(mask), True)
    measures = Measures.unpack(packed.detach(), drafter.num_positions)
    guesses = list(drafter.iterate_guesses(features, mask, drafter.count_labels(mask)))
    num_outside = 0
    for depth, (x, labels) in enumerate(guesses):
        choices = (labels.hidden @ drafters.make_head().weight.T).argmax(1)
        order = DRAFT_TOKENS[(drafter.norm(x) @ drafter.lm_head.weight.T).argsort(1).flip(1)]
        hits = [int((order[:, :k] == choices[:, None]).sum()) for k in range(1, drafter.max_k + 1)]
        assert measures.hits[depth].tolist() == hits
        num_outside += int((~torch.isin(choices, DRAFT_TOKENS)).sum())
    assert num_outside > 0


def test_dpace_measures_no_choice_outside_of_a_short_vocabulary() -> None:
    drafter = make_short_drafter(depth_weighting="dpace")
    features, mask = drafters.make_batch()
    x, labels = next(iter(drafter.iterate_guesses(features, mask, drafter.count_labels(mask))))
    measured = drafter.measure_position(features, 0, x, labels)
    head_input = drafter.use_head(features, 0, x, lambda head_input: head_input)
    expected = measure_slowly(drafter, drafters.make_head(), (x, labels, head_input))
    torch.testing.assert_close(measured, expected.detach())
    assert (measured == 0).any()
    assert (measured > 0).any()


def test_without_a_teacher_the_texts_tokens_are_accepted() -> None:
    logits = draw(False, torch.float32)[0]
    tokens = torch.arange(NUM_LABELS)
    found = measure_acceptances(torch.eye(NUM_LABELS), logits.T.contiguous(), tokens)
    torch.testing.assert_close(found, logits.softmax(1)[tokens, tokens])
