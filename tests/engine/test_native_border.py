"""What is not as the kernels take it is refused before they touch it."""

from __future__ import annotations

import ctypes
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec.engine import native_border, native_library
from specdec.engine.compiler import call_compiler, find_compiler
from specdec.engine.layers import Attention, Norm
from specdec.engine.linear import Linear
from specdec.engine.native import NativeKernels
from specdec.engine.native_border import get_packed_shape
from specdec.engine.native_models import PackedDrafter, PackedLayers
from specdec.errors import SpecDecError
from tests.engine.kernels import needs_compiler

pytestmark = needs_compiler
SINGLE, HALF, DOUBLE = torch.float32, torch.float16, torch.float64
ROWS, POSITIONS, LAYERS, HIDDEN, HEADS, SIZE, INNER = 2, 64, 2, 32, 4, 8, 48
QKV = 3 * HEADS * SIZE
HOW: dict[str, Any] = {"scale": 1.0, "cap": None, "window": None, "rotary": None}


def zeros(*shape: int, dtype: torch.dtype = SINGLE) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def plan(kernels: NativeKernels, *, rows: int = 2, past: int = 0, line: int = 0) -> Any:
    """A step of three tokens in each of two rows."""
    return kernels.plan_step(
        np.array([0, rows - 1]), np.zeros((2, 3), np.int64), np.full((2, 3), line),
        np.array([0, past]), np.ones((2, 3, 3), np.bool_),
    )  # fmt: skip


