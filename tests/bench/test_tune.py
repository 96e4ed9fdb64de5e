"""specdec tune: replays are exact, predictions stand beside measurements, recipes resolve."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from specdec.bench.candidates import measure_accuracies
from specdec.bench.engine import Bench, open_bench
from specdec.bench.prompts import read_prompt_set
from specdec.bench.recipe import to_flags
from specdec.bench.replay import follow_text, replay
from specdec.bench.settings import TuneSettings
from specdec.bench.steps import interpolate, list_sizes, take_turns, time_steps
from specdec.bench.tune import list_draft_target, list_medusa, list_redrafter, record, tune
from specdec.build.settings import BuildSettings
from specdec.convert.settings import ConvertSettings
from specdec.engine.tree import pack_beams
from specdec.errors import SpecDecError, UsageError
from specdec.run.loop import Timing
from specdec.run.requests import sum_stats
from specdec.run.settings import RunSettings
from specdec.settings import resolve_settings
from tests.bench.conftest import PLAIN_CHECKPOINT
from tests.conftest import make_llama, make_medusa_heads, make_tokenizer, run_cli
from tests.engines import call


def load(engine: Path, folder: Path, limit: int = 24, **flags: Any) -> Bench:
    settings = RunSettings(
        engine_dir=engine, tokenizer_dir=str(folder / "target"), device="cpu",
        max_output_len=limit, **flags,
    )  # fmt: skip
    bench = open_bench(settings)
    bench.take_prompts(read_prompt_set(folder / "prompts.jsonl"), settings)
    return bench


@pytest.fixture(scope="module")
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


def check_replays(bench: Bench, candidates: list[Any], recordings: list[Any]) -> list[float]:
    """Every replay tells the acceptance and the steps of a real run; return the acceptances."""
    found = []
    for candidate in candidates:
        for batch_size in (1, 4):
            timing = Timing()
            results = bench.decode(bench.requests, candidate.proposer, batch_size, timing)
            replayed = replay(candidate.proposer, recordings, batch_size, 200)
            totals = sum_stats(results)
            assert round(replayed.acceptance_length, 4) == totals["acceptance_length"]
            assert len(replayed.sizes) == timing.num_steps
        found.append(replayed.acceptance_length)
    return found


def test_replay_of_redrafter(engine: Path, folder: Path) -> None:
    bench = load(engine, folder)
    candidates = list_redrafter(bench, [1, 3], 4)
    assert [c.name for c in candidates][:5] == ["1 x 1", "1 x 2", "1 x 3", "1 x 4", "3 x 1"]
    lengths = check_replays(bench, candidates[::3], record(bench, 2))
    assert max(lengths) > 1.0, "something is accepted"
    assert bench.engine.proposer.head.params.num_beams == 2, "the engine's own is as it was"


def test_replay_of_a_draft_model(pair: tuple[Path, Path], folder: Path) -> None:
    """A target that drafts for itself is always right, up to each request's last token."""
    bench = load(pair[0], folder, draft_engine_dir=pair[1], draft_len="4")
    candidates = list_draft_target(bench, 4)
    assert candidates[2].run == {"draft_len": "3"}
    lengths = check_replays(bench, candidates, record(bench, 3))
    assert lengths == sorted(lengths)
    assert lengths[0] == pytest.approx(2.0, abs=0.1)
    assert lengths[3] > 4


def test_replay_of_medusa(medusa: Path, folder: Path) -> None:
    bench = load(medusa, folder)
    recordings = record(bench, 2)
    candidates = list_medusa(bench, recordings)
    assert candidates[0].run == {"medusa_choices": "[[0]]"}
    assert max(len(json.loads(c.run["medusa_choices"])) for c in candidates) <= 20
    check_replays(bench, candidates[::3], recordings)


def test_accuracies_are_those_of_the_text(medusa: Path, folder: Path) -> None:
    """Texts made of what the heads rank second have all of their accuracy there, or below."""
    bench = load(medusa, folder)
    heads = bench.engine.proposer.heads
    (recording, *_) = record(bench, 2)
    ranked = heads.rank_tokens(recording.states, [2, 2, 2]).tolist()
    made = dataclasses.replace(recording, output_ids=[0, *(row[1] for row in ranked[:-1])])
    accuracies = measure_accuracies(heads, [made])
    assert accuracies.shape == (3, 10)
    assert accuracies[0, 0] < 0.2, "the second is not the first"
    own = dataclasses.replace(recording, output_ids=[0, *(row[0] for row in ranked[:-1])])
    assert measure_accuracies(heads, [own])[0, 0] == 1.0


def test_following_a_text() -> None:
    import numpy as np

    tree = pack_beams(7, np.array([[11, 21, 31], [11, 22, 32], [12, 21, 33]]))
    assert tree.tokens[follow_text(tree, [11, 22, 9])].tolist() == [7, 11, 22]
    assert tree.tokens[follow_text(tree, [12, 21, 33, 40])].tolist() == [7, 12, 21, 33]
    assert follow_text(tree, [13]) == [0]
    assert follow_text(tree, []) == [0]


