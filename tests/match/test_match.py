"""`specdec match`: what fits a target and why others do not, by the converter's own checks."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from specdec.convert.hf import HfFolder
from specdec.convert.pipeline import convert_model
from specdec.convert.settings import ConvertSettings
from specdec.errors import SpecDecError
from specdec.files.acceptance import MAX_DEPTH, NUM_BUCKETS, Acceptance
from specdec.gguf.model import GgufModel
from tests.conftest import (
    ROOT,
    change_tensors,
    make_eagle_drafter,
    make_llama,
    make_medusa_heads,
    make_mtp_head,
    make_tokenizer,
    read_error_lines,
    run_cli,
)
from tests.convert.checkpoints import set_config
from tests.convert.test_drafters import FORMATS, LAYERS
from tests.convert.test_eagle import DESCRIPTION, save_together
from tests.engines import run_cli_here

TITLES = {"DFlash deepspec": "DSpark", "P-EAGLE": "P-EAGLE"}
SPARE = "EAGLE-1"  # a drafter of the module's that tests copy


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub that is not there, until a test makes it."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two targets, of which the second has other sizes, and a folder of drafters for the first."""
    folder = tmp_path_factory.mktemp("models")
    make_llama(folder, layers=LAYERS, vocab=131)
    make_llama(folder, layers=3, vocab=160, hidden=32, name="other")
    for name, (_, make) in FORMATS.items():
        (folder / "made").mkdir()
        (folder / "drafters").mkdir(exist_ok=True)
        make(folder / "made").rename(folder / "drafters" / name)
        shutil.rmtree(folder / "made")
    return folder


def match(*words: object, status: int = 0) -> dict[str, Any]:
    """Return the report of `specdec match --json`."""
    done = run_cli_here("match", "--json", *words)
    assert done.returncode == status, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["num_fitting"] == sum(entry["fits"] for entry in report["candidates"])
    assert bool(report["num_fitting"]) == (status == 0)
    return report


def find(report: dict[str, Any], path: Path | str) -> dict[str, Any]:
    (entry,) = (entry for entry in report["candidates"] if entry["name"] == str(path))
    return dict(entry)


def convert(target: Path, drafter: Path) -> list[tuple[str, str]]:
    """Return the problems of a conversion, none for one that would be done."""
    settings = ConvertSettings(
        model_dir=str(target), drafter_model_dir=str(drafter), output_dir=drafter / "out",
        dry_run=True,
    )  # fmt: skip
    try:
        convert_model(settings)
    except SpecDecError as error:
        return error.problems
    return []


def list_reasons(entry: dict[str, Any]) -> list[tuple[str, str]]:
    return [(reason["fact"], reason["remedy"]) for reason in entry["reasons"]]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["target", "other"])
def test_the_rule_is_the_converters(name: str, models: Path) -> None:
    """For drafters of each method and format: one verdict, with the same facts and remedies."""
    fits = name == "target"
    report = match(
        "--model-dir", models / name, "--among", models / "drafters", status=0 if fits else 1
    )
    assert len(report["candidates"]) == len(FORMATS)
    for format_name, (option, _) in FORMATS.items():
        folder = models / "drafters" / format_name
        entry, problems = find(report, folder), convert(models / name, folder)
        assert list_reasons(entry) == problems
        assert entry["fits"] == (not problems) == fits, format_name
        assert entry["method"] == option.split("_")[0].replace("drafter", "redrafter")
        if fits:
            start = TITLES.get(format_name, format_name.split()[0])
            assert entry["title"] == start
            assert entry["command"] == (
                f"specdec generate --model-dir {models / name} --drafter-model-dir"
                f" '{folder}' Hello".replace("'", "'" if " " in str(folder) else "")
            )


