"""Every golden case of the Llama path: the same bytes and the same configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.convert import plan
from tests.conftest import run_cli
from tests.convert.conftest import Converter, Source
from tests.convert.golden_models import (
    INEXPRESSIBLE,
    find_obstacle,
    read_cases,
    read_tensors,
    rewrite,
    summarize_rank,
)

CASES = read_cases()
EXPRESSIBLE = [case for case in CASES if find_obstacle(case) is None]
# Keys of 0.14 that 1.x does not take: see docs/convert.md.
ABSENT_IN_1X = {"share_embedding_table", "moe"}


def get_flags(case: dict[str, Any]) -> dict[str, Any]:
    """The settings of a case's options."""
    flags: dict[str, Any] = {"tp_size": case["tp_size"]}
    options = list(case["options"])
    while options:
        option = options.pop(0)
        if option in ("pe0", "pe1"):
            flags |= {"use_parallel_embedding": True, "embedding_sharding_dim": int(option[-1])}
        elif option == "--redrafter_no_greedy_search":
            flags["redrafter_no_greedy_search"] = True
        else:
            flags[option.removeprefix("--")] = int(options.pop(0))
    return flags


def check_output(case: dict[str, Any], folder: Path, *, version: str) -> None:
    """Compare every tensor and every key of config.json."""
    ranks = [summarize_rank(folder / f"rank{rank}.safetensors") for rank in range(case["tp_size"])]
    assert ranks == case["ranks"]
    assert not (folder / f"rank{case['tp_size']}.safetensors").exists()
    config = json.loads((folder / "config.json").read_text())
    expected = dict(case["config"])
    if version == "1.2":
        expected = {key: value for key, value in expected.items() if key not in ABSENT_IN_1X}
    assert config == expected


@pytest.mark.parametrize(
    "case",
    [c for c in EXPRESSIBLE if c["path"] != "redrafter1x_composed"],
    ids=lambda case: case["case"],
)
def test_conversion_from_hugging_face(
    case: dict[str, Any], source: Source, tmp_path: Path, convert: Converter
) -> None:
    flags = get_flags(case) | {"model_dir": source(case["model"]), "dtype": case["dtype"]}
    if case["drafter"]:
        flags["drafter_model_dir"] = source(case["drafter"])
    has_1x = case["dtype"] == "float16" and not case["drafter"]  # composed cases are the others
    for version in ("0.14", "1.2") if has_1x else ("0.14",):
        convert(output_dir=tmp_path / version, trtllm_version=version, **flags)
        check_output(case, tmp_path / version, version=version)


@pytest.mark.parametrize(
    "case",
    [c for c in EXPRESSIBLE if c["path"] == "redrafter1x_composed"],
    ids=lambda case: case["case"],
)
def test_drafter_added_to_a_checkpoint(
    case: dict[str, Any],
    source: Source,
    tmp_path: Path,
    convert: Converter,
    log: pytest.LogCaptureFixture,
) -> None:
    base, model, drafter = tmp_path / "base", source(case["model"]), source(case["drafter"])
    flags = get_flags(case)
    convert(model_dir=model, output_dir=base, dtype=case["base_dtype"], **flags)
    excluded = case.get("exclude_modules_before")
    if excluded is not None:
        config = json.loads((base / "config.json").read_text())
        config["quantization"]["exclude_modules"] = excluded
        (base / "config.json").write_text(json.dumps(config))
    is_mixed = case["base_dtype"] != case["dtype"]
    convert(
        base_model_checkpoint_dir=base,
        drafter_model_dir=drafter,
        dtype=case["dtype"] if is_mixed else "auto",
    )
    check_output(case, convert.output, version="1.2")
    assert ("need one dtype" in log.text) == is_mixed
    if not is_mixed and excluded is None:  # the other way in comes to the same
        direct = tmp_path / "direct"
        convert(
            model_dir=model, drafter_model_dir=drafter, output_dir=direct, dtype=case["dtype"],
            **flags,
        )  # fmt: skip
        check_output(case, direct, version="1.2")


