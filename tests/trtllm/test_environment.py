"""The machine as TensorRT-LLM's engines see it, and what differs from where one was built."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from specdec.system.machine import Gpu, find_version, list_gpus, read_torch_cuda
from specdec.trtllm.environment import Environment, compare_environments, read_environment
from specdec.trtllm.facts import (
    LABELS,
    explain_unknown,
    find_facts,
    find_label,
    list_lines_with,
    load_facts,
)
from tests.trtllm.double import DRIVER, H100, install_double, write_script

A100 = Gpu(name="NVIDIA A100", compute_capability="8.0", memory_bytes=40 << 30)
H200 = Gpu(name="NVIDIA H200", compute_capability="9.0", memory_bytes=140 << 30)
HERE = Environment(
    tensorrt_llm="1.2.0", tensorrt="10.13.3", cuda="13.0", cuda_driver="13.0", gpus=(H100,)
)


def compare(present: Environment, num_ranks: int = 1, **recorded: Any) -> list[tuple[str, bool]]:
    built = HERE.to_json() | recorded
    stops, others = compare_environments(built, present, num_ranks=num_ranks)
    assert all(remedy for _, remedy in [*stops, *others])
    return [(fact, True) for fact, _ in stops] + [(fact, False) for fact, _ in others]


def test_same_machine_differs_in_nothing() -> None:
    assert compare(HERE) == []


@pytest.mark.parametrize(
    ("recorded", "fact", "stops"),
    [
        ({"tensorrt_llm": "1.1.0"}, "built with TensorRT-LLM 1.1.0, here is 1.2.0", True),
        ({"tensorrt": "10.4.0"}, "built with TensorRT 10.4.0, here is 10.13.3", True),
        ({"cuda": "12.9"}, "built under CUDA 12.9, here is 13.0", False),
        (
            {"gpus": [dataclasses.asdict(A100)]},
            "built for compute capability 8.0 (NVIDIA A100), this GPU has 9.0 (NVIDIA H100",
            True,
        ),
        ({"gpus": [dataclasses.asdict(H200)]}, "tuned on NVIDIA H200, here is NVIDIA H100", False),
    ],
)
def test_what_differs_is_said(recorded: dict[str, Any], fact: str, stops: bool) -> None:
    ((found, is_stop),) = compare(HERE, **recorded)
    assert fact in found
    assert is_stop is stops


def test_nothing_installed_no_gpu_and_too_few() -> None:
    facts = [fact for fact, _ in compare(Environment())]
    assert "which is not installed here" in facts[0]
    assert facts[1] == "no GPU is visible"
    assert compare(HERE, num_ranks=2)[0][0] == "the engine has 2 ranks, 1 GPUs are visible"


def test_engine_without_a_record_is_compared_by_what_is_known() -> None:
    assert compare_environments({"tensorrt_llm": "1.2.0"}, HERE) == ([], [])
    stops, others = compare_environments({"tensorrt_llm": "1.2.1"}, HERE)
    assert (len(stops), others) == (1, [])


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["a", "b", "c"]), ("", []), ("1", ["b"]), ("2,0", ["c", "a"]), ("0,-1,1", ["a"]),
        ("GPU-00000001", ["b"]), ("7", []),
    ],
)  # fmt: skip
def test_gpus_are_those_that_cuda_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    gpus = [dataclasses.replace(H100, name=name) for name in "abc"]
    environment = install_double(tmp_path / "double", "1.2", gpus=gpus)
    monkeypatch.setenv("PATH", environment["PATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found, driver = list_gpus()
    assert [gpu.name for gpu in found] == names
    assert driver == DRIVER
    assert all(gpu.memory_bytes == H100.memory_bytes for gpu in found)


@pytest.mark.parametrize(
    "body", ["echo 'No devices were found'", "exit 9", "echo a, b", "echo ',,,,,'"]
)
def test_strange_nvidia_smi_is_no_gpu_or_an_unknown_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    write_script(tmp_path / "nvidia-smi", f"#!/bin/sh\n{body}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus, _ = list_gpus()
    assert all(gpu.capability == (-1, -1) and gpu.memory_bytes == 0 for gpu in gpus)
    assert len(gpus) == (1 if "," * 5 in body else 0)


def test_environment_is_read_from_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_environment().tensorrt_llm is None
    install_double(tmp_path / "double", "0.14")
    monkeypatch.syspath_prepend(str(tmp_path / "double" / "site"))
    found = read_environment()
    assert (found.tensorrt_llm, found.tensorrt) == ("0.14.0", "10.4.0")


def test_torch_cuda_is_read_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert read_torch_cuda() == torch.version.cuda
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError\n")
    (tmp_path / "torch" / "version.py").write_text("cuda: str | None = '13.0'\n")
    import importlib.util

    real = importlib.util.find_spec
    spec = importlib.util.spec_from_file_location("torch", tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec if name == "torch" else real(name)
    )
    assert read_torch_cuda() == "13.0"


def test_versions() -> None:
    assert find_version("no-such-package", "numpy") is not None
    assert find_version("no-such-package") is None


# Facts


@pytest.mark.parametrize("label", LABELS)
def test_facts_are_whole(label: str) -> None:
    facts = load_facts(label)
    assert facts.label == label
    assert len(facts.flags) == {"1.2": 67, "0.14": 65}[label]
    assert facts.modes["none"] == 1
    assert ("eagle" in facts.modes) == (label == "1.2")
    assert facts.flags["speculative_decoding_mode"].choices == tuple(facts.modes)[1:]
    names = facts.list_flag_names()
    assert len(set(names)) == len(names)
    for flag in facts.flags.values():
        if flag.choices and flag.default is not None:
            assert flag.default in flag.choices, flag.name
    assert facts.flags["tokens_per_block"].default == {"1.2": 32, "0.14": 64}[label]
    assert "engine_dir" in facts.runner_from_dir
    assert "draft_tokens_list" in facts.runner_generate_kwargs


def test_releases_belong_to_lines() -> None:
    assert [find_label(v) for v in ("0.14.0", "1.0.0rc1", "1.2.0", "1.3.0rc9", "1.3.0rc20")] == [
        "0.14", "1.2", "1.2", "1.2", "1.2",
    ]  # fmt: skip
    for version in ("0.13.0", "0.15.0", "0.15.0rc1", "0.21.0", "unknown"):
        assert find_facts(version) is None
        assert "not recorded" in explain_unknown(version)[0]
    for version in ("1.3.0rc21", "1.3.0", "1.3.1.post1", "1.4.0rc1", "2.0.0"):
        assert find_facts(version) is None
        fact, remedy = explain_unknown(version)
        assert fact.endswith("1.3.0rc20 was the last release with the TensorRT backend")
        assert "specdec-export --to trtllm-pytorch" in remedy
        for built, said in (
            (None, fact),
            ("1.2.0", f"built with TensorRT-LLM 1.2.0, here is {version}"),
        ):
            ((found, remedy), *_), _ = compare_environments(
                {"tensorrt_llm": built}, Environment(tensorrt_llm=version)
            )
            assert said in found
            assert "build the engine again" not in remedy


def test_lines_with_a_flag() -> None:
    assert list_lines_with("enable_xqa") == ["0.14"]
    assert list_lines_with("dora_plugin") == ["1.2"]
    assert list_lines_with("max_decoder_seq_len") == ["1.2", "0.14"]
    assert list_lines_with("no_such_flag") == []
