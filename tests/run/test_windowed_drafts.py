"""Drafts of and for models with windowed layers: all operators, windows, trees and drafters."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.decode.drafters.draft_target import attach_draft
from specdec.decode.drafters.draft_tree import DraftModelNet
from specdec.decode.drafters.levels import Level, TreeDraft, make_first
from specdec.decode.drafters.medusa import MedusaDrafter
from specdec.decode.drafters.trees import grow_choices
from specdec.decode.engine import TorchEngine
from specdec.engine.compiler import find_compiler
from specdec.engine.decoder import Decoder
from specdec.engine.kv_cache import KVCache
from specdec.engine.step import Step
from specdec.text.token_map import SameTokens
from specdec.trt.library import find_package
from tests.covering import cover
from tests.engines import call, continue_by_transformers, list_requests
from tests.families import make_family_model
from tests.methods import build_methods, use_method
from tests.tape import TapeRecorder
from tests.trt.networks import load_here

VOCAB, LIMIT = 128, 14
PROMPTS = [list(range(3, 23)), [5, 9, 77], [60, 8] * 6]
# Where all layers have a window, where every other one has, and where a rotary table goes with it.
FAMILIES = ("mistral", "gemma2", "gemma3", "phi3")
WINDOWS = (5, 40)  # shorter than a text, and longer than every text
OPERATORS = tuple(
    name
    for name, is_there in {
        "kernels": find_compiler() is not None, "torch": True, "graphs": True,
        "two ranks": True, "networks": find_package() is not None,
    }.items()
    if is_there
)  # fmt: skip
# Tokens and levels of a draft model's tree; None is a chain.
TREES = {"chain": None, "three levels": (6, 3), "six levels": (12, 6), "one level": (4, 1)}
METHODS = (
    *(f"draft_target, {tree}" for tree in TREES),
    "eagle", "eagle, dynamic", "redrafter", "medusa", "dflash",
)  # fmt: skip


class Models:
    """Checkpoints and engines of windowed models, each made when it is first asked for."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self.target = functools.cache(self._make_target)
        self.list_expected = functools.cache(self._list_expected)
        self._checkpoint = functools.cache(self._convert)

    def _make_target(self, family: str, window: int, num_ranks: int) -> Path:
        folder = self._parent / f"{family}-{window}-{num_ranks}"
        folder.mkdir()
        pattern: dict[str, Any] = {"sliding_window_pattern": 2} if family == "gemma3" else {}
        return make_family_model(
            folder, family, vocab=VOCAB, seed=3, sliding_window=window, **pattern
        )

    def _list_expected(self, family: str, window: int) -> list[list[int]]:
        """Texts of transformers' greedy decoding."""
        return continue_by_transformers(self.target(family, window, 1), PROMPTS, LIMIT)

    def _convert(self, family: str, window: int, drafter: str, num_ranks: int) -> Path:
        target = self.target(family, window, num_ranks)
        build_methods(target, drafter, convert=["--tp-size", num_ranks])
        return target.parent / f"{drafter}-ckpt"

    def open_engine(self, name: str, operators: str, family: str, window: int) -> Any:
        """Load an engine with a drafter's weights, "pair" or "draft"."""
        checkpoint = self._checkpoint(family, window, name, 1 + (operators == "two ranks"))
        folder = checkpoint.parent / f"{name}-{operators}"
        flags: list[object] = ["--max-batch-size", 3]
        if name == "pair":
            flags += ["--speculative-decoding-mode", "draft_tokens_external",
                      "--max-draft-len", 12]  # fmt: skip
        if operators == "networks":
            return load_here(checkpoint, folder, *flags, "--force")
        kind = "auto" if operators == "kernels" else "none"
        if not folder.exists():
            call("build", "--checkpoint-dir", checkpoint, "--output-dir", folder,
                 "--optimize", kind, *flags)  # fmt: skip
        recorder = TapeRecorder() if operators == "graphs" else None
        return TorchEngine(folder, device="cpu", recorder=recorder)

    def load(self, operators: str, family: str, window: int, method: str) -> Any:
        """Load an engine that drafts by a method."""
        name, _, variant = method.partition(", ")
        opened = functools.partial(
            self.open_engine, operators=operators, family=family, window=window
        )
        if name != "draft_target":
            engine = opened(name)
            if isinstance(engine.drafter, MedusaDrafter):  # as on a GPU
                engine.drafter.use_tree(grow_choices(3, 7, 128))
            use_method(engine, method)
            return engine
        engine, tree = opened("pair"), TREES[variant]
        tokens, depth = tree or (None, 3)
        attach_draft(engine, opened("draft"), draft_len=depth, use_logits=False, tree_tokens=tokens)
        return engine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("windows"))


