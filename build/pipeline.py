"""Checkpoint folder to engine folder: read, check everything, write aside, rename."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from specdec import logs
from specdec.errors import SpecDecError
from specdec.schema import read_checkpoint_config
from specdec.settings import require, to_plain
from specdec.storage import check_output_dir, describe_file, stage_folder, write_manifest
from specdec.vocabulary import read_recorded

from .settings import BuildSettings

logger = logs.get_logger(__name__)


def build_engine(settings: BuildSettings) -> dict[str, Any]:
    """Build an engine and return what was built; with `dry_run`, only check and describe it."""
    from .backends.torch_engine import describe_plan, plan_build, write_engine
    from .limits import resolve_limits

    require(settings, "checkpoint_dir", "output_dir")
    assert settings.checkpoint_dir is not None
    assert settings.output_dir is not None
    if settings.backend == "tensorrt-llm":
        raise SpecDecError(
            "this release of specdec builds for the torch backend only",
            "leave --backend out; the checkpoint itself is what trtllm-build of TensorRT-LLM reads",
        )
    began = time.monotonic()
    folder: Path = settings.checkpoint_dir
    checkpoint = read_checkpoint_config(folder)
    limits = resolve_limits(settings, checkpoint)
    check_output_dir(settings.output_dir, force=settings.force, inputs=[folder])
    plan = plan_build(settings, checkpoint, folder)
    report = {
        "engine_dir": str(settings.output_dir),
        "method": checkpoint.method.name if checkpoint.method else "plain",
        **describe_plan(plan, limits),
    }
    if settings.dry_run:
        return {"dry_run": True, **report}
    sources = [describe_file(folder / name) for name in ("config.json", "rank0.safetensors")]
    with stage_folder(settings.output_dir, force=settings.force, inputs=[folder]) as staged:
        hashes = write_engine(plan, checkpoint, limits, staged)
        write_manifest(
            staged, kind="engine", settings=to_plain(settings), sources=sources, hashes=hashes,
            vocabulary=read_recorded(settings.checkpoint_dir),
        )  # fmt: skip
    seconds = round(time.monotonic() - began, 2)
    logger.info(
        "engine %s: %s, %d tensors, %.1f MB, %s, %.1f s",
        settings.output_dir, report["method"], report["num_tensors"],
        plan.num_bytes / 1e6,
        "native kernels" if plan.compile_kernels else "no native kernels", seconds,
    )  # fmt: skip
    return {"dry_run": False, **report, "build_seconds": seconds}
