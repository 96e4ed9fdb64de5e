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
    stops, warnings, rebuild = Problems(), Problems(), "build the engine again here"
    for key, name in (("tensorrt_llm", "TensorRT-LLM"), ("tensorrt", "TensorRT")):
        built, current_value = build_environment.get(key), getattr(environment, key)
        is_known = (
            key == "tensorrt" or current_value is None or find_facts(current_value) is not None
        )
        if current_value is None and key == "tensorrt_llm":
            fact = f"the engine was built with {name} {built or 'of an unknown version'},"
            package = f"tensorrt-llm{f'=={built}' if built else ''}"
            remedy = f"install {package}, in NVIDIA's container for instance"
            stops.add(f"{fact} which is not installed here", remedy)
        elif current_value is not None and built not in (None, current_value):
            remedy = f"install {name.lower()}=={built}" + (f", or {rebuild}" if is_known else "")
            stops.add(f"the engine was built with {name} {built}, here is {current_value}", remedy)
        elif not is_known:
            stops.add(*explain_unknown(current_value))
    built_cuda = build_environment.get("cuda")
    if None not in (built_cuda, environment.cuda) and built_cuda != environment.cuda:
        fact = f"the engine was built under CUDA {built_cuda}, here is {environment.cuda}"
        warnings.add(fact, f"if it does not load, {rebuild}")
    stopping, further = _compare_gpus(
        build_environment.get("gpus") or [], environment.gpus, num_ranks
    )
    return Problems(stops + stopping), Problems(warnings + further)


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
