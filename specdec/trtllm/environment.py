"""Installation of TensorRT-LLM on this machine, and whether an engine built elsewhere can run.

Read from package metadata, the driver and nvidia-smi: importing TensorRT-LLM takes many seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from specdec.errors import Problems
from specdec.system.machine import (
    Gpu,
    find_version,
    is_importable,
    list_gpus,
    read_cuda_driver,
    read_torch_cuda,
)

from .facts import explain_unknown, find_facts

BUILD_COMMAND = "trtllm-build"
REBUILD = "build the engine again here"  # the end of several remedies
MIN_CAPABILITY = (8, 0)
MIN_CAPABILITY_FP8 = (8, 9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """Versions by what they are of, None where it is not there; the GPUs that are visible.

    cuda is the runtime that torch brings, cuda_driver the newest that the driver can run; driver
    is the driver's own version.
    """

    tensorrt_llm: str | None = None
    tensorrt: str | None = None
    cuda: str | None = None
    cuda_driver: str | None = None
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"gpus": [dataclasses.asdict(gpu) for gpu in self.gpus]}


def read_environment() -> Environment:
    """Look at this machine; takes what nvidia-smi takes, where there is one."""
    gpus, driver = list_gpus()
    has_package = is_importable("tensorrt_llm")
    return Environment(
        tensorrt_llm=find_version("tensorrt-llm") if has_package else None,
        tensorrt=find_version("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
        cuda=read_torch_cuda(),
        cuda_driver=read_cuda_driver(),
        driver=driver,
        gpus=gpus,
    )


def compare_environments(
    build_environment: Mapping[str, Any], environment: Environment, *, num_ranks: int = 1
) -> tuple[Problems, Problems]:
    """Compare the machine that an engine's manifest records with this one, before it is loaded.

    What stops the engine, and what differs besides.

    A serialized engine loads only under the TensorRT that wrote it, and on the compute capability
    that it was made for; TensorRT-LLM's plugins are part of it.
    """
    stops = _compare_product(build_environment.get("tensorrt_llm"), environment.tensorrt_llm)
    stops += _compare_library(build_environment.get("tensorrt"), environment.tensorrt)
    warnings = Problems()
    built_cuda = build_environment.get("cuda")
    if None not in (built_cuda, environment.cuda) and built_cuda != environment.cuda:
        fact = f"the engine was built under CUDA {built_cuda}, here is {environment.cuda}"
        warnings.add(fact, f"if it does not load, {REBUILD}")
    stopping, further = _compare_gpus(
        build_environment.get("gpus") or [], environment.gpus, num_ranks
    )
    return Problems(stops + stopping), Problems(warnings + further)


def _compare_product(built: str | None, installed: str | None) -> Problems:
    """Compare the releases of TensorRT-LLM that built an engine and that is to run it."""
    problems = Problems()
    if installed is None:
        package = f"tensorrt-llm{f'=={built}' if built else ''}"
        return problems.add(
            f"the engine was built with TensorRT-LLM {built or 'of an unknown version'}, which is"
            " not installed here",
            f"install {package}, in NVIDIA's container for instance",
        )
    is_known = find_facts(installed) is not None
    if built not in (None, installed):
        remedy = f"install tensorrt-llm=={built}" + (f", or {REBUILD}" if is_known else "")
        problems.add(f"the engine was built with TensorRT-LLM {built}, here is {installed}", remedy)
    elif not is_known:
        problems.add(*explain_unknown(installed))
    return problems


def _compare_library(built: str | None, installed: str | None) -> Problems:
    """Compare the versions of TensorRT that wrote an engine and that is to load it."""
    return Problems.from_table(
        (None not in (built, installed) and built != installed,
         f"the engine was built with TensorRT {built}, here is {installed}",
         f"install tensorrt=={built}, or {REBUILD}"),
    )  # fmt: skip


def _compare_gpus(
    build_gpus: list[Mapping[str, Any]], gpus: tuple[Gpu, ...], num_ranks: int
) -> tuple[Problems, Problems]:
    if not gpus:
        return Problems().add("no GPU is visible", "run it where nvidia-smi lists one"), Problems()
    built = {str(gpu.get("compute_capability")) for gpu in build_gpus}
    capabilities = {gpu.compute_capability for gpu in gpus[:num_ranks]}
    names = {str(gpu.get("name")) for gpu in build_gpus}
    build_names, gpu_name = ", ".join(sorted(names)), gpus[0].name
    stops = Problems.from_table(
        (len(gpus) < num_ranks,
         f"the engine has {num_ranks} ranks, {len(gpus)} GPUs are visible",
         f"make {num_ranks} GPUs visible, or convert and build for fewer ranks"),
        (built and not capabilities <= built,
         f"the engine was built for compute capability {', '.join(sorted(built))} ({build_names}),"
         f" this GPU has {', '.join(sorted(capabilities - built))} ({gpu_name})",
         "build the engine on a GPU of the kind that runs it"),
    )  # fmt: skip
    is_other = built and capabilities <= built and gpu_name not in names
    fact = f"the engine was tuned on {build_names}, here is {gpu_name}"
    return stops, Problems.from_table((is_other, fact, "build it again here for full speed"))
