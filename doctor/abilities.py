"""What can be done here, and what stands in the way of the rest; which versions go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from specdec.trtllm.environment import (
    MIN_CAPABILITY,
    MIN_CAPABILITY_FP8,
    Environment,
    parse_capability,
)
from specdec.trtllm.facts import (
    LABELS,
    Facts,
    explain_unknown,
    find_facts,
    load_facts,
    order_release,
)

MIN_TORCH = (2, 6)
MIN_TRANSFORMERS = (4, 57)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ability:
    """Something specdec does; `reasons` say why not here, none where it does."""

    what: str
    reasons: list[str]

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "can": not self.reasons, "reasons": self.reasons}


def list_abilities(machine: dict[str, Any], here: Environment) -> list[Ability]:
    """List what specdec does, each with what is missing for it here."""
    packages = machine["packages"]
    torch = _find_torch_reasons(packages["torch"])
    transformers = [] if packages["transformers"] else ["transformers is not installed"]
    no_compiler = [] if machine["compiler"] else ["no C++ compiler is found: install g++"]
    tensorrt = _find_tensorrt_reasons(machine, here)
    builds = tensorrt + (
        [] if machine["trtllm_build"] or here.tensorrt_llm is None
        else ["trtllm-build is not on PATH"]
    )  # fmt: skip
    launcher = machine["mpi"]["launchers"]
    no_mpi = [] if can_start_ranks(launcher) else ["neither mpirun nor srun is found"]
    few = ["one GPU is visible"] if len(here.gpus) == 1 else []
    return [
        Ability(what="convert checkpoints", reasons=[]),
        Ability(what="write a TensorRT-LLM build down (--dry-run, --emit-script)", reasons=[]),
        Ability(what="build and run on the torch backend", reasons=torch + transformers),
        Ability(what="native CPU kernels of the torch backend", reasons=torch + no_compiler),
        Ability(what="the torch backend on a GPU", reasons=torch + _find_cuda_reasons(here)),
        Ability(what="build TensorRT-LLM engines", reasons=builds),
        Ability(
            what="build TensorRT-LLM engines of an FP8 checkpoint",
            reasons=builds + _find_capability_reasons(here, MIN_CAPABILITY_FP8),
        ),
        Ability(what="run TensorRT-LLM engines", reasons=tensorrt),
        Ability(what="run TensorRT-LLM engines of several ranks", reasons=tensorrt + no_mpi + few),
    ]


def can_start_ranks(launchers: Collection[str]) -> bool:
    """Whether several ranks can be started: specdec-run calls mpirun, or is called by srun."""
    return bool({"mpirun", "srun"} & set(launchers))


def _find_torch_reasons(version: str | None) -> list[str]:
    if version is None:
        return ["torch is not installed"]
    if order_release(version) < MIN_TORCH:
        needed = ".".join(map(str, MIN_TORCH))
        return [f"torch {version} is older than {needed}, the first that loads files safely"]
    return []


def _find_cuda_reasons(here: Environment) -> list[str]:
    reasons = []
    if here.cuda is None:
        reasons.append("the installed torch is built without CUDA")
    if not here.gpus:
        reasons.append("no GPU is visible")
    return reasons


def _find_capability_reasons(here: Environment, needed: tuple[int, int]) -> list[str]:
    return [
        f"{gpu.name} has compute capability {gpu.compute_capability}, {needed[0]}.{needed[1]} is"
        " needed"
        for gpu in here.gpus[:1]
        if gpu.capability < needed
    ]


def _find_tensorrt_reasons(machine: dict[str, Any], here: Environment) -> list[str]:
    reasons = []
    if here.tensorrt_llm is None:
        reasons.append("TensorRT-LLM is not installed")
    elif find_facts(here.tensorrt_llm) is None:
        reasons.append(explain_unknown(here.tensorrt_llm)[0])
    if here.tensorrt_llm is not None and machine["packages"].get("mpi4py") is None:
        reasons.append("mpi4py is not installed, and TensorRT-LLM does not load without it")
    if not here.gpus:
        reasons.append("no GPU is visible")
    reasons += _find_capability_reasons(here, MIN_CAPABILITY)
    runtime, driver = machine["cuda"]["runtime"], here.cuda_driver
    if runtime and driver and parse_capability(driver) < parse_capability(runtime):
        reasons.append(f"the driver runs CUDA {driver} at most, torch is built for {runtime}")
    return reasons


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
    """List what is installed beside TensorRT-LLM in another version than belongs to it."""
    facts = find_facts(here.tensorrt_llm) if here.tensorrt_llm else None
    if facts is None or facts.label != _get_exact_label(here.tensorrt_llm, facts):
        return []
    installed = {
        "python": machine["python"], "cuda": here.cuda, **machine["packages"],
    }  # fmt: skip
    problems = []
    for name, pinned in facts.pins.items():
        version = installed.get(name)
        if version is None:
            continue
        if not any(order_release(version) == order_release(one) for one in pinned.split(", ")):
            problems.append(
                f"TensorRT-LLM {here.tensorrt_llm} goes with {name}"
                f" {pinned.replace(', ', ' or ')}, here is {version}"
            )
    return problems


def _get_exact_label(version: str | None, facts: Facts) -> str:
    """The pins are those of the line's own release; an earlier 1.x had others."""
    first, second = order_release(version or "")
    return facts.label if facts.label == f"{first}.{second}" else ""
