"""Convert, build, run: each stage is called as its command would be."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specdec.command.stages import load_command
from specdec.errors import SpecDecError, count
from specdec.files.backends import TORCH, read_backend
from specdec.files.engine_cache import (
    FOLDER_NAME,
    LIMIT_VARIABLE,
    EngineCache,
    measure_folder,
    read_limit,
)
from specdec.files.reading import read_json
from specdec.files.staging import find_existing
from specdec.methods.budget import read_budget
from specdec.options import get_flags
from specdec.system import logs
from specdec.system.cache import find_cache
from specdec.text.pretrained import load_tokenizer
from specdec.text.pretrained_tokenizer import keep_tokenizers

from .plans import (
    EnginePlan,
    check_decoding,
    check_lengths,
    complete_build,
    foresee_engine,
    plan_draft,
    plan_target,
)
from .settings import DRAFTS, GenerateSettings

logger = logs.get_logger(__name__)

TEMPORARY_PREFIX = "specdec-generate-"  # of the folders of engines that are not kept
ABANDONED_AGE = 24 * 3600  # seconds: locks alone may be unknown to another host that shares a disk


def generate(settings: GenerateSettings) -> None:
    """Make the engines, or take those that are kept, and run the prompts through them."""
    with keep_tokenizers(), hold_engines(settings) as run:
        call_stage("run", run)


@contextlib.contextmanager
def hold_engines(settings: GenerateSettings) -> Iterator[dict[str, Any]]:
    """Make the engines, or take cached ones; yield the options of a run with them."""
    plans = [plan_target(settings)]
    if settings.draft_model_dir is not None:
        plans.append(plan_draft(settings))
    run = list_run_options(settings)
    with open_cache(settings) as (cache, max_bytes), contextlib.ExitStack() as stack:
        is_cached = not settings.force and all(cache.has(plan.name) for plan in plans)
        run["apply_chat_template"] = check_prompts(settings, run, [] if is_cached else plans)
        engines = [stack.enter_context(hold_engine(cache, plan, settings)) for plan in plans]
        if max_bytes is not None:
            limit_cache(cache, max_bytes)
        run["engine_dir"] = engines[0]
        if "draft_engine_dir" in run:
            run["draft_engine_dir"] = engines[1]
        yield run


def list_run_options(settings: GenerateSettings) -> dict[str, Any]:
    """Return the options of the run, with folders of models in the place of engines."""
    run = settings.list_stage("run") | {
        "input_text": settings.texts, "tokenizer_dir": settings.tokenizer_dir or settings.model_dir,
    }  # fmt: skip
    if settings.chat_template is not None and settings.apply_chat_template is None:
        run["apply_chat_template"] = True
    if settings.draft_model_dir is not None and not settings.no_speculation:
        run["draft_engine_dir"] = settings.draft_model_dir
        if settings.draft_vocabulary != "same":
            run["draft_tokenizer_dir"] = settings.draft_model_dir
    if settings.no_speculation:
        flags = {name: flag for kind in DRAFTS for name, flag in get_flags(kind).items()}
        run |= {"draft_tree_tokens": None, "draft_vocabulary": "same"} | {
            name: default for name, (_, default) in flags.items()
        }
        if settings.draft_len != "auto":  # which a run refuses, and not only a draft model has
            run["draft_len"] = None
    return run


def check_prompts(
    settings: GenerateSettings, run: dict[str, Any], plans: Sequence[EnginePlan]
) -> bool:
    """Return whether texts go into the chat template; raise SpecDecError for what cannot be done.

    plans: of engines that are to be made, which takes minutes: what can be known is told before.
    """
    from specdec.decode.prompt_requests import make_requests
    from specdec.text.encoding import applies_template, check_template_use, use_template
    from specdec.text.prompts import list_prompts

    run_settings = load_command("run").settings_class(**run)
    run_settings.refuse_contradictions()
    read_budget(run_settings)
    prompts = list_prompts(settings.texts, settings.input_file, json=settings.json)
    flag = "--model-dir" if settings.tokenizer_dir is None else "--tokenizer-dir"
    tokenizer = use_template(load_tokenizer(run["tokenizer_dir"], flag), settings.chat_template)
    is_chat = applies_template(run_settings, tokenizer, by_default=True)
    check_template_use(run_settings, prompts, tokenizer, by_default=True)
    if not plans:
        return is_chat
    run_settings = dataclasses.replace(run_settings, apply_chat_template=is_chat)
    requests = make_requests(prompts, run_settings, tokenizer, repeats=not settings.streaming)
    engines = [engine for plan in plans if (engine := foresee_engine(plan)) is not None]
    if len(engines) == len(plans):
        check_lengths(requests, engines)
        check_decoding(settings, run_settings, tokenizer, engines)
    return is_chat


@contextlib.contextmanager
def open_cache(settings: GenerateSettings) -> Iterator[tuple[EngineCache, float | None]]:
    """Yield the user's cache and its limit in bytes, or one without that is gone afterwards."""
    folder = None if settings.no_cache else find_cache()
    lack = _explain_lack(folder)
    if folder is not None and lack is None:
        yield EngineCache(folder / FOLDER_NAME), read_limit(folder)
        return
    if not settings.no_cache:
        logger.warning("%s, so the engine is not kept: set SPECDEC_CACHE_DIR", lack)
    remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX) as temporary:
        yield EngineCache(Path(temporary), is_temporary=True), None


