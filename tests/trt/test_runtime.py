"""The product's own way to run engines, on a runtime whose engines the interpreter computes.

TensorRT's runtime does not start without a GPU. This double has its calls, reads and writes the
memory at the addresses that it is given, and checks what TensorRT's documentation asks for.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.decode.engine import TorchEngine
from specdec.errors import SpecDecError
from specdec.trt import engine, runtime
from specdec.trt.engine import TensorRTEngine
from specdec.trt.library import describe_library, load_tensorrt
from specdec.trt.runtime import EngineRunner
from tests.conftest import make_eagle_drafter, make_llama
from tests.engines import call
from tests.trt.interpreter import Interpreter
from tests.trt.networks import NEEDS_TENSORRT, build_here, list_texts, make_requests

pytestmark = NEEDS_TENSORRT
OWN_STREAM = 7
PROMPTS = [[5, 9, 77], [3] * 20, [100], [8, 60, 8, 60, 8, 60, 8]]


class Stream:
    """A runner's own stream, which waits for the default one before a step, and that for it."""

    waits: list[int] = []

    def __init__(self, device: Any = None) -> None:
        self.cuda_stream = OWN_STREAM

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.cuda_stream)


class RuntimeCache:
    """Kernels that were compiled, one by one; another driver's are refused."""

    driver, num_compiled = b"580 ", 0

    def __init__(self) -> None:
        self.content = b""

    def deserialize(self, content: bytes) -> bool:
        if fits := content.startswith(self.driver):
            self.content = content.removeprefix(self.driver)
        return fits

    def serialize(self) -> bytes:
        return self.driver + self.content

    def compile(self, shape: bytes) -> None:
        """Compile kernels of a shape that are not there."""
        if shape not in self.content:
            type(self).num_compiled += 1
            self.content += shape


class RuntimeConfig:
    """A runtime config of TensorRT-RTX."""

    cuda_graph_strategy: Any = None

    def create_runtime_cache(self) -> RuntimeCache:
        return RuntimeCache()

    def set_runtime_cache(self, cache: RuntimeCache) -> bool:
        self.cache = cache
        return True


class Context:
    """An execution context of a network."""

    def __init__(self, network: Interpreter, config: RuntimeConfig | None) -> None:
        strategies = network.trt.CudaGraphStrategy
        self.is_recorded = config is not None
        assert config is None or config.cuda_graph_strategy is strategies.WHOLE_GRAPH_CAPTURE
        self.network, self.config = network, config
        self.num_set: Counter[str] = Counter()  # addresses, by name
        self.communicators: list[int] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_communicator(self, capsule: Any) -> bool:
        """Keep the address that a capsule holds."""
        read = ctypes.pythonapi.PyCapsule_GetPointer
        read.restype, read.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        self.communicators.append(read(capsule, None))
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return self.network.fits(name, shape)

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address
        self.num_set[name] += 1

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Of an output, once all inputs have shapes."""
        return tuple(self._compute(copies=True)[name].shape)

    def execute_async_v3(self, stream: int) -> bool:
        assert stream == OWN_STREAM
        if self.config is not None:
            self.config.cache.compile(repr(sorted(self.shapes.items())).encode())
        for name, value in self._compute(copies=False).items():
            if name.startswith("present_"):
                assert self.addresses[name] == self.addresses[name.replace("present", "past")]
            else:
                self._view(name, tuple(value.shape), value.dtype).copy_(value)
        return True

    def _compute(self, *, copies: bool) -> dict[str, Tensor]:
        types = self.network.types
        inputs = {
            tensor.name: self._view(tensor.name, self.shapes[tensor.name], types[tensor.dtype])
            for tensor in self.network.inputs
        }
        return self.network.run({n: t.clone() if copies else t for n, t in inputs.items()})

    def _view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        memory = (ctypes.c_char * size).from_address(self.addresses[name])
        return torch.frombuffer(memory, dtype=dtype).view(shape)


class Runtime:
    """Reads as an engine what its name in `networks` is."""

    networks: dict[str, Interpreter] = {}

    def __init__(self, logger: Any) -> None:
        pass

    def deserialize_cuda_engine(self, data: bytes) -> Any:
        network = self.networks.get(data.decode())
        if network is None:
            return None
        trt, outputs = network.trt, [tensor.name for tensor in network.outputs]
        tensors = {tensor.name: tensor for tensor in [*network.inputs, *network.outputs]}
        names, mode = list(tensors), trt.TensorIOMode
        return SimpleNamespace(
            num_io_tensors=len(names), get_tensor_name=names.__getitem__,
            get_tensor_dtype=lambda name: tensors[name].dtype,
            get_tensor_mode=lambda name: mode.OUTPUT if name in outputs else mode.INPUT,
            create_runtime_config=RuntimeConfig,
            create_execution_context=lambda config=None: Context(network, config),
        )  # fmt: skip


class Library:
    """TensorRT with that runtime."""

    Runtime = Runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(load_tensorrt(), name)


@pytest.fixture
def on_double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(RuntimeCache, "num_compiled", 0)
    library = Library()
    monkeypatch.setattr(runtime, "load_tensorrt", lambda: library)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    default = Stream()
    default.cuda_stream = 0
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(Stream, "waits", [])
    monkeypatch.setattr(engine, "check_machine", lambda *_: None)
    yield
    assert Stream.waits == [0, OWN_STREAM] * (len(Stream.waits) // 2)


@pytest.mark.thorough
@pytest.mark.usefixtures("on_double")
def test_engines_run_by_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With EAGLE-3, which has every kind of network."""
    target, drafter = make_llama(tmp_path, layers=3), make_eagle_drafter(tmp_path, version=3)
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "engine"
    call(
        "convert", "--model-dir", target, "--drafter-model-dir", drafter, "--output-dir",
        checkpoint,
    )  # fmt: skip
    call(
        "build", "--checkpoint-dir", checkpoint, "--output-dir", tmp_path / "torch",
        "--optimize", "none", "--max-batch-size", 3,
    )  # fmt: skip
    networks = build_here(checkpoint, folder, "--max-batch-size", 3)
    monkeypatch.setattr(Runtime, "networks", networks)
    monkeypatch.setattr(TensorRTEngine, "check_whole", lambda self: None)
    for name in networks:  # the double's engines are their names
        (folder / name).write_bytes(name.encode())
    ours = TensorRTEngine(folder, device="cpu")
    requests = make_requests(PROMPTS, 10)
    texts = list_texts(TorchEngine(tmp_path / "torch", device="cpu"), requests)
    assert list_texts(ours, requests) == texts
    body = EngineRunner(folder / "head0.engine", torch.device("cpu"))
    assert body._context.is_recorded
    with pytest.raises(SpecDecError, match="is beyond what the engine was built for"):
        body.run({"states": torch.zeros(10**4, 64)})


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_double: None) -> Callable[[], Any]:
    """Load a plain engine on the double, as often as it is called."""
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "engine"
    call("convert", "--model-dir", make_llama(tmp_path), "--output-dir", checkpoint)
    networks = build_here(checkpoint, folder, "--max-batch-size", 3)
    monkeypatch.setattr(Runtime, "networks", networks)
    monkeypatch.setattr(TensorRTEngine, "check_whole", lambda self: None)
    for name in networks:
        (folder / name).write_bytes(name.encode())
    return lambda: TensorRTEngine(folder, device="cpu")


