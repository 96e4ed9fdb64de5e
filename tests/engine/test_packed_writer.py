"""The writer of packed weight files: which matrices it packs, and that their numbers come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from specdec.build.backends.packing import PackedWriter, is_cut, list_packed, round_up
from specdec.engine import int8
from specdec.engine.native import NativeKernels
from specdec.engine.native_border import ALIGNMENT
from specdec.engine.packed import identify_packing
from specdec.files.reading import hash_file
from specdec.files.tensor_file import TensorFile, TensorInfo
from tests.engine.kernels import needs_compiler
from tests.engine.models import make_model

LAYER = "transformer.layers.0."
DENSE, EXPERTS = f"{LAYER}attention.dense.weight", f"{LAYER}mlp.fc.weight"
EMBEDDING = "transformer.vocab_embedding.weight"
FLOAT = "float32"


def test_which_matrices_are_packed() -> None:
    packed = {
        DENSE: (8, 8), EXPERTS: (2, 6, 8), "lm_head.weight": (9, 8),
        "drafter.layers.0.attention.qkv.weight": (8, 8),
        "dflash.drafter.layers.0.attention.qkv.weight": (8, 8),
    }  # fmt: skip
    kept = {
        EMBEDDING: (9, 8), f"{LAYER}input_layernorm.weight": (8,),
        f"{LAYER}mlp.router.weight": (2, 8),
        f"{LAYER}mlp.shared_expert_gate.weight": (1, 8), "drafter.input_proj.weight": (8, 16),
        "medusa_heads.0.mlp.fc.weight": (8, 8), f"{LAYER}attention.dense.other": (8, 8),
    }  # fmt: skip
    tensors = {name: TensorInfo(FLOAT, shape) for name, shape in (packed | kept).items()}
    model = make_model()
    assert list_packed(tensors, model) == list(packed)
    tied = make_model(share_embedding_table=True)
    assert list_packed(tensors, tied) == [*packed, EMBEDDING]
    for is_split in (False, True):  # a rank that holds the whole table packs none of it
        two = make_model(share_embedding_table=True, tp_size=2, use_parallel_embedding=is_split)
        assert (EMBEDDING in list_packed(tensors, two)) is is_split
    # Other types than the model's, an order of inputs, and rows of integers that DFlash stacks.
    assert list_packed({DENSE: TensorInfo("float8_e4m3fn", (8, 8))}, model) == []
    order = {f"{LAYER}attention.dense.input_permutation": TensorInfo("int32", (8,))}
    assert list_packed({DENSE: TensorInfo("int8", (4, 8))}, model) == [DENSE]
    assert list_packed({DENSE: TensorInfo("int8", (4, 8))} | order, model) == []
    qkv = "dflash.drafter.layers.0.attention.qkv.weight"
    assert [is_cut(qkv, TensorInfo(kind, (8, 8)), model) for kind in (FLOAT, "int8")] == [
        False, True,
    ]  # fmt: skip
    assert list_packed({qkv: TensorInfo("int8", (8, 8))}, model) == []
    assert not is_cut(DENSE, TensorInfo("int8", (8, 8)), model)


def test_whole_lines() -> None:
    sizes = (0, 1, ALIGNMENT, ALIGNMENT + 1)
    assert [*map(round_up, sizes)] == [0, ALIGNMENT, ALIGNMENT, 2 * ALIGNMENT]


@needs_compiler
def test_what_is_written_is_what_the_kernels_read(library: Path, tmp_path: Path) -> None:
    """A matrix of floats and its bias, experts one by one, and a matrix in int8 with its scales."""
    kernels = NativeKernels(library, torch.float32)
    generator = torch.Generator().manual_seed(1)
    rounded = f"{LAYER}attention.qkv.weight"
    weights = {
        DENSE: torch.randn(37, 40, generator=generator),
        EXPERTS: torch.randn(2, 6, 40, generator=generator),
        rounded: torch.randn(50, 64, generator=generator),
        f"{LAYER}attention.dense.bias": torch.randn(37, generator=generator),
    }
    codes, scales = int8.quantize(weights[rounded], "qkv")
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in weights.items()}
    arrays |= {rounded: codes.numpy(), f"{LAYER}attention.qkv.per_channel_scale": scales.numpy()}
    infos = {name: TensorInfo(str(array.dtype), array.shape) for name, array in arrays.items()}

    def read(name: str) -> Any:
        return iter(arrays[name]) if name == EXPERTS else arrays[name]

    writer = PackedWriter(infos, read, make_model(), kernels)
    sums = writer.write(tmp_path, "weights.safetensors", "the id")
    names = ["weights.safetensors", "packed/weights.safetensors"]
    assert sums == {name: hash_file(tmp_path / name) for name in names}
    plain = load_file(tmp_path / names[0])
    assert list(plain) == [f"{LAYER}attention.dense.bias"]
    assert torch.equal(
        plain[f"{LAYER}attention.dense.bias"], weights[f"{LAYER}attention.dense.bias"]
    )
    metadata = TensorFile(tmp_path / names[1]).metadata
    assert (metadata["part"], metadata["build_id"]) == (names[1], "the id")
    assert metadata["packing"] == identify_packing(kernels)
    assert json.loads(metadata["replaced"]) == {
        DENSE: [FLOAT, 37, 40], EXPERTS: [FLOAT, 2, 6, 40], rounded: ["int8", 50, 64],
        f"{LAYER}attention.qkv.per_channel_scale": [FLOAT, 50],
    }  # fmt: skip
    packed = load_file(tmp_path / names[1])
    assert set(packed) == {DENSE, EXPERTS, rounded}
    rows = kernels.unpack_rows(packed[DENSE], (37, 40), torch.arange(37))
    assert torch.equal(rows, weights[DENSE])
    for expert in range(2):
        rows = kernels.unpack_rows(packed[EXPERTS][expert], (6, 40), torch.arange(6))
        assert torch.equal(rows, weights[EXPERTS][expert])
    assert len(packed[rounded]) % ALIGNMENT == 0
    # Whole numbers up to 127 are inputs that nothing is rounded of.
    x = torch.randint(-126, 127, (3, 64), generator=generator).float()
    x[:, 0] = 127
    products = kernels.multiply(x, packed[rounded], None, 50)
    expected = x.double() @ (codes.double() * scales.double()[:, None]).T
    np.testing.assert_allclose(products.double(), expected, rtol=1e-5)
