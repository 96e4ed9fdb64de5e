"""Judges what TensorRT built: weights in each engine file, compute capabilities, and the settings.

TensorRT stores a matrix row by row, or, where it joins products of one input, column by column
with the outputs of the others after them. So a file's bytes tell which tensors it was built of.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdec.trt.library import load_tensorrt
from specdec.trt.network import NetworkWriter
from tests.conftest import make_drafter, make_eagle_drafter, make_llama, make_medusa_heads
from tests.engines import call
from tests.parity.models import make_model
from tests.trt.networks import NEEDS_TENSORRT

pytestmark = NEEDS_TENSORRT
GROUP = 16  # outputs of a product that lie side by side, at least where all tests' sizes divide
FLAGS: frozenset[str] = frozenset()  # that the builder's config has; TensorRT's own are {"TF32"}


@dataclasses.dataclass
class Built:
    """What the builder was given for one engine: settings, attention layers, and weights."""

    flags: set[str]
    capabilities: list[str]
    attention: list[dict[str, Any]]
    num_weights: int
    changed_weights: int


class Recorder:
    """TensorRT whose builder notes what it is given, and spoils memory that is free by then."""

    def __init__(self) -> None:
        self.trt: Any = load_tensorrt()
        self.built: list[Built] = []
        self._weights: list[tuple[int, bytes]] = []
        self._attention: list[Any] = []
        recorder, trt = self, self.trt

        class Builder(trt.Builder):  # type: ignore[misc,name-defined]
            def create_network(self, flags: int) -> Any:
                recorder._weights, recorder._attention = [], []
                return super().create_network(flags)

            def build_serialized_network(self, network: Any, config: Any) -> Any:
                recorder._note(config)
                return super().build_serialized_network(network, config)

        self.Builder = Builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trt, name)

    def Weights(self, kind: Any, address: int, count: int) -> Any:
        weights = self.trt.Weights(kind, address, count)
        self._weights.append((address, ctypes.string_at(address, weights.nbytes)))
        return weights

    def note_attention(self, layer: Any) -> Any:
        self._attention.append(layer)
        return layer

    def _note(self, config: Any) -> None:
        spoiled = [
            torch.full((len(data),), 0xAB, dtype=torch.uint8)
            for _, data in self._weights for _ in range(3)
        ]  # fmt: skip
        now = [ctypes.string_at(address, len(data)) for address, data in self._weights]
        del spoiled
        flags = self.trt.BuilderFlag.__members__.items()
        count = config.num_compute_capabilities
        names = [config.get_compute_capability(i).name for i in range(count)]
        self.built.append(Built(
            {name for name, flag in flags if config.get_flag(flag)}, names,
            [
                {"decomposable": each.decomposable, "causal": each.causal_kind.name,
                 "norm": each.norm_op.name, "masked": each.mask is not None,
                    "ends": each.key_value_lengths is not None}
                for each in self._attention
            ],
            len(now),
            sum(data != before for data, (_, before) in zip(now, self._weights, strict=True)),
        ))  # fmt: skip


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(load_build(), "load_tensorrt", lambda: recorder)
    network, add = recorder.trt.INetworkDefinition, recorder.trt.INetworkDefinition.add_attention_v2
    monkeypatch.setattr(
        network, "add_attention_v2", lambda *given: recorder.note_attention(add(*given))
    )
    return recorder


def read_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def lies_in(tensor: Tensor, data: bytes) -> bool:
    """Return whether a tensor lies in an engine's bytes, or each group of its rows by columns."""
    if read_bytes(tensor) in data:
        return True
    for group in torch.split(tensor, GROUP) if tensor.ndim == 2 else ():
        end = 0
        for column in group.t():  # one after the other, with other groups' between them
            end = data.find(read_bytes(column), end)
            if end < 0:
                return False
    return tensor.ndim == 2


# By name in a checkpoint, the networks whose engine has the tensor, {} for the rank.
HOLDERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"eagle_nets\.0\.(lm_head|drafter\.ln_f)\.", ("drafter_head0",)),
    (r"eagle_nets\.0\.drafter\.fc\.", ("drafter_features0",)),
    (r"eagle_nets|drafter\.|medusa_heads", ("drafter0",)),
    (r"lm_head\.", ("head{}",)),
    (r"transformer\.", ("rank{}",)),
)


