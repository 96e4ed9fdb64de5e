"""What a training works with, loaded and checked: devices, target, rows, drafter."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import Problems, SpecDecError, UsageError, name_extra, summarize
from specdec.files.manifest import describe_file
from specdec.files.staging import list_local
from specdec.files.tensor_file import TensorFile
from specdec.system.logs import get_logger
from specdec.system.mpi import check_meeting_place, find_launch
from specdec.system.processes import keep_stdout_clean

from .settings import TrainSettings

if TYPE_CHECKING:
    from .methods.base import TrainableDrafter, TrainingMethod
    from .rows import Rows
    from .state import TrainingState
    from .target import LiveTarget, Target

DEFAULT_MAX_LENGTH = 2048
PATIENCE = datetime.timedelta(hours=6)

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What is known before the target is loaded."""

    settings: TrainSettings
    accelerator: Any
    method: TrainingMethod
    config: Any  # the target's
    dtype: str  # to compute in
    max_length: int  # tokens of a row

    @property
    def needs_head(self) -> bool:
        """Whether the target's output layer is read."""
        return self.method.needs_head or bool(self.settings.self_distillation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Setup):
    """Everything a training works with, loaded and checked. File lists: main process only."""

    state: TrainingState
    target: Target
    train: Rows
    heldout: Rows
    target_files: list[dict[str, Any]]
    data_files: list[dict[str, Any]]

    @property
    def save_dtype(self) -> str:
        """The type to write the weights in."""
        from .target import get_stored_dtype

        if self.settings.save_dtype != "auto":
            return self.settings.save_dtype
        return "bfloat16" if get_stored_dtype(self.target.config) == "bfloat16" else "float32"


def prepare_setup(settings: TrainSettings, accelerator: Any) -> Setup:
    """Read the target's configuration and choose what follows from it."""
    from .methods import load_method
    from .target import load_config

    config = load_config(settings.model_dir)
    return Setup(
        settings=settings,
        accelerator=accelerator,
        method=load_method(settings.method),
        config=config,
        dtype="bfloat16" if accelerator.mixed_precision == "bf16" else "float32",
        max_length=choose_max_length(settings, config),
    )


def prepare_job(setup: Setup) -> Job:
    """Load the target, open the training's state, and load or make the rows."""
    from .state import TrainingState, collect_facts, name_hashes
    from .target import describe_target

    settings, accelerator, config = setup.settings, setup.accelerator, setup.config
    target: Target | None = None if settings.hidden_states_dir else load_target(setup)
    state = TrainingState(settings.output_dir)
    data_files: list[dict[str, Any]] = []
    target_files: list[dict[str, Any]] = []
    if accelerator.is_main_process:
        data_files = [describe_file(f) for f in (settings.data, settings.eval_data) if f]
        target_files = describe_target(settings.model_dir)
        facts = collect_facts(
            settings, setup.dtype, accelerator.num_processes, target_files, data_files
        )
        state.open(facts, resume=settings.resume)
    accelerator.wait_for_everyone()
    vocab_size = target.shape.vocab_size if target is not None else int(config.vocab_size)
    train, heldout = load_rows(setup, state, vocab_size)
    if target is None:
        from .hidden_states import open_states

        target = open_states(
            setup, {"train": train, "heldout": heldout}, vocab_size,
            [*target_files, *data_files], name_hashes(target_files, data_files),
        )  # fmt: skip
    return Job(
        **vars(setup), state=state, target=target, train=train, heldout=heldout,
        target_files=target_files, data_files=data_files,
    )  # fmt: skip


def load_target(setup: Setup) -> LiveTarget:
    """Load what the method reads of the target."""
    from . import target as targets

    settings, accelerator = setup.settings, setup.accelerator
    mesh = None
    if settings.shard_target:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    target = targets.load_target(
        settings.model_dir, setup.config, setup.dtype, accelerator.device,
        with_head=setup.needs_head, mesh=mesh,
        aux_layers=setup.method.choose_layers(settings, setup.config),
    )  # fmt: skip
    accelerator.wait_for_everyone()
    target.check_head()
    return target


def make_drafter(setup: Setup, target: Target, rows: Rows) -> TrainableDrafter:
    """Make the drafter with fresh weights, the same on every process; rows: what it will learn."""
    import torch

    settings, method = setup.settings, setup.method
    torch.manual_seed(settings.seed)
    target.token_counts = rows.count_tokens(target.shape.vocab_size)
    drafter = method.build(settings, target)
    if settings.start_from is not None:
        path = settings.start_from / method.weights_name
        load_weights(drafter, path, method.list_shared(target), method.optional_prefixes)
    drafter.to(setup.accelerator.device)
    return drafter


def load_weights(
    drafter: TrainableDrafter,
    path: Path,
    shared: Mapping[str, Any],
    optional_prefixes: tuple[str, ...],
) -> None:
    """Give the drafter a written one's weights; shared: tensors there that are the target's.

    optional_prefixes: see TrainingMethod.
    """
    from specdec.files.torch_tensors import to_tensor

    file = TensorFile(path)
    there = {name: info for name, info in file.tensors.items() if name not in shared}
    wanted = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
    for name in [n for n in wanted if n.startswith(optional_prefixes) and n not in there]:
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


def load_rows(setup: Setup, state: TrainingState, vocab_size: int) -> tuple[Rows, Rows]:
    """Tokenize on the main process; map the result, from which all processes read."""
    from .rows import Rows, prepare_rows
    from .target import load_tokenizer

    settings, accelerator = setup.settings, setup.accelerator
    if accelerator.is_main_process and not state.has_rows():
        # transformers warns when a process that has used it forks, which ours does not do.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        tokenizer = load_tokenizer(settings.model_dir, vocab_size)
        rows = prepare_rows(settings.data, settings.eval_data, tokenizer, setup.max_length)
        state.data_folder.mkdir(exist_ok=True)
        with state.writing(state.data_folder):
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
