"""specdec tune: replays are exact, predictions stand beside measurements, recipes resolve."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdec.bench.combine import add_budget, add_suffix
from specdec.bench.engine import Bench, open_bench
from specdec.bench.forecast import Forecaster, spread_seconds
from specdec.bench.measure import list_results
from specdec.bench.methods import (
    draft_target,
    load_tuning,
    prompt_lookup,
    redrafter,
)
from specdec.bench.methods import eagle as eagle_tuning
from specdec.bench.methods import medusa as medusa_tuning
from specdec.bench.prompts import read_prompt_set
from specdec.bench.recipe import describe_best, to_flags, write_recipe
from specdec.bench.rehearsal import count_static, measure_ranks
from specdec.bench.replay import Replay, follow_text
from specdec.bench.settings import TuneSettings
from specdec.bench.steps import interpolate, level_costs, list_sizes, take_turns, time_steps
from specdec.bench.tune import record, tune
from specdec.bench.tune_cli import MAX_ROWS, format_report
from specdec.build.settings import BuildSettings
from specdec.command.settings import resolve_settings
from specdec.convert.settings import ConvertSettings
from specdec.decode.drafters.budget import BudgetProposer
from specdec.decode.drafters.draft_tree import DraftTreeProposer
from specdec.decode.drafters.levels import ALL_LEVELS
from specdec.decode.drafters.redrafter import DynamicProposer
from specdec.decode.drafters.trees import grow_choices
from specdec.decode.requests import sum_stats
from specdec.engine.tree import pack_beams
from specdec.errors import SpecDecError, UsageError
from specdec.methods import METHODS
from specdec.methods.draft_target import METHOD
from specdec.run.settings import RunSettings
from tests.bench.conftest import PLAIN_CHECKPOINT
from tests.engines import call, run_cli_here, run_here

# What a plain target can draft by.
FREE = [load_tuning(method) for method in METHODS.values() if method.source == "target"]


def list_free(bench: Any) -> list[Any]:
    given = TuneSettings()
    return [c for tuning in FREE for c in tuning.list_candidates(bench, [], given)]


def load(engine: Path, folder: Path, limit: int = 24, **flags: Any) -> Bench:
    settings = RunSettings(
        engine_dir=engine, tokenizer_dir=str(folder / "target"), device="cpu",
        max_output_len=limit, **flags, **{"draft_budget": "fixed"},
    )  # fmt: skip
    bench = open_bench(settings)
    bench.take_prompts(read_prompt_set(folder / "prompts.jsonl"), settings)
    return bench


def check_replays(bench: Bench, candidates: list[Any], recordings: list[Any]) -> list[float]:
    """Every forecast tells the acceptance and the steps of a real run; return the acceptances."""
    found = []
    for candidate in candidates:
        for batch_size in (1, 2):
            done = bench.run(candidate.proposer, batch_size)
            results, num_steps = list_results(done), done.timing.num_steps
            told = Forecaster(bench, recordings, batch_size).find(candidate)
            totals = sum_stats(results)
            assert round(told.acceptance_length, 4) == totals["acceptance_length"]
            assert len(told.sizes) == len(told.draft_seconds) == num_steps
            drafted = sum(result.stats.num_draft_tokens for result in results)
            if batch_size == 1:
                assert sum(told.sizes) == pytest.approx(num_steps + drafted)
            assert min(told.draft_seconds) > 0
        found.append(told.acceptance_length)
    return found


def test_replay_of_redrafter(engine: Path, folder: Path) -> None:
    bench = load(engine, folder)
    candidates = redrafter.list_searches(bench, [1, 3], 4)
    assert [c.name for c in candidates][:5] == ["1 x 1", "1 x 2", "1 x 3", "1 x 4", "3 x 1"]
    trees = [c for c in candidates if c.run]
    assert [c.name for c in trees] == ["3 x 3, best 7", "3 x 4, best 7"]
    assert trees[0].run == {"redrafter_tree_tokens": 7}
    lengths = check_replays(bench, [*candidates[::3], trees[1]], record(bench, 2))
    assert max(lengths) > 1.0, "something is accepted"
    paced = add_budget(candidates[-2]).proposer
    assert isinstance(paced, BudgetProposer)
    assert isinstance(paced.proposer, DynamicProposer), "as --draft-budget auto drafts"
    assert bench.engine.proposer.head.params.num_beams == 2, "the engine's own is as it was"


def test_replay_of_a_draft_model(pair: tuple[Path, Path], folder: Path) -> None:
    """A target that drafts for itself is always right, up to each request's last token."""
    bench = load(pair[0], folder, draft_engine_dir=pair[1], draft_len="4")
    candidates = draft_target.list_lengths(bench, 4)
    assert candidates[2].run == {"draft_len": "3"}
    trees = draft_target.list_trees(bench, [1, 4])
    assert trees[1].run == {"draft_tree_tokens": 4}
    lengths = check_replays(bench, [*candidates, *trees], record(bench, 3))
    assert lengths[:4] == sorted(lengths[:4])
    assert lengths[0] == pytest.approx(2.0, abs=0.1)
    assert lengths[3] > 4
    assert lengths[4] == lengths[0], "a tree of one token is a chain of one"
    assert 1.5 < lengths[5] <= lengths[3]
    behind = add_suffix(candidates[2], METHOD)
    for chain in (candidates[2], behind):  # as --draft-budget auto drafts, alone and in a chain
        paced = add_budget(chain).proposer
        assert isinstance(paced, BudgetProposer)
        drafter: Any = paced.proposer
        drafter = drafter if chain is not behind else drafter._groups[1][0]
        assert isinstance(drafter, DraftTreeProposer)
        assert (drafter.tree.num_tokens, drafter.tree.depth) == (3, 3)