def list_holders(shards: Sequence[Mapping[str, Tensor]], more: Sequence[str]) -> dict[bytes, Any]:
    """Return, by the bytes of each tensor of a checkpoint, its name, itself, and its engine files.

    more: networks that have the target's embedding besides its layers.
    """
    holders: dict[bytes, tuple[str, Tensor, set[str]]] = {}
    for rank, shard in enumerate(shards):
        for name, tensor in shard.items():
            networks: tuple[str, ...] = next(
                each for pattern, each in HOLDERS if re.match(pattern, name)
            )
            networks += tuple(more) if name == "transformer.vocab_embedding.weight" else ()
            _, _, files = holders.setdefault(read_bytes(tensor), (name, tensor, set()))
            files |= {f"{each.format(rank)}.engine" for each in networks}
    return holders


def judge(
    built: Sequence[Built], shards: Sequence[Mapping[str, Tensor]], folder: Path,
    capabilities: Sequence[str], more: Sequence[str] = (),
) -> None:  # fmt: skip
    """Compare engine files, and what the builder was given, with the checkpoint."""
    engines = {path.name: path.read_bytes() for path in folder.glob("*.engine")}
    kinds = [f"SM{each.replace('.', '')}" for each in capabilities]
    assert len(built) == len(engines)
    for each in built:
        assert each.flags == FLAGS
        assert each.capabilities == kinds
        assert each.num_weights > 0
        assert each.changed_weights == 0
        expected = {
            "decomposable": True,
            "causal": "NONE",
            "norm": "SOFTMAX",
            "masked": True,
            "ends": True,
        }
        assert all(attention == expected for attention in each.attention)
    assert any(each.attention for each in built)
    for name, data in engines.items():
        marks = {f"SM{mark.decode()}" for mark in re.findall(rb"sm(\d{2,3})(?!\d)", data)}
        assert marks == set(kinds), name
    for name, tensor, files in list_holders(shards, more).values():
        found = {file for file, data in engines.items() if lies_in(tensor, data)}
        assert found == files, name


def build(
    checkpoint: Path, folder: Path, capabilities: Sequence[str], *flags: object
) -> list[dict[str, Tensor]]:
    """Build engines; return the tensors of the checkpoint's shards."""
    call(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", folder, "--backend", "tensorrt",
        "--compute-capability", ",".join(capabilities), *flags,
    )  # fmt: skip
    return [load_file(path) for path in sorted(checkpoint.glob("rank*.safetensors"))]


def convert(target: Path, drafter: Path | None = None, *flags: object) -> Path:
    checkpoint = target.parent / "checkpoint"
    words = [] if drafter is None else ["--drafter-model-dir", drafter]
    call("convert", "--model-dir", target, "--output-dir", checkpoint, *words, *flags)
    return checkpoint