@pytest.mark.parametrize("chunk_bytes", [1, 500])
@pytest.mark.parametrize(
    "name",
    [
        "llama_vocab131__unified__tp4__bf16",
        "llama_vocab131__unified__tp4__f16__pe0",
        "llama_gqa__legacy_hfmodel__tp4__f16__pe1",
        "llama_mqa+drafter_A_rnn_e96__redrafter014__tp4__f16",
    ],
)
def test_chunk_size_leaves_no_trace(
    name: str,
    chunk_bytes: int,
    source: Source,
    convert: Converter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real chunks are larger than any tensor here; small ones must give the same bytes."""
    case = next(case for case in CASES if case["case"] == name)
    monkeypatch.setattr(plan, "CHUNK_BYTES", chunk_bytes)
    drafter = source(case["drafter"]) if case["drafter"] else None
    convert(
        model_dir=source(case["model"]), drafter_model_dir=drafter, dtype=case["dtype"],
        trtllm_version="0.14", workers=3, **get_flags(case),
    )  # fmt: skip
    check_output(case, convert.output, version="0.14")


def test_all_cases_are_covered() -> None:
    """204 cases; eight need an option that we do not offer, for a stated reason."""
    left_out = {case["case"]: INEXPRESSIBLE[find_obstacle(case) or ""] for case in CASES
                if find_obstacle(case)}  # fmt: skip
    assert sorted(left_out) == [
        "llama_gqa__unified__tp1__f16__share",
        "llama_gqa__unified__tp2__f16__pe0_share",
        "llama_layers4__unified__tp1__f16__pp2",
        "llama_layers4__unified__tp2__f16__pp2",
        "llama_tied__unified__tp1__f16__share",
        "llama_tied__unified__tp2__f16__pe0_share",
        "llama_tied_withhead__unified__tp1__f16__share",
        "llama_tied_withhead__unified__tp2__f16__pe0_share",
    ]
    assert len(CASES) == 204
    assert len(EXPRESSIBLE) == 196


@pytest.mark.parametrize(
    "name",
    [
        "llama_gqa__legacy_hfmodel__tp4__f16__pe1",
        "llama_mha+drafter_A_rnn_e96__redrafter014__tp1__f16__beams4",
        "llama_mha+drafter_B_rnn_e96__redrafter014__tp2__f16",
    ],
)
def test_the_command_writes_the_same(name: str, source: Source, tmp_path: Path) -> None:
    case = next(case for case in CASES if case["case"] == name)
    words: list[object] = []
    for flag, value in get_flags(case).items():
        words += [f"--{flag}"] if value is True else [f"--{flag}", value]
    if case["drafter"]:
        words += ["--drafter_model_dir", source(case["drafter"])]
    done = run_cli(
        "convert", "--model-dir", source(case["model"]), "--output-dir", tmp_path / "out",
        "--dtype", case["dtype"], "--trtllm-version", "0.14", "--json", *words,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_output(case, tmp_path / "out", version="0.14")
    report = json.loads(done.stdout)
    sizes = {file["path"]: file["bytes"] for file in report["files"]}
    assert sizes == {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("option", ["share", "pe0_share"])
def test_a_shared_table_gives_the_head_when_a_drafter_is_added(
    option: str, source: Source, tmp_path: Path, convert: Converter
) -> None:
    """0.14 stores a tied model's table once; the head we write from it is the tied model's own."""
    flags: dict[str, Any] = {"tp_size": 1 if option == "share" else 2}
    if option == "pe0_share":
        flags |= {"use_parallel_embedding": True, "embedding_sharding_dim": 0}
    plain, shared = tmp_path / "plain", tmp_path / "shared"
    convert(
        model_dir=source("llama_tied"), output_dir=plain, dtype="float16", trtllm_version="0.14",
        **flags,
    )  # fmt: skip
    case = next(
        case for case in CASES
        if case["model"] == "llama_tied" and case["options"] == option.split("_")
    )  # fmt: skip
    shared.mkdir()
    (shared / "config.json").write_text(json.dumps(case["config"]))
    for rank in range(flags["tp_size"]):
        tensors = read_tensors(plain / f"rank{rank}.safetensors")
        del tensors["lm_head.weight"]
        rewrite(shared / f"rank{rank}.safetensors", tensors)
        assert summarize_rank(shared / f"rank{rank}.safetensors") == case["ranks"][rank]
    outputs = []
    for base in (plain, shared):
        output = tmp_path / f"{base.name}-out"
        convert(
            base_model_checkpoint_dir=base,
            drafter_model_dir=source("drafter_A_rnn_e96"),
            output_dir=output,
        )
        outputs.append([path.read_bytes() for path in sorted(output.glob("rank*"))])
    assert outputs[0] == outputs[1]