ROWS = [
    row
    for row in itertools.product(OPERATORS, FAMILIES, WINDOWS, METHODS, (1, 3))
    # The build has no network of DFlash; convert asks how a drafter for Gemma was trained.
    if row[3] != "dflash" or (row[0] != "networks" and "gemma" not in row[1])
]


@pytest.mark.thorough
@pytest.mark.parametrize(("operators", "family", "window", "method", "rows"), cover(ROWS))
def test_text_is_that_of_plain_decoding(
    operators: str, family: str, window: int, method: str, rows: int, models: Models
) -> None:
    engine = models.load(operators, family, window, method)
    results = engine.generate(list_requests(PROMPTS[:rows], LIMIT))
    expected = models.list_expected(family, window)
    assert [result.output_ids for result in results] == expected[:rows]
    assert sum(result.stats.num_draft_tokens for result in results) > 3


def start_texts(decoder: Decoder, texts: Sequence[Sequence[int]]) -> tuple[KVCache, Tensor]:
    """Run and commit texts, one in each row; return the states of their last tokens, [B, D]."""
    cache, states = decoder.make_cache(len(texts), 64), []
    for row, text in enumerate(texts):
        decoder.start_row(cache, row, len(text))
        size = len(text)
        step = Step(
            np.array([row]), np.array([text]), np.arange(size)[None],
            np.tril(np.ones((1, size, size), np.bool_)),
        )  # fmt: skip
        states.append(decoder.forward(step, cache)[0, -1])
        cache.commit(row, list(range(size)))
    return cache, torch.stack(states)


SHAPES: dict[str, Callable[[int], list[int]]] = {  # a level's parents, by its depth
    "chain": lambda depth: [0],
    "wide": lambda depth: [0] * 4 if depth == 1 else [0, 0, 1, 3],
    "narrowing": lambda depth: [[0, 0, 0, 0], [1, 2, 2], [0, 2], [1], [0]][depth - 1],
}


@pytest.mark.thorough
@torch.inference_mode()
@pytest.mark.parametrize(
    ("operators", "family", "window", "shape"),
    cover(itertools.product(OPERATORS, FAMILIES, (3, *WINDOWS), SHAPES)),
)
def test_nodes_of_a_tree_see_what_their_path_sees(
    operators: str, family: str, window: int, shape: str, models: Models
) -> None:
    """Each node's state is that of its path alone, which lies in the cache as a text."""
    decoder = models.open_engine("draft", operators, family, window).decoder
    texts = [PROMPTS[0], PROMPTS[1]]
    cache, hidden = start_texts(decoder, texts)
    net = DraftModelNet(decoder, SameTokens(VOCAB, VOCAB))
    roots = np.array([text[-1] for text in texts])
    draft = TreeDraft(net, cache, np.arange(2), roots, hidden, np.full(2, 0.5))
    level, paths = make_first(roots, 4), [[text] for text in texts]
    for depth in range(1, 6):
        ranked, _ = draft.rank(level)  # [B, n, 4]
        parents = np.array(SHAPES[shape](depth))
        tokens = ranked[:, parents, np.arange(len(parents)) % 4]
        level = Level(tokens, np.tile(parents, (2, 1)), 4)
        for row, before in enumerate(paths):
            paths[row] = [
                [*before[parent], token]
                for parent, token in zip(parents.tolist(), tokens[row].tolist(), strict=True)
            ]
    draft.rank(level)
    _, expected = start_texts(decoder, [path for row in paths for path in row])
    difference = draft._hidden.flatten(0, 1) - expected
    assert difference.abs().max() < 1e-4 * expected.abs().max()
