"""Arguments of ModelRunnerCpp.from_dir, by which a TensorRT-LLM engine is loaded."""

from __future__ import annotations

import inspect
from typing import Any

from specdec.decode.drafters import eagle, medusa
from specdec.decode.drafters.lookahead import choose_lookahead, fit_lookahead
from specdec.decode.drafters.trees import grow_choices
from specdec.decode.settings import DecodeSettings
from specdec.errors import SpecDecError, UsageError
from specdec.methods import METHODS
from specdec.methods.draft_target import DraftOptions
from specdec.methods.eagle import EagleDraft, EagleParams
from specdec.methods.eagle import read_options as read_eagle_options
from specdec.methods.lookahead import LookaheadConfig
from specdec.methods.lookahead import read_options as read_lookahead_config
from specdec.methods.medusa import MedusaDraft, MedusaParams
from specdec.methods.medusa import read_options as read_medusa_tree
from specdec.options import list_given, name_flag
from specdec.trtllm.engine_folder import EngineFolder
from specdec.trtllm.run_checks import EAGLE, MEDUSA
from specdec.trtllm.runner import has_orchestrator


def make_shared_options(fraction: float | None) -> dict[str, Any]:
    """Return the arguments of from_dir that every engine of a run has in common."""
    return {} if fraction is None else {"kv_cache_free_gpu_memory_fraction": fraction}


def make_method_options(settings: DecodeSettings, folder: EngineFolder) -> dict[str, Any]:
    """Return the arguments of from_dir that the engine's own method needs."""
    options: dict[str, Any] = {}
    tree = read_medusa_tree(settings)
    if folder.mode == MEDUSA:
        if isinstance(tree, int):
            raise UsageError(
                "--medusa-tree-tokens: TensorRT-LLM's trees of Medusa are static",
                "give the tree by --medusa-choices, or leave both out",
            )
        params = MedusaParams(
            num_heads=folder.pretrained["num_medusa_heads"],
            num_layers=folder.pretrained.get("num_medusa_layers", 1),
            max_draft_len=folder.max_draft_len,
        )
        # The runtime's own default tree is for four heads and 63 tokens.
        default_tree = grow_choices(params.num_heads, params.max_draft_len, folder.vocab_size)
        if tree is not None:
            medusa.check_choices(tree, params, folder.vocab_size)
        options["medusa_choices"] = [list(path) for path in tree or default_tree]
    elif tree is not None:
        raise _make_idle_error(name_flag(list_given(settings, MedusaDraft)[0]), folder)
    options |= make_eagle_options(settings, folder)
    if folder.mode in (MEDUSA, EAGLE):
        # from_dir turns it off after it has handed it on, so that it stays on unless told here.
        options["multi_block_mode"] = False
    window = make_window(settings, folder)
    if window is not None:
        options["lookahead_config"] = [
            window.window_size, window.ngram_size, window.verification_set_size
        ]  # fmt: skip
    return options


def make_window(settings: DecodeSettings, folder: EngineFolder) -> LookaheadConfig | None:
    """Return a lookahead engine's window, which must fill its drafts; None for others."""
    config = read_lookahead_config(settings)
    if config is None and folder.mode == METHODS["lookahead"].mode:
        config = fit_lookahead(folder.max_draft_len)
    window = choose_lookahead(config, folder.mode, folder.max_draft_len)
    if window is not None and window.max_draft_tokens != folder.max_draft_len:
        raise SpecDecError(
            f"lookahead {window} drafts {window.max_draft_tokens} tokens a step, and TensorRT-LLM"
            f" needs exactly the engine's max_draft_len, {folder.max_draft_len}",
            f"give {fit_lookahead(folder.max_draft_len)}, or build with --max-draft-len"
            f" {window.max_draft_tokens}",
        )
    return window


