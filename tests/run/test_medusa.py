"""Medusa on the torch engine: trees, and greedy text that no head can change."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from specdec.decode.drafters.base import DraftContext
from specdec.decode.drafters.medusa import (
    ChoiceTree,
    MedusaDrafter,
    check_choices,
    make_drafter,
)
from specdec.decode.drafters.trees import DEFAULT_CPU_TOKENS, grow_choices
from specdec.decode.engine import TorchEngine
from specdec.engine.medusa import MedusaHeads
from specdec.engine.step import States
from specdec.engine.tree import build_tree_mask
from specdec.errors import SpecDecError, UsageError
from specdec.files.reading import read_json
from specdec.methods.base import Choices, parse_paths
from specdec.methods.medusa import MedusaDraft, MedusaParams, read_options
from tests.conftest import make_llama, make_medusa_heads
from tests.engines import (
    call,
    continue_by_transformers,
    list_requests,
    make_counter,
    make_tree_engine,
)
from tests.run.drafting import PROMPTS

PARAMS = MedusaParams(num_heads=3, num_layers=1, max_draft_len=10)
LIMIT = 30


# ---- Choices.


def test_choices_are_read() -> None:
    assert parse_paths("[[0], [0, 2], [1]]", "--medusa-choices") == ((0,), (0, 2), (1,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "is {}, not a list of paths"),
        ("[]", r"is \[\], not a list of paths"),
        ("7", "is 7, not a list"),
        ("[0]", ": 0 is not a path"),
        ("[[]]", r": \[\] is not a path"),
        ("[[0], [-1]]", r": \[-1\] is not a path"),
        ("[[0], [true]]", r": \[true\] is not a path"),
        ("[[0.0]]", r": \[0.0\] is not a path"),
    ],
)
def test_choices_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_paths(text, "--medusa-choices")
    assert "[[0], [0, 0], [1]]" in caught.value.hint


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ("[[0], [1], [0]]", r"has \[0\] twice"),
        ("[[0], [1, 0]]", r"has \[1, 0\] but not \[1\]"),
        ("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]", "is 4 deep, the engine has 3 Medusa heads"),
        (json.dumps([[n] for n in range(11)]), "has 11 paths, the engine's max_draft_len is 10"),
        ("[[0], [90]]", "has rank 90, the vocabulary 90 tokens"),
        ("[[0], [1, 0], [0]]", "2 problems"),
    ],
)
def test_choices_that_the_heads_cannot_give(choices: str, message: str) -> None:
    with pytest.raises(SpecDecError, match=message):
        check_choices(parse_paths(choices, "--medusa-choices"), PARAMS, vocab_size=90)
    check_choices(((0,), (0, 89)), PARAMS, vocab_size=90)


def test_default_tree_on_a_cpu() -> None:
    """By hand: 0.6; 0.6 * 0.48; 0.6 / 4; 0.6 * 0.48 * 0.384; 0.6 * 0.48 / 4, ..."""
    assert grow_choices(4, DEFAULT_CPU_TOKENS, 1000) == (
        (0,), (0, 0), (1,), (0, 0, 0), (0, 1), (1, 0), (2,),
    )  # fmt: skip


@hypothesis.given(st.integers(1, 5), st.integers(1, 64), st.integers(1, 9))
def test_grown_trees_are_the_best_of_their_size(heads: int, size: int, vocab: int) -> None:
    choices = grow_choices(heads, size, vocab)
    check_choices(choices, MedusaParams(num_heads=heads, num_layers=1, max_draft_len=size), vocab)
    everything = sum(vocab**depth for depth in range(1, heads + 1))
    assert len(choices) == min(size, everything)

    def rate(path: tuple[int, ...]) -> float:
        return float(np.prod([0.6 * 0.8**i / (r + 1) ** 2 for i, r in enumerate(path)]))

    # Nothing outside beats anything inside: it is enough to try every way to extend the tree.
    known = set(choices)
    outside = {(*p, 0) for p in known if len(p) < heads}
    outside |= {(*p[:-1], p[-1] + 1) for p in known if p[-1] + 1 < vocab}
    worst = min(map(rate, choices))
    assert all(rate(path) <= worst * (1 + 1e-12) for path in outside - known)


def test_a_tree_is_filled_with_the_ranked_tokens() -> None:
    """Head 0 ranks 10, 11, 12; head 1 ranks 20, 21. Paths may come in any order."""
    tree = ChoiceTree(((1, 1), (0, 1), (1,), (2,), (0,)))
    assert tree.widths == [3, 2]
    filled = tree.fill(7, np.array([10, 11, 12, 20, 21]))
    assert filled.tokens.tolist() == [7, 10, 11, 12, 21, 21]
    assert filled.parents.tolist() == [-1, 0, 0, 0, 1, 2]
    assert filled.depths.tolist() == [0, 1, 1, 1, 2, 2]
    assert build_tree_mask(filled)[5].tolist() == [True, False, True, False, False, True]


# ---- The engine.


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("target"), seed=3)


@functools.cache
def reference(target: Path) -> list[list[int]]:
    """What transformers continues the prompts with, no end token."""
    return continue_by_transformers(target, PROMPTS, LIMIT)


make_medusa_engine = functools.partial(make_tree_engine, "medusa")
make_requests = functools.partial(list_requests, PROMPTS, LIMIT)


@pytest.mark.thorough
@pytest.mark.parametrize(("layers", "optimize"), [(1, "none"), (1, "auto"), (2, "none")])
def test_random_heads_leave_the_text_unchanged(
    target: Path, tmp_path: Path, layers: int, optimize: str
) -> None:
    heads = make_medusa_heads(tmp_path, heads=4, layers=layers, scale=3.0)
    engine = TorchEngine(
        make_medusa_engine(tmp_path, target, heads, optimize=optimize), device="cpu"
    )
    assert engine.method == "medusa"
    drafter = engine.drafter
    assert isinstance(drafter, MedusaDrafter)
    assert drafter.max_draft_tokens == DEFAULT_CPU_TOKENS
    trees: list[Choices | int] = [
        1, 3, 63, grow_choices(4, DEFAULT_CPU_TOKENS, 128), grow_choices(4, 63, 128), ((0,),),
        ((5,), (5, 0), (5, 0, 2), (5, 0, 2, 1)), tuple((n,) for n in range(60)),
    ]  # fmt: skip
    for tree in trees:
        drafter.use_tree(tree)
        size = tree if isinstance(tree, int) else len(tree)
        depth = min(tree, 4) if isinstance(tree, int) else max(map(len, tree))
        results = engine.generate(make_requests())
        assert [r.output_ids for r in results] == reference(target)
        for result in results:
            assert len(result.stats.accepted_histogram) == 1 + depth
            assert result.stats.num_draft_tokens == result.stats.num_verify_steps * size
    alone = [engine.generate([request])[0].output_ids for request in make_requests()]
    assert alone == reference(target), (
        "batch 1 differs from batch 3, one row of which is used twice"
    )


def make_knowing_heads(parent: Path) -> tuple[Path, list[list[int]]]:
    """A target that counts upwards, and heads that know it.

    Head i without residual layers maps the embedding of token n to token n + 2 + i.
    """
    from safetensors.torch import save_file

    size = make_counter(parent)
    heads = make_medusa_heads(parent, hidden=size, vocab=size, heads=3, layers=0)
    known = {f"{i}.0.weight": torch.eye(size).roll(2 + i, 0).contiguous() for i in range(3)}
    save_file(known, heads / "medusa_lm_head.safetensors")
    return heads, [[(p[-1] + 1 + n) % size for n in range(LIMIT)] for p in ([4], [30, 2])]


def test_a_dynamic_tree_has_the_paths_that_the_heads_find_likeliest() -> None:
    """By hand: a sure head 0 and an unsure head 1 make a fan; an unsure head 0 has all its own."""
    params = MedusaParams(num_heads=2, num_layers=0, max_draft_len=4)
    chances = torch.tensor([[0.1, 0.8, 0.1], [0.34, 0.3, 0.36]])  # of head 0: by the state
    weights = {
        "medusa_heads.0.lm_head.weight": chances.log().T.contiguous(),
        "medusa_heads.1.lm_head.weight": torch.tensor([0.5, 0.3, 0.2]).log()[:, None].repeat(1, 2),
    }
    drafter = MedusaDrafter(MedusaHeads(params, weights), 4)
    drafter.allocate(2, 9)
    requests: Any = [SimpleNamespace(row=row, output_ids=[7]) for row in range(2)]
    drafter.observe(requests, States(torch.eye(2)[:, None]), [[0], [0]])
    sure, unsure = drafter.propose(requests)
    assert sure.tree.tokens.tolist() == [7, 1, 0, 1, 2]
    assert sure.tree.parents.tolist() == [-1, 0, 1, 1, 1]
    assert sure.confidence == pytest.approx([1, 0.8, 0.5, 0.3, 0.2])
    assert unsure.tree.tokens.tolist() == [7, 2, 0, 1, 0]
    assert unsure.tree.parents.tolist() == [-1, 0, 0, 0, 1]
    assert unsure.confidence == pytest.approx([1, 0.36, 0.34, 0.3, 0.5])
    with pytest.raises(SpecDecError, match="--medusa-tree-tokens is 5, .* max_draft_len is 4"):
        drafter.use_tree(5)


def test_a_tree_is_static_or_dynamic() -> None:
    with pytest.raises(UsageError, match="--medusa-choices with --medusa-tree-tokens"):
        read_options(MedusaDraft(medusa_choices="[[0]]", medusa_tree_tokens=3))


def test_perfect_heads_are_accepted_to_their_depth(tmp_path: Path) -> None:
    """Head i drafts the token i + 2 ahead: one place off, and nothing would be accepted."""
    heads, expected = make_knowing_heads(tmp_path)
    folder = make_medusa_engine(tmp_path, tmp_path / "counter", heads, optimize="none")
    engine = TorchEngine(folder, device="cpu")
    drafter = engine.drafter
    assert isinstance(drafter, MedusaDrafter)
    requests = list_requests(([4], [30, 2]), LIMIT)
    trees: list[tuple[Choices | int, int]] = [
        (((0,), (0, 0), (0, 0, 0)), 3), (((1,), (0,), (0, 0)), 2), (((1,),), 0), (3, 3), (2, 2),
    ]  # fmt: skip
    for tree, depth in trees:
        drafter.use_tree(tree)
        for result, tokens in zip(engine.generate(requests), expected, strict=True):
            assert result.output_ids == tokens
            assert result.stats.num_verify_steps == -(-(LIMIT - 1) // (depth + 1))
            assert sum(result.stats.accepted_histogram[:depth]) <= 1, "all but a cut last step"


@pytest.mark.parametrize(("device", "num_tokens"), [("cpu", DEFAULT_CPU_TOKENS), ("cuda", 63)])
def test_the_tree_is_larger_where_steps_are_cheap(device: str, num_tokens: int) -> None:
    params = MedusaParams(num_heads=3, num_layers=1, max_draft_len=63)
    model: Any = SimpleNamespace(hidden_size=64, vocab_size=128)
    weights = {name: torch.zeros(spec.shape) for name, spec in params.list_tensors(model).items()}
    decoder: Any = SimpleNamespace(
        device=torch.device(device), is_prepacked=False, kernels=None, graphs=None,
        dtype=torch.float32, model=model,
    )  # fmt: skip
    context = DraftContext(decoder=decoder, params=params, weights=weights)
    assert make_drafter(context).max_draft_tokens == num_tokens


def test_what_a_build_takes_from_the_checkpoint(target: Path, tmp_path: Path) -> None:
    heads = make_medusa_heads(tmp_path, scale=3.0)
    engine = make_medusa_engine(
        tmp_path, target, heads, optimize="none", flags=["--max-medusa-token-len", 16]
    )
    config = read_json(engine / "config.json")
    assert config["build_config"]["speculative_decoding_mode"] == "medusa"
    assert config["build_config"]["max_draft_len"] == 16
    with pytest.raises(SpecDecError, match="contradicts the checkpoint: its max_draft_len is 16"):
        call(
            "build", "--checkpoint-dir", tmp_path / "checkpoint", "--output-dir", tmp_path / "no",
            "--max-draft-len", 7,
        )  # fmt: skip
