"""Check of an engine folder against the machine that is to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.checkpoint.config import CheckpointConfig, parse_checkpoint_config
from specdec.engine.compiler import describe_cpu
from specdec.engine.kernel_cache import find_kept
from specdec.engine.layout import find_engine_problems, read_engine_config
from specdec.errors import Problems, join_names
from specdec.files.folders import ENGINE, TENSORRT, TORCH, expect_folder
from specdec.files.manifest import CHANGED_HINT, NAME, find_changes
from specdec.files.reading import read_json
from specdec.trtllm.engine_folder import list_mode_names, refuse_config
from specdec.trtllm.environment import Environment, compare_environments
from specdec.trtllm.facts import order_release
from specdec.trtllm.lacks import list_defects

from .abilities import MIN_TORCH, can_start_ranks


def check_engine(folder: Path, machine: dict[str, Any], environment: Environment) -> dict[str, Any]:
    """Return the problems that keep an engine from running here, and notes beside them."""
    expect_folder(folder, ENGINE, "--engine-dir")
    document = read_json(folder / "config.json")
    if not isinstance(document.get("build_config"), dict):
        raise refuse_config(folder)
    backend = document.get("backend", "tensorrt-llm")
    pretrained = document.get("pretrained_config")
    checkpoint = parse_checkpoint_config(pretrained if isinstance(pretrained, dict) else {})
    checks = {TORCH: _check_torch, TENSORRT: _check_networks}
    check = checks.get(backend, _check_tensorrt_llm)
    problems, notes = check(folder, document, checkpoint, machine, environment)
    if (folder / NAME).is_file():
        changes, lacks = find_changes(folder)
        config_path = str(folder / "config.json")  # is checked; may be changed on purpose
        problems += [(fact, CHANGED_HINT) for fact in changes if not fact.startswith(config_path)]
        notes += [fact for fact in changes if fact.startswith(config_path)] + lacks
    else:
        notes.append(f"it has no {NAME}: its files cannot be compared with what was built")
    return {
        "engine_dir": str(folder),
        "backend": backend,
        "method": checkpoint.method.name if checkpoint.method else "plain",
        "dtype": checkpoint.model.dtype,
        "tp_size": checkpoint.model.tp_size,
        "can_run": not problems,
        "problems": [{"fact": fact, "remedy": remedy} for fact, remedy in problems],
        "notes": notes,
    }


def _check_torch(
    folder: Path, document: dict[str, Any], checkpoint: CheckpointConfig,
    machine: dict[str, Any], environment: Environment,
) -> tuple[Problems, list[str]]:  # fmt: skip
    problems = Problems()
    torch = machine["packages"]["torch"]
    if torch is None or order_release(torch) < MIN_TORCH:
        problems.add(
            f"the torch backend needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer, here is"
            f" {torch or 'none'}",
            "pip install --upgrade torch",
        )
    config = read_engine_config(folder)
    problems += find_engine_problems(folder, config)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    ranks, cores = checkpoint.model.tp_size, machine["cpu"]["cores"] or 1
    notes: list[str] = []
    if environment.gpus and environment.cuda is not None:
        gpu = environment.gpus[0]
        problems += _check_memory(-(-size // ranks), gpu.memory_bytes, gpu.name)
        if len(environment.gpus) < ranks:
            num_gpus = len(environment.gpus)
            notes.append(f"its {ranks} ranks will not have a GPU each: {num_gpus} visible")
    else:
        notes += _describe_kernels(config.kernels, machine)
        problems += _check_memory(size, machine["cpu"]["available_bytes"] or 0, "this machine")
        if cores < ranks > 1:
            notes.append(f"its {ranks} ranks share {cores} cores")
    return problems, notes


def _describe_kernels(kernels: dict[str, Any] | None, machine: dict[str, Any]) -> list[str]:
    """Return a note where an engine's native kernels are not ready on this machine."""
    if kernels is None:
        return ["it has no native kernels: it runs on torch's own operators"]
    if kernels.get("cpu") == describe_cpu() and find_kept(kernels):
        return []
    if machine["compiler"]:
        return ["its native kernels are not kept here: the first run compiles them"]
    return [
        "its native kernels are not kept here and there is no C++ compiler: it runs on torch's own"
        " operators, slower"
    ]


