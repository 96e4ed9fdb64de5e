"""Medusa's sources: every layout that is read, and what is wrong with one is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.convert.checkpoints import set_config
from tests.convert.conftest import Converter, Source
from tests.convert.golden_models import read_ranks, read_tensors, rewrite

Edit = Callable[[dict[str, Any]], Any]
TARGET, HEADS = "llama_mha", "medusa_2x1"
FILE = "medusa_lm_head.safetensors"


@pytest.fixture
def copy(source: Source, tmp_path: Path) -> Callable[..., str]:
    """Copy the heads, change their config or tensors, and return the copy."""

    def make(config: dict[str, Any] | None = None, edit: Edit | None = None) -> str:
        folder = tmp_path / "heads"
        shutil.copytree(source(HEADS), folder)
        values = json.loads((folder / "config.json").read_text()) | (config or {})
        values = {key: value for key, value in values.items() if value != "ABSENT"}
        (folder / "config.json").write_text(json.dumps(values))
        if edit is not None:
            tensors = read_tensors(folder / FILE)
            edit(tensors)
            rewrite(folder / FILE, tensors)
        return str(folder)

    return make


Copy = Callable[..., str]


def rename(change: Callable[[str], str]) -> Edit:
    def edit(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[change(name)] = tensors.pop(name)

    return edit


# ---- What is read.


@pytest.fixture
def expected(source: Source, convert: Converter, tmp_path: Path) -> list[dict[str, Any]]:
    """The ranks as converted from the plain layout."""
    return read_ranks(
        convert(
            model_dir=source(TARGET), medusa_model_dir=str(source(HEADS)), tp_size=2,
            output_dir=tmp_path / "expected",
        )
    )  # fmt: skip


@pytest.mark.parametrize("filename", ["medusa_lm_head.pt", "model.safetensors", "model.pt"])
def test_other_files(
    filename: str, expected: Any, source: Source, copy: Copy, convert: Converter
) -> None:
    """FasterDecoding's pickle of tensors, and the names that Hugging Face folders have."""
    folder = Path(copy())
    if filename.endswith(".pt"):
        tensors = {
            name: torch.from_numpy(array.view(np.float16).copy())
            for name, array in read_tensors(folder / FILE).items()
        }
        torch.save(tensors, folder / filename)
        (folder / FILE).unlink()
    else:
        (folder / FILE).rename(folder / filename)
    convert(model_dir=source(TARGET), medusa_model_dir=str(folder), tp_size=2)
    assert read_ranks(convert.output) == expected


@pytest.mark.parametrize("prefix", ["medusa_heads.", "medusa_head."])
def test_heads_saved_with_their_target(
    prefix: str, expected: Any, source: Source, convert: Converter, tmp_path: Path
) -> None:
    """One folder holds both, here in one file; either can be taken alone."""
    both = tmp_path / "both"
    both.mkdir()
    config = json.loads((source(TARGET) / "config.json").read_text())
    counts = {"num_medusa_heads": 2, "num_medusa_layers": 1}
    if prefix == "medusa_heads.":
        config |= {"medusa": counts}
    else:
        config |= {"medusa_num_heads": 2, "medusa_num_layers": 1}
    (both / "config.json").write_text(json.dumps(config))
    tensors = {
        name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        for path in source(TARGET).glob("*.safetensors")
        for name, array in read_tensors(path).items()
    }
    tensors |= {
        prefix + name: torch.from_numpy(array.view(np.float16).copy())
        for name, array in read_tensors(source(HEADS) / FILE).items()
    }
    from safetensors.torch import save_file

    save_file(tensors, both / "model.safetensors")
    convert(model_dir=both, medusa_model_dir=str(both), tp_size=2)
    assert read_ranks(convert.output) == expected
    convert(model_dir=source(TARGET), medusa_model_dir=str(both), tp_size=2, force=True)
    assert read_ranks(convert.output) == expected
    other = convert.output.parent / "other"
    error = convert.fail(model_dir=both, output_dir=other)
    assert f"{both} holds a drafter besides the target: {prefix}0.0.linear" in error.message
    assert "--medusa-model-dir" in error.hint


