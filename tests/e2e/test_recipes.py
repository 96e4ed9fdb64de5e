"""Each method's recipe, from data to text, by its own commands: on a tiny target, in this process.

One of them runs as the script does it, on the models that ship.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from examples.pycode import edits, methods, recipe
from specdec.methods import METHODS
from specdec.text.pretrained import load_tokenizer
from specdec.train import acceptance
from specdec.train.settings import TRAINABLE
from tests.conftest import (
    ROOT,
    make_dflash_drafter,
    make_drafter,
    make_eagle_drafter,
    make_llama,
    make_medusa_heads,
    make_mtp_head,
    make_tokenizer,
)
from tests.engines import call_here, reset_accelerator, run_cli_here

CHANGES = recipe.QUICK
# Recipes whose drafter begins as that of another recipe.
STARTS = {"p_eagle": "eagle3", "dspark": "dflash"}
TEXTS = ("def add(a, b):\n    return", "class Stack:\n    def", "import os", "for x in range(10):")


@pytest.fixture(autouse=True)
def stages_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stages that call others do so in this process."""
    monkeypatch.setattr(acceptance, "call_stage", call_here)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands in place of each path in the recipes."""
    folder = tmp_path_factory.mktemp("recipes")
    make_tokenizer(make_llama(folder, seed=3))
    make_tokenizer(make_llama(folder, seed=4, hidden=32, layers=1, name="draft"))
    (folder / "out").mkdir()
    prompts = "".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS)
    (folder / "prompts.jsonl").write_text(prompts)
    rows = [json.dumps({"text": text * 3 + str(n)}) + "\n" for n in range(3) for text in TEXTS]
    (folder / "heldout.jsonl").write_text("".join(rows))
    flags = ("--tokenizer-dir", folder / "target", "--output", folder / "ngrams.safetensors")
    made = run_cli_here("train", "ngrams", "--data", folder / "heldout.jsonl", *flags)
    assert made.returncode == 0, made.stderr
    return {
        "out/": f"{folder}/out/",
        "examples/pycode/target": f"{folder}/target",
        "examples/pycode/draft": f"{folder}/draft",
        "examples/pycode/ngrams.safetensors": f"{folder}/ngrams.safetensors",
        recipe.PROMPTS: f"{folder}/prompts.jsonl",
        recipe.TRAINING_PROMPTS: f"{folder}/prompts.jsonl",
        f"{recipe.CORPUS}/heldout.jsonl": f"{folder}/heldout.jsonl",
        **{f"examples/pycode/{name}": f"{folder}/out/pycode-{name}" for name in STARTS.values()},
    }


def run_recipe(path: Path, stages: Sequence[str] = recipe.STAGES) -> dict[str, dict[str, Any]]:
    """Call a recipe's commands in order; return their reports."""
    reports = {}
    for name, *arguments in recipe.list_commands(path, stages):
        if name == "specdec-train":
            reset_accelerator()
        stage = name.removeprefix("specdec-")
        reports["data" if arguments[0] == "data" else stage] = call_here(stage, arguments)
    return reports


@pytest.mark.thorough
@pytest.mark.parametrize("name", recipe.NAMES)
def test_a_recipe_runs_from_data_to_text(name: str, paths: dict[str, str], tmp_path: Path) -> None:
    start = STARTS.get(name, name)
    method = start.removesuffix("3")
    *others, own = recipe.write_recipes(name, tmp_path, CHANGES, paths)
    for other in others:
        run_recipe(other, ("convert", "build"))
    if start != name:
        *_, other = recipe.write_recipes(start, tmp_path, CHANGES, paths)
        run_recipe(other, ("data", "train"))
    reports = run_recipe(own)
    assert set(reports) >= {"convert", "build", "verify", "bench", "run"}
    assert recipe.list_commands(own) == [
        [f"specdec-{stage}", "--config", str(own)] for stage in ("verify", "bench", "run")
    ], "what was written is there"
    if method in TRAINABLE:
        (drafter,) = Path(paths["out/"]).glob(f"pycode-{name}/*.safetensors")
        assert reports["train"]["steps"] == 2
        assert reports["train"]["eval"]["acceptance"]["prompts"] == 2
        sources = json.loads((drafter.parent / "manifest.json").read_text())["sources"]
        assert paths["out/"] + "pycode-data.jsonl" in {source["path"] for source in sources}
    assert reports["verify"]["verdict"] == "exact"
    (batch,) = reports["bench"]["batches"]
    assert batch["texts"] == {"compared": len(TEXTS), "equal": len(TEXTS)}
    stats = reports["run"]["stats"]
    assert stats["method"] == reports["verify"]["method"] == reports["bench"]["method"] == method
    assert len(reports["run"]["outputs"]) == len(TEXTS)


