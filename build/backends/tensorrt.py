"""The tensorrt backend's build: a checkpoint's networks, made into engines by TensorRT."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from specdec import __version__
from specdec.checkpoint.config import CheckpointConfig
from specdec.engine.draft_net import take_drafter_tensors, take_offsets
from specdec.engine.kv_cache import POSITION_BLOCK
from specdec.engine.layout import (
    DRAFTER_NAME,
    BuildConfig,
    EngineConfig,
    encode_engine_config,
    name_weight_file,
)
from specdec.errors import Problems, SpecDecError, UsageError, join_names
from specdec.files.backends import TENSORRT
from specdec.files.reading import write_json
from specdec.files.tensor_file import TensorInfo, write_tensor_file
from specdec.files.torch_tensors import TORCH_DTYPES, to_array, view_tensor
from specdec.methods.eagle import EagleParams
from specdec.model import blocks, int4
from specdec.model.architectures import list_flags
from specdec.model.quantization import FP8, INT8
from specdec.model.tensors import EAGLE_NET, EMBEDDING, OFFSETS
from specdec.system import logs
from specdec.system.machine import list_gpus
from specdec.system.processes import read_memory
from specdec.trt.drafters import KINDS, OFFSETS_FILE, list_networks, write_drafter
from specdec.trt.engine import SPARE_POSITIONS, NetworkConfig, list_files, name_networks
from specdec.trt.library import OTHER_RELEASE, Library, describe_library, load_tensorrt, make_logger
from specdec.trt.network import NetworkWriter, Sizes, can_meet_ranks
from specdec.trt.target import COMPUTED, write_head, write_target

from ..settings import BuildSettings
from . import torch_engine
from .embedded import build_embedded
from .torch_engine import EngineReader, TorchPlan, Work, plan_build

logger = logs.get_logger(__name__)
PROMPT_TOKENS = 512  # of a row in a step at most, unless a step's draft has more
MEMORY_FACTOR = 3.0  # of the weights' bytes, which TensorRT's builder takes


def read_weights(plan: TorchPlan, file: str) -> dict[str, Tensor]:
    """Map the tensors of an engine's file: those of the checkpoint where they are equal."""
    infos, read = plan.files[file], EngineReader(plan, file).read
    weights = {}
    # Scales are chosen before what they scale is rounded.
    for name in sorted(infos, key=lambda name: infos[name].dtype == INT8):
        array = read(name)
        whole = array if isinstance(array, np.ndarray) else np.concatenate(list(array))
        weights[name] = view_tensor(whole, infos[name].dtype).view(infos[name].shape)
    return weights


def plan_engine(settings: BuildSettings, checkpoint: CheckpointConfig, limits: BuildConfig) -> Work:
    """Check and plan an engine of TensorRT's layers."""
    folder = settings.checkpoint_dir
    trt, capabilities = check_target(settings, checkpoint)
    library = describe_library(trt)
    plan = plan_build(dataclasses.replace(settings, optimize="none"), checkpoint, folder)
    find_plan_problems(plan).raise_all()
    networks = plan_networks(checkpoint, limits, capabilities, library.name)

    def write(folder: Path, build_id: str) -> tuple[dict[str, str], dict[str, Any], str]:
        num_layers = write_engines(trt, plan, checkpoint, networks, folder)
        config = EngineConfig(
            version=__version__, checkpoint=checkpoint, build=limits, build_id=build_id,
            prepack=False, kernels=None, quantization=plan.quantization,
            has_fixed_drafts=True,
        )  # fmt: skip
        document = encode_engine_config(config, TENSORRT)
        document[f"{TENSORRT}_config"] |= dataclasses.asdict(networks)
        write_json(folder / "config.json", document)
        size = sum((folder / name).stat().st_size for name in list_files(checkpoint))
        built_for = f"compute capability {', '.join(capabilities)}"
        told = f"{num_layers} layers, {size / 1e6:.1f} MB, {built_for}"
        return {}, {"num_layers": num_layers, "engine_bytes": size}, told

    report = {
        "library": networks.library, "compute_capabilities": capabilities,
        "quantization": plan.quantization, "weights_bytes": plan.num_bytes,
        "networks": list_files(checkpoint),
    }  # fmt: skip
    return Work(plan, report, plan.num_bytes, write)


def build_engine(settings: BuildSettings) -> dict[str, Any]:
    """Build an engine of TensorRT's layers, or only check and describe it."""
    return build_embedded(settings, TENSORRT, plan_engine)


def foresee_limits(settings: BuildSettings, checkpoint: CheckpointConfig) -> BuildConfig:
    """Return the limits of a planned checkpoint's engine, which needs no tensor."""
    check_target(settings, checkpoint)
    return torch_engine.foresee_limits(settings, checkpoint)


