"""What was accepted of a drafter: counted by run, handed on by convert and build, begun with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.decode.accept import Candidates
from specdec.decode.drafters.calibration import AcceptanceCounts, Calibration
from specdec.decode.drafters.pace import Pace
from specdec.decode.drafters.paced import PacedDrafter
from specdec.decode.engine import load_engine
from specdec.decode.settings import DecodeSettings
from specdec.engine.tree import pack_beams
from specdec.errors import SpecDecError, UsageError
from specdec.files.acceptance import NAME, Acceptance, read_acceptance
from tests.conftest import make_llama, make_medusa_heads
from tests.costs import make_costs
from tests.engines import call, run_here

CHAIN = Candidates(pack_beams(0, np.array([[1, 2, 3]])), None, np.array([1.0, 0.95, 0.95, 0.35]))


def count(paths: list[list[int]]) -> Acceptance:
    """What was accepted of as many drafts of three tokens."""
    counts = AcceptanceCounts()
    for path in paths:
        counts.record([CHAIN], [path])
    record = counts.make_record(num_prompts=1)
    assert record is not None
    return record


def test_what_is_counted() -> None:
    """Tokens whose parents were accepted, and what drafts bring by their number of nodes."""
    record = count([[0, 1, 2, 3], [0, 1], [0], [0, 1, 2]])
    assert [(sum(r), sum(n)) for r, n in zip(record.right, record.seen, strict=True)][:4] == [
        (3, 4), (2, 3), (1, 2), (0, 0),
    ]  # fmt: skip
    assert record.right[0][9] == 3
    assert record.seen[2][3] == 2
    assert record.gains[:4] == (0.75, 1.25, 1.5, 1.5)
    assert record.num_drafts == 4
    assert AcceptanceCounts().make_record() is None


def test_what_is_known_before_the_first_draft() -> None:
    """A drafter whose word is worth little is not believed, and does not draft for a trial only."""
    record = count([[0]] * 80 + [[0, 1]] * 20)
    chances = Calibration(record).estimate(CHAIN)
    assert chances[1] == pytest.approx(0.2, abs=0.08)
    assert chances[2] < 0.2
    other = Candidates(CHAIN.tree, None, CHAIN.confidence, source=1)
    assert np.allclose(Calibration(record).estimate(other), [1, 0.95, 0.95, 0.35])
    assert Calibration(record, 1).estimate(other)[1] < 0.3
    dear = make_costs(draft=lambda _: 0.5)
    for known, is_trial in ((record, True), (count([[0, 1, 2, 3]] * 50), False)):
        pace = Pace(5, dear, record=known)
        pace.plan([100])
        assert pace.is_trial == is_trial


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a drafter, and what is made of both, as DRAFTER-engine."""
    folder = tmp_path_factory.mktemp("acceptance")
    target = make_llama(folder, layers=2, seed=3)
    target = target.rename(folder / "target")
    make_medusa_heads(folder, scale=3.0).rename(folder / "medusa")
    (folder / "prompts.jsonl").write_text('{"input_ids": [5, 6, 7]}\n', encoding="utf-8")
    build(folder, "medusa")
    plain, engine = folder / "plain-ckpt", folder / "plain-engine"
    call("convert", "--model-dir", target, "--output-dir", plain)
    call("build", "--checkpoint-dir", plain, "--output-dir", engine, "--backend", "torch")
    return folder


def build(folder: Path, drafter: str) -> None:
    call("convert", "--model-dir", folder / "target", "--medusa-model-dir", folder / drafter,
         "--output-dir", folder / f"{drafter}-ckpt")  # fmt: skip
    call("build", "--checkpoint-dir", folder / f"{drafter}-ckpt", "--backend", "torch",
         "--output-dir", folder / f"{drafter}-engine")  # fmt: skip


def run(parent: Path, engine: str, *flags: object) -> dict[str, Any]:
    found: dict[str, Any] = run_here(
        ["--engine-dir", str(parent / engine), "--input-file", str(parent / "prompts.jsonl"),
         "--max-output-len", "24", *map(str, flags)]
    )  # fmt: skip
    return found


def test_a_drafter_brings_its_acceptance_along(parent: Path, tmp_path: Path) -> None:
    """From a run into the drafter's folder, the checkpoint, the engine, and what paces it."""
    file = tmp_path / NAME
    stats = run(parent, "medusa-engine", "--draft-budget", "fixed", "--acceptance-output", file)
    record = read_acceptance(tmp_path)
    assert record is not None
    assert record.num_drafts == stats["stats"]["num_drafted_steps"]
    assert record.about["num_prompts"] == 1
    assert len(record.about["prompts_sha256"]) == 64
    shutil.copytree(parent / "medusa", parent / "known")
    shutil.copy(file, parent / "known" / NAME)
    build(parent, "known")
    for made in ("known-ckpt", "known-engine"):
        assert read_acceptance(parent / made) == record
    call("verify", "--checkpoint-dir", parent / "known-ckpt")
    engines = [
        load_engine(DecodeSettings(engine_dir=parent / name, device="cpu"), None).drafter
        for name in ("medusa-engine", "known-engine")
    ]
    paces = []
    for drafter in engines:
        assert isinstance(drafter, PacedDrafter)
        paces.append(drafter.pace)
    assert paces[1].chain.promise.gains.tolist() != paces[0].chain.promise.gains.tolist()
    assert paces[1].chain.promise.gains[0] == pytest.approx(record.gains[0])


@pytest.mark.parametrize("change", [
    {"format_version": 9}, {"right": []}, {"seen": [[0] * 10] * 12}, {"gains": [2.0, 1.0]},
    {"num_drafts": 0}, {"about": 3}, {"right": [[-1] * 10] * 12}, {"gains": None},
    {"gains": [0.5, "nan"]}, {"gains": [0.5, 1e7]}, {"gains": [-1.0, 0.5]}, {"gains": []},
])  # fmt: skip
def test_a_file_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    count([[0, 1]]).write(tmp_path / NAME)
    document = json.loads((tmp_path / NAME).read_text(encoding="utf-8"))
    (tmp_path / NAME).write_text(json.dumps(document | change), encoding="utf-8")
    with pytest.raises(SpecDecError, match="acceptance.json") as caught:
        read_acceptance(tmp_path)
    assert "--acceptance-output" in caught.value.hint


def test_flags_that_have_no_effect(parent: Path, tmp_path: Path) -> None:
    for flags, message in (
        (["medusa-engine", "--no-speculation"], "no effect with --no-speculation"),
        (["plain-engine"], "nothing drafts in a plain engine"),
    ):
        with pytest.raises(UsageError, match=message):
            call("run", "--engine-dir", parent / flags[0], "--input-file", parent / "prompts.jsonl",
                 *flags[1:], "--acceptance-output", tmp_path / NAME)  # fmt: skip
