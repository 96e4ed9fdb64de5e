"""`--drafter-model-dir` takes a drafter of any method and format, told by what its folder holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.convert.pipeline import convert_model
from specdec.convert.settings import ConvertSettings
from specdec.errors import SpecDecError, UsageError
from tests.conftest import (
    make_dflash_drafter,
    make_drafter,
    make_eagle_drafter,
    make_llama,
    make_medusa_heads,
    make_mtp_head,
)
from tests.convert.conftest import Converter
from tests.convert.test_eagle import copy_drafter, to_safeailab, to_specforge, to_speculators
from tests.engines import run_cli_here

LAYERS = 8  # of the target: SafeAILab's default layers are 1, 3 and 4
EAGLE3: dict[str, Any] = {"version": 3, "vocab": 131, "draft_vocab": 70, "aux_layers": (1, 3, 4)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("target"), layers=LAYERS, vocab=131)


def pickle(folder: Path, name: str = "pytorch_model.bin", *, is_old: bool = False) -> Path:
    """Store a drafter's weights as torch.save does, before torch 1.6 or since."""
    (file,) = folder.glob("*.safetensors")
    torch.save(load_file(file), folder / name, _use_new_zipfile_serialization=not is_old)
    file.unlink()
    return folder


def make_published(parent: Path) -> Path:
    """EAGLE-3 as its authors publish it."""
    folder = Path(copy_drafter(make_eagle_drafter(parent, **EAGLE3), parent / "own", to_safeailab))
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    return pickle(folder)


def edit_eagle3(edit: Any) -> Callable[[Path], Path]:
    return lambda parent: Path(
        copy_drafter(make_eagle_drafter(parent, **EAGLE3), parent / "edited", edit)
    )


def make_naming(naming: str) -> Callable[[Path], Path]:
    exit_dim = None if naming == "C" else 96
    return lambda parent: make_drafter(parent, vocab=131, naming=naming, exit_dim=exit_dim)


def make_form(form: str) -> Callable[[Path], Path]:
    rank = 4 if form == "deepspec" else None
    return lambda parent: make_dflash_drafter(
        parent, vocab=131, form=form, target_layers=LAYERS, markov_rank=rank
    )


FORMATS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    **{
        f"ReDrafter {naming}": ("drafter_model_dir", make_naming(naming)) for naming in "ABC"
    },
    "ReDrafter .bin": ("drafter_model_dir", lambda p: pickle(make_drafter(p, vocab=131))),
    "Medusa": ("medusa_model_dir", lambda p: make_medusa_heads(p, vocab=131)),
    "Medusa .pt": (
        "medusa_model_dir",
        lambda p: pickle(make_medusa_heads(p, vocab=131), "medusa_lm_head.pt"),
    ),
    "Medusa .bin": (
        "medusa_model_dir", lambda p: pickle(make_medusa_heads(p, vocab=131), is_old=True)
    ),
    "EAGLE-1": ("eagle_model_dir", lambda p: make_eagle_drafter(p, vocab=131)),
    "EAGLE-1 .bin": ("eagle_model_dir", lambda p: pickle(make_eagle_drafter(p, vocab=131))),
    "EAGLE-3": ("eagle_model_dir", make_published),
    "EAGLE-3 ModelOpt": ("eagle_model_dir", lambda p: make_eagle_drafter(p, **EAGLE3)),
    "EAGLE-3 speculators": ("eagle_model_dir", edit_eagle3(to_speculators)),
    "EAGLE-3 SpecForge": ("eagle_model_dir", edit_eagle3(to_specforge)),
    "P-EAGLE": ("eagle_model_dir", lambda p: make_eagle_drafter(p, mask_token_id=5, **EAGLE3)),
    **{
        f"DFlash {form}": ("dflash_model_dir", make_form(form))
        for form in ("z-lab", "speculators", "deepspec")
    },
    "MTP": ("mtp_model_dir", lambda p: make_mtp_head(
        p, make_llama(p, vocab=131, layers=LAYERS, name="like"))),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", FORMATS)
