"""specdec tune: the slower half falls in each round, recipes resolve."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.bench.combine import add_budget
from specdec.bench.engine import Bench, open_bench
from specdec.bench.measure import list_results
from specdec.bench.methods import base, load_tuning
from specdec.bench.methods import eagle as eagle_tuning
from specdec.bench.methods import medusa as medusa_tuning
from specdec.bench.methods.base import Candidate
from specdec.bench.prompts import read_prompt_set
from specdec.bench.recipe import describe_best, to_flags, write_recipe
from specdec.bench.report import MAX_ROWS, format_tuning
from specdec.bench.settings import TuneSettings
from specdec.bench.steps import list_sizes, take_turns, time_steps
from specdec.bench.tune import describe_doubts, tune
from specdec.build.settings import BuildSettings
from specdec.command.settings import resolve_settings
from specdec.convert.settings import ConvertSettings
from specdec.decode.drafters.base import ALL_LEVELS
from specdec.errors import SpecDecError, UsageError
from specdec.methods import METHODS
from specdec.run.settings import RunSettings
from tests.bench.conftest import PLAIN_CHECKPOINT
from tests.engines import call, run_cli_here, run_here


@pytest.fixture(autouse=True)
def builds_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines be built in this process."""
    monkeypatch.setattr(base, "call_stage", lambda stage, words: call(stage, *words))


# What a plain target can draft by.
FREE = [load_tuning(method) for method in METHODS.values() if method.source == "target"]


def list_free(bench: Any) -> list[Any]:
    given = TuneSettings()
    return [c for tuning in FREE for c in tuning.list_candidates(bench, given)]


def load(engine: Path, folder: Path, limit: int = 24, **flags: Any) -> Bench:
    settings = RunSettings(
        engine_dir=engine, tokenizer_dir=str(folder / "target"), device="cpu",
        max_output_len=limit, **flags, **{"draft_budget": "fixed"},
    )  # fmt: skip
    bench = open_bench(settings)
    bench.take_prompts(read_prompt_set(folder / "prompts.jsonl"), settings)
    return bench


def test_accuracies_are_those_of_the_text(medusa: Path, folder: Path) -> None:
    """Texts made of what a head ranks first are its own; those of its second tokens are not."""
    bench = load(medusa, folder)
    heads = bench.engine.proposer.heads

    def measure(rank: int) -> Any:
        results = list_results(bench.run(bench.plain, 2))
        for result in results:
            states = bench.read_states([*result.request.input_ids, *result.output_ids])
            first = len(result.request.input_ids) - 1
            ranked = heads.rank_tokens(states[first:-1], [2, 2, 2])[0].tolist()
            result.output_ids[1:] = [row[rank] for row in ranked[:-1]]
        done = SimpleNamespace(results={"": results})
        fake: Any = SimpleNamespace(
            plain=None, max_batch_size=2, run=lambda *_: done,
            # What was read of the texts before they were changed.
            read_states=lambda tokens: read(tokens, results),
        )  # fmt: skip
        originals = {
            tuple(result.request.input_ids): bench.read_states([*result.request.input_ids, *kept])
            for result, kept in zip(results, texts, strict=True)
        }

        def read(tokens: list[int], results: Any) -> Any:
            (result,) = (
                r for r in results if tokens[: len(r.request.input_ids)] == r.request.input_ids
            )
            return originals[tuple(result.request.input_ids)]

        return medusa_tuning.measure_accuracies(fake, heads)

    texts = [list(r.output_ids) for r in list_results(bench.run(bench.plain, 2))]
    accuracies = measure(0)
    assert accuracies.shape == (3, 10)
    assert accuracies[0, 0] == 1.0
    assert measure(1)[0, 0] < 0.2, "the second is not the first"


