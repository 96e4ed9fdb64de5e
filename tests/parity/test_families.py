"""Every family on the engine is the model that transformers runs: its logits and its text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.convert.families import FAMILIES
from specdec.decode.engine import TorchEngine
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.step import Step, pack_segments, place_tree
from specdec.engine.tree import Tree
from specdec.errors import SpecDecError
from tests.engines import continue_greedily, list_paths, list_requests, make_engine
from tests.parity.models import (
    FIRST_NAMES,
    NAMES,
    SWITCH,
    VARIANTS,
    VOCAB,
    WINDOW,
    WITH_KERNELS_OR_NOT,
    make_model,
)

# Of the largest logit. Both sides compute in float32; sums are taken in another order.
TOLERANCE = 2e-5
LIMIT = 24
# Prompt tokens of the two rows: beyond a vector's lanes, WINDOW and SWITCH.
CHUNKS = ((5, 3), (80, 13, 1))
# Root 9; two beams that share their first token, and one that does not.
TREE = Tree(
    np.array([9, 4, 7, 5, 6, 8, 11]),
    np.array([-1, 0, 0, 1, 1, 2, 3]),
    np.array([0, 1, 1, 2, 2, 2, 3]),
)
# What is verified of a hybrid, whose states follow one text.
CHAIN = Tree(TREE.tokens, np.arange(-1, 6), np.arange(7))
GetEngine = Callable[[str, str], TorchEngine]


def test_every_family_has_a_variant() -> None:
    """By its first name: MiMo 7B, a second one of Qwen2's, has no class in transformers."""
    assert set(VARIANTS) == {family.architectures[0] for family in FAMILIES.values()}


@pytest.fixture(scope="module")
def get_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    parent = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: make_model(parent / name, name))


