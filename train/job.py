"""Parts of a training, loaded and checked: target, rows, drafter."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import Problems, SpecDecError, count, join_names
from specdec.files.folders import find_gguf
from specdec.files.manifest import describe_file
from specdec.files.tensor_file import TensorFile
from specdec.system.logs import get_logger

from .setup import Setup, open_target
from .start_config import compare_config, open_start

if TYPE_CHECKING:
    from torch import Tensor

    from .methods.base import TrainableDrafter, TrainingMethod
    from .rows import TokenRows
    from .state import TrainingState
    from .target import FrozenTarget

# Norms of the difference between a drafter's copy of a tensor and the target's, over that of the
# tensor: below the first one type's rounding, up to the second blocks of few bits.
LEAST_ROUNDING, MOST_ROUNDING = 0.01, 0.2
ROWS = 4096  # of a tensor that are compared at a time

logger = get_logger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingJob(Setup):
    """Setup, target, rows and state of a training. File lists: main process only."""

    state: TrainingState
    target: FrozenTarget
    train_rows: TokenRows
    heldout_rows: TokenRows
    target_files: list[dict[str, Any]]
    data_files: list[dict[str, Any]]

    @property
    def save_dtype(self) -> str:
        """Name the type of the written weights."""
        from .target import get_stored_dtype

        if self.settings.save_dtype != "auto":
            return self.settings.save_dtype
        return "bfloat16" if get_stored_dtype(self.target.config) == "bfloat16" else "float32"


def prepare_job(setup: Setup) -> TrainingJob:
    """Load the target, open the training's state, and load or make the rows."""
    from .state import TrainingState, collect_facts, list_inferred, name_hashes, name_source
    from .target import list_target_files

    settings, accelerator, config = setup.settings, setup.accelerator, setup.config
    target: FrozenTarget | None = None if settings.hidden_states_dir else open_target(setup)
    state = TrainingState(settings.output_dir)
    data_files: list[dict[str, Any]] = []
    target_files: list[dict[str, Any]] = []
    if accelerator.is_main_process:
        data_files = [describe_file(f) for f in (settings.data, settings.eval_data) if f]
        target_files = list_target_files(settings.model_dir, list_part_files(setup))
        facts = collect_facts(
            settings, setup.dtype, accelerator.num_processes, target_files, data_files
        ) | name_source(setup)
        state.open(facts, resume=settings.resume, inferred=list_inferred(settings))
    accelerator.wait_for_everyone()
    vocab_size = target.shape.vocab_size if target is not None else int(config.vocab_size)
    with state.removing(is_kept=settings.resume or not accelerator.is_main_process):
        train_rows, heldout_rows = load_rows(setup, state, vocab_size)
        splits = {"train": train_rows, "heldout": heldout_rows}
        if target is None:
            from .hidden_states import open_states

            target = open_states(
                setup, splits, vocab_size, [*target_files, *data_files],
                name_hashes(target_files, data_files),
            )  # fmt: skip
        else:
            target.check_rows(splits)
    return TrainingJob(
        **vars(setup), state=state, target=target, train_rows=train_rows,
        heldout_rows=heldout_rows, target_files=target_files, data_files=data_files,
    )  # fmt: skip


def list_part_files(setup: Setup) -> list[Path] | None:
    """List the files of the target's parts that are read; None where it is loaded whole."""
    settings = setup.settings
    if settings.hidden_states_from is None or find_gguf(settings.model_dir) is not None:
        return None
    from .parts import PartsPlan

    return PartsPlan(settings.model_dir, setup.config).files


def make_drafter(setup: Setup, target: FrozenTarget, rows: TokenRows) -> TrainableDrafter:
    """Make the drafter with fresh weights, equal on all processes; rows: its training data."""
    import torch

    settings, method = setup.settings, setup.method
    torch.manual_seed(settings.seed)
    target.token_counts = rows.count_tokens(target.shape.vocab_size)
    drafter = method.build(settings, target)
    if settings.start_from is not None:
        file = open_start(settings.start_from, method.weights_name)
        copy_weights(drafter, file, method, method.list_accepted_copies(target))
        if (settings.start_from / "config.json").is_file():
            compare_config(settings.start_from, method.describe(drafter, target))
    drafter.to(setup.accelerator.device)
    return drafter


def copy_weights(
    drafter: TrainableDrafter, file: TensorFile, method: TrainingMethod,
    target_tensors: Mapping[str, Tensor],
) -> None:  # fmt: skip
    """Give the drafter the weights of a written drafter.

    target_tensors: tensors of the target that the file may repeat.
    """
    from specdec.files.torch_tensors import to_tensor

    refuse_other_copies(file, target_tensors)
    names = name_tensors(file, method, target_tensors)
    written = drafter.finish_weights(drafter.state_dict())
    drafter_shapes = {name: list(tensor.shape) for name, tensor in written.items()}
    fresh_names = [n for n in drafter_shapes if n.startswith(method.optional_prefixes)]
    for name in [n for n in fresh_names if n not in names]:
        logger.info("--start-from: %s has no %s, which begins anew", file.path, name)
        del drafter_shapes[name]
    file_shapes = {name: list(file.tensors[stored].shape) for name, stored in names.items()}
    refuse_shapes(file.path, file_shapes, drafter_shapes)
    weights = {
        name: to_tensor(file.read(stored), file.tensors[stored].dtype)
        for name, stored in names.items()
    }
    refuse_nonfinite(file.path, weights)
    drafter.load_state_dict(drafter.state_dict() | weights)