def test_replay_of_medusa(medusa: Path, folder: Path) -> None:
    bench = load(medusa, folder)
    recordings = record(bench, 2)
    candidates = medusa_tuning.list_candidates(bench, recordings, TuneSettings())
    assert candidates[0].run == {"medusa_choices": "[[0]]"}
    assert candidates[1].run == {"medusa_tree_tokens": 1}
    for static, dynamic in zip(candidates[::2], candidates[1::2], strict=True):
        size = dynamic.run["medusa_tree_tokens"]
        assert len(json.loads(static.run["medusa_choices"])) == size <= 20
    check_replays(bench, candidates[::3], recordings)


@pytest.mark.parametrize("version", ["eagle1", "eagle3"])
def test_forecasts_of_eagle(version: str, request: pytest.FixtureRequest) -> None:
    """A pass or two over the texts tell what every tree accepts, static and dynamic."""
    eagle = request.getfixturevalue(version)
    bench = load(eagle / "engine", eagle, 16)
    recordings = record(bench, 2)
    candidates = eagle_tuning.list_candidates(bench, recordings, TuneSettings())
    names = [c.name for c in candidates]
    assert len(set(names)) == len(names)
    static = [c for c in candidates if "eagle_choices" in c.run]
    assert {c.rehearsed.max_draft_depth for c in static} == {1, 2, 3}
    assert max(c.proposer.max_draft_tokens for c in static) <= 31
    dynamic = [c for c in candidates if "eagle_tree_tokens" in c.run]
    assert "dynamic 15, 3 deep, top 2" not in names, "only 10 are drafted"
    assert {c.run["eagle_dynamic_tree_max_top_k"] for c in dynamic} == {2, 4}
    assert {c.convert["num_eagle_layers"] for c in dynamic} == {2, 3}
    lengths = check_replays(bench, [*static[::9], *dynamic[::7]], recordings)
    assert 1 < min(lengths) < 1.9 < max(lengths)
    assert bench.engine.proposer.params.num_eagle_layers == 3, "the engine's own is as it was"


def test_trees_stay_within_what_may_go_on() -> None:
    """Equally probable paths: of each length the first two that were gone on from, and no more."""
    choices = grow_choices(3, 45, 10, lambda depth, rank: 0.9, max_inner=2)
    assert len(set(choices)) == 45
    for length in (1, 2):
        assert len({path[:length] for path in choices if len(path) > length}) == 2
    assert {path[:-1] for path in choices} <= {(), *choices}
    assert len(grow_choices(3, 99, 10, max_inner=2)) == 10 + 2 * 10 + 2 * 10, "all there are"


def test_accuracy_of_ranks() -> None:
    """Below a right path: what follows a token that was not drafted is not counted."""
    ranks = {0: np.array([[9, 9], [1, 0], [1, -1], [0, 2], [-1, -1], [0, -1]])}
    shares = measure_ranks(ranks, 3)
    # Of five places the text is ranked 1, 1, 0, -, 0; behind the first four of them it goes on.
    assert shares[0].tolist() == [0.4, 0.4, 0.0]
    assert shares[1].tolist() == pytest.approx([1 / 3, 0, 0])
    paths = ((0,), (1,), (1, 0))
    assert count_static(ranks, paths)[0].tolist()[1:] == [2, 1, 1, 0, 1]


def test_few_drafts_tell_the_cost_of_all() -> None:
    """Three requests' first drafts are among the sample, 6 in all beyond the usual one."""
    sample = Replay([1] * 5, [3.0, 1.0, 5.0, 1.5, 1.0], [1, 0, 2, 0, 0])
    assert spread_seconds(sample, [2, 0, 0, 1]) == [5.0, 1.0, 1.0, 3.0]
    assert spread_seconds(Replay([1], [2.0], [1]), [1, 0]) == [2.0, 2.0]


