"""First weights of an EAGLE drafter by least squares, from the target's states of some rows.

A drafter's first guess is the target's next last hidden state, and most of it is a linear function
of the features that the drafter reads: one pass over some rows and one linear system give what
gradient descent takes hundreds of thousands of tokens to find. EAGLE-1's `fc` is that function.
EAGLE-3 reads the embedding in its attention alone, so there each token looks itself up: keys are
random directions of the embedding, in which it is most like itself, and values and output hold the
embedding's part, of the rank that the key/value heads have (reduced-rank regression). All other
parts of the layers begin with an output of zero.

Legend: D hidden, P features, N labels, R rank, Q query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.errors import SpecDecError
from specdec.system.logs import get_logger

from ...features import Features
from ...rows import TokenRows
from ...target import FrozenTarget, make_batch
from .nets import Eagle, Eagle1, Eagle3, EagleAttention, EagleLayer

LABELS_PER_FEATURE = 40  # that are read: of twice as many the guesses are hardly better
MEASURED_LABELS = 4096  # of which the sizes of features are measured
LEAST_LABELS_PER_FEATURE = 4  # with fewer, the fit is of the rows and not of the model
RIDGE = 1e-3  # penalty of a weight, relative to its feature's square
LACKING_RIDGE = 1e-4  # what directions that a matrix lacks get, of its mean diagonal
SELF_SCORE = 20.0  # attention score of a token with itself; other tokens' are spread around 0
OTHER_WEIGHTS = 0.01  # standard deviation of the attention's weights for the state, at first

logger = get_logger(__name__)


@dataclasses.dataclass
class Moments:
    """Sums over labels of products of features x and of the next last hidden states y."""

    gram: Tensor  # [P, P] sum of x x^T
    cross: Tensor  # [P, D] sum of x y^T
    squares: Tensor  # [D] sum of y^2
    num_labels: int


def start_from_least_squares(
    drafter: Eagle, target: FrozenTarget, rows: TokenRows, batch_size: int
) -> bool:
    """Give a drafter the weights of a least-squares fit; return whether the rows were enough.

    batch_size: rows that the target reads at a time. All processes read the first rows alike.
    Raises SpecDecError where the target's states are not finite.
    """
    num_features = count_features(drafter)
    num_labels = int(rows.mask.sum())
    if num_labels < LEAST_LABELS_PER_FEATURE * num_features:
        logger.info(
            "the drafter begins with random weights: %d labels are too few for least squares of"
            " %d features", num_labels, num_features,
        )  # fmt: skip
        return False
    with torch.no_grad():
        moments = collect_moments(
            drafter, target, rows, batch_size, LABELS_PER_FEATURE * num_features
        )
        for layer in drafter.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        if isinstance(drafter, Eagle3):
            fill_eagle3(drafter, moments)
        elif isinstance(drafter, Eagle1):
            fill_eagle1(drafter, moments)
        squares = moments.gram.diagonal()[: drafter.fc.in_features]
        drafter.fc.even_inputs((squares / moments.num_labels).sqrt())
    logger.info("the drafter begins as the least-squares fit of %d labels", moments.num_labels)
    return True


def collect_moments(
    drafter: Eagle, target: FrozenTarget, rows: TokenRows, batch_size: int, max_labels: int
) -> Moments:
    """Sum up products over the labels of `read_labels`.

    Raises SpecDecError where the target's states are not finite.
    """
    device, width = drafter.fc.weight.device, drafter.model.hidden_size
    num_features = count_features(drafter)
    moments = Moments(
        torch.zeros(num_features, num_features, device=device),
        torch.zeros(num_features, width, device=device), torch.zeros(width, device=device), 0,
    )  # fmt: skip
    for x, y in read_labels(drafter, target, rows, batch_size, max_labels):
        moments.gram.addmm_(x.T, x)
        moments.cross.addmm_(x.T, y)
        moments.squares += y.square().sum(0)
        moments.num_labels += len(x)
    check_finite(moments.gram, moments.num_labels, target)
    return moments


def measure_sizes(drafter: Eagle, target: FrozenTarget, rows: TokenRows, batch_size: int) -> Tensor:
    """Return root mean squares of the inputs of `fc`, [inputs]; raises as `collect_moments`."""
    with torch.no_grad():
        labels = read_labels(drafter, target, rows, batch_size, MEASURED_LABELS)
        inputs = torch.cat([x[:, : drafter.fc.in_features] for x, _ in labels])
    check_finite(inputs, len(inputs), target)
    return inputs.square().mean(0).sqrt()


def read_labels(
    drafter: Eagle, target: FrozenTarget, rows: TokenRows, batch_size: int, max_labels: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the features [n, P] and next last hidden states [n, D] of each row's labels.

    It ends after the row that completes `max_labels` labels. Rows come one by one, so that sums do
    not depend on the size of a batch.
    """
    num_labels = 0
    for start in range(0, len(rows), batch_size):
        indices = list(range(start, min(start + batch_size, len(rows))))
        target.expect(rows, indices)
        batch = make_batch(rows, indices, drafter.fc.weight.device)
        features = target.read(batch)
        inputs = torch.cat(list_inputs(drafter, features), dim=-1)
        for row_inputs, hidden, mask in zip(inputs, features.hidden, batch.mask, strict=True):
            yield row_inputs[mask[2:]], hidden[1:-1][mask[2:]].float()
            num_labels += int(mask[2:].sum())
            if num_labels >= max_labels:
                return


