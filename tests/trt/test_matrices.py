"""Products of TensorRT's networks, computed at once by torch; doctor's section of the backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.errors import SpecDecError
from specdec.model import int4
from specdec.trt import doctor, engine
from specdec.trt.matrices import multiply


class Calculator:
    """A writer of networks whose tensors are numbers."""

    dtype = torch.float32

    def constant(self, values: Tensor, four_bits: Sequence[int] | None = None) -> Tensor:
        if four_bits is None:
            return values
        low, high = values << 4 >> 4, values >> 4  # signed, the first in the low bits
        return torch.stack((low, high), -1).reshape(*four_bits)

    def lift(self, values: Tensor, num_dims: int) -> Tensor:
        return values.reshape((1,) * (num_dims - values.dim()) + tuple(values.shape))

    def matmul(self, x: Tensor, y: Tensor, turn: str) -> Tensor:
        assert turn == "TRANSPOSE"
        return x @ y.transpose(-1, -2)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def quantize(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return (x / scale).to(dtype)

    def dequantize(self, codes: Tensor, scales: Tensor, axis: int | None = None) -> Tensor:
        if axis is not None:
            return codes.float() * scales[:, None]
        if scales.dim() > 1:
            scales = scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
        return codes.float() * scales


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def compute(
    weights: dict[str, Tensor], x: Tensor, sizes: Sequence[int] = (), **options: Any
) -> list[Tensor]:
    writer: Any = Calculator()
    return multiply(writer, x, weights, "m", sizes, **options)


def test_products_by_parts() -> None:
    """Rows of each part, with their biases, which may be left out."""
    weight, bias, x = draw(6, 4), draw(6), draw(2, 3, 4)
    weights = {"m.weight": weight, "m.bias": bias}
    whole = x @ weight.T + bias
    (product,) = compute(weights, x)
    torch.testing.assert_close(product, whole)
    parts = compute(weights, x, (1, 5))
    for part, wanted in zip(parts, torch.split(whole, [1, 5], -1), strict=True):
        torch.testing.assert_close(part, wanted)
    (bare,) = compute(weights, x, has_bias=False)
    torch.testing.assert_close(bare, x @ weight.T)
    (without,) = compute({"m.weight": weight}, x)
    torch.testing.assert_close(without, x @ weight.T)


def test_int8_has_a_scale_a_row() -> None:
    codes = torch.randint(-127, 128, (6, 4), dtype=torch.int8)
    scales, x = torch.rand(6) + 0.5, draw(3, 4)
    weights = {"m.weight": codes, "m.per_channel_scale": scales}
    wanted = torch.split(x @ (codes.float() * scales[:, None]).T, [2, 4], -1)
    for part, product in zip(compute(weights, x, (2, 4)), wanted, strict=True):
        torch.testing.assert_close(part, product)


def test_int4_is_packed_otherwise() -> None:
    """A checkpoint's byte has two rows, TensorRT's two columns; groups of 2 share a scale."""
    numbers = np.random.default_rng(0).integers(0, 16, (6, 4), np.uint8)
    scales, x = torch.rand(6, 2) + 0.5, draw(3, 4)
    weights = {"m.weight": torch.from_numpy(int4.pack(numbers)), "m.weights_scaling_factor": scales}
    matrix = (torch.from_numpy(numbers).float() - 8) * scales.repeat_interleave(2, 1)
    products = compute(weights, x, (2, 4))
    for part, wanted in zip(products, torch.split(x @ matrix.T, [2, 4], -1), strict=True):
        torch.testing.assert_close(part, wanted)


@pytest.mark.parametrize("weight_scale", [[0.5], [0.5, 2.0]])
def test_fp8_rounds_its_inputs(weight_scale: list[float]) -> None:
    """By one scale; a weight of two parts may have a scale for each."""
    weight = draw(4, 4).to(torch.float8_e4m3fn)
    x, scale = draw(3, 4), torch.tensor([0.25])
    weights = {
        "m.weight": weight, "m.activation_scaling_factor": scale,
        "m.weights_scaling_factor": torch.tensor(weight_scale),
    }  # fmt: skip
    rounded = (x / 0.25).to(torch.float8_e4m3fn).float() * 0.25
    assert not torch.equal(rounded, x)
    scales = weight_scale * (2 // len(weight_scale))
    for part, rows, factor in zip(
        compute(weights, x, (2, 2)), torch.split(weight, 2), scales, strict=True
    ):
        torch.testing.assert_close(part, rounded @ (rows.float() * factor).T)


# doctor.py

GPU = {"name": "L4", "compute_capability": "8.9", "memory_bytes": 10}


def make_machine(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "tensorrt": {"name": "tensorrt_rtx 1.3", "compute_capabilities": ["8.9"], "error": None},
        "gpus": [GPU], "packages": {"torch": "2.11.0"}, "cuda": {"runtime": "12.9"},
    }  # fmt: skip
    return values | changes


def describe_library(**changes: Any) -> dict[str, Any]:
    return make_machine()["tensorrt"] | changes


@pytest.mark.parametrize(
    ("changes", "build", "run"),
    [
        ({}, [], []),
        ({"tensorrt": {"name": "none", "compute_capabilities": [], "error": "no TensorRT: pip"},
          "gpus": [GPU]}, ["no TensorRT: pip"], ["no TensorRT: pip"]),
        ({"gpus": []}, [], ["no GPU is visible"]),
        ({"gpus": [], "tensorrt": describe_library(name="tensorrt 10", compute_capabilities=[])},
         ["no GPU is visible, and only TensorRT-RTX builds for others than this machine's"],
         ["no GPU is visible"]),
        ({"gpus": [GPU | {"compute_capability": "7.0"}]}, [],
         ["L4 has compute capability 7.0, tensorrt_rtx 1.3 builds for 8.9"]),
        ({"cuda": {"runtime": None}, "packages": {"torch": None}}, [],
         ["torch is not installed", "the installed torch is built without CUDA"]),
    ],
)  # fmt: skip
def test_what_can_be_done_here(changes: dict[str, Any], build: list[str], run: list[str]) -> None:
    abilities = doctor.list_abilities(make_machine(**changes))
    assert abilities == {
        "build engines of TensorRT's own layers": build,
        "run engines of TensorRT's own layers": run,
    }
    assert doctor.describe_pins(make_machine()) == {}


def test_the_library_is_described_or_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    trt = SimpleNamespace(
        __name__="tensorrt_rtx_bindings", __version__="1.3",
        ComputeCapability=SimpleNamespace(__members__={"NONE": 0, "SM89": 1, "SM120": 2}),
    )  # fmt: skip
    monkeypatch.setattr(doctor, "load_tensorrt", lambda: trt)
    assert doctor.describe_machine()["tensorrt"] == {
        "name": "tensorrt_rtx 1.3", "compute_capabilities": ["8.9", "12.0"], "error": None,
    }  # fmt: skip

    def fail() -> None:
        raise SpecDecError("tensorrt is too old", "install 10.15")

    monkeypatch.setattr(doctor, "load_tensorrt", fail)
    assert doctor.describe_machine()["tensorrt"] == {
        "name": "none", "compute_capabilities": [], "error": "tensorrt is too old: install 10.15",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sizes", "facts"),
    [
        ({"gpus": [GPU] * 2}, (10, 10), []),
        ({"gpus": [GPU] * 2}, (11, 10), ["the weights take 0.0 GB, L4 has 0.0 GB"]),
        ({}, (1, 1), ["its 2 ranks need a GPU each, 1 visible"]),
        ({"gpus": []}, (1, 1), ["it runs on a GPU, and none is visible"]),
        ({"gpus": [GPU] * 2}, (10, None), ["lacks two"]),
        ({"gpus": [GPU] * 2, "tensorrt": describe_library(name="tensorrt_rtx 1.4")}, (1, 1),
         ["was built by tensorrt_rtx 1.3, and tensorrt_rtx 1.4 is installed"]),
        ({"gpus": [GPU | {"compute_capability": "9.0"}] * 2,
          "tensorrt": describe_library(compute_capabilities=["8.9", "9.0"])}, (1, 1),
         ["was built for compute capability 8.9, and L4 has 9.0"]),
    ],
)  # fmt: skip
def test_an_engine_is_checked(
    changes: dict[str, Any], sizes: tuple[int | None, ...], facts: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of two ranks, with half of the bytes of its networks each."""
    networks: Any = SimpleNamespace(library="tensorrt_rtx 1.3", compute_capabilities=["8.9"])
    monkeypatch.setattr(engine, "read_network_config", lambda folder: (None, networks))
    monkeypatch.setattr(engine, "list_files", lambda checkpoint: ["one", "two"])
    for name, size in zip(("one", "two"), sizes, strict=True):
        if size is not None:
            (tmp_path / name).write_bytes(b"x" * size)
    checkpoint: Any = SimpleNamespace(model=SimpleNamespace(tp_size=2))
    problems, notes = doctor.check_engine(tmp_path, {}, checkpoint, make_machine(**changes))
    found = [fact for fact, _ in problems]
    assert len(found) == len(facts)
    for fact, wanted in zip(found, facts, strict=True):
        assert wanted in fact
    assert notes == []
