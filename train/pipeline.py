"""Training, in order: check, load the target, tokenize, train, write the drafter."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.command.settings import list_given, name_flag, need, require
from specdec.documents import check_data_file
from specdec.errors import Problems, SpecDecError, UsageError, name_extra, summarize
from specdec.files.manifest import describe_file
from specdec.files.staging import check_output_dir, list_local, stage_folder
from specdec.files.tensor_file import TensorFile
from specdec.logs import get_launched_rank, get_logger
from specdec.methods import METHODS
from specdec.mpi import check_meeting_place, find_launch
from specdec.processes import keep_stdout_clean

from .settings import TRAINABLE, TrainSettings

if TYPE_CHECKING:
    from .loop import Loop
    from .methods.base import Drafter, TrainingMethod
    from .rows import Rows
    from .state import TrainingState
    from .target import LiveTarget, Target

DEFAULT_MAX_LENGTH = 2048
# What accelerate's launcher sets for options that change how a model is trained.
LAUNCHER_OPTIONS = {
    "ACCELERATE_USE_FSDP": "--use_fsdp",
    "ACCELERATE_USE_DEEPSPEED": "--use_deepspeed",
    "ACCELERATE_USE_MEGATRON_LM": "--use_megatron_lm",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "--use_parallelism_config",
    "ACCELERATE_MIXED_PRECISION": "--mixed_precision",
    "ACCELERATE_DYNAMO_BACKEND": "--dynamo_backend",
}
PATIENCE = datetime.timedelta(hours=6)

logger = get_logger(__name__)


def train_drafter(settings: TrainSettings) -> dict[str, Any] | None:
    """Train a drafter as `settings` say; return the results on the main process, else None."""
    settings = fill_defaults(settings)
    refuse_launcher(os.environ)
    check_settings(settings)
    if settings.sanity:
        from .sanity import learn_one_row

        return learn_one_row(settings)
    # torch and transformers take seconds to import: not before the cheap checks.
    from .hub import open_hub, push_folder
    from .output import write_drafter

    accelerator = start_accelerator(settings)
    hub = None
    if settings.push_to_hub and accelerator.is_main_process:
        hub = open_hub(settings.push_to_hub)
    report = None
    with (
        tell_of_resume(settings),
        open_output(settings, is_main=accelerator.is_main_process) as folder,
    ):
        job = prepare_job(settings, accelerator)
        try:
            loop = start_loop(job)
        except SpecDecError:
            if folder is not None and not settings.resume:
                job.state.remove()  # nothing was learned: the next command may be another
            raise
        began = time.monotonic()
        outcome = loop.run()
        if folder is not None:
            report = {
                "method": settings.method,
                "output_dir": str(settings.output_dir),
                "steps": outcome.num_steps,
                "tokens": outcome.num_tokens,
                "seconds": round(time.monotonic() - began, 1),
                "eval": outcome.evaluation,
            }
            write_drafter(folder, job, loop.drafter, report, rows_per_step=loop.rows_per_step)
    if report is not None:
        job.state.remove()
        logger.info("the drafter is in %s", settings.output_dir)
        if hub is not None and settings.push_to_hub:
            report["hub"] = push_folder(hub, settings.push_to_hub, settings.output_dir)
    # In this order: what uses the connections, everybody's last word, the connections. A process
    # that leaves them to its own end now and then aborts there.
    del job, loop
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return report


@contextlib.contextmanager
def tell_of_resume(settings: TrainSettings) -> Iterator[None]:
    """Let Ctrl-C say what it left behind."""
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
    """Give the settings that were not given the values that the method has for them."""
    defaults = METHODS[settings.method].training or {}
    missing = {name: value for name, value in defaults.items() if getattr(settings, name) is None}
    return dataclasses.replace(settings, **missing)


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything a training works with, loaded and checked. File lists: main process only."""

    settings: TrainSettings
    accelerator: Any
    method: TrainingMethod
    state: TrainingState
    target: Target
    train: Rows
    heldout: Rows
    dtype: str
    max_length: int
    target_files: list[dict[str, Any]]
    data_files: list[dict[str, Any]]

    @property
    def save_dtype(self) -> str:
        """The type to write the weights in."""
        from .target import get_stored_dtype

        if self.settings.save_dtype != "auto":
            return self.settings.save_dtype
        return "bfloat16" if get_stored_dtype(self.target.config) == "bfloat16" else "float32"


