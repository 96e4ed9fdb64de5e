"""specdec diagnose: every cause is found where it is, and nowhere else."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.verify_cost import count_experts
from specdec.command.stages import STAGES
from specdec.decode.engine import TorchEngine
from specdec.decode.requests import sum_stats
from specdec.errors import SpecDecError
from specdec.measure import causes
from specdec.measure.causes import (
    BatchFacts,
    Cause,
    find_missing_kernels,
    find_overflow,
    find_unused_template,
    rank_causes,
)
from specdec.measure.diagnose import diagnose, find_max_magnitude, list_remedies_in_use, observe_run
from specdec.measure.engine import open_bench
from specdec.measure.prompts import read_prompt_set
from specdec.measure.report import format_diagnosis
from specdec.measure.settings import DiagnoseSettings
from tests.conftest import make_drafter, make_tokenizer
from tests.engines import make_engine, run_cli_here
from tests.families import make_family_model

SHARES = (0.8, 0.64, 0.512)


def make_facts(**changes: Any) -> BatchFacts:
    """A drafter that is right 4 of 5 times, and costs next to nothing to run and to verify."""
    healthy = BatchFacts(
        batch_size=1,
        speculation={"draft": 0.02, "verify": 1.02, "accept": 0.01, "other": 0.01, "total": 1.06},
        plain={"draft": 0.0, "verify": 1.0, "accept": 0.01, "other": 0.01, "total": 1.02},
        step_ms={1: 1.0, 2: 1.0, 4: 1.02},
        tokens_per_step=4.0,
        acceptance_length=2.952,
        by_position=SHARES,
        contexts=[(100, 2)] * 100,
        ratio=2.8,
        step_ratio=2.84,
        smallest_batch=(1, 2.8),
        prefill_share=0.05,
    )
    return dataclasses.replace(healthy, **changes)


def name_causes(facts: BatchFacts) -> list[str]:
    return [cause.name for cause in rank_causes(facts, [])]


def test_nothing_is_wrong_with_a_healthy_engine() -> None:
    assert rank_causes(make_facts(), []) == []


def with_step(**phases: float) -> dict[str, float]:
    times = {"draft": 0.02, "verify": 1.02, "accept": 0.01, "other": 0.01, **phases}
    return times | {"total": sum(times.values())}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"acceptance_length": 1.5, "by_position": (0.3, 0.15, 0.05)},
            "few drafted tokens are accepted",
        ),
        (
            {"speculation": with_step(verify=1.9), "by_position": (0.8, 0.1, 0.0),
             "acceptance_length": 2.952},
            "the draft is too long",
        ),
        ({"speculation": with_step(draft=0.5)}, "the drafter takes long"),
        ({"speculation": with_step(verify=1.8)}, "verification is expensive on this machine"),
        ({"speculation": with_step(other=0.3)}, "acceptance and bookkeeping take long"),
        ({"batch_size": 8, "ratio": 1.1}, "the batch is large"),
        ({"ratio": 2.0, "smallest_batch": (1, 2.0)}, "the prompts take much of the time"),
        (
            {"contexts": [(100, 3)] * 50 + [(1000, 1)] * 50},
            "acceptance falls in long contexts",
        ),
    ],
)  # fmt: skip
def test_each_cause(changes: dict[str, Any], expected: str) -> None:
    assert expected in name_causes(make_facts(**changes))


def test_gains_are_what_removal_brings() -> None:
    """A drafter that takes half of the step: without it the step is twice as fast."""
    facts = make_facts(speculation=with_step(draft=1.04))
    (cause,) = [c for c in rank_causes(facts, []) if c.name == "the drafter takes long"]
    assert cause.gain == pytest.approx(2.0)
    assert "1.040 of 2.080 ms, 50% of a step" in cause.evidence
    long = make_facts(speculation=with_step(verify=2.0), by_position=(0.8, 0.0, 0.0))
    (cause,) = [c for c in rank_causes(long, []) if c.name == "the draft is too long"]
    # 1.8 tokens either way; the step costs 1.02 and a third of what it has beyond, or all of it.
    assert cause.gain == pytest.approx(2.04 / (1.02 + (2.04 - 1.02) / 3), rel=1e-3)
    assert "draft 1 tokens" in cause.remedy


@pytest.mark.parametrize(
    ("changes", "remedies"),
    [
        ({"speculation": with_step(draft=0.5)}, {"rounded_drafter": "--drafter-weights int8"}),
        (
            {"speculation": with_step(verify=2.0)},
            {"bfloat16": "--dtype bfloat16", "kernels": "--optimize native"},
        ),
        ({"ratio": 1.0, "batch_size": 8}, {"budget": "--draft-budget auto"}),
    ],
)
def test_what_is_so_already_is_not_advised(
    changes: dict[str, Any], remedies: dict[str, str]
) -> None:
    facts = make_facts(**changes)
    advice = "; ".join(cause.remedy for cause in rank_causes(facts, []))
    assert all(text in advice for text in remedies.values())
    facts_in_use = dataclasses.replace(facts, in_use=frozenset(remedies))
    advice = "; ".join(cause.remedy for cause in rank_causes(facts_in_use, []))
    assert advice
    assert not any(text in advice for text in remedies.values())


def test_remedies_name_commands_that_there_are() -> None:
    """In all texts of the stage, of which remedies are some."""
    named = set()
    for path in Path(causes.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named |= set(re.findall(r"\bspecdec[ -]([a-z]+)", node.value))
    assert {"bench", "train"} & named
    assert named <= {*STAGES, "docs", "help"}


def test_what_an_engine_has_is_known() -> None:
    def list_for(**changes: Any) -> frozenset[str]:
        values = {"weights": None, "drafter": object(), "device": "cpu", "kernels": None}
        values |= {"dtype": "float32", "is_fixed": True} | changes
        model = SimpleNamespace(dtype=values["dtype"])
        checkpoint = SimpleNamespace(model=model, drafter=values["drafter"])
        config = SimpleNamespace(checkpoint=checkpoint, drafter_weights=values["weights"])
        engine: Any = SimpleNamespace(
            config=config, device=SimpleNamespace(type=values["device"]),
            decoder=SimpleNamespace(kernels=values["kernels"]),
            drafter=SimpleNamespace(is_fixed=values["is_fixed"]),
        )  # fmt: skip
        return list_remedies_in_use(engine)

    assert list_for() == frozenset()
    assert list_for(weights="int8") == list_for(drafter=None) == {"rounded_drafter"}
    assert list_for(dtype="bfloat16", kernels=object()) == {"bfloat16", "kernels"}
    assert list_for(is_fixed=False) == {"budget"}
    assert list_for(device="cuda") == {"rounded_drafter", "bfloat16", "kernels"}


def test_short_and_few_contexts_say_nothing() -> None:
    few = make_facts(contexts=[(100, 3)] * 50 + [(1000, 1)] * 20)
    assert "acceptance falls in long contexts" not in name_causes(few)
    rising = make_facts(contexts=[(100, 1)] * 50 + [(1000, 3)] * 50)
    assert "acceptance falls in long contexts" not in name_causes(rising)


def test_order() -> None:
    """What is certainly wrong, then by gain, then what is only suspected."""
    certain, perhaps = Cause("x", "", "", is_certain=True), Cause("y", "", "")
    facts = make_facts(speculation=with_step(draft=0.5, verify=2.5))
    names = [cause.name for cause in rank_causes(facts, [perhaps, certain])]
    assert (names[0], names[-1]) == ("x", "y")
    gains = [c.gain for c in rank_causes(facts, []) if c.gain is not None]
    assert len(gains) >= 2
    assert gains == sorted(gains, reverse=True)


def test_suspects() -> None:
    assert find_overflow("float16", 60000.0) is not None
    assert find_overflow("float16", math.inf) is not None
    assert find_overflow("float16", 500.0) is None
    assert find_overflow("bfloat16", 1e9) is None
    assert find_unused_template(True, 0) is not None
    assert find_unused_template(True, 2) is None
    assert find_unused_template(False, 0) is None
    assert find_missing_kernels("cpu", False) is not None
    assert find_missing_kernels("cpu", True) is None
    assert find_missing_kernels("cuda", False) is None


def test_what_is_no_number_counts_as_infinite() -> None:
    assert find_max_magnitude(3.0, torch.tensor([1.0, -9.0])) == 9.0
    assert find_max_magnitude(3.0, torch.tensor([math.nan, 1.0])) == math.inf
    assert find_max_magnitude(3.0, torch.tensor([-math.inf])) == math.inf


def run_diagnose(engine: Path, folder: Path, tokenizer: Path, **flags: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"max_output_len": 12, "repeat": 1, "batch_sizes": "3,1", **flags}
    return diagnose(
        DiagnoseSettings(
            engine_dir=engine, tokenizer_dir=str(tokenizer), device="cpu",
            prompts=folder / "prompts.jsonl", **values,
        )
    )  # fmt: skip


@pytest.mark.thorough
def test_an_engine_that_is_not_faster(engine: Path, folder: Path, tmp_path: Path) -> None:
    """A drafter that knows nothing, and no kernels; a tokenizer that is another's is refused."""
    make_tokenizer(tmp_path / "other", vocab=120)
    with pytest.raises(SpecDecError, match="is not the one that .* was made with"):
        run_diagnose(engine, folder, tmp_path / "other")
    report = run_diagnose(engine, folder, folder / "target", draft_chain="redrafter")
    assert [batch["batch_size"] for batch in report["batches"]] == [1, 3]
    for batch in report["batches"]:
        names = [cause["name"] for cause in batch["causes"]]
        assert "few drafted tokens are accepted" in names
        assert names[-1] == "the engine has no compiled kernels"
        assert batch["acceptance_length"] < 1.5
        assert batch["step_ms_by_tokens"].keys() == {1, 2, 4, 7}
    assert report["experts"] is None
    text = format_diagnosis(report)
    assert "times as fast without" in text
    assert json.dumps(report)