def test_the_heads_of_the_target_may_be_left_for_others(
    expected: Any, source: Source, convert: Converter, tmp_path: Path,
    log: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    both = tmp_path / "both"
    shutil.copytree(source(TARGET), both)
    (path,) = both.glob("*.safetensors")
    tensors = read_tensors(path)
    names = {
        name: torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for name, a in tensors.items()
    }
    names["medusa_heads.0.0.linear.bias"] = torch.zeros(64)
    from safetensors.torch import save_file

    save_file(names, path)
    convert(model_dir=both, medusa_model_dir=str(source(HEADS)), tp_size=2)
    assert read_ranks(convert.output) == expected
    assert f"the drafter saved with {both} is left out" in log.text


def test_fewer_heads_than_trained_if_asked(
    expected: Any, source: Source, convert: Converter
) -> None:
    convert(
        model_dir=source(TARGET), medusa_model_dir=str(source(HEADS)), num_medusa_heads=1,
        tp_size=2, max_medusa_token_len=12,
    )  # fmt: skip
    assert read_ranks(convert.output) == [
        {name: info for name, info in rank.items() if not name.startswith("medusa_heads.1.")}
        for rank in expected
    ]
    assert convert.report["config"]["num_medusa_heads"] == 1
    assert convert.report["config"]["max_draft_len"] == 12


def test_more_heads_than_the_config_tells_if_asked(
    expected: Any, source: Source, copy: Copy, convert: Converter
) -> None:
    """Published heads exist whose config.json tells of fewer than there are."""
    heads = copy({"medusa_num_heads": 1})
    flags: dict[str, Any] = {"model_dir": source(TARGET), "medusa_model_dir": heads, "tp_size": 2}
    error = convert.fail(**flags)
    assert "config.json says 1 Medusa heads, the folder holds 2" in error.message
    assert "--num-medusa-heads" in error.hint
    convert(**flags, num_medusa_heads=2)
    assert read_ranks(convert.output) == expected


def test_numbers_from_the_flags_where_the_config_has_none(
    expected: Any, source: Source, copy: Copy, convert: Converter
) -> None:
    heads = copy({"medusa_num_heads": "ABSENT", "medusa_num_layers": None})
    flags: dict[str, Any] = {"model_dir": source(TARGET), "medusa_model_dir": heads, "tp_size": 2}
    assert "names no medusa_num_layers" in convert.fail(**flags).message
    convert(**flags, num_medusa_layers=1)
    assert read_ranks(convert.output) == expected


# ---- What is wrong.


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        ({}, {"num_medusa_heads": 3}, "--num-medusa-heads is 3, the folder holds 2"),
        ({}, {"num_medusa_layers": 2}, "--num-medusa-layers is 2, the heads have 1"),
        ({"medusa_num_heads": 3}, {}, "lacks 3 tensors: 2.0.linear.weight, 2.0.linear.bias"),
        ({"medusa_num_layers": 2}, {}, "lacks 6 tensors"),
        ({"medusa_num_layers": 0}, {}, "lacks 2 tensors: 0.0.weight, 1.0.weight"),
        ({"medusa_num_heads": 10**9}, {}, "is said to have 1000000000 layers, but holds 6"),
        ({"medusa_num_heads": "2"}, {}, "medusa_num_heads is '2', not a whole number"),
        ({"medusa_num_heads": 0}, {}, "medusa_num_heads is 0, not a whole number of at least 1"),
        ({"medusa": {"num_medusa_heads": 3}}, {}, "says medusa_num_heads 2 and num_medusa_heads 3"),
        ({"medusa": 4}, {}, "medusa is 4, not an object"),
    ],
)
def test_numbers_at_odds(
    config: dict[str, Any], flags: dict[str, Any], message: str, source: Source, copy: Copy,
    convert: Converter,
) -> None:  # fmt: skip
    error = convert.fail(model_dir=source(TARGET), medusa_model_dir=copy(config), **flags)
    assert message in error.message


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("1.0.linear.bias"), "lacks 1 tensor: 1.0.linear.bias"),
        (lambda t: t.pop("0.1.weight"), "lacks 1 tensor: 0.1.weight"),
        (lambda t: t.update({"stray": np.ones(1, np.float16)}), "would not use: stray"),
        (lambda t: t.update({"0.1.bias": np.ones(128, np.float16)}), "would not use: 0.1.bias"),
        (
            lambda t: t.update({"1.0.linear.weight": np.ones((64, 32), np.float16)}),
            "1.0.linear.weight has shape [64, 32], not [64, 64]",
        ),
        (
            lambda t: t.update({"0.1.weight": np.ones((131, 64), np.float16)}),
            "the Medusa heads' vocab_size is 131, the target's 128",
        ),
        (
            lambda t: t.update({"0.1.weight": np.ones((128, 32), np.float16)}),
            "the Medusa heads' hidden_size is 32, the target's 64",
        ),
        (
            lambda t: t.update({"medusa_heads.0.1.weight": t["0.1.weight"]}),
            "under 2 names: 0.*, medusa_heads.0.*",
        ),
        (rename(lambda name: "head." + name), "holds no tensor of a Medusa head, 0.* or"),
        (
            lambda t: t.update({"999999999.0.linear.bias": np.ones(64, np.float16)}),
            "config.json says 2 Medusa heads, the folder holds 1000000000",
        ),
    ],
)
def test_tensors_at_odds(
    edit: Edit, message: str, source: Source, copy: Copy, convert: Converter
) -> None:
    error = convert.fail(model_dir=source(TARGET), medusa_model_dir=copy(edit=edit))
    assert message in error.message


def test_tp_size_that_does_not_divide(convert: Converter, tmp_path: Path) -> None:
    """Three heads of 24 over three ranks, but a hidden size of 64."""
    from tests.conftest import make_llama, make_medusa_heads

    target = make_llama(tmp_path, heads=4, kv_heads=4, head_dim=18, intermediate=96)
    # Not so from the beginning, which transformers 5 refuses.
    set_config(target, num_attention_heads=3, num_key_value_heads=3, head_dim=24)
    heads = make_medusa_heads(tmp_path)
    error = convert.fail(model_dir=target, medusa_model_dir=str(heads), tp_size=3)
    assert "the Medusa heads' hidden_size=64 does not split over tp_size=3" in error.message
