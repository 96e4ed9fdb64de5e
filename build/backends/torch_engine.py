"""The torch backend's build: weights laid out for execution, kernels for this machine."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec import __version__, logs
from specdec.engine.layout import (
    DRAFTER_NAME,
    BuildConfig,
    EngineConfig,
    check_inventory,
    encode_engine_config,
    list_engine_files,
    make_metadata,
    name_weight_file,
    plan_int8,
)
from specdec.errors import Problems, SpecDecError, join_names
from specdec.files.reading import Array, write_json
from specdec.files.tensor_file import TensorFile, TensorInfo, write_tensor_file
from specdec.methods.eagle import EagleParams
from specdec.model.checkpoint import CheckpointConfig
from specdec.model.inventory import find_rank_files, list_tensors
from specdec.model.quantization import (
    ACTIVATION_SCALE,
    EXECUTED,
    FLOAT8,
    FLOAT8_STORAGE,
    FP8,
    INT8,
    INT8_SCALES,
    KV_SCALES,
    SCALES,
    WEIGHT_SCALE,
    find_contradictions,
    is_scale,
)
from specdec.model.sharding import join
from specdec.model.tensors import (
    Shard,
    find_first_copy,
    get_rank_shape,
    get_stored_dtype,
    list_linears,
)

from ..settings import BuildSettings

if TYPE_CHECKING:
    from torch import Tensor

logger = logs.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class TorchPlan:
    """A checked build: the rank files to read, the files to write, whether to compile.

    needs_kernels: whether the build fails where the compiler does.
    """

    sources: list[TensorFile]
    files: dict[str, dict[str, TensorInfo]]
    prepack: bool
    compile_kernels: bool
    needs_kernels: bool
    quantization: str | None

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for file in self.files.values() for info in file.values())

    @property
    def num_tensors(self) -> int:
        return sum(map(len, self.files.values()))


def plan_build(settings: BuildSettings, checkpoint: CheckpointConfig, folder: Path) -> TorchPlan:
    """Check everything the torch backend needs; raise SpecDecError that lists what is wrong."""
    # Imported here, not above: this module is also what `--help` and `--dry-run` errors load.
    from specdec.engine.layers import ACTIVATIONS
    from specdec.engine.native import find_compiler
    from specdec.engine.rotary import compute_frequencies

    model, drafter = checkpoint.model, checkpoint.drafter
    problems = Problems()
    if settings.kv_cache_type == "paged":
        problems.add(
            "the torch backend has a continuous KV cache only", "leave --kv-cache-type out"
        )
    if model.pp_size != 1:
        problems.add(
            f"the checkpoint is split for pp_size={model.pp_size}; the torch backend has no"
            " pipeline stages",
            "convert it again with --pp-size 1",
        )
    if model.hidden_act not in ACTIVATIONS:
        problems.add(
            f"hidden_act={model.hidden_act!r}",
            f"the torch backend executes {', '.join(ACTIVATIONS)}",
        )
    algorithm = checkpoint.quantization.quant_algo
    if algorithm not in EXECUTED:
        problems.add(
            f"the checkpoint is quantized ({algorithm})",
            "the torch backend executes FP8, float16, bfloat16 and float32",
        )
    if settings.quantization is not None and checkpoint.quantization.is_quantized:
        problems.add(
            f"--quantization {settings.quantization}: the checkpoint is quantized already"
            f" ({algorithm or checkpoint.quantization.kv_cache_quant_algo})",
            "leave it out, or convert the model without --quantization",
        )
    problems.raise_all()
    if model.arithmetic.positions == "rotary":
        compute_frequencies(model, model.max_position_embeddings)
    if isinstance(drafter, EagleParams):
        net = drafter.make_net_model(model)
        compute_frequencies(net, net.max_position_embeddings)
    paths, problems = find_rank_files(folder, model.tp_size, f"tp_size={model.tp_size}")
    problems.raise_all()
    sources = [TensorFile(path) for path in paths]
    float8 = check_sources(sources, checkpoint)
    compile_kernels = settings.optimize != "none"
    if settings.optimize == "auto" and find_compiler() is None:
        logger.warning(
            "no C++ compiler found: the engine will run on torch's own operators, slower on a CPU"
        )
        compile_kernels = False
    files = {
        file: plan_tensors(shapes, model.dtype, float8)
        for file, shapes in list_engine_files(model, drafter).items()
    }
    if settings.quantization == INT8:
        files = {file: plan_int8(tensors, model) for file, tensors in files.items()}
        if not compile_kernels:
            logger.warning(
                "int8 without native kernels: the engine's files are small, but its weights take"
                " the memory of %s when it runs", model.dtype,
            )  # fmt: skip
    return TorchPlan(
        sources=sources,
        files=files,
        prepack=settings.optimize != "none",
        compile_kernels=compile_kernels,
        needs_kernels=settings.optimize == "native",
        quantization=settings.quantization,
    )


def check_sources(sources: Sequence[TensorFile], checkpoint: CheckpointConfig) -> set[str]:
    """Check every rank's file against config.json; return the matrices that are float8 in all."""
    found = [check_source(source, checkpoint) for source in sources]
    for source, float8 in zip(sources[1:], found[1:], strict=True):
        if unlike := sorted(float8 ^ found[0]):
            raise SpecDecError(
                f"{source.path} and {sources[0].path} differ in which linears are FP8:"
                f" {join_names(unlike)}",
                "the ranks' files must come from one run: convert again",
            )
    return found[0]