def make_eagle_options(settings: DecodeSettings, folder: EngineFolder) -> dict[str, Any]:
    """Return from_dir's arguments for the tree of an EAGLE engine: static, or dynamic as EAGLE-2's.

    The runtime drops choices where a dynamic tree is on, needs its width then, and wants a static
    tree to be as deep as the engine: its default one is for engines four deep.
    """
    options = read_eagle_options(settings)
    if folder.mode != EAGLE:
        if options is not None:
            raise _make_idle_error(name_flag(list_given(settings, EagleDraft)[0]), folder)
        return {}
    if options is not None and options.num_tokens is not None:
        raise UsageError(
            "--eagle-tree-tokens: TensorRT-LLM's dynamic tree has as many tokens as the engine",
            "leave it out; the engine's max_draft_len decides",
        )
    params = EagleParams.from_checkpoint(folder.pretrained)
    choices = eagle.grow_deepest(params) if options is None else options.choices
    if options is not None and choices is None:
        width = eagle.count_top_k(params) if options.top_k is None else options.top_k
        eagle.check_top_k(width, params)
        return {"eagle_use_dynamic_tree": True, "eagle_dynamic_tree_max_top_k": width}
    if not choices:
        raise SpecDecError(
            f"the engine's max_draft_len is {params.max_draft_len}, and TensorRT-LLM's static tree"
            f" is as deep as its num_eagle_layers, {params.num_eagle_layers}",
            "give --eagle-use-dynamic-tree, or convert with a larger --max-draft-len",
        )
    eagle.check_choices(choices, params)
    depth = max(map(len, choices))
    if depth != params.num_eagle_layers:
        raise UsageError(
            f"--eagle-choices is {depth} deep, and TensorRT-LLM needs exactly num_eagle_layers"
            f" {params.num_eagle_layers}",
            "make the longest path as long",
        )
    return {"eagle_choices": [list(path) for path in choices]}


def _make_idle_error(flag: str, folder: EngineFolder) -> UsageError:
    return UsageError(
        f"{flag} has no effect with an engine that runs {folder.method}", "leave it out"
    )


def choose_logits(is_wanted: bool, runtime: Any) -> dict[str, Any]:
    """Return 1.x's argument of from_dir for logits; before 1.0 the build alone decides."""
    name = "gather_generation_logits"
    is_known = name in inspect.signature(runtime.from_dir).parameters
    return {name: True} if is_wanted and is_known else {}


def place_pair(
    options: DraftOptions,
    folder: EngineFolder,
    draft: EngineFolder,
    runtime: Any,
    *,
    num_processes: int,
    fraction: float | None,
) -> list[dict[str, Any]]:
    """Return from_dir's arguments by which target and draft engine find their GPUs, in that order.

    Both are led from this one process, which needs the orchestrator mode for more than one rank.
    """
    is_orchestrated = has_orchestrator(runtime)
    if num_processes != 1:
        raise SpecDecError(
            f"MPI has {num_processes} processes, and both engines are led from a single one",
            "run it without mpirun or srun",
        )
    placements: list[dict[str, Any]] = []
    for role, engine, devices in (
        ("target", folder, options.target_devices),
        ("draft", draft, options.draft_devices),
    ):
        if engine.world_size > 1 and not is_orchestrated:
            raise SpecDecError(
                f"the {role} engine has {engine.world_size} ranks, and this TensorRT-LLM has no"
                " orchestrator mode to lead them beside a second engine",
                "use release 1.0 or later, or engines of one rank",
            )
        device_ids = list(range(engine.world_size)) if devices is None else list(devices)
        placements.append({"rank": 0, "device_ids": device_ids})
        if is_orchestrated:
            placements[-1]["is_orchestrator_mode"] = True
    shared_devices = set(placements[0]["device_ids"]) & set(placements[1]["device_ids"])
    if shared_devices and fraction is None:
        raise SpecDecError(
            f"target and draft engine share GPU {', '.join(map(str, sorted(shared_devices)))},"
            " and each KV cache would take 0.9 of what is free there",
            "give --kv-cache-free-gpu-memory-fraction, 0.4 for instance, or --draft-devices and"
            " --target-devices",
        )
    return placements