def test_steps_are_seen_as_they_were_counted(engine: Path, folder: Path) -> None:
    settings = DiagnoseSettings(
        engine_dir=engine, tokenizer_dir=str(folder / "target"), max_output_len=16, device="cpu"
    ).to_decode()
    bench = open_bench(settings)
    bench.take_prompts(read_prompt_set(folder / "prompts.jsonl"), settings)
    observations = observe_run(bench, 2)
    run = bench.run(bench.engine.drafter, 2)
    results = [r for group in run.results.values() for r in group]
    assert len(observations.contexts) == sum_stats(results)["num_verify_steps"]
    accepted = [number for _, number in observations.contexts]
    histogram = [sum(c) for c in zip(*(r.stats.accepted_histogram for r in results), strict=True)]
    assert [accepted.count(n) for n in range(2)] == histogram[:2]
    shortest = min(len(request.input_ids) for request in bench.requests)
    assert min(length for length, _ in observations.contexts) == shortest + 1
    assert "observe" not in vars(bench.engine.drafter), "nothing is left behind"


def test_experts_of_a_mixture(tmp_path: Path) -> None:
    """A token alone reads top_k of them; what the verify steps read lies between that and all."""
    target = make_family_model(tmp_path, "mixtral", vocab=128)
    make_tokenizer(target)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"input_ids": [5, 9, 5, 9, 5, 9, 5]}) + "\n")
    engine = make_engine(tmp_path, target, make_drafter(tmp_path), beams=1, length=3)
    settings: dict[str, Any] = {"batch_sizes": "1", "max_output_len": 6, "draft_budget": "fixed"}
    report = run_diagnose(engine, tmp_path, target, **settings)
    experts = report["experts"]
    assert (experts["per_layer"], experts["per_token"], experts["batch_size"]) == (4, 2, 1)
    tokens, touched = experts["tokens_per_step"], experts["per_step"]
    assert 1 < tokens <= 4
    assert 2 < touched <= min(4, 2 * tokens)
    text = format_diagnosis(report)
    assert f"reads 2 of a layer's 4 experts, a verify step of {tokens:.1f}" in text
    decoder = TorchEngine(engine, device="cpu").decoder
    counts = count_experts(decoder, [1, 4], past_len=3)
    assert counts[1] == 2 < counts[4] <= 4


def test_the_command(engine: Path, folder: Path) -> None:
    process = run_cli_here(
        "diagnose", "--engine-dir", engine, "--tokenizer-dir", folder / "target",
        "--max-output-len", 6, "--repeat", 1,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert "tokens a step, break-even at" in process.stdout
