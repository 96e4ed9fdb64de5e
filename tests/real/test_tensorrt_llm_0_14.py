"""TensorRT-LLM 0.14's own parser, configuration classes, weight loading and runner, on our output.

Not part of the default suite: SPECDEC_TRTLLM_SOURCE names a folder with its source tree (commit
8681b3a4 is the one that the facts were read from). What needs a GPU is stubs of our own; the tokens
are the torch engine's, handed to the real runner by the runtime double's executor.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from specdec.files.reading import read_json
from specdec.trtllm.facts import load_facts
from tests.conftest import run_cli
from tests.engines import call
from tests.families import CLASSES, NOT_IN_014, make_family_model
from tests.real.programs import SOURCE_NAME, install_programs, read_version
from tests.trtllm.checkpoints import CheckpointStore, quantize_checkpoint
from tests.trtllm.worlds import (
    BUILD,
    MAX_BATCH,
    PAGED,
    WAYS,
    World,
    install_mpirun,
    list_texts,
    make_checkpoint,
    make_prompts,
)

if SOURCE_NAME not in os.environ:
    pytest.skip(
        f"{SOURCE_NAME} does not name a source tree of TensorRT-LLM 0.14", allow_module_level=True
    )
SOURCE = Path(os.environ[SOURCE_NAME])
REQUESTS = make_prompts(4, 17, max_output_len=14)
METHODS = [method for method in WAYS if method != "eagle"]  # 0.14 has none
LOGITS = "--gather-generation-logits"
# What the double does not have, since nothing reads it: whole sections, and plugins of weights.
UNREAD = re.compile(
    r"version|build_config\.(auto_parallel_config.*|lora_config\..*"
    r"|plugin_config\.(identity|.*quant.*|manage_weights).*)"
)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, World]:
    """A world with the double's programs, and one with the real ones; same models."""
    assert read_version(SOURCE).startswith("0.14"), "the stubs and the facts are of 0.14"
    found = []
    for name in ("double", "real"):
        folder = tmp_path_factory.mktemp(name)
        world = World(folder, "0.14")
        install_mpirun(world)
        found.append(world)
    install_programs(found[1].folder / "double", SOURCE)
    return found[0], found[1]


