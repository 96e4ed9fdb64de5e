"""Engines of one target after every method, for the tests that try them all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specdec.decode.drafters.draft_target import attach_draft
from specdec.decode.drafters.lookahead import LookaheadDrafter
from specdec.decode.drafters.ngram import NgramDrafter
from specdec.decode.drafters.prompt_lookup import PromptLookupDrafter
from specdec.decode.drafters.suffix import SuffixDrafter
from specdec.decode.engine import TorchEngine
from specdec.files.ngrams import NgramTable
from specdec.methods.lookahead import LookaheadConfig
from specdec.methods.ngram import NgramOptions
from specdec.methods.prompt_lookup import LookupOptions
from specdec.methods.suffix import SuffixOptions
from specdec.train.ngrams.counts import count_ngrams, join_texts, make_table
from tests.conftest import (
    make_dflash_drafter,
    make_drafter,
    make_eagle_drafter,
    make_medusa_heads,
    make_mtp_head,
)
from tests.engines import call, make_noisy_copy

EXTERNAL = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 6)


def make_drafter_flags(name: str, target: Path, layers: int) -> tuple[object, ...]:
    """What convert needs for a drafter, which is written beside the target."""
    parent = target.parent
    observed = (0,) if layers == 2 else (0, 1)  # DFlash's target layers; not the last one
    match name:
        case "redrafter":
            return ("--drafter-model-dir", make_drafter(parent, exit_dim=96, scale=3.0))
        case "medusa":
            return ("--medusa-model-dir", make_medusa_heads(parent, scale=3.0))
        case "eagle":
            return ("--eagle-model-dir", make_eagle_drafter(parent, scale=2.0))
        case "eagle3":
            own: dict[str, Any] = {"version": 3, "aux_layers": (0, layers - 1), "name": "eagle3"}
            return ("--eagle-model-dir", make_eagle_drafter(parent, scale=2.0, **own))
        case "dflash":
            own = {"target_layers": layers, "aux_layers": observed, "scale": 2.0}
            return ("--dflash-model-dir", make_dflash_drafter(parent, **own))
        case "mtp":
            return ("--mtp-model-dir", make_mtp_head(parent, target))
    return ()


def build_methods(
    target: Path,
    *names: str,
    layers: int = 2,
    convert: Sequence[object] = (),
    build: Sequence[object] = (),
) -> None:
    """Write NAME-ckpt and NAME-engine beside a target.

    names: of drafters; "pair", which takes drafts from outside; "draft", the target alone; "noisy",
    a model that mostly agrees with it.
    """
    parent = target.parent
    for name in names:
        source = target
        if name == "noisy":
            make_noisy_copy(target, source := parent / name)
        checkpoint, engine = parent / f"{name}-ckpt", parent / f"{name}-engine"
        flags = make_drafter_flags(name, target, layers)
        call("convert", "--model-dir", source, "--output-dir", checkpoint, *flags, *convert)
        flags = EXTERNAL if name == "pair" else ()
        call("build", "--checkpoint-dir", checkpoint, "--output-dir", engine, *flags, *build)


def count_table(texts: Sequence[Sequence[int]], num_tokens: int) -> NgramTable:
    """Count all n-grams of some texts, up to 3 tokens before the next."""
    corpus = join_texts([np.array(text) for text in texts])
    orders = count_ngrams(corpus, max_order=3, min_count=1, num_continuations=4, least_news=0.0)
    return make_table(orders, num_tokens=num_tokens, sha256="none")


# Of whatever model's tokens: each with the numbers after it.
TABLE = count_table([[(start + step) % 60 for step in range(9)] for start in range(60)], 60)


def use_method(engine: TorchEngine, method: str) -> None:
    """Let an engine draft from its texts alone, or an EAGLE engine by dynamic trees."""
    if method == "eagle, dynamic":
        eagle: Any = engine.drafter
        eagle.use_dynamic_tree(3, 8)
    elif method == "prompt_lookup":
        lookup = LookupOptions(num_tokens=4, max_ngram_size=2)
        engine.use_method(method, PromptLookupDrafter(lookup))
    elif method == "suffix":
        engine.use_method(method, SuffixDrafter(SuffixOptions(max_tokens=6, min_probability=0)))
    elif method == "ngram":
        engine.use_method(method, NgramDrafter(NgramOptions(path=Path(), max_tokens=6), TABLE))
    elif method == "lookahead":
        engine.use_method(method, LookaheadDrafter(LookaheadConfig(3, 3, 3), engine.decoder))


def load_method(parent: Path, method: str, draft: str = "draft") -> TorchEngine:
    """An engine with a method and its variant, as "eagle, dynamic", of those in a folder.

    draft: the engine of the draft model.
    """
    name, _, variant = method.partition(", ")
    folder = parent / f"{name}-engine"
    engine = TorchEngine(folder if folder.exists() else parent / "pair-engine", device="cpu")
    if name == "draft_target":
        tree_tokens = 4 if variant == "tree" else None
        attach_draft(
            engine,
            TorchEngine(parent / f"{draft}-engine", device="cpu"),
            draft_len=None if tree_tokens else 3,
            use_logits=variant == "logits",
            tree_tokens=tree_tokens,
        )
    use_method(engine, method)
    return engine