def test_a_drafter_is_told_by_what_it_holds(name: str, target: Path, tmp_path: Path) -> None:
    option, make = FORMATS[name]
    (tmp_path / "made").mkdir()
    drafter = make(tmp_path / "made")
    reports = []
    for flag in (option, "drafter_model_dir"):
        flags = {flag: str(drafter), "model_dir": str(target), "output_dir": tmp_path / "out"}
        reports.append(convert_model(ConvertSettings(**flags, dry_run=True)))
    for report in reports:
        del report["hash_seconds"]
    assert reports[0] == reports[1]
    assert reports[0]["method"] == option.split("_")[0].replace("drafter", "redrafter")
    other = "dflash" if option == "medusa_model_dir" else "medusa"
    done = run_cli_here(
        "convert", "--model-dir", target, f"--{other}-model-dir", drafter, "--output-dir",
        tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 1
    assert f"--{other}-model-dir {drafter} is " in done.stderr
    assert f"as --{option.replace('_', '-')}, beside" in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ReDrafter A", "Medusa", "EAGLE-1", "EAGLE-3", "DFlash z-lab"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_drafter_added_to_a_checkpoint(
    name: str, tp_size: int, target: Path, convert: Converter, tmp_path: Path
) -> None:
    """Comes to what one step writes; there is room for one drafter."""
    option, make = FORMATS[name]
    (tmp_path / "made").mkdir()
    flags: dict[str, Any] = {option: str(make(tmp_path / "made"))}
    direct = convert(model_dir=target, tp_size=tp_size, output_dir=tmp_path / "direct", **flags)
    base = convert(model_dir=target, tp_size=tp_size, output_dir=tmp_path / "base")
    convert(base_model_checkpoint_dir=base, **flags)
    for path in sorted(direct.iterdir()):
        if path.name != "manifest.json":
            assert (convert.output / path.name).read_bytes() == path.read_bytes()
    error = convert.fail(
        base_model_checkpoint_dir=convert.output, output_dir=tmp_path / "twice", **flags
    )
    method = option.split("_")[0].replace("drafter", "redrafter")
    assert error.message == f"{convert.output} already holds a {method} drafter"


def save(folder: Path, config: dict[str, Any] | None, *names: str) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if names:
        save_file({name: torch.zeros(2) for name in names}, folder / "model.safetensors")


def test_folders_that_hold_no_drafter_or_several(target: Path, tmp_path: Path) -> None:
    save(tmp_path / "unknown", {"hidden_act": "silu"}, "block.0.a.weight", "block.1.a.weight")
    save(tmp_path / "several", {"num_draft_layers": 1}, "fc.weight", "layers.0.x.weight")
    save(tmp_path / "empty", None)
    save(tmp_path / "notes", None)
    (tmp_path / "notes" / "README.md").touch()
    cases = {
        target: ("is a Hugging Face model folder, which drafts from an engine", "--draft-engine"),
        tmp_path / "unknown": (
            "no drafter that is known: its tensors are block.N.a.weight; the keys of its"
            " config.json hidden_act; its files config.json, model.safetensors",
            "the folder of an EAGLE drafter, fc.weight beside layers.N.* or midlayer.*",
        ),
        tmp_path / "several": (
            "shows 2 kinds of drafters: the folder of a ReDrafter drafter (config.json's"
            " num_draft_layers) and the folder of an EAGLE drafter (fc.weight)",
            "--drafter-model-dir or --eagle-model-dir",
        ),
        tmp_path / "notes": (
            "no drafter that is known: no tensors in it can be listed; its config.json is missing"
            " or has no keys; its files README.md",
            "the folder of an EAGLE drafter",
        ),
        tmp_path / "empty": ("is an empty folder, not a drafter's", "check the path"),
    }
    for folder, (fact, hint) in cases.items():
        flags = {"model_dir": str(target), "drafter_model_dir": str(folder)}
        with pytest.raises(SpecDecError) as caught:
            convert_model(ConvertSettings(**flags, output_dir=tmp_path / "out"))
        assert fact in caught.value.message
        assert hint in caught.value.hint
        assert not (tmp_path / "out").exists()


def test_options_of_another_method(target: Path, tmp_path: Path) -> None:
    drafter = make_medusa_heads(tmp_path, vocab=131)
    flags: dict[str, Any] = {"model_dir": str(target), "output_dir": tmp_path / "out"}
    flags["drafter_model_dir"] = str(drafter)
    with pytest.raises(UsageError, match="--redrafter-num-beams has no effect: .* of Medusa heads"):
        convert_model(ConvertSettings(**flags, redrafter_num_beams=3))
    with pytest.raises(
        UsageError, match="--drafter-model-dir and --eagle-model-dir are both given"
    ):
        convert_model(ConvertSettings(**flags, eagle_model_dir=str(drafter)))
    report = convert_model(ConvertSettings(**flags, num_medusa_heads=2, dry_run=True))
    assert report["config"]["num_medusa_heads"] == 2