def prepare_job(settings: TrainSettings, accelerator: Any) -> Job:
    """Load the target, open the training's state, and load or make the rows."""
    from .methods import load_method
    from .state import TrainingState, collect_facts, name_hashes
    from .target import describe_target, get_name, load_config

    is_main = bool(accelerator.is_main_process)
    dtype = "bfloat16" if accelerator.mixed_precision == "bf16" else "float32"
    config = load_config(settings.model_dir)
    max_length = choose_max_length(settings, config)
    method = load_method(settings.method)
    method.check_options(settings)
    load = functools.partial(open_target, settings, method, config, dtype, accelerator)
    target: Target | None = None if settings.hidden_states_dir else load()
    state = TrainingState(settings.output_dir)
    files = [f for f in (settings.data, settings.eval_data) if f and is_main]
    data_files = [describe_file(f) for f in files]
    target_files = describe_target(settings.model_dir) if is_main else []
    if is_main:
        facts = collect_facts(
            settings,
            dtype=dtype,
            num_processes=accelerator.num_processes,
            target_files=target_files,
            data_files=data_files,
        )
        state.open(facts, resume=settings.resume)
    accelerator.wait_for_everyone()
    vocab_size = target.shape.vocab_size if target is not None else int(config.vocab_size)
    train, heldout = load_rows(settings, state, vocab_size, max_length, accelerator)
    if target is None:
        from .hidden_states import StatesPlan, Work, hash_rows, open_states

        parts = {"train": train, "heldout": heldout}
        hashes = {f"sha256 of the {name} rows": hash_rows(rows) for name, rows in parts.items()}
        plan = StatesPlan(
            facts={"--dtype": dtype, **name_hashes(target_files, data_files), **hashes},
            parts=parts,
            layers=method.choose_layers(settings, config),
            vocab_size=vocab_size,
            hidden_size=int(config.hidden_size),
            dtype=dtype,
        )
        work = Work(
            accelerator=accelerator,
            batch_size=settings.batch_size,
            in_step=settings.shard_target,
            sources=[*target_files, *data_files],
            inputs=list_inputs(settings),
        )
        target = open_states(
            need(settings.hidden_states_dir), plan, config, load, work,
            name=get_name(settings.model_dir), with_head=needs_head(settings, method),
        )  # fmt: skip
    return Job(
        settings=settings,
        accelerator=accelerator,
        method=method,
        state=state,
        target=target,
        train=train,
        heldout=heldout,
        dtype=dtype,
        max_length=max_length,
        target_files=target_files,
        data_files=data_files,
    )


def open_target(
    settings: TrainSettings,
    method: TrainingMethod,
    config: Any,
    dtype: str,
    accelerator: Any,
) -> LiveTarget:
    """Load what the method reads of the target."""
    from .sharding import make_mesh
    from .target import load_target

    mesh = None
    if settings.shard_target:
        mesh = make_mesh(accelerator.device, accelerator.num_processes)
    target = load_target(
        settings.model_dir, config, dtype, accelerator.device,
        with_head=needs_head(settings, method),
        aux_layers=method.choose_layers(settings, config), mesh=mesh,
    )  # fmt: skip
    accelerator.wait_for_everyone()
    target.check_head()
    return target


def needs_head(settings: TrainSettings, method: TrainingMethod) -> bool:
    """Tell whether the target's output layer is read."""
    return method.needs_head or bool(settings.self_distillation)


def start_loop(job: Job) -> Loop:
    """Make the drafter, with fresh weights or those of the checkpoint, and its training loop."""
    from .acceptance import AcceptanceMeter
    from .loop import Hooks, Loop

    settings, accelerator, state = job.settings, job.accelerator, job.state
    drafter = make_drafter(settings, accelerator, job.method, job.target, job.train)
    hooks = Hooks(is_enough=functools.partial(is_accepted, settings.stop_at_acceptance))
    if accelerator.is_main_process:
        hooks = dataclasses.replace(hooks, log=state.add_log, save=state.save_checkpoint)
        if settings.eval_prompts:
            meter = AcceptanceMeter(job, drafter)
            meter.check()
            hooks = dataclasses.replace(hooks, measure_acceptance=meter.measure)
    loop = Loop(settings, accelerator, job.target, drafter, job.train, job.heldout, hooks)
    checkpoint = state.load_checkpoint()
    if checkpoint is not None:
        try:
            loop.restore(checkpoint)
        except (ValueError, KeyError, TypeError, RuntimeError, AttributeError):
            raise state.refuse_checkpoint() from None
        logger.info("resumed at step %d", loop.step)
    if accelerator.is_main_process:
        state.cut_log(loop.step)
    logger.info(
        "%d parameters, %d rows of up to %d tokens, %d rows a step, %d steps, %s on %s",
        sum(p.numel() for p in drafter.parameters()), len(job.train), job.max_length,
        loop.rows_per_step, loop.num_steps, job.dtype, accelerator.device.type,
    )  # fmt: skip
    return loop


