"""An engine of matrices in GGML's block types: its text is that of the weights as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specdec.decode.engine import TorchEngine
from specdec.engine.native_layers import NativeLayers
from tests.blocks import put_blocks
from tests.conftest import make_drafter, make_llama
from tests.engine.kernels import needs_compiler
from tests.engines import build_plain, renew_sums
from tests.run.test_int8_engine import build, change_config, convert, generate

# Types of a module's rows by the end of its name: as in a Q4_K_M file, where q, k and v differ.
KINDS = {
    "0.attention.qkv": (12, 14), "attention.qkv": (2,), "dense": (12,), "0.mlp.fc": (2, 8),
    "0.mlp.gate": (3,), "fc": (8,), "gate": (8,), "proj": (14,), "vocab_embedding": (14,),
}  # fmt: skip


def put_in_blocks(checkpoint: Path, kinds: dict[str, Any], *, as_blocks: bool = True) -> Path:
    for file in checkpoint.glob("rank*.safetensors"):
        tensors = load_file(file)
        put_blocks(tensors, kinds, as_blocks=as_blocks)
        save_file(tensors, file)
    if as_blocks:
        section = {"quant_algo": "GGUF", "exclude_modules": []}
        change_config(checkpoint, lambda config: config.update(quantization=section))
    renew_sums(checkpoint)
    return checkpoint


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a target with a drafter, in blocks and in float32, and engines of these."""
    parent = tmp_path_factory.mktemp("blocks")
    target = make_llama(parent, hidden=256, intermediate=256, seed=5, tied=True)
    drafter = make_drafter(parent / "drafter", hidden=256)
    for name, as_blocks in (("blocks", True), ("wide", False)):
        folder = convert(target, parent / f"{name}-ckpt", "--drafter-model-dir", drafter)
        put_in_blocks(folder, KINDS, as_blocks=as_blocks)
    for name in ("blocks", "wide"):
        for optimize in ("auto", "none"):
            build(parent / f"{name}-ckpt", f"{name}-{optimize}", "--optimize", optimize)
    return parent


@pytest.mark.thorough
def test_text_without_kernels_is_that_of_the_weights(parent: Path) -> None:
    texts, accepted = generate(TorchEngine(parent / "blocks-none", device="cpu"))
    assert texts == generate(TorchEngine(parent / "wide-none", device="cpu"))[0]
    assert sum(len(set(text)) for text in texts) > 20, "the texts vary"
    assert accepted >= 0


@needs_compiler
def test_text_with_drafts_is_that_of_plain_decoding(parent: Path) -> None:
    engine = TorchEngine(parent / "blocks-auto", device="cpu")
    plain = TorchEngine(parent / "blocks-auto", device="cpu", speculate=False)
    assert type(engine.decoder._native) is NativeLayers, "types may differ from part to part"
    texts, _ = generate(engine)
    assert texts == generate(plain)[0]
    portable = build_plain(parent / "blocks-auto")
    assert generate(TorchEngine(portable, device="cpu"))[0] == texts
    wide = generate(TorchEngine(parent / "wide-auto", device="cpu", speculate=False))[0]
    pairs = zip(sum(texts, []), sum(wide, []), strict=True)
    assert sum(a == b for a, b in pairs) > 12, "inputs are rounded, and little changes"
