"""EAGLE-3's map of a reduced vocabulary, damaged in an engine: an error at load, not a crash."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from specdec.decode.engine import TorchEngine
from specdec.errors import SpecDecError
from specdec.model.tensors import EAGLE_OFFSETS
from tests.conftest import make_eagle_drafter, make_llama
from tests.engines import call


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
    start, _ = json.loads(data[8 : 8 + size])[EAGLE_OFFSETS]["data_offsets"]
    at = 8 + size + start + 8 * place
    data[at : at + 8] = np.int64(value).tobytes()
    path.write_bytes(data)
    with pytest.raises(SpecDecError, match=re.escape(fact)):
        TorchEngine(engine, device="cpu").load()
