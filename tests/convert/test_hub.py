"""Hub ids, against a server on this machine: which files are fetched, and what goes wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import make_llama, read_error_lines
from tests.convert.conftest import Source
from tests.convert.hub_server import HubServer
from tests.engines import run_cli_here
from tests.forks import fork, run_main

SHARDED = "someone/sharded"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def models(source: Source, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as they lie on the Hub, with much that no conversion needs."""
    folder = tmp_path_factory.mktemp("models")
    sharded, old, empty = folder / "sharded", folder / "old", folder / "empty"
    shutil.copytree(source("llama_gqa"), sharded)
    shutil.copytree(source("llama_mha_f32"), old)
    state = load_file(old / "model.safetensors")
    (old / "model.safetensors").unlink()
    for path in (sharded, old):
        torch.save(state, path / "pytorch_model.bin")
        for name in ("README.md", "tokenizer.json", "model.onnx", "model.fp16.safetensors"):
            (path / name).write_text("not needed")
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    (empty / "tf_model.h5").write_text("weights of another kind")
    return {SHARDED: sharded, "old": old, "someone/empty": empty}


@pytest.fixture
def hub(models: dict[str, Path]) -> Iterator[HubServer]:
    with HubServer(models) as server:
        yield server


def convert(
    hub: HubServer, home: Path, hub_id: str, *args: object, **env: str
) -> subprocess.CompletedProcess[str]:
    """Convert a model of the hub with a cache of the test's own."""

    def work() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
            del sys.modules[name]  # it reads the environment when it is imported
        run_main("convert", "--model-dir", hub_id, "--output-dir", home / "out", "--force", *args)

    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "0",
           "HF_TOKEN": "", "NO_PROXY": "127.0.0.1"}  # fmt: skip
    process = fork(work, own | env)
    out, err = process.communicate(timeout=600)
    return subprocess.CompletedProcess(hub_id, process.returncode, out, err)


def read_ranks(home: Path) -> bytes:
    return (home / "out" / "rank0.safetensors").read_bytes()


def test_only_the_files_needed_are_fetched(hub: HubServer, source: Source, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_left_here")
    done = convert(hub, tmp_path, SHARDED)
    assert done.returncode == 0, done.stderr
    index = "model.safetensors.index.json"
    assert hub.list_fetched() == sorted(["config.json", index, *SHARDS])
    assert f"fetching {SHARDED} from the Hugging Face Hub" in done.stderr
    assert "%|" not in done.stderr, "no progress bar: stderr is no terminal"
    assert hub.tokens == {None}, "a token comes from the environment alone"
    run_cli_here("convert", "--model-dir", source("llama_gqa"), "--output-dir", tmp_path / "local")
    assert read_ranks(tmp_path) == (tmp_path / "local" / "rank0.safetensors").read_bytes()

    # What is cached is not fetched again; the copy serves when the Hub is gone, and offline.
    hub.requests.clear()
    assert convert(hub, tmp_path, SHARDED, HF_TOKEN="hf_given").returncode == 0
    assert hub.list_fetched() == []
    assert hub.tokens == {None, "Bearer hf_given"}
    hub.refusals[SHARDED] = (503, "")
    for env, reason in (({}, "503"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set")):
        done = convert(hub, tmp_path, SHARDED, **env)
        assert done.returncode == 0, done.stderr
        assert f"{SHARDED}: using the cached copy in {tmp_path}" in done.stderr
        assert reason in done.stderr


def test_torch_weights_where_there_are_no_others(hub: HubServer, tmp_path: Path) -> None:
    done = convert(hub, tmp_path, "old")
    assert done.returncode == 0, done.stderr
    assert hub.list_fetched() == ["config.json", "pytorch_model.bin"]


def test_a_download_that_is_cut_off_goes_on(hub: HubServer, tmp_path: Path) -> None:
    # The library writes 10 MiB at a time; what of the next piece has come is lost.
    piece = 10 << 20
    model = make_llama(tmp_path, vocab=50_000, name="large")
    hub.models = {"someone/large": model}
    hub.cuts["model.safetensors"] = piece + 1000
    done = convert(hub, tmp_path, "someone/large")
    assert done.returncode == 0, done.stderr
    assert hub.ranges == [f"bytes={piece}-"]
    (copy,) = (tmp_path / "hf").rglob("snapshots/*/model.safetensors")
    assert copy.read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("hub_id", "refusal", "message", "hint"),
    [
        ("someone/typo", None, "there is no such model, or a private one", "HF_TOKEN"),
        (SHARDED, (401, "GatedRepo"), "access to that model is restricted", "accept its terms"),
        (SHARDED, (401, "RepoNotFound"), "there is no such model, or a private one", "HF_TOKEN"),
        (SHARDED, (500, ""), "the Hugging Face Hub answered with status 500", "run it again"),
        ("someone/empty", None, "on the Hub holds neither model.safetensors nor", "transformers"),
    ],
)
def test_refusals(
    hub_id: str,
    refusal: tuple[int, str] | None,
    message: str,
    hint: str,
    hub: HubServer,
    tmp_path: Path,
) -> None:
    if refusal:
        hub.refusals[hub_id] = refusal
    done = convert(hub, tmp_path, hub_id)
    assert done.returncode == 1
    assert done.stdout == ""
    assert message in read_error_lines(done.stderr)[0]
    assert hint in read_error_lines(done.stderr)[1]
    assert "Traceback" not in done.stderr
    assert hub.list_fetched() == []
    assert [path.name for path in tmp_path.iterdir()] in ([], ["hf"])


def test_no_hub_and_no_copy(hub: HubServer, tmp_path: Path) -> None:
    for env, message in (
        (
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "the Hugging Face Hub cannot be reached: connection r",
        ),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, and no copy is cached"),
    ):
        done = convert(hub, tmp_path, SHARDED, **env)
        assert done.returncode == 1
        assert message in read_error_lines(done.stderr)[0]
        assert hub.requests == []
