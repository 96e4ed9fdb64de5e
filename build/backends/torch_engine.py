"""The torch backend's build: one weight file laid out for execution, kernels for this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from specdec import __version__, logs
from specdec.engine.layout import (
    WEIGHTS_NAME,
    BuildConfig,
    EngineConfig,
    check_inventory,
    encode_engine_config,
    list_engine_tensors,
)
from specdec.errors import SpecDecError, raise_problems
from specdec.schema import CheckpointConfig
from specdec.storage import Array, TensorFile, TensorInfo, write_json, write_tensor_file
from specdec.tensors import get_rank_shape, list_tensors

from ..settings import BuildSettings

logger = logs.get_logger(__name__)


@dataclasses.dataclass(frozen=True)
class TorchPlan:
    """A checked build: the rank file to read, the tensors to write, whether to compile."""

    source: TensorFile
    tensors: dict[str, TensorInfo]
    prepack: bool
    compile_kernels: bool

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors.values())


def plan_build(settings: BuildSettings, checkpoint: CheckpointConfig, folder: Path) -> TorchPlan:
    """Check everything the torch backend needs; raise SpecDecError that lists what is wrong."""
    # Imported here, not above: this module is also what `--help` and `--dry-run` errors load.
    from specdec.engine.layers import compute_inverse_frequencies
    from specdec.engine.native import NativeKernels, find_compiler
    from specdec.torch_tensors import TORCH_DTYPES

    model, drafter = checkpoint.model, checkpoint.drafter
    problems: list[tuple[str, str]] = []
    for flag in ("gemm_plugin", "use_paged_context_fmha", "use_fp8_context_fmha"):
        if getattr(settings, flag) is not None:
            name = "--" + flag.replace("_", "-")
            problems.append((f"{name} has no meaning for the torch backend", f"leave {name} out"))
    if settings.kv_cache_type == "paged":
        problems.append(
            ("the torch backend has a continuous KV cache only", "leave --kv-cache-type out")
        )
    if model.tp_size != 1:
        problems.append(
            (
                f"the checkpoint is split for tp_size={model.tp_size}; the torch backend of this"
                " release runs one rank",
                "convert it again with --tp-size 1",
            )
        )
    if model.hidden_act != "silu":
        problems.append((f"hidden_act={model.hidden_act!r}", "the torch backend executes silu"))
    quantization = checkpoint.raw.get("quantization") or {}
    if quantization.get("quant_algo") or quantization.get("kv_cache_quant_algo"):
        problems.append(
            (
                f"the checkpoint is quantized ({quantization.get('quant_algo')}, KV cache"
                f" {quantization.get('kv_cache_quant_algo')})",
                "the torch backend of this release executes float16, bfloat16 and float32",
            )
        )
    raise_problems(problems)
    compute_inverse_frequencies(model.head_size, model.rotary_base, model.rotary_scaling)
    source = TensorFile(folder / "rank0.safetensors")
    specs = list_tensors(model, drafter)
    check_inventory(source, {n: get_rank_shape(s, model) for n, s in specs.items()}, "checkpoint")
    found = sorted({source.tensors[name].dtype for name in specs})
    if found != [model.dtype]:
        raise SpecDecError(
            f"config.json says dtype={model.dtype}, the tensors are {', '.join(found)}",
            "target and drafter must be converted with one --dtype",
        )
    shapes = list_engine_tensors(model, drafter)
    has_kernels = NativeKernels.supports(TORCH_DTYPES[model.dtype])
    if settings.optimize == "native" and not has_kernels:
        raise SpecDecError(
            f"--optimize native: there are no native kernels for {model.dtype}",
            "use --optimize auto, or convert with --dtype bfloat16 or float32",
        )
    compile_kernels = settings.optimize != "none" and has_kernels
    if settings.optimize == "auto" and compile_kernels and find_compiler() is None:
        logger.warning(
            "no C++ compiler found: the engine will run on torch's own operators, slower on a CPU"
        )
        compile_kernels = False
    tensors = {name: TensorInfo(model.dtype, shape) for name, shape in shapes.items()}
    return TorchPlan(
        source=source,
        tensors=tensors,
        prepack=settings.optimize != "none",
        compile_kernels=compile_kernels,
    )


def write_engine(
    plan: TorchPlan, checkpoint: CheckpointConfig, limits: BuildConfig, folder: Path
) -> dict[str, str]:
    """Write the engine's files into `folder`; return their sha256 sums by name where known."""
    from specdec.engine.native import compile_kernels

    def produce(name: str) -> Array:
        if ".mlp.gate_up." in name:
            parts = [name.replace("gate_up", part) for part in ("fc", "gate")]
            return np.concatenate([plan.source.read(part) for part in parts])
        return plan.source.read(name)

    kernels: dict[str, str] | None = None
    if plan.compile_kernels:
        kernels = compile_kernels(folder)
    sha256 = write_tensor_file(folder / WEIGHTS_NAME, plan.tensors, produce)
    config = EngineConfig(
        version=__version__,
        checkpoint=checkpoint,
        build=limits,
        prepack=plan.prepack,
        kernels=kernels,
    )
    write_json(folder / "config.json", encode_engine_config(config))
    return {WEIGHTS_NAME: sha256}


def describe_plan(plan: TorchPlan, limits: BuildConfig) -> dict[str, Any]:
    """What `--dry-run` and `--json` report."""
    return {
        "backend": "torch",
        "prepack": plan.prepack,
        "native_kernels": plan.compile_kernels,
        "weights_bytes": plan.num_bytes,
        "num_tensors": len(plan.tensors),
        "build_config": dataclasses.asdict(limits),
    }
