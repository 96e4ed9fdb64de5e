"""specdec-bench and specdec diagnose on every method: the same figures, and they hold together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.files.ngrams import hash_tokens
from specdec.measure.diagnose import diagnose
from specdec.measure.pipeline import run_bench
from specdec.measure.settings import BenchSettings, DiagnoseSettings
from specdec.methods import METHODS
from specdec.text.pretrained import load_tokenizer
from tests.bench.conftest import PLAIN_CHECKPOINT
from tests.engines import call
from tests.methods import TABLE

Case = dict[str, Any]  # settings of a command


def use(engine: Path, folder: Path, **flags: Any) -> Case:
    return {
        "engine_dir": engine, "tokenizer_dir": str(folder / "target"),
        "prompts": folder / "prompts.jsonl", **flags,
    }  # fmt: skip


def use_eagle(request: pytest.FixtureRequest) -> Case:
    folder = request.getfixturevalue("eagle1")
    return use(folder / "engine", folder, eagle_dynamic_tree_max_top_k=3, eagle_tree_tokens=6)


def use_pair(request: pytest.FixtureRequest) -> Case:
    engine, draft = request.getfixturevalue("pair")
    folder = request.getfixturevalue("folder")
    return use(engine, folder, draft_engine_dir=draft, draft_len="2")


def use_lookup(request: pytest.FixtureRequest) -> Case:
    engine, _ = request.getfixturevalue("pair")
    return use(engine, request.getfixturevalue("folder"), prompt_lookup_num_tokens=3)


def use_suffix(request: pytest.FixtureRequest) -> Case:
    engine, _ = request.getfixturevalue("pair")
    return use(engine, request.getfixturevalue("folder"), suffix_max_tokens=3)


def use_ngrams(request: pytest.FixtureRequest) -> Case:
    """Let a table of the engine's tokenizer draft, which says that few tokens follow each."""
    engine, _ = request.getfixturevalue("pair")
    folder = request.getfixturevalue("folder")
    tokenizer = load_tokenizer(folder / "target")
    digest = hash_tokens(tokenizer, TABLE.num_tokens)
    dataclasses.replace(TABLE, sha256=digest).write(folder / "table.safetensors")
    return use(engine, folder, ngram_table=folder / "table.safetensors", ngram_max_tokens=3)


def use_lookahead(request: pytest.FixtureRequest) -> Case:
    request.getfixturevalue("plain")
    folder = request.getfixturevalue("folder")
    engine = folder / "engine-lookahead"
    call("build", "--checkpoint-dir", folder / PLAIN_CHECKPOINT, "--output-dir", engine, "--force",
         "--optimize", "none", "--speculative-decoding-mode", "lookahead_decoding",
         "--max-draft-len", 11)  # fmt: skip
    return use(engine, folder, lookahead_config="[3,3,3]")


def use_assistant(request: pytest.FixtureRequest) -> Case:
    folder = request.getfixturevalue("assistant")
    return use(folder / "engine", folder, mtp_assistant_tokens=3)


CASES: dict[str, Callable[[pytest.FixtureRequest], Case]] = {
    "redrafter": lambda r: use(r.getfixturevalue("engine"), r.getfixturevalue("folder")),
    "medusa": lambda r: use(r.getfixturevalue("medusa"), r.getfixturevalue("folder")),
    "eagle": use_eagle,
    "dflash": lambda r: use(r.getfixturevalue("dflash") / "engine", r.getfixturevalue("dflash")),
    "mtp": lambda r: use(r.getfixturevalue("mtp") / "engine", r.getfixturevalue("mtp")),
    "mtp_assistant": use_assistant,
    "draft_target": use_pair,
    "prompt_lookup": use_lookup,
    "suffix": use_suffix,
    "ngram": use_ngrams,
    "lookahead": use_lookahead,
}
MAX_ACCEPTED = {  # draft tokens that a step of these settings can accept
    "redrafter": 3, "medusa": 3, "eagle": 3, "dflash": 4, "draft_target": 2, "prompt_lookup": 3,
    "suffix": 3, "ngram": 3, "lookahead": 3, "mtp": 3, "mtp_assistant": 3,
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("method", [*METHODS])
def test_figures_of_every_method(method: str, request: pytest.FixtureRequest) -> None:
    case = CASES[method](request)
    settings: Case = {"device": "cpu", "max_output_len": 8, "repeat": 1, "batch_sizes": "1"}
    settings |= {"draft_budget": "fixed"} | case
    report = run_bench(BenchSettings(**settings))
    assert report["method"] == method
    (batch,) = report["batches"]
    assert batch["texts"]["equal"] == batch["texts"]["compared"] == report["num_prompts"]
    acceptance = batch["acceptance"]
    assert len(acceptance["accepted_by_position"]) == MAX_ACCEPTED[method]
    assert acceptance["draft_tokens_per_step"] > 0
    counts = acceptance["accepted_histogram"]
    shares = [sum(counts[n:]) / sum(counts) for n in range(1, len(counts))]
    assert acceptance["accepted_by_position"] == pytest.approx(shares, abs=1e-3)
    emitted = sum(counts) + sum(n * count for n, count in enumerate(counts))
    # Plain decoding takes a step for every token but a text's first; a last step may be cut.
    assert 0 <= emitted - batch["plain"]["num_steps"] <= report["num_prompts"]
    assert min(batch["speculation"]["step_ms"].values()) > 0
    diagnosis = diagnose(DiagnoseSettings(**settings))
    (batch_diagnosis,) = diagnosis["batches"]
    assert batch_diagnosis["acceptance_length"] == acceptance["acceptance_length"], (
        "as specdec-bench has it"
    )
    remedies = " ".join(cause["remedy"] for cause in batch_diagnosis["causes"])
    assert ("train" in remedies) <= (METHODS[method].source != "target")
