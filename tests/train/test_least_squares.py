"""First weights by least squares: a target whose next states are linear is guessed at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.errors import SpecDecError
from specdec.methods.eagle import Eagle3Params
from specdec.model.config import ModelConfig
from specdec.train.features import Features, OutputHead
from specdec.train.methods.eagle_parts.least_squares import start_from_least_squares
from specdec.train.methods.eagle_parts.nets import Eagle, Eagle1, Eagle3
from specdec.train.rows import TokenRows
from specdec.train.settings import TrainSettings
from specdec.train.target import RowBatch

HIDDEN, VOCAB, NUM_ROWS, LENGTH = 16, 24, 40, 60
MODEL = ModelConfig(
    architecture="LlamaForCausalLM", dtype="float32", vocab_size=VOCAB, hidden_size=HIDDEN,
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_size=8,
    intermediate_size=20, norm_epsilon=1e-5, max_position_embeddings=64, rotary_base=1e4,
)  # fmt: skip
PARAMS = Eagle3Params(aux_layers=(0, 1), draft_vocab_size=VOCAB, norm_before_residual=False)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class LinearTarget:
    """Target whose next last hidden state is linear in what the drafter reads.

    rank: of the part that the next token's embedding has.
    """

    name = "linear"

    def __init__(self, *, reads_auxiliary: bool, rank: int = HIDDEN) -> None:
        self.table = draw(VOCAB, HIDDEN, seed=1) + 0.5  # all embeddings share a direction
        self.head = OutputHead(draw(VOCAB, HIDDEN, seed=2))
        self.reads_auxiliary = reads_auxiliary
        self.embedding_part = draw(HIDDEN, rank, seed=3) @ draw(rank, HIDDEN, seed=4) / rank
        self.state_part = draw(2 * HIDDEN if reads_auxiliary else HIDDEN, HIDDEN, seed=6) / 6
        self.rows_read: list[int] = []

    def expect(self, rows: TokenRows, indices: list[int]) -> None:
        self.rows_read += indices

    def read(self, batch: RowBatch) -> Features:
        """Compute each row by itself, as targets do on a processor."""
        embedded = self.table[batch.tokens]
        num_places = embedded.shape[1]
        auxiliary = [draw(num_places, 2 * HIDDEN, seed=row + 9) for row in batch.indices]
        hidden = [self.compute(*row) for row in zip(embedded, auxiliary, strict=True)]
        return Features(
            batch.tokens, torch.stack(hidden), embedded, self.head, torch.stack(auxiliary)
        )

    def compute(self, embedded: Tensor, auxiliary: Tensor) -> Tensor:
        """Return a row's last hidden states, [T, D]."""
        auxiliary[:, 5] *= 1000  # a channel as large as those of real targets
        if self.reads_auxiliary:
            states = auxiliary / torch.where(torch.arange(2 * HIDDEN) == 5, 1000, 1)
            embedded = embedded / embedded.square().mean(-1, keepdim=True).sqrt()
            inputs = torch.cat((torch.zeros(1, HIDDEN), (states @ self.state_part)[:-1]))
            return inputs + embedded @ self.embedding_part
        hidden = [torch.zeros(HIDDEN)]
        for part in (embedded @ self.embedding_part)[1:]:
            hidden.append(hidden[-1] @ self.state_part + part)
        return torch.stack(hidden)


def make_rows(num_rows: int = NUM_ROWS) -> TokenRows:
    lengths = np.full(num_rows, LENGTH)
    lengths[1::2] -= 7
    tokens = np.random.default_rng(7).integers(VOCAB, size=lengths.sum())
    mask = np.ones(len(tokens), bool)
    mask[::5] = False
    return TokenRows(tokens, mask, np.concatenate(([0], lengths.cumsum())))


def make_eagle3(target: LinearTarget, model: ModelConfig = MODEL, **params: Any) -> Eagle3:
    torch.manual_seed(0)
    settings = TrainSettings(self_distillation=1.0, eagle_version="3")
    return Eagle3(settings, model, target.head, dataclasses.replace(PARAMS, **params))


def start(drafter: Eagle, target: LinearTarget, rows: TokenRows, batch_size: int = 4) -> bool:
    return start_from_least_squares(drafter, target, rows, batch_size)


def read_unseen(target: LinearTarget) -> Features:
    """Return the features of rows that the fit has not read."""
    rows = make_rows(12)
    tokens, mask = map(torch.from_numpy, rows.make_batch(list(range(12))))
    return target.read(RowBatch(rows, list(range(1000, 1012)), tokens, mask))


def measure_top_1(drafter: Eagle3, features: Features) -> float:
    """Return the share of places at which the first guess is the target's likeliest token."""
    assert features.head is not None
    with torch.no_grad():
        guess = drafter.norm(drafter.draft_states(features)[0]) @ drafter.lm_head.weight.T
        wanted = features.head.compute_logits(features.hidden[:, 1:-1])
    return float((guess.argmax(-1) == wanted.argmax(-1)).float().mean())