@pytest.fixture(scope="module")
def get_engine(
    get_target: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> GetEngine:
    parent = tmp_path_factory.mktemp("engines")

    @functools.cache
    def load(name: str, optimize: str) -> TorchEngine:
        folder = parent / name
        folder.mkdir(exist_ok=True)
        engine = make_engine(folder, get_target(name), optimize=optimize)
        return TorchEngine(engine, device="cpu")

    return load


@functools.cache
def load_reference(target: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    # Of the ways that transformers has, only the plain one caps scores.
    model = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager")
    return model.to(dtype).eval()


@torch.inference_mode()
def compute_reference(
    target: Path, tokens: list[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Logits [T, V] of one pass over the tokens, nothing cached from before."""
    model = load_reference(target, dtype)
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits
    return logits[0].float()


@functools.cache
def generate_reference(
    target: Path, lengths: tuple[int, ...], limit: int = LIMIT
) -> list[list[int]]:
    """What transformers continues the prompts of these lengths with, no end token."""
    model = load_reference(target)
    return continue_greedily(model, make_prompts(lengths), limit)


@torch.inference_mode()
def check_reference(
    target: Path, lengths: tuple[int, ...], outputs: list[list[int]]
) -> list[list[int]]:
    """`outputs`, if one pass over each text finds every token the best one after those before it.

    Else what `generate_reference` tells, which takes a pass a token.
    """
    for prompt, output in zip(make_prompts(lengths), outputs, strict=True):
        logits = compute_reference(target, prompt + output[:-1])[len(prompt) - 1 :]
        if logits.argmax(-1).tolist() != output:
            return generate_reference(target, lengths, len(output))
    return outputs


def make_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def generate(engine: TorchEngine, lengths: tuple[int, ...], limit: int = LIMIT) -> list[list[int]]:
    requests = list_requests(make_prompts(lengths), limit)
    return [result.output_ids for result in engine.generate(requests)]


def run_step(decoder: Decoder, cache: KVCache, row: int, tokens: list[int]) -> torch.Tensor:
    """Run and commit the next tokens of a row; return their logits [T, V]."""
    count, past = len(tokens), int(cache.past_lens[row])
    step = Step(
        rows=np.array([row]),
        tokens=np.array([tokens]),
        positions=past + np.arange(count)[None],
        tree_mask=np.tril(np.ones((1, count, count), np.bool_)),
    )
    logits = decoder.compute_logits(decoder.forward(step, cache))
    cache.commit(row, list(range(count)))
    return logits[0]


def run_tree(decoder: Decoder, cache: KVCache, tree: Tree) -> torch.Tensor:
    """Logits [2, T, V] of a tree after each of two rows."""
    step = pack_segments([place_tree(tree, row, cache) for row in range(2)], cache)
    return decoder.compute_logits(decoder.forward(step, cache))


def assert_near(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error = (actual.float().cpu() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE, f"{what}: {error:.2e} of the largest logit"


@torch.inference_mode()
def check_logits(decoder: Decoder, target: Path) -> None:
    """Prompts in chunks, single tokens, and a tree over two rows of different lengths.

    Of a hybrid a chain, of which a part is then kept and gone on after.
    """
    generator = torch.Generator().manual_seed(3)
    cache = decoder.make_cache(len(CHUNKS), 128)
    texts: list[list[int]] = []
    for row, sizes in enumerate(CHUNKS):
        # Three tokens more, one at a time.
        text = torch.randint(3, VOCAB, (sum(sizes) + 3,), generator=generator).tolist()
        decoder.start_row(cache, row, sum(sizes))
        logits, at = [], 0
        for size in (*sizes, 1, 1, 1):
            logits.append(run_step(decoder, cache, row, text[at : at + size]))
            at += size
        assert_near(torch.cat(logits), compute_reference(target, text), f"row {row}")
        texts.append(text)
    is_hybrid = decoder.model.recurrence is not None
    tree = CHAIN if is_hybrid else TREE
    of_tree = run_tree(decoder, cache, tree)
    assert of_tree.shape == (2, tree.num_nodes, VOCAB)
    for row, text in enumerate(texts):
        for path in list_paths(tree):
            expected = compute_reference(target, text + tree.tokens[path].tolist())
            assert_near(of_tree[row, path], expected[len(text) :], f"row {row}, nodes {path}")
        if is_hybrid:
            kept = list(range(2 * row + 1))
            cache.commit(row, kept)
            text += [*tree.tokens[kept].tolist(), 17, 3]
            newest = torch.cat([run_step(decoder, cache, row, [token]) for token in text[-2:]])
            assert_near(newest, compute_reference(target, text)[-2:], f"row {row}, a part kept")


@pytest.mark.parametrize(("name", "optimize"), WITH_KERNELS_OR_NOT)
def test_logits_equal_transformers(
    name: str, optimize: str, get_engine: GetEngine, get_target: Callable[[str], Path]
) -> None:
    target, decoder = get_target(name), get_engine(name, optimize).decoder
    assert (decoder.kernels is None) == (optimize == "none" or decoder.device.type == "cuda")
    check_logits(decoder, target)


# Each once, of every second family without kernels.
@pytest.mark.parametrize(
    ("name", "optimize"),
    [(name, "none" if name in FIRST_NAMES[::2] else "auto") for name in NAMES],
)
def test_greedy_text_equals_transformers(
    name: str, optimize: str, get_engine: GetEngine, get_target: Callable[[str], Path]
) -> None:
    """Windows, and of longrope each side of its switch, are exceeded."""
    assert WINDOW < LIMIT
    lengths = (5, SWITCH - LIMIT, 1, 70)
    outputs = generate(get_engine(name, optimize), lengths)
    assert sum(len(set(output)) for output in outputs) > LIMIT, "the text varies"
    assert outputs == check_reference(get_target(name), lengths, outputs)


@pytest.mark.parametrize(("kind", "optimize"), [("linear", "none"), ("dynamic", "auto")])
def test_text_beyond_the_trained_positions(kind: str, optimize: str, tmp_path: Path) -> None:
    """Scalings that max_position_embeddings does not count in; the prompt's keys stay as cached."""
    scaling = {"rope_type": kind, "factor": 4.0}
    target = make_model(
        tmp_path / kind, "LlamaForCausalLM-plain", max_position_embeddings=SWITCH,
        rope_scaling=scaling,
    )  # fmt: skip
    folder = make_engine(tmp_path, target, optimize=optimize, build=["--max-seq-len", 4 * SWITCH])
    engine = TorchEngine(folder, device="cpu")
    lengths, limit = (SWITCH, 7), 2 * SWITCH
    assert generate(engine, lengths, limit) == generate_reference(target, lengths, limit)
    if kind == "dynamic":
        with pytest.raises(SpecDecError, match=f"prompt has {SWITCH + 1} tokens"):
            generate(engine, (SWITCH + 1,), 1)


def test_a_request_across_the_switch_of_longrope_is_refused(get_engine: GetEngine) -> None:
    engine = get_engine("Phi3ForCausalLM-longrope", "none")
    with pytest.raises(SpecDecError, match=f"40 \\+ 9 tokens cross {SWITCH}"):
        generate(engine, (40,), 9)
    assert len(generate(engine, (40,), 8)[0]) == 8
    cache = engine.decoder.make_cache(1, 128)
    run_step(engine.decoder, cache, 0, list(range(3, 3 + SWITCH)))
    with pytest.raises(SpecDecError, match=f"more than {SWITCH} tokens"):
        run_step(engine.decoder, cache, 0, [5])


def test_a_prefix_of_another_rotary_table_is_not_reused(get_engine: GetEngine) -> None:
    decoder = get_engine("Phi3ForCausalLM-longrope", "none").decoder
    cache = decoder.make_cache(2, 128)
    decoder.start_row(cache, 0, 40)
    run_step(decoder, cache, 0, list(range(3, 33)))
    cache.copy_prefix(0, 1, 20)
    decoder.start_row(cache, 1, 45)
    assert cache.past_lens.tolist() == [30, 20], "both are short"
    decoder.start_row(cache, 1, SWITCH + 1)
    assert cache.past_lens.tolist() == [30, 0]


# What a type keeps of a number: values of size x are spaced x / 2**bits.
BITS = {"bfloat16": 8, "float16": 11}


@pytest.mark.parametrize(("name", "dtype"), zip(FIRST_NAMES, itertools.cycle(BITS)))
@torch.inference_mode()
def test_half_precision_is_as_near_as_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    """Held against float32 on the same weights, the engine's mean error is not above 1.5 times that
    of transformers in this type; and where another token is best, the two nearly tie.

    Near is 8 spacings of the largest logit, as in tests/run/test_exactness.py.
    """
    target = make_model(tmp_path / name, name, dtype=dtype)  # references are kept by their folder
    decoder = TorchEngine(make_engine(tmp_path, target), device="cpu").decoder
    assert decoder.dtype is getattr(torch, dtype)
    text = make_prompts((90,))[0]
    cache, logits, at = decoder.make_cache(1, 128), [], 0
    for size in (70, 16, 1, 1, 1, 1):
        logits.append(run_step(decoder, cache, 0, text[at : at + size]))
        at += size
    own = torch.cat(logits).float().cpu()
    exact = compute_reference(target, text)
    theirs = compute_reference(target, text, getattr(torch, dtype))
    assert (own - exact).abs().mean() <= 1.5 * (theirs - exact).abs().mean()
    spacing = float(theirs.abs().max()) / 2 ** BITS[dtype]

    def count_far(chosen: torch.Tensor, logits: torch.Tensor) -> int:
        margins = logits.amax(-1) - logits.gather(1, chosen.argmax(-1, keepdim=True))[:, 0]
        return int((margins > 8 * spacing).sum())

    if decoder.model.experts is None:
        assert count_far(own, theirs) == 0
    else:  # where two experts nearly tie, a rounding takes the other: in theirs of the router's too
        assert count_far(own, exact) <= count_far(theirs, exact)
