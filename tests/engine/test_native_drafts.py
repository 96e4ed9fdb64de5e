"""EAGLE's drafts in one call of the kernels: those of the passes one by one, to the last bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.decode.accept import Candidates
from specdec.decode.drafters.base import ALL_LEVELS
from specdec.decode.drafters.eagle import StaticTree
from specdec.decode.drafters.levels import DynamicTree, TreeDraft
from specdec.decode.prefill import fill_cache
from specdec.engine.eagle import EagleNet
from specdec.engine.kv_cache import KVCache
from specdec.engine.native import NativeKernels
from specdec.engine.native_drafts import NewPairs, NewStates, PackedEagle, pack_drafter
from specdec.engine.native_matrices import KernelMatrix
from specdec.files.torch_tensors import TORCH_DTYPES
from specdec.methods.eagle import Eagle3Params, EagleParams
from tests.engine.kernels import in_every_form, needs_compiler
from tests.engine.models import make_model

pytestmark = needs_compiler
HIDDEN, VOCAB, POSITIONS = 40, 90, 64
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_size": 16, "intermediate_size": 72,
    "max_position_embeddings": POSITIONS,
}  # fmt: skip
THIRD = Eagle3Params(aux_layers=(0, 2), draft_vocab_size=53, norm_before_residual=False)
KINDS: dict[str, Eagle3Params | None] = {
    "eagle1": None,
    "eagle3": THIRD,
    "eagle3-input-norm": dataclasses.replace(
        THIRD, norm_before_residual=True, norm_before_fc=True, draft_vocab_size=VOCAB
    ),
    "eagle3-fc-norm": dataclasses.replace(THIRD, fc_norm=True, norm_output=True),
}
TREES: dict[str, StaticTree | DynamicTree] = {
    "chain": StaticTree(((0,), (0, 0), (0, 0, 0))),
    "static": StaticTree(((0,), (1,), (4,), (0, 0), (0, 2), (4, 1), (0, 2, 0), (4, 1, 3))),
    "dynamic": DynamicTree(top_k=4, depth=4, num_tokens=9),
    "shallow": DynamicTree(top_k=3, depth=1, num_tokens=7),
}
# Rows of the cache with a text each, of which some pairs have run.
ROWS, NUM_RUN = [3, 0, 1], [9, 1, 30]
TEMPERATURES = np.array([0.5, 1.0, 0.7])


class Drafter:
    """A random drafter with a cache of texts, which drafts in both ways."""

    def __init__(self, kernels: NativeKernels, kind: str, *, packs_embedding: bool) -> None:
        name = next(name for name, dtype in TORCH_DTYPES.items() if dtype is kernels.dtype)
        model, self.generator = make_model(**SIZES, dtype=name), torch.Generator().manual_seed(4)
        net = dataclasses.replace(model, num_hidden_layers=1 if KINDS[kind] else 2)
        params = EagleParams(
            net=net, num_eagle_layers=1, max_non_leaves_per_layer=9, max_draft_len=20,
            eagle3=KINDS[kind],
        )  # fmt: skip
        shapes = {name: spec.shape for name, spec in params.list_tensors(model).items()}
        shapes |= {
            f"{name}.weight": (VOCAB, HIDDEN) for name in ("transformer.vocab_embedding", "lm_head")
        }
        weights: dict[str, Any] = {}
        for name, shape in shapes.items():
            weights[name] = self.draw(*shape) * 2 / shape[-1] ** 0.5
            weights[name] = weights[name].to(kernels.dtype)
            if name.endswith("d2t"):
                weights[name] = torch.arange(*shape) % 7 * 5
            elif "norm" in name or "ln_f" in name:
                weights[name] = (1 + self.draw(*shape) / 8).to(kernels.dtype)
            elif packs_embedding and name.endswith("drafter.vocab_embedding.weight"):
                numbers = kernels.pack_matrix(weights[name])
                weights[name] = KernelMatrix(numbers, (VOCAB, HIDDEN), kernels)
        self.net = EagleNet(
            params, weights, model, num_positions=POSITIONS, device=torch.device("cpu"),
            prepack=False, kernels=kernels,
        )  # fmt: skip
        packed = pack_drafter(self.net)
        assert packed is not None
        self.packed: PackedEagle = packed
        self.states = self.draw(2, 5, packed.state_size).to(kernels.dtype)
        self.features = self.draw(4, POSITIONS, HIDDEN).to(kernels.dtype)
        self.texts = [
            torch.randint(VOCAB, (size,), generator=self.generator).tolist() for size in (12, 2, 34)
        ]
        self.cache = self.net.decoder.make_cache(4, POSITIONS)
        begun = [text[:count] for text, count in zip(self.texts, NUM_RUN, strict=True)]
        self.run_pairs(self.cache, self.features, begun)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def run_pairs(self, cache: KVCache, features: Tensor, texts: Sequence[Sequence[int]]) -> Tensor:
        def run(step: Any, cache: KVCache) -> Tensor:
            return self.net.forward(step, features[step.rows[:, None], step.positions], cache)

        return fill_cache(self.net.decoder, cache, ROWS, texts, 512, forward=run)

    def copy(self) -> tuple[KVCache, Tensor]:
        cache = self.net.decoder.make_cache(4, POSITIONS)
        cache.blocks.copy_(self.cache.blocks)
        cache.past_lens[:] = self.cache.past_lens
        return cache, self.features.clone()

    def draft_by_passes(
        self, tree: Any, new: NewStates, min_gain: float
    ) -> tuple[list[Candidates], int, Tensor]:
        cache, features = self.copy()
        made = self.net.make_features(self.states.flatten(0, 1)[list(new.lines)])
        features[list(new.rows), list(new.positions)] = made
        hidden = self.run_pairs(cache, features, self.texts)
        roots = np.array([text[-1] for text in self.texts])
        draft = TreeDraft(self.net, cache, np.array(ROWS), roots, hidden, TEMPERATURES, min_gain)
        return tree.grow(draft), draft.num_levels, features

    def draft_at_once(
        self, tree: Any, new: NewStates, min_gain: float
    ) -> tuple[list[Candidates], int, Tensor]:
        cache, features = self.copy()
        tokens = [text[count:] for text, count in zip(self.texts, NUM_RUN, strict=True)]
        drafts = self.packed.draft(
            cache, features, new, NewPairs(ROWS, tokens, TEMPERATURES), tree.lay_out(), min_gain
        )
        assert cache.past_lens[ROWS].tolist() == [len(text) for text in self.texts]
        return tree.name_drafts(drafts), drafts.num_levels, features


def check_both(drafter: Drafter) -> None:
    new = NewStates(drafter.states, [0, 3, 4, 6, 7], [3, 3, 3, 1, 1], [9, 10, 11, 30, 31])
    for tree in TREES.values():
        for min_gain in (ALL_LEVELS, 1.2):
            wanted, wanted_levels, wanted_features = drafter.draft_by_passes(tree, new, min_gain)
            found, num_levels, features = drafter.draft_at_once(tree, new, min_gain)
            assert num_levels == wanted_levels
            assert torch.equal(features, wanted_features)
            for one, other in zip(found, wanted, strict=True):
                for part in ("tokens", "parents", "depths"):
                    np.testing.assert_array_equal(
                        getattr(one.tree, part), getattr(other.tree, part), part
                    )
                assert one.confidence is not None
                assert other.confidence is not None
                np.testing.assert_array_equal(one.confidence, other.confidence)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_drafts_what_passes_do(library: Path, kind: str, dtype: torch.dtype) -> None:
    """Of rows with texts of unlike length, for trees of all kinds; features are alike, too."""
    check_both(Drafter(NativeKernels(library, dtype), kind, packs_embedding=kind == "eagle3"))


@in_every_form
def test_every_form_drafts_so(library: Path) -> None:
    check_both(Drafter(NativeKernels(library, torch.bfloat16), "eagle3", packs_embedding=True))


def test_what_the_kernels_would_read_beyond_is_refused(library: Path) -> None:
    drafter = Drafter(NativeKernels(library, torch.float32), "eagle3", packs_embedding=False)
    tree, cache, states = TREES["dynamic"].lay_out(), drafter.cache, drafter.states

    def draft(new: NewStates | None = None, **changed: Any) -> None:
        pairs = NewPairs(**{"rows": [0], "tokens": [[5]], "temperatures": np.ones(1), **changed})
        drafter.packed.draft(cache, drafter.features, new, pairs, tree, ALL_LEVELS)

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"rows": [4]}, "rows, positions"), ({"tokens": [[VOCAB]]}, "rows, positions"),
        ({"tokens": [[-1]]}, "rows, positions"), ({"tokens": [[]]}, "pairs"),
        ({"tokens": [[1] * 60]}, "of 64 positions"),
        ({"temperatures": np.zeros(1)}, "temperatures"),
        ({"new": NewStates(states, [10], [0], [1])}, "rows, positions"),
        ({"new": NewStates(states, [0], [4], [1])}, "rows, positions"),
        ({"new": NewStates(states, [0], [0], [64])}, "rows, positions"),
        ({"new": NewStates(states.double(), [0], [0], [1])}, "states is torch.float64"),
        ({"new": NewStates(states[..., :9], [0], [0], [1])}, "states is"),
    ]  # fmt: skip
    past = cache.past_lens.copy()
    for changed, message in wrong:
        with pytest.raises((ValueError, IndexError), match=f"{message}|out of bounds"):
            draft(**changed)
    assert cache.past_lens.tolist() == past.tolist()
    big = dataclasses.replace(tree, max_ranked=99)
    with pytest.raises(ValueError, match="of 53 drafted tokens"):
        drafter.packed.draft(
            cache, drafter.features, None, NewPairs([0], [[5]], np.ones(1)), big, ALL_LEVELS
        )
