"""Checkpoint folder to TensorRT-LLM engine: check, run trtllm-build aside, record, rename."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from specdec import logs
from specdec.command.settings import to_plain
from specdec.errors import SpecDecError, join_names, name_extra
from specdec.files.manifest import write_manifest
from specdec.files.reading import read_json
from specdec.files.staging import check_free_space, check_output_dir, stage_folder
from specdec.model.checkpoint import read_checkpoint_config
from specdec.model.inventory import describe_sources
from specdec.tokenizer import check_tokenizer, copy_tokenizer
from specdec.trtllm.environment import BUILD_COMMAND, Environment, read_environment
from specdec.vocabulary import read_recorded

from ...settings import BuildSettings
from .plan import TOLD, TensorRTPlan, choose_facts, make_plan
from .process import run_child
from .script import find_launcher_problems, format_script, write_script

logger = logs.get_logger(__name__)

LOG_NAME = "build.log"


def build_tensorrt_engine(settings: BuildSettings) -> dict[str, Any]:
    """Build an engine, or write down how; with `dry_run`, only check and describe it."""
    began = time.monotonic()
    builds = not settings.dry_run and settings.emit_script is None
    here = read_environment()
    if builds:
        check_installed(here)
    facts = choose_facts(settings, here, builds=builds)
    folder, script = settings.checkpoint_dir, settings.emit_script
    checkpoint = read_checkpoint_config(folder)
    check_output_dir(settings.output_dir, force=settings.force, inputs=[folder])
    plan = make_plan(settings, facts, checkpoint, here if builds else None)
    if script is None and settings.launcher != "local":
        raise SpecDecError(
            f"--launcher {settings.launcher} is for a script", "add --emit-script FILE"
        )
    find_launcher_problems(plan, settings.launcher).raise_all()
    report = plan.describe()
    for note in plan.notes:
        logger.info("%s", note)
    if settings.tokenizer_dir is not None and script is not None:
        raise SpecDecError(
            "--tokenizer-dir has no effect on a script, which writes the engine alone",
            "leave it out, and give --tokenizer-dir to specdec-run",
        )
    given = settings.tokenizer_dir
    tokenizer = None if given is None else check_tokenizer(given, read_recorded(folder))
    if script is not None:
        report["script"] = str(script)
        if not settings.dry_run:
            write_script(script, format_script(plan, settings.launcher), force=settings.force)
            logger.info("script %s: run it where TensorRT-LLM is", script)
    if not builds:
        return {"dry_run": settings.dry_run, **report}
    check_free_space(plan.output_dir, sum(plan.weights_bytes), "the engine takes at least")
    recorded = run_build(plan, settings, here, tokenizer)
    seconds = round(time.monotonic() - began, 2)
    logger.info("engine %s: %s, TensorRT-LLM %s, %d rank(s), %.1f s", settings.output_dir,
                plan.method, here.tensorrt_llm, plan.num_ranks, seconds)  # fmt: skip
    return {"dry_run": False, **report, "build_config": recorded, "build_seconds": seconds}


def check_installed(here: Environment) -> None:
    """Raise SpecDecError, one clear sentence, where TensorRT-LLM is not here."""
    if here.tensorrt_llm is not None and shutil.which(BUILD_COMMAND) is not None:
        return
    missing = f"{BUILD_COMMAND} of TensorRT-LLM {here.tensorrt_llm}"
    raise SpecDecError(
        f"{missing if here.tensorrt_llm else 'TensorRT-LLM'} is not installed here, and nothing"
        " else can build its engines",
        f"run this in NVIDIA's container, or {name_extra('tensorrt-llm')}; --dry-run and"
        " --emit-script FILE write the build down for another machine, and --backend torch builds"
        " for this one",
    )


def run_build(
    plan: TensorRTPlan, settings: BuildSettings, here: Environment, tokenizer: Path | None
) -> dict[str, Any]:
    """Run trtllm-build into the engine folder; return the build_config that it recorded."""
    folder, kept = plan.checkpoint_dir.resolve(), settings.output_dir.resolve()
    failed_log = kept.parent / f"{kept.name}.{LOG_NAME}"
    sources = describe_sources(folder, plan.files)
    with stage_folder(settings.output_dir, force=settings.force, inputs=[folder]) as staged:
        # It leaves its timing cache in the current folder.
        with tempfile.TemporaryDirectory(prefix="specdec-build-") as scratch:
            argv = plan.make_argv(folder, staged)
            try:
                run_child(argv, plan.environment, Path(scratch), failed_log)
                recorded = check_engine(plan, staged)
            except KeyboardInterrupt:
                failed_log.unlink(missing_ok=True)
                raise
        shutil.move(failed_log, staged / LOG_NAME)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, staged)
        manifest = folder / "manifest.json"
        write_manifest(
            staged, kind="engine", settings=to_plain(settings), sources=sources,
            backend="tensorrt-llm", trtllm_version=plan.label, environment=here.to_json(),
            method=plan.method, build_commands=[{"argv": argv, "env": plan.environment}],
            checkpoint=read_json(manifest) if manifest.is_file() else None,
            vocabulary=read_recorded(folder),
        )  # fmt: skip
    return recorded


def check_engine(plan: TensorRTPlan, folder: Path) -> dict[str, Any]:
    """Check that the engine is whole, and tell what it recorded otherwise than was predicted."""
    wanted = ["config.json", *(f"rank{rank}.engine" for rank in range(plan.num_ranks))]
    if absent := [name for name in wanted if not (folder / name).is_file()]:
        raise SpecDecError(
            f"trtllm-build ended without an error and without {join_names(absent)}",
            "read its log above; a worker may have failed",
        )
    document = read_json(folder / "config.json")
    recorded = document.get("build_config")
    if not isinstance(recorded, dict):
        raise SpecDecError(
            "the engine's config.json has no build_config", "read trtllm-build's log above"
        )
    plugins = recorded.get("plugin_config")
    found = recorded | (plugins if isinstance(plugins, dict) else {})
    for name in TOLD:
        predicted, value = _normalize(plan, name), found.get(name)
        if name in found and value is not None and value != predicted:
            logger.warning("the engine records %s %s, not %s as predicted", name, value, predicted)
    return {name: found[name] for name in TOLD if name in found}


def _normalize(plan: TensorRTPlan, name: str) -> Any:
    """Return a predicted value as config.json has it."""
    value = plan.record.values[name]
    if name == "speculative_decoding_mode":
        return plan.facts.modes[value]
    if plan.facts.flags[name].is_toggle:
        return value == "enable"
    if name.endswith("_plugin") and value in ("disable", None):
        return None
    return value