def test_every_method_has_a_recipe_that_is_run_here() -> None:
    own_methods = set(METHODS) - {"mtp_assistant"}  # which only a Gemma 4 has
    assert own_methods <= set(recipe.NAMES)
    for method in own_methods:
        names = recipe.list_recipes(method)
        sections = recipe.read_recipe(ROOT / "configs" / f"{names[-1]}.yaml")
        trained = {"data", "train"} if method in TRAINABLE else set()
        assert set(sections) == {"convert", "build", "verify", "bench", "run", *trained}


def test_what_follows_something_new_is_done_anew(paths: dict[str, str], tmp_path: Path) -> None:
    """A drafter that was trained again is converted again, in place of the old one."""
    moved = paths | {"out/": f"{tmp_path}/out/"}
    *_, own = recipe.write_recipes("medusa", tmp_path, CHANGES, moved)
    sections = recipe.read_recipe(own)
    for stage in ("data", "convert", "build"):
        Path(sections[stage][recipe.WRITTEN[stage]]).mkdir(parents=True)
    commands = [[name, *words[2:]] for name, *words in recipe.list_commands(own)]
    assert commands == [
        ["specdec-train", "--resume"], ["specdec-convert", "--force"],
        ["specdec-build", "--force"], ["specdec-verify"], ["specdec-bench"], ["specdec-run"],
    ]  # fmt: skip


def test_a_shipped_drafter_takes_the_place_of_the_trained_one(tmp_path: Path) -> None:
    (own,) = recipe.write_recipes("redrafter", tmp_path, {}, {"out/": "elsewhere/"}, shipped=True)
    sections = recipe.read_recipe(own)
    assert set(sections) == {"convert", "build", "verify", "bench", "run"}
    assert sections["convert"]["drafter_model_dir"] == "examples/pycode/redrafter"
    assert sections["convert"]["output_dir"] == sections["build"]["checkpoint_dir"]
    assert sections["run"]["engine_dir"] == "elsewhere/pycode-redrafter-engine"