def remove_abandoned() -> None:
    """Remove the temporary folders of this user's killed processes: unused for a day, unlocked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            cache = EngineCache(folder)
            last_uses = [status.st_mtime, *(entry.last_use for entry in cache.list_entries())]
            is_old = time.time() - max(last_uses) > ABANDONED_AGE
            if is_old and status.st_uid == os.geteuid() and not cache.clear()[1]:
                shutil.rmtree(folder)


def _explain_lack(folder: Path | None) -> str | None:
    """Say why no engine can be kept in a cache folder; None where one can."""
    if folder is None:
        return "there is no home folder"
    existing = find_existing(folder / FOLDER_NAME)
    if not existing.is_dir():
        return f"{existing} is a file"
    return None if os.access(existing, os.W_OK) else f"{folder} is read-only"


def limit_cache(cache: EngineCache, max_bytes: float) -> None:
    """Remove the least recently used engines that are beyond the cache's limit, and say so."""
    removed_entries, num_left = cache.trim(max_bytes)
    limit = f"its limit of {max_bytes / 1e9:g} GB ({LIMIT_VARIABLE})"
    if removed_entries:
        logger.info(
            "removed %s of %.1f MB, the least recently used, to keep the cache within %s: %s",
            count(len(removed_entries), "engine"), sum(e.num_bytes for e in removed_entries) / 1e6,
            limit, ", ".join(entry.name for entry in removed_entries),
        )  # fmt: skip
    if num_left > max_bytes:
        logger.info(
            "the engines in use take %.1f MB, and the cache is beyond %s until they are not",
            num_left / 1e6, limit,
        )  # fmt: skip


@contextlib.contextmanager
def hold_engine(cache: EngineCache, plan: EnginePlan, settings: GenerateSettings) -> Iterator[Path]:
    """Yield the folder of a planned engine, which is made if it is not there."""
    is_made = False

    def make(folder: Path) -> None:
        nonlocal is_made
        is_made = True
        make_engine(plan, folder)
        if plan.describe() != plan.description:
            raise SpecDecError(
                f"{' or '.join(plan.models)} changed while it was converted", "run it again"
            )

    force = settings.force or not fits_machine(cache.folder / plan.name / "engine")
    with cache.hold(plan.name, make, force=force) as folder:
        engine = folder / "engine"
        size = measure_folder(folder) / 1e6
        if cache.is_temporary:
            logger.info("engine of %.1f MB, not kept", size)
        else:
            logger.info(
                "engine %s: %s (%.1f MB; --clear-cache removes what is kept)",
                "kept" if is_made else "taken from the cache", engine, size,
            )  # fmt: skip
        yield engine


def fits_machine(engine: Path) -> bool:
    """Return whether a cached engine's matrices are packed as this machine reads them."""
    from specdec.engine.engine_kernels import check_machine

    try:
        if engine.is_dir() and read_backend(engine) == TORCH:
            check_machine(engine)
    except SpecDecError as error:
        logger.warning("%s: it is built again", error.message)
        return False
    return True


def make_engine(plan: EnginePlan, folder: Path) -> None:
    """Convert and build into `folder`/engine; the checkpoint between them is removed."""
    checkpoint = folder / "checkpoint"
    call_stage("convert", plan.convert | {"output_dir": checkpoint})
    positions = read_json(checkpoint / "config.json").get("max_position_embeddings")
    build = complete_build(plan.build, positions)
    call_stage("build", build | {"checkpoint_dir": checkpoint, "output_dir": folder / "engine"})
    shutil.rmtree(checkpoint)


def call_stage(stage: str, options: dict[str, Any]) -> None:
    """Run a stage's command with these settings in this process."""
    command = load_command(stage)
    command.work(command.settings_class(**options))


def clear_cache() -> None:
    """Remove the engines that are kept and not in use."""
    folder = find_cache()
    if folder is None:
        raise SpecDecError("there is no home folder, and no cache in it", "set SPECDEC_CACHE_DIR")
    removed_entries, num_used = EngineCache(folder / FOLDER_NAME).clear()
    in_use = f"; {num_used} in use are left" if num_used else ""
    size = sum(entry.num_bytes for entry in removed_entries) / 1e6
    logger.info("%s removed, %.1f MB%s", count(len(removed_entries), "engine"), size, in_use)
