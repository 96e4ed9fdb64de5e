"""Whether an engine folder can run on this machine."""

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


def check_engine(folder: Path, machine: dict[str, Any], here: Environment) -> dict[str, Any]:
    """Return what stands in the way of an engine, and what does not but is worth knowing."""
    expect_folder(folder, ENGINE, "--engine-dir")
    document = read_json(folder / "config.json")
    if not isinstance(document.get("build_config"), dict):
        raise refuse_config(folder)
    backend = document.get("backend", "tensorrt-llm")
    pretrained = document.get("pretrained_config")
    checkpoint = parse_checkpoint_config(pretrained if isinstance(pretrained, dict) else {})
    checks = {TORCH: _check_torch, TENSORRT: _check_networks}
    check = checks.get(backend, _check_tensorrt_llm)
    problems, notes = check(folder, document, checkpoint, machine, here)
    if (folder / NAME).is_file():
        changes, lacks = find_changes(folder)
        own = str(folder / "config.json")  # which is checked, and may have been changed on purpose
        problems += [(fact, CHANGED_HINT) for fact in changes if not fact.startswith(own)]
        notes += [fact for fact in changes if fact.startswith(own)] + lacks
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
    machine: dict[str, Any], here: Environment,
) -> tuple[Problems, list[str]]:  # fmt: skip
    problems = Problems()
    notes: list[str] = []
    torch = machine["packages"]["torch"]
    if torch is None or order_release(torch) < MIN_TORCH:
        problems.add(
            f"the torch backend needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer, here is"
            f" {torch or 'none'}",
            "pip install --upgrade torch",
        )
    config = read_engine_config(folder)
    on_gpu = bool(here.gpus) and here.cuda is not None
    if config.kernels is None and not on_gpu:
        notes.append("it has no native kernels: it runs on torch's own operators")
    elif config.kernels is not None and not on_gpu:
        if config.kernels.get("cpu") != describe_cpu() or not find_kept(config.kernels):
            notes.append(
                "its native kernels are not kept here: the first run compiles them"
                if machine["compiler"]
                else "its native kernels are not kept here and there is no C++ compiler: it runs on"
                " torch's own operators, slower"
            )
    problems += find_engine_problems(folder, config)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    ranks, cores = checkpoint.model.tp_size, machine["cpu"]["cores"] or 1
    if on_gpu:
        problems += _check_memory(-(-size // ranks), here.gpus[0].memory_bytes, here.gpus[0].name)
        if len(here.gpus) < ranks:
            notes.append(f"its {ranks} ranks will not have a GPU each: {len(here.gpus)} visible")
    else:
        problems += _check_memory(size, machine["cpu"]["available_bytes"] or 0, "this machine")
        if cores < ranks > 1:
            notes.append(f"its {ranks} ranks share {cores} cores")
    return problems, notes


def _check_tensorrt_llm(
    folder: Path, document: dict[str, Any], checkpoint: CheckpointConfig,
    machine: dict[str, Any], here: Environment,
) -> tuple[Problems, list[str]]:  # fmt: skip
    num_ranks = checkpoint.model.tp_size * checkpoint.model.pp_size
    problems = Problems()
    notes: list[str] = []
    files = [folder / f"rank{rank}.engine" for rank in range(num_ranks)]
    if absent := [path.name for path in files if not path.is_file()]:
        problems.add(f"{folder} lacks {join_names(absent)}", "copy the folder again")
    manifest = folder / "manifest.json"
    recorded = read_json(manifest).get("environment") if manifest.is_file() else None
    if not isinstance(recorded, dict):
        notes.append("it has no record of the machine that built it: only its version is compared")
        recorded = {"tensorrt_llm": document.get("version")}
    stops, others = compare_environments(recorded, here, num_ranks=num_ranks)
    problems += stops
    notes += [f"{fact}: {remedy}" for fact, remedy in others]
    mode = list_mode_names().get(document["build_config"].get("speculative_decoding_mode"))
    notes += list_defects(str(document.get("version")), mode, checkpoint.raw)
    problems += Problems.where(
        (num_ranks > 1 and not can_start_ranks(machine["mpi"]["launchers"]),
         f"the engine has {num_ranks} ranks and no mpirun is found", "install OpenMPI"),
        (here.tensorrt_llm is not None and machine["packages"].get("mpi4py") is None,
         "TensorRT-LLM does not load without mpi4py, which is not installed",
         "pip install mpi4py"),
    )  # fmt: skip
    if here.gpus and not absent:
        largest = max(path.stat().st_size for path in files)
        problems += _check_memory(largest, here.gpus[0].memory_bytes, here.gpus[0].name)
    return problems, notes


def _check_networks(
    folder: Path, document: dict[str, Any], checkpoint: CheckpointConfig,
    machine: dict[str, Any], here: Environment,
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
    told, ranks = machine["tensorrt"], checkpoint.model.tp_size
    problems += Problems.where(
        (0 < len(here.gpus) < ranks,
         f"its {ranks} ranks need a GPU each, {len(here.gpus)} visible", "use more GPUs"),
        (not here.gpus, "it runs on a GPU, and none is visible", "use a machine with a GPU"),
    )  # fmt: skip
    for gpu in here.gpus[:1]:
        library = Library(told["name"], told["compute_capabilities"])
        problems += find_machine_problems(
            folder, networks, library, gpu.name, gpu.compute_capability
        )
        if not problems:
            size = sum((folder / file).stat().st_size for file in list_files(checkpoint))
            problems += _check_memory(-(-size // ranks), gpu.memory_bytes, gpu.name)
    return problems, []


def _check_memory(needed: int, room: int, where: str) -> Problems:
    fact = f"the weights take {needed / 1e9:.1f} GB, {where} has {room / 1e9:.1f} GB"
    remedy = "use a machine with more memory, more ranks or a quantized model"
    return Problems.where((0 < room < needed, fact, remedy))
