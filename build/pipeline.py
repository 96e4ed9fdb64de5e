"""Checkpoint folder to engine folder: read, check everything, write aside, rename."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.checkpoint.config import CheckpointConfig, read_checkpoint_config
from specdec.checkpoint.inventory import describe_sources
from specdec.command.settings import make_unknown_error, require, to_plain
from specdec.errors import UsageError
from specdec.files.acceptance import copy_acceptance
from specdec.files.folders import TENSORRT, TENSORRT_LLM, TORCH
from specdec.files.manifest import write_manifest
from specdec.files.staging import check_free_space, check_output_dir, name_final, stage_folder
from specdec.files.vocabulary import read_recorded
from specdec.options import get_flags, name_flag, refuse_contradictions
from specdec.system import logs
from specdec.text.tokenizer import check_tokenizer, copy_tokenizer

from .settings import BuildSettings

if TYPE_CHECKING:
    from specdec.engine.layout import BuildConfig

logger = logs.get_logger(__name__)


# Fields that say how TensorRT-LLM computes, not what: command lines from its pages have them.
TENSORRT_MEANS = ("gemm_plugin", "use_paged_context_fmha", "use_fp8_context_fmha", "workers")
# What one backend alone has a use for.
OWN_FIELDS = {
    TENSORRT_LLM: ("trtllm_version", "emit_script", "launcher", "emit_triton", *TENSORRT_MEANS),
    TENSORRT: ("compute_capability",),
    TORCH: ("optimize", "packed_weights", "drafter_weights", "draft_vocab_file",
            "draft_vocab_size"),
}  # fmt: skip


def build_engine(settings: BuildSettings) -> dict[str, Any]:
    """Build an engine and return what was built; with `dry_run`, only check and describe it."""
    from . import triton

    refuse_contradictions(settings, triton.CONTRADICTIONS)
    if settings.emit_triton is None:
        return build_any_engine(settings)
    require(settings)
    templates = triton.read_templates(settings)
    report = {} if settings.checkpoint_dir is None else build_any_engine(settings)
    if report and settings.dry_run:  # there is no engine yet to describe
        return report
    return report | triton.write_repository(settings, templates)


def build_any_engine(settings: BuildSettings) -> dict[str, Any]:
    """Build with the backend that is asked for."""
    require(settings, "checkpoint_dir")
    backend = choose_backend(settings)
    refuse_foreign(settings, backend)
    if backend == TENSORRT_LLM:
        from .backends.tensorrt_llm.pipeline import build_tensorrt_engine

        return build_tensorrt_engine(settings)
    return build_own_engine(settings, backend)


def check_before_checkpoint(
    settings: BuildSettings, checkpoint: CheckpointConfig
) -> BuildConfig | None:
    """Return the limits of a planned checkpoint's engine, None with TensorRT-LLM.

    Raises SpecDecError for what can be known before the checkpoint's tensors are there.
    """
    backend = choose_backend(settings)
    refuse_foreign(settings, backend)
    if backend == TENSORRT_LLM:
        from specdec.trtllm.environment import read_environment

        from .backends.tensorrt_llm.pipeline import check_installed

        check_installed(read_environment())
        return None
    if backend == TENSORRT:
        from .backends.tensorrt import check_target

        check_target(settings, checkpoint)
    from .backends.torch_checks import check_config
    from .backends.torch_tensors import plan_layout
    from .limits import resolve_limits

    limits = resolve_limits(settings, checkpoint)
    check_config(settings, checkpoint)
    plan_layout(settings, checkpoint, set())
    return limits


def choose_backend(settings: BuildSettings) -> str:
    """Return the backend; `auto` takes TensorRT-LLM where it is there, with a GPU."""
    if settings.backend != "auto":
        return settings.backend
    from specdec.trtllm.environment import is_importable, list_gpus

    if not is_importable("tensorrt_llm") or not list_gpus()[0]:
        return "torch"
    logger.info("backend tensorrt-llm: it is installed here, and a GPU is visible")
    return "tensorrt-llm"


def refuse_foreign(settings: BuildSettings, backend: str) -> None:
    """Raise UsageError for what only other backends take than this one.

    Where nobody asked for torch, what says how TensorRT-LLM computes is named and has no effect.
    """
    from specdec.trtllm.facts import list_lines_with

    flags, remedy = get_flags(BuildSettings), "leave {} out, or give --backend {}"
    for name, other in settings.unknown_options.items() if backend != TENSORRT_LLM else ():
        if not list_lines_with(name):
            raise make_unknown_error(BuildSettings, "build", name, other)
        shown = name_flag(name)
        fact = f"{shown} is a flag of trtllm-build, which the {backend} backend has no use for"
        raise UsageError(fact, remedy.format(shown, TENSORRT_LLM))
    given = {
        name: taker for taker, names in OWN_FIELDS.items() for name in names
        if taker != backend and getattr(settings, name) != flags[name][1]
    }  # fmt: skip
    if settings.backend == "auto" and given and set(given) <= set(TENSORRT_MEANS):
        shown = ", ".join(name_flag(name) for name in given)
        logger.warning("no effect on the torch backend, which was chosen here: %s", shown)
    elif given:
        name, taker = next(iter(given.items()))
        shown = name_flag(name)
        fact = f"{shown} has no meaning for the {backend} backend"
        raise UsageError(fact, remedy.format(shown, taker))


def build_own_engine(settings: BuildSettings, backend: str) -> dict[str, Any]:
    """Build for the embedded engine, by torch's operators or by TensorRT's layers."""
    from specdec.engine.layout import make_build_id

    from .limits import resolve_limits

    if backend == TENSORRT:
        from .backends.tensorrt import plan_engine
    else:
        from .backends.torch_engine import plan_engine
    began = time.monotonic()
    folder: Path = settings.checkpoint_dir
    checkpoint = read_checkpoint_config(folder)
    limits = resolve_limits(settings, checkpoint)
    check_output_dir(settings.output_dir, force=settings.force, inputs=[folder])
    work = plan_engine(settings, checkpoint, limits)
    vocabulary = read_recorded(folder)
    tokenizer = settings.tokenizer_dir and check_tokenizer(settings.tokenizer_dir, vocabulary)
    report = {
        "engine_dir": str(settings.output_dir),
        "method": checkpoint.method.name if checkpoint.method else "plain",
        "backend": backend, **work.report, "build_config": dataclasses.asdict(limits),
    }  # fmt: skip
    if settings.dry_run:
        return {"dry_run": True, **report}
    check_free_space(settings.output_dir, work.num_bytes, "the engine takes at least")
    plan = work.plan
    sources = describe_sources(folder, plan.sources)
    sums, tokens = [source["sha256"] for source in sources], plan.draft_tokens
    drafted = None if tokens is None else hashlib.sha256(tokens.tobytes()).hexdigest()
    build_id = make_build_id(sums, plan.quantization, plan.drafter_weights, drafted)
    with stage_folder(settings.output_dir, force=settings.force, inputs=[folder]) as staged:
        hashes, written, told = work.write(staged, build_id)
        copy_acceptance(folder, staged)
        if tokenizer:
            copy_tokenizer(tokenizer, staged)
        write_manifest(
            staged, kind="engine", settings=to_plain(settings), sources=sources, hashes=hashes,
            vocabulary=vocabulary,
        )  # fmt: skip
    seconds = round(time.monotonic() - began, 2)
    name = name_final(settings.output_dir)
    logger.info("engine %s: %s, %s, %.1f s", name, report["method"], told, seconds)
    return {"dry_run": False, **report, **written, "build_seconds": seconds}