def _check_tensorrt_llm(
    folder: Path, document: dict[str, Any], checkpoint: CheckpointConfig,
    machine: dict[str, Any], environment: Environment,
) -> tuple[Problems, list[str]]:  # fmt: skip
    num_ranks = checkpoint.model.tp_size * checkpoint.model.pp_size
    paths = [folder / f"rank{rank}.engine" for rank in range(num_ranks)]
    problems = Problems()
    notes: list[str] = []
    if missing_files := [path.name for path in paths if not path.is_file()]:
        problems.add(f"{folder} lacks {join_names(missing_files)}", "copy the folder again")
    manifest = folder / "manifest.json"
    build_environment = read_json(manifest).get("environment") if manifest.is_file() else None
    if not isinstance(build_environment, dict):
        notes.append("it has no record of the machine that built it: only its version is compared")
        build_environment = {"tensorrt_llm": document.get("version")}
    stops, warnings = compare_environments(build_environment, environment, num_ranks=num_ranks)
    problems += stops
    notes += [f"{fact}: {remedy}" for fact, remedy in warnings]
    mode = list_mode_names().get(document["build_config"].get("speculative_decoding_mode"))
    notes += list_defects(str(document.get("version")), mode, checkpoint.raw)
    problems += Problems.from_table(
        (num_ranks > 1 and not can_start_ranks(machine["mpi"]["launchers"]),
         f"the engine has {num_ranks} ranks and no mpirun is found", "install OpenMPI"),
        (environment.tensorrt_llm is not None and machine["packages"].get("mpi4py") is None,
         "TensorRT-LLM does not load without mpi4py, which is not installed",
         "pip install mpi4py"),
    )  # fmt: skip
    if environment.gpus and not missing_files:
        size, gpu = max(path.stat().st_size for path in paths), environment.gpus[0]
        problems += _check_memory(size, gpu.memory_bytes, gpu.name)
    return problems, notes


def _check_networks(
    folder: Path, document: dict[str, Any], checkpoint: CheckpointConfig,
    machine: dict[str, Any], environment: Environment,
) -> tuple[Problems, list[str]]:  # fmt: skip
    from specdec.trt.engine import (
        find_machine_problems,
        find_network_problems,
        list_files,
        read_network_config,
    )
    from specdec.trt.library import Library

    _, networks = read_network_config(folder)
    problems = find_network_problems(folder, checkpoint)
    trt_facts, ranks, gpus = machine["tensorrt"], checkpoint.model.tp_size, environment.gpus
    problems += Problems.from_table(
        (0 < len(gpus) < ranks,
         f"its {ranks} ranks need a GPU each, {len(gpus)} visible", "use more GPUs"),
        (not gpus, "it runs on a GPU, and none is visible", "use a machine with a GPU"),
    )  # fmt: skip
    for gpu in gpus[:1]:
        library = Library(trt_facts["name"], trt_facts["compute_capabilities"])
        problems += find_machine_problems(
            folder, networks, library, gpu.name, gpu.compute_capability
        )
        if not problems:
            size = sum((folder / file).stat().st_size for file in list_files(checkpoint))
            problems += _check_memory(-(-size // ranks), gpu.memory_bytes, gpu.name)
    return problems, []


def _check_memory(weight_bytes: int, memory_bytes: int, device: str) -> Problems:
    """Return a problem where the weights do not fit; memory of 0 bytes is not known."""
    fact = f"the weights take {weight_bytes / 1e9:.1f} GB, {device} has {memory_bytes / 1e9:.1f} GB"
    remedy = "use a machine with more memory, more ranks or a quantized model"
    return Problems.from_table((0 < memory_bytes < weight_bytes, fact, remedy))