def test_what_does_not_ship_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["recipe.py", "dspark", "--shipped"])
    with pytest.raises(SystemExit):
        recipe.main()
    assert "no drafter ships for dspark: leave out --shipped" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_script_runs_the_commands_as_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the models that ship; what it starts as processes runs in this one."""

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert words[:3] == [sys.executable, "-m", "specdec"]
        done = run_cli_here(*words[3:])
        print(done.stdout, end="")
        print(done.stderr, end="", file=sys.stderr)
        return done

    folder = tmp_path / "out"
    monkeypatch.setattr(recipe, "subprocess", SimpleNamespace(run=run))
    monkeypatch.chdir(tmp_path)
    words = ["recipe.py", "redrafter", "--quick", "--shipped", "--output-dir", str(folder)]
    monkeypatch.setattr("sys.argv", words)
    recipe.main()
    done = capsys.readouterr()
    path = folder / "recipes" / "redrafter-pycode.yaml"
    shown = [line for line in done.out.splitlines() if line.startswith("$ ")]
    assert shown == [
        f"$ specdec-{stage} --config {path}"
        for stage in ("convert", "build", "verify", "bench", "run")
    ]
    assert ": exact" in done.out
    assert f'Output [Text {recipe.QUICK_NUM_PROMPTS - 1} Beam 0]: "' in done.out
    per_step = re.search(r"([0-9.]+) tokens per verify step", done.err)
    assert per_step is not None
    assert float(per_step[1]) > 1.2, "the shipped drafter is accepted"


@pytest.mark.thorough
def test_the_table_measures_every_method(
    paths: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With random drafters in the places of those that ship."""
    shipped = {
        "redrafter": make_drafter(tmp_path),
        "medusa": make_medusa_heads(tmp_path),
        "eagle3": make_eagle_drafter(tmp_path, version=3, name="eagle3"),  # before its beginning
        "eagle": make_eagle_drafter(tmp_path),
        "dflash": make_dflash_drafter(tmp_path, target_layers=2, aux_layers=(0,)),
        "mtp": make_mtp_head(tmp_path, Path(paths["examples/pycode/target"])),
    }
    moved = {old: new for old, new in paths.items() if old != "out/"}
    moved |= {f"examples/pycode/{name}": str(folder) for name, folder in shipped.items()}
    work = tmp_path / "work"
    arguments = ["--quick", "--work-dir", str(work), "--output-dir", str(tmp_path / "unused")]
    methods.main(arguments, moved, {}, call_here)
    report = json.loads((work / "methods.json").read_text())
    others = {"mtp_assistant"}  # which only a Gemma 4 has
    assert {row["method"] for row in report["rows"]} >= {*METHODS} - others
    assert [row["name"] for row in report["rows"]] == [v.name for v in methods.VARIANTS]
    for row in report["rows"]:
        for length, found in zip(report["max_output_lens"], row["lengths"], strict=True):
            assert (found["max_output_len"], found["rounds"]) == (length, 1)
            assert found["same_text_as_plain"] == found["prompts"] == 2
            assert found["acceptance_length"] >= 1
            assert found["speed_ratio"]["median"] > 0
    # Those that share engines are still asked for different things.
    lengths = {
        yaml.safe_load(path.read_text())["bench"]["draft_len"]
        for path in (work / "recipes").glob("draft-model-*/draft_target-pycode.yaml")
    }
    assert lengths == {4, 8, "auto"}
    table = (work / "methods.md").read_text()
    assert table in capsys.readouterr().out
    (work / "methods.md").unlink()
    methods.main(["--quick", "--render", "--work-dir", str(work)])
    assert (work / "methods.md").read_text() == table
    assert not (tmp_path / "unused").exists()


def test_the_shipped_table_is_of_the_shipped_measurement() -> None:
    """methods.json is the source; methods.md, which the page links to, is made of it."""
    folder = ROOT / "examples" / "pycode"
    table = methods.format_table(json.loads((folder / "methods.json").read_text()))
    assert (folder / "methods.md").read_text() == table, (
        "python -m examples.pycode.methods --render"
    )
    assert "](methods.md)" in (folder / "README.md").read_text()


def test_what_edits_are_written_in(paths: dict[str, str], tmp_path: Path) -> None:
    """A random target, held to texts: one that its prompt has, one that it has not."""
    lines = {"copy": "for x in range(10):\n    return", "new": "class Stack:\n    def add(a, b):"}
    begun = "for x in range(10):\n    return\n\n"
    entries = [
        {"category": name, "prompt": begun, "reference": text} for name, text in lines.items()
    ]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    edits.main(
        [
            "--only", "prompt_lookup", "draft_target", "--work-dir", str(tmp_path),
            "--prompts", str(tmp_path / "few.jsonl"),
        ],
        {old: new for old, new in paths.items() if old != "out/"},
        {}, call_here,
    )  # fmt: skip
    report = json.loads((tmp_path / "few.json").read_text())
    assert report["lines"] == {"copy": 1, "new": 1, "all": 2}
    lookup, pair, chain = (
        report["rows"][name]
        for name in (
            "prompt lookup, 8 tokens", "draft model, 4 tokens",
            "suffix decoding, else the draft model",
        )
    )  # fmt: skip
    assert len(report["rows"]) == 4, "a length that adapts is left out"
    assert "draft model, a tree of 8" in report["rows"]
    assert lookup["copy"] > 3 > lookup["new"] >= 1
    assert chain["copy"] > pair["copy"], "suffix decoding finds what a random draft model does not"
    assert "| prompt lookup, 8 tokens | " in (tmp_path / "few.md").read_text()


def test_shipped_edits_fit_the_shipped_target() -> None:
    tokenizer = load_tokenizer(str(ROOT / "examples/pycode/target"))
    made = edits.make_requests(edits.EDITS, tokenizer)
    assert {category for category, _ in made} == {"refactor", "diff", "log"}
    for _, request in made:
        assert len(request.input_ids) + request.max_output_len < 1024
        assert request.max_output_len > 20