def refuse_nonfinite(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Raise SpecDecError for weights from which nothing can be learned."""
    names = sorted(name for name, tensor in weights.items() if not tensor.isfinite().all())
    if names:
        raise SpecDecError(
            f"--start-from: {count(len(names), 'tensor')} in {path} with weights that are no finite"
            f" numbers: {join_names(names)}",
            "get the drafter again, or train a fresh one",
        )


def name_tensors(
    file: TensorFile, method: TrainingMethod, target_tensors: Mapping[str, Tensor]
) -> dict[str, str]:
    """Map our names of the drafter's own tensors to those in the file."""
    names = {}
    for stored in file.tensors.keys() - target_tensors.keys() - set(method.derived_tensors):
        name = stored
        for published, prefix in method.published_prefixes.items():
            if stored.startswith(published):
                name = prefix + stored.removeprefix(published)
        names[name] = stored
    return names


def refuse_other_copies(file: TensorFile, target_tensors: Mapping[str, Tensor]) -> None:
    """Raise SpecDecError where a tensor that a drafter shares with its target is another one."""
    from specdec.files.torch_tensors import to_tensor

    for name, tensor in target_tensors.items():
        if (info := file.tensors.get(name)) is None:
            continue
        copy = to_tensor(file.read(name), info.dtype)
        is_equal = copy.shape == tensor.shape
        error = measure_difference(copy, tensor) if is_equal else 1.0
        if not error < MOST_ROUNDING:
            raise SpecDecError(
                f"--start-from: {name} {list(copy.shape)} in {file.path} is not the target's"
                f" {list(tensor.shape)}, which a training keeps"
                + (f": it is off by {100 * error:.0f} %" if is_equal else ""),
                "give the target that the drafter was trained for",
            )
        if error > LEAST_ROUNDING:
            logger.warning(
                "--start-from: %s in %s is off by %.1f %% from the target's, which a training"
                " keeps: that is usual where the target is quantized", name, file.path, 100 * error,
            )  # fmt: skip


def measure_difference(copy: Tensor, tensor: Tensor) -> float:
    """Return the norm of a difference over the tensor's; large ones are never wide as a whole."""
    import torch

    difference = total = 0.0
    for copied_rows, rows in zip(torch.split(copy, ROWS), torch.split(tensor, ROWS), strict=True):
        numbers = rows.float()
        difference += float((copied_rows.to(rows.device).float() - numbers).square().sum())
        total += float(numbers.square().sum())
    return (difference / total) ** 0.5 if total else float(difference > 0)


def refuse_shapes(
    path: Path, file_shapes: Mapping[str, list[int]], drafter_shapes: Mapping[str, list[int]]
) -> None:
    """Raise SpecDecError that names every tensor of a file whose shape is not the drafter's."""
    problems = Problems()
    for name in sorted({*drafter_shapes, *file_shapes}):
        if file_shapes.get(name) != drafter_shapes.get(name):
            problems.add(
                f"--start-from: {name} in {path} is {file_shapes.get(name, 'missing')}, of this"
                f" training {drafter_shapes.get(name, 'missing')}",
                "give the method and sizes that the drafter was trained with",
            )
    problems.raise_all()


def load_rows(setup: Setup, state: TrainingState, vocab_size: int) -> tuple[TokenRows, TokenRows]:
    """Tokenize the data on the main process; map the rows, which all processes read."""
    from .rows import TokenRows

    accelerator = setup.accelerator
    if accelerator.is_main_process:
        if state.has_rows():
            state.check_rows()
        else:
            _write_rows(setup, state, vocab_size)
    accelerator.wait_for_everyone()
    if not state.has_rows():
        raise SpecDecError(
            f"{state.data_folder} is not there on process {accelerator.process_index}",
            "let --output-dir be in a folder that all machines share",
        )
    splits = (
        TokenRows.load(state.data_folder, "train"),
        TokenRows.load(state.data_folder, "heldout"),
    )
    for split in splits:
        split.check_tokens(vocab_size, state.data_folder)
    return splits


def _write_rows(setup: Setup, state: TrainingState, vocab_size: int) -> None:
    """Tokenize the data into the training's state."""
    from .rows import prepare_rows
    from .target import load_tokenizer

    # transformers warns when a process that has used it forks, which ours does not do.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    settings = setup.settings
    tokenizer = load_tokenizer(settings.model_dir, vocab_size)
    rows = prepare_rows(settings.data, settings.eval_data, tokenizer, setup.max_length)
    state.data_folder.mkdir(exist_ok=True)
    with state.writing(state.data_folder):
        for name, split in zip(("train", "heldout"), rows, strict=True):
            split.save(state.data_folder, name)
        state.finish_rows()
