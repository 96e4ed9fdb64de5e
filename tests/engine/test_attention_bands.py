"""Attention in bfloat16 where sums are those of AMX: by AMX and in plain code, in any step.

What lies in the cache beyond the tokens is no number: reading any of it would show.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.engine import compiler, layers, native, native_library
from specdec.engine.torch_layers import build_full_mask
from specdec.engine.tree import BoolArray, Tree, build_tree_mask
from tests.engine.kernels import FORMS, needs_compiler

pytestmark = needs_compiler

PLAIN_AND_OWN = [form for form in ("own", "bands") if form in FORMS]
# Of the largest value: weights and results are rounded to bfloat16.
TOLERANCE = 1e-2
PARENTS = np.array([-1, 0, 0, 1, 3, 3, 4, 4, 7, 2, 8, 10])
TREE = Tree(tokens=PARENTS, parents=PARENTS, depths=PARENTS)  # for its mask alone
# heads, K/V heads, size, window, cap
SHAPES = [
    (4, 1, 64, None, None),
    (6, 2, 24, None, None),
    (3, 3, 80, 33, None),
    (20, 1, 96, None, 2.0),
    (8, 2, 128, 600, 2.0),
    (2, 1, 7, 4, None),
]
LENGTHS = [0, 1, 31, 32, 33, 500, 511, 512, 513, 1030]


class Text:
    """A text's keys and values, then the queries, keys and values of tokens that follow."""

    def __init__(self, past: int, shape: tuple[int, int, int, int | None, float | None]) -> None:
        generator = torch.Generator().manual_seed(past)
        self.past = past
        self.heads, self.kv_heads, self.size, window, cap = shape
        self.how = layers.Attention(scale=0.3, cap=cap, window=window, rotary=None)
        self.cache = torch.full(
            (2, 1, self.kv_heads, past + 50, self.size), float("nan"), dtype=torch.bfloat16
        )
        self.cache[:, :, :, :past] = torch.randn(
            2, 1, self.kv_heads, past, self.size, generator=generator
        )
        width = (self.heads + 2 * self.kv_heads) * self.size
        self.qkv = torch.randn(40, width, generator=generator).bfloat16()

    def attend(
        self, kernels: native.NativeKernels, tokens: list[int], mask: BoolArray, before: int = 0,
        cache: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Of a step of these tokens; `before` more are in the cache."""
        cache = self.cache.clone() if cache is None else cache
        past = np.array([self.past + before])
        positions = (past + mask.sum(axis=1) - 1)[None]
        plan = kernels.plan_step(np.array([0]), positions, positions, past, mask[None])
        return kernels.attend(
            self.qkv[tokens][None].clone(), cache, self.how, plan, self.heads, self.kv_heads,
            self.size,
        )[0]  # fmt: skip

    def compute(self, tokens: list[int], mask: BoolArray) -> torch.Tensor:
        """The same in float64."""
        cache = self.cache.double().nan_to_num()
        view = self.qkv[tokens].double().view(len(tokens), -1, self.size).transpose(0, 1)
        slots = slice(self.past, self.past + len(tokens))
        cache[0, 0, :, slots] = view[self.heads : self.heads + self.kv_heads]
        cache[1, 0, :, slots] = view[self.heads + self.kv_heads :]
        past = np.array([self.past])
        positions = (past + mask.sum(axis=1) - 1)[None]
        full = build_full_mask(past, mask[None], positions, cache.shape[3], self.how.window)
        return layers.attend(
            view[: self.heads].transpose(0, 1)[None].contiguous(), cache[0], cache[1],
            torch.from_numpy(full), self.how.scale, self.how.cap,
        )[0]  # fmt: skip


# A tree, a prompt's chunk, and a block of which every token sees all.
STEPS = {
    "tree": build_tree_mask(TREE), "chunk": np.tri(40, dtype=bool), "block": np.ones((16, 16), bool)
}  # fmt: skip


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The kernels for this machine, and those of the same sums in plain code."""
    found = []
    for form in ("own", "bands"):
        folder = tmp_path_factory.mktemp(form)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native_library, "FLAGS", (*compiler.FLAGS, *FORMS[form]))
            native_library.compile_kernels(folder)
        found.append(folder / native_library.LIBRARY_NAME)
    return found


@pytest.mark.skipif("bands" not in FORMS, reason="of x86")
@pytest.mark.parametrize("shape", SHAPES)
def test_plain_code_has_the_bits_of_amx(
    both: list[Path], shape: tuple[int, int, int, int | None, float | None]
) -> None:
    amx, plain = (native.NativeKernels(library, torch.bfloat16) for library in both)
    if not amx.uses_amx:
        pytest.skip("this processor has no AMX")
    for past in LENGTHS:
        text = Text(past, shape)
        for name, mask in STEPS.items():
            by_amx, expected = (text.attend(k, list(range(len(mask))), mask) for k in (amx, plain))
            assert torch.equal(by_amx.view(torch.int16), expected.view(torch.int16)), (past, name)


@pytest.mark.parametrize("library", PLAIN_AND_OWN, indirect=True)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_has_the_same_bits_in_every_step(
    library: Path, shape: tuple[int, int, int, int | None, float | None]
) -> None:
    """Alone, in a chain, in a tree and in a prompt's chunks; and they are near the exact ones."""
    kernels = native.NativeKernels(library, torch.bfloat16)
    for past in LENGTHS:
        text = Text(past, shape)
        for name, mask in STEPS.items():
            tokens = list(range(len(mask)))
            found, exact = text.attend(kernels, tokens, mask), text.compute(tokens, mask)
            error = (found.double() - exact).abs().max() / exact.abs().max()
            assert error < TOLERANCE, (past, name)
            if name == "block":
                continue
            node = tokens[-1]
            path = [token for token in tokens if mask[node, token]]
            chain = text.attend(kernels, path, np.tri(len(path), dtype=bool))
            assert torch.equal(chain, found[path]), (past, name)
            cache = text.cache.clone()
            for at, token in enumerate(path):
                one = np.ones((1, 1), bool)
                alone = text.attend(kernels, [token], one, before=at, cache=cache)
                assert torch.equal(alone[0], found[token]), (past, name, at)
