"""EAGLE's output layer: a damaged map of a reduced vocabulary, and the scale of the target's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec.decode.drafters.eagle import EagleDrafter
from specdec.decode.engine import TorchEngine
from specdec.errors import SpecDecError
from specdec.model.tensors import EAGLE_NET, OFFSETS
from tests.conftest import make_eagle_drafter, make_llama
from tests.engines import call, make_engine
from tests.parity.models import VOCAB, make_model


@pytest.mark.parametrize(
    ("place", "value", "fact"),
    [
        (3, 125, "d2t maps drafted token 3 to 128, the target has vocab_size 128"),
        (3, -4, "d2t maps drafted token 3 to -1, the target"),
        (0, 2**62, f"d2t maps drafted token 0 to {2**62}"),
        (69, 2**63 - 1, "d2t maps drafted token 69 to"),
    ],
)
def test_offsets_beyond_the_vocabulary(place: int, value: int, fact: str, tmp_path: Path) -> None:
    target = make_llama(tmp_path, layers=4)
    drafter = make_eagle_drafter(
        tmp_path, version=3, draft_vocab=70, aux_layers=(0, 1, 2)
    )  # fmt: skip
    checkpoint, engine = tmp_path / "ck", tmp_path / "engine"
    call("convert", "--model-dir", target, "--eagle-model-dir", drafter, "--output-dir", checkpoint)
    call("build", "--checkpoint-dir", checkpoint, "--output-dir", engine, "--optimize", "none")
    path = engine / "weights.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    start, _ = json.loads(data[8 : 8 + size])[EAGLE_NET + OFFSETS]["data_offsets"]
    at = 8 + size + start + 8 * place
    data[at : at + 8] = np.int64(value).tobytes()
    path.write_bytes(data)
    with pytest.raises(SpecDecError, match=re.escape(fact)):
        TorchEngine(engine, device="cpu")


@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("optimize", ["none", "auto"])
def test_drafts_are_weighed_by_the_targets_own_scale(
    version: int, optimize: str, tmp_path: Path
) -> None:
    """EAGLE-1 has learned by the target's logits as they are; EAGLE-3's head is its own."""
    target = make_model(tmp_path / "target", "GraniteForCausalLM-multipliers")
    drafter = make_eagle_drafter(tmp_path, version=version, vocab=VOCAB, own_embedding=False)
    flags = ["--eagle-model-dir", drafter]
    engine = TorchEngine(
        make_engine(tmp_path, target, convert=flags, optimize=optimize), device="cpu"
    )
    assert isinstance(engine.drafter, EagleDrafter)
    net = engine.drafter.net
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weight = net.decoder.lm_head(torch.eye(64)).T
    scale = 1 / 3 if version == 1 else 1.0
    read = hidden if version == 1 else net.final_norm(hidden)
    expected = (read @ weight.T * scale).log_softmax(-1).topk(4)
    tokens, scores = net.rank_tokens(hidden, 4)
    assert torch.equal(tokens, expected.indices)
    torch.testing.assert_close(scores, expected.values, rtol=1e-4, atol=1e-4)