MAKERS: dict[str, Callable[..., Path]] = {
    "redrafter": make_drafter, "medusa": make_medusa_heads, "eagle": make_eagle_drafter,
    "eagle3": lambda parent, **options: make_eagle_drafter(parent, version=3, **options),
}  # fmt: skip
# Type, drafter, flags of convert, compute capabilities, where the embedding lies as well.
CASES: dict[str, tuple[str, str | None, Sequence[object], Sequence[str], Sequence[str]]] = {
    "float32": ("float32", None, (), ("8.0", "8.9"), ()),
    "Turing": ("float16", None, (), ("7.5",), ()),
    "every capability": (
        "float16", None, (), ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1"), (),
    ),
    "medusa": ("bfloat16", "medusa", (), ("8.6", "12.0"), ()),
    "eagle3": ("float16", "eagle3", (), ("8.9",), ()),
    "redrafter, two ranks": ("float16", "redrafter", ("--tp-size", 2), ("8.0",), ("drafter0",)),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_engines_hold_their_own_weights(name: str, recorder: Recorder, tmp_path: Path) -> None:
    dtype, method, flags, capabilities, more = CASES[name]
    target = make_llama(tmp_path, layers=2, dtype=dtype)
    drafter = MAKERS[method](tmp_path, dtype=dtype) if method else None
    checkpoint = convert(target, drafter, *flags)
    shards = build(checkpoint, tmp_path / "engine", capabilities)
    judge(recorder.built, shards, tmp_path / "engine", capabilities, more)


def test_a_tied_head_is_the_embedding(recorder: Recorder, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "LlamaForCausalLM-tied_head_dim", dtype="float16")
    shards = build(convert(model), tmp_path / "engine", ["8.9"])
    judge(recorder.built, shards, tmp_path / "engine", ["8.9"], ["head0"])


def test_integers_are_stored_as_such(recorder: Recorder, tmp_path: Path) -> None:
    """The codes are those of the torch backend's engine, in a quarter of the bytes."""
    checkpoint = convert(make_llama(tmp_path, layers=1, intermediate=96))
    build(checkpoint, tmp_path / "engine", ["8.9"], "--quantization", "int8")
    call("build", "--checkpoint-dir", checkpoint, "--output-dir", tmp_path / "torch",
         "--optimize", "none", "--quantization", "int8")  # fmt: skip
    (shard,) = map(load_file, (tmp_path / "torch").glob("*.safetensors"))
    shard = {name: tensor for name, tensor in shard.items() if not name.endswith("_scale")}
    assert sum(tensor.dtype is torch.int8 for tensor in shard.values()) == 4
    judge(recorder.built, [shard], tmp_path / "engine", ["8.9"])


def test_each_capability_has_an_engine_of_its_own(recorder: Recorder, tmp_path: Path) -> None:
    checkpoint = convert(make_llama(tmp_path, layers=1, dtype="float16"))
    heads = set()
    for capability in ("8.0", "8.9", "12.0"):
        folder = tmp_path / capability
        shards = build(checkpoint, folder, [capability])
        judge(recorder.built[-2:], shards, folder, [capability])
        heads.add((folder / "head0.engine").read_bytes())
    assert len(heads) == 3


def drop_attribute(name: str) -> Callable[..., Any]:
    """A layer keeps TensorRT's default of an attribute."""

    def change(take: Callable[..., Any]) -> Callable[..., Any]:
        def keep(self: Any, layer: Any, **attributes: Any) -> Any:
            attributes.pop(name, None)
            return take(self, layer, **attributes)

        return keep

    return change


def free_weights(build: Callable[..., Any]) -> Callable[..., Any]:
    def change(self: NetworkWriter, capabilities: Sequence[str]) -> Any:
        self._constants_in_use.clear()
        return build(self, capabilities)

    return change


def build_for_first(build: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, capabilities: build(self, [capabilities[0]] * len(capabilities))


def copy_engine(source: str, copy: str) -> Callable[..., Any]:
    def change(write: Callable[..., int]) -> Callable[..., int]:
        def write_and_copy(*given: Any) -> int:
            num_layers = write(*given)
            shutil.copy(given[-1] / source, given[-1] / copy)
            return num_layers

        return write_and_copy

    return change


def load_build() -> Any:
    from specdec.build.backends import tensorrt

    return tensorrt


# Deliberate breaks of the build: whose attribute each one replaces, and by what.
BREAKS: dict[str, tuple[Callable[[], Any], str, Callable[..., Any]]] = {
    "head0 is a copy of rank0": (
        load_build, "write_engines", copy_engine("rank0.engine", "head0.engine"),
    ),
    "head1 is a copy of head0": (
        load_build, "write_engines", copy_engine("head0.engine", "head1.engine"),
    ),
    "every capability is the first": (lambda: NetworkWriter, "build", build_for_first),
    "TF32 is left on": (
        lambda: load_tensorrt().IBuilderConfig, "clear_flag", lambda _: lambda self, flag: None,
    ),
    "attention is not decomposable": (
        lambda: NetworkWriter, "_take", drop_attribute("decomposable"),
    ),
    "attention reads the whole cache": (
        lambda: NetworkWriter, "_take", drop_attribute("key_value_lengths"),
    ),
    "attention has no mask": (lambda: NetworkWriter, "_take", drop_attribute("mask")),
    "weights are freed before the build": (lambda: NetworkWriter, "build", free_weights),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", BREAKS)
def test_breaks_show(
    name: str, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_owner, attribute, change = BREAKS[name]
    owner = find_owner()
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    checkpoint = convert(make_llama(tmp_path, layers=1, dtype="float16"), None, "--tp-size", 2)
    shards = build(checkpoint, tmp_path / "engine", ["8.0", "8.9"])
    with pytest.raises(AssertionError):
        judge(recorder.built, shards, tmp_path / "engine", ["8.0", "8.9"])
