"""benchmarks/edits.py with tiny models, and a target that is held to a text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import edits
from benchmarks.side_by_side import models
from examples.pycode.edits import Held
from specdec.engine.tree import pack_beams
from tests.conftest import make_llama, make_tokenizer
from tests.engines import call


def test_a_text_that_is_held_to() -> None:
    """Its tokens on their own way through a tree; wrong drafts are verified, too."""
    output = [5, 6]
    state = Held([5, 6, 7, 8, 9]).follow(output)
    tree = pack_beams(6, np.array([[7, 1, 2], [7, 8, 3], [4, 4, 4]]))
    assert state.list_kept(tree, is_drawn=False) == [*range(tree.num_nodes)]
    best_tokens = state.shape(tree, torch.zeros(tree.num_nodes + 2, 12)).argmax(-1)
    accepted_nodes = [node for node in range(tree.num_nodes) if best_tokens[node]]
    assert [(int(tree.tokens[node]), int(best_tokens[node])) for node in accepted_nodes] == [
        (6, 7),
        (7, 8),
        (8, 9),
    ]
    output += [7, 8, 9]
    root = pack_beams(9, np.array([[1]]))
    assert not state.shape(root, torch.zeros(2, 12)).any(), "after its end anything goes"


@pytest.mark.thorough
def test_all_ways_write_the_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_llama(tmp_path, seed=3, dtype="bfloat16")
    make_tokenizer(target)
    draft = tmp_path / "draft"
    shutil.copytree(target, draft)
    prompt = "for x in range(10):\n    return\n\n"
    lines = {"copy": "for x in range(10):\n    return", "new": "class Stack:\n    def add(a, b):"}
    (tmp_path / "edits.jsonl").write_text(
        "".join(
            json.dumps({"category": kind, "prompt": prompt, "reference": text}) + "\n"
            for kind, text in lines.items()
        )
    )
    paths = models.Models(tmp_path / "models", target, tmp_path / "none", draft)
    monkeypatch.setattr(edits, "PYCODE", tmp_path)
    monkeypatch.setattr(models, "prepare_models", lambda *_: paths)
    monkeypatch.setattr(models, "call_stage", lambda stage, words: call(stage, *words))
    external = ["--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", "8"]
    for name, folder, flags in (("draft-target", target, external), ("draft", draft, [])):
        models.build_engine(folder, paths.folder / "engines" / name, build=flags)
    words = ["--size", "pycode", "--folder", str(tmp_path), "--output-dir", str(tmp_path / "out"),
             "--prompts", str(tmp_path / "edits.jsonl")]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["edits.py", *words])
    edits.main()
    report = json.loads((tmp_path / "out" / "edits-pycode.json").read_text())
    assert report["lines"] == {"copy": 1, "new": 1, "all": 2}
    assert list(report["ways"])[:2] == ["plain", "suffix of 8"]
    assert len(report["ways"]) == 9
    plain, suffix, chain = (
        report["ways"][name]
        for name in ("plain", "suffix of 15", "suffix of 15, else draft model of 8")
    )
    assert plain["all"]["acceptance_length"] == plain["all"]["ratio"] == 1
    for way in (suffix, chain):
        assert way["copy"]["acceptance_length"] > 3 > way["new"]["acceptance_length"] >= 1
        assert way["all"]["ratio"] > 0 < way["all"]["step_ratio"]
    assert "| suffix of 31, budget auto | " in capsys.readouterr().out