def test_eagle1_guesses_the_next_state() -> None:
    target = LinearTarget(reads_auxiliary=False)
    torch.manual_seed(0)
    drafter = Eagle1(TrainSettings(eagle_noise=0.0, self_distillation=1.0), MODEL)
    assert start(drafter, target, make_rows())
    features = read_unseen(target)
    with torch.no_grad():
        error = drafter.draft_states(features)[0] - features.hidden[:, 1:-1]
    assert float(error.norm() / features.hidden[:, 1:-1].norm()) < 0.02


@pytest.mark.parametrize(
    ("num_kv_heads", "rank", "params"),
    [(2, HIDDEN, {}), (1, 8, {}), (4, HIDDEN, {"norm_output": True}), (4, 3, {})],
)
def test_eagle3_guesses_the_next_token(num_kv_heads: int, rank: int, params: Any) -> None:
    """Also where the key/value heads have no more than the rank of the embedding's part."""
    target = LinearTarget(reads_auxiliary=True, rank=rank)
    model = dataclasses.replace(MODEL, num_key_value_heads=num_kv_heads)
    drafter = make_eagle3(target, model, **params)
    features = read_unseen(target)
    assert measure_top_1(drafter, features) < 0.4
    assert start(drafter, target, make_rows())
    assert measure_top_1(drafter, features) > 0.65


def test_normed_states_are_fitted_as_they_are_read() -> None:
    """Norms of the states change what is linear: what is left is still most of it."""
    target = LinearTarget(reads_auxiliary=True)
    kinds: list[dict[str, Any]] = [{"fc_norm": True}, {"norm_before_fc": True}]
    for params in kinds:
        drafter = make_eagle3(target, **params)
        assert start(drafter, target, make_rows())
        assert all(weight.isfinite().all() for weight in drafter.parameters())
        # The large channel alone is left of the layer that has it.
        assert measure_top_1(drafter, read_unseen(target)) > 0.15


def test_weights_do_not_depend_on_the_size_of_a_batch() -> None:
    """Each of several processes finds them for itself, whatever batches it was given."""
    target, rows = LinearTarget(reads_auxiliary=True), make_rows(200)  # more than are read
    drafters = [make_eagle3(target) for _ in range(2)]
    for drafter, batch_size in zip(drafters, (1, 7), strict=True):
        assert start(drafter, target, rows, batch_size)
    for one, other in zip(*(drafter.parameters() for drafter in drafters), strict=True):
        assert torch.equal(one, other)


def test_no_more_rows_are_read_than_a_fit_takes() -> None:
    target = LinearTarget(reads_auxiliary=True)
    assert start(make_eagle3(target), target, make_rows(200))
    assert 40 < len(target.rows_read) < 60  # 40 labels for each of 48 features


def test_too_few_labels_leave_random_weights() -> None:
    target = LinearTarget(reads_auxiliary=True)
    drafter, untouched = make_eagle3(target), make_eagle3(target)
    assert not start(drafter, target, make_rows(3))
    for one, other in zip(drafter.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not target.rows_read


def test_states_that_overflowed_are_refused() -> None:
    target = LinearTarget(reads_auxiliary=True)
    target.table[3] = torch.inf
    with pytest.raises(SpecDecError, match=r"linear: .* of the first \d+ labels are not"):
        start(make_eagle3(target), target, make_rows())


def take_step(drafter: Eagle3, features: Features, learning_rate: float) -> None:
    """Take one step of AdamW towards the target's likeliest tokens."""
    assert features.head is not None
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=learning_rate, weight_decay=0.0)
    guess = drafter.norm(drafter.draft_states(features)[0]) @ drafter.lm_head.weight.T
    wanted = features.head.compute_logits(features.hidden[:, 1:-1]).argmax(-1)
    loss = torch.nn.functional.cross_entropy(guess.flatten(0, 1), wanted.flatten())
    torch.autograd.backward(loss)
    optimizer.step()


def test_a_first_step_keeps_the_fit() -> None:
    """Without even inputs, it would step far along the large channel."""
    target = LinearTarget(reads_auxiliary=True)
    drafter = make_eagle3(target)
    start(drafter, target, make_rows())
    features = read_unseen(target)
    fitted = measure_top_1(drafter, features)
    uneven = make_eagle3(target)
    uneven.load_state_dict({
        **drafter.finish_weights(drafter.state_dict()),
        "fc.input_scale": torch.ones(2 * HIDDEN),
    })  # fmt: skip
    assert measure_top_1(uneven, features) == fitted, "what is written guesses alike"
    for net in (drafter, uneven):
        take_step(net, features, 1e-3)
    assert measure_top_1(drafter, features) > 0.95 * fitted
    assert measure_top_1(uneven, features) < 0.5 * fitted