def check_target(settings: BuildSettings, checkpoint: CheckpointConfig) -> tuple[Any, list[str]]:
    """Return the library and the compute capabilities to build for.

    Raises SpecDecError where there are none, or where config.json has what the layers lack.
    """
    trt = load_tensorrt()
    capabilities = choose_capabilities(settings, describe_library(trt))
    find_problems(checkpoint, capabilities, trt).raise_all()
    return trt, capabilities


def choose_capabilities(settings: BuildSettings, library: Library) -> list[str]:
    """Choose the compute capabilities: those of the flag, else that of this machine's GPU."""
    gpus, name = list_gpus()[0], library.name
    own = [gpu.compute_capability for gpu in gpus[:1]]
    usable = library.compute_capabilities or own
    flag, given = "--compute-capability", settings.compute_capability
    if given is None and not own or not usable:
        raise SpecDecError(
            f"no GPU is visible, and without {flag} an engine is for the GPU of this machine"
            if usable else f"{name} builds for the GPU of this machine, and none is visible",
            f"give specdec-build {flag} with one or more of {', '.join(usable)}"
            if usable else "build on a machine with a GPU, or install tensorrt_rtx",
        )  # fmt: skip
    if given is None:
        if fact := library.explain(gpus[0].name, own[0]):
            raise SpecDecError(
                fact, f"{OTHER_RELEASE}, or --backend torch; {flag} is for other GPUs"
            )
        return own
    wanted = list(dict.fromkeys(re.split(r"\s*,\s*", given.strip())))
    if unknown := [each for each in wanted if each not in usable]:
        raise UsageError(
            f"{name} builds for compute capability {', '.join(usable)}, not for {unknown[0]}",
            f"give {flag} with some of these, or install another TensorRT",
        )
    return sorted(wanted, key=float)


def find_problems(checkpoint: CheckpointConfig, capabilities: list[str], trt: Any) -> Problems:
    """List what of a checkpoint TensorRT's layers do not compute, by name."""
    model, drafter, remedy = checkpoint.model, checkpoint.drafter, "use --backend torch"
    split = f"the checkpoint is split for tp_size={model.tp_size}, and"
    unknown = getattr(drafter, "TITLE", None) if type(drafter) not in KINDS else None
    if isinstance(drafter, EagleParams) and drafter.mask_token_id is not None:
        unknown = "P-EAGLE"
    flags = sorted(set(list_flags(model.arithmetic)) - COMPUTED)
    kinds = {
        "linear attention": model.linear_attention, "short convolutions": model.short_conv,
        "Mamba-2": model.mamba2, "layers of several sizes": model.layer_sizes,
    }  # fmt: skip
    flags += [name for name, sizes in kinds.items() if sizes is not None]
    least = min(map(float, capabilities))
    # A checkpoint's need, and the first compute capability with it.
    is_fp8 = checkpoint.quantization.quant_algo == FP8
    needs = (
        (model.tp_size != 1, f"{split} TensorRT sums over ranks", 8.0),
        (is_fp8, "the checkpoint is FP8, which TensorRT has", 8.9),
        (model.dtype == "bfloat16", "dtype=bfloat16: TensorRT has it", 8.0),
    )
    return Problems.from_table(
        (model.tp_size != 1 and not can_meet_ranks(trt),
         f"{split} {describe_library(trt).name} has no layer that sums over ranks",
         "convert it with --tp-size 1, or install tensorrt_rtx 1.7.1 or newer"),
        (model.experts is not None,
         f"{model.architecture} is a mixture of experts, and TensorRT-RTX builds no engine with its"
         " layer of experts for any compute capability", remedy),
        (flags, f"{model.architecture} has {join_names(flags)}, which the networks do not compute",
         remedy),
        (unknown, f"the tensorrt backend has no network of {unknown} drafters", remedy),
        *((is_needed and least < first,
           f"{fact} from compute capability {first} on, not on {least}",
           f"give --compute-capability {first} or higher, or {remedy}")
          for is_needed, fact, first in needs),
    )  # fmt: skip