def test_forecasts_of_ngrams(pair: tuple[Path, Path], folder: Path) -> None:
    bench = load(pair[0], folder, prompt_lookup_num_tokens=4)
    candidates = list_free(bench)
    lookups = [c for c in candidates if "prompt_lookup_num_tokens" in c.run]
    windows = [c for c in candidates if "lookahead_config" in c.run]
    assert {c.build["max_draft_len"] for c in lookups} == set(prompt_lookup.NUM_TOKENS)
    given = TuneSettings(checkpoint_dir=folder / PLAIN_CHECKPOINT)
    room = max(tuning.prepare(given, folder).max_draft_len for tuning in FREE)
    assert max(c.build["max_draft_len"] for c in candidates) == room
    assert windows[1].run == {"lookahead_config": "[3,3,3]"}
    trees = [c for c in candidates if "suffix_max_tokens" in c.run]
    check_replays(bench, [*lookups[::9], *trees[::9], *windows[:2]], record(bench, 2))


def test_accuracies_are_those_of_the_text(medusa: Path, folder: Path) -> None:
    """Texts made of what the heads rank second have all of their accuracy there, or below."""
    bench = load(medusa, folder)
    heads = bench.engine.proposer.heads
    (recording, *_) = record(bench, 2)
    ranked = heads.rank_tokens(recording.states, [2, 2, 2])[0].tolist()
    made = dataclasses.replace(recording, output_ids=[0, *(row[1] for row in ranked[:-1])])
    accuracies = medusa_tuning.measure_accuracies(heads, [made])
    assert accuracies.shape == (3, 10)
    assert accuracies[0, 0] < 0.2, "the second is not the first"
    own = dataclasses.replace(recording, output_ids=[0, *(row[0] for row in ranked[:-1])])
    assert medusa_tuning.measure_accuracies(heads, [own])[0, 0] == 1.0


def test_following_a_text() -> None:
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
    assert level_costs({1: 9.0, 2: 4.0, 4: 5.0, 8: 4.5}) == {1: 4.0, 2: 4.0, 4: 4.5, 8: 4.5}
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

    def count_work(self: Any, category: str | None = None) -> list[float]:
        """Tokens for each token evaluated: what a busy machine does not change."""
        return [
            done.count_tokens(category)
            / (done.timing.num_steps + sum(r.stats.num_draft_tokens for r in list_results(done)))
            for done in self.timed
        ]

    monkeypatch.setattr("specdec.bench.measure.Rounds.list_rates", count_work)
    report = run_tune(folder, checkpoint, output_file=recipe)
    (batch,) = report["batches"]
    combined = [
        row for row in batch["settings"] if not row["name"][0].isdigit() or "," in row["name"]
    ]
    fixed = [row for row in batch["settings"] if row not in combined]
    assert {row["name"] for row in fixed} == {"1 x 1", "1 x 2", "2 x 1", "2 x 2"}
    best = fixed[0]["name"]
    made = {row["name"] for row in combined}
    assert {f"{best}, budget auto", f"suffix of 15, else {best}"} <= made
    assert len(made) == len({best, "2 x 2"}) + 1
    assert [row["measured"] is not None for row in fixed] == [True, True, False, False]
    assert all(row["measured"] is not None for row in combined)
    rates = [row["predicted_tokens_per_second"] for row in batch["settings"]]
    assert rates == sorted(rates, reverse=True)
    for row in fixed[:2]:
        assert row["measured"]["acceptance_length"] == row["acceptance_length"]
    assert set(batch["step_ms_by_tokens"]) == {1, 2, 4, 5}
    assert batch["best"] == "plain"
    assert report["recipe"]["run"]["no_speculation"] is True
    settings = resolve_settings(RunSettings, "run", {}, recipe)
    assert settings.no_speculation
    with pytest.raises(SpecDecError, match="exists"):
        run_tune(folder, checkpoint, output_file=recipe)

    from specdec.bench.tune import Candidate

    better = Candidate(
        "1 x 2", None,
        convert={"redrafter_num_beams": 1, "redrafter_draft_len_per_beam": 2},
    )  # fmt: skip
    given = TuneSettings(checkpoint_dir=checkpoint, tokenizer_dir="t")
    report |= describe_best(better, given, 1)
    recipe_before = recipe.read_bytes()
    with pytest.raises(SpecDecError, match="it has been made since"):
        write_recipe(recipe, report, force=False)
    assert recipe.read_bytes() == recipe_before
    assert list(tmp_path.iterdir()) == [recipe]
    write_recipe(recipe, report, force=True)
    converted = resolve_settings(ConvertSettings, "convert", {}, recipe)
    assert (converted.redrafter_num_beams, converted.redrafter_draft_len_per_beam) == (1, 2)
    assert converted.model_dir == str(folder / "target")
    assert converted.output_dir == Path(f"{checkpoint}-tuned")
    built = resolve_settings(BuildSettings, "build", {}, recipe)
    assert built.checkpoint_dir == converted.output_dir
    assert resolve_settings(RunSettings, "run", {}, recipe).engine_dir == built.output_dir
    assert [line.split()[1] for line in report["commands"]] == ["convert", "build", "run"]