def make_drafter(
    settings: TrainSettings, accelerator: Any, method: TrainingMethod, target: Target, rows: Rows
) -> Drafter:
    """Make the drafter with fresh weights, the same on every process; rows: what it will learn."""
    import torch

    torch.manual_seed(settings.seed)
    target.token_counts = rows.count_tokens(target.shape.vocab_size)
    drafter = method.build(settings, target)
    if settings.start_from is not None:
        path = settings.start_from / method.weights_name
        load_weights(drafter, path, method.list_shared(target), method.new_parts)
    drafter.to(accelerator.device)
    return drafter


def load_weights(
    drafter: Drafter, path: Path, shared: Mapping[str, Any], new_parts: tuple[str, ...]
) -> None:
    """Give the drafter a written one's weights; shared: tensors there that are the target's.

    new_parts: see TrainingMethod.
    """
    from specdec.files.torch_tensors import to_tensor

    file = TensorFile(path)
    there = {name: info for name, info in file.tensors.items() if name not in shared}
    wanted = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
    for name in [n for n in wanted if n.startswith(new_parts) and n not in there]:
        logger.info("--start-from: %s has no %s, which begins anew", path, name)
        del wanted[name]
    problems = Problems()
    for name in sorted({*wanted, *there}):
        shape = list(there[name].shape) if name in there else "missing"
        if shape != wanted.get(name):
            problems.add(
                f"--start-from: {name} in {path} is {shape}, of this training"
                f" {wanted.get(name, 'missing')}",
                "give the method and sizes that the drafter was trained with",
            )
    problems.raise_all()
    weights = {name: to_tensor(file.read(name), info.dtype) for name, info in there.items()}
    drafter.load_state_dict(drafter.state_dict() | weights)


def is_accepted(wanted: float | None, evaluation: Mapping[str, Any]) -> bool:
    """Tell whether an evaluation's acceptance length is what was wanted."""
    measured = evaluation.get("acceptance")
    if wanted is None or measured is None:
        return False
    return bool(measured["acceptance_length"] >= wanted)


def check_settings(settings: TrainSettings) -> None:
    """Raise for what can be seen to be wrong before anything is loaded."""
    from .state import TrainingState

    require(settings, "model_dir", "data", *([] if settings.sanity else ["output_dir"]))
    check_method_options(settings)
    if settings.max_steps is not None and settings.num_epochs is not None:
        raise UsageError("both --max-steps and --num-epochs are given", "give one of them")
    for name in ("num_epochs", "learning_rate"):
        if getattr(settings, name) == 0:
            raise UsageError(
                f"{name_flag(name)} is 0", "nothing would be learned: give more than 0"
            )
    if settings.warmup_ratio > 1:
        raise UsageError(f"--warmup-ratio is {settings.warmup_ratio:g}", "give 0 to 1")
    if settings.self_distillation > 1:
        raise UsageError(
            f"--self-distillation is {settings.self_distillation:g}", "give a share, 0 to 1"
        )
    if settings.stop_at_acceptance is not None and not settings.eval_prompts:
        raise UsageError(
            "--stop-at-acceptance without --eval-prompts: no acceptance is measured",
            "give --eval-prompts more than 0",
        )
    check_data_file(settings.data, "--data")
    if settings.eval_data is not None:
        check_data_file(settings.eval_data, "--eval-data")
    if settings.start_from is not None and not settings.start_from.is_dir():
        raise SpecDecError(
            f"--start-from {settings.start_from} is no folder", "give one that specdec-train wrote"
        )
    if settings.sanity:
        return
    states = settings.hidden_states_dir
    if states is not None:
        paths = [states.resolve(), settings.output_dir.resolve()]
        if paths[0] in (paths[1], *paths[1].parents) or paths[1] in paths[0].parents:
            raise UsageError(
                f"--hidden-states-dir {states} and --output-dir {settings.output_dir} are one"
                " folder, or one lies in the other",
                "name two folders side by side",
            )
    inputs = [*list_inputs(settings), *list_local(states)]
    check_output_dir(settings.output_dir, force=settings.force, inputs=inputs)
    if (get_launched_rank() or 0) == 0:  # who writes it, so no other can meet its own training's
        TrainingState(settings.output_dir).refuse_unfinished(
            resume=settings.resume, force=settings.force
        )


def check_method_options(settings: TrainSettings) -> None:
    """Raise UsageError for an option of a method that is not the chosen one."""
    for name in TRAINABLE:
        useless = list_given(settings, METHODS[name].options["train"])
        if useless and name != settings.method:
            raise UsageError(
                f"{name_flag(useless[0])} has no effect with --method {settings.method}",
                "leave it out",
            )


def list_inputs(settings: TrainSettings) -> list[Path]:
    """The local folders and files that are read: --force may not replace them."""
    return list_local(settings.model_dir, settings.data, settings.eval_data, settings.start_from)


