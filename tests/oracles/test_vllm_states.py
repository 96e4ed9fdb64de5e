"""vLLM's extract_hidden_states on the CPU: its states are ours, and so are drafters from them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from specdec.train import extracted, target
from specdec.train.rows import TokenRows
from specdec.train.settings import TrainSettings
from tests.oracles.models import PYCODE, pad_heads

LAYERS = (1, 5, 8)  # EAGLE-3's of 12
START_SECONDS = 600


@pytest.fixture(scope="module")
def server(environments: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server of the shipped target, in float32, and its URL."""
    python = environments / "vllm" / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"there is no vLLM in {environments}: docs/export.md tells how to install it")
    folder = tmp_path_factory.mktemp("vllm-states")
    model = pad_heads(PYCODE / "target", folder / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ids = [*(layer + 1 for layer in LAYERS), 12]
    speculative = {
        "method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }  # fmt: skip
    transfer = {
        "kv_connector": "CpuHiddenStatesConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "vllm_states_connector",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "states")},
    }  # fmt: skip
    words = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", port,
        "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", 512,
        "--max-num-seqs", 4, "--no-enable-prefix-caching", "--no-enable-chunked-prefill",
        "--speculative-config", json.dumps(speculative), "--kv-transfer-config",
        json.dumps(transfer),
    ]  # fmt: skip
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent),
    }  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [str(word) for word in words], stdout=log, stderr=log, env=environment
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_up(url):
                text = (folder / "log").read_text()[-3000:]
                assert process.poll() is None, text
                assert time.monotonic() < deadline, text
                time.sleep(1)
            yield f"{url}/v1"
        finally:
            process.terminate()
            process.wait(60)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.HTTPError:
        return False


def test_its_states_are_ours(server: str) -> None:
    """Behind three inner layers and after the last norm, rows of several lengths at once."""
    folder = str(PYCODE / "target")
    config, device = target.load_config(folder), torch.device("cpu")
    settings = TrainSettings(model_dir=folder, data=Path("none"), hidden_states_from=server)
    theirs = extracted.open_extracted(
        settings, config, "float32", device, layers=LAYERS, with_head=True
    )
    ours = target.load_target(folder, config, "float32", device, with_head=True, aux_layers=LAYERS)
    tokens = np.random.default_rng(0).integers(2, 4000, 600).astype(np.int32)
    rows = TokenRows(tokens, np.ones(600, bool), np.array([0, 200, 450, 470, 600]))
    theirs.check_rows({"train": rows})
    batch = target.make_batch(rows, [2, 0, 3, 1], device)
    with torch.no_grad():
        pairs: list[Any] = list(
            zip(theirs.find_states(batch), ours.find_states(batch), strict=True)
        )
    assert len(pairs) == 1 + len(LAYERS)
    for found, expected in pairs:
        for row, length in enumerate(batch.lengths):
            error = (found[row, :length] - expected[row, :length]).norm()
            assert error < 1e-5 * expected[row, :length].norm()
