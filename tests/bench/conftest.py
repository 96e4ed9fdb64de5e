"""Engines that the tests of specdec-bench, tune and diagnose measure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.assistants import make_mtp_assistant, make_target
from tests.conftest import make_drafter, make_llama, make_medusa_heads, make_tokenizer
from tests.engines import (
    call,
    make_constant_pair,
    make_engine,
    make_knowing_drafter,
    make_tree_engine,
)

PLAIN_CHECKPOINT = "ckpt-b4l5noneautop"  # that `plain` is built from
NOISE = {"feature": 2.4, "layers": 0.9}  # of EAGLE drafters, by what they know
TEXTS = ("def add(a, b):", "import os", "The", "x = 1\ny = 2\n", "Once upon", "a, b")


@pytest.fixture(scope="session")
def folder(lasting_dir: Path) -> Path:
    """A target with its tokenizer, and prompts of two categories."""
    parent = lasting_dir / "bench"
    make_llama(parent, seed=3)
    make_tokenizer(parent / "target")
    make_drafter(parent, seed=5)
    lines = [
        {"question_id": n, "category": "code" if n % 2 else "prose", "prompt": text}
        for n, text in enumerate(TEXTS)
    ]
    (parent / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return parent


@pytest.fixture(scope="session")
def engine(folder: Path) -> Path:
    """A ReDrafter engine of the target, with a drafter that knows nothing."""
    return make_engine(
        folder, folder / "target", folder / "drafter", beams=2, length=3, optimize="none"
    )


@pytest.fixture(scope="session")
def plain(folder: Path) -> Path:
    """The target alone."""
    return make_engine(folder, folder / "target", optimize="none")


@pytest.fixture(scope="session")
def pair(folder: Path, plain: Path) -> tuple[Path, Path]:
    """An engine that takes drafts, and the same model to draft for it."""
    engine = folder / "engine-external"
    call("build", "--checkpoint-dir", folder / PLAIN_CHECKPOINT, "--output-dir", engine,
         "--optimize", "none", "--speculative-decoding-mode", "draft_tokens_external",
         "--max-draft-len", 4)  # fmt: skip
    return engine, plain


@pytest.fixture(scope="session")
def medusa(folder: Path) -> Path:
    make_medusa_heads(folder)
    call(
        "convert", "--model-dir", folder / "target", "--medusa-model-dir", folder / "heads",
        "--output-dir", folder / "ckpt-medusa", "--max-medusa-token-len", 20,
    )  # fmt: skip
    engine = folder / "engine-medusa"
    call("build", "--checkpoint-dir", folder / "ckpt-medusa", "--output-dir", engine,
         "--optimize", "none")  # fmt: skip
    return engine


EAGLE = ("--num-eagle-layers", 3, "--max-draft-len", 31, "--max-non-leaves-per-layer", 4)


def make_knowing_folder(
    folder: Path, kind: str, method: str = "eagle", flags: Sequence[object] = EAGLE
) -> Path:
    """A target, prompts, and an engine with a drafter that is right, or with noise now and then."""
    drafter = make_knowing_drafter(folder, kind, noise=NOISE.get(kind, 0.0))
    (folder / "counter").rename(folder / "target")
    make_tokenizer(folder / "target")
    lines = [{"input_ids": list(ids)} for ids in ([4], [30, 2], [9] * 5, [17, 1], [25])]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_tree_engine(
        method, folder, folder / "target", drafter, optimize="none", flags=flags
    )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def eagle1(lasting_dir: Path) -> Path:
    """EAGLE-1's folder."""
    return make_knowing_folder(lasting_dir / "eagle1", "feature")


@pytest.fixture(scope="session")
def mtp(lasting_dir: Path) -> Path:
    """The folder of a head for multi-token prediction."""
    flags = ("--mtp-max-draft-len", 3)
    return make_knowing_folder(lasting_dir / "mtp", "mtp-embedding", "mtp", flags)


@pytest.fixture(scope="session")
def assistant(lasting_dir: Path) -> Path:
    """The folder of a Gemma 4 and its assistant."""
    folder = lasting_dir / "assistant"
    folder.mkdir()
    drafter = make_mtp_assistant(folder, make_tokenizer(make_target(folder / "target")))
    lines = [{"input_ids": list(ids)} for ids in ([4], [30, 2], [9] * 5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_tree_engine("mtp_assistant", folder, folder / "target", drafter, optimize="none")
    return folder


@pytest.fixture(scope="session")
def dflash(lasting_dir: Path) -> Path:
    """The folder of a DFlash drafter that is always right."""
    folder = lasting_dir / "dflash"
    drafter = make_constant_pair(folder)
    make_tokenizer(folder / "target")
    lines = [{"input_ids": list(ids)} for ids in ([4], [30, 2], [9] * 5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_tree_engine("dflash", folder, folder / "target", drafter, optimize="none")
    return folder


@pytest.fixture(scope="session")
def eagle3(lasting_dir: Path) -> Path:
    """EAGLE-3's."""
    return make_knowing_folder(lasting_dir / "eagle3", "layers")