DAMAGES: dict[str, dict[str, Any]] = {
    "hidden size": {"hidden_size": 32}, "vocabulary": {"vocab_size": 90},
    "layers": {"num_hidden_layers": 9, "num_draft_layers": 9, "medusa_num_heads": 9},
    "activation": {"hidden_act": "relu"}, "no type": {"num_attention_heads": "four"},
    "layout": {"is_neox_style": False}, "quantized": {"quantization_config": {"bits": 4}},
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("damage", DAMAGES)
def test_drafters_with_one_wrong_value(damage: str, models: Path, tmp_path: Path) -> None:
    names = ["ReDrafter A", "Medusa", "EAGLE-1", "EAGLE-3", "DFlash z-lab", "MTP"]
    for name in names:
        shutil.copytree(models / "drafters" / name, tmp_path / "among" / name)
        set_config(tmp_path / "among" / name, **DAMAGES[damage])
    whole = models / "drafters" / "Medusa .pt"  # fits, so that the status is 0
    report = match("--model-dir", models / "target", "--among", tmp_path / "among", whole)
    for name in names:
        folder = tmp_path / "among" / name
        entry, problems = find(report, folder), convert(models / "target", folder)
        assert (entry["fits"], list_reasons(entry)) == (not problems, problems), name


def test_numbers_beside_a_verdict(models: Path) -> None:
    drafters = models / "drafters"
    among = [drafters / name for name in ("EAGLE-3 ModelOpt", "EAGLE-3", "EAGLE-1", "Medusa")]
    report = match("--model-dir", models / "target", "--among", *among)
    assert {name: report["target"][name] for name in ("hidden_size", "num_layers")} == {
        "hidden_size": 64, "num_layers": LAYERS,
    }  # fmt: skip
    numbers = find(report, drafters / "EAGLE-3 ModelOpt")["numbers"]
    assert numbers["feature_layers"] == [1, 3, 4]
    assert (numbers["vocab_size"], numbers["draft_vocab_size"]) == (131, 70)
    assert find(report, drafters / "Medusa")["numbers"]["num_heads"] == 3
    other = match("--model-dir", models / "other", "--among", *among, status=1)
    numbers = find(other, drafters / "EAGLE-3 ModelOpt")["numbers"]
    assert (numbers["hidden_size"], numbers["draft_vocab_size"]) == (64, 70)
    done = run_cli_here("match", "--model-dir", models / "target", "--among", *among)
    assert (
        f"  {drafters / 'EAGLE-3'}: EAGLE-3, hidden size 64, layers 1, reads layers [1, 3, 4]"
        in (done.stdout)
    )
    done = run_cli_here("match", "--model-dir", models / "other", "--among", *among)
    assert "    no: the EAGLE drafter's hidden_size is 64, the target's 32\n" in done.stdout


def test_no_weights_are_read(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def read(self: HfFolder, name: str, *_: object) -> Any:
        names.append(name)
        return original(self, name)

    original = HfFolder.read
    monkeypatch.setattr(HfFolder, "read", read)
    monkeypatch.setattr(HfFolder, "read_block", read)
    match("--model-dir", models / "target", "--among", models / "drafters")
    assert set(names) == {"d2t", "t2d"}  # the maps of drafted tokens, which are checked


def test_no_candidate_fits(models: Path, tmp_path: Path) -> None:
    """A report is printed, and the status is 1; so it is where there is none."""
    (tmp_path / "empty").mkdir()
    target = models / "target"
    for words, fact in (
        (["--among", tmp_path / "empty"], "no drafter for"),
        ([], "no drafter for"),
        (["--among", models / "other"], "none of 1 candidate drafts for"),
    ):
        done = run_cli_here("match", "--model-dir", target, *words)
        error, hint = read_error_lines(done.stderr)
        assert (done.returncode, done.stdout.splitlines()[0].split(":")[0]) == (1, str(target))
        assert fact in error
        assert "--among" in hint
    report = match("--model-dir", target, "--among", tmp_path / "empty", status=1)
    assert report["warnings"] == [f"--among {tmp_path / 'empty'} holds no model and no drafter"]


def test_a_process_of_its_own(models: Path, cache: Path) -> None:
    """Nothing is imported there yet, and the cache is the environment's."""
    fill_cache(cache, "someone/heads", models / "drafters" / "Medusa")
    done = run_cli("match", "--model-dir", models / "target", env={"HF_HUB_CACHE": str(cache)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:3] == [
        "fit: 1 of 1",
        "  someone/heads (hub cache): Medusa, heads 3, float32",
    ]


def test_what_cannot_be_looked_at(models: Path, tmp_path: Path) -> None:
    target = models / "target"
    calls: list[tuple[list[object], str, str]] = [
        (["--model-dir", tmp_path / "none"], "does not exist", "check the path"),
        (["--model-dir", models / "drafters" / SPARE], "is the folder of an EAGLE", "--eagle"),
        (["--model-dir", "someone/model"], "the Hub's cache does not hold it", "fetch it first"),
        (["--model-dir", target, "--among", tmp_path / "none"], "does not exist", "check the path"),
    ]
    broken = tmp_path / "broken"
    shutil.copytree(target, broken)
    set_config(broken, num_hidden_layers=LAYERS + 1)
    calls.append((["--model-dir", broken], "lacks 9 tensors", "config.json"))
    for words, fact, remedy in calls:
        done = run_cli_here("match", "--json", *words)
        error, hint = read_error_lines(done.stderr)
        assert (done.returncode, done.stdout) == (1, "")
        assert fact in error
        assert remedy in hint
    done = run_cli_here("match")
    assert done.returncode == 2
    assert "missing --model-dir" in done.stderr


def test_broken_folders_are_named_and_nothing_else_stops(models: Path, tmp_path: Path) -> None:
    among = tmp_path / "among"
    for name in ("cut", "text", "lost", "acceptance", "whole"):
        shutil.copytree(models / "drafters" / SPARE, among / name)
    weights = among / "cut" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 5)
    (among / "text" / "config.json").write_text("{")
    (among / "lost" / "model.safetensors").unlink()
    (among / "lost" / "model.safetensors").symlink_to(tmp_path / "nowhere")
    (among / "acceptance" / "acceptance.json").write_text('{"format_version": 9}')
    (among / "adapter").mkdir()
    (among / "adapter" / "adapter_config.json").write_text("{}")
    (among / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    (among / "notes").mkdir()
    report = match("--model-dir", models / "target", "--among", among)
    assert [entry["name"] for entry in report["candidates"] if entry["fits"]] == [
        str(among / "whole")
    ]
    facts = {
        "cut": "model.safetensors", "text": "JSON", "lost": "model.safetensors",
        "acceptance": "format_version 9", "adapter": "the folder of a LoRA adapter",
    }  # fmt: skip
    assert len(report["candidates"]) == len(facts) + 1  # what holds no model is left out
    for name, fact in facts.items():
        entry = find(report, among / name)
        assert list_reasons(entry) == convert(models / "target", among / name), name
        assert fact in entry["reasons"][0]["fact"]


def test_two_folders_each_candidate_once(models: Path, tmp_path: Path) -> None:
    drafters = models / "drafters"
    first, second = drafters / SPARE, drafters / "Medusa"
    reports = [
        match("--model-dir", models / "target", *words)
        for words in (
            ["--among", first, "--among", second, "--among", first],
            ["--among", first, second, models / "target"],
        )
    ]
    for report in reports:
        assert sorted(e["name"] for e in report["candidates"]) == sorted(map(str, (first, second)))


def fill_cache(cache: Path, hub_id: str, folder: Path, *, revision: str = "0" * 40) -> Path:
    """Lay a folder into a cache as the Hub's library does: blobs, and links to them."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    for file in folder.iterdir():
        blob = repository / "blobs" / f"{len(list((repository / 'blobs').iterdir())):040x}"
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def test_models_in_the_cache_of_the_hub(models: Path, cache: Path) -> None:
    drafters = models / "drafters"
    fill_cache(cache, "someone/target", models / "target")
    other = fill_cache(cache, "someone/eagle3", drafters / "Medusa", revision="1" * 40)
    fill_cache(cache, "someone/eagle3", drafters / "EAGLE-3 ModelOpt")  # which is main
    lost = fill_cache(cache, "someone/lost", drafters / SPARE)
    (lost / "model.safetensors").resolve().unlink()
    fill_cache(cache, "someone/medusa", drafters / "Medusa")
    (cache / "models--broken").mkdir()
    report = match("--model-dir", "someone/target")
    assert sorted(e["name"] for e in report["candidates"]) == [
        "someone/eagle3", "someone/medusa",
    ]  # fmt: skip
    assert find(report, "someone/eagle3")["title"] == "EAGLE-3"
    assert find(report, "someone/eagle3")["command"] == (
        "specdec generate --model-dir someone/target --drafter-model-dir someone/eagle3 Hello"
    )
    for name in ("models--someone--lost", "models--broken"):
        assert any(name in warning for warning in report["warnings"])
    assert {entry["source"] for entry in report["candidates"]} == {"hub cache"}
    # Another cache, whose ids no command knows: paths.
    moved = cache.rename(cache.with_name("elsewhere"))
    report = match("--model-dir", models / "target", "--among", moved)
    names = [entry["name"] for entry in report["candidates"] if entry["fits"]]
    assert str(moved / "models--someone--medusa" / "snapshots" / ("0" * 40)) in names
    assert str(moved / other.relative_to(cache)) not in names


def test_draft_models(models: Path, tmp_path: Path) -> None:
    """By their vocabularies: the same, shared, or unknown; each as specdec generate takes it."""
    among = tmp_path / "among"
    target = make_tokenizer(make_llama(tmp_path, vocab=140, layers=3), vocab=140)
    make_tokenizer(make_llama(among, vocab=144, layers=1, name="padded"), vocab=140)
    make_tokenizer(make_llama(among, vocab=120, layers=1, name="shorter"), vocab=120)
    make_tokenizer(make_llama(among, vocab=140, layers=9, name="larger"), vocab=140)
    make_llama(among, vocab=140, layers=1, name="unknown")
    make_llama(among, vocab=96, layers=1, name="unlike")
    report = match("--model-dir", target, "--among", among)
    modes = {Path(e["name"]).name: (e["fits"], e["draft_vocabulary"]) for e in report["candidates"]}
    assert modes == {
        "padded": (True, "same"), "shorter": (True, "shared"), "larger": (True, "same"),
        "unknown": (True, "same"), "unlike": (False, "same"),
    }  # fmt: skip
    assert {entry["title"] for entry in report["candidates"]} == {"Draft-target"}
    shorter = find(report, among / "shorter")
    assert shorter["shared_tokens"] == 120
    assert shorter["command"] == (
        f"specdec generate --model-dir {target} --draft-model-dir {among / 'shorter'}"
        " --draft-vocabulary shared Hello"
    )
    assert "one has none" in find(report, among / "unknown")["warnings"][0]
    assert "pays only where it is much smaller" in find(report, among / "larger")["warnings"][0]
    names = [Path(entry["name"]).name for entry in report["candidates"]]
    assert names.index("larger") == 3  # after the smaller ones
    (reason,) = find(report, among / "unlike")["reasons"]
    assert "vocab_size is 140, the draft model's 96" in reason["fact"]
    done = run_cli_here(
        "generate", "--model-dir", target, "--draft-model-dir", among / "unlike", "a", "--no-cache"
    )
    assert read_error_lines(done.stderr)[0] == reason["fact"]


def test_a_draft_model_with_hardly_a_token_of_the_targets(tmp_path: Path) -> None:
    target = make_tokenizer(make_llama(tmp_path, vocab=140), vocab=140)
    draft = make_tokenizer(make_llama(tmp_path, vocab=140, name="draft"), vocab=140)
    document = json.loads((draft / "tokenizer.json").read_text())
    document["model"]["vocab"] = {
        token if number < 3 else f"\u0120{number}\u0120": number
        for token, number in document["model"]["vocab"].items()
    }
    document["model"]["merges"] = []
    (draft / "tokenizer.json").write_text(json.dumps(document))
    report = match("--model-dir", target, "--among", draft, status=1)
    assert "3 tokens are in both vocabularies" in find(report, draft)["reasons"][0]["fact"]


def test_a_drafter_in_the_targets_own_folder(models: Path, tmp_path: Path) -> None:
    """An EAGLE that was saved together with its target, and a published head of Qwen's."""
    target, drafters = models / "target", models / "drafters"
    together = save_together(
        target, drafters / SPARE, tmp_path / "together",
        DESCRIPTION | {"num_attention_heads": 4, "intermediate_size": 96},
    )  # fmt: skip
    report = match("--model-dir", together, "--among", drafters / "Medusa", status=0)
    eagle = find(report, together)
    assert (eagle["fits"], eagle["source"], eagle["title"]) == (True, "target", "EAGLE-1")
    assert f"--eagle-model-dir {together}" in eagle["command"]
    medusa = find(report, drafters / "Medusa")
    assert "holds a drafter besides the target" in medusa["reasons"][0]["fact"]
    assert list_reasons(medusa) == convert(together, drafters / "Medusa")
    headed = tmp_path / "headed"
    shutil.copytree(target, headed)
    from safetensors.torch import load_file

    with change_tensors(headed) as tensors:
        tensors |= load_file(make_mtp_head(tmp_path, target) / "model.safetensors")
    report = match("--model-dir", headed, "--among", drafters / SPARE)
    assert find(report, headed)["command"] == (
        f"specdec generate --model-dir {headed} --speculative-decoding-mode mtp Hello"
    )
    assert find(report, drafters / SPARE)["fits"]


def test_a_gguf_file_and_drafters_in_folders(tmp_path: Path) -> None:
    file = tmp_path / "llama.gguf"
    shutil.copyfile(ROOT / "tests/golden/gguf/llama.gguf", file)
    config = GgufModel(file).config
    sizes = {"hidden": config["hidden_size"], "vocab": config["vocab_size"]}
    drafters = tmp_path / "drafters"
    eagle = make_eagle_drafter(drafters, **sizes, bias=False)
    heads = make_medusa_heads(drafters, hidden=2 * sizes["hidden"], vocab=sizes["vocab"])
    shutil.copyfile(file, drafters / "small.gguf")
    report = match("--model-dir", file, "--among", drafters)
    assert find(report, eagle)["fits"]
    (reason,) = find(report, heads)["reasons"]
    assert reason["fact"].endswith(
        f"heads' hidden_size is {2 * sizes['hidden']}, the target's {sizes['hidden']}"
    )
    assert "`specdec match`" in reason["remedy"]
    assert list_reasons(find(report, heads)) == convert(file, heads)
    small = find(report, drafters / "small.gguf")
    assert (small["fits"], small["draft_vocabulary"]) == (True, "same")


def test_the_head_of_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "hybrid.gguf"
    shutil.copyfile(ROOT / "tests/golden/gguf/qwen35.gguf", file)
    report = match("--model-dir", file)
    (entry,) = report["candidates"]
    assert (entry["title"], entry["source"], entry["fits"]) == ("MTP", "target", True)


def write_promise(folder: Path) -> None:
    rows = tuple((4,) * NUM_BUCKETS for _ in range(MAX_DEPTH))
    gains = (0.5, 0.75, 0.875, 1.0, 1.0)
    about = {"num_prompts": 8, "prompts_sha256": "0" * 64}
    Acceptance(right=rows, seen=rows, gains=gains, num_drafts=1234, about=about).write(
        folder / "acceptance.json"
    )


def test_cards_are_told_and_nothing_is_invented(models: Path, tmp_path: Path) -> None:
    told, silent = tmp_path / "told", models / "drafters" / SPARE
    shutil.copytree(silent, told)
    write_promise(told)
    (told / "README.md").write_text("---\nbase_model: someone/Llama-9-13B\x1b[2J\n---\n")
    (told / "manifest.json").write_text(json.dumps({"compute": {"model_max_length": 256}}))
    make_tokenizer(told, vocab=120)
    target = make_tokenizer(shutil.copytree(models / "target", tmp_path / "target"), vocab=131)
    report = match("--model-dir", target, "--among", told, silent)
    entry = find(report, told)
    assert entry["acceptance"] == {
        "tokens_per_step": {"1": 1.5, "2": 1.75, "4": 2.0}, "num_drafts": 1234,
        "about": {"num_prompts": 8, "prompts_sha256": "0" * 64},
    }  # fmt: skip
    assert (entry["base_models"], entry["names_target"]) == (["someone/Llama-9-13B\x1b[2J"], False)
    base, tokens, length = entry["warnings"]
    assert "names someone/Llama-9-13B\x1b[2J as its target" in base
    assert "its tokenizer has 120 tokens, the target's 131" in tokens
    assert length == "it was trained on texts of up to 256 tokens, the target has 512 positions"
    silent_entry = find(report, silent)
    assert (silent_entry["acceptance"], silent_entry["base_models"]) == (None, [])
    assert silent_entry["warnings"] == []
    done = run_cli_here("match", "--model-dir", target, "--among", told, silent)
    assert "\x1b" not in done.stdout
    assert "    made for someone/Llama-9-13B\\x1b[2J, by its name another model\n" in done.stdout
    assert "promises 1.50 with 1 drafted, 1.75 with 2 drafted, 2.00 with 4 drafted tokens" in (
        done.stdout
    )
    assert done.stdout.count("promises") == 1


def test_converters_error_leads_here(models: Path, tmp_path: Path) -> None:
    """And what is found by following it fits."""
    words = ["convert", "--model-dir", models / "other", "--output-dir", tmp_path / "out"]
    for name in ("ReDrafter A", "Medusa", "EAGLE-1", "EAGLE-3", "DFlash z-lab"):
        done = run_cli_here(*words, "--drafter-model-dir", models / "drafters" / name)
        assert done.returncode == 1
        assert "`specdec match` tells which of several fits" in done.stderr, name


@pytest.mark.parametrize("place", [".", "closed"])
def test_a_folder_that_cannot_be_read(
    place: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "among" / "closed"
    closed.mkdir(parents=True)

    def close(original: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any = ".") -> Any:
            if Path(path) == closed:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return original(path)

        return refuse

    monkeypatch.setattr(os, "listdir", close(os.listdir))
    monkeypatch.setattr(os, "scandir", close(os.scandir))
    drafter = models / "drafters" / SPARE
    report = match("--model-dir", models / "target", "--among", closed.parent / place, drafter)
    assert find(report, drafter)["fits"]
    (reason,) = find(report, closed)["reasons"]
    assert reason["fact"] == f"{closed}: Permission denied"
    assert "permissions" in reason["remedy"]