def check_source(source: TensorFile, checkpoint: CheckpointConfig) -> set[str]:
    """Check one rank's file: names, shapes and types; return its float8 matrices."""
    model = checkpoint.model
    specs = list_tensors(model, checkpoint.drafter)
    expected = {name: get_rank_shape(spec, model) for name, spec in specs.items()}
    is_quantized = checkpoint.quantization.quant_algo == FP8
    float8 = find_float8(source, expected) if is_quantized else set()
    if float8:
        expected = add_scales(expected, source.tensors)
        # The cache keeps the model's type, for which it needs none of its scales.
        expected |= {
            name: info.shape for name, info in source.tensors.items()
            if name.rpartition(".")[2] in KV_SCALES and is_scale(name, specs)
        }  # fmt: skip
    check_inventory(source, expected, "checkpoint")
    wrong = find_contradictions(
        checkpoint.quantization,
        [*list_linears(model), "lm_head"],
        {name: info.dtype for name, info in source.tensors.items()},
    )
    if wrong:
        raise SpecDecError(
            f"{source.path}: {len(wrong)} linears are not quantized as config.json says:"
            f" {'; '.join(wrong[:4])}",
            "config.json and the tensors must come from one run: convert again",
        )
    found = sorted(
        {
            source.tensors[name].dtype for name in specs
            if name not in float8
            and source.tensors[name].dtype != get_stored_dtype(name, model.dtype)
        }
    )  # fmt: skip
    if found:
        raise SpecDecError(
            f"config.json says dtype={model.dtype}, the tensors are {', '.join(found)}",
            "target and drafter must be converted with one --dtype",
        )
    check_copies(source, specs)
    return float8


def add_scales(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo]
) -> dict[str, tuple[int, ...]]:
    """Add the scales that belong to those of the tensors which are stored as float8.

    Scales have one element, the weight's of a stacked gate_up two.
    """
    expected = dict(shapes)
    for name in shapes:
        if name in stored and stored[name].dtype in FLOAT8_STORAGE:
            for kind in SCALES:
                scale = f"{name.removesuffix('.weight')}.{kind}"
                info = stored.get(scale)
                is_one = info is not None and math.prod(info.shape) == 1
                is_pair = kind == WEIGHT_SCALE and ".mlp.gate_up." in name
                expected[scale] = info.shape if info and is_one else ((2,) if is_pair else (1,))
    return expected


def check_copies(source: TensorFile, names: Iterable[str]) -> None:
    """Raise SpecDecError where EAGLE nets that are to be copies differ: the first alone is run."""
    for name in names:
        first = find_first_copy(name)
        if first != name and not np.array_equal(source.read(name), source.read(first)):
            raise SpecDecError(
                f"{source.path}: {name} differs from {first}; the torch backend runs one EAGLE net"
                " for all levels of a tree",
                "use the tensorrt-llm backend, which runs one each",
            )


def find_float8(source: TensorFile, names: Iterable[str]) -> set[str]:
    """Find the matrices that are stored as float8; fc and gate must be of one kind."""
    stored = {
        name for name in names
        if name in source.tensors and "embedding" not in name
        and len(source.tensors[name].shape) == 2
        and source.tensors[name].dtype in FLOAT8_STORAGE
    }  # fmt: skip
    for name in stored:
        if ".mlp." in name:
            for one, other in ((".fc.", ".gate."), (".gate.", ".fc.")):
                twin = name.replace(one, other)
                if twin in source.tensors and twin not in stored:
                    raise SpecDecError(
                        f"{source.path}: {name} is FP8, {twin} is {source.tensors[twin].dtype}",
                        "the torch backend stacks the two: quantize both, or neither",
                    )
    return stored


def plan_tensors(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, float8: set[str]
) -> dict[str, TensorInfo]:
    """Plan the engine's tensors; those of `float8` keep their bytes, with their scales."""
    tensors = {}
    for name, shape in shapes.items():
        is_stacked = ".mlp.gate_up." in name
        if name.replace(".gate_up.", ".fc.") not in float8:
            tensors[name] = TensorInfo(get_stored_dtype(name, dtype), shape)
            continue
        module = name.removesuffix(".weight")
        num_scales = 2 if is_stacked and name.replace(".gate_up.", ".gate.") in float8 else 1
        tensors[name] = TensorInfo(FLOAT8, shape)
        tensors[f"{module}.{WEIGHT_SCALE}"] = TensorInfo("float32", (num_scales,))
        tensors[f"{module}.{ACTIVATION_SCALE}"] = TensorInfo("float32", (1,))
    return tensors


