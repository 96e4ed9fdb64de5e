"""Families over two ranks, as processes: the text is transformers', with drafters too.

Every family's layers are split in test_parallel_layers.py, and drafted for in test_pairs.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.decode.engine import TorchEngine
from tests.engines import OracleDrafter, make_engine
from tests.parity.models import SWITCH, make_model
from tests.parity.test_families import LIMIT, generate, generate_reference

NAMES = [
    "LlamaForCausalLM-plain", "PhiForCausalLM-gelu_new", "GPT2LMHeadModel-gelu_new",
    "Gemma2ForCausalLM-caps", "Qwen2MoeForCausalLM-plain",
]  # fmt: skip
LENGTHS = (5, SWITCH - LIMIT, 1, 70)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "flags"),
    [(name, []) for name in NAMES] + [("Qwen2MoeForCausalLM-plain", ["--moe-ep-size", 2])],
)
def test_greedy_text_of_two_ranks_equals_transformers(
    name: str, flags: list[object], tmp_path: Path
) -> None:
    """Plain, and with an oracle whose drafts are right, wrong and in between."""
    target = make_model(tmp_path / "hf", name)
    folder = make_engine(tmp_path, target, convert=["--tp-size", 2, *flags])
    engine = TorchEngine(folder, device="cpu")
    assert engine.config.checkpoint.model.tp_size == engine.decoder.model.tp_size == 2
    expected = generate_reference(target, LENGTHS)
    assert sum(len(set(output)) for output in expected) > LIMIT, "the text varies"
    assert generate(engine, LENGTHS) == expected
    oracle = OracleDrafter(expected, beams=3, length=4, quality=0.7, seed=1)
    engine.drafter = oracle
    assert generate(engine, LENGTHS) == expected
    assert 0 < oracle.observed_rows < len(LENGTHS) * LIMIT, "several tokens were accepted at once"
