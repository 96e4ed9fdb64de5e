"""specdec-bench measures what it says, and tells when its figures are worth little."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.decode.timing import Timing
from specdec.errors import SpecDecError, UsageError
from specdec.measure import machine, plots
from specdec.measure.engine import BenchRun, open_bench
from specdec.measure.measure import alternate, divide, summarize
from specdec.measure.pipeline import find_error, list_warnings, run_bench
from specdec.measure.prompts import read_prompt_set
from specdec.measure.repetition import is_looping, measure_distinct
from specdec.measure.report import format_report, format_table, write_report
from specdec.measure.settings import BenchSettings, read_counts
from specdec.run.settings import RunSettings
from tests.bench.conftest import PLAIN_CHECKPOINT
from tests.conftest import read_error_lines
from tests.engines import call, run_cli_here

KINDS = ("plain", "speculation")


@pytest.fixture(scope="module")
def report(engine: Path, folder: Path) -> dict[str, Any]:
    return bench(engine, folder, draft_chain="redrafter")


def bench(engine: Path, folder: Path, **flags: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "engine_dir": engine, "tokenizer_dir": str(folder / "target"), "device": "cpu",
        "prompts": folder / "prompts.jsonl", "max_output_len": 12, "repeat": 2,
        "batch_sizes": "1,3", **flags,
    }  # fmt: skip
    return run_bench(BenchSettings(**values))


@pytest.mark.thorough
def test_a_report_adds_up(report: dict[str, Any]) -> None:
    assert [batch["batch_size"] for batch in report["batches"]] == [1, 3]
    for batch in report["batches"]:
        assert batch["texts"] == {"compared": 6, "equal": 6}
        assert set(batch["categories"]) == {"code", "prose"}
        for name in ("speculation", "plain"):
            figures = batch[name]
            rates, times = figures["tokens_per_second"], figures["step_ms"]
            assert 0 < rates["lowest"] <= rates["median"] <= rates["highest"]
            milliseconds = [times[phase] for phase in ("draft", "verify", "accept", "other")]
            assert sum(milliseconds) == pytest.approx(times["total"], abs=1e-3)
            assert min(milliseconds) > 0
        acceptance = batch["acceptance"]
        counts = acceptance["accepted_histogram"]
        assert len(counts) == 4, "none to all three of a beam"
        shares = [sum(counts[n:]) / sum(counts) for n in (1, 2, 3)]
        assert acceptance["accepted_by_position"] == pytest.approx(shares, abs=1e-3)
        assert acceptance["acceptance_length"] == pytest.approx(
            1 + sum(n * count for n, count in enumerate(counts)) / sum(counts), abs=0.1
        )
        assert batch["speculation"]["num_steps"] <= batch["plain"]["num_steps"]
    alone, together = report["batches"]
    assert alone["plain"]["num_steps"] == 6 * 11, "one step a token, but for the prompt's own"
    assert together["plain"]["num_steps"] == 2 * 11
    assert report["memory"]["peak_mb"] > 10
    assert find_error(report, use_logits=False) is None


def test_rounds_go_there_and_back() -> None:
    """Each warms up once; then they take turns, every other round backwards."""
    order: list[str] = []

    class FakeBench:
        def run(self, drafter: str, batch_size: int) -> BenchRun:
            order.append(drafter)
            return BenchRun({"all": 1.0}, {"all": []}, Timing())

    drafters: dict[str, Any] = {"speculation": "s", "plain": "p"}
    bench: Any = FakeBench()
    rounds = alternate(bench, drafters, 1, 3)
    assert "".join(order) == "sp" + "sp" + "ps" + "sp"
    assert [len(group.timed) for group in rounds.values()] == [3, 3]


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [{"prompt_lookup_num_tokens": 3}, {"draft_len": "4"}])
def test_no_round_profits_from_the_one_before(
    flags: dict[str, Any], pair: tuple[Path, Path], folder: Path
) -> None:
    """Drafts, n-grams and caches are forgotten: every round accepts and steps as the first did."""
    draft = pair[1] if "draft_len" in flags else None
    settings = RunSettings(
        engine_dir=pair[0], draft_engine_dir=draft, tokenizer_dir=str(folder / "target"),
        device="cpu", max_output_len=40, draft_budget="fixed", **flags,
    )  # fmt: skip
    bench = open_bench(settings)
    bench.take_prompts(read_prompt_set(folder / "prompts.jsonl"), settings)
    first_run, second_run = (bench.run(bench.engine.drafter, 2) for _ in range(2))
    for category, results in first_run.results.items():
        again = second_run.results[category]
        assert [r.stats.to_json() for r in results] == [r.stats.to_json() for r in again]
    assert first_run.timing.num_steps == second_run.timing.num_steps
    assert sum(r.stats.num_draft_tokens for r in first_run.results["code"]) > 0


def test_text_form(report: dict[str, Any]) -> None:
    text = format_report(report)
    assert "redrafter in float32 on cpu" in text
    assert "1 core, 1 thread, " in format_report(report | {"usable_cores": 1, "threads": 1})
    assert "6 of 6" in text
    assert "prose" in text
    assert "steps that accept at least 1, 2, ..." in text
    assert format_table(["a", "b"], [["long", "1"]]) == ["a     b", "long  1"]


def test_differing_texts_are_an_error_in_float32_only(report: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(report))
    changed["batches"][1]["texts"]["equal"] = 4
    error = find_error(changed, use_logits=False)
    assert error is not None
    assert "2 at batch size 3" in error.message
    assert any("2 of 6 texts differ" in w for w in list_warnings(changed, use_logits=False))
    assert find_error(changed, use_logits=True) is None
    assert find_error(changed | {"dtype": "bfloat16"}, use_logits=False) is None


def test_warnings(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    steady = json.loads(json.dumps(report)) | {"processors_used_by_others": 0.0}
    for batch in steady["batches"]:
        batch["looping"]["texts"] = 0
        for name in ("speculation", "plain"):
            batch[name]["tokens_per_second"] = summarize([9.0, 10.0, 11.0])
    assert list_warnings(steady, use_logits=False) == []
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    steady["processors_used_by_others"] = 1.5
    assert list_warnings(steady, use_logits=False) == [
        "other programs kept 1.5 of 4 processors busy meanwhile: the figures are doubtful"
    ]
    steady["processors_used_by_others"] = None
    steady["batches"][0]["looping"] |= {"texts": 5, "of": 6}
    steady["batches"][1]["plain"]["tokens_per_second"] = summarize([5.0, 10.0, 11.0])
    loops, unsteady = list_warnings(steady, use_logits=False)
    assert "5 of 6 texts run in circles" in loops
    assert "plain ran at 5.0 to 11.0" in unsteady


def test_spread() -> None:
    assert summarize([9.0, 1.0, 2.0]) == {"median": 2.0, "lowest": 1.0, "highest": 9.0}
    # Of the ratios within rounds, not the ratio of medians.
    assert divide([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])["median"] == 2.0


def test_loops_are_seen() -> None:
    assert measure_distinct(range(50)) == 1.0
    assert measure_distinct([1, 2]) == 1.0
    assert measure_distinct([1] * 11) == 1 / 8
    assert is_looping([1, 2, 3] * 20)
    assert not is_looping(list(range(30)) + list(range(15)))


def test_written_report(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.measure.plots.has_matplotlib", lambda: False)
    write_report(report, tmp_path / "out", force=False)
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert (tmp_path / "out" / "report.txt").read_text() == format_report(report) + "\n"
    names = ["manifest.json", "report.json", "report.txt"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == names
    write_report(report, tmp_path / "out", force=True)


@pytest.mark.thorough
@pytest.mark.skipif(not plots.has_matplotlib(), reason="matplotlib is not installed")
def test_plots(report: dict[str, Any], tmp_path: Path) -> None:
    write_report(report, tmp_path / "out", force=False)
    for name in ("speedup.png", "acceptance.png", "step.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not plots.has_matplotlib(), reason="matplotlib is not installed")
def test_plots_show_the_figures(report: dict[str, Any]) -> None:
    """Each bar and line is a number of the report, under its name."""
    alone, together = report["batches"]
    (axes,) = plots.draw_speedup(report).axes
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names[:2] == ["batch 1", "batch 1\nprose"]
    assert [bar.get_height() for bar in axes.patches] == [
        ratio["median"]
        for batch in (alone, together)
        for ratio in (
            batch["ratio"],
            *(category["ratio"] for category in batch["categories"].values()),
        )
    ]
    (axes,) = plots.draw_acceptance(report).axes
    for line, batch in zip(axes.lines, (alone, together), strict=True):
        assert list(line.get_xdata()) == [1, 2, 3]
        assert list(line.get_ydata()) == batch["acceptance"]["accepted_by_position"]
    (axes,) = plots.draw_step(report).axes
    tops = [bar.get_y() + bar.get_height() for bar in axes.patches][-4:]
    steps = [batch[name]["step_ms"] for batch in (alone, together) for name in KINDS]
    assert tops == pytest.approx([step["total"] for step in steps], abs=1e-3)
    drafts = [bar.get_height() for bar in axes.patches][:4]
    assert drafts == [step["draft"] for step in steps]


def test_turns_are_requests_of_their_own(engine: Path, folder: Path, tmp_path: Path) -> None:
    """The second turn's prompt holds the first, its answer by the target, and the second."""
    path = tmp_path / "turns.jsonl"
    path.write_text('{"category": "talk", "turns": ["def f", "x ="]}\n{"prompt": "The"}\n')
    turn_report = bench(engine, folder, prompts=path, batch_sizes="1")
    (batch,) = turn_report["batches"]
    assert {name: category["num_prompts"] for name, category in batch["categories"].items()} == {
        "talk": 2, "all": 1,
    }  # fmt: skip
    assert batch["plain"]["num_steps"] == 3 * 11


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": []}', "turns is [], not a list of texts"),
        ('{"prompt": "a", "turns": ["b"]}', "needs exactly one of prompt"),
        ('{"prompt": "a", "category": 3}', "category is 3, not a text"),
        ('{"prompt": "a", "categroy": "x"}', "unknown key 'categroy' (did you mean category?)"),
        ("{", "is not JSON"),
        ("", "holds no prompt"),
    ],
)
def test_wrong_prompt_sets(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(SpecDecError) as caught:
        read_prompt_set(path)
    assert message in caught.value.message


def test_prompt_sets_without_a_file_or_categories(tmp_path: Path) -> None:
    assert len({prompt.category for prompt in read_prompt_set(None, 2)}) > 2
    assert [prompt.category for prompt in read_prompt_set(None, 4)] == ["all"] * 8
    path = tmp_path / "prompts.txt"
    path.write_text("a\n\nb\n")
    assert [(p.category, p.prompt.text) for p in read_prompt_set(path)] == [
        ("all", "a"), ("all", "b"),
    ]  # fmt: skip


def test_wrong_batches(engine: Path, folder: Path) -> None:
    with pytest.raises(SpecDecError, match="batch size 9: the engine's max_batch_size is 8"):
        bench(engine, folder, batch_sizes="9")
    with pytest.raises(SpecDecError, match="batch size 4: a category has 3 prompts"):
        bench(engine, folder, batch_sizes="1,4")
    for text in ("0", "1,1", "x", ""):
        with pytest.raises(UsageError, match="--batch-sizes is"):
            read_counts("--batch-sizes", text)


def test_a_plain_engine_drafts_by_suffixes(plain: Path, folder: Path, tmp_path: Path) -> None:
    """As in a run; one without room for drafts is refused."""
    assert bench(plain, folder, max_output_len=9, repeat=1)["method"] == "suffix"
    narrow = tmp_path / "narrow"
    call("build", "--checkpoint-dir", folder / PLAIN_CHECKPOINT, "--output-dir", narrow,
         "--optimize", "none", "--max-batch-size", 8, "--max-num-tokens", 8)  # fmt: skip
    with pytest.raises(SpecDecError, match="no speculation to measure"):
        bench(narrow, folder)


def test_the_command(engine: Path, folder: Path, tmp_path: Path) -> None:
    flags = (
        "bench", "--engine-dir", engine, "--tokenizer-dir", folder / "target", "--repeat", 1,
        "--max_output_len", 4, "--output", tmp_path / "out",
    )  # fmt: skip
    process = run_cli_here(*flags, "--json")
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["batches"][0]["texts"]["compared"] == 8
    again = run_cli_here(*flags)
    assert again.returncode == 1
    assert "out" in read_error_lines(again.stderr)[0]