def write_engine(
    plan: TorchPlan, checkpoint: CheckpointConfig, limits: BuildConfig, folder: Path, build_id: str
) -> tuple[dict[str, str], bool]:
    """Write the engine's files into `folder`.

    build_id: of `make_build_id`. Returns their sha256 sums by name where known, and whether it has
    native kernels.
    """
    kernels = write_kernels(plan, checkpoint, folder) if plan.compile_kernels else None
    hashes = {
        name: write_tensor_file(
            folder / name,
            tensors,
            make_reader(plan, checkpoint, name),
            make_metadata(name, build_id, tensors),
        )
        for name, tensors in plan.files.items()
    }
    config = EngineConfig(
        version=__version__,
        checkpoint=checkpoint,
        build=limits,
        build_id=build_id,
        prepack=plan.prepack,
        kernels=kernels,
        quantization=plan.quantization,
    )
    write_json(folder / "config.json", encode_engine_config(config))
    return hashes, kernels is not None


def write_kernels(
    plan: TorchPlan, checkpoint: CheckpointConfig, folder: Path
) -> dict[str, str] | None:
    """Compile the kernels, into the user's cache and the engine's folder; say what with.

    None where the compiler fails and the kernels are not needed.
    """
    from specdec.engine import kernel_cache
    from specdec.engine.native import LIBRARY_NAME, compile_kernels, describe_coverage

    with tempfile.TemporaryDirectory(dir=folder, prefix=".kernels-") as workplace:
        try:
            kernels = compile_kernels(Path(workplace))
        except SpecDecError as error:
            if plan.needs_kernels:
                raise
            logger.warning(
                "no native kernels: %s; the engine will run on torch's own operators, slower on a"
                " CPU: %s", error.message, error.hint,
            )  # fmt: skip
            return None
        (folder / kernel_cache.FOLDER_NAME).mkdir(mode=0o755)
        kernel_cache.place(Path(workplace) / LIBRARY_NAME, kernels, folder, mode=0o644)
    logger.info("native kernels: %s", describe_coverage(checkpoint.model))
    return kernels


def make_reader(plan: TorchPlan, checkpoint: CheckpointConfig, file: str) -> Callable[[str], Array]:
    """Return the function that reads a tensor of an engine file out of the checkpoint's files."""
    import torch

    from specdec.engine import int8
    from specdec.files.torch_tensors import to_array, view_tensor

    model, tensors = checkpoint.model, plan.files[file]
    specs = list_tensors(model, checkpoint.drafter)
    ranks = [rank for rank in range(model.tp_size) if name_weight_file(model, rank) == file]
    own = plan.sources[ranks[0] if ranks else 0]
    int8_scales: dict[str, Tensor] = {}  # which lie before the weights in a file

    def read(name: str, source: TensorFile) -> Array:
        if file == DRAFTER_NAME:  # every rank has a part of it
            return join([other.read(name) for other in plan.sources], specs[name], model)
        return source.read(name)

    def stack(name: str, source: TensorFile = own) -> Array:
        if ".mlp.gate_up." in name:
            fc = read(name.replace("gate_up", "fc"), source)
            if model.arithmetic.mlp == "fused":
                up, gate = np.split(fc, 2)  # the activated half comes second
                return np.concatenate([gate, up])
            return np.concatenate([fc, read(name.replace("gate_up", "gate"), source)])
        return read(name, source)

    def make_int8_scales(name: str) -> Tensor:
        """Of whole rows, also where the ranks hold parts of them: tp_size changes no weight."""
        is_split = name in specs and specs[name].shard is Shard.COLUMNS
        parts = [
            int8.find_largest(view_tensor(stack(name, source), model.dtype))
            for source in (plan.sources if is_split else [own])
        ]
        return int8.make_scales(torch.stack(parts).amax(0), name)

    def produce(name: str) -> Array:
        module, _, kind = name.rpartition(".")
        if kind in SCALES:
            return read_scales(own, name)
        if kind == INT8_SCALES:
            matrix = f"{module}.weight"
            int8_scales[matrix] = make_int8_scales(matrix)
            return to_array(int8_scales[matrix])
        if name in int8_scales:
            weight = view_tensor(stack(name), model.dtype)
            return to_array(int8.round_weight(weight, int8_scales[name]))
        if tensors[name].dtype == FLOAT8:
            return stack(name).view(np.uint8)  # older writers store it as int8
        return stack(name)

    return produce


def read_scales(source: TensorFile, name: str) -> Array:
    """Read an engine tensor's scale; of gate_up those of both halves, for the input the larger."""
    names = [name]
    if ".mlp.gate_up." in name:
        names = [name.replace(".gate_up.", part) for part in (".fc.", ".gate.")]
    scales = np.concatenate([source.read(n).reshape(1) for n in names if n in source.tensors])
    return scales if name.endswith(WEIGHT_SCALE) else scales.max(keepdims=True)


def describe_plan(plan: TorchPlan, limits: BuildConfig) -> dict[str, Any]:
    """What `--dry-run` and `--json` report."""
    return {
        "backend": "torch",
        "prepack": plan.prepack,
        "native_kernels": plan.compile_kernels,
        "quantization": plan.quantization,
        "weights_bytes": plan.num_bytes,
        "num_tensors": plan.num_tensors,
        "weight_files": list(plan.files),
        "build_config": dataclasses.asdict(limits),
    }
