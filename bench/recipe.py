"""The best setting as command lines and as a recipe for `--config`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from specdec.files.reading import read_json
from specdec.files.staging import write_whole
from specdec.methods.draft_target import DraftTargetTune
from specdec.options import as_options, name_flag

from .methods.base import Candidate
from .settings import TuneSettings

Sections = dict[str, dict[str, Any]]


def describe_best(
    best: Candidate | None, settings: TuneSettings, batch_size: int
) -> dict[str, Any]:
    """Return the recipe's sections, the commands that say the same, and what must be done before.

    best: None where plain decoding is fastest. Paths are absolute: the recipe may lie anywhere.
    """
    checkpoint_dir = str(settings.checkpoint_dir.absolute())
    sections: Sections = {}
    notes = []
    if best is not None and best.convert and differs(settings.checkpoint_dir, best.convert):
        converted = read_conversion(settings.checkpoint_dir)
        checkpoint_dir += "-tuned"
        if converted is None:
            notes.append(
                f"{settings.checkpoint_dir} does not record how it was converted: convert it again"
                f" into {checkpoint_dir} with {to_flags(best.convert)}"
            )
        else:
            sections["convert"] = converted | best.convert | {"output_dir": checkpoint_dir}
            notes += [
                f"{key} is {value}, as it was typed when {settings.checkpoint_dir} was converted:"
                " if that is no Hub id, write where it is"
                for key, value in converted.items()
                if key.endswith("_dir") and not Path(str(value)).is_absolute()
            ]
    build: dict[str, Any] = {
        "checkpoint_dir": checkpoint_dir,
        "output_dir": f"{checkpoint_dir}-engine",
        "max_batch_size": batch_size,
    }
    run: dict[str, Any] = {
        "engine_dir": build["output_dir"],
        "tokenizer_dir": locate(settings.tokenizer_dir),
    }
    if best is None:
        run["no_speculation"] = True
        notes.append("no setting that was measured beats plain decoding here")
    else:
        build |= best.build
        run |= best.run
        draft_checkpoint_dir = as_options(settings, DraftTargetTune).draft_checkpoint_dir
        if draft_checkpoint_dir is not None:
            draft_checkpoint_dir = draft_checkpoint_dir.absolute()
            run["draft_engine_dir"] = f"{draft_checkpoint_dir}-engine"
            notes.append(
                "the draft model's own engine first: specdec build --checkpoint-dir"
                f" {draft_checkpoint_dir} --output-dir {run['draft_engine_dir']}"
                f" --max-batch-size {batch_size}"
            )
    sections |= {"build": build, "run": run}
    commands = [f"specdec {name} {to_flags(options)}" for name, options in sections.items()]
    return {"recipe": sections, "commands": commands, "notes": notes}


def differs(checkpoint_dir: Path, options: dict[str, Any]) -> bool:
    """Whether a checkpoint was converted with other values than these."""
    config = read_json(checkpoint_dir / "config.json")
    return any(config.get(key) != value for key, value in options.items())


def read_conversion(checkpoint_dir: Path) -> dict[str, Any] | None:
    """Return the options that a checkpoint was converted with, as its manifest has them."""
    path = checkpoint_dir / "manifest.json"
    settings = read_json(path).get("settings") if path.is_file() else None
    if not isinstance(settings, dict):
        return None
    idle = {"json", "force", "resume", "dry_run"}
    return {
        key: locate(value)
        for key, value in settings.items()
        if key not in idle and value not in (None, False, [])
    }


def locate(value: Any) -> Any:
    """Return what names a file or folder that is there as an absolute path, all else as it is."""
    is_there = isinstance(value, str) and bool(value) and Path(value).exists()
    return str(Path(value).absolute()) if is_there else value


def to_flags(options: dict[str, Any]) -> str:
    """Return options as they are typed."""
    words = []
    for key, value in options.items():
        words.append(name_flag(key))
        if value is not True:
            words.append(str(value))
    return shlex.join(words)


def write_recipe(path: Path, report: dict[str, Any], *, force: bool) -> None:
    """Write the recipe, with what it came from as a comment."""
    import yaml

    batch = report["batches"][0]
    lines = [
        f"# Written by specdec tune on {report['date']}: {report['method']}, {batch['best']}, for"
        f" batch size {batch['batch_size']}",
        f"# on {report['processor']}.",
        *(f"# {note}" for note in report["notes"]),
        *(f"# warning: {warning}" for warning in report["warnings"]),
    ]
    text = yaml.safe_dump(report["recipe"], sort_keys=False, allow_unicode=True)
    write_whole(path, "\n".join(lines) + "\n\n" + text, force=force)