def test_costs_of_steps(engine: Path, folder: Path) -> None:
    bench = load(engine, folder)
    costs = time_steps(bench.engine.decoder, [1, 5], past_len=20, repeat=2, batch_size=3)
    assert list(costs) == [1, 5]
    assert min(costs.values()) > 0
    assert interpolate({1: 1.0, 5: 3.0}, 4) == 2.5
    assert [list_sizes(n) for n in (1, 2, 8, 21)] == [
        [1], [1, 2], [1, 2, 4, 8], [1, 2, 4, 8, 16, 21],
    ]  # fmt: skip
    order: list[int] = []
    assert list(take_turns({n: lambda n=n: order.append(n) for n in (1, 2)}, 3)) == [1, 2]
    assert order == [1, 2] * 5, "two rounds warm up, and all take turns"


def run_tune(folder: Path, checkpoint: Path, **flags: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "checkpoint_dir": checkpoint, "tokenizer_dir": str(folder / "target"), "device": "cpu",
        "prompts": folder / "prompts.jsonl", "max_output_len": 8, "repeat": 1, "beams": "1,2",
        "max_length": 2, "num_measured": 2, **flags,
    }  # fmt: skip
    return tune(TuneSettings(**values))


def test_a_table_and_its_recipe(
    engine: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a drafter that knows nothing plain decoding wins; a better one changes the recipe."""
    checkpoint = folder / "ckpt-b2l3noneautod"
    recipe = tmp_path / "recipe.yaml"
    report = run_tune(folder, checkpoint, output_file=recipe)
    (batch,) = report["batches"]
    names = {row["name"] for row in batch["settings"]}
    assert names == {"1 x 1", "1 x 2", "2 x 1", "2 x 2"}
    assert [row["measured"] is not None for row in batch["settings"]] == [True, True, False, False]
    rates = [row["predicted_tokens_per_second"] for row in batch["settings"]]
    assert rates == sorted(rates, reverse=True)
    for row in batch["settings"][:2]:
        assert row["measured"]["acceptance_length"] == row["acceptance_length"]
    assert set(batch["step_ms_by_tokens"]) == {1, 2, 4, 5}
    assert batch["best"] == "plain"
    assert report["recipe"]["run"]["no_speculation"] is True
    settings = resolve_settings(RunSettings, "run", {}, recipe)
    assert settings.no_speculation
    with pytest.raises(SpecDecError, match="exists"):
        run_tune(folder, checkpoint, output_file=recipe)

    from specdec.bench.recipe import describe_best, write_recipe
    from specdec.bench.tune import Candidate

    better = Candidate(
        "1 x 2", None,
        convert={"redrafter_num_beams": 1, "redrafter_draft_len_per_beam": 2},
    )  # fmt: skip
    given = TuneSettings(checkpoint_dir=checkpoint, tokenizer_dir="t")
    report |= describe_best(better, given, "redrafter", 1)
    write_recipe(recipe, report)
    converted = resolve_settings(ConvertSettings, "convert", {}, recipe)
    assert (converted.redrafter_num_beams, converted.redrafter_draft_len_per_beam) == (1, 2)
    assert converted.model_dir == str(folder / "target")
    assert converted.output_dir == Path(f"{checkpoint}-tuned")
    built = resolve_settings(BuildSettings, "build", {}, recipe)
    assert built.checkpoint_dir == converted.output_dir
    assert resolve_settings(RunSettings, "run", {}, recipe).engine_dir == built.output_dir
    assert [line.split()[1] for line in report["commands"]] == ["convert", "build", "run"]


def test_the_command_with_a_draft_model(folder: Path, pair: tuple[Path, Path]) -> None:
    checkpoint = folder / PLAIN_CHECKPOINT
    done = run_cli(
        "tune", "--checkpoint-dir", checkpoint, "--draft-checkpoint-dir", checkpoint,
        "--tokenizer-dir", folder / "target", "--max-output-len", 6, "--max-length", 2,
        "--repeat", 1, "--num-measured", 1, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["method"] == "draft_target"
    lengths = {r["name"]: r["acceptance_length"] for r in report["batches"][0]["settings"]}
    assert lengths["2 tokens"] > lengths["1 tokens"] > 1.5


def test_flags() -> None:
    assert to_flags({"a_b": 3, "force": True, "c": "x y"}) == "--a-b 3 --force --c 'x y'"


def test_what_cannot_be_tuned(engine: Path, folder: Path, tmp_path: Path) -> None:
    checkpoint = folder / "ckpt-b2l3noneautod"
    with pytest.raises(UsageError, match="--draft-checkpoint-dir has no effect"):
        run_tune(folder, checkpoint, draft_checkpoint_dir=checkpoint)
    make_llama(tmp_path)
    make_tokenizer(tmp_path / "target")
    call("convert", "--model-dir", tmp_path / "target", "--output-dir", tmp_path / "plain")
    with pytest.raises(SpecDecError, match="plain checkpoint: there is no drafter to tune"):
        run_tune(folder, tmp_path / "plain")
