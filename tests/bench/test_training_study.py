"""benchmarks/training_study.py with a tiny model: recipes, their steps, and going on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import training_study as study
from specdec.command.stages import run_command
from specdec.train import plan
from specdec.train.cli import command
from tests.bench.test_published_prompts import TASKS, write_spec_bench
from tests.conftest import make_llama, make_tokenizer
from tests.engines import reset_accelerator


@pytest.fixture
def words(
    tmp_path: Path, lasting_dir: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[str]:  # fmt: skip
    """Flags of a study of a tiny target, whose processes run in this one."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(lasting_dir / "study-cache"))
    monkeypatch.setenv("CXX", "none")
    monkeypatch.setattr(plan, "MEASURED_SECONDS", 0.0)

    def call(words: Sequence[str], log: Path) -> str:
        with log.open("a", encoding="utf-8") as file:
            file.write(" ".join(words) + "\n")
        capsys.readouterr()
        if words[0] == "-m":
            reset_accelerator()
            with pytest.raises(SystemExit) as ended:
                run_command(command, list(words[3:]))
            assert not ended.value.code, capsys.readouterr().err
        else:
            study.main(words[1:])
        return capsys.readouterr().out

    monkeypatch.setattr(study, "call", call)
    target = make_tokenizer(make_llama(tmp_path, seed=3))
    write_spec_bench(tmp_path)
    data = tmp_path / "answers.jsonl"
    texts = [f"number {i} and then {i + 1} and then {i + 2}, " * 3 for i in range(12)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [
        "--model-dir", str(target), "--data", str(data), "--spec-bench", str(tmp_path),
        "--model-max-length", "32", "--batch-size", "2", "--minutes", "0.000001", "--dtype",
        "float32", "--prompts-per-category", "1", "--max-output-len", "5", "--output-dir",
        str(tmp_path / "out"),
    ]  # fmt: skip


@pytest.mark.thorough
def test_recipes_are_trained_measured_and_joined(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    study.main([*words, "--only", "kl", "--curve", "300"])
    report = json.loads((out / "study.json").read_text())
    assert list(report["recipes"]) == ["kl", "tokens300"]
    for result in report["recipes"].values():
        assert result["tokens_per_step"] >= 1
        assert list(result["tasks"]) == ["mt_bench", *TASKS]
    assert report["recipes"]["kl"]["steps"] == 1
    assert report["recipes"]["tokens300"]["steps"] > 1
    table = (out / "study.md").read_text()
    assert "| recipe | tokens per step | over kl | mt_bench |" in table
    assert "| kl | " in table
    assert "| +0.0 % |" in table

    # Finished recipes are read, and a better recipe of a group joins the last one.
    kl = json.loads((out / "kl.json").read_text())
    for name, length in (("kl", 1.0), ("muon", 1.5)):
        (out / f"{name}.json").write_text(json.dumps(kl | {"tokens_per_step": length}))
    before = (out / "kl.log").read_text()
    study.main([*words, "--only", "kl", "muon", "together"])
    assert (out / "kl.log").read_text() == before
    assert not (out / "muon.log").exists()
    assert json.loads((out / "together.json").read_text())["flags"][-2:] == ["--optimizer", "muon"]
    settings = json.loads((out / "together" / "manifest.json").read_text())["settings"]
    assert settings["optimizer"] == "muon"
    assert "| muon | 1.500 | +50.0 % |" in (out / "study.md").read_text()
    with pytest.raises(SystemExit, match="is of another study: minutes was 1e-06, is 2.0"):
        study.main([*words, "--minutes", "2"])


@pytest.mark.thorough
def test_recipes_go_on_from_a_drafter_by_equal_tokens(words: list[str], tmp_path: Path) -> None:
    study.main([*words, "--only", "kl"])
    out = tmp_path / "further"
    first = ["--start-from", str(tmp_path / "out" / "kl"), "--tokens", "100", "--only", "kl", "tv"]
    study.main([*words, *first, "--output-dir", str(out)])
    recipes = json.loads((out / "study.json").read_text())["recipes"]
    before = json.loads((tmp_path / "out" / "kl.json").read_text())
    assert list(recipes) == ["start", "kl", "tv"]
    assert recipes["start"]["tokens_per_step"] == before["tokens_per_step"]
    assert recipes["start"]["steps"] == 0
    assert recipes["kl"]["steps"] == recipes["tv"]["steps"] > 1
    assert "--start-from" in recipes["tv"]["flags"]
    assert (out / "states" / "manifest.json").exists()


def test_the_best_of_each_group_is_joined() -> None:
    lengths = {"kl": 2.0, "tv": 1.9, "lk": 2.1, "lk_hybrid": 2.2, "uniform": 2.0, "muon": 2.5}
    results = {name: {"tokens_per_step": length} for name, length in lengths.items()}
    assert study.join_best(results) == ("--loss", "lk_hybrid", "--optimizer", "muon")
    assert study.join_best({"kl": results["kl"]}) == ()


def test_every_recipe_is_one_that_training_takes(capsys: pytest.CaptureFixture[str]) -> None:
    from specdec.train.settings import TrainSettings

    study.main(["--list"])
    lines = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert list(lines) == list(study.RECIPES)
    flags = {word for line in lines.values() for word in line.split() if word.startswith("--")}
    names = {flag.removeprefix("--").replace("-", "_") for flag in flags}
    assert names <= set(TrainSettings.__dataclass_fields__)


def test_a_command_that_fails_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="study.log ends with\nno such"):
        study.call(["-c", "raise SystemExit('no such')"], tmp_path / "study.log")
