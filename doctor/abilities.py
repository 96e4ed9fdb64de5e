"""What can be done here, and what stands in the way of the rest; which versions go together."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from specdec.errors import name_extra
from specdec.trt.library import Library
from specdec.trtllm.environment import MIN_CAPABILITY, MIN_CAPABILITY_FP8, Environment
from specdec.trtllm.facts import (
    LABELS,
    Facts,
    explain_unknown,
    find_facts,
    load_facts,
    order_release,
)

MIN_TORCH = (2, 9)
MIN_TRANSFORMERS = (4, 57)


def list_abilities(machine: dict[str, Any], here: Environment) -> dict[str, list[str]]:
    """What specdec does, each with what is missing for it here; nothing where it can be done."""
    packages, launchers = machine["packages"], machine["mpi"]["launchers"]
    torch, tensorrt = _find_torch_reasons(packages["torch"]), _find_tensorrt_reasons(machine, here)
    told = machine["tensorrt"]
    library = Library(told["name"], told["compute_capabilities"])
    networks = _choose((told["error"], told["error"]))
    unusable = [library.explain(gpu.name, gpu.compute_capability) for gpu in here.gpus[:1]]
    has_no_command = not machine["trtllm_build"] and here.tensorrt_llm is not None
    builds = tensorrt + _choose((has_no_command, "trtllm-build is not on PATH"))
    return {
        "convert checkpoints": [],
        "read and write GGUF files": _choose(
            (not packages["gguf"], f"the package gguf is not installed: {name_extra('gguf')}")
        ),
        "write a TensorRT-LLM build down (--dry-run, --emit-script)": [],
        "build and run on the torch backend": torch + _choose(
            (not packages["transformers"], "transformers is not installed")
        ),
        "native CPU kernels of the torch backend": torch + _choose(
            (not machine["compiler"], "no C++ compiler is found: install g++")
        ),
        "the torch backend on a GPU": torch + _choose(
            (here.cuda is None, "the installed torch is built without CUDA"),
            (not here.gpus, "no GPU is visible"),
        ),
        "build engines of TensorRT's own layers": networks + _choose(
            (not library.compute_capabilities and not here.gpus,
             "no GPU is visible, and only TensorRT-RTX builds for others than this machine's"),
        ),
        "run engines of TensorRT's own layers": networks + torch + _choose(
            *((fact, fact) for fact in unusable),
            (not here.gpus, "no GPU is visible"),
            (here.cuda is None, "the installed torch is built without CUDA"),
        ),
        "build TensorRT-LLM engines": builds,
        "build TensorRT-LLM engines of an FP8 checkpoint": (
            builds + _find_capability_reasons(here, MIN_CAPABILITY_FP8)
        ),
        "run TensorRT-LLM engines": tensorrt,
        "run TensorRT-LLM engines of several ranks": tensorrt + _choose(
            (not can_start_ranks(launchers), "neither mpirun nor srun is found"),
            (len(here.gpus) == 1, "one GPU is visible"),
        ),
    }  # fmt: skip


def _choose(*rows: tuple[object, str]) -> list[str]:
    """The reasons of those rows (is so, reason) that are so."""
    return [reason for is_so, reason in rows if is_so]


def can_start_ranks(launchers: Collection[str]) -> bool:
    """Whether several ranks can be started: specdec-run calls mpirun, or is called by srun."""
    return bool({"mpirun", "srun"} & set(launchers))


def _find_torch_reasons(version: str | None) -> list[str]:
    if version is None:
        return ["torch is not installed"]
    needed = ".".join(map(str, MIN_TORCH))
    fact = f"torch {version} is older than {needed}, the first that loads files safely"
    return _choose((order_release(version) < MIN_TORCH, fact))


def _find_capability_reasons(here: Environment, needed: tuple[int, int]) -> list[str]:
    return [
        f"{gpu.name} has compute capability {gpu.compute_capability}, {needed[0]}.{needed[1]} is"
        " needed"
        for gpu in here.gpus[:1]
        if gpu.capability < needed
    ]


def _find_tensorrt_reasons(machine: dict[str, Any], here: Environment) -> list[str]:
    version, runtime, driver = here.tensorrt_llm, machine["cuda"]["runtime"], here.cuda_driver
    reasons = _choose((version is None, "TensorRT-LLM is not installed"))
    if version is not None and find_facts(version) is None:
        reasons.append(explain_unknown(version)[0])
    is_old = runtime and driver and order_release(driver) < order_release(runtime)
    return [
        *reasons,
        *_choose(
            (version is not None and machine["packages"].get("mpi4py") is None,
             "mpi4py is not installed, and TensorRT-LLM does not load without it"),
            (not here.gpus, "no GPU is visible"),
        ),
        *_find_capability_reasons(here, MIN_CAPABILITY),
        *_choose((is_old, f"the driver runs CUDA {driver} at most, torch is built for {runtime}")),
    ]  # fmt: skip


def list_pins() -> list[dict[str, Any]]:
    """The table of versions that go together, a row a line of TensorRT-LLM."""
    rows = []
    for label in LABELS:
        facts = load_facts(label)
        first, end = facts.releases
        rows.append(
            {"tensorrt_llm": label, "releases": f">={first},<{end}", **facts.pins,
             "fits": not find_clashes(facts), "source": facts.pins_source}
        )  # fmt: skip
    return rows


def find_clashes(facts: Facts) -> list[str]:
    """List what a line pins older than specdec asks for: pip cannot install both together."""
    return [
        f"{name} {facts.pins[name]}"
        for name, least in (("torch", MIN_TORCH), ("transformers", MIN_TRANSFORMERS))
        if order_release(facts.pins[name]) < least
    ]


def list_clashes() -> list[str]:
    """Say of each line that does not fit into one environment with specdec, why."""
    asked = " and ".join(
        f"{name} {'.'.join(map(str, least))}"
        for name, least in (("torch", MIN_TORCH), ("transformers", MIN_TRANSFORMERS))
    )
    return [
        f"TensorRT-LLM {label} brings {' and '.join(clashes)}, specdec asks for {asked} or newer:"
        " pip cannot install them together"
        for label in LABELS
        if (clashes := find_clashes(load_facts(label)))
    ]


def find_pin_problems(machine: dict[str, Any], here: Environment) -> list[str]:
    """List what is installed with TensorRT-LLM in another version than belongs to it."""
    facts = find_facts(here.tensorrt_llm) if here.tensorrt_llm else None
    # The pins are those of the line's own release; an earlier 1.x had others.
    release = ".".join(map(str, order_release(here.tensorrt_llm or "")))
    if facts is None or facts.label != release:
        return []
    installed = {"python": machine["python"], "cuda": here.cuda, **machine["packages"]}
    problems = []
    for name, pinned in facts.pins.items():
        version = installed.get(name)
        known = [order_release(one) for one in pinned.split(", ")]
        if version is not None and order_release(version) not in known:
            problems.append(
                f"TensorRT-LLM {here.tensorrt_llm} goes with {name}"
                f" {pinned.replace(', ', ' or ')}, here is {version}"
            )
    return problems