def run(world: World, *words: object, stdin: str | None = None) -> Any:
    """Run one of our commands with --json where a world's TensorRT-LLM is."""
    done = run_cli(*words, "--json", env=world.environment, stdin=stdin, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def build(world: World, checkpoint: Path, name: str, *flags: object) -> Path:
    engine = world.folder / name
    if not engine.exists():
        run(world, "build", "--backend", "tensorrt-llm", "--checkpoint-dir", checkpoint,
            "--output-dir", engine, *BUILD, *flags)  # fmt: skip
        log = (engine / "build.log").read_text()
        assert "Provided but not expected" not in log
        assert "Traceback" not in log
    return engine


def flatten(document: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict) and value:
            found |= flatten(value, f"{prefix}{key}.")
        elif not UNREAD.fullmatch(prefix + key):
            found[prefix + key] = value
    return found


def complete(world: World, engine: Path, *flags: object, requests: Any = REQUESTS) -> Any:
    stdin = "".join(json.dumps(request) + "\n" for request in requests)
    return run(
        world, "run", "--engine-dir", engine, "--input-file", "-", "--end-id", 127, *flags,
        stdin=stdin,
    )  # fmt: skip


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_engines_record_what_the_doubles_do(
    worlds: tuple[World, World], method: str, tp_size: int
) -> None:
    configs = []
    for world in worlds:
        checkpoint = make_checkpoint(world, method, tp_size)
        engine = build(world, checkpoint, f"{method}{tp_size}", *WAYS[method].flags)
        configs.append(flatten(read_json(engine / "config.json")))
    double, real = configs
    # The classes of configurations add their defaults, which the checkpoint leaves out.
    added = {key for key in real if key not in double}
    assert {key for key in added if not key.startswith("pretrained_config.")} == set()
    assert double == {key: value for key, value in real.items() if key not in added}
    assert worlds[1].log.exists() is False, "nothing of the runtime was called"


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_the_runner_writes_the_targets_text(
    worlds: tuple[World, World], method: str, tp_size: int
) -> None:
    double, real = worlds
    if method == "draft_target" and tp_size == 2:
        pytest.skip("0.14 has no orchestrator mode")
    engine = build(
        real, make_checkpoint(real, method, tp_size), f"{method}{tp_size}", *WAYS[method].flags
    )
    flags: list[object] = []
    if method == "draft_target":
        flags = ["--draft-engine-dir", build(real, real.draft(), "draft", *PAGED),
                 "--draft-target-model-config", "[4,[0],[1],False]"]  # fmt: skip
    report = complete(real, engine, *flags)
    plain = real.torch_engine("plain", real.checkpoint("plain"))
    assert list_texts(report) == list_texts(complete(real, plain))
    stats = report["stats"]
    assert (stats["method"], stats["tp_size"]) == (method, tp_size)
    # 0.14's results do not count steps.
    counts = method in ("plain", "draft_target")
    assert (stats["acceptance_length"] is not None) == counts


def test_logits_of_the_draft_reach_the_target(worlds: tuple[World, World], tmp_path: Path) -> None:
    _, real = worlds
    target = build(
        real, real.checkpoint("plain"), "target-logits", *WAYS["draft_target"].flags, LOGITS
    )
    draft = build(real, real.draft(), "draft-logits", *PAGED, LOGITS)
    report = complete(
        real, target, "--draft-engine-dir", draft, "--draft-target-model-config",
        "[4,[0],[1],True]", "--output-generation-logits", "--output-file", tmp_path / "out.json",
    )  # fmt: skip
    plain = real.torch_engine("plain", real.checkpoint("plain"))
    assert list_texts(report) == list_texts(complete(real, plain))


def test_stop_words_streaming_and_several_calls(worlds: tuple[World, World]) -> None:
    _, real = worlds
    engine = build(real, real.checkpoint("plain"), "plain1", *PAGED)
    plain = real.torch_engine("plain", real.checkpoint("plain"))
    requests = make_prompts(*range(3, 3 + MAX_BATCH + 2), max_output_len=9)
    expected = complete(real, plain, requests=requests)
    end_id = expected["outputs"][0]["output_ids"][4]
    for flags in ([], ["--end-id", end_id]):
        found, wanted = (complete(real, folder, *flags, requests=requests)
                         for folder in (engine, plain))  # fmt: skip
        assert list_texts(found) == list_texts(wanted)
    done = run_cli(
        "run", "--engine-dir", engine, "--input-file", "-", "--streaming", "--tokenizer-dir",
        real.target, env=real.environment, stdin=json.dumps(REQUESTS[0]) + "\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "TensorRT-LLM version: " in done.stderr
    assert "TensorRT" not in done.stdout


@pytest.mark.parametrize("family", [name for name in CLASSES if name not in NOT_IN_014])
def test_weights_of_every_family_load(
    worlds: tuple[World, World], tmp_path: Path, family: str
) -> None:
    _, real = worlds
    source = make_family_model(tmp_path, family, kv_heads=8)
    checkpoint = tmp_path / "ckpt"
    call("convert", "--model-dir", source, "--output-dir", checkpoint, "--trtllm-version", "0.14",
         "--tp-size", 1)  # fmt: skip
    engine = tmp_path / "engine"
    done = run_cli(
        "build", "--backend", "tensorrt-llm", "--checkpoint-dir", checkpoint, "--output-dir",
        engine, "--max-batch-size", 2, "--max-input-len", 16, "--max-seq-len", 32,
        "--max-num-tokens", 64, env=real.environment, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Provided but not expected" not in done.stderr


@pytest.mark.parametrize("with_cache", [False, True])
def test_weights_of_float8_load(
    worlds: tuple[World, World], tmp_path: Path, with_cache: bool
) -> None:
    _, real = worlds
    store = CheckpointStore(tmp_path)
    for kind in ("plain", "redrafter"):
        checkpoint = store.copy(tmp_path / kind, kind, "0.14")
        quantize_checkpoint(checkpoint, with_cache=with_cache)
        (checkpoint / "manifest.json").unlink()  # which has the sums of what specdec wrote
        build(real, checkpoint, f"fp8-{kind}-{with_cache}")


def test_the_parser_is_the_recorded_one() -> None:
    """Every flag, its type, its choices and its default."""
    import subprocess
    import sys

    code = (
        "import argparse, json, sys; from pathlib import Path\n"
        "from tests.real.stubs import install; install(Path(sys.argv[1]))\n"
        "from tensorrt_llm.commands.build import parse_arguments\n"
        "print('FLAGS', json.dumps([[a.option_strings, a.choices and list(a.choices),"
        " None if a.default is argparse.SUPPRESS else a.default, str(a.nargs)]"
        " for a in parse_arguments()._actions if a.dest != 'help'], default=str))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, SOURCE], capture_output=True, text=True,
                          check=True)  # fmt: skip
    line = next(line for line in done.stdout.splitlines() if line.startswith("FLAGS "))
    found = {
        names[0].removeprefix("--"): (sorted(n.removeprefix("--") for n in names), choices, default,
                                      {"0": "switch", "+": "list"}.get(nargs, "value"))
        for names, choices, default, nargs in json.loads(line.removeprefix("FLAGS "))
    }  # fmt: skip
    kinds = {True: "list", False: "value"}
    for name, flag in load_facts("0.14").flags.items():
        kind = "switch" if flag.kind == "switch" else kinds[flag.is_list]
        names, choices, default, real_kind = found.pop(name)
        assert (names, real_kind) == (sorted([name, *flag.aliases]), kind)
        assert default == flag.default, name
        if name != "kv_cache_type":  # a class in the real one
            assert (choices or []) == list(flag.choices), name
    assert not found