def choose_max_length(settings: TrainSettings, config: Any) -> int:
    """Return the row length in tokens, or raise where the target cannot read that many."""
    from .target import get_max_length

    limit = get_max_length(config)
    wanted = settings.model_max_length
    if wanted is None:
        return min(DEFAULT_MAX_LENGTH, limit or DEFAULT_MAX_LENGTH)
    if limit is not None and wanted > limit:
        raise SpecDecError(
            f"--model-max-length {wanted} is more than the {limit} positions of the target",
            f"use at most {limit}",
        )
    return wanted


def refuse_launcher(environment: Mapping[str, str]) -> None:
    """Raise UsageError where accelerate's launcher was told what no training here obeys."""
    for name, option in LAUNCHER_OPTIONS.items():
        value = environment.get(name, "no").lower()
        if value not in ("no", "false", "0", ""):
            raise UsageError(
                f"accelerate was launched with {option} ({name}={value}), which has no effect here",
                "launch with torchrun --nproc-per-node N $(which specdec-train) ...; --shard-target"
                " splits a target that does not fit, --dtype says what to compute in",
            )


def start_accelerator(settings: TrainSettings) -> Any:
    """Set up the devices: those that `torchrun` gave the process, else one GPU or the CPU."""
    try:
        from accelerate import Accelerator
        from accelerate.utils import InitProcessGroupKwargs
    except ImportError:
        raise SpecDecError("accelerate is not installed", name_extra("train")) from None
    import torch

    has_gpu = torch.cuda.is_available()
    use_bf16 = settings.dtype == "bfloat16" or settings.dtype == "auto" and _has_fast_bf16()
    launch = find_launch()
    place = check_meeting_place() if launch is not None and launch.size > 1 else ""
    try:
        with keep_stdout_clean():
            accelerator = Accelerator(
                cpu=not has_gpu and not torch.backends.mps.is_available(),
                mixed_precision="bf16" if use_bf16 else "no",
                # The others wait while the main process tokenizes the data and measures an engine.
                kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
            )
    except (RuntimeError, ValueError) as error:
        if not place:
            raise
        raise SpecDecError(
            f"rank {launch.rank if launch else 0} cannot reach the other ranks at {place}:"
            f" {summarize(error)}",
            "check MASTER_ADDR and MASTER_PORT, and that every rank has its own RANK",
        ) from None
    kind = str(accelerator.distributed_type.value)
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise SpecDecError(
            f"accelerate found devices of the kind {kind}, which cannot train a drafter here",
            "launch on GPUs or CPUs: torchrun --nproc-per-node N $(which specdec-train) ...",
        )
    if settings.shard_target and accelerator.num_processes == 1:
        raise UsageError(
            "--shard-target has no effect in a training of one process",
            "leave it out, or launch several: torchrun --nproc-per-node N $(which specdec-train)",
        )
    return accelerator


def _has_fast_bf16() -> bool:
    """Tell whether the processor multiplies bfloat16 matrices in hardware."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= (8, 0)
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return any(f" {name}" in flags for name in ("avx512_bf16", "amx_bf16"))


@contextlib.contextmanager
def open_output(settings: TrainSettings, *, is_main: bool) -> Iterator[Path | None]:
    """Yield the folder to write the drafter into; None on other processes than the main one."""
    if not is_main:
        yield None
        return
    with stage_folder(
        settings.output_dir, force=settings.force, inputs=list_inputs(settings)
    ) as folder:
        yield folder


def load_rows(
    settings: TrainSettings,
    state: TrainingState,
    vocab_size: int,
    max_length: int,
    accelerator: Any,
) -> tuple[Rows, Rows]:
    """Tokenize on the main process; map the result, from which all processes read."""
    from .rows import Rows, prepare_rows
    from .target import load_tokenizer

    if accelerator.is_main_process and not state.has_rows():
        # transformers warns when a process that has used it forks, which ours does not do.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        tokenizer = load_tokenizer(settings.model_dir, vocab_size)
        rows = prepare_rows(settings.data, settings.eval_data, tokenizer, max_length)
        state.data_folder.mkdir(exist_ok=True)
        for name, part in zip(("train", "heldout"), rows, strict=True):
            part.save(state.data_folder, name)
        state.finish_rows()
    accelerator.wait_for_everyone()
    if not state.has_rows():
        raise SpecDecError(
            f"{state.data_folder} is not there on process {accelerator.process_index}",
            "let --output-dir be in a folder that all machines share",
        )
    parts = Rows.load(state.data_folder, "train"), Rows.load(state.data_folder, "heldout")
    for part in parts:
        part.check_tokens(vocab_size, state.data_folder)
    return parts
