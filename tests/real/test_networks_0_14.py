"""TensorRT-LLM 0.14's own networks on our checkpoints, computed and compared step by step.

trtllm-build's own main makes them of the command line that specdec-build writes, with TensorRT-RTX
as `tensorrt`; torch computes them layer by layer. Not part of the default suite, see
docs/tensorrt-llm.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engines import call
from tests.families import CLASSES, NOT_IN_014, make_family_model
from tests.real.driver import Network, Row, plan_build
from tests.real.network import Machine
from tests.real.programs import SOURCE_NAME, read_version
from tests.trt.networks import NEEDS_TENSORRT

if SOURCE_NAME not in os.environ:
    pytest.skip(
        f"{SOURCE_NAME} does not name a source tree of TensorRT-LLM 0.14", allow_module_level=True
    )
pytestmark = NEEDS_TENSORRT
SOURCE = Path(os.environ[SOURCE_NAME])
MIXTURES = ("mixtral", "qwen2_moe")  # their layer is a plugin of its own
FAMILIES = [name for name in CLASSES if name not in (*NOT_IN_014, *MIXTURES)]


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    assert read_version(SOURCE).startswith("0.14"), "the stubs and the facts are of 0.14"
    machine = Machine(SOURCE)
    yield machine
    machine.close()


def make_prompt(length: int, seed: int = 0, vocab: int = 67) -> list[int]:
    generator = torch.Generator().manual_seed(17 * length + seed)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()


@torch.inference_mode()
def compute_reference(target: Path, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits
    return logits[0].float()


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(
    machine: Machine, tmp_path: Path, family: str, tp_size: int
) -> None:
    """Two prompts in one step, then tokens one by one beside a third prompt."""
    target = make_family_model(tmp_path, family, kv_heads=8 if family == "phi" else 4)
    checkpoint = tmp_path / "checkpoint"
    call("convert", "--model-dir", target, "--output-dir", checkpoint, "--trtllm-version", "0.14",
         "--tp-size", tp_size)  # fmt: skip
    network = Network(machine, plan_build(checkpoint))
    texts = [make_prompt(n) for n in (9, 16, 12)]
    expected = [compute_reference(target, text) for text in texts]
    found = network.run([Row(texts[i][:n], 0, i) for i, n in enumerate((6, 13))])["logits"]
    compare(found, [expected[0][5], expected[1][12]])
    rows = [Row(texts[2], 0, 2), *[
        Row([texts[i][past]], past, i, is_prompt=False) for i, past in enumerate((6, 13))
    ]]  # fmt: skip
    compare(network.run(rows)["logits"], [expected[2][11], expected[0][6], expected[1][13]])
    rows = [Row([texts[i][past]], past, i, is_prompt=False) for i, past in enumerate((7, 14))]
    compare(network.run(rows)["logits"], [expected[0][7], expected[1][14]])


def compare(found: torch.Tensor, expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found[:, : len(expected[0])], torch.stack(expected), atol=3e-4,
                               rtol=1e-4)  # fmt: skip
