"""A target's networks, computed layer by layer, are the model that transformers runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import call
from tests.parity.models import NAMES, SWITCH, WINDOW, make_model
from tests.parity.test_families import LIMIT, check_logits, check_reference, generate
from tests.trt.networks import NEEDS_TENSORRT, load_here

pytestmark = NEEDS_TENSORRT
DENSE = [name for name in NAMES if "Mixtral" not in name and "Moe" not in name]


@pytest.mark.parametrize("name", DENSE)
def test_family_equals_transformers(name: str, tmp_path: Path) -> None:
    """Logits of chunks, single tokens and a tree; greedy text, windows and switches exceeded."""
    target, checkpoint = make_model(tmp_path / "model", name), tmp_path / "checkpoint"
    call("convert", "--model-dir", target, "--output-dir", checkpoint)
    engine = load_here(checkpoint, tmp_path / "engine", "--max-batch-size", 3)
    assert WINDOW < LIMIT
    check_logits(engine.decoder, target)
    lengths = (5, SWITCH - LIMIT, 1, 70)
    outputs = generate(engine, lengths)
    assert sum(len(set(output)) for output in outputs) > LIMIT, "the text varies"
    assert outputs == check_reference(target, lengths, outputs)
