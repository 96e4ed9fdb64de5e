"""Absurd config.json files of engines: run as they say, or refused; nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.decode.engine import TorchEngine
from specdec.decode.requests import Request
from specdec.doctor.engine import check_engine
from specdec.engine.layout import read_engine_config
from specdec.engine.weight_files import find_engine_problems
from specdec.errors import SpecDecError
from specdec.files.reading import read_json, write_json
from specdec.trtllm.environment import Environment
from tests.conftest import make_drafter, make_llama
from tests.convert.fuzzing import attempt, fuzz
from tests.convert.test_fuzz_configs import VALUES, change
from tests.doctor.test_doctor import MACHINE, put
from tests.engines import make_engine

MAX_POSITIONS = 10**5  # of engines that are also loaded here
FLAGS: dict[str, tuple[object, ...]] = {
    "redrafter": (), "plain": (),
    "external": ("--speculative-decoding-mode", "draft_tokens_external", "--max-draft-len", 5),
}  # fmt: skip
BUILD = {
    "max_batch_size": 1, "max_input_len": 1, "max_seq_len": 2, "max_num_tokens": 1,
    "max_draft_len": 0, "max_beam_width": 1,
}  # fmt: skip


@pytest.fixture(params=FLAGS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    target = make_llama(tmp_path)
    drafter = make_drafter(tmp_path, exit_dim=96) if request.param == "redrafter" else None
    return make_engine(
        tmp_path, target, drafter, beams=2, length=3, optimize="none", build=FLAGS[request.param]
    )


def read(engine: Path) -> SpecDecError | None:
    """Read an engine as run and doctor do, and run it where it can be."""
    config, error = attempt(lambda: read_engine_config(engine))
    if config is None:
        return error
    problems, _ = attempt(lambda: find_engine_problems(engine, config))
    found, _ = attempt(lambda: check_engine(engine, put(MACHINE, Environment())))
    assert found is not None
    assert found["can_run"] == (not problems)
    if problems or config.build.max_seq_len > MAX_POSITIONS:
        return None
    loaded, error = attempt(lambda: TorchEngine(engine, device="cpu"))
    if loaded is None:
        return error
    request = Request(index=0, input_ids=[5, 9], max_output_len=2, end_ids=frozenset())
    attempt(lambda: loaded.generate([request]))
    return None


def test_configs(engine: Path) -> None:
    good = read_json(engine / "config.json")
    assert read(engine) is None

    @fuzz(80)
    @given(change(good))
    def check(config: dict[str, Any]) -> None:
        (engine / "config.json").write_text(json.dumps(config))
        read(engine)

    check()


def test_limits(engine: Path) -> None:
    good = read_json(engine / "config.json")

    @fuzz(80)
    @given(st.sampled_from(sorted(good["build_config"])), VALUES)
    def check(name: str, value: Any) -> None:
        build = good["build_config"] | {name: value}
        (engine / "config.json").write_text(json.dumps(good | {"build_config": build}))
        error = read(engine)
        if type(value) is not int and value != good["build_config"][name]:
            assert error is not None
            if name != "speculative_decoding_mode" or value is not None:
                assert f"build_config.{name} is " in error.message

    check()


@pytest.mark.parametrize("value", ["4", -1, None, [4], 1.0, True, 2**70])
def test_each_limit(tmp_path: Path, value: Any) -> None:
    engine = make_engine(tmp_path, make_llama(tmp_path), optimize="none")
    good = read_json(engine / "config.json")
    for name in BUILD:
        build = good["build_config"] | {name: value}
        write_json(engine / "config.json", good | {"build_config": build})
        with pytest.raises(SpecDecError, match=rf"config.json: build_config\.{name} is "):
            TorchEngine(engine)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("place", "value", "fact"),
    [
        ("pretrained_config", [], "pretrained_config is [], which"),
        ("pretrained_config", None, "pretrained_config is None, which"),
        ("build_config", [1], "build_config is [1], which"),
        ("torch_config", "none", "torch_config is 'none', which"),
        ("version", 3, "version is 3, which"),
        ("torch_config.prepack", "yes", "torch_config.prepack is 'yes', which"),
        ("torch_config.kernels", "g++", "torch_config.kernels is 'g++', which"),
        ("torch_config.kernels", {"cpu": 1}, "torch_config.kernels is {'cpu': 1}, which"),
        ("torch_config.quantization", ["int8"], "torch_config.quantization is ['int8'], which"),
        ("torch_config.build_id", None, "torch_config.build_id is None, which"),
        ("build_config.speculative_decoding_mode", "medusa", "mode is 'medusa', which"),
        ("build_config.speculative_decoding_mode", [], "mode is [], which"),
        ("build_config.gather", 1, "build_config.gather is 1, which"),
        ("build_config.max_seq_len", 513, "max_seq_len 513, more than the model's 512"),
        ("build_config.max_input_len", 512, "max_input_len 512, max_seq_len 512"),
        ("build_config.max_draft_len", 3, "max_draft_len 3, which is not the drafter's"),
        ("build_config.max_beam_width", 2, "max_beam_width 2"),
    ],
)
def test_each_field(tmp_path: Path, place: str, value: Any, fact: str) -> None:
    engine = make_engine(tmp_path, make_llama(tmp_path), optimize="none")
    config = read_json(engine / "config.json")
    at = config
    *path, key = place.split(".")
    for name in path:
        at = at[name]
    at[key] = value
    write_json(engine / "config.json", config)
    with pytest.raises(SpecDecError) as caught:
        TorchEngine(engine)
    assert fact in caught.value.message
