"""llama.cpp's server: what specdec-export writes as GGUF is loaded, and drafts as specdec does."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.side_by_side.workers.llama_cpp import Server
from tests.engines import call
from tests.oracles.conftest import MAX_TOKENS
from tests.oracles.models import PYCODE
from tests.oracles.ours import Counters, chain, count, decode, make_engine

LENGTH = 3
EXTERNAL = ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 8)
METRIC = re.compile(r'^llamacpp:spec_decode_(\w+?)_total(?:\{position="(\d+)"\})? (\d+)', re.M)


@pytest.fixture(scope="module")
def run_server(environments: Path, work: Path, prompts: Any) -> Any:
    """Decode with a server of its own; return texts and counters."""
    server = environments / "llama.cpp" / "build" / "bin" / "llama-server"
    if not server.is_file():
        pytest.skip(f"there is no llama.cpp in {environments}: docs/export.md tells how to get it")
    call(
        "export", "--model-dir", PYCODE / "target", "--dtype", "float32", "--to", "gguf",
        "--output-dir", work / "target-gguf",
    )  # fmt: skip

    def run(*words: object) -> tuple[list[list[int]], dict[str, Any]]:
        common = (
            server, "--model", work / "target-gguf" / "model.gguf", "--ctx-size", 512,
            "--parallel", 1, "--cache-ram", 0, "--fit", "off", "--metrics",
        )  # fmt: skip
        running = Server([str(word) for word in (*common, *words)])
        try:
            texts = [running.complete(ids, MAX_TOKENS)["tokens"] for ids in prompts]
            with urllib.request.urlopen(f"{running.address}/metrics") as answer:
                text = answer.read().decode()
        finally:
            running.end()
        found: dict[str, Any] = {"positions": {}}
        for name, position, value in METRIC.findall(text):
            if position:
                found["positions"][int(position)] = int(value)
            else:
                found[name] = int(value)
        print(words, found)
        return texts, found

    return run


@pytest.fixture(scope="module")
def plain(run_server: Any) -> list[list[int]]:
    texts: list[list[int]] = run_server()[0]
    return texts


def draft_with(kind: str, folder: Path) -> list[object]:
    return [
        "--spec-type", kind, "--spec-draft-model", folder / "model.gguf", "--spec-draft-n-max",
        LENGTH, "--spec-draft-n-min", 0, "--spec-draft-p-min", 0,
    ]  # fmt: skip


@pytest.mark.parametrize("way", ["eagle3", "draft"])
def test_drafters(
    way: str, run_server: Any, plain: Any, work: Path, prompts: Any, draft_engine: Path
) -> None:
    """The same text as plain decoding on both sides, and the same counters, number for number."""
    exported = work / f"{way}-gguf"
    options: dict[str, Any]
    if way == "eagle3":
        model, own = PYCODE / "target", ["--eagle-model-dir", work / "eagle3"]
        engine = make_engine(work / "ours-gguf-eagle3", PYCODE / "target", own, [])
        options = {"eagle_choices": chain(LENGTH)}
    else:
        model, own = PYCODE / "draft", []
        engine = make_engine(work / "ours-gguf-draft", PYCODE / "target", [], EXTERNAL)
        options = {"draft": draft_engine, "draft_len": str(LENGTH)}
    call(
        "export", "--model-dir", model, *own, "--dtype", "float32", "--to", "gguf",
        "--output-dir", exported,
    )  # fmt: skip
    kind = "draft-eagle3" if way == "eagle3" else "draft-simple"
    texts, counters = run_server(*draft_with(kind, exported))
    assert texts == plain
    ours = decode(engine, prompts, MAX_TOKENS, **options)
    assert [output.token_ids[:MAX_TOKENS] for output in ours] == plain
    positions = tuple(counters["positions"][place] for place in range(LENGTH))
    found = Counters(
        counters["num_drafts"], counters["num_draft_tokens"], counters["num_accepted_tokens"],
        positions,
    )  # fmt: skip
    assert found == count(ours, MAX_TOKENS, LENGTH, is_cut=True)
