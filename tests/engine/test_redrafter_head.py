"""The drafter's beam search against a slow, beam-by-beam reading of the paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import ALL_LEVELS
from specdec.decode.drafters.calibration import follow_chances
from specdec.decode.drafters.levels import DynamicTree
from specdec.decode.drafters.redrafter import BeamDraft, list_candidates
from specdec.engine import int4, int8, native
from specdec.engine.compiler import find_compiler
from specdec.engine.layout import plan_drafter
from specdec.engine.linear import Linear
from specdec.engine.redrafter import NUM_CANDIDATES, ReDrafterHead
from specdec.files.tensor_file import TensorInfo
from specdec.methods.redrafter import ReDrafterParams
from specdec.model.int4 import pack
from tests.engines import round_inputs

HIDDEN, VOCAB = 16, 90


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> native.NativeKernels:
    if find_compiler() is None:
        pytest.skip("no C++ compiler here")
    return native.NativeKernels(request.getfixturevalue("library"), torch.float32)


def make_head(
    *,
    beams: int,
    length: int,
    rnn: bool,
    exit_dim: int,
    vocab: int = VOCAB,
    kernels: native.NativeKernels | None = None,
) -> tuple[ReDrafterHead, dict[str, torch.Tensor], torch.Tensor]:
    params = ReDrafterParams(
        num_layers=2, hidden_size=HIDDEN, exit_dim=exit_dim, is_rnn=rnn, num_beams=beams,
        draft_len_per_beam=length, greedy_search=True,
    )  # fmt: skip
    model: Any = SimpleNamespace(vocab_size=vocab)
    generator = torch.Generator().manual_seed(beams * 10 + length)
    weights = {
        name: torch.randn(spec.shape, generator=generator) * 0.4
        for name, spec in params.list_tensors(model).items()
    }
    embedding = torch.randn(vocab, HIDDEN, generator=generator)
    return ReDrafterHead(params, weights, embedding, kernels=kernels), weights, embedding


def silu(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = x / (1 + np.exp(-x))
    return result


Stepper = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def make_stepper(
    params: ReDrafterParams, weights: dict[str, np.ndarray], embedding: np.ndarray,
    hidden: np.ndarray, num_kept: int,
) -> Stepper:  # fmt: skip
    """From a state and a token to the next state and log-probabilities, in float64.

    These are normalized over so many tokens, the best; the others have none.
    """

    def step(state: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
        if params.is_rnn:
            state = silu(
                weights["drafter.rnn_w.weight"] @ embedding[token]
                + weights["drafter.rnn_u.weight"] @ state
                + weights["drafter.rnn_u.bias"]
            )
        else:
            state = state + embedding[token]
        x = np.concatenate([hidden, state])
        if params.has_input_proj:
            x = weights["drafter.input_proj.weight"] @ x + weights["drafter.input_proj.bias"]
        for i in range(params.num_layers):
            x = x + silu(
                weights[f"drafter.layers.{i}.linear.weight"] @ x
                + weights[f"drafter.layers.{i}.linear.bias"]
            )
        logits = weights["drafter.lm_head.weight"] @ x
        kept = np.sort(logits)[-num_kept:]
        normalizer = kept.max() + np.log(np.exp(kept - kept.max()).sum())
        return state, np.where(logits >= kept[0], logits - normalizer, -np.inf)

    return step


def search_slowly(params: ReDrafterParams, step: Stepper, token: int) -> list[list[int]]:
    """Extend every beam by every token; keep the best sums of log-probabilities."""
    beams: list[tuple[float, list[int], np.ndarray]] = [(0.0, [], np.zeros(HIDDEN))]
    for _ in range(params.draft_len_per_beam):
        grown = []
        for score, tokens, state in beams:
            after, log_probs = step(state, tokens[-1] if tokens else token)
            grown += [(score + log_probs[v], [*tokens, v], after) for v in range(len(log_probs))]
        grown.sort(key=lambda beam: -beam[0])
        beams = grown[: params.num_beams]
    return [tokens for _, tokens, _ in beams]


@dataclasses.dataclass
class Case:
    """A head, by torch or by the kernels, and three rows to draft for."""

    head: ReDrafterHead
    weights: dict[str, torch.Tensor]
    embedding: torch.Tensor
    hidden: torch.Tensor
    tokens: torch.Tensor

    def make_stepper(self, row: int, num_kept: int) -> Stepper:
        exact = {name: w.double().numpy() for name, w in self.weights.items()}
        hidden, embedding = self.hidden[row].double().numpy(), self.embedding.double().numpy()
        return make_stepper(self.head.params, exact, embedding, hidden, num_kept)


@pytest.fixture(params=[False, True], ids=["torch", "native"])
def make_case(request: pytest.FixtureRequest) -> Callable[..., Case]:
    def make(**shape: Any) -> Case:
        kernels = request.getfixturevalue("kernels") if request.param else None
        head, weights, embedding = make_head(**shape, kernels=kernels)
        assert (head.packed is not None) == request.param
        hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
        return Case(head, weights, embedding, hidden, torch.tensor([4, 80, 33]))

    return make


in_every_shape = pytest.mark.parametrize(
    ("rnn", "exit_dim"), [(True, 2 * HIDDEN), (True, 24), (False, 2 * HIDDEN), (False, 24)]
)


@in_every_shape
@pytest.mark.parametrize(("beams", "length"), [(1, 1), (1, 4), (3, 3), (5, 5)])
def test_search_equals_the_slow_reference(
    rnn: bool, exit_dim: int, beams: int, length: int, make_case: Callable[..., Case]
) -> None:
    case = make_case(beams=beams, length=length, rnn=rnn, exit_dim=exit_dim)
    found = case.head.search_beams(case.hidden, case.tokens)
    assert found.shape == (3, beams, length)
    for row, token in enumerate(case.tokens.tolist()):
        step = case.make_stepper(row, NUM_CANDIDATES)
        assert found[row].tolist() == search_slowly(case.head.params, step, token)


def grow_slowly(
    params: ReDrafterParams, step: Stepper, token: int, num_tokens: int, temperature: float
) -> dict[tuple[int, ...], float]:
    """The likeliest paths of all that the widest nodes of each level lead to, and how likely."""
    seen: dict[tuple[int, ...], float] = {}
    level: list[tuple[tuple[int, ...], float, np.ndarray]] = [((), 0.0, np.zeros(HIDDEN))]
    for _ in range(params.draft_len_per_beam):
        grown: list[tuple[tuple[int, ...], float, np.ndarray]] = []
        for path, score, state in level:
            after, log_probs = step(state, path[-1] if path else token)
            log_probs = log_probs / temperature
            log_probs -= np.logaddexp.reduce(log_probs)
            for v in np.argsort(-log_probs)[: params.num_beams]:
                grown.append(((*path, int(v)), score + log_probs[v], after))
        grown.sort(key=lambda node: -node[1])
        seen |= {path: score for path, score, _ in grown}
        level = grown[: params.num_beams]
    best = sorted(seen, key=lambda path: -seen[path])[:num_tokens]
    return {path: seen[path] for path in best}


def grow(
    head: ReDrafterHead, hidden: torch.Tensor, tokens: np.ndarray, size: int,
    temperatures: np.ndarray, min_gain: float = ALL_LEVELS,
) -> tuple[list[Candidates], int]:  # fmt: skip
    """Dynamic trees and their levels, as the drafter has them."""
    found = head.search_trees(hidden, torch.tensor(tokens), size, temperatures, min_gain)
    assert (found is not None) == (head.packed is not None)
    if found is not None:
        return list_candidates(tokens, found), found.num_levels
    beams, length = head.params.num_beams, head.params.draft_len_per_beam
    draft = BeamDraft(head, hidden, tokens, temperatures, min_gain)
    tree = DynamicTree(top_k=beams, depth=length, num_tokens=size)
    return tree.grow(draft), draft.num_levels


def list_paths(candidates: Candidates) -> list[tuple[int, ...]]:
    """The tokens below the root of every node."""
    tree = candidates.tree
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], int(token)))
    assert tree.parents[0] == -1
    assert tree.depths.tolist() == [len(path) for path in paths]
    return paths


@in_every_shape
@pytest.mark.parametrize(("beams", "length", "size"), [(1, 4, 3), (3, 3, 7), (5, 5, 12)])
def test_a_dynamic_tree_equals_the_slow_reference(
    rnn: bool, exit_dim: int, beams: int, length: int, size: int, make_case: Callable[..., Case]
) -> None:
    case = make_case(beams=beams, length=length, rnn=rnn, exit_dim=exit_dim)
    head, tokens, temperatures = case.head, case.tokens.numpy(), np.array([1.0, 0.4, 1.7])
    found, num_levels = grow(head, case.hidden, tokens, size, temperatures)
    for row, candidates in enumerate(found):
        assert candidates.confidence is not None
        (chances,) = follow_chances([candidates.tree], candidates.confidence.tolist())
        found_paths = dict(zip(list_paths(candidates)[1:], chances[1:], strict=True))
        step = case.make_stepper(row, VOCAB)
        expected = grow_slowly(head.params, step, int(tokens[row]), size, temperatures[row])
        assert found_paths.keys() == expected.keys()
        for path, score in expected.items():
            assert found_paths[path] == pytest.approx(np.exp(score), rel=1e-3)
    # By torch, levels end where none of their nodes could enter the tree.
    is_native = head.packed is not None
    assert num_levels == length if is_native else 1 <= num_levels <= length


def test_more_beams_than_candidates() -> None:
    head, _, _ = make_head(beams=60, length=2, rnn=True, exit_dim=24, vocab=64)
    found = head.search_beams(torch.zeros(1, HIDDEN), torch.tensor([1]))
    assert len({tuple(beam) for beam in found[0].tolist()}) == 60


@pytest.mark.parametrize("batch", [1, 2, 7, 16])
def test_native_search_equals_torch_for_any_batch(
    batch: int, kernels: native.NativeKernels
) -> None:
    """A vocabulary and sizes that fill no tile."""
    shape = {"beams": 3, "length": 4, "rnn": True, "exit_dim": 37, "vocab": 211}
    plain, _, _ = make_head(**shape)  # type: ignore[arg-type]
    fast, _, _ = make_head(**shape, kernels=kernels)  # type: ignore[arg-type]
    hidden = torch.randn(batch, HIDDEN, generator=torch.Generator().manual_seed(batch))
    tokens = torch.arange(batch)
    assert torch.equal(fast.search_beams(hidden, tokens), plain.search_beams(hidden, tokens))


@pytest.mark.parametrize(("beams", "length", "size"), [(1, 3, 2), (4, 5, 15), (3, 4, 12)])
@pytest.mark.parametrize("min_gain", [ALL_LEVELS, 1.5, 4.0])
def test_native_trees_equal_those_of_torch(
    kernels: native.NativeKernels, beams: int, length: int, size: int, min_gain: float
) -> None:
    """Node by node, at temperatures of their own, also where levels are left out."""
    shape = {"beams": beams, "length": length, "rnn": True, "exit_dim": 37, "vocab": 211}
    plain, _, _ = make_head(**shape)  # type: ignore[arg-type]
    fast, _, _ = make_head(**shape, kernels=kernels)  # type: ignore[arg-type]
    hidden = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2))
    tokens, temperatures = np.array([5, 0, 210, 7]), np.array([0.75, 1.0, 1.3, 0.75])
    slow, num_levels = grow(plain, hidden, tokens, size, temperatures, min_gain)
    found, levels = grow(fast, hidden, tokens, size, temperatures, min_gain)
    assert num_levels <= levels
    assert levels == length or min_gain > 0
    assert levels == 1 or min_gain < 4  # of four rows no more can be promised
    for one, other in zip(found, slow, strict=True):
        for name in ("tokens", "parents", "depths"):
            assert getattr(one.tree, name).tolist() == getattr(other.tree, name).tolist()
        assert one.confidence == pytest.approx(other.confidence, rel=1e-4)
    (alone,), _ = grow(fast, hidden[2:3], tokens[2:3], size, temperatures[2:3])
    if levels == length:
        assert alone.confidence is not None
        assert found[2].confidence is not None
        assert np.array_equal(alone.confidence, found[2].confidence)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [[0], [0, 1, 2]])
def test_native_search_over_what_is_no_number(
    broken: float, rows: list[int], kernels: native.NativeKernels
) -> None:
    """It ends with tokens of the vocabulary, and disturbs no other sequence."""
    head, _, _ = make_head(beams=3, length=4, rnn=True, exit_dim=24, kernels=kernels)
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([4, 80, 33])
    whole = head.search_beams(hidden, tokens)
    hidden[rows] = broken
    found = head.search_beams(hidden, tokens)
    assert 0 <= int(found.min()) <= int(found.max()) < VOCAB
    for row in range(3):
        if row not in rows:
            assert torch.equal(found[row], whole[row])
        else:
            assert len({tuple(beam) for beam in found[row].tolist()}) == 3
    trees, _ = grow(head, hidden, tokens.numpy(), 7, np.ones(3))
    for candidates in trees:
        assert 0 <= candidates.tree.tokens.min() <= candidates.tree.tokens.max() < VOCAB
        assert len({*list_paths(candidates)}) == 8
        assert candidates.confidence is not None
        assert np.isfinite(candidates.confidence).all()


def test_native_search_passes_over_what_is_no_number(kernels: native.NativeKernels) -> None:
    head, weights, embedding = make_head(beams=3, length=3, rnn=True, exit_dim=24, kernels=kernels)
    hidden = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([4, 80])
    chosen = head.search_beams(hidden, tokens)[0, 0, 0]
    weights["drafter.lm_head.weight"][chosen] = float("nan")  # and so is its logit, always
    head = ReDrafterHead(head.params, weights, embedding, kernels=kernels)
    assert chosen not in head.search_beams(hidden, tokens)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("rnn", [True, False])
def test_search_with_integers(kernels: native.NativeKernels, weights: str, rnn: bool) -> None:
    """The native search is that of products with rounded weights and rounded inputs."""
    params = ReDrafterParams(
        num_layers=2, hidden_size=64, exit_dim=64, is_rnn=rnn, num_beams=3, draft_len_per_beam=4,
        greedy_search=True,
    )  # fmt: skip
    model: Any = SimpleNamespace(vocab_size=VOCAB)
    generator = torch.Generator().manual_seed(1)
    stored: dict[str, torch.Tensor] = {}
    shapes = {name: spec.shape for name, spec in params.list_tensors(model).items()}
    plan = plan_drafter({n: TensorInfo("float32", s) for n, s in shapes.items()}, weights, None)
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=generator) * 0.4
        module = name.removesuffix(".weight")
        if plan[name].dtype == "float32":
            stored[name] = weight
        elif plan[name].shape == shape:
            codes, scales = int8.quantize(weight, name)
            stored |= {name: codes, f"{module}.per_channel_scale": scales}
        else:
            scales = int4.choose_scales(weight, 32, name)
            codes = torch.from_numpy(pack(int4.round_weight(weight, scales).numpy()))
            stored |= {name: codes, f"{module}.weights_scaling_factor": scales}
    embedding = torch.randn(VOCAB, 64, generator=generator)
    fast = ReDrafterHead(params, stored, embedding, kernels=kernels)
    slow = ReDrafterHead(params, stored, embedding, prepack=False)
    for name in ("input_proj", "lm_head", *(("rnn_w", "rnn_u") if rnn else ())):
        setattr(slow, name, Rounding(getattr(slow, name)))
    slow.blocks = [Rounding(block) for block in slow.blocks]
    hidden, tokens = torch.randn(2, 64, generator=generator), torch.tensor([3, 7])
    found = fast.search_beams(hidden, tokens)
    assert torch.equal(found, slow.search_beams(hidden, tokens))
    assert torch.equal(found[:1], fast.search_beams(hidden[:1], tokens[:1]))


class Rounding(Linear):
    """A linear whose inputs are rounded by groups, as those of integers are."""

    def __init__(self, linear: Linear) -> None:
        self._linear: Any = linear
        self.bias = linear.bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self._linear.matrix
        return self._linear(round_inputs(x, matrix.group))


@pytest.mark.parametrize("native", [False, True])
def test_of_equal_beams_the_first_is_kept(kernels: native.NativeKernels, native: bool) -> None:
    """Tokens whose rows are the same: the lower id is drafted, by torch and by the kernels."""
    head, weights, embedding = make_head(beams=4, length=3, rnn=True, exit_dim=24)
    for matrix in (embedding, weights["drafter.lm_head.weight"]):
        matrix[VOCAB // 2 :] = matrix[: VOCAB - VOCAB // 2]
    chosen = kernels if native else None
    head = ReDrafterHead(head.params, weights, embedding, kernels=chosen)
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    beams = head.search_beams(hidden, torch.tensor([4, 80, 33]))
    # Of a pair both are candidates; where one of them is left out, it is the higher id.
    for row in beams.tolist():
        for first, second in zip(row, row[1:], strict=False):
            if [t % (VOCAB // 2) for t in first] == [t % (VOCAB // 2) for t in second]:
                assert first < second
        assert max(row[0]) < VOCAB // 2
