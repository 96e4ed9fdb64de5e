"""Settings: defaults, recipes and typed flags, and the messages about wrong ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specdec.command.settings import read_recipe, require, resolve_settings, to_plain
from specdec.command.stages import STAGES, load_command
from specdec.errors import UsageError, find_nearest, suggest
from specdec.options import check_value, get_flags, name_flag, setting
from specdec.train.data.settings import DataSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToySettings:
    output_dir: Path | None = setting(help="where")
    max_len: int = setting(10, help="length", minimum=1)
    rate: float = setting(0.5, help="rate")
    mode: str = setting("draft_tokens", help="mode", choices=("draft_tokens", "eagle"))
    use_fmha: bool | None = setting(help="plugin")
    verbose: bool = setting(False, help="talk")
    texts: list[str] = setting([], help="texts")


def resolve(recipe: Path | None = None, **typed: Any) -> ToySettings:
    return resolve_settings(ToySettings, "run", typed, recipe)


def write_recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_typed_flag_beats_recipe_beats_default(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "run: {max_len: 20, rate: 0.25}\nbuild: {anything: 1}\n")
    settings = resolve(recipe, max_len=30)
    assert (settings.max_len, settings.rate, settings.mode) == (30, 0.25, "draft_tokens")


def test_list_default_is_not_shared() -> None:
    resolve().texts.append("x")
    assert resolve().texts == []


def test_recipe_values_take_their_types(tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        "run:\n  output-dir: out/x\n  max_len: '7'\n  rate: 1e-4\n  use_fmha: disable\n"
        "  verbose: true\n  texts: one\n  mode: draft-tokens\n",
    )
    settings = resolve(recipe)
    assert settings == ToySettings(
        output_dir=Path("out/x"), max_len=7, rate=1e-4, use_fmha=False, verbose=True,
        texts=["one"], mode="draft_tokens",
    )  # fmt: skip
    assert to_plain(settings)["output_dir"] == "out/x"


def test_a_recipe_may_name_the_home_folder(tmp_path: Path) -> None:
    settings = resolve(write_recipe(tmp_path, "run: {output_dir: ~/x, texts: [~/x]}"))
    assert settings.output_dir == Path.home() / "x"
    assert settings.texts == ["~/x"]


@pytest.mark.parametrize("empty", ["", "run:\n", "run: {}\n", "run:\n  max_len:\n"])
def test_empty_recipe_leaves_defaults(tmp_path: Path, empty: str) -> None:
    assert resolve(write_recipe(tmp_path, empty)) == ToySettings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {max_lne: 3}", "unknown key 'max_lne' in section run (did you mean max_len?)"),
        ("runn: {max_len: 3}", "unknown section 'runn' (did you mean run?)"),
        ("1: {max_len: 3}", "unknown section 1"),
        ("[1, 2]", "holds a list, not sections"),
        ("run: 3", "section run is not a mapping"),
        ("run: []", "section run is not a mapping"),
        ("run: {max_len: 3, max-len: 4}", "max_len is given twice"),
        ("run: {max_len: [1]}", "max_len: expected a whole number, got [1]"),
        ("run: {max_len: 2.5}", "max_len: expected a whole number, got 2.5"),
        ("run: {max_len: true}", "max_len: expected a whole number, got True"),
        ("run: {max_len: 0}", "max_len: expected at least 1, got 0"),
        ("run: {rate: fast}", "rate: expected a number, got 'fast'"),
        ("run: {verbose: 1}", "verbose: expected true or false, got 1"),
        ("run: {use_fmha: maybe}", "use_fmha: expected enable or disable, got 'maybe'"),
        ("run: {texts: {a: 1}}", "texts: expected a text or a list of texts"),
        ("run: {texts: [true]}", "texts: expected a text or a list of texts"),
        ("run: {output_dir: ''}", "output_dir: expected a path, got ''"),
        ("run: {mode: eagel}", "'eagel' is not one of draft_tokens, eagle (did you mean eagle?)"),
        ("run: {mode: [eagle]}", "mode: expected a text"),
        ("run: {max_len: 3", "is not readable"),
        ("run: {max_len: 2020-13-45}", "is not readable"),
        ("run: !!python/object:os.system {}", "is not readable"),
        ("run: {texts: " + "[" * 900, "is not readable"),
        ("run:\n  max_len: 3\n  max_len: 4", "max_len is there twice, again on line 3"),
        ("run: {max_len: 3}\nbuild: {}\nrun: {}", "run is there twice, again on line 3"),
    ],
)
def test_wrong_recipe_is_a_usage_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(write_recipe(tmp_path, text))
    assert message in caught.value.message
    assert caught.value.hint


def test_unreadable_recipes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_recipe(tmp_path / "absent.yaml", "run")
    with pytest.raises(UsageError, match="not readable"):
        read_recipe(tmp_path, "run")
    (tmp_path / "latin.yaml").write_bytes(b"run: {mode: \xe9}")
    with pytest.raises(UsageError, match="not readable"):
        read_recipe(tmp_path / "latin.yaml", "run")


@pytest.mark.parametrize("value", [10**400, "nan", float("nan"), "inf", "-1e400"])
def test_numbers_that_are_none(value: Any) -> None:
    with pytest.raises(UsageError, match="rate: expected a (finite )?number"):
        check_value("rate", value, get_flags(ToySettings)["rate"][0])


def test_require_names_every_missing_flag() -> None:
    require(ToySettings(texts=["a"]), "texts", "max_len")
    with pytest.raises(UsageError, match="missing --output-dir, --texts$"):
        require(ToySettings(), "output_dir", "texts", "max_len")


def test_a_required_field_need_not_be_named() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Strict(ToySettings):
        input_dir: Path = setting(help="from", required=True)

    require(Strict(input_dir=Path("a")))
    with pytest.raises(UsageError, match="missing --input-dir$"):
        require(Strict())
    with pytest.raises(UsageError, match="missing --output-dir, --input-dir$"):
        require(Strict(), "output_dir")


def list_required() -> list[tuple[str, str]]:
    """Each command with the fields that its settings declare as required."""
    kinds = {name: load_command(name).settings_class for name in STAGES}
    kinds["train data"] = DataSettings
    return [
        (name, field)
        for name, kind in kinds.items()
        for field, (flag, _) in get_flags(kind).items()
        if flag.required
    ]


@pytest.mark.parametrize(("command", "field"), list_required())
def test_every_command_checks_what_it_declares_as_required(command: str, field: str) -> None:
    """Its types say that the field is never None."""
    name, *words = command.split()
    caught = CliRunner().invoke(load_command(name), words)
    assert isinstance(caught.exception, UsageError)
    assert name_flag(field) in caught.exception.message.removeprefix("missing ").split(", ")


def test_suggest_only_near_names() -> None:
    assert suggest("redraftr", ["medusa", "redrafter"]) == " (did you mean redrafter?)"
    assert suggest("zzz", ["medusa", "redrafter"]) == ""


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("nosuch", None), ("rnu", "run"), ("benhc", "bench"), ("covnert", "convert"),
        ("generat", "generate"), ("serv", "serve"), ("trian", "train"), ("x", None), ("", None),
        ("quantize", None), ("drafter_dir", "drafter_model_dir"), ("draft_length", "draft_len"),
        ("max-seq", "max_seq_len"), ("dir", None), ("frobnicate", None), ("out", None),
    ],
)  # fmt: skip
def test_only_a_near_miss_is_meant(name: str, meant: str | None) -> None:
    known = [*STAGES, "drafter_model_dir", "draft_len", "max_seq_len", "model_dir", "medusa"]
    assert find_nearest(name, known) == meant


@pytest.mark.parametrize(
    ("stage", "name", "value", "most"),
    [
        ("build", "max_batch_size", 2**62, "65536"),
        ("build", "max_num_tokens", 2**62, "2147483647"),
        ("train", "learning_rate", 1e300, "1000"),
    ],
)
def test_numbers_beyond_what_later_steps_take(
    stage: str, name: str, value: float, most: str
) -> None:
    kind = load_command(stage).settings_class
    with pytest.raises(UsageError, match=f"{name_flag(name)}: expected at most {most}, got"):
        resolve_settings(kind, stage, {name: value}, None)


def test_a_circle_of_links(tmp_path: Path) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    kind = load_command("run").settings_class
    for name in ("engine_dir", "output_file", "input_file"):
        for path in (circle, circle / "below"):
            with pytest.raises(UsageError, match=f"{name_flag(name)}: .*circle of links"):
                resolve_settings(kind, "run", {name: str(path)}, None)
