"""In half precision a token's state has the same bits in every step: alone, in a tree, in a batch.

With integer weights too.

So speculative text is that of plain decoding on the same engine in half precision too, not only up
to near-ties, wherever the native kernels run a step.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.decode.prefill import PromptReader, fill_cache
from specdec.engine import decoder as engine
from specdec.engine import int8, native
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.layout import list_engine_tensors, list_integers, name_int8_scales
from specdec.engine.step import Step, pack_segments, place_tree
from specdec.engine.tree import Tree, build_tree_mask
from specdec.files.torch_tensors import TORCH_DTYPES
from specdec.model.config import FULL, SLIDING
from specdec.model.experts import Experts
from specdec.model.tensors import get_stored_dtype
from tests.covering import cover
from tests.engine.kernels import FORMS, in_every_form, needs_compiler
from tests.engine.models import make_model

pytestmark = needs_compiler

CHAIN = [5, 9, 2, 30, 41]
# The chain among others: nodes 1, 3, 4, 7 and 8 are its own, below a root of another row's length.
PARENTS = [-1, 0, 0, 1, 3, 3, 4, 4, 7]
TOKENS = [CHAIN[0], CHAIN[1], 8, CHAIN[2], CHAIN[3], 17, 23, CHAIN[4], 50]
NODES = [0, 1, 3, 4, 7]


# All that a layer may have with a Llama's: Gemma 3's, with Gemma 2's caps and Granite's numbers.
EVERYTHING: dict[str, Any] = {
    "architecture": "Gemma3ForCausalLM", "hidden_act": "gelu_pytorch_tanh",
    "layer_types": (SLIDING, SLIDING, FULL, SLIDING), "rope_local_base_freq": 100.0,
    "query_pre_attn_scalar": 40.0, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0,
    "embedding_multiplier": 1.5, "attention_multiplier": 2.0, "residual_multiplier": 0.3,
    "output_multiplier_scale": 0.7,
}  # fmt: skip


def make_decoder(
    library: Path, dtype: str, heads: int, kv_heads: int, window: int | None, *, is_int8: bool,
    intermediate_size: int = 80, **changes: Any,
) -> Decoder:  # fmt: skip
    model = make_model(
        dtype=dtype, vocab_size=64, hidden_size=384, num_hidden_layers=4,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_size=384 // heads,
        intermediate_size=intermediate_size, sliding_window=window, **changes,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(heads)
    weights = {
        name: (torch.randn(shape, generator=generator) * (0.1 if len(shape) > 1 else 1.0)).to(
            TORCH_DTYPES[get_stored_dtype(name, dtype)]
        )
        for name, shape in list_engine_tensors(model, None).items()
    }
    for name in list_integers(model) if is_int8 else []:
        weights[name], weights[name_int8_scales(name)] = int8.quantize(weights[name], name)
    kernels = native.NativeKernels(library, TORCH_DTYPES[dtype])
    return Decoder(model, weights, num_positions=256, device=torch.device("cpu"), kernels=kernels)


def make_step(past: list[int], tree: Tree) -> Step:
    count = len(past)
    return Step(
        rows=np.arange(count),
        tokens=np.tile(tree.tokens, (count, 1)),
        positions=np.array(past)[:, None] + tree.depths,
        tree_mask=np.tile(build_tree_mask(tree), (count, 1, 1)),
    )


def make_tree(tokens: list[int], parents: list[int]) -> Tree:
    depths = [0] * len(tokens)
    for node, parent in enumerate(parents):
        depths[node] = depths[parent] + 1 if parent >= 0 else 0
    return Tree(tokens=np.array(tokens), parents=np.array(parents), depths=np.array(depths))


def fill(decoder: Decoder, num_rows: int, past_len: int) -> KVCache:
    """A cache whose rows hold the same tokens, run one at a time."""
    cache = decoder.make_cache(num_rows, 200)
    for at in range(past_len):
        decoder.forward(make_step([at] * num_rows, make_tree([at % 64], [-1])), cache)
        for row in range(num_rows):
            cache.commit(row, [0])
    return cache


@torch.inference_mode()
def test_threads_change_no_bits(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do more of them than there are cores keep each other from ending, step after step.

    A thread that waits long has others do some of its part of a matrix, which has many here.
    """
    decoder = make_decoder(
        library, "bfloat16", 6, 2, None, is_int8=False, intermediate_size=3000
    )  # fmt: skip
    cache = fill(decoder, 1, 12)
    tree = make_step([12], make_tree(TOKENS, PARENTS))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    expected = decoder.forward(tree, cache)
    for count in (2, 3, 3 * (os.cpu_count() or 1) + 1, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        for _ in range(60):
            assert torch.equal(decoder.forward(tree, cache), expected)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@torch.inference_mode()
def test_kernels_run_in_threads_that_end_and_after_a_fork(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of the kernels end with the thread that leads them, and are not in a fork's child."""
    decoder = make_decoder(library, "bfloat16", 6, 2, None, is_int8=False)
    cache = fill(decoder, 1, 12)
    tree = make_step([12], make_tree(TOKENS, PARENTS))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    expected = decoder.forward(tree, cache)

    def is_same() -> bool:
        with torch.inference_mode():
            return torch.equal(decoder.forward(tree, cache), expected)

    before = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
    for _ in range(20):
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(is_same).result()
    if before:
        deadline = time.monotonic() + 60
        while len(os.listdir("/proc/self/task")) > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(os.listdir("/proc/self/task")) <= before
    if (child := os.fork()) == 0:
        os._exit(0 if is_same() else 1)
    assert os.waitpid(child, 0)[1] == 0


SHAPES = itertools.product(
    FORMS, [("bfloat16", False), ("bfloat16", True), ("float16", False)], [None, 7],
    [(6, 6), (6, 2), (12, 1)],
)  # fmt: skip


@pytest.mark.parametrize(
    ("library", "kind", "window", "heads"), cover(SHAPES), indirect=["library"]
)
@torch.inference_mode()
def test_a_state_has_the_same_bits_in_every_step(
    library: Path, kind: tuple[str, bool], window: int | None, heads: tuple[int, int]
) -> None:
    dtype, is_int8 = kind
    check_bits(make_decoder(library, dtype, *heads, window, is_int8=is_int8))


@in_every_form
@pytest.mark.parametrize(
    ("dtype", "window", "changes"),
    [
        ("bfloat16", 7, EVERYTHING),
        ("float16", 7, EVERYTHING),
        # Attention and MLP read one norm.
        ("bfloat16", None, {"architecture": "PhiForCausalLM", "hidden_act": "gelu_new"}),
    ],
)
@torch.inference_mode()
def test_all_arithmetic_has_the_same_bits(
    library: Path, dtype: str, window: int | None, changes: dict[str, Any]
) -> None:
    check_bits(make_decoder(library, dtype, 6, 2, window, is_int8=False, **changes))


@in_every_form
@pytest.mark.parametrize(
    ("dtype", "is_int8"), [("bfloat16", False), ("float16", False), ("bfloat16", True)]
)
@torch.inference_mode()
def test_experts_give_the_same_bits_in_every_step(library: Path, dtype: str, is_int8: bool) -> None:
    """Whichever other tokens an expert's matrices are read for."""
    experts = Experts(num=5, top_k=2, inner=40, shared_inner=24, renormalizes=False)
    decoder = make_decoder(
        library, dtype, 6, 2, None, is_int8=is_int8, architecture="Qwen2MoeForCausalLM",
        hidden_act="swiglu", experts=experts,
    )  # fmt: skip
    check_bits(decoder)
    counted = [
        layer.experts.counters for layer in decoder.stack.layers if layer.experts is not None
    ]
    steps, tokens, taken = np.sum(counted, axis=0)
    assert 2 * steps < taken < 2 * tokens, "tokens of a step share experts"


def check_bits(decoder: Decoder) -> None:
    past_len = 37
    alone = fill(decoder, 1, past_len)
    expected = []
    for at, token in enumerate(CHAIN):
        step = make_step([past_len + at], make_tree([token], [-1]))
        state = decoder.forward(step, alone)
        expected.append((state[0, 0], decoder.compute_logits(state)[0, 0]))
        alone.commit(0, [0])
    assert len({tuple(state.tolist()) for state, _ in expected}) == len(CHAIN)
    for num_rows in (1, 3):
        cache = fill(decoder, num_rows, past_len)
        states = decoder.forward(
            make_step([past_len] * num_rows, make_tree(TOKENS, PARENTS)), cache
        )
        logits = decoder.compute_logits(states)
        for row in range(num_rows):
            for node, (state, logit) in zip(NODES, expected, strict=True):
                assert torch.equal(states[row, node], state)
                assert torch.equal(logits[row, node], logit)
    check_wanted(decoder, states, past_len)


def check_wanted(decoder: Decoder, expected: torch.Tensor, past_len: int) -> None:
    """The last layer goes on with what is wanted: no bit of that or of the cache changes.

    expected: the states of a step of three rows.
    """
    step = make_step([past_len] * len(expected), make_tree(TOKENS, PARENTS))
    cache = fill(decoder, len(expected), past_len)
    before = cache.blocks.clone()
    decoder.forward(step, cache)
    after = cache.blocks.clone()
    for nodes in ([], [(0, 8)], [(0, 0), (2, 3), (2, 8)], [*np.ndindex(3, 9)]):
        wanted = np.zeros(step.tokens.shape, np.bool_)
        for node in nodes:
            wanted[node] = True
        cache.blocks.copy_(before)
        states = decoder.forward(dataclasses.replace(step, output_mask=wanted), cache)
        assert torch.equal(states[wanted], expected[wanted])
        assert not states[~wanted].any(), "nothing is computed of the others"
        assert torch.equal(cache.blocks, after)
    decoder.observed_layers = (1, 3)
    states = decoder.forward(dataclasses.replace(step, output_mask=np.zeros_like(wanted)), cache)
    assert decoder.observed_outputs is not None
    assert torch.equal(states, expected), "what is observed of the last layer is whole"
    decoder.observed_layers = ()


@in_every_form
@pytest.mark.parametrize("window", [None, 70])
@torch.inference_mode()
def test_a_prompt_has_the_same_bits_beside_others(library: Path, window: int | None) -> None:
    """However its passes are cut: alone, with longer and shorter ones, and token by token."""
    decoder = make_decoder(library, "bfloat16", 6, 2, window, is_int8=False)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(64, (size,), generator=generator).tolist() for size in (150, 30, 70)]
    cache = decoder.make_cache(3, 200)
    together = fill_cache(decoder, cache, [0, 1, 2], prompts, 8192)
    for at, prompt in enumerate(prompts):
        for max_num_tokens in (8192, 13, 1):
            state = fill_cache(decoder, decoder.make_cache(1, 200), [0], [prompt], max_num_tokens)
            assert torch.equal(state[0], together[at]), (at, max_num_tokens)


@in_every_form
@torch.inference_mode()
def test_a_prompt_has_the_same_bits_in_a_step_with_trees(library: Path) -> None:
    """Its tokens in rows of the trees' size or longer ones, which go on in each other."""
    decoder = make_decoder(library, "bfloat16", 6, 2, 7, is_int8=False)
    tree, past = make_tree(TOKENS, PARENTS), 37
    expected = decoder.forward(make_step([past], tree), fill(decoder, 1, past))[0]
    prompt = torch.randint(64, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    last = fill_cache(decoder, decoder.make_cache(1, 200), [0], [prompt], 1)[0]
    for size in (len(TOKENS), len(TOKENS) + 3):
        cache = fill(decoder, 2, past)
        cache.past_lens[1] = 0
        reader = PromptReader(decoder, cache, 8192)
        reader.add(1, prompt)
        while reader.is_busy:
            chunk = reader.plan(23, num_others=1, min_size=size)
            assert chunk.size >= size
            segments = [place_tree(tree, 0, cache), *chunk.segments]
            states = decoder.forward(pack_segments(segments, cache, chunk.size), cache)
            assert torch.equal(states[0, : len(TOKENS)], expected)
            ended = chunk.pick_last(states[1:])
            reader.commit(chunk)
        assert torch.equal(ended[0], last)


@torch.inference_mode()
def test_steps_too_long_for_the_kernels(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's attention alongside the kernels' products: the same model."""
    decoder = make_decoder(library, "float32", 6, 2, None, is_int8=False)
    step = make_step([0], make_tree(TOKENS, PARENTS))
    expected = decoder.forward(step, decoder.make_cache(1, 200))
    monkeypatch.setattr(engine, "MAX_NATIVE_TOKENS", len(TOKENS) - 1)
    monkeypatch.setattr(native.NativeKernels, "run_layers", None)
    found = decoder.forward(step, decoder.make_cache(1, 200))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
