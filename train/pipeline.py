"""Training, in order: check, load the target, tokenize, train, write the drafter."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.files.staging import stage_folder
from specdec.methods import METHODS
from specdec.system.logs import get_logger

from .devices import start_accelerator
from .flags import check_settings
from .job import TrainingJob, make_drafter, prepare_job
from .settings import TrainSettings
from .setup import list_inputs, prepare_setup
from .tracker import Tracker

if TYPE_CHECKING:
    from .loop import Hooks, Loop

logger = get_logger(__name__)


def train_drafter(settings: TrainSettings) -> dict[str, Any] | None:
    """Train a drafter; return the report on the main process, None on the others."""
    settings = fill_defaults(settings)
    check_settings(settings)
    if trial := find_trial(settings):
        return trial(settings)
    # torch and transformers take seconds to import, so the cheap checks come first.
    from .hub import open_hub, push_folder
    from .output import write_drafter
    from .state import FULL_DISK_HINT, TrainingState

    accelerator = start_accelerator(settings)
    hub = None
    if settings.push_to_hub and accelerator.is_main_process:
        hub = open_hub(settings.push_to_hub)
    report = None
    output: contextlib.AbstractContextManager[Path | None] = contextlib.nullcontext()
    if accelerator.is_main_process:
        inputs = list_inputs(settings)
        output = stage_folder(
            settings.output_dir, force=settings.force, inputs=inputs, full_disk_hint=FULL_DISK_HINT,
            finish=TrainingState(settings.output_dir).remove,
        )  # fmt: skip
    with name_unfinished(settings), output as folder:
        job = prepare_job(prepare_setup(settings, accelerator))
        with job.state.removing(is_kept=folder is None or settings.resume):
            loop = start_loop(job)
        start_time = time.monotonic()
        evaluation = loop.run()
        loop.hooks.finish()
        weights = loop.gather_weights()
        if folder is not None:
            report = {
                "method": settings.method,
                "output_dir": str(settings.output_dir),
                "steps": loop.step,
                "tokens": loop.num_tokens,
                "seconds": round(time.monotonic() - start_time, 1),
                "eval": evaluation,
            }
            write_drafter(
                folder, job, loop.drafter, weights, report, rows_per_step=loop.rows_per_step
            )
            job.state.mark_finished(folder)
    if report is not None:
        logger.info("the drafter is in %s", settings.output_dir)
        if hub is not None and settings.push_to_hub:
            report["hub"] = push_folder(hub, settings.push_to_hub, settings.output_dir)
    # First the users of the connections end, then all processes meet, then the connections end. A
    # process that exits with open connections sometimes aborts.
    del job, loop, weights
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return report


def find_trial(settings: TrainSettings) -> Callable[[TrainSettings], dict[str, Any]] | None:
    """Return what is to be done instead of a training, and writes nothing."""
    if settings.plan:
        from .plan import plan_training

        return plan_training
    if settings.sanity:
        from .sanity import learn_one_row

        return learn_one_row
    return None


@contextlib.contextmanager
def name_unfinished(settings: TrainSettings) -> Iterator[None]:
    """Let Ctrl-C name the folder from which --resume goes on."""
    from .state import TrainingState

    try:
        yield
    except KeyboardInterrupt as error:
        folder = TrainingState(settings.output_dir).folder
        if not folder.is_dir():
            raise
        raise KeyboardInterrupt(
            f"the same command with --resume goes on with what is in {folder}"
        ) from error


def fill_defaults(settings: TrainSettings) -> TrainSettings:
    """Fill the settings that were not given with the method's defaults."""
    defaults = METHODS[settings.method].training or {}
    filled_settings = {
        name: value for name, value in defaults.items() if getattr(settings, name) is None
    }
    return dataclasses.replace(settings, **filled_settings)


def start_loop(job: TrainingJob) -> Loop:
    """Make the drafter and its training loop, fresh or from the checkpoint."""
    from .acceptance import AcceptanceMeter
    from .loop import Hooks, Loop

    settings, accelerator, state = job.settings, job.accelerator, job.state
    drafter = make_drafter(job, job.target, job.train_rows)
    wanted_length = settings.stop_at_acceptance

    def is_enough(evaluation: Mapping[str, Any]) -> bool:
        acceptance = evaluation.get("acceptance")
        return bool(
            wanted_length and acceptance and acceptance["acceptance_length"] >= wanted_length
        )

    hooks = Hooks(is_enough=is_enough)
    if accelerator.is_main_process:
        hooks = dataclasses.replace(hooks, log=state.add_log, save=state.save_checkpoint)
        if settings.eval_prompts:
            meter = AcceptanceMeter(job, drafter)
            meter.check(drafter.state_dict())
            hooks = dataclasses.replace(hooks, measure_acceptance=meter.measure)
    checkpoint = state.load_checkpoint(maps=settings.shard_drafter)
    find_first_weights = job.method.find_first_weights
    if find_first_weights and checkpoint is None:
        find_first_weights(settings, drafter, job.target, job.train_rows)
    loop = Loop(
        settings, accelerator, job.target, drafter, job.train_rows, job.heldout_rows, hooks
    )  # fmt: skip
    if checkpoint is not None:
        try:
            loop.restore(checkpoint)
        except (ValueError, KeyError, TypeError, RuntimeError, AttributeError):
            raise state.refuse_checkpoint() from None
        logger.info("resumed at step %d", loop.step)
    if accelerator.is_main_process:
        state.cut_log(loop.step)
        if settings.tracker is not None:
            loop.hooks = track(loop.hooks, Tracker(settings, loop.step))
    logger.info(
        "%d parameters, %d rows of up to %d tokens, %d rows a step, %d steps, %s on %s",
        sum(p.numel() for p in drafter.parameters()), len(job.train_rows), job.max_length,
        loop.rows_per_step, loop.num_steps, job.dtype, accelerator.device.type,
    )  # fmt: skip
    return loop


def track(hooks: Hooks, tracker: Tracker) -> Hooks:
    """Return hooks that also give the log's lines to a tracker."""

    def log(line: dict[str, Any]) -> None:
        hooks.log(line)
        tracker.log(line)

    return dataclasses.replace(hooks, log=log, finish=tracker.finish)