def pack_integers(kernels: NativeKernels, **changed: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {
        "codes": zeros(5, 70, dtype=torch.int8), "scales": zeros(5, 2), "bits": 8, "group": 64,
    }  # fmt: skip
    return kernels.pack_integers(**(arguments | changed))


def make_layers(
    dtype: torch.dtype = SINGLE, table: Any = None, **changed: torch.Tensor
) -> PackedLayers:
    def packed(num_outputs: int, depth: int) -> torch.Tensor:
        return zeros(*get_packed_shape(num_outputs, depth, dtype), dtype=dtype)

    norm = zeros(HIDDEN, dtype=dtype)
    row = {
        "norm": norm, "norm_bias": None, "qkv": packed(QKV, HIDDEN), "qkv_bias": None,
        "dense": packed(HIDDEN, HEADS * SIZE), "dense_bias": None, "post": norm, "post_bias": None,
        "up": packed(2 * INNER, HIDDEN), "up_bias": None, "down": packed(HIDDEN, INNER),
        "down_bias": None, "q_norm": zeros(SIZE, dtype=dtype), "k_norm": zeros(SIZE, dtype=dtype),
        "dense_norm": norm, "dense_norm_bias": None, "down_norm": norm, "down_norm_bias": None,
    }  # fmt: skip
    layer = SimpleNamespace(
        attention=Attention(**HOW | {"rotary": table}), up=SimpleNamespace(num_outputs=2 * INNER)
    )
    stack: Any = SimpleNamespace(
        final_norm=Norm(norm, None, 1e-5), num_heads=HEADS, num_kv_heads=HEADS, head_size=SIZE,
        is_gated=True, layers=[layer, layer], share=1.0,
    )  # fmt: skip
    return PackedLayers([row, row | changed], stack, 0, {}, {})


def run_layers(kernels: NativeKernels, **changed: Any) -> None:
    arguments = {
        "x": zeros(2, 3, HIDDEN), "layers": make_layers(), "plan": plan(kernels),
        "cache": zeros(LAYERS, 2, ROWS, HEADS, POSITIONS, SIZE), "observed_layers": (),
    }  # fmt: skip
    kernels.run_layers(**(arguments | changed))


def attend(
    kernels: NativeKernels, cache: torch.Tensor | None = None, past: int = 0, **how: Any
) -> torch.Tensor:
    cache = zeros(2, ROWS, HEADS, POSITIONS, SIZE) if cache is None else cache
    q_norm = Norm(zeros(SIZE), None, 1e-5)
    attention = Attention(**HOW | {"q_norm": q_norm, "k_norm": q_norm} | how)
    step = plan(kernels, past=past)
    return kernels.attend(zeros(2, 3, QKV), cache, attention, step, HEADS, HEADS, SIZE)


def make_drafter(
    kernels: NativeKernels, *, embedding: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None, is_integer: bool = False, **changed: torch.Tensor,
) -> PackedDrafter:  # fmt: skip
    weights = {
        "context_proj": zeros(12, HIDDEN), "context_proj.bias": zeros(12),
        "state_proj": zeros(12, HIDDEN), "lm_head": zeros(50, 12),
        "rnn_w": zeros(HIDDEN, HIDDEN), "rnn_u": zeros(HIDDEN, HIDDEN), "rnn_u.bias": zeros(HIDDEN),
        **{name.replace("__", "."): value for name, value in changed.items()},
    }  # fmt: skip
    parts = {
        name: Linear(weight, weights.get(f"{name}.bias"), prepack=False, kernels=kernels)
        for name, weight in weights.items() if not name.endswith(".bias")
    }  # fmt: skip
    if is_integer:
        codes = zeros(50, 12, dtype=torch.int8)
        parts["lm_head"].packed = pack_integers(kernels, codes=codes, scales=torch.ones(50, 1))
    return PackedDrafter(
        parts, zeros(50, HIDDEN) if embedding is None else embedding, num_layers=0, exit_dim=12,
        num_candidates=5, kernels=kernels, tokens=tokens,
    )  # fmt: skip


def search(kernels: NativeKernels, hidden: torch.Tensor, tokens: torch.Tensor) -> None:
    kernels.search_beams(make_drafter(kernels), hidden, tokens, 2, 2)


def search_trees(kernels: NativeKernels, size: int, *temperatures: float) -> None:
    tokens = torch.tensor([1])
    kernels.search_trees(
        make_drafter(kernels), zeros(1, HIDDEN), tokens, 2, 2, size, np.array(temperatures), 0.0
    )


def test_what_is_right_passes(library: Path) -> None:
    kernels = NativeKernels(library, SINGLE)
    kernels.multiply(zeros(3, 70), pack_integers(kernels), None, 5)
    run_layers(kernels)
    attend(kernels)
    run_layers(kernels, plan=plan(kernels, past=POSITIONS - 3))
    search(kernels, zeros(1, HIDDEN), torch.tensor([49]))
    search_trees(kernels, 9, 0.75)


@pytest.mark.parametrize(
    "call",
    [
        lambda k: k.pack_matrix(zeros(5, 6, dtype=HALF)),
        lambda k: k.pack_matrix(zeros(5, 6, dtype=torch.int32)),
        lambda k: pack_integers(k, codes=zeros(5, 70)),
        lambda k: pack_integers(k, codes=zeros(5, 70, dtype=torch.uint8)),
        lambda k: pack_integers(k, scales=zeros(5, 2, dtype=DOUBLE)),
        lambda k: pack_integers(k, scales=zeros(5, 3)),
        lambda k: pack_integers(k, scales=zeros(4, 2)),
        lambda k: pack_integers(k, bits=4),
        lambda k: pack_integers(k, group=48),
        lambda k: pack_integers(k, zeros=zeros(5, 2, dtype=torch.uint8)),
        lambda k: pack_integers(k, input_scales=zeros(69)),
        lambda k: pack_integers(k, order=zeros(70)),
        lambda k: pack_integers(k, order=torch.arange(70, dtype=torch.int32) + 1),
        lambda k: k.multiply(zeros(3, 69), pack_integers(k), None, 5),
        lambda k: k.multiply(zeros(3, 70), pack_integers(k), None, 4),
        lambda k: k.multiply(zeros(3, 70), pack_integers(k)[:-1].view(torch.int8), None, 5),
        lambda k: make_layers(down=pack_integers(k, codes=zeros(HIDDEN, INNER, dtype=torch.int8),
                                                 scales=zeros(HIDDEN, 1))),
        lambda k: k.norm(zeros(3, 8), Norm(zeros(8, dtype=HALF), None, 1e-5)),
        lambda k: k.norm(zeros(3, 8), Norm(zeros(7), None, 1e-5)),
        lambda k: k.norm(zeros(3, 8), Norm(zeros(8), zeros(4), 1e-5)),
        lambda k: k.norm(zeros(8, 3).T, Norm(zeros(8), None, 1e-5)),
        lambda k: k.add_norm(zeros(3, 8), zeros(2, 8), Norm(zeros(8), None, 1e-5)),
        lambda k: k.gate_mul(zeros(3, 8, dtype=HALF), "silu"),
        lambda k: k.multiply(zeros(3, 6), k.pack_matrix(zeros(5, 7)), None, 5),
        lambda k: k.multiply(zeros(3, 6), k.pack_matrix(zeros(5, 6)), None, 50),
        lambda k: k.multiply(zeros(3, 6), k.pack_matrix(zeros(5, 6)), zeros(4), 5),
        lambda k: k.multiply(zeros(3, 6, dtype=HALF), k.pack_matrix(zeros(5, 6)), None, 5),
        lambda k: k.rank_outputs(zeros(3, 6), k.pack_matrix(zeros(5, 6)), None, 5, 6),
        lambda k: k.add_norm(zeros(3, 8), zeros(3, 8), Norm(zeros(8), None, 1e-5),
                             Norm(zeros(7), None, 1e-5)),
        lambda k: k.cap_logits(zeros(3, 8, dtype=HALF), 1.0, 30.0),
        lambda k: attend(k, cache=zeros(2, ROWS, HEADS, POSITIONS, SIZE, dtype=HALF)),
        lambda k: attend(k, past=POSITIONS - 2),
        lambda k: attend(k, k_norm=Norm(zeros(SIZE - 1), None, 1e-5)),
        lambda k: run_layers(k, x=zeros(2, 3, HIDDEN, dtype=HALF)),
        lambda k: run_layers(k, x=zeros(2, 2, HIDDEN)),
        lambda k: run_layers(k, cache=zeros(LAYERS - 1, 2, ROWS, HEADS, POSITIONS, SIZE)),
        lambda k: run_layers(k, plan=plan(k, rows=ROWS + 1)),
        lambda k: run_layers(k, plan=plan(k, past=POSITIONS - 2)),
        lambda k: run_layers(k, plan=plan(k, past=-1)),
        lambda k: run_layers(k, observed_layers=(LAYERS,)),
        lambda k: run_layers(k, layers=make_layers(HALF)),
        lambda k: run_layers(k, first_input=zeros(2, 3, HIDDEN + 1)),
        lambda k: make_layers(norm=zeros(HIDDEN, dtype=HALF)),
        lambda k: make_layers(norm_bias=zeros(HIDDEN - 1)),
        lambda k: make_layers(qkv=zeros(*get_packed_shape(QKV, HIDDEN - 1, SINGLE))),
        lambda k: make_layers(down=zeros(*get_packed_shape(HIDDEN, INNER - 1, SINGLE))),
        lambda k: make_layers(up_bias=zeros(INNER)),
        lambda k: make_layers(k_norm=zeros(SIZE + 1)),
        lambda k: make_layers(down_norm=zeros(HIDDEN, dtype=HALF)),
        lambda k: make_drafter(k, embedding=zeros(50, HIDDEN, dtype=HALF)),
        lambda k: make_drafter(k, rnn_u__bias=zeros(HIDDEN - 1)),
        lambda k: make_drafter(k, lm_head=zeros(49, 12)),
        lambda k: make_drafter(k, context_proj__bias=zeros(11)),
        lambda k: make_drafter(k, is_integer=True),
        lambda k: make_drafter(k, tokens=torch.arange(49)),
        lambda k: make_drafter(k, tokens=torch.arange(50) + 1),
        lambda k: make_drafter(k, tokens=torch.arange(50, dtype=torch.int32)),
        lambda k: make_drafter(k, tokens=torch.arange(4), lm_head=zeros(4, 12)),
        lambda k: search(k, zeros(1, HIDDEN, dtype=HALF), torch.tensor([1])),
        lambda k: k.search_beams(make_drafter(k), zeros(1, HIDDEN), torch.tensor([1]), 6, 2),
        lambda k: k.search_beams(make_drafter(k), zeros(1, HIDDEN), torch.tensor([1]), 0, 2),
        lambda k: k.search_beams(make_drafter(k), zeros(1, HIDDEN), torch.tensor([1]), 2, 0),
        lambda k: search(k, zeros(1, HIDDEN), torch.tensor([50])),
        lambda k: search(k, zeros(1, HIDDEN), torch.tensor([-1])),
        lambda k: search(k, zeros(1, HIDDEN), torch.tensor([1], dtype=torch.int32)),
        lambda k: search_trees(k, 0, 1.0),
        lambda k: search_trees(k, 3, 1.0, 1.0),
        lambda k: search_trees(k, 3, 0.0),
    ],
)  # fmt: skip
def test_what_is_refused(library: Path, call: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        call(NativeKernels(library, SINGLE))


def test_angles_beyond_the_table(library: Path) -> None:
    kernels = NativeKernels(library, SINGLE)
    table: Any = type(
        "Table", (), {"cos": zeros(9, SIZE), "sin": zeros(9, SIZE), "query_shift": 0}
    )()
    layers = make_layers(table=table)
    run_layers(kernels, layers=layers, plan=plan(kernels, line=8))
    with pytest.raises(ValueError, match="angles"):
        run_layers(kernels, layers=layers, plan=plan(kernels, line=9))
    table.sin = zeros(8, SIZE)
    with pytest.raises(ValueError, match="sin is"):
        make_layers(table=table)


def test_a_library_without_our_kernels(library: Path, tmp_path: Path) -> None:
    compiler = shlex.split(find_compiler() or "")
    call_compiler(
        [*compiler, "-shared", "-x", "c++", "/dev/null", "-o", str(tmp_path / "empty.so")]
    )
    with pytest.raises(SpecDecError, match="has kernel interface 0"):
        NativeKernels(tmp_path / "empty.so", SINGLE)


@pytest.mark.parametrize("name", [record.__name__ for record in native_border.RECORDS])
def test_a_record_of_another_size(
    library: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = type(name, (getattr(native_border, name),), {"_fields_": [("more", ctypes.c_int64)]})
    monkeypatch.setattr(native_library, "RECORDS", (grown,))
    with pytest.raises(RuntimeError, match=f"{name} has {ctypes.sizeof(grown)} bytes, not"):
        NativeKernels(library, SINGLE)
