"""benchmarks/field.py with tiny models: every method and llama.cpp over the field's prompts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import field
from tests.bench.test_published_prompts import TASKS, write_human_eval, write_spec_bench
from tests.conftest import make_drafter, make_llama, make_tokenizer

ACCEPTED = {"plain": 0, "prompt lookup": 4}


class NoServers:
    """llama.cpp that writes nine tokens, with prompt lookup in four verify steps of two."""

    draft = ""

    def __init__(self, *_: Any) -> None:
        self.has_ended = False

    def get(self, way: str, setting: dict[str, Any]) -> Any:
        class Server:
            def complete(self, prompt: list[int], max_output_len: int) -> dict[str, Any]:
                timings = {"predicted_n": 9, "draft_n_accepted": ACCEPTED[way]}
                return {"tokens": [len(prompt), *range(8)], "timings": timings}

        assert setting == ({} if way == "plain" else {"length": 2})
        return Server()

    def end(self) -> None:
        self.has_ended = True


@pytest.fixture(autouse=True)
def _environment(lasting_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of these tests' own, no compiler, for kernels are not what is tested."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(lasting_dir / "field-cache"))
    monkeypatch.setenv("CXX", "none")
    monkeypatch.setattr(field, "Servers", NoServers)


@pytest.fixture(scope="module")
def words(lasting_dir: Path) -> list[str]:
    """A target, and drafters of two methods; the small model's is the target itself."""
    folder = lasting_dir / "field"
    target = make_tokenizer(make_llama(folder, seed=3))
    make_drafter(folder / "drafters", seed=5)
    shutil.copytree(target, folder / "drafters" / "draft")
    write_spec_bench(folder)
    human_eval = write_human_eval(folder / "HumanEval.jsonl.gz")
    return [
        "--model-dir", str(target), "--drafters", str(folder / "drafters"), "--num-tokens", "2",
        "--spec-bench", str(folder), "--human-eval", str(human_eval), "--max-output-len", "5",
        "--prompts-per-category", "1", "--threads", "1", "--llama-server", "llama-server",
        "--output", str(folder / "field.json"),
    ]  # fmt: skip


@pytest.mark.thorough
def test_every_method_and_task(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    field.main(words)
    report = json.loads(Path(words[-1]).read_text())
    greedy = {row["way"]: row for row in report["rows"]["0"]}
    our_rows = ["plain", "prompt lookup, 2", "suffix, 2", "lookahead [4,4,4]"]
    peer_rows = ["llama.cpp, plain", "llama.cpp, prompt lookup"]
    assert list(greedy) == [*our_rows, *peer_rows, "draft", "drafter"]
    sampled = [row["way"] for row in report["rows"]["1"]]
    assert sampled == [*our_rows, "draft", "drafter"]
    assert list(greedy["draft"]) == ["way", "all", "mt_bench", *TASKS, "humaneval"]
    assert {row["all"]["texts"] for row in greedy.values()} == {8}, "mt_bench has two turns"
    assert {row["all"]["like_plain"] for row in greedy.values()} == {8}
    assert greedy["plain"]["all"]["tokens_per_step"] == 1
    assert greedy["plain"]["qa"]["times_plain"] == 1
    # The target drafts for itself: all of five tokens, the first of which the prompt yields.
    assert greedy["draft"]["rag"]["tokens_per_step"] == 2
    assert greedy["llama.cpp, prompt lookup"]["qa"]["tokens_per_step"] == 2
    table = capsys.readouterr().out
    assert "| tokens per step, temperature 0 | all | mt_bench |" in table
    assert "| draft | 2.00 |" in table


def test_other_texts_fail(
    words: list[str], lasting_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = field.list_ways

    def spoil(*args: Any) -> dict[str, field.Way]:
        ways = real(*args)
        return ways | {"suffix, 2": lambda request: ([1, 2, 3], {"steps": 2})}

    monkeypatch.setattr(field, "list_ways", spoil)
    few = [*words, "--temperatures", "0", "--drafters", str(lasting_dir / "none")]
    with pytest.raises(SystemExit, match="texts differ from plain decoding's: suffix, 2$"):
        field.main(few)
