"""State of an unfinished training, in `.NAME.training` next to the output folder.

    settings.json     facts that the weights depend on; a resumed training must have equal ones
    data/             the tokenized rows; `complete` has the sha256 of their files
    checkpoint.pt     weights, optimizer, step (torch.save; loaded with weights_only)
    log.jsonl         one line per progress line
    finished          the sha256 of the drafter's manifest.json, once the drafter is written

Data order and learning rate are functions of the step and the seed, so they need no saving.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.command.settings import to_plain
from specdec.errors import SpecDecError, summarize
from specdec.files.manifest import NAME, describe_file
from specdec.files.reading import hash_file, parse_json, read_json, write_json
from specdec.files.staging import hold_lock
from specdec.options import name_flag
from specdec.system.cache import remove_renamed
from specdec.system.logs import get_logger

from .settings import LAYERS_FLAG, TrainSettings

if TYPE_CHECKING:
    from .setup import Setup

# Settings without effect on the weights, and paths, whose files are compared by their hashes.
UNCOMPARED_SETTINGS = frozenset(
    "model_dir data eval_data output_dir batch_size gradient_accumulation_steps save_steps"
    " eval_steps eval_rows eval_prompts eval_output_len stop_at_acceptance report_top_k"
    " logging_steps save_dtype sanity plan tracker max_disk"
    " push_to_hub shard_target shard_drafter hidden_states_dir hidden_states_from"
    " hidden_states_layers resume force json".split()
)

START_FACT = "sha256 of --start-from's config.json"
FULL_DISK_HINT = "make room on its disk, then continue with --resume"

logger = get_logger(__name__)


class TrainingState:
    """Folder of an unfinished training, which only the main process writes into."""

    def __init__(self, output_dir: Path) -> None:
        output_dir = output_dir.resolve()
        self.folder = output_dir.parent / f".{output_dir.name}.training"
        self.data_folder = self.folder / "data"
        self._checkpoint = self.folder / "checkpoint.pt"
        self._complete = self.data_folder / "complete"
        self._settings = self.folder / "settings.json"
        self._log = self.folder / "log.jsonl"
        self._finished = self.folder / "finished"
        self._output_dir = output_dir

    def refuse_unfinished(self, *, resume: bool, force: bool) -> None:
        """Raise SpecDecError for an unfinished training, unless it is resumed or replaced.

        One that another process is at is refused, too. What is left of one whose drafter has its
        name is removed.
        """
        if not self._settings.is_file():
            return
        with hold_lock(self._output_dir):
            manifest = self._output_dir / NAME
            if self._finished.is_file() and manifest.is_file():
                if self._finished.read_text(encoding="utf-8") == hash_file(manifest):
                    self.remove()
                    return
            if not resume and not force:
                raise SpecDecError(
                    f"an unfinished training is in {self.folder}",
                    "continue it with --resume, or start over with --force",
                )

    def open(
        self, facts: Mapping[str, Any], *, resume: bool, inferred: Collection[str] = ()
    ) -> None:
        """Start a new training, or check that the interrupted one has equal facts.

        facts: settings and hashes that the weights depend on. inferred: see `refuse_changes`.
        """
        if self._settings.is_file() and resume:
            earlier_facts = read_json(self._settings)
            hint = "give what it was started with, or start over with --force"
            if LAYERS_FLAG in facts.keys() - earlier_facts.keys() - set(inferred):
                hint = (
                    f"it was begun by an earlier specdec, which did not record {LAYERS_FLAG}: leave"
                    " the option out if it was started without; if it was started with the same,"
                    f' add "{LAYERS_FLAG}": "{facts[LAYERS_FLAG]}" to {self._settings}; else start'
                    " over with --force"
                )
            refuse_changes(
                "--resume: not the same training", earlier_facts, facts, hint=hint,
                inferred=inferred,
            )  # fmt: skip
            return
        if resume:
            logger.info("nothing to resume: a new training begins")
        self.remove()
        self.folder.mkdir(parents=True)
        self._write_aside(self._settings, lambda path: write_json(path, facts))

    def _write_aside(self, path: Path, write: Any) -> None:
        partial = path.with_name(path.name + ".partial")
        try:
            with self.writing(path):
                write(partial)
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Name the file that the body cannot write; numpy and torch report no full disk."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise SpecDecError(
                f"{path} cannot be written: {summarize(error)}",
                FULL_DISK_HINT,
            ) from error

    def has_rows(self) -> bool:
        """Return whether the tokenized data is complete."""
        return self._complete.is_file()

    def finish_rows(self) -> None:
        """Mark the tokenized data as complete, with the sha256 of its files."""
        hashes = {path.name: hash_file(path) for path in sorted(self.data_folder.glob("*.npy"))}
        self._write_aside(self._complete, lambda path: write_json(path, hashes))

    def check_rows(self) -> None:
        """Raise SpecDecError where the tokenized data is not what `finish_rows` saw."""
        # An earlier specdec wrote no hashes.
        hashes = read_json(self._complete) if self._complete.stat().st_size else {}
        for name, sha256 in hashes.items():
            path = self.data_folder / name
            if not path.is_file() or hash_file(path) != sha256:
                raise SpecDecError(
                    f"the tokenized rows {path} are damaged: they have another sha256 than when"
                    " they were written",
                    "start over with --force",
                )

    def save_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Replace the checkpoint; a kill at any moment leaves the old or the new one."""
        import torch

        self._write_aside(self._checkpoint, lambda path: torch.save(dict(checkpoint), path))

    def load_checkpoint(self, *, maps: bool = False) -> dict[str, Any] | None:
        """Return the checkpoint on the CPU, or None where there is none.

        maps: whether its tensors stay in the file until they are read.
        """
        if not self._checkpoint.is_file():
            return None
        import torch

        try:
            with zipfile.ZipFile(self._checkpoint) as archive:  # torch ignores its sums
                if archive.testzip() is not None:
                    raise self.refuse_checkpoint()
            return dict(
                torch.load(self._checkpoint, map_location="cpu", weights_only=True, mmap=maps)
            )
        except Exception:  # noqa: BLE001 - a damaged pickle raises any error
            raise self.refuse_checkpoint() from None

    def refuse_checkpoint(self) -> SpecDecError:
        """Return the error of a checkpoint that does not belong to this training."""
        return SpecDecError(f"{self._checkpoint} is damaged", "start over with --force")

    def cut_log(self, step: int) -> None:
        """Drop the log lines after `step`, which the training writes again."""
        earlier_lines = [line for line in self.read_log() if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in earlier_lines)
        self._write_aside(self._log, lambda path: path.write_text(text, encoding="utf-8"))

    def add_log(self, line: Mapping[str, Any]) -> None:
        """Append one line to the log."""
        with self.writing(self._log), self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def read_log(self) -> list[dict[str, Any]]:
        """Return the log's lines, without a last line that a kill cut off.

        Raises SpecDecError for any other line that no training wrote.
        """
        if not self._log.is_file():
            return []
        lines: list[dict[str, Any]] = []
        *complete_lines, _cut_off = self._log.read_bytes().split(b"\n")
        for number, text in enumerate(complete_lines, 1):
            try:
                line = parse_json(text)
                loss = line.get("mean_loss", 0.0) if isinstance(line, dict) else None
                if type(loss) not in (int, float) or type(line.get("step")) is not int:
                    raise ValueError("it has no step")
            except ValueError as error:
                raise SpecDecError(
                    f"{self._log} line {number} does not belong to this training: {error}",
                    "remove the line, or start over with --force",
                ) from None
            lines.append(line)
        return lines

    @contextlib.contextmanager
    def removing(self, *, is_kept: bool) -> Iterator[None]:
        """Remove the folder where the body fails before the first step: nothing is to be resumed.

        is_kept: whether it is left, as an earlier run's is, and other processes leave it.
        """
        try:
            yield
        except SpecDecError:
            if not is_kept:
                self.remove()
            raise

    def mark_finished(self, drafter_folder: Path) -> None:
        """Mark the training as one whose drafter is written and about to get its name."""
        sha256 = hash_file(drafter_folder / NAME)
        self._write_aside(self._finished, lambda path: path.write_text(sha256, encoding="utf-8"))

    def remove(self) -> None:
        """Remove the folder once the drafter has its name."""
        remove_renamed(self.folder)