def name_target(drafter: Path, *keys: str, name: str) -> None:
    """Let a drafter's config.json name its target, in an object within an object if told so."""
    config = json.loads((drafter / "config.json").read_text())
    place = config
    for key in keys[:-1]:
        place = place.setdefault(key, {})
    place[keys[-1]] = name
    (drafter / "config.json").write_text(json.dumps(config))


def train_for(drafter: Path, target: Path, name: str = "/elsewhere/pycode") -> None:
    """Put the manifest of a drafter that specdec-train has trained for a target."""
    from specdec.files.manifest import describe_file

    sources = [describe_file(target / n) for n in ("config.json", "model.safetensors")]
    data = [{"path": "/data/states.safetensors", "bytes": 9, "sha256": "0" * 64}]
    document = {"kind": "drafter", "settings": {"model_dir": name}, "sources": sources + data}
    (drafter / "manifest.json").write_text(json.dumps(document))


def convert_for(target: Path, drafter: Path, output: Path, **flags: Any) -> list[str]:
    """Convert and return the warnings, which are in the manifest as well."""
    settings = {"model_dir": str(target), "drafter_model_dir": str(drafter), "output_dir": output}
    report = convert_model(ConvertSettings(**settings | flags, force=True))
    warnings: list[str] = report["warnings"]
    if not report["dry_run"]:
        assert json.loads((output / "manifest.json").read_text())["warnings"] == warnings
    return warnings


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_drafter_of_another_base(
    dry_run: bool, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_llama(tmp_path, layers=LAYERS, vocab=131, seed=7, name="other")
    larger = make_llama(tmp_path, layers=LAYERS, vocab=131, intermediate=320, name="larger")
    drafter = make_drafter(tmp_path, vocab=131)
    out = tmp_path / "out"
    train_for(drafter, target)
    assert convert_for(target, drafter, out, dry_run=dry_run) == []
    (warning,) = convert_for(other, drafter, out, dry_run=dry_run)
    assert "was trained for another target: sha256 " in warning
    done = run_cli_here(
        "convert", "--model-dir", other, "--drafter-model-dir", drafter, "--output-dir", out,
        "--force", *(["--dry-run"] if dry_run else []),
    )  # fmt: skip
    assert warning in done.stderr
    assert (f"warning: {warning}" in done.stdout) == dry_run
    (warning,) = convert_for(larger, drafter, out, dry_run=dry_run)
    assert "its weights had " in warning
    train_for(drafter, target, name="somebody/larger-FP8")
    assert convert_for(larger, drafter, out, dry_run=dry_run) == [], "the same name, another form"
    if not dry_run:  # a checkpoint's manifest knows its model's hashes
        (drafter / "manifest.json").unlink()
        convert_model(ConvertSettings(model_dir=str(other), output_dir=tmp_path / "base"))
        train_for(drafter, target)
        flags: dict[str, Any] = {"base_model_checkpoint_dir": tmp_path / "base"}
        flags |= {"drafter_model_dir": str(drafter), "output_dir": out, "force": True}
        assert convert_model(ConvertSettings(**flags))["warnings"]
        train_for(drafter, other)
        assert not convert_model(ConvertSettings(**flags))["warnings"]


SAME = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    ("named", "called", "is_one"),
    [
        (SAME, "models/Llama-3.1-8B-Instruct", True),
        (SAME, "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic", True),
        (SAME, "/data/llama31", True),
        (SAME, "Llama-3.1-8B", False),
        (SAME, "Llama-3.2-8B-Instruct", False),
        ("Qwen/Qwen3-8B", "Qwen3-4B", False),
        ("/mnt/train/target", "target", True),
        ("lmsys/vicuna-7b-v1.3", "llama", False),
    ],
)
def test_names_of_one_model(named: str, called: str, is_one: bool) -> None:
    from specdec.files.origin import is_same

    assert is_same(named, called) == is_one


@pytest.mark.parametrize(
    "keys",
    [("base_model_name_or_path",), ("speculators_config", "verifier", "name_or_path"),
     ("target_model",), ("_name_or_path",)],
)  # fmt: skip
def test_a_drafter_that_names_its_target(
    keys: tuple[str, ...], target: Path, tmp_path: Path
) -> None:
    drafter = make_eagle_drafter(tmp_path, vocab=131)
    name_target(drafter, *keys, name="somebody/Llama-3.1-8B")
    (warning,) = convert_for(target, drafter, tmp_path / "out", dry_run=True)
    assert "names somebody/Llama-3.1-8B as its target, this one is called" in warning
    name_target(drafter, *keys, name="elsewhere/target")
    assert convert_for(target, drafter, tmp_path / "out", dry_run=True) == []
