"""Checkpoint folder to TensorRT-LLM engine: check, run trtllm-build aside, record, rename."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from specdec.checkpoint.config import CheckpointConfig, read_checkpoint_config
from specdec.checkpoint.inventory import describe_sources, find_rank_files
from specdec.command.settings import to_plain
from specdec.errors import SpecDecError, join_names, name_extra
from specdec.files.manifest import write_manifest
from specdec.files.reading import read_json
from specdec.files.staging import check_free_space, check_output_dir, stage_folder
from specdec.files.tensor_file import TensorFile
from specdec.files.vocabulary import read_recorded
from specdec.system import logs
from specdec.text.tokenizer import check_tokenizer, copy_tokenizer
from specdec.trtllm.environment import BUILD_COMMAND, Environment, read_environment
from specdec.trtllm.facts import DEFAULT_LABEL, Facts, find_label, load_facts
from specdec.trtllm.lacks import list_defects

from ...settings import BuildSettings
from . import checks
from .flags import collect_flags, find_flag_problems, find_path_problems
from .plan import SHOWN_FLAGS, TensorRTPlan
from .process import run_child
from .record import predict_record
from .script import find_launcher_problems, format_script, write_script

logger = logs.get_logger(__name__)

LOG_NAME = "build.log"


def choose_facts(settings: BuildSettings, machine: Environment, *, builds: bool) -> Facts:
    """Return the line that the command is for: as stated, as installed, or 1.2."""
    stated, installed = settings.trtllm_version, machine.tensorrt_llm
    if installed is not None and (builds or stated is None):
        label = find_label(installed)
        if stated not in (None, label):
            raise SpecDecError(
                f"--trtllm-version {stated}, but TensorRT-LLM {installed} is installed here",
                "leave the flag out, or add --dry-run or --emit-script",
            )
        return load_facts(label)
    return load_facts(stated or DEFAULT_LABEL)


def make_plan(
    settings: BuildSettings, facts: Facts, checkpoint: CheckpointConfig, machine: Environment | None
) -> TensorRTPlan:
    """Check everything and return the build; raise SpecDecError that lists all that is wrong.

    machine: the one that is to build, if it is this one; None where another will.
    """
    given_flags = collect_flags(settings, facts)
    mode = checkpoint.mode or settings.speculative_decoding_mode
    problems = checks.find_checkpoint_problems(facts, checkpoint)
    problems += checks.find_mode_problems(
        checkpoint, settings.speculative_decoding_mode, given_flags.get("max_draft_len")
    )
    gpus = machine.gpus if machine is not None else ()
    capability = gpus[0].capability if gpus else None
    record = predict_record(facts, checkpoint, mode, given_flags, capability)
    model = checkpoint.model
    ranks_reason = f"tp_size {model.tp_size}"
    if model.pp_size > 1:
        ranks_reason += f" x pp_size {model.pp_size}"
    num_ranks = model.tp_size * model.pp_size
    paths, missing_files = find_rank_files(settings.checkpoint_dir, num_ranks, ranks_reason)
    plan = TensorRTPlan(
        facts=facts, checkpoint=checkpoint, checkpoint_dir=settings.checkpoint_dir,
        output_dir=settings.output_dir, mode=mode, given_flags=given_flags, record=record,
        files=[TensorFile(path) for path in paths],
    )  # fmt: skip
    for find in (
        find_flag_problems, checks.find_method_problems, checks.find_length_problems,
        checks.find_bent_flags,
    ):  # fmt: skip
        problems += find(plan)
    problems += missing_files
    problems += checks.find_tensor_problems(checkpoint, plan.files)
    problems += checks.find_head_problems(facts, checkpoint, plan.files)
    if settings.quantization is not None:
        problems.add(
            f"--quantization {settings.quantization} is of the torch backend: TensorRT-LLM builds"
            " checkpoints that are quantized already",
            "leave it out and convert with --quantization fp8, or build with --backend torch",
        )
    plan.notes.extend(list_notes(plan, machine))
    if machine is not None:
        problems += find_path_problems(plan)
        problems += checks.find_gpu_problems(plan, gpus)
    problems.raise_all()
    return plan


def list_notes(build: TensorRTPlan, machine: Environment | None) -> list[str]:
    """List notes for the user where nothing is wrong."""
    notes = []
    record, values = build.record, build.record.values
    if record.growth is not None:
        notes.append(
            f"the engine will record max_seq_len {values['max_seq_len']} = {record.growth};"
            " prompt plus output stay within the first number"
        )
    is_quantized = build.checkpoint.quantization.is_quantized
    for name, reason in record.reasons.items():
        # Nobody expects FP8 attention where the weights are not quantized.
        if name not in build.given_flags and (is_quantized or name != "use_fp8_context_fmha"):
            notes.append(f"the engine will record {name} {values[name]}: {reason}")
    if build.mode == checks.EXTERNAL and not values["gather_generation_logits"]:
        notes.append(
            "without --gather-generation-logits on both engines, drafts are accepted token by"
            " token: --use-logits needs it"
        )
    if build.label == "1.2" and build.given_flags.get("gather_generation_logits"):
        notes.append("trtllm-build calls --gather_generation_logits deprecated on every run")
    version = (machine.tensorrt_llm if machine is not None else None) or build.label
    notes += list_defects(version, build.mode, build.checkpoint.raw)
    if machine is None:
        notes.append("not checked: the GPU, its memory and the version of the machine that builds")
    return notes


def build_engine(settings: BuildSettings) -> dict[str, Any]:
    """Build an engine, or write down how; with `dry_run`, only check and describe it."""
    start_time = time.monotonic()
    builds = not settings.dry_run and settings.emit_script is None
    machine = read_environment()
    if builds:
        check_installed(machine)
    facts = choose_facts(settings, machine, builds=builds)
    folder, script = settings.checkpoint_dir, settings.emit_script
    checkpoint = read_checkpoint_config(folder)
    check_output_dir(settings.output_dir, force=settings.force, inputs=[folder])
    plan = make_plan(settings, facts, checkpoint, machine if builds else None)
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
    tokenizer_dir = settings.tokenizer_dir
    tokenizer = (
        None if tokenizer_dir is None else check_tokenizer(tokenizer_dir, read_recorded(folder))
    )
    if script is not None:
        report["script"] = str(script)
        if not settings.dry_run:
            write_script(script, format_script(plan, settings.launcher), force=settings.force)
            logger.info("script %s: run it where TensorRT-LLM is", script)
    if not builds:
        return {"dry_run": settings.dry_run, **report}
    check_free_space(plan.output_dir, sum(plan.weights_bytes), "the engine takes at least")
    build_config = run_build(plan, settings, machine, tokenizer)
    seconds = round(time.monotonic() - start_time, 2)
    logger.info("engine %s: %s, TensorRT-LLM %s, %d rank(s), %.1f s", settings.output_dir,
                plan.method, machine.tensorrt_llm, plan.num_ranks, seconds)  # fmt: skip
    return {"dry_run": False, **report, "build_config": build_config, "build_seconds": seconds}


def foresee_limits(settings: BuildSettings, checkpoint: CheckpointConfig) -> None:
    """Return None, no limits that `Engine` would read; raise where nothing can build here."""
    check_installed(read_environment())


def check_installed(machine: Environment) -> None:
    """Raise SpecDecError, one clear sentence, where TensorRT-LLM is not here."""
    if machine.tensorrt_llm is not None and shutil.which(BUILD_COMMAND) is not None:
        return
    missing_program = "TensorRT-LLM"
    if machine.tensorrt_llm is not None:
        missing_program = f"{BUILD_COMMAND} of TensorRT-LLM {machine.tensorrt_llm}"
    raise SpecDecError(
        f"{missing_program} is not installed here, and nothing else can build its engines",
        f"run this in NVIDIA's container, or {name_extra('tensorrt-llm')}; --dry-run and"
        " --emit-script FILE write the build down for another machine, and --backend torch builds"
        " for this one",
    )


def run_build(
    plan: TensorRTPlan, settings: BuildSettings, machine: Environment, tokenizer: Path | None
) -> dict[str, Any]:
    """Run trtllm-build into the engine folder; return the build_config that it recorded."""
    folder, engine_folder = plan.checkpoint_dir.resolve(), settings.output_dir.resolve()
    failed_log = engine_folder.parent / f"{engine_folder.name}.{LOG_NAME}"
    sources = describe_sources(folder, plan.files)
    with stage_folder(settings.output_dir, force=settings.force, inputs=[folder]) as staged:
        # It leaves its timing cache in the current folder.
        with tempfile.TemporaryDirectory(prefix="specdec-build-") as scratch:
            argv = plan.make_argv(folder, staged)
            try:
                run_child(argv, plan.environment, Path(scratch), failed_log)
                build_config = check_engine(plan, staged)
            except KeyboardInterrupt:
                failed_log.unlink(missing_ok=True)
                raise
        shutil.move(failed_log, staged / LOG_NAME)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, staged)
        manifest = folder / "manifest.json"
        write_manifest(
            staged, kind="engine", settings=to_plain(settings), sources=sources,
            backend="tensorrt-llm", trtllm_version=plan.label, environment=machine.to_json(),
            method=plan.method, build_commands=[{"argv": argv, "env": plan.environment}],
            checkpoint=read_json(manifest) if manifest.is_file() else None,
            vocabulary=read_recorded(folder),
        )  # fmt: skip
    return build_config


def check_engine(plan: TensorRTPlan, folder: Path) -> dict[str, Any]:
    """Check that the engine is whole; warn where it recorded other values than predicted."""
    expected_files = ["config.json", *(f"rank{rank}.engine" for rank in range(plan.num_ranks))]
    if missing_files := [name for name in expected_files if not (folder / name).is_file()]:
        raise SpecDecError(
            f"trtllm-build ended without an error and without {join_names(missing_files)}",
            "read its log above; a worker may have failed",
        )
    document = read_json(folder / "config.json")
    build_config = document.get("build_config")
    if not isinstance(build_config, dict):
        raise SpecDecError(
            "the engine's config.json has no build_config", "read trtllm-build's log above"
        )
    plugins = build_config.get("plugin_config")
    recorded_values = build_config | (plugins if isinstance(plugins, dict) else {})
    for name in SHOWN_FLAGS:
        predicted, value = _normalize(plan, name), recorded_values.get(name)
        if name in recorded_values and value is not None and value != predicted:
            logger.warning("the engine records %s %s, not %s as predicted", name, value, predicted)
    return {name: recorded_values[name] for name in SHOWN_FLAGS if name in recorded_values}


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