def find_plan_problems(plan: TorchPlan) -> Problems:
    """List matrices that dequantize layers do not stand for, and memory that the builder lacks."""
    kinds = (int4.ZERO_POINT, int4.INPUT_SCALE, int4.PERMUTATION, blocks.BLOCK_TYPES)
    found = [name for file in plan.files.values() for name in file if name.endswith(kinds)]
    kind = found[0].rpartition(".")[2] if found else ""
    largest = max(sum(info.num_bytes for info in file.values()) for file in plan.files.values())
    needed, room = MEMORY_FACTOR * largest, read_memory("MemAvailable")
    return Problems.from_table(
        (found, f"{len(found)} matrices of the checkpoint have {kind}, which TensorRT's dequantize"
         " layers do not take", "use --backend torch, or convert the model with --dequantize"),
        (room is not None and room < needed,
         f"TensorRT's builder takes about {needed / 1e9:.1f} GB for weights of"
         f" {largest / 1e9:.1f} GB, and {(room or 0) / 1e9:.1f} GB are available",
         "build on a machine with more memory, or with --quantization int8"),
    )  # fmt: skip


def plan_networks(
    checkpoint: CheckpointConfig, limits: BuildConfig, capabilities: list[str], library: str
) -> NetworkConfig:
    """Plan the networks: what they are built for, and the sizes of their inputs."""
    drafter, step = checkpoint.drafter, limits.max_draft_len + 1
    spare = max(step, SPARE_POSITIONS)
    positions = -(-(limits.max_seq_len + spare) // POSITION_BLOCK) * POSITION_BLOCK
    tokens = max(step, min(PROMPT_TOKENS, limits.max_num_tokens))
    states = max(limits.max_batch_size * step, PROMPT_TOKENS)
    sizes = Sizes(limits.max_batch_size, min(tokens, positions), step, positions, states)
    drafters = sizes
    if isinstance(drafter, EagleParams):  # whose trees lie in its cache as well
        width = drafter.max_non_leaves_per_layer
        run = drafter.max_draft_len + drafter.num_eagle_layers * width
        run = -(-run // POSITION_BLOCK) * POSITION_BLOCK
        drafters = dataclasses.replace(
            sizes, tokens=max(sizes.tokens, width), typical_tokens=width, positions=positions + run
        )
    return NetworkConfig(library, capabilities, sizes, drafters)


def write_networks(
    trt: Any, builder: Any, plan: TorchPlan, checkpoint: CheckpointConfig,
    networks: NetworkConfig, folder: Path,
) -> Iterator[tuple[str, NetworkWriter]]:  # fmt: skip
    """Yield each file's name and network; write the drafted tokens into the folder."""
    model, drafter = checkpoint.model, checkpoint.drafter
    third = drafter.eagle3 if isinstance(drafter, EagleParams) else None
    writes: Any = (
        partial(write_target, observed_layers=third.aux_layers if third else ()),
        write_head,
    )
    make = partial(NetworkWriter, trt, builder, TORCH_DTYPES[model.dtype])
    weights: dict[str, Tensor] = {}
    for rank in range(model.tp_size):
        weights = read_weights(plan, name_weight_file(model, rank))
        for name, write in zip(name_networks(rank), writes, strict=True):
            writer = make(networks.sizes, rank)  # the former's constants are let go
            write(writer, model, weights)
            yield name, writer
    if drafter is None:
        return
    if model.tp_size > 1:  # with the target's embedding, whole
        embedding = TensorInfo(model.dtype, (model.vocab_size, model.hidden_size))
        own = plan.files[DRAFTER_NAME] | {EMBEDDING: embedding}
        plan = dataclasses.replace(plan, files=plan.files | {DRAFTER_NAME: own})
        weights = read_weights(plan, DRAFTER_NAME)
    for name in list_networks(drafter):
        writer = make(networks.drafter_sizes)
        write_drafter(name, writer, drafter, model, weights)
        yield name, writer
    drafter_tensors = take_drafter_tensors(weights, EAGLE_NET)
    if (offsets := take_offsets(drafter_tensors, model.vocab_size)) is not None:
        infos = {OFFSETS: TensorInfo("int64", tuple(offsets.shape))}
        write_tensor_file(folder / OFFSETS_FILE, infos, lambda _: to_array(offsets))


def write_engines(
    trt: Any, plan: TorchPlan, checkpoint: CheckpointConfig, networks: NetworkConfig, folder: Path
) -> int:
    """Build every network into its file; return how many layers they have."""
    builder = trt.Builder(make_logger(trt))
    wanted = networks.compute_capabilities if describe_library(trt).compute_capabilities else []
    num_layers = 0
    for name, writer in write_networks(trt, builder, plan, checkpoint, networks, folder):
        began = time.monotonic()
        engine = writer.build(wanted)
        with open(folder / name, "wb") as file:
            file.write(engine)
        num_layers += writer.network.num_layers
        logger.info(
            "%s: %d layers, %.1f MB of weights, %.1f MB, %.1f s", name, writer.network.num_layers,
            writer.num_bytes / 1e6, engine.nbytes / 1e6, time.monotonic() - began,
        )  # fmt: skip
    return num_layers