def test_costs_of_steps(engine: Path, folder: Path) -> None:
    bench = load(engine, folder)
    costs = time_steps(bench.engine.decoder, [1, 5], past_len=20, repeat=2, batch_size=3)
    assert list(costs) == [1, 5]
    assert min(costs.values()) > 0
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

    def count_work(self: Any) -> list[float]:
        """Tokens for each token evaluated: what a busy machine does not change."""
        return [
            sum(map(len, done.texts))
            / (done.timing.num_steps + sum(r.stats.num_draft_tokens for r in list_results(done)))
            for done in self.timed
        ]

    monkeypatch.setattr("specdec.bench.measure.Rounds.list_rates", count_work)
    report = run_tune(folder, checkpoint, output_file=recipe)
    (batch,) = report["batches"]
    fixed = [row for row in batch["settings"] if row["round"] is not None]
    combined = [row for row in batch["settings"] if row["round"] is None]
    assert {row["name"] for row in fixed} == {
        f"{beams} x {tokens}"
        for beams in ("1 beam", "2 beams") for tokens in ("1 token", "2 tokens")
    }  # fmt: skip
    assert sum(row["measured"] is not None for row in fixed) == 2, "the others fell"
    assert {row["round"] for row in fixed} == {1}
    assert all(row["measured"] is not None for row in combined)
    assert any(row["name"].startswith("suffix of 15, else ") for row in combined)
    assert sum(row["name"].endswith(", budget auto") for row in combined) in (1, 2)
    ratios = [r["measured"]["ratio"]["median"] for r in batch["settings"] if r["measured"]]
    assert ratios == sorted(ratios, reverse=True)
    assert batch["best"] == "plain"
    assert report["recipe"]["run"]["no_speculation"] is True
    settings = resolve_settings(RunSettings, "run", {}, recipe)
    assert settings.no_speculation
    with pytest.raises(SpecDecError, match="exists"):
        run_tune(folder, checkpoint, output_file=recipe)

    better = Candidate(
        "1 beam x 2 tokens", None,
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


def test_a_recipe_runs_where_it_lies(
    engine: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its paths are absolute, the conversion's too, however they were typed."""
    source = folder / "ckpt-b2l3noneautod"
    (tmp_path / "typed" / "target").mkdir(parents=True)
    checkpoint = shutil.copytree(source, tmp_path / "typed" / "checkpoint")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["settings"] |= {"model_dir": "target", "drafter_model_dir": "gone/drafter"}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.chdir(tmp_path / "typed")
    given = TuneSettings(checkpoint_dir=Path("checkpoint"), tokenizer_dir="target")
    wide = Candidate("1 beam x 2 tokens", None, convert={"redrafter_num_beams": 1})
    for candidate in (wide, None):
        found = describe_best(candidate, given, 1)
        monkeypatch.chdir(tmp_path)
        for section in found["recipe"].values():
            for key, value in section.items():
                if key.endswith("_dir") and key != "drafter_model_dir":
                    assert Path(value).parent == tmp_path / "typed"
        if candidate is not None:
            assert any("drafter_model_dir is gone/drafter" in note for note in found["notes"])
            assert found["recipe"]["convert"]["model_dir"] == str(tmp_path / "typed" / "target")
        monkeypatch.chdir(tmp_path / "typed")


@pytest.mark.parametrize(
    ("ratios", "doubt"),
    [
        ((1.2, 1.1, 1.3), None), ((1.05, 0.98, 1.2), "from 0.98 to 1.20: it is doubtful"),
        ((1.2, 1.2, 1.2), "--repeat 5 shows the spread"), (None, None),
    ],
)  # fmt: skip
def test_doubtful_figures_are_told(ratios: Any, doubt: str | None) -> None:
    rows = []
    if ratios is not None:
        ratio = dict(zip(("median", "lowest", "highest"), ratios, strict=True))
        rows = [{"name": "a", "measured": {"ratio": ratio}}]
    batch = {"batch_size": 4, "best": "a" if rows else "plain", "settings": rows}
    told = describe_doubts([batch])
    assert (doubt is None and told == []) or doubt in told[0]


def follow_recipe(candidate: Any, checkpoint: Path, tokenizer: Path, method: str) -> dict[str, Any]:
    """Do what the recipe of a setting says, on the smallest prompt; return its statistics."""
    given = TuneSettings(checkpoint_dir=checkpoint, tokenizer_dir=str(tokenizer))
    about = {
        "date": "",
        "method": method,
        "processor": "",
        "warnings": [],
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
    *_, dynamic = eagle_tuning.list_candidates(bench, TuneSettings())
    bench.run(add_budget(dynamic).proposer, 2)
    assert dynamic.proposer.min_gain == ALL_LEVELS


def test_a_table_of_eagle_trees_and_their_recipes(eagle1: Path) -> None:
    """Half of the settings falls in each round; what is chosen is what then runs."""
    report = run_tune(eagle1, eagle1 / "checkpoint", num_measured=1, max_output_len=6)
    assert report["method"] == "eagle"
    rows = report["batches"][0]["settings"]
    counts = [sum((row["round"] or 0) >= number for row in rows) for number in (1, 2, 3)]
    assert counts[0] > 4
    assert counts[1:] == [-(-counts[0] // 2), -(-counts[0] // 4)]
    assert min(row["draft_ms"] for row in rows) > 0
    text = format_tuning(report)
    assert (f"{len(rows) - MAX_ROWS} more fell" in text) == (len(rows) > MAX_ROWS)
    bench = load(eagle1 / "engine", eagle1, 6)
    candidates = eagle_tuning.list_candidates(bench, TuneSettings())
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
    assert lengths["2 tokens"] > lengths["1 token"] > 1.5


def test_flags() -> None:
    assert to_flags({"a_b": 3, "force": True, "c": "x y"}) == "--a-b 3 --force --c 'x y'"


def test_what_cannot_be_tuned(engine: Path, folder: Path, tmp_path: Path) -> None:
    checkpoint = folder / "ckpt-b2l3noneautod"
    with pytest.raises(UsageError, match="--draft-checkpoint-dir has no effect"):
        run_tune(folder, checkpoint, draft_checkpoint_dir=checkpoint)