def follow_recipe(candidate: Any, checkpoint: Path, tokenizer: Path, method: str) -> dict[str, Any]:
    """Do what the recipe of a setting says, on the smallest prompt; return its statistics."""
    given = TuneSettings(checkpoint_dir=checkpoint, tokenizer_dir=str(tokenizer))
    about = {
        "date": "",
        "method": method,
        "processor": "",
        "batches": [{"best": "", "batch_size": 1}],
    }
    report = about | describe_best(candidate, given, 1)
    path = checkpoint.parent / "recipe.yaml"
    write_recipe(path, report, force=True)
    prompt = checkpoint.parent / "one.jsonl"
    prompt.write_text('{"input_ids": [4, 5, 4]}')
    stages = list(report["recipe"])
    for stage in stages[:-1]:
        call(stage, "--config", path, "--force", *["--optimize", "none"][: 2 * (stage == "build")])
    out = run_here(["--config", str(path), "--input-file", str(prompt), "--max-output-len", "6"])
    shutil.rmtree(report["recipe"]["build"]["output_dir"])
    stats: dict[str, Any] = out["stats"]
    return stats | {"stages": stages, "most": len(out["outputs"][0]["stats"]["accepted_histogram"])}


def test_a_budget_leaves_the_setting_that_it_is_for_alone(eagle1: Path) -> None:
    """Both are measured by turns: what the budget cuts is its own drafts."""
    bench = load(eagle1 / "engine", eagle1, 6)
    *_, dynamic = eagle_tuning.list_candidates(bench, record(bench, 2), TuneSettings())
    bench.run(add_budget(dynamic).proposer, 2)
    assert dynamic.proposer.least_promise == ALL_LEVELS


def test_a_table_of_eagle_trees_and_their_recipes(eagle1: Path) -> None:
    """The settings with predictions, the best measured; what is chosen is what then runs."""
    report = run_tune(eagle1, eagle1 / "checkpoint", num_measured=1, max_output_len=6)
    assert report["method"] == "eagle"
    rows = first, *others = report["batches"][0]["settings"]
    # Budgets and chains choose by measured times: what they accept differs from run to run.
    replayed = [r for r in rows if r["measured"] and "budget" not in r["name"]]
    replayed = [r for r in replayed if "suffix" not in r["name"]]
    assert replayed
    assert all(r["measured"]["acceptance_length"] == r["acceptance_length"] for r in replayed)
    assert min(row["draft_ms"] for row in rows) > 0
    text = format_report(report)
    assert f"{len(others) + 1 - MAX_ROWS} more should be slower" in text
    assert others[-1]["name"] not in text
    bench = load(eagle1 / "engine", eagle1, 6)
    candidates = eagle_tuning.list_candidates(bench, record(bench, 2), TuneSettings())
    static, *_, dynamic = [c for c in candidates if "3 deep" in c.name]
    for candidate, stages, most in (
        (static, ["build", "run"], 4),
        (dynamic, ["build", "run"], 4),
        (
            dataclasses.replace(dynamic, convert={"num_eagle_layers": 2}),
            ["convert", "build", "run"],
            3,
        ),
    ):
        stats = follow_recipe(candidate, eagle1 / "checkpoint", eagle1 / "target", "eagle")
        assert (stats["stages"], stats["most"]) == (stages, most)


def test_a_table_without_a_drafter(folder: Path, plain: Path) -> None:
    """Methods that need no drafter, of a plain checkpoint; each runs as its recipe says."""
    report = run_tune(folder, folder / PLAIN_CHECKPOINT, num_measured=1, max_output_len=4)
    names = [row["name"] for row in report["batches"][0]["settings"]]
    assert {"lookup of 3, 2-grams", "suffix of 5, factor 4", "lookahead [2,2,2]"} < set(names)
    fake: Any = SimpleNamespace(engine=SimpleNamespace(decoder=None))
    candidates = list_free(fake)
    for candidate, method in ((candidates[0], "prompt_lookup"), (candidates[-1], "lookahead")):
        stats = follow_recipe(
            candidate, folder / PLAIN_CHECKPOINT, folder / "target", report["method"]
        )
        assert stats["method"] == method


def test_the_command_with_a_draft_model(folder: Path, pair: tuple[Path, Path]) -> None:
    checkpoint = folder / PLAIN_CHECKPOINT
    done = run_cli_here(
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
