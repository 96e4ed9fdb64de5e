"""Candidates, numbers and the report of specdec match, alone; and what holds drafters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from specdec.convert.matching import DrafterMatcher, list_own_drafters
from specdec.errors import SpecDecError
from specdec.files.acceptance import Acceptance
from specdec.match import candidates, numbers
from specdec.match.candidates import FOLDER, Candidate, find_candidates, find_target
from specdec.match.pipeline import match_drafters
from specdec.match.report import MAX_LINE, find_error, format_report
from specdec.match.settings import MatchSettings
from tests.conftest import make_llama, make_medusa_heads


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the Hub that is not there."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, heads that fit it, and some of another size."""
    folder = tmp_path_factory.mktemp("match")
    make_llama(folder)
    make_medusa_heads(folder)
    make_medusa_heads(folder, hidden=32, name="narrow")
    return folder


def test_a_target_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(candidates, "list_cached", lambda: ([("a/b", tmp_path / "snapshot")], []))
    assert find_target("a/b") == tmp_path / "snapshot"
    with pytest.raises(SpecDecError, match="--model-dir a/c is no local folder") as caught:
        find_target("a/c")
    assert "specdec-convert --model-dir a/c --output-dir out/c --dry-run" in (
        caught.value.hint or ""
    )
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert find_target("a/b") == Path("a/b"), "a folder comes before the cache"
    assert find_target("no/hub/id") == Path("no/hub/id"), "which opening refuses"


