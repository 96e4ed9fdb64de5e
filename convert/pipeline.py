"""Model to checkpoint: read what is there, plan every tensor, check all of it, then write."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.checkpoint.config import parse_checkpoint_config
from specdec.command.settings import to_plain
from specdec.errors import Problems
from specdec.files.acceptance import NAME as ACCEPTANCE_NAME
from specdec.files.manifest import check_sources, write_manifest
from specdec.files.origin import find_other_base
from specdec.files.reading import FileStates, note_states, write_json
from specdec.files.staging import (
    check_free_space,
    check_output_dir,
    list_local,
    stage_folder,
)
from specdec.files.unfinished import name_final
from specdec.methods import place_drafter
from specdec.system import logs

from . import stream
from .config import refuse_layout
from .drafter import fetch_drafter, plan_drafter
from .families.base import BACKEND_NOTES
from .flags import check_settings
from .methods import FOLDERS, find_folder
from .plan import ConversionPlan, merge_ranks
from .report import count_workers, describe_plan, describe_ranks, tells_backends
from .settings import ConvertSettings
from .target import MTP_FOLDER, PlannedTarget, plan_checkpoint, plan_target

logger = logs.get_logger(__name__)


def convert_model(settings: ConvertSettings) -> dict[str, Any]:
    """Write a checkpoint and return its description; with `dry_run`, only check and describe it."""
    start_time = time.monotonic()
    settings = complete_settings(settings)
    check_output_dir(settings.output_dir, force=settings.force, inputs=list_inputs(settings))
    has_notes = tells_backends(settings)
    with contextlib.nullcontext() if has_notes else logs.hush(BACKEND_NOTES, logging.ERROR):
        with note_states() as opened_states:
            plan = make_plan(settings)
    states = stream.get_states(plan, opened_states)
    report = describe_plan(plan, settings)
    check_free_space(settings.output_dir, report["total_bytes"], "the checkpoint takes")
    if settings.dry_run:
        report["warnings"] = warn_of_other_base(plan)
        seconds = stream.measure_hash_seconds(plan, count_workers(settings))
        return {"dry_run": True, **report, "hash_seconds": round(seconds, 2)}
    if plan.measure is not None:
        report["quality"] = plan.measure(count_workers(settings))
    report["warnings"] = write_checkpoint(plan, settings, states)
    for file in report["files"]:
        file["bytes"] = (settings.output_dir / file["path"]).stat().st_size
    seconds = round(time.monotonic() - start_time, 2)
    log_checkpoint(report, settings, plan.dtype, seconds)
    return {"dry_run": False, **report, "convert_seconds": seconds}


def write_checkpoint(
    plan: ConversionPlan, settings: ConvertSettings, states: FileStates
) -> list[str]:
    """Write the checkpoint's folder; return the warnings that the hashes of the sources gave."""
    with stage_folder(
        settings.output_dir, force=settings.force, inputs=list_inputs(settings)
    ) as staged:
        result = stream.write_plan(
            plan, staged, workers=count_workers(settings), states=states,
            allow_nonfinite=settings.allow_nonfinite, allow_zeros=settings.allow_zeros,
        )  # fmt: skip
        check_sources(result.sources)
        write_json(staged / "config.json", plan.config)
        if plan.acceptance is not None:
            plan.acceptance.write(staged / ACCEPTANCE_NAME)
        hashes = {Path(entry["path"]): entry["sha256"] for entry in result.sources}
        warnings = warn_of_other_base(plan, hashes)
        write_manifest(
            staged,
            kind="checkpoint",
            settings=to_plain(settings),
            sources=result.sources,
            hashes=result.hashes,
            vocabulary=plan.vocabulary,
            warnings=warnings,
            nonfinite={name: dataclasses.asdict(flaws) for name, flaws in result.flaws.items()},
        )
    return warnings


def log_checkpoint(
    report: Mapping[str, Any], settings: ConvertSettings, dtype: str, seconds: float
) -> None:
    """Log what was written, and which runtimes cannot load it."""
    weights = f" with {report['quant_algo']} weights" if report["quant_algo"] else ""
    logger.info(
        "checkpoint %s: %s, %s%s, %s, %d tensors, %.1f MB, %.1f s",
        name_final(settings.output_dir), report["architecture"], dtype, weights,
        describe_ranks(report), report["num_tensors"], report["total_bytes"] / 1e6, seconds,
    )  # fmt: skip
    if report["lack"] is not None and tells_backends(settings):
        takers = "other runtimes"
        if "torch" in report["backends"]:
            takers = "specdec's own backends, torch and (not every model) tensorrt"
        logger.info("%s: this checkpoint is for %s", report["lack"], takers)


def complete_settings(settings: ConvertSettings) -> ConvertSettings:
    """Return settings that name the drafter by its kind; raise UsageError for contradictions."""
    settings = place_drafter(settings, fetch_drafter(settings))
    if settings.speculative_decoding_mode is not None and find_folder(settings) is None:
        head_folder: dict[str, Any] = {MTP_FOLDER: settings.model_dir}
        settings = dataclasses.replace(settings, **head_folder)
    check_settings(settings)
    return settings


def warn_of_other_base(plan: ConversionPlan, hashes: Mapping[Path, str] | None = None) -> list[str]:
    """Log and return the warning that the drafter belongs to another target, if there is one."""
    warning = find_other_base(plan.origin, hashes) if plan.origin is not None else None
    if warning is not None:
        logger.warning("warning: %s", warning)
    return [warning] if warning is not None else []


def list_inputs(settings: ConvertSettings) -> list[Path]:
    """Return the local folders that are read."""
    return list_local(
        settings.model_dir, settings.base_model_checkpoint_dir, settings.calibration_data,
        settings.lora_dir, *(getattr(settings, folder) for folder in FOLDERS),
    )  # fmt: skip


def make_plan(settings: ConvertSettings, target: PlannedTarget | None = None) -> ConversionPlan:
    """Plan the whole conversion; raise one SpecDecError that names everything wrong with it.

    target: planned before, with the same settings and no drafter.
    """
    problems = Problems()
    if target is None:
        plan = plan_target if settings.base_model_checkpoint_dir is None else plan_checkpoint
        target = plan(settings, problems)
    option = find_folder(settings)
    drafter = plan_drafter(settings, option, target, problems) if option is not None else None
    problems.raise_all()
    config, ranks, files, origin = target.config, target.ranks, target.files, None
    if drafter is not None:
        config, origin, ranks = drafter.config, drafter.origin, merge_ranks(ranks, drafter.ranks)
        files = [*files, *(path for path in drafter.files if path not in files)]
    checkpoint = parse_checkpoint_config(
        config | {"share_embedding_table": target.model.share_embedding_table}
    )
    refuse_layout(checkpoint, settings.line)
    return ConversionPlan(
        config=config, checkpoint=checkpoint, dtype=target.model.dtype, ranks=tuple(ranks),
        source_files=tuple(files), vocabulary=target.vocabulary, origin=origin,
        acceptance=drafter.acceptance if drafter is not None else None,
        measure=target.quantizer.measure if target.quantizer is not None else None,
        left_out=target.left_out,
    )  # fmt: skip