def refuse_changes(
    message: str, earlier_facts: Mapping[str, Any], facts: Mapping[str, Any], *, hint: str,
    inferred: Collection[str] = (),
) -> None:  # fmt: skip
    """Raise SpecDecError that names every fact that changed.

    inferred: names of facts that follow from others, so that earlier facts may lack them.
    """
    changed = [
        f"{name} is {facts.get(name)!r}, was {earlier_facts.get(name)!r}"
        for name in dict.fromkeys([*earlier_facts, *facts])
        if earlier_facts.get(name) != facts.get(name)
        and not (name in inferred and name not in earlier_facts)
    ]
    if changed:
        raise SpecDecError(f"{message}: {'; '.join(changed)}", hint)


def collect_facts(
    settings: TrainSettings,
    dtype: str,
    num_processes: int,
    target_files: list[dict[str, Any]],
    data_files: list[dict[str, Any]],
) -> dict[str, Any]:
    """Collect the facts that the weights depend on, under names a user can act on."""
    facts = {
        name_flag(name): value
        for name, value in to_plain(settings).items()
        if name not in UNCOMPARED_SETTINGS
    }
    facts["--dtype"] = dtype
    # However they are spread over processes and passes.
    facts["rows of a step"] = (
        settings.batch_size * settings.gradient_accumulation_steps * num_processes
    )
    start = settings.start_from
    if start is not None and (start / "config.json").is_file():
        facts[START_FACT] = describe_file(start / "config.json")["sha256"]
    return facts | name_hashes(target_files, data_files)


def list_inferred(settings: TrainSettings) -> list[str]:
    """List facts that trainings and kept states of an earlier specdec lack and need not have.

    A drafter of --start-from had to agree with the settings. Layer ids that are not given follow
    from the drafter: a server or folder with others has another number of states.
    """
    return [START_FACT, *([LAYERS_FLAG] if settings.hidden_states_layers is None else [])]


def name_source(setup: Setup) -> dict[str, str]:
    """Return the facts of hidden states that another program gives: the layers, or the engine."""
    source = setup.settings.hidden_states_from
    if source is None:
        return {}
    from .engine_states import is_engine
    from .extracted import choose_layer_ids

    if not is_engine(source):
        layers = setup.method.choose_layers(setup.settings, setup.config)
        layer_ids = choose_layer_ids(setup.settings, layers, setup.config)
        return {"--hidden-states-from": "given", LAYERS_FLAG: ",".join(map(str, layer_ids))}
    sha256 = describe_file(Path(source) / "config.json")["sha256"]
    return {"--hidden-states-from": f"an engine, config.json {sha256}"}


def name_hashes(
    target_files: list[dict[str, Any]], data_files: list[dict[str, Any]]
) -> dict[str, str]:
    """Return the hashes of the files that are read, under names a user can act on."""
    facts = {}
    for flag, entry in zip(("--data", "--eval-data"), data_files, strict=False):
        facts[f"sha256 of {flag}"] = entry["sha256"]
    for entry in target_files:
        facts[f"sha256 of the target's {Path(entry['path']).name}"] = entry["sha256"]
    return facts