def check_finite(numbers: Tensor, num_labels: int, target: FrozenTarget) -> None:
    """Raise SpecDecError where numbers of the target's states are not finite."""
    if not numbers.isfinite().all():
        raise SpecDecError(
            f"{target.name}: hidden states of the first {num_labels} labels are not finite numbers",
            "train with --dtype float32, where the target's own overflow can be told apart",
        )


def count_features(drafter: Eagle) -> int:
    """Count the numbers that a first guess is fitted from, the embedding's included."""
    is_apart = isinstance(drafter, Eagle3)  # EAGLE-1 reads the embedding in `fc`
    return drafter.fc.in_features + (drafter.model.hidden_size if is_apart else 0)


def list_inputs(drafter: Eagle, features: Features) -> list[Tensor]:
    """List the features of each place's first guess, [B, T-2, ...] each, the embedding's apart."""
    embedded = features.embedded[:, 1:-1].float()
    if not isinstance(drafter, Eagle3):
        return [embedded, features.hidden[:, :-2].float()]
    assert features.auxiliary is not None
    states = drafter.norm_states(features.auxiliary[:, :-2].float())
    return [states, drafter.layers[0].input_layernorm(embedded)]


def solve(moments: Moments) -> Tensor:
    """Return the weights [P, D] of the ridge regression; all penalties are of normed features."""
    size = moments.gram.diagonal().sqrt()
    size = size.clamp(min=1e-6 * float(size.max()))
    system = moments.gram / size[:, None] / size
    system.diagonal().add_(RIDGE)
    factor = torch.linalg.cholesky(system)
    weights: Tensor = torch.cholesky_solve(moments.cross / size[:, None], factor)
    return weights / size[:, None]


def fill_eagle1(drafter: Eagle1, moments: Moments) -> None:
    """Let `fc` be the fit, from the embedding and the last hidden state."""
    drafter.fc.weight.copy_(solve(moments).T)
    if drafter.fc.bias is not None:
        drafter.fc.bias.zero_()


