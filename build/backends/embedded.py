"""Checkpoint folder to an engine that `Engine` loads: check everything, write aside, rename."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.checkpoint.config import CheckpointConfig, read_checkpoint_config
from specdec.checkpoint.inventory import describe_sources
from specdec.command.settings import to_arguments, to_plain
from specdec.engine.layout import BuildConfig, make_build_id
from specdec.files.acceptance import copy_acceptance
from specdec.files.manifest import write_manifest
from specdec.files.reading import check_states, note_states
from specdec.files.staging import check_free_space, check_output_dir, stage_folder
from specdec.files.unfinished import name_final
from specdec.files.vocabulary import read_recorded
from specdec.system import logs
from specdec.text.tokenizer import check_tokenizer, copy_tokenizer

from ..limits import resolve_limits
from ..settings import BuildSettings

if TYPE_CHECKING:
    from .torch_engine import Work

logger = logs.get_logger(__name__)


def build_embedded(
    settings: BuildSettings,
    backend: str,
    plan_engine: Callable[[BuildSettings, CheckpointConfig, BuildConfig], Work],
) -> dict[str, Any]:
    """Build an engine that `specdec.Engine` runs, as a backend plans it; return what was built.

    With `dry_run`, only check and describe it.
    """
    began = time.monotonic()
    folder: Path = settings.checkpoint_dir
    with note_states() as opened_states:
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
        check_states(opened_states)
        copy_acceptance(folder, staged)
        if tokenizer:
            copy_tokenizer(tokenizer, staged)
        write_manifest(
            staged, kind="engine", settings=to_plain(settings), sources=sources, hashes=hashes,
            vocabulary=vocabulary, build_arguments=list_arguments(settings),
        )  # fmt: skip
    seconds = round(time.monotonic() - began, 2)
    name = name_final(settings.output_dir)
    logger.info("engine %s: %s, %s, %.1f s", name, report["method"], told, seconds)
    return {"dry_run": False, **report, **written, "build_seconds": seconds}


def list_arguments(settings: BuildSettings) -> list[str]:
    """List the arguments that build an engine again, but for the folder that is written."""
    checkpoint = settings.checkpoint_dir.absolute()
    omitted_options = ("--output-dir", "--force", "--json")
    arguments = to_arguments(dataclasses.replace(settings, checkpoint_dir=checkpoint))
    return [word for word in arguments if word.partition("=")[0] not in omitted_options]
