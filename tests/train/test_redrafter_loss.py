"""The drafter's arithmetic against a slow one written from the formulas, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.train import loss as loss_module
from specdec.train.features import Features, TargetShape
from specdec.train.loss import Measures, compute_loss, measure_positions, rank_labels
from specdec.train.methods.redrafter import ReDrafter
from specdec.train.settings import TrainSettings

HIDDEN, VOCAB, STEPS = 6, 11, 3
SHAPE = TargetShape(hidden_size=HIDDEN, vocab_size=VOCAB)
KINDS: dict[str, dict[str, Any]] = {
    "rnn": dict(rnn=True, num_layers=2),
    "sum": dict(rnn=False, num_layers=1),
    "projected": dict(rnn=True, num_layers=1, exit_dim=7),
    "decay": dict(rnn=True, num_layers=0, loss_decay=0.5),
}


def make_drafter(kind: str) -> ReDrafter:
    torch.manual_seed(0)
    options = {f"redrafter_{name}": value for name, value in KINDS[kind].items()}
    return ReDrafter(TrainSettings(redrafter_predict_n_tokens=STEPS, **options), SHAPE)


def make_batch(num_rows: int = 3, length: int = 9) -> tuple[Features, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = Features(
        tokens=torch.randint(0, VOCAB, (num_rows, length), generator=generator),
        hidden=torch.randn(num_rows, length, HIDDEN, generator=generator),
        embedded=torch.randn(num_rows, length, HIDDEN, generator=generator),
    )
    return features, torch.rand(num_rows, length, generator=generator) < 0.7


def apply_silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def compute_reference_logits(
    weights: dict[str, Tensor], hidden: Tensor, embedded: list[Tensor], *, is_rnn: bool
) -> Tensor:
    """Logits of one draft step: `embedded` are the tokens read so far, all [D]."""
    state = torch.zeros(HIDDEN)
    for e in embedded:
        if is_rnn:
            u = weights["rnn_u.weight"] @ state + weights["rnn_u.bias"]
            state = apply_silu(weights["rnn_w.weight"] @ e + u)
        else:
            state = state + e
    x = torch.cat([hidden, state])
    if "input_proj.weight" in weights:
        x = weights["input_proj.weight"] @ x + weights["input_proj.bias"]
    layer = 0
    while f"lm_head.{layer}.linear.weight" in weights:
        name = f"lm_head.{layer}.linear"
        x = x + apply_silu(weights[name + ".weight"] @ x + weights[name + ".bias"])
        layer += 1
    return weights[f"lm_head.{layer}.weight"] @ x


def compute_reference(
    drafter: ReDrafter, features: Features, mask: Tensor
) -> tuple[Tensor, list[list[tuple[int, int, int, Tensor]]]]:
    """Loss, and per draft step the (row, place, label, logits) that made it."""
    weights = dict(drafter.named_parameters())
    total, details = torch.zeros(()), []
    for step in range(STEPS):
        terms, seen = [], []
        for row in range(len(mask)):
            for place in range(mask.shape[1] - 2 - step):
                if not mask[row, place + 2 + step]:
                    continue
                read = [features.embedded[row, place + 1 + j] for j in range(step + 1)]
                logits = compute_reference_logits(
                    weights, features.hidden[row, place], read, is_rnn=drafter.is_rnn
                )
                label = int(features.tokens[row, place + 2 + step])
                terms.append(logits.exp().sum().log() - logits[label])
                seen.append((row, place, label, logits.detach()))
        total = total + drafter.loss_decay**step * torch.stack(terms).mean()
        details.append(seen)
    return total, details


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_elements", [VOCAB, 1 << 20])
def test_loss_and_gradients_match_the_formulas(
    kind: str, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", chunk_elements)
    drafter = make_drafter(kind)
    features, mask = make_batch()
    expected, details = compute_reference(drafter, features, mask)
    torch.autograd.backward(expected)
    gradients = {n: p.grad.clone() for n, p in drafter.named_parameters()}
    drafter.zero_grad()

    num_labels = drafter.count_labels(mask)
    assert num_labels.tolist() == [len(seen) for seen in details]
    loss, _ = drafter(features, mask, num_labels.float(), False)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    loss.backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


def test_measures_match_counting_by_hand() -> None:
    drafter = make_drafter("rnn")
    features, mask = make_batch(num_rows=6, length=12)
    _, details = compute_reference(drafter, features, mask)
    # Train a little, so that there are hits to count.
    optimizer = torch.optim.Adam(drafter.parameters(), lr=0.02)
    for _ in range(30):
        drafter(features, mask, drafter.count_labels(mask).float(), False)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    _, details = compute_reference(drafter, features, mask)
    _, packed = drafter(features, mask, drafter.count_labels(mask).float(), True)
    summary = Measures.unpack(packed, STEPS).summarize()

    right: dict[tuple[int, int, int], bool] = {}
    for step, seen in enumerate(details):
        for k in range(1, 6):
            hits = [label in logits.topk(k).indices.tolist() for _, _, label, logits in seen]
            assert summary["top_k_accuracy"][step][k - 1] == round(sum(hits) / len(hits), 4)
        losses = [float(logits.logsumexp(0) - logits[label]) for _, _, label, logits in seen]
        assert abs(summary["loss_per_position"][step] - sum(losses) / len(losses)) < 1e-3
        for row, place, label, logits in seen:
            right[step, row, place] = int(logits.argmax()) == label
    starts = [
        (row, place)
        for _, row, place in right
        if all((step, row, place) in right for step in range(STEPS))
    ]
    starts = sorted(set(starts))
    lengths = []
    for row, place in starts:
        hits = [right[step, row, place] for step in range(STEPS)]
        lengths.append((hits + [False]).index(False))
    assert 0 < sum(lengths) < STEPS * len(starts)
    assert summary["chain_length"] == round(1 + sum(lengths) / len(lengths), 4)


def test_cutting_a_step_into_batches_changes_nothing() -> None:
    drafter = make_drafter("rnn")
    features, mask = make_batch(num_rows=4)
    num_labels = drafter.count_labels(mask).float()
    whole, _ = drafter(features, mask, num_labels, False)
    parts = [
        Features(features.tokens[p], features.hidden[p], features.embedded[p])
        for p in (slice(0, 1), slice(1, 4))
    ]
    first, _ = drafter(parts[0], mask[:1], num_labels, False)
    second, _ = drafter(parts[1], mask[1:], num_labels, False)
    torch.testing.assert_close(first + second, whole)


@pytest.mark.parametrize("length", [2, 3, 9])
def test_a_batch_without_labels_has_zero_loss_and_gradients(length: int) -> None:
    drafter = make_drafter("projected")
    features, mask = make_batch(length=length)
    nothing = torch.zeros_like(mask)
    loss, packed = drafter(features, nothing, drafter.count_labels(nothing).float(), True)
    loss.backward()
    assert loss.item() == 0
    assert torch.isfinite(packed).all()
    assert all(not p.grad.any() for p in drafter.parameters())


def test_recurrence_reads_one_token_a_step() -> None:
    drafter = make_drafter("rnn")
    features, _ = make_batch()
    states = drafter.compute_states(features.embedded)
    weights = {n: p.detach() for n, p in drafter.named_parameters()}
    expected = torch.zeros(HIDDEN)
    for step in range(STEPS):
        u = weights["rnn_u.weight"] @ expected + weights["rnn_u.bias"]
        expected = apply_silu(weights["rnn_w.weight"] @ features.embedded[2, 4 + 1 + step] + u)
        assert states[step].shape == (3, 9 - 2 - step, HIDDEN)
        torch.testing.assert_close(states[step][2, 4], expected)


def test_equal_logits_rank_by_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    ranks = [int(rank_labels(logits, logits[:, i : i + 1], torch.tensor([[i]]))) for i in range(5)]
    assert ranks == [3, 0, 1, 2, 4]


def test_bfloat16_inputs_give_float32_gradients_of_the_weight() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(7, 4, requires_grad=True)
    labels, weights = torch.tensor([0, 6, 3, 3, 1]), torch.rand(5)
    loss, losses, _ = compute_loss(x, weight, labels, weights, measure=False)
    exact = torch.nn.functional.cross_entropy(
        x.float() @ weight.detach().T, labels, reduction="none"
    )
    torch.testing.assert_close(losses, exact, rtol=0.03, atol=0.03)
    loss.backward()
    assert weight.grad is not None
    assert x.grad is not None
    assert weight.grad.dtype == torch.float32
    assert x.grad.dtype == torch.bfloat16
    assert weight.grad.any()


def test_measures_survive_packing() -> None:
    masks = [torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 3, dtype=torch.bool)]
    ranks = torch.tensor([0, 0, 1, 4, 0, 2, 0])
    measures = measure_positions(torch.arange(7.0), ranks, masks, 2)
    again = Measures.unpack(measures.pack(), 2)
    assert again.loss.tolist() == [6.0, 15.0]
    assert again.num_labels.tolist() == [4.0, 3.0]
    assert again.hits.tolist() == [[2.0, 3.0], [2.0, 2.0]]
    # Three places have both labels: right+right, right+wrong, wrong.
    assert (float(again.chain), float(again.num_chains)) == (3.0, 3.0)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_have_the_published_names_and_shapes(kind: str) -> None:
    drafter = make_drafter(kind)
    width, layers = drafter.exit_dim, drafter.num_layers
    expected: dict[str, tuple[int, ...]] = {f"lm_head.{layers}.weight": (VOCAB, width)}
    for j in range(layers):
        expected[f"lm_head.{j}.linear.weight"] = (width, width)
        expected[f"lm_head.{j}.linear.bias"] = (width,)
    if drafter.is_rnn:
        expected["rnn_u.weight"] = expected["rnn_w.weight"] = (HIDDEN, HIDDEN)
        expected["rnn_u.bias"] = (HIDDEN,)
    if kind == "projected":
        expected["input_proj.weight"], expected["input_proj.bias"] = (7, 2 * HIDDEN), (7,)
    assert {n: tuple(p.shape) for n, p in drafter.state_dict().items()} == expected