def fill_eagle3(drafter: Eagle3, moments: Moments) -> None:
    """Let `fc` be the fit's part of the states, and the first layer's attention the other part."""
    layer: EagleLayer = drafter.layers[0]
    model, attention = drafter.model, layer.self_attn
    width, num_states = model.hidden_size, drafter.fc.in_features
    rank = min(model.num_key_value_heads * model.head_size, width)
    add_ridge(moments.gram[num_states:, num_states:])
    gram = moments.gram[num_states:, num_states:] / moments.num_labels
    directions = choose_directions(
        solve(moments)[num_states:], gram, drafter.lm_head.weight.float(), rank
    )
    weights = solve(_reduce(moments, directions))
    # The last norm's weights are the channels' sizes, so that what it norms has even channels.
    size = (moments.squares / moments.num_labels).sqrt()
    size = size.clamp(min=1e-3 * float(size.max()))
    weights = weights / size
    drafter.norm.weight.copy_(size)
    drafter.fc.weight.copy_(weights[:num_states].T)
    generator = torch.Generator().manual_seed(0)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        fill_state_part(projection.weight[:, width:], generator)
    let_tokens_find_themselves(attention, gram, generator)
    attention.v_proj.weight[:, :width] = 0.0
    attention.v_proj.weight[:rank, :width] = directions.T
    values = weights.new_zeros(width, model.num_key_value_heads * model.head_size)
    values[:, :rank] = weights[num_states:].T
    group = model.num_attention_heads // model.num_key_value_heads
    outputs = attention.o_proj.weight.view(width, model.num_attention_heads, model.head_size)
    outputs[:, ::group] = values.view(width, model.num_key_value_heads, model.head_size)


def choose_directions(weights: Tensor, gram: Tensor, head: Tensor, rank: int) -> Tensor:
    """Return the directions [D, R] of the embedding of which most of the logits are made.

    weights: [D, D], the fit's of the embedding; gram: [D, D], the embedding's; head: [V, D].
    Numbers along the directions have a variance of 1.
    """
    inner = torch.linalg.cholesky(gram)
    outer = torch.linalg.cholesky(add_ridge(head.T @ head))
    left, *_ = torch.linalg.svd(inner.T @ weights @ outer)
    directions: Tensor = torch.linalg.solve_triangular(inner.T, left[:, :rank], upper=True)
    return directions


def add_ridge(matrix: Tensor) -> Tensor:
    """Make a matrix larger in the directions that it lacks, in place, and return it."""
    matrix.diagonal().add_(LACKING_RIDGE * float(matrix.diagonal().mean()))
    return matrix


def _reduce(moments: Moments, directions: Tensor) -> Moments:
    """Return the moments with the embedding, the last features, in these directions alone."""
    gram, cross = moments.gram, moments.cross
    num_states = len(gram) - len(directions)
    mixed = gram[:num_states, num_states:] @ directions
    reduced = directions.T @ gram[num_states:, num_states:] @ directions
    upper, lower = (gram[:num_states, :num_states], mixed), (mixed.T, reduced)
    return dataclasses.replace(
        moments,
        gram=torch.cat((torch.cat(upper, dim=1), torch.cat(lower, dim=1))),
        cross=torch.cat((cross[:num_states], directions.T @ cross[num_states:])),
    )


def fill_state_part(weight: Tensor, generator: torch.Generator) -> None:
    """Draw small weights, in place, for the state that an attention reads beside the embedding."""
    weight.copy_(OTHER_WEIGHTS * torch.randn(weight.shape, generator=generator))


def let_tokens_find_themselves(
    attention: EagleAttention, gram: Tensor, generator: torch.Generator
) -> None:
    """Let the first query head of each group attend to the token's embedding alone.

    gram: [D, D], the mean of e e^T. The direction that all embeddings share is left out.
    """
    width, head_size = len(gram), attention.head_size
    keys = attention.k_proj.weight.view(-1, head_size, 2 * width)
    random = torch.randn(len(keys), head_size, width, generator=generator).to(gram)
    shared_direction = torch.linalg.eigh(gram)[1][:, -1]
    random -= (random @ shared_direction)[..., None] * shared_direction
    # Of a key of squared length L with itself, the score is L / sqrt(H).
    squares = torch.einsum("khd,de,khe->k", random, gram, random)
    random *= (SELF_SCORE * head_size**0.5 / squares.clamp(min=1e-12)).sqrt()[:, None, None]
    group = len(attention.q_proj.weight) // len(attention.k_proj.weight)
    queries = attention.q_proj.weight.view(len(keys), group, head_size, 2 * width)[:, 0]
    keys[..., :width] = random
    queries[..., :width] = random