def test_caches_are_bound_once(load: Callable[[], Any]) -> None:
    """As long as the rows of a step stay; what a step reads besides is set in each."""
    engine = load()
    context = engine.decoder.runners[0]._context
    list_texts(engine, make_requests(PROMPTS[:2], 10))
    before = context.num_set.copy()
    list_texts(engine, make_requests(PROMPTS[:2], 20))
    assert before["tokens"] >= 10
    assert context.num_set["tokens"] - before["tokens"] >= 20
    for name in ("past_key_0", "past_value_1", "present_key_1", "present_value_0"):
        assert 1 <= context.num_set[name] - before[name] <= 3, name


def test_compiled_kernels_are_kept(
    load: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process compiles nothing; one with another driver compiles all of it again."""
    kept = tmp_path / "cache" / "kernels"
    requests = make_requests(PROMPTS[:2], 5)
    texts = list_texts(load(), requests)
    first, entries = RuntimeCache.num_compiled, set(kept.iterdir())
    assert first > 2
    assert len(entries) == 2  # of the layers and of the head
    assert list_texts(load(), requests) == texts
    assert RuntimeCache.num_compiled == first
    assert set(kept.iterdir()) == entries
    monkeypatch.setattr(RuntimeCache, "driver", b"590 ")
    assert list_texts(load(), requests) == texts
    assert RuntimeCache.num_compiled == 2 * first
    assert len(list(kept.iterdir())) == 2
    assert not entries & set(kept.iterdir())


def test_without_a_cache_kernels_are_compiled_again(
    load: Callable[[], Any], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_bytes(b"no folder")
    for times in (1, 2):
        list_texts(load(), make_requests(PROMPTS[:1], 3))
        assert RuntimeCache.num_compiled == times * 3, "a prompt, a token, and a head's states"


@pytest.mark.usefixtures("on_double")
def test_ranks_meet_before_their_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context gets the communicator that torch's ranks have on a GPU, once."""
    call("convert", "--model-dir", make_llama(tmp_path), "--output-dir", tmp_path / "two",
         "--tp-size", 2)  # fmt: skip
    networks = build_here(tmp_path / "two", tmp_path / "engine")
    monkeypatch.setattr(Runtime, "networks", networks)
    sums: list[Tensor] = []
    group: Any = SimpleNamespace(sum=sums.append)
    backend = SimpleNamespace(_comm_ptr=lambda: 0x5EC)
    world = SimpleNamespace(_get_backend=lambda device: backend)
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=world))
    path = tmp_path / "engine" / "head1.engine"
    path.write_bytes(b"head1.engine")
    runner = EngineRunner(path, torch.device("cpu"), group)
    assert runner._context.communicators == []
    assert not runner._context.is_recorded
    networks["head1.engine"].meet = lambda x: [x, x]
    for _ in range(2):
        logits = runner.run({"states": torch.zeros(1, 64)})["logits"]
        assert runner._context.communicators == [0x5EC]
    first, second = logits.chunk(2, dim=1)
    assert torch.equal(first, second)
    assert len(sums) == 1  # by which NCCL's communicator is made


@pytest.mark.usefixtures("on_double")
def test_what_is_no_engine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank0.engine").write_bytes(b"no engine")
    with pytest.raises(SpecDecError, match="TensorRT does not load"):
        EngineRunner(tmp_path / "rank0.engine", torch.device("cpu"))


def test_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    device, here = torch.device("cuda"), describe_library(load_tensorrt()).name
    networks: Any = SimpleNamespace(library=here, compute_capabilities=["8.9", "9.0"])
    engine.check_machine(tmp_path, networks, device)
    networks.compute_capabilities = ["8.0", "8.9"]
    with pytest.raises(SpecDecError, match="compute capability 8.0, 8.9, and H100 has 9.0"):
        engine.check_machine(tmp_path, networks, device)
    networks.library = "tensorrt 10.15"
    with pytest.raises(SpecDecError, match="was built by tensorrt 10.15"):
        engine.check_machine(tmp_path, networks, device)