def test_candidates_of_folders(tmp_path: Path) -> None:
    """Each once, without the target; of a folder that holds none there is a warning."""
    for name in ("among/one", "among/two", "among/notes", "empty"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("one/config.json", "two/heads.pt", "notes/read.me"):
        (tmp_path / "among" / name).write_text("{}")
    among, empty = str(tmp_path / "among"), str(tmp_path / "empty")
    one, two = (tmp_path / "among" / name for name in ("one", "two"))
    listed_candidates, warnings = find_candidates([among, empty, str(two)], one)
    assert listed_candidates == [Candidate(str(two), two, FOLDER)]
    assert warnings == [f"--among {empty} holds no model and no drafter"]
    with pytest.raises(SpecDecError, match="--among .*nothing does not exist"):
        find_candidates([str(tmp_path / "nothing")], one)


def test_numbers_of_a_folder(models: Path, tmp_path: Path) -> None:
    """Outer objects come before inner ones, and headers where config.json is silent."""
    config = {
        "text_config": {"hidden_size": 8, "vocab_size": 5}, "n_embd": 4, "vocab_size": None,
        "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    values = numbers.describe_folder(tmp_path, config)
    assert {name: value for name, value in values.items() if value is not None} == {
        "hidden_size": 4, "vocab_size": 5, "quantization": "fp8",
    }  # fmt: skip
    config = json.loads((models / "heads" / "config.json").read_text())
    values = numbers.describe_folder(models / "heads", config)
    assert (values["num_heads"], values["dtype"]) == (3, "float32")
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    assert numbers.describe_folder(tmp_path, {})["dtype"] is None


def test_length_of_a_training(tmp_path: Path) -> None:
    """Of specdec-train's manifest; what is none says nothing."""
    manifest = tmp_path / "manifest.json"
    assert numbers.read_trained_length(tmp_path) is None
    for text, expected in (
        ('{"compute": {"model_max_length": 512}}', 512), ('{"compute": {}}', None), ("[]", None),
        ('{"compute": {"model_max_length": "512"}}', None), ("{", None), ('{"compute": 1}', None),
    ):  # fmt: skip
        manifest.write_text(text)
        assert numbers.read_trained_length(tmp_path) == expected, text


def test_promises_of_an_acceptance() -> None:
    acceptance = Acceptance(
        right=(), seen=(), gains=(0.5, 0.75, 0.9), num_drafts=7, about={"num_prompts": 2}
    )
    assert numbers.describe_acceptance(acceptance) == {
        "tokens_per_step": {"1": 1.5, "2": 1.75}, "num_drafts": 7, "about": {"num_prompts": 2},
    }  # fmt: skip
    assert numbers.describe_drafter(object()) == (None, {})


def make_entry(**fields: Any) -> dict[str, Any]:
    return {
        "name": "d", "source": "folder", "title": "Medusa", "fits": True, "reasons": [],
        "warnings": [], "numbers": {}, "base_models": [], "names_target": None,
        "draft_vocabulary": None, "shared_tokens": None, "acceptance": None, "command": None,
    } | fields  # fmt: skip


def make_report(*entries: dict[str, Any], warnings: tuple[str, ...] = ()) -> dict[str, Any]:
    target = {"name": "t", "architecture": "LlamaForCausalLM", "hidden_size": 64}
    num_fitting = sum(entry["fits"] for entry in entries)
    return {"target": target, "candidates": [*entries], "warnings": [*warnings],
            "num_fitting": num_fitting}  # fmt: skip


def test_lines_of_a_report() -> None:
    acceptance = {
        "tokens_per_step": {"1": 1.5, "2": 1.75}, "num_drafts": 1700, "about": {"num_prompts": 2},
    }  # fmt: skip
    report = make_report(
        make_entry(
            source="hub cache", numbers={"num_heads": 3, "dtype": "float16", "vocab_size": None},
            base_models=["a/b"], names_target=False, acceptance=acceptance, warnings=["w"],
            draft_vocabulary="shared", shared_tokens=1234, command="specdec generate",
        ),
        make_entry(fits=False, title=None, name="x\n" + "y" * 2 * MAX_LINE),
        make_entry(fits=False, reasons=[{"fact": "too wide", "remedy": "none"}]),
        warnings=("careful",),
    )  # fmt: skip
    lines = format_report(report).split("\n")
    assert lines[:10] == [
        "t: LlamaForCausalLM, hidden size 64", "warning: careful", "fit: 1 of 3",
        "  d (hub cache): Medusa, heads 3, float16",
        "    made for a/b, by its name another model",
        "    promises 1.50 with 1 drafted, 1.75 with 2 drafted tokens a step, counted in 1,700"
        " drafts of 2 prompts",
        "    warning: w", "    another vocabulary: 1,234 tokens are in both, and drafted",
        "    specdec generate", "do not fit: 2",
    ]  # fmt: skip
    assert len(lines[10]) < 2 * MAX_LINE, "a name of any length takes a line"
    assert lines[11:] == ["  d: Medusa", "    no: too wide"]


def test_errors_of_a_report() -> None:
    assert find_error(make_report(make_entry())) is None
    for entries, fact in (
        ((), "no drafter for t was found: neither --among nor the Hub's cache has any"),
        ((make_entry(fits=False),) * 2, "none of 2 candidates drafts for t"),
    ):
        error = find_error(make_report(*entries))
        assert error is not None
        assert error.message == fact
        assert "give folders of drafters with --among" in (error.hint or "")


def test_what_holds_drafters(models: Path, tmp_path: Path) -> None:
    """The conversion's own checks decide, and are asked for each drafter anew."""
    matcher = DrafterMatcher(str(models / "target"))
    assert list_own_drafters(str(models / "target")) == matcher.own_options == []
    drafter = matcher.hold(str(models / "heads")).checkpoint.drafter
    assert drafter.num_heads == 3
    for _ in range(2):
        with pytest.raises(SpecDecError, match="32") as caught:
            matcher.hold(str(models / "narrow"))
        assert caught.value.hint
    with pytest.raises(SpecDecError, match="heads is a folder of Medusa heads, not a"):
        DrafterMatcher(str(models / "heads"))


def test_a_match_of_two(models: Path, tmp_path: Path) -> None:
    """Those that fit come first, with a command; nothing is written."""
    before = sorted(models.rglob("*"))
    settings = MatchSettings(
        model_dir=str(models / "target"), among=[str(models / "narrow"), str(models)]
    )
    report = match_drafters(settings)
    first, second = report["candidates"]
    assert [entry["fits"] for entry in (first, second)] == [True, False]
    assert (first["path"], first["method"]) == (str(models / "heads"), "medusa")
    assert "--drafter-model-dir" in first["command"]
    assert "32" in second["reasons"][0]["fact"]
    assert report["num_fitting"] == 1
    assert sorted(models.rglob("*")) == before
    with pytest.raises(SpecDecError, match="does not exist"):
        match_drafters(dataclasses.replace(settings, among=[str(tmp_path / "none")]))


def test_a_fault_with_one_candidate_hides_no_other(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised for one is its reason; the others are held against the target."""
    hold = DrafterMatcher.hold

    def fail(self: DrafterMatcher, folder: str, option: str) -> Any:
        if folder.endswith("narrow"):
            raise ZeroDivisionError("oh\nno")
        return hold(self, folder, option)

    monkeypatch.setattr(DrafterMatcher, "hold", fail)
    report = match_drafters(MatchSettings(model_dir=str(models / "target"), among=[str(models)]))
    first, second = report["candidates"]
    assert first["fits"]
    fact = f"{models / 'narrow'}: unexpected ZeroDivisionError: oh"
    assert [reason["fact"] for reason in second["reasons"]] == [fact]
    assert "fault in specdec" in second["reasons"][0]["remedy"]
