"""Greedy output is the target's own, token for token in float32, whatever is drafted."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.decode import accept as verify
from specdec.decode.drafters.base import Drafter
from specdec.decode.drafters.lookahead import LookaheadDrafter
from specdec.decode.drafters.prompt_lookup import PromptLookupDrafter
from specdec.decode.drafters.redrafter import BeamDrafter, BeamTreeDrafter
from specdec.decode.drafters.suffix import SuffixDrafter
from specdec.decode.engine import TorchEngine
from specdec.decode.loop import Options, generate
from specdec.decode.requests import ActiveRequest, Request
from specdec.engine import compiler, native_library
from specdec.engine.tree import Tree
from specdec.methods.lookahead import LookaheadConfig
from specdec.methods.prompt_lookup import LookupOptions
from specdec.methods.suffix import SuffixOptions
from tests.conftest import (
    make_drafter,
    make_llama,
)
from tests.engine.kernels import FORMS, needs_compiler
from tests.engines import OracleDrafter, continue_greedily, make_engine
from tests.families import make_hybrid

PROMPT_LENGTHS = (5, 17, 1, 40)
LIMIT = 40
SHAPES = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
HYBRID = "hybrid"  # linear attention in every second layer
TARGETS = [*sorted(SHAPES), HYBRID]


@functools.cache
def reference(target: Path, dtype: str = "float32") -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and what transformers continues them with, no end token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target).to(getattr(torch, dtype)).eval()
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(3, 128, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    return prompts, continue_greedily(model, prompts, LIMIT)


def is_hybrid(engine: TorchEngine) -> bool:
    return engine.config.checkpoint.model.recurrence is not None


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == HYBRID:
        return make_hybrid(tmp_path_factory.mktemp(HYBRID))
    heads, kv_heads = SHAPES[request.param]
    return make_llama(
        tmp_path_factory.mktemp(request.param),
        heads=heads,
        kv_heads=kv_heads,
        seed=heads + kv_heads,
    )


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_drafter(tmp_path_factory.mktemp("drafter"), exit_dim=96, scale=3.0)


def make_requests(
    prompts: list[list[int]], *, end_ids: frozenset[int] = frozenset(), limit: int = LIMIT
) -> list[Request]:
    return [
        Request(index=i, input_ids=p, max_output_len=limit, end_ids=end_ids)
        for i, p in enumerate(prompts)
    ]


def outputs_of(results: list[ActiveRequest]) -> list[list[int]]:
    return [r.output_ids for r in results]


@pytest.mark.thorough
@pytest.mark.parametrize(
    # The fewest and the most beams with the shortest and the longest, and some between them; with
    # kernels and without.
    ("target", "beams", "length", "optimize"),
    [
        ("gqa", 1, 1, "none"), ("mqa", 1, 5, "auto"), ("mha", 2, 3, "auto"), (HYBRID, 5, 3, "auto"),
        ("gqa", 5, 5, "none"),
    ],
    indirect=["target"],
)  # fmt: skip
def test_redrafter_equals_transformers(
    target: Path, drafter: Path, tmp_path: Path, beams: int, length: int, optimize: str
) -> None:
    prompts, expected = reference(target)
    folder = make_engine(tmp_path, target, drafter, beams=beams, length=length, optimize=optimize)
    engine = TorchEngine(folder, device="cpu")
    assert outputs_of(engine.generate(make_requests(prompts))) == expected
    alone = [outputs_of(engine.generate([request]))[0] for request in make_requests(prompts)]
    assert alone == expected, "batch 1 differs from batch 4"
    assert isinstance(engine.drafter, BeamDrafter)
    engine.drafter = BeamTreeDrafter(engine.drafter.head, (beams * length + 1) // 2)
    assert outputs_of(engine.generate(make_requests(prompts))) == expected, "a dynamic tree"


@pytest.fixture(scope="module")
def engine(target: Path, tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    return TorchEngine(make_engine(tmp_path_factory.mktemp("plain"), target), device="cpu")


def test_plain_engine_equals_transformers(target: Path, engine: TorchEngine) -> None:
    prompts, expected = reference(target)
    results = engine.generate(make_requests(prompts))
    assert outputs_of(results) == expected
    assert {r.stats.acceptance_length for r in results} == {1.0}
    assert engine.method == "plain"


@pytest.mark.parametrize("quality", [1.0, 0.8, 0.5, 0.0])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 3), (5, 4)])
def test_any_drafter_leaves_the_text_unchanged(
    target: Path, engine: TorchEngine, quality: float, shape: tuple[int, int]
) -> None:
    """Also where prompts are read in pieces."""
    prompts, expected = reference(target)
    beams, length = shape
    drafter = OracleDrafter(expected, beams=beams, length=length, quality=quality, seed=5)
    options = Options(max_num_tokens={1.0: 8192, 0.8: 4, 0.5: 12, 0.0: 64}[quality])
    results = generate(engine.decoder, drafter, make_requests(prompts), options)
    assert outputs_of(results) == expected
    for result in results:
        stats = result.stats
        assert sum(stats.accepted_histogram) == stats.num_verify_steps
        accepted = sum(n * count for n, count in enumerate(stats.accepted_histogram))
        assert accepted == stats.num_accepted
        assert stats.num_output_tokens == LIMIT
        if quality == 0.0:
            assert stats.num_accepted == 0, "a hostile drafter is never accepted"
            assert stats.num_verify_steps == LIMIT - 1
        if quality == 1.0 and (beams == 1 or not is_hybrid(engine)):
            steps = -(-(LIMIT - 1) // (length + 1))
            assert stats.num_verify_steps == steps, "a perfect drafter is always accepted"


@pytest.mark.parametrize(
    "shape", [(3,), (12,), (1, 1), (6, 3), (1, 2, 1), (2, 5, 1), (4, 4, 4), (7, 7, 7)], ids=str
)
def test_drafts_from_the_text_leave_it_unchanged(
    target: Path, engine: TorchEngine, shape: tuple[int, ...]
) -> None:
    """Suffix trees, by size; prompt lookup, by length and n-gram; lookahead, by [W,N,G].

    Lookahead is refused for hybrids: tests/run/test_hybrids.py.
    """
    if len(shape) == 3 and is_hybrid(engine):
        pytest.skip("a hybrid verifies chains only")
    prompts, expected = reference(target)
    drafter: Drafter
    if len(shape) == 1:
        options = SuffixOptions(max_tokens=shape[0], min_probability=0, max_cached_tokens=500)
        drafter = SuffixDrafter(options)
    elif len(shape) == 2:
        lookup = LookupOptions(num_tokens=shape[0], max_ngram_size=shape[1])
        drafter = PromptLookupDrafter(lookup)
    else:
        drafter = LookaheadDrafter(LookaheadConfig(*shape), engine.decoder)
    requests = make_requests(prompts)
    assert outputs_of(generate(engine.decoder, drafter, requests, Options())) == expected
    few = Options(max_batch_size=2, max_num_tokens=12)
    assert outputs_of(generate(engine.decoder, drafter, requests, few)) == expected


@pytest.mark.parametrize(
    ("limit", "position"),
    [*((limit, None) for limit in (1, 2, 7, 8, 9)), *((LIMIT, at) for at in (0, 1, 4, 11, 20))],
)
def test_limits_and_ends_cut_inside_a_block(
    target: Path, engine: TorchEngine, limit: int, position: int | None
) -> None:
    """A token that plain decoding emits is declared the end, for one row and so for all."""
    prompts, expected = reference(target)
    end = -1 if position is None else expected[0][position]
    cut = [t[: t.index(end) + 1] if end in t else t[:limit] for t in expected]
    requests = make_requests(prompts, end_ids=frozenset([end]), limit=limit)
    for quality in (1.0, 0.9):
        drafter = OracleDrafter(expected, beams=3, length=5, quality=quality, seed=2)
        results = generate(engine.decoder, drafter, requests, Options())
        assert outputs_of(results) == cut
        reasons = ["eos" if end in tokens else "length" for tokens in cut]
        assert [r.finish_reason for r in results] == reasons
    assert outputs_of(engine.generate(requests)) == cut, "the same without drafts"


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 8), ("float16", 11)])
def test_half_precision_differs_only_at_near_ties(
    target: Path, drafter: Path, tmp_path: Path, dtype: str, bits: int
) -> None:
    """The first difference, if any, is where two tokens nearly tie.

    bfloat16 keeps 8 bits, float16 keeps 11: logits of size x are spaced x / 2**bits, and rounding
    through the layers moves them by a few spacings, at worst by 17 with this model. 8 spacings is
    the bound, of the margin that the reference has in half precision or of what the same weights
    have in float32: there our token must be that little below the best, whoever rounded worse.
    """
    from transformers import AutoModelForCausalLM

    prompts, expected = reference(target, dtype)
    folder = make_engine(tmp_path, target, drafter, beams=4, length=4, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(target).to(getattr(torch, dtype)).eval()
    results = TorchEngine(folder, device="cpu").generate(make_requests(prompts))
    found = []
    for prompt, own, theirs in zip(prompts, outputs_of(results), expected, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(own, theirs, strict=True)) if a != b), None)
        if at is not None:
            found.append((at, torch.tensor([prompt + theirs[:at]]), theirs[at], own[at]))

    @torch.no_grad()
    def measure_margins() -> list[float]:
        """In spacings, of each token that differs."""
        rows = [model(tokens).logits[0, -1].float() for _, tokens, _, _ in found]
        return [
            float((row[theirs] - row[own]) / row.abs().max()) * 2**bits
            for row, (_, _, theirs, own) in zip(rows, found, strict=True)
        ]

    margins = measure_margins()
    model.float()
    for (at, *_), rounded, exact in zip(found, margins, measure_margins(), strict=True):
        told = f"token {at}: {rounded:.1f} spacings by the reference, {exact:.1f} in float32"
        assert min(rounded, exact) <= 8, told


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", ["own", "avx2"])
def test_half_precision_text_is_that_of_plain_decoding(
    target: Path,
    drafter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    dtype: str,
) -> None:
    """A step of many tokens computes each to the same bits as a step of one.

    Also in the form of a processor without AVX-512.
    """
    if form not in FORMS:
        pytest.skip("not this kind of processor")
    monkeypatch.setattr(native_library, "FLAGS", (*compiler.FLAGS, *FORMS[form]))
    prompts, _ = reference(target)
    folder = make_engine(tmp_path, target, drafter, beams=4, length=4, dtype=dtype)
    plain = outputs_of(
        TorchEngine(folder, device="cpu", speculate=False).generate(make_requests(prompts))
    )
    engine = TorchEngine(folder, device="cpu")
    assert outputs_of(engine.generate(make_requests(prompts))) == plain
    oracle = OracleDrafter(plain, beams=3, length=6, quality=0.8, seed=5)
    results = generate(engine.decoder, oracle, make_requests(prompts), Options())
    assert outputs_of(results) == plain
    assert sum(result.stats.num_accepted for result in results) > LIMIT


def test_accepting_a_wrong_token_is_noticed(
    target: Path, engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deliberate break of the accept rule: one draft token too many is taken."""
    prompts, expected = reference(target)
    drafter = OracleDrafter(expected, beams=2, length=4, quality=0.6, seed=4)
    honest: Any = verify.accept

    def accept_one_more(tree: Tree, choices: np.ndarray) -> tuple[list[int], int]:
        path, bonus = honest(tree, choices)
        children = [n for n in range(tree.num_nodes) if tree.parents[n] == path[-1]]
        return ([*path, children[0]], int(choices[children[0]])) if children else (path, bonus)

    monkeypatch.setattr(verify, "accept", accept_one_more)
    results = generate(engine.decoder, drafter, make_requests(prompts), Options())
    assert outputs_of(results) != expected
