"""The TensorRT-LLM backend against the real thing: build, run, and compare with the torch engine.

Run in NVIDIA's container, as docs/tensorrt-llm-run.md says. Weights are float32, so that two
implementations of greedy decoding agree to the token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.system.machine import is_importable, list_gpus
from tests.conftest import run_cli
from tests.trtllm.worlds import (
    EXTERNAL,
    MAX_BATCH,
    PAGED,
    WAYS,
    World,
    list_texts,
    make_checkpoint,
    make_prompts,
)

HAS_RUNTIME = is_importable("tensorrt_llm")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_RUNTIME, reason="TensorRT-LLM is not installed"),
    pytest.mark.skipif(HAS_RUNTIME and not list_gpus()[0], reason="no GPU is visible"),
]


class RealWorld(World):
    """The same models and engines, without a double."""

    def __init__(self, folder: Path) -> None:
        from specdec.system.machine import find_version
        from specdec.trtllm.facts import find_label

        self.make_models(folder, find_label(find_version("tensorrt-llm") or ""))

    def run_real(self, engine: Path, requests: list[dict[str, Any]], *flags: object) -> Any:
        """Run request lines in a process of their own, which frees the GPU again."""
        path = self.folder / "requests.jsonl"
        path.write_text("".join(json.dumps(request) + "\n" for request in requests))
        done = run_cli(
            "run", "--engine-dir", engine, "--tokenizer-dir", self.target, "--input-file", path,
            "--end-id", 127, "--json", *flags,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return RealWorld(tmp_path_factory.mktemp("world"))


def test_plain_and_redrafter_write_the_torch_engines_text(world: RealWorld) -> None:
    requests = make_prompts(4, 9, 23, 30)
    expected = world.run_real(world.torch_engine("plain", world.checkpoint("plain")), requests)
    plain = world.run_real(world.engine("plain", world.checkpoint("plain"), *PAGED), requests)
    assert list_texts(plain) == list_texts(expected)
    redrafter = world.run_real(world.engine("redrafter", world.redrafter()), requests)
    assert list_texts(redrafter) == list_texts(expected)
    steps = [output["stats"]["num_verify_steps"] for output in redrafter["outputs"]]
    assert all(step is None or 0 < step < 100 for step in steps)


@pytest.mark.parametrize("method", ["medusa", "eagle", "lookahead"])
def test_other_modes_write_the_torch_engines_text(world: RealWorld, method: str) -> None:
    if method == "eagle" and world.label == "0.14":
        pytest.skip("TensorRT-LLM 0.14 has no EAGLE")
    # More than a batch: lookahead of some releases is said to go wrong from the second call on.
    requests = make_prompts(*[4, 9, 23, 30] * MAX_BATCH)
    expected = world.run_real(world.torch_engine("plain", world.checkpoint("plain")), requests)
    engine = world.engine(f"{method}1", make_checkpoint(world, method), *WAYS[method].flags)
    assert list_texts(world.run_real(engine, requests)) == list_texts(expected)


def test_a_dynamic_tree_writes_the_torch_engines_text(world: RealWorld) -> None:
    if world.label == "0.14":
        pytest.skip("TensorRT-LLM 0.14 has no EAGLE")
    requests = make_prompts(4, 9, 23, 30)
    expected = world.run_real(world.torch_engine("plain", world.checkpoint("plain")), requests)
    engine = world.engine("eagle1", make_checkpoint(world, "eagle"))
    report = world.run_real(engine, requests, "--eagle-use-dynamic-tree")
    assert list_texts(report) == list_texts(expected)


@pytest.mark.skipif(HAS_RUNTIME and len(list_gpus()[0]) < 2, reason="one GPU is visible")
@pytest.mark.parametrize("method", ["plain", "redrafter"])
def test_two_ranks_write_the_torch_engines_text(world: RealWorld, method: str) -> None:
    requests = make_prompts(4, 9, 23, 30)
    expected = world.run_real(world.torch_engine("plain", world.checkpoint("plain")), requests)
    checkpoint = make_checkpoint(world, method, 2)
    report = world.run_real(
        world.engine(f"{method}2", checkpoint, *WAYS[method].flags, "--workers", 2), requests
    )
    assert list_texts(report) == list_texts(expected)
    assert report["stats"]["tp_size"] == 2


def test_the_end_token_is_the_last_one_of_the_output(world: RealWorld) -> None:
    engine = world.engine("plain", world.checkpoint("plain"), *PAGED)
    whole = world.run_real(engine, make_prompts(4))["outputs"][0]["output_ids"]
    report = world.run_real(engine, make_prompts(4), "--end-id", whole[7])
    ids = report["outputs"][0]["output_ids"]
    assert ids == whole[: whole.index(whole[7]) + 1]
    assert report["outputs"][0]["finish_reason"] == "eos"


def test_draft_target_writes_the_targets_text(world: RealWorld) -> None:
    requests = make_prompts(4, 9, 23, max_output_len=30)
    target = world.engine("target", world.checkpoint("plain"), *EXTERNAL)
    draft = world.engine("draft", world.draft(), *PAGED)
    expected = world.run_real(world.torch_engine("plain", world.checkpoint("plain")), requests)
    report = world.run_real(
        target, requests, "--draft-engine-dir", draft, "--draft-len", 4,
        "--kv-cache-free-gpu-memory-fraction", 0.2,
    )  # fmt: skip
    assert list_texts(report) == list_texts(expected)
    assert 0 < sum(output["stats"]["num_accepted"] for output in report["outputs"])
    alone = world.run_real(target, requests, "--no-speculation")
    assert list_texts(alone) == list_texts(expected)


def test_streaming_ends_with_the_same_text(world: RealWorld) -> None:
    engine = world.engine("plain", world.checkpoint("plain"), *PAGED)
    requests = make_prompts(4, 9, max_output_len=20)
    expected = world.run_real(engine, requests)
    done = run_cli(
        "run", "--engine-dir", engine, "--tokenizer-dir", world.target, "--input-file",
        world.folder / "requests.jsonl", "--end-id", 127, "--streaming",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for output in expected["outputs"]:
        assert f'Beam 0]: "{output["output_text"]}"' in done.stdout
